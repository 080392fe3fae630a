"""How a leader learns its workers: sizes in, number of slots out, readiness in.

Runs on the channel's thread; what the leader needs is handed over in ``inbox`` and ``found`` (deques, safe
between two threads). Until every worker is ready the tier has no slots: the engine serves, without hits.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.errors import ConfigError
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.observe.readiness import Readiness
from kvbm_core.runtime.messages import (
    PROTOCOL_VERSION,
    Ask,
    Configure,
    Hello,
    Here,
    Joined,
    Message,
    OfPeers,
    Order,
    Ready,
    Refused,
    Results,
    TierDirect,
    TierFound,
    TierRefused,
)
from kvbm_core.runtime.replicas import Replicas
from kvbm_core.storage.disk.allocate import DiskError
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.transfer.plan import JobResult, TierPlace
from kvbm_core.types import BlockKey

log = logging.getLogger("kvbm")


@dataclass(frozen=True, slots=True)
class SlotsReady:
    """Slots 0 .. ``slots``-1 are usable on every rank; ``block_bytes`` and the device tier's size for the
    log. ``fingerprint``: for names of blocks. ``head_shard_bytes``: of a block in stores that keep head
    shards, where the fingerprint is the same for any number of ranks; 0: they keep blocks as they are.
    """

    slots: int
    planned_slots: int
    block_bytes: int
    num_device_blocks: int
    fingerprint: str
    head_shard_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """One rank's word on one job."""

    rank: int
    result: JobResult


@dataclass(frozen=True, slots=True)
class Disabled:
    """The tier cannot be used; ``reason`` is one line."""

    reason: str


@dataclass(frozen=True, slots=True)
class SlotsFound:
    """Slots of a lower tier below ``end`` are usable on one rank; ``found``: what the newest of them hold."""

    tier: str
    rank: int
    end: int
    found: list[Found]


@dataclass(frozen=True, slots=True)
class TierOff:
    """A lower tier cannot be used; ``reason`` is one line."""

    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class TierReach:
    """Whether every rank that stores reads a lower tier straight into its device's memory from now on."""

    tier: str
    is_direct: bool


@dataclass(frozen=True, slots=True)
class RankReplaced:
    """A new process is this rank, without a block; jobs below ``first_job_id`` died with the old one."""

    rank: int
    first_job_id: int


LeaderEvent = SlotsReady | RankAnswer | Disabled | TierOff | TierReach | RankReplaced
PlanTier = Callable[[int, str], TierPlace]
"""``plan(bytes of a block over all ranks, fingerprint of the layout)``: where a lower tier is."""

ANSWER_WITHIN_S = 5.0
"""A process that lives answers an Ask at once; its channel's thread may have to wait for the interpreter."""


