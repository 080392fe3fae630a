"""A real worker and a real channel on one socket, with numpy device memory and the executor for CPUs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import Clock, ManualClock, SystemClock
from kvbm_core.errors import Outcome, StuckCopyError
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.runtime import worker as worker_module
from kvbm_core.runtime.channel import LeaderChannel
from kvbm_core.runtime.endpoint import Endpoint
from kvbm_core.runtime.handshake import Disabled, Handshake, RankAnswer, SlotsReady
from kvbm_core.runtime.leader import Leader, LeaderParts
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.runtime.messages import Ask, Configure, Hello, Here, Message, Ready, Results
from kvbm_core.runtime.step_offloads import StepOffloads
from kvbm_core.runtime.transfer_jobs import TransferJob
from kvbm_core.runtime.worker import Worker
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.storage.memory_room import MemoryRoom
from kvbm_core.testing.executor_bench import two_group_memory
from kvbm_core.testing.leader_bench import ROOT
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.transfer import rank as rank_module
from kvbm_core.transfer.executor import DeviceMemory, Executor
from kvbm_core.transfer.plan import GroupMove, JobResult, TransferPlan
from kvbm_core.transfer.rank import RankOptions
from kvbm_core.types import Direction, Tier

LONG_S = 120.0
NUM_SLOTS = 24
GROUPS = (GroupSpec(0, 4), GroupSpec(1, 4))
PROMPT = list(range(21))  # five full blocks


class Gate:
    """An executor that starts nothing while it is shut; then a job can be cancelled, or waited for in
    vain.
    """

    def __init__(self, inner: Executor, worker: Worker) -> None:
        self.inner, self._worker = inner, worker
        self.is_shut = False
        self.is_running = False
        self.held: dict[int, TransferPlan] = {}
        self.submitted: list[int] = []

    def submit(self, plan: TransferPlan, *, deadline_s: float | None = None) -> None:
        self.submitted.append(plan.job_id)
        if self.is_shut:
            self.held[plan.job_id] = plan
        else:
            self.inner.submit(plan, deadline_s=deadline_s)

    def open(self) -> None:
        self.is_shut = False
        for plan in list(self.held.values()):
            self.inner.submit(self.held.pop(plan.job_id))

    def cancel(self, job_id: int) -> bool:
        if job_id not in self.held or self.is_running:
            return self.inner.cancel(job_id)
        del self.held[job_id]
        self._worker._finished(JobResult(job_id, Outcome.REJECTED, 0, 0.0, 0.0))
        return True

    def wait(self, job_ids: Collection[int] | None, timeout_s: float) -> bool:
        held = self.held if job_ids is None else set(job_ids) & set(self.held)
        return not held and self.inner.wait(job_ids, timeout_s)

    def close(self) -> None:
        self.inner.close()


class Engine:
    """A leader and its workers, as in one process of an engine, without the engine."""

    def __init__(
        self,
        folder: Path,
        ranks: int = 1,
        num_slots: int = NUM_SLOTS,
        register: bool = True,
        *,
        endpoint: Endpoint | None = None,
        clock: Clock | None = None,
    ) -> None:
        path = folder / "s.sock"
        self.endpoint = endpoint or Endpoint(f"ipc://{path}", path, secret=b"s")
        clock = clock or SystemClock()
        self.handshake = Handshake(ranks, lambda block_bytes: num_slots, clock=clock)
        self.tier = BlockTier(Tier.HOST, LruPolicy(), clock)
        self.leader = Leader(
            GROUPS,
            self.tier,
            self.handshake,
            clock=clock,
            metrics=Metrics(),
            options=LeaderOptions(),
            parts=LeaderParts(),
        )
        self.news = threading.Condition()
        self.channel = LeaderChannel(self.endpoint, self._on_message)
        self.handshake.connect(self.channel.send)
        self.memories = [two_group_memory(seed=rank + 1) for rank in range(ranks)]
        self.gates: dict[int, Gate] = {}
        self.workers = [Worker(rank, ranks, self.endpoint, RankOptions(verify=True)) for rank in range(ranks)]
        for worker, memory in zip(self.workers, self.memories, strict=True):
            worker.wrap_executor(self._wrapper(worker))
            if register:
                worker.register(memory, f"layout{worker.rank}")

    def submit_offloads(self) -> None:
        job = self.leader.take_offloads()
        self.submit(None if job is None else job.plan())

    def _wrapper(self, worker: Worker) -> Callable[[Executor], Executor]:
        def wrap(inner: Executor) -> Executor:
            self.gates[worker.rank] = Gate(inner, worker)
            return self.gates[worker.rank]

        return wrap

    def _on_message(self, identity: bytes, message: object) -> list[tuple[bytes, object]]:
        answers = self.handshake.on_message(identity, message)
        with self.news:
            self.news.notify_all()
        return answers

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = LONG_S) -> None:
        """Polls the leader after each message until ``condition`` holds."""

        def holds() -> bool:
            self.leader.poll()
            return condition()

        with self.news:
            assert self.news.wait_for(holds, timeout_s), "what was waited for did not come"

    def wait_for_tick(self, condition: Callable[[], bool]) -> None:
        """As ``wait_for``, for what no message tells: looks every few milliseconds."""

        def holds() -> bool:
            self.leader.poll()
            return condition()

        ends_at_s = time.monotonic() + LONG_S
        with self.news:
            while not holds():
                assert time.monotonic() < ends_at_s, "what was waited for did not come"
                self.news.wait(0.005)

    def submit(self, plan: TransferPlan | None) -> TransferPlan:
        assert plan is not None
        for worker in self.workers:
            worker.submit(plan)
        return plan

    def settle(self) -> None:
        self.wait_for(lambda: self.leader.pending_jobs == 0)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.channel.close()


def content(memory: DeviceMemory, group: int, block: int) -> bytes:
    regions = memory.views[group].regions(block)
    return b"".join(memory.storages[s][o : o + n].tobytes() for s, o, n in regions)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    made.wait_for(lambda: made.tier.capacity_blocks == NUM_SLOTS)
    yield made
    made.close()


def offload_of(*device_blocks: int, job_id: int = 900) -> TransferPlan:
    slots = tuple(range(len(device_blocks)))
    return TransferPlan(job_id, Direction.OFFLOAD, (GroupMove(0, device_blocks, slots),))


def onboard_of(*device_blocks: int, job_id: int = 900) -> TransferPlan:
    return replace(offload_of(*device_blocks, job_id=job_id), direction=Direction.ONBOARD)


def wait_ended(worker: Worker, *job_ids: int) -> dict[int, Outcome]:
    assert worker.wait(job_ids, LONG_S)
    return {result.job_id: result.outcome for result in worker.take()}


# ---------------------------------------------------------------- together


@pytest.mark.parametrize("ranks", [1, 2])
def test_bytes_go_down_and_come_back_elsewhere(tmp_path: Path, ranks: int) -> None:
    engine = Engine(tmp_path, ranks)
    try:
        engine.wait_for(lambda: engine.tier.capacity_blocks == NUM_SLOTS)
        assert engine.leader.layout_fingerprint == "-".join(f"layout{rank}" for rank in range(ranks))
        writer = engine.leader.open("writer", ROOT, None)
        tables = [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]]
        engine.leader.offload(writer, PROMPT, 0, 20, tables)
        engine.submit_offloads()
        expected = [
            [content(memory, group, block) for group in (0, 1) for block in tables[group]]
            for memory in engine.memories
        ]
        engine.settle()
        for memory in engine.memories:
            for storage in memory.storages:
                storage[:] = 0
        reader = engine.leader.open("reader", ROOT, None)
        assert engine.leader.match(reader, PROMPT, 0, 20) == 20
        tables = [[7, 8, 9, 10, 11], [3, 6, 1, 9, 2]]
        engine.submit(engine.leader.onboard(reader, 20, tables))
        engine.settle()
        for memory, wanted in zip(engine.memories, expected, strict=True):
            assert [content(memory, group, block) for group in (0, 1) for block in tables[group]] == wanted
        assert engine.leader.metrics.snapshot()["kvbm_onboard_blocks_h2d"] == 10
        for state in (writer, reader):
            engine.leader.finish(state)
        engine.leader.check_integrity()
        assert engine.tier.live_leases == 0 and engine.leader.open_requests == 0
    finally:
        engine.close()


def test_the_leader_may_come_after_the_workers_and_until_then_nothing_is_ready(tmp_path: Path) -> None:
    endpoint = Endpoint(f"ipc://{tmp_path}/s.sock", tmp_path / "s.sock", secret=b"s")
    worker = Worker(0, 1, endpoint, RankOptions())
    try:
        worker.register(two_group_memory(), "layout")
        worker.submit(offload_of(1))
        assert [result.outcome for result in worker.take()] == [Outcome.REJECTED]
        worker.fence([900])
        assert not worker.is_ready and worker.wait(None, 0)
        handshake = Handshake(1, lambda block_bytes: 5)
        channel = LeaderChannel(endpoint, handshake.on_message)
        try:
            assert handshake.wait(LONG_S)
            ready = [event for event in handshake.inbox if isinstance(event, SlotsReady)]
            assert ready[-1].slots == 5 and worker.is_ready
        finally:
            channel.close()
    finally:
        worker.close()


def test_what_does_not_fit_into_memory_is_refused_with_both_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_module, "available_memory", lambda: MemoryRoom(1000, 1000, "a test"))
    engine = Engine(tmp_path)
    try:
        engine.wait_for(lambda: engine.leader.disabled_reason is not None)
        reason = engine.leader.disabled_reason or ""
        assert "DYN_KVBM_CPU_CACHE_GB" in reason and "is available (a test)" in reason and "\n" not in reason
        assert not engine.workers[0].is_ready
    finally:
        engine.close()


def test_a_size_or_a_memory_that_nothing_can_be_made_of_is_refused_and_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slabs = []

    class Slab(HostSlab):
        def close(self) -> None:
            slabs.append(self)
            super().close()

    def no_executor(*args: object, **kwargs: object) -> Executor:
        raise ValueError("no way to copy")

    monkeypatch.setattr(rank_module, "HostSlab", Slab)
    monkeypatch.setattr(rank_module, "make_executor", no_executor)
    engine = Engine(tmp_path)
    try:
        engine.wait_for(lambda: engine.leader.disabled_reason is not None)
        assert "no way to copy" in (engine.leader.disabled_reason or "")
        assert len(slabs) == 1  # its memory was given back
        assert engine.workers[0]._hello() is None
    finally:
        engine.close()


def test_a_worker_that_refuses_says_so_and_says_no_hello(tmp_path: Path) -> None:
    engine = Engine(tmp_path, register=False)
    try:
        engine.workers[0].refuse("unknown layout")
        engine.workers[0].register(two_group_memory(), "layout")
        engine.wait_for(lambda: engine.leader.disabled_reason == "worker 0: unknown layout")
        assert engine.workers[0]._hello() is None
    finally:
        engine.close()


# ---------------------------------------------------------------- one worker


def test_results_are_taken_once_and_acknowledged_once(engine: Engine) -> None:
    worker = engine.workers[0]
    worker.submit(offload_of(1, 2))
    assert wait_ended(worker, 900) == {900: Outcome.OK}
    assert worker.take() == [] and not worker.is_known(900)
    engine.wait_for(lambda: engine.leader.stale_results_total == 1)  # the leader knows no job 900


def test_a_plan_that_cannot_run_is_a_failed_job(engine: Engine) -> None:
    worker = engine.workers[0]
    worker.submit(offload_of(999))
    assert wait_ended(worker, 900) == {900: Outcome.REJECTED}


def test_a_plan_given_twice_is_one_job(engine: Engine) -> None:
    worker, gate = engine.workers[0], engine.gates[0]
    gate.is_shut = True
    worker.submit(offload_of(1))
    worker.submit(offload_of(1))
    assert worker.is_in_flight(900) and gate.submitted == [900]
    gate.open()
    assert wait_ended(worker, 900) == {900: Outcome.OK}


def test_a_fence_cancels_what_has_not_started(engine: Engine) -> None:
    worker, gate = engine.workers[0], engine.gates[0]
    gate.is_shut = True
    for job_id in (901, 902, 903):
        worker.submit(offload_of(1, job_id=job_id))
    worker.fence([901, 903, 12345])
    assert {result.job_id: result.outcome for result in worker.take()} == dict.fromkeys(
        (901, 903), Outcome.REJECTED
    )
    assert worker.is_in_flight(902)
    worker.fence_all()
    assert not worker.is_in_flight(902)


def test_a_fence_waits_for_what_runs(engine: Engine) -> None:
    worker = engine.workers[0]
    before = content(engine.memories[0], 0, 3)
    for job_id in range(901, 940):
        worker.submit(offload_of(3, job_id=job_id))
    worker.fence_all()
    engine.memories[0].storages[0][:] = 0  # now it may be overwritten
    ended = worker.take()
    assert {result.job_id for result in ended} == set(range(901, 940))
    if any(result.outcome is Outcome.OK for result in ended):
        assert worker._memory is not None and worker._memory.slab.array[: len(before)].tobytes() == before


def test_a_copy_that_outlives_its_fence_is_reported_as_failed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, gate = engine.workers[0], engine.gates[0]
    monkeypatch.setattr(worker_module, "FENCE_TIMEOUT_S", 0.01)
    gate.is_shut = gate.is_running = True
    worker.submit(offload_of(1))
    worker.fence([900])
    assert worker.take() == [] and worker.is_in_flight(900)  # its slots are not free before it ends
    gate.open()
    assert wait_ended(worker, 900) == {900: Outcome.TIMED_OUT}
    worker.submit(offload_of(1))
    assert wait_ended(worker, 900) == {900: Outcome.OK}  # the mark is gone with the job


def test_a_load_that_hangs_is_never_taken_for_over(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a GPU does not answer: whoever would use its blocks is kept from it by an error."""
    worker, gate = engine.workers[0], engine.gates[0]
    monkeypatch.setattr(worker_module, "FENCE_TIMEOUT_S", 0.01)
    gate.is_shut = gate.is_running = True
    worker.submit(onboard_of(1))
    for stop in (worker.fence_all, worker.leave_device, partial(worker.fence, [900])):
        with pytest.raises(StuckCopyError, match=r"jobs \[900\].*must not go on"):
            stop()
    assert worker.is_in_flight(900)
    gate.open()
    assert wait_ended(worker, 900) == {900: Outcome.TIMED_OUT}
    worker.fence_all()
    worker.leave_device()


