"""The ``kvbm`` command: what is configured, what is going on, and how to serve a model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Annotated

import typer
from rich.table import Table

from kvbm_core import __version__
from kvbm_core.cli.console import fail, table_console
from kvbm_core.cli.disk import disk_app
from kvbm_core.cli.remote import remote_app
from kvbm_core.cli.status import StatusError, fetch_samples, status_rows
from kvbm_core.cli.whose import owner_of_guide_names
from kvbm_core.config import KvbmSettings, SettingRow, SettingSource
from kvbm_core.errors import ConfigError

COMMANDS = "kvbm.commands"
"""Entry points: a command's name, and the function that typer makes it of."""
BAD_CONFIG_EXIT = 2
UNREACHABLE_EXIT = 1

app = typer.Typer(
    name="kvbm",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="""
kvbm keeps the KV blocks that an LLM engine would throw away and brings them back when a prompt
starts the same way.

The engine loads it; this command only looks and explains. A first session:

1. `kvbm serve-line Qwen/Qwen3-0.6B` prints the line that serves a model with kvbm. Paste it.

2. Send the same long prompt twice, with other prompts in between.

3. `kvbm status` shows what was offloaded, found again and brought back.

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


app.add_typer(disk_app, name="disk")
app.add_typer(remote_app, name="remote")


@app.command()
def config(
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the default.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, for programs.")] = False,
) -> None:
    """Every setting: variable, value, where the value comes from, meaning.

    Settings are environment variables. Under vLLM the same names, or the short ones that --json shows, work
    as keys of kv_connector_extra_config, which wins over the environment. Exit status 2 if a value cannot be
    used.
    """
    try:
        settings = KvbmSettings.from_env(None)
    except ConfigError as error:
        fail(str(error), BAD_CONFIG_EXIT)
    rows = [row for row in settings.describe() if not changed or row.source is not SettingSource.DEFAULT]
    if as_json:
        typer.echo(json.dumps([_as_json(row) for row in rows], indent=2))
    elif not rows:
        typer.echo("nothing is set: every setting has its default (kvbm config lists them)")
    else:
        table = Table("variable", "value", "source", "meaning", title="kvbm settings")
        for row in rows:
            style = "" if row.source is SettingSource.DEFAULT else "bold"
            table.add_row(row.env, _value_text(row.value), row.source.value, row.doc, style=style)
        table_console().print(table)
    for line in settings.warnings:
        typer.echo(f"warning: {line}", err=True)


def _as_json(row: SettingRow) -> dict[str, object]:
    return {
        "variable": row.env,
        "name": row.name,
        "value": row.value,
        "source": row.source.value,
        "meaning": row.doc,
    }


def _value_text(value: object) -> str:
    if value is None:
        return "(unset)"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


@app.command()
def status(
    port: Annotated[int, typer.Option(help="The engine's DYN_KVBM_METRICS_PORT.", min=1, max=65535)] = 6880,
    host: Annotated[str, typer.Option(help="Where the engine runs.")] = "127.0.0.1",
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds to wait.", min=0.1)] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="All series as JSON, for programs.")] = False,
) -> None:
    """What a running engine's kvbm has done: tiers, hits, offloaded and onboarded blocks, failures.

    Reads the metrics page, so the engine must run with DYN_KVBM_METRICS=true. Exit status 1 if it is
    not there.
    """
    try:
        samples = fetch_samples(host, port, timeout_s)
    except StatusError as error:
        fail(f"kvbm status: {error}", UNREACHABLE_EXIT)
    if as_json:
        series = [
            {"name": name, "labels": labels, "value": value}
            for name, found in samples.items()
            for labels, value in found
        ]
        typer.echo(json.dumps(series, indent=2))
        return
    _print_sections(f"kvbm at {host}:{port}", status_rows(samples))


def _print_sections(title: str, rows: Iterable[tuple[str, str, str]]) -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for section, what, value in rows:
        sections.setdefault(section, []).append((what, value))
    table = Table("", "what", "value", title=title)
    for section, lines in sections.items():
        for number, (what, value) in enumerate(lines):
            table.add_row("" if number else section, what, value, end_section=number == len(lines) - 1)
    table_console().print(table)


@app.command()
def version() -> None:
    """The version of kvbm, and whether engines would load it or NVIDIA's package of the same name.

    Exit status 1 if they would load NVIDIA's, or nothing.
    """
    is_ours, line = owner_of_guide_names()
    typer.echo(f"kvbm {__version__}\n{line}")
    if not is_ours:
        raise typer.Exit(1)


def run() -> None:
    """The command: ours, and what the adapters of installed packages add (``kvbm.commands``)."""
    for entry in sorted(entry_points(group=COMMANDS), key=lambda entry: entry.name):
        try:
            app.command(entry.name)(entry.load())
        except Exception as error:  # somebody else's package; our own commands go on
            typer.echo(f"kvbm: no command {entry.name}: {type(error).__name__}: {error}", err=True)
    app()


if __name__ == "__main__":
    run()
