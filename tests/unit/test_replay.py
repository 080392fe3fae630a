"""Serving a trace without an engine: what is counted, worked out by hand, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from kvbm_core.errors import IntegrityError
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.replay import study as study_module
from kvbm_core.replay.machine import (
    EVERYTHING,
    FILTER,
    POLICIES,
    Policy,
    Replay,
    Sizes,
    Tally,
    replay,
    reusable_tokens,
)
from kvbm_core.replay.study import Size, Study, cases_of, study
from kvbm_core.replay.trace import Prefixes, Request, Trace, request_of
from kvbm_core.types import BlockKey

TOKENS = 512
# Two blocks fit on the device, four in the host, eight on disk. Prompts, and the second at which they come.
PROMPTS = (
    (0, (1, 2)),
    (1, (3, 4)),
    (2, (1, 2)),  # in the host: hits; the filter lets them go to disk
    (3, (5, 6)),  # the host forgets 3 and 4
    (4, (7, 8)),  # and 1 and 2; a disk to which all goes is full
    (5, (1, 2)),  # on disk; promoted, the host forgets 5 and 6
    (6, (1, 2, 9)),  # on the device; 9 takes 8's place in the host, and on a full disk that of 4
    (7, (3, 4)),  # a disk to which all went has 3 still; the host forgets 7 and 9
    (8, (1, 2, 9)),  # the host has the head; the tail is on disk if all went there
)
SMALL = Sizes(2, 4, 8)
NUM_TOKENS = 9 * (2 * TOKENS + 1) + 2 * TOKENS


def request(second: float, ids: Sequence[int]) -> Request:
    """A prompt of these blocks and one token more."""
    return request_of(second, len(ids) * TOKENS + 1, ids, TOKENS)


def trace_of(prompts: Sequence[tuple[float, Sequence[int]]] = PROMPTS) -> Trace:
    return Trace("test", TOKENS, [request(second, ids) for second, ids in prompts])


def random_trace(rng: random.Random, num_requests: int = 200) -> Trace:
    """Prompts that share prefixes."""
    prefixes = Prefixes()
    prompts = []
    for second in range(num_requests):
        words = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        prompts.append((second, prefixes.number(words)))
    return trace_of(prompts)


def tally_of(device: int, host: int, disk: int, written: int) -> Tally:
    """In blocks."""
    in_tiers = (TOKENS * device, TOKENS * host, TOKENS * disk)
    return Tally(NUM_TOKENS, *in_tiers, NUM_TOKENS - sum(in_tiers), written, disk)


# ---------------------------------------------------------------- one replay


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (EVERYTHING, tally_of(2, 4, 4, 10)),
        (FILTER, tally_of(2, 4, 2, 5)),  # 3, 4 and 9 were computed again
    ],
)
def test_what_each_policy_makes_of_a_trace_worked_out_by_hand(policy: Policy, expected: Tally) -> None:
    assert replay(trace_of(), SMALL, policy) == expected


@pytest.mark.parametrize(("policy", "written"), [(FILTER, 2), (EVERYTHING, 10)])
def test_time_is_the_traces(policy: Policy, written: int) -> None:
    late = [*PROMPTS[:-2], *((second + 600, ids) for second, ids in PROMPTS[-2:])]
    assert replay(trace_of(late), SMALL, policy).written_blocks == written


def test_what_the_device_has_used_again_stays_there() -> None:
    prompts = [
        (second, ids) for second, ids in enumerate([(1, 2), (3, 4), (1, 2), (5, 6), (1, 2, 7), (3, 4)])
    ]
    tally = replay(trace_of(prompts), Sizes(4, 4, 8), FILTER)
    # 1 and 2 twice; 7 takes the place of 6; 3 and 4 have left the host as well.
    assert (tally.device_tokens, tally.host_tokens, tally.disk_tokens) == (4 * TOKENS, 0, 0)


def test_without_a_disk_and_without_a_cache_on_the_device() -> None:
    tally = replay(trace_of(), Sizes(2, 4, 0), FILTER)
    assert (tally.device_tokens, tally.host_tokens, tally.disk_tokens) == (2 * TOKENS, 4 * TOKENS, 0)
    tally = replay(trace_of(), Sizes(0, 4, 0), FILTER)
    assert (tally.device_tokens, tally.host_tokens) == (0, 6 * TOKENS)


def test_writes_for_each_read() -> None:
    assert replay(trace_of(), SMALL, EVERYTHING).writes_per_read == 2.5
    assert replay(trace_of(PROMPTS[:2]), SMALL, EVERYTHING).writes_per_read is None


def test_one_token_is_left_to_compute_and_a_block_that_is_not_full_is_no_block() -> None:
    whole = request_of(0, 2 * TOKENS, [1, 2], TOKENS)
    assert (whole.prompt_blocks, whole.reusable_blocks) == (2, 1)
    tally = replay(Trace("t", TOKENS, [whole, whole]), SMALL, EVERYTHING)
    assert (tally.device_tokens, tally.computed_tokens) == (TOKENS, 3 * TOKENS)
    short = request_of(0, TOKENS - 1, [], TOKENS)
    assert replay(Trace("t", TOKENS, [short, short]), SMALL, EVERYTHING).computed_tokens == 2 * TOKENS - 2
    assert request_of(0, 0, [], TOKENS).reusable_blocks == 0


def test_an_answer_is_found_by_the_next_turn() -> None:
    first = request_of(0, TOKENS + 1, [1, 2, 3], TOKENS)  # a block of prompt, two of answer
    second = request_of(1, 4 * TOKENS, [1, 2, 3, 4], TOKENS)
    assert first.prompt_blocks == 1
    tally = replay(Trace("t", TOKENS, [first, second]), Sizes(0, 8, 0), EVERYTHING)
    assert tally.host_tokens == 3 * TOKENS


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_no_policy_finds_more_than_there_is_and_other_keys_give_the_same(
    policy: Policy, rng: random.Random
) -> None:
    trace = random_trace(rng)
    tally = replay(trace, Sizes(8, 16, 40), policy)
    assert 0 < tally.hit_tokens <= reusable_tokens(trace)
    assert tally == replay(trace, Sizes(8, 16, 40), policy, seed=2)


def test_with_room_for_everything_all_that_there_is_is_found(rng: random.Random) -> None:
    trace = random_trace(rng)
    for sizes in (Sizes(8, 1000, 1000), Sizes(8, 16, 1000), Sizes(8, 1000, 0)):
        assert replay(trace, sizes, EVERYTHING).hit_tokens == reusable_tokens(trace)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda host, disk: (max(0, host - 1), disk), "kvbm_matched_tokens says 2, counted were 1"),
        (lambda host, disk: (disk, host), "kvbm_onboard_blocks_d2d says 0, counted were 2"),
    ],
)
def test_counts_that_the_product_does_not_confirm_are_no_result(
    wrong: Callable[[int, int], tuple[int, int]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_up = Replay._bring_up
    monkeypatch.setattr(Replay, "_bring_up", lambda *args: wrong(*bring_up(*args)))
    with pytest.raises(IntegrityError, match=said):
        replay(trace_of(PROMPTS[:3]), SMALL, EVERYTHING)


def test_it_says_how_far_it_is(rng: random.Random) -> None:
    told: list[int] = []
    replay(random_trace(rng, 300), SMALL, FILTER, told=told.append)
    assert told == [0, 256]


# ---------------------------------------------------------------- a study


def small_study(told: Callable[[int], None] = lambda done: None) -> Study:
    sizes = (Size(blocks=2), [Size(factor=2)], [None, Size(factor=2), Size(blocks=5), Size()])
    trace = trace_of()
    return study(trace, cases_of(trace, POLICIES, sizes), told=told)


def test_a_study_has_every_policy_under_every_pair_of_sizes() -> None:
    told: list[int] = []
    found = small_study(told.append)
    assert [(row.policy.name, row.sizes) for row in found.rows] == [
        ("all", Sizes(2, 4, 0)),
        *((policy.name, Sizes(2, 4, disk)) for disk in (8, 5, 9) for policy in POLICIES),
    ]
    assert found.rows[1].tally == tally_of(2, 4, 4, 10)
    assert found.bound.tally.hit_tokens == reusable_tokens(trace_of()) == 11 * TOKENS
    assert found.trace["distinct_blocks"] == 9 and found.trace["prompt_tokens"] == NUM_TOKENS
    assert told == list(range(1, 10))


def test_several_processes_find_the_same(rng: random.Random) -> None:
    trace = random_trace(rng)
    cases = cases_of(trace, POLICIES, (Size(blocks=8), [Size(factor=2)], [Size(factor=2)]))
    assert study(trace, cases, processes=2) == study(trace, cases)


class KeyDependent(AdmitAll):
    """Takes what a good policy must not know: what the bytes of a key happen to be."""

    def admit(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """A coin that the hash tossed."""
        return [key for key in keys if key[0] % 2]


def test_counts_that_depend_on_keys_are_no_result() -> None:
    trace = random_trace(random.Random(1))
    coin = Policy("coin", lambda clock: KeyDependent())
    cases = cases_of(trace, [coin], (Size(blocks=8), [Size(factor=2)], [Size(factor=2)]))
    with pytest.raises(IntegrityError, match="coin: other keys gave other counts"):
        study(trace, cases)


def test_a_bound_that_is_not_the_traces_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_module, "reusable_tokens", lambda trace: reusable_tokens(trace) + 1)
    with pytest.raises(IntegrityError, match="the bound"):
        small_study()


@pytest.mark.parametrize(
    ("text", "blocks"),
    [("4x", 40), ("1.5x", 15), ("7", 7), ("1024t", 2), ("1t", 1), ("0.5GB", 500), ("unlimited", 9)],
)
def test_sizes(text: str, blocks: int) -> None:
    assert Size.parse(text).of(10, trace_of(), 1_000_000) == blocks
    assert str(Size.parse(text)) == text


@pytest.mark.parametrize("text", ["", "x", "0", "-1x", "4y", "nanGB", "infx", "1e3"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size; write 80GB"):
        Size.parse(text)


def test_gigabytes_need_a_model() -> None:
    with pytest.raises(ValueError, match=r"80GB: .* give --model"):
        Size.parse("80GB").of(1, trace_of(), None)
