"""Orders to an instance, and its answers: JSON, closed and small, the same on every wire."""

from __future__ import annotations

import math
from enum import Enum
from typing import Annotated, Literal, TypeVar

import msgspec

from kvbm_core.control.why_rows import MAX_ROWS, WhyRow

MAX_ORDER_BYTES = 8 << 20
MAX_PROMPT_TOKENS = 1 << 20
"""Of numbers below a million each has at most 7 bytes in an order."""
MAX_TTL_S = 30 * 86_400.0
MAX_ANSWER_BYTES = 256 * 1024
MAX_WAIT_S = 30.0
MAX_NAME = 200
MAX_SALT_CHARS = 16_384

_Short = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
_Salt = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SALT_CHARS)]

_Token = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
_Prompt = Annotated[tuple[_Token, ...], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)]
_Size = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]


class Verb(str, Enum):
    """What can be asked for. ``metrics``: the metrics page. ``why``: of the last requests. ``drain``: nothing
    new is loaded or stored until ``resume``.
    """

    STATUS = "status"
    METRICS = "metrics"
    WHY = "why"
    RESET = "reset"
    DRAIN = "drain"
    RESUME = "resume"
    LOOKUP = "lookup"
    PIN = "pin"
    UNPIN = "unpin"
    QUOTA = "quota"

    def __str__(self) -> str:
        return self.value


class Result(str, Enum):
    """What became of an order. ``pending``: it was taken, and will be carried out later."""

    DONE = "done"
    PENDING = "pending"
    REFUSED = "refused"

    def __str__(self) -> str:
        return self.value


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``adapter`` and ``salt``: whose blocks are meant; None: of a prompt, none; else any. ``tokens``: a
    prompt. ``pin``: a pin's name. ``host_blocks``, ``disk_blocks``, or in GB ``host_gb``, ``disk_gb``: a
    quota; None: no limit there.

    ``instance`` and ``namespace`` empty: all. ``tier``: to be reset. ``wait_s``: how long the answer may
    wait for the end. ``fleet``, ``time_s`` (since 1970) and ``nonce`` count where orders are signed.
    """

    verb: Verb
    fleet: _Short = ""
    instance: _Short = ""
    tier: Literal["all", "host", "disk"] = "all"
    namespace: _Short = ""
    request: _Short = ""
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_ROWS)] = 20
    adapter: _Short | None = None
    salt: _Salt | None = None
    tokens: _Prompt = ()
    pin: _Short = ""
    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_TTL_S)] = 3600.0
    host_blocks: _Count | None = None
    disk_blocks: _Count | None = None
    host_gb: _Size | None = None
    disk_gb: _Size | None = None
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MAX_WAIT_S)] = 5.0
    time_s: float = 0.0
    nonce: Annotated[str, msgspec.Meta(max_length=64)] = ""


class SignedOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``order``: the JSON text of an Order. ``key``: public, who says so. ``signature``: base64."""

    order: str
    key: _Short
    signature: _Short


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """``trouble``: why nothing is cached now; "" if all is well. ``tiers``: blocks in use, and in all.
    ``hit_rates``: of the last requests, 0 to 1.
    """

    engine: str
    version: str
    host: str
    pid: int
    model: str
    namespace: str
    is_draining: bool
    trouble: str
    tiers: dict[str, tuple[int, int]]
    hit_rates: dict[str, float]
    pending_transfers: int


class FoundPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Where the full blocks of a prompt are, without those of states; ``matched_blocks``: what a request that
    goes on from it would be given, from the head on.
    """

    num_blocks: int
    matched_blocks: int
    host_blocks: int
    disk_blocks: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """``text``: one line for a person. ``page``: of metrics, if that was asked for."""

    instance: str
    rank: int
    result: Result
    text: str = ""
    status: Status | None = None
    page: str = ""
    why: tuple[WhyRow, ...] = ()
    found: FoundPrompt | None = None


def flaw_of(order: Order) -> str:
    """What an instance would not understand, for a person; "" if all is well. Numbers that JSON has no word
    for would come to it as if they were not set.
    """
    for name in ("ttl_s", "wait_s", "host_gb", "disk_gb"):
        value = getattr(order, name)
        if value is not None and not math.isfinite(value):
            return f"{name}={value}: is no number"
    try:
        payload = msgspec.json.encode(order)
    except UnicodeError as error:
        return str(error)
    if len(payload) > MAX_ORDER_BYTES:
        return f"it has {len(payload):,} bytes, more than {MAX_ORDER_BYTES:,}"
    return flaw_in(payload)


def flaw_in(payload: bytes) -> str:
    """Why these bytes are no order, for a person; "" if they are one."""
    try:
        msgspec.json.decode(payload, type=Order)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return str(error)
    return ""


T = TypeVar("T", Order, SignedOrder, Answer)


def decode(payload: bytes, kind: type[T], limit_bytes: int = MAX_ORDER_BYTES) -> T | None:
    """None for what is too large, or is none."""
    if len(payload) > limit_bytes:
        return None
    try:
        return msgspec.json.decode(payload, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
