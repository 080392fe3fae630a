"""One engine whose ranks are processes of their own, perhaps on other hosts; the leader is in this process.

Leader, workers, channel, keys, disk and etcd are the product's and real; device memory is numpy's.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.assembly import LeaderProcess, leader_options, rank_options
from kvbm_core.runtime.endpoint import endpoint_apart
from kvbm_core.runtime.worker import Worker
from kvbm_core.testing.executor_bench import two_group_memory
from kvbm_core.testing.leader_bench import ROOT
from kvbm_core.transfer.plan import TransferPlan
from tests.engines.hosts import Host, see_instead
from tests.unit.test_worker import GROUPS, PROMPT, content

LONG_S = 120.0
NAME = "engine-apart"
NUM_TOKENS = 20
TABLES = [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]]
ELSEWHERE = [[7, 8, 9, 10, 11], [11, 10, 9, 8, 7]]
Overrides = dict[str, object]


@dataclass
class Place:
    """Where a rank runs. ``disk``: what it sees at the folder of the same setting; None: what all see."""

    overrides: Overrides
    host: Host | None = None
    disk: Path | None = None
    name: str = NAME


def expected_of(rank: int) -> list[bytes]:
    """The blocks of PROMPT on this rank."""
    memory = two_group_memory(seed=rank + 1)
    return [content(memory, group, block) for group in (0, 1) for block in TABLES[group]]


def run_rank(commands: Connection, rank: int, world_size: int, place: Place) -> None:
    """A rank's process."""
    if place.disk is not None:
        see_instead(Path(str(place.overrides["disk_cache_dir"])), place.disk)
    if place.host is not None:
        place.host.enter()
    settings = KvbmSettings.from_env(place.overrides)
    endpoint = endpoint_apart(settings, place.name, 0)
    assert endpoint is not None
    memory = two_group_memory(seed=rank + 1)
    worker = Worker(rank, world_size, endpoint, rank_options(settings))
    worker.register(memory, f"layout{rank}")
    with suppress(EOFError):
        while True:
            what, argument = commands.recv()
            if what == "submit":
                worker.submit(argument)
            elif what == "wipe":
                for storage in memory.storages:
                    storage[:] = 0
            elif what == "state":
                commands.send((worker.is_ready, worker._is_refused))
            else:
                commands.send([content(memory, g, block) for g in (0, 1) for block in argument[g]])
    worker.close()


@dataclass
class Rank:
    """A rank's process, as its starter has it."""

    number: int
    world_size: int
    place: Place
    pipe: Any = field(init=False)
    process: Any = field(init=False)

    def __post_init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        arguments = (theirs, self.number, self.world_size, self.place)
        self.process = spawn.Process(target=run_rank, args=arguments)
        self.process.start()
        theirs.close()

    def ask(self, what: str, argument: object = None) -> Any:
        self.pipe.send((what, argument))
        assert self.pipe.poll(LONG_S)
        return self.pipe.recv()

    def tell(self, what: str, argument: object = None) -> None:
        with suppress(BrokenPipeError):
            self.pipe.send((what, argument))

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def close(self) -> None:
        self.pipe.close()
        self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join(10)


class ApartEngine:
    """A context manager. ``places``: of its ranks."""

    def __init__(self, overrides: Overrides, places: list[Place]) -> None:
        settings = KvbmSettings.from_env(overrides)
        endpoint = endpoint_apart(settings, NAME, 0)
        assert endpoint is not None
        self.metrics = Metrics()
        self.places = places
        self.process = LeaderProcess(
            settings, self.metrics, endpoint, world_size=len(places), model="model", engine_name="apart"
        )
        self.outcomes: list[Outcome] = []
        self.leader = self.process.make_leader(
            GROUPS,
            leader_options(settings, share_loads=False),
            on_onboard_end=lambda part, outcome: self.outcomes.append(outcome),
        )
        self.ranks: list[Rank] = []
        self._requests = 0

    def __enter__(self) -> ApartEngine:
        for number in range(len(self.places)):
            self.start(number)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.close()
        self.process.close()

    def start(self, number: int) -> None:
        """A process for this rank, in the place of the one that it had."""
        rank = Rank(number, len(self.places), self.places[number])
        if number < len(self.ranks):
            self.ranks[number].close()
            self.ranks[number] = rank
        else:
            self.ranks.append(rank)

    def wait_for(self, holds: Callable[[], bool], timeout_s: float = LONG_S) -> None:
        """Polls the leader, as an engine's steps do."""
        ends_at_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < ends_at_s, self.leader.readiness()
            time.sleep(0.01)
            self.leader.poll()

    def wait_ready(self) -> None:
        self.wait_for(lambda: self.leader.readiness().is_ready and self.leader.chain.host.capacity_blocks > 0)

    def offload(self) -> None:
        """Stores PROMPT, as each rank's memory has it."""
        state = self._open()
        self.leader.offload(state, PROMPT, 0, NUM_TOKENS, TABLES)
        job = self.leader.take_offloads()
        if job is not None:
            self._submit(job.plan())
        self.wait_for(lambda: self.leader.pending_jobs == 0)
        self.leader.finish(state)

    def onboard(self) -> int:
        """Loads what there is of PROMPT, elsewhere; how many tokens came. They are checked on every rank."""
        state = self._open()
        try:
            found = self.leader.match(state, PROMPT, 0, NUM_TOKENS) or 0
            if not found:
                return 0
            self._submit(self.leader.onboard(state, found, ELSEWHERE))
            self.wait_for(lambda: self.leader.pending_jobs == 0)
            if self.outcomes[-1] is not Outcome.OK:
                return 0
            if found == NUM_TOKENS:
                for rank in self.ranks:
                    assert rank.ask("content", ELSEWHERE) == expected_of(rank.number), rank.number
            return found
        finally:
            self.leader.finish(state)

    def _open(self) -> Any:
        self._requests += 1
        return self.leader.open(f"request-{self._requests}", ROOT, None)

    def _submit(self, plan: TransferPlan | None) -> None:
        assert plan is not None
        for rank in self.ranks:
            rank.tell("submit", plan)


def in_process(target: Callable[..., None], *arguments: object, patience_s: float = 240.0) -> None:
    """Runs ``target`` in a process of its own, which may enter a host, and fails as it does."""
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=target, args=arguments)
    process.start()
    process.join(patience_s)
    if process.is_alive():
        process.kill()
    assert process.exitcode == 0, f"{target.__name__} failed: {process.exitcode}"


def own_environment() -> None:
    """No setting from outside."""
    for variable in KvbmSettings.env_names().values():
        os.environ.pop(variable, None)
