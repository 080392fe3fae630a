"""What etcd and NATS say of themselves, and how fast a count of theirs grows."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import httpx

from benchmarks.fleet.children import cpu_s, rss_bytes
from tests.engines.etcd_server import EtcdServer
from tests.engines.nats_server import NatsServer
from tests.engines.ports import HOST

_SAMPLE = re.compile(r'^(\w+)(?:\{.*?grpc_method="(\w+)".*?\})? (\S+)$', re.MULTILINE)
PULSE_S = 0.1


class Reading(NamedTuple):
    """At one moment: ``counts`` of its own, CPU time and memory of its process."""

    at_s: float
    cpu_s: float
    rss_bytes: int
    counts: Mapping[str, float]

    def rates(self, later: Reading) -> dict[str, float]:
        """Growth of each count in a second, until ``later``; ``cpu`` in cores."""
        seconds = later.at_s - self.at_s
        grown = {name: (later.counts.get(name, 0.0) - count) / seconds for name, count in self.counts.items()}
        return {**grown, "cpu": (later.cpu_s - self.cpu_s) / seconds}


def _client() -> httpx.Client:
    return httpx.Client(timeout=5.0, trust_env=False)


def etcd_counts(server: EtcdServer, http: httpx.Client) -> dict[str, float]:
    """``calls_METHOD``, ``messages_METHOD`` that came, ``bytes`` both ways."""
    found = dict[str, float]()
    for name, method, value in _SAMPLE.findall(http.get(f"{server.url}/metrics").text):
        short = {
            "grpc_server_started_total": f"calls_{method}",
            "grpc_server_msg_received_total": f"messages_{method}",
            "etcd_network_client_grpc_received_bytes_total": "bytes",
            "etcd_network_client_grpc_sent_bytes_total": "bytes",
        }.get(name)
        if short is not None:
            found[short] = found.get(short, 0.0) + float(value)
    return found


def nats_counts(port: int, http: httpx.Client) -> dict[str, float]:
    """Messages and bytes, in and out; connections that were made, and those that are there."""
    told = http.get(f"http://{HOST}:{port}/varz").json()
    names = (
        "in_msgs",
        "out_msgs",
        "in_bytes",
        "out_bytes",
        "total_connections",
        "connections",
        "slow_consumers",
    )
    return {name: float(told[name]) for name in names}


class EtcdMeter:
    """Of a server that answers."""

    def __init__(self, server: EtcdServer) -> None:
        self.server = server
        self._http = _client()
        self.close = self._http.close

    def read(self) -> Reading:
        """Now."""
        pid = self.server.pid
        counts = etcd_counts(self.server, self._http)
        return Reading(time.monotonic(), cpu_s(pid), rss_bytes(pid), counts)

    def newcomers(self) -> float:
        """Sessions that were begun since the server started."""
        return etcd_counts(self.server, self._http).get("calls_LeaseGrant", 0.0)


class NatsMeter:
    """Of a server that was started with ``-m`` and this port."""

    def __init__(self, server: NatsServer, port: int) -> None:
        self.server = server
        self._port = port
        self._http = _client()
        self.close = self._http.close

    def read(self) -> Reading:
        """Now."""
        pid = self.server.pid
        return Reading(time.monotonic(), cpu_s(pid), rss_bytes(pid), nats_counts(self._port, self._http))

    def newcomers(self) -> float:
        """Connections that were made since the server started."""
        return nats_counts(self._port, self._http)["total_connections"]


class Pulse:
    """How much a server's count grew at most within a tenth of a second and within a second, while it runs.

    A context manager. A server that has just started counts from 0; one that does not answer has not grown.
    """

    def __init__(self, meter: EtcdMeter | NatsMeter) -> None:
        self.peak_tenth = self.peak_second = 0.0
        self._meter = meter
        self._seen = deque[tuple[float, float]]()
        self._pid = meter.server.pid
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Pulse:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(30)
        self._look()

    def _run(self) -> None:
        while not self._is_over.wait(PULSE_S):
            self._look()

    def _look(self) -> None:
        try:
            pid, count = self._meter.server.pid, self._meter.newcomers()
        except (httpx.HTTPError, RuntimeError, AssertionError):
            return
        now_s, seen = time.monotonic(), self._seen
        if pid != self._pid:
            self._pid = pid
            seen.clear()
            seen.append((now_s - PULSE_S, 0.0))
        seen.append((now_s, count))
        while seen[0][0] < now_s - 1.0:
            seen.popleft()
        self.peak_second = max(self.peak_second, count - seen[0][1])
        if len(seen) > 1:
            before_s, before = seen[-2]
            self.peak_tenth = max(self.peak_tenth, (count - before) * min(1.0, PULSE_S / (now_s - before_s)))
