"""The disk tier under vLLM's own scheduler: what left the host comes back from disk, every byte checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvbm_core.config import settings as settings_module
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk import nixl_io
from kvbm_core.storage.disk.record import SECTOR_BYTES, slot_offset_bytes
from kvbm_core.testing.file_io_contract import why_no_nixl
from kvbm_core.transfer.movers import disk_direct
from kvbm_core.types import BlockKey, Direction
from tests.vllm.kvbm_engine import KvbmEngine, specs_to_try

every_kind = pytest.mark.parametrize("spec", specs_to_try().values(), ids=specs_to_try().keys())
NO_NIXL = why_no_nixl()
TIGHT: dict[str, Any] = {"host_blocks": 30, "disk_blocks": 1000}
ALL = range(50)
OTHERS = tuple(range(start, start + 60) for start in range(1000, 5001, 250))
FROM_DISK = "kvbm_onboard_blocks_d2d"
TO_DISK = "kvbm_offload_blocks_h2d"


def push_out(engine: KvbmEngine, times: int = 1) -> None:
    """Other prompts take the places in the device cache and in the host tier."""
    for turn in range(times):
        for prompt in OTHERS:
            engine.ask(f"other {prompt.start} {turn} {engine.record.steps}", prompt)
            engine.forget_device()


def ask_anew(engine: KvbmEngine) -> None:
    """The same prompts again and again, which have gone from the device and the host meanwhile: every time
    the same answers.
    """
    prompts = [range(start, start + 50) for start in range(0, 400, 100)]
    answers = [engine.ask(f"first {prompt.start}", prompt, 4) for prompt in prompts]
    for turn in range(2):
        engine.forget_device()
        push_out(engine)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert engine.ask(f"{turn} {prompt.start}", prompt, 4) == answer
            engine.forget_device()


@every_kind
def test_a_prompt_comes_back_from_disk_and_then_from_the_host(spec: dict[str, Any], tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **{**TIGHT, **spec}) as engine:
        first = engine.ask("a", ALL, 8)
        engine.forget_device()
        push_out(engine)
        before = engine.metric(FROM_DISK)
        assert engine.ask("b", ALL, 8) == first
        assert (
            engine.external_tokens("b") == 49 // engine.spec.block_size_tokens * engine.spec.block_size_tokens
        )
        from_disk = engine.metric(FROM_DISK)
        assert from_disk > before
        engine.forget_device()
        assert engine.ask("c", ALL, 8) == first
        assert engine.external_tokens("c") == engine.external_tokens("b")
        assert engine.metric(FROM_DISK) == from_disk, "what came from disk was not kept in the host"
        engine.assert_clean()


@every_kind
def test_a_new_engine_finds_what_the_old_one_left(spec: dict[str, Any], tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **{**TIGHT, **spec}) as engine:
        first = engine.ask("a", ALL, 8)
        engine.settle()
        stored = engine.metric(TO_DISK)
        assert stored > 0
    with KvbmEngine(tmp_path, **{**TIGHT, **spec}) as engine:
        engine.wait_for(lambda: engine.disk.slots.capacity_blocks == TIGHT["disk_blocks"])
        assert engine.disk.slots.resident_blocks == stored
        assert engine.ask("b", ALL, 8) == first
        assert (
            engine.external_tokens("b") == 49 // engine.spec.block_size_tokens * engine.spec.block_size_tokens
        )
        assert engine.metric(FROM_DISK) > 0
        engine.assert_clean()


@pytest.mark.parametrize("windows", [(None, None), (None, 8)])
def test_a_disk_without_a_host_tier(windows: tuple[int | None, ...], tmp_path: Path) -> None:
    """A little host memory is on the way to the disk: as many blocks as the disk has, if these are few."""
    alone = {"host_blocks": 0, "disk_blocks": 1000}
    with KvbmEngine(tmp_path, windows=windows, **alone) as engine:
        first = engine.ask("a", ALL, 8)
        engine.settle()
        stored = engine.disk.slots.resident_blocks
        assert stored > 0
    with KvbmEngine(tmp_path, windows=windows, **alone) as engine:
        engine.wait_for(lambda: engine.disk.slots.resident_blocks == stored)
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == 48
        assert engine.metric(FROM_DISK) > 0
        engine.assert_clean()


@pytest.mark.shows("KVBM_DISK_IO=nixl-posix")
@pytest.mark.skipif(NO_NIXL is not None, reason=f"NOT RUN: disk I/O by NIXL: {NO_NIXL}")
def test_a_prompt_comes_back_from_disk_by_nixl(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **TIGHT, extra={"KVBM_DISK_IO": "nixl-posix"}) as engine:
        first = engine.ask("a", ALL, 8)
        engine.forget_device()
        push_out(engine)
        before, agents = engine.metric(FROM_DISK), len(nixl_io._OPEN)
        assert engine.ask("b", ALL, 8) == first
        assert engine.metric(FROM_DISK) > before and agents >= 2
        engine.assert_clean()


def test_a_reset_is_for_good(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **TIGHT) as engine:
        engine.ask("a", ALL)
        engine.settle()
        assert engine.reset_device(with_connector=True)
        engine.ask("new", range(500, 550))
        engine.settle()
        kept = engine.metric(TO_DISK)
    with KvbmEngine(tmp_path, **TIGHT) as engine:
        assert 0 < engine.disk.slots.resident_blocks < kept
        engine.ask("b", ALL)
        assert engine.promised("b") == [0]
        engine.ask("new", range(500, 550))
        assert engine.external_tokens("new") == 48
        engine.assert_clean()


def test_the_filter_lets_pass_what_was_hit(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, disk_blocks=300, extra={"disable_disk_offload_filter": False}) as engine:
        engine.ask("a", ALL)
        engine.forget_device()
        assert engine.metric(TO_DISK) == 0
        engine.ask("b", ALL)
        engine.settle()
        assert engine.metric(TO_DISK) == 12
        engine.assert_clean()


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.IO_ERROR, Outcome.TIMED_OUT, Outcome.MISS])
def test_a_load_from_disk_that_fails_is_computed(outcome: Outcome, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **TIGHT) as engine:
        first = engine.ask("a", ALL, 8)
        engine.forget_device()
        push_out(engine)
        for executor in engine.executors:
            executor.fail_next(Direction.ONBOARD, outcome)
        assert engine.ask("b", ALL, 8) == first
        engine.forget_device()
        assert engine.ask("c", ALL, 8) == first
        engine.assert_clean()


def damage(engine: KvbmEngine, key: BlockKey, folder: Path) -> None:
    """One bit of this block on the disk is another from now on, on the first rank."""
    lease = engine.disk.slots.lease("damage", [key], 1.0)
    assert lease is not None
    engine.disk.slots.release(lease)
    (path,) = folder.glob("disk/kvbm/*/rank-0-of-*.blocks")
    payload_bytes = engine.ranks[0].connector.worker_side.worker._memory.slab.slot_bytes
    with path.open("r+b") as file:
        file.seek(slot_offset_bytes(lease.slots[0], payload_bytes) + SECTOR_BYTES)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("lost", [0, 5, 11])
@pytest.mark.parametrize("ranks", [1, 2])
def test_of_a_load_that_lost_a_block_what_lies_before_it_is_kept(
    lost: int, ranks: int, tmp_path: Path
) -> None:
    with KvbmEngine(tmp_path, **TIGHT, ranks=ranks) as engine:
        engine.add("a", ALL, 8)
        engine.step()
        keys = keys_of(engine, "a")
        engine.run()
        first = engine.record.outputs["a"]
        engine.settle()
        damage(engine, keys[lost], tmp_path)
        engine.forget_device()
        engine.leader.chain.host.reset()  # everything is on the disk alone
        before = engine.record.computed_tokens
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == 48 and engine.metric(FROM_DISK) == 11
        computed = engine.record.computed_tokens - before
        assert computed == 50 - lost * engine.spec.block_size_tokens + 7, (
            "what lies before it is computed anew"
        )
        engine.settle()
        assert engine.disk.contains(keys[lost]), "it is not written anew"
        engine.forget_device()
        assert engine.ask("c", ALL, 8) == first
        assert engine.external_tokens("c") == 48
        engine.assert_clean()


def test_of_several_groups_a_load_that_lost_a_block_fails_whole(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **TIGHT, windows=(None, 8, None, 8)) as engine:
        engine.add("a", ALL, 8)
        engine.step()
        keys = keys_of(engine, "a")
        engine.run()
        first = engine.record.outputs["a"]
        engine.settle()
        damage(engine, keys[5], tmp_path)
        engine.forget_device()
        engine.leader.chain.host.reset()
        before = engine.record.computed_tokens
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == 48 and engine.record.computed_tokens - before == 50 + 7
        engine.forget_device()
        assert engine.ask("c", ALL, 8) == first
        engine.assert_clean()


def keys_of(engine: KvbmEngine, request_id: str) -> list[BlockKey]:
    """Of the first group's full blocks."""
    state = engine.leader.request(request_id)
    assert state is not None
    return list(state.keys(0))


