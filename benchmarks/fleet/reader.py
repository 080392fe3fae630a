"""A process that follows all simulated instances over NATS, as a router does."""

from __future__ import annotations

import struct
import time
from array import array
from typing import Any

from benchmarks.fleet.children import serve
from benchmarks.fleet.instance import FLEET, MEDIUM, Place, digest, name_of
from kvbm_core.events.consumer import Picture
from kvbm_core.events.nats_reader import NatsReader
from kvbm_core.events.nats_sink import subject
from kvbm_core.events.wire import NUMBER

_TIME = struct.Struct(">xBd")
"""How a batch begins: an array, then a float64."""
_FLOAT64 = 0xCB


class TimedReader(NatsReader):
    """Notes how late batches are. All of it is read on other threads while the reader's changes it."""

    def __init__(self, place: Place) -> None:
        self.num_batches = 0
        self.num_bytes = 0
        self.lags_s = array("d")
        self.newest_s: dict[str, float] = {}
        """When the newest batch of a stream was made."""
        super().__init__(place.nats(), subject(FLEET, "*", 0))

    def _heard(self, client: Any, stream: str, message: bytes) -> None:
        super()._heard(client, stream, message)
        mark, made_s = _TIME.unpack_from(message, NUMBER.size)
        if mark != _FLOAT64:
            raise ValueError("a batch that does not begin with its time")
        self.num_batches += 1
        self.num_bytes += len(message)
        self.lags_s.append(time.time() - made_s)
        self.newest_s[stream] = made_s


class Reader:
    """``serve`` calls it."""

    _reader: TimedReader

    def begin(self, **place: Any) -> dict[str, Any]:
        """It follows from now on."""
        self._reader = TimedReader(Place(**place))
        return {}

    def status(self, since_s: float = 0.0, count: int = 0) -> dict[str, Any]:
        """Of the streams of ``count`` instances: how many have told something since, and are complete."""
        lags, self._reader.lags_s = sorted(self._reader.lags_s), array("d")
        found = {
            "batches": self._reader.num_batches,
            "bytes": self._reader.num_bytes,
            "current": 0,
            "gaps": 0,
        }
        for number in range(count):
            stream = subject(FLEET, name_of(number), 0)
            is_current, gaps = self._reader.look(
                stream, lambda picture: (picture.is_current, picture.gaps_total)
            )
            found["current"] += is_current and self._reader.newest_s.get(stream, 0.0) >= since_s
            found["gaps"] += gaps
        at = {"lag_p50_s": 0.5, "lag_p99_s": 0.99, "lag_max_s": 1.0}
        return {**found, **{name: _quantile(lags, share) for name, share in at.items()}}

    def pictures(self, count: int) -> dict[str, Any]:
        """What each instance has, by what it told: its name to a digest."""

        def see(picture: Picture) -> str:
            return digest(picture.places.get((MEDIUM, 0), ())) if picture.is_current else ""

        names = map(name_of, range(count))
        return {name: self._reader.look(subject(FLEET, name, 0), see) for name in names}


def _quantile(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


if __name__ == "__main__":
    reader = Reader()
    serve({"begin": reader.begin, "status": reader.status, "pictures": reader.pictures})
