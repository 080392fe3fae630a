"""Where a server of a store is: the URLs of Valkey, Redis and Mooncake Store."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from kvbm_core.config.addresses import bracketed

VALKEY_SCHEMES = ("redis", "rediss", "valkey", "valkeys")
"""Two words for one thing; those with an s at the end are with TLS."""
TLS_SCHEMES = ("rediss", "valkeys")
MOONCAKE_SCHEME = "mooncake"
SERVER_SCHEMES = (*VALKEY_SCHEMES, MOONCAKE_SCHEME)
_DEFAULT_PORT = {MOONCAKE_SCHEME: 50051}
_VALKEY_PORT = 6379
_SECRETS = "no name or password belongs there; set KVBM_REMOTE_USERNAME and KVBM_REMOTE_PASSWORD_FILE"


class ServerUrl(NamedTuple):
    """``database``: number of one of Valkey's."""

    scheme: str
    host: str
    port: int
    database: int = 0

    @property
    def is_tls(self) -> bool:
        """Whether the connection is encrypted, and the server's certificate checked."""
        return self.scheme in TLS_SCHEMES

    @property
    def address(self) -> str:
        """For people, and as Mooncake wants it."""
        return f"{bracketed(self.host)}:{self.port}"


def server_url(url: str) -> ServerUrl:
    """What ``url`` names. ValueError with the remedy, which repeats nothing of it."""
    scheme = url.partition("://")[0].lower()
    is_mooncake = scheme == MOONCAKE_SCHEME
    remedy = f"write {scheme}://HOST:PORT" + ("" if is_mooncake else " or, for a database, HOST:PORT/NUMBER")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ValueError(remedy) from None
    if "@" in parts.netloc or "@" in url:
        raise ValueError(_SECRETS)
    database = parts.path.strip("/")
    if not host or parts.query or parts.fragment or (database and (is_mooncake or not database.isdecimal())):
        raise ValueError(remedy)
    if not database.isascii() or len(database) > 6:
        raise ValueError(remedy)
    return ServerUrl(scheme, host, port or _DEFAULT_PORT.get(scheme, _VALKEY_PORT), int(database or 0))
