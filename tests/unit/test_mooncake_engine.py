"""MooncakeEngine over a double of Mooncake's client: slow batches, and an end while it joins."""

from __future__ import annotations

import ctypes
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.config.server_url import server_url
from kvbm_core.errors import Outcome
from kvbm_core.storage.remote import mooncake
from kvbm_core.storage.remote.engine import GetItem, Got
from kvbm_core.testing.store_contract import LONG_S


class ClientDouble:
    """What the engine calls of Mooncake's client, over ``objects``. It is a double because nothing makes a
    real pool slow, or closes it, at a moment of the test's choice.

    Each of the next reads takes so many seconds of ``clock`` as ``take_s`` says.
    """

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.objects: dict[str, bytes] = {}
        self.take_s: list[float] = []
        self.reads: list[list[str]] = []
        self.on_register: Callable[[int], None] = lambda address: None
        self.num_closed = 0
        self.may_join = threading.Event()
        self.may_join.set()

    def setup(self, *arguments: object, **more: object) -> int:
        """Joins, when it may."""
        assert self.may_join.wait(LONG_S)
        return 0

    def register_buffer(self, address: int, num_bytes: int) -> int:
        """Tells the test."""
        self.on_register(address)
        return 0

    def batch_get_into_multi_buffers(
        self, names: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> list[int]:
        """Only what is exactly as long as the memory."""
        self.reads.append(names)
        self.clock.advance(self.take_s.pop(0) if self.take_s else 0.0)
        return [self._read(*one) for one in zip(names, addresses, sizes, strict=True)]

    def _read(self, name: str, addresses: list[int], sizes: list[int]) -> int:
        content, at = self.objects.get(name), 0
        if content is None:
            return -704
        if len(content) != sum(sizes):
            return -600
        for address, size in zip(addresses, sizes, strict=True):
            ctypes.memmove(address, content[at : at + size], size)
            at += size
        return at

    def batch_get_replica_desc(self, names: list[str]) -> dict[str, list[Any]]:
        """Sizes."""
        return {name: [_Replica(len(self.objects[name]))] for name in names if name in self.objects}

    def close(self) -> None:
        """Counts."""
        self.num_closed += 1


class _Replica:
    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def is_memory_replica(self) -> bool:
        return True

    def get_memory_descriptor(self) -> SimpleNamespace:
        return SimpleNamespace(buffer_descriptor=SimpleNamespace(size=self._num_bytes))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> ClientDouble:
    """The one that an engine makes."""
    double = ClientDouble()
    monkeypatch.setattr(mooncake, "_load", lambda: SimpleNamespace(MooncakeDistributedStore=lambda: double))
    monkeypatch.setattr(mooncake, "_rehearse", lambda arguments, more: (0, ""))
    return double


@pytest.fixture
def joins_later(client: ClientDouble) -> None:
    """``client`` waits for ``may_join``."""
    client.may_join.clear()


@pytest.fixture
def engine(client: ClientDouble) -> Iterator[mooncake.MooncakeEngine]:
    """Of a master that listens."""
    with socket.create_server(("127.0.0.1", 0)) as master:
        url = f"mooncake://127.0.0.1:{master.getsockname()[1]}"
        made = mooncake.MooncakeEngine(server_url(url), client.clock)
        yield made
        made.close()


def item(name: str, num_bytes: int, offset_bytes: int = 0) -> GetItem:
    """With memory of its own."""
    return GetItem(name, [memoryview(bytearray(num_bytes))], offset_bytes)


def filled(items: Sequence[GetItem]) -> list[bytes]:
    """What is in their memory."""
    return [b"".join(map(bytes, one.pieces)) for one in items]


def test_reads_from_an_offset_are_tried_after_whole_ones_that_were_slow(
    client: ClientDouble, engine: mooncake.MooncakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    client.objects = {"a": b"a" * 10, "b": b"b" * 10 + b"c" * 6}
    client.take_s = [2 * mooncake.QUICK_S]
    items = [item("a", 10), item("b", 6, 10), item("absent", 6, 10)]
    with caplog.at_level(logging.WARNING):
        gots = engine.get(items, deadline_s=LONG_S)
    assert gots == [Got(Outcome.OK, 10), Got(Outcome.OK, 6), Got(Outcome.MISS)]
    assert filled(items)[:2] == [b"a" * 10, b"c" * 6]
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING], "nothing has failed"


def test_whole_reads_that_were_slow_and_failed_are_not_tried_again(
    client: ClientDouble, engine: mooncake.MooncakeEngine
) -> None:
    client.objects = {"a": b"a" * 10}
    client.take_s = [2 * mooncake.QUICK_S]
    assert engine.get([item("a", 12)], deadline_s=LONG_S) == [Got(Outcome.IO_ERROR)]
    assert client.reads == [["a"]]
    assert engine.get([item("a", 12)], deadline_s=LONG_S) == [Got(Outcome.OK, 10)]


def test_what_the_deadline_leaves_no_time_for_is_timed_out_and_not_tried(
    client: ClientDouble, engine: mooncake.MooncakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    client.objects = {"a": b"a" * 10, "b": b"b" * 16, "c": b"c" * 16}
    client.take_s = [LONG_S / 2, LONG_S]
    items = [item("a", 10), item("b", 6, 10), item("c", 6, 10)]
    gots = engine.get(items, deadline_s=LONG_S)
    assert gots == [Got(Outcome.OK, 10), Got(Outcome.OK, 6), Got(Outcome.TIMED_OUT)]
    assert client.reads == [["a"], ["b"]]
    client.take_s = [2 * LONG_S]
    assert engine.get(items[:2], deadline_s=LONG_S) == [Got(Outcome.OK, 10), Got(Outcome.TIMED_OUT)]
    assert client.reads[2:] == [["a"]]
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING], "nothing has failed"


@pytest.mark.usefixtures("joins_later")
def test_a_client_that_is_closed_while_it_registers_memory_is_closed_once(
    client: ClientDouble, engine: mooncake.MooncakeEngine
) -> None:
    membership, closing = engine._membership, threading.Thread(target=engine.close)
    seen: list[int] = []

    def on_register(address: int) -> None:
        seen.append(address)
        if address == 1:
            engine.register(2, 1)
            return
        closing.start()
        with membership._changed:
            assert membership._changed.wait_for(lambda: membership.is_closed, LONG_S)

    client.on_register = on_register
    engine.register(1, 1)
    client.may_join.set()
    membership._thread.join(LONG_S)
    closing.join(LONG_S)
    assert seen == [1, 2] and client.num_closed == 1


@pytest.mark.usefixtures("joins_later")
def test_memory_that_is_known_before_or_while_it_joins_is_registered(
    client: ClientDouble, engine: mooncake.MooncakeEngine
) -> None:
    seen: list[int] = []

    def on_register(address: int) -> None:
        seen.append(address)
        if address == 1:
            engine.register(2, 1)

    client.on_register = on_register
    engine.register(1, 1)
    client.may_join.set()
    assert engine._membership.client(LONG_S) is client
    assert seen == [1, 2], "all of it, before the client is used"
    engine.register(3, 1)
    assert seen == [1, 2, 3]
    engine.close()
    engine.close()
    assert client.num_closed == 1
