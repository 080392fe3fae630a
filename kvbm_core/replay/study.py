"""Every policy under every pair of sizes, on all cores: rows of what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from typing import Any

from kvbm_core.errors import IntegrityError
from kvbm_core.replay.machine import EVERYTHING, Policy, Sizes, Tally, replay, reusable_tokens
from kvbm_core.replay.trace import Trace

UNLIMITED = "unlimited"


@dataclass(frozen=True, slots=True)
class Size:
    """Of one tier: ``factor`` times the tier above it, or ``blocks``, ``tokens`` or ``gb``; with none of
    them, room for the whole trace.
    """

    factor: float = 0
    blocks: int = 0
    tokens: int = 0
    gb: float = 0

    @staticmethod
    def parse(text: str) -> Size:
        """``4x``, ``4000`` (blocks), ``500000t`` (tokens), ``80GB`` or ``unlimited``; ValueError, one line,
        for anything else.
        """
        if text == UNLIMITED:
            return Size()
        try:
            if text.lower().endswith("gb"):
                size = Size(gb=float(text[:-2]))
            elif text.endswith("x"):
                size = Size(factor=float(text[:-1]))
            elif text.endswith("t"):
                size = Size(tokens=int(text[:-1]))
            else:
                size = Size(blocks=int(text))
        except ValueError:
            size = Size()
        if not 0 < max(size.factor, size.blocks, size.tokens, size.gb) < float("inf"):
            raise ValueError(
                f"{text!r} is no size; write 80GB, 4x, 500000t (tokens), 4000 (blocks), unlimited"
            )
        return size

    def of(self, above_blocks: int, trace: Trace, block_bytes: int | None) -> int:
        """In blocks of ``trace``, at least one. ``block_bytes``: of one of them; ValueError if that is not
        known and needed.
        """
        if self.gb and not block_bytes:
            raise ValueError(f"{self}: how many tokens that is depends on the model; give --model")
        blocks = self.blocks or int(self.factor * above_blocks) or self.tokens // trace.block_tokens
        if self.gb and block_bytes:
            blocks = int(self.gb * 1e9 / block_bytes)
        if self == Size():
            return trace.distinct_blocks
        return max(1, blocks)

    def __str__(self) -> str:
        if self.factor:
            return f"{self.factor:g}x"
        if self.gb:
            return f"{self.gb:g}GB"
        if self.tokens:
            return f"{self.tokens}t"
        return f"{self.blocks}" if self.blocks else UNLIMITED


@dataclass(frozen=True, slots=True)
class Row:
    """One replay. ``host`` and ``disk`` are the sizes as they were asked for; no ``disk``: none."""

    policy: Policy
    host: Size
    disk: Size | None
    sizes: Sizes
    tally: Tally

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
            "disk": "none" if self.disk is None else str(self.disk),
            **self.sizes._asdict(),
            **asdict(tally),
            "device_hit_rate": self.share(tally.device_tokens),
            "host_hit_rate": self.share(tally.host_tokens),
            "disk_hit_rate": self.share(tally.disk_tokens),
            "hit_rate": tally.hit_rate,
            "writes_per_read": tally.writes_per_read,
        }


@dataclass(frozen=True, slots=True)
class Study:
    """``bound``: unlimited host, everything kept. ``trace`` says what was replayed."""

    bound: Row
    rows: tuple[Row, ...]
    trace: dict[str, int]


@dataclass(frozen=True, slots=True)
class Case:
    """A replay to be run."""

    policy: Policy
    host: Size
    disk: Size | None
    sizes: Sizes
    seed: int

    def run(self, trace: Trace) -> Row:
        """Replays it."""
        return Row(
            self.policy, self.host, self.disk, self.sizes, replay(trace, self.sizes, self.policy, self.seed)
        )


def cases_of(
    trace: Trace,
    policies: Sequence[Policy],
    sizes: tuple[Size, Sequence[Size], Sequence[Size | None]],
    *,
    seed: int = 1,
    block_bytes: int | None = None,
) -> list[Case]:
    """The bound, then each policy under each of ``sizes``: the device's, hosts and disks. Without a disk the
    policy makes no difference: one of them is enough. ValueError, one line, for a size that means nothing.
    """
    device, hosts, disks = sizes
    device_blocks = device.of(0, trace, block_bytes)
    whole = trace.distinct_blocks
    cases = [Case(EVERYTHING, Size(), Size(), Sizes(device_blocks, whole, whole), seed)]
    for host in hosts:
        host_blocks = host.of(device_blocks, trace, block_bytes)
        for disk in disks:
            disk_blocks = 0 if disk is None else disk.of(host_blocks, trace, block_bytes)
            tried = policies if disk_blocks else policies[:1]
            cases += [
                Case(policy, host, disk, Sizes(device_blocks, host_blocks, disk_blocks), seed)
                for policy in tried
            ]
    return cases


def study(
    trace: Trace,
    cases: Sequence[Case],
    *,
    processes: int = 1,
    told: Callable[[int], None] = lambda done: None,
) -> Study:
    """Runs ``cases``, of which the first is the bound; ``told`` hears how many replays have been run of one
    more than there are.

    IntegrityError if counts do not add up, if the bound is not what a cache that never forgets would find, or
    if other keys (another order in every set and dict of keys) give other counts.
    """
    # Where most is evicted, once more.
    again = min(cases, key=lambda case: (case.sizes.disk_blocks or case.sizes.host_blocks, case.policy.name))
    rows = []
    for row in _run(trace, [*cases, replace(again, seed=again.seed + 1)], processes):
        rows.append(row)
        told(len(rows))
    bound, *found, repeated = rows
    if repeated.tally != rows[cases.index(again)].tally:
        raise IntegrityError(f"{repeated.policy.name}: other keys gave other counts")
    if bound.tally.hit_tokens != reusable_tokens(trace):
        raise IntegrityError("the bound is not what the trace has in it")
    return Study(bound, tuple(found), facts(trace))


def _run(trace: Trace, cases: Sequence[Case], processes: int) -> Iterator[Row]:
    """The rows of ``cases``, in that order."""
    if processes == 1:
        yield from (case.run(trace) for case in cases)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), _keep, (trace,)) as pool:
        yield from pool.map(_run_kept, cases)


_kept: list[Trace] = []
"""In a process of the pool: the trace, sent once."""


def _keep(trace: Trace) -> None:
    _kept[:] = [trace]


def _run_kept(case: Case) -> Row:
    return case.run(_kept[0])


def facts(trace: Trace) -> dict[str, int]:
    """What is in a trace, for reports."""
    return {
        "requests": len(trace.requests),
        "seconds": int(trace.seconds),
        "prompt_tokens": trace.prompt_tokens,
        "block_tokens": trace.block_tokens,
        "full_blocks": sum(len(request.ids) for request in trace.requests),
        "distinct_blocks": trace.distinct_blocks,
        "longest_prompt_blocks": max(len(request.ids) for request in trace.requests),
    }
