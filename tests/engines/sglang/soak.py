"""kvbm under SGLang's HiCache for a long time, or for one round.

A real SGLang server on the CPU with small tiers answers clients that share prefixes, so that pages go to
kvbm's file, are evicted and come back.

Twice a round the clients pause: SGLang's tiers are emptied; then kvbm is cleared, detached and attached
again, with prompts asked alone in between.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from tests.engines.sglang.soak_prompts import Askers, Tally, pool_of
from tests.engines.sglang.soak_server import NOTHING, Counts, SoakServer, Usage

BUSY = (
    "offload_no_space",
    "offload_busy",
    "onboard_busy",
)  # a page is not kept or not brought back; that may be
Told = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """How long, and with how many.

    ``fewest_prompts``: what each client asks in each half of a round, however long that takes.

    ``disk_cache_gb``: 0.02 are some 540 pages of the tiny model, fewer than are written in a round of the
    usual length.
    """

    output: Path
    minutes: float = 15.0
    clients: int = 8
    prompts: int = 40
    round_s: float = 20.0
    fewest_prompts: int = 1
    disk_cache_gb: float = 0.02
    seed: int = 0
    is_detached: bool = False
    """Without kvbm: what SGLang holds by itself."""


@dataclass(frozen=True)
class Rule:
    """Samples have grown if the median of their last quarter is above that of their second quarter by more
    than this.

    Fewer than ``fewest`` samples are not judged.
    """

    name: str
    unit: str
    times: float
    plus: float
    fewest: int

    def medians(self, samples: Sequence[float]) -> tuple[float, float] | None:
        """Of the second and of the last quarter."""
        if len(samples) < self.fewest:
            return None
        size = len(samples) // 4
        return median(samples[size : 2 * size]), median(samples[-size:])

    def has_grown(self, samples: Sequence[float]) -> bool:
        """False for too few samples."""
        medians = self.medians(samples)
        return medians is not None and medians[1] > medians[0] * self.times + self.plus


# SGLang on a CPU grows by itself, which ebbs away: without kvbm (--detached) by 247 MiB over its first 512
# answers, and by 1.5 % from the second to the last quarter of 13 minutes. Handles and threads come and go
# with a connection.
RULES = {
    "rss_bytes": Rule("memory of the scheduler", "MiB", times=1.03, plus=0, fewest=30),
    "handles": Rule("file handles of the scheduler", "", times=1.0, plus=2, fewest=4),
    "threads": Rule("threads of the scheduler", "", times=1.0, plus=2, fewest=4),
}


@dataclass(frozen=True)
class Round:
    """One round's sample: usage at its end; what kvbm counted in it before and after it was attached
    again.
    """

    ended_s: float
    answers: int
    usage: Usage
    before: Counts
    after: Counts


@dataclass
class Soak:
    """What happened."""

    tally: Tally
    is_detached: bool = False
    rounds: list[Round] = field(default_factory=list)

    def series(self, name: str) -> list[float]:
        """A quantity of Usage, a sample a round."""
        return [getattr(each.usage, name) for each in self.rounds]

    def complaints(self) -> list[str]:
        """All that was not as it must be, a line each."""
        found = [
            f"{what} ({times} times)" if times > 1 else what for what, times in self.tally.complaints.items()
        ]
        for name, rule in RULES.items():
            if rule.has_grown(self.series(name)):
                found.append(f"{rule.name} grew: {growth(rule, self.series(name))}")
        if not self.rounds:
            found.append("no round was finished")
        if self.is_detached or not self.rounds:
            return found
        if not any(each.before.written_pages > each.before.capacity_pages for each in self.rounds):
            found.append("kvbm's file was never full: nothing was evicted")
        if not any(each.before.read_pages for each in self.rounds):
            found.append("no page came back from kvbm's file")
        return found


async def run_soak(server: SoakServer, options: Options, told: Told) -> Soak:
    """Rounds until the time is over, at least one. ``told`` hears each."""
    async with Askers(server.base_url, pool_of(options.seed, options.prompts), options.seed) as askers:
        soak = Soak(askers.tally, options.is_detached)
        told(f"asking for {options.prompts} prompts, cold and alone")
        await askers.learn()
        started_s = time.monotonic()
        while not soak.rounds or time.monotonic() - started_s < options.minutes * 60:
            answers = askers.tally.answers
            if options.is_detached:
                await _round_detached(askers, options)
                before = after = NOTHING
            else:
                before = await _round(askers, server, options)
                after = server.counts()
            _judge(askers.tally, server, before, after)
            elapsed_s = time.monotonic() - started_s
            sample = Round(elapsed_s, askers.tally.answers - answers, server.usage(), before, after)
            soak.rounds.append(sample)
            told(_line(len(soak.rounds), sample, options, len(askers.tally.complaints)))
        return soak


async def _round(askers: Askers, server: SoakServer, options: Options) -> Counts:
    """What the first of its two instances of kvbm had counted at its end."""
    await askers.play(options.clients, options.round_s / 2, options.fewest_prompts)
    await askers.flush()
    await askers.play(options.clients, options.round_s / 2, options.fewest_prompts)
    await askers.flush()
    before = server.counts()
    await askers.clear()
    await askers.probe(is_stored=False, when="after clear")
    await askers.flush()
    await askers.probe(is_stored=True, when="after flush_cache")
    await askers.flush()
    _judge(askers.tally, server, server.counts())
    await askers.detach()
    await askers.attach()
    await askers.probe(is_stored=True, when="after detach and attach")
    return before


async def _round_detached(askers: Askers, options: Options) -> None:
    if not askers.is_detached:
        await askers.detach()
    for _ in range(2):
        await askers.play(options.clients, options.round_s / 2, options.fewest_prompts)
        await askers.flush()


def _judge(tally: Tally, server: SoakServer, *counts: Counts) -> None:
    for each in counts:
        if each.guarded_errors:
            tally.complaints[f"kvbm caught {each.guarded_errors} errors of its own"] += 1
        for kind in set(each.failures) - set(BUSY):
            tally.complaints[f"kvbm counted failures: {kind}"] += 1
    for line in server.new_errors():
        tally.complaints[f"in the server's log: {line}"] += 1


def _line(number: int, sample: Round, options: Options, num_complaints: int) -> str:
    usage, before = sample.usage, sample.before
    return (
        f"round {number}, {sample.ended_s / 60:.1f} of {options.minutes:g} min: {sample.answers} answers, "
        f"{before.written_pages:,} pages to the disk, {before.read_pages:,} from it, "
        f"{usage.rss_bytes >> 20:,} MiB, "
        f"{usage.handles} handles, {usage.threads} threads, {num_complaints} complaints"
    )


def growth(rule: Rule, samples: Sequence[float]) -> str:
    """The medians that it compares, as text."""
    medians = rule.medians(samples)
    if medians is None:
        return f"not judged with {len(samples)} samples"
    scale = 1 << 20 if rule.unit == "MiB" else 1
    return " → ".join(f"{value / scale:,.1f} {rule.unit}".strip() for value in medians)


def soak_model(model: Path, options: Options, told: Told) -> Soak:
    """Serves the model, soaks it and writes ``soak.json``. ServerError if the server does not start."""
    options.output.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(options.output / "disk", ignore_errors=True)
    server = SoakServer(model, options.output, options.disk_cache_gb)
    try:
        server.start(progress=lambda seconds, _: told(f"starting SGLang's server: {seconds:.0f} s"))
        soak = asyncio.run(run_soak(server, options, told))
    finally:
        server.stop()
        shutil.rmtree(options.output / "disk", ignore_errors=True)
    written = {"rounds": [asdict(each) for each in soak.rounds], "complaints": soak.complaints()}
    written["tally"] = dict(vars(soak.tally))  # asdict breaks a Counter
    (options.output / "soak.json").write_text(json.dumps(written, indent=1) + "\n")
    return soak
