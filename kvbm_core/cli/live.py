"""What is shown again and again until somebody has seen enough; and ``kvbm status``."""

from __future__ import annotations

import contextlib
import json
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvbm_core.cli.console import fail, table_console
from kvbm_core.cli.instances import REMEDY, UNREADABLE, Reading, Sought
from kvbm_core.cli.options import Instance, Key
from kvbm_core.cli.report import BAD_USAGE_EXIT, finite, shown
from kvbm_core.cli.status import StatusError, status_rows
from kvbm_core.errors import ConfigError

UNREACHABLE_EXIT = 1
MIN_INTERVAL_S = 0.2

Urls = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PAGE]...", help="Metrics pages (http://HOST:PORT). Default: all engines of this machine."
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait for answers.", min=0.1, max=30.0)]


def sought(urls: list[str] | None, key: Path | None, instance: str, timeout_s: float) -> Sought:
    """What the command's options mean."""
    if urls and key is not None:
        fail("kvbm: --key: goes without pages, as it asks over NATS", BAD_USAGE_EXIT)
    return Sought(tuple(urls or ()), key, instance, timeout_s)


def read_or_fail(command: str, whom: Sought) -> list[Reading]:
    """Their numbers; the end, with one line, if there are none."""
    try:
        readings = whom.read()
    except StatusError as error:
        fail(f"kvbm {command}: {error}", UNREACHABLE_EXIT)
    except ConfigError as error:
        fail(str(error), BAD_USAGE_EXIT)
    if all(one.trouble and not one.is_listed for one in readings):
        trouble = readings[0].trouble
        remedy = f": {REMEDY}" if trouble.startswith(UNREADABLE) else ""
        fail(f"kvbm {command}: {trouble}{remedy}", UNREACHABLE_EXIT)
    return readings


def show_again(console: Console, render: Callable[[], RenderableType], interval_s: float) -> None:
    """``render`` every ``interval_s``, until q, Ctrl-C or the end of the input."""
    with (
        _keys() as pressed,
        Live(render(), console=console, screen=True, auto_refresh=False, transient=True) as live,
        contextlib.suppress(KeyboardInterrupt),
    ):
        while not pressed(interval_s):
            live.update(render(), refresh=True)


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Waits so many seconds, or until a key says that it is enough."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)

    def pressed(seconds: float) -> bool:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            if select.select([descriptor], [], [], left_s)[0] and sys.stdin.read(1) in {"q", "Q", "\x1b", ""}:
                return True
        return False

    try:
        tty.setcbreak(descriptor)
        yield pressed
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def status(
    urls: Urls = None,
    *,
    port: Annotated[int, typer.Option(help="The page of this port.", min=0, max=65535)] = 0,
    host: Annotated[str, typer.Option(help="Where that is.")] = "127.0.0.1",
    key: Key = None,
    instance: Instance = "",
    timeout_s: Timeout = 3.0,
    watch_s: Annotated[
        float, typer.Option("--watch", metavar="SECONDS", help="Again and again; q quits.", min=0.0)
    ] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="All series as JSON, for programs.")] = False,
) -> None:
    """What kvbm has done in running engines: tiers, hits, offloaded and onboarded blocks, failures.

    Finds all engines of this user on this machine that have a metrics page (DYN_KVBM_METRICS=true) or a
    private socket (KVBM_CONTROL=socket); with ETCD_ENDPOINTS those of other machines too. Exit status 1 if
    there is none.
    """
    if port:
        urls = [*(urls or ()), f"http://{host}:{port}"]
    whom = sought(urls, key, instance, timeout_s)
    readings = read_or_fail("status", whom)
    console = table_console()
    if as_json:
        _print_json(readings)
    elif watch_s and console.is_terminal:
        show_again(console, lambda: _tables(_again(whom)), max(watch_s, MIN_INTERVAL_S))
    else:
        console.print(_tables(readings))


def _again(whom: Sought) -> list[Reading]:
    """As the numbers are now; trouble is shown, as it may pass."""
    try:
        return whom.read()
    except StatusError as error:
        return [Reading("", "", trouble=str(error))]


def _tables(readings: list[Reading]) -> Group:
    return Group(*(_table(one) if not one.trouble else _trouble(one) for one in readings))


def _trouble(one: Reading) -> Text:
    return Text(f"{shown(one.name)}: {one.trouble}" if one.name else one.trouble, style="red")


def _table(one: Reading) -> Table:
    sections: dict[str, list[tuple[str, str]]] = {}
    for section, what, value in status_rows(one.samples):
        sections.setdefault(section, []).append((what, value))
    table = Table(title=Text(f"kvbm, {one.title}"))
    for name in ("", "what", "value"):
        table.add_column(name, overflow="fold")
    for section, lines in sections.items():
        for number, (what, value) in enumerate(lines):
            cells = ("" if number else section, shown(what), value)
            table.add_row(*map(Text, cells), end_section=number == len(lines) - 1)
    return table


def _print_json(readings: list[Reading]) -> None:
    series = [
        {"instance": one.name, "name": name, "labels": labels, "value": value}
        for one in readings
        for name, found in one.samples.items()
        for labels, value in found
    ]
    typer.echo(json.dumps(finite(series), indent=2))
