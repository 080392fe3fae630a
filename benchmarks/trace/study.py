"""Every policy under every pair of sizes, on all cores: rows of what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.suite import expect
from benchmarks.trace.policies import ADMIT_ALL, POLICIES, Policy
from benchmarks.trace.replay import Sizes, Tally, replay, reusable_tokens
from benchmarks.trace.requests import BLOCK_TOKENS, Request, read_trace

UNLIMITED = "unlimited"


@dataclass(frozen=True, slots=True)
class Size:
    """Of one tier: ``factor`` times the tier above it, or ``blocks``; with neither, room for the whole
    trace.
    """

    factor: int = 0
    blocks: int = 0

    @staticmethod
    def parse(text: str) -> Size:
        """``4x``, ``4000`` or ``unlimited``; ValueError for anything else, and for nothing."""
        if text == UNLIMITED:
            return Size()
        number = int(text.removesuffix("x"))
        if number < 1:
            raise ValueError(f"a tier has at least one block, not {text}")
        return Size(factor=number) if text.endswith("x") else Size(blocks=number)

    def of(self, above_blocks: int, trace_blocks: int) -> int:
        """In blocks."""
        return self.blocks or self.factor * above_blocks or trace_blocks

    def __str__(self) -> str:
        return f"{self.factor}x" if self.factor else f"{self.blocks:,}" if self.blocks else UNLIMITED


@dataclass(frozen=True, slots=True)
class Row:
    """One replay. ``host`` and ``disk`` are the sizes as they were asked for."""

    place: int
    host: Size
    disk: Size
    sizes: Sizes
    tally: Tally

    @property
    def policy(self) -> Policy:
        """By its place in POLICIES: what makes one does not travel between processes."""
        return POLICIES[self.place]

    def share(self, tokens: int) -> float:
        """Of all prompt tokens."""
        return tokens / max(1, self.tally.input_tokens)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        tally = self.tally
        return {
            "policy": self.policy.name,
            "is_candidate": self.policy.is_candidate,
            "host": str(self.host),
            "disk": str(self.disk),
            **self.sizes._asdict(),
            **asdict(tally),
            "device_hit_rate": self.share(tally.device_tokens),
            "host_hit_rate": self.share(tally.host_tokens),
            "disk_hit_rate": self.share(tally.disk_tokens),
            "hit_rate": self.share(tally.hit_tokens),
            "writes_per_read": tally.writes_per_read,
        }


@dataclass(frozen=True, slots=True)
class Study:
    """``bound``: unlimited host and disk, everything admitted. ``trace`` says what was replayed."""

    bound: Row
    rows: tuple[Row, ...]
    trace: dict[str, int]


@dataclass(frozen=True, slots=True)
class Case:
    """A replay to be run; ``place`` as in Row."""

    place: int
    host: Size
    disk: Size
    sizes: Sizes
    seed: int

    def run(self, requests: Sequence[Request]) -> Row:
        """Replays it."""
        tally = replay(requests, self.sizes, POLICIES[self.place], self.seed)
        return Row(self.place, self.host, self.disk, self.sizes, tally)


def study(
    path: Path,
    device_blocks: int,
    hosts: Sequence[Size],
    disks: Sequence[Size],
    *,
    seed: int,
    processes: int,
    told: Callable[[str], None] = lambda text: None,
) -> Study:
    """Replays the trace at ``path`` for each policy, ``hosts`` by ``disks``.

    TraceError or OSError if it cannot be read. WrongAnswer if counts do not add up, if the bound is not what
    a cache that never forgets would find, or if other keys (another order in every set and dict of keys) give
    other counts.
    """
    requests = read_trace(path)
    trace_blocks = max(1, len({block for request in requests for block in request.full_block_ids}))
    cases = [Case(ADMIT_ALL, Size(), Size(), Sizes(device_blocks, trace_blocks, trace_blocks), seed)]
    for host in hosts:
        host_blocks = host.of(device_blocks, trace_blocks)
        for disk in disks:
            sizes = Sizes(device_blocks, host_blocks, disk.of(host_blocks, trace_blocks))
            cases += [Case(place, host, disk, sizes, seed) for place in range(len(POLICIES))]
    # Where most is evicted, once more.
    again = min(cases, key=lambda case: (case.sizes.disk_blocks, case.place != ADMIT_ALL))
    cases.append(replace(again, seed=seed + 1))
    rows = []
    for row in _run(path, requests, cases, processes):
        rows.append(row)
        told(f"{len(rows)} of {len(cases)} replays")
    bound, *found, repeated = rows
    first = rows[cases.index(again)]
    expect(repeated.tally == first.tally, f"{repeated.policy.name}: other keys gave other counts")
    expect(bound.tally.hit_tokens == reusable_tokens(requests), "the bound is not what the trace has in it")
    return Study(bound, tuple(found), _facts(requests, trace_blocks))


def _run(path: Path, requests: Sequence[Request], cases: Sequence[Case], processes: int) -> Iterator[Row]:
    """The rows of ``cases``, in that order."""
    if processes == 1:
        yield from (case.run(requests) for case in cases)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), _load, (path,)) as pool:
        yield from pool.map(_run_loaded, cases)


_loaded: list[Request] = []
"""In a process of the pool: the trace, read once."""


def _load(path: Path) -> None:
    _loaded[:] = read_trace(path)


def _run_loaded(case: Case) -> Row:
    return case.run(_loaded)


def _facts(requests: Sequence[Request], trace_blocks: int) -> dict[str, int]:
    return {
        "requests": len(requests),
        "seconds": requests[-1].timestamp // 1000,
        "prompt_tokens": sum(request.input_length for request in requests),
        "block_tokens": BLOCK_TOKENS,
        "full_blocks": sum(len(request.full_block_ids) for request in requests),
        "distinct_blocks": trace_blocks,
        "longest_prompt_blocks": max(len(request.full_block_ids) for request in requests),
    }
