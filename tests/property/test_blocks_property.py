"""Random histories: LRU against its naive twin, the books of one tier against a model, encodings read back."""

from __future__ import annotations

from struct import unpack_from

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbm_core.blocks.lease import Lease, LeaseBook
from kvbm_core.blocks.pool import SlotPool
from kvbm_core.blocks.registry import BlockRegistry
from kvbm_core.clock import ManualClock
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.testing.naive import NaiveLru
from kvbm_core.testing.policy_contract import sample_keys
from kvbm_core.tokens.chain import TokenChain
from kvbm_core.tokens.hashing import encode_fields
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.types import BlockKey, SlotId

UNIVERSE = sample_keys(0, 24)
SOME_KEYS = st.lists(st.sampled_from(UNIVERSE), max_size=8)
A_FEW = st.integers(0, 10)

# Small, and full of what a careless encoding would trip over.
TEXTS = st.text(st.sampled_from("a0\0sn\x01é\ud800"), max_size=4)
FIELDS = st.lists(st.one_of(TEXTS, st.binary(max_size=4), st.integers(), st.none()), max_size=4)
NAMESPACES = st.builds(
    KeyNamespace,
    model=TEXTS,
    revision=TEXTS,
    kv_dtype=TEXTS,
    layout=TEXTS,
    block_size_tokens=st.integers(0, 3),
    parallel=TEXTS,
    adapter=TEXTS,
    salt=st.none() | TEXTS,
    extra=st.dictionaries(TEXTS, TEXTS, max_size=2).map(lambda pairs: tuple(pairs.items())),
)


# ---------------------------------------------------------------- encodings


def decode_fields(raw: bytes) -> list[bytes | str | int | None]:
    """The inverse of encode_fields: that there is one is what makes it injective."""
    fields: list[bytes | str | int | None] = []
    while raw:
        tag, (nbytes,) = raw[:1], unpack_from("<Q", raw, 1)
        payload, raw = raw[9 : 9 + nbytes], raw[9 + nbytes :]
        assert len(payload) == nbytes
        match tag:
            case b"n":
                fields.append(None)
            case b"b":
                fields.append(payload)
            case b"s":
                fields.append(payload.decode("utf-8", "surrogatepass"))
            case b"i":
                fields.append(int(payload))
            case _:
                raise AssertionError(tag)
    return fields


@given(FIELDS)
def test_encoded_fields_can_be_read_back(fields: list[bytes | str | int | None]) -> None:
    decoded = decode_fields(encode_fields(*fields))
    assert [(type(field), field) for field in decoded] == [(type(field), field) for field in fields]


@given(NAMESPACES, NAMESPACES)
def test_roots_are_equal_exactly_if_namespaces_are(one: KeyNamespace, other: KeyNamespace) -> None:
    assert (one == other) == (one.root() == other.root())


@given(NAMESPACES, st.permutations([field for field in KeyNamespace.__dataclass_fields__ if field != "extra"]))
def test_the_same_values_in_other_fields_are_another_namespace(one: KeyNamespace, order: list[str]) -> None:
    texts = [name for name in order if name not in ("block_size_tokens", "salt")]
    rolled = dict(zip(texts, [getattr(one, name) for name in texts[1:] + texts[:1]], strict=True))
    other = KeyNamespace(**rolled, block_size_tokens=one.block_size_tokens, salt=one.salt, extra=one.extra)
    assert (one == other) == (one.root() == other.root())


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=40),
    st.lists(st.integers(0, 45), max_size=6),
    st.integers(1, 7),
    st.booleans(),
)
def test_however_a_chain_grows_it_is_the_same(
    tokens: list[int], stops: list[int], block_size_tokens: int, has_extra: bool
) -> None:
    extra_of_block = (lambda block: b"x" * (block % 3)) if has_extra else None
    whole = TokenChain(KeyNamespace("m").root(), block_size_tokens, extra_of_block)
    whole.extend(tokens)
    grown = TokenChain(KeyNamespace("m").root(), block_size_tokens, extra_of_block)
    for stop in stops:
        grown.extend(tokens, stop)
    grown.extend(tokens)
    assert grown.hashes == whole.hashes
    assert len(whole.hashes) == len(tokens) // block_size_tokens


