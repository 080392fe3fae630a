"""What blocks are called in KV events: by names that each request's engine adapter gives."""

from __future__ import annotations

from collections.abc import Iterable

from kvbm_core.events.log import EventLog
from kvbm_core.runtime.leader import Leader
from kvbm_core.runtime.request import RequestState
from kvbm_core.runtime.transfer_jobs import JobPart
from kvbm_core.tokens.runs import BlockRun


class BlockNames:
    """Names blocks in ``log``, on the leader's thread; None: nobody wants events, and nothing is done. The
    base of adapters' feeds, which say in ``RequestState.names_of`` what a request's blocks are called.
    """

    def __init__(self, log: EventLog | None = None) -> None:
        self.log = log

    def on_end(self, part: JobPart, committed: bool) -> None:
        """A part of an offload is over; blocks that became matchable get their names."""
        if committed:
            self._name(part.state, part.runs)

    def on_match(self, state: RequestState) -> None:
        """What was matched, and is to be loaded: of what was found on disk at the start, or was brought from
        a store, nobody has known what it is called.
        """
        if self.log is not None and state.match is not None and self.log.lacks_names(state.match.held.keys):
            self._name(state, state.runs(state.match.blocks))

    def renamed(self, leader: Leader) -> None:
        """The weights are others, or known now: the names that were given so far mean other blocks, and those
        of open requests too.
        """
        if self.log is not None:
            leader.forget_names()
            self.log.renamed()

    def _name(self, state: RequestState, runs: Iterable[BlockRun]) -> None:
        if self.log is not None and state.names_of is not None and not state.is_retired:
            for run in runs:
                self.log.name(state.names_of(run))
