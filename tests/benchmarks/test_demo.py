"""What the demo makes of answers, hits and audits."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("httpx")

from benchmarks.conversation import Turn
from benchmarks.demo_report import Comparison
from kvbm_core.observe.metrics import Metrics
from tests.engines.client import Answer, Audits, CacheCounts, read_audits

EQUAL, NONE = Audits(40, 0, 1), Audits(0, 0, 3)


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


def test_what_audits_found_is_read_from_the_page_of_metrics() -> None:
    metrics = Metrics()
    for result, blocks in (("equal", 7), ("wrong", 2), ("not_compared", 1), ("equal", 3)):
        metrics.audited_blocks(result, blocks)
    assert read_audits(metrics.exposition()) == Audits(10, 2, 1)
