"""What the leader knows of one request of the engine, from its first query to its end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeVar, cast

from kvbm_core.blocks.tenants import NOBODY
from kvbm_core.errors import IntegrityError
from kvbm_core.identity.roots import RootFacts
from kvbm_core.observe.why import Account
from kvbm_core.runtime.audit import AuditedPrefix
from kvbm_core.tiers.chain import Held
from kvbm_core.tiers.groups import GroupSpec, base_block_tokens
from kvbm_core.tiers.lower import Seeker
from kvbm_core.tokens.chain import TokenChain
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.types import BlockKey, SequenceHash, block_key

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from kvbm_core.events.log import Names

BlockTable = Sequence[int]
"""Device block ids of one request in one group, by block index; the null block where the engine keeps
nothing.
"""
Status = TypeVar("Status", bound=Enum)
Event = TypeVar("Event", bound=Enum)
NULL_BLOCK = 0
"""The null block of most engines; see LeaderOptions."""


class StateOnDevice(NamedTuple):
    """The state of the layers of ``groups[position]`` after the first ``end_tokens`` tokens of a request:
    where the engine says that it is.
    """

    position: int
    device_block: int
    end_tokens: int


class TokenLimits(NamedTuple):
    """What a request allows; None: all. ``load``: tokens that are loaded beyond those on the device, at most.
    ``offload``: tokens from its first one on of which blocks may be stored.
    """

    load: int | None = None
    offload: int | None = None


NO_LIMITS = TokenLimits()


@dataclass(slots=True)
class StateMarks:
    """Ends of states of one request, in tokens. ``kept_tokens``: the last one that stays when there are newer
    ones; distances are counted from it. ``spare_tokens``: the newest, if it goes first as soon as there is a
    newer one; 0: none. ``waiting_tokens``: one that was not offered to lower tiers, as its KV was not there.
    ``prompt_tokens``: the request's prompt. ``lasting``: all that stay.
    """

    kept_tokens: int = 0
    spare_tokens: int = 0
    waiting_tokens: int = 0
    prompt_tokens: int = 0
    lasting: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Match:
    """A promise, until it is kept or let go: ``held`` has the blocks ``blocks[g]`` of each group g, one after
    the other.
    """

    computed_tokens: int
    prefix_tokens: int
    blocks: tuple[range, ...]
    held: Held


class Seen(NamedTuple):
    """A request that began in some way: its root, what that was made of, and when it came, on the leader's
    clock.
    """

    root: SequenceHash
    facts: RootFacts | None
    at_s: float
    request_id: str


def after(table: Mapping[Status, Mapping[Event, Status]], status: Status, event: Event) -> Status:
    """What a request, or its load, is after ``event``, by an engine adapter's table of what it can be.
    IntegrityError, a bug, if that cannot happen to what it is.
    """
    found = table[status].get(event)
    if found is None:
        raise IntegrityError(f"kvbm: {type(event).__name__} {event.value} while it is {status.value}")
    return found


class Worth(Enum):
    """What a request's keys are worth. Besides, it has ended or not: what it stored before is worth as much.

    | from | to | by | as |
    | --- | --- | --- | --- |
    | | LASTING, LOCAL | open | it begins, or begins anew |
    | LOCAL | LASTING | confirm | it is known at its end that its adapter was the one in its keys |
    | any but DISOWNED | RETIRED | retire, new_generation | weights or its adapter have changed under it |
    | any | DISOWNED | disown | nobody knows what it was computed with |
    """

    LASTING = "lasting"
    """They mean the same in another process."""
    LOCAL = "local"
    """They do not, and never reach lower tiers."""
    RETIRED = "retired"
    """What it has on the device is not what they say; nothing of it moves any more."""
    DISOWNED = "disowned"
    """Nor is what was stored of it."""


@dataclass
class RequestState:
    """One request. Only the leader's thread touches it.

    ``next_offload[g]`` is the first block of group g that has not been considered for offload yet, and
    ``next_full_tokens`` the length at which the next of them is full (0: not known, look).
    ``foreign_tokens``: what the engine found on the device, and nobody here has seen computed; it is never
    offloaded. ``audited``: what was found and is computed again, to be compared. ``hit_blocks``: those that
    it was given from the host, the disk and stores. ``hit_tokens``: with what it began to run, wherever that
    lay; 0 once that counts as used. ``came_s``, ``prompt_tokens``: for who records requests.
    ``tenant``: whose it is, see TenantTable. ``waits_for``: what has to change before a search tells whoever
    waits for lower tiers anything new. ``seeker``: what was learned of lower tiers by key. ``facts``: of its
    root. ``beginning``, ``before``: a name of its first tokens, and who began so under this root before.
    ``account``: what it got, once that is known. ``trace_headers``: the W3C trace context that it came with;
    ``span``: its own, where spans are asked for. ``marks``: of its states. ``limits``: what it allows itself.
    ``names_of``: what its blocks are called in KV events; None: nobody is told of them.
    """

    request_id: str
    chain: TokenChain
    groups: tuple[GroupSpec, ...]
    worth: Worth = Worth.LASTING
    match: Match | None = None
    onboard_job: int | None = None
    offload_jobs: set[int] = field(default_factory=set)
    next_offload: list[int] = field(default_factory=list)
    next_full_tokens: int = 0
    foreign_tokens: int = 0
    deferred_since_s: float | None = None
    fetch_wanted_since_s: float | None = None
    waits_for: object = None
    queried_blocks: int = 0
    hit_blocks: tuple[int, int, int] = (0, 0, 0)
    hit_tokens: int = 0
    is_finished: bool = False
    tenant: int = NOBODY
    audited: AuditedPrefix | None = None
    came_s: float = 0.0
    prompt_tokens: int = 0
    seeker: Seeker = field(default_factory=Seeker)
    facts: RootFacts | None = None
    beginning: int | None = None
    before: Seen | None = None
    account: Account | None = None
    trace_headers: Mapping[str, str] | None = None
    span: Span | None = None
    marks: StateMarks = field(default_factory=StateMarks)
    limits: TokenLimits = NO_LIMITS
    names_of: Callable[[BlockRun], Names] | None = None
    _keys: list[list[BlockKey]] = field(default_factory=list)
    _steps: list[int] = field(default_factory=list)
    _own: set[BlockKey] = field(default_factory=set)
    _own_hashes: int = 0

    def __post_init__(self) -> None:
        self._keys = [[] for _ in self.groups]
        base = base_block_tokens(self.groups)
        self._steps = [group.block_size_tokens // base for group in self.groups]
        self.restart_offload()

    @property
    def is_retired(self) -> bool:
        """Whether nothing of it moves any more."""
        return self.worth is Worth.RETIRED or self.worth is Worth.DISOWNED

    def restart_offload(self) -> None:
        """All blocks are to be considered (again): the request waits to be scheduled from its start."""
        self.next_offload = [self.foreign_tokens // group.block_size_tokens for group in self.groups]
        self.next_full_tokens = 0

    def keys(self, position: int) -> list[BlockKey]:
        """Keys of all full blocks of ``groups[position]`` that the chain knows so far. Not to be changed."""
        group, step, hashes = self.groups[position], self._steps[position], self.chain.hashes
        if step == 1 and not group.index:
            return cast("list[BlockKey]", hashes)  # block_key(digest, 0) is the digest
        keys = self._keys[position]
        if (len(keys) + 1) * step <= len(hashes):
            keys.extend(
                block_key(digest, group.index) for digest in hashes[(len(keys) + 1) * step - 1 :: step]
            )
        return keys

    def run(self, position: int, first: int, end: int) -> BlockRun:
        """Blocks ``first`` to ``end`` - 1 of ``groups[position]``, of those that are known so far."""
        keys, group = self.keys(position), self.groups[position]
        has_window = group.window_tokens is not None
        return BlockRun(keys, first, min(end, len(keys)), group.block_size_tokens, group.is_state, has_window)

    def runs(self, spans: Iterable[range]) -> list[BlockRun]:
        """``spans`` of blocks, one of each group; without those that are empty."""
        runs = (self.run(position, span.start, span.stop) for position, span in enumerate(spans))
        return [run for run in runs if run.first < run.end]

    def runs_from(self, first_tokens: int) -> list[BlockRun]:
        """The chains of all groups but those of states from there on, as far as they are known."""
        return self.runs(
            range(first_tokens // group.block_size_tokens, 0 if group.is_state else len(self.keys(position)))
            for position, group in enumerate(self.groups)
        )

    def considered_runs(self) -> list[BlockRun]:
        """The same, as far as their blocks were considered for offload."""
        return self.runs(
            range(0 if group.is_state else end)
            for group, end in zip(self.groups, self.next_offload, strict=True)
        )

    @property
    def num_keys(self) -> int:
        """How many keys all groups have so far."""
        return sum(len(self.chain.hashes) // step for step in self._steps)

    def own_keys(self) -> set[BlockKey]:
        """The keys of all groups but those of states as a set, which grows with the chain instead of being
        made anew. Not to be changed.
        """
        if self._own_hashes < len(self.chain.hashes):
            for position, step in enumerate(self._steps):
                if not self.groups[position].is_state:
                    self._own.update(self.keys(position)[self._own_hashes // step :])
            self._own_hashes = len(self.chain.hashes)
        return self._own

    def chain_keys(self) -> list[BlockKey]:
        """The keys of all groups in prefix order: a block that ends earlier comes first. With a key for each
        state that there may be.
        """
        if len(self.groups) == 1:
            return self.keys(0)
        ends: list[tuple[int, BlockKey]] = []
        for position, group in enumerate(self.groups):
            ends += (
                ((block + 1) * group.block_size_tokens, key) for block, key in enumerate(self.keys(position))
            )
        return [key for _, key in sorted(ends, key=lambda entry: entry[0])]
