"""The rank processes, and jobs that run on all of them in lock step."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from tests.trtllm.double import comm
from tests.trtllm.double.contract import installed
from tests.trtllm.double.failure import PATIENCE_S, DoubleFailure

PRELOADED = ["torch", "tests.trtllm.harness"]
"""Imported by one process, out of which all ranks are forked: torch alone takes two seconds."""


class World:
    """``num_ranks`` ranks with TensorRT-LLM of one contract version.

    One rank is this process; more are started at the first job and kept for the next. A job is a function of
    a module and arguments that can be pickled; it gets the rank first and imports adapters itself, so that
    they see the version. Jobs of one world run one after the other.
    """

    def __init__(self, version: str, num_ranks: int = 1) -> None:
        self.version = version
        self.num_ranks = num_ranks
        self._stack = ExitStack()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> World:
        if self.num_ranks == 1:
            self._stack.enter_context(installed(self.version))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._stop(is_kind=kind is None)

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """What the job returned on each rank, by rank.

        Raises the first failure of any rank, as DoubleFailure with that rank's traceback; the ranks are then
        replaced, as they are where a test's time limit interrupts this. In this process (one rank) exceptions
        go through as they are.
        """
        if self.num_ranks == 1:
            return [job(0, *args)]
        if not self._processes:
            self._spawn()
        for pipe in self._pipes:
            pipe.send((job, args))
        results: dict[int, Any] = {}
        try:
            while len(results) < self.num_ranks:
                rank, is_ok, value = self._next_result(set(range(self.num_ranks)) - results.keys())
                if not is_ok:
                    raise DoubleFailure(f"rank {rank} failed:\n{value}")
                results[rank] = value
        except BaseException:
            self._stop(is_kind=False)
            raise
        return [results[rank] for rank in range(self.num_ranks)]

    def _next_result(self, ranks: set[int]) -> tuple[int, bool, Any]:
        """(rank, whether it went well, result or traceback) of the next rank to answer."""
        pipes = {self._pipes[rank]: rank for rank in ranks}
        pipe = wait(list(pipes))[0]
        assert isinstance(pipe, Connection)
        try:
            is_ok, value = pipe.recv()
        except EOFError:
            is_ok, value = False, "the process ended"
        return pipes[pipe], is_ok, value

    def _spawn(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        links = [context.Pipe() for _ in range(self.num_ranks - 1)]
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            mine = [link[0] for link in links] if rank == 0 else [links[rank - 1][1]]
            arguments = (self.version, rank, self.num_ranks, theirs, mine)
            process = context.Process(target=_serve, args=arguments, name=f"rank-{rank}", daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        for link in links:
            link[0].close()
            link[1].close()

    def _stop(self, *, is_kind: bool) -> None:
        """Ends the processes; those that may be stuck are not asked."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            if not is_kind:
                process.kill()
            process.join(PATIENCE_S)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes, self._pipes = [], []


def _serve(version: str, rank: int, size: int, pipe: Connection, links: list[Connection]) -> None:
    """A rank process: runs jobs until the pipe closes."""
    import torch

    torch.set_num_threads(1)
    comm.use(comm.Comm(rank, size, links))
    with installed(version):
        while True:
            try:
                job, args = pipe.recv()
            except EOFError:
                return
            try:
                answer = (True, job(rank, *args))
                comm.current().end_job()
            except Exception:
                answer = (False, traceback.format_exc())
            try:
                pipe.send(answer)
            except Exception:
                pipe.send((False, f"the job's result cannot be sent:\n{traceback.format_exc()}"))
