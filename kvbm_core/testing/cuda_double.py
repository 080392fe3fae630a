"""A double of CudaApi for machines without a GPU."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvbm_core.transfer.executors.cuda_runtime import Copies, CudaError


@dataclass
class DoubleEvent:
    """Happens when the stream that it was recorded on gets to it."""

    happened: bool = False
    failed: bool = False


@dataclass
class DoubleStream:
    """Work in order; while held, nothing of it starts."""

    high_priority: bool = False
    work: deque[tuple[str, Any]] = field(default_factory=deque)
    is_held: bool = False


class CudaDouble:
    """CudaApi that copies ordinary memory, in a thread of its own, with memmove.

    It is a double because no GPU was at hand when the executor was written: streams run independently, each
    in order, and wait for events of each other as CUDA's do, so the executor's ordering and bookkeeping are
    the real ones. It says nothing about CUDA itself: call signatures, pinning and speed need a real GPU.
    """

    def __init__(self) -> None:
        self.streams: list[DoubleStream] = []
        self.compute = self.create_stream(high_priority=False)
        self.batches: list[Copies] = []
        self.refuse_copies = False
        self.fail_copies = False
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvbm-cuda-double", daemon=True)
        self._thread.start()

    def bind_thread(self) -> None:
        """Nothing to bind."""

    def address_of(self, storage: Any) -> int:
        """Of a numpy array."""
        return int(storage.ctypes.data)

    def create_stream(self, *, high_priority: bool) -> DoubleStream:
        """A stream that runs beside the others."""
        stream = DoubleStream(high_priority)
        self.streams.append(stream)
        return stream

    def record_on_current_stream(self) -> DoubleEvent:
        """The compute stream stands for the caller's current one."""
        return self.record(self.compute)

    def record(self, stream: DoubleStream) -> DoubleEvent:
        """See CudaApi."""
        event = DoubleEvent()
        self._push(stream, "record", event)
        return event

    def wait_event(self, stream: DoubleStream, event: DoubleEvent) -> None:
        """See CudaApi."""
        self._push(stream, "wait", event)

    def is_done(self, event: DoubleEvent) -> bool:
        """See CudaApi."""
        with self._changed:
            if event.failed:
                raise CudaError("CUDA error 700 (double)")
            return event.happened

    def copy(self, copies: Copies, stream: DoubleStream) -> None:
        """See CudaApi; every batch is kept in ``batches``."""
        if self.refuse_copies:
            raise CudaError("CUDA error 1 (double)")
        with self._changed:
            self.batches.append(copies)
        self._push(stream, "copy", copies)

    def compute_calls(self, kernel: Callable[[], None]) -> None:
        """Queues ``kernel`` on the compute stream, as a forward pass would."""
        self._push(self.compute, "call", kernel)

    def wait_batches(self, count: int, timeout_s: float) -> bool:
        """Waits until the executor has queued ``count`` batches."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self.batches) >= count, timeout_s)

    def hold(self, stream: DoubleStream, held: bool) -> None:
        """Stops a stream before its next piece of work, or lets it go on."""
        with self._changed:
            stream.is_held = held
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread; work not yet done is dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()

    def _push(self, stream: DoubleStream, what: str, argument: Any) -> None:
        with self._changed:
            stream.work.append((what, argument))
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._runnable() is not None)
                stream = self._runnable()
                if self._stopping or stream is None:
                    return
                what, argument = stream.work.popleft()
            if what == "call":
                argument()
            elif what == "copy" and not self.fail_copies:
                for target, source, nbytes in zip(*argument, strict=True):
                    ctypes.memmove(target, source, nbytes)
            elif what == "record":
                with self._changed:
                    argument.happened, argument.failed = True, self.fail_copies
                    self._changed.notify_all()

    def _runnable(self) -> DoubleStream | None:
        """The stream whose next work may run now, those of high priority first."""
        for stream in sorted(self.streams, key=lambda s: not s.high_priority):
            if stream.work and not stream.is_held:
                what, argument = stream.work[0]
                if what != "wait" or argument.happened:
                    return stream
        return None
