"""KV events under TensorRT-LLM: what kvbm's blocks are called, and what they hold.

TensorRT-LLM tells connectors the hashes that it publishes in its newest versions only, so blocks have 64 bits
of kvbm's own. Routers take a hash for a name, and find blocks by their tokens. Of requests with a salt or an
adapter, whose name is not known here, hashes alone are told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from kvbm_core.events.log import EventLog, Names
from kvbm_core.events.wire import BlockHash
from kvbm_core.runtime.request import RequestState
from kvbm_core.runtime.transfer_jobs import JobPart
from kvbm_core.tokens.runs import BlockRun
from kvbm_core.types import SequenceHash

if TYPE_CHECKING:
    from kvbm_trtllm.requests import Followed


def own_hash(key: bytes) -> BlockHash:
    """64 bits of a block's key."""
    return int.from_bytes(key[:8], "big")


class EventFeed:
    """Names blocks in ``event_log``, on the leader's thread; None: nobody wants events."""

    def __init__(self, event_log: EventLog | None = None) -> None:
        self.log = event_log
        self._tokens_of: dict[tuple[int, str], Sequence[int] | None] = {}
        self._old_roots: frozenset[SequenceHash] = frozenset()

    def note(self, job_id: int | None, followed: Followed) -> None:
        """A job stores blocks of this request."""
        if self.log is not None and job_id is not None:
            self._tokens_of[job_id, followed.name] = _told_tokens(followed)

    def renamed(self, states: Iterable[RequestState]) -> None:
        """It is known now which weights these are, and nobody asks for what was named before: those of open
        requests (``states``), and what is still written, too.
        """
        if self.log is not None:
            self._tokens_of.clear()
            self._old_roots = frozenset(state.chain.root for state in states)
            self.log.renamed()

    def on_end(self, part: JobPart, committed: bool) -> None:
        """A part of an offload is over; blocks that became matchable get their names."""
        tokens_of, place = self._tokens_of, (part.job_id, part.state.request_id)
        if self.log is None or place not in tokens_of:
            return
        tokens = tokens_of.pop(place)
        if committed:
            self._name(part.state, part.runs, tokens)

    def on_match(self, followed: Followed, state: RequestState) -> None:
        """What was matched: of what was found on disk at the start nobody has known what it is called."""
        if self.log is not None and state.match is not None and self.log.lacks_names(state.match.held.keys):
            self._name(state, state.runs(state.match.blocks), _told_tokens(followed))

    def _name(self, state: RequestState, runs: Iterable[BlockRun], tokens: Sequence[int] | None) -> None:
        if self.log is not None and state.chain.root not in self._old_roots:
            for run in runs:
                self.log.name(_names(run, tokens))


def _told_tokens(followed: Followed) -> Sequence[int] | None:
    return None if followed.is_private else followed.tokens


def _names(run: BlockRun, tokens: Sequence[int] | None) -> Names:
    first, end, size = run.first, run.end, run.block_tokens
    keys = run.keys[first:end]
    parent = run.keys[first - 1] if first else None
    told = None if tokens is None else tokens[first * size : end * size]
    return Names(keys, keys, parent, size, told)
