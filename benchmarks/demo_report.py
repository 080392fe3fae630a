"""What the demo found: compared answers, a table, a plot, and the line to serve a model of one's own."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.conversation import Turn
from tests.engines.client import Audits
from tests.engines.vllm_server import connector_config


class State(Enum):
    """Where the KV of a prompt came from."""

    COLD = "cold"
    HOST = "host hit"
    DISK = "disk hit, new process"
    DEVICE = "device hit"


AUDITED = {State.HOST: "audited", State.DISK: "audited, new process"}
"""Instead of hits, where every hit is audited."""
COLORS = {State.COLD: "#8c8c8c", State.HOST: "#2a7f62", State.DEVICE: "#8fc1e3", State.DISK: "#c9822b"}


@dataclass(frozen=True)
class Row:
    """The medians of one turn over all users, in one state, on a server with or without kvbm."""

    turn: int
    state: State
    with_kvbm: bool
    prompt_tokens: float
    device_tokens: float
    host_tokens: float
    disk_tokens: float
    ttft_s: float
    each_ttft_s: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """The comparison of all answers, and the rows of the table. ``audits``: where every hit was
    audited, and so none was loaded; of the server that hit host memory, and of the one that hit the disk.
    """

    rows: tuple[Row, ...]
    answers: int
    differing: tuple[Turn, ...]
    onboarded_blocks: int
    missed: tuple[Turn, ...]  # returning users whose conversation did not come back from host memory
    restarted_from_disk: int  # conversations that came back from disk after the server was killed
    lost: tuple[Turn, ...]  # and those that did not
    judges_answers: bool = True
    audits: tuple[Audits, ...] = ()

    @property
    def good(self) -> bool:
        """Whether every answer was the same, and every returning conversation came back from host memory or
        disk; or, of audits, whether there were some and no block was wrong.
        """
        if self.judges_answers and self.differing:
            return False
        if self.audits:
            return all(audits.equal and not audits.wrong for audits in self.audits)
        return not self.missed and not self.lost

    def name_of(self, state: State) -> str:
        """For people."""
        return AUDITED.get(state, state.value) if self.audits else state.value

    def row(self, turn: int, state: State, *, with_kvbm: bool) -> Row | None:
        """The row of a turn, if it was measured."""
        wanted = (turn, state, with_kvbm)
        return next((row for row in self.rows if (row.turn, row.state, row.with_kvbm) == wanted), None)


def compare(
    plain: Sequence[Turn], with_kvbm: Sequence[Turn], restarted: Sequence[Turn], block_tokens: int
) -> Comparison:
    """Hold every answer with kvbm against the engine without it; ``restarted``: after the server had been
    killed.
    """
    reference = {(turn.user, turn.turn): turn.answer.token_ids for turn in plain}
    answered = [*with_kvbm, *restarted]
    differing = [turn for turn in answered if turn.answer.token_ids != reference[turn.user, turn.turn]]
    returning = [turn for turn in with_kvbm if turn.turn > 0 and not turn.again]
    turns = sorted({turn.turn for turn in plain})
    rows: list[Row] = []
    for number in turns:
        state = State.COLD if number == 0 else State.HOST
        rows.append(_row(number, State.COLD, plain, block_tokens, with_kvbm=False, again=False))
        rows.append(_row(number, state, with_kvbm, block_tokens, with_kvbm=True, again=False))
        rows.append(_row(number, State.DEVICE, with_kvbm, block_tokens, with_kvbm=True, again=True))
    rows.append(_row(turns[-1], State.DISK, restarted, block_tokens, with_kvbm=True, again=False))
    return Comparison(
        rows=tuple(rows),
        answers=len(answered),
        differing=tuple(differing),
        onboarded_blocks=sum(turn.found.onboarded_blocks for turn in with_kvbm),
        missed=tuple(turn for turn in returning if turn.found.kvbm_tokens == 0),
        restarted_from_disk=sum(turn.found.disk_blocks > 0 for turn in restarted),
        lost=tuple(turn for turn in restarted if turn.found.disk_blocks == 0),
    )


def _row(
    number: int, state: State, turns: Sequence[Turn], block_tokens: int, *, with_kvbm: bool, again: bool
) -> Row:
    chosen = [turn for turn in turns if turn.turn == number and turn.again == again]
    return Row(
        turn=number,
        state=state,
        with_kvbm=with_kvbm,
        prompt_tokens=median(turn.answer.prompt_tokens for turn in chosen),
        device_tokens=median(turn.found.device_tokens for turn in chosen),
        host_tokens=median(turn.found.kvbm_tokens - block_tokens * turn.found.disk_blocks for turn in chosen),
        disk_tokens=median(block_tokens * turn.found.disk_blocks for turn in chosen),
        ttft_s=median(turn.answer.ttft_s for turn in chosen),
        each_ttft_s=tuple(turn.answer.ttft_s for turn in chosen),
    )


def show(console: Console, comparison: Comparison, plot: Path, elapsed_s: float) -> None:
    """Print table, verdict and what to type next."""
    console.print(_table(comparison))
    if comparison.differing:
        places = ", ".join(f"user {turn.user} turn {turn.turn + 1}" for turn in comparison.differing)
        told = f"{len(comparison.differing)} of {comparison.answers} answers DIFFER: {places}"
        line = f"[red]✗ {told}[/red]" if comparison.judges_answers else f"  {told}; in this dtype they may"
        console.print(line)
    else:
        states = "audited, device hit, and audited after kill -9"
        if not comparison.audits:
            states = "host hit, device hit, and disk hit after kill -9"
        console.print(
            f"[green]✓[/green] all {comparison.answers} answers with kvbm are, token for token, "
            f"those of the engine without it: cold, {states}"
        )
    if comparison.audits:
        console.print(
            "  KVBM_AUDIT_RATE=1: every hit is computed again to be compared, and nothing is loaded. So "
            "host and disk are 0, and nothing but device hits is faster than cold"
        )
    for tier, audits in zip(("host memory", "disk"), comparison.audits, strict=False):
        mark = "[green]✓[/green]" if audits.equal and not audits.wrong else "[red]✗[/red]"
        console.print(
            f"{mark} audited, {tier}: {audits.equal:,} blocks are what is computed, "
            f"{audits.wrong:,} are NOT, {audits.not_compared:,} were not compared"
        )
    if not comparison.audits:
        _show_hits(console, comparison)
    console.print(f"  plot: {plot}   time: {elapsed_s:.0f} s, no process left running\n")
    console.print("To serve a model of your own (20 GB of host memory for its cache):\n")
    activate = _activate_line()
    if activate:
        console.print(f"  {activate}", highlight=False, markup=False, soft_wrap=True)
    line = f"  DYN_KVBM_CPU_CACHE_GB=20 vllm serve YOUR_MODEL --kv-transfer-config '{connector_config()}'"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def _activate_line() -> str:
    """What puts ``vllm`` and ``kvbm`` on PATH; empty if they are there."""
    folder = Path(sys.executable).parent
    found = shutil.which("vllm")
    if found is not None and Path(found).parent == folder:
        return ""
    inside = Path(os.path.relpath(folder)) if folder.is_relative_to(Path.cwd()) else folder
    return f"source {shlex.quote(str(inside / 'activate'))}"


def _show_hits(console: Console, comparison: Comparison) -> None:
    if comparison.missed:
        console.print(
            f"[red]✗ {len(comparison.missed)} returning conversations were not found in host memory[/red]"
        )
    else:
        console.print(f"[green]✓[/green] {comparison.onboarded_blocks:,} blocks came back from host memory")
    if comparison.lost:
        console.print(
            f"[red]✗ {len(comparison.lost)} conversations were not found on disk after the restart[/red]"
        )
    else:
        console.print(
            f"[green]✓[/green] {comparison.restarted_from_disk} conversations were still there "
            "after kill -9 of the"
            " server, on disk"
        )


def _table(comparison: Comparison) -> Table:
    table = Table(
        title="Medians over the users",
        title_justify="left",
        caption="against cold: beside the same turn on the engine without kvbm",
        caption_justify="left",
    )
    headings = (
        "turn",
        "state",
        "prompt tokens",
        "matched: device",
        "host",
        "disk",
        "TTFT ms",
        "against cold",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "state" else "right")
    for row in comparison.rows:
        cold = comparison.row(row.turn, State.COLD, with_kvbm=False)
        engine = "" if row.with_kvbm else ", no kvbm"
        table.add_row(
            str(row.turn + 1),
            f"{comparison.name_of(row.state)}{engine}",
            f"{row.prompt_tokens:,.0f}",
            f"{row.device_tokens:,.0f}",
            f"{row.host_tokens:,.0f}",
            f"{row.disk_tokens:,.0f}",
            f"{1000 * row.ttft_s:,.0f}",
            "cold itself" if cold in (None, row) else f"{cold.ttft_s / row.ttft_s:.1f} x as fast",
            style="bold" if row.state in (State.HOST, State.DISK) else None,
            end_section=row.state is State.DEVICE,
        )
    return table


def draw_plot(comparison: Comparison, path: Path) -> Path:
    """Save the table as a picture: one group of bars per turn, a dot per user."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    turns = sorted({row.turn for row in comparison.rows})
    figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
    kept, title = "brought back", "brought back from host memory and disk"
    if comparison.audits:
        kept, title = "computed again to be compared", "found and computed again"
    states = [
        (State.COLD, False, "cold: engine without kvbm"),
        (State.HOST, True, f"host hit: {kept}"),
        (State.DISK, True, f"disk hit: {kept} after kill -9"),
        (State.DEVICE, True, "device hit: asked again at once"),
    ]
    width = 0.21
    for offset, (state, with_kvbm, label) in zip((-1.5, -0.5, 0.5, 1.5), states, strict=True):
        rows = [
            row for turn in turns if (row := comparison.row(turn, state, with_kvbm=with_kvbm)) is not None
        ]
        places = [row.turn + offset * width for row in rows]
        heights = [1000 * row.ttft_s for row in rows]
        axes.bar(places, heights, width * 0.92, label=label, color=COLORS[state])
        for place, height, row in zip(places, heights, rows, strict=True):
            each = [1000 * seconds for seconds in row.each_ttft_s]
            axes.scatter([place] * len(each), each, s=8, color="black", alpha=0.35, linewidths=0, zorder=3)
            above = (0, 4)
            top = (place, max(each))
            axes.annotate(f"{height:.0f}", top, above, textcoords="offset points", ha="center", fontsize=9)
    axes.annotate(
        "nothing\nyet",
        (-0.5 * width, 0),
        (0, 6),
        textcoords="offset points",
        ha="center",
        fontsize=9,
        color="gray",
    )
    prompts = {row.turn: row.prompt_tokens for row in comparison.rows}
    axes.set_xticks(turns, [f"turn {turn + 1}\n{prompts[turn]:,.0f} prompt tokens" for turn in turns])
    axes.set_ylabel("time to first token, ms (bar: median, dots: users)")
    axes.set_title(f"A conversation that the device cache forgot, {title}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
