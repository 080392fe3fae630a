"""Host and disk tier under TensorRT-LLM: what left the host comes back; what was damaged is never read by a
model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.storage.disk.io import Transfer
from kvbm_core.storage.disk.record import slot_offset_bytes, whole_sectors
from kvbm_core.testing import toy_store
from kvbm_core.transfer.movers import disk as disk_mover
from kvbm_core.transfer.plan import TransferPlan
from kvbm_core.types import Direction
from kvbm_trtllm.notes import LoadEnded, decode

pytest.importorskip("torch", reason="NOT RUN: TensorRT-LLM's connector against its double; torch is missing")

from tests.trtllm.double import RELEASED, DoubleFailure
from tests.trtllm.double.failure import PATIENCE_S
from tests.trtllm.harness import KeepingExecutor, Kind, Serving, kinds, serve
from tests.trtllm.kinds import NEWEST_2, RELEASED_1, RELEASED_2, each
from tests.unit.disk_mover_bench import GatedIo

Play = Callable[..., list[Any]]
PROMPT = list(range(40))
CAP = 36
HOST_BLOCKS = 30
DISK_BLOCKS = 1000
BLOCK_BYTES = 2 * 2 * 4 * 8
ALL_KINDS = [*kinds(1), *(kind for kind in kinds(2) if kind.overlap)]
# The newest one keeps the blocks of a request that is cancelled in its load until the load is over.
HANGING = [Kind(RELEASED, "v1", False), RELEASED_1]
STALLING = [*kinds(1)[1::2], RELEASED_2, NEWEST_2]
FROM_DISK = "kvbm_onboard_blocks_d2d"
TO_DISK = "kvbm_offload_blocks_h2d"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a model whose weights can be looked at: its blocks are found again by another process."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    return tmp_path


@contextmanager
def serve_with_disk(
    rank: int,
    kind: Kind,
    folder: Path,
    *,
    is_filtered: bool = False,
    checks: bool = True,
    host_blocks: int = HOST_BLOCKS,
    disk_blocks: int = DISK_BLOCKS,
    store: str | None = None,
    **options: Any,
) -> Iterator[Serving]:
    """Both tiers, and below them the store behind that URL; what has been found on disk is taken in."""
    env = {
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": str(disk_blocks),
        "DYN_KVBM_DISK_CACHE_DIR": str(folder / "disk"),
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": str(not is_filtered).lower(),
    }
    if not checks:  # under TensorRT-LLM it does unless told otherwise
        env["KVBM_DISK_CHECK_AT_START"] = "false"
    if store is not None:
        toy_store.register()
        env |= {"KVBM_REMOTE_URL": store, "KVBM_REMOTE_CACHE_GB": "0"}
    with serve(
        rank, kind, host_blocks=host_blocks, env=env, model=str(folder / "model"), **options
    ) as serving:
        serving.may_fail = True  # blocks that find no room in so small a host
        serving.step_until(
            lambda: serving.from_leader(lambda: serving.disk.slots.capacity_blocks == disk_blocks)
        )
        yield serving


def push_out(serving: Serving) -> None:
    """Other prompts take the places in the device's cache and in the host tier."""
    for start in range(1000, 7000, 500):
        serving.ask(range(start, start + 60), 2)
        serving.forget_device()
    hosted = serving.from_leader(lambda: serving.leader.chain.host.resident_blocks)
    assert 0 < hosted <= HOST_BLOCKS


def comes_back(rank: int, kind: Kind, folder: Path) -> None:
    """A job: evicted blocks come back from disk, and stay in the host."""
    with serve_with_disk(rank, kind, folder) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        push_out(serving)
        before = serving.metric(FROM_DISK)
        serving.expect_match(serving.ask(PROMPT), (CAP, True))
        assert serving.metric(FROM_DISK) == before + CAP // 4
        serving.forget_device()
        serving.expect_match(serving.ask(PROMPT), (CAP, True))
        assert serving.metric(FROM_DISK) == before + CAP // 4, "what came from disk was not kept in the host"
        assert serving.metric('kvbm_failures_total{kind="onboard_corrupt"}') == 0


@pytest.mark.parametrize("kind", each(ALL_KINDS))
def test_evicted_blocks_come_back_from_disk(kind: Kind, folder: Path, play: Play) -> None:
    play(kind, comes_back, kind, folder)


