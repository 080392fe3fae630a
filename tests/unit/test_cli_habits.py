"""What all parts of the ``kvbm`` command do alike: nothing is cut where a terminal is narrow, help by -h, the
shell completes paths, and ``python -m`` does the same.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from rich.console import Console
from rich.table import Table
from typer.testing import CliRunner, Result

from kvbm_core import __version__
from kvbm_core.cli import fleet
from kvbm_core.cli.completion import by_shell
from kvbm_core.cli.console import show_table
from kvbm_core.cli.doctor.catalog import OWN
from kvbm_core.cli.doctor.check import Finding, Level
from kvbm_core.cli.doctor.report import show_findings
from kvbm_core.cli.doctor.run import Looked
from kvbm_core.cli.main import app
from kvbm_core.config import KvbmSettings
from kvbm_core.control.desk import Desk
from kvbm_core.control.messages import Answer, Status
from kvbm_core.control.messages import Result as OrderResult
from kvbm_core.observe.labels import MissReason
from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.why import Account, WhyBook
from kvbm_vllm.serve_line import serve_line
from tests.unit.block_files import HOUR_NS, flip, path_fixture, write  # noqa: F401
from tests.unit.control_bench import here, taking_orders  # noqa: F401
from tests.unit.test_cli import metrics_port  # noqa: F401
from tests.unit.test_cli_remote import NAME, OTHER_NAME, share  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
CUT = "…"
WIDTHS = (60, 80, 200)
TAB_PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting from outside."""
    for variable in KvbmSettings.env_names().values():
        monkeypatch.delenv(variable, raising=False)


def run(width: int, *arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(width), "NO_COLOR": "1"})


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with its words, the whole first."""
    yield path, command
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from commands(inner, (*path, name))


ALL = dict(commands(typer.main.get_command(app)))
GROUPS = [of.typer_instance for of in app.registered_groups if of.typer_instance is not None]


def test_the_walk_sees_the_commands() -> None:
    assert {
        (),
        ("config",),
        ("doctor",),
        ("disk", "verify"),
        ("remote", "sweep"),
        ("fleet", "reset"),
    } <= ALL.keys()


def is_whole(text: str, width: int) -> bool:
    """Whether nothing is cut, and no line is broken by the terminal."""
    return CUT not in text and all(len(line) <= width for line in text.splitlines())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("path", ALL, ids=lambda path: " ".join(path) or "kvbm")
def test_help_cuts_no_name(path: tuple[str, ...], width: int) -> None:
    text = help_of(path, width)
    assert is_whole(text, width), text
    command = ALL[path]
    names = [
        option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
    ]
    names += list(getattr(command, "commands", {}))
    for name in names:
        if name.startswith("-") or name in getattr(command, "commands", {}):
            assert re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text), f"{name}\n{text}"
    for variable in re.findall(r"\b(?:DYN|KVBM)_[A-Z0-9_]+", _words_of(command)):
        assert variable in text, f"{variable}\n{text}"


def help_of(path: tuple[str, ...], width: int, option: str = "--help") -> str:
    """typer's own runner for tests has a width of its own."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as shown:
        patch.setenv("COLUMNS", str(width))
        patch.setenv("NO_COLOR", "1")
        typer.main.get_command(app).main([*path, option], prog_name="kvbm", standalone_mode=False)
    return shown.getvalue()


def _words_of(command: Any) -> str:
    helps = [str(getattr(parameter, "help", "") or "") for parameter in command.params]
    return "\n".join([str(command.help or ""), *helps])


@pytest.mark.parametrize("path", ALL, ids=lambda path: " ".join(path) or "kvbm")
def test_help_is_asked_for_in_short_too(path: tuple[str, ...]) -> None:
    assert help_of(path, 80, "-h") == help_of(path, 80)


def test_a_narrow_terminal_has_the_help_of_an_adapters_command_whole() -> None:
    one = type(app)(name="kvbm", help="One.")
    one.command("serve-line")(serve_line)
    one.command("other")(lambda: None)
    result = CliRunner().invoke(one, ["serve-line", "--help"], env={"COLUMNS": "60", "NO_COLOR": "1"})
    assert "--cpu-cache-gb" in result.output and "--no-metrics" in result.output and CUT not in result.output


# ---------------------------------------------------------------- tables


