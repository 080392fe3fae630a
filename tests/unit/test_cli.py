"""The ``kvbm`` command, run as a user runs it; `status` against a real metrics endpoint."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from kvbm_core import __version__
from kvbm_core.cli.main import app
from kvbm_core.cli.status import StatusError, format_bytes, parse_samples, status_rows
from kvbm_core.config import KvbmSettings
from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.server import MetricsServer
from kvbm_core.types import Direction, Tier
from kvbm_vllm.serve_line import serve_line


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting from outside."""
    for variable in KvbmSettings.env_names().values():
        monkeypatch.delenv(variable, raising=False)


class Ran(NamedTuple):
    """What a run of the command left behind; ``output`` is both streams as a terminal shows them."""

    exit_code: int
    stdout: str
    stderr: str
    output: str


def run(*arguments: str) -> Ran:
    """Runs the command in this process, without colors and as wide as is known."""
    result = CliRunner().invoke(app, list(arguments), env={"NO_COLOR": "1", "COLUMNS": "120"})
    return Ran(result.exit_code, result.stdout, result.stderr, result.output)


def on_one_line(text: str) -> str:
    """Output without table lines and line breaks."""
    return " ".join("".join(" " if ord(char) in range(0x2500, 0x2600) else char for char in text).split())


@pytest.fixture
def metrics_port() -> Iterator[int]:
    """A live endpoint with the numbers of a small session."""
    metrics = Metrics()
    metrics.matched_tokens(4096)
    metrics.offloaded_blocks(300)
    metrics.onboarded_blocks(128)
    metrics.request_hits(3, 0, 4)
    metrics.bytes_moved(Direction.OFFLOAD, 2_500_000)
    metrics.transfer_seconds(Direction.OFFLOAD, 0.02)
    metrics.tier_usage(Tier.HOST, 300, 1200)
    metrics.failure("onboard_timed_out", 2)
    server = MetricsServer(0, metrics, "127.0.0.1")
    assert server.start()
    assert server.bound_port is not None
    yield server.bound_port
    server.close()


def test_help_teaches_the_first_session() -> None:
    result = run("--help")
    assert result.exit_code == 0
    text = on_one_line(result.output)
    for words in ("kvbm serve-line Qwen/Qwen3-0.6B", "kvbm status", "kvbm config", "keeps the KV blocks"):
        assert words in text


def test_version() -> None:
    assert run("version").output.startswith(f"kvbm {__version__}\n")


def test_config_lists_every_setting_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "4.5")
    rows = json.loads(run("config", "--json").stdout)
    assert [row["variable"] for row in rows] == list(KvbmSettings.env_names().values())
    by_variable = {row["variable"]: row for row in rows}
    assert by_variable["DYN_KVBM_CPU_CACHE_GB"] | {"meaning": ""} == {
        "variable": "DYN_KVBM_CPU_CACHE_GB",
        "name": "cpu_cache_gb",
        "value": 4.5,
        "source": "env",
        "meaning": "",
        "no_effect": None,
        "only": ["vLLM", "TensorRT-LLM", "SGLang's linker"],
    }
    assert by_variable["DYN_FATBIN_PATH"]["no_effect"] == "kvbm needs no kernel file"
    assert by_variable["DYN_KVBM_METRICS_PORT"]["source"] == "default"
    assert all(row["meaning"] for row in rows)


def test_config_table_shows_variable_value_and_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_METRICS", "1")
    result = run("config")
    text = on_one_line(result.output)
    assert result.exit_code == 0
    assert "DYN_KVBM_METRICS true env" in text
    assert "DYN_KVBM_METRICS_PORT 6880 default" in text


def test_config_changed_leaves_the_defaults_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "4")
    rows = json.loads(run("config", "--changed", "--json").stdout)
    assert [row["variable"] for row in rows] == ["DYN_KVBM_CPU_CACHE_GB"]


