"""Owners and askers that are killed or frozen: see nurseries.py. Orders: ``own PORT INSTANCE HOW``, which has
no moment, and ``ask ADDRESS SEED HOW``; HOW is what brings the bytes, zmq or nixl.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import replace
from random import Random

from kvbm_core.errors import Outcome
from kvbm_core.peers.client import PeerStore, call_blocks
from kvbm_core.peers.landing import LandingZone
from kvbm_core.testing.peer_owner import Owner, content_of, key_of, wait_for
from tests.faults.nurseries import MOST_CALLS, Calls, Moment, fork_for_each_line, say
from tests.unit.peer_bench import ASKER, OWNER, targets_for

NIXL = "nixl"
BLOCK_BYTES = 128 << 10
KEYS = [key_of(number) for number in range(1, 33)]
THEIRS = replace(OWNER, block_bytes=BLOCK_BYTES)
OURS = replace(ASKER, block_bytes=BLOCK_BYTES)


def zone_of() -> LandingZone:
    """Once it can be written to."""
    zone = LandingZone(BLOCK_BYTES, call_blocks(BLOCK_BYTES), 1)
    assert zone.wait(30.0)
    return zone


def ask_some(store: PeerStore, address: str, rng: Random, deadline_s: float) -> list[Outcome]:
    """One question; what came is what was asked for."""
    keys = rng.sample(KEYS, rng.randint(1, 24))
    targets = targets_for(len(keys), BLOCK_BYTES)
    outcomes = store.at(address).get_many(keys, targets, deadline_s=deadline_s)
    for key, target, outcome in zip(keys, targets, outcomes, strict=True):
        assert outcome is not Outcome.OK or bytes(target) == content_of(key, BLOCK_BYTES), "a wrong byte"
    return outcomes


def _live(order: str, moment: Moment) -> None:
    what, *words = order.split()
    is_nixl = words[-1] == NIXL
    if what == "own":
        owner = Owner(
            replace(THEIRS, instance=words[1]),
            bind=f"tcp://127.0.0.1:{words[0]}",
            max_bytes=1 << 24,
            writes=is_nixl,
        )
        owner.put(*KEYS)
        if is_nixl:
            wait_for(lambda: owner.server.writes)
        say("owns")
        threading.Event().wait(600.0)
        return
    calls = Calls(moment)
    store, rng = PeerStore(OURS, zone=zone_of() if is_nixl else None), Random(words[1])
    for call in range(MOST_CALLS):
        calls.begin(call)
        ask_some(store, words[0], rng, 5.0)


if __name__ == "__main__":
    with suppress(ImportError):  # once, and not in each child
        import nixl  # noqa: F401
    fork_for_each_line(_live)