def abort_while_loading(engine: KvbmEngine, when: str) -> None:
    if when == "held":
        engine.hold(Direction.ONBOARD)
    engine.add("b", ALL, 8)
    engine.step()
    engine.abort("b")
    engine.release(Direction.ONBOARD)
    engine.run()


@pytest.mark.parametrize("when", ["held", "started"])
def test_abort_while_loading_from_disk(when: str, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **TIGHT) as engine:
        first = engine.ask("a", ALL, 8)
        engine.forget_device()
        push_out(engine)
        abort_while_loading(engine, when)
        engine.forget_device()
        assert engine.ask("c", ALL, 8) == first
        engine.assert_clean()


def test_a_prompt_that_the_host_cannot_hold_comes_back_as_far_as_it_can(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, host_blocks=8, disk_blocks=300) as engine:
        first = engine.ask("a", ALL, 8)
        for name in ("b", "c"):
            engine.forget_device()
            assert engine.ask(name, ALL, 8) == first
            assert engine.external_tokens(name) == 8 * engine.spec.block_size_tokens
        engine.assert_clean()


def test_two_engines_on_one_directory_have_a_folder_each(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **TIGHT) as one, KvbmEngine(tmp_path, **TIGHT) as other:
        assert one.ask("a", ALL, 8) == other.ask("a", ALL, 8)
        for engine in (one, other):
            engine.settle()
            assert engine.metric(TO_DISK) > 0
    folders = (tmp_path / "disk" / "kvbm").glob("*-*")  # beside them may be what `kvbm why` reads
    assert len(list(folders)) == 2


