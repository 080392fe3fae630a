"""What the benchmark of the disk times is what it says, and it notices wrong answers, failures and a lack of
room.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("matplotlib")

from benchmarks.leader.index import PROMPT_BLOCKS
from benchmarks.storage import fio_side, kvbm_side, lookup, part, place, throughput, weights
from benchmarks.storage.blocks import Blocks
from benchmarks.storage.fio_side import FioSide, fio_problem
from benchmarks.storage.kvbm_side import KvbmSide, WithoutChecksum, as_prompts, scattered
from benchmarks.storage.part import StoragePart
from benchmarks.storage.sides import Rates
from benchmarks.suite import CannotRun, Effort, Options, WrongAnswer
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk import lane
from kvbm_core.storage.disk.aio_io import make_file_io
from kvbm_core.storage.disk.block_file import BlockFile, Geometry
from kvbm_core.storage.disk.lane import Lane, Record
from kvbm_core.storage.disk.record import payload_digest
from kvbm_core.tiers.tier import BlockTier
from kvbm_core.types import BlockKey

NUM_BLOCKS, BLOCK_BYTES = 24, 8192
FIO = shutil.which("fio")
needs_fio = pytest.mark.skipif(FIO is None, reason="fio is not installed")


# ---------------------------------------------------------------- goals


def test_the_rows_are_those_of_the_issue() -> None:
    goals = {goal.name: goal for goal in StoragePart().goals}
    for size in ("64 KiB", "256 KiB", "1 MiB", "4 MiB"):
        for direction in ("write", "read"):
            for pattern in ("as prompts are stored", "scattered"):
                goal = goals[f"{direction}, {size}, {pattern}"]
                assert (goal.bound, goal.better, goal.against) == (0.85, "higher", throughput.BETTER_FIO)
    for size in ("64 KiB", "128 KiB"):
        for direction in ("write", "read"):
            goal = goals[f"{direction}, {size}, against a file per block"]
            assert (goal.bound, goal.better, goal.against) == (2.0, "higher", "vLLM fs tier")
    assert all(goal.bound == 0.97 for name, goal in goals.items() if "checksums" in name)
    assert all(goal.text == "≤ 1 ms" for name, goal in goals.items() if "lookup" in name)
    assert all(goal.text == "≤ 10 s" for name, goal in goals.items() if "records" in name)
    assert all(goal.bound == 0.7 for name, goal in goals.items() if "all bytes checked" in name)
    assert goals[weights.COLD.name].bound == 0.8 and goals[weights.AGAIN.name].bound == 0
    assert len(goals) == 16 + 4 + 4 + 2 + 2 + 3 + 2


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


def test_a_turn_gives_rates(make_side: MakeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvbm_side, "BATCH_BYTES", 4 * BLOCK_BYTES)
    side = make_side(KvbmSide)
    for _ in range(3):
        rates = side.turn()
        assert min(rates) > 0


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_lane_that_only_says_ok_is_noticed(
    call: str, make_side: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = make_side(KvbmSide)
    side.turn()

    def lie(self: Lane, records: Sequence[Record], **kwargs: object) -> list[Outcome]:
        return [Outcome.OK] * len(records)

    monkeypatch.setattr(Lane, call, lie)
    with pytest.raises(WrongAnswer, match="wrong bytes"):
        side.turn()


def test_one_wrong_bit_is_noticed(make_side: MakeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    side, read = make_side(KvbmSide), Lane.read
    before = int(side._blocks.slab.array[-1])

    def flip(self: Lane, records: Sequence[Record], *, deadline_s: float) -> list[Outcome]:
        outcomes = read(self, records, deadline_s=deadline_s)
        side._blocks.slab.array[-1] = before ^ 1  # however many batches there are
        return outcomes

    monkeypatch.setattr(Lane, "read", flip)
    with pytest.raises(WrongAnswer, match="wrong bytes"):
        side.turn()


def test_an_outcome_that_is_not_ok_is_noticed(make_side: MakeSide, monkeypatch: pytest.MonkeyPatch) -> None:
    side = make_side(KvbmSide)
    monkeypatch.setattr(kvbm_side, "DEADLINE_S", -1.0)
    with pytest.raises(WrongAnswer, match="timed_out"):
        side.turn()


def test_without_checksum_means_that_no_payload_is_digested(
    make_side: MakeSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    digested: list[int] = []
    digest = payload_digest

    def counting(payload: memoryview) -> bytes:
        digested.append(len(payload))
        return digest(payload)

    monkeypatch.setattr(lane, "payload_digest", counting)
    make_side(KvbmSide).turn()
    assert digested == [BLOCK_BYTES] * (2 * NUM_BLOCKS)
    digested.clear()
    make_side(WithoutChecksum).turn()
    assert not digested
    make_side(KvbmSide).turn()  # and it is back afterwards
    assert len(digested) == 2 * NUM_BLOCKS


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


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (fio_result(1, "", "\nfio: engine io_uring not loadable\nmore"), "fio: engine io_uring not loadable"),
        (fio_result(0, fio_json(0, error=1)), "note: something"),
        (fio_result(3, ""), "ended with status 3"),
        (fio_result(0, '{"jobs": []}'), "ended with status 0"),
    ],
)
def test_a_fio_that_fails_is_one_line(result: subprocess.CompletedProcess[str], said: str) -> None:
    with pytest.raises(CannotRun) as reason:
        fio_side.parse(result, "fio io_uring")
    assert str(reason.value) == f"fio io_uring: {said}"


@needs_fio
def test_the_real_fio_is_understood(tmp_path: Path) -> None:
    side = FioSide("libaio", tmp_path / "fio", 1 << 20, 1 << 16)
    try:
        rates = side.turn()
    except CannotRun as reason:  # a place without O_DIRECT: then that must be what it says
        assert fio_problem("libaio", tmp_path) == str(reason)
        return
    assert min(rates) > 0
    assert (tmp_path / "fio").stat().st_size == 1 << 20
    side.close()
    assert fio_problem("libaio", tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@needs_fio
def test_an_engine_that_fio_does_not_have_is_left_out(tmp_path: Path) -> None:
    problem = fio_problem("no-such-engine", tmp_path)
    assert problem is not None
    assert problem.startswith("fio no-such-engine: ")
    assert "\n" not in problem


# ---------------------------------------------------------------- vLLM


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


def test_lookups_are_measured() -> None:
    figures = lookup.measure(3, 1, RESIDENT)
    assert [figure.goal for figure in figures] == list(lookup.GOALS)
    assert all(len(figure.ours) == 3 and min(figure.ours) > 0 for figure in figures)


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


# ---------------------------------------------------------------- place and part


@pytest.fixture(autouse=True)
def no_tmpdir(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output folder is used unless a test says otherwise."""
    monkeypatch.delenv("TMPDIR", raising=False)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, SystemExit])
