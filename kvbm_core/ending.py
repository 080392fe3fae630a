"""The end of what nobody has closed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

OWN_THREADS = "kvbm-"
"""Names of kvbm's own threads begin so."""


def close_with(owner: object, close: Callable[[], None]) -> weakref.finalize[[Callable[[], None]], Any]:
    """Has ``close`` called when ``owner`` is gone, at the end of the process, or when the answer is called.

    Garbage may be collected in any thread. In one of kvbm's own, which ``close`` may wait for, a new thread
    calls it.
    """
    return weakref.finalize(owner, _call_elsewhere, close)


def _call_elsewhere(close: Callable[[], None]) -> None:
    if threading.current_thread().name.startswith(OWN_THREADS):
        threading.Thread(target=close, name="kvbm-close", daemon=True).start()
    else:
        close()
