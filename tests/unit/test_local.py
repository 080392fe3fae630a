"""Host and disk of one process by key: what comes back, what is held, and what failures leave behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.runtime.local import LocalOptions, LocalTiers
from kvbm_core.storage.disk.record import slot_offset_bytes, whole_sectors
from kvbm_core.testing import toy_store
from kvbm_core.testing.executor_bench import LONG_S
from kvbm_core.testing.file_io_contract import why_no_nixl
from kvbm_core.tiers.slotted import SlottedTier
from kvbm_core.transfer.movers import disk as disk_mover
from kvbm_core.transfer.plan import OrderKind
from kvbm_core.types import SequenceHash, block_key
from tests.faults.doubles import FailingIo, HeldIo
from tests.unit.local_bench import KEYS, PIECE_BYTES, End, LocalBench, device_memory

FILE = "rank-0-of-1.blocks"
NO_NIXL = why_no_nixl()
MakeBench = Callable[..., LocalBench]


@pytest.fixture
def bench_of(tmp_path: Path) -> Iterator[MakeBench]:
    """Benches in one folder, closed at the end."""
    made: list[LocalBench] = []

    def make(num_slots: int = 12, disk_slots: int = 0, **more: object) -> LocalBench:
        made.append(LocalBench(tmp_path / "blocks", num_slots, disk_slots, **more))  # type: ignore[arg-type]
        return made[-1]

    (tmp_path / "blocks").mkdir()
    yield make
    for bench in made:
        bench.close()


# ---------------------------------------------------------------- host


def test_blocks_come_back_to_other_places(bench_of: MakeBench) -> None:
    bench = bench_of()
    assert bench.store(KEYS[:4]) is Outcome.OK
    assert bench.tiers.match("a", [*KEYS[:3], KEYS[5], KEYS[3]]) == 3
    assert bench.load("a", KEYS[:3]) is Outcome.OK and bench.came(KEYS[:3])
    assert bench.tiers.match("a", KEYS[5:]) == 0
    assert bench.metric("kvbm_onboard_blocks_h2d") == 3 and bench.metric("kvbm_offload_blocks_d2h") == 4
    assert bench.metric('kvbm_tier_blocks{tier="host",state="used"}') == 4


def test_blocks_of_several_groups_share_the_slots(bench_of: MakeBench) -> None:
    parts = [block_key(SequenceHash(KEYS[3]), group) for group in (1, 2)]
    keys = [*KEYS[:4], *parts]
    bench = bench_of(6, disk_slots=6, num_groups=3)
    assert bench.store(keys) is Outcome.OK
    assert bench.tiers.match("a", keys) == 6
    assert bench.load("a", keys) is Outcome.OK and bench.came(keys)
    bench.close()
    again = bench_of(6, disk_slots=6, num_groups=3)
    assert again.tiers.match("a", [*KEYS[2:4], *parts]) == 4
    assert again.load("a", [*KEYS[2:4], *parts]) is Outcome.OK and again.came([*KEYS[2:4], *parts])


def test_what_is_there_already_is_not_stored_again(bench_of: MakeBench) -> None:
    bench = bench_of(4)
    bench.store(KEYS[:3])
    assert bench.store(KEYS[:2]) is Outcome.OK
    assert bench.store(KEYS[1:4]) is Outcome.OK
    assert bench.metric("kvbm_offload_blocks_d2h") == 4
    assert bench.metric('kvbm_evicted_blocks_total{tier="host",reason="room"}') == 0


def test_of_what_does_not_fit_the_head_is_kept(bench_of: MakeBench) -> None:
    bench = bench_of(3)
    assert bench.store(KEYS[:5]) is Outcome.NO_SPACE
    assert bench.tiers.match("a", KEYS) == 3
    assert bench.load("a", KEYS[:3]) is Outcome.OK and bench.came(KEYS[:3])
    assert bench.metric('kvbm_dropped_blocks_total{reason="no_space"}') == 2


def test_what_was_matched_is_held_until_its_time_is_over(bench_of: MakeBench) -> None:
    clock = ManualClock()
    bench = bench_of(3, clock=clock)
    bench.store(KEYS[:3])
    assert bench.tiers.match("a", KEYS) == 3
    assert bench.store(KEYS[3:5]) is Outcome.NO_SPACE and bench.tiers.match("b", KEYS) == 3
    clock.advance(29.0)
    assert bench.tiers.match("b", KEYS) == 3  # asked again: holds anew, once
    clock.advance(1.5)
    assert bench.tiers.match("c", KEYS[3:]) == 0  # the first one's time is over, the second one's is not
    assert bench.store(KEYS[3:5]) is Outcome.NO_SPACE
    clock.advance(30.0)
    assert bench.tiers.match("c", KEYS[3:]) == 0
    assert bench.store(KEYS[3:5]) is Outcome.OK


def test_a_claim_is_held_however_long(bench_of: MakeBench) -> None:
    clock = ManualClock()
    bench = bench_of(3, clock=clock)
    bench.store(KEYS[:3])
    bench.tiers.match("a", KEYS)
    claim = bench.tiers.claim("a", KEYS[:2])  # another rank had two only
    assert claim is not None
    for _ in range(8):
        clock.advance(14.0)
        bench.tiers.match("b", [])
    assert bench.store(KEYS[3:6]) is Outcome.NO_SPACE  # one was free
    end = End()
    bench.tiers.load(claim, bench.blocks_for(KEYS[:2]), end)
    assert end.wait() is Outcome.OK and bench.came(KEYS[:2])
    assert bench.store(KEYS[3:6]) is Outcome.OK


def test_a_claim_needs_no_match_but_every_block(bench_of: MakeBench) -> None:
    bench = bench_of(3)
    bench.store(KEYS[:3])
    assert bench.tiers.claim("a", KEYS[:4]) is None
    claim = bench.tiers.claim("a", KEYS[:3])
    assert claim is not None
    assert bench.store(KEYS[3:5]) is Outcome.NO_SPACE
    bench.tiers.drop(claim)
    assert bench.store(KEYS[3:5]) is Outcome.OK


def test_stores_whose_device_blocks_were_given_up_are_not_kept(bench_of: MakeBench) -> None:
    bench = bench_of()
    gate, first = threading.Event(), threading.Event()

    def hold(outcome: Outcome) -> None:
        first.set()
        gate.wait(LONG_S)

    bench.tiers.store(KEYS[:1], [0], hold)
    assert first.wait(LONG_S)
    end = bench.begin_store(KEYS[1:3])  # cannot end while the copying thread is held
    bench.tiers.disown()
    gate.set()
    assert end.wait() is Outcome.REJECTED
    assert bench.tiers.match("a", KEYS[1:]) == 0 and bench.tiers.contains(KEYS[0])


def test_a_plan_that_cannot_be_is_a_failed_load(bench_of: MakeBench) -> None:
    bench = bench_of()
    bench.store(KEYS[:2])
    claim, end = bench.tiers.claim("a", KEYS[:2]), End()
    assert claim is not None
    bench.tiers.load(claim, [3, 99], end)
    assert end.wait() is Outcome.REJECTED
    assert bench.tiers.resident_blocks == (0,)  # what a load failed on is not offered again


def test_more_memory_than_there_is_is_refused() -> None:
    with pytest.raises(ConfigError, match="DYN_KVBM_CPU_CACHE_GB"):
        LocalTiers(device_memory(), LocalOptions(10**12))


# ---------------------------------------------------------------- disk


def test_what_left_the_host_comes_from_the_disk_and_stays(bench_of: MakeBench) -> None:
    bench = bench_of(4, 10)
    for start in (0, 4):
        bench.store(KEYS[start : start + 4])
    assert bench.tiers.resident_blocks == (4, 8)
    assert bench.tiers.match("a", KEYS[:4]) == 4
    assert bench.load("a", KEYS[:4]) is Outcome.OK and bench.came(KEYS[:4])
    assert bench.metric("kvbm_onboard_blocks_d2d") == 4
    record_bytes = whole_sectors(2 * PIECE_BYTES)
    assert bench.metric('kvbm_tier_transfer_bytes_total{from="host",to="disk"}') == 8 * record_bytes
    assert bench.metric('kvbm_tier_transfer_bytes_total{from="disk",to="host"}') == 4 * record_bytes
    assert bench.load("a", KEYS[:4]) is Outcome.OK and bench.came(KEYS[:4])
    assert bench.metric("kvbm_onboard_blocks_d2d") == 4 and bench.metric("kvbm_onboard_blocks_h2d") == 4


def test_what_is_on_the_disk_is_found_by_the_next_process(bench_of: MakeBench) -> None:
    first = bench_of(4, 10)
    first.store(KEYS[:4])
    first.tiers.close()
    second = bench_of(8, 10)
    assert second.tiers.match("a", KEYS) == 4
    assert second.load("a", KEYS[:4]) is Outcome.OK and second.came(KEYS[:4])


def test_a_prefix_may_lie_in_host_and_disk_in_turns(bench_of: MakeBench) -> None:
    bench = bench_of(3, 10)
    bench.store(KEYS[:3])
    bench.store(KEYS[3:5])  # the tail of the first ones has left
    assert bench.tiers.match("a", KEYS) == 3  # no more slots than three
    assert bench.load("a", KEYS[:3]) is Outcome.OK and bench.came(KEYS[:3])
    assert 0 < bench.metric("kvbm_onboard_blocks_d2d") < 3


def test_a_block_that_somebody_else_brings_up_cuts_the_match_and_is_read_once(bench_of: MakeBench) -> None:
    first = bench_of(8, 10)
    first.store(KEYS[:6])
    first.tiers.close()
    bench = bench_of(8, 10)
    assert bench.load("before", KEYS[:1]) is Outcome.OK
    assert bench.tiers.match("a", KEYS[:3]) == 3
    assert bench.tiers.match("b", KEYS) == 1  # what the host has; the next block is on its way for "a"
    assert bench.tiers.claim("b", KEYS[:3]) is None
    assert bench.tiers.match("b", KEYS[3:]) == 3  # nobody else wants these
    assert bench.load("a", KEYS[:3]) is Outcome.OK and bench.came(KEYS[:3])
    assert bench.load("b", KEYS[3:6]) is Outcome.OK and bench.came(KEYS[3:6])
    assert bench.tiers.match("b", KEYS) == 6
    assert bench.load("b", KEYS[:6]) is Outcome.OK and bench.came(KEYS[:6])
    assert bench.metric("kvbm_onboard_blocks_d2d") == 6  # each once


def test_slots_that_were_promised_to_nobody_who_came_back_are_free_again(bench_of: MakeBench) -> None:
    clock = ManualClock()
    first = bench_of(4, 10, clock=clock)
    first.store(KEYS[:3])
    first.tiers.close()
    bench = bench_of(3, 10, clock=clock)
    assert bench.tiers.match("a", KEYS) == 3
    assert bench.store(KEYS[3:6]) is Outcome.NO_SPACE
    clock.advance(31.0)
    assert bench.tiers.match("b", KEYS[6:]) == 0
    assert bench.store(KEYS[3:6]) is Outcome.OK


def test_a_damaged_record_fails_once_and_only_those_who_need_it(bench_of: MakeBench, tmp_path: Path) -> None:
    first = bench_of(4, 10)
    first.store(KEYS[:4])
    first.tiers.close()
    with (tmp_path / "blocks" / FILE).open("r+b") as file:
        file.seek(slot_offset_bytes(2, whole_sectors(2 * PIECE_BYTES)) + 5000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    bench = bench_of(8, 10)
    assert bench.tiers.match("a", KEYS) == 4
    assert bench.load("a", KEYS[:4]) is Outcome.CORRUPT
    assert bench.tiers.match("a", KEYS) == 2  # the others came, and stay
    assert bench.tiers.contains(KEYS[3]) and bench.tiers.resident_blocks == (3, 3)
    assert bench.load("a", KEYS[:2]) is Outcome.OK and bench.came(KEYS[:2])
    assert bench.store(KEYS[:4]) is Outcome.OK
    assert bench.load("a", KEYS[:4]) is Outcome.OK and bench.came(KEYS[:4])
    assert bench.metric('kvbm_failures_total{kind="onboard_corrupt"}') == 1


def test_a_disk_that_hangs_ends_loads_in_time_and_keeps_its_slots_meanwhile(
    bench_of: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = bench_of(4, 10)
    first.store(KEYS[:3])
    first.tiers.close()
    made: list[HeldIo] = []

    def make_io(fd: int, *, is_direct: bool) -> HeldIo:
        made.append(HeldIo(fd, lambda transfer, is_write: not is_write))
        return made[-1]

    monkeypatch.setattr(disk_mover, "make_file_io", make_io)
    bench = bench_of(3, 10, io_deadline_s=0.05)
    assert bench.load("a", KEYS[:3]) is Outcome.TIMED_OUT
    assert (
        bench.begin_store(KEYS[3:6]).wait() is Outcome.NO_SPACE
    )  # the kernel may still write into all three
    for io in made:
        io.let_go()
    with bench.tiers._lock:
        assert bench.tiers._lock.wait_for(lambda: not len(bench.tiers._jobs), LONG_S)
    assert bench.store(KEYS[3:6]) is Outcome.OK
    assert bench.load("a", KEYS[3:6]) is Outcome.OK and bench.came(KEYS[3:6])


def test_a_late_write_keeps_its_slots_until_the_kernel_is_done(
    bench_of: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still reads the host's slot, and may still land in the disk's."""
    made: list[HeldIo] = []

    def make_io(fd: int, *, is_direct: bool) -> HeldIo:
        made.append(HeldIo(fd, lambda transfer, is_write: is_write))
        return made[-1]

    monkeypatch.setattr(disk_mover, "make_file_io", make_io)
    bench = bench_of(1, 1, io_deadline_s=0.05)
    disk, is_given_up = bench.tiers._chain.named("disk"), threading.Event()
    assert isinstance(disk, SlottedTier)
    judge = disk.judge

    def judged(outcome: Outcome, kind: OrderKind) -> None:
        judge(outcome, kind)
        is_given_up.set()

    monkeypatch.setattr(disk, "judge", judged)
    assert bench.begin_store(KEYS[:1]).wait() is Outcome.OK and is_given_up.wait(LONG_S)
    with bench.tiers._lock:
        assert disk.slots.pending_blocks == 1
    assert bench.begin_store(KEYS[1:2]).wait() is Outcome.NO_SPACE
    for io in made:
        io.let_go()
    with bench.tiers._lock:
        assert bench.tiers._lock.wait_for(lambda: not disk.slots.pending_blocks, LONG_S)
    assert bench.begin_store(KEYS[1:2]).wait() is Outcome.OK


