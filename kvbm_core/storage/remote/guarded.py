"""Engines of other people's packages: what goes wrong in one costs no more than blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from reprlib import repr as shortened
from typing import Any

from kvbm_core.config.installed import BROKEN, said_by
from kvbm_core.errors import Outcome
from kvbm_core.observe.log import RateLimitedLogger, get_logger
from kvbm_core.storage.names import ObjectInfo
from kvbm_core.storage.remote.engine import Got, ObjectEngine, TakesMemory

limited_log = RateLimitedLogger()


def _each(call: str, bad: object = Outcome.IO_ERROR) -> Callable[..., Any]:
    def ask(self: GuardedEngine, items: Sequence[object], *, deadline_s: float) -> Any:
        def answers() -> list[Any]:
            found = getattr(self._engine, call)(items, deadline_s=deadline_s)
            is_one_each = isinstance(found, list) and len(found) == len(items)
            if not is_one_each or not all(isinstance(one, type(bad)) for one in found):
                wanted = f"{len(items)} of {type(bad).__name__}"
                raise TypeError(f"it answered {shortened(found)} where {wanted} were expected")
            return list(found)

        return self._guarded(call, answers, [bad] * len(items))

    return ask


class GuardedEngine:
    """ObjectEngine: somebody else's; TakesMemory if it is. Where a call raises, or does not answer for each
    item, these are IO_ERROR. ``whose``: what the line calls it that says so, once a minute for all calls that
    fail alike.
    """

    def __init__(self, engine: ObjectEngine, whose: str) -> None:
        self.traits = engine.traits
        self._engine = engine
        self._whose = whose
        self.close = partial(self._guarded, "close", engine.close, None)
        if isinstance(engine, TakesMemory):
            self.register = engine.register

    put, get, exists = _each("put"), _each("get", Got(Outcome.IO_ERROR)), _each("exists")
    remove, renew = _each("remove"), _each("renew")

    def scan(self, prefix: str, *, deadline_s: float) -> Iterator[ObjectInfo]:
        """See ObjectEngine."""
        try:
            for info in self._engine.scan(prefix, deadline_s=deadline_s):
                yield ObjectInfo(*info)
        except OSError:
            raise
        except BROKEN as error:
            raise OSError(self._line("scan", error)) from error

    def _guarded(self, call: str, ask: Callable[[], Any], bad: Any) -> Any:
        try:
            return ask()
        except BROKEN as error:
            get_logger().debug("kvbm: %s", self._whose, exc_info=error)
            limited_log.warning((self._whose, type(error)), "kvbm: %s", self._line(call, error))
            return bad

    def _line(self, call: str, error: BaseException) -> str:
        return f"{self._whose} fails in {call}: {said_by(error)}; run kvbm_core.testing.engine_contract on it"
