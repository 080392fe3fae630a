"""A Prometheus of a test's own, on a free port of loopback: Debian's, installed, or as deploy/setup_env.py
unpacks it into the environment. KVBM_PROMETHEUS: its program, if it is elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from tests.engines import PATIENCE_S
from tests.engines.own_server import OwnServer
from tests.engines.ports import HOST, listens

LOOK_S = 0.1


def find_prometheus(name: str = "prometheus") -> str | None:
    """The program, or promtool, which lies beside it."""
    own = os.environ.get("KVBM_PROMETHEUS")
    places = [*([str(Path(own).parent)] if own else []), str(Path(sys.prefix) / "prometheus" / "usr" / "bin")]
    return shutil.which(name, path=os.pathsep.join([*places, os.environ.get("PATH", "")]))


class Prometheus(OwnServer):
    """A context manager. ``config``: its configuration."""

    def __init__(self, folder: Path, config: str) -> None:
        super().__init__(folder / "prometheus" / "prometheus.log")
        self._folder = folder / "prometheus"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._config = self._folder / "prometheus.yml"
        self._config.write_text(config)

    def _command(self) -> list[str]:
        program = find_prometheus()
        assert program is not None
        command = [program, f"--config.file={self._config}", f"--storage.tsdb.path={self._folder / 'data'}"]
        return [*command, f"--web.listen-address={HOST}:{self.port}"]

    def _answers(self) -> bool:
        if not listens(self.pid, self.port):
            return False
        try:
            with urllib.request.urlopen(f"http://{HOST}:{self.port}/-/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def get(self, path: str, **query: str) -> Any:
        """What its API answers."""
        url = f"http://{HOST}:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def query(self, text: str) -> list[tuple[dict[str, str], float]]:
        """The series that ``text`` gives now, with their values."""
        result = self.get("query", query=text)["result"]
        return [(one["metric"], float(one["value"][1])) for one in result]

    def wait_for(self, text: str, count: int = 1) -> None:
        """Until ``text`` gives so many series."""
        ends_at_s = time.monotonic() + PATIENCE_S
        while len(self.query(text)) < count:
            assert time.monotonic() < ends_at_s, f"{text}: {self.query(text)}"
            time.sleep(LOOK_S)
