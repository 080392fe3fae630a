"""Runs a script of deploy/launch with programs in place of engines, which note how they were started."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.engines import PATIENCE_S
from tests.engines.launched import LAUNCH
from tests.engines.process import runs_in

POLL_S = 0.02
STAND_IN = """#!/usr/bin/env bash
[[ -z ${IS_STUBBORN:-} ]] || trap '' TERM
if [[ -n ${LEAVES_A_CHILD:-} ]]; then sleep 600 & fi
note="$NOTES/$$"
printf '%s\\0' "${0##*/}" "$@" >"$note.tmp"
env -0 >"$note.env"
mv "$note.tmp" "$note.argv"
[[ -n ${LEAVES_A_CHILD:-} ]] || exec sleep 600
wait
"""


@dataclass(frozen=True)
class Started:
    """One program that a script has started."""

    pid: int
    argv: tuple[str, ...]
    env: Mapping[str, str]

    def option(self, name: str) -> str:
        """The value behind an option."""
        return self.argv[self.argv.index(name) + 1]


@contextmanager
def started_by(
    script: str | Path,
    *arguments: str,
    count: int,
    folder: Path,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[tuple[subprocess.Popen[bytes], list[Started]]]:
    """The script, and ``count`` programs that it has started; both are ended, and nothing of them is left."""
    notes, programs = folder / "notes", folder / "programs"
    notes.mkdir()
    programs.mkdir()
    for name in ("vllm", "python3"):
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(0o755)
    kept = {name: os.environ[name] for name in ("HOME", "TMPDIR") if name in os.environ}
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    process = subprocess.Popen(
        # A shell cannot trap what it was told to ignore, as a job in the background is.
        ["env", "--default-signal=INT,HUP", "bash", str(LAUNCH / script), *arguments],
        env={**kept, "PATH": path, "NOTES": str(notes), **(env or {})},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        cwd=cwd,
    )
    try:
        wait_until(lambda: len(list(notes.glob("*.argv"))) >= count)
        yield process, sorted(map(_started, notes.glob("*.argv")), key=lambda each: each.argv)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
        left = session_of(process.pid)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert left == [], "the script has ended, and something that it started has not"


def session_of(leader: int) -> list[int]:
    """Ids of the processes of a session that have not ended."""
    entries = Path("/proc").glob("[0-9]*")
    return [int(entry.name) for entry in entries if runs_in(entry, leader)]


def _started(note: Path) -> Started:
    argv = note.read_text().split("\0")[:-1]
    pairs = (line.partition("=") for line in note.with_suffix(".env").read_text().split("\0"))
    return Started(int(note.stem), tuple(argv), {name: value for name, _, value in pairs if name})


def wait_until(condition: object) -> None:
    """Patiently."""
    assert callable(condition)
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "what was waited for did not come"
        time.sleep(POLL_S)