def test_config_changed_with_nothing_set_says_so() -> None:
    result = run("config", "--changed")
    assert result.exit_code == 0
    assert result.stdout == "nothing is set: every setting has its default (kvbm config lists them)\n"


def test_config_shows_warnings_beside_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_METRICS_PORT", "none")
    result = run("config", "--json")
    assert result.exit_code == 0
    assert "warning: kvbm: DYN_KVBM_METRICS_PORT=none" in result.stderr
    assert json.loads(result.stdout)


def test_config_with_a_value_that_cannot_be_used_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "lots")
    result = run("config")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("kvbm: DYN_KVBM_CPU_CACHE_GB=lots: ")
    assert result.stderr.count("\n") == 1


def test_config_refuses_an_address_of_the_leader_that_an_engine_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DYN_KVBM_LEADER_ZMQ_HOST", "10.0.0.1")
    result = run("config")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "DYN_KVBM_LEADER_ZMQ_HOST=tcp://10.0.0.1:*: can be reached from other machines" in result.stderr
    monkeypatch.setenv("DYN_KVBM_LEADER_ZMQ_HOST", "127.0.0.1")
    assert run("config").exit_code == 0


def test_the_version_as_an_option() -> None:
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"kvbm {__version__}\n")


def test_status_reads_a_live_endpoint(metrics_port: int) -> None:
    result = run("status", "--port", str(metrics_port))
    assert result.exit_code == 0
    text = on_one_line(result.output)
    for words in (
        "host hit rate (recent requests) 75.0 %",
        "tokens matched 4,096",
        "device to host 300 blocks",
        "host to device 128 blocks",
        "2.5 MB in 1 transfer of 20.0 ms on average",
        "host 300 of 1,200 blocks (25 %)",
        "failures onboard_timed_out 2",
        "guarded errors none 0",
    ):
        assert words in text


def test_status_shows_disk_and_remote_tier_where_there_are_any(metrics_port: int) -> None:
    without = on_one_line(run("status", "--port", str(metrics_port)).output)
    assert "disk" not in without and "remote" not in without
    metrics = Metrics()
    metrics.offloaded_blocks(40, Tier.HOST, Tier.DISK)
    metrics.onboarded_blocks(30, Tier.DISK, Tier.DEVICE)
    metrics.request_hits(0, 2, 4, 1)
    metrics.tier_usage(Tier.DISK, 40, 400)
    metrics.tier_transfer(Tier.HOST, Tier.DISK, 3_000_000, 0.002)
    metrics.read_again(Tier.DISK, 1_500_000)
    metrics.headless_blocks(Tier.DISK, 3)
    metrics.offloaded_blocks(50, Tier.HOST, Tier.REMOTE)
    metrics.onboarded_blocks(20, Tier.REMOTE, Tier.HOST)
    metrics.remote_failures(6, is_write=False)
    metrics.remote_failures(7, is_write=True)
    server = MetricsServer(0, metrics, "127.0.0.1")
    assert server.start()
    try:
        text = on_one_line(run("status", "--port", str(server.bound_port)).output)
    finally:
        server.close()
    for words in (
        "disk hit rate (recent requests) 50.0 %",
        "remote hit rate (recent requests) 25.0 %",
        "to disk 40 blocks",
        "disk to device 30 blocks",
        "disk 40 of 400 blocks (10 %)",
        "host to disk 3 MB at 1.5 GB/s on average",
        "written to disk 3 MB, 1.5 MB (50 %) of them read again",
        "disk without what comes before 3 blocks",
        "to remote 50 blocks",
        "from remote 20 blocks",
        "blocks not fetched from remote 6",
        "blocks not stored in remote 7",
    ):
        assert words in text
    # As under SGLang's HiCache: kvbm has no host tier there.
    assert "host hit rate" not in text and "device to host" not in text
    assert "failures none" not in text


