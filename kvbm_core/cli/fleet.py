"""``kvbm fleet``: what running instances are asked for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from kvbm_core.cli.console import fail, show_table, table_console
from kvbm_core.cli.options import Instance, Json, Key
from kvbm_core.cli.report import BAD_USAGE_EXIT
from kvbm_core.config import KvbmSettings
from kvbm_core.control.messages import MAX_WAIT_S, Answer, Order, Result, Status, Verb, flaw_of
from kvbm_core.errors import ConfigError

if TYPE_CHECKING:
    from kvbm_core.control.asking import Asked

FAILED_EXIT, PENDING_EXIT = 1, 3
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,64}", re.ASCII)
_TIERS = ("all", "host", "disk")
REMEDY = "is such an engine running, and without KVBM_CONTROL=off?"
NOBODY = f"nobody is there: {REMEDY}"

fleet_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="""
Asks running instances for their status, and has them forget blocks, or pause.

An instance answers unless it was started with KVBM_CONTROL=off. With `--key` orders go over NATS to
all machines; without, over a private socket to this user's engines on this machine.

Exit status 0: done. 1: somebody refused, or did not answer, or nobody is there. 2: wrong usage.
3: somebody will carry it out later.
""",
)

All = Annotated[bool, typer.Option("--all", help="All instances.")]
Wait = Annotated[
    float, typer.Option("--wait", min=0.1, max=MAX_WAIT_S, help="Seconds to wait until it is done.")
]


@fleet_app.command()
def status(instance: Instance = "", key: Key = None, wait_s: Wait = 3.0, as_json: Json = False) -> None:
    """Who is there, what it serves, how full its tiers are."""
    order = Order(verb=Verb.STATUS, instance=instance, wait_s=wait_s)
    show(ask_instances(order, key, "kvbm fleet status"), "kvbm fleet status", instance, as_json=as_json)


@fleet_app.command()
def reset(
    *,
    instance: Instance = "",
    every: All = False,
    tier: Annotated[str, typer.Option(help="host, disk or all.")] = "all",
    namespace: Annotated[
        str, typer.Option(help="Only instances whose namespace is this one (kvbm fleet status).")
    ] = "",
    key: Key = None,
    wait_s: Wait = 10.0,
    as_json: Json = False,
) -> None:
    """Forgets the blocks of a tier. What machines share stays in its store.

    What is being loaded ends first.
    """
    if tier not in _TIERS:
        fail(f"kvbm fleet: --tier {tier}: write {', '.join(_TIERS)}", BAD_USAGE_EXIT)
    give(Verb.RESET, instance, every, key, wait_s, as_json=as_json, tier=tier, namespace=namespace)


@fleet_app.command()
def drain(
    context: typer.Context,
    *,
    instance: Instance = "",
    every: All = False,
    key: Key = None,
    wait_s: Wait = 10.0,
    as_json: Json = False,
) -> None:
    """Nothing new is loaded or stored until resume; what is under way ends. Engines serve on, without hits.

    It is forgotten when the engine starts again.
    """
    give(Verb.DRAIN, instance, every, key, wait_s, as_json=as_json, command=_typed(context))


@fleet_app.command()
def resume(
    context: typer.Context,
    *,
    instance: Instance = "",
    every: All = False,
    key: Key = None,
    wait_s: Wait = 10.0,
    as_json: Json = False,
) -> None:
    """Ends drain."""
    give(Verb.RESUME, instance, every, key, wait_s, as_json=as_json, command=_typed(context))


def _typed(context: typer.Context) -> str:
    """The command's name: the same one is also there without ``fleet``."""
    of_fleet = context.parent is not None and context.parent.info_name == "fleet"
    return f"kvbm {'fleet ' * of_fleet}{context.info_name}"


def give(
    verb: Verb,
    instance: str,
    every: bool,
    key: Path | None,
    wait_s: float,
    *,
    as_json: bool,
    command: str = "",
    **what: Any,
) -> None:
    """Gives an order that changes something, and shows what became of it. ``command``: as it was typed, if
    not ``kvbm fleet VERB``.
    """
    command = command or f"kvbm fleet {verb}"
    if bool(instance) is every:
        fail(f"{command}: write --instance NAME or --all (kvbm fleet status has the names)", BAD_USAGE_EXIT)
    order = Order(verb=verb, instance=instance, wait_s=wait_s, **what)
    show(ask_instances(order, key, command), command, instance, as_json=as_json)