class Handshake:
    """``size_tier(bytes of a block over all ranks)`` answers the number of slots, or raises ConfigError.

    ``plans``: of the lower tiers, by name. ConfigError or DiskError: the engine serves without that one.

    A rank is the peer that said hello for it: what others say in its name is dropped and counted. Another
    process that says that it is this rank is refused, and nothing else happens, unless the first one has died
    and answers no more.

    Where several ranks have the same KV, one of them may store it for all (``Replicas``): sizes and
    fingerprints are those of the ranks that store.

    If not every rank is there after ``init_timeout_s``, one line in the log says which ones are missing, and
    ``on_overdue`` is called; who comes later is welcome all the same.

    ``engine``: where ranks of other engines can come too, which are refused and change nothing.
    """

    def __init__(
        self,
        world_size: int,
        size_tier: Callable[[int], int],
        plans: Mapping[str, PlanTier] | None = None,
        *,
        clock: Clock | None = None,
        init_timeout_s: float = math.inf,
        on_overdue: Callable[[], None] = lambda: None,
        engine: str = "",
    ) -> None:
        self.describe_missing: Callable[[list[int]], str] = lambda ranks: ""
        """What else is known of ranks that have not said hello."""
        self.inbox: deque[LeaderEvent] = deque()
        self.found: deque[SlotsFound] = deque()
        self.world_size = world_size
        self._size_tier = size_tier
        self._plans = dict(plans or {})
        self._places: dict[str, TierPlace] = {}
        self._hellos: dict[int, tuple[bytes, Hello]] = {}
        self._ready: dict[int, int] = {}
        self._num_slots: int | None = None
        self._answered = threading.Event()
        # Of tiers with slots, which ranks have looked through theirs; and whether all of all have.
        self._searched: dict[str, set[int]] = {}
        self._unsearched: set[str] = set()
        self._are_searched = threading.Event()
        # Which ranks read a tier straight into their devices' memory.
        self._direct: dict[str, set[int]] = {}
        self.foreign_total = 0
        self.next_job_id: Callable[[], int] = lambda: 0
        self.on_peers: Callable[[OfPeers], Message | None] = lambda message: None
        """Answers what a rank asks for other instances. On the channel's thread."""
        self._clock = clock or SystemClock()
        self._replicas = Replicas(self._clock)
        self._starts_at_s = self._clock.now_s()
        self._init_timeout_s = init_timeout_s
        self._on_overdue = on_overdue
        self._engine = engine
        self._is_overdue = False
        self._problem: str | None = None
        self._send: Callable[[bytes, Message], None] | None = None
        self._heard_at_s: dict[int, float] = {}
        # When a rank was asked whether it lives, because another process says that it is this rank.
        self._challenged_at_s: dict[int, float] = {}
        self._first_job_ids: dict[int, int] = {}
        self._log = RateLimitedLogger(log)

    # ---------------------------------------------------------------- for the leader, from its thread

    def connect(self, send: Callable[[bytes, Message], None]) -> None:
        """The channel is there: ``send(identity, message)`` reaches a worker and does not wait."""
        self._send = send

    def tell(self, rank: int, message: Message) -> bool:
        """Says something to one rank; False if nobody has said hello for it, or there is no channel yet."""
        peer = self._peer_of(rank)
        if peer is None or self._send is None:
            return False
        self._send(peer, message)
        return True

    def heard_at_s(self, rank: int) -> float:
        """When this rank said something last, on the clock; minus infinity if it never did."""
        return self._heard_at_s.get(rank, -math.inf)

    def wait(self, timeout_s: float) -> bool:
        """Waits, at start only, until the first slots are usable and what lower tiers hold is known;
        False, and a
        line in the log, if time ran out.

        Or until the tier is off. Both go on in the background.
        """
        starts_at_s = self._clock.now_s()
        is_over = self._answered.wait(timeout_s) and self._are_searched.wait(
            max(0.0, timeout_s - (self._clock.now_s() - starts_at_s))
        )
        if timeout_s and not is_over:
            line = "kvbm: not ready after %g s (%s); the engine serves without hits until it is"
            log.warning(
                line, timeout_s, self.readiness().reason or "lower tiers are still being looked through"
            )
        return is_over

    def missing_ranks(self) -> list[int]:
        """Those that have not said hello. Any thread."""
        return [rank for rank in range(self.world_size) if rank not in self._hellos]

    def readiness(self) -> Readiness:
        """Whether there are slots, or what they wait for. Any thread."""
        if self._problem is not None:
            return Readiness(False, f"the tier is off: {self._problem}")
        silent = self.missing_ranks()
        unready = [
            rank for rank in range(self.world_size) if rank in self._hellos and rank not in self._ready
        ]
        known = self.describe_missing(silent) if silent else ""
        parts = [f"{_named(silent)} not said hello{known and f': {known}'}"] if silent else []
        parts += [f"{_named(unready)} no memory yet"] if unready and not silent else []
        return Readiness(not parts, "; ".join(parts))

    # ---------------------------------------------------------------- on the channel's thread

    def on_tick(self) -> list[tuple[bytes, Message]]:
        """Time passes, whether or not anybody says anything; at least once a second."""
        waited_s = self._clock.now_s() - self._starts_at_s
        if not self._is_overdue and waited_s >= self._init_timeout_s and not self._answered.is_set():
            self._is_overdue = True
            log.error(
                "kvbm: not ready after DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS=%g (%s); the engine serves "
                "without the cache, which joins when they come: look for the first error of these workers",
                self._init_timeout_s,
                self.readiness().reason,
            )
            self._on_overdue()
        return self._meanwhile(self._replicas.tick)

    def on_message(self, identity: bytes, message: Message) -> list[tuple[bytes, Message]]:
        """Takes one message of one worker; returns the answers."""
        if isinstance(message, Hello):
            stranger = self._is_not_ours(message)
            if stranger is None:
                return self._hello(identity, message)
            self.foreign_total += 1
            self._log.warning(stranger, "kvbm: a worker is refused: it %s", stranger)
            return [(identity, Refused(message.rank, stranger))]
        if isinstance(message, Order) or not self._may_speak(identity, message):
            self.foreign_total += 1
            return []
        self._heard_at_s[message.rank] = self._clock.now_s()
        if isinstance(message, Refused):
            self._disable(f"worker {message.rank}: {message.reason}")
        elif isinstance(message, Joined):
            return self._meanwhile(partial(self._replicas.joined, message))
        elif isinstance(message, Ready):
            self._on_ready(message)
        elif isinstance(message, Results):
            self.inbox.extend(RankAnswer(message.rank, result) for result in message.results)
        elif isinstance(message, TierRefused):
            self.inbox.append(TierOff(message.tier, f"worker {message.rank}: {message.reason}"))
            self._stop_waiting_for(message.tier)
        elif isinstance(message, TierFound):
            self._on_tier_found(message)
        elif isinstance(message, TierDirect):
            self._on_tier_direct(message.rank, message.tier, message.is_direct)
        elif isinstance(message, OfPeers):
            answer = self.on_peers(message)
            return [(identity, answer)] if answer is not None else []
        return []

    def _may_speak(
        self,
        identity: bytes,
        message: Joined | Ready | Results | Here | Refused | TierFound | TierRefused | TierDirect | OfPeers,
    ) -> bool:
        peer = self._peer_of(message.rank)
        if isinstance(message, Refused) and peer is None:  # it cannot even say how large its blocks are
            return 0 <= message.rank < self.world_size and message.engine == self._engine
        return peer == identity

    def _on_tier_found(self, message: TierFound) -> None:
        place, ranks = self._places.get(message.tier), self._searched.get(message.tier, set())
        if place is None or message.rank in ranks:  # a process in a rank's place: what it has is known
            return
        records = zip(message.slots, message.keys, message.sequences, strict=True)
        found = [Found(slot, BlockKey(key), sequence) for slot, key, sequence in records]
        self.found.append(SlotsFound(message.tier, message.rank, message.end, found))
        if message.end >= place.num_slots:
            ranks.add(message.rank)
            if len(ranks) == len(self.storing_ranks):
                self._stop_waiting_for(message.tier)

    def _on_tier_direct(self, rank: int, tier: str, is_direct: bool) -> None:
        ranks = self._direct.setdefault(tier, set())
        were_all = len(ranks) == len(self.storing_ranks)
        (ranks.add if is_direct else ranks.discard)(rank)
        are_all = len(ranks) == len(self.storing_ranks)
        if were_all is not are_all:
            self.inbox.append(TierReach(tier, are_all))

    def _stop_waiting_for(self, tier: str) -> None:
        self._unsearched.discard(tier)
        if not self._unsearched:
            self._are_searched.set()

    @property
    def has_replaced(self) -> bool:
        """Whether a rank's memory is gone and the leader has not taken it in. On the channel's thread, while
        the leader does not poll.
        """
        return any(isinstance(event, RankReplaced) for event in self.inbox)

    def places_of(self, tier: str) -> int:
        """Slots of a lower tier on each rank that stores; 0 while that is not known."""
        place = self._places.get(tier)
        return 0 if place is None else place.num_slots

    def peers(self) -> list[bytes]:
        """The workers that said hello."""
        return [identity for identity, _ in self._hellos.values()]

    def storing_peers(self) -> list[bytes]:
        """Those of them that store."""
        return [self._hellos[rank][0] for rank in self._replicas.storing()]

    @property
    def storing_ranks(self) -> list[int]:
        """Those that store; all, until it is known that some do it for others."""
        return self._replicas.storing() or list(range(self.world_size))

    def _peer_of(self, rank: int) -> bytes | None:
        hello = self._hellos.get(rank)
        return hello[0] if hello is not None else None

    def _disable(self, reason: str) -> None:
        self._problem = self._problem or reason
        self.inbox.append(Disabled(reason))
        self._answered.set()
        self._are_searched.set()

    def _hello(self, identity: bytes, hello: Hello) -> list[tuple[bytes, Message]]:
        problem = self._problem_of(hello)
        peer = self._peer_of(hello.rank)
        if peer is not None and peer != identity:
            return self._rival(identity, hello, peer, problem)
        if problem is not None:
            if self._num_slots is None:  # else every rank is there, and this is none of them
                self._disable(f"worker {hello.rank} {problem}")
            return [(identity, Refused(hello.rank, problem))]
        self._hellos[hello.rank] = (identity, hello)
        self._heard_at_s[hello.rank] = self._clock.now_s()
        if self._num_slots is not None:
            return [(identity, self._configuration(self._num_slots, hello.rank))]
        if len(self._hellos) < self.world_size:
            return []
        ranks = [hello.rank]
        if not self._replicas.is_begun:
            self._replicas.begin([said for _, (_, said) in sorted(self._hellos.items())])
            ranks = sorted(self._hellos)
        invited = [(self._hellos[rank][0], self._replicas.invitation(rank)) for rank in ranks]
        return [(who, join) for who, join in invited if join is not None] or self._configure_all()

    def _meanwhile(self, news: Callable[[], None]) -> list[tuple[bytes, Message]]:
        """Takes in news of ranks that are to meet others; their answers, if it is settled now who stores."""
        was_settled = self._replicas.is_settled
        news()
        return [] if was_settled else self._configure_all()

    def _configure_all(self) -> list[tuple[bytes, Message]]:
        if not self._replicas.is_settled:
            return []
        try:
            self._num_slots = self._size_tier(self._block_bytes())
        except ConfigError as error:
            self._disable(str(error))
            return [(who, Refused(rank, str(error))) for rank, (who, _) in self._hellos.items()]
        self._plan_tiers()
        return [(who, self._configuration(self._num_slots, rank)) for rank, (who, _) in self._hellos.items()]

    def _is_not_ours(self, hello: Hello) -> str | None:
        """Why it is no rank of this engine, where others can come too; None if it is one."""
        if not self._engine:
            return None
        if hello.protocol != PROTOCOL_VERSION:
            return self._problem_of(hello)
        if hello.engine != self._engine:
            return f"is rank {hello.rank} of engine {hello.engine!r}, this leader is of {self._engine!r}"
        return self._wrong_size(hello)

    def _wrong_size(self, hello: Hello) -> str | None:
        if hello.world_size != self.world_size or not 0 <= hello.rank < self.world_size:
            return f"is rank {hello.rank} of {hello.world_size}, the leader expects {self.world_size} ranks"
        return None

    def _plan_tiers(self) -> None:
        for name, plan in self._plans.items():
            try:
                place = plan(self._block_bytes(), self._fingerprint())
                self._places[name] = place if place.num_slots else replace(place, head_shards=self._heads())
            except (ConfigError, DiskError) as error:
                self.inbox.append(TierOff(name, str(error.args[-1])))
        self._searched = {name: set() for name, place in self._places.items() if place.num_slots}
        self._unsearched = set(self._searched)
        if not self._unsearched:
            self._are_searched.set()

    def _rival(
        self, identity: bytes, hello: Hello, peer: bytes, problem: str | None
    ) -> list[tuple[bytes, Message]]:
        """Another process says that it is a rank we know. Whether that one lives is asked first; the other
        one says hello again meanwhile.
        """
        rank, now_s = hello.rank, self._clock.now_s()
        asked_at_s = self._challenged_at_s.get(rank, -math.inf)
        if problem is None and now_s - asked_at_s > 3 * ANSWER_WITHIN_S:  # never, or of another one
            self._challenged_at_s[rank] = now_s
            return [(peer, Ask([], is_last=False))]
        if problem is None and self.heard_at_s(rank) <= asked_at_s:
            if now_s - asked_at_s < ANSWER_WITHIN_S:
                return []
            del self._challenged_at_s[rank]
            return self._replace(identity, hello)
        self._challenged_at_s.pop(rank, None)
        self.foreign_total += 1
        reason = problem or f"is there already as rank {rank}: end one of the two"
        self._log.warning("rival", "kvbm: another process that says that it is rank %d is refused", rank)
        return [(identity, Refused(rank, reason))]

    def _replace(self, identity: bytes, hello: Hello) -> list[tuple[bytes, Message]]:
        """A rank's process has died, and another one is in its place: its memory is empty."""
        rank, (_, old) = hello.rank, self._hellos[hello.rank]
        self._hellos[rank] = (identity, hello)
        self._heard_at_s[rank] = self._clock.now_s()
        self._ready.pop(rank, None)
        if self._num_slots is None:  # at most it was joining others
            return self._meanwhile(partial(self._replicas.left, rank))
        same = (old.fingerprint, old.block_bytes, old.num_device_blocks, old.head_shards)
        now = (hello.fingerprint, hello.block_bytes, hello.num_device_blocks, hello.head_shards)
        if self._replicas.is_shared(rank) or same != now:
            reason = f"rank {rank} was started anew and does not fit in its old place; restart the engine"
            self._disable(reason)
            return [(identity, Refused(rank, reason))]
        log.warning("kvbm: a new process is rank %d; the host tier starts empty", rank)
        for tier in self._direct:  # of the old process
            self._on_tier_direct(rank, tier, False)
        self._first_job_ids[rank] = first_job_id = self.next_job_id()
        self.inbox.append(RankReplaced(rank, first_job_id))
        join, configure = self._replicas.join_of(rank), self._configuration(self._num_slots, rank)
        return [(identity, configure)] if join is None else [(identity, join), (identity, configure)]

    def _configuration(self, num_slots: int, rank: int) -> Configure:
        places, first = tuple(self._places.values()), self._first_job_ids.get(rank, 0)
        return Configure(num_slots, places, first, is_shared=self._replicas.are_shared)

    def _fingerprint(self) -> str:
        return "-".join(self._hellos[rank][1].fingerprint for rank in self._replicas.naming())

    def _heads(self) -> str:
        """What all that store say that their blocks mean as head shards; empty if one of them does not."""
        meanings = {self._hellos[rank][1].head_shards for rank in self._replicas.storing()}
        return meanings.pop() if len(meanings) == 1 else ""

    def _problem_of(self, hello: Hello) -> str | None:
        if hello.protocol != PROTOCOL_VERSION:
            return (
                f"speaks protocol {hello.protocol}, the leader {PROTOCOL_VERSION}; install one "
                "kvbm everywhere"
            )
        if (wrong_size := self._wrong_size(hello)) is not None:
            return wrong_size
        if hello.block_bytes <= 0 or hello.num_device_blocks <= 0:
            return f"has blocks of {hello.block_bytes} bytes, {hello.num_device_blocks} of them"
        return None

    def _on_ready(self, ready: Ready) -> None:
        self._ready[ready.rank] = max(ready.ready_slots, self._ready.get(ready.rank, 0))
        if self._num_slots is None or len(self._ready) < self.world_size:
            return
        self.inbox.append(
            SlotsReady(
                slots=min(*self._ready.values(), self._num_slots),
                planned_slots=self._num_slots,
                block_bytes=self._block_bytes(),
                num_device_blocks=min(hello.num_device_blocks for _, hello in self._hellos.values()),
                fingerprint=self._heads() or self._fingerprint(),
                head_shard_bytes=self._hellos[0][1].head_shard_bytes if self._heads() else 0,
            )
        )
        self._answered.set()

    def _block_bytes(self) -> int:
        return sum(self._hellos[rank][1].block_bytes for rank in self._replicas.storing())


def _named(ranks: list[int]) -> str:
    """The subject of a sentence that goes on."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers} has" if len(ranks) == 1 else f"ranks {numbers} have"
