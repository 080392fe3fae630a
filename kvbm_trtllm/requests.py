"""What the leader's side knows of each request of TensorRT-LLM, followed from its query to its end or its
silence.

TensorRT-LLM says nothing when a request is aborted or has failed: a request is gone when its blocks are given
to somebody else, or when nothing has been heard of it for long.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

from kvbm_core.runtime.request import RequestState, after
from kvbm_core.tiers.groups import GroupSpec
from kvbm_trtllm.contract import BAD_PAGE
from kvbm_trtllm.states import REQUEST_TABLE, RequestEvent, RequestStatus

SILENT_AFTER_S = 60.0
Given = tuple[int, Sequence[Sequence[int]]]
"""A request's number, and device blocks that are new to it, by group."""


@dataclass(slots=True)
class Followed:
    """One request. ``state`` is None if it is not cached.

    ``tokens``: those known, prompt and answer. ``tables``: device blocks by layer group. ``computed_tokens``:
    on the device when it was queried; ``matched_tokens``: promised to it beyond that; ``is_async``: and that
    it waits parked for them. ``status`` is moved on by Requests alone. ``kept_tokens``: offload ends there,
    by retention priority. ``added_tokens``: what the next report's ``computed_position`` leaves out.
    ``is_private``: it has a salt or an adapter, and nobody is told its tokens.
    """

    number: int
    state: RequestState | None
    tokens: list[int]
    num_prompt_tokens: int
    status: RequestStatus = RequestStatus.WAITING
    tables: list[list[int]] = field(default_factory=list)
    computed_tokens: int = 0
    matched_tokens: int = 0
    is_async: bool = False
    added_tokens: int = 0
    kept_tokens: int | None = None
    heard_at_s: float = 0.0
    heard_tokens: int = -1
    is_private: bool = False

    @property
    def name(self) -> str:
        """Its id in the core."""
        return str(self.number)

    def has(self, group: int, block: int) -> bool:
        """Whether this device block is one of its own now."""
        return bool(self.tables) and block in self.tables[group]


class DeviceBlocks:
    """Who was given each device block last, and which blocks hold something else than their owner was
    promised.

    The leader's thread only. Block ids are by layer group.
    """

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        self._groups = groups
        self._owners: list[dict[int, int]] = [{} for _ in groups]
        self._tainted: list[set[int]] = [set() for _ in groups]

    def give(self, given: Sequence[Given]) -> list[tuple[int, int, int]]:
        """These blocks are these requests', and new to them; who had them before, as (request, group, block).

        That one is gone, unless it was preempted and runs again with other blocks. One that has left a window
        behind has given its blocks up and goes on.
        """
        gone: list[tuple[int, int, int]] = []
        for group, owners, tainted in zip(self._groups, self._owners, self._tainted, strict=True):
            tells = group.window_tokens is None
            for number, fresh in given:
                for block in fresh[group.index]:
                    before = owners.get(block, number)
                    owners[block] = number
                    if before != number and tells:
                        gone.append((before, group.index, block))
                if tainted:
                    tainted.difference_update(fresh[group.index])
            owners.pop(BAD_PAGE, None)
        return gone

    def taint(self, group: int, blocks: Iterable[int], number: int) -> None:
        """A load into these blocks has failed: what ``number`` still has of them must not be read by
        anybody.
        """
        owners = self._owners[group]
        self._tainted[group].update(block for block in blocks if owners.get(block) == number)

    def are_tainted(self, tables: Sequence[Iterable[int]]) -> bool:
        """Whether any of these blocks, which were found on the device, must not be read."""
        return any(
            not tainted.isdisjoint(blocks)
            for tainted, blocks in zip(self._tainted, tables, strict=True)
            if tainted
        )

    @property
    def num_tainted(self) -> int:
        """Blocks that must not be read, until they are given to somebody."""
        return sum(map(len, self._tainted))


class Requests(dict[int, Followed]):
    """Followed requests by their number. The leader's thread only.

    ``broken``: numbers of those whose blocks hold something else than they were promised, refused or not yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.broken: set[int] = set()

    def add(self, followed: Followed) -> None:
        """Follows a request, instead of an earlier one of the same number."""
        self[followed.number] = followed
        self.broken.discard(followed.number)

    def forget(self, number: int) -> Followed | None:
        """Follows it no more."""
        self.broken.discard(number)
        return self.pop(number, None)

    def move(self, followed: Followed, event: RequestEvent) -> None:
        """Something has happened to a request. IntegrityError, a bug, if it cannot; nothing changes then."""
        followed.status = after(REQUEST_TABLE, followed.status, event)
        if followed.status in {RequestStatus.BROKEN, RequestStatus.REFUSED}:
            self.broken.add(followed.number)
        else:
            self.broken.discard(followed.number)

    def offloads_but_of(self, running: Container[int]) -> set[int]:
        """Offloads of those that are not among ``running``."""
        return {
            job
            for number, followed in self.items()
            if number not in running and followed.state is not None
            for job in followed.state.offload_jobs
        }

    def silent(self, now_s: float) -> list[Followed]:
        """Those of which nothing has been heard for SILENT_AFTER_S; call it now and then.

        A request that waits for its load is not silent: TensorRT-LLM has parked it. A broken one is not
        forgotten before it has been refused: one that waits parked comes back, whenever that is.
        """
        found = []
        for followed in self.values():
            heard = len(followed.tokens) + sum(map(len, followed.tables))
            is_waiting = followed.status in {RequestStatus.LOADING, RequestStatus.BROKEN}
            if heard != followed.heard_tokens or is_waiting:
                followed.heard_tokens, followed.heard_at_s = heard, now_s
            elif now_s - followed.heard_at_s > SILENT_AFTER_S:
                found.append(followed)
        return found
