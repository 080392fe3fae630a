"""Ports that the settings ask for: whether somebody else has them."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from kvbm_core.cli.doctor.check import Check, Finding, Subject, error, ok, warning
from kvbm_core.config import KvbmSettings

_LISTENS = "0A"
_TABLES = ("proc/net/tcp", "proc/net/tcp6")


class Wanted(NamedTuple):
    """``setting``: which asks for it. ``is_vital``: kvbm does not do without."""

    setting: str
    host: str
    port: int
    is_vital: bool


def look_at_ports(subject: Subject) -> Iterator[Finding]:
    """Binds each of them for a moment."""
    wanted = list(_wanted(subject.settings))
    for one in wanted:
        try:
            _bind(one.host, one.port)
        except OSError as problem:
            yield _finding(subject, one, problem)
        else:
            yield ok(f"{one.setting}: port {one.port} of {one.host} is free")


def _wanted(settings: KvbmSettings) -> Iterator[Wanted]:
    if settings.metrics:
        yield Wanted("DYN_KVBM_METRICS_PORT", settings.metrics_host, settings.metrics_port, False)
    if settings.is_set("leader_zmq_ack_port") or settings.is_set("leader_zmq_host"):
        yield Wanted(
            "DYN_KVBM_LEADER_ZMQ_ACK_PORT", settings.leader_zmq_host, settings.leader_zmq_ack_port, True
        )
    if "zmq" in settings.event_ways:
        for setting, address in (
            ("KVBM_EVENTS_ENDPOINT", settings.events_endpoint),
            ("KVBM_EVENTS_REPLAY_ENDPOINT", settings.events_replay_endpoint),
        ):
            yield from _of_address(setting, address)
    if "http" in settings.control_ways:
        yield from _of_address("KVBM_CONTROL_HTTP", f"tcp://{settings.control_http}")
    if settings.has_peers:
        yield from _of_address("KVBM_PEER_BIND", f"tcp://{settings.peer_bind.removeprefix('tcp://')}")


def _of_address(setting: str, address: str) -> Iterator[Wanted]:
    with suppress(ValueError):
        url = urlsplit(address)
        if url.scheme == "tcp" and url.hostname and url.port:
            yield Wanted(setting, "0.0.0.0" if url.hostname == "*" else url.hostname, url.port, True)


def _bind(host: str, port: int) -> None:
    """As servers do: what an ended one has left does not count. OSError if it cannot be had."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen(1)


def _finding(subject: Subject, one: Wanted, problem: OSError) -> Finding:
    tell = error if one.is_vital else warning
    seen = f"{one.setting}: port {one.port} of {one.host}: {problem.strerror or problem}"
    if problem.errno == errno.EADDRINUSE:
        holder = _holder(subject, one.port)
        remedy = "is an engine running already? else choose another port"
        return tell(f"{one.setting}: port {one.port} of {one.host} is taken{holder}", remedy)
    if problem.errno == errno.EACCES:
        return tell(seen, "choose 1024 or above")
    return tell(seen, "use an address of this machine")


def _holder(subject: Subject, port: int) -> str:
    """ " by process N (name)", if we may know."""
    inodes = set()
    for table in _TABLES:
        for line in subject.told(table).splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for entry in (process / "fd").iterdir():
                if os.readlink(entry) in inodes:
                    return f" by process {process.name} ({(process / 'comm').read_text().strip()})"
    return ""


CHECKS = (
    Check(
        "ports",
        "ports of metrics, leader, events, orders and peers, as far as settings ask for them",
        look_at_ports,
    ),
)
