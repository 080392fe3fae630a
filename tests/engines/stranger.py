"""A new user: the wheel in an empty environment, nothing of the checkout, and the lines of the pages.

What the wheel needs, and the engine, is borrowed from an environment that is there; its programs and its link
to the checkout are not.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.engines import REPOSITORY
from tests.engines.ports import HOST, free_port
from tests.engines.process import Server
from tests.engines.vllm_server import ONE_THREAD

TIMEOUT_S = 300
_BLOCK = re.compile(r"^```(?:bash)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PACKAGES_OF = "import json, sys; print(json.dumps([p for p in sys.path if p.endswith('-packages')]))"
_VLLM = "#!{python}\nfrom vllm.entrypoints.cli.main import main\n\nif __name__ == '__main__':\n    main()\n"


def blocks_of(page: str, heading: str) -> list[str]:
    """The command lines that ``page`` shows below ``heading``, block by block."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    found = _BLOCK.findall(section)
    assert found, f"{page} shows nothing below {heading}"
    return [str(block) for block in found]


def build_wheel(folder: Path) -> Path:
    """This checkout's wheel."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=TIMEOUT_S)
    (wheel,) = folder.glob("*.whl")
    return wheel


class Stranger:
    """Who works in ``home``, with the wheel and with packages of ``python``'s environment, and has copied
    ``deploy/launch``.
    """

    def __init__(self, home: Path, python: Path | str, wheel: Path, scratch: Path) -> None:
        self.home = home
        self.bin = home / "venv" / "bin"
        self._make_environment(str(python), wheel)
        shutil.copytree(REPOSITORY / "deploy" / "launch", home / "deploy" / "launch")
        self.variables = {
            "HOME": str(home),
            "PATH": os.pathsep.join([str(self.bin), "/usr/local/bin", "/usr/bin", "/bin"]),
            "TMPDIR": str(scratch),
            "LANG": "C.UTF-8",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DYN_KVBM_METRICS_PORT": str(free_port()),
            **ONE_THREAD,
        }

    def _make_environment(self, python: str, wheel: Path) -> None:
        packages = json.loads(subprocess.check_output([python, "-c", _PACKAGES_OF], text=True, cwd="/"))
        subprocess.run([python, "-m", "venv", "--without-pip", self.home / "venv"], check=True, cwd="/")
        own = self.bin / "python"
        install = ("install", "-q", "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel))
        command = [sys.executable, "-m", "pip", "--python", str(own), *install]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        (site,) = (self.home / "venv").glob("lib/python3.*/site-packages")
        # Of their own .pth files only what stands in for SGLang's kernels: another one leads to the checkout.
        stand_ins = [path.read_text() for each in packages for path in Path(each).glob("kvbm_sglang_cpu.pth")]
        (site / "zz_borrowed.pth").write_text("".join([*(f"{path}\n" for path in packages), *stand_ins]))
        (self.bin / "vllm").write_text(_VLLM.format(python=own))
        (self.bin / "vllm").chmod(0o755)

    def run(self, script: str) -> str:
        """What the lines print; all of them have to succeed."""
        done = subprocess.run(
            ["bash", "-eu", "-o", "pipefail", "-c", script],
            cwd=self.home,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def requests(self) -> list[dict[str, Any]]:
        """What ``kvbm why`` tells of each request, the last one first."""
        (engine,) = json.loads(self.run("kvbm why --json"))
        return list(engine["requests"])


class Pasted(Server):
    """A server that a stranger starts by pasting lines; ``PORT_NUMBER`` in them is that of ``base_url``."""

    name = "what the page shows"

    def __init__(self, stranger: Stranger, lines: str, log_path: Path) -> None:
        super().__init__(log_path)
        self.stranger = stranger
        self.lines = lines.replace("PORT_NUMBER", self.port)

    def command(self) -> list[str]:
        return ["bash", "-eu", "-c", self.lines]

    def environment(self, scratch: Path) -> dict[str, str]:
        return {**self.stranger.variables, "PWD": str(self.stranger.home)}

    def here(self, text: str, port: int) -> str:
        """``text`` of a page, in which servers listen at ``port``."""
        assert f"localhost:{port}/" in text
        return text.replace(f"localhost:{port}/", f"{HOST}:{self.port}/")
