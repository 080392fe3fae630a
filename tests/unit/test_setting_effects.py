"""Settings as their rows of the table say, on real files, sockets and memory: each test fails if its setting
is not heeded.
"""

from __future__ import annotations

import fcntl
import http.client
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.config import Adapter, KvbmSettings
from kvbm_core.config.instance import instance_of
from kvbm_core.control import socket_wire
from kvbm_core.control.desk import About
from kvbm_core.control.http_wire import PATH
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.events.nats_sink import login_of
from kvbm_core.events.service import EventService
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime import assembly
from kvbm_core.runtime.assembly import (
    LeaderProcess,
    announce,
    leader_options,
    metrics_of,
    metrics_server,
    rank_options,
    store_options,
)
from kvbm_core.runtime.endpoint import Endpoint
from kvbm_core.runtime.handshake import Handshake
from kvbm_core.storage.directory.calls import FileCalls
from kvbm_core.storage.disk import allocate
from kvbm_core.storage.disk.allocate import FileOptions, open_file, reserve
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.storage.stores import StoreSpec, open_store
from kvbm_core.testing.executor_bench import LONG_S
from kvbm_core.testing.leader_bench import LeaderBench
from kvbm_core.testing.store_contract import buffers, key_of
from kvbm_core.transfer import rank
from kvbm_core.transfer.executors.memcpy import MemcpyExecutor
from tests.engines.ports import free_port
from tests.unit.control_bench import Cache, here
from tests.unit.disk_bench import PROMPT, loading
from tests.unit.event_truth import make_log
from tests.unit.local_bench import KEYS, LocalBench
from tests.unit.test_config import clean_environment
from tests.unit.test_directory_store import _of_another

__all__ = ["clean_environment", "here"]

ROOT = Path(__file__).resolve().parents[2]
FILE_BYTES = 4 << 20


def settings_of(**given: object) -> KvbmSettings:
    """With a host tier."""
    return KvbmSettings.from_env({"cpu_cache_gb": 0.1, **given})


# ---------------------------------------------------------------- files of the disk


def file_options(**given: object) -> FileOptions:
    return rank_options(settings_of(disk_cache_gb=1, **given)).disk


