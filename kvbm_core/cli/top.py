"""``kvbm top``: what running instances do now."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvbm_core.cli.changes import Change, age_words
from kvbm_core.cli.console import table_console
from kvbm_core.cli.instances import Reading
from kvbm_core.cli.live import MIN_INTERVAL_S, Timeout, Urls, read_or_fail, show_again, sought
from kvbm_core.cli.options import Instance, Key
from kvbm_core.cli.report import finite, shown
from kvbm_core.cli.status import HIT_RATES, TIERS, StatusError, format_bytes

WIDE = 150
"""From so many columns on, tables stand side by side; below MEDIUM, the first one has fewer columns."""
MEDIUM = 100


class Watch:
    """Keeps the readings before, by instance."""

    def __init__(self) -> None:
        self._before: dict[str, Reading] = {}

    def since(self, readings: Sequence[Reading]) -> list[Change]:
        """What has changed since the last call; at the first one there are no rates yet."""
        changes = [Change(one, self._before.get(one.name)) for one in readings]
        self._before = {one.name: one for one in readings if not one.trouble}
        return changes


def top(
    urls: Urls = None,
    *,
    key: Key = None,
    instance: Instance = "",
    interval_s: Annotated[
        float, typer.Option("--interval", help="Seconds between two looks.", min=MIN_INTERVAL_S, max=3600.0)
    ] = 2.0,
    timeout_s: Timeout = 3.0,
    once: Annotated[bool, typer.Option("--once", help="Two looks, and the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As --once, as JSON, for programs.")] = False,
) -> None:
    """What kvbm does now in running engines: hits, bytes per second, queues, evictions, failures.

    Finds them as kvbm status does. q quits. Without a terminal it is as with --once. Exit status 1 if nobody
    is there.
    """
    whom = sought(urls, key, instance, timeout_s)
    watch, console = Watch(), table_console()
    changes = watch.since(read_or_fail("top", whom))
    if once or as_json or not console.is_terminal:
        time.sleep(interval_s)
        changes = watch.since(read_or_fail("top", whom))
        if as_json:
            typer.echo(json.dumps(finite({"instances": [change.as_json() for change in changes]}), indent=2))
        else:
            console.print(view(changes, console.width))
        return
    first = [changes]

    def render() -> RenderableType:
        heading = Text(f"kvbm top, every {interval_s:g} s, q quits", style="bold")
        try:
            return Group(heading, view(first.pop() if first else watch.since(whom.read()), console.width))
        except StatusError as error:
            return Group(heading, Text(str(error), style="red"))

    show_again(console, render, interval_s)


def view(changes: Sequence[Change], width: int) -> RenderableType:
    """All tables, for a terminal of so many columns."""
    there = [change for change in changes if not change.after.trouble]
    tables = [_moved(there), _evicted(there), _troubles(there)]
    parts: list[RenderableType] = [_instances(changes, width)]
    parts += [
        Text(f"{shown(one.name)}: {one.trouble}", style="red")
        for one in (change.after for change in changes)
        if one.trouble
    ]
    if width >= WIDE:
        row = Table.grid(padding=(0, 3))
        row.add_row(*tables)
        parts.append(row)
    else:
        parts += tables
    return Group(*parts)


def _table(title: str, *columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in right else "left")
    return table


def _instances(changes: Sequence[Change], width: int) -> Table:
    names = ["instance", "hits", "tokens/s", "tiers", "moving"]
    if width >= MEDIUM:
        names = ["instance", "engine", *names[1:], "leases", "saved"]
    table = _table(f"instances: {len(changes)}", *names, right=("tokens/s", "moving", "leases"))
    for change in changes:
        if change.after.trouble:  # no numbers, which are not zero
            table.add_row(Text(shown(change.after.name)), style="red")
            continue
        cells = _cells(change)
        table.add_row(*(Text(cells[name]) for name in names))
    return table


def _cells(change: Change) -> dict[str, str]:
    about = change.after.about
    silent = change.now("kvbm_silent_ranks")
    name = shown(change.after.name)
    hit_tokens = sum(change.rate("kvbm_hit_tokens_total", tier=tier) for tier in TIERS)
    saved = change.now("kvbm_ttft_saved_seconds_total") - change.now("kvbm_ttft_lost_seconds_total")
    return {
        "instance": f"{name}\n{silent:.0f} ranks silent" if silent else name,
        "engine": "\n".join(filter(None, (about.get("engine", ""), about.get("model", "")))),
        "hits": "\n".join(_hits(change)),
        "tokens/s": f"{hit_tokens:,.0f}",
        "tiers": "\n".join(_usage(change)),
        "moving": "\n".join(_queues(change)),
        "leases": f"{change.now('kvbm_live_leases'):,.0f}",
        "saved": f"{saved:,.1f} s" if saved else "",
    }


def _hits(change: Change) -> Iterator[str]:
    for tier, name in HIT_RATES.items():
        rate = change.now(name)
        if rate or tier == "host":
            yield f"{tier} {100 * rate:.0f} %"


def _usage(change: Change) -> Iterator[str]:
    for tier in TIERS:
        used, capacity = (change.now("kvbm_tier_blocks", tier=tier, state=of) for of in ("used", "capacity"))
        if capacity:
            yield f"{tier} {100 * used / capacity:.0f} % of {capacity:,.0f}"


def _queues(change: Change) -> Iterator[str]:
    yield f"{change.now('kvbm_pending_jobs'):,.0f}"
    for tier in TIERS[1:]:
        waiting = change.now("kvbm_waiting_blocks", tier=tier)
        if waiting:
            yield f"to {shown(tier)} {waiting:,.0f}"


def _moved(changes: Sequence[Change]) -> Table:
    names = ("way", "now", "in all", "mean", "slowest lately")
    table = _table("moved", *names, right=names[1:4])
    ways = {
        (labels.get("from", ""), labels.get("to", "")): None
        for change in changes
        for labels, _ in change.labels_of("kvbm_tier_transfer_bytes_total")
    }
    for source, target in ways:
        way = {"from": source, "to": target}
        rate = sum(change.rate("kvbm_tier_transfer_bytes_total", **way) for change in changes)
        num_bytes = sum(change.now("kvbm_tier_transfer_bytes_total", **way) for change in changes)
        table.add_row(
            Text(shown(f"{source} to {target}")),
            f"{format_bytes(rate)}/s",
            format_bytes(num_bytes),
            _mean(changes, way),
            Text(_slowest(changes, way, is_named=len(changes) > 1)),
        )
    if not ways:
        table.add_row("nothing yet")
    return table


def _mean(changes: Sequence[Change], way: dict[str, str]) -> str:
    for of in (Change.more, Change.now):  # lately, else since the start
        count, seconds = (
            sum(of(change, f"kvbm_tier_transfer_seconds_{what}", **way) for change in changes)
            for what in ("count", "sum")
        )
        if count:
            return f"{1000 * seconds / count:.3g} ms"
    return ""


def _slowest(changes: Sequence[Change], way: dict[str, str], *, is_named: bool) -> str:
    seconds, num_bytes, name = max(
        (
            change.now("kvbm_slowest_transfer_seconds", **way),
            change.now("kvbm_slowest_transfer_bytes", **way),
            shown(change.after.name),
        )
        for change in changes
    )
    if not seconds:
        return ""
    told = f"{1000 * seconds:.3g} ms for {format_bytes(num_bytes)}"
    return f"{told}, {name}" if is_named else told


def _evicted(changes: Sequence[Change]) -> Table:
    table = _table("evicted", "tier", "why", "blocks/s", "in all", "last used", right=("blocks/s", "in all"))
    found = {
        (labels.get("tier", ""), labels.get("reason", "")): None
        for change in changes
        for labels, _ in change.labels_of("kvbm_evicted_blocks_total")
    }
    for tier, reason in found:
        of = {"tier": tier, "reason": reason}
        ages = [change.median("kvbm_evicted_age_seconds", tier=tier) for change in changes]
        youngest = min((age for age in ages if age is not None), default=None)
        table.add_row(
            Text(shown(tier)),
            Text(shown(reason)),
            f"{sum(change.rate('kvbm_evicted_blocks_total', **of) for change in changes):,.1f}",
            f"{sum(change.now('kvbm_evicted_blocks_total', **of) for change in changes):,.0f}",
            f"{age_words(youngest)} ago" if reason == "room" and youngest is not None else "",
        )
    if not found:
        table.add_row("nothing yet")
    return table


def _troubles(changes: Sequence[Change]) -> Table:
    table = _table("trouble", "what", "kind", "in all", right=("in all",))
    sums: dict[tuple[str, str], float] = {}
    for change in changes:
        for section, what, count in change.troubles():
            sums[section, what] = sums.get((section, what), 0.0) + count
    for (section, what), count in sums.items():
        table.add_row(section, Text(shown(what)), f"{count:,.0f}")
    if not sums:
        table.add_row("none")
    return table
