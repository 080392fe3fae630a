"""Blocks whose read fails are read once more: some errors have passed by then, of a bus, a driver or a
page.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import compress
from pathlib import Path

from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.storage.disk.bounce import Bounced
from kvbm_core.storage.disk.lane import Lane, OnEnded, Record

MAY_PASS = frozenset({Outcome.IO_ERROR, Outcome.CORRUPT})

log = logging.getLogger("kvbm")


def read_twice(
    lane: Lane,
    records: Sequence[Record],
    *,
    path: Path,
    clock: Clock,
    deadline_s: float,
    on_ended: OnEnded | None = None,
    bounced: Bounced | None = None,
) -> list[Outcome]:
    """As ``Lane.read``; a record whose outcome is one of MAY_PASS has a second try within the same time.

    ``on_ended`` hears of each record's last try alone. ``path`` is for the log.
    """
    ends_at_s = clock.now_s() + deadline_s
    failed: list[int] = []

    def tell(indices: Sequence[int], ended: Sequence[Outcome]) -> None:
        if on_ended is not None and indices:
            on_ended(indices, ended)

    def on_first(indices: Sequence[int], ended: Sequence[Outcome]) -> None:
        if MAY_PASS.isdisjoint(ended):
            tell(indices, ended)
            return
        failed.extend(compress(indices, [outcome in MAY_PASS for outcome in ended]))
        others = [outcome not in MAY_PASS for outcome in ended]
        tell(list(compress(indices, others)), list(compress(ended, others)))

    def on_second(numbers: Sequence[int], ended: Sequence[Outcome]) -> None:
        indices = [failed[number] for number in numbers]
        for index, outcome in zip(indices, ended, strict=True):
            outcomes[index] = outcome
        tell(indices, ended)

    outcomes = lane.read(records, deadline_s=deadline_s, on_ended=on_first, bounced=bounced)
    left_s = ends_at_s - clock.now_s()
    if not failed:
        return outcomes
    if left_s <= 0:  # a request would be in flight, and late, at once
        tell(failed, [outcomes[index] for index in failed])
        return outcomes
    part = None if bounced is None else bounced.part(failed)
    again = lane.read(
        [records[index] for index in failed], deadline_s=left_s, on_ended=on_second, bounced=part
    )
    if num_good := again.count(Outcome.OK):  # what stays bad is told by whoever asked
        log.warning(
            "kvbm: %s: %d of %d blocks read again, %d are good now", path, len(failed), len(records), num_good
        )
    return outcomes
