"""Pages of SGLang's host pools as memory: the pieces that SGLang itself names for zero copy."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from kvbm_core.errors import LayoutError
from kvbm_core.storage.base import Memory

_WRITABLE = 0x200  # PyBUF_WRITE
_view_of_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


class Pages:
    """One host pool. LayoutError, one line, for one whose pages have no memory that can be named."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page_tokens = int(getattr(pool, "logical_page_size", None) or pool.page_size)
        try:
            pointers, sizes = pool.get_page_buffer_meta(torch.arange(self.page_tokens))
        except (AttributeError, NotImplementedError, TypeError, ValueError) as error:
            raise LayoutError(
                f"kvbm: {type(pool).__name__} names no memory of its pages ({error})"
            ) from error
        if not pointers or len(pointers) != len(sizes) or not all(size > 0 for size in sizes):
            raise LayoutError(f"kvbm: {type(pool).__name__} names no memory of its pages")
        self.piece_bytes = tuple(int(size) for size in sizes)

    @property
    def page_bytes(self) -> int:
        """Of one page, all pieces."""
        return sum(self.piece_bytes)

    @property
    def pool_bytes(self) -> int:
        """Of all pages that SGLang can use."""
        return int(self._pool.size) // self.page_tokens * self.page_bytes

    def memory_of(self, host_indices: torch.Tensor, num_pages: int) -> list[Memory]:
        """Where the pages are, in the order of ``host_indices`` (one per token). LayoutError if they are not
        whole.
        """
        if len(host_indices) != num_pages * self.page_tokens:
            raise LayoutError(
                f"kvbm: {len(host_indices)} indices are not {num_pages} pages of {self.page_tokens}"
            )
        pointers, sizes = self._pool.get_page_buffer_meta(host_indices)
        step = len(self.piece_bytes)
        if len(pointers) != num_pages * step or tuple(sizes[:step]) != self.piece_bytes:
            raise LayoutError(f"kvbm: {type(self._pool).__name__} names other pieces than before")
        if not pointers:
            return []
        # One view from the first piece to the end of the last: its slices cost a third of as many views.
        first = min(pointers)
        end = max(pointer + size for pointer, size in zip(pointers, sizes, strict=True))
        span = _view_of_memory(first, end - first, _WRITABLE)
        pieces = [
            span[pointer - first : pointer - first + size]
            for pointer, size in zip(pointers, sizes, strict=True)
        ]
        return [pieces[start : start + step] for start in range(0, len(pieces), step)]
