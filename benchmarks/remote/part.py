"""Stores that machines share."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.figures import Figure, Goal
from benchmarks.remote import mooncake, peers, peers_nixl, s3, steps, valkey
from benchmarks.suite import CannotRun, Findings, Options

STORES = (s3, valkey, mooncake, steps, peers, peers_nixl)


class RemotePart:
    """Each store by itself: one that is not installed does not keep the others from being measured."""

    name = "remote"
    help = "blocks in stores that machines share, beside those stores' own clients"
    goals: Sequence[Goal] = tuple(goal for store in STORES for goal in store.GOALS.values())

    def run(self, options: Options) -> Findings:
        """See Part."""
        figures: list[Figure] = []
        for store in STORES:
            options.told(f"remote: {store.__name__.rpartition('.')[2]}")
            try:
                figures += store.measure(options)
            except CannotRun as reason:
                figures += [Figure(goal, note=str(reason)) for goal in store.GOALS.values()]
        return Findings(figures)
