"""What each running request has on the device, followed from step to step.

New requests bring the whole table with SchedulerOutput, cached ones what was added, resumed ones the whole
table again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import compress
from typing import TYPE_CHECKING

from kvbm_core.runtime.request import NULL_BLOCK
from kvbm_core.tiers.groups import GroupSpec
from kvbm_vllm.requests import Followed

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput


class DeviceTables:
    """Keeps the block tables of ``requests``, and the device blocks that a step overwrites. The scheduler's
    thread only.
    """

    def __init__(self, groups: tuple[GroupSpec, ...], requests: Mapping[str, Followed]) -> None:
        self._groups = groups
        self._requests = requests
        self._overwritten: list[int] = []

    def note_overwritten(self, device_blocks: Iterable[int]) -> None:
        """A load will fill these in the step that is being planned."""
        self._overwritten.extend(device_blocks)

    def follow(self, scheduler_output: SchedulerOutput, *, note_grown: bool) -> list[int]:
        """Takes in a step; the device blocks that are overwritten in it.

        Without ``note_grown`` those that running requests were given are left out.
        """
        for new in scheduler_output.scheduled_new_reqs:
            self._replace(new.req_id, new.block_ids, new.num_computed_tokens)
        self._follow_cached(scheduler_output.scheduled_cached_reqs, note_grown=note_grown)
        overwritten, self._overwritten = self._overwritten, []
        return overwritten

    def _follow_cached(self, cached: CachedRequestData, *, note_grown: bool) -> None:
        get, resumed = self._requests.get, cached.resumed_req_ids
        # No new blocks is None, for nearly every request in nearly every step: passed over in C.
        given = cached.new_block_ids
        for request_id, new_ids in zip(compress(cached.req_ids, given), filter(None, given), strict=True):
            if resumed and request_id in resumed:
                self._replace(
                    request_id, new_ids, cached.num_computed_tokens[cached.req_ids.index(request_id)]
                )
            elif (followed := get(request_id)) is not None and followed.tables:
                tables = followed.tables
                if len(tables) == 1:
                    tables[0].extend(new_ids[0])
                else:
                    for table, ids in zip(tables, new_ids, strict=True):
                        table.extend(ids)
                if note_grown:
                    for ids in new_ids:
                        self._overwritten.extend(ids)

    def _replace(self, request_id: str, tables: tuple[list[int], ...], computed_tokens: int) -> None:
        followed = self._requests.get(request_id)
        if followed is not None:
            followed.tables = tuple(list(ids) for ids in tables)
        for group, table in zip(self._groups, tables, strict=False):
            self._overwritten.extend(table[computed_tokens // group.block_size_tokens :])

    def targets(self, tables: Iterable[list[int]], first_token: int, num_tokens: int) -> tuple[int, ...]:
        """Device blocks that a load of these tokens would fill."""
        wanted: set[int] = set()
        for group, table in zip(self._groups, tables, strict=False):
            size = group.block_size_tokens
            wanted.update(table[first_token // size : -(-(first_token + num_tokens) // size)])
        return tuple(sorted(wanted - {NULL_BLOCK}))
