"""Ports on loopback."""

from __future__ import annotations

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
_DRAW = random.SystemRandom()  # a seed would give the same ports to tests that run side by side


def listens(pid: int, port: int) -> bool:
    """Whether it is this process, and no other, that listens there."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    inodes = {field[9] for field in fields if field[3] == "0A" and field[1].endswith(f":{port:04X}")}
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            links.append(str(entry.readlink()))
    return bool(inodes) and {f"socket:[{inode}]" for inode in inodes} <= set(links)


def free_port() -> int:
    """One that nobody listens on at this moment."""
    while True:
        port = _DRAW.randrange(FIRST_PORT, END_PORT)
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        return port