@pytest.mark.parametrize("width", WIDTHS)
def test_config_shows_every_name_and_what_has_no_effect(width: int) -> None:
    result = run(width, "config")
    assert result.exit_code == 0 and is_whole(result.stdout, width)
    text = " ".join(re.sub(r"[^\x20-\x7e]", " ", result.stdout).split())
    for variable in KvbmSettings.env_names().values():
        assert re.search(rf"\b{variable}\b", text), variable
    if width != 80:
        assert "Only TensorRT-LLM." in text
    assert "No effect: kvbm needs no kernel file." in text


@pytest.mark.parametrize("width", WIDTHS)
def test_status_shows_whole_words(width: int, metrics_port: int) -> None:  # noqa: F811
    result = run(width, "status", "--port", str(metrics_port))
    assert result.exit_code == 0 and is_whole(result.stdout, width)
    for word in ("offloaded", "onboard_timed_out", "1,200", "(recent"):
        assert word in result.stdout


@pytest.mark.parametrize("width", WIDTHS)
def test_disk_tables_show_whole_words(width: int, tmp_path: Path, path: Path) -> None:
    write(path, range(12), age_ns=50 * HOUR_NS)
    for command in ("inspect", "verify"):
        result = run(width, "disk", command, str(tmp_path))
        assert result.exit_code == 0 and is_whole(result.stdout, width), result.stdout
        assert "rank-0-of-1.blocks" in result.stdout.replace("\n", "").replace("│", "").replace(" ", "")
        for word in ("used", "free", "newest") if command == "inspect" else ("good", "damaged", "unreadable"):
            assert word in result.stdout


@pytest.mark.parametrize("width", WIDTHS)
def test_remote_tables_show_whole_words(width: int, share: Path) -> None:  # noqa: F811
    for command in ("ls", "inspect"):
        result = run(width, "remote", command, f"file://{share}")
        tables = result.stdout.partition(": 1 name is")[0].rpartition("\n")[0] or result.stdout
        assert result.exit_code == 0 and CUT not in result.stdout
        for word in ("records", "blocks", "least recently"):
            assert word in tables
        plain = re.sub(r"[\s│]", "", tables)
        assert NAME in plain and OTHER_NAME in plain


