"""Plans, runs, torch memory and the parts of the executors that need no thread."""

from __future__ import annotations

import gc
import pickle
import random
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvbm_core.errors import LayoutError, Outcome
from kvbm_core.layout.tensors import view_of_tensors
from kvbm_core.layout.view import BlockView, Segment
from kvbm_core.storage.host_slab import HUGE_PAGE_BYTES, HostSlab
from kvbm_core.testing.executor_bench import LONG_S
from kvbm_core.transfer.coalesce import Run, runs, runs_both_ways
from kvbm_core.transfer.digests import SlotDigests, gather
from kvbm_core.transfer.executor import DeviceMemory, refusal_of
from kvbm_core.transfer.executors.cuda_runtime import CudaError, CudaRuntime, ways_to_copy
from kvbm_core.transfer.factory import make_executor
from kvbm_core.transfer.plan import GroupMove, JobResult, TransferPlan
from kvbm_core.transfer.torch_memory import describe_tensors
from kvbm_core.types import Direction


def test_runs_are_maximal_and_do_not_need_order() -> None:
    assert runs([7, 3, 4, 5, 9], [1, 10, 11, 12, 2]) == [(3, 10, 3), (7, 1, 1), (9, 2, 1)]
    assert runs([], []) == []
    assert runs([1, 2], [5, 4]) == [(1, 5, 1), (2, 4, 1)]
    assert runs_both_ways([3, 2, 1, 0], [5, 6, 7, 8]) == [Run(0, 8, 4, -1)]
    assert runs_both_ways([0, 1, 2], [4, 4 + 1, 4]) == [Run(0, 4, 2, 1), Run(2, 4, 1, 1)]
    with pytest.raises(ValueError, match="zip"):
        runs([1], [1, 2])


def test_runs_cover_exactly_the_pairs() -> None:
    rng = random.Random(5)
    for _ in range(200):
        src = rng.sample(range(12), rng.randrange(1, 12))
        dst = rng.sample(range(12), len(src))
        covered = [
            (run.src + i, run.dst + i * run.step)
            for run in runs_both_ways(src, dst)
            for i in range(run.count)
        ]
        assert sorted(covered) == sorted(zip(src, dst, strict=True))
        forward = [(s + i, d + i) for s, d, count in runs(src, dst) for i in range(count)]
        assert sorted(forward) == sorted(covered)


