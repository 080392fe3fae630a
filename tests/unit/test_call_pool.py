"""Threads for calls that may hang: what one call keeps, others do not need."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kvbm_core.clock import SystemClock
from kvbm_core.errors import Outcome
from kvbm_core.storage.call_pool import CallPool


def test_a_call_of_one_item_has_a_thread_though_another_one_hangs() -> None:
    pool, is_over = CallPool("test", 3, SystemClock()), threading.Event()

    def hang(_: int, __: Callable[[], bool]) -> Outcome:
        is_over.wait(20.0)
        return Outcome.OK

    def work(_: int, __: Callable[[], bool]) -> Outcome:
        return Outcome.OK

    try:
        for number in range(2):
            assert pool.run(hang, 1, deadline_s=0.05) == [Outcome.TIMED_OUT]
            assert pool.run(work, 1, deadline_s=10.0) == [Outcome.OK]
            assert pool.stuck_threads == number + 1
        assert pool.run(hang, 1, deadline_s=0.05) == [Outcome.TIMED_OUT]
        assert pool.run(work, 1, deadline_s=10.0) == [Outcome.BUSY]
    finally:
        is_over.set()
        assert pool.close(10.0)
