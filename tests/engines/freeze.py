"""A process that stands still, as on a machine that hangs."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

FREEZE_TIMEOUT_S = 60.0


def freeze(pid: int) -> None:
    """Returns when none of its threads runs any more. The signal is taken by one of them, which the others
    do not wait for: on a busy machine they go on for a while.
    """
    os.kill(pid, signal.SIGSTOP)
    ends_at_s = time.monotonic() + FREEZE_TIMEOUT_S
    while not all(_stands(task) for task in Path(f"/proc/{pid}/task").iterdir()):
        if time.monotonic() > ends_at_s:
            raise RuntimeError(f"process {pid} does not stop")
        time.sleep(0.001)


def _stands(task: Path) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return (task / "stat").read_text().rpartition(") ")[2][0] in "TtZX"
    return True


def thaw(pid: int) -> None:
    """It goes on."""
    os.kill(pid, signal.SIGCONT)
