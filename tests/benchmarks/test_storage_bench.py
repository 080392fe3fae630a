"""The benchmark of the disk moves every block once, and notices wrong answers and failures."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("matplotlib")

from benchmarks.leader.index import PROMPT_BLOCKS
from benchmarks.storage import kvbm_side, lookup, throughput
from benchmarks.storage.blocks import Blocks
from benchmarks.storage.fio_side import FioSide
from benchmarks.storage.kvbm_side import KvbmSide, as_prompts, scattered
from benchmarks.storage.sides import Rates
from benchmarks.suite import WrongAnswer
from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.aio_io import make_file_io
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.record_io import Record, RecordIo
from kvbm_core.types import BlockKey

NUM_BLOCKS, BLOCK_BYTES = 24, 8192


# ---------------------------------------------------------------- goals


def test_the_better_engine_is_the_peer_and_our_threads_are_not() -> None:
    samples = {
        throughput.PROMPTS: [Rates(9.0, 9.0)] * 3,
        throughput.SCATTERED: [Rates(5.0, 5.0)] * 3,
        throughput.AIO_ALONE: [Rates(99.0, 99.0)] * 3,
        "fio libaio": [Rates(10.0, 1.0), Rates(1.0, 1.0), Rates(10.0, 30.0)],
        "fio io_uring": [Rates(9.0, 2.0)] * 3,
    }
    figures = throughput.fio_figures(1 << 20, samples, {})
    assert [round(figure.their_value) for figure in figures] == [10, 10, 2, 2]
    assert [figure.verdict for figure in figures] == ["met", "short", "met", "met"]
    assert figures[0].ratios == [0.9, 9.0, 0.9]
    assert throughput.AIO_ALONE in figures[0].peers


# ---------------------------------------------------------------- the order of blocks


@pytest.mark.parametrize("order", [as_prompts, scattered])
@pytest.mark.parametrize(("num_blocks", "batch_blocks"), [(1, 4), (2, 1), (64, 16), (65, 16), (100, 200)])
def test_every_block_once(
    order: kvbm_side.Order, num_blocks: int, batch_blocks: int, rng: random.Random
) -> None:
    batches = order(num_blocks, batch_blocks, rng)
    assert sorted(block for batch in batches for block in batch) == list(range(num_blocks))
    assert max(map(len, batches)) <= batch_blocks


def test_prompts_are_neighbours_and_scattered_blocks_are_not(rng: random.Random) -> None:
    for batch in as_prompts(256, 32, rng):
        assert batch == list(range(batch[0], batch[0] + 32))
    for batch in scattered(256, 32, rng):
        slots = sorted(batch)
        assert all(after - before > 1 for before, after in pairwise(slots))
        assert slots != batch


# ---------------------------------------------------------------- kvbm's side


MakeSide = Callable[[type[KvbmSide]], KvbmSide]


@pytest.fixture
def make_side(tmp_path: Path, seed: int) -> Iterator[MakeSide]:
    """Sides on one small block file."""
    blocks = Blocks(NUM_BLOCKS, BLOCK_BYTES, seed)
    file = BlockFile(tmp_path / "kvbm.blocks", Geometry(NUM_BLOCKS, BLOCK_BYTES, throughput.FINGERPRINT))
    made: list[KvbmSide] = []

    def make(kind: type[KvbmSide]) -> KvbmSide:
        make_io = partial(make_file_io, file.fd, is_direct=file.is_direct)
        made.append(kind("side", file, blocks, make_io, order=scattered, seed=seed))
        return made[-1]

    yield make
    for side in made:
        side.close()
    file.close()
    blocks.close()


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_lane_that_only_says_ok_is_noticed(
    call: str, make_side: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = make_side(KvbmSide)
    side.turn()

    def lie(self: RecordIo, records: Sequence[Record], **kwargs: object) -> list[Outcome]:
        return [Outcome.OK] * len(records)

    monkeypatch.setattr(RecordIo, call, lie)
    with pytest.raises(WrongAnswer, match="wrong bytes"):
        side.turn()


def test_one_wrong_bit_is_noticed(make_side: MakeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    side, read = make_side(KvbmSide), RecordIo.read
    before = int(side._blocks.slab.array[-1])

    def flip(self: RecordIo, records: Sequence[Record], *, deadline_s: float) -> list[Outcome]:
        outcomes = read(self, records, deadline_s=deadline_s)
        side._blocks.slab.array[-1] = before ^ 1  # however many batches there are
        return outcomes

    monkeypatch.setattr(RecordIo, "read", flip)
    with pytest.raises(WrongAnswer, match="wrong bytes"):
        side.turn()


def test_an_outcome_that_is_not_ok_is_noticed(make_side: MakeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    side = make_side(KvbmSide)
    monkeypatch.setattr(kvbm_side, "DEADLINE_S", -1.0)
    with pytest.raises(WrongAnswer, match="timed_out"):
        side.turn()


# ---------------------------------------------------------------- fio


def fio_result(status: int, out: str, err: str = "") -> subprocess.CompletedProcess[str]:
    """What a run of fio may leave."""
    return subprocess.CompletedProcess(["fio"], status, out, err)


def fio_json(moved_bytes: int, error: int = 0) -> str:
    """As fio prints it, with a note before."""
    job = {"error": error, "write": {"io_bytes": moved_bytes, "bw_bytes": 3_000_000_000}}
    return "note: something\n" + json.dumps({"jobs": [job]})


def test_fios_rate_is_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    side = FioSide("libaio", tmp_path / "fio", 1 << 20, 1 << 18)
    monkeypatch.setattr(side, "_run", lambda direction: fio_result(0, fio_json(1 << 20)))
    assert side._rate("write") == 3.0
    monkeypatch.setattr(side, "_run", lambda direction: fio_result(0, fio_json((1 << 20) - 1)))
    with pytest.raises(WrongAnswer, match="moved 1048575 of 1048576"):
        side._rate("write")


# ---------------------------------------------------------------- vLLM


@pytest.mark.nightly("loads vLLM to time its tier: 8 s")
@pytest.mark.vllm
def test_vllms_tier_moves_blocks_and_leaves_no_file(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from vllm.v1.kv_offload.tiering.fs import manager

    from benchmarks.storage import vllm_side

    assert throughput.vllm_problem() is None
    monkeypatch.setattr(vllm_side, "JOB_BYTES", 5 * BLOCK_BYTES)
    blocks = Blocks(NUM_BLOCKS, BLOCK_BYTES, seed)
    side = vllm_side.VllmFsSide(tmp_path, blocks)
    try:
        for _ in range(2):  # the second turn has to write again
            assert min(side.turn()) > 0
            assert list(tmp_path.rglob("*.bin")) == []
        for name, said in (("batch_load_block", "wrong bytes"), ("batch_store_block", "0 of 5 jobs")):
            with monkeypatch.context() as lying:
                lying.setattr(manager, name, lambda *arguments: None)
                with pytest.raises(WrongAnswer, match=said):
                    side.turn()
    finally:
        side.close()
        del side
        blocks.close()


# ---------------------------------------------------------------- lookups


RESIDENT = 2 * PROMPT_BLOCKS


def test_a_lookup_that_finds_too_little_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockTier, "match_prefix", lambda self, keys: len(keys) - 1)
    with pytest.raises(WrongAnswer, match="found 8191 of 8192"):
        lookup.measure(1, 1, RESIDENT)


@pytest.mark.skipif(not lookup.io_counters(), reason="this kernel does not count a thread's I/O")
def test_a_lookup_that_reads_a_file_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "index"
    path.write_bytes(b"index")

    def look(self: BlockTier, keys: Sequence[BlockKey]) -> int:
        path.read_bytes()
        return len(keys)

    monkeypatch.setattr(BlockTier, "match_prefix", look)
    with pytest.raises(WrongAnswer, match="did I/O"):
        lookup.measure(1, 1, RESIDENT)
