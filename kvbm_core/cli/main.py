"""The ``kvbm`` command: what is configured, what is going on, and how to serve a model."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Annotated

import typer
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from kvbm_core import __version__
from kvbm_core.cli.app import App
from kvbm_core.cli.console import fail, show_table, table_console
from kvbm_core.cli.control import COMMANDS as CONTROL_COMMANDS
from kvbm_core.cli.disk import disk_app
from kvbm_core.cli.doctor.command import doctor
from kvbm_core.cli.fleet import drain, fleet_app, resume
from kvbm_core.cli.keys import keys_app
from kvbm_core.cli.live import status
from kvbm_core.cli.options import Json
from kvbm_core.cli.plan import plan_tiers
from kvbm_core.cli.remote import remote_app
from kvbm_core.cli.replay import replay_trace
from kvbm_core.cli.top import top
from kvbm_core.cli.whose import owner_of_guide_names
from kvbm_core.cli.why import why
from kvbm_core.config import KvbmSettings, SettingRow, SettingSource
from kvbm_core.config.settings import limits_of
from kvbm_core.errors import ConfigError
from kvbm_core.runtime.endpoint import endpoint_apart

COMMANDS = "kvbm.commands"
"""Entry points: a command's name, and the function that typer makes it of."""
BAD_CONFIG_EXIT = 2

app = App(
    name="kvbm",
    help="""
kvbm keeps the KV blocks that an LLM engine would throw away and brings them back when a prompt
starts the same way.

The engine loads it; this command only looks and explains. A first session:

1. `kvbm doctor` says what works on this machine, and what to do if not.

2. `kvbm serve-line Qwen/Qwen3-0.6B` prints the line that serves a model with kvbm. Paste it.

3. Send the same long prompt twice, with other prompts in between.

4. `kvbm status` shows what was offloaded, found again and brought back; `kvbm top` what happens now.

`kvbm plan` says how many gigabytes a load needs; `kvbm replay` serves a recorded one without an engine.

`kvbm why` says of the last requests why they missed what they missed.

`kvbm config` lists every setting, its present value and where that came from.

`kvbm version` says whether engines load this package or NVIDIA's, which has the same name.
""",
)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"kvbm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    _: Annotated[
        bool,
        typer.Option("--version", help="The version, and no more.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Replaced by the app's own help."""


app.command()(doctor)
app.add_typer(disk_app, name="disk")
app.add_typer(remote_app, name="remote")
app.add_typer(keys_app, name="keys")
app.add_typer(fleet_app, name="fleet")
app.command()(status)
app.command()(top)
app.command()(why)
for _command in (*CONTROL_COMMANDS, drain, resume):
    app.command()(_command)
app.command("plan")(plan_tiers)
app.command("replay")(replay_trace)


@app.command()
def config(
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the default.")] = False,
    as_json: Json = False,
) -> None:
    """Every setting: variable, value, where the value comes from, meaning.

    Settings are environment variables. Under vLLM the same names, or the short ones that --json shows, work
    as keys of kv_connector_extra_config, which wins over the environment. What has no effect in this release,
    or only with some engines, says so.

    Exit status 2 if a value cannot be used.
    """
    try:
        settings = KvbmSettings.from_env(None)
        endpoint_apart(settings, "kvbm config", 0)
    except ConfigError as error:
        fail(str(error), BAD_CONFIG_EXIT)
    rows = [row for row in settings.describe() if not changed or row.source is not SettingSource.DEFAULT]
    if as_json:
        typer.echo(json.dumps([_as_json(row) for row in rows], indent=2))
    elif not rows:
        typer.echo("nothing is set: every setting has its default (kvbm config lists them)")
    else:
        _show_settings(rows)
    for line in settings.warnings:
        typer.echo(f"warning: {line}", err=True)


def _show_settings(rows: Sequence[SettingRow]) -> None:
    table = Table(Column("variable", no_wrap=True), "value", "source", "meaning", title="kvbm settings")
    narrow: list[RenderableType] = []
    for row in rows:
        style = "" if row.source is SettingSource.DEFAULT else "bold"
        value, meaning = Text(_value_text(row.value)), Text(row.doc)
        for sentence in limits_of(row.no_effect, row.only):
            meaning.append(f" {sentence}", style="italic")
        table.add_row(row.env, value, row.source.value, meaning, style=style)
        made = "" if row.value in (None, "") else f"={value.plain}"
        narrow.append(Text(f"{row.env}{made}  ({row.source.value})", style=style or "cyan"))
        narrow.append(Padding(meaning, (0, 0, 0, 4), style=style))
    show_table(table_console(), table, narrow)


def _as_json(row: SettingRow) -> dict[str, object]:
    return {
        "variable": row.env,
        "name": row.name,
        "value": row.value,
        "source": row.source.value,
        "meaning": row.doc,
        "no_effect": row.no_effect or None,
        "only": list(map(str, row.only)),
    }


def _value_text(value: object) -> str:
    if value is None:
        return "(unset)"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


@app.command()
def version(
    as_json: Json = False,
) -> None:
    """The version of kvbm, and whether engines would load it or NVIDIA's package of the same name.

    Exit status 1 if they would load NVIDIA's, or nothing.
    """
    is_ours, line = owner_of_guide_names()
    if as_json:
        typer.echo(json.dumps({"version": __version__, "is_loaded": is_ours, "seen": line}, indent=2))
    else:
        typer.echo(f"kvbm {__version__}\n{line}")
    if not is_ours:
        raise typer.Exit(1)


def run() -> None:
    """The command: ours, and what the adapters of installed packages add (``kvbm.commands``)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale without some character ends no command
            stream.reconfigure(errors="replace")
    for entry in sorted(entry_points(group=COMMANDS), key=lambda entry: entry.name):
        try:
            app.command(entry.name)(entry.load())
        except Exception as error:  # somebody else's package; our own commands go on
            typer.echo(f"kvbm: no command {entry.name}: {type(error).__name__}: {error}", err=True)
    app()


if __name__ == "__main__":
    run()
