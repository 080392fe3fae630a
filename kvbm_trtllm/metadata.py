"""What the leader sends to every worker with each iteration, as MessagePack: TensorRT-LLM broadcasts bytes.

Slots and device block ids, never addresses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from kvbm_core.transfer.plan import TransferPlan


@dataclass(slots=True)
class StepPlans:
    """Plans of one iteration.

    ``onboards``: request and its load, each to be reported by ``get_finished``. ``sync_onboards``: loads that
    have to be over before the iteration's forward pass. ``offloads``: reads of what this iteration computes.
    ``fences``: jobs whose device blocks belong to somebody else from now on: what has not begun is cancelled,
    what runs is waited for. ``awaited``: loads of blocks that another request found on the device: they must
    be complete. ``fence_all``: all. ``unkept``: offloads of blocks that may be somebody else's from now on:
    fences, after a short wait. ``not_loaded``: requests that are parked for a load that will not be made.
    ``refused``: scheduled requests of that status: this forward pass must not come to an end.
    """

    onboards: list[tuple[str, TransferPlan]] = field(default_factory=list)
    sync_onboards: list[TransferPlan] = field(default_factory=list)
    offloads: list[TransferPlan] = field(default_factory=list)
    fences: list[int] = field(default_factory=list)
    awaited: list[int] = field(default_factory=list)
    unkept: list[int] = field(default_factory=list)
    fence_all: bool = False
    not_loaded: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[StepPlans] = msgspec.msgpack.Decoder(StepPlans)
NO_PLANS = StepPlans()
QUIET = b""
"""What an iteration without plans has for its metadata."""


def encode(plans: StepPlans) -> bytes:
    """The iteration's metadata."""
    return _ENCODER.encode(plans)


def decode(metadata: object) -> StepPlans | None:
    """What ``encode`` was given; None for an iteration without plans, as any empty metadata says.

    msgspec.DecodeError or UnicodeDecodeError for bytes of anybody else, TypeError for something else than
    bytes.
    """
    if not metadata:
        return None
    if not isinstance(metadata, bytes):
        raise TypeError(f"metadata is {type(metadata).__name__}, not bytes")
    return _DECODER.decode(metadata)
