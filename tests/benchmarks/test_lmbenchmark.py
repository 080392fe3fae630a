"""benchmarks.lmbenchmark: what it tells LMBenchmark's program, and what it makes of its files.

LMBenchmark is no part of this repository: a stand-in for its program, which takes the same arguments and
writes the same columns, talks to a real HTTP server. KVBM_LMBENCHMARK names a checkout for the real one.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.lmbenchmark.__main__ import main
from benchmarks.lmbenchmark.checkout import (
    FOLDER,
    FULL,
    PROGRAM,
    TINY,
    Checkout,
    Request,
    read_requests,
    summary_of,
)
from benchmarks.lmbenchmark.report import BASELINE, OURS
from benchmarks.suite import CannotRun

STAND_IN = """
import argparse, csv, json, time, urllib.request
parser = argparse.ArgumentParser()
for name in ("users", "rounds", "qps"):
    parser.add_argument("--" + ("num-" + name if name != "qps" else name), type=float, required=True)
for name in ("shared-system-prompt", "user-history-prompt", "answer-len", "init-user-id", "time"):
    parser.add_argument("--" + name, type=int, required=True)
for name in ("model", "base-url", "output"):
    parser.add_argument("--" + name, required=True)
options = parser.parse_args()
if options.model == "broken":
    raise SystemExit("no such model")
rows = []
for number in range(int(options.num_users)):
    body = json.dumps({"user": options.init_user_id + number, "words": options.user_history_prompt}).encode()
    begun = time.time()
    urllib.request.urlopen(urllib.request.Request(options.base_url + "/ask", body)).read()
    rows.append((10.0, float(options.answer_len), 0.5, 0.1, number, 1, begun, begun + 2))
with open(options.output, "w", newline="") as file:
    writer = csv.writer(file)
    names = "prompt_tokens generation_tokens ttft generation_time user_id question_id launch_time finish_time"
    writer.writerow(names.split())
    writer.writerows(rows if options.model != "silent" else [])
"""
FIELDS = ["prompt_tokens", "generation_tokens", "ttft", "launch_time", "finish_time"]


class Recorder(ThreadingHTTPServer):
    """Keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked: list[dict[str, int]] = []

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    """Says nothing in return."""

    server: Recorder

    def do_POST(self) -> None:
        """A question of the stand-in."""
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *values: object) -> None:
        """Nowhere."""


@pytest.fixture
def servers() -> Iterator[tuple[Recorder, Recorder]]:
    """Ours and the baseline."""
    both = Recorder(), Recorder()
    threads = [threading.Thread(target=server.serve_forever) for server in both]
    for thread in threads:
        thread.start()
    yield both
    for server, thread in zip(both, threads, strict=True):
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like one, and packages that it needs."""
    folder = tmp_path / "LMBenchmark"
    (folder / FOLDER).mkdir(parents=True)
    (folder / FOLDER / PROGRAM).write_text(STAND_IN)
    return folder


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """This one, with empty packages of the names that LMBenchmark imports."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in ("openai", "pandas"):
        (packages / f"{name}.py").touch()
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program


def test_both_servers_are_asked_the_same_and_reported(
    servers: tuple[Recorder, Recorder], checkout: Path, python: Path, tmp_path: Path
) -> None:
    ours, baseline = servers
    output = tmp_path / "out"
    arguments = ["--python", str(python), "--output", str(output), "--model", "m", "--sizes", "tiny"]
    arguments += ["--ours", ours.url, "--baseline", baseline.url, "--repeats", "2"]
    assert main([str(checkout), *arguments]) == 0
    long, short = TINY
    # Each run: one user to warm up, then all; everybody's prompts are new.
    assert len(ours.asked) == 2 * (1 + long.users + 1 + short.users)
    assert sorted(map(str, ours.asked)) == sorted(map(str, baseline.asked))
    users = {asked["user"] for asked in ours.asked}
    assert len(users) == 2 * (long.users + short.users)  # the one that warmed up asks again
    data = json.loads((output / "lmbenchmark.json").read_text())
    runs = [(run["server"], run["workload"]["name"], run["repeat"]) for run in data["runs"]]
    names = ("long", "short")
    first = [(BASELINE, name, 0) for name in names] + [(OURS, name, 0) for name in names]
    second = [(OURS, name, 1) for name in names] + [(BASELINE, name, 1) for name in names]
    assert runs == first + second
    page = (output / "lmbenchmark.md").read_text()
    assert "| mean time to first token, ms | 500 | 500 | 1.00 |" in page and "## short input, 4 " in page
    assert (output / "lmbenchmark.png").read_bytes().startswith(b"\x89PNG")


