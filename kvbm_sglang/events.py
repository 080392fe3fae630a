"""KV events under SGLang: kvbm's pages under the hashes that SGLang publishes for its own.

SGLang names a page by a SHA-256 and publishes 64 bits of it. It tells its storage neither tokens nor the page
before, so hashes are all that kvbm tells. Of requests with a salt or an extra key SGLang publishes other
hashes than it gives its storage: those of kvbm are then known to nobody.

Of the ranks of one engine, each of which has tiers of its own, the first one speaks.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvbm_core.config import KvbmSettings
from kvbm_core.events.log import EventLog, Names
from kvbm_core.events.service import EventService, media_of
from kvbm_core.observe.metrics import Metrics
from kvbm_core.types import BlockKey


def published_hash(page: str) -> int:
    """As SGLang makes it of a page's name; of a name that is none of its own, something that fits nothing."""
    try:
        bits = int(page[:16], 16)
    except ValueError:
        bits = hash(page) & (2**64 - 1)
    return bits - 2**64 if bits >= 2**63 else bits


class EventFeed:
    """``log``: None: nobody wants events of this rank. Any thread."""

    def __init__(
        self, settings: KvbmSettings, metrics: Metrics, page_tokens: int, rank: int, is_first: bool
    ) -> None:
        self.log: EventLog | None = None
        self.generation = 0
        """How often the weights have changed, or become known: of what was begun before that nothing is
        told.
        """
        self._page_tokens = page_tokens
        self._service: EventService | None = None
        if settings.event_ways and is_first:
            self.log = EventLog(media_of(settings), published_hash)
            self._service = EventService(settings, self.log, rank, metrics)

    def kept(self, keys: Sequence[BlockKey], pages: Sequence[str], generation: int) -> None:
        """Consecutive pages that are kept now, and SGLang's names of them; begun in ``generation``."""
        if self.log is not None and generation == self.generation:
            self.log.name(Names(keys, pages, None, self._page_tokens))
            if generation != self.generation:  # meanwhile, in another thread
                self.log.renamed()

    def renamed(self) -> None:
        """Nobody asks for what was named before: SGLang calls other pages so from now on."""
        self.generation += 1
        if self.log is not None:
            self.log.renamed()

    def wanted(self, keys: Sequence[BlockKey], pages: Sequence[str]) -> None:
        """Consecutive pages that are asked for: of those that were found on disk at the start nobody has
        known what they are called.
        """
        if self.log is not None and self.log.lacks_names(keys):
            self.log.name(Names(keys, pages, None, self._page_tokens))

    def close(self) -> None:
        """May be called twice."""
        if self._service is not None:
            self._service.close()
