"""Logging under the name "kvbm": set-up, lines that cannot flood, and KVBM's periodic hit-rate line."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Hashable

from kvbm_core.clock import Clock, SystemClock
from kvbm_core.observe.metrics import HitWindow, Metrics

ROOT_LOGGER = "kvbm"
_LEVELS = {
    "error": logging.ERROR,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "info": logging.INFO,
    "debug": logging.DEBUG,
    "trace": logging.DEBUG,
    "off": logging.CRITICAL + 1,
}
_MAX_KEYS = 256


def get_logger(part: str = "") -> logging.Logger:
    """The logger "kvbm", or "kvbm.<part>"."""
    return logging.getLogger(f"{ROOT_LOGGER}.{part}" if part else ROOT_LOGGER)


def level_of(directives: str) -> int:
    """
    The level in DYN_LOG's notation: a level, or comma-separated "target=level" with an optional plain level.
    Targets other than kvbm are ignored; what is not understood means info.
    """
    level = logging.INFO
    for directive in directives.split(","):
        target, _, name = directive.strip().lower().rpartition("=")
        if target in ("", ROOT_LOGGER) and name in _LEVELS:
            level = _LEVELS[name]
            if target:
                break
    return level


def setup_logging(directives: str = "info") -> None:
    """
    Sets kvbm's level, and gives it a handler on stderr if nothing else would show its lines (engines
    configure their own loggers only). May be called again.
    """
    logger = get_logger()
    logger.setLevel(level_of(directives))
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s"))
        logger.addHandler(handler)


class RateLimitedLogger:
    """Logs a line at most once per interval and key, and says how many like it were left out. Thread safe."""

    def __init__(
        self, logger: logging.Logger | None = None, interval_s: float = 60.0, clock: Clock | None = None
    ) -> None:
        self._logger = logger or get_logger()
        self._interval_s = interval_s
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        # key -> (time of its last line, lines left out since); the longest unused key makes room for others.
        self._seen: OrderedDict[Hashable, tuple[float, int]] = OrderedDict()

    def log(
        self, level: int, key: Hashable, message: str, *args: object, exc_info: BaseException | None = None
    ) -> bool:
        """Logs ``message % args`` unless ``key`` was logged within the interval. True if it was logged."""
        now_s = self._clock.now_s()
        with self._lock:
            last_s, left_out = self._seen.get(key, (None, 0))
            due = last_s is None or now_s - last_s >= self._interval_s
            self._seen[key] = (now_s, 0) if due or last_s is None else (last_s, left_out + 1)
            self._seen.move_to_end(key)
            if len(self._seen) > _MAX_KEYS:
                self._seen.popitem(last=False)
        if due:
            suffix = f" ({left_out} more like this were left out)" if left_out else ""
            self._logger.log(level, message + suffix, *args, exc_info=exc_info)
        return due

    def warning(
        self, key: Hashable, message: str, *args: object, exc_info: BaseException | None = None
    ) -> bool:
        """``log`` at level WARNING."""
        return self.log(logging.WARNING, key, message, *args, exc_info=exc_info)


class TroubleLog:
    """Says once that something fails and why, and once that it works again. Thread safe.

    What fails and works by turns is told of once per ``interval_s``.
    """

    def __init__(
        self, logger: logging.Logger | None = None, interval_s: float = 600.0, clock: Clock | None = None
    ) -> None:
        self._logger = logger or get_logger()
        self._limited = RateLimitedLogger(self._logger, interval_s, clock)
        self._lock = threading.Lock()
        self._told: dict[Hashable, Hashable] = {}

    def failed(self, what: Hashable, why: Hashable, message: str, *args: object) -> None:
        """``what`` fails; logs ``message % args`` unless that has been said, with the same ``why``."""
        with self._lock:
            if self._told.get(what) != why and self._limited.warning((what, why), message, *args):
                self._told[what] = why

    def worked(self, what: Hashable, message: str, *args: object) -> None:
        """``what`` works; logs ``message % args`` if it was said that it fails."""
        if what in self._told:
            with self._lock:
                if self._told.pop(what, None) is not None:
                    self._logger.warning(message, *args)


class CacheStatsLog:
    """KVBM's line "KVBM [worker] Cache Hit Rates - Host: ..., Disk: ...", and ", Object: ..." where a shared
    store has brought something; call ``tick`` at any rate,
    from one thread.
    """

    def __init__(
        self,
        metrics: Metrics,
        interval_s: float = 5.0,
        worker: str = "0",
        clock: Clock | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        self._metrics = metrics
        self._interval_s = interval_s
        self._worker = worker
        self._clock = clock or SystemClock()
        self._logger = logger or get_logger()
        self._next_s = self._clock.now_s() + interval_s
        self._last = HitWindow(0, 0, 0, 0)

    def tick(self) -> bool:
        """Logs the line if the interval is over and a number has changed. True if it was logged."""
        now_s = self._clock.now_s()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + self._interval_s
        window = self._metrics.hit_window()
        if window == self._last:
            return False
        self._last = window
        host, disk, objects, queried = window
        tiers = [("Host", host), ("Disk", disk)] + [("Object", objects)] * bool(objects)
        rates = (f"{tier}: {100 * window.rate(hits):.1f}% ({hits}/{queried})" for tier, hits in tiers)
        self._logger.info("KVBM [%s] Cache Hit Rates - %s", self._worker, ", ".join(rates))
        return True