def test_rates_replace_the_workloads_own(
    servers: tuple[Recorder, Recorder], checkout: Path, python: Path, tmp_path: Path
) -> None:
    ours, baseline = servers
    arguments = ["--python", str(python), "--output", str(tmp_path), "--model", "m", "--only", "long"]
    arguments += ["--ours", ours.url, "--baseline", baseline.url, "--qps", "0.5", "2", "--duration-s", "7"]
    assert main([str(checkout), *arguments]) == 0
    data = json.loads((tmp_path / "lmbenchmark.json").read_text())
    assert [run["workload"]["qps"] for run in data["runs"]] == [0.5, 2, 0.5, 2]
    assert {run["workload"]["duration_s"] for run in data["runs"]} == {7}
    assert {run["workload"]["history_words"] for run in data["runs"]} == {FULL[0].history_words}
    assert {asked["words"] for asked in ours.asked} == {20000}


@pytest.mark.parametrize(
    ("model", "message"),
    [("broken", "LMBenchmark ended with status 1; its log is"), ("silent", "no request has ended")],
)
def test_a_run_that_fails_is_no_result(  # noqa: PLR0917
    servers: tuple[Recorder, Recorder],
    checkout: Path,
    python: Path,
    tmp_path: Path,
    model: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    urls = ["--ours", servers[0].url, "--baseline", servers[1].url]
    arguments = ["--python", str(python), "--output", str(tmp_path), "--model", model, *urls]
    assert main([str(checkout), *arguments]) == 1
    output = capsys.readouterr().out
    assert message in output and not (tmp_path / "lmbenchmark.json").exists()


def test_what_is_missing_is_said_in_one_line(checkout: Path, python: Path, tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="is no checkout of LMBenchmark; git clone"):
        Checkout(tmp_path, python)
    with pytest.raises(CannotRun, match="--python /no/such: No such file"):
        Checkout(checkout, "/no/such")
    (tmp_path / "packages" / "pandas.py").write_text("import no_such_package")
    with pytest.raises(CannotRun, match=r"No module named 'no_such_package'; .* -m pip install -r .*choose"):
        Checkout(checkout, python)
    with pytest.raises(SystemExit):
        main([str(checkout), "--ours", "http://x"])


def test_the_summary_by_hand() -> None:
    rows = [Request(100, 10, 0.1 * n, 1000.0 + n, 1001.0 + n) for n in range(1, 11)]
    found = summary_of(rows)
    assert (found.requests, found.requests_per_s) == (10, 1.0)
    assert (found.input_tokens_per_s, found.output_tokens_per_s) == (100.0, 10.0)
    times = (found.ttft_mean_s, found.ttft_median_s, found.ttft_p90_s)
    assert times == pytest.approx((0.55, 0.55, 1.0))


def test_a_file_that_is_something_else(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    for text, message in (("a,b\n1,2\n", "not what this LMBenchmark"), ("", "no request has ended")):
        path.write_text(text)
        with pytest.raises(CannotRun, match=message):
            read_requests(path)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([FIELDS, [10, 0, 0, 1, 2], [10, 2, 0.1, 1, 2]])
    with pytest.raises(CannotRun, match="1 of 2 requests brought no token"):
        read_requests(path)
    with pytest.raises(CannotRun, match="No such file"):
        read_requests(tmp_path / "none.csv")


def test_the_real_program_takes_our_arguments() -> None:
    folder = os.environ.get("KVBM_LMBENCHMARK")
    if not folder:
        pytest.skip("NOT RUN: KVBM_LMBENCHMARK names no checkout of LMBenchmark")
    text = (Path(folder) / FOLDER / PROGRAM).read_text(encoding="utf-8")
    options = ("num-users", "num-rounds", "qps", "time", "shared-system-prompt", "user-history-prompt")
    for option in (*options, "answer-len", "init-user-id", "model", "base-url", "output"):
        assert f'"--{option}"' in text
    assert all(f'df["{name}"]' in text for name in FIELDS)
