"""A leader and ranks that all keep the same KV: rank 0 stores it once, with a slab and a file, and all load
from it.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.runtime import replicas
from kvbm_core.runtime.messages import Hello
from kvbm_core.storage.memory_room import MemoryRoom
from kvbm_core.testing.leader_bench import ROOT
from kvbm_core.transfer import rank as rank_module
from kvbm_core.transfer.executors.broadcast import BroadcastExecutor
from kvbm_core.transfer.executors.broadcast_group import Group, GroupError
from kvbm_core.transfer.executors.memcpy import MemcpyExecutor
from tests.unit.test_worker import LONG_S, NUM_SLOTS, PROMPT, content, wait_ended
from tests.unit.worker_disk_engine import ELSEWHERE, NUM_TOKENS, DiskEngine

pytest.importorskip("torch", reason="NOT RUN: the broadcast between ranks (needs torch)")

FILE = "rank-0-of-1.blocks"


def wipe(engine: DiskEngine) -> None:
    for memory in engine.memories:
        for storage in memory.storages:
            storage[:] = 0


def test_rank_0_alone_stores_and_every_rank_gets_the_blocks(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path, 2, replicates=True)
    try:
        engine.wait_ready()
        assert engine.leader.layout_fingerprint == "layout0"
        engine.store_prompt()
        wipe(engine)
        plan = engine.onboard_prompt()
        assert plan is not None and not plan.reads and engine.on_devices() == engine.expected()
        assert engine.workers[0]._memory is not None and engine.workers[1]._memory is None
        assert sorted(path.name for path in engine.folder.iterdir() if path.suffix == ".blocks") == [FILE]
        num_bytes = 5 * sum(view.block_bytes for view in engine.memories[0].views)
        counted = engine.leader.metrics.snapshot()
        assert counted['kvbm_bytes_total{direction="offload"}'] == num_bytes
        assert counted['kvbm_bytes_total{direction="onboard"}'] == num_bytes
        engine.leader.check_integrity()
    finally:
        engine.close()


def test_a_restart_finds_the_blocks_also_with_other_ranks(tmp_path: Path) -> None:
    for ranks in (2, 3, 2):
        engine = DiskEngine(tmp_path, ranks, replicates=True)
        try:
            engine.wait_ready()
            if ranks == 2 and not engine.disk.slots.resident_blocks:
                engine.store_prompt()
                continue
            assert engine.disk.slots.resident_blocks == 10
            wipe(engine)
            plan = engine.onboard_prompt()
            assert plan is not None and plan.reads and engine.on_devices() == engine.expected()
        finally:
            engine.close()


def test_what_is_damaged_on_the_disk_is_loaded_by_nobody(tmp_path: Path) -> None:
    for life in range(2):
        engine = DiskEngine(tmp_path, 2, replicates=True)
        try:
            engine.wait_ready()
            if life == 0:
                engine.store_prompt()
                continue
            path = engine.folder / FILE
            found = path.read_bytes()
            block = engine.expected()[0][0]
            assert block in found
            path.write_bytes(found.replace(block, bytes(len(block))))
            wipe(engine)
            state = engine.leader.open("reader", ROOT, None)
            assert engine.leader.match(state, PROMPT, 0, NUM_TOKENS) == NUM_TOKENS
            plan = engine.submit(engine.leader.onboard(state, NUM_TOKENS, ELSEWHERE))
            engine.settle()
            outcomes = [
                {result.job_id: result.outcome for result in worker.take()}[plan.job_id]
                for worker in engine.workers
            ]
            assert outcomes == [Outcome.CORRUPT, Outcome.CORRUPT]
            # Nothing of the job came to rank 1.
            assert not any(any(content(engine.memories[1], g, b)) for g in (0, 1) for b in ELSEWHERE[g])
            assert engine.leader.disabled_reason is None
        finally:
            engine.close()


def test_when_a_rank_is_gone_the_leader_stops_asking(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path, 2, replicates=True)
    try:
        engine.wait_ready()
        engine.offload_prompt()
        engine.workers[1].close()
        state = engine.leader.open("reader", ROOT, None)
        assert engine.leader.match(state, PROMPT, 0, NUM_TOKENS) == NUM_TOKENS
        plan = engine.leader.onboard(state, NUM_TOKENS, ELSEWHERE)
        assert plan is not None
        engine.workers[0].submit(plan)
        engine.wait_for(lambda: engine.leader.disabled_reason is not None)
        assert (engine.leader.disabled_reason or "").startswith(
            "worker 0: the broadcast between the ranks is broken"
        )
        # The leader is told before the loads end, so that it asks for no more of them.
        assert wait_ended(engine.workers[0], plan.job_id)[plan.job_id] is Outcome.IO_ERROR
        other = engine.leader.open("other", ROOT, None)
        assert engine.leader.match(other, PROMPT, 0, NUM_TOKENS) == 0
    finally:
        engine.close()


def test_rank_0_without_memory_turns_the_tier_off_and_nobody_is_left_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set(threading.enumerate())
    monkeypatch.setattr(rank_module, "available_memory", lambda: MemoryRoom(1000, 1000, "a test"))
    engine = DiskEngine(tmp_path, 2, replicates=True)
    try:
        engine.wait_for(lambda: engine.leader.disabled_reason is not None)
        assert "DYN_KVBM_CPU_CACHE_GB" in (engine.leader.disabled_reason or "")
    finally:
        engine.close()
    assert set(threading.enumerate()) <= threads


# ---------------------------------------------------------------- whom it is stored for


def files(engine: DiskEngine) -> list[str]:
    return sorted(path.name for path in engine.folder.iterdir() if path.suffix == ".blocks")


def comes_back(engine: DiskEngine) -> bool:
    """What is stored once, or by each rank, is on every device after a load."""
    engine.wait_ready()
    engine.store_prompt()
    wipe(engine)
    assert engine.onboard_prompt() is not None
    engine.leader.check_integrity()
    return engine.on_devices() == engine.expected()


def with_memory(engine: DiskEngine) -> list[bool]:
    """Which ranks have host memory."""
    return [worker._memory is not None for worker in engine.workers]


def test_each_stage_has_one_copy(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path, 4, parts=("first", "first", "second", "second"))
    try:
        assert comes_back(engine) and with_memory(engine) == [True, False, True, False]
        assert files(engine) == ["rank-0-of-2.blocks", "rank-1-of-2.blocks"]
        assert engine.leader.layout_fingerprint == "layout0-layout1"
    finally:
        engine.close()


def test_each_machine_has_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines that name their loopback addresses differently; here they have one disk, and one waits."""
    names = iter(["one", "two", "one", "two"])
    monkeypatch.setattr(replicas, "loopback_name", lambda: next(names))
    engine = DiskEngine(tmp_path, 4, replicates=True)
    try:
        engine.wait_for(lambda: engine.tier.capacity_blocks == NUM_SLOTS)
        assert with_memory(engine) == [True, True, False, False]
        engine.offload_prompt()
        wipe(engine)
        assert engine.onboard_prompt() is not None and engine.on_devices() == engine.expected()
        assert engine.leader.layout_fingerprint == "layout0"
    finally:
        engine.close()


