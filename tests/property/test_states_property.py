"""Random conversations with a hybrid model in a host that is too small: what is of no use goes before what
is, hits end where they can, and the books agree.
"""

from __future__ import annotations

from random import Random

import pytest

from kvbm_core.policy.lru import LruPolicy
from kvbm_core.runtime.request import RequestState
from kvbm_core.types import BlockKey
from tests.effort import tries
from tests.unit.states_bench import ATTENTION, BLOCK, STATES, StatesBench

SEEDS = tries(3, nightly=120)
MOST_TOKENS = 80


def next_first(bench: StatesBench) -> list[BlockKey]:
    """The host's blocks that nobody holds, in the order in which they go."""
    policy = bench.tier._policy
    assert isinstance(policy, LruPolicy)
    keys = [key for slots in policy._oldest() for key in bench.tier._registry.keys_in(slots)]
    return [key for key in keys if key is not None]


def num_demoted(bench: StatesBench) -> int:
    """How many of these go before all others."""
    policy = bench.tier._policy
    assert isinstance(policy, LruPolicy)
    return 0 if policy._demoted is None else len(policy._demoted.queue)


def best_end(bench: StatesBench, tokens: list[int], limit: int) -> int:
    """By trying every end: the last one with all of its KV, and a state of each group."""
    for end in range(limit // BLOCK * BLOCK, 0, -BLOCK):
        kv = bench.chain(tokens, ATTENTION)[: end // BLOCK]
        if all(map(bench.tier.contains, [*kv, *bench.states(tokens, [end])])):
            return end
    return 0


class Walk:
    """One host, and conversations that part and go on."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.every = random.choice([0, 8, 20, 1000])
        self.num_slots = random.choice([20, 40, 70])
        self.bench = StatesBench(self.num_slots, every_tokens=self.every)
        self.texts: list[list[int]] = [[]]
        self.hits = self.superseded = self.dead = 0

    def turn(self, number: int) -> None:
        """A request comes, is computed in steps, answers and goes."""
        random, bench = self.random, self.bench
        text = random.choice(self.texts)
        tokens = text[: random.choice([len(text), len(text), random.randint(0, len(text))])]
        tokens = tokens + [random.randrange(1000) for _ in range(random.randint(1, 30))]
        prompt = min(len(tokens), MOST_TOKENS - 20)
        tokens = tokens[:prompt] + [random.randrange(1000) for _ in range(random.randint(1, 20))]
        self.texts = [*self.texts[-6:], tokens]
        state = bench.open(f"r{number}")
        asked = tokens[:prompt]
        expected = best_end(bench, asked, prompt - 1)
        assert bench.match(state, asked) == expected
        if expected:
            self.hits += 1
            bench.answer(bench.leader.onboard(state, expected, bench.tables(expected)))
            self.check_order(state, tokens, expected, prompt)
        self.compute(state, tokens, expected, prompt)
        bench.leader.finish(state)
        bench.leader.check_integrity()

    def compute(self, state: RequestState, tokens: list[int], at: int, prompt: int) -> None:
        random, bench = self.random, self.bench
        while at < len(tokens):
            is_prefill = at < prompt
            end = min(prompt, at + random.choice([8, 16])) if is_prefill else at + 1
            if is_prefill and end % BLOCK and end - at >= BLOCK:
                end -= end % BLOCK  # as engines do
            had = self.newest(tokens, at)
            hands_off = random.random() < 0.9
            plan = bench.computes(state, tokens, at, end, prompt=prompt, hands_off=hands_off)
            if plan is not None:
                self.check_own(tokens, had)
                bench.answer(plan)
                self.check_order(state, tokens, end, prompt)
            at = end

    def newest(self, tokens: list[int], limit: int) -> int:
        ends = [end for end in self.bench.ends(tokens) if end <= limit]
        return max(ends, default=0)

    def check_own(self, tokens: list[int], had: int) -> None:
        """What made room for the request's blocks was not its newest state."""
        assert all(map(self.bench.tier.contains, self.bench.states(tokens, [had] if had else [])))

    def check_order(self, state: RequestState, tokens: list[int], computed: int, prompt: int) -> None:
        """Of this path, what can be hit goes after all that cannot, and after older states."""
        bench = self.bench
        kv = bench.chain(tokens, ATTENTION)
        ends = [end for end in bench.ends(tokens) if end <= computed]
        newest = max((end for end in ends if bench.tier.contains(kv[end // BLOCK - 1])), default=0)
        used = {*kv[: newest // BLOCK], *bench.states(tokens, [newest] if newest else [])}
        path = {key for position in (*STATES, ATTENTION) for key in bench.chain(tokens, position)}
        place = {key: i for i, key in enumerate(next_first(bench))}
        first_used = min((place[key] for key in used if key in place), default=len(place))
        others = [place[key] for key in path - used if key in place]
        if others and newest:
            assert max(others) < first_used
            self.dead += 1
        # A state of the answer that was followed is among what goes before all others.
        ends = [end for end in bench.ends(tokens) if prompt < end < newest]
        if self.every == 1000 and ends and state.marks.spare_tokens == newest:
            followed = {key for end in ends for key in bench.states(tokens, [end])} & place.keys()
            if followed:
                self.superseded += 1
                assert max(place[key] for key in followed) < num_demoted(bench)


@pytest.mark.parametrize("number", range(SEEDS))
def test_what_cannot_be_hit_goes_before_what_can(number: int, seed: int) -> None:
    walk = Walk(Random(seed + number))
    for turn in range(25):
        walk.turn(turn)
    walk.bench.assert_idle()
    assert walk.dead, "there was nothing that could not be hit"


def test_conversations_hit_and_answers_go_over_blocks(seed: int) -> None:
    hits = superseded = 0
    for number in range(6):
        walk = Walk(Random(seed + 100 + number))
        walk.every = 1000
        walk.bench = StatesBench(walk.num_slots, every_tokens=1000)
        for turn in range(30):
            walk.turn(turn)
        hits, superseded = hits + walk.hits, superseded + walk.superseded
    assert hits > 6 and superseded > 6