def several_come_back(rank: int, kind: Kind, folder: Path) -> None:
    """A job: prompts in any order, from three places at once."""
    with serve_with_disk(rank, kind, folder, chunk_tokens=16) as serving:
        for i in range(8):  # alone: at once they may find no room in the host, and then are not stored
            serving.ask(range(100 * i, 100 * i + 20), 5)
            serving.forget_device()
        for turn in range(3):
            requests = [serving.submit(range(100 * i, 100 * i + 20 + 6 * turn), 5) for i in range(8)]
            serving.executor.run_until_idle()
            assert {serving.reason(request) for request in requests} == {"length"}
            serving.forget_device()
        assert serving.metric(FROM_DISK) > 0


@pytest.mark.parametrize("kind", each(kinds(1)))
def test_prompts_from_all_tiers(kind: Kind, folder: Path, play: Play) -> None:
    play(kind, several_come_back, kind, folder)


def catches_up(rank: int, kind: Kind, folder: Path) -> None:
    """A job: what was found is taken in at the start while another thread may poll; they must take turns."""
    with serve_with_disk(rank, kind, folder) as serving:
        seen: list[bool] = []
        serving.side.leader.catch_up = lambda: seen.append(serving.leader.lock._is_owned())
        assert serving.executor.leader is not None
        serving.executor.leader.part.wait()
        assert seen == [True]


def test_what_was_found_is_taken_in_under_the_lock(folder: Path, play: Play) -> None:
    kind = kinds(1)[0]
    play(kind, catches_up, kind, folder)


def fill(rank: int, kind: Kind, folder: Path) -> float:
    """A job: how much one prompt leaves on disk."""
    with serve_with_disk(rank, kind, folder) as serving:
        serving.ask(PROMPT)
        serving.settle()
        return serving.metric(TO_DISK)


def find(rank: int, kind: Kind, folder: Path, stored: float) -> None:
    """A job: another engine in the same folder has all of it."""
    with serve_with_disk(rank, kind, folder) as serving:
        assert serving.from_leader(lambda: serving.disk.slots.resident_blocks) == stored
        serving.expect_match(serving.ask(PROMPT), (CAP, True))
        assert serving.metric(FROM_DISK) == CAP // 4


@pytest.mark.parametrize("kind", each(ALL_KINDS))
def test_a_new_engine_finds_what_the_old_one_left(kind: Kind, folder: Path, play: Play) -> None:
    stored = play(kind, fill, kind, folder)[0]
    assert stored >= CAP // 4
    play(kind, find, kind, folder, stored)


@pytest.mark.parametrize("kind", each(kinds(1)))
def test_other_weights_find_nothing(kind: Kind, folder: Path, play: Play) -> None:
    play(kind, fill, kind, folder)
    (folder / "model" / "model.safetensors").write_bytes(bytes(range(255, -1, -1)) * 40)
    play(kind, find_nothing, kind, folder)


def find_nothing(rank: int, kind: Kind, folder: Path) -> None:
    """A job: nothing of what is there is of this model."""
    with serve_with_disk(rank, kind, folder) as serving:
        serving.expect_match(serving.ask(PROMPT), (0, False))


def only_what_was_hit(rank: int, kind: Kind, folder: Path) -> None:
    """A job: the filter of the disk tier."""
    with serve_with_disk(rank, kind, folder, is_filtered=True) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        assert serving.metric(TO_DISK) == 0
        serving.ask(PROMPT)
        assert serving.metric(TO_DISK) == CAP // 4


@pytest.mark.parametrize("kind", each(kinds(1)))
def test_the_filter_lets_pass_what_was_hit(kind: Kind, folder: Path, play: Play) -> None:
    play(kind, only_what_was_hit, kind, folder)


# ---------------------------------------------------------------- a disk that stalls


def note_what_is_awaited(serving: Serving, patch: pytest.MonkeyPatch) -> set[int]:
    """The jobs that this rank's loop waits for from now on."""
    awaited, wait = set[int](), serving.gate.wait

    def note(job_ids: Collection[int], timeout_s: float) -> bool:
        awaited.update(job_ids)
        return wait(job_ids, timeout_s)

    patch.setattr(serving.gate, "wait", note)
    return awaited


