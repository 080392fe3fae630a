"""Small engines with disks around a real leader, killed and started again: right bytes, and nothing left at
the end.
"""

from __future__ import annotations

from random import Random

import pytest

from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.testing.leader_sim import SimShape
from kvbm_core.testing.sim_disk import DiskLeaderSim
from kvbm_core.tiers.groups import GroupSpec
from tests.effort import tries

GROUPS = {
    "one group": (GroupSpec(0, 2),),
    "hybrid": (GroupSpec(0, 2), GroupSpec(1, 2, window_tokens=5)),
    "two block sizes": (GroupSpec(0, 2), GroupSpec(1, 4)),
    "windows only": (GroupSpec(0, 2, window_tokens=4), GroupSpec(1, 4, window_tokens=7)),
}
SEEDS_EACH = tries(30, nightly=120)
STEPS = 600
STEPS_AFTER = 300


def sim_of(groups: tuple[GroupSpec, ...], random: Random) -> DiskLeaderSim:
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
        ),
    )
    num_disk_slots = random.choice([6, 20, 100])
    return DiskLeaderSim(shape, random, num_disk_slots=num_disk_slots, uses_filter=random.random() < 0.3)


def run(sim: DiskLeaderSim) -> None:
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


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_bytes_stay_right_through_the_disk_and_restarts(groups: tuple[GroupSpec, ...], seed: int) -> None:
    disk_loads = promoted_blocks = restart_hits = late_reads = audits_ok = 0
    for number in range(seed, seed + SEEDS_EACH):
        random = Random(number)
        sim = sim_of(groups, random)
        try:
            run(sim)
        except Exception as error:
            raise AssertionError(f"simulation {number}: {error}") from error
        disk_loads += sim.disk_loads
        promoted_blocks += sim.promoted_blocks
        restart_hits += sim.restart_hits
        late_reads += sim.late_reads
        audits_ok += sim.audits_ok
    assert disk_loads > SEEDS_EACH // 6, "the simulations hardly ever loaded anything from a disk"
    assert promoted_blocks > SEEDS_EACH // 3, "hardly anything was promoted"
    assert restart_hits > 0, "hardly anything was found again after a restart"
    assert late_reads > 0, "no read was late"
    assert audits_ok > 0, "the simulations hardly ever audited anything"
