"""Stores by key that only tests have, one of an installed package (that of docs/extending.md), and a tier of
a third kind, below host and disk under vLLM's own scheduler: every byte is checked.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from kvbm_core.testing import toy_store
from tests import third_kind
from tests.engines.silent_server import silent_server
from tests.outside import sqlite_store
from tests.vllm.kvbm_engine import KvbmEngine, specs_to_try
from tests.vllm.test_scheduler_disk import ALL, FROM_DISK, ask_anew, keys_of, push_out

every_kind = pytest.mark.parametrize("spec", specs_to_try().values(), ids=specs_to_try().keys())
FROM_STORE = "kvbm_onboard_blocks_o2d"
TO_STORE = "kvbm_offload_blocks_d2o"
STORE = "toy://blocks?seed=1"
EXTENTS = "toys://blocks?seed=1"
every_store = pytest.mark.parametrize("store", [STORE, EXTENTS], ids=["blocks", "extents"])
of_others = pytest.mark.parametrize("store", ["installed", "shelf"], indirect=True)
TIGHT: dict[str, Any] = {"host_blocks": 30, "disk_blocks": 40}
"""Host and disk lose what other prompts push out; the store does not."""
FAULTS = {
    "slow": "latency_ms=5",
    "fails": "fails=0.02",
    "loses": "loses=0.2",
    "spoils": "spoils=0.2",
    "writes late": "is_late=0.2",
    "raises": "raises=0.3",
    "all": "latency_ms=1&fails=0.05&loses=0.05&spoils=0.05&is_late=0.05&raises=0.05",
}
NOT_LEFT_ALONE = ("slow", "loses", "spoils")


@pytest.fixture(autouse=True)
def _empty_stores() -> Iterator[None]:
    toy_store.forget_all()
    yield
    toy_store.forget_all()
    third_kind.SHELVES.clear()


@pytest.fixture(name="store")
def store_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a new one."""
    third_kind.register()
    with sqlite_store(tmp_path / "site"):
        yield {
            "blocks": STORE,
            "extents": EXTENTS,
            "installed": f"sqlite://{tmp_path}/objects.db",
            "shelf": "shelf://blocks",
        }[request.param]


def stored_by_an_engine(folder: Path, store: str, **spec: Any) -> tuple[list[int], float]:
    """What an engine answers to ALL, and how many blocks it stores of that."""
    with KvbmEngine(folder, host_blocks=60, store=store, **spec) as engine:
        answer = engine.ask("a", ALL, 8)
        engine.settle()
        return answer, engine.metric(TO_STORE)


@pytest.mark.parametrize("store", ["blocks", "extents", "installed", "shelf"], indirect=True)
@every_kind
def test_what_host_and_disk_have_lost_comes_back_from_the_store(
    spec: dict[str, Any], store: str, tmp_path: Path
) -> None:
    with KvbmEngine(tmp_path, **{**TIGHT, "store": store, **spec}) as engine:
        block = engine.spec.block_size_tokens
        first = engine.ask("a", ALL, 8)
        engine.forget_device()
        push_out(engine)
        assert engine.metric(TO_STORE) > 0
        before = engine.metric(FROM_STORE)
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == 49 // block * block
        from_store = engine.metric(FROM_STORE)
        assert from_store > before
        engine.forget_device()
        assert engine.ask("c", ALL, 8) == first
        assert engine.metric(FROM_STORE) == from_store, "what came from the store was not kept in the host"
        engine.assert_clean()


@every_store
@every_kind
def test_another_engine_finds_what_the_first_one_stored(
    spec: dict[str, Any], store: str, tmp_path: Path
) -> None:
    first, stored = stored_by_an_engine(tmp_path, store, **spec)
    with KvbmEngine(tmp_path, host_blocks=60, store=store, disk_blocks=40, **spec) as engine:
        block = engine.spec.block_size_tokens
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == 49 // block * block
        engine.settle()
        assert engine.metric(FROM_STORE) > 0
        rates = [engine.metric(f"kvbm_{tier}_cache_hit_rate") for tier in ("host", "disk", "object")]
        assert rates == [0.0, 0.0, 1.0]
        engine.forget_device()
        assert engine.ask("c", ALL, 8) == first
        assert engine.metric("kvbm_object_cache_hit_rate") == engine.metric("kvbm_host_cache_hit_rate") == 0.5
        engine.settle()
        assert engine.metric(FROM_STORE) + engine.metric(TO_STORE) <= stored, "what came back is stored again"
        engine.assert_clean()


@of_others
def test_another_engine_finds_what_the_first_one_stored_elsewhere(store: str, tmp_path: Path) -> None:
    first, _ = stored_by_an_engine(tmp_path, store)
    with KvbmEngine(tmp_path, host_blocks=60, disk_blocks=40, store=store) as engine:
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == 48
        engine.settle()
        rates = [engine.metric(f"kvbm_{tier}_cache_hit_rate") for tier in ("host", "disk", "object")]
        assert rates == [0.0, 0.0, 1.0]
        engine.assert_clean()


@of_others
def test_of_two_ranks_each_has_its_own_part(store: str, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, **TIGHT, store=store, ranks=2) as engine:
        ask_anew(engine)
        assert engine.metric(FROM_STORE) > 0
        engine.assert_clean()