def stall_in_a_load(rank: int, kind: Kind, folder: Path) -> None:
    """A job: a load waits for the disk, is cancelled, and its blocks go to a request that reads its own bytes
    there, before and after the disk goes on.
    """
    goes_on, is_reading = threading.Event(), threading.Event()

    def make_file_io(fd: int, *, is_direct: bool) -> GatedIo:
        def is_read(transfer: Transfer, is_write: bool) -> bool:
            if not is_write:
                is_reading.set()
            return not is_write

        return GatedIo(fd, is_read, None, goes_on)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_mover, "make_file_io", make_file_io)
        with serve_with_disk(rank, kind, folder, checks=False, num_blocks=24) as serving:
            loading = serving.submit(PROMPT)
            serving.executor.step()
            serving.expect_match(loading, (CAP, True))
            assert is_reading.wait(PATIENCE_S)
            awaited = note_what_is_awaited(serving, patch)
            serving.executor.cancel(loading)
            serving.executor.step()
            assert serving.reason(loading) == "cancelled"
            other = serving.submit(range(500, 550), 40)  # needs the blocks that were to be filled
            for _ in range(20):
                serving.executor.step()
            loads = {plan.job_id for plan in serving.gate.submitted_of(Direction.ONBOARD)}
            assert loads and awaited.isdisjoint(loads), "the loop stood still for the disk"
            goes_on.set()
            worker, ends_at_s = serving.executor.worker.side.worker, time.monotonic() + PATIENCE_S
            while worker._late:  # no iteration passes until the late read is over
                assert time.monotonic() < ends_at_s
                time.sleep(0)
            assert other not in serving.executor.outputs, "it had ended before the disk went on"
            serving.executor.run_until_idle()
            assert serving.reason(other) == "length"
            serving.forget_device()
            again = serving.ask(PROMPT)
            assert serving.reason(again) == "length"


@pytest.mark.parametrize("kind", each(STALLING))
def test_a_load_that_was_cancelled_at_a_stalled_disk_writes_to_nobody(
    kind: Kind, folder: Path, play: Play
) -> None:
    play(kind, fill, kind, folder)
    play(kind, stall_in_a_load, kind, folder)


def hang_in_a_load(rank: int, kind: Kind) -> None:
    """A job: the copies of a load never end, and its blocks are given to another request."""
    ends_loop = pytest.raises(DoubleFailure, match=r"StuckCopyError.*must not go on")
    with ends_loop, serve(rank, kind, num_blocks=24) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        serving.gate.hold(Direction.ONBOARD)
        loading = serving.submit(PROMPT)
        serving.executor.step()
        serving.gate.hangs = True
        serving.executor.cancel(loading)
        other = serving.submit(range(500, 560), 20)
        serving.executor.run_until_idle()
        assert other not in serving.executor.outputs


@pytest.mark.parametrize("kind", each(HANGING))
def test_no_forward_pass_while_a_load_hangs_that_writes_its_blocks(kind: Kind, play: Play) -> None:
    """The loop ends with an error, as TensorRT-LLM ends it for any error outside of a forward pass."""
    play(kind, hang_in_a_load, kind)


# ---------------------------------------------------------------- damage


def flip(folder: Path, slots: range) -> None:
    """Flips a bit in the bytes of these slots, in the file of the last rank."""
    path = max((folder / "disk" / "kvbm").rglob("*.blocks"))
    with path.open("r+b") as file:
        for slot in slots:
            # Behind the record's header: only its checksum can tell.
            at = slot_offset_bytes(slot, whole_sectors(BLOCK_BYTES)) + 4096 + 5
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 4]))


def meet_damage(rank: int, kind: Kind, folder: Path) -> None:
    """A job: one of the blocks on disk is not what it was, on one rank, and nobody has looked."""
    with serve_with_disk(rank, kind, folder, checks=False, executor_class=KeepingExecutor) as serving:
        bystander = serving.ask(range(300, 320))
        failed = serving.ask(PROMPT)
        serving.expect_match(failed, (CAP, True))
        assert serving.reason(failed) == "error" and serving.output(failed) == []
        assert serving.metric('kvbm_failures_total{kind="onboard_corrupt"}') == 1
        # TensorRT-LLM kept the blocks for reuse; whoever finds them must not read them.
        for _ in range(2):
            again = serving.ask(PROMPT)
            assert serving.device_hit(again) == CAP
            assert serving.reason(again) == "error"
        assert len(serving.executor.errors) == 3
        if serving.executor.contract.leaks_on_error:
            return  # nobody ever gets those blocks, so whoever finds them fails until the engine starts anew
        # Others are served, and their blocks take the place of the tainted ones in the end.
        for start in range(2000, 8000, 500):
            assert serving.reason(serving.ask(range(start, start + 60), 4)) == "length"
            serving.settle()
        last = serving.ask(PROMPT)
        assert serving.reason(last) == "length"
        assert serving.device_hit(last) == 0
        serving.forget_device()
        served = serving.ask(PROMPT)
        serving.expect_match(served, (CAP, True))
        assert {serving.reason(bystander), serving.reason(served)} == {"length"}


