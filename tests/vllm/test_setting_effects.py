"""Settings as their rows of the table say, on vLLM's own scheduler: each test fails if its setting is not
heeded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvbm_core.testing import memory_engine, toy_store
from kvbm_core.transfer.executors.broadcast_group import Group
from kvbm_core.transfer.executors.memcpy import MemcpyExecutor
from kvbm_core.transfer.movers import store as store_mover
from tests.policies import Listening, installed
from tests.unit.test_policies import theirs
from tests.vllm.kvbm_engine import KvbmEngine
from tests.vllm.test_scheduler_disk import FROM_DISK, TO_DISK, push_out
from tests.vllm.test_scheduler_peers import PeerEngine
from tests.vllm.test_scheduler_stores import FROM_STORE, TO_STORE

PROMPT = range(50)
BLOCKS = 12
"""Of 4 tokens, that it fills."""


@pytest.fixture(autouse=True)
def _empty_stores() -> Iterator[None]:
    toy_store.forget_all()
    memory_engine.forget_all()
    yield
    toy_store.forget_all()
    memory_engine.forget_all()


def slab_bytes(engine: KvbmEngine) -> int:
    """Of host memory, over all ranks."""
    return sum(rank.connector.worker_side.worker._memory.slab.array.nbytes for rank in engine.ranks)


def file_bytes(folder: Path) -> int:
    """Of block files, over all ranks."""
    return sum(path.stat().st_size for path in folder.rglob("*.blocks"))


class Sized(KvbmEngine):
    """``passing_blocks`` of host memory, whatever says so."""

    passing_blocks = 24


@pytest.mark.shows("DYN_KVBM_CPU_CACHE_GB")
@pytest.mark.parametrize("ranks", [1, 2])
def test_gigabytes_of_host_memory_are_those_of_all_ranks(ranks: int, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, ranks=ranks, host_blocks=10) as engine:
        block_bytes = slab_bytes(engine) // 10
    extra = {"cpu_cache_gb": 24.5 * block_bytes / 1e9}
    with Sized(tmp_path, ranks=ranks, host_blocks=0, extra=extra) as engine:
        assert engine.leader.chain.host.capacity_blocks == 24 and slab_bytes(engine) == 24 * block_bytes
        engine.assert_clean()


@pytest.mark.shows("DYN_KVBM_DISK_CACHE_GB", "DYN_KVBM_DISK_CACHE_DIR")
@pytest.mark.parametrize("ranks", [1, 2])
def test_gigabytes_of_disk_are_those_of_all_ranks_and_the_directory_is_made(
    ranks: int, tmp_path: Path
) -> None:
    shape: dict[str, Any] = {"ranks": ranks, "block_size_tokens": 32, "num_blocks": 24, "host_blocks": 10}
    sizes = []  # of whole sectors, so that nothing is filled up
    for num_blocks in (20, 40):
        with KvbmEngine(tmp_path, disk_blocks=num_blocks, **shape) as engine:
            engine.wait_for(lambda: engine.disk.slots.capacity_blocks == num_blocks)  # noqa: B023
            sizes.append(file_bytes(tmp_path / "disk"))
    folder, block_bytes = tmp_path / "not" / "there" / "yet", (sizes[1] - sizes[0]) // 20
    extra = {"disk_cache_gb": 30.5 * block_bytes / 1e9, "disk_cache_dir": str(folder)}
    with KvbmEngine(tmp_path, extra=extra, **shape) as engine:
        engine.wait_for(lambda: engine.disk.slots.capacity_blocks == 30)
        assert file_bytes(folder) - sizes[0] == 10 * block_bytes
        engine.assert_clean()


@pytest.mark.shows(
    "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS",
    "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS",
)
def test_numbers_of_blocks_win_over_gigabytes(tmp_path: Path) -> None:
    extra = {"cpu_cache_gb": 0.001, "disk_cache_gb": 0.002}
    with KvbmEngine(tmp_path, host_blocks=16, disk_blocks=32, extra=extra) as engine:
        assert engine.leader.chain.host.capacity_blocks == 16
        engine.wait_for(lambda: engine.disk.slots.capacity_blocks == 32)
        engine.ask("a", PROMPT, 1)
        engine.forget_device()
        engine.ask("b", range(500, 550), 1)
        engine.forget_device()
        assert engine.metric('kvbm_evicted_blocks_total{tier="host",reason="room"}') == 2 * BLOCKS - 16
        engine.assert_clean()


@pytest.mark.shows("DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER")
@pytest.mark.parametrize("is_disabled", [False, True])
def test_without_the_filter_what_was_never_hit_goes_to_the_disk_too(
    is_disabled: bool, tmp_path: Path
) -> None:
    extra = {"disable_disk_offload_filter": is_disabled}
    with KvbmEngine(tmp_path, disk_blocks=300, extra=extra) as engine:
        for number in range(2):
            engine.ask(f"{number}", PROMPT, 1)
            engine.forget_device()
            expected = BLOCKS if is_disabled or number else 0
            assert engine.metric(TO_DISK) == expected
        engine.assert_clean()


@pytest.mark.shows("KVBM_EVICTION_POLICY")
def test_an_installed_policy_says_which_blocks_go_and_is_told_of_prompts(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "host_blocks": 30,
        "disk_blocks": 1000,
        "extra": {"eviction_policy": "listening"},
    }
    with (
        installed(tmp_path / "installed", listening="tests.policies:Listening"),
        KvbmEngine(tmp_path, **sizes) as engine,
    ):
        answer = engine.ask("a", PROMPT, 1)
        engine.forget_device()
        push_out(engine)
        assert engine.ask("b", PROMPT, 1) == answer
        engine.settle()
        host, disk = (theirs(slots._policy) for slots in engine.leader.chain.books)
        assert isinstance(host, Listening) and isinstance(disk, Listening)
        assert all(slot >= 0 for slot in host.told[0][1])
        assert BLOCKS in [sum(slot >= 0 for slot in slots) for _, slots in disk.told]
        engine.assert_clean()


@pytest.mark.shows("KVBM_REMOTE_FILTER", "KVBM_REMOTE_FILTER=all", "KVBM_REMOTE_FILTER=hit")
@pytest.mark.parametrize("which", ["all", "hit"])
def test_which_blocks_go_to_a_shared_store(which: str, tmp_path: Path) -> None:
    extra = {"remote_filter": which}
    with KvbmEngine(tmp_path, host_blocks=60, store="toy://blocks?seed=1", extra=extra) as engine:
        for number in range(2):
            engine.ask(f"{number}", PROMPT, 1)
            engine.forget_device()
            assert engine.metric(TO_STORE) == (BLOCKS if which == "all" or number else 0)
        engine.assert_clean()


@contextmanager
def let_go_in(seconds: float, let_go: Any) -> Iterator[None]:
    """Long after what the setting says, and long before what its default would."""
    timer = threading.Timer(seconds, let_go)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        let_go()


@pytest.mark.shows("KVBM_REMOTE_DEADLINE_S")
def test_a_store_that_hangs_is_given_up_after_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_mover, "GRACE_S", 0.05)
    store = "toy://blocks?seed=1"
    with KvbmEngine(tmp_path, host_blocks=60, store=store) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.settle()
    extra = {"remote_deadline_s": 0.05, "remote_load": "always"}
    with KvbmEngine(tmp_path, host_blocks=60, store=store, extra=extra) as engine:
        toy = toy_store.OPENED[-1]
        toy.hold(toy_store.CONTAINS, toy_store.GET)
        with let_go_in(4.5, toy.let_go):
            assert engine.ask("b", PROMPT, 8) == first
            assert engine.external_tokens("b") == 0 == engine.metric(FROM_STORE)
        engine.assert_clean()


@pytest.mark.shows("KVBM_REMOTE_ENCRYPT", "KVBM_REMOTE_CODEC=zstd", "KVBM_REMOTE_CODEC=none")
def test_what_is_in_a_store_is_smaller_with_a_codec_and_unreadable_if_encrypted(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a secret of this test")
    held: dict[str, list[bytes]] = {}
    block = b""
    for name, more in (
        ("none", {}),
        ("zstd", {"remote_codec": "zstd"}),
        ("secret", {"remote_encrypt": True}),
    ):
        extra: dict[str, Any] = {**more, "remote_secret_file": str(tmp_path / "secret")}
        with KvbmEngine(tmp_path, host_blocks=60, store="memory://blocks?seed=1", extra=extra) as engine:
            engine.ask("a", PROMPT, 8)
            engine.settle()
            slots = engine.leader.chain.host
            assert slots.resident_blocks > BLOCKS
            slab = engine.ranks[0].connector.worker_side.worker._memory.slab
            used = [row.tobytes() for row in np.array(slab.array).reshape(-1, slab.slot_bytes) if row.any()]
            block = block or used[0].rstrip(b"\0")
        objects = memory_engine.OPENED[-1].objects.objects
        held[name] = [bytes(entry.content) for entry in objects.values()]
        memory_engine.forget_all()
    plain = sum(map(len, held["none"]))
    assert any(block in content for content in held["none"])
    assert sum(map(len, held["zstd"])) < plain <= sum(map(len, held["secret"]))
    assert not any(block in content for content in held["secret"])


@pytest.mark.shows("KVBM_DISK_TO_DEVICE", "KVBM_DISK_TO_DEVICE=nixl-posix", "KVBM_DISK_TO_DEVICE=off")
@pytest.mark.parametrize("way", ["nixl-posix", "off"])
def test_without_a_host_tier_blocks_come_straight_from_the_disk_or_by_way_of_the_host(
    way: str, tmp_path: Path
) -> None:
    if way != "off":
        pytest.importorskip("nixl", reason="NOT RUN: blocks straight from disk: NIXL is missing")
    sizes: dict[str, Any] = {"host_blocks": 0, "disk_blocks": 300, "extra": {"disk_to_device": way}}
    with KvbmEngine(tmp_path, **sizes) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.settle()
    with KvbmEngine(tmp_path, **sizes) as engine:
        engine.wait_for(lambda: engine.disk.slots.resident_blocks >= BLOCKS)
        if way != "off":
            engine.wait_for(lambda: engine.disk.is_direct)
        assert engine.ask("b", PROMPT, 8) == first and engine.metric(FROM_DISK) == BLOCKS
        engine.settle()
        name = 'kvbm_tier_transfer_bytes_total{{from="disk",to="{}"}}'
        assert bool(engine.metric(name.format("device"))) is (way != "off")
        assert bool(engine.metric(name.format("host"))) is (way == "off")
        engine.assert_clean()


@pytest.mark.shows("DYN_KVBM_MAX_TRANSFER_BATCH_SIZE")
@pytest.mark.parametrize("size", [5, 16])
def test_blocks_are_copied_in_batches_of_that_size(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, copy = list[int](), MemcpyExecutor._copy

    def count(self: MemcpyExecutor, group: int, blocks: Any, slots: Any, is_offload: bool) -> None:
        sizes.append(len(slots))
        copy(self, group, blocks, slots, is_offload)

    monkeypatch.setattr(MemcpyExecutor, "_copy", count)
    extra = {"max_transfer_batch_size": size}
    with KvbmEngine(tmp_path, extra=extra, max_batched_tokens=128) as engine:
        engine.ask("a", range(81), 1)
        engine.settle()
        assert sizes == ([5, 5, 5, 5] if size == 5 else [16, 4])
        engine.assert_clean()


@pytest.mark.shows("KVBM_PEER_DEADLINE_S", "KVBM_PEER_EXPORT_GB")
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_lends_and_asks_within_what_the_settings_allow(ranks: int, tmp_path: Path) -> None:
    extra = {"peer_deadline_s": 7.5, "peer_export_gb": 1e-5}
    with PeerEngine(tmp_path, ranks=ranks, extra=extra) as engine:
        for rank in engine.ranks:
            worker = rank.connector.worker_side.worker
            copies, mover = worker._peer_server._copies, worker._memory._movers["peers"]
            assert copies._most == max(1, int(1e4) // copies.block_bytes)
            assert mover._io_deadline_s == 7.5
        engine.assert_clean()


@pytest.mark.shows("KVBM_PEERS=off")
def test_without_peers_nobody_is_asked_whatever_a_router_hints_at(tmp_path: Path) -> None:
    with PeerEngine(tmp_path) as first, PeerEngine(tmp_path, extra={"peers": "off"}) as second:
        answer = first.ask("a", PROMPT, 8)
        first.settle()
        assert second.ask("b", PROMPT, 8, extra_args=first.hint) == answer
        assert second.external_tokens("b") == 0 == first.lends()
        assert all(rank.connector.worker_side.worker._peer_server is None for rank in second.ranks)
        second.assert_clean()


@pytest.mark.shows("KVBM_WHY_REQUESTS=0")
def test_no_request_is_remembered(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra={"why_requests": 0}) as engine:
        engine.ask("a", PROMPT, 1)
        assert not engine.leader.metrics.why.last(10)
        assert engine.metric('kvbm_missed_requests_total{reason="never_seen"}') == 1
        engine.assert_clean()


@pytest.mark.shows("KVBM_TRACES", "KVBM_TRACES=on", "KVBM_TRACES=off")
@pytest.mark.parametrize("wish", ["on", "off"])
def test_the_setting_wins_over_the_standard_variables(
    wish: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    if wish == "off":
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with KvbmEngine(tmp_path, extra={"traces": wish}) as engine:
        assert (engine.leader.metrics.traces is not None) is (wish == "on")
        engine.assert_clean()


@pytest.mark.shows("DYN_KVBM_NCCL_MAX_CTAS")
def test_the_limit_of_ctas_reaches_each_ranks_broadcast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What NCCL is told of it needs GPUs: tests/unit/test_broadcast_cuda.py."""
    limits, make = list[int | None](), Group.__init__

    def note(group: Group, *given: Any, max_ctas: int | None = None, **more: Any) -> None:
        limits.append(max_ctas)
        make(group, *given, max_ctas=max_ctas, **more)

    monkeypatch.setattr(Group, "__init__", note)
    extra = {"nccl_mla_mode": True, "nccl_max_ctas": 3}
    with KvbmEngine(tmp_path, ranks=2, is_mla=True, extra=extra) as engine:
        assert limits == [3, 3]
        engine.assert_clean()


@pytest.mark.shows("KVBM_START_WAIT_S")
def test_an_engine_that_does_not_wait_serves_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[float]()
    from kvbm_core.runtime.handshake import Handshake

    wait = Handshake.wait
    monkeypatch.setattr(Handshake, "wait", lambda self, seconds: waits.append(seconds) or wait(self, seconds))
    with KvbmEngine(tmp_path, extra={"start_wait_s": 0}) as engine:
        assert waits == [0.0]
        engine.assert_clean()
