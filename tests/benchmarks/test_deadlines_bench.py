"""What is timed while a server hangs is a call that runs into its deadline, and nothing else."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")

from benchmarks.remote.deadlines import STORES, DeadlinesPart, _late_s
from benchmarks.suite import Effort, Options, WrongAnswer
from kvbm_core.errors import Outcome


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.MISS, Outcome.IO_ERROR, Outcome.BUSY])
def test_a_call_that_ends_otherwise_is_a_wrong_answer(outcome: Outcome) -> None:
    with pytest.raises(WrongAnswer, match=str(outcome)):
        _late_s(lambda: [outcome])


def test_each_store_that_is_installed_has_both_rows() -> None:
    found = DeadlinesPart().run(Options(effort=Effort.QUICK))
    assert [figure.goal for figure in found.figures] == list(DeadlinesPart.goals)
    assert len(found.figures) == 2 * len(STORES)
    assert all(figure.is_measured or "make setup" in figure.note for figure in found.figures)