@pytest.mark.parametrize("width", WIDTHS)
def test_the_fleets_table_shows_whole_words(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    status = Status(
        engine="vllm",
        version="0.1.0",
        host="a-machine-in-rack-17.example",
        pid=4_194_303,
        model="meta-llama/Llama-3.1-8B-Instruct",
        namespace="0123456789abcdef",
        is_draining=False,
        trouble="",
        tiers={"host": (1_000_000, 2_000_000), "disk": (3, 4)},
        hit_rates={"host": 0.5},
        pending_transfers=0,
    )
    answer = Answer(instance="an-instance-with-a-name", rank=0, result=OrderResult.DONE, status=status)
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        show_table(console, fleet._table([answer], "kvbm fleet status"))
    text = captured.get()
    assert is_whole(text, width)
    for word in (
        "an-instance-with-a-name.0",
        "meta-llama/Llama-3.1-8B-Instruct",
        "0123456789abcdef",
        "2,000,000",
    ):
        assert word in text


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("request_id", ["", "chatcmpl"])
def test_why_shows_whole_words(
    width: int,
    request_id: str,
    here: Path,  # noqa: F811
) -> None:
    metrics = Metrics()
    metrics.why = WhyBook(10)
    evil = "chatcmpl-\x1b[31m\x1b]0;title\x07\u202e0123456789"
    text = "from token 0 on: the same beginning came 5 s ago with another cache_salt, or none"
    account = Account(evil, 12_345_678, 1, 12_345_600, MissReason.OTHER_NAMESPACE, text, remote_tokens=77)
    metrics.why.add(account)
    with taking_orders({"control": "socket", "instance": "one"}, Desk(), metrics):
        shown = run(width, "why", *filter(None, [request_id]))
    assert shown.exit_code == 0 and not re.search("[\x1b\x07\u202e]", shown.stdout)
    assert all(len(line) <= width for line in shown.stdout.splitlines())
    for word in ("request", "prompt", "device", "remote", "missed", "12,345,678", "other_namespace"):
        assert word in shown.stdout and CUT not in shown.stdout


def test_a_locale_without_some_character_ends_no_command() -> None:
    env = os.environ | {"PYTHONIOENCODING": "ascii:strict", "DYN_KVBM_DISK_CACHE_DIR": "/caf\u00e9"}
    words = [sys.executable, "-m", "kvbm_core", "config", "--changed"]
    shown = subprocess.run(words, env=env, capture_output=True, check=False, timeout=TAB_PATIENCE_S)
    assert shown.returncode == 0 and b"/caf?" in shown.stdout and b"Traceback" not in shown.stderr


@pytest.mark.parametrize("width", WIDTHS)
def test_the_doctors_findings_are_whole(width: int) -> None:
    variable = max(KvbmSettings.env_names().values(), key=len)
    finding = Finding(
        Level.WARNING, f"{variable}=5: {'seen ' * 30}", f"set {variable} in /some/{'path' * 30}/x"
    )
    console = Console(width=width, highlight=False)
    with console.capture() as captured:
        show_findings(console, [Looked(OWN[0], (finding, finding), 0.1)])
    text = captured.get()
    assert is_whole(text, width) and text.count(variable) == 4 and OWN[0].name in text
    assert re.sub(r"[\s│]", "", text).count("path" * 30) == 2


def test_a_table_takes_no_more_room_than_it_needs() -> None:
    def shown(width: int) -> str:
        table = Table("name", "words", title="a [b] title")
        table.add_row("a_name_that_stays_whole", "many words " * 6, style="bold")
        console = Console(width=width, highlight=False)
        with console.capture() as captured:
            show_table(console, table)
        return captured.get()

    assert max(map(len, shown(200).splitlines())) < 110
    assert all("a_name_that_stays_whole" in shown(width) for width in (30, 40, 60))
    assert "│" in shown(40) and "│" not in shown(30)


# ---------------------------------------------------------------- JSON


def test_disk_verify_as_json(tmp_path: Path, path: Path) -> None:
    write(path, range(5))
    flip(path, 3, 5000)
    result = run(80, "disk", "verify", str(tmp_path), "--json")
    answer = json.loads(result.stdout)
    (file,) = answer.pop("files")
    assert result.exit_code == 1
    assert answer.pop("took_s") >= 0 and answer == {"directory": str(tmp_path), "erased": None}
    (detail,) = file.pop("details")
    assert file.pop("read_bytes") > 0
    counts = {"records": 5, "good": 4, "damaged": 1, "unreadable": 0}
    assert file == counts | {"path": str(path), "kind": "blocks", "detail": "", "in_use": False, "pid": None}
    assert (detail["slot"], detail["unreadable"]) == (3, False) and detail["what"]
    erased = json.loads(run(80, "disk", "verify", str(tmp_path), "--json", "--erase-damaged").stdout)
    assert erased["erased"] == 1
    again = run(80, "disk", "verify", str(tmp_path), "--json")
    assert again.exit_code == 0 and json.loads(again.stdout)["files"][0]["records"] == 4
    assert json.loads(run(80, "disk", "verify", str(path.parent / ".."), "--json").stdout)["files"]


def test_disk_verify_of_nothing_as_json(tmp_path: Path) -> None:
    assert json.loads(run(80, "disk", "verify", str(tmp_path), "--json").stdout)["files"] == []


def test_remote_verify_and_sweep_as_json(share: Path) -> None:  # noqa: F811
    url = f"file://{share}"
    result = run(80, "remote", "verify", url, "--json")
    assert result.exit_code == 0
    wanted = {"url": url, "good": 12, "foreign": {}, "removed": 0, "bad": [], "not_looked_at": []}
    assert json.loads(result.stdout) == wanted
    record = next(path for path in share.rglob("*") if path.is_file() and path.stat().st_size > 4096)
    with record.open("r+b") as file:
        file.seek(4100)
        file.write(b"damaged")
    damaged = run(80, "remote", "verify", url, "--json", "--remove-damaged")
    answer = json.loads(damaged.stdout)
    assert damaged.exit_code == 1 and answer["removed"] == len(answer["bad"]) == 1 and answer["good"] == 11
    swept = run(80, "remote", "sweep", url, "--max-gb", "1", "--json")
    told = json.loads(swept.stdout)
    assert (
        swept.exit_code == 0 and told["records"] == 11 and told["removed"] == 0 and told["max_bytes"] == 10**9
    )


def test_remote_rm_as_json(share: Path) -> None:  # noqa: F811
    url = f"file://{share}"
    asked = run(80, "remote", "rm", url, "--all", "--json")
    assert asked.exit_code == 2 and "give --yes too" in asked.stderr
    told = json.loads(run(80, "remote", "rm", url, "--all", "--yes", "--json").stdout)
    assert told["url"] == url and sum(of["records"] for of in told["removed"]) == 12
    nothing = json.loads(run(80, "remote", "rm", url, "--all", "--yes", "--json").stdout)
    assert sum(of["records"] for of in nothing["removed"]) == 0


def test_keys_as_json(tmp_path: Path) -> None:
    made = json.loads(run(80, "keys", "new", str(tmp_path / "keys"), "--name", "one", "--json").stdout)
    assert Path(made["KVBM_CURVE_KEY_FILE"]).is_file() and Path(made["public_key_file"]).is_file()
    assert made["KVBM_CURVE_ALLOWED"] == str(tmp_path / "keys")
    operator = json.loads(run(80, "keys", "operator", str(tmp_path / "operator"), "--json").stdout)
    assert list(operator) == ["KVBM_CONTROL_OPERATORS"]


def test_serve_line_as_json() -> None:
    one = typer.Typer()
    one.command("serve-line")(serve_line)
    told = json.loads(CliRunner().invoke(one, ["a model", "--json"]).stdout)
    assert told["environment"] == {"DYN_KVBM_CPU_CACHE_GB": "20", "DYN_KVBM_METRICS": "true"}
    assert told["command"][:3] == ["vllm", "serve", "a model"]


def test_every_command_answers_in_json() -> None:
    leaves = {path: command for path, command in ALL.items() if not getattr(command, "commands", None)}
    options = {
        path: {name for param in command.params for name in param.opts} for path, command in leaves.items()
    }
    assert len(leaves) > 20 and [path for path, names in options.items() if "--json" not in names] == []


def test_version_as_json() -> None:
    answer = json.loads(run(80, "version", "--json").stdout)
    assert answer["version"] == __version__ and answer["is_loaded"] is True and "is ours" in answer["seen"]


# ---------------------------------------------------------------- python -m, and Tab


@pytest.mark.parametrize("module", ["kvbm", "kvbm_core"])
def test_the_command_by_python(module: str, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'compat'}"}
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"kvbm {__version__}\n")


