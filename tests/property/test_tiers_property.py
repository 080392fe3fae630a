"""Random histories of one tier against a model, and the longest prefix against trying every length."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbm_core.blocks.lease import Lease
from kvbm_core.blocks.slot_tier import BlockTier, Reservation
from kvbm_core.clock import ManualClock
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.testing.heard import Heard
from kvbm_core.testing.policy_contract import sample_keys
from kvbm_core.tiers.groups import GroupSpec, alignment_tokens, longest_prefix_tokens, needed_blocks
from kvbm_core.types import BlockKey, SequenceHash, Tier, block_key
from tests.effort import tries

# ---------------------------------------------------------------- the longest prefix


class Residents:
    """A set of keys."""

    def __init__(self, keys: set[BlockKey]) -> None:
        self.keys = keys

    def contains(self, key: BlockKey) -> bool:
        return key in self.keys

    def match_prefix(self, keys: Sequence[BlockKey]) -> int:
        return next((index for index, key in enumerate(keys) if key not in self.keys), len(keys))


def is_usable(
    group: GroupSpec, keys: Sequence[BlockKey], there: Residents, computed: int, length: int
) -> bool:
    """Whether a token at position ``length`` finds everything it sees, token by token."""
    size = group.block_size_tokens
    if length // size > len(keys):
        return False
    if group.is_state:  # the one after the last token, and no other
        return length <= computed or there.contains(keys[length // size - 1])
    seen_from = 0 if group.window_tokens is None else max(0, length - group.window_tokens + 1)
    return all(token < computed or there.contains(keys[token // size]) for token in range(seen_from, length))


def naive_longest(
    groups: Sequence[GroupSpec],
    all_keys: Sequence[Sequence[BlockKey]],
    computed: int,
    limit: int,
    there: Residents,
) -> int:
    """Every length from the top."""
    align = alignment_tokens(groups)
    for length in range(limit // align * align, computed, -align):
        if all(
            is_usable(group, keys, there, computed, length)
            for group, keys in zip(groups, all_keys, strict=True)
        ):
            return length
    return computed


@st.composite
def prefix_questions(draw: st.DrawFn) -> tuple[list[GroupSpec], list[list[BlockKey]], int, int, Residents]:
    specs = draw(
        st.lists(
            st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.none() | st.integers(0, 20)),
            min_size=1,
            max_size=3,
        )
    )
    groups = [
        GroupSpec(index, size, window or None, is_state=window == 0)
        for index, (size, window) in enumerate(specs)
    ]
    if draw(st.booleans()):  # as engines have them: one size, several groups with states
        size, num_states = draw(st.integers(1, 4)), draw(st.sampled_from([1, 3]))
        groups = [GroupSpec(index, size, is_state=index < num_states) for index in range(num_states + 1)]
    total = draw(st.integers(0, 48))
    digests = [SequenceHash(block.to_bytes(32, "big")) for block in range(total)]
    all_keys = [
        [block_key(digest, group.index) for digest in digests[: total // group.block_size_tokens]]
        for group in groups
    ]
    every = [key for keys in all_keys for key in keys]
    # Mostly full tiers with a few holes, or mostly empty ones with a few blocks.
    some = set(draw(st.lists(st.sampled_from(every), max_size=8))) if every else set()
    there = Residents(set(every) - some if draw(st.booleans()) else some)
    align = alignment_tokens(groups)
    computed = draw(st.integers(0, 3)) * align
    return groups, all_keys, computed, draw(st.integers(0, 50)), there


@settings(max_examples=tries(75, nightly=1000))
@given(prefix_questions())
def test_the_longest_prefix_is_the_one_that_trying_every_length_finds(
    question: tuple[list[GroupSpec], list[list[BlockKey]], int, int, Residents],
) -> None:
    groups, all_keys, computed, limit, there = question
    expected = naive_longest(groups, all_keys, computed, limit, there)
    assert longest_prefix_tokens(groups, lambda g: all_keys[g], computed, limit, there) == expected
    for group in groups:
        if group.is_state and expected > computed:
            end = expected // group.block_size_tokens
            assert needed_blocks(group, computed, expected) == range(end - 1, end)


# ---------------------------------------------------------------- the tier

UNIVERSE = sample_keys(0, 12)
SOME_KEYS = st.lists(st.sampled_from(UNIVERSE), max_size=6)
INDEX = st.integers(0, 50)


class TierMachine(RuleBasedStateMachine):
    """BlockTier next to a dict of what must be resident, pending and doomed, and a list of who reads what."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.heard = Heard()
        self.tier = BlockTier(Tier.HOST, LruPolicy(), self.clock, self.heard)
        self.tier.grow(5)
        self.resident: dict[BlockKey, int] = {}
        self.doomed: set[BlockKey] = set()
        self.reservations: list[tuple[Reservation, bool]] = []  # with: made before a reset
        self.leases: list[Lease] = []
        self.ended: list[Lease] = []

    # -------- the model

    def pending(self) -> set[BlockKey]:
        return {key for reservation, _ in self.reservations for key in reservation.keys}

    def pinned(self) -> set[BlockKey]:
        return {key for lease in self.leases for key in lease.keys}

    def visible(self) -> set[BlockKey]:
        return set(self.resident) - self.doomed

    def take_gone(self) -> set[BlockKey]:
        """What has become unmatchable."""
        gone, self.heard.gone[:] = list(self.heard.gone), []
        assert len(set(gone)) == len(gone)
        return set(gone)

    def doomed_leave(self) -> None:
        left = self.doomed - self.pinned()
        self.doomed -= left
        for key in left:
            del self.resident[key]
        assert not self.take_gone()

    # -------- what happens

    @rule(
        keys=SOME_KEYS,
        protected=st.frozensets(st.sampled_from(UNIVERSE), max_size=6),
        all_or_none=st.booleans(),
    )
    def reserve(self, keys: list[BlockKey], protected: frozenset[BlockKey], all_or_none: bool) -> None:
        new = [key for key in dict.fromkeys(keys) if key not in self.resident and key not in self.pending()]
        free = self.tier.capacity_blocks - len(self.resident) - len(self.pending())
        evictable = self.visible() - self.pinned() - protected
        reservation = self.tier.reserve(keys, lambda _: protected, all_or_none=all_or_none)
        gone = self.take_gone()
        assert gone <= evictable
        for key in gone:
            del self.resident[key]
        if all_or_none and (len(new) < len(keys) or len(new) > free + len(evictable)):
            assert not gone and not reservation.keys
        else:
            assert len(gone) == min(max(0, len(new) - free), len(evictable))
            assert list(reservation.keys) == new[: free + len(gone)]
        taken = [*self.resident.values(), *(slot for other, _ in self.reservations for slot in other.slots)]
        assert not set(taken) & set(reservation.slots)
        self.reservations.append((reservation, False))

    @precondition(lambda self: self.reservations)
    @rule(which=INDEX)
    def commit(self, which: int) -> None:
        reservation, is_old = self.reservations.pop(which % len(self.reservations))
        assert self.tier.commit(reservation) is not is_old
        if not is_old:
            self.resident.update(zip(reservation.keys, reservation.slots, strict=True))

    @precondition(lambda self: self.reservations)
    @rule(which=INDEX)
    def abort(self, which: int) -> None:
        reservation, _ = self.reservations.pop(which % len(self.reservations))
        self.tier.abort(reservation)

    @rule(keys=SOME_KEYS, ttl_s=st.integers(1, 5))
    def lease(self, keys: list[BlockKey], ttl_s: int) -> None:
        keys = list(dict.fromkeys(keys))
        lease = self.tier.lease("r", keys, ttl_s)
        assert (lease is not None) == (set(keys) <= self.visible())
        if lease is not None:
            assert lease.slots == tuple(self.resident[key] for key in keys)
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(which=INDEX, ttl_s=st.integers(1, 5))
    def renew(self, which: int, ttl_s: int) -> None:
        old = self.leases.pop(which % len(self.leases))
        new = self.tier.renew(old, ttl_s)
        assert new is not None and (new.keys, new.slots) == (old.keys, old.slots)
        self.leases.append(new)
        self.ended.append(old)

    @precondition(lambda self: self.leases)
    @rule(which=INDEX)
    def release(self, which: int) -> None:
        lease = self.leases.pop(which % len(self.leases))
        self.tier.release(lease)
        self.ended.append(lease)
        self.doomed_leave()

    @precondition(lambda self: self.ended)
    @rule(which=INDEX)
    def what_has_ended_stays_ended(self, which: int) -> None:
        lease = self.ended[which % len(self.ended)]
        self.tier.release(lease)
        assert self.tier.renew(lease, 1.0) is None

    @rule(seconds=st.integers(0, 4))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)
        over = [lease for lease in self.leases if lease.expires_at_s <= self.clock.now_s()]
        assert self.tier.expire_leases() == len(over)
        self.leases = [lease for lease in self.leases if lease not in over]
        self.ended += over
        self.doomed_leave()

    @rule(keys=SOME_KEYS)
    def forget(self, keys: list[BlockKey]) -> None:
        forgotten = set(keys) & self.visible()
        self.tier.forget(keys)
        assert self.take_gone() == forgotten
        self.doomed |= forgotten
        self.doomed_leave()

    @rule()
    def reset(self) -> None:
        assert self.tier.reset() == len(self.visible())
        assert self.take_gone() == self.visible()
        self.doomed |= self.visible()
        self.reservations = [(reservation, True) for reservation, _ in self.reservations]
        self.doomed_leave()

    @rule(keys=SOME_KEYS)
    def touch(self, keys: list[BlockKey]) -> None:
        self.tier.touch(keys)

    @rule(keys=SOME_KEYS)
    def demote(self, keys: list[BlockKey]) -> None:
        self.tier.demote(keys)

    @rule(more=st.integers(-1, 2))
    def grow(self, more: int) -> None:
        wanted = self.tier.capacity_blocks + more
        self.tier.grow(wanted)
        assert self.tier.capacity_blocks == max(wanted, wanted - more)

    # -------- what holds after each step

    @invariant()
    def the_tier_is_the_model(self) -> None:
        self.tier.check_integrity()
        assert {key for key in UNIVERSE if self.tier.contains(key)} == self.visible()
        assert self.heard.here[Tier.HOST] == self.visible()
        assert self.tier.resident_blocks == len(self.visible())
        assert self.tier.pending_blocks == len(self.pending())
        assert self.tier.live_leases == len(self.leases)
        run = next((i for i, key in enumerate(UNIVERSE) if key not in self.visible()), len(UNIVERSE))
        assert self.tier.match_prefix(UNIVERSE) == run
        assert len(self.tier.new_of(UNIVERSE)) == len(set(UNIVERSE) - set(self.resident) - self.pending())


TierMachine.TestCase.settings = settings(max_examples=tries(20, nightly=160), stateful_step_count=40)
TestTierAgainstItsModel = TierMachine.TestCase
