"""Ranks that have the same KV (MLA): which of them store it, and for which others (DYN_KVBM_NCCL_MLA_MODE).

Ranks with the same part of the KV on one machine are a set: its first rank stores, and sends what it loads to
the others. They meet before anything is sized. If they cannot, on any machine, each rank stores its own copy.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.runtime.messages import Hello, Join, Joined
from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.transfer.executors.broadcast_group import Group, GroupError, MeetingPoint, loopback_name
from kvbm_core.transfer.executors.broadcast_join import Joining

log = logging.getLogger("kvbm")

LOAD_GRACE_S = 60.0
"""What a load may take once it has started; other ranks that wait for it give up after that."""
JOIN_WITHIN_S = 60.0
"""A rank that cannot join says so within half of it; one that is silent for longer is waited for no more."""
NOT_ALIKE = (
    "kvbm: DYN_KVBM_NCCL_MLA_MODE is set, but it is for MLA models with tensor parallelism, whose ranks "
    "have the same KV: here each rank stores and loads its own"
)
"""What an adapter that knows it says."""


def why_apart(hellos: Sequence[Hello]) -> str:
    """What keeps ranks of which some say what part they have from sharing: the middle of a line; "" if
    nothing.
    """
    silent = [hello.rank for hello in hellos if not hello.part]
    if silent:
        return f"it is not set on ranks {silent} of {len(hellos)}, or the KV there is another"
    first_of: dict[str, Hello] = {}
    for hello in hellos:
        first = first_of.setdefault(hello.part, hello)
        if _meaning(hello) != _meaning(first):
            return f"the KV blocks of rank {hello.rank} are not those of rank {first.rank}"
    return ""


def _meaning(hello: Hello) -> tuple[object, ...]:
    return hello.fingerprint, hello.block_bytes, hello.num_device_blocks


def sets_of(hellos: Sequence[Hello]) -> list[Join]:
    """The sets, in the order of their first ranks; sets on several machines with the same part have the same
    shard.
    """
    parts = list(dict.fromkeys(hello.part for hello in hellos))
    members: dict[tuple[str, str], list[Hello]] = {}
    for hello in hellos:
        members.setdefault((hello.part, hello.machine), []).append(hello)
    return [
        Join(tuple(hello.rank for hello in same), same[0].broadcast_address, parts.index(part), len(parts))
        for (part, _), same in members.items()
    ]


class Replicas:
    """Asks the ranks to meet, and decides: the leader's side, or without a leader the same on each rank, of
    which one ``is_heard``: what it says is in the log. One thread only.
    """

    def __init__(self, clock: Clock, *, is_heard: bool = True) -> None:
        self._clock = clock
        self._is_heard = is_heard
        self._ranks: list[int] = []
        self._joins: dict[int, Join] = {}
        self._joined: set[int] = set()
        self._ends_at_s = math.inf
        self.is_begun = False
        self.are_shared = False

    @property
    def is_settled(self) -> bool:
        """Whether it is known which ranks store."""
        return self.is_begun and (self.are_shared or not self._joins)

    def begin(self, hellos: Sequence[Hello]) -> None:
        """Every rank has said hello: those in ``hellos``, by their numbers."""
        self.is_begun = True
        self._ranks = [hello.rank for hello in hellos]
        if not any(hello.part for hello in hellos):
            return
        if reason := why_apart(hellos):
            self.give_up(reason)
            return
        self._joins = {rank: join for join in sets_of(hellos) for rank in join.ranks}
        self._ends_at_s = self._clock.now_s() + JOIN_WITHIN_S

    def join_of(self, rank: int) -> Join | None:
        """Whom this rank is to meet, or has met; None if nobody."""
        return self._joins.get(rank)

    def invitation(self, rank: int) -> Join | None:
        """As ``join_of``, while that is not settled."""
        return None if self.is_settled else self.join_of(rank)

    def joined(self, *messages: Joined) -> None:
        """The words of some ranks."""
        if not self._joins or self.are_shared:
            return
        problems = [f"rank {said.rank}: {said.problem}" for said in messages if said.problem]
        if problems:
            self.give_up("; ".join(problems))
            return
        self._joined.update(said.rank for said in messages)
        self.are_shared = self._joined >= self._joins.keys()
        sets = dict.fromkeys(self._joins.values())
        if self.are_shared and len(sets) < len(self._ranks):
            level = logging.INFO if self._is_heard else logging.DEBUG
            whom = " and for ".join(str([*join.ranks]) for join in sets)
            log.log(level, "kvbm: KV is stored once for ranks %s", whom)

    def left(self, rank: int) -> None:
        """Another process is this rank now. Whom the old one was to meet would wait for it."""
        if not self.is_settled and rank in self._joins:
            self.give_up(f"rank {rank} was started anew meanwhile")

    def tick(self) -> None:
        """Time passes."""
        if self._joins and not self.are_shared and self._clock.now_s() >= self._ends_at_s:
            silent = sorted(self._joins.keys() - self._joined)
            self.give_up(f"ranks {silent} did not join within {JOIN_WITHIN_S:g} s")

    def give_up(self, reason: str) -> None:
        """Each rank stores its own copy."""
        self._joins = {}
        log.log(
            logging.WARNING if self._is_heard else logging.DEBUG,
            "kvbm: DYN_KVBM_NCCL_MLA_MODE is set, but KV cannot be stored once for all ranks (%s): each rank "
            "stores and loads its own copy, and as many fewer blocks fit",
            reason,
        )

    def is_shared(self, rank: int) -> bool:
        """Whether this rank stores for others, or another one for it."""
        return self.num_like(rank) > 1

    def num_like(self, rank: int) -> int:
        """How many ranks of this machine have one copy together with this one."""
        join = self._joins.get(rank)
        return 1 if join is None else len(join.ranks)

    def storing(self) -> list[int]:
        """The ranks that store."""
        return [rank for rank in self._ranks if not self._joins or self._joins[rank].ranks[0] == rank]

    def naming(self) -> list[int]:
        """Of those that store, one for each part of the KV: what blocks are called does not depend on the
        number of machines.
        """
        if not self._joins:
            return self._ranks
        first_of: dict[int, int] = {}
        for rank in self.storing():
            first_of.setdefault(self._joins[rank].shard, rank)
        return [*first_of.values()]


@dataclass(frozen=True, slots=True)
class Role:
    """``shard``: what this rank stores, as (number, of how many); None if another rank stores for it.
    ``group``: which it shares loads in, connected.
    """

    shard: tuple[int, int] | None
    group: Group | None


class ReplicaRank:
    """A worker's side. ``part``: which part of the KV it has, see Hello; empty: it shares nothing.

    ``deadline_s``: when a load is given up that has not started. One thread, but for ``close``; ``send`` is
    called from any.
    """

    def __init__(
        self, rank: int, max_ctas: int | None, deadline_s: float, send: Callable[[Joined], None]
    ) -> None:
        self._rank = rank
        self._max_ctas = max_ctas
        self._load_timeout_s = deadline_s + LOAD_GRACE_S
        self._send = send
        self._point: MeetingPoint | None = None
        self._join: Join | None = None
        self._joining: Joining | None = None
        self.part = ""
        self.machine = ""

    def open(self, part: str) -> None:
        """What this rank says of itself is known."""
        self.part = part
        if part:
            self.machine = loopback_name()
            self._point = MeetingPoint()

    @property
    def address(self) -> str:
        """Where others would meet, if this is the first of its set."""
        return "" if self._point is None else self._point.address

    def invited(self, join: Join, memory: DeviceMemory) -> None:
        """Begins to join; answers a second time what has been answered."""
        if self._join is None:
            self._join = join
            point = self._point
            if point is not None and join.ranks[0] != self._rank:
                self._discard_point()
                point = None
            if len(join.ranks) > 1:
                group = Group(
                    self._rank,
                    join.ranks,
                    join.address,
                    point,
                    load_timeout_s=self._load_timeout_s,
                    max_ctas=self._max_ctas,
                )
                self._joining = Joining(group, memory, self._ended)
                return
            self._discard_point()
        problem = "" if self._joining is None else self._joining.problem
        if problem is not None:
            self._ended(problem)

    def _ended(self, problem: str) -> None:
        self._send(Joined(self._rank, problem))

    def decided(self, world_size: int, *, are_shared: bool) -> Role:
        """What the leader has said. GroupError if this rank is not in its group any more."""
        join, joining = self._join, self._joining
        if not are_shared or join is None:
            if joining is not None:
                joining.give_up()
            self._discard_point()
            return Role((self._rank, world_size), None)
        shard = (join.shard, join.num_shards) if join.ranks[0] == self._rank else None
        if joining is None:
            return Role(shard, None)
        group = joining.take()
        if group is None:
            raise GroupError("this rank has left those that it was to share blocks with")
        return Role(shard, group)

    def close(self) -> None:
        """What was not taken over by a role ends."""
        if self._joining is not None:
            self._joining.close()
        self._discard_point()

    def _discard_point(self) -> None:
        point, self._point = self._point, None
        if point is not None and self._joining is None:  # else it is the group's
            point.close()
            point.discard()


def meet(
    hello: Hello,
    replica: ReplicaRank,
    answers: SimpleQueue[Joined],
    memory: DeviceMemory | None,
    exchange: Callable[[Any], list[Any]],
) -> tuple[Replicas, Role]:
    """Where there is no leader: all ranks call it, tell each other who they are, join, and decide alike.

    ``exchange``: a collective; what each rank gives it, in their order. ``answers``: where ``replica`` puts
    its word. Waits for JOIN_WITHIN_S at most, but for the collective. GroupError: see ReplicaRank.decided.
    """
    replicas = Replicas(SystemClock(), is_heard=hello.rank == 0)
    replicas.begin(exchange(hello))
    join = replicas.join_of(hello.rank)
    if join is not None and memory is not None:
        replica.invited(join, memory)
        try:
            mine = answers.get(timeout=JOIN_WITHIN_S)
        except Empty:
            mine = Joined(hello.rank, f"it did not join within {JOIN_WITHIN_S:g} s")
        replicas.joined(*exchange(mine))
    return replicas, replica.decided(hello.world_size, are_shared=replicas.are_shared)
