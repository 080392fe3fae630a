"""Who runs the commands of a page as they are written: a machine of their own, as far as names go.

Namespaces of Linux have the addresses, ports and folders that pages name; nothing of the real ones is
touched, and no process is left. Models of the hub are folders of that name.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.engines import REPOSITORY
from tests.engines.pages import PYTHON, Command
from tests.engines.stranger import Stranger

TIMEOUT_S = 2400
WATCHED_S = 30
"""Programs without an end; their status is then 124."""
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_FOLDERS = ("etc", "mnt", "run", "var/cache", "var/log")
_PIP = "#!{python}\nimport sys\n\nfrom pip._internal.cli.main import main\n\nsys.exit(main())\n"
# What a machine has before its user comes: a network, hosts with names, and where disks are mounted.
_MACHINE = f"""
set -eu
ip link set lo up
ip address add 10.0.0.1/32 dev lo
ip route add default dev lo src 10.0.0.1
cp -r /etc/. "$MACHINE/etc" 2>/dev/null || true
for folder in {" ".join(_FOLDERS)}; do mount --bind "$MACHINE/$folder" "/$folder"; done
mount -t tmpfs none /dev/shm
mkdir -p /mnt/kv /mnt/nvme /run/secrets /etc/kvbm
printf '127.0.0.1 localhost node-1 node-2\\n' >/etc/hosts
unset MACHINE
"""


class Reader(Stranger):
    """A stranger on a machine of their own. ``checkout`` is a copy of this repository, ``home`` has what
    every stranger has, and what pages suppose to be there.
    """

    def __init__(self, home: Path, python: Path | str, wheel: Path, scratch: Path) -> None:
        super().__init__(home, python, wheel, scratch)
        self.machine = scratch / "machine"
        self.checkout = home.parent / "checkout"
        (self.bin / "pip").write_text(_PIP.format(python=self.bin / "python"))
        (self.bin / "pip").chmod(0o755)
        # No index: what pip needs is there already, as it is in an environment that has an engine.
        self.variables |= {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
        for name in ("meta-llama/Llama-3.1-8B", "my-model"):
            (home / name).mkdir(parents=True)
            (home / name / "config.json").write_text(json.dumps(LLAMA_8B))
        (home / "tenant.salt").write_text("tenant a")
        (home / "system-prompt.txt").write_text("You are a helpful assistant. " * 200)

    def has_models(self, model: Path) -> None:
        """Whoever asks for the hub's model, or MODEL, gets this one."""
        for name in ("Qwen/Qwen3-0.6B", "MODEL", "models/llama"):
            (self.home / name).parent.mkdir(exist_ok=True, parents=True)
            (self.home / name).symlink_to(model)

    def copy_checkout(self) -> None:
        """What git has, and what was added since."""
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.check_output(listed, cwd=REPOSITORY, text=True).split("\0")
        for name in filter(None, names):
            if (REPOSITORY / name).is_file():
                (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / name, self.checkout / name)

    def new_machine(self) -> None:
        """With empty disks."""
        shutil.rmtree(self.machine, ignore_errors=True)
        for folder in _FOLDERS:
            (self.machine / folder).mkdir(parents=True)

    def work(self, script: str, more: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """What bash says to ``script`` there. All of its processes have ended."""
        own = ("--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
        as_root = () if os.geteuid() == 0 else ("--map-root-user",)
        return subprocess.run(
            ["unshare", *as_root, *own, "bash", "-c", _MACHINE + script],
            cwd=self.home,
            env={**self.variables, **(more or {}), "MACHINE": str(self.machine)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
        )


def why_no_machine() -> str:
    """Why there can be none here; empty if it can."""
    missing = [name for name in ("unshare", "ip", "curl", "openssl") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    as_root = () if os.geteuid() == 0 else ("--map-root-user",)
    made = subprocess.run(
        ["unshare", *as_root, "--mount", "--net", "--pid", "--fork", "true"], capture_output=True
    )
    return "" if made.returncode == 0 else "namespaces need root, or users that may make them"


def lines_of(command: Command, statuses: Iterable[int] = (0,), keys: str = "") -> str:
    """A command for a script with ``set -e``; it is named before it runs. ``keys`` are typed."""
    text = command.text
    if command.language == PYTHON:
        text = f"cat > program.py <<'END_OF_PROGRAM'\n{text}END_OF_PROGRAM\n"
        text += "python program.py" if 124 not in statuses else f"timeout {WATCHED_S} python program.py"
    if keys:
        text = f"{{ {text}\n}} <<<{shlex.quote(keys)}"
    good = "|".join(map(str, statuses))
    if good != "0":
        text = f"{{ {text}\n}} || case $? in {good}) ;; *) false ;; esac"
    return f"echo '>>> {command.page}:{command.line}' | tee /dev/stderr\n{text}\n"
