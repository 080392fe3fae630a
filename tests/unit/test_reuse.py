"""What is predicted of tiers is what the leader then does."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvbm_core.replay.machine import EVERYTHING, FILTER, POLICIES, Policy, Sizes, replay
from kvbm_core.replay.trace import Trace, request_of
from kvbm_core.sizing.load import Load
from kvbm_core.sizing.reuse import MAX_REFERENCES, Reuse, fit
from tests.unit.test_replay import PROMPTS, SMALL, random_trace, trace_of

MOST_OFF = 0.02
"""What was promised: 2 % of all prompt tokens."""


def naive_counts(trace: Trace, num_slots: int) -> list[int]:
    """Blocks of each request that a list of the last used ones has, by walking through it."""
    recent: list[int] = []
    counts = []
    for request in trace.requests:
        here = set(recent[:num_slots])
        counts.append(sum(block in here for block in request.ids[: request.reusable_blocks]))
        used = set(request.ids)
        recent = [*request.ids, *(block for block in recent if block not in used)]
    return counts


@pytest.mark.parametrize("num_slots", [0, 1, 2, 5, 8, 16, 40, 1000])
def test_one_pass_counts_what_a_walk_through_the_list_does(num_slots: int, rng: random.Random) -> None:
    trace = random_trace(rng)
    assert Reuse(trace).in_reach(num_slots).tolist() == naive_counts(trace, num_slots)


def test_a_single_request_and_requests_without_blocks() -> None:
    lone = Trace("t", 512, [request_of(0, 10, [], 512), request_of(1, 1025, [1, 2], 512)])
    assert Reuse(lone).in_reach(10).tolist() == [0, 0]
    assert Reuse(Trace("t", 512, lone.requests[:1])).hit_rates([1, 5]) == [0.0, 0.0]


@pytest.mark.parametrize("sizes", [Sizes(0, 8, 0), Sizes(2, 8, 0), Sizes(16, 8, 0), Sizes(8, 40, 0)])
def test_without_a_disk_every_block_is_predicted(sizes: Sizes, rng: random.Random) -> None:
    trace = random_trace(rng)
    found, tally = Reuse(trace).found(sizes, FILTER), replay(trace, sizes, FILTER)
    predicted = [512 * int(part.sum()) for part in (found.device, found.host, found.disk)]
    assert predicted == [tally.device_tokens, tally.host_tokens, 0]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("sizes", [Sizes(0, 8, 30), Sizes(8, 16, 40), Sizes(16, 8, 60), Sizes(2, 20, 60)])
def test_with_a_disk_too(sizes: Sizes, policy: Policy, rng: random.Random) -> None:
    trace = random_trace(rng)
    found, tally = Reuse(trace).found(sizes, policy), replay(trace, sizes, policy)
    predicted = [512 * int(part.sum()) for part in (found.device, found.host, found.disk)]
    assert predicted == [tally.device_tokens, tally.host_tokens, tally.disk_tokens]
    assert found.written_blocks == tally.written_blocks


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("sizes", [Sizes(2, 4, 8), Sizes(3, 2, 20), Sizes(9, 3, 50)])
def test_a_host_without_room_for_a_whole_prompt(sizes: Sizes, policy: Policy, rng: random.Random) -> None:
    trace = random_trace(rng)
    reuse = Reuse(trace)
    assert abs(reuse.hit_rate(reuse.found(sizes, policy)) - replay(trace, sizes, policy).hit_rate) <= MOST_OFF


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(EVERYTHING, (2, 4, 4, 10)), (FILTER, (2, 4, 2, 5))],  # as worked out by hand in test_replay.py
)
def test_a_disk_worked_out_by_hand(policy: Policy, expected: tuple[int, ...]) -> None:
    found = Reuse(trace_of(PROMPTS)).found(SMALL, policy)
    sums = [int(part.sum()) for part in (found.device, found.host, found.disk)]
    assert (*sums, found.written_blocks) == expected


def test_a_load_is_predicted_at_six_sizes(rng: random.Random) -> None:
    trace = Load(
        users=10, turns=6, prompt_tokens=900, think_s=20, seconds=240, seed=rng.randrange(1000)
    ).trace(128)
    reuse, whole = Reuse(trace), trace.distinct_blocks
    rates = set()
    for part in (100, 40, 20, 10, 4, 2):
        sizes = Sizes(whole // 200, whole // part, 2 * whole // part)
        for policy in POLICIES:
            predicted = reuse.hit_rate(reuse.found(sizes, policy))
            rates.add(round(predicted, 2))
            assert abs(predicted - replay(trace, sizes, policy).hit_rate) <= MOST_OFF
    assert len(rates) > 3, "sizes that make no difference test nothing"


def test_rates_over_sizes_are_those_of_each_size(rng: random.Random) -> None:
    trace = random_trace(rng)
    reuse, sizes = Reuse(trace), [1, 3, 9, 27, 81]
    rates = reuse.hit_rates(sizes)
    assert rates == sorted(rates)
    for size, rate in zip(sizes, rates, strict=True):
        assert rate == pytest.approx(int(reuse.in_reach(size).sum()) * 512 / trace.prompt_tokens)


def test_a_large_trace_is_looked_at_in_larger_blocks() -> None:
    ids = list(range(1000))
    requests = [request_of(float(i), 4001, ids, 4) for i in range(MAX_REFERENCES // 1000 + 1)]
    trace = Trace("t", 4, requests)
    small = fit(trace)
    assert small.block_tokens == 8
    assert fit(small) is small
    assert np.sum([len(request.ids) for request in small.requests]) <= MAX_REFERENCES
