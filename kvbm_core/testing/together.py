# ruff: noqa: S101  (a conformance suite is made of asserts)
"""Threads of a test that work at once, and what shows that none of a store's own are left."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

LONG_S = 120.0
"""Longer than anything here takes."""


def run_together(tasks: Sequence[Callable[[], None]], meanwhile: Callable[[], None] | None = None) -> None:
    """Runs each task in a thread of its own, and ``meanwhile`` in this one. When all have ended, raises the
    first failure of a task.
    """
    failures: list[BaseException] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    if meanwhile is not None:
        meanwhile()
    for thread in threads:
        thread.join(None if meanwhile is None else LONG_S)
        assert not thread.is_alive(), "a task has not ended with what was done meanwhile"
    if failures:
        raise failures[0]


def wait_for(is_so: Callable[[], bool]) -> None:
    """Until it is so; AssertionError if that takes too long."""
    end_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < end_s, "it does not come to be"
        time.sleep(0.005)


def open_files() -> list[str]:
    """Of this process, by number."""
    return sorted(os.listdir("/proc/self/fd"))
