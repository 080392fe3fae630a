"""A bounded number of threads for calls that may hang in the kernel."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from kvbm_core.clock import Clock
from kvbm_core.errors import Outcome
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.storage.base import Memory
from kvbm_core.storage.late import LATE, ranges_of

ITEMS_PER_THREAD = 8
"""Of small tasks: fewer are not worth one more thread."""

IsGivenUp = Callable[[], bool]
Task = Callable[[int, IsGivenUp], Outcome]

limited_log = RateLimitedLogger()


class CallPool:
    """Runs a task for each item of a call in daemon threads. Any thread.

    A call ends by its deadline. Tasks that have not begun by then are dropped. A task that hangs is TIMED_OUT
    and keeps its thread until the kernel returns. While all threads hang, calls are BUSY at once; a thread
    that comes back works again.
    """

    def __init__(self, name: str, num_threads: int, clock: Clock) -> None:
        self._name = name
        self._num_threads = num_threads
        self._clock = clock
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._calls: set[_Call] = set()  # under way
        self.stuck_threads = 0
        """Threads whose task was given up and has not ended."""
        self._num_asked = 0  # threads that have something to do, or are about to
        self._is_closed = False

    def run(
        self,
        task: Task,
        count: int,
        *,
        deadline_s: float,
        targets: Sequence[Memory] | None = None,
        is_small: bool = False,
    ) -> list[Outcome]:
        """Calls ``task(i, is_given_up)`` for each of ``count`` items, in any order. The outcomes, in order of
        the items.

        ``targets``: the memory that each item may touch; late (see ``LATE``) if it is given up. ``is_small``:
        a task takes microseconds, as a rule.
        """
        call = _Call(self, task, count, targets)
        ends_at_s = self._clock.now_s() + deadline_s
        num_threads = -(-count // ITEMS_PER_THREAD) if is_small else count
        with self._lock:
            if self._is_closed:
                return [Outcome.REJECTED] * count
            if count and self.stuck_threads >= self._num_threads:
                return [Outcome.BUSY] * count
            if deadline_s <= 0:
                return call.outcomes
            self._calls.add(call)
            self._start(call, min(num_threads, self._num_threads))
        call.wait(ends_at_s, self._clock)
        return call.outcomes

    def close(self, timeout_s: float) -> bool:
        """Ends what is under way, by giving it up after ``timeout_s``. False if a thread hangs: it stays.

        Later calls are REJECTED. May be called again.
        """
        ends_at_s = self._clock.now_s() + timeout_s
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for _ in self._threads:
                    self._queue.put(None)
        for thread in self._threads:
            thread.join(max(0.0, ends_at_s - self._clock.now_s()))
        with self._lock:
            for call in list(self._calls):
                call.give_up()
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads

    # ---------------------------------------------------------------- inside

    def _start(self, call: _Call, num_threads: int) -> None:
        self._num_asked += num_threads
        while len(self._threads) < min(self._num_asked, self._num_threads):
            name = f"kvbm-{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        for _ in range(num_threads):
            self._queue.put(call)

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            call.work()
            del call  # or an idle thread keeps its memory
            with self._lock:
                self._num_asked -= 1


class _Call:
    """The items of one call. All but ``work`` and ``wait`` under the pool's lock."""

    def __init__(self, pool: CallPool, task: Task, count: int, targets: Sequence[Memory] | None) -> None:
        self._pool = pool
        self._lock = pool._lock
        self._task = task
        self._count = count
        self._targets = targets
        self._next = 0
        self._running: dict[int, int | None] = {}  # with their tokens in LATE, once it is given up
        self._num_ended = 0
        self._is_given_up = False
        self._has_ended = not count
        self._end_signal = threading.Lock()  # as an Event, at half the time
        if count:
            self._end_signal.acquire()
        self.outcomes = [Outcome.TIMED_OUT] * count

    def give_up(self) -> None:
        """What has not ended is TIMED_OUT, and its memory late."""
        if not self._is_given_up:
            self._is_given_up = True
            self._pool._calls.discard(self)
            self._pool.stuck_threads += len(self._running)
            for index in self._running:
                memory = () if self._targets is None else self._targets[index]
                self._running[index] = LATE.add(ranges_of(memory), memory)
        self._signal()

    def _signal(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._end_signal.release()

    def wait(self, ends_at_s: float, clock: Clock) -> None:
        """Until all have ended, or it is given up: at ``ends_at_s`` at the latest."""
        self._end_signal.acquire(timeout=max(0.0, ends_at_s - clock.now_s()))
        with self._lock:
            self.give_up()

    def work(self) -> None:
        """As many items as are left."""
        while (index := self._take()) is not None:
            outcome = Outcome.IO_ERROR
            try:
                outcome = self._task(index, lambda: self._is_given_up)
            except Exception as error:  # whoever waits for this one must hear of it
                limited_log.warning("task", "kvbm: %s: %s", self._pool._name, error, exc_info=error)
            self._end(index, outcome)

    def _take(self) -> int | None:
        with self._lock:
            if self._is_given_up or self._next == self._count:
                return None
            index, self._next = self._next, self._next + 1
            self._running[index] = None
            return index

    def _end(self, index: int, outcome: Outcome) -> None:
        with self._lock:
            token = self._running.pop(index)
            if token is not None:
                self._pool.stuck_threads -= 1
            else:
                self._num_ended += 1
                self.outcomes[index] = outcome
                if self._num_ended == self._count:
                    self._signal()
        if token is not None:  # without the lock, and last: who hears of it may want this pool
            LATE.end(token)