def test_a_directory_that_cannot_be_used_leaves_the_host_tier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "disk").write_text("a file where a directory should be")
    with KvbmEngine(tmp_path, **TIGHT) as engine:
        first = engine.ask("a", ALL, 8)
        engine.forget_device()
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == 48
        lines = [
            record.getMessage() for record in caplog.records if "the disk tier is off" in record.getMessage()
        ]
        assert len(lines) == 1 and "DYN_KVBM_DISK_CACHE_DIR" in lines[0] and "\n" not in lines[0]
        engine.assert_clean()


# ---------------------------------------------------------------- straight to the device

STRAIGHT: dict[str, Any] = {
    "host_blocks": 0,
    "disk_blocks": 300,
    "extra": {"KVBM_DISK_TO_DEVICE": "nixl-posix"},
}
needs_nixl = pytest.mark.skipif(NO_NIXL is not None, reason=f"NOT RUN: disk to device by NIXL: {NO_NIXL}")


def moved_bytes(engine: KvbmEngine, source: str, target: str) -> float:
    return engine.metric(f'kvbm_tier_transfer_bytes_total{{from="{source}",to="{target}"}}')


def leave_on_disk_alone(engine: KvbmEngine) -> None:
    """Neither the device nor the memory that blocks pass on their way down has any of it."""
    engine.wait_for(lambda: engine.disk.is_direct)
    engine.forget_device()
    engine.leader.chain.host.reset()


@needs_nixl
@every_kind
def test_a_prompt_comes_straight_from_disk_and_passes_no_host_memory(
    spec: dict[str, Any], tmp_path: Path
) -> None:
    """Also in an engine that has just been started."""
    with KvbmEngine(tmp_path, **{**STRAIGHT, **spec}) as engine:
        first = engine.ask("a", ALL, 8)
        down = moved_bytes(engine, "device", "host")
        for name in ("b", "c"):  # the second time it is on disk alone again
            before = engine.metric(FROM_DISK)
            leave_on_disk_alone(engine)
            assert engine.ask(name, ALL, 8) == first
            size = engine.spec.block_size_tokens
            assert engine.external_tokens(name) == 49 // size * size
            assert engine.metric(FROM_DISK) > before
        engine.settle()
        assert moved_bytes(engine, "device", "host") == down, "what is on disk was stored again"
        check_none_passed_the_host(engine)
    with KvbmEngine(tmp_path, **{**STRAIGHT, **spec}) as engine:
        engine.wait_for(lambda: engine.disk.slots.capacity_blocks == STRAIGHT["disk_blocks"])
        engine.wait_for(lambda: engine.disk.is_direct)
        assert engine.ask("b", ALL, 8) == first
        check_none_passed_the_host(engine)