# ---------------------------------------------------------------- LRU and its twin


class LruAndItsTwin(RuleBasedStateMachine):
    """The same calls to both, misuse included: the same answers, the same errors, the same order in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.twin = LruPolicy(), NaiveLru()

    def both(self, name: str, *args: object) -> None:
        """Calls ``name`` on both and compares what comes back."""
        answers = []
        for each in (self.policy, self.twin):
            try:
                answers.append(getattr(each, name)(*args))
            except (KeyError, ValueError) as error:
                answers.append(type(error))
        assert answers[0] == answers[1], (name, args)

    @rule(keys=SOME_KEYS)
    def insert(self, keys: list[BlockKey]) -> None:
        self.both("insert", keys)

    @rule(keys=st.lists(st.sampled_from(UNIVERSE), max_size=8, unique=True))
    def insert_new_ones(self, keys: list[BlockKey]) -> None:
        self.both("insert", [key for key in keys if key not in self.twin._stamps])

    @rule(keys=SOME_KEYS)
    def touch(self, keys: list[BlockKey]) -> None:
        self.both("touch", keys)

    @rule(keys=SOME_KEYS)
    def pin(self, keys: list[BlockKey]) -> None:
        self.both("pin", keys)

    @rule(keys=SOME_KEYS)
    def pin_known_ones(self, keys: list[BlockKey]) -> None:
        self.both("pin", [key for key in keys if key in self.twin._stamps])

    @rule(keys=SOME_KEYS)
    def unpin(self, keys: list[BlockKey]) -> None:
        self.both("unpin", keys)

    @rule(keys=SOME_KEYS)
    def unpin_pinned_ones(self, keys: list[BlockKey]) -> None:
        self.both("unpin", [key for key in dict.fromkeys(keys) if self.twin.is_pinned(key)])

    @rule(key=st.sampled_from(UNIVERSE))
    def remove(self, key: BlockKey) -> None:
        self.both("remove", key)

    @rule(count=st.integers(-1, 10), protected=SOME_KEYS)
    def evict(self, count: int, protected: list[BlockKey]) -> None:
        self.both("evict", count, frozenset(protected))

    @invariant()
    def they_agree(self) -> None:
        self.policy.check_integrity()
        assert self.policy.evictable_blocks == self.twin.evictable_blocks
        assert all(self.policy.is_pinned(key) == self.twin.is_pinned(key) for key in UNIVERSE)

    def teardown(self) -> None:
        self.both("evict", self.twin.evictable_blocks)


# ---------------------------------------------------------------- pool, registry, policy and leases of a tier


class BooksOfATier(RuleBasedStateMachine):
    """What a tier does with its four books, against plain dicts; every slot is somewhere exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.pool, self.registry, self.policy = SlotPool(), BlockRegistry(), LruPolicy()
        self.leases = LeaseBook(self.clock)
        self.resident: dict[BlockKey, SlotId] = {}
        self.pending: dict[BlockKey, SlotId] = {}
        self.held: list[Lease] = []

    @initialize(capacity=st.integers(1, 12))
    def start(self, capacity: int) -> None:
        self.pool.grow(capacity)

    @rule(more=st.integers(0, 3))
    def grow(self, more: int) -> None:
        self.pool.grow(self.pool.capacity_slots + more)

    @rule(keys=st.lists(st.sampled_from(UNIVERSE), max_size=6, unique=True))
    def reserve(self, keys: list[BlockKey]) -> None:
        keys = [key for key in keys if key not in self.resident and key not in self.pending]
        free = self.pool.free_slots
        slots = self.pool.allocate(len(keys))
        assert (slots is None) == (len(keys) > free)
        if slots is not None:
            assert slots == sorted(slots)
            assert not set(slots) & {*self.resident.values(), *self.pending.values()}
            self.registry.reserve(keys, slots)
            self.pending.update(zip(keys, slots, strict=True))

    @rule(count=A_FEW)
    def commit(self, count: int) -> None:
        keys = list(self.pending)[:count]
        self.registry.commit(keys)
        self.policy.insert(keys)
        self.resident.update({key: self.pending.pop(key) for key in keys})

    @rule(count=A_FEW)
    def abort(self, count: int) -> None:
        keys = list(self.pending)[:count]
        slots = self.registry.drop(keys)
        assert slots == [self.pending.pop(key) for key in keys]
        self.pool.release(slots)

    @rule(count=A_FEW, protected=SOME_KEYS)
    def evict(self, count: int, protected: list[BlockKey]) -> None:
        leased = {key for lease in self.held for key in lease.keys}
        allowed = self.resident.keys() - leased - set(protected)
        victims = self.policy.evict(count, set(protected))
        assert (victims is None) == (count > len(allowed))
        if victims is not None:
            assert len(victims) == count
            assert set(victims) <= allowed
            slots = self.registry.drop(victims)
            assert slots == [self.resident.pop(key) for key in victims]
            self.pool.release(slots)

    @rule(keys=SOME_KEYS)
    def touch(self, keys: list[BlockKey]) -> None:
        self.policy.touch(keys)

    @rule(keys=SOME_KEYS, ttl_s=st.integers(1, 5))
    def lease_a_prefix(self, keys: list[BlockKey], ttl_s: int) -> None:
        count = self.registry.match_prefix(keys)
        assert all(key in self.resident for key in keys[:count])
        assert count == len(keys) or keys[count] not in self.resident
        self.policy.pin(keys[:count])
        slots = [self.resident[key] for key in keys[:count]]
        self.held.append(self.leases.grant("owner", keys[:count], slots, ttl_s))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.held))
        self.held.remove(lease)
        assert self.leases.release(lease)
        assert not self.leases.release(lease)
        self.policy.unpin(lease.keys)

    @rule(seconds=st.integers(0, 3))
    def time_passes(self, seconds: int) -> None:
        self.clock.advance(seconds)
        expired = self.leases.expire()
        over = [lease for lease in self.held if lease.expires_at_s <= self.clock.now_s()]
        assert sorted(lease.lease_id for lease in expired) == sorted(lease.lease_id for lease in over)
        for lease in expired:
            self.held.remove(lease)
            assert not self.leases.release(lease)
            self.policy.unpin(lease.keys)

    @invariant()
    def the_books_agree(self) -> None:
        for book in (self.pool, self.registry, self.policy, self.leases):
            book.check_integrity()
        assert dict.fromkeys(self.registry.keys()) == dict.fromkeys(self.resident)
        assert all(self.registry.slot_of(key) == self.resident.get(key) for key in UNIVERSE)
        assert all(self.registry.is_pending(key) == (key in self.pending) for key in UNIVERSE)
        assert (len(self.registry), self.registry.pending_blocks) == (len(self.resident), len(self.pending))
        used = self.pool.capacity_slots - self.pool.free_slots
        assert used == len(self.resident) + len(self.pending)

    @invariant()
    def leased_blocks_stay_where_they_are(self) -> None:
        assert self.leases.live_leases == len(self.held)
        leased = {key for lease in self.held for key in lease.keys}
        for lease in self.held:
            assert self.leases.is_live(lease)
            assert [self.registry.slot_of(key) for key in lease.keys] == list(lease.slots)
        assert all(self.policy.is_pinned(key) == (key in leased) for key in UNIVERSE)
        assert self.policy.evictable_blocks == len(self.resident.keys() - leased)


TestLruAndItsTwin = LruAndItsTwin.TestCase
TestLruAndItsTwin.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBooksOfATier = BooksOfATier.TestCase
TestBooksOfATier.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
