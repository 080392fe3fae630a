"""Device blocks as rows of bytes that lie one after the other: gathered for a broadcast, scattered after
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvbm_core.layout.view import BlockView, evenly_spaced
from kvbm_core.storage.numa import leave_bound_core
from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.transfer.executors.cuda_runtime import CudaRuntime
from kvbm_core.transfer.plan import TransferPlan

CHUNK_BYTES = 8 << 20
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Pieces:
    """``count`` pieces of every block, ``[piece, block, word]``, that are neighbours in its content."""

    device: Any
    content_bytes: int
    count: int
    piece_bytes: int


class DeviceRows:
    """Chunks of at most ``chunk_bytes``, or of one block, in a tensor of our own; on CUDA on a stream of our
    own.

    A row is a block's content in the order of its view, so it means the same on every rank, wherever each
    keeps it. All but ``mark`` belong to one thread, inside ``bound``. What is gathered or scattered is in
    place on return.
    """

    def __init__(self, device: DeviceMemory, chunk_bytes: int = CHUNK_BYTES) -> None:
        import torch

        self._torch = torch
        self.views = device.views
        self._chunk_bytes = chunk_bytes
        storages = [torch.from_numpy(storage) if device.is_cpu else storage for storage in device.storages]
        self.device = storages[0].device
        self._runtime = None if device.is_cpu else CudaRuntime(self.device.index)
        self._stream = None if self._runtime is None else self._runtime.create_stream(high_priority=True)
        # Eight bytes at a time where everything is so aligned: an eighth of the work for the GPU.
        is_aligned = all(_is_aligned(view) for view in device.views)
        is_aligned = is_aligned and all(storage.data_ptr() % _WORD_BYTES == 0 for storage in storages)
        self._word_bytes = _WORD_BYTES if is_aligned else 1
        self._staging: Any = None
        self._words: Any = None
        storages = [self._in_words(storage) for storage in storages]
        self._pieces = [self._pieces_of(view, storages) for view in device.views]

    @contextmanager
    def bound(self) -> Iterator[None]:
        """The calling thread works on this device, apart from the engine's own work."""
        if self._runtime is None:
            leave_bound_core()
            self._allocate()
            yield
            return
        self._runtime.bind_thread()
        with self._torch.cuda.stream(self._stream):
            self._allocate()
            yield

    def _allocate(self) -> None:
        num_bytes = max(self._chunk_bytes, *(view.block_bytes for view in self.views))
        num_bytes = -(-num_bytes // _WORD_BYTES) * _WORD_BYTES
        self._staging = self._torch.empty(num_bytes, dtype=self._torch.uint8, device=self.device)
        self._words = self._in_words(self._staging)

    def mark(self) -> Any:
        """What the calling thread's stream was given so far, for ``scatter`` to wait for; None on a CPU."""
        return None if self._runtime is None else self._runtime.record_on_current_stream()

    def chunks(self, plan: TransferPlan) -> list[tuple[int, tuple[int, ...]]]:
        """The plan's device blocks as (group, blocks), each to be gathered or scattered at once."""
        found = []
        for move in plan.moves:
            step = max(1, self._chunk_bytes // self.views[move.group].block_bytes)
            blocks = move.device_blocks
            found += [(move.group, blocks[start : start + step]) for start in range(0, len(blocks), step)]
        return found

    def staged(self, group: int, num_blocks: int) -> Any:
        """Where the rows of ``num_blocks`` blocks are put: a 1-D uint8 tensor."""
        return self._staging[: num_blocks * self.views[group].block_bytes]

    def gather(self, group: int, blocks: Sequence[int]) -> Any:
        """The rows of ``blocks``, as ``staged``."""
        numbers = self._torch.tensor(blocks, dtype=self._torch.int64, device=self.device)
        for piece in self._pieces[group]:
            self._torch.index_select(piece.device, 1, numbers, out=self._rows_of(piece, group, len(blocks)))
        self._wait()
        return self.staged(group, len(blocks))

    def scatter(self, group: int, blocks: Sequence[int], mark: Any) -> None:
        """Writes the staged rows to ``blocks``, after what ``mark`` stands for."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)
        numbers = self._torch.tensor(blocks, dtype=self._torch.int64, device=self.device)
        try:
            for piece in self._pieces[group]:
                piece.device.index_copy_(1, numbers, self._rows_of(piece, group, len(blocks)))
        finally:
            self._wait()  # also when it fails midway: who hears of it may use the blocks at once

    def _wait(self) -> None:
        if self._stream is None:
            return
        event = self._torch.cuda.Event(blocking=True)  # the thread sleeps meanwhile
        event.record(self._stream)
        event.synchronize()

    def _in_words(self, tensor: Any) -> Any:
        num_words = tensor.numel() // self._word_bytes
        whole = tensor[: num_words * self._word_bytes]
        return whole.view(self._torch.int64) if self._word_bytes > 1 else whole

    def _pieces_of(self, view: BlockView, storages: Sequence[Any]) -> list[_Pieces]:
        word, pieces, content_bytes = self._word_bytes, [], 0
        segments = [(segment,) for segment in view.coalesced().segments]
        while segments:
            count, (step_bytes,) = evenly_spaced(segments)
            if step_bytes < 0:  # torch has no steps backwards
                count, step_bytes = 1, 0
            (first,) = segments[0]
            tensor = self._torch.as_strided(
                storages[first.storage],
                (count, view.num_blocks, first.nbytes // word),
                (step_bytes // word, first.block_stride_bytes // word, 1),
                first.offset_bytes // word,
            )
            pieces.append(_Pieces(tensor, content_bytes, count, first.nbytes))
            content_bytes += count * first.nbytes
            del segments[:count]
        return pieces

    def _rows_of(self, piece: _Pieces, group: int, num_blocks: int) -> Any:
        word = self._word_bytes
        return self._torch.as_strided(
            self._words,
            (piece.count, num_blocks, piece.piece_bytes // word),
            (piece.piece_bytes // word, self.views[group].block_bytes // word, 1),
            piece.content_bytes // word,
        )


def _is_aligned(view: BlockView) -> bool:
    return all(
        number % _WORD_BYTES == 0
        for segment in view.segments
        for number in (segment.offset_bytes, segment.block_stride_bytes, segment.nbytes)
    )
