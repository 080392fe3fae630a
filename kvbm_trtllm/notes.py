"""What the leader's side says to every worker outside of iterations, in the channel's notes."""

from __future__ import annotations

import msgspec

from kvbm_core.transfer.plan import TransferPlan


class Finish(msgspec.Struct, tag="finish", frozen=True, forbid_unknown_fields=True):
    """A request is over; its device blocks wait for these jobs, of which ``plan`` begins now: TensorRT-LLM's
    own messages end with a request's last step.
    """

    request_id: str
    job_ids: tuple[int, ...]
    plan: TransferPlan | None


class LoadEnded(msgspec.Struct, tag="load_ended", frozen=True, forbid_unknown_fields=True):
    """Every rank has answered this load, and the leader knows what becomes of its request: all ranks have to
    act alike. Sent of each load that failed, and of those that the leader has let the workers wait for.
    """

    request_id: str
    job_id: int
    is_done: bool


Note = Finish | LoadEnded

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Note] = msgspec.msgpack.Decoder(Note)


def encode(note: Note) -> bytes:
    """The content of a note."""
    return _ENCODER.encode(note)


def decode(content: bytes) -> Note:
    """What ``encode`` was given. msgspec.DecodeError or UnicodeDecodeError for bytes of anybody else."""
    return _DECODER.decode(content)