@pytest.mark.shows("DYN_KVBM_DISK_ZEROFILL_FALLBACK")
@pytest.mark.parametrize("fills", [False, True])
def test_where_fallocate_is_unknown_zeros_are_written_if_that_is_asked_for(
    fills: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(allocate, "_fallocate", lambda fd, num_bytes: False)
    options = file_options(disk_zerofill_fallback=fills)
    with closing(open_file(tmp_path / "x.blocks", options)) as opened:
        reserve(opened, FILE_BYTES, options)
        status = os.fstat(opened.fd)
        assert status.st_size == FILE_BYTES and opened.is_reserved is fills
        assert (status.st_blocks * 512 >= FILE_BYTES) is fills


def knows_o_direct(folder: Path) -> bool:
    """Whether this file system does."""
    try:
        os.close(os.open(folder / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


@pytest.mark.shows(
    "DYN_KVBM_DISK_DISABLE_O_DIRECT",
    "DYN_KVBM_DISK_ALLOCATOR_TYPE",
    "DYN_KVBM_DISK_ALLOCATOR_TYPE=default",
    "DYN_KVBM_DISK_ALLOCATOR_TYPE=open-direct",
)
@pytest.mark.parametrize("allocator", ["default", "open-direct"])
@pytest.mark.parametrize("is_disabled", [False, True])
def test_the_page_cache_is_passed_by_and_how_that_is_asked_for(
    allocator: str, is_disabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not knows_o_direct(tmp_path):
        pytest.skip("NOT RUN: O_DIRECT: this file system does not know it")
    flags, open_it = list[int](), os.open

    def note(path: Any, how: int, *mode: int) -> int:
        flags.append(how)
        return open_it(path, how, *mode)

    options = file_options(disk_allocator_type=allocator, disk_disable_o_direct=is_disabled)
    monkeypatch.setattr(os, "open", note)
    with closing(open_file(tmp_path / "x.blocks", options)) as opened:
        monkeypatch.undo()
        is_direct = bool(fcntl.fcntl(opened.fd, fcntl.F_GETFL) & os.O_DIRECT)
    assert is_direct is opened.is_direct is not is_disabled
    asked_at_open = any(how & os.O_DIRECT for how in flags)
    assert asked_at_open is (allocator == "open-direct" and not is_disabled)


# ---------------------------------------------------------------- memory and copies


@contextmanager
def without_near_cpus(tmp_path: Path, near: set[int], **given: object) -> Iterator[list[set[int]]]:
    """Where the memory of a host tier was touched, beside a GPU that is near these CPUs."""
    ran_on: list[set[int]] = []

    def prepare(memory: object) -> Callable[[int, int], None]:
        return lambda address, num_bytes: ran_on.append(os.sched_getaffinity(0))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rank, "slab_cpus", lambda memory: frozenset(near))
        patched.setattr(rank, "slab_preparation", prepare)
        with closing(LocalBench(tmp_path, memory=rank_options(settings_of(**given)))):
            yield ran_on


@pytest.mark.shows("DYN_MEMORY_DISABLE_NUMA", "DYN_KVBM_ENABLE_NUMA")
@pytest.mark.parametrize("given", [{}, {"disable_numa": True}, {"enable_numa": True}, {"enable_numa": False}])
def test_host_memory_is_taken_near_the_gpu_unless_that_is_disabled(
    given: dict[str, object], tmp_path: Path
) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("NOT RUN: where memory is taken from: needs two CPUs")
    near = {max(allowed)}
    with without_near_cpus(tmp_path, near, **given) as ran_on:
        assert ran_on == [allowed if given.get("disable_numa") else near]


@pytest.mark.shows("DYN_KVBM_DISABLE_WRITE_COMBINED")
def test_memory_is_the_same_whatever_is_said_of_write_combining() -> None:
    options = [rank_options(settings_of(disable_write_combined=value)) for value in (True, False)]
    assert options[0] == options[1]
    assert not settings_of(disable_write_combined=True).warnings


@pytest.mark.shows("DYN_KVBM_MAX_CONCURRENT_TRANSFERS", "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE")
def test_limits_of_copies_reach_the_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU's executor does with them: tests/contract/test_executors.py."""
    made, make = list[dict[str, Any]](), rank.make_executor

    def note(device: Any, host: HostSlab, **more: Any) -> Any:
        made.append(more)
        return make(device, host, **more)

    monkeypatch.setattr(rank, "make_executor", note)
    given = rank_options(settings_of(max_concurrent_transfers=3, max_transfer_batch_size=5))
    LocalBench(tmp_path, memory=given).close()
    assert [(limits["max_concurrent"], limits["max_batch_blocks"]) for limits in made] == [(3, 5)]


@pytest.mark.shows("KVBM_TRANSFER_DEADLINE_S")
def test_a_copy_that_has_not_started_in_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_copying, goes_on, copy = threading.Event(), threading.Event(), MemcpyExecutor._copy

    def slow_copy(self: MemcpyExecutor, *given: Any) -> None:
        is_copying.set()
        assert goes_on.wait(LONG_S)
        copy(self, *given)

    monkeypatch.setattr(MemcpyExecutor, "_copy", slow_copy)
    bench = LocalBench(tmp_path, memory=rank_options(settings_of(transfer_deadline_s=0.05)))
    first = bench.begin_store(KEYS[:2])
    assert is_copying.wait(LONG_S)
    second, ends_at_s = bench.begin_store(KEYS[2:4]), time.monotonic() + 0.1
    while time.monotonic() < ends_at_s:
        time.sleep(0.01)
    goes_on.set()
    assert (first.wait(), second.wait()) == (Outcome.OK, Outcome.TIMED_OUT)
    bench.close()


# ---------------------------------------------------------------- the leader


def warm_leader(**given: object) -> LeaderBench:
    """That has PROMPT in its host tier."""
    bench = LeaderBench(8, options=leader_options(settings_of(**given), share_loads=True))
    bench.store(PROMPT)
    return bench


@pytest.mark.shows("KVBM_LEASE_TTL_S")
def test_blocks_stay_pinned_so_long_for_a_request_that_went_silent() -> None:
    bench = warm_leader(lease_ttl_s=7)
    assert bench.match(bench.open("silent"), PROMPT)
    for seconds, leases in ((6.9, 1), (0.2, 0)):
        bench.clock.advance(seconds)
        bench.leader.poll()
        assert bench.tier.live_leases == leases


@pytest.mark.shows("KVBM_SHARE_WAIT_S", "KVBM_SHARE_WAIT_S=0")
@pytest.mark.parametrize("wait_s", [0, 7])
def test_a_request_waits_so_long_for_blocks_that_another_one_is_bringing(wait_s: float) -> None:
    bench = warm_leader(share_wait_s=wait_s)
    state, plan = loading(bench)
    second = bench.open("second")
    if wait_s:
        assert bench.match(second, PROMPT) is None
        bench.clock.advance(wait_s - 0.1)
        assert bench.match(second, PROMPT) is None
        bench.clock.advance(0.2)
    assert bench.match(second, PROMPT)
    bench.answer(plan)
    bench.leader.finish(second)
    bench.leader.finish(state)


@contextmanager
def leader_process(folder: Path, **given: object) -> Iterator[LeaderProcess]:
    settings, path = settings_of(**given), folder / "socket"
    endpoint = Endpoint(f"ipc://{path}", path, secret=b"s")
    with closing(
        LeaderProcess(settings, metrics_of(settings), endpoint, world_size=1, model="m", engine_name="e")
    ) as process:
        yield process


@pytest.mark.shows("DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS")
def test_missing_workers_are_named_after_the_timeout(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    monkeypatch.setattr(assembly, "Handshake", partial(Handshake, clock=clock))
    with leader_process(short_path, leader_worker_init_timeout_s=7) as process:
        clock.advance(6.9)
        process._handshake.on_tick()
        assert "INIT_TIMEOUT" not in caplog.text
        clock.advance(0.2)
        process._handshake.on_tick()
    assert "rank 0 has not said hello" in caplog.text and "INIT_TIMEOUT_SECS=7" in caplog.text


@pytest.mark.shows("DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS", "DYN_KVBM_CACHE_STATS_MAX_REQUESTS")
def test_how_often_hit_rates_are_logged_and_of_how_many_requests(
    short_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    caplog.set_level(logging.INFO, "kvbm")
    make = assembly.CacheStatsLog
    monkeypatch.setattr(assembly, "CacheStatsLog", lambda *given: make(*given, clock=clock))
    given = {"cache_stats_log_interval_s": 70, "cache_stats_max_requests": 2}
    with leader_process(short_path, **given) as process:
        for hits in (4, 3, 0):
            process._metrics.request_hits(hits, 0, 4)
        clock.advance(69.0)
        assert not process._stats_log.tick() and "Cache Hit Rates" not in caplog.text
        clock.advance(2.0)
        process._stats_log.tick()
        ends_at_s = time.monotonic() + LONG_S
        while "Cache Hit Rates - Host: 37.5% (3/8)" not in caplog.text:  # the process' own thread was first
            assert time.monotonic() < ends_at_s
            time.sleep(0.01)


@pytest.mark.shows("DYN_LOG")
@pytest.mark.parametrize(
    ("value", "level"), [("error", logging.ERROR), ("warn", logging.WARNING), ("debug", logging.DEBUG)]
)
def test_the_log_has_the_level_that_is_asked_for(value: str, level: int) -> None:
    logger = logging.getLogger("kvbm")
    before, handlers = logger.level, list(logger.handlers)
    try:
        announce(settings_of(log_level=value), Adapter.VLLM)
        assert logger.getEffectiveLevel() == level
    finally:
        logger.setLevel(before)
        logger.handlers[:] = handlers


# ---------------------------------------------------------------- the metrics page


@pytest.mark.shows("DYN_KVBM_METRICS", "DYN_KVBM_METRICS_PORT", "KVBM_METRICS_HOST")
def test_the_page_is_served_where_the_settings_say_if_it_is_asked_for(short_path: Path) -> None:
    about, port = About("engine", "model", 1), free_port()
    assert metrics_server(settings_of(metrics_port=port), Metrics(), about) is None
    host = "127.0.0.2"  # of this machine too; 127.0.0.1 is another address
    given = settings_of(metrics=True, metrics_port=port - 1, metrics_host=host)
    served = metrics_server(given, Metrics(), about)
    assert served is not None
    with closing(served):
        connection = http.client.HTTPConnection(host, port, timeout=LONG_S)
        connection.request("GET", "/metrics")
        assert b"kvbm_matched_tokens" in connection.getresponse().read()
        connection.close()
        with pytest.raises(ConnectionRefusedError):
            http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S).connect()


# ---------------------------------------------------------------- a directory that machines share


@contextmanager
def directory_of(folder: Path, **given: object) -> Iterator[Any]:
    """The store, as a rank opens it."""
    folder.mkdir(exist_ok=True)
    settings = settings_of(**{"remote_url": f"file://{folder}", "remote_cache_gb": 0, **given})
    (url,) = settings.store_urls
    with closing(
        open_store(StoreSpec(url, 8192, "meaning", "0of1", "model", store_options(settings)))
    ) as one:
        yield one


@pytest.mark.shows("KVBM_REMOTE_CACHE_GB", "KVBM_REMOTE_CACHE_GB=0")
@pytest.mark.parametrize("limit_gb", [0, 0.0005])
def test_a_models_folder_grows_to_its_size(limit_gb: float, tmp_path: Path) -> None:
    with directory_of(tmp_path / "kv", remote_cache_gb=limit_gb) as store:
        for start in range(0, 100, 10):
            keys = [key_of(number) for number in range(start, start + 10)]
            assert store.put_many(keys, buffers(10, 8192), deadline_s=LONG_S) == [Outcome.OK] * 10
        store.evictor.evict()
        left = [
            path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.stat().st_size > 8000
        ]
        num_bytes = sum(path.stat().st_size for path in left)
        assert len(left) == 100 if not limit_gb else num_bytes <= limit_gb * 1e9


@pytest.mark.shows("KVBM_REMOTE_TRUST", "KVBM_REMOTE_TRUST=user", "KVBM_REMOTE_TRUST=group")
@pytest.mark.parametrize(("trust", "outcome"), [("user", Outcome.MISS), ("group", Outcome.OK)])
def test_whose_blocks_are_read(
    trust: str, outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with directory_of(tmp_path / "kv", remote_trust=trust) as store:
        assert store.put_many(KEYS[:1], buffers(1, 8192), deadline_s=LONG_S) == [Outcome.OK]
        assert store.get_many(KEYS[:1], buffers(1, 8192), deadline_s=LONG_S) == [Outcome.OK]
        as_of_another = _of_another(os.fstat, os.getegid())
        monkeypatch.setattr(FileCalls, "fstat", staticmethod(as_of_another))
        assert store.get_many(KEYS[:1], buffers(1, 8192), deadline_s=LONG_S) == [outcome]


# ---------------------------------------------------------------- events


@pytest.mark.shows("KVBM_EVENTS=off")
def test_no_events_are_published_unless_that_is_asked_for(short_path: Path) -> None:
    threads, log = set(threading.enumerate()), make_log()
    end = f"ipc://{short_path}/events"
    for ways, has_publisher in (("off", False), ("zmq", True)):
        given = settings_of(events=ways, events_endpoint=end, events_replay_endpoint=f"{end}-replay")
        with closing(EventService(given, log, 0, Metrics())) as service:
            assert (service.publisher is not None) is has_publisher
            assert (set(threading.enumerate()) <= threads) is not has_publisher


# ---------------------------------------------------------------- other machines, and orders


@pytest.mark.shows("KVBM_INSTANCE")
def test_an_instance_has_the_name_that_it_is_given_or_another_one_at_each_start() -> None:
    assert instance_of(settings_of(instance="one")) == "one"
    program = (
        "from kvbm_core.config import KvbmSettings; from kvbm_core.config.instance import instance_of;"
        "print(*[instance_of(KvbmSettings.from_env()) for _ in range(2)])"
    )
    names = [instance_of(settings_of())]
    for _ in range(2):
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        name, again = done.stdout.split()
        assert name == again
        names.append(name)
    assert len(set(names)) == 3


@pytest.mark.shows("KVBM_FLEET_INSECURE")
def test_a_nats_server_elsewhere_without_tls_has_to_be_asked_for() -> None:
    with pytest.raises(ConfigError, match="no TLS"):
        login_of(settings_of(nats_server="nats://192.0.2.1:4222")).check()
    login_of(settings_of(nats_server="nats://192.0.2.1:4222", fleet_insecure=True)).check()


@pytest.mark.shows("KVBM_CONTROL", "KVBM_CONTROL=socket", "KVBM_CONTROL=http", "KVBM_CONTROL_HTTP")
def test_orders_are_taken_over_each_way_and_over_http_at_a_port_of_each_rank(here: Path) -> None:
    token, port = here / "token", free_port()
    token.touch(0o600)
    token.write_text("a token of this test alone")
    given = settings_of(
        control="socket,http", control_http=f"127.0.0.1:{port - 2}", control_token_file=str(token)
    )
    service = assembly.control_service(given, About("engine", "model", 2), Cache().control, Metrics())
    assert service is not None
    with closing(service):
        assert len(socket_wire.sockets()) == 1
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=LONG_S)
        connection.request(
            "POST", PATH, b'{"verb": "status"}', {"Authorization": f"Bearer {token.read_text()}"}
        )
        assert connection.getresponse().status == 200
        connection.close()
