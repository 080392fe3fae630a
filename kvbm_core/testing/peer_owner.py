"""The owner's side of peers without an engine: one rank of an instance with real sockets and the books of its
leader, for tests and benchmarks.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence

import numpy as np

from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.fleet.keys import CurveKeys
from kvbm_core.observe.metrics import Metrics
from kvbm_core.peers.copies import Bytes, Copies
from kvbm_core.peers.lending import Lender
from kvbm_core.peers.server import PeerServer
from kvbm_core.peers.wire import Terms
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.testing.verdicts import judges
from kvbm_core.tiers.chain import TierChain
from kvbm_core.tiers.jobs import JobTable
from kvbm_core.types import BlockKey, Tier

ANY_PORT = "tcp://127.0.0.1:*"
PATIENCE_S = 60.0
"""Guards against hanging, and nothing else."""
PADDING_BYTES = 24
"""A slot has more bytes than its block."""


def key_of(number: int) -> BlockKey:
    """One of many keys, which look as real ones do: the index takes a part of them for their hash."""
    return BlockKey(hashlib.sha256(number.to_bytes(8, "little")).digest())


def content_of(key: BlockKey, num_bytes: int) -> bytes:
    """What the block with this key has to hold."""
    return (bytes(key) * (num_bytes // len(key) + 1))[:num_bytes]


def wait_for(condition: Callable[[], object]) -> None:
    """Until it is true, or PATIENCE_S are over; it is looked at again whenever a little time has passed."""
    ended = threading.Event()
    for _ in range(int(PATIENCE_S / 0.01)):
        if condition():
            return
        ended.wait(0.01)
    raise AssertionError("what was waited for did not come")


class Line:
    """LeaderLine to a Lender. ``hold``: the leader does not answer until ``let_go``."""

    def __init__(self, lender: Lender) -> None:
        self.lender = lender
        self.server: PeerServer
        self.counts = [0, 0, 0]
        self.before_return: Callable[[], None] = lambda: None
        self._held: list[Callable[[], None]] | None = None
        self._changed = threading.Condition()

    def hold(self) -> None:
        """What is asked from now on is not answered."""
        self._held = []

    def wait_held(self, count: int = 1) -> None:
        """Until so much was asked since."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._held or ()) >= count, PATIENCE_S):
                raise AssertionError("it was not asked")

    def let_go(self) -> None:
        """All is answered."""
        with self._changed:
            held, self._held = self._held or [], None
        for answer in held:
            answer()

    def _answer(self, answer: Callable[[], None]) -> None:
        with self._changed:
            if self._held is not None:
                self._held.append(answer)
                self._changed.notify_all()
                return
        answer()

    def borrow(self, number: int, keys: Sequence[BlockKey], ttl_s: float, *, is_find: bool) -> None:
        """See LeaderLine."""

        def answer() -> None:
            loan = self.lender.find(keys) if is_find else self.lender.lend(0, number, keys, ttl_s)
            self.server.lent(number, loan)

        self._answer(answer)

    def give_back(self, number: int) -> None:
        """See LeaderLine."""

        def answer() -> None:
            self.before_return()
            self.server.returned(number, was_held=self.lender.take_back(0, number))

        self._answer(answer)

    def counted(self, busy: int, refused: int, bad: int) -> None:
        """See LeaderLine."""
        self.counts = [a + b for a, b in zip(self.counts, (busy, refused, bad), strict=True)]


class Owner:
    """One rank of an instance, and its leader's books."""

    def __init__(
        self,
        terms: Terms,
        *,
        num_slots: int = 64,
        max_bytes: int = 1 << 20,
        bind: str = ANY_PORT,
        keys: CurveKeys | None = None,
        writes: bool = False,
    ) -> None:
        clock = SystemClock()
        self.terms = terms
        self.metrics = Metrics()
        self.host = BlockTier(Tier.HOST, LruPolicy(), clock)
        self.host.grow(num_slots)
        self.block_bytes = terms.block_bytes
        self.memory: Bytes = np.zeros((num_slots, terms.block_bytes + PADDING_BYTES), np.uint8)
        chain = TierChain(
            self.host, (), JobTable(1, clock), send=lambda order: None, clock=clock, metrics=self.metrics
        )
        self.lock = threading.RLock()
        self.line = Line(Lender(chain, self.lock, clock, self.metrics))
        copies = Copies(terms.block_bytes, max_bytes, in_one=writes)
        self.server = PeerServer(bind, terms, self, self.line, copies=copies, keys=keys)
        self.line.server = self.server

    @property
    def address(self) -> str:
        """Where it can be asked."""
        return f"tcp://127.0.0.1:{self.server.port}"

    def put(self, *keys: BlockKey) -> None:
        """They are in its host tier from now on, with their contents."""
        with self.lock:
            reservation = self.host.reserve(keys, lambda new: frozenset())
            for key, slot in zip(reservation.keys, reservation.slots, strict=True):
                content = content_of(key, self.block_bytes)
                self.memory[slot, : self.block_bytes] = np.frombuffer(content, np.uint8)
            self.host.commit(reservation)

    def slot(self, slot: int) -> Bytes:
        """See OwnBlocks."""
        row: Bytes = self.memory[slot]
        return row

    def read(
        self, tier: str, blocks: Sequence[tuple[BlockKey, int]], copies: Sequence[Bytes], *, deadline_s: float
    ) -> list[Outcome]:
        """See OwnBlocks."""
        raise AssertionError("there is no disk")

    @judges
    def assert_whole(self) -> None:
        """Nothing is held, nothing is on its way."""
        wait_for(lambda: not self.line.lender.num_loans and not self.server.copied_blocks)
        with self.lock:
            if self.host.live_leases:
                raise AssertionError("blocks are held for nobody")
            self.host.check_integrity()

    @judges
    def assert_whole_soon(self) -> None:
        """Nothing is held any more, though an asker does not read."""
        wait_for(lambda: not self.line.lender.num_loans)

    def close(self) -> None:
        """Ends the server."""
        self.server.close()
