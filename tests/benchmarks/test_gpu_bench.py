"""The benchmark for GPUs, without one: its judgement of made-up figures, and its eye for wrong bytes."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.rows import Cell, Goal, Row
from benchmarks.gpu.stages import Options

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="NOT RUN: copies; torch is missing"
)
needs_httpx = pytest.mark.skipif(
    importlib.util.find_spec("httpx") is None, reason="NOT RUN: serving; httpx is missing"
)
SHARE = Goal("share", "GB/s", "limit", 0.9, "higher")


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (Row(SHARE, (9.0, 8.0, 1.0), (10.0, 8.0, 10.0)), "met"),  # by pairs: 0.9, 1.0, 0.1
        (Row(SHARE, (8.9,), (10.0,)), "short"),
        (Row(SHARE, (8.9,)), "failed: no samples"),
        (Row(SHARE, failure="it hung"), "failed: it hung"),
        (Row(Goal("wrong", "copies", bound=0), (0.0,)), "met"),
        (Row(Goal("wrong", "copies", bound=0), (1.0,)), "short"),
        (Row(Goal("rate", "GB/s"), (1.0,)), "measured"),
    ],
)
def test_a_row_judges_the_median_of_pairs(row: Row, verdict: str) -> None:
    assert row.verdict == verdict
    assert Row.read(json.loads(json.dumps(row.plain()))) == row
    dry = row.cells(is_dry=True)[-1]
    assert dry == (verdict if verdict.startswith("failed") else "dry run")


@needs_torch
def test_bytes_that_did_not_arrive_are_seen(tmp_path: Path) -> None:
    from benchmarks.gpu.device import DryGpu
    from benchmarks.gpu.memory import LAYOUTS, Cache, Pool, WrongBytes
    from kvbm_core.types import Direction

    device = DryGpu()
    pool = Pool(device, page_bytes=1024, layers=3, num_blocks=6, seed=1)
    for layout in LAYOUTS:
        cache = Cache(pool, layout)
        choice, other = pool.choose()
        assert not set(choice.slots) & set(other.slots) and not set(choice.blocks) & set(other.blocks)
        cache.finish(cache.submit([(choice, Direction.OFFLOAD)]))
        cache.check("offload", choice)
        pool.slab.array[choice.slots[-1] * pool.slab.slot_bytes + 2 * 1024] ^= 1
        with pytest.raises(WrongBytes, match=layout):
            cache.check("one byte", choice)
        pool.change()
        cache.finish(cache.submit([(choice, Direction.ONBOARD)]))
        cache.check("onboard", choice)
        pool.change()
        with pytest.raises(WrongBytes):
            cache.check("nothing was copied", choice)
        cache.close()
    pool.close()
    device.close()


@needs_torch
def test_the_layouts_are_those_of_vllm() -> None:
    import torch

    from benchmarks.gpu.memory import CROSS_LAYER, HEADS, LAYOUTS, PER_LAYER_HND, kv_tensors

    raw = torch.arange(2 * 3 * HEADS * 5 * 64, dtype=torch.int32)
    for layout in LAYOUTS:
        tensors = kv_tensors(raw, layout, 2, 3)
        assert [tuple(tensor.shape) for tensor in tensors] == [(3, HEADS, 5, 64)] * 2
        assert (tensors[0].stride(1) > tensors[0].stride(2)) == (layout == PER_LAYER_HND)
        assert (tensors[0].stride(0) == 2 * HEADS * 5 * 64) == (layout == CROSS_LAYER)


@needs_torch
def test_numa_nodes_are_read(tmp_path: Path) -> None:
    from benchmarks.gpu.pinned import numa_nodes

    for node, cpus in (("node0", "0-2,7\n"), ("node1", "3\n"), ("node2", "\n")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cpus)
    assert numa_nodes(tmp_path) == {0: {0, 1, 2, 7}, 1: {3}}


def serving_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: Sequence[str]
) -> tuple[dict[str, Row], list[Cell]]:
    """The serving stage's results with made-up measurements, ours twice as fast as the others."""
    from benchmarks.gpu import serving
    from benchmarks.gpu.chat import Pair, Played

    def measure(side: str, *arguments: Any) -> serving.Measured:
        if side in broken:
            raise RuntimeError("would not start")
        factor = 0.5 if side == serving.OURS else 1.0
        turns = ((9.0, 9.0), (factor, factor), (factor, factor))
        return [Pair(1.0, 0.1 * factor, 512, True)], Played(turns, 100 / factor, 4096)

    monkeypatch.setattr(serving, "_measure", measure)
    monkeypatch.setattr(serving, "install", lambda options: None)
    monkeypatch.setattr(serving, "write_model", lambda options: tmp_path)
    monkeypatch.setattr(serving, "exit_on_sigterm", lambda: None)
    options = Options(tmp_path, is_dry=True)
    results = list(serving.ServingStage().run(options))
    rows = [result for result in results if isinstance(result, Row)]
    assert sorted(row.goal.name for row in rows) == sorted(
        g.name for g in serving.ServingStage().goals(options)
    )
    return {row.goal.name: row for row in rows}, [cell for cell in results if isinstance(cell, Cell)]