@pytest.mark.parametrize(
    ("store", "lost", "left"),
    [
        *((STORE, lost, lost) for lost in (0, 5, 11)),
        *((EXTENTS, lost, left) for lost, left in ((0, 0), (5, 4), (11, 8))),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_of_a_prefix_that_lost_a_block_what_lies_before_it_comes_back(
    store: str, lost: int, left: int, ranks: int, tmp_path: Path
) -> None:
    """``left``: before the block, or before the extent that it was in."""
    with KvbmEngine(tmp_path, host_blocks=60, store=store, ranks=ranks) as engine:
        engine.add("a", ALL, 8)
        engine.step()
        keys = keys_of(engine, "a")
        engine.run()
        first = engine.record.outputs["a"]
        engine.settle()
    # Of one rank of two: what is not there on all of them is not there.
    assert toy_store.lose("blocks", keys[lost], f"{ranks - 1}of")
    with KvbmEngine(tmp_path, host_blocks=60, store=store, ranks=ranks) as engine:
        block = engine.spec.block_size_tokens
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == left * block
        assert engine.record.computed_tokens == 50 - left * block + 7
        assert engine.metric(FROM_STORE) == left
        engine.settle()
    with KvbmEngine(tmp_path, host_blocks=60, store=store, ranks=ranks) as engine:
        assert engine.ask("c", ALL, 8) == first
        assert engine.external_tokens("c") == 48
        engine.assert_clean()


@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("scheme", ["toy", "toys"])
def test_faults_of_a_store_cost_hits_and_nothing_else(
    scheme: str, faults: str, tmp_path: Path, seed: int
) -> None:
    """Each of two ranks has faults of its own."""
    shape = {**TIGHT, "store": f"{scheme}://blocks?seed={seed}&{faults}", "ranks": 2}
    # Longer than a busy machine makes a store wait, which is left alone after its deadline.
    with KvbmEngine(tmp_path, **shape, extra={"remote_wait_s": 10.0}) as engine:
        ask_anew(engine)
        # A store that fails, or is late, again and again is left alone, by luck from its first call on.
        assert engine.metric(FROM_STORE) > 0 or faults not in {FAULTS[name] for name in NOT_LEFT_ALONE}
        engine.assert_clean()


@pytest.mark.shows("KVBM_REMOTE_URL")
def test_of_two_stores_the_second_gives_what_the_first_has_lost(tmp_path: Path) -> None:
    stores = "toys://near?seed=1 toy://far?seed=2"
    first, _ = stored_by_an_engine(tmp_path, stores)
    for lost, reads in (("", ("near",)), ("near", ("far",)), ("far", ("near",))):
        toy_store.forget(lost)
        toy_store.OPENED.clear()
        with KvbmEngine(tmp_path, host_blocks=60, store=stores) as engine:
            assert engine.ask("b", ALL, 8) == first
            assert engine.external_tokens("b") == 48
            engine.settle()
            asked = [{name for name, _ in store.calls} for store in toy_store.OPENED]
            assert [toy_store.GET in names for names in asked] == [name in reads for name in ("near", "far")]
            engine.assert_clean()


def test_of_two_stores_one_that_fails_keeps_nobody_from_the_other(tmp_path: Path) -> None:
    stores = "toy://near?seed=1&fails=1.0 toys://far?seed=2"
    first, _ = stored_by_an_engine(tmp_path, stores)
    with KvbmEngine(tmp_path, host_blocks=60, store=stores) as engine:
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == 48
        engine.assert_clean()


@every_store
def test_a_store_that_hangs_costs_a_bounded_wait(store: str, tmp_path: Path) -> None:
    first, _ = stored_by_an_engine(tmp_path, store)
    short = {"remote_wait_s": 0.2, "remote_deadline_s": 0.2}
    with KvbmEngine(tmp_path, host_blocks=60, disk_blocks=40, store=store, extra=short) as engine:
        toy = toy_store.OPENED[-1]
        toy.hold(toy_store.CONTAINS, toy_store.GET, toy_store.PUT)
        assert engine.ask("b", ALL, 8) == first
        assert engine.external_tokens("b") == 0 and engine.metric(FROM_DISK) == 0
        toy.let_go()
        engine.assert_clean()


def test_no_step_waits_for_a_store_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tell: Any
) -> None:
    """All that a thread can wait by is watched in the engine's own: what it waits for is copies alone."""
    with silent_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        extra: dict[str, Any] = {"remote_wait_s": 0.3, "remote_deadline_s": 2.0, "remote_load": "always"}
        with KvbmEngine(tmp_path, host_blocks=60, store="s3://bucket/hangs", extra=extra) as engine:
            with waits_of_this_thread() as waits:
                for turn in range(4):
                    engine.add(f"{turn}", range(100 * turn, 100 * turn + 50), 8)
                    while engine.scheduler.has_requests():
                        engine.step()
            assert server.connections() > 0, "the store was not asked"
            promised = engine.promised("0")
            assert engine.external_tokens("0") == 0 and promised[0] is None and not any(promised)
            engine.assert_clean()
    tell(f"{engine.record.steps} steps beside a store that hangs, {len(waits)} waits for copies")
    assert not [wait for wait in waits if "worker._let_copies_run" not in wait]


@contextmanager
def waits_of_this_thread() -> Iterator[list[list[str]]]:
    """The functions on the stack, the innermost first, of each call in which a thread may wait."""
    waits: list[list[str]] = []
    python = {threading.Condition.wait.__code__, threading.Thread.join.__code__}
    native = {"sleep", "recv", "recv_into", "send", "sendall", "connect", "select", "poll"}

    def watch(frame: FrameType, event: str, function: Any) -> None:
        is_native = event == "c_call" and function.__name__ in native
        if is_native or (event == "call" and frame.f_code in python):
            waits.append([getattr(function, "__name__", ""), *names_above(frame)])

    sys.setprofile(watch)
    try:
        yield waits
    finally:
        sys.setprofile(None)


def names_above(frame: FrameType | None) -> Iterator[str]:
    """Of the frame's function and its callers, with their modules."""
    while frame is not None:
        yield f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"
        frame = frame.f_back
