"""An owner of blocks and those who ask it, in one process: real books, real sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import zmq

from kvbm_core.fleet.keys import CurveKeys
from kvbm_core.peers.client import PeerStore
from kvbm_core.peers.landing import LandingZone
from kvbm_core.peers.wire import Answer, Hello, Question, Terms, decode_question, encode, hello_of
from kvbm_core.testing.peer_owner import PADDING_BYTES, PATIENCE_S, Owner

BLOCK_BYTES = 1000
SLOT_BYTES = BLOCK_BYTES + PADDING_BYTES
OWNER = Terms("owner", 0, 1, BLOCK_BYTES, "layout", "namespace")
ASKER = replace(OWNER, instance="asker")


@contextmanager
def owning(terms: Terms = OWNER, **how: Any) -> Iterator[Owner]:
    owner = Owner(terms, **how)
    try:
        yield owner
    finally:
        owner.close()


@contextmanager
def asking(
    terms: Terms = ASKER, keys: CurveKeys | None = None, zone: LandingZone | None = None
) -> Iterator[PeerStore]:
    store = PeerStore(terms, keys, zone=zone)
    try:
        yield store
    finally:
        store.close()


def targets_for(count: int, num_bytes: int = SLOT_BYTES) -> list[memoryview]:
    return [np.full(num_bytes, 0xEE, np.uint8).data for _ in range(count)]


class Stranger:
    """A bare socket to an owner: says what it likes."""

    def __init__(self, address: str, terms: Terms | None = ASKER) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        if terms is not None:
            self.say(hello_of(terms))
            self.hear()

    def say(self, *parts: Question | bytes) -> None:
        self.socket.send_multipart([part if isinstance(part, bytes) else encode(part) for part in parts])

    def hear(self) -> list[bytes]:
        assert self.socket.poll(int(PATIENCE_S * 1000)), "no answer"
        return self.socket.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)


class FakeOwner:
    """Answers each question after the hello with what ``script`` says."""

    def __init__(self, script: Callable[[Any], list[list[Answer | bytes]]], welcome: Answer | bytes) -> None:
        self.questions = 0
        self._script = script
        self._welcome = welcome
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._is_closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closing:
            if not self._socket.poll(20):
                continue
            asker, frame, *_ = self._socket.recv_multipart()
            question = decode_question(frame)
            if isinstance(question, Hello):
                answers: list[list[Answer | bytes]] = [[self._welcome]]
            else:
                self.questions += 1
                answers = self._script(question)
            for answer in answers:
                parts = [part if isinstance(part, bytes) else encode(part) for part in answer]
                self._socket.send_multipart([asker, *parts])

    def close(self) -> None:
        self._is_closing = True
        self._thread.join()
        self._context.destroy(linger=0)
