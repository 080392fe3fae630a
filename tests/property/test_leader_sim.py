"""Hundreds of small engines around a real leader, each from one seed: right bytes, and nothing left at the
end.
"""

from __future__ import annotations

from random import Random

import pytest

from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.testing.leader_sim import LeaderSim, SimShape
from kvbm_core.tiers.groups import GroupSpec
from tests.effort import tries

GROUPS = {
    "one group": (GroupSpec(0, 2),),
    "hybrid": (GroupSpec(0, 2), GroupSpec(1, 2, window_tokens=5)),
    "two block sizes": (GroupSpec(0, 2), GroupSpec(1, 4)),
    "windows only": (GroupSpec(0, 2, window_tokens=4), GroupSpec(1, 4, window_tokens=7)),
}
SEEDS_EACH = tries(40, nightly=200)
STEPS = 300


def shape_of(groups: tuple[GroupSpec, ...], random: Random) -> SimShape:
    """Anything from a tier of one block to one with room for all."""
    return SimShape(
        groups=groups,
        num_slots=random.choice([1, 3, 8, 20, 100]),
        num_device_blocks=random.choice([30, 60]),
        world_size=random.choice([1, 1, 2]),
        failure_rate=random.choice([0.0, 0.0, 0.1, 0.4]),
        options=LeaderOptions(
            lease_ttl_s=random.choice([0.5, 2.0]),
            share_wait_s=random.choice([0.0, 1.0]),
            share_loads=random.random() < 0.8,
            audit_rate=random.choice([0.0, 0.0, 0.05, 0.3]),
            audit_seed=random.randrange(2**32),
        ),
    )


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_bytes_stay_right_and_nothing_is_left(groups: tuple[GroupSpec, ...], seed: int) -> None:
    loads_ok = audits_ok = 0
    for number in range(seed, seed + SEEDS_EACH):
        random = Random(number)
        sim = LeaderSim(shape_of(groups, random), random)
        try:
            for step in range(STEPS):
                sim.step()
                if step % 25 == 0:
                    sim.check_bytes()
            sim.end()
        except Exception as error:
            raise AssertionError(f"simulation {number}: {error}") from error
        loads_ok += sim.loads_ok
        audits_ok += sim.audits_ok
    assert loads_ok > SEEDS_EACH // 4, "the simulations hardly ever loaded anything"
    assert audits_ok > 0, "the simulations hardly ever audited anything"
