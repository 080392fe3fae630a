"""A double of CudaRuntime for machines without a GPU."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvbm_core.transfer.executors.cuda_runtime import Copies, CudaError, CudaRuntime


@dataclass(eq=False)
class DoubleStream:
    """Work in order; while held, nothing of it starts."""

    high_priority: bool = False
    work: deque[tuple[str, Any]] = field(default_factory=deque)
    is_held: bool = False
    was_asked: bool = False


@dataclass(eq=False)
class DoubleEvent:
    """Happens when ``stream``, on which it was recorded, gets to it; without a stream never."""

    stream: DoubleStream | None = None
    happened: bool = False
    failed: bool = False
    was_asked: bool = False


class CudaDouble(CudaRuntime):
    """CudaRuntime that copies ordinary memory with memmove, and does everything as late as CUDA may.

    It is a double because no GPU was at hand when the executor was written. A stream does its work in order,
    and only when somebody needs it: the second time that an event behind it is looked at, when another
    stream that is needed waits for such an event, or in ``synchronize``. So what is not ordered by an event
    is done in the wrong order, and what is not waited for has not been done. Each thread has a current stream
    of its own: the default stream, but ``compute`` in the thread that makes the double, which stands for an
    engine that computes on a stream of its own. It says nothing about CUDA itself: call signatures, pinning
    and speed need a real GPU.
    """

    def __init__(self) -> None:
        self.streams: list[DoubleStream] = []
        self.default = self.create_stream(high_priority=False)
        self.compute = self.create_stream(high_priority=False)
        self._current = threading.local()
        self._current.stream = self.compute
        self.batches: list[Copies] = []
        self.refuse_copies = False
        self.fail_copies = False
        self.refuse_records = False
        """On streams other than those that the engine's threads have."""
        self._changed = threading.Condition(threading.RLock())

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
        """See CudaRuntime."""
        return self._record(getattr(self._current, "stream", self.default))

    def record(self, stream: DoubleStream) -> DoubleEvent:
        """See CudaRuntime."""
        if self.refuse_records:
            raise CudaError("CUDA error 2 (double)")
        return self._record(stream)

    def _record(self, stream: DoubleStream) -> DoubleEvent:
        event = DoubleEvent(stream)
        self._push(stream, "record", event)
        return event

    def wait_event(self, stream: DoubleStream, event: DoubleEvent) -> None:
        """See CudaRuntime."""
        self._push(stream, "wait", event)

    def is_done(self, event: DoubleEvent) -> bool:
        """See CudaRuntime. The first look at an event comes too early."""
        with self._changed:
            if event.was_asked:
                self._run_to(event)
            event.was_asked = True
            if event.failed:
                raise CudaError("CUDA error 700 (double)")
            return event.happened

    def is_idle(self, stream: DoubleStream) -> bool:
        """See CudaRuntime. The first look at a stream comes too early."""
        with self._changed:
            if stream.was_asked:
                self._run_to(DoubleEvent(stream))
            stream.was_asked = bool(stream.work)
            if self.fail_copies:
                raise CudaError("CUDA error 700 (double)")
            return not stream.work

    def copy(self, copies: Copies, stream: DoubleStream) -> None:
        """See CudaRuntime; every batch is kept in ``batches``."""
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

    def synchronize(self) -> None:
        """Does all that is left to do, but for streams that are held, and those that wait for them."""
        for stream in self.streams:
            with self._changed:
                self._run_to(self._record(stream))

    def close(self) -> None:
        """Work not yet done is dropped."""
        with self._changed:
            for stream in self.streams:
                stream.work.clear()

    def _push(self, stream: DoubleStream, what: str, argument: Any) -> None:
        with self._changed:
            stream.work.append((what, argument))
            self._changed.notify_all()

    def _run_to(self, event: DoubleEvent) -> bool:
        """Does the work before ``event``; False if something is held. With the lock."""
        stream = event.stream
        while stream is not None and not event.happened and stream.work and not stream.is_held:
            what, argument = stream.work[0]
            if what == "wait" and not self._run_to(argument):
                return False
            stream.work.popleft()
            if what == "call":
                argument()
            elif what == "copy" and not self.fail_copies:
                for target, source, nbytes in zip(*argument, strict=True):
                    ctypes.memmove(target, source, nbytes)
            elif what == "record":
                argument.happened, argument.failed = True, self.fail_copies
        return event.happened