OWN_COPIES = "each rank stores and loads its own copy"


def check_own_copies(engine: DiskEngine, caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """``words``: of the reason, one of them."""
    assert comes_back(engine) and with_memory(engine) == [True] * len(engine.workers)
    assert files(engine) == [f"rank-{rank}-of-2.blocks" for rank in range(2)]
    lines = [record.getMessage() for record in caplog.records if OWN_COPIES in record.getMessage()]
    assert len(lines) == 1 and any(word in lines[0] for word in words) and "\n" not in lines[0]
    assert engine.leader.disabled_reason is None


def test_a_rank_where_it_is_not_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = DiskEngine(tmp_path, 2, parts=("all", ""))
    try:
        check_own_copies(engine, caplog, "it is not set on ranks [1] of 2")
    finally:
        engine.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_join(
    rank: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, threads = Group.connect, set(threading.enumerate())

    def connect_others(group: Group, device: object) -> None:
        if group.rank == rank:
            raise GroupError("this torch has no NCCL\nand more that nobody reads")
        connect(group, device)

    monkeypatch.setattr(Group, "connect", connect_others)
    engine = DiskEngine(tmp_path, 2, replicates=True)
    try:
        # What it does to the other one may be heard first.
        check_own_copies(engine, caplog, f"rank {rank}: this torch has no NCCL", f"rank {1 - rank}: ")
    finally:
        engine.close()
    assert set(threading.enumerate()) <= threads


def test_ranks_that_are_closed_while_they_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, threads, is_waiting = Group.connect, set(threading.enumerate()), threading.Event()

    def connect_first(group: Group, device: object) -> None:
        if group.rank:  # it never comes
            return
        is_waiting.set()
        group._timeout_s = 10 * LONG_S
        connect(group, device)

    monkeypatch.setattr(Group, "connect", connect_first)
    engine = DiskEngine(tmp_path, 2, replicates=True)
    assert is_waiting.wait(LONG_S)
    engine.close()
    assert set(threading.enumerate()) <= threads


def test_one_rank_replicates_nothing(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path, 1, replicates=True)
    try:
        engine.wait_for(lambda: engine.tier.capacity_blocks == NUM_SLOTS)
        assert not isinstance(
            engine.workers[0]._executor, BroadcastExecutor | MemcpyExecutor
        )  # a disk, no group
        assert engine.handshake.storing_ranks == [0]
        hello = [said for _, said in engine.handshake._hellos.values()]
        assert [(isinstance(h, Hello), h.part, h.broadcast_address) for h in hello] == [(True, "", "")]
    finally:
        engine.close()
