"""A rank's way into the group that shares loads, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.transfer.executors.broadcast_group import Group
from kvbm_core.transfer.executors.cuda_runtime import CudaRuntime

log = logging.getLogger("kvbm")

CLOSE_TIMEOUT_S = 40.0


class Joining:
    """Connects ``group``. ``on_end`` is told, once, from that thread, what is in the way; empty if the rank
    is in.

    NCCL may wait for others without end: whoever joins does not wait for it, and may give up at any time.
    """

    def __init__(self, group: Group, memory: DeviceMemory, on_end: Callable[[str], None]) -> None:
        self._group = group
        self._memory = memory
        self._on_end = on_end
        self._lock = threading.Lock()
        self._is_in = False
        self._is_given_up = False
        self.problem: str | None = None
        self._thread = threading.Thread(target=self._join, name="kvbm-broadcast-join", daemon=True)
        self._thread.start()

    def take(self) -> Group | None:
        """The connected group, which is the caller's from now on; None if it is not, or has been given up."""
        with self._lock:
            is_in, self._is_in = self._is_in, False
        return self._group if is_in else None

    def give_up(self) -> None:
        """What was not taken is closed; whoever waits for it, here and on other ranks, ends. Any thread."""
        with self._lock:
            is_in, self._is_in = self._is_in, False
            is_running, self._is_given_up = self.problem is None, True
        if is_in or is_running:
            self._group.close()
        if is_in:
            self._group.discard()

    def close(self) -> None:
        """As ``give_up``; then waits for the thread."""
        self.give_up()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.error("kvbm: rank %d: joining the broadcast did not end", self._group.rank)

    def _join(self) -> None:
        problem = ""
        try:
            self._group.connect(_bound_device(self._memory))
        except Exception as error:  # of torch, NCCL or a connection: whatever it is, this rank is not in
            problem = (str(error) or type(error).__name__).splitlines()[0]
        with self._lock:
            self.problem = problem
            self._is_in = not problem and not self._is_given_up
            is_in = self._is_in
        if not is_in:
            self._group.close()
            self._group.discard()
        self._on_end(problem)


def _bound_device(memory: DeviceMemory) -> Any:
    """The device, which the calling thread works on from now on."""
    import torch

    if memory.is_cpu:
        return torch.device("cpu")
    device = memory.storages[0].device
    CudaRuntime(device.index).bind_thread()
    return device
