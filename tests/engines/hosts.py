"""Hosts with addresses of their own on one machine: network namespaces with a cable between. Needs root."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_NEW_MOUNTS, _NEW_NETWORK = 0x00020000, 0x40000000
_PRIVATE, _RECURSIVE, _BIND = 1 << 18, 1 << 14, 1 << 12


class Host(NamedTuple):
    """A network namespace, and its address on the cable."""

    name: str
    address: str
    device: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """Of a command line that is to run there."""
        return ("ip", "netns", "exec", self.name)

    def enter(self) -> None:
        """This thread, and those that it starts from now on, are on this host."""
        fd = os.open(f"/run/netns/{self.name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(ctypes.CDLL(None, use_errno=True).setns(fd, _NEW_NETWORK))
        finally:
            os.close(fd)

    def cut(self) -> None:
        """Pulls the cable."""
        _ip("-n", self.name, "link", "set", self.device, "down")

    def slow(self, bytes_per_s: int) -> None:
        """So much goes out over the cable, not more."""
        shape = ("tbf", "rate", f"{bytes_per_s}bps", "burst", "128kb", "latency", "1s")
        _run("tc", "-n", self.name, "qdisc", "replace", "dev", self.device, "root", *shape)

    def mend(self) -> None:
        """Puts it back, as fast as it was."""
        _ip("-n", self.name, "link", "set", self.device, "up")
        _run("tc", "-n", self.name, "qdisc", "replace", "dev", self.device, "root", "pfifo")


def why_not() -> str:
    """Why this machine can have no such hosts; empty if it can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "there is no ip or no tc (Debian: iproute2)"
    made = subprocess.run(["ip", "netns", "add", name := f"kvbm-{secrets.token_hex(3)}"], capture_output=True)
    if made.returncode:
        return "network namespaces need root"
    _ip("netns", "del", name)
    return ""


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two, and nothing else on their network."""
    key, net = secrets.token_hex(3), secrets.randbelow(250)
    hosts = tuple(Host(f"kvbm-{key}-{side}", f"10.213.{net}.{side}", f"kv{key}{side}") for side in (1, 2))
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        _ip("link", "add", hosts[0].device, "type", "veth", "peer", "name", hosts[1].device)
        for host in hosts:
            _ip("link", "set", host.device, "netns", host.name)
            _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.device)
            _ip("-n", host.name, "link", "set", host.device, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield hosts[0], hosts[1]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


@contextmanager
def lone_host() -> Iterator[Host]:
    """One whose only network is its own loopback."""
    host = Host(f"kvbm-{secrets.token_hex(3)}", "127.0.0.1", "lo")
    _ip("netns", "add", host.name)
    try:
        host.mend()
        yield host
    finally:
        subprocess.run(["ip", "netns", "del", host.name], capture_output=True)


def see_instead(place: Path, other: Path) -> None:
    """This process sees ``other`` where others see ``place``: a machine's own disk."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_NEW_MOUNTS))
    _check(libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None))
    _check(libc.mount(os.fsencode(other), os.fsencode(place), None, _BIND, None))


def _check(result: int) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
