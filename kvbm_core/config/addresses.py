"""Addresses of machines: as they are written, and what they mean from here."""

from __future__ import annotations

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Whether no other machine reaches it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name, an interface, or * for all of them
        return False


def bracketed(host: str) -> str:
    """As it stands before a port, and in a URL."""
    return f"[{host}]" if ":" in host else host


def own_address(host: str, port: int) -> str:
    """Of this machine, on the way to a server; nothing is sent. OSError if there is no way."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
