"""The frequency filter against a twin that does what the guides say: a table, and a sweep at each decay
step.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvbm_core.clock import ManualClock
from kvbm_core.policy.frequency import ADMITTED_FROM, DECAY_S, MAX_COUNT, FrequencyFilter
from kvbm_core.types import BlockKey

KEYS = [BlockKey(bytes([number]) * 32) for number in range(6)]
A, B, C, D, *_ = KEYS


class SweepingTwin:
    """Counts as they are; ``sweep`` is called once for each decay step that begins."""

    def __init__(self) -> None:
        self.counts: dict[BlockKey, int] = {}

    def admit(self, keys: list[BlockKey]) -> list[BlockKey]:
        """As FrequencyFilter."""
        for key in keys:
            self.counts[key] = min(2 * self.counts[key], MAX_COUNT) if key in self.counts else 1
        return [key for key in keys if self.counts[key] >= ADMITTED_FROM]

    def hit(self, keys: list[BlockKey]) -> None:
        """As FrequencyFilter."""
        for key in keys:
            self.counts[key] = min(2 * self.counts.get(key, 1), MAX_COUNT)

    def sweep(self) -> None:
        """A decay step has begun."""
        self.counts = {key: count - 1 for key, count in self.counts.items() if count > 1}


def decide(filter_: FrequencyFilter, key: BlockKey) -> bool:
    """Whether it is admitted."""
    return filter_.admit([key]) == [key]


STEPS = st.one_of(
    st.tuples(st.just("admit"), st.lists(st.sampled_from(KEYS), max_size=4, unique=True)),
    st.tuples(st.just("hit"), st.lists(st.sampled_from(KEYS), max_size=8)),
    st.tuples(st.just("pass"), st.sampled_from([0.5, DECAY_S / 2, DECAY_S, 3.5 * DECAY_S])),
)


@given(steps=st.lists(STEPS, max_size=60), start_s=st.floats(0.0, 10 * DECAY_S))
def test_it_is_the_twin_that_sweeps(steps: list[tuple[str, object]], start_s: float) -> None:
    clock, twin = ManualClock(start_s), SweepingTwin()
    filter_ = FrequencyFilter(clock)
    for what, argument in steps:
        if what == "admit":
            assert isinstance(argument, list)
            assert filter_.admit(argument) == twin.admit(argument)
        elif what == "hit":
            assert isinstance(argument, list)
            filter_.hit(argument)
            twin.hit(argument)
        else:
            assert isinstance(argument, float)
            steps_before = int(clock.now_s() // DECAY_S)
            clock.advance(argument)
            for _ in range(int(clock.now_s() // DECAY_S) - steps_before):
                twin.sweep()
    for key in KEYS:
        assert filter_.admit([key]) == twin.admit([key])


def test_a_block_is_admitted_when_it_is_offered_again_or_was_hit() -> None:
    filter_ = FrequencyFilter(ManualClock())
    assert [decide(filter_, A) for _ in range(3)] == [False, True, True]
    assert not decide(filter_, B)
    filter_.hit([C])
    assert decide(filter_, C)


def test_a_hit_counts_for_a_block_that_was_never_offered() -> None:
    filter_ = FrequencyFilter(ManualClock())
    filter_.hit([A])
    assert decide(filter_, A)


def test_hits_wear_off() -> None:
    clock = ManualClock()
    filter_ = FrequencyFilter(clock, decay_s=10.0)
    filter_.hit([A])
    filter_.hit([B, B, B])  # 8
    clock.advance(20.0)
    assert not decide(filter_, A)
    clock.advance(50.0)
    assert decide(filter_, B)  # 1, and this offer
    clock.advance(20.0)
    assert not decide(filter_, B)


def test_a_count_has_a_limit_and_comes_down_from_there() -> None:
    clock = ManualClock()
    filter_ = FrequencyFilter(clock, decay_s=1.0)
    filter_.hit([A] * 5000)
    filter_.hit([B] * 5000)
    clock.advance(float(MAX_COUNT - 1))
    assert decide(filter_, A)
    clock.advance(1.0)
    assert not decide(filter_, B)


@given(keys=st.lists(st.sampled_from(KEYS), max_size=50), max_entries=st.integers(1, 5))
def test_no_more_is_remembered_than_allowed_and_the_latest_always_is(
    keys: list[BlockKey], max_entries: int
) -> None:
    filter_ = FrequencyFilter(ManualClock(), max_entries=max_entries)
    latest: list[BlockKey] = []
    for number, key in enumerate(keys):
        if number % 2:
            filter_.hit([key])
        else:
            decide(filter_, key)
        latest = [*(other for other in latest if other != key), key][-max_entries:]
        assert len(filter_) == len(latest)
    filter_.hit(latest)  # whatever is remembered has been offered: it has 2 now at least
    assert len(filter_) == len(latest)
    assert all(decide(filter_, key) for key in latest)


def test_the_one_longest_without_an_offer_or_a_hit_goes_first() -> None:
    filter_ = FrequencyFilter(ManualClock(), max_entries=3)
    filter_.hit([A, B, C])
    assert decide(filter_, A)  # an offer
    filter_.hit([B])
    decide(filter_, D)  # C goes
    assert decide(filter_, A) and decide(filter_, B)
    assert not decide(filter_, C)