def test_a_disk_that_cannot_be_written_costs_nothing_but_its_blocks(
    bench_of: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        disk_mover,
        "make_file_io",
        lambda fd, *, is_direct: FailingIo(fd, lambda transfer, is_write: is_write, -5),
    )
    bench = bench_of(4, 10)
    assert bench.store(KEYS[:4]) is Outcome.OK
    assert bench.tiers.resident_blocks == (4, 0)
    assert bench.load("a", KEYS[:4]) is Outcome.OK and bench.came(KEYS[:4])


def test_without_a_usable_folder_there_is_the_host_alone(tmp_path: Path) -> None:
    (tmp_path / "blocks").write_text("no folder")
    bench = LocalBench(tmp_path / "blocks", 4, 10, has_disk=False)
    assert bench.store(KEYS[:4]) is Outcome.OK
    assert bench.load("a", KEYS[:4]) is Outcome.OK and bench.came(KEYS[:4])
    bench.close()


# ---------------------------------------------------------------- a store by key


@pytest.mark.parametrize("disk_slots", [0, 10])
@pytest.mark.parametrize("scheme", ["toy", "toys"])
def test_what_one_process_has_stored_by_key_another_one_finds(
    bench_of: MakeBench, scheme: str, disk_slots: int
) -> None:
    """A store that keeps extents is given each block alone: nobody says where in a prompt they lie."""
    toy_store.register()
    toy_store.forget_all()
    first = bench_of(4, disk_slots, store=f"{scheme}://local?seed=1")
    assert first.store(KEYS[:4]) is Outcome.OK
    first.tiers.close()
    for path in Path(first.folder).glob("*.blocks"):
        path.unlink()
    second = bench_of(40, disk_slots, store=f"{scheme}://local?seed=1")
    matches = [second.tiers.match("a", [*KEYS[:4], KEYS[7]])]
    with second.tiers._lock:  # what is asked again may be there
        while second.tiers._chain.host.resident_blocks < 4:
            assert second.tiers._lock.wait_for(lambda: not len(second.tiers._jobs), LONG_S)
            matches.append(second.tiers.match("a", [*KEYS[:4], KEYS[7]]))
    assert matches[0] == 0 and second.tiers.match("a", [*KEYS[:4], KEYS[7]]) == 4
    assert second.load("a", KEYS[:4]) is Outcome.OK and second.came(KEYS[:4])
    assert second.metric("kvbm_onboard_blocks_o2d") == 4
    assert second.store(KEYS[:4]) is Outcome.OK and second.metric("kvbm_offload_blocks_d2o") == 0


