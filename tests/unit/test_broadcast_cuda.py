"""The broadcast between ranks on real GPUs: rows of blocks on one, NCCL between two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvbm_core.errors import Outcome
from kvbm_core.testing.executor_bench import LONG_S, NUM_DEVICE_BLOCKS, Listener, plan, two_group_memory
from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.transfer.executors.broadcast import BroadcastExecutor, OnDone
from kvbm_core.transfer.executors.broadcast_group import Group, MeetingPoint
from kvbm_core.transfer.executors.device_rows import DeviceRows
from kvbm_core.transfer.plan import GroupMove, JobResult, TransferPlan
from kvbm_core.types import Direction
from tests.unit.test_broadcast_ends import ManualLoader
from tests.unit.test_broadcast_executor import content

torch = pytest.importorskip("torch", reason="NOT RUN: the broadcast between ranks (needs torch)")
num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0


def on_gpu(memory: DeviceMemory, index: int) -> DeviceMemory:
    return DeviceMemory(memory.views, [torch.from_numpy(s).to(f"cuda:{index}") for s in memory.storages])


def on_host(memory: DeviceMemory) -> DeviceMemory:
    torch.cuda.synchronize()
    return DeviceMemory(memory.views, [np.asarray(storage.cpu()) for storage in memory.storages])


@pytest.mark.skipif(num_gpus < 1, reason="NOT RUN: rows of blocks on a GPU: there is none")
def test_rows_of_a_gpus_blocks() -> None:
    memory = two_group_memory(1)
    gpu = on_gpu(memory, 0)
    rows, blocks, targets = DeviceRows(gpu, chunk_bytes=4096), [9, 4, 5], [0, 11, 3]
    with rows.bound():
        for group in (0, 1):
            gathered = rows.gather(group, blocks)
            expected = b"".join(content(memory, group, block) for block in blocks)
            assert gathered.cpu().numpy().tobytes() == expected
            rows.scatter(group, targets, rows.mark())
            assert b"".join(content(on_host(gpu), group, block) for block in targets) == expected


@pytest.mark.skipif(num_gpus < 2, reason="NOT RUN: the broadcast over NCCL: there are no two GPUs")
def test_a_load_comes_to_the_other_gpu_over_nccl() -> None:
    memories = [on_gpu(two_group_memory(1 + rank), rank) for rank in range(2)]
    source = two_group_memory(1)
    loaders: list[ManualLoader] = []

    def make_loader(on_done: OnDone) -> ManualLoader:
        loaders.append(ManualLoader(on_done))
        return loaders[0]

    point = MeetingPoint()
    listeners = [Listener(), Listener()]
    groups = [Group(0, (0, 1), point.address, point, max_ctas=4), Group(1, (0, 1), point.address, max_ctas=4)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda group: group.connect(torch.device("cuda", group.rank)), groups))
    first = BroadcastExecutor(memories[0], groups[0], listeners[0], make_loader=make_loader)
    second = BroadcastExecutor(memories[1], groups[1], listeners[1])
    moves = tuple(
        GroupMove(group, tuple(range(NUM_DEVICE_BLOCKS)), tuple(range(NUM_DEVICE_BLOCKS))) for group in (0, 1)
    )
    for submitted in (TransferPlan(1, Direction.ONBOARD, moves), plan(2, Direction.ONBOARD, [3], [0])):
        first.submit(submitted)
        second.submit(submitted)
        loaders[0].on_done(JobResult(submitted.job_id, Outcome.OK, 0, 0.0, 0.0))
    assert first.wait(None, LONG_S) and second.wait(None, LONG_S)
    assert [listener.outcomes() for listener in listeners] == [{1: Outcome.OK, 2: Outcome.OK}] * 2
    arrived = on_host(memories[1])
    assert all((a == b).all() for a, b in zip(arrived.storages, source.storages, strict=True))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda executor: executor.close(), (first, second)))