@needs_httpx
def test_servers_are_compared_and_one_that_fails_spoils_only_its_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from benchmarks.gpu import serving

    rows, cells = serving_rows(monkeypatch, tmp_path, [])
    assert {row.verdict for row in rows.values()} == {"met"}
    assert rows[serving.HIT.name].ratio == pytest.approx(0.05)
    assert rows[serving.P99.name].ratio == pytest.approx(0.5)  # a first turn, cold for all, is not in it
    assert rows[serving.RATE.name].ratio == pytest.approx(2.0)
    assert len(cells) == 3 * 3
    rows, _ = serving_rows(monkeypatch, tmp_path, [serving.OFFLOADING])
    failed = {
        name
        for name, row in rows.items()
        if row.verdict.startswith("failed: OffloadingConnector: RuntimeError")
    }
    assert failed == {
        g.name for g in (serving.HIT_PEER, serving.P50, serving.P99, serving.WORST, serving.RATE)
    }
    rows, _ = serving_rows(monkeypatch, tmp_path, [serving.OURS])
    assert all(row.verdict.startswith("failed: kvbm") for row in rows.values())


@needs_httpx
def test_a_chat_goes_on_from_the_answers() -> None:
    from benchmarks.gpu.chat import EXTERNAL_HITS, Load, percentile, play
    from tests.engines.client import Answer

    class Client:
        """Remembers what it is asked; an answer is the prompt's length, twice."""

        def __init__(self) -> None:
            self.prompts: list[list[int]] = []

        async def complete(self, prompt: list[int], max_tokens: int) -> Answer:
            self.prompts.append(list(prompt))
            await asyncio.sleep(0)
            return Answer("", (len(prompt),) * max_tokens, len(prompt), 0.25, 1.0)

        async def engine_metrics(self) -> dict[str, float]:
            return {EXTERNAL_HITS: 7.0 * len(self.prompts)}

    client: Any = Client()
    load = Load(
        10, 1, users=3, rounds=2, opening_tokens=5, turn_tokens=4, answer_tokens=2, at_once=2, vocabulary=100
    )
    played = asyncio.run(play(client, load, seed=1))
    first, second = client.prompts[:3], client.prompts[3:]
    assert [len(prompt) for prompt in client.prompts] == [5] * 3 + [11] * 3
    assert [prompt[:7] for prompt in second] == [[*prompt, 5, 5] for prompt in first]
    assert len({tuple(prompt) for prompt in first}) == 3
    assert load.final_tokens == 13
    assert played.ttft_s == ((0.25,) * 3,) * 2 and played.all_ttft_s == [0.25] * 3
    assert played.external_tokens == 42 and played.tokens_per_s > 0
    assert [percentile(range(100), share) for share in (0.0, 0.5, 0.99, 1.0)] == [0, 50, 99, 99]


@needs_torch
def test_what_comes_from_disk_is_compared_and_tabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvbm_core.testing.file_io_contract import why_no_nixl

    if reason := why_no_nixl():
        pytest.skip(f"NOT RUN: disk to device by NIXL: {reason}")
    from benchmarks.gpu.disk import DIGESTS, WRONG, DiskStage
    from kvbm_core.transfer.movers.device_stage import DeviceStage

    options = Options(tmp_path, is_dry=True)
    digests, table, wrong = DiskStage().run(options)
    assert isinstance(digests, Row) and isinstance(wrong, Row) and isinstance(table, Cell)
    assert (digests.goal, digests.ours, wrong.goal, wrong.ours) == (DIGESTS, (0.0,), WRONG, (0.0,))
    assert table.values["by"] == "nixl-posix" and float(table.values["ratio"]) > 0
    monkeypatch.setattr(DeviceStage, "spread", lambda *arguments: None)
    *_, wrong = DiskStage().run(options)
    assert isinstance(wrong, Row) and wrong.ours == (1.0,), "bytes that did not arrive are not seen"
    assert not list(tmp_path.iterdir())


@needs_torch
def test_what_one_gpu_loads_for_all_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu.broadcast import BroadcastStage
    from kvbm_core.transfer.executors.device_rows import DeviceRows

    options = Options(tmp_path, is_dry=True)

    def rows() -> dict[str, Row]:
        found = [result for result in BroadcastStage().run(options) if isinstance(result, Row)]
        assert [row.goal for row in found] == list(BroadcastStage().goals(options))
        return {row.goal.name: row for row in found}

    right, gone = rows(), "until the others know that a GPU's process is gone"
    assert right["loads of one GPU for all that brought other bytes"].verdict == "met"
    assert right["load of one GPU for all"].ours and right[gone].verdict == "met"
    scatter = DeviceRows.scatter

    def lose_one(rows: DeviceRows, group: int, blocks: Sequence[int], mark: object) -> None:
        scatter(rows, group, blocks[1:], mark)

    monkeypatch.setattr(DeviceRows, "scatter", lose_one)
    assert rows()["loads of one GPU for all that brought other bytes"].verdict == "short"
