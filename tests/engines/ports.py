"""Ports on loopback."""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


def free_port() -> int:
    """One that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
