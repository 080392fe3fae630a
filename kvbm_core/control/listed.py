"""What etcd says of instances: where each can be asked from other machines, and whether to believe that.

etcd is not trusted: whoever can write there could have operators send their token to an address of his. So
who takes orders over HTTP proves with each address that he knows the token already.
"""

from __future__ import annotations

import hashlib
import hmac
from contextlib import closing, suppress

import msgspec

from kvbm_core.config import KvbmSettings
from kvbm_core.control.messages import MAX_ANSWER_BYTES, Answer, Order, decode
from kvbm_core.errors import ConfigError

RECORDS = "inst/"
PATH = "/v1/orders"
"""Of orders over HTTP."""
_PURPOSE = "kvbm: orders are taken here"


class InstanceRecord(msgspec.Struct, frozen=True):
    """What an instance tells etcd of itself. Less than 2 KiB. ``address``: where it takes orders over HTTP,
    HOST:PORT; ``proof``: see ``proof_of``; ``page``: where its metrics are. Empty if other machines cannot
    reach that.
    """

    instance: str
    rank: int
    engine: str
    model: str
    host: str
    pid: int
    ways: str
    address: str = ""
    proof: str = ""
    page: str = ""

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"{self.instance}.{self.rank}"


def proof_of(token: bytes, fleet: str, name: str, address: str) -> str:
    """That who tells this address knows the token, and that this is where it may be sent."""
    text = "\0".join((_PURPOSE, fleet, name, address))
    return hmac.digest(token, text.encode(), hashlib.sha256).hex()


def is_proven(record: InstanceRecord, token: bytes, fleet: str) -> bool:
    """Whether the token may be sent to the record's address."""
    proof = proof_of(token, fleet, record.name, record.address)
    return hmac.compare_digest(proof.encode(), record.proof.encode())


def listed(settings: KvbmSettings) -> dict[str, InstanceRecord | None] | None:
    """Whom etcd lists, by name (INSTANCE.RANK); None for a record that cannot be read. None without etcd.
    ConfigError, one line, if it cannot be asked.
    """
    if not settings.etcd_endpoints:
        return None
    from kvbm_core.fleet.etcd import ENDPOINTS, EtcdOptions, first_server, open_client

    options = EtcdOptions.from_settings(settings)
    if options is None:
        return None
    root = f"{settings.fleet_root}{RECORDS}"
    try:
        with closing(open_client(options, first_server(options))) as client:
            found = [(about.key.decode(errors="replace"), value) for value, about in client.get_prefix(root)]
    except ConfigError:
        raise
    except Exception as error:  # whatever package and servers can do
        why = f"does not say who is there ({type(error).__name__}); unset it to ask without it"
        raise ConfigError(ENDPOINTS, "(set)", why) from None
    return {key.removeprefix(root): _read(key.removeprefix(root), value) for key, value in found}


def _read(name: str, value: bytes) -> InstanceRecord | None:
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        record = msgspec.json.decode(value, type=InstanceRecord)
        return record if record.name == name else None
    return None


def ask_http(address: str, token: bytes, order: Order, timeout_s: float) -> Answer | str:
    """The answer of who takes orders at HOST:PORT, or why there is none. Goes nowhere else: no redirection is
    followed, and no proxy is asked.
    """
    import http.client  # of who asks; engines do not need it

    try:
        connection = http.client.HTTPConnection(address, timeout=timeout_s)
        with closing(connection):
            headers = {"Authorization": f"Bearer {token.decode('latin-1')}"}
            connection.request("POST", PATH, msgspec.json.encode(order), headers)
            response = connection.getresponse()
            body = response.read(MAX_ANSWER_BYTES + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    answer = decode(body, Answer, MAX_ANSWER_BYTES)
    return answer if answer is not None else f"it answers {response.status} {response.reason}"