def test_paths_are_left_to_the_shell() -> None:
    number = 0
    for info in [*app.registered_commands, *(one for of in GROUPS for one in of.registered_commands)]:
        assert info.callback is not None
        for name, kind in get_type_hints(info.callback, include_extras=True).items():
            if "Path" in str(get_args(kind)[:1] or kind):
                (how,) = get_args(kind)[1:]
                assert how.autocompletion is by_shell, f"{info.name} {name}: write autocompletion=by_shell"
                number += 1
    assert number >= 8


def test_tab_completes_a_path_in_bash(tmp_path: Path) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("NOT RUN: completion: no bash")
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "kvbm"
    paths = [str(ROOT), str(ROOT / "compat")]
    lines = [f"#!{sys.executable}", "import sys", f"sys.path[:0] = {paths!r}"]
    program.write_text("\n".join([*lines, "from kvbm_core.cli.main import run", "run()", ""]))
    program.chmod(0o755)
    (tmp_path / "a-folder").mkdir()
    (tmp_path / "a-folder" / "rank-0-of-1.blocks").touch()
    environ = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}", "PS1": "$ ", "TERM": "dumb"}
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        [bash, "--norc", "--noprofile", "-i"],
        cwd=tmp_path,
        env=environ,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    try:
        os.write(ours, b'eval "$(_KVBM_COMPLETE=source_bash kvbm)"; echo completion $((40 + 2))\n')
        _read_until(ours, b"completion 42")
        os.write(ours, b"kvbm disk verify a-fo\t")
        _read_until(ours, b"a-folder/")
        os.write(ours, b"ra\t")
        _read_until(ours, b"rank-0-of-1.blocks")
        os.write(ours, b"\x15kvbm doc\t")
        _read_until(ours, b"kvbm doctor")
    finally:
        shell.kill()
        shell.wait(10)
        os.close(ours)


def _read_until(terminal: int, wanted: bytes) -> None:
    seen, ends_at_s = b"", time.monotonic() + TAB_PATIENCE_S
    while wanted not in seen:
        left_s = ends_at_s - time.monotonic()
        assert left_s > 0 and select.select([terminal], [], [], left_s)[0], seen
        seen += os.read(terminal, 4096)