def check_none_passed_the_host(engine: KvbmEngine) -> None:
    """On its way up; it is counted as device to disk and disk to device alone."""
    assert moved_bytes(engine, "disk", "device") > 0
    assert moved_bytes(engine, "disk", "host") == moved_bytes(engine, "host", "device") == 0
    assert engine.metric("kvbm_onboard_blocks_h2d") == engine.metric(TO_DISK) == 0
    assert engine.metric(FROM_DISK) > 0 and engine.metric("kvbm_host_cache_hit_rate") == 0
    engine.assert_clean()


@needs_nixl
def test_what_comes_straight_may_be_more_than_host_memory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings_module, "_MIN_STAGED_BLOCKS", 8)
    monkeypatch.setattr(settings_module, "_STAGED_BYTES", 1)
    monkeypatch.setattr(KvbmEngine, "passing_blocks", 8)
    for extra, blocks in ((STRAIGHT["extra"], 12), ({}, 8)):
        folder = tmp_path / str(blocks)
        folder.mkdir()
        with KvbmEngine(folder, **{**STRAIGHT, "extra": extra}) as engine:
            if extra:
                engine.wait_for(lambda engine=engine: engine.disk.is_direct)
            first = []
            for name, end in (("a", 24), ("b", 40), ("c", 50)):  # what goes down at once has room on its way
                first = engine.ask(name, range(end), 8)
                engine.settle()
            engine.forget_device()
            engine.leader.chain.host.reset()
            assert engine.ask("d", ALL, 8) == first
            assert engine.external_tokens("d") == blocks * engine.spec.block_size_tokens
            engine.assert_clean()


@needs_nixl
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_damaged_block_that_comes_straight_is_computed(ranks: int, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **STRAIGHT, ranks=ranks) as engine:
        engine.add("a", ALL, 8)
        engine.step()
        keys = keys_of(engine, "a")
        engine.run()
        first = engine.record.outputs["a"]
        leave_on_disk_alone(engine)
        damage(engine, keys[5], tmp_path)
        before = engine.record.computed_tokens
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == 48 and engine.metric(FROM_DISK) == 11
        assert engine.record.computed_tokens - before == 50 - 5 * engine.spec.block_size_tokens + 7
        engine.settle()
        assert engine.disk.contains(keys[5]), "it is not written anew"
        leave_on_disk_alone(engine)
        assert engine.ask("c", ALL, 8) == first
        assert engine.external_tokens("c") == 48
        check_none_passed_the_host(engine)


@needs_nixl
@pytest.mark.parametrize("when", ["held", "started"])
def test_abort_while_blocks_come_straight_from_disk(when: str, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **STRAIGHT) as engine:
        first = engine.ask("a", ALL, 8)
        leave_on_disk_alone(engine)
        abort_while_loading(engine, when)
        leave_on_disk_alone(engine)
        assert engine.ask("c", ALL, 8) == first
        engine.assert_clean()


@needs_nixl
def test_if_one_rank_cannot_read_to_its_device_all_go_by_way_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def why_not(kind: str, gpu: int | None, *, is_direct: bool) -> str | None:
        asked.append(kind)
        return "the second has none" if len(asked) == 2 else None

    monkeypatch.setattr(disk_direct, "why_not", why_not)
    with KvbmEngine(tmp_path, **STRAIGHT, ranks=2) as engine:
        first = engine.ask("a", ALL, 8)
        engine.wait_for(lambda: any("the second has none" in text for text in caplog.messages))
        engine.forget_device()
        engine.leader.chain.host.reset()
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == 48 and not engine.disk.is_direct
        assert moved_bytes(engine, "disk", "host") > 0 == moved_bytes(engine, "disk", "device")
        engine.assert_clean()


@needs_nixl
def test_an_audit_of_what_is_on_disk_alone_brings_it_to_the_host(tmp_path: Path) -> None:
    """What is compared has to be there."""
    extra = {**STRAIGHT["extra"], "audit_rate": 1.0}
    with KvbmEngine(tmp_path, **{**STRAIGHT, "extra": extra}) as engine:
        first = engine.ask("a", ALL, 8)
        leave_on_disk_alone(engine)
        assert engine.ask("b", ALL, 8) == first
        engine.settle()
        assert engine.metric('kvbm_audited_blocks_total{result="equal"}') == 12
        assert engine.leader.chain.host.resident_blocks >= 12 and engine.metric(FROM_DISK) == 0
        engine.assert_clean()
