"""What tiers of any size would find in a trace, without serving it.

Device and host are least-recently-used over whole prompts, of which the tail goes before the head. So both
hold what was used last, and a block is found exactly if fewer other blocks have been used since than there
are slots (Mattson's stack distance): one pass over the trace answers for all sizes. A block is never used
without those before it, so its distance is never smaller than theirs: what is found is a prefix by itself.

A disk sees only what passes the host and the filter, in an order of its own, and what is written to it is
held in the host meanwhile. So both are followed block by block for one pair of sizes, with the product's own
admission policy, but without leases, hashes, jobs and slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import cast

import numpy as np
import numpy.typing as npt

from kvbm_core.clock import ManualClock
from kvbm_core.policy.admission import AdmissionPolicy
from kvbm_core.replay.machine import Policy, Sizes
from kvbm_core.replay.trace import Request, Trace
from kvbm_core.tiers.storing import STORE_BLOCKS
from kvbm_core.types import BlockKey

Ints = npt.NDArray[np.int64]
MAX_REFERENCES = 1_500_000
"""Blocks of all prompts together that are looked at within seconds; larger traces are made coarser."""
_NEVER = np.iinfo(np.int64).max


def fit(trace: Trace) -> Trace:
    """``trace``, or the same in blocks so much larger that it is looked at within seconds."""
    references = sum(len(request.ids) for request in trace.requests)
    factor = 1
    while references > MAX_REFERENCES * factor:
        factor *= 2
    return trace.coarser(factor)


@dataclass(frozen=True, slots=True)
class Found:
    """Blocks that each request finds in each tier, and what that writes to disk in all."""

    device: Ints
    host: Ints
    disk: Ints
    written_blocks: int

    @property
    def blocks(self) -> int:
        """Found in any tier by all requests."""
        return int(self.device.sum() + self.host.sum() + self.disk.sum())


class Reuse:
    """Stack distances of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._ends = np.cumsum([len(request.ids) for request in trace.requests], dtype=np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), self._ends[:-1]])
        self._distances = _distances(trace, self._starts)
        reusable = np.array([request.reusable_blocks for request in trace.requests], np.int64)
        places = np.arange(len(self._distances), dtype=np.int64) - np.repeat(self._starts, self._lengths)
        self._is_reusable = places < np.repeat(reusable, self._lengths)

    @property
    def _lengths(self) -> Ints:
        lengths: Ints = self._ends - self._starts
        return lengths

    def in_reach(self, num_slots: int) -> Ints:
        """How many leading blocks of each request ``num_slots`` hold when it comes, of those that it can
        reuse.
        """
        return self._counts((self._distances < num_slots) & self._is_reusable)

    def _counts(self, marks: npt.NDArray[np.bool_]) -> Ints:
        sums = np.concatenate([np.zeros(1, np.int64), np.cumsum(marks, dtype=np.int64)])
        counts: Ints = sums[self._ends] - sums[self._starts]
        return counts

    def hit_rates(self, sizes: Sequence[int]) -> list[float]:
        """Shares of all prompt tokens that are found with so many slots on device or host, whichever is
        larger.
        """
        ordered = np.sort(self._distances[self._is_reusable])
        tokens = max(1, self.trace.prompt_tokens)
        found = np.searchsorted(ordered, np.array(sizes, np.int64))
        return [int(count) * self.trace.block_tokens / tokens for count in found]

    def found(self, sizes: Sizes, policy: Policy) -> Found:
        """What tiers of ``sizes`` find, with ``policy`` before the disk."""
        device = self.in_reach(sizes.device_blocks)
        if not sizes.disk_blocks:
            host = np.maximum(self.in_reach(sizes.host_blocks) - device, 0)
            return Found(device, host, np.zeros(len(device), np.int64), 0)
        clock = ManualClock()
        tiers = _HostAndDisk(sizes, policy.make(clock))
        counts = []
        for request, on_device in zip(self.trace.requests, device.tolist(), strict=True):
            clock.advance(max(0.0, request.at_s - clock.now_s()))
            counts.append(tiers.serve(request, on_device))
        in_host, on_disk = np.array(counts, np.int64).T
        return Found(device, in_host, on_disk, tiers.written_blocks)

    def hit_rate(self, found: Found) -> float:
        """Of all prompt tokens, 0 to 1."""
        return found.blocks * self.trace.block_tokens / max(1, self.trace.prompt_tokens)