def test_closing_ends_what_waits(bench_of: MakeBench) -> None:
    bench = bench_of(4, 10)
    ends = [bench.begin_store(KEYS[start : start + 2]) for start in (0, 2)]
    bench.tiers.close()
    bench.tiers.close()
    assert {end.wait() for end in ends} <= {Outcome.OK, Outcome.REJECTED}
    assert bench.begin_store(KEYS[4:5]).wait() is Outcome.REJECTED


@pytest.mark.skipif(NO_NIXL is not None, reason=f"NOT RUN: disk to device by NIXL: {NO_NIXL}")
def test_pages_come_straight_from_disk_more_than_the_host_holds(tmp_path: Path) -> None:
    bench = LocalBench(tmp_path, 4, 20, to_device="nixl-posix")
    try:
        for start in (0, 4, 8):
            assert bench.store(KEYS[start : start + 4]) is Outcome.OK
        disk = bench.tiers._lower("disk")
        assert isinstance(disk, SlottedTier)
        with bench.tiers._lock:
            assert bench.tiers._lock.wait_for(lambda: disk.is_direct, LONG_S)
            bench.tiers._chain.host.reset()
        assert bench.tiers.match("r", KEYS[:12]) == 12
        assert bench.load("r", KEYS[:12]) is Outcome.OK and bench.came(KEYS[:12])
        assert bench.tiers.resident_blocks == (0, 12)
        assert bench.store(KEYS[:12]) is Outcome.OK, "they are there, and are not stored again"
        assert bench.tiers.resident_blocks == (0, 12)
        assert bench.metric("kvbm_onboard_blocks_d2d") == 12 and bench.metric("kvbm_onboard_blocks_h2d") == 0
        bench.tiers.check_integrity()
    finally:
        bench.close()
