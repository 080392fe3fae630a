"""A leader and ranks that all keep the same KV: rank 0 stores it once, with a slab and a file, and all load
from it.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.runtime.messages import Hello
from kvbm_core.testing.leader_bench import ROOT
from kvbm_core.transfer import rank as rank_module
from kvbm_core.transfer.executors.broadcast import BroadcastExecutor
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
        # Of a rank that went before it was ever connected to, gloo learns by its own time-out, of 30 s.
        engine.wait_for(lambda: engine.leader.disabled_reason is not None, 3 * LONG_S)
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
    monkeypatch.setattr(rank_module, "available_memory_bytes", lambda: 1000)
    engine = DiskEngine(tmp_path, 2, replicates=True)
    try:
        engine.wait_for(lambda: engine.leader.disabled_reason is not None)
        assert "DYN_KVBM_CPU_CACHE_GB" in (engine.leader.disabled_reason or "")
    finally:
        engine.close()
    assert set(threading.enumerate()) == threads


def test_one_rank_replicates_nothing(tmp_path: Path) -> None:
    engine = DiskEngine(tmp_path, 1, replicates=True)
    try:
        engine.wait_for(lambda: engine.tier.capacity_blocks == NUM_SLOTS)
        assert not isinstance(
            engine.workers[0]._executor, BroadcastExecutor | MemcpyExecutor
        )  # a disk, no group
        assert engine.handshake.num_storing_ranks == 1
        hello = [said for _, said in engine.handshake._hellos.values()]
        assert [(isinstance(h, Hello), h.replicates, h.broadcast_address) for h in hello] == [
            (True, False, "")
        ]
    finally:
        engine.close()
