"""The label values that a metric may carry: closed lists, so that the number of time series is bounded.

What an engine calls is not here: an adapter hands the names of its hooks to Metrics (guard.seams_of).
"""

from __future__ import annotations

from enum import Enum

from kvbm_core.errors import Outcome
from kvbm_core.types import Direction


class _Label(str, Enum):
    def __str__(self) -> str:
        return str(self.value)


class DropReason(_Label):
    """Why a block that could have been offloaded was not kept."""

    NO_SPACE = "no_space"
    QUOTA = "quota"
    QUEUE_FULL = "queue_full"
    PREEMPTED = "preempted"
    TRANSFER_FAILED = "transfer_failed"
    TIER_NOT_READY = "tier_not_ready"
    RESET = "reset"
    OTHER = "other"


class EvictReason(_Label):
    """Why a block left its tier: to make room, for others of who has a quota, as an operator or new weights
    said so, or as nobody knows any more what it holds (a load of it failed, or its weights are unknown).
    """

    ROOM = "room"
    QUOTA = "quota"
    RESET = "reset"
    FORGOTTEN = "forgotten"
    OTHER = "other"


class FailureKind(_Label):
    """What failed outside our control and is no transfer; for those see FAILURE_KINDS."""

    HANDSHAKE = "handshake"
    LAYOUT = "layout"
    LEASE_EXPIRED = "lease_expired"
    WORKER_LOST = "worker_lost"
    BAD_MESSAGE = "bad_message"
    OTHER = "other"


FAILURE_KINDS: tuple[str, ...] = (
    *(kind.value for kind in FailureKind),
    *(
        f"{direction}_{outcome}"
        for direction in Direction
        for outcome in Outcome
        if outcome is not Outcome.OK
    ),
)
"""FailureKind, and every way in which a transfer can fail, such as ``onboard_corrupt``."""


class PeerTrouble(_Label):
    """Why another instance got nothing: too much was under way, it does not fit, or it said what is no
    question.
    """

    BUSY = "busy"
    REFUSED = "refused"
    BAD_MESSAGE = "bad_message"
    OTHER = "other"


class UncachedReason(_Label):
    """Why a request bypasses the cache."""

    MULTIMODAL = "multimodal"
    PROMPT_EMBEDS = "prompt_embeds"
    ADAPTER = "adapter"
    STREAMING_SESSION = "streaming_session"
    OPTED_OUT = "opted_out"
    OTHER = "other"


class MissReason(_Label):
    """Why tokens of a prompt were computed, and not loaded (docs/why.md)."""

    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    QUOTA = "quota"
    FORGOTTEN = "forgotten"
    FILTERED = "filtered"
    NOT_KEPT = "not_kept"
    IN_FLIGHT = "in_flight"
    NOT_READY = "not_ready"
    FAILED = "failed"
    NO_ROOM = "no_room"
    NO_STATE = "no_state"
    TOO_SLOW = "too_slow"
    TOO_SHORT = "too_short"
    SALTED = "salted"
    OTHER_ADAPTER = "other_adapter"
    OTHER_WEIGHTS = "other_weights"
    OTHER_NAMESPACE = "other_namespace"
    CHANGED = "changed"
    AUDITED = "audited"
    OPTED_OUT = "opted_out"
    LIMITED = "limited"
    UNCACHED = "uncached"
    OTHER = "other"
