"""Threads that a test has begun. Those of an earlier test may still be ending in the same process."""

from __future__ import annotations

import threading
from collections.abc import Set as AbstractSet


def threads_since(before: AbstractSet[threading.Thread], prefix: str = "kvbm-") -> list[str]:
    """Names that begin with ``prefix``, of threads that run now and are not in ``before``, which was
    ``set(threading.enumerate())``.
    """
    new = set(threading.enumerate()) - before
    return sorted(thread.name for thread in new if thread.name.startswith(prefix))
