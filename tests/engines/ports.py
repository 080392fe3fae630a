"""Ports on loopback."""

from __future__ import annotations

import itertools
import os
import random
import socket
from contextlib import suppress
from pathlib import Path

HOST = "127.0.0.1"
FIRST_PORT, END_PORT = 20_000, 32_000
"""Below those that the kernel gives to connections and to whoever asks for any port: an engine binds its
port up to a minute later, and its libraries open dozens of such sockets meanwhile. (Dynamo reads its system
port as a signed number of 16 bits, too.)
"""
_PARTS = 4
# A seed would give the same ports to tests that run side by side.
_TURNS = itertools.count(random.SystemRandom().randrange(END_PORT))


def listens(pid: int, port: int) -> bool:
    """Whether it is this process, and no other, that listens there."""
    fields, links = list[list[str]](), list[str]()
    with suppress(OSError):  # it may end meanwhile
        for name in ("tcp", "tcp6"):
            lines = Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
            fields += [line.split() for line in lines]
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                links.append(str(entry.readlink()))
    inodes = {field[9] for field in fields if field[3] == "0A" and field[1].endswith(f":{port:04X}")}
    return bool(inodes) and {f"socket:[{inode}]" for inode in inodes} <= set(links)


def free_ports(count: int) -> int:
    """The first of ``count`` in a row that nobody listens on at this moment. Workers of pytest-xdist take
    them from parts of their own, and a process is given all others of its part before it is given one again:
    a server may take its ports seconds after it has looked.
    """
    size = (END_PORT - FIRST_PORT) // _PARTS
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    start = FIRST_PORT + size * (int(worker or 0) % _PARTS)
    while True:
        turn, *_rest = [next(_TURNS) for _ in range(count)]
        first = start + turn % size
        if first + count <= start + size and all(map(_is_free, range(first, first + count))):
            return first


def free_port() -> int:
    """One that nobody listens on at this moment."""
    return free_ports(1)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