def test_device_memory_is_not_left_while_a_copy_reads_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of memory that is unmapped meanwhile is a fault, whichever way it goes."""
    worker, gate = engine.workers[0], engine.gates[0]
    monkeypatch.setattr(worker_module, "FENCE_TIMEOUT_S", 0.01)
    gate.is_shut = gate.is_running = True
    worker.submit(offload_of(1))
    with pytest.raises(StuckCopyError, match=r"jobs \[900\]"):
        worker.leave_device()
    gate.open()
    assert wait_ended(worker, 900) == {900: Outcome.OK}
    worker.leave_device()


def test_close_leaves_no_thread_no_descriptor_and_no_memory(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    threads, before = set(threading.enumerate()), descriptors()
    engine = Engine(tmp_path)
    engine.wait_for(lambda: engine.tier.capacity_blocks == NUM_SLOTS)
    worker = engine.workers[0]
    assert worker._memory is not None
    slab = worker._memory.slab
    for job_id in range(901, 930):
        worker.submit(offload_of(1, job_id=job_id))
    for _ in range(2):
        engine.close()
    assert set(threading.enumerate()) <= threads and descriptors() <= before
    assert len(worker.take()) == 29  # each job ended, one way or another
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="closed"):
        assert np.any(slab.array)
    worker.submit(offload_of(1))
    assert [result.outcome for result in worker.take()] == [Outcome.REJECTED]


def test_a_worker_closed_while_it_is_being_configured_leaves_nothing(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    for _ in range(10):
        engine = Engine(tmp_path)
        engine.close()
    assert set(threading.enumerate()) <= threads


def test_the_leader_hears_of_trouble_as_it_is(engine: Engine) -> None:
    worker = engine.workers[0]
    worker.judge_results(lambda result: JobResult(result.job_id, Outcome.CORRUPT, 0, 0.0, 0.0, "judged"))
    state = engine.leader.open("r", ROOT, None)
    engine.leader.offload(state, PROMPT, 0, 20, [[1, 2, 3, 4, 5]] * 2)
    engine.submit_offloads()
    engine.settle()
    assert engine.tier.resident_blocks == 0
    assert engine.leader.metrics.snapshot()['kvbm_failures_total{kind="offload_corrupt"}'] == 1
    assert not any(isinstance(event, Disabled | RankAnswer) for event in engine.handshake.inbox)


# ---------------------------------------------------------------- when the leader asks


class Asking:
    """A worker whose leader says what the test says, and keeps what it hears."""

    def __init__(self, folder: Path, **options: object) -> None:
        path = folder / "s.sock"
        endpoint = Endpoint(f"ipc://{path}", path, secret=b"s")
        self.heard: list[Message] = []
        self.news = threading.Condition()
        self._peer = b""
        self.configure = Configure(NUM_SLOTS, first_job_id=100)
        self.channel = LeaderChannel(endpoint, self._take)
        self.worker = Worker(0, 1, endpoint, RankOptions(), **options)  # type: ignore[arg-type]
        self.gate: Gate | None = None
        self.worker.wrap_executor(self._wrap)
        self.worker.register(two_group_memory(), "layout")
        self.wait_for(lambda: any(message == Ready(0, NUM_SLOTS) for message in self.heard))

    def _wrap(self, inner: Executor) -> Executor:
        self.gate = Gate(inner, self.worker)
        return self.gate

    def _take(self, identity: bytes, message: Message) -> list[tuple[bytes, Message]]:
        with self.news:
            self._peer = identity
            self.heard.append(message)
            self.news.notify_all()
        return [(identity, self.configure)] if isinstance(message, Hello) else []

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(condition, LONG_S)

    def ask(self, *job_ids: int, is_last: bool = False) -> dict[int, Outcome]:
        """What it answers, up to its sign of life."""
        with self.news:
            self.heard.clear()
        self.channel.send(self._peer, Ask(list(job_ids), is_last))
        self.wait_for(lambda: Here(0) in self.heard)
        acks = [ack for message in self.heard if isinstance(message, Results) for ack in message.results]
        return {ack.job_id: ack.outcome for ack in acks}

    def close(self) -> None:
        self.worker.close()
        self.channel.close()


@pytest.fixture
def asking(tmp_path: Path) -> Iterator[Asking]:
    made = Asking(tmp_path, engine_carries_acks=True)
    yield made
    made.close()


def test_a_worker_that_is_asked_says_what_the_engine_has_not_fetched_yet(asking: Asking) -> None:
    worker = asking.worker
    worker.submit(offload_of(1, job_id=101))
    assert worker.wait([101], LONG_S)
    worker.submit(offload_of(2, job_id=102))
    assert worker.wait([102], LONG_S)
    assert asking.ask(101) == {101: Outcome.OK} == asking.ask(101)
    assert {ack.job_id for ack in worker.take_results()} == {101, 102}  # the engine's own road is as it was
    assert asking.ask(101, 102) == {}


def test_what_has_not_come_when_the_leader_asks_last_is_never_begun(asking: Asking) -> None:
    worker, gate = asking.worker, asking.gate
    assert gate is not None
    gate.is_shut = True
    worker.submit(offload_of(1, job_id=101))
    assert asking.ask(101, 102, 103) == {}  # it may still come
    assert asking.ask(101, 102, is_last=True) == {102: Outcome.REJECTED}
    for job_id in (102, 102, 103):
        worker.submit(offload_of(2, job_id=job_id))
    assert gate.submitted == [101, 103]  # 102's slots may be somebody else's by now
    assert not worker.is_in_flight(102)
    gate.open()
    assert wait_ended(worker, 101, 102, 103) == {
        101: Outcome.OK,
        102: Outcome.REJECTED,
        103: Outcome.OK,
    }


def test_a_new_process_does_not_begin_what_its_predecessor_was_told(asking: Asking) -> None:
    worker, gate = asking.worker, asking.gate
    assert gate is not None
    worker.submit(offload_of(1, job_id=99))
    worker.submit(offload_of(1, job_id=100))
    assert gate.submitted == [100]
    assert wait_ended(worker, 99, 100) == {99: Outcome.REJECTED, 100: Outcome.OK}


def test_offloads_that_a_step_did_not_come_to_are_answered_and_never_begun(asking: Asking) -> None:
    worker, gate, offloads = asking.worker, asking.gate, StepOffloads(asking.worker)
    assert gate is not None
    offloads.begin([offload_of(1, job_id=101), offload_of(2, job_id=102)])
    offloads.begin([offload_of(2, job_id=102), offload_of(3, job_id=103)])
    assert wait_ended(worker, 101) == {101: Outcome.REJECTED}
    offloads.submit()
    offloads.submit()
    assert gate.submitted == [102, 103]
    offloads.begin([offload_of(4, job_id=104)])
    offloads.abandon()
    offloads.submit()
    assert gate.submitted == [102, 103]
    assert wait_ended(worker, 102, 103, 104) == {
        102: Outcome.OK,
        103: Outcome.OK,
        104: Outcome.REJECTED,
    }


def test_a_finished_requests_blocks_are_free_when_nothing_reads_them(asking: Asking) -> None:
    worker, gate, offloads = asking.worker, asking.gate, StepOffloads(asking.worker)
    assert gate is not None
    gate.is_shut = True
    offloads.begin([offload_of(1, job_id=101)])
    offloads.keep({"a": (101,), "b": (90,)})
    assert offloads.take_read() == {"b"}  # its job was over before
    offloads.submit()
    assert offloads.take_read() == set()
    gate.open()
    assert wait_ended(worker, 101) == {101: Outcome.OK}
    assert offloads.take_read() == {"a"} and offloads.take_read() == set() and not offloads.kept


def test_a_rank_whose_copy_hangs_is_away_until_it_ends(tmp_path: Path) -> None:
    """Leader, channel and workers are real, and one rank's executor does not move."""
    clock = ManualClock()
    engine = Engine(tmp_path, 2, clock=clock)
    try:
        engine.wait_for(lambda: engine.tier.capacity_blocks == NUM_SLOTS)
        engine.gates[1].is_shut = True
        state = engine.leader.open("writer", ROOT, None)
        engine.leader.offload(state, PROMPT, 0, 20, [[1, 2, 3, 4, 5]] * 2)
        engine.submit_offloads()
        engine.wait_for(lambda: engine.leader._jobs.jobs(TransferJob)[0].waiting_ranks == {1})
        clock.advance(6.0)
        engine.leader.poll()
        asked_at_s = clock.now_s()
        engine.wait_for_tick(lambda: engine.handshake.heard_at_s(1) >= asked_at_s)
        clock.advance(20.0)
        engine.leader.poll()
        assert engine.leader.is_ready  # slow, and alive
        clock.advance(100.0)
        for _ in range(2):
            engine.leader.poll()
            clock.advance(1.0)
        assert not engine.leader.is_ready and engine.leader.readiness().reason == "no answer from rank 1"
        assert engine.tier.pending_blocks == 10
        engine.gates[1].open()
        engine.settle()
        clock.advance(1.0)
        engine.leader.poll()
        assert engine.leader.is_ready and engine.leader.match(state, PROMPT, 0, 20) == 20
        engine.leader.finish(state)
        engine.leader.check_integrity()
    finally:
        engine.close()
