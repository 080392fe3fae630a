"""How the leader and the workers of one engine find each other: TensorRT-LLM makes both at once and
introduces nobody.

Leader and first worker live in one process, made by two threads at the same time: the n-th leader of a
process belongs to its n-th worker. The other ranks' workers hear the engine's name through TensorRT-LLM's own
broadcast.
"""

from __future__ import annotations

import os
import secrets
import threading
from typing import TYPE_CHECKING, Any, Protocol

from kvbm_core.runtime.endpoint import SECRET_BYTES
from kvbm_trtllm.config import uses_attention_dp, world_size_of

if TYPE_CHECKING:
    from kvbm_core.tiers.groups import GroupSpec


class LeaderPart(Protocol):
    """What a worker in the leader's process has of it."""

    def begin(self, groups: tuple[GroupSpec, ...], *, is_told: bool) -> None:
        """The engine's layer groups are known; before any worker says hello.

        ``is_told``: TensorRT-LLM has said how many tokens a block holds.
        """

    def wait(self) -> None:
        """At start: until the first slots are usable, or time is up."""

    def poll(self) -> None:
        """Takes in what workers have said; on the executor's loop thread, in each of its iterations, idle
        ones too.
        """


class Meeting:
    """One engine in this process. ``leader`` is there once its constructor has run, which may be later than
    ours.

    ``engine_id`` is the engine's secret too: whoever knows it is one of the engine's ranks.
    """

    def __init__(self, number: int) -> None:
        self.engine_id = f"trtllm {os.getpid()} {number} {secrets.token_hex(SECRET_BYTES)}"
        self.leader: LeaderPart | None = None


_lock = threading.Lock()
_meetings: dict[int, Meeting] = {}
_arrived = {"leader": 0, "worker": 0}


def meet(role: str) -> Meeting:
    """The meeting of the next leader or worker ("leader", "worker") of this process. Any thread."""
    with _lock:
        number = _arrived[role]
        _arrived[role] += 1
        meeting = _meetings.pop(number, None)
        if meeting is None:  # the first of the two
            meeting = _meetings[number] = Meeting(number)
        return meeting


def rank_of(llm_args: Any) -> int:
    """This process's rank among those that hold shards of the same blocks."""
    from tensorrt_llm import mpi_rank

    return 0 if uses_attention_dp(llm_args) else int(mpi_rank())


def data_parallel_rank_of(llm_args: Any) -> int:
    """Which of several engines with blocks of their own this process is."""
    from tensorrt_llm import mpi_rank

    return int(mpi_rank()) if uses_attention_dp(llm_args) else 0


def name_of_engine(llm_args: Any, meeting: Meeting | None) -> str:
    """The same in all ranks. ``meeting``: on rank 0. A collective of all workers; call it before anything can
    fail.
    """
    if world_size_of(llm_args) == 1:
        return meeting.engine_id if meeting is not None else ""
    from tensorrt_llm._utils import mpi_broadcast

    return str(mpi_broadcast(meeting.engine_id if meeting is not None else None, root=0))
