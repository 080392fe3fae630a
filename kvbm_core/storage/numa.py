"""Which CPUs our threads run on (Linux): near a PCI device, whose memory they touch first, or beside the
engine's.
"""

from __future__ import annotations

import os
from pathlib import Path


def cpus_in(cpulist: str) -> frozenset[int]:
    """The kernel's list format, such as ``0-15,32-47``. ValueError if it is not one."""
    cpus: set[int] = set()
    for part in cpulist.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus |= set(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def cpus_near(pci_address: str, sysfs: Path = Path("/sys")) -> frozenset[int]:
    """CPUs on the device's NUMA node that this process may use; empty if that is all of them, none, or
    unknown.

    ``pci_address``: domain:bus:device.function in lower-case hexadecimal, as in ``0000:1b:00.0``.
    """
    try:
        near = cpus_in((sysfs / "bus/pci/devices" / pci_address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()
    allowed = os.sched_getaffinity(0)
    return frozenset() if allowed <= near else near & allowed


def leave_bound_core() -> None:
    """Lets the calling thread, which only copies or waits, run beside the cores that an engine computes on.

    An engine's worker process binds its main thread, which computes, to one core, and each thread that is
    started later inherits that: there a copy would hold up the whole forward pass. The thread goes to the
    other CPUs of the same NUMA node, or of any, that the engine process which started the worker may use. It
    stays if there are none, and where it was not the engine that bound it (another program started this
    process, or more than one core is left).
    """
    try:
        bound, parent = os.sched_getaffinity(os.getpid()), os.getppid()
        is_worker = os.path.samefile(f"/proc/{parent}/exe", "/proc/self/exe")
        others = os.sched_getaffinity(parent) - bound
        if is_worker and len(bound) == 1 and others:
            os.sched_setaffinity(0, others & _cpus_of_nodes(bound) or others)
    except (OSError, ValueError):  # slower, not wrong
        return


def _cpus_of_nodes(cpus: set[int], sysfs: Path = Path("/sys")) -> set[int]:
    """All CPUs of the NUMA nodes that ``cpus`` are on; empty if unknown."""
    found: set[int] = set()
    for path in (sysfs / "devices/system/node").glob("node[0-9]*/cpulist"):
        node = cpus_in(path.read_text())
        if node & cpus:
            found |= node
    return found
