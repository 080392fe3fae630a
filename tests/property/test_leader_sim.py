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
from tests.property.simulations import play

GROUPS = {
    "one group": (GroupSpec(0, 2),),
    "hybrid": (GroupSpec(0, 2), GroupSpec(1, 2, window_tokens=5)),
    "two block sizes": (GroupSpec(0, 2), GroupSpec(1, 4)),
    "windows only": (GroupSpec(0, 2, window_tokens=4), GroupSpec(1, 4, window_tokens=7)),
    "states": (GroupSpec(0, 2, is_state=True), GroupSpec(1, 2)),
    "three kinds of states": (*(GroupSpec(i, 2, is_state=True) for i in range(3)), GroupSpec(3, 2)),
    "states and windows": (GroupSpec(0, 2), GroupSpec(1, 4, is_state=True), GroupSpec(2, 2, window_tokens=5)),
    "states only": (GroupSpec(0, 2, is_state=True),),
}
SEEDS_EACH = tries(20, nightly=200)
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
            audit_rate=random.choice([0.0, 0.3, 0.3]),
            audit_seed=random.randrange(2**32),
            state_every_tokens=random.choice([0, 4, 8, 100]),
        ),
    )


def run(sim: LeaderSim) -> LeaderSim:
    """To its end."""
    for step in range(STEPS):
        sim.step()
        if step % 25 == 0:
            sim.check_bytes()
    sim.end()
    return sim


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_bytes_stay_right_and_nothing_is_left(groups: tuple[GroupSpec, ...], seed: int) -> None:
    has_states = any(group.is_state for group in groups)  # a hit is rarer: it ends at one of few states
    least = {
        "loads_ok": SEEDS_EACH // (12 if has_states else 4),
        "audits_ok": 0 if has_states else 1,
        "states_loaded": 0,
    }
    sums = play(
        seed,
        SEEDS_EACH,
        lambda random: run(LeaderSim(shape_of(groups, random), random)),
        lambda sim: {what: getattr(sim, what) for what in least},
        least,
    )
    if has_states:
        assert sums["states_loaded"] >= sums["loads_ok"], "something was loaded without a state"
