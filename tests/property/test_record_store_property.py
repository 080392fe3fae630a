"""Two record stores on one engine against a set: damage, and an engine that comes back empty, included."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvbm_core.errors import Outcome
from kvbm_core.storage.extents import Extent
from kvbm_core.testing.extent_contract import extent_of, last_of
from kvbm_core.testing.store_contract import LONG_S
from tests.effort import tries
from tests.unit.record_stores import KINDS, Kind, flipped, get

UNIVERSE = [extent_of(number, size, group) for number in (1, 2) for size in (1, 2, 8) for group in (0, 1)]
ONE = st.sampled_from(UNIVERSE)
SOME = st.lists(ONE, max_size=5)
WHICH = st.integers(0, 1)


class RecordMachine(RuleBasedStateMachine):
    """The twin: the extents that are there, and those of them that are damaged and must not be got."""

    @initialize(kind=st.sampled_from(sorted(KINDS)))
    def begin(self, kind: str) -> None:
        self.kind: Kind = KINDS[kind]()
        self.kind.payload_bytes = 100
        self.stores = [self.kind.open(), self.kind.open()]
        self.there: set[Extent] = set()
        self.damaged: set[Extent] = set()

    @rule(extents=SOME)
    def put(self, extents: list[Extent]) -> None:
        self.kind.put(*extents)
        self.there.update(extents)
        self.damaged.difference_update(extents)

    @rule(which=WHICH, extent=ONE, count=st.integers(1, 8))
    def get(self, which: int, extent: Extent, count: int) -> None:
        outcomes = get(self.stores[which], last_of(extent, count), 100)
        if extent in self.damaged:
            assert Outcome.OK not in outcomes
            self.damaged.discard(extent)
            self.there.discard(extent)
        else:
            assert set(outcomes) == {Outcome.OK if extent in self.there else Outcome.MISS}

    @rule(extent=ONE, where=st.floats(0, 1, exclude_max=True))
    def damage(self, extent: Extent, where: float) -> None:
        """In the trailer, or cut off."""
        if extent in self.there - self.damaged:
            content = self.kind.content(extent)
            at = int(8 * (len(content) - 4096 + 4096 * where))
            self.kind.damage(extent, lambda old: flipped(old, [at]) if at % 2 else old[: at // 8])
            self.damaged.add(extent)

    @rule(which=WHICH, extents=SOME)
    def remove(self, which: int, extents: list[Extent]) -> None:
        ones = [extent for extent in dict.fromkeys(extents) if extent.num_blocks == 1]
        keys = [extent.keys[0] for extent in ones]
        outcomes = self.stores[which].remove_many(keys, deadline_s=LONG_S)
        assert outcomes == [Outcome.OK if extent in self.there else Outcome.MISS for extent in ones]
        self.there.difference_update(ones)
        self.damaged.difference_update(ones)

    @rule()
    def lose_everything(self) -> None:
        with self.kind.objects.lock:
            for name in list(self.kind.objects.objects):
                self.kind.objects.pop(name)
        self.there, self.damaged = set(), set()

    @invariant()
    def what_is_there_is_contained(self) -> None:
        for store in getattr(self, "stores", ()):
            held = store.contains_extents(UNIVERSE, deadline_s=LONG_S)
            assert held == [Outcome.OK if extent in self.there else Outcome.MISS for extent in UNIVERSE]

    @invariant()
    def keys_are_told_if_there_is_no_secret(self) -> None:
        if not hasattr(self, "stores"):
            return
        ones = {extent.keys[0] for extent in self.there if extent.num_blocks == 1}
        assert set(self.stores[0].scan()) == (ones if self.kind.secret is None else set())


TestRecordStores = RecordMachine.TestCase
TestRecordStores.settings = settings(
    max_examples=tries(15, nightly=1_000), stateful_step_count=30, deadline=None
)
