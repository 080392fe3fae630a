"""What the scheduler's side knows of each request of vLLM, from its arrival to its end; and one table of what
a request can be, and what moves it on, which docs/architecture.md shows with the hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvbm_core.identity.roots import Stamp
from kvbm_core.runtime.request import RequestState, after

if TYPE_CHECKING:
    from vllm.v1.request import Request

Tables = tuple[list[int], ...]
"""Device blocks of a request, by group."""


class Status(str, Enum):
    """Of a request that has not ended."""

    NEW = "new"
    """The leader does not follow it yet: it was not asked for, or the tiers were not ready."""
    UNCACHED = "uncached"
    """Its blocks have no names, for a reason; so it stays."""
    OPEN = "open"
    LOADING = "loading"
    """vLLM waits for its load. Its view, not the leader's, who hears of the end of a load earlier."""
    MIXED = "mixed"
    """Weights or adapter have changed since it began: what it has on the device is of both."""
    LOADING_MIXED = "loading mixed"


class Event(str, Enum):
    """What moves a request on."""

    OPENED = "opened"
    LEFT_OUT = "left out"
    LOAD = "load"
    REPORTED = "reported"
    CHANGED = "changed"
    ANEW = "anew"


TABLE: Mapping[Status, Mapping[Event, Status]] = {
    Status.NEW: {
        Event.OPENED: Status.OPEN,
        Event.LEFT_OUT: Status.UNCACHED,
        Event.CHANGED: Status.MIXED,
    },
    Status.UNCACHED: {Event.CHANGED: Status.UNCACHED},
    Status.OPEN: {Event.LOAD: Status.LOADING, Event.CHANGED: Status.MIXED},
    Status.LOADING: {Event.REPORTED: Status.OPEN, Event.CHANGED: Status.LOADING_MIXED},
    Status.MIXED: {Event.CHANGED: Status.MIXED, Event.ANEW: Status.NEW},
    Status.LOADING_MIXED: {Event.REPORTED: Status.MIXED, Event.CHANGED: Status.LOADING_MIXED},
}


@dataclass(slots=True)
class Followed:
    """One request. ``state``: the leader's, once it is open. ``reason``: why it is uncached, an
    UncachedReason. ``is_explained``: it is known why the tiers are not asked for it. ``adapter``: its blocks
    may go to the disk if it still has this one at its end. ``loaded_at``: how often it had been preempted
    when it was last given a load. ``tables``: empty until it is scheduled.
    """

    request: Request
    status: Status = Status.NEW
    state: RequestState | None = None
    reason: str = ""
    is_explained: bool = False
    adapter: Stamp | None = None
    loaded_at: int = -1
    tables: Tables = ()

    @property
    def is_loading(self) -> bool:
        """Whether vLLM waits for a load of it."""
        return self.status is Status.LOADING or self.status is Status.LOADING_MIXED

    def move(self, event: Event) -> None:
        """Something has happened to it. IntegrityError, a bug, if it cannot; nothing changes then."""
        self.status = after(TABLE, self.status, event)
