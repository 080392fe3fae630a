"""Small engines with three lower tiers at once, a disk and two stores that other engines use too: right bytes
through everything.
"""

from __future__ import annotations

from random import Random

import pytest

from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.testing.leader_sim import SimShape
from kvbm_core.testing.sim_store import StoreLeaderSim
from kvbm_core.tiers.groups import GroupSpec
from tests.effort import tries
from tests.property.simulations import play
from tests.property.test_leader_sim_disk import GROUPS, has_states, run

SEEDS_EACH = tries(15, nightly=120)


def sim_of(groups: tuple[GroupSpec, ...], random: Random) -> StoreLeaderSim:
    """Disk and host are small, so that blocks are often in a store only."""
    shape = SimShape(
        groups=groups,
        num_slots=random.choice([4, 8, 16, 40]),
        num_device_blocks=random.choice([30, 60]),
        world_size=random.choice([1, 1, 2]),
        failure_rate=random.choice([0.0, 0.05, 0.2]),
        options=LeaderOptions(
            lease_ttl_s=random.choice([0.5, 2.0]),
            share_wait_s=random.choice([0.0, 1.0]),
            fetch_wait_s=random.choice([0.0, 1.0, 5.0]),
            share_loads=random.random() < 0.8,
        ),
    )
    num_disk_slots = random.choice([4, 20])
    return StoreLeaderSim(shape, random, num_disk_slots=num_disk_slots, uses_filter=random.random() < 0.3)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_bytes_stay_right_through_three_lower_tiers_and_restarts(
    groups: tuple[GroupSpec, ...], seed: int
) -> None:
    is_rare = has_states(groups)
    least = {
        "fetched": SEEDS_EACH // (3 if is_rare else 1),
        "stored": SEEDS_EACH,
        "late_fetches": 0 if is_rare else 1,
        "disk_loads": 0 if is_rare else 1,
    }
    play(seed, SEEDS_EACH, lambda random: run(sim_of(groups, random)), seen, least)


def test_prompts_for_which_the_host_is_too_small_are_not_fetched_again_and_again() -> None:
    """A life in which the last prompts of those who ask once pushed each other out of the host, for ever."""
    run(sim_of(GROUPS["hybrid"], Random(1126208005)))


def seen(sim: StoreLeaderSim) -> dict[str, float]:
    """What it did that not each of them does."""
    return {
        "fetched": sim.moved("fetched"),
        "stored": sim.moved("stored"),
        "late_fetches": sim.late_fetches,
        "disk_loads": sim.disk_loads,
    }
