"""A candidate for copies of many small pages: the GPU's own processors read and write the pinned host memory.

Imported only where Triton is installed. The CPU sends nothing but the numbers of blocks and slots, where a
DMA wants an address for each piece; in return the kernel takes processors from the forward pass, ``programs``
of them at most.
"""

# mypy: disable-error-code="import-untyped, import-not-found"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvbm_core.errors import LayoutError
from kvbm_core.layout.view import Segment

WORD_BYTES = 8
CHUNK_WORDS = 1024


@triton.jit
def _move_words(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    device_starts,
    host_starts,
    blocks,
    slots,
    num_pairs,
    num_items,
    chunks,
    piece_words,
    device_stride,
    host_stride,
    to_host: tl.constexpr,
    chunk_words: tl.constexpr,
):
    """Each program takes every n-th chunk of the pieces; addresses are bytes, a word is 8 of them."""
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        chunk = item % chunks
        pair = (item // chunks) % num_pairs
        number = item // chunks // num_pairs
        device = tl.load(device_starts + pair) + tl.load(blocks + number) * device_stride
        host = tl.load(host_starts + pair) + tl.load(slots + number) * host_stride
        words = chunk * chunk_words + tl.arange(0, chunk_words)
        inside = words < piece_words
        # With 16 bytes of alignment known, each thread moves 16 bytes at a time.
        on_device = tl.multiple_of(device.to(tl.pointer_type(tl.int64)), 16) + words
        on_host = tl.multiple_of(host.to(tl.pointer_type(tl.int64)), 16) + words
        if to_host:
            tl.store(on_host, tl.load(on_device, mask=inside), mask=inside)
        else:
            tl.store(on_device, tl.load(on_host, mask=inside), mask=inside)


class TritonCopier:
    """Moves blocks between one view's device memory and the slots of a pinned slab, on the current stream."""

    def __init__(
        self,
        pairs: list[tuple[Segment, Segment]],
        device_bases: list[int],
        host_base: int,
        device: torch.device,
    ) -> None:
        first_device, first_host = pairs[0]
        self._piece_bytes = first_device.nbytes
        self._strides = (first_device.block_stride_bytes, first_host.block_stride_bytes)
        device_starts = [device_bases[a.storage] + a.offset_bytes for a, _ in pairs]
        host_starts = [host_base + b.offset_bytes for _, b in pairs]
        shapes = {(a.nbytes, a.block_stride_bytes, b.block_stride_bytes) for a, b in pairs}
        numbers = [*device_starts, *host_starts, *self._strides, self._piece_bytes]
        if len(shapes) != 1 or any(number % 16 for number in numbers):
            raise LayoutError("the kernel moves equal pieces at equal distances, aligned to 16 bytes")
        self._num_pairs = len(pairs)
        self._device_starts = torch.tensor(device_starts, dtype=torch.int64, device=device)
        self._host_starts = torch.tensor(host_starts, dtype=torch.int64, device=device)

    def queue(self, blocks: torch.Tensor, slots: torch.Tensor, *, to_host: bool, programs: int) -> None:
        """Queues the copy; ``blocks`` and ``slots`` are int64 on the device and must live until it has
        run.
        """
        words = self._piece_bytes // WORD_BYTES
        chunk_words = min(CHUNK_WORDS, triton.next_power_of_2(words))
        chunks = triton.cdiv(words, chunk_words)
        items = len(blocks) * self._num_pairs * chunks
        _move_words[(min(programs, items),)](
            self._device_starts,
            self._host_starts,
            blocks,
            slots,
            self._num_pairs,
            items,
            chunks,
            words,
            *self._strides,
            to_host=to_host,
            chunk_words=chunk_words,
        )
