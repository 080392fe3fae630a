"""How long the calls of stores are allowed to wait, seen where they wait: no machine is too busy for that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from kvbm_core.clock import Clock
from kvbm_core.peers import client, lending
from kvbm_core.storage import call_pool
from kvbm_core.storage.remote import resp
from kvbm_core.types import BlockKey

GRACE_S = 20.0
"""What a busy machine may add to a deadline. What is waited for does not come by itself: without the deadline
a call would not end at all.
"""


@pytest.fixture
def waits_s() -> Iterator[list[float]]:
    """See ``asked``."""
    with asked() as seconds:
        yield seconds


@contextmanager
def asked() -> Iterator[list[float]]:
    """The seconds that each call on a thread, each exchange on a socket of our own client and each answer of
    a peer may take from now on, and for which an owner in this process lends blocks.
    """
    asked_s: list[float] = []
    wait, begin = call_pool._Call.wait, resp.Deadline.__init__
    hear, lend = client.Link._hear, lending.Lender.lend

    def waits(call: call_pool._Call, ends_at_s: float, clock: Clock) -> None:
        asked_s.append(ends_at_s - clock.now_s())
        wait(call, ends_at_s, clock)

    def begins(deadline: resp.Deadline, seconds: float) -> None:
        asked_s.append(seconds)
        begin(deadline, seconds)

    def hears(link: client.Link, ends_at_s: float) -> client._Heard:
        asked_s.append(ends_at_s - link._clock.now_s())
        return hear(link, ends_at_s)

    def lends(
        lender: lending.Lender, rank: int, number: int, keys: Sequence[BlockKey], ttl_s: float
    ) -> lending.Loan:
        asked_s.append(ttl_s)
        return lend(lender, rank, number, keys, ttl_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_pool._Call, "wait", waits)
        patch.setattr(resp.Deadline, "__init__", begins)
        patch.setattr(client.Link, "_hear", hears)
        patch.setattr(lending.Lender, "lend", lends)
        yield asked_s
