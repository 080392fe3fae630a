"""Blocks outlive leader and workers: what was stored is found by the next ones, or is a miss."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvbm_core.storage.disk.allocate import FileOptions
from kvbm_core.storage.disk.record import SECTOR_BYTES, slot_offset_bytes
from kvbm_core.testing.executor_bench import LONG_S
from tests.faults.doubles import BUFFERED
from tests.unit.worker_disk_engine import DISK_SLOTS, STRAY, DiskEngine

FIRST_LIFE = """
import sys
from pathlib import Path
from tests.unit.worker_disk_engine import DiskEngine
engine = DiskEngine(Path(sys.argv[1]), int(sys.argv[2]))
engine.wait_ready()
engine.store_prompt()
print("stored", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("options", [FileOptions(), BUFFERED], ids=["direct", "buffered"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_stored_is_found_by_the_next_engine(
    tmp_path: Path, ranks: int, options: FileOptions
) -> None:
    first = DiskEngine(tmp_path, ranks, options=options)
    try:
        first.wait_ready()
        assert first.disk.slots.resident_blocks == 0  # a new file is empty, and usable at once
        first.store_prompt()
        first.leader.check_integrity()
    finally:
        first.close()
    again = DiskEngine(tmp_path, ranks, options=options)
    try:
        check_prompt_comes_back(again)
    finally:
        again.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_was_stored_survives_the_death_of_all_of_them(tmp_path: Path, ranks: int) -> None:
    command = [sys.executable, "-c", FIRST_LIFE, str(tmp_path), str(ranks)]
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "stored\n"
        finally:
            process.send_signal(signal.SIGKILL)
    again = DiskEngine(tmp_path, ranks)
    try:
        check_prompt_comes_back(again)
    finally:
        again.close()


def check_prompt_comes_back(engine: DiskEngine) -> None:
    """From the disk first, and from the host the next time; with the bytes that were on the device."""
    engine.wait_ready()
    assert engine.disk.slots.resident_blocks == 10 and engine.tier.resident_blocks == 0
    for memory in engine.memories:
        for storage in memory.storages:
            storage[:] = 0
    plan = engine.onboard_prompt()
    assert plan is not None and plan.reads and len(plan.reads[0].keys) == 10
    assert engine.on_devices() == engine.expected()
    assert engine.tier.resident_blocks == 10
    for memory in engine.memories:
        for storage in memory.storages:
            storage[:] = 0
    plan = engine.onboard_prompt("reader 2")
    assert plan is not None and not plan.reads
    assert engine.on_devices() == engine.expected()
    engine.leader.check_integrity()


def test_bytes_and_seconds_are_counted_on_each_way_between_tiers(tmp_path: Path) -> None:
    first = DiskEngine(tmp_path, 2)
    try:
        first.wait_ready()
        first.store_prompt()
        of_device = sum(len(block) for rank in first.expected() for block in rank)
        of_disk = 2 * 10 * first.slot_bytes
        assert ways(first) == {("device", "host"): of_device, ("host", "disk"): of_disk}
    finally:
        first.close()
    again = DiskEngine(tmp_path, 2)
    try:
        again.wait_ready()
        assert again.onboard_prompt() is not None
        # All that was read is counted, with what fills a record up to whole sectors.
        assert ways(again) == {("disk", "host"): of_disk, ("host", "device"): of_device}
    finally:
        again.close()


def ways(engine: DiskEngine) -> dict[tuple[str, str], float]:
    """Bytes by where from and where to; each with its seconds."""
    counted = engine.leader.metrics.snapshot()
    found = {}
    for name, value in counted.items():
        if name.startswith("kvbm_tier_transfer_bytes_total") and value:
            labels = name.removeprefix("kvbm_tier_transfer_bytes_total")
            assert counted[f"kvbm_tier_transfer_seconds_count{labels}"] == 1
            assert 0 < counted[f"kvbm_tier_transfer_seconds_sum{labels}"] < LONG_S
            source, target = re.findall('"([a-z]+)"', labels)
            found[source, target] = value
    return found


def test_one_rank_that_has_lost_its_file_has_a_say(tmp_path: Path) -> None:
    """A block is there if every rank has it."""
    first = DiskEngine(tmp_path, 2)
    first.wait_ready()
    first.store_prompt()
    first.close()
    first.rank_file(1).unlink()
    again = DiskEngine(tmp_path, 2)
    try:
        again.wait_ready()
        assert again.disk.slots.resident_blocks == 0 and again.onboard_prompt() is None
        again.store_prompt()
    finally:
        again.close()


def test_a_damaged_record_is_a_miss_and_no_wrong_byte(tmp_path: Path) -> None:
    first = DiskEngine(tmp_path)
    first.wait_ready()
    first.store_prompt()
    first.close()
    with first.rank_file().open("r+b") as file:
        for slot in range(DISK_SLOTS):
            file.seek(slot_offset_bytes(slot, first.slot_bytes) + SECTOR_BYTES + 17)
            file.write(b"\xff\x00\xff")
    again = DiskEngine(tmp_path)
    try:
        again.wait_ready()
        assert again.disk.slots.resident_blocks == 10  # headers are whole
        assert again.onboard_prompt() is not None
        assert again.leader.metrics.snapshot()['kvbm_failures_total{kind="onboard_corrupt"}'] == 1
        assert again.onboard_prompt("reader 2") is None and again.tier.resident_blocks == 0
        again.leader.check_integrity()
    finally:
        again.close()


def test_a_reset_is_for_good(tmp_path: Path) -> None:
    first = DiskEngine(tmp_path)
    first.wait_ready()
    first.store_prompt()
    first.leader.reset()
    assert first.onboard_prompt() is None
    # The order to forget and what follows come on one channel, in order.
    first.tell_all(STRAY)
    first.wait_for(lambda: first.leader.stale_results_total == 1)
    first.close()
    again = DiskEngine(tmp_path)
    try:
        again.wait_ready()
        assert again.disk.slots.keys() == [b"x" * 32] and again.onboard_prompt() is None
    finally:
        again.close()