def test_nothing_is_left_behind(error: type[BaseException] | None, tmp_path: Path) -> None:
    def use() -> None:
        with place.working_folder(Options(output=tmp_path / "out"), 1) as folder:
            assert folder.parent == tmp_path / "out"
            (folder / "file").write_bytes(b"blocks")
            if error is not None:
                raise error

    if error is None:
        use()
    else:
        with pytest.raises(error):
            use()
    assert list((tmp_path / "out").iterdir()) == []


def test_tmpdir_is_where_the_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with place.working_folder(Options(output=tmp_path / "out"), 1) as folder:
        assert folder.parent == tmp_path
    assert not (tmp_path / "out").exists()


def test_too_little_space_is_one_line(tmp_path: Path) -> None:
    said = r"GB are free, 1000000000\.0 GB are needed; set TMPDIR"
    with pytest.raises(CannotRun, match=said), place.working_folder(Options(output=tmp_path), 10**18):
        pytest.fail("there is no such disk")


def test_too_little_memory_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.storage.blocks.available_memory_bytes", lambda: 1 << 20)
    with pytest.raises(CannotRun, match="too little memory"):
        Blocks(2, BLOCK_BYTES, 1)


def test_the_report_says_what_disk_it_was(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "20 1 8:1 / /mnt rw,relatime - ext4 /dev/sda1 rw\n"
        "21 1 8:2 / /data rw,noatime shared:5 - xfs /dev/sdb1 rw,attr2\n"
    )
    assert place._file_system("8:2", mounts) == "xfs on /dev/sdb1 (rw,noatime)"
    assert place._file_system("9:9", mounts) == "unknown"
    disk = tmp_path / "sys" / "sda"
    for name, text in {
        "queue/rotational": "0",
        "queue/scheduler": "[none]",
        "device/model": "Fast Disk",
    }.items():
        (disk / name).parent.mkdir(parents=True, exist_ok=True)
        (disk / name).write_text(text + "\n")
    (disk / "sda1").mkdir()
    (disk / "sda1" / "partition").write_text("1\n")
    described = "sda, Fast Disk, no moving parts, scheduler [none]"
    assert place._device(disk) == place._device(disk / "sda1") == described
    assert "no block device" in place._device(tmp_path / "nothing")


def test_the_part_runs_without_peers_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part, "QUICK_BYTES", 8 << 20)
    monkeypatch.setattr(fio_side, "_program", str)
    monkeypatch.setattr(throughput, "vllm_problem", lambda: "vLLM is not installed")
    monkeypatch.setattr(lookup, "measure", partial(lookup.measure, num_resident=RESIDENT))
    told: list[str] = []
    found = StoragePart().run(Options(effort=Effort.QUICK, output=tmp_path, told=told.append))
    assert [figure.goal for figure in found.figures] == list(StoragePart().goals)
    verdicts = {figure.goal.name: (figure.verdict == "not run", figure.note) for figure in found.figures}
    assert verdicts["read, 4 MiB, scattered"] == (True, fio_side.MISSING)
    assert verdicts["write, 128 KiB, against a file per block"] == (True, "vLLM is not installed")
    assert all(figure.is_measured for figure in found.figures if "checksums" in figure.goal.name)
    assert "vLLM is not installed" in found.settings["peers left out"]
    assert found.settings["kvbm's I/O"].startswith(("AioIo", "ThreadIo"))
    assert any("4 MiB" in text for text in told)
    assert list(tmp_path.iterdir()) == []
