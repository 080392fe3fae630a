"""The user's checkout of LMBenchmark: its program as it is, and what it writes."""

from __future__ import annotations

import csv
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

from benchmarks.suite import CannotRun

SOURCE = "https://github.com/LMCache/LMBenchmark"
FOLDER, PROGRAM, REQUIREMENTS = "synthetic-multi-round-qa", "multi-round-qa.py", "requirements.txt"
WARM_UP_QPS, WARM_UP_ROUNDS = 2.0, 2
GRACE_S = 300.0
"""Requests that were under way when the time was over still end."""


@dataclass(frozen=True)
class Workload:
    """One of LMBenchmark's synthetic workloads. Lengths of prompts are in words "hi": a token each for most
    tokenizers. ``warm_up_s``: before each run, one user at a time, as in its scripts.
    """

    name: str
    users: int
    rounds: int
    system_words: int
    history_words: int
    answer_tokens: int
    qps: float
    duration_s: int
    warm_up_s: int


FULL = (
    Workload("long", 15, 20, 1000, 20000, 100, 0.1, 100, 10),
    Workload("short", 320, 20, 0, 256, 20, 15.0, 100, 200),
)
"""Long and short input, both with short output: the numbers of LMBenchmark's README and scripts."""
TINY = (
    Workload("long", 5, 8, 50, 950, 8, 1.0, 40, 4),
    Workload("short", 24, 6, 0, 64, 4, 4.0, 40, 4),
)
"""The same shapes for the tiny model on a CPU, whose tokenizer takes three tokens for a word."""


@dataclass(frozen=True)
class Request:
    """One row of what LMBenchmark writes, with its names. Seconds; moments count from the epoch."""

    prompt_tokens: int
    generation_tokens: int
    ttft: float
    launch_time: float
    finish_time: float


@dataclass(frozen=True)
class Summary:
    """Of one run. ``ttft_...``: time to the first token; ``p90``: nine of ten requests took less."""

    requests: int
    ttft_mean_s: float
    ttft_median_s: float
    ttft_p90_s: float
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float


class Checkout:
    """``python``: one that has its requirements. CannotRun if it has not, or this is no checkout."""

    def __init__(self, folder: Path, python: Path | str) -> None:
        self._program = folder.resolve() / FOLDER / PROGRAM
        self._python = str(python)
        if not self._program.is_file():
            raise CannotRun(f"{folder} is no checkout of LMBenchmark; git clone {SOURCE}")
        try:
            check = subprocess.run(
                [self._python, "-c", "import openai, pandas"], capture_output=True, text=True, check=False
            )
        except OSError as error:
            raise CannotRun(f"--python {python}: {error.strerror}") from None
        if check.returncode:
            why = check.stderr.strip().rpartition("\n")[2]
            needed = self._program.parent / REQUIREMENTS
            raise CannotRun(f"{python}: {why}; {python} -m pip install -r {needed}, or choose with --python")

    def run(self, workload: Workload, url: str, model: str, output: Path, *, first_user: int) -> Summary:
        """Plays the workload, after its warm-up. ``output``: its CSV; a log beside it. ``first_user``: each
        user's prompts are their own, so another number is cold. CannotRun if it fails.
        """
        warm_up = self._command(url, model, first_user, output.with_suffix(".warm-up.csv"))
        warm_up += ["--num-users", "1", "--num-rounds", str(WARM_UP_ROUNDS), "--qps", str(WARM_UP_QPS)]
        self._play([*warm_up, *_lengths(workload), "--time", str(workload.warm_up_s)], output, workload)
        command = self._command(url, model, first_user, output)
        command += ["--num-users", str(workload.users), "--num-rounds", str(workload.rounds)]
        command += ["--qps", str(workload.qps), "--time", str(workload.duration_s), *_lengths(workload)]
        self._play(command, output, workload)
        return summary_of(read_requests(output))

    def _command(self, url: str, model: str, first_user: int, output: Path) -> list[str]:
        command = [self._python, str(self._program), "--base-url", url, "--model", model]
        return [*command, "--init-user-id", str(first_user), "--output", str(output.resolve())]

    def _play(self, command: Sequence[str], output: Path, workload: Workload) -> None:
        log_path = output.with_suffix(".log")
        timeout_s = workload.duration_s + workload.warm_up_s + GRACE_S
        with log_path.open("ab") as log:
            try:
                result = subprocess.run(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=self._program.parent,
                    env={**os.environ, "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"},
                    timeout=timeout_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise CannotRun(
                    f"LMBenchmark did not end in {timeout_s:.0f} s; its log is {log_path}"
                ) from None
        if result.returncode:
            raise CannotRun(f"LMBenchmark ended with status {result.returncode}; its log is {log_path}")


def _lengths(workload: Workload) -> list[str]:
    return [
        *("--shared-system-prompt", str(workload.system_words)),
        *("--user-history-prompt", str(workload.history_words)),
        *("--answer-len", str(workload.answer_tokens)),
    ]


def read_requests(path: Path) -> list[Request]:
    """What LMBenchmark wrote. CannotRun if no request has ended well."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        requests = [
            Request(
                int(float(row["prompt_tokens"])),  # "3162.0", where a user who asked nothing is in the table
                int(float(row["generation_tokens"])),
                float(row["ttft"]),
                float(row["launch_time"]),
                float(row["finish_time"]),
            )
            for row in rows
        ]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CannotRun(f"{path}: not what this LMBenchmark is expected to write ({error!r})") from None
    if not requests:
        raise CannotRun(f"{path}: no request has ended; its log is {path.with_suffix('.log')}")
    empty = sum(request.ttft <= 0 for request in requests)  # LMBenchmark's way to say: no token came
    if empty:
        raise CannotRun(f"{path}: {empty} of {len(requests)} requests brought no token")
    return requests


def summary_of(requests: Sequence[Request]) -> Summary:
    """Of at least one request."""
    ttfts = sorted(request.ttft for request in requests)
    begun_s = min(request.launch_time for request in requests)
    took_s = max(request.finish_time for request in requests) - begun_s
    return Summary(
        len(requests),
        mean(ttfts),
        median(ttfts),
        ttfts[min(len(ttfts) - 1, len(ttfts) * 9 // 10)],
        len(requests) / took_s,
        sum(request.prompt_tokens for request in requests) / took_s,
        sum(request.generation_tokens for request in requests) / took_s,
    )
