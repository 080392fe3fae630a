"""The last requests, and why each of them missed what it missed: bounded, for who asks (``kvbm why``)."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from kvbm_core.observe.labels import MissReason

MAX_ID_CHARS = 256
"""Of a request's id, which clients may choose, the beginning is remembered."""


@dataclass(slots=True, eq=False)
class Account:
    """One request, as of its first answer; a load that fails later is added. Tokens.

    ``device_tokens``: the engine's own hit. ``host_tokens``, ``disk_tokens``, ``remote_tokens``: loaded from
    there. ``missed_tokens``: in whole blocks, computed although a cache that had everything would have had
    them. ``reason``: of the first missing block; None: nothing was missed. ``text``: the same for a person.
    ``at_s``: by time.monotonic.
    """

    request_id: str
    prompt_tokens: int
    device_tokens: int
    missed_tokens: int
    reason: MissReason | None
    text: str
    host_tokens: int = 0
    disk_tokens: int = 0
    remote_tokens: int = 0
    at_s: float = field(default_factory=time.monotonic)

    def failed(self, num_tokens: int, text: str) -> None:
        """``num_tokens`` that were promised are computed after all."""
        self.missed_tokens += num_tokens
        self.reason, self.text = MissReason.FAILED, text
        self.host_tokens = self.disk_tokens = self.remote_tokens = 0


class WhyBook:
    """Accounts of the last requests, one of each id. Any thread. ``max_requests`` 0: none is kept."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._lock = threading.Lock()
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    def add(self, account: Account) -> None:
        """The newest one."""
        if self._max_requests <= 0:
            return
        account.request_id = account.request_id[:MAX_ID_CHARS]
        with self._lock:
            self._accounts[account.request_id] = account
            self._accounts.move_to_end(account.request_id)
            if len(self._accounts) > self._max_requests:
                self._accounts.popitem(last=False)

    def find(self, request_id: str) -> list[Account]:
        """Those whose id is this one, or contains it: engines add to the ids that their clients see. The
        newest first.
        """
        with self._lock:
            exact = self._accounts.get(request_id[:MAX_ID_CHARS])
            if exact is not None:
                return [exact]
            return [one for name, one in reversed(self._accounts.items()) if request_id in name]

    def last(self, count: int) -> list[Account]:
        """The newest first."""
        with self._lock:
            names = list(self._accounts)[-count:] if count > 0 else []
            return [self._accounts[name] for name in reversed(names)]


def age_s(account: Account) -> float:
    """How long ago it was."""
    return max(0.0, time.monotonic() - account.at_s)


def told_s(seconds: float) -> str:
    """A span of time for a person."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
