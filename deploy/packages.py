"""What the set-up programs share: packages by uv, as pip is configured, and what checkouts have in common."""

from __future__ import annotations

import ast
import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

UV_VERSION = "0.13.9"
REPOSITORY = Path(__file__).resolve().parent.parent
LOCKS = REPOSITORY / "deploy" / "locks"
LEFT_OUT = LOCKS / "left-out.txt"
LOCKED_FOR = ((3, 11), "x86_64")
"""The locks are for this Python on this machine type, without a GPU."""
NEWEST = "KVBM_SETUP_NEWEST"
# pip's name of a setting; uv's, and what stands between several values of it.
SETTINGS = {
    "cert": ("SSL_CERT_FILE", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "proxy": ("ALL_PROXY", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
PIP_LOOKS_AT = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
# All indexes are equal, as they are to pip.
ALWAYS = {
    "UV_HTTP_RETRIES": "10",
    "UV_HTTP_TIMEOUT": "60",
    "UV_INDEX_STRATEGY": "unsafe-best-match",
    "UV_NO_PROGRESS": "1",
    "UV_PYTHON_DOWNLOADS": "never",
}
PATIENCE = ("--retries", "10", "--timeout", "60")
"""The same for pip."""
LAST_LINES = 15


class SetupError(Exception):
    """Set-up cannot go on; the message is one line that says what to do."""


@dataclass(frozen=True)
class Packages:
    """What is in an environment."""

    lock: str
    """The name of the file in LOCKS with their versions; empty if there is none."""
    needed: tuple[str, ...]
    """As lines of a requirements file; all that they need comes along, but for LEFT_OUT."""
    extras: tuple[str, ...] = ()
    """Those of kvbm."""
    alone: tuple[str, ...] = ()
    """Without what they say they need: that is for GPUs."""

    @property
    def is_locked(self) -> bool:
        """Whether an environment gets the versions of the lock."""
        machine = (sys.version_info[:2], platform.machine())
        return bool(self.lock) and machine == LOCKED_FOR and not os.environ.get(NEWEST)

    def install(self, venv: Path) -> None:
        """Brings them into ``venv``, and kvbm from this checkout. SetupError if that fails."""
        extras = f"[{','.join(self.extras)}]" if self.extras else ""
        versions = ["--excludes", str(LEFT_OUT)] if self.lock else []
        if self.is_locked:
            versions += ["-c", str(LOCKS / f"{self.lock}.txt"), "-b", str(LOCKS / "core.txt")]
        elif os.environ.get(NEWEST):
            versions += ["--upgrade"]
        own = ("-r", "-", "-e", f"{REPOSITORY}{extras}")
        install(venv, f"{self.needed[-1]}, kvbm{extras}", *versions, *own, lines=self.needed)
        if self.alone:
            install(venv, ", ".join(self.alone), "--no-deps", *self.alone)
        if self.lock and os.environ.get(NEWEST):
            say(f"{venv.name} differs from its lock: {', '.join(self._changed(venv)) or 'in nothing'}")

    def check(self, venv: Path, statement: str) -> None:
        """Runs ``statement`` in ``venv``, but not where the versions are those that the tests had. SetupError
        if it fails.
        """
        if not self.is_locked:
            run(f"checking {venv.name}: {statement}", [str(python_of(venv)), "-c", statement])

    def _changed(self, venv: Path) -> list[str]:
        frozen = uv(f"listing {venv.name}", "pip", "freeze", "--python", str(python_of(venv)))
        locked = (LOCKS / f"{self.lock}.txt").read_text(encoding="utf-8")
        was, now = (dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)) for text in (locked, frozen))
        return [f"{name} {was[name]} -> {now[name]}" for name in was if now.get(name, was[name]) != was[name]]


def install(venv: Path, what: str, *arguments: str, lines: Sequence[str] = ()) -> None:
    """Runs ``uv pip install`` in ``venv``; ``what`` is told, ``lines`` are the requirements file ``-``."""
    command = ("pip", "install", "--python", str(python_of(venv)), *arguments)
    uv(f"installing {what} into {venv.name}", *command, lines=lines)


def uv(what: str, *arguments: str, lines: Sequence[str] = ()) -> str:
    """What uv prints; ``what`` is told, it reads ``lines``. SetupError if it fails."""
    command = [str(tools() / "bin" / "uv"), *arguments]
    return run(what, command, environment=_environment(), lines=lines)


@cache
def tools() -> Path:
    """An environment with pip and uv in it, which the checkouts of a user share."""
    which = hashlib.sha256(f"{sys.base_prefix} {sys.version_info[:2]}".encode()).hexdigest()

    def make(folder: Path) -> None:
        try:
            run("making an environment for uv", [sys.executable, "-m", "venv", str(folder)])
        except SetupError as error:
            raise SetupError(
                f"{error}; is Python's venv module there (Debian: apt install python3-venv)?"
            ) from None
        pip = [str(python_of(folder)), "-m", "pip", "install", "-q", "--disable-pip-version-check", *PATIENCE]
        run(f"installing uv {UV_VERSION}", [*pip, f"uv=={UV_VERSION}"])

    return made_once(cache_folder() / f"uv-{UV_VERSION}-{which[:8]}", make)


@cache
def _environment() -> Mapping[str, str]:
    """Variables for uv: it looks where pip is configured to, unless it is told otherwise itself."""
    pip = [str(python_of(tools())), "-m", "pip", "config", "list"]
    usual = [str(python_of(tools())), "-c", PIP_LOOKS_AT]
    listed, index = (subprocess.check_output(command, text=True) for command in (pip, usual))
    return {**ALWAYS, **settings_of(listed, index.strip()), **os.environ}


def settings_of(listed: str, index: str) -> dict[str, str]:
    """uv's variables by what ``pip config list`` printed; ``index`` is where pip looks by itself.

    A variable of pip's goes before a section for ``install``, and this before the global one.
    """
    found: dict[str, list[str]] = {}
    for section in ("global", "install", ":env:"):
        for line in listed.splitlines():
            place, _, value = line.partition("=")
            if place.startswith(f"{section}."):
                found[place.removeprefix(f"{section}.")] = str(ast.literal_eval(value)).split()
    # Where several have a version, pip takes the best wheel, but uv that of the first: the others may have
    # fewer of them. uv's default index is the last.
    *first, last = (*found.get("index-url", [index]), *found.get("extra-index-url", []))
    others = {name: between.join(found[key]) for key, (name, between) in SETTINGS.items() if key in found}
    return {"UV_INDEX": " ".join(first), "UV_DEFAULT_INDEX": last, **others}


def cache_folder() -> Path:
    """What all checkouts of a user share; what is in it is never changed."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "kvbm"


def made_once(final: Path, make: Callable[[Path], None]) -> Path:
    """``final``, which ``make`` makes unless it is there. Nobody sees half of it; of two that want it at once
    the second waits for the first.
    """
    if not final.exists():
        final.parent.mkdir(parents=True, exist_ok=True)
        with (
            open(final.parent / f"{final.name}.lock", "w", encoding="utf-8") as lock,
            tempfile.TemporaryDirectory(prefix="aside-", dir=final.parent) as scratch,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not final.exists():
                make(Path(scratch) / final.name)
                (Path(scratch) / final.name).rename(final)
    return final


def make_venv(venv: Path) -> None:
    """An empty environment, unless there is one. SetupError if something else stands there."""
    if python_of(venv).exists():
        return
    if venv.exists() and any(venv.iterdir()):
        raise SetupError(f"{venv} exists and is no virtual environment: name another directory or remove it")
    uv(f"making {venv}", "venv", "--allow-existing", "--python", sys.executable, str(venv))


def site_packages_of(venv: Path) -> Path:
    """Where its packages are."""
    (folder,) = venv.glob("lib/python3.*/site-packages")
    return folder


def python_of(venv: Path) -> Path:
    """Its interpreter."""
    return venv / "bin" / "python"


def download(distribution: str, version: str, folder: Path, *options: str) -> Path:
    """One wheel for this machine, whatever Python it asks for; it is not installed."""
    options = ("--no-deps", "--only-binary=:all:", "--python-version", "3.11", "-q", *PATIENCE, *options)
    command = [str(python_of(tools())), "-m", "pip", "download", *options, "-d", str(folder)]
    run(f"downloading {distribution} {version}", [*command, f"{distribution}=={version}"])
    return next(folder.glob("*.whl"))


def has_cuda() -> bool:
    """Whether nvidia-smi works."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0


def run(
    what: str,
    command: Sequence[str],
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
    lines: Sequence[str] = (),
) -> str:
    """Runs ``command``, which reads ``lines``; returns its output, which is shown when it fails."""
    started_s = time.monotonic()
    say(f"{what} ...")
    result = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        input="\n".join(lines),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        print("\n".join(result.stdout.splitlines()[-LAST_LINES:]), file=sys.stderr)
        raise SetupError(f"{what} failed (see above): check network, pip's index settings and disk space")
    say(f"{what}: done in {time.monotonic() - started_s:.0f} s")
    return result.stdout


def say(text: str) -> None:
    """A line for whoever waits."""
    print(f"kvbm setup: {text}", flush=True)
