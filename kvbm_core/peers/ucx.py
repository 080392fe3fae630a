"""A NIXL agent whose transport is UCX: RDMA where there is any, else shared memory or TCP.

UCX neither encrypts nor asks who is there: whoever reaches its port could read and write this process'
memory. It is for networks that nobody else is on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

BACKEND = "UCX"
EXTRA = "pip install 'nixl>=1.5'"
_OPTIONS = {"engine_config": "TCP_TX_SEG_SIZE=256k,TCP_RX_SEG_SIZE=256k"}
"""With UCX' own 8 KiB, TCP has a third of the rate."""
_INFINIBAND = Path("/sys/class/infiniband")
_ONE_AT_A_TIME = threading.Lock()
"""UCX reads the environment and loads its modules when an agent is made: two at once may hang (NIXL 1668)."""

Rows = npt.NDArray[np.uint64]


def is_installed() -> bool:
    """Whether NIXL can be looked for; nothing is imported."""
    return importlib.util.find_spec("nixl") is not None


class Agent:
    """One NIXL agent and the memory that it has registered. One thread at a time. OSError if it cannot be
    made: one line.
    """

    def __init__(self, name: str, address: int, num_bytes: int) -> None:
        try:
            with _ONE_AT_A_TIME:
                prepare()
                import nixl

                self._agent: Any = nixl.nixl_agent(
                    name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
                )
                self._agent.create_backend(BACKEND, _OPTIONS)
                memory = [(address, num_bytes, 0, "")]
                self._registered: Any = self._agent.register_memory(memory, "DRAM", backends=[BACKEND])
        except Exception as error:  # NIXL's have no class in common
            raise OSError(f"NIXL's UCX cannot be had ({' '.join(str(error).split())}); {EXTRA}") from error

    def zone(self) -> bytes:
        """What another agent needs to write to the registered memory."""
        made: bytes = self._agent.get_partial_agent_metadata(self._registered, True, [BACKEND])
        return made

    def meet(self, zone: bytes) -> Any:
        """The agent that this is of. NIXL's exceptions."""
        return self._agent.add_remote_agent(zone)

    def forget(self, peer: Any) -> None:
        """Its connections end."""
        with contextlib.suppress(Exception):
            self._agent.remove_remote_agent(peer)

    def write(self, peer: Any, sources: Rows, targets: Rows) -> Any:
        """Begins to write; the transfer's handle. ``sources`` in registered memory. May take as long as the
        transfer. NIXL's exceptions.
        """
        agent = self._agent
        near, far = agent.get_xfer_descs(sources, "DRAM"), agent.get_xfer_descs(targets, "DRAM")
        handle = agent.initialize_xfer("WRITE", near, far, peer, b"", backends=[BACKEND])
        agent.transfer(handle)
        return handle

    def is_over(self, handle: Any) -> bool:
        """Whether it is there. NIXL's exceptions; then it is not, and nothing of it is under way any more."""
        state = self._agent.check_xfer_state(handle)
        if state == "DONE":
            self._agent.release_xfer_handle(handle)
        elif state != "PROC":
            raise OSError(f"a transfer ended as {state}")
        return bool(state == "DONE")

    def progress(self) -> None:
        """Takes what comes over a network that does not write to memory by itself."""
        with contextlib.suppress(Exception):  # a connection has ended: whoever waits for it has a deadline
            self._agent.get_new_notifs(backends=[BACKEND])

    def close(self) -> None:
        """Ends it with all that is under way: nothing is written, or read, over a network by it any more. Its
        memory may be written to by processes of this machine that have begun.
        """
        with _ONE_AT_A_TIME:
            with contextlib.suppress(Exception):
                self._agent.deregister_memory(self._registered, backends=[BACKEND])
            self._registered = self._agent = None


def prepare() -> None:
    """What UCX reads when it is loaded. What the user has set stays."""
    # UCX would write over the code of mmap, munmap and others while threads of the engine run it, and one of
    # them may crash (UCX 11795). It does so to hear of memory that goes; all of ours is registered.
    os.environ.setdefault("UCX_MEM_MMAP_HOOK_MODE", "none")
    if not _INFINIBAND.is_dir():
        # Without such devices, UCX' part for them ends the process by SIGSEGV when it exits.
        os.environ.setdefault("UCX_MODULES", "^ib")


def rows_of(addresses: list[int], num_bytes: int) -> Rows:
    """As NIXL takes them. OverflowError for what is no address."""
    rows = np.zeros((len(addresses), 3), np.uint64)
    rows[:, 0] = addresses
    rows[:, 1] = num_bytes
    return rows