@pytest.mark.parametrize("kind", each(ALL_KINDS))
def test_a_damaged_block_is_never_read(kind: Kind, folder: Path, play: Play) -> None:
    play(kind, fill, kind, folder)
    flip(folder, range(4, 5))
    play(kind, meet_damage, kind, folder)


def news_before_result(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load ends when the worker side has just taken results, and the leader has said its word on it before
    the worker side listens.
    """
    side = serving.executor.worker.side
    worker, held = side.worker, list[TransferPlan]()
    submit, take_notes = worker.submit, worker.take_notes

    def hold(plan: TransferPlan) -> None:
        if plan.direction is Direction.ONBOARD:
            held.append(plan)
        else:
            submit(plan)

    def load_and_take_notes() -> list[bytes]:
        notes, jobs = list[bytes](), {plan.job_id for plan in held}
        for plan in held:
            submit(plan)
        held.clear()
        assert worker.wait(jobs, PATIENCE_S)
        ends_at_s = time.monotonic() + PATIENCE_S
        while jobs and time.monotonic() < ends_at_s:
            side._find_leader().poll()
            worker.wait_note(0.01)
            news = take_notes()
            jobs -= {note.job_id for note in map(decode, news) if isinstance(note, LoadEnded)}
            notes += news
        return notes + take_notes()

    monkeypatch.setattr(worker, "submit", hold)
    monkeypatch.setattr(worker, "take_notes", load_and_take_notes)


def hear_first(rank: int, kind: Kind, folder: Path) -> None:
    """A job: as above, and the leader's word on the load is there before the rank looks at its own result."""
    with (
        serve_with_disk(rank, kind, folder, checks=False, executor_class=KeepingExecutor) as serving,
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        news_before_result(serving, monkeypatch)
        failed = serving.ask(PROMPT)
        serving.expect_match(failed, (CAP, True))
        assert serving.reason(failed) == "error" and serving.output(failed) == []


@pytest.mark.parametrize("kind", each(kinds(1)))
def test_news_of_a_failed_load_are_not_lost_that_come_before_its_result(
    kind: Kind, folder: Path, play: Play
) -> None:
    play(kind, fill, kind, folder)
    flip(folder, range(4, 5))
    play(kind, hear_first, kind, folder)


def leave_out_damage(rank: int, kind: Kind, folder: Path, stored: float, damaged: range) -> None:
    """A job: as above, but a start looks at all of the disk, as it does unless told otherwise."""
    with serve_with_disk(rank, kind, folder) as serving:
        serving.may_fail = False
        assert serving.from_leader(lambda: serving.disk.slots.resident_blocks) == stored - len(damaged)
        matched = 4 * damaged.start
        request = serving.ask(PROMPT)
        serving.expect_match(request, (matched, True))
        assert serving.metric(FROM_DISK) == matched // 4, "what is whole comes from the disk"
        serving.settle()
        serving.forget_device()
        again = serving.ask(PROMPT)
        serving.expect_match(again, (CAP, True))
        assert {serving.reason(request), serving.reason(again)} == {"length"}
        assert serving.executor.errors == []


@pytest.mark.parametrize("kind", each(ALL_KINDS))
def test_a_start_leaves_out_what_is_damaged(kind: Kind, folder: Path, play: Play) -> None:
    """No load fails, no request ends with an error; that its answers are right is looked at with each
    scenario.
    """
    stored = play(kind, fill, kind, folder)[0]
    damaged = range(4, 7)
    flip(folder, damaged)
    play(kind, leave_out_damage, kind, folder, stored, damaged)
