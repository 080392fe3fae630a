"""Blocks that one engine has computed come to another one over real sockets, under vLLM's own scheduler:
every byte is checked. The engine that has them does nothing meanwhile: nobody steps it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.testing.file_io_contract import why_no_nixl
from kvbm_vllm.request_params import hinted_peer
from tests.engines.ports import free_port, free_ports
from tests.vllm.harness import PATIENCE_S
from tests.vllm.kvbm_engine import KvbmEngine, specs_to_try
from tests.vllm.test_scheduler_disk import ALL

every_kind = pytest.mark.parametrize("spec", specs_to_try().values(), ids=specs_to_try().keys())
NO_NIXL = why_no_nixl()
FETCHED, LENT = "kvbm_peer_fetched_blocks_total", "kvbm_peer_lent_blocks_total"


class PeerEngine(KvbmEngine):
    """``hint``: as a router writes it."""

    def __init__(self, folder: Path, *, extra: dict[str, Any] | None = None, **shape: Any) -> None:
        self.port = free_ports(shape.get("ranks", 1))
        settings = {
            "peers": "zmq",
            "peer_bind": f"127.0.0.1:{self.port}",
            "remote_load": "always",
            "remote_wait_s": PATIENCE_S,
            "peer_deadline_s": PATIENCE_S,
            **(extra or {}),
        }
        super().__init__(folder, **{"host_blocks": 60, **shape}, extra=settings)

    @property
    def hint(self) -> dict[str, Any]:
        return hint_of(f"tcp://127.0.0.1:{self.port}")

    def lends(self) -> float:
        return self.metric(LENT)


def hint_of(address: str) -> dict[str, Any]:
    return {"kv_transfer_params": {"router_hint": {"source_control_endpoint": address, "block_hashes": [1]}}}


@contextmanager
def two(folder: Path, first: dict[str, Any] | None = None, **shape: Any) -> Iterator[tuple[Any, Any]]:
    """Engines of one model, the second without a disk."""
    with PeerEngine(folder, **{**shape, **(first or {})}) as one, PeerEngine(folder, **shape) as other:
        yield one, other


@pytest.mark.shows("KVBM_PEERS", "KVBM_PEERS=zmq", "KVBM_PEER_BIND")
@every_kind
def test_what_one_engine_has_computed_comes_to_the_other(spec: dict[str, Any], tmp_path: Path) -> None:
    with two(tmp_path, **spec) as (first, second):
        block = first.spec.block_size_tokens
        answer = first.ask("a", ALL, 8)
        first.settle()
        assert second.ask("b", ALL, 8, extra_args=first.hint) == answer
        assert second.external_tokens("b") == 49 // block * block
        fetched = second.metric(FETCHED)
        assert fetched > 0 and first.lends() == fetched * first.spec.ranks
        second.forget_device()
        assert second.ask("c", ALL, 8, extra_args=first.hint) == answer
        assert second.metric(FETCHED) == fetched, "what came was not kept in the host"
        for engine in (first, second):
            engine.assert_clean()


@pytest.mark.shows("KVBM_PEERS=nixl")
@pytest.mark.skipif(NO_NIXL is not None, reason=f"NOT RUN: peers by NIXL: {NO_NIXL}")
@pytest.mark.parametrize("ranks", [1, 2])
def test_by_nixl_too_and_one_line_says_what_that_means(
    ranks: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with two(tmp_path, extra={"peers": "nixl"}, ranks=ranks) as (first, second):
        for rank in first.ranks:
            server = rank.connector.worker_side.worker._peer_server
            first.wait_for(lambda server=server: server.writes)
        answer = first.ask("a", ALL, 8)
        first.settle()
        assert second.ask("b", ALL, 8, extra_args=first.hint) == answer
        assert second.external_tokens("b") == 48 and second.metric(FETCHED) > 0
        lines = [r.getMessage() for r in caplog.records if "KVBM_PEERS=nixl" in r.getMessage()]
        assert len(lines) == 2 * ranks and all("neither encrypts" in line for line in lines)
        for engine in (first, second):
            engine.assert_clean()


def test_without_a_hint_nobody_is_asked(tmp_path: Path) -> None:
    with two(tmp_path) as (first, second):
        answer = first.ask("a", ALL, 8)
        first.settle()
        assert second.ask("b", ALL, 8) == answer
        assert second.external_tokens("b") == 0 == second.metric(FETCHED) == first.lends()
        assert not second.leader.chain.named("peers")._sources  # type: ignore[union-attr]
        second.assert_clean()


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_other_engine_has_on_its_disk_alone_comes_too(ranks: int, tmp_path: Path) -> None:
    disk = {"host_blocks": 30, "disk_blocks": 1000}
    with two(tmp_path, disk, ranks=ranks) as (first, second):
        answer = first.ask("a", ALL, 8)
        first.settle()
        for start in range(1000, 1400, 100):  # which takes its place in the host
            first.forget_device()
            first.ask(f"other {start}", range(start, start + 60))
        first.settle()
        resident = first.disk.slots.keys()
        in_host = sum(first.leader.chain.host.contains(key) for key in resident)
        assert in_host < len(resident)
        assert second.ask("b", ALL, 8, extra_args=first.hint) == answer
        assert second.external_tokens("b") == 48
        for engine in (first, second):
            engine.assert_clean()


def test_the_field_that_vllm_has_for_hints_is_heeded(tmp_path: Path) -> None:
    hints = pytest.importorskip("vllm.v1.kv_hints")  # vLLM 0.32 and later
    with two(tmp_path) as (first, second):
        answer = first.ask("a", ALL, 8)
        first.settle()
        payload = {"source_control_endpoint": f"tcp://127.0.0.1:{first.port}", "block_hashes": [7]}
        action = hints.KvHintAction("x", "kv.fetch", "1.0", payload)
        request = second.add("b", ALL, 8)
        request.kv_hints = hints.KvHintsEnvelope("9.9", "m", [action])
        assert hinted_peer(request) == ""  # another protocol may mean something else
        request.kv_hints = hints.KvHintsEnvelope("0.1", "m", [action])
        second.run()
        assert second.record.outputs["b"] == answer and second.external_tokens("b") == 48
        second.assert_clean()


def test_another_salt_or_model_finds_nothing(tmp_path: Path) -> None:
    with two(tmp_path) as (first, second):
        first.ask("a", ALL, 8, salt="one")
        first.settle()
        second.ask("b", ALL, 8, salt="other", extra_args=first.hint)
        assert second.external_tokens("b") == 0 == second.metric(FETCHED)
        (tmp_path / "other").mkdir()
        with PeerEngine(tmp_path / "other", weights=b"others") as third:
            third.ask("c", ALL, 8, salt="one", extra_args=first.hint)
            assert third.external_tokens("c") == 0 == third.metric(FETCHED)
            third.assert_clean()
        first.assert_clean()


def test_hints_that_lie_cost_a_bounded_wait_once(tmp_path: Path) -> None:
    extra = {"peer_deadline_s": 0.3, "remote_wait_s": 0.3}
    with PeerEngine(tmp_path, extra=extra) as engine, socket.create_server(("127.0.0.1", 0)) as silent:
        answer = engine.ask("a", ALL, 8)
        engine.settle()
        engine.reset_device(with_connector=True)
        addresses = [
            f"tcp://127.0.0.1:{free_port()}",
            f"tcp://127.0.0.1:{engine.port}",
            "tcp://198.51.100.1:7",
            "ipc:///etc/passwd",
            f"tcp://127.0.0.1:{silent.getsockname()[1]}",
        ]
        for number, address in enumerate(addresses):
            assert engine.ask(f"b{number}", ALL, 8, extra_args=hint_of(address)) == answer
            assert engine.external_tokens(f"b{number}") == 0
            engine.settle()
            engine.reset_device(with_connector=True)
        engine.assert_clean()


def test_an_owner_that_ends_and_one_that_comes_in_its_place(tmp_path: Path) -> None:
    with PeerEngine(tmp_path) as second:
        with PeerEngine(tmp_path) as first:
            answer = first.ask("a", ALL, 8)
            first.settle()
            hint, port = first.hint, first.port
            assert second.ask("b", ALL[:20], 1, extra_args=hint)
        second.forget_device()
        assert second.ask("c", ALL, 8, extra_args=hint) == answer
        assert second.external_tokens("c") == 20, "what had come before"
        second.reset_device(with_connector=True)
        with PeerEngine(tmp_path, extra={"peer_bind": f"127.0.0.1:{port}"}) as again:
            again.ask("a", ALL, 8)
            again.settle()
            tier: Any = second.leader.chain.named("peers")
            tier._sources[f"tcp://127.0.0.1:{port}"]._breaker.succeeded()  # time has passed
            assert second.ask("d", ALL, 8, extra_args=hint) == answer
            assert second.external_tokens("d") == 48
        second.assert_clean()


@pytest.mark.shows("KVBM_PEER_BIND")
def test_a_port_that_is_taken_is_told_in_one_line_and_the_engine_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with PeerEngine(tmp_path) as first:
        answer = first.ask("a", ALL, 8)
        first.settle()
        with PeerEngine(tmp_path, extra={"peer_bind": f"127.0.0.1:{first.port}"}) as second:
            second.wait_for(lambda: second.leader.chain.named("peers").off_reason)  # type: ignore[union-attr]
            assert second.ask("b", ALL, 8, extra_args=first.hint) == answer
            assert second.external_tokens("b") == 0
            (line,) = [r.getMessage() for r in caplog.records if "peers tier is off" in r.getMessage()]
            assert "KVBM_PEER_BIND" in line and "\n" not in line
            second.assert_clean()


def test_ranks_on_several_machines_serve_without_peers_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PeerEngine(tmp_path) as first:
        answer = first.ask("a", ALL, 8)
        first.settle()
        monkeypatch.setattr("kvbm_vllm.assembly.num_nodes_of", lambda vllm_config: 2)
        with PeerEngine(tmp_path) as second:
            (line,) = [r.getMessage() for r in caplog.records if "peers tier is off" in r.getMessage()]
            assert "KVBM_PEERS" in line and "\n" not in line
            assert second.ask("b", ALL, 8, extra_args=first.hint) == answer
            assert second.external_tokens("b") == 0
            with socket.socket() as probe:  # nor is anybody served
                assert probe.connect_ex(("127.0.0.1", second.port))
            second.assert_clean()


def test_an_idle_engine_holds_its_books_against_its_own_steps(tmp_path: Path) -> None:
    """Loans are looked up by another thread while the engine works: the hooks and that thread take turns."""
    with two(tmp_path, host_blocks=40) as (first, second):
        prompts = [range(start, start + 50) for start in range(0, 300, 50)]
        for turn in range(3):
            for number, prompt in enumerate(prompts):
                request = f"{turn} {number}"
                second.add(request, prompt, 4, extra_args=first.hint)
                first.add(request, prompts[(number + 1) % len(prompts)], 4)
                while second.scheduler.has_requests() or first.scheduler.has_requests():
                    for engine in (first, second):
                        if engine.scheduler.has_requests():
                            engine.step()
                first.forget_device()
                second.forget_device()
        assert second.metric(FETCHED) > 0
        for engine in (first, second):
            engine.assert_clean()


def test_hooks_wait_for_a_look_at_the_books(tmp_path: Path) -> None:
    with PeerEngine(tmp_path) as engine:
        engine.add("a", ALL, 8)
        is_over = threading.Event()

        def serve() -> None:
            engine.run()
            is_over.set()

        server = threading.Thread(target=serve)
        with engine.leader.lock:
            server.start()
            assert not is_over.wait(0.3)
        server.join()
        assert is_over.is_set() and len(engine.record.outputs["a"]) == 8
        engine.assert_clean()
