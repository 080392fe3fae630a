"""LocalTiers against a set of keys: what is said to be there can be loaded, and holds what was stored."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.types import BlockKey
from tests.effort import tries
from tests.unit.local_bench import KEYS, LocalBench

CHAINS = [KEYS[:6], [*KEYS[:2], *KEYS[6:9]], KEYS[9:12]]
SOME = st.tuples(st.sampled_from(CHAINS), st.integers(1, 6)).map(lambda picked: picked[0][: picked[1]])
OWNERS = st.sampled_from("abc")
DISK_SLOTS = 9


class TiersMachine(RuleBasedStateMachine):
    """The twin: what was ever stored. With ``num_slots`` for every key nothing may be missing."""

    num_slots = 5

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="kvbm-local-property-")
        self.clock = ManualClock()
        self.stored: set[BlockKey] = set()
        self.promised: dict[str, tuple[list[BlockKey], float]] = {}
        self.open()

    def open(self) -> None:
        """A process that finds what the last one left on the disk."""
        self.bench = LocalBench(Path(self.folder.name), self.num_slots, DISK_SLOTS, clock=self.clock)

    def longest(self, keys: list[BlockKey]) -> int:
        """How many leading keys were ever stored."""
        return next((i for i, key in enumerate(keys) if key not in self.stored), len(keys))

    @rule(keys=SOME)
    def store(self, keys: list[BlockKey]) -> None:
        outcome = self.bench.store(keys)
        assert outcome in (Outcome.OK, Outcome.NO_SPACE)
        assert (outcome is Outcome.OK) == all(map(self.bench.tiers.contains, keys))
        self.stored.update(keys)

    @rule(owner=OWNERS, keys=SOME)
    def match(self, owner: str, keys: list[BlockKey]) -> None:
        found = self.bench.tiers.match(owner, keys)
        assert found <= self.longest(keys)
        self.promised[owner] = (keys[:found], self.clock.now_s())

    @rule(owner=OWNERS, fewer=st.integers(0, 2))
    def load_what_was_matched(self, owner: str, fewer: int) -> None:
        keys, since_s = self.promised.pop(owner, ([], 0.0))
        keys = keys[: len(keys) - fewer]
        if keys:
            is_held = self.clock.now_s() - since_s < 30.0
            outcome = self.bench.load(owner, keys)
            assert outcome is Outcome.OK or not is_held
            assert outcome is not Outcome.OK or self.bench.came(keys)

    @rule(owner=OWNERS, keys=SOME)
    def claim_and_drop(self, owner: str, keys: list[BlockKey]) -> None:
        self.promised.pop(owner, None)
        claim = self.bench.tiers.claim(owner, keys)
        assert claim is None or self.longest(keys) == len(keys)
        if claim is not None:
            self.bench.tiers.drop(claim)

    @rule(seconds=st.sampled_from([1.0, 20.0, 31.0]))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def restart(self) -> None:
        self.bench.close()
        self.promised.clear()
        self.open()

    @invariant()
    def the_books_agree(self) -> None:
        self.bench.tiers.check_integrity()

    def teardown(self) -> None:
        """Ends threads and files."""
        self.bench.close()
        self.folder.cleanup()


TestTiers = TiersMachine.TestCase
TestTiers.settings = settings(max_examples=tries(6, nightly=50), stateful_step_count=25, deadline=None)


@given(st.lists(SOME, max_size=4), SOME)
@settings(max_examples=30, deadline=None)
def test_with_room_for_all_the_longest_prefix_is_found(
    stored: list[list[BlockKey]], wanted: list[BlockKey]
) -> None:
    with tempfile.TemporaryDirectory(prefix="kvbm-local-property-") as folder:
        bench = LocalBench(Path(folder), len(KEYS), 0)
        known: set[BlockKey] = set()
        for keys in stored:
            assert bench.store(keys) is Outcome.OK
            known.update(keys)
        longest = next((i for i, key in enumerate(wanted) if key not in known), len(wanted))
        assert bench.tiers.match("a", wanted) == longest
        assert not longest or (
            bench.load("a", wanted[:longest]) is Outcome.OK and bench.came(wanted[:longest])
        )
        bench.close()
