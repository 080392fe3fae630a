"""Random histories: LRU against its naive twin, the log of uses against a list, encodings read back."""

from __future__ import annotations

from random import Random
from struct import unpack_from

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbm_core.policy.lru import LruPolicy
from kvbm_core.policy.recency import RecencyLog, are_distinct, as_slots
from kvbm_core.testing.naive import NaiveLru
from kvbm_core.testing.policy_contract import ListPolicy
from kvbm_core.tokens.chain import TokenChain
from kvbm_core.tokens.hashing import encode_fields
from kvbm_core.tokens.namespace import KeyNamespace
from tests.effort import tries

UNIVERSE = range(24)
SOME_SLOTS = st.lists(st.sampled_from(UNIVERSE), max_size=8)

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


@given(
    NAMESPACES, st.permutations([field for field in KeyNamespace.__dataclass_fields__ if field != "extra"])
)
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
    """The same calls to both, misuse included: the same answers, the same errors, the same order in the
    end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.naive = NaiveLru()
        self.policy, self.twin = ListPolicy(LruPolicy()), ListPolicy(self.naive)

    @property
    def known(self) -> set[int]:
        """Slots that both hold."""
        return set(self.naive._stamps)

    def both(self, name: str, *args: object) -> None:
        """Calls ``name`` on both and compares what comes back."""
        answers = []
        for each in (self.policy, self.twin):
            try:
                answers.append(getattr(each, name)(*args))
            except (KeyError, ValueError) as error:
                answers.append(type(error))
        assert answers[0] == answers[1], (name, args)

    @rule(slots=SOME_SLOTS)
    def insert(self, slots: list[int]) -> None:
        self.both("insert", slots)

    @rule(slots=st.lists(st.sampled_from(UNIVERSE), max_size=8, unique=True))
    def insert_new_ones(self, slots: list[int]) -> None:
        self.both("insert", [slot for slot in slots if slot not in self.known])

    @rule(slots=SOME_SLOTS)
    def demote(self, slots: list[int]) -> None:
        self.both("demote", slots)

    @rule(slots=SOME_SLOTS)
    def touch(self, slots: list[int]) -> None:
        self.both("touch", slots)

    @rule(slots=SOME_SLOTS)
    def pin(self, slots: list[int]) -> None:
        self.both("pin", slots)

    @rule(slots=SOME_SLOTS)
    def pin_known_ones(self, slots: list[int]) -> None:
        self.both("pin", [slot for slot in slots if slot in self.known])

    @rule(slots=SOME_SLOTS)
    def unpin(self, slots: list[int]) -> None:
        self.both("unpin", slots)

    @rule(slots=SOME_SLOTS)
    def unpin_pinned_ones(self, slots: list[int]) -> None:
        self.both("unpin", [slot for slot in dict.fromkeys(slots) if self.twin.is_pinned(slot)])

    @rule(slot=st.sampled_from(UNIVERSE))
    def remove(self, slot: int) -> None:
        self.both("remove", slot)

    @rule(count=st.integers(-1, 10), protected=SOME_SLOTS)
    def evict(self, count: int, protected: list[int]) -> None:
        self.both("evict", count, frozenset(protected))

    @invariant()
    def they_agree(self) -> None:
        self.policy.check_integrity()
        assert self.policy.evictable_blocks == self.twin.evictable_blocks
        assert all(self.policy.is_pinned(slot) == self.twin.is_pinned(slot) for slot in UNIVERSE)

    def teardown(self) -> None:
        self.both("evict", self.twin.evictable_blocks)


# ---------------------------------------------------------------- the log of uses


class LogAndAList(RuleBasedStateMachine):
    """RecencyLog with chunks of four places beside a list; its size stays in proportion to what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.log = RecencyLog(chunk_bits=2)
        self.log.grow(40)
        self.slots: list[int] = []

    @rule(slots=st.lists(st.integers(0, 39), unique=True, max_size=40))
    def append(self, slots: list[int]) -> None:
        new = [slot for slot in slots if slot not in self.slots]
        self.log.append(as_slots(new))
        self.slots += new

    @rule(slots=st.lists(st.integers(0, 39), unique=True, max_size=40))
    def remove(self, slots: list[int]) -> None:
        here = [slot for slot in slots if slot in self.slots]
        self.log.remove(as_slots(here))
        self.slots = [slot for slot in self.slots if slot not in here]

    @rule(slots=st.lists(st.integers(0, 39), unique=True, max_size=5), times=st.integers(1, 30))
    def use_again(self, slots: list[int], times: int) -> None:
        here = [slot for slot in slots if slot in self.slots]
        for _ in range(times):
            self.log.remove(as_slots(here))
            self.log.append(as_slots(here))
        self.slots = [slot for slot in self.slots if slot not in here] + here

    @invariant()
    def it_is_the_list(self) -> None:
        self.log.check_integrity()
        assert [slot for part in self.log.oldest() for slot in part.tolist()] == self.slots
        assert len(self.log) == len(self.slots)
        assert self.log.holds(as_slots(range(40))).tolist() == [slot in self.slots for slot in range(40)]
        assert (
            self.log.log_entries <= 160 + 16
        )  # each of the 40 slots could keep one chunk alive, and no more


def test_the_log_stays_small_however_uneven_the_use_is() -> None:
    log = RecencyLog(chunk_bits=4)
    log.grow(1000)
    log.append(as_slots(range(1000)))
    random = Random(7)
    for _ in range(3000):
        slots = as_slots(random.sample(range(1000), 20))
        log.remove(slots)
        log.append(slots)
    log.check_integrity()
    assert log.log_entries < 3 * 1000


@given(
    slots=st.lists(st.integers(0, 300), min_size=1, max_size=200),
    order=st.sampled_from(["as drawn", "ascending", "descending"]),
    is_unique=st.booleans(),
)
def test_slots_are_distinct_or_not(slots: list[int], order: str, is_unique: bool) -> None:
    slots = list(dict.fromkeys(slots)) if is_unique else slots
    if order != "as drawn":
        slots.sort(reverse=order == "descending")
    assert are_distinct(as_slots(slots)) == (len(set(slots)) == len(slots))


@given(
    num_slots=st.integers(17, 600),
    order=st.sampled_from(["oldest first", "newest first", "halves in turns", "drawn"]),
    seed=st.integers(0, 1000),
)
def test_slots_leave_the_log_in_any_order(num_slots: int, order: str, seed: int) -> None:
    log = RecencyLog(chunk_bits=6)
    log.grow(700)
    log.append(as_slots(range(700)))
    slots = list(range(num_slots))
    if order == "newest first":
        slots.reverse()
    elif order == "halves in turns":
        half = num_slots // 2
        slots = [slot for pair in zip(slots[:half], slots[half : 2 * half], strict=True) for slot in pair]
    elif order == "drawn":
        Random(seed).shuffle(slots)
    log.remove(as_slots(slots))
    log.check_integrity()
    assert [slot for part in log.oldest() for slot in part.tolist()] == sorted(set(range(700)) - set(slots))


WALK = settings(max_examples=tries(25, nightly=300), stateful_step_count=40, deadline=None)
TestLruAndItsTwin = LruAndItsTwin.TestCase
TestLruAndItsTwin.settings = WALK
TestLogAndAList = LogAndAList.TestCase
TestLogAndAList.settings = WALK
