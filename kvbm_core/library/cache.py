"""BlockCache: what ``kvbm.open_cache`` gives."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import TracebackType

from kvbm_core.ending import close_with
from kvbm_core.errors import Outcome
from kvbm_core.library.arrays import Blocks, as_blocks
from kvbm_core.library.spec import BlockSpec, Names
from kvbm_core.library.stage import Stage
from kvbm_core.runtime.local import LocalTiers
from kvbm_core.types import BlockKey, Tier

CALL_TIMEOUT_S = 30.0
RESET_TIERS = frozenset({Tier.HOST, Tier.DISK})


class BlockCache:
    """Blocks by name, in host memory, on disk and in shared stores. Made by ``open_cache``.

    Every call takes names: either the tokens of a prompt, of which each full block counts, or a list of keys
    (bytes or strings) of the caller's own, one for each block. ``salt`` keeps one tenant's blocks from the
    others': names with another salt, or without one, are other names.

    A block never changes: what is put under a name that is there already is not kept, so a name has to say
    all that the bytes depend on. Blocks may be forgotten at any time, to make room or because a disk or a
    store failed; that is a miss, and no error. What comes back is what was put.

    Safe to call from any thread; calls run side by side, and copy on the calling thread. Not safe over a
    fork: the child opens a cache of its own. RuntimeError if it was closed, or opened by another process.
    """

    def __init__(
        self, spec: BlockSpec, stage: Stage, tiers: LocalTiers, num_slots: int, on_close: Callable[[], None]
    ) -> None:
        self.spec = spec
        self._stage = stage
        self._tiers = tiers
        self._num_slots = num_slots
        self._pid = os.getpid()
        self._owners = count()
        self._changed = threading.Condition()
        self._num_calls = 0
        self._is_closed = False
        # Also at the end of a process that forgot.
        self._end = close_with(self, partial(_close_at_home, self._pid, on_close))

    # ---------------------------------------------------------------- blocks

    def put(
        self, names: Names, blocks: Blocks, *, salt: str | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> int:
        """Keeps ``blocks[i]`` as the block of name i: how many leading blocks are in the cache now.

        ``blocks``: NumPy array or torch tensor of shape ``(blocks, *spec.shape)`` and the spec's dtype, on
        any device; it may be used otherwise when the call returns. Of tokens, those behind the last full
        block do not count. Fewer blocks than names: ValueError.

        They are in host memory then, and on their way to the disk and to stores: ``flush`` waits for that. If
        there is no room, waits up to ``timeout_s`` seconds for it. Without a disk or store no more is kept
        than the host memory holds, the head first.
        """
        keys = self.spec.keys(names, salt)
        source = as_blocks(blocks, self.spec, "blocks", writes=False)
        if len(blocks) < len(keys):
            raise ValueError(f"kvbm: {len(keys)} blocks have a name, and blocks has only {len(blocks)}")
        ends_at_s, num_put = time.monotonic() + timeout_s, 0
        if len(self._tiers.tiers) == 1:
            keys = keys[: self._num_slots]
        with self._call():
            while num_put < len(keys):
                with self._stage.borrowed(len(keys) - num_put) as stage_blocks:
                    part = keys[num_put : num_put + len(stage_blocks)]
                    for number, block in enumerate(stage_blocks):
                        source.read(num_put + number, self._stage.block(block))
                    num_kept = self._store(part, stage_blocks, ends_at_s)
                num_put += num_kept
                if num_kept < len(part):
                    break
        return num_put

    def match(self, names: Names, *, salt: str | None = None, timeout_s: float = CALL_TIMEOUT_S) -> int:
        """How many leading blocks ``get`` would find now. Nothing is held: they may be gone by then.

        With a shared store this asks it, waits for the answer up to ``timeout_s`` seconds, and brings what is
        there into host memory; beyond what is here it counts at most as many blocks as half of that holds.
        """
        keys = self.spec.keys(names, salt)
        with self._call():
            found = self._tiers.leading(keys)
            if found < len(keys) and self._tiers.is_asked:
                found = self._tiers.bring(keys[: found + max(1, self._num_slots // 2)], timeout_s)
            return found

    def get(
        self, names: Names, out: Blocks, *, salt: str | None = None, timeout_s: float = CALL_TIMEOUT_S
    ) -> int:
        """Copies the longest prefix of blocks that is there to ``out``: how many blocks.

        ``out[i]`` holds the block of name i for all i below that number; what comes behind is untouched.
        ``out``: NumPy array or torch tensor of shape ``(blocks, *spec.shape)`` and the spec's dtype, on any
        device; with fewer blocks than names only so many are looked for. What a disk or store has not brought
        ``timeout_s`` seconds from now is not waited for.
        """
        keys = self.spec.keys(names, salt)
        target = as_blocks(out, self.spec, "out", writes=True)
        keys = keys[: len(out)]
        ends_at_s, num_got = time.monotonic() + timeout_s, 0
        with self._call():
            while num_got < len(keys):
                with self._stage.borrowed(len(keys) - num_got) as stage_blocks:
                    part = keys[num_got : num_got + len(stage_blocks)]
                    num_came = self._load(part, stage_blocks, ends_at_s)
                    for number, block in enumerate(stage_blocks[:num_came]):
                        target.write(num_got + number, self._stage.block(block))
                num_got += num_came
                if not num_came:
                    break
        return num_got

    def _store(self, keys: Sequence[BlockKey], stage_blocks: Sequence[int], ends_at_s: float) -> int:
        """How many leading ``keys`` are there after their blocks were stored from the stage."""
        while True:
            end = _End()
            self._tiers.store(keys, stage_blocks, end)
            outcome, left_s = end.wait(), ends_at_s - time.monotonic()
            num_kept = len(keys) if outcome is Outcome.OK else self._tiers.leading(keys)
            if num_kept == len(keys) or outcome is not Outcome.NO_SPACE or left_s <= 0:
                return num_kept
            self._tiers.wait_news(left_s)  # others hold room, or are storing the same

    def _load(self, keys: Sequence[BlockKey], stage_blocks: Sequence[int], ends_at_s: float) -> int:
        """How many blocks of leading ``keys`` have been loaded into the stage."""
        owner = str(next(self._owners))
        while True:
            left_s = ends_at_s - time.monotonic()
            found = self._tiers.leading(keys)
            if found < len(keys) and self._tiers.is_asked:
                found = self._tiers.bring(keys, max(0.0, left_s))
            held = keys[: self._tiers.match(owner, keys[:found])] if found else ()
            claim = self._tiers.claim(owner, held) if held else None
            if claim is not None:
                end = _End()
                self._tiers.load(claim, stage_blocks[: len(held)], end)
                if not end.has_come(max(0.0, left_s)):
                    self._tiers.cancel(claim)
                if end.wait() is Outcome.OK:
                    return len(held)
            left_s = ends_at_s - time.monotonic()
            if not found or left_s <= 0:
                return 0
            self._tiers.wait_news(left_s)  # others hold room; or what failed is forgotten: look again

    @contextmanager
    def _call(self) -> Iterator[None]:
        self._check_process()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("kvbm: this cache is closed; open another one")
            self._num_calls += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_calls -= 1
                self._changed.notify_all()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"kvbm: process {self._pid} opened this cache; after a fork, open another one in the child"
            )

    # ---------------------------------------------------------------- all of it

    def usage(self) -> dict[str, int]:
        """Blocks in host memory ("host"), and on the disk of this cache ("disk")."""
        with self._call():
            blocks = self._tiers.resident_blocks
            return {"host": blocks[0], "disk": blocks[1] if Tier.DISK in self._tiers.tiers else 0}

    def flush(self, *, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """Waits until what was put is on the disk and in the stores; False if time ran out. What they refuse
        is not waited for.
        """
        with self._call():
            return self._tiers.wait_stored(timeout_s)

    def clear(self, *, timeout_s: float = CALL_TIMEOUT_S) -> bool:
        """Forgets all blocks in host memory and on this cache's disk, for later processes too, when what is
        being loaded has been loaded; False, and nothing is forgotten, if time ran out. Shared stores keep
        theirs (`kvbm remote` empties them).
        """
        with self._call():
            return self._tiers.reset(RESET_TIERS, timeout_s)

    def close(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        """Waits for calls of other threads, flushes up to ``timeout_s`` seconds, and gives memory, threads
        and files back. What is in host memory is gone. May be called again.
        """
        self._check_process()
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.wait_for(lambda: not self._num_calls)
        self._tiers.wait_stored(timeout_s)
        self._end()

    def __enter__(self) -> BlockCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _End:
    """Of one transfer."""

    def __init__(self) -> None:
        self._outcome = Outcome.REJECTED
        self._over = threading.Event()

    def __call__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._over.set()

    def has_come(self, timeout_s: float) -> bool:
        """False if it has not within that time."""
        return self._over.wait(timeout_s)

    def wait(self) -> Outcome:
        """Every transfer ends: until then its memory is not to be used otherwise."""
        self._over.wait()
        return self._outcome


def _close_at_home(pid: int, close: Callable[[], None]) -> None:
    if os.getpid() == pid:  # in a forked child there are no threads to end, and the files are the parent's
        close()
