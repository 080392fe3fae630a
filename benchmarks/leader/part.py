"""The leader's part of the suite."""

from __future__ import annotations

import gc
import importlib.util
import random
from collections.abc import Sequence

from benchmarks.figures import Figure, Goal
from benchmarks.leader import hashing, index, memory, metadata
from benchmarks.leader.index import LARGE_BLOCKS, SMALL_BLOCKS, IndexBench, Resident, new_hashes
from benchmarks.leader.sides import OurSide, Side
from benchmarks.lmcache_package import lmcache_problem
from benchmarks.suite import Findings, Options


class LeaderPart:
    """Metadata alone: no engine runs, no bytes move."""

    name = "leader"
    help = "lookups, eviction, hashing, memory and step metadata, beside vLLM and LMCache"
    goals: Sequence[Goal] = (*index.GOALS, *hashing.GOALS, memory.GOAL, *metadata.GOALS)

    def run(self, options: Options) -> Findings:
        """See Part."""
        has_vllm = importlib.util.find_spec("vllm") is not None
        rounds = options.choose(2, 10, 40)
        options.told("leader: memory")
        remembered = memory.measure(has_vllm, options.seed)
        options.told("leader: hash chains")
        hashed = hashing.measure(rounds, options.seed)
        options.told("leader: metadata of a step")
        planned = metadata.measure(options) if has_vllm else _not_run(metadata.GOALS, "vLLM is not installed")
        looked_up, missing = _measure_indexes(rounds, has_vllm, options)
        settings = {
            "resident": f"{LARGE_BLOCKS:,} blocks of 16 tokens, all slots in use",
            "insert + evict": f"{index.BATCH_BLOCKS} blocks at a time",
            "memory": "growth of a fresh process (RSS)",
            "peers left out": missing or "none",
        }
        return Findings([*looked_up, *hashed, remembered, *planned], (), settings)


def _measure_indexes(rounds: int, has_vllm: bool, options: Options) -> tuple[list[Figure], str]:
    """The figures, and why a peer is missing."""
    draw = random.Random(options.seed)
    hashes = new_hashes(draw, LARGE_BLOCKS)
    sides, missing = _sides(has_vllm, options)
    try:
        residents = []
        for side in sides:
            options.told(f"leader: storing {LARGE_BLOCKS:,} blocks in {side.name}")
            residents.append(Resident.fill(side, hashes))
        small = Resident.fill(OurSide(SMALL_BLOCKS), hashes[:SMALL_BLOCKS])
        # Engines do this too once they have started. It helps whoever keeps objects per block: the peers.
        gc.collect()
        gc.freeze()
        return IndexBench(residents, small, options.seed).measure(rounds, options.told), missing
    finally:
        gc.unfreeze()
        for side in sides:
            side.close()


def _sides(has_vllm: bool, options: Options) -> tuple[list[Side], str]:
    sides: list[Side] = [OurSide(LARGE_BLOCKS)]
    if not has_vllm:
        return sides, "vLLM is not installed"
    from benchmarks.leader.vllm_sides import VllmSide

    sides += [VllmSide(LARGE_BLOCKS, "lru"), VllmSide(LARGE_BLOCKS, "arc")]
    missing = lmcache_problem(options.told)
    if missing is None:
        from benchmarks.leader.lmcache_sides import InProcessSide, L1Side

        sides += [L1Side(LARGE_BLOCKS), InProcessSide(LARGE_BLOCKS)]
    return sides, missing or ""


def _not_run(goals: Sequence[Goal], why: str) -> list[Figure]:
    return [Figure(goal, note=why) for goal in goals]
