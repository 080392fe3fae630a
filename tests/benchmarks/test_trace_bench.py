"""Candidates beside the product's policies, and predictions beside what the leader reaches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.plan import __main__ as plan_main
from benchmarks.plan.comparison import Pair, compare, six_sizes
from benchmarks.plan.loads import agents, documents
from benchmarks.trace import sharing
from benchmarks.trace.__main__ import main
from benchmarks.trace.policies import CANDIDATES, COMPARED, RejectFirst
from benchmarks.trace.sharing import Row, joined, restarted, unlimited
from kvbm_core.replay.machine import EVERYTHING, FILTER, Policy, Sizes, replay
from kvbm_core.replay.trace import Trace, write_trace
from kvbm_core.sizing.load import Load
from kvbm_core.types import BlockKey
from tests.unit.test_replay import PROMPTS, SMALL, TOKENS, tally_of, trace_of

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(CANDIDATES[0], tally_of(2, 4, 2, 2)), (CANDIDATES[1], tally_of(2, 4, 2, 5))],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_candidates_make_of_a_trace_worked_out_by_hand(policy: Policy, expected: object) -> None:
    assert replay(trace_of(), SMALL, policy) == expected


def test_what_reject_first_remembers_is_bounded() -> None:
    policy = RejectFirst(max_entries=2)
    first, second, third = (BlockKey(bytes([number]) * 32) for number in range(3))
    assert [policy.admit([key]) for key in (first, second, first, third)] == [[], [], [first], []]
    assert policy.admit([second]) == []  # forgotten when the third came
    policy.hit([first])
    assert policy.admit([first]) == [first]


def test_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "t.jsonl", trace_of(PROMPTS))
    sizes = ["--device", "2", "--host", "2x", "--disk", "2x,5"]
    words = [str(tmp_path / "t.jsonl"), *sizes, "--output", str(tmp_path / "out"), "--processes", "1"]
    assert main(words) == 0
    report = json.loads((tmp_path / "out" / "trace.json").read_text())
    assert [row["policy"] for row in report["rows"]] == 2 * [policy.name for policy in COMPARED]
    assert (tmp_path / "out" / "trace.png").stat().st_size
    assert "hits alone*" in capsys.readouterr().out
    assert main([str(tmp_path / "none.jsonl")]) == 2


# ---------------------------------------------------------------- an engine that comes later

AGAIN = trace_of([(second, (1, 2)) for second in range(8)])
ROOMY = Sizes(4, 4, 4)


def found_later(case: str, rule: Policy, asked: int, hit: int, lower: int) -> Row:
    """``asked``: requests; ``hit`` and ``lower`` in blocks, as is what was written: 2, or nothing."""
    return Row(case, rule.name, asked * (2 * TOKENS + 1), hit * TOKENS, lower * TOKENS, lower)


@pytest.mark.parametrize("rule", [EVERYTHING, FILTER])
def test_who_joins_or_starts_again_finds_what_was_served_from_the_device(rule: Policy) -> None:
    assert joined(AGAIN, ROOMY._replace(disk_blocks=0), rule) == found_later("joined", rule, 2, 4, 2)
    assert restarted(AGAIN, ROOMY, rule) == found_later("restarted", rule, 4, 8, 2)


@pytest.mark.parametrize(("least_uses", "lower"), [(None, 2), (2, 2), (4, 2), (6, 0)])
def test_what_a_rule_could_reach(least_uses: int | None, lower: int) -> None:
    """The first engine has six of the requests, five of them before the second has its first."""
    row = unlimited(AGAIN, least_uses)
    assert (row.asked_tokens, row.hit_tokens) == (2 * (2 * TOKENS + 1), (2 + lower) * TOKENS)
    assert (row.lower_tokens, row.written_blocks) == (lower * TOKENS, 2)


def test_a_report_of_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "t.jsonl", AGAIN)
    assert sharing.main([str(tmp_path / "t.jsonl"), "--output", str(tmp_path), "--device", "4"]) == 0
    report = json.loads((tmp_path / "sharing.json").read_text())
    cases = 4 * ["joined"] + 4 * ["restarted"] + 4 * ["unlimited"]
    assert [row["case"] for row in report["rows"]] == cases
    assert "reject first" in capsys.readouterr().out
    assert sharing.main([str(tmp_path / "none.jsonl")]) == 2


# ---------------------------------------------------------------- predicted and reached


def predict(trace: Trace) -> None:
    """The leader reaches what is predicted, at six sizes."""
    pairs = compare(trace)
    assert len({pair.sizes for pair in pairs}) == 6
    assert max(pair.off_points for pair in pairs) <= 2
    assert len({round(pair.reached, 2) for pair in pairs}) >= 3, "sizes that make no difference test nothing"


def test_loads_with_other_habits_are_predicted() -> None:
    for trace in (agents(seconds=45), documents(num_requests=250, num_documents=150)):
        predict(trace)


@pytest.mark.nightly("two minutes; two other loads are predicted always")
def test_conversations_with_long_prompts_are_predicted() -> None:
    predict(
        Load(users=120, turns=4, prompt_tokens=4000, answer_tokens=350, think_s=60, seconds=900).trace(512)
    )


def test_sizes_have_room_for_something() -> None:
    for sizes in six_sizes(trace_of(PROMPTS)):
        assert sizes.host_blocks > 0


@pytest.mark.parametrize(("off", "status"), [(0.019, 0), (0.021, 1)])
def test_a_prediction_that_is_off_is_a_failure(
    off: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair("t", Sizes(1, 2, 3), EVERYTHING, 0.5 + off, 0.5, 1, 1, 0.1, 1.0)
    monkeypatch.setattr(plan_main, "compare", lambda trace, told: [pair])
    assert plan_main.main(["--output", str(tmp_path)]) == status
    assert len(json.loads((tmp_path / "plan.json").read_text())) == 2
    assert plan_main.main([str(tmp_path / "none.jsonl")]) == 2