def ask_instances(order: Order, key: Path | None, command: str) -> Asked:
    """Over NATS with a ``key``; else those of this user on this machine."""
    from kvbm_core.control.asking import ask_fleet, ask_here  # asyncio and more: not for other commands

    if order.instance and not _WORD.fullmatch(order.instance):
        fail(f"{command}: --instance {order.instance!r}: is no name of an instance", BAD_USAGE_EXIT)
    if flaw := flaw_of(order):
        fail(f"{command}: such an order cannot be given: {flaw}", BAD_USAGE_EXIT)
    try:
        if key is None:
            asked = ask_here(order)
            named, _, rank = order.instance.rpartition(".")
            if named and rank.isdecimal() and not asked.answers and not asked.missing:
                line = (
                    f"--instance {order.instance}: nobody has this name; without the rank: --instance {named}"
                )
                fail(f"{command}: {line}", FAILED_EXIT)
            return asked
        from kvbm_core.control.operators import OperatorKey

        settings = KvbmSettings.from_env(None)
        order = msgspec.structs.replace(order, fleet=settings.fleet)
        return ask_fleet(settings, OperatorKey(key.expanduser()), order)
    except ConfigError as error:
        fail(str(error), BAD_USAGE_EXIT)


def show(asked: Asked, command: str, instance: str, *, as_json: bool) -> None:
    """What was answered to ``command``, and the exit status that follows from it. ``instance``: the only one
    that was asked, if not "".
    """
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(asked), indent=2).decode())
    elif asked.answers:
        show_table(table_console(), _table(asked.answers, command))
    for name in asked.missing:
        typer.echo(f"{command}: {plain(name)} did not answer", err=True)
    if not asked.answers and not asked.missing:
        whom = f"{instance} is not there" if instance else "nobody is there"
        typer.echo(f"{command}: {whom}: {REMEDY}", err=True)
    elif not asked.is_list_known:
        line = f"{command}: without ETCD_ENDPOINTS nobody knows who else should have answered"
        typer.echo(line, err=True)
    results = {answer.result for answer in asked.answers}
    if not asked.answers or asked.missing or Result.REFUSED in results:
        raise typer.Exit(FAILED_EXIT)
    if Result.PENDING in results:
        raise typer.Exit(PENDING_EXIT)


def _table(answers: list[Answer], command: str) -> Table:
    names = ("instance", "machine", "engine", "model", "namespace", "tiers (blocks)", "hits", "state")
    table = Table(*names, title=command)
    for answer in answers:
        name, status = f"{answer.instance}.{answer.rank}", answer.status
        outcome = "" if command == "kvbm fleet status" else f"{answer.result}"
        said = ": ".join(filter(None, [outcome, answer.text]))
        if status is None:
            cells = (name, "", "", "", "", "", "", said or str(answer.result))
            table.add_row(*map(plain, cells))
            continue
        cells = (
            name,
            f"{status.host}, {status.pid}",
            status.engine,
            status.model,
            status.namespace,
            _tiers(status),
            _hits(status),
            "; ".join(filter(None, [said, _state(status)])),
        )
        table.add_row(*map(plain, cells))
    return table


def plain(text: str) -> Text:
    """What came over a wire, without anything that a terminal might heed."""
    return Text("".join(char if char.isprintable() or char == "\n" else "?" for char in text))


def _tiers(status: Status) -> str:
    return "\n".join(f"{name} {used:,} of {total:,}" for name, (used, total) in status.tiers.items())


def _hits(status: Status) -> str:
    return "\n".join(f"{name} {100 * rate:.0f} %" for name, rate in status.hit_rates.items() if rate)


def _state(status: Status) -> str:
    if status.is_draining:
        moving = status.pending_transfers
        return f"drained, {moving} transfers under way" if moving else "drained"
    return status.trouble or "in service"