def test_status_before_the_first_slots_are_ready_shows_the_host() -> None:
    rows = {what for _, what, _ in status_rows(parse_samples(Metrics().exposition()))}
    assert {"host hit rate (recent requests)", "device to host"} <= rows
    assert not [what for what in rows if "disk" in what or "remote" in what]


def test_status_shows_wrong_blocks_and_silent_ranks(metrics_port: int) -> None:
    text = on_one_line(run("status", "--port", str(metrics_port)).output)
    assert "audited" not in text
    assert "ranks that do not answer" not in text
    metrics = Metrics()
    metrics.audited_blocks("equal", 90)
    metrics.audited_blocks("wrong", 3)
    metrics.set_silent_ranks(2, 7)
    server = MetricsServer(0, metrics, "127.0.0.1")
    assert server.start()
    try:
        text = on_one_line(run("status", "--port", str(server.bound_port)).output)
    finally:
        server.close()
    for words in ("audited equal 90 blocks", "wrong 3 blocks", "ranks that do not answer 2"):
        assert words in text


def test_status_as_json_has_every_series(metrics_port: int) -> None:
    series = json.loads(run("status", "--port", str(metrics_port), "--json").stdout)
    of = {"instance": f"http://127.0.0.1:{metrics_port}"}
    assert {**of, "name": "kvbm_offload_blocks_d2h", "labels": {}, "value": 300.0} in series
    moved = {"name": "kvbm_bytes_total", "labels": {"direction": "offload"}, "value": 2_500_000.0}
    assert {**of, **moved} in series


def test_status_without_an_engine_says_what_to_do() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    result = run("status", "--port", str(port))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert f":{port}/metrics" in result.stderr
    assert "DYN_KVBM_METRICS=true" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("page", ["kvbm_matched_tokens not-a-number\n", "<html>hello</html>\n"])
def test_a_page_that_is_no_metrics_page_is_refused(page: str) -> None:
    with pytest.raises(StatusError, match="Prometheus"):
        parse_samples(page)


def served(*arguments: str) -> str:
    """What vLLM's command says; tests/unit/test_packaging.py has it as a part of ours."""
    app = typer.Typer()
    app.command()(serve_line)
    return CliRunner().invoke(app, list(arguments)).stdout


@pytest.mark.parametrize(
    ("model", "gigabytes", "expected"),
    [("Qwen/Qwen3-0.6B", None, "20"), ("./my model", "0.5", "0.5")],
)
def test_serve_line_is_the_guides_command(model: str, gigabytes: str | None, expected: str) -> None:
    options = ["--cpu-cache-gb", gigabytes] if gigabytes else []
    words = shlex.split(served(model, *options).replace("\\\n", " "))
    assert words[:2] == [f"DYN_KVBM_CPU_CACHE_GB={expected}", "DYN_KVBM_METRICS=true"]
    assert words[2:6] == ["vllm", "serve", model, "--kv-transfer-config"]
    assert json.loads(words[6]) == {
        "kv_connector": "DynamoConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvbm.vllm_integration.connector",
    }


def test_serve_line_without_metrics() -> None:
    assert "METRICS" not in served("m", "--no-metrics")


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e6, "2.5 MB"), (3e12, "3.0 TB")]
)
def test_bytes_for_people(number: float, text: str) -> None:
    assert format_bytes(number) == text


def test_what_libraries_write_is_kept_off_the_terminal_and_our_own_lines_are_not() -> None:
    program = """
import logging, os, sys
from kvbm_core.cli.console import fail, without_library_lines
try:
    with without_library_lines():
        os.write(2, b"a library's line\\n")
        print("our line", file=sys.stderr)
        logging.getLogger("kvbm").warning("our warning")
        fail("our error", 2)
finally:
    os.write(2, b"afterwards\\n")
    print("our last line", file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    shown = "our line\nour warning\nour error\nafterwards\nour last line\n"
    assert done.stderr.startswith(shown) and "library" not in done.stderr.partition("Traceback")[0]
    assert (done.stdout, done.returncode) == ("", 1)
