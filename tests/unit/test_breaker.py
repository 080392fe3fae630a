"""The breaker: nothing for the odd failure, a pause for a series, a longer one each time, and an end to
it.
"""

from __future__ import annotations

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.tiers.breaker import FAILURES_IN_A_ROW, FIRST_PAUSE_S, LONGEST_PAUSE_S, Breaker
from kvbm_core.transfer.plan import OrderKind


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


@pytest.mark.parametrize(
    ("failing", "proves"),
    [
        (OrderKind.STORE, [OrderKind.STORE, OrderKind.FIND, OrderKind.FETCH]),
        (OrderKind.FIND, [OrderKind.FIND, OrderKind.FETCH]),
        (OrderKind.FETCH, [OrderKind.FETCH]),
    ],
)
def test_only_what_proves_as_much_as_what_failed_counts(failing: OrderKind, proves: list[OrderKind]) -> None:
    for kind in (OrderKind.STORE, OrderKind.FIND, OrderKind.FETCH):
        clock = ManualClock()
        breaker = Breaker(clock)
        for _ in range(FAILURES_IN_A_ROW):
            breaker.failed(failing)
        assert breaker.succeeded(kind) is (kind in proves)
        assert is_open(breaker) is (kind not in proves)
        clock.advance(FIRST_PAUSE_S)
        assert breaker.succeeded(kind) is (kind in proves)
        assert breaker.failed(failing) is (kind not in proves), "it is on trial until that is proved"


def test_failures_that_were_made_up_for_do_not_count_beside_one_that_was_not() -> None:
    breaker = Breaker(ManualClock())
    breaker.failed(OrderKind.FETCH)  # and nothing is to be fetched any more
    for kind in (OrderKind.STORE, OrderKind.FIND) * 10 * FAILURES_IN_A_ROW:
        assert not breaker.failed(kind), f"a single {kind}"
        assert breaker.succeeded(kind)
    assert not is_open(breaker)


def test_what_works_is_not_left_alone_for_the_odd_failure_while_fetches_are_on_trial() -> None:
    clock = ManualClock()
    breaker = broken(clock)
    clock.advance(FIRST_PAUSE_S)
    for _ in range(10 * FAILURES_IN_A_ROW):
        assert not breaker.succeeded(OrderKind.STORE)
        assert not breaker.failed(OrderKind.STORE)
    assert breaker.failed(OrderKind.FETCH)


def test_failures_of_all_kinds_are_one_row() -> None:
    for proves_least in OrderKind.STORE, OrderKind.FIND:
        breaker = Breaker(ManualClock())
        begins = [breaker.failed(kind) for kind in (OrderKind.FETCH, proves_least, OrderKind.FIND)]
        assert begins == [False, False, True]


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
