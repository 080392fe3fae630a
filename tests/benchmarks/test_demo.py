"""What the demo makes of answers, hits and audits."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("httpx")

from benchmarks.conversation import Turn
from benchmarks.demo_report import Comparison, compare, draw_plot, show
from kvbm_core.observe.metrics import Metrics
from tests.engines.client import Answer, Audits, CacheCounts, read_audits

EQUAL, NONE = Audits(40, 0, 1), Audits(0, 0, 3)
NOTHING = CacheCounts(0, 0, 0)


@pytest.mark.parametrize(
    ("audits", "is_good"),
    [((EQUAL, EQUAL), True), ((EQUAL, replace(EQUAL, wrong=1)), False), ((EQUAL, NONE), False)],
)
def test_with_every_hit_audited_a_wrong_block_or_no_audit_is_a_failure(
    audits: tuple[Audits, ...], is_good: bool
) -> None:
    turn = Turn(0, 1, again=False, answer=Answer("", (1,), 9, 0.1, 0.2), found=CacheCounts(0, 0, 0))
    nothing_came = Comparison((), 1, (), 0, missed=(turn,), restarted_from_disk=0, lost=(turn,))
    assert not nothing_came.good
    audited = replace(nothing_came, audits=audits)
    assert audited.good is is_good
    assert not replace(audited, differing=(turn,)).good
    assert replace(audited, differing=(turn,), judges_answers=False).good is is_good


def played(*, found: CacheCounts, ttft_s: float, ask_again: bool) -> list[Turn]:
    """Two turns of one user, the first one cold."""
    turns: list[Turn] = []
    for number in range(2):
        answer = Answer("", (1, number), 640, ttft_s, 1.0)
        turns.append(Turn(0, number, again=False, answer=answer, found=found if number else NOTHING))
        if ask_again:
            turns.append(Turn(0, number, again=True, answer=answer, found=CacheCounts(608, 0, 0)))
    return turns


def shown(comparison: Comparison) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    show(console, comparison, Path("demo.png"), 1.0)
    return console.export_text()


def compared(found: CacheCounts, on_disk: CacheCounts, ttft_s: float) -> Comparison:
    cold = played(found=NOTHING, ttft_s=0.3, ask_again=False)
    with_kvbm = played(found=found, ttft_s=ttft_s, ask_again=True)
    return compare(cold, with_kvbm, played(found=on_disk, ttft_s=ttft_s, ask_again=False)[1:], 32)


def test_audited_hits_are_not_called_hits(tmp_path: Path) -> None:
    audited = replace(compared(NOTHING, NOTHING, 0.5), audits=(EQUAL, EQUAL))
    text = shown(audited)
    assert "host hit" not in text and "disk hit" not in text
    assert "audited, new process" in text and "those of the engine without it: cold, audited" in text
    assert "nothing is loaded" in text and "0.6 x as fast" in text
    assert "came back" not in text and "still there" not in text
    assert draw_plot(audited, tmp_path / "demo.png").exists()


def test_every_row_says_how_it_is_beside_a_cold_one() -> None:
    text = shown(compared(CacheCounts(0, 608, 19), CacheCounts(0, 608, 19, 19), 0.1))
    rows = [line.split("│") for line in text.splitlines() if line.startswith("│")]
    assert {row[2].strip(): row[-2].strip() for row in rows} == {
        "cold, no kvbm": "cold itself",
        "cold": "3.0 x as fast",
        "host hit": "3.0 x as fast",
        "device hit": "3.0 x as fast",
        "disk hit, new process": "3.0 x as fast",
    }
    assert "nothing is loaded" not in text and "19 blocks came back from host memory" in text


def test_the_last_line_can_be_pasted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment's programs are on PATH, or the line before puts them there."""
    comparison = compared(CacheCounts(0, 608, 19), CacheCounts(0, 608, 19, 19), 0.1)
    environment = tmp_path / ".venv" / "bin"
    environment.mkdir(parents=True)
    program = environment / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(environment / "python"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nonexistent")
    assert "\n  source .venv/bin/activate\n  DYN_KVBM_CPU_CACHE_GB=20 vllm serve" in shown(comparison)
    monkeypatch.setenv("PATH", str(environment))
    assert "activate" not in shown(comparison)


def test_what_audits_found_is_read_from_the_page_of_metrics() -> None:
    metrics = Metrics()
    for result, blocks in (("equal", 7), ("wrong", 2), ("not_compared", 1), ("equal", 3)):
        metrics.audited_blocks(result, blocks)
    assert read_audits(metrics.exposition()) == Audits(10, 2, 1)
