"""Finding a prompt's blocks among those on the disk: by the tier's books, without touching the disk."""

from __future__ import annotations

import random
from pathlib import Path

from benchmarks.figures import LIMIT, Figure, Goal
from benchmarks.leader.index import BATCH_BLOCKS, LARGE_BLOCKS, PROMPT_BLOCKS, new_hashes
from benchmarks.suite import expect
from benchmarks.timing import timed
from kvbm_core.blocks.slot_tier import BlockTier, protect_nothing
from kvbm_core.clock import SystemClock
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.types import BlockKey, Tier

IN_ORDER = Goal("lookup of 8,192 keys, 1M on disk, stored in order, no I/O", "ms", 1.0, "lower", LIMIT)
SCATTERED = Goal("lookup of 8,192 keys, 1M on disk, scattered, no I/O", "ms", 1.0, "lower", LIMIT)
GOALS = (IN_ORDER, SCATTERED)
WARM_UP = 1


def measure(rounds: int, seed: int, num_resident: int = LARGE_BLOCKS) -> list[Figure]:
    """Both figures. WrongAnswer if a lookup is wrong, or moved a byte by a system call."""
    draw = random.Random(f"lookup {seed}")
    hashes = new_hashes(draw, num_resident)
    tier = full_tier(hashes)
    samples: dict[Goal, list[float]] = {goal: [] for goal in GOALS}
    for number in range(rounds + WARM_UP):
        for goal in GOALS:
            # New objects, as a request brings them, and another prompt each time.
            prompt = [BlockKey(bytes(bytearray(each))) for each in _prompt(hashes, goal, draw)]
            seconds = timed_without_io(tier, prompt)
            if number >= WARM_UP:
                samples[goal].append(1000 * seconds)
    return [Figure(goal, tuple(samples[goal])) for goal in GOALS]


def full_tier(hashes: list[bytes]) -> BlockTier:
    """The disk tier's books with all of ``hashes``, stored in batches as an engine's steps bring them."""
    tier = BlockTier(Tier.DISK, LruPolicy(), SystemClock())
    tier.grow(len(hashes))
    for start in range(0, len(hashes), BATCH_BLOCKS):
        tier.commit(
            tier.reserve([BlockKey(each) for each in hashes[start : start + BATCH_BLOCKS]], protect_nothing)
        )
    expect(
        tier.resident_blocks == len(hashes), f"{tier.resident_blocks} of {len(hashes)} blocks are resident"
    )
    return tier


def timed_without_io(tier: BlockTier, prompt: list[BlockKey]) -> float:
    """Seconds of one lookup that finds all of ``prompt``."""
    nothing = _io_between(io_counters(), io_counters())  # what looking at the counters costs by itself
    before = io_counters()
    seconds, found = timed(lambda: tier.match_prefix(prompt))
    moved = _io_between(before, io_counters())
    expect(found == len(prompt), f"a lookup found {found} of {len(prompt)} blocks")
    expect(moved == nothing, f"a lookup did I/O: {moved} instead of {nothing}")
    return seconds


def io_counters() -> dict[str, int]:
    """This thread's bytes and system calls of I/O so far; empty where the kernel does not count them."""
    path = Path("/proc/thread-self/io")
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, value in (line.split(":") for line in lines)}


def _io_between(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    # How many digits the counters have is part of what reading them moves: calls and disk bytes do not depend
    # on it.
    names = ("syscr", "syscw", "read_bytes", "write_bytes")
    return {name: after[name] - before[name] for name in names if name in after}


def _prompt(hashes: list[bytes], goal: Goal, draw: random.Random) -> list[bytes]:
    if goal is SCATTERED:
        return draw.sample(hashes, PROMPT_BLOCKS)
    start = draw.randrange(len(hashes) // PROMPT_BLOCKS) * PROMPT_BLOCKS
    return hashes[start : start + PROMPT_BLOCKS]
