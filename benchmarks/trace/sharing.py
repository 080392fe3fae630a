"""What an engine that comes later finds: ``python -m benchmarks.trace.sharing TRACE.jsonl``.

One engine serves half of the trace. Then a second, cold one that shares a store with it joins, and each
serves every other request; or the first is killed, and one that starts on its disk serves the rest. Under
each rule of `python -m benchmarks.trace`: hits of the engine that came, and what was written. And what rules
could reach that store what was used so often, or that know the future, if nothing were ever forgotten.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import typer
from rich.table import Table

from benchmarks.console import report_console
from benchmarks.trace.policies import COMPARED
from kvbm_core.cli.replay import load_trace
from kvbm_core.errors import Outcome
from kvbm_core.replay.machine import Policy, Replay, Sizes
from kvbm_core.replay.study import Size
from kvbm_core.replay.trace import Trace
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.storage.disk.recovery import Found
from kvbm_core.tiers.keyed import KeyedOptions, keyed_tier
from kvbm_core.tiers.lower import LowerTierMaker
from kvbm_core.transfer.plan import OrderKind, TierOrder
from kvbm_core.types import BlockKey, Tier

STORE = "store"
USES = (2, 3, 4)


class Engine(Replay):
    """A Replay with a disk or, if ``shared`` is given, with a store that keeps what is in it. ``on_disk``:
    what a restart would find.
    """

    _options = LeaderOptions(fetch_wait_s=1.0)

    def __init__(
        self,
        sizes: Sizes,
        rule: Policy,
        trace: Trace,
        *,
        shared: set[BlockKey] | None = None,
        found: Sequence[Found] = (),
    ) -> None:
        self._shared = shared
        self.on_disk = {record.slot: record for record in found}
        super().__init__(sizes, rule, trace.block_tokens, found=found)

    def _lower_tiers(self, sizes: Sizes, policy: Policy) -> tuple[LowerTierMaker, ...]:
        if self._shared is None:
            return super()._lower_tiers(sizes, policy)
        options = KeyedOptions(always_loads=True)
        return (keyed_tier(STORE, Tier.REMOTE, policy.make(self._clock), options),)

    def _do(self, order: TierOrder) -> Mapping[int, Outcome]:
        shared = self._shared
        if shared is None:
            for key, slot in zip(order.keys, order.places, strict=True):
                self.on_disk[slot] = Found(slot, key, order.job_id)
            return {}
        if order.kind is OrderKind.STORE:
            shared.update(order.keys)
        places = range(len(order.keys)) if order.kind is OrderKind.FIND else order.slots
        return {
            place: Outcome.MISS for place, key in zip(places, order.keys, strict=True) if key not in shared
        }

    @property
    def from_store_blocks(self) -> int:
        """Blocks that came from the store and that a request has used, or will."""
        return int(self._leader.metrics.snapshot()["kvbm_onboard_blocks_o2d"])


class Row(NamedTuple):
    """What the engine that came has found, in tokens, of those that it was asked; and blocks written by all
    engines. ``lower_tokens``: those from the store, or from the disk.
    """

    case: str
    rule: str
    asked_tokens: int
    hit_tokens: int
    lower_tokens: int
    written_blocks: int


def joined(trace: Trace, sizes: Sizes, rule: Policy) -> Row:
    """A second engine joins, and each serves every other request."""
    shared = set[BlockKey]()
    engines = [Engine(sizes, rule, trace, shared=shared) for _ in range(2)]
    half = len(trace.requests) // 2
    for number, request in enumerate(trace.requests):
        engines[number >= half and number % 2].serve(request)
    tally = engines[1].tally
    lower_tokens = engines[1].from_store_blocks * trace.block_tokens
    written_blocks = sum(engine.tally.written_blocks for engine in engines)
    return Row("joined", rule.name, tally.input_tokens, tally.hit_tokens, lower_tokens, written_blocks)


def restarted(trace: Trace, sizes: Sizes, rule: Policy) -> Row:
    """The engine is killed after half of the trace, and starts again on its disk."""
    first, half = Engine(sizes, rule, trace), len(trace.requests) // 2
    for request in trace.requests[:half]:
        first.serve(request)
    found = sorted(first.on_disk.values(), key=lambda record: record.sequence)
    second = Engine(sizes, rule, trace, found=[f._replace(sequence=n) for n, f in enumerate(found)])
    for request in trace.requests[half:]:
        second.serve(request)
    tally, written_blocks = second.tally, first.tally.written_blocks + second.tally.written_blocks
    return Row(
        "restarted", rule.name, tally.input_tokens, tally.hit_tokens, tally.disk_tokens, written_blocks
    )


def unlimited(trace: Trace, least_uses: int | None) -> Row:
    """As ``joined``, with engines and a store that forget nothing. Blocks are stored at their n-th use by one
    engine; None: those that the second engine will load, and no others.
    """
    uses, half = (Counter[int](), Counter[int]()), len(trace.requests) // 2
    loaded = set[int]()
    asked_tokens = hit_blocks = 0
    for number, request in enumerate(trace.requests):
        engine = number >= half and number % 2
        if engine:
            asked_tokens += request.prompt_tokens
            for block in request.ids[: request.reusable_blocks]:
                if not uses[1][block]:
                    if uses[0][block] < (least_uses or 1):
                        break
                    loaded.add(block)
                hit_blocks += 1
        uses[engine].update(set(request.ids))
    stored = {block for counts in uses for block, count in counts.items() if count >= (least_uses or 1)}
    rule = "knows what is asked" if least_uses is None else f"used {least_uses} times"
    tokens, written = trace.block_tokens, loaded if least_uses is None else stored
    return Row("unlimited", rule, asked_tokens, hit_blocks * tokens, len(loaded) * tokens, len(written))


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 2 when the trace cannot be used."""
    arguments = _parse(argv)
    try:
        trace = load_trace(arguments.trace, None)
    except typer.Exit as ended:
        return ended.exit_code
    device = arguments.device.of(0, trace, None)
    host = arguments.host.of(device, trace, None)
    disk = arguments.disk.of(host, trace, None)
    rows = [
        case(trace, Sizes(device, host, blocks), rule)
        for case, blocks in ((joined, 0), (restarted, disk))
        for rule in COMPARED
    ]
    rows += [unlimited(trace, least_uses) for least_uses in (None, *USES)]
    table = Table("engine", "rule", "hit %", "from below %", "blocks written", "hits per block written")
    for row in rows:
        shares = (f"{100 * tokens / row.asked_tokens:.1f}" for tokens in (row.hit_tokens, row.lower_tokens))
        each = row.lower_tokens / trace.block_tokens / max(1, row.written_blocks)
        table.add_row(row.case, row.rule, *shares, f"{row.written_blocks:,}", f"{each:.2f}")
    report_console().print(table)
    arguments.output.mkdir(parents=True, exist_ok=True)
    sizes = {"device": device, "host": host, "disk": disk}
    plain = {"trace": trace.name, **sizes, "rows": [row._asdict() for row in rows]}
    (arguments.output / "sharing.json").write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace.sharing", description=__doc__)
    parser.add_argument("trace", type=Path, help="as kvbm replay takes it")
    for name, size, words in (
        ("device", "1000", "blocks of each engine's device"),
        ("host", "4x", "of its host memory"),
        ("disk", "unlimited", "of the disk; a store has room for all"),
    ):
        parser.add_argument(f"--{name}", type=Size.parse, default=size, help=f"{words}; {size}")
    results = Path("benchmarks/results")
    parser.add_argument("--output", type=Path, default=results, help="folder of the report")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
