"""``kvbm why``: why requests missed the cache."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.table import Table

from kvbm_core.cli.console import fail, show_table, table_console
from kvbm_core.cli.fleet import NOBODY, ask_instances, plain
from kvbm_core.cli.options import Instance, Json, Key
from kvbm_core.cli.report import BAD_USAGE_EXIT
from kvbm_core.control.messages import MAX_NAME, Answer, Order, Verb
from kvbm_core.control.why_rows import MAX_ROWS, WhyRow
from kvbm_core.observe.why import told_s

if TYPE_CHECKING:
    from kvbm_core.control.asking import Asked

NOTHING_EXIT = 1
_TIERS = ("device", "host", "disk", "remote")


def why(
    request: Annotated[
        str, typer.Argument(help="The id of one request, or a part of it; the last requests without.")
    ] = "",
    *,
    last: Annotated[int, typer.Option("--last", min=1, max=MAX_ROWS, help="How many requests.")] = 20,
    missed: Annotated[bool, typer.Option("--missed", help="Only requests that missed something.")] = False,
    instance: Instance = "",
    key: Key = None,
    wait_s: Annotated[float, typer.Option("--wait", min=0.1, max=30.0, help="Seconds to wait.")] = 3.0,
    as_json: Json = False,
) -> None:
    """Why the last requests, or one, computed what could have been loaded.

    Asks this user's engines on this machine over their private sockets (KVBM_CONTROL); with --key all
    machines. Exit status 1 if nobody is there, somebody does not answer, or nobody knows the request.
    """
    if len(request) > MAX_NAME:
        fail(f"kvbm why: the id of a request has at most {MAX_NAME} characters here", BAD_USAGE_EXIT)
    order = Order(verb=Verb.WHY, instance=instance, wait_s=wait_s, request=request, count=last)
    asked = ask_instances(order, key, "kvbm why")
    answers = [msgspec.structs.replace(one, why=_chosen(one.why, missed=missed)) for one in asked.answers]
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode([_as_json(one) for one in answers])).decode())
    elif request and sum(len(one.why) for one in answers) == 1:
        for one in answers:
            _show_one(one)
    elif any(one.why for one in answers):
        _show_table(answers)
    _end(asked, answers, request)


def _chosen(rows: tuple[WhyRow, ...], *, missed: bool) -> tuple[WhyRow, ...]:
    return tuple(row for row in rows if row.reason or not missed)


def _as_json(answer: Answer) -> dict[str, object]:
    return {"instance": answer.instance, "rank": answer.rank, "requests": answer.why}


def _end(asked: Asked, answers: list[Answer], request: str) -> None:
    for name in asked.missing:
        typer.echo(f"kvbm why: {name} did not answer", err=True)
    if not answers and not asked.missing:
        fail(f"kvbm why: {NOBODY}", NOTHING_EXIT)
    if asked.missing:
        raise typer.Exit(NOTHING_EXIT)
    if not any(one.why for one in answers):
        if request:
            fail(f"kvbm why: nobody knows a request {request}: see KVBM_WHY_REQUESTS", NOTHING_EXIT)
        untold = [one for one in answers if one.text]
        for one in untold:
            typer.echo(f"kvbm why: {plain(f'{one.instance}.{one.rank}: {one.text}')}", err=True)
        if len(untold) < len(answers):
            typer.echo("kvbm why: no request yet", err=True)


def _show_table(answers: list[Answer]) -> None:
    table = Table(title="kvbm why (tokens)")
    table.add_column("request", overflow="fold")
    table.add_column("ago", justify="right")
    for name in ("prompt", *_TIERS, "missed"):
        table.add_column(name, justify="right")
    table.add_column("why", overflow="fold")
    missed: Counter[str] = Counter()
    for answer in answers:
        for row in answer.why:
            name = row.request if len(answers) == 1 else f"{answer.instance}.{answer.rank} {row.request}"
            cells = (name, told_s(row.age_s), f"{row.prompt_tokens:,}", *_by_tier(row))
            said = f"{row.reason}: {row.text}" if row.reason else "nothing missed"
            table.add_row(*map(plain, (*cells, f"{row.missed_tokens:,}", said)))
            missed[row.reason] += row.missed_tokens
    console = table_console()
    show_table(console, table)
    reasons = ", ".join(f"{reason} {tokens:,}" for reason, tokens in missed.most_common() if reason)
    if reasons:
        console.print(plain(f"missed tokens by reason: {reasons}"))


def _by_tier(row: WhyRow) -> tuple[str, ...]:
    numbers = (row.device_tokens, row.host_tokens, row.disk_tokens, row.remote_tokens)
    return tuple(f"{number:,}" if number else "" for number in numbers)


def _show_one(answer: Answer) -> None:
    for row in answer.why:
        table = Table("what", "value", title="kvbm why")
        found = zip((f"{tier} hit, tokens" for tier in _TIERS), _by_tier(row), strict=True)
        lines = [
            ("request", row.request),
            ("instance", f"{answer.instance}.{answer.rank}"),
            ("ago", told_s(row.age_s)),
            ("prompt, tokens", f"{row.prompt_tokens:,}"),
            *((what, value or "0") for what, value in found),
            ("missed, tokens", f"{row.missed_tokens:,}"),
            ("reason", row.reason or "nothing missed"),
            ("in words", row.text),
        ]
        for what, value in lines:
            table.add_row(plain(what), plain(value))
        show_table(table_console(), table)