def plan(direction: Direction, *moves: tuple[int, list[int], list[int]]) -> TransferPlan:
    """Moves as (group, device blocks, slots)."""
    return TransferPlan(1, direction, tuple(GroupMove(g, tuple(b), tuple(s)) for g, b, s in moves))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (plan(Direction.OFFLOAD, (0, [1, 2], [1])), "2 device blocks for 1"),
        (plan(Direction.OFFLOAD, (0, [1], [4])), "slot"),
        (plan(Direction.OFFLOAD, (0, [1], [-1])), "slot"),
        (plan(Direction.ONBOARD, (0, [8], [1])), "device block"),
        (plan(Direction.OFFLOAD, (0, [1], [3]), (1, [1], [3])), "twice"),
        (plan(Direction.ONBOARD, (0, [1], [2]), (0, [1], [3])), "twice"),
    ],
)
def test_a_wrong_plan_is_misuse(wrong: TransferPlan, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        wrong.check(8, 4)


def test_a_source_may_be_used_twice_and_groups_number_their_own_blocks() -> None:
    plan(Direction.OFFLOAD, (0, [1, 1], [2, 3])).check(8, 4)
    plan(Direction.ONBOARD, (0, [1], [2]), (1, [1], [2])).check(8, 4)


def test_a_plan_is_plain_data() -> None:
    made = plan(Direction.ONBOARD, (0, [1, 2], [2, 3]), (1, [5], [1]))
    assert pickle.loads(pickle.dumps(made)) == made
    assert made.num_blocks == 3


def test_device_memory_is_checked_when_made() -> None:
    with pytest.raises(LayoutError, match="ends at byte"):
        DeviceMemory((BlockView(4, (Segment(0, 0, 8, 8),)),), [np.zeros(31, np.uint8)])
    with pytest.raises(LayoutError, match="without"):
        DeviceMemory((), [])


def test_torch_tensors_become_storages_that_are_the_same_memory() -> None:
    torch = pytest.importorskip("torch")
    raw = torch.zeros(2 * 6 * 3 * 4 * 8, dtype=torch.int8)
    shared = raw.view(torch.float16).view(2, 6, 3, 4, 4).unbind(0)
    tensors = {"b": shared[1], "alone": torch.zeros(6, 4, dtype=torch.bfloat16), "a": shared[0]}
    infos, storages = describe_tensors(tensors, ["a", "b", "alone"])
    assert [(i.name, i.storage, i.storage_offset_bytes, i.dtype) for i in infos] == [
        ("a", 0, 0, "float16"),
        ("b", 0, 6 * 3 * 4 * 8, "float16"),
        ("alone", 1, 0, "bfloat16"),
    ]
    assert [s.nbytes for s in storages] == [raw.nbytes, 48]
    shared[1][5, 0, 0, 0] = 1.0
    offset = infos[1].storage_offset_bytes + 5 * 3 * 4 * 8
    assert storages[0][offset : offset + 2].tobytes() == b"\x00\x3c"
    storages[1][:] = 0xFF
    assert torch.isnan(tensors["alone"]).all()


def test_a_storage_keeps_its_tensor_alive() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.full((1 << 22,), 7, dtype=torch.uint8).view(4, -1)
    _, (storage,) = describe_tensors({"x": tensor}, ["x"])
    del tensor
    gc.collect()
    churn = [torch.full((1 << 22,), 9, dtype=torch.uint8) for _ in range(4)]
    assert (storage == 7).all() and len(churn) == 4


def test_tensors_that_have_no_reachable_memory_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(LayoutError, match="meta"):
        describe_tensors({"x": torch.zeros(4, 4, device="meta")}, ["x"])
    with pytest.raises(LayoutError, match="empty"):
        describe_tensors({"x": torch.zeros(0, 4)}, ["x"])
    with pytest.raises(LayoutError, match="several devices"):
        tensors = {"x": torch.zeros(4, 4, device="meta"), "y": torch.zeros(4, 4)}
        describe_tensors(tensors, ["x", "y"])


@pytest.mark.parametrize("permutation", [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (1, 0, 2, 3, 4), (2, 1, 0, 3, 4)])
def test_kv_caches_of_any_memory_order_come_back_through_torch(permutation: tuple[int, ...]) -> None:
    """[layer, block, head, token, content] laid out in memory by ``permutation``, seen as a view per
    layer.
    """
    torch = pytest.importorskip("torch")
    sizes = (3, 10, 2, 4, 6)
    physical = torch.randn([sizes[axis] for axis in permutation]).to(torch.bfloat16)
    inverse = sorted(range(5), key=lambda axis: permutation[axis])
    layers = physical.permute(inverse).unbind(0)
    names = [f"layer.{i}" for i in range(3)]
    infos, storages = describe_tensors(dict(zip(names, layers, strict=True)), names)
    device = DeviceMemory((view_of_tensors(infos, 5),), storages)  # two kernel blocks per block
    host = HostSlab(4, device.views[0].block_bytes)
    assert host.wait_ready(LONG_S)
    results: list[JobResult] = []
    executor = make_executor(device, host, on_done=results.append, digests=SlotDigests())
    expected = [layer[2:6].clone() for layer in layers]
    executor.submit(plan(Direction.OFFLOAD, (0, [1, 2], [3, 0])))
    assert executor.wait(None, LONG_S)
    physical.zero_()
    executor.submit(plan(Direction.ONBOARD, (0, [4, 0], [3, 0])))
    assert executor.wait(None, LONG_S)
    assert [result.outcome for result in results] == [Outcome.OK, Outcome.OK]
    for layer, before in zip(layers, expected, strict=True):
        assert torch.equal(layer[8:10], before[:2]) and torch.equal(layer[0:2], before[2:])
        assert not layer[2:8].any()
    executor.close()
    host.close()


def test_gather_reads_the_content_in_order() -> None:
    view = BlockView(2, (Segment(1, 0, 2, 2), Segment(0, 4, 4, 3)))
    storages = [np.arange(12, dtype=np.uint8), np.arange(100, 104, dtype=np.uint8)]
    assert gather(view, storages, 1).tolist() == [102, 103, 8, 9, 10]


def test_a_copy_function_that_is_not_here_gives_way_to_the_next() -> None:
    pytest.importorskip("torch")
    runtime = CudaRuntime(0)
    used: list[str] = []

    def way(name: str, code: int) -> Any:
        def call(copies: object, stream: int) -> int:
            used.append(f"{name} {stream}")
            return code

        return call

    stream = SimpleNamespace(cuda_stream=5)
    runtime._ways = [way("batch", 801), way("single", 0)]
    for _ in range(2):
        runtime.copy(([1], [2], [3]), stream)
    runtime.copy(([], [], []), stream)
    assert used == ["batch 5", "single 5", "single 5"]
    runtime._ways = [way("batch", 1), way("single", 0)]
    with pytest.raises(CudaError, match="error 1 "):
        runtime.copy(([1], [2], [3]), stream)
    runtime._ways = [way("batch", 35)]
    with pytest.raises(CudaError, match="no CUDA copy function"):
        runtime.copy(([1], [2], [3]), stream)


def test_cuda_python_takes_our_arguments() -> None:
    """Without a GPU the real binding still checks and converts them, then reports that there is no driver."""
    pytest.importorskip("cuda.bindings.runtime")
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("made-up addresses must not reach a real GPU")
    ways = ways_to_copy(None)
    assert [way.__name__ for way in ways] == ["batch_by_cuda_python", "single_by_cuda_python"]
    for way in ways:
        assert way(([4096, 8192], [12288, 16384], [16, 32]), 1) in (35, 100)


def test_the_slot_just_beyond_those_that_are_ready_is_busy() -> None:
    """Two slots to a chunk of the slab; the second chunk is being prepared."""
    slot_bytes = HUGE_PAGE_BYTES // 2
    view = BlockView(4, (Segment(0, 0, 64, 64),))
    device = DeviceMemory((view,), [np.zeros(256, np.uint8)])
    is_second, gate, chunks = threading.Event(), threading.Event(), list[int]()

    def prepare(address: int, nbytes: int) -> None:
        chunks.append(address)
        if len(chunks) == 2:
            is_second.set()
            assert gate.wait(LONG_S)

    host = HostSlab(4, slot_bytes, prepare=prepare, chunk_bytes=HUGE_PAGE_BYTES)
    try:
        assert is_second.wait(LONG_S) and host.ready_slots == 2
        for slots, refusal in (((0, 1), None), ((1, 2), Outcome.BUSY), ((3,), Outcome.BUSY)):
            plan = TransferPlan(1, Direction.OFFLOAD, (GroupMove(0, tuple(range(len(slots))), slots),))
            found = refusal_of(plan, device, host)
            assert (found and found[0]) is refusal, slots
        gate.set()
        assert host.wait_ready(LONG_S) and refusal_of(plan, device, host) is None
    finally:
        gate.set()
        host.close()
