"""What a request of TensorRT-LLM can be, and what moves it on: one table for the leader, and one for the
request's load on each rank.

docs/trtllm-inside.md shows both tables; a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class RequestStatus(str, Enum):
    """Of a request that the leader follows. It is gone when it is not followed any more."""

    WAITING = "waiting"
    """TensorRT-LLM has asked for it, or runs it anew, and has not scheduled it since."""
    LOADING = "loading"
    """TensorRT-LLM has parked it until all ranks have reported its load."""
    RUNNING = "running"
    """It has been scheduled."""
    BROKEN = "broken"
    """Its device blocks hold something else than it was promised. It has not been scheduled, and will be:
    TensorRT-LLM cannot be told.
    """
    REFUSED = "refused"
    """As broken, and scheduled: the workers are told to let no forward pass with it come to its end."""


class RequestEvent(str, Enum):
    """What moves a request on."""

    LOAD = "load"
    """A load of it has been planned, for which TensorRT-LLM parks it."""
    LOADED = "loaded"
    """All ranks have its load."""
    FAILED = "failed"
    """What it was promised is not there, or what the device had for it must not be read."""
    SCHEDULED = "scheduled"
    """It is in the report of an iteration for the first time since it was asked for or run anew."""
    AGAIN = "again"
    """TensorRT-LLM reports it as a new one without having asked."""


class LoadStatus(str, Enum):
    """Of a request's load on one rank, for which TensorRT-LLM has parked the request."""

    NONE = "none"
    LOADING = "loading"
    FAILED = "failed"
    """It is not reported: the leader does not know yet, and would not refuse the request."""
    OVER = "over"
    """It is reported as soon as TensorRT-LLM asks."""


class LoadEvent(str, Enum):
    """What moves a load on."""

    BEGIN = "begin"
    NOT_MADE = "not made"
    """The leader could not plan it, or has taken the plan back."""
    LOADED = "loaded"
    FAILED = "failed"
    TOLD = "told"
    """The leader knows that it has failed on some rank."""
    REPORTED = "reported"


REQUEST_TABLE: Mapping[RequestStatus, Mapping[RequestEvent, RequestStatus]] = {
    RequestStatus.WAITING: {
        RequestEvent.LOAD: RequestStatus.LOADING,
        RequestEvent.LOADED: RequestStatus.WAITING,  # one for which it is not parked
        RequestEvent.FAILED: RequestStatus.BROKEN,
        RequestEvent.SCHEDULED: RequestStatus.RUNNING,
    },
    RequestStatus.LOADING: {
        RequestEvent.LOADED: RequestStatus.WAITING,
        RequestEvent.FAILED: RequestStatus.BROKEN,
        RequestEvent.SCHEDULED: RequestStatus.RUNNING,  # all ranks have said so, whenever we hear of it
    },
    RequestStatus.RUNNING: {
        RequestEvent.LOADED: RequestStatus.RUNNING,
        RequestEvent.FAILED: RequestStatus.REFUSED,
        RequestEvent.AGAIN: RequestStatus.WAITING,
    },
    RequestStatus.BROKEN: {
        RequestEvent.LOADED: RequestStatus.BROKEN,
        RequestEvent.FAILED: RequestStatus.BROKEN,
        RequestEvent.SCHEDULED: RequestStatus.REFUSED,
    },
    RequestStatus.REFUSED: {
        RequestEvent.LOADED: RequestStatus.REFUSED,
        RequestEvent.FAILED: RequestStatus.REFUSED,
        RequestEvent.AGAIN: RequestStatus.BROKEN,
    },
}
LOAD_TABLE: Mapping[LoadStatus, Mapping[LoadEvent, LoadStatus]] = {
    LoadStatus.NONE: {LoadEvent.BEGIN: LoadStatus.LOADING, LoadEvent.NOT_MADE: LoadStatus.OVER},
    LoadStatus.LOADING: {
        LoadEvent.LOADED: LoadStatus.OVER,
        LoadEvent.FAILED: LoadStatus.FAILED,
    },
    LoadStatus.FAILED: {LoadEvent.TOLD: LoadStatus.OVER},
    LoadStatus.OVER: {LoadEvent.REPORTED: LoadStatus.NONE},
}
