"""A real SGLang HTTP server on a CPU with kvbm as HiCache's storage, for the soak, and what its processes
hold.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.engines.client import parse_metrics
from tests.engines.ports import HOST, free_port
from tests.engines.process import START_TIMEOUT_S, Progress, Server
from tests.engines.sglang.engine import ENGINE, HICACHE
from tests.engines.sglang.environment import PYTHON, variables

ANSWER_TIMEOUT_S = 60.0
ADMIN_KEY = "soak"
# Both of SGLang's own tiers together hold fewer pages than the prompts have.
SMALL: dict[str, Any] = {"max_total_tokens": 4096, "hicache_ratio": 1.5, "log_level_http": "warning"}
CAPACITY = re.compile(r'^kvbm_tier_blocks\{(?=.*tier="disk")(?=.*state="capacity").*\} (\S+)$', re.MULTILINE)
FAILURES = re.compile(r'^kvbm_failures_total\{kind="(\w+)"\} (\S+)$', re.MULTILINE)
LOGGED_ERRORS = re.compile(r"^.*(?:kvbm: error in|Traceback \(most recent call last\)).*$", re.MULTILINE)


@dataclass(frozen=True)
class Usage:
    """What the scheduler processes hold together."""

    rss_bytes: int
    handles: int
    threads: int


@dataclass(frozen=True)
class Counts:
    """What one instance of kvbm counted from its attachment on. ``capacity_pages`` is 0 before its first
    transfer.
    """

    written_pages: int
    read_pages: int
    capacity_pages: int
    guarded_errors: int
    failures: dict[str, int]


NOTHING = Counts(0, 0, 0, 0, {})


class SoakServer(Server):
    """One ``sglang.launch_server``."""

    name = "sglang.launch_server"

    def __init__(self, model: Path, folder: Path, disk_cache_gb: float) -> None:
        super().__init__(folder / "server.log")
        self._model = model
        self._disk_cache_gb = disk_cache_gb
        self._disk = folder / "disk"
        self._metrics_port = free_port()
        self._log_seen_bytes = 0

    def start(self, timeout_s: float = START_TIMEOUT_S, progress: Progress | None = None) -> None:
        super().start(timeout_s, progress)
        self.new_errors()  # SGLang logs one of its own before the first prompt

    def environment(self, scratch: Path) -> dict[str, str]:
        # One thread computes: several wait for each other by spinning, which on a busy machine takes most of
        # the time. oneDNN would keep a kernel for each of the last 1,024 shapes that it has seen; that is not
        # kvbm's memory.
        torch = {"OMP_NUM_THREADS": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32"}
        metrics = {"DYN_KVBM_METRICS": "true", "DYN_KVBM_METRICS_PORT": str(self._metrics_port)}
        disk = {
            "DYN_KVBM_DISK_CACHE_DIR": str(self._disk.absolute()),
            "DYN_KVBM_DISK_CACHE_GB": str(self._disk_cache_gb),
        }
        return variables(**torch, **metrics, **disk)

    def usage(self) -> Usage:
        """At this moment."""
        pids = self._scheduler_processes()
        status = [dict(_fields(Path(f"/proc/{pid}/status").read_text())) for pid in pids]
        return Usage(
            rss_bytes=sum(int(fields["VmRSS"].split()[0]) << 10 for fields in status),
            handles=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids),
            threads=sum(int(fields["Threads"]) for fields in status),
        )

    def counts(self) -> Counts:
        """Of the attached kvbm; httpx.HTTPError if it does not answer."""
        url = f"http://{HOST}:{self._metrics_port}/metrics"
        response = httpx.get(url, timeout=ANSWER_TIMEOUT_S, trust_env=False)
        text = response.raise_for_status().text
        sums, capacity = parse_metrics(text), CAPACITY.search(text)
        return Counts(
            written_pages=int(sums["kvbm_offload_blocks_h2d"]),
            read_pages=int(sums["kvbm_onboard_blocks_d2d"]),
            capacity_pages=int(float(capacity[1])) if capacity else 0,
            guarded_errors=int(sums["kvbm_guarded_errors_total"]),
            failures={kind: int(float(number)) for kind, number in FAILURES.findall(text) if float(number)},
        )

    def new_errors(self) -> list[str]:
        """Lines about errors that came into the log since the last call."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_seen_bytes)
            text = log.read()
        self._log_seen_bytes += len(text)
        return LOGGED_ERRORS.findall(text.decode(errors="replace"))

    def command(self) -> list[str]:
        settings = {
            **ENGINE,
            **HICACHE,
            **SMALL,
            "model_path": self._model.absolute(),
            "admin_api_key": ADMIN_KEY,
        }
        settings |= {"host": HOST, "port": self.port, "enable_cache_report": True}
        command = [str(PYTHON), "-m", "sglang.launch_server"]
        for name, value in settings.items():
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return command

    def _scheduler_processes(self) -> list[int]:
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):  # it has just ended
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sglang::scheduler"):
                    found.append(pid)
        return found


def _fields(status: str) -> list[tuple[str, str]]:
    return [(name, value.strip()) for name, _, value in (line.partition(":") for line in status.splitlines())]
