"""`python -m tests.mutants [WORD ...]`: plays the mutants whose row has one of the words; all without words.

Exit status 1 if one lives, or a test does not pass as things are.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.mutants.mutant import Mutant
from tests.mutants.playing import Copy, Verdict
from tests.mutants.tables import MUTANTS, NOT_SHOWN


def chosen(words: Sequence[str]) -> list[Mutant]:
    """Those whose row has one of ``words``."""
    texts = {mutant: " ".join((mutant.seen, mutant.path, mutant.test)).lower() for mutant in MUTANTS}
    return [
        mutant for mutant, text in texts.items() if not words or any(word.lower() in text for word in words)
    ]


def table_of(verdicts: Sequence[Verdict]) -> Table:
    """What was found."""
    table = Table("seen before the mend", "undone in", "noticed by", "mutant", "s")
    for mutant, what, seconds in verdicts:
        cells = mutant.seen, mutant.path, "\n".join(mutant.tests), what
        table.add_row(*map(escape, cells), f"{seconds:.0f}")
    return table


def main(words: Sequence[str]) -> int:
    """See above."""
    mutants = chosen(words)
    console = Console(width=None if sys.stdout.isatty() else 200)
    verdicts = []
    with tempfile.TemporaryDirectory(prefix="kvbm-mutants-") as folder:
        copy = Copy(Path(folder))
        try:
            problems = copy.unmutated(mutants)
            for verdict in copy.play(mutants):
                verdicts.append(verdict)
                line = f"{len(verdicts)}/{len(mutants)} {verdict.what}: {verdict.mutant.seen}"
                console.print(line, markup=False, highlight=False)
        finally:
            copy.close()
    console.print(table_of(verdicts))
    for what, why in NOT_SHOWN if not words else ():
        console.print(f"not shown: {what}: {why}", markup=False, highlight=False)
    for problem in problems:
        console.print(problem, markup=False, highlight=False)
    return int(bool(problems) or not mutants or any(verdict.what != "dies" for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
