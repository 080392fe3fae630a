"""From a raw value (text, or a JSON scalar) to a setting's type; ValueError carries the remedy to show."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Annotated

from pydantic import PlainValidator, SecretStr

from kvbm_core.config.remote_url import read_remote_urls

MAX_CACHE_GB = 1e6
MAX_COUNT = 2**40
MAX_SECONDS = 1e7
LOG_LEVELS = ("error", "warn", "warning", "info", "debug", "trace", "off")
_LAST_PORT = 65_535
OUR_LOG_TARGET = "kvbm"
_MAX_FLOAT = 1e300
_SHOWN_CHARS = 80

# Plain ASCII notation only: Python's own float() would also take "1_000", "nan" and non-Latin digits.
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
_INT = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_USER_IN_URL = re.compile(r"(://|^[^\s@/]*:).*@")
_QUERY_OF_SERVER = re.compile(r"((?!file:)\b[a-z0-9]+://[^?]*\?).*", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_TRUE = frozenset({"1", "true", "on", "yes"})
_FALSE = frozenset({"0", "false", "off", "no"})


def without_password(text: str) -> str:
    """``text`` but for who one is in a URL, and its query, which may be a key."""
    return _QUERY_OF_SERVER.sub(r"\1***", _USER_IN_URL.sub(r"\1***@", text))


def shown(value: object) -> str:
    """``value`` as it may stand in a message: one printable line of bounded length, no password of a URL."""
    text = without_password(str(value))[: _SHOWN_CHARS + 1]
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def _float_or_none(value: object) -> float | None:
    """The number; infinity for one too large for a float and for NaN, None for what is no number."""
    if isinstance(value, str) and _FLOAT.fullmatch(value.strip()):
        return float(value)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if abs(value) <= _MAX_FLOAT else math.inf
    return None


def _int_or_none(value: object) -> int | None:
    if isinstance(value, str) and _INT.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() else None
    return value if isinstance(value, int) else None


def float_reader(remedy: str, high: float, *, zero_allowed: bool = False) -> Callable[[object], float]:
    """A reader of a finite number above zero (or from zero, if allowed) and up to ``high``."""

    def read(value: object) -> float:
        number = _float_or_none(value)
        if number is None or number > high or number < 0 or (number == 0 and not zero_allowed):
            raise ValueError(remedy)
        return number

    return read


def int_reader(remedy: str, low: int, high: int) -> Callable[[object], int]:
    """A reader of a whole number from ``low`` to ``high``."""

    def read(value: object) -> int:
        number = _int_or_none(value)
        if number is None or not low <= number <= high:
            raise ValueError(remedy)
        return number

    return read


def _read_flag(value: object) -> bool:
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError("write true or false (1, on, yes or 0, off, no are read too)")


def _read_presence(value: object) -> bool:
    return str(value).strip().lower() not in _FALSE


def choice_reader(*choices: str) -> Callable[[object], str]:
    """A reader of exactly one of ``choices``."""

    def read(value: object) -> str:
        text = str(value).strip()
        if text not in choices:
            raise ValueError(f"write one of {', '.join(choices)}")
        return text

    return read


def _read_word(value: object) -> str:
    if not isinstance(value, str) or not _WORD.fullmatch(value.strip()):
        raise ValueError("write a word of letters, digits, dots, dashes and underscores")
    return value.strip()


def _ways_reader(remedy: str, *ways: str) -> Callable[[object], str]:
    """A reader of some of ``ways``, each once and with commas between them, or of off."""

    def read(value: object) -> str:
        words = [word.strip() for word in value.split(",")] if isinstance(value, str) else []
        are_known = set(words) <= set(ways) and len(set(words)) == len(words)
        if not words or not (words == ["off"] or are_known):
            raise ValueError(remedy)
        return ",".join(words)

    return read


def _read_host(value: object) -> str:
    text = value.strip() if isinstance(value, str) else ""
    if text.startswith("[") and text.endswith("]"):  # as in a URL
        text = text[1:-1]
    if not text or not text.isprintable() or any(sign in text for sign in " /[]") or text.count(":") == 1:
        raise ValueError("write a host name or address without scheme and port, such as 127.0.0.1")
    return text


def _read_address(value: object) -> str:
    text = value.strip().removeprefix("tcp://") if isinstance(value, str) else ""
    host, _, port = text.rpartition(":")
    is_bare = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if is_bare or _int_or_none(port) is None or not 0 < int(port) <= _LAST_PORT:
        raise ValueError("write an address and a port, such as 127.0.0.1:56100 or [::1]:56100")
    return f"{_read_host(host)}:{int(port)}"


def _read_log_level(value: object) -> str:
    """In DYN_LOG's notation, of which others' targets are none of our business."""
    text = _read_text(value)
    directives = [directive.strip().lower().rpartition("=") for directive in text.split(",")]
    ours = [level for target, _, level in directives if target == OUR_LOG_TARGET]
    plain = [level for target, _, level in directives if not target]
    # A plain word may be a target of Dynamo's, but not if no level stands beside it.
    is_known = all(level in LOG_LEVELS for level in ours) and (
        bool(ours) or not plain or any(level in LOG_LEVELS for level in plain)
    )
    if not is_known:
        raise ValueError(f"write one of {', '.join(LOG_LEVELS)}")
    return text


def _read_text(value: object) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise ValueError("write one printable line")
    return value


def _read_secret(value: object) -> SecretStr | None:
    if value is None:
        return None
    text = value.strip() if isinstance(value, str) else ""
    if not text or not text.isprintable() or not text.isascii() or " " in text:
        raise ValueError("write one word of printable ASCII")
    return SecretStr(text)


def _read_optional_text(value: object) -> str | None:
    return None if value is None else _read_text(value)


_read_port = int_reader("write a port number from 1 to 65535", 1, 65535)


def _read_optional_port(value: object) -> int | None:
    return None if value is None else _read_port(value)


def _int(low: int, high: int) -> PlainValidator:
    return PlainValidator(int_reader(f"write a whole number from {low} to {high}", low, high))


_GB = "write a plain number of gigabytes (1e9 bytes) above 0 and up to 1000000, such as 20"
_GB_OR_ZERO = "write a plain number of gigabytes (1e9 bytes) from 0 to 1000000, such as 20"
_MIN_SHARE = 1e-9
_SHARE = f"write 0, or a plain number from {_MIN_SHARE:g} to 1, such as 0.001"
_SECONDS = f"write a plain number of seconds above 0, such as 30, at most {MAX_SECONDS:.0f}"
_SECONDS_OR_ZERO = f"write a plain number of seconds, 0 to {MAX_SECONDS:.0f}, such as 1"

_read_number_to_1 = float_reader(_SHARE, 1.0, zero_allowed=True)


def _read_share(value: object) -> float:
    number = _read_number_to_1(value)
    if 0 < number < _MIN_SHARE:
        raise ValueError(_SHARE)
    return number


Gigabytes = Annotated[float | None, PlainValidator(float_reader(_GB, MAX_CACHE_GB))]
GigabytesOrZero = Annotated[
    float | None, PlainValidator(float_reader(_GB_OR_ZERO, MAX_CACHE_GB, zero_allowed=True))
]
Seconds = Annotated[float, PlainValidator(float_reader(_SECONDS, MAX_SECONDS))]
SecondsOrZero = Annotated[
    float, PlainValidator(float_reader(_SECONDS_OR_ZERO, MAX_SECONDS, zero_allowed=True))
]
Share = Annotated[float, PlainValidator(_read_share)]
OptionalCount = Annotated[int | None, _int(1, MAX_COUNT)]
OptionalCountOrZero = Annotated[int | None, _int(0, MAX_COUNT)]
Count = Annotated[int, _int(1, 1_000_000)]
CountOrZero = Annotated[int, _int(0, 1_000_000)]
BytesOrZero = Annotated[int, _int(0, 2**63 - 1)]
Priority = Annotated[int, _int(0, 2**32 - 1)]
Port = Annotated[int, PlainValidator(_read_port)]
OptionalPort = Annotated[int | None, PlainValidator(_read_optional_port)]
Flag = Annotated[bool, PlainValidator(_read_flag)]
OptionalFlag = Annotated[bool | None, PlainValidator(_read_flag)]
Presence = Annotated[bool, PlainValidator(_read_presence)]
"""KVBM turns some switches on by their mere presence; here an outspoken "false" keeps them off."""
Word = Annotated[str, PlainValidator(_read_word)]
EventWays = Annotated[str, PlainValidator(_ways_reader("write zmq, nats, zmq,nats or off", "zmq", "nats"))]
ControlWays = Annotated[
    str,
    PlainValidator(
        _ways_reader("write socket, http, nats, some of them with commas, or off", "socket", "http", "nats")
    ),
]
Host = Annotated[str, PlainValidator(_read_host)]
Text = Annotated[str, PlainValidator(_read_text)]
LogLevel = Annotated[str, PlainValidator(_read_log_level)]
DiskAllocator = Annotated[str, PlainValidator(choice_reader("default", "open-direct"))]
ConsolidatorMode = Annotated[str, PlainValidator(choice_reader("dedup", "passthrough"))]
DiskIo = Annotated[
    str, PlainValidator(choice_reader("auto", "aio", "threads", "nixl-posix", "nixl-gds", "nixl-gds-mt"))
]
DiskToDevice = Annotated[str, PlainValidator(choice_reader("off", "nixl-gds-mt", "nixl-gds", "nixl-posix"))]
RemoteUrl = Annotated[str | None, PlainValidator(read_remote_urls)]
RemoteFilter = Annotated[str, PlainValidator(choice_reader("auto", "all", "hit"))]
RemoteLoad = Annotated[str, PlainValidator(choice_reader("faster", "always"))]
Peers = Annotated[str, PlainValidator(choice_reader("off", "zmq", "nixl"))]
Address = Annotated[str, PlainValidator(_read_address)]
Traces = Annotated[str, PlainValidator(choice_reader("auto", "on", "off"))]
RemoteTrust = Annotated[str, PlainValidator(choice_reader("user", "group"))]
RemoteCodec = Annotated[str, PlainValidator(choice_reader("none", "zstd", "fp8"))]
OptionalText = Annotated[str | None, PlainValidator(_read_optional_text)]
Secret = Annotated[SecretStr | None, PlainValidator(_read_secret)]
"""Nothing that shows settings shows it."""
LoadFailurePolicy = Annotated[str, PlainValidator(choice_reader("recompute", "fail"))]
