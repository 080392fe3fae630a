"""How long the calls of stores are allowed to wait, seen where they wait: no machine is too busy for that."""

from __future__ import annotations

import pytest

from kvbm_core.clock import Clock
from kvbm_core.storage import call_pool
from kvbm_core.storage.remote import resp

GRACE_S = 20.0
"""What a busy machine may add to a deadline. What is waited for does not come by itself: without the deadline
a call would not end at all.
"""


@pytest.fixture
def waits_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each call on a thread, and each exchange on a socket of our own client, may take from
    now on.
    """
    asked_s: list[float] = []
    wait, begin = call_pool._Call.wait, resp.Deadline.__init__

    def waits(call: call_pool._Call, ends_at_s: float, clock: Clock) -> None:
        asked_s.append(ends_at_s - clock.now_s())
        wait(call, ends_at_s, clock)

    def begins(deadline: resp.Deadline, seconds: float) -> None:
        asked_s.append(seconds)
        begin(deadline, seconds)

    monkeypatch.setattr(call_pool._Call, "wait", waits)
    monkeypatch.setattr(resp.Deadline, "__init__", begins)
    return asked_s