class _HostAndDisk:
    """What their slots would hold; the least recently used first."""

    def __init__(self, sizes: Sizes, admission: AdmissionPolicy) -> None:
        self.written_blocks = 0
        self._host_slots, self._disk_slots = sizes.host_blocks, sizes.disk_blocks
        self._admission = admission
        self._host: OrderedDict[int, None] = OrderedDict()
        self._disk: OrderedDict[int, None] = OrderedDict()

    def serve(self, request: Request, on_device: int) -> tuple[int, int]:
        """Blocks that the host has for a request of which ``on_device`` need not be loaded, and the disk."""
        ids, host = request.ids, self._host
        own = [block for block in ids if block in host]
        for block in own:  # nothing of a prompt makes room for the rest of it
            host.move_to_end(block)
        brought = self._brought(ids, on_device, request.reusable_blocks, self._host_slots - len(own))
        self._take_in(brought)
        found = self._prefix(ids, on_device, request.reusable_blocks)
        room = self._host_slots - len(own) - len(brought)
        new = [block for block in ids if block not in host][:room]
        self._take_in(new)
        for block in reversed(ids):
            if block in host:
                host.move_to_end(block)
        used = ids[: on_device + found]
        for block in reversed(used):
            if block in self._disk:
                self._disk.move_to_end(block)
        self._admission.hit(_keys([block for block in used if block not in self._disk]))
        # What is written to disk is held meanwhile, and counts as used when it has been.
        for first_to_go in (*self._store(used, ids), *self._store(new, ids)):
            host.move_to_end(first_to_go)
        return found - len(brought), len(brought)

    def _brought(self, ids: Sequence[int], start: int, end: int, room: int) -> list[int]:
        """What of the prefix from ``start`` on the disk has and the host lacks; it has been used now."""
        brought: list[int] = []
        for place in range(start, end):
            block = ids[place]
            if block in self._host:
                continue
            if block not in self._disk or len(brought) >= room:
                break
            brought.append(block)
        for block in reversed(brought):
            self._disk.move_to_end(block)
        return brought

    def _prefix(self, ids: Sequence[int], start: int, end: int) -> int:
        place = start
        while place < end and ids[place] in self._host:
            place += 1
        return max(0, place - start)

    def _take_in(self, blocks: Sequence[int]) -> None:
        for _ in range(len(self._host) + len(blocks) - self._host_slots):
            self._host.popitem(last=False)
        self._host.update(dict.fromkeys(blocks))

    def _store(self, blocks: Sequence[int], ids: Sequence[int]) -> list[int]:
        """Of ``blocks`` of the prompt ``ids`` what the disk lacks and admits is stored, if it is in the host
        and the disk has what comes before it. It, in the order of use.
        """
        disk = self._disk
        offered = [block for block in blocks if block not in disk]
        wanted = set(cast("list[int]", self._admission.admit(_keys(offered))))
        head = takewhile(lambda block: block in disk or (block in wanted and block in self._host), ids)
        admitted = [block for block in head if block in wanted][: self._disk_slots]
        self.written_blocks += len(admitted)
        for _ in range(len(disk) + len(admitted) - self._disk_slots):
            disk.popitem(last=False)
        used: list[int] = []
        for first in range(0, len(admitted), STORE_BLOCKS):  # an order's tail goes before its head
            used += reversed(admitted[first : first + STORE_BLOCKS])
        disk.update(dict.fromkeys(used))
        return used


def _keys(ids: Sequence[int]) -> Sequence[BlockKey]:
    """A policy compares names of blocks, and these are names of blocks."""
    return cast("Sequence[BlockKey]", ids)


def _distances(trace: Trace, starts: Ints) -> Ints:
    """For each block of each request: how many others have been used since it was used last, when the request
    comes; _NEVER for one that is new.
    """
    ids = np.concatenate([np.array(request.ids, np.int64) for request in trace.requests])
    num, lengths = len(ids), np.diff(np.append(starts, len(ids)))
    # In the order of use: of each prompt the tail first, so that the head is the most recent.
    firsts, rows = np.repeat(starts, lengths), np.arange(num, dtype=np.int64)
    behind = np.repeat(starts + lengths - 1, lengths) - rows  # blocks of the same prompt that are used before
    order = firsts + behind
    uses = ids[order]
    before = _previous(uses)
    earlier_later = _greater_before(before)
    # Others since: first uses after ``before``, which are those whose own last use is not after it.
    since = rows - earlier_later - before - 1
    distances = np.where(before < 0, _NEVER, since - behind[order])
    result = np.empty(num, np.int64)
    result[order] = distances
    return result


def _previous(uses: Ints) -> Ints:
    """Where each one was used before; -1: nowhere."""
    order = np.argsort(uses, kind="stable")
    is_again = uses[order][1:] == uses[order][:-1]
    before = np.full(len(uses), -1, np.int64)
    before[order[1:][is_again]] = order[:-1][is_again]
    return before


def _greater_before(values: Ints) -> Ints:
    """For each of ``values``: how many before it are greater. By merging sorted runs of twice the length each
    time.
    """
    num = len(values)
    # Distinct numbers in the same order; of equal ones the later is the greater, so it counts none of them.
    ranks = np.empty(num, np.int64)
    ranks[np.argsort(values, kind="stable")] = np.arange(num, dtype=np.int64)
    counts = np.zeros(num, np.int64)
    places = np.arange(num, dtype=np.int64)  # whose rank stands where, each run in ascending order
    width = 1
    while width < num:
        runs = (
            places // width
        )  # of the places as numbers of elements: elements never leave their pair of runs
        pairs = runs // 2
        merged = places[np.argsort(pairs * num + ranks[places], kind="stable")]
        is_right = merged // width % 2 == 1
        lefts = np.cumsum(~is_right)
        first = merged // (2 * width) * (2 * width)
        lefts_before = lefts - np.concatenate([np.zeros(1, np.int64), lefts])[first]
        counts[merged[is_right]] += width - lefts_before[is_right]
        places = merged
        width *= 2
    return counts
