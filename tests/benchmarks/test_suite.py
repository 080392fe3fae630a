"""The benchmark suite judges as it says; and what it times would notice a wrong answer."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("matplotlib")

from benchmarks.figures import LIMIT, Figure, Goal
from benchmarks.leader import hashing, index
from benchmarks.leader.index import IndexBench, Resident, new_hashes
from benchmarks.leader.sides import OurSide
from benchmarks.report import Report
from benchmarks.suite import Findings, Options, WrongAnswer, run_part
from kvbm_core.types import Direction

ROOT = Path(__file__).resolve().parents[2]
FASTER = Goal("time", "ms", 0.5, "lower")
MORE = Goal("rate", "blocks/s", 4.0, "higher")
AT_MOST = Goal("size", "bytes", 256.0, "lower", LIMIT)
NOTHING = Goal("difference", "", 0.0, "lower", LIMIT)


# ---------------------------------------------------------------- figures


def test_a_limit_of_nothing_is_met_by_nothing_alone() -> None:
    assert Figure(NOTHING, (0.0, 0.0)).verdict == "met" and Figure(NOTHING, (0.0,)).ratio == 1.0
    assert Figure(NOTHING, (0.5,)).verdict == "short" and Figure(NOTHING, (0.5,)).ratio == 1.5


def test_the_ratio_is_the_median_of_the_pairs() -> None:
    figure = Figure(FASTER, (1.0, 10.0, 3.0), {"peer": (2.0, 40.0, 4.0)})
    assert figure.ratio == 0.5
    assert figure.verdict == "met"
    assert replace(figure, ours=(1.1, 30.0, 3.0)).verdict == "short"


@pytest.mark.parametrize(("goal", "best"), [(FASTER, "low"), (MORE, "high")])
def test_the_best_peer_is_the_one_that_is_hardest_to_beat(goal: Goal, best: str) -> None:
    figure = Figure(goal, (1.0,), {"middle": (5.0,), "low": (2.0,), "high": (9.0,)})
    assert figure.reference == best
    assert figure.ratio == 1.0 / figure.peers[best][0]


def test_a_named_peer_is_the_reference_even_if_another_is_better() -> None:
    figure = Figure(
        replace(MORE, against="limit of memory"), (8.0,), {"limit of memory": (2.0,), "other": (7.0,)}
    )
    assert (figure.ratio, figure.verdict) == (4.0, "met")


@pytest.mark.parametrize(("ours", "verdict"), [(256.0, "met"), (257.0, "short")])
def test_a_limit_is_held_against_our_value(ours: float, verdict: str) -> None:
    assert Figure(AT_MOST, (1.0, ours, 9999.0)).verdict == verdict


def test_a_ratio_without_a_peer_is_not_run() -> None:
    assert Figure(FASTER, (1.0,)).verdict == "not run"
    assert Figure(AT_MOST, ()).verdict == "not run"


# ---------------------------------------------------------------- the suite


class WrongPart:
    """A part with one row, whose run notices a wrong answer."""

    name = "one"
    help = "a part for tests"
    goals: Sequence[Goal] = (FASTER,)

    def run(self, options: Options) -> Findings:
        """See Part."""
        raise WrongAnswer("found what was never stored")


def test_a_wrong_answer_is_a_complaint_and_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Machine facts ask for vLLM's version; the core's tests run without it.
    monkeypatch.setattr("benchmarks.suite.machine_facts", lambda: {"cpu": "test"})
    report = Report(tmp_path, ["one"])
    report.add(run_part(WrongPart(), Options()))
    assert report.complaints == ["one: found what was never stored"]
    rows = json.loads((tmp_path / "latest.json").read_text())["rows"]
    assert [row["verdict"] for row in rows] == ["not run"]


# ---------------------------------------------------------------- what is timed


def small_index(side: OurSide) -> IndexBench:
    """As the real one, with room for two prompts."""
    hashes = new_hashes(random.Random(1), 2 * index.PROMPT_BLOCKS)
    return IndexBench([Resident.fill(side, hashes)], Resident.fill(OurSide(len(hashes)), hashes), seed=1)


@pytest.mark.parametrize("lie", ["lookup", "read", "store"])
def test_an_index_that_answers_wrongly_is_noticed(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    side = OurSide(2 * index.PROMPT_BLOCKS)
    bench = small_index(side)
    monkeypatch.setattr(side, lie, lambda keys: len(keys) - 1)
    with pytest.raises(WrongAnswer, match="kvbm"):
        bench.measure(1, lambda text: None)


def test_a_lookup_that_finds_what_was_never_stored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    side = OurSide(2 * index.PROMPT_BLOCKS)
    bench = small_index(side)
    monkeypatch.setattr(side, "lookup", len)
    with pytest.raises(WrongAnswer, match="of 0 blocks"):
        bench.measure(1, lambda text: None)


def test_a_wrong_hash_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "PROMPT_TOKENS", 64)
    monkeypatch.setattr(hashing, "peer_hashers", dict)
    chain, extend = hashing.measure(2, seed=1)
    assert (len(chain.ours), len(extend.ours)) == (2, 2 * hashing.EXTENSIONS)
    monkeypatch.setattr(hashing, "hash_block", lambda parent, tokens: parent)
    with pytest.raises(WrongAnswer, match="block 0"):
        hashing.measure(2, seed=1)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("way", ["execute", "torch_per_page", "torch_indexed"])
def test_copies_are_compared_byte_by_byte(way: str, direction: Direction) -> None:
    pytest.importorskip("torch")
    from benchmarks.transfer.memory import CopyBench

    bench = CopyBench(page_bytes=512, num_moved=6, seed=1)
    choice = bench.choose()
    bench.wipe(direction, choice)
    with pytest.raises(WrongAnswer, match="wrong bytes"):
        bench.check("nobody", choice)
    if way == "execute":
        bench.execute(bench.plan(direction, choice))
        bench.check_outcomes()
    else:
        getattr(bench, way)(direction, choice)
    bench.check(way, choice)
    bench.slots[choice.slots[-1], -1, -1] ^= 1
    with pytest.raises(WrongAnswer, match="wrong bytes"):
        bench.check(way, choice)
    bench.close()
