"""``kvbm doctor``."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.progress import MofNCompleteColumn

from kvbm_core.cli.completion import by_shell, complete_engine, engine_names
from kvbm_core.cli.console import fail, progress_bar, table_console
from kvbm_core.cli.doctor.check import Check, Level, Subject, warning
from kvbm_core.cli.doctor.report import ERROR_EXIT, as_json, exit_code, show_findings, summary
from kvbm_core.cli.doctor.run import Looked, of_config_error, run_checks
from kvbm_core.cli.options import Json
from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError

_SETTINGS = "settings"


def doctor(
    model: Annotated[
        str,
        typer.Option(
            metavar="PATH|NAME",
            help="A model's folder, or its name in the hub's cache.",
            autocompletion=by_shell,
        ),
    ] = "",
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The engine that is to serve; else any.", autocompletion=complete_engine
        ),
    ] = "",
    problems: Annotated[bool, typer.Option("--problems", help="Only warnings and errors.")] = False,
    as_json_text: Json = False,
) -> None:
    """What works on this machine, for this model and for the settings of this shell, and what to do if not.

    Engines are vllm, sglang and trtllm.

    Run it where the engine will run: same container, same user, same environment. It changes nothing: what it
    writes are temporary files and objects, which it removes. It takes seconds.

    Exit status: 0 if all is well (notes are no trouble); 1 with warnings; 2 with errors, or for wrong usage.

    Example: `kvbm doctor --engine vllm --model Qwen/Qwen3-0.6B && echo ready`
    """
    from kvbm_core.cli.doctor.catalog import OWN, engine_checks  # all that engines load: seconds

    if engine and engine not in engine_names():
        fail(f"kvbm doctor: --engine {engine}: write one of {', '.join(engine_names())}", ERROR_EXIT)
    try:
        subject = Subject(KvbmSettings.from_env(None), model, engine)
    except ConfigError as problem:
        check = next(check for check in OWN if check.name == _SETTINGS)
        looked = [Looked(check, (of_config_error(problem),), 0.0)]
        _show(looked, problems=problems, as_json_text=as_json_text)
        typer.echo("nothing else was looked at: correct this setting, and run it again", err=True)
        raise typer.Exit(ERROR_EXIT) from None
    of_engines = engine_checks(engine)
    looked = _run((*of_engines, *OWN), subject)
    if not any(one.findings for one in looked[: len(of_engines)]):
        looked.insert(0, _no_engine())
    _show(looked, problems=problems, as_json_text=as_json_text)
    raise typer.Exit(exit_code(looked))


def _run(checks: tuple[Check, ...], subject: Subject) -> list[Looked]:
    with progress_bar(MofNCompleteColumn()) as progress:
        bar = progress.add_task("checks", total=len(checks))
        waiting = [check.name for check in checks]

        def done(looked: Looked) -> None:
            waiting.remove(looked.check.name)
            progress.update(bar, advance=1, description=f"waiting for {waiting[0]}" if waiting else "checks")

        return run_checks(checks, subject, done)


def _no_engine() -> Looked:
    seen = "no engine that kvbm serves is installed in this environment"
    finding = warning(seen, "run kvbm doctor with the Python of the engine's environment")
    return Looked(Check("engine", "whether an engine is there", lambda subject: ()), (finding,), 0.0)


def _show(looked: list[Looked], *, problems: bool, as_json_text: bool) -> None:
    if as_json_text:
        typer.echo(json.dumps(as_json(looked), indent=2))
        return
    bad = (Level.WARNING, Level.ERROR)
    shown = [
        one._replace(findings=tuple(found for found in one.findings if found.level in bad or not problems))
        for one in looked
    ]
    console = table_console()
    if any(one.findings for one in shown):
        show_findings(console, shown)
    for line in summary(looked):
        console.print(line, overflow="fold", markup=False)
