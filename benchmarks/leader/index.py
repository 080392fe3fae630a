"""Lookup, the whole read path, and insert + evict, on indexes that are full."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.figures import LIMIT, Figure, Goal
from benchmarks.leader.sides import Side
from benchmarks.suite import expect
from benchmarks.timing import rotated, timed

HASH_BYTES = 32
PROMPT_BLOCKS = 8192
BATCH_BLOCKS = 512
CHURN_BATCHES = 8
SMALL_BLOCKS, LARGE_BLOCKS = 100_000, 1_000_000

READ = Goal("128k prompt, 1M resident: match to release, stored in order", "ms", 0.2, "lower")
READ_SCATTERED = Goal("128k prompt, 1M resident: match to release, scattered", "ms", 0.2, "lower")
LOOKUP = Goal("128k prompt, 1M resident: lookup alone, stored in order", "ms", 0.5, "lower")
LOOKUP_SCATTERED = Goal("128k prompt, 1M resident: lookup alone, scattered", "ms", 0.5, "lower")
MISS = Goal("128k prompt, 1M resident: lookup that misses", "ms", 0.1, "lower", LIMIT)
CHURN = Goal("insert + evict at 1M resident", "blocks/s", 4.0, "higher")
# A step that grew with the number of blocks would show as 10; twice is left to the processor's caches.
SMALL = "kvbm, 100k resident"
READ_GROWTH = Goal("match to release, 1M resident against 100k", "ms", 2.0, "lower", SMALL)
CHURN_GROWTH = Goal("insert + evict, 1M resident against 100k", "us/block", 2.0, "lower", SMALL)
GOALS = (READ, READ_SCATTERED, LOOKUP, LOOKUP_SCATTERED, MISS, CHURN, READ_GROWTH, CHURN_GROWTH)

Samples = dict[str, list[float]]


@dataclass
class Resident:
    """A side, full, and what it was given, oldest first."""

    side: Side
    hashes: list[bytes]

    @staticmethod
    def fill(side: Side, hashes: list[bytes]) -> Resident:
        """Stores everything in prompts of PROMPT_BLOCKS, in batches as an engine's steps bring them."""
        for start in range(0, len(hashes), BATCH_BLOCKS):
            batch = hashes[start : start + BATCH_BLOCKS]
            expect(
                side.store(side.keys(batch)) == len(batch), f"{side.name} did not take a block while filling"
            )
        expect(side.resident() == len(hashes), f"{side.name} holds {side.resident()} of {len(hashes)} blocks")
        return Resident(side, hashes)


class IndexBench:
    """``sides``: ours first, then the peers, all with the same LARGE blocks; ``small``: ours with fewer."""

    def __init__(self, sides: Sequence[Resident], small: Resident, seed: int) -> None:
        self._sides = sides
        self._small = small
        self._everyone = [*sides, small]
        self._draw = random.Random(
            f"rounds {seed}"
        )  # another stream than the one that the resident hashes came from
        self._samples: defaultdict[Goal, Samples] = defaultdict(lambda: defaultdict(list))

    def measure(self, rounds: int, told: Callable[[str], None]) -> list[Figure]:
        """All figures. WrongAnswer if a side gives a wrong answer."""
        for number in range(rounds + 1):
            told(f"leader: lookups, round {number} of {rounds}")
            self._read_round(number)
            if number == 0:
                self._samples.clear()
        for number in range(rounds):
            told(f"leader: insert + evict, round {number + 1} of {rounds}")
            for resident in rotated(self._everyone, number):
                self._churn(resident)
        return [self._figure(goal) for goal in GOALS]

    def _read_round(self, number: int) -> None:
        for resident in rotated(self._everyone, number):
            # Each has a prompt of its own: what was just looked up would still be in the processor's cache.
            self._lookup(resident, self._in_order(resident), LOOKUP, PROMPT_BLOCKS)
            self._read(resident, self._in_order(resident), (READ, READ_GROWTH))
            self._lookup(resident, self._scattered(resident), LOOKUP_SCATTERED, PROMPT_BLOCKS)
            self._read(resident, self._scattered(resident), (READ_SCATTERED,))
            self._lookup(resident, new_hashes(self._draw, PROMPT_BLOCKS), MISS, 0)

    def _in_order(self, resident: Resident) -> list[bytes]:
        start = self._draw.randrange(len(resident.hashes) // PROMPT_BLOCKS) * PROMPT_BLOCKS
        return resident.hashes[start : start + PROMPT_BLOCKS]

    def _scattered(self, resident: Resident) -> list[bytes]:
        return self._draw.sample(resident.hashes, PROMPT_BLOCKS)

    def _read(self, resident: Resident, prompt: list[bytes], goals: Sequence[Goal]) -> None:
        side = resident.side
        keys = side.keys(prompt)
        seconds, found = timed(lambda: side.read(keys))
        expect(found == PROMPT_BLOCKS, f"{side.name} read {found} of {PROMPT_BLOCKS} blocks")
        for goal in goals:
            self._note(resident, goal, 1000 * seconds)

    def _lookup(self, resident: Resident, prompt: list[bytes], goal: Goal, expected: int) -> None:
        side = resident.side
        keys = side.keys(prompt)
        seconds, found = timed(lambda: side.lookup(keys))
        if found is not None:
            expect(found == expected, f"{side.name} found {found} of {expected} blocks")
            self._note(resident, goal, 1000 * seconds)

    def _churn(self, resident: Resident) -> None:
        side = resident.side
        hashes = new_hashes(self._draw, CHURN_BATCHES * BATCH_BLOCKS)
        batches = [
            side.keys(hashes[start : start + BATCH_BLOCKS]) for start in range(0, len(hashes), BATCH_BLOCKS)
        ]
        seconds, stored = timed(lambda: sum(side.store(batch) for batch in batches))
        expect(stored == len(hashes), f"{side.name} stored {stored} of {len(hashes)} blocks")
        # The last batch: a policy may give up new blocks for such as were used twice (ARC does).
        last = side.keys(hashes[-BATCH_BLOCKS:])
        expect(side.lookup(last) in (None, BATCH_BLOCKS), f"{side.name} lost what it had just stored")
        expect(side.resident() == len(resident.hashes), f"{side.name} evicted other than was stored")
        self._note(resident, CHURN, len(hashes) / seconds)
        self._note(resident, CHURN_GROWTH, 1e6 * seconds / len(hashes))

    def _note(self, resident: Resident, goal: Goal, value: float) -> None:
        name = SMALL if resident is self._small else resident.side.name
        self._samples[goal][name].append(value)

    def _figure(self, goal: Goal) -> Figure:
        samples = {name: tuple(values) for name, values in self._samples[goal].items()}
        ours = samples.pop(self._sides[0].side.name)
        growth = goal.against == SMALL
        return Figure(
            goal, ours, {name: values for name, values in samples.items() if (name == SMALL) == growth}
        )


def new_hashes(draw: random.Random, count: int) -> list[bytes]:
    """Hashes that nobody has seen."""
    blob = draw.randbytes(count * HASH_BYTES)
    return [blob[start : start + HASH_BYTES] for start in range(0, len(blob), HASH_BYTES)]
