"""Small engines with disks around a real leader, killed and started again: right bytes, and nothing left at
the end.
"""

from __future__ import annotations

from random import Random
from typing import TypeVar

import pytest

from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.testing.leader_sim import SimShape
from kvbm_core.testing.sim_direct import DirectLeaderSim
from kvbm_core.testing.sim_disk import DiskLeaderSim
from kvbm_core.tiers.groups import GroupSpec
from tests.effort import tries
from tests.property.simulations import play

GROUPS = {
    "one group": (GroupSpec(0, 2),),
    "hybrid": (GroupSpec(0, 2), GroupSpec(1, 2, window_tokens=5)),
    "two block sizes": (GroupSpec(0, 2), GroupSpec(1, 4)),
    "windows only": (GroupSpec(0, 2, window_tokens=4), GroupSpec(1, 4, window_tokens=7)),
    "states": (GroupSpec(0, 2, is_state=True), GroupSpec(1, 2, is_state=True), GroupSpec(2, 2)),
}
SEEDS_EACH = tries(15, nightly=120)
STEPS = 600
STEPS_AFTER = 300


SimT = TypeVar("SimT", bound=DiskLeaderSim)


def has_states(groups: tuple[GroupSpec, ...]) -> bool:
    """A hit is rarer there: it has to end at one of few states."""
    return any(group.is_state for group in groups)


def sim_of(groups: tuple[GroupSpec, ...], random: Random, kind: type[SimT]) -> SimT:
    """The host is small, so that blocks are often on the disk only."""
    shape = SimShape(
        groups=groups,
        num_slots=random.choice([4, 8, 12]),
        num_device_blocks=random.choice([30, 60]),
        world_size=random.choice([1, 1, 2]),
        failure_rate=random.choice([0.0, 0.05, 0.2]),
        options=LeaderOptions(
            lease_ttl_s=random.choice([0.5, 2.0]),
            share_wait_s=random.choice([0.0, 1.0]),
            share_loads=random.random() < 0.8,
            audit_rate=random.choice([0.0, 0.0, 0.05, 0.3]),
            audit_seed=random.randrange(2**32),
            state_every_tokens=random.choice([0, 4]),
        ),
    )
    num_disk_slots = random.choice([20, 100] if has_states(groups) else [6, 20, 100])
    return kind(shape, random, num_disk_slots=num_disk_slots, uses_filter=random.random() < 0.3)


def run(sim: SimT) -> SimT:
    """Kills strike while it runs; then it ends in order, starts again, and goes on with what is on the
    disks.
    """
    for step in range(STEPS):
        sim.step()
        if step % 25 == 0:
            sim.check_bytes()
    sim.end()
    sim.restart()
    sim.tell_all_found()
    sim.check_bytes()
    for _ in range(STEPS_AFTER):
        sim.step()
    sim.end()
    return sim


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_bytes_stay_right_through_the_disk_and_restarts(groups: tuple[GroupSpec, ...], seed: int) -> None:
    least = {
        "disk_loads": SEEDS_EACH // 10,
        "promoted_blocks": SEEDS_EACH // 3,
        "restart_hits": 1,
        "late_reads": 0 if has_states(groups) else 1,
        "audits_ok": 1,
        "clears": SEEDS_EACH // 3,
    }
    play(
        seed,
        SEEDS_EACH,
        lambda random: run(sim_of(groups, random, DiskLeaderSim)),
        lambda sim: {what: getattr(sim, what) for what in least},
        least,
    )


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_bytes_stay_right_when_disks_are_read_straight_to_devices(
    groups: tuple[GroupSpec, ...], seed: int
) -> None:
    least = {"straight_loads": SEEDS_EACH // 3, "straight_blocks": 0, "disk_loads": 1, "audits_ok": 1}
    sums = play(
        seed,
        SEEDS_EACH,
        lambda random: run(sim_of(groups, random, DirectLeaderSim)),
        lambda sim: {what: getattr(sim, what) for what in least},
        least,
    )
    assert sums["straight_blocks"] > sums["straight_loads"], "never more than a block at a time"
