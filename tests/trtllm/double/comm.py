"""MPI as far as connectors see it: broadcast and allgather among the rank processes of a ``World``."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from tests.trtllm.double.failure import PATIENCE_S, DoubleFailure

COLLECTIVE_S = PATIENCE_S + 40.0
"""A rank that waits longer than this in a collective has found a hang. No rank waits so long for something of
its own, and the one that does says more.
"""


@dataclass
class Comm:
    """This process's place among the ranks. Rank 0 has one link to each other rank, the others one to
    rank 0.
    """

    rank: int = 0
    size: int = 1
    links: list[Connection] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def allgather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank. Blocks until every rank is here."""
        if self.size == 1:
            return [value]
        with self.lock:
            if self.rank:
                self._send(self.links[0], "allgather", value)
                result: list[Any] = self._receive(self.links[0], "allgather")
                return result
            values = [value, *(self._receive(link, "allgather") for link in self.links)]
            for link in self.links:
                self._send(link, "allgather", values)
            return values

    def broadcast(self, value: Any, root: int = 0) -> Any:
        """The value of rank ``root``."""
        if self.size == 1:
            return value
        if root:
            return self.allgather(value)[root]
        with self.lock:
            if self.rank:
                return self._receive(self.links[0], "broadcast")
            for link in self.links:
                self._send(link, "broadcast", value)
            return value

    def end_job(self) -> None:
        """Raises on a rank that is still in a collective when another one has ended its job."""
        for link in self.links:
            self._send(link, "the end of its job", None)
        for link in self.links:
            self._receive(link, "the end of its job")

    def _send(self, link: Connection, operation: str, value: Any) -> None:
        link.send((operation, value))

    def _receive(self, link: Connection, operation: str) -> Any:
        if not link.poll(COLLECTIVE_S):
            raise DoubleFailure(
                f"rank {self.rank} waited {COLLECTIVE_S:.0f} s in {operation}: another rank is stuck"
            )
        theirs, value = link.recv()
        if theirs != operation:
            raise DoubleFailure(f"rank {self.rank} is at {operation} while another rank is at {theirs}")
        return value


_place = [Comm()]


def current() -> Comm:
    """This process's place; rank 0 of 1 outside a world."""
    return _place[0]


def use(comm: Comm) -> None:
    """Makes ``comm`` this process's place."""
    _place[0] = comm


def mpi_rank() -> int:
    """This process's rank."""
    return current().rank


def mpi_world_size() -> int:
    """How many ranks there are."""
    return current().size


def mpi_broadcast(obj: Any, root: int = 0) -> Any:
    """Rank ``root``'s object on every rank."""
    return current().broadcast(obj, root)


def mpi_allgather(obj: Any) -> list[Any]:
    """Every rank's object, by rank."""
    return current().allgather(obj)
