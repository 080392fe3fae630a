"""Addresses of peers, tcp://HOST:PORT: that of an instance is its rank 0's; rank r is r ports further on."""

from __future__ import annotations

import re
from typing import NamedTuple

SCHEME = "tcp://"
LAST_PORT = 65_535
MAX_CHARACTERS = 300
_PATTERN = re.compile(
    r"(?:tcp://)?(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})):([0-9]{1,5})"
)


class PeerAddress(NamedTuple):
    """``host``: a name or an IP address; an IPv6 one without its brackets."""

    host: str
    port: int

    @property
    def text(self) -> str:
        """As ZMQ takes it."""
        return f"{SCHEME}{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def parse_address(text: str) -> PeerAddress | None:
    """None for what is no address of a peer."""
    found = _PATTERN.fullmatch(text) if len(text) <= MAX_CHARACTERS else None
    if found is None or not 0 < int(found[2]) <= LAST_PORT:
        return None
    return PeerAddress(found[1].strip("[]"), int(found[2]))


def address_of_rank(source: str, rank: int) -> str | None:
    """Where rank ``rank`` of the instance at ``source`` listens; None if there is no such place."""
    address = parse_address(source)
    if address is None or address.port + rank > LAST_PORT:
        return None
    return address._replace(port=address.port + rank).text


def host_of(address: str) -> str:
    """Its host; empty for what is no address."""
    parsed = parse_address(address)
    return parsed.host if parsed is not None else ""
