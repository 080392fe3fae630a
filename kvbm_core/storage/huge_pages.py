"""Huge pages (Linux): a copy of scattered small pieces otherwise waits for the translation of each
address.
"""

from __future__ import annotations

import ctypes
import errno
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HUGE_PAGE_BYTES = 2 << 20
MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25  # Linux 6.1
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def advise(address: int, nbytes: int, advice: int) -> bool:
    """madvise without the GIL; False if the kernel does not know ``advice``. OSError if out of memory."""
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if madvise(address, nbytes, advice) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOMEM, errno.EFAULT):
        raise OSError(code, "no memory for the host tier")
    return False


class HugePages:
    """Moves memory that is in use into huge pages, a page at a time: for an engine's KV cache in ordinary
    memory.

    Its bytes stay the same, and whoever uses them meanwhile waits for one page at most. ``memories`` are 1-D
    uint8 arrays that outlive this object. What the kernel refuses stays as it is, and without memory left
    this ends: only speed is lost.
    """

    def __init__(self, memories: Sequence[Any], enabled: Path = _ENABLED) -> None:
        self._steps: deque[int] = deque()
        try:
            if "[never]" in enabled.read_text():
                return
        except OSError:
            return
        for memory in memories:
            begin, end = int(memory.ctypes.data), int(memory.ctypes.data) + int(memory.nbytes)
            first = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            last = end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            self._steps.extend(range(first, last, HUGE_PAGE_BYTES))

    def __bool__(self) -> bool:
        """Whether there is something left to do."""
        return bool(self._steps)

    def step(self) -> None:
        """One huge page more: some milliseconds."""
        address = self._steps.popleft()
        try:
            advise(address, HUGE_PAGE_BYTES, MADV_HUGEPAGE)  # enough where nothing has been touched yet
            advise(address, HUGE_PAGE_BYTES, _MADV_COLLAPSE)
        except OSError:
            self._steps.clear()
