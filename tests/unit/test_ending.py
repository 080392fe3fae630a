"""What nobody has closed ends with the last reference to it, in whatever thread that is found."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import kvbm
from kvbm_core.ending import close_with
from kvbm_core.errors import Outcome
from kvbm_core.runtime.channel import LeaderChannel
from kvbm_core.runtime.endpoint import Endpoint

LONG_S = 120.0


class Owner:
    """Refers to itself: only the collector of garbage finds that it is forgotten."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _collects_when_told() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_it_ends_with_its_owner_or_when_it_is_told_to() -> None:
    calls: list[str] = []
    owner, other = Owner(), Owner()
    forgotten = close_with(owner, lambda: calls.append("gone"))
    told = close_with(other, lambda: calls.append("told"))
    told()
    told()
    assert calls == ["told"] and forgotten.alive
    del owner
    gc.collect()
    assert calls == ["told", "gone"], "in the thread that collects, unless it is one of ours"


def test_a_channel_ends_that_its_own_thread_finds_forgotten(tmp_path: Path) -> None:
    path, closed = tmp_path / "socket", threading.Event()
    channel = LeaderChannel(Endpoint(f"ipc://{path}", path, secret=b"x" * 32), lambda *_: [])
    thread = channel._loop._thread

    def close() -> None:
        channel.close()
        closed.set()

    close_with(Owner(), close)
    channel.poll_with(lambda: gc.collect() and None)
    assert closed.wait(LONG_S)
    assert not thread.is_alive() and channel._loop.socket.closed and not path.exists()


def test_a_cache_ends_that_one_of_its_threads_finds_forgotten(tmp_path: Path) -> None:
    spec = kvbm.BlockSpec("forgotten", shape=(2, 16, 64), dtype="float16", tokens=16)
    others = set(threading.enumerate())
    cache = kvbm.open_cache(spec, host_bytes=1 << 22, disk=tmp_path, disk_bytes=1 << 24)
    cache.put(list(range(64)), np.ones((4, *spec.shape), spec.dtype))
    tiers, keys = cache._tiers, spec.keys(list(range(64, 80)), None)
    vars(cache)["own"] = cache
    del cache
    in_thread: list[threading.Thread] = []

    def collect(_: Outcome) -> None:
        in_thread.append(threading.current_thread())
        gc.collect()

    own = set(threading.enumerate()) - others
    tiers.store(keys, [0], collect)
    for thread in own:
        thread.join(LONG_S)
    (found,) = in_thread
    assert found in own and not any(thread.is_alive() for thread in own)
    for thread in set(threading.enumerate()) - others:  # the one that closes
        thread.join(LONG_S)
    kvbm.open_cache(spec, host_bytes=1 << 22, disk=tmp_path, disk_bytes=1 << 24).close()
