"""The breaker: nothing for the odd failure, a pause for a series, a longer one each time, and an end to
it.
"""

from __future__ import annotations

from kvbm_core.clock import ManualClock
from kvbm_core.tiers.breaker import FAILURES_IN_A_ROW, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker


def broken(clock: ManualClock) -> Breaker:
    """One whose first pause has just begun."""
    breaker = Breaker(clock)
    begins = [breaker.failed() for _ in range(FAILURES_IN_A_ROW)]
    assert begins == [False] * (FAILURES_IN_A_ROW - 1) + [True]
    return breaker


def is_open(breaker: Breaker) -> bool:
    """Asked anew: a type checker takes the property for a constant."""
    return breaker.is_open


def test_a_new_one_and_one_with_a_failure_less_are_closed() -> None:
    breaker = Breaker(ManualClock())
    assert not is_open(breaker)
    for _ in range(FAILURES_IN_A_ROW - 1):
        assert not breaker.failed()
    assert not is_open(breaker)


def test_a_success_in_between_begins_the_count_anew() -> None:
    breaker = Breaker(ManualClock())
    for _ in range(5):
        for _ in range(FAILURES_IN_A_ROW - 1):
            assert not breaker.failed()
        breaker.succeeded()
    assert not is_open(breaker)


def test_the_pause_ends_by_itself_and_to_the_second() -> None:
    clock = ManualClock(100.0)
    breaker = broken(clock)
    clock.advance(FIRST_PAUSE_S - 0.001)
    assert is_open(breaker)
    clock.advance(0.001)
    assert not is_open(breaker)


def test_news_of_failures_during_the_pause_make_it_no_longer() -> None:
    clock = ManualClock()
    breaker = broken(clock)
    clock.advance(1.0)
    assert not any(breaker.failed() for _ in range(10))
    clock.advance(FIRST_PAUSE_S - 1.0)
    assert not is_open(breaker)


def test_after_the_pause_one_failure_is_enough_and_each_pause_is_twice_as_long_up_to_a_limit() -> None:
    clock = ManualClock()
    breaker = broken(clock)
    pause_s = FIRST_PAUSE_S
    for _ in range(12):
        clock.advance(pause_s - 0.5)
        assert is_open(breaker)
        clock.advance(0.5)
        assert not is_open(breaker)
        assert breaker.failed()  # begins the next one
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
    assert pause_s == LONGEST_PAUSE_S


def test_a_success_ends_the_pause_and_the_next_one_is_short_again() -> None:
    clock = ManualClock()
    breaker = broken(clock)
    clock.advance(FIRST_PAUSE_S)
    assert breaker.failed()
    assert is_open(breaker)
    breaker.succeeded()
    assert not is_open(breaker)
    for _ in range(FAILURES_IN_A_ROW):
        breaker.failed()
    clock.advance(FIRST_PAUSE_S)
    assert not is_open(breaker)
