"""The process that began an engine, once the engine has ended.

At every ordinary end vLLM kills its engine core, whose sockets and secrets stay: they are removed here. And
a core that does not start ends with the reason in a traceback, below which this process puts another: the
reason is said again, as the last line.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import sys
import time
from pathlib import Path
from types import TracebackType

from kvbm_core.control import pages, socket_wire
from kvbm_core.control.place import is_private, private_place
from kvbm_core.runtime.endpoint import private_folder, sweep

SUFFIX = ".last"
POLL_S, WAIT_S = 0.02, 5.0
_NAME = "last words"
_FIRST = "_KVBM_FIRST_PROCESS"


def leave(line: str) -> None:
    """Leaves a line for the process that began this one, or that which began this one."""
    if multiprocessing.parent_process() is None:  # the traceback that ends with the line is this process's
        return
    with contextlib.suppress(Exception):  # the reason is in the traceback as well
        (private_folder(_NAME) / f"{int(os.environ[_FIRST])}{SUFFIX}").write_text(line)


def watch() -> None:
    """Has all that done when this process ends. Before it begins others."""
    if multiprocessing.parent_process() is not None:
        return
    os.environ[_FIRST] = str(os.getpid())
    before = sys.excepthook

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        with contextlib.suppress(Exception):
            if line := _take(private_folder(_NAME)):
                print(f"\n{line}", file=sys.stderr, flush=True)

    sys.excepthook = say
    atexit.register(remove_what_is_left, time.time())


def remove_what_is_left(since_s: float) -> None:
    """Of engines of this user that have ended, in the folder that they share. Processes that were killed a
    moment ago may still hold theirs: waits for what is younger than ``since_s``, a time of day, if not long.
    """
    folder, ends_at_s = private_place(), time.monotonic() + WAIT_S
    if not is_private(folder):
        return
    with contextlib.suppress(OSError):
        while True:
            sweep(folder, also_young=True)
            pages.pages()
            socket_wire.sweep(folder)
            is_over = all(path.lstat().st_mtime < since_s for path in folder.iterdir())
            if is_over or time.monotonic() > ends_at_s:
                return
            time.sleep(POLL_S)


def _take(folder: Path) -> str:
    """What was left for us, which is removed; as is what was left for nobody."""
    line = ""
    for path in folder.glob(f"*{SUFFIX}"):
        pid = int(path.stem)
        if pid == os.getpid():
            line = path.read_text()
        elif Path(f"/proc/{pid}").exists():
            continue
        path.unlink()
    return line
