"""The reason why an engine does not start, as the last line that a user sees.

The engine core ends with it in a traceback, and the process that began the core puts another below. That one
says the reason again, below its own traceback.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from pathlib import Path
from types import TracebackType

from kvbm_core.runtime.endpoint import private_folder

SUFFIX = ".last"
_NAME = "last words"
_FIRST = "_KVBM_FIRST_PROCESS"


def leave(line: str) -> None:
    """Leaves a line for the process that began this one, or that which began this one."""
    if multiprocessing.parent_process() is None:  # the traceback that ends with the line is this process's
        return
    with contextlib.suppress(Exception):  # the reason is in the traceback as well
        (private_folder(_NAME) / f"{int(os.environ[_FIRST])}{SUFFIX}").write_text(line)


def say_at_the_end() -> None:
    """Has an exception that ends this process followed by what those that it began have left. Before it
    begins them.
    """
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
