"""The replay of a trace: what it counts, worked out by hand, and what it refuses to report."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.suite import WrongAnswer
from benchmarks.trace import study as study_module
from benchmarks.trace.__main__ import main
from benchmarks.trace.policies import POLICIES, Policy, RejectFirst
from benchmarks.trace.replay import Replay, Sizes, Tally, replay, reusable_tokens
from benchmarks.trace.requests import BLOCK_TOKENS, Request, TraceError, read_trace
from benchmarks.trace.study import Size, Study, study
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.types import BlockKey

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {policy.name: policy for policy in POLICIES}
# Two blocks fit on the device, four in the host, eight on disk. Prompts, and the second at which they come.
PROMPTS = (
    (0, (1, 2)),
    (1, (3, 4)),
    (2, (1, 2)),  # in the host: hits; the filter lets them go to disk
    (3, (5, 6)),  # the host forgets 3 and 4
    (4, (7, 8)),  # and 1 and 2; a disk to which all goes is full
    (5, (1, 2)),  # on disk; promoted, the host forgets 5 and 6
    (
        6,
        (1, 2, 9),
    ),  # on the device; 9 takes 8's place in the host, and on a full disk that of 4, the oldest tail
    (7, (3, 4)),  # a disk to which all went has 3 still; the host forgets 7 and 9
    (8, (1, 2, 9)),  # the host has the head; the tail is on disk if all went there
)
SMALL = Sizes(2, 4, 8)
NUM_TOKENS = 9 * (2 * BLOCK_TOKENS + 1) + 2 * BLOCK_TOKENS


def request(second: int, ids: Sequence[int]) -> Request:
    """A prompt of these blocks and one token more, which has an id, as in the published traces."""
    return Request(1000 * second, len(ids) * BLOCK_TOKENS + 1, 10, [*ids, 1000 + second])


def requests_of(prompts: Sequence[tuple[int, Sequence[int]]] = PROMPTS) -> list[Request]:
    return [request(second, ids) for second, ids in prompts]


def late(prompts: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, Sequence[int]]]:
    """The last two come ten minutes later."""
    return [*prompts[:-2], *((second + 600, ids) for second, ids in prompts[-2:])]


def tally_of(device: int, host: int, disk: int, written: int) -> Tally:
    """In blocks."""
    in_tiers = (BLOCK_TOKENS * device, BLOCK_TOKENS * host, BLOCK_TOKENS * disk)
    return Tally(NUM_TOKENS, *in_tiers, NUM_TOKENS - sum(in_tiers), written, disk)


def write_trace(path: Path, requests: Sequence[Request]) -> Path:
    lines = (
        {name: getattr(each, name) for name in ("timestamp", "input_length", "output_length", "hash_ids")}
        for each in requests
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


# ---------------------------------------------------------------- one replay


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("AdmitAll", tally_of(2, 4, 4, 10)),
        ("hits alone", tally_of(2, 4, 2, 2)),
        ("FrequencyFilter", tally_of(2, 4, 2, 5)),  # 3, 4 and 9 were computed again
        ("reject first", tally_of(2, 4, 2, 5)),
    ],
)
def test_what_each_policy_makes_of_a_trace_worked_out_by_hand(name: str, expected: Tally) -> None:
    assert replay(requests_of(), SMALL, BY_NAME[name], seed=1) == expected


@pytest.mark.parametrize(("name", "written"), [("FrequencyFilter", 2), ("reject first", 5), ("AdmitAll", 10)])
def test_time_is_the_traces(name: str, written: int) -> None:
    tally = replay(requests_of(late(PROMPTS)), SMALL, BY_NAME[name], seed=1)
    assert tally.written_blocks == written


def test_what_the_device_has_used_again_stays_there() -> None:
    prompts = [
        (second, ids) for second, ids in enumerate([(1, 2), (3, 4), (1, 2), (5, 6), (1, 2, 7), (3, 4)])
    ]
    tally = replay(requests_of(prompts), Sizes(4, 4, 8), BY_NAME["FrequencyFilter"], seed=1)
    # 1 and 2 twice; 7 takes the place of 6; 3 and 4 have left the host as well.
    assert (tally.device_tokens, tally.host_tokens, tally.disk_tokens) == (4 * BLOCK_TOKENS, 0, 0)


def test_writes_for_each_read() -> None:
    assert replay(requests_of(), SMALL, BY_NAME["AdmitAll"], seed=1).writes_per_read == 2.5
    assert replay(requests_of(PROMPTS[:2]), SMALL, BY_NAME["AdmitAll"], seed=1).writes_per_read is None


def test_one_token_is_left_to_compute_and_a_block_that_is_not_full_is_no_block() -> None:
    whole = Request(0, 2 * BLOCK_TOKENS, 1, [1, 2])
    assert (whole.reusable_blocks, list(whole.full_block_ids)) == (1, [1, 2])
    tally = replay([whole, whole], SMALL, BY_NAME["AdmitAll"], seed=1)
    assert (tally.device_tokens, tally.computed_tokens) == (BLOCK_TOKENS, 3 * BLOCK_TOKENS)
    short = Request(0, BLOCK_TOKENS - 1, 1, [1])
    assert (short.reusable_blocks, list(short.full_block_ids)) == (0, [])
    assert replay([short, short], SMALL, BY_NAME["AdmitAll"], seed=1).computed_tokens == 2 * BLOCK_TOKENS - 2
    assert Request(0, 0, 1, []).reusable_blocks == 0


def random_requests(rng: random.Random) -> list[Request]:
    """Prompts that share prefixes: an id stands for a block and all before it."""
    ids: dict[tuple[int, ...], int] = {}
    prompts = []
    for second in range(200):
        words = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        prompts.append((second, [ids.setdefault(tuple(words[: i + 1]), len(ids)) for i in range(len(words))]))
    return requests_of(prompts)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_no_policy_finds_more_than_there_is_and_other_keys_give_the_same(
    policy: Policy, rng: random.Random
) -> None:
    requests = random_requests(rng)
    tally = replay(requests, Sizes(8, 16, 40), policy, seed=1)
    assert 0 < tally.hit_tokens <= reusable_tokens(requests)
    assert tally == replay(requests, Sizes(8, 16, 40), policy, seed=2)


def test_with_room_for_everything_all_that_there_is_is_found(rng: random.Random) -> None:
    requests = random_requests(rng)
    for sizes in (Sizes(8, 1000, 1000), Sizes(8, 16, 1000)):
        assert replay(requests, sizes, BY_NAME["AdmitAll"], seed=1).hit_tokens == reusable_tokens(requests)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda host, disk: (host + 1, disk), "2560 tokens hit and 1026 computed are not 3075"),
        (lambda host, disk: (max(0, host - 1), disk), "kvbm_matched_tokens says 2, counted were 1"),
        (lambda host, disk: (disk, host), "kvbm_onboard_blocks_d2d says 0, counted were 2"),
    ],
)
def test_counts_that_the_product_does_not_confirm_are_no_result(
    wrong: Callable[[int, int], tuple[int, int]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_up = Replay._bring_up
    monkeypatch.setattr(Replay, "_bring_up", lambda *args: wrong(*bring_up(*args)))
    with pytest.raises(WrongAnswer, match=said):
        replay(requests_of(PROMPTS[:3]), SMALL, BY_NAME["AdmitAll"], seed=1)


def test_what_reject_first_remembers_is_bounded() -> None:
    policy = RejectFirst(max_entries=2)
    first, second, third = (BlockKey(bytes([number]) * 32) for number in range(3))
    assert [policy.admit([key]) for key in (first, second, first, third)] == [[], [], [first], []]
    assert policy.admit([second]) == []  # forgotten when the third came
    policy.hit([first])
    assert policy.admit([first]) == [first]


# ---------------------------------------------------------------- a study


def small_study(path: Path, told: Callable[[str], None] = lambda text: None) -> Study:
    sizes = [Size(factor=2)], [Size(factor=2), Size(blocks=5), Size()]
    return study(write_trace(path / "t.jsonl", requests_of()), 2, *sizes, seed=1, processes=1, told=told)


def test_a_study_has_every_policy_under_every_pair_of_sizes(tmp_path: Path) -> None:
    told: list[str] = []
    found = small_study(tmp_path, told=told.append)
    assert [(row.policy.name, row.sizes) for row in found.rows] == [
        (policy.name, Sizes(2, 4, disk)) for disk in (8, 5, 9) for policy in POLICIES
    ]
    assert found.rows[0].tally == tally_of(2, 4, 4, 10)
    assert found.bound.tally.hit_tokens == reusable_tokens(requests_of()) == 11 * BLOCK_TOKENS
    assert found.trace["distinct_blocks"] == 9 and found.trace["prompt_tokens"] == NUM_TOKENS
    assert told[-1] == "14 of 14 replays"


class KeyDependent(AdmitAll):
    """Takes what a good policy must not know: what the bytes of a key happen to be."""

    def admit(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """A coin that the hash tossed."""
        return [key for key in keys if key[0] % 2]


def test_counts_that_depend_on_keys_are_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_module, "POLICIES", (Policy("coin", lambda clock: KeyDependent()),))
    with pytest.raises(WrongAnswer, match="coin: other keys gave other counts"):
        study(
            write_trace(tmp_path / "t.jsonl", random_requests(random.Random(1))),
            8,
            [Size(factor=2)],
            [Size(factor=2)],
            seed=1,
            processes=1,
        )


def test_a_bound_that_is_not_the_traces_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_module, "reusable_tokens", lambda requests: reusable_tokens(requests) + 1)
    with pytest.raises(WrongAnswer, match="the bound"):
        small_study(tmp_path)


# ---------------------------------------------------------------- files and the command


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", requests_of())
    path.write_text(path.read_text() + "\n")
    assert read_trace(path) == requests_of()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: "),
        ('{"timestamp": 1}', "line 2: .*input_length"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', "line 2: .*hash_ids"),
        (
            '{"timestamp": 1, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            "line 2: 1 ids for 513 tokens",
        ),
        ('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}', "its times go back"),
    ],
)
def test_what_is_no_trace_is_refused(line: str, said: str, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [request(1, [1])])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(TraceError, match=said):
        read_trace(path)
    assert main([str(path), "--output", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()


def arguments_of(path: Path, output: Path) -> list[str]:
    sizes = ["--device-blocks", "2", "--host-blocks", "2x", "--disk-blocks", "2x,5"]
    return [str(path), *sizes, "--output", str(output), "--processes", "1"]


def test_a_wrong_answer_ends_with_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_module, "reusable_tokens", lambda requests: 0)
    path = write_trace(tmp_path / "t.jsonl", requests_of())
    assert main(arguments_of(path, tmp_path / "out")) == 1
    assert not (tmp_path / "out").exists()
