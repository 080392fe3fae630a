"""Which CPUs are near a PCI device: memory first touched there lies on the device's NUMA node (Linux, sysfs)."""

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
    """CPUs on the device's NUMA node that this process may use; empty if that is all of them, none, or unknown.

    ``pci_address``: domain:bus:device.function in lower-case hexadecimal, as in ``0000:1b:00.0``.
    """
    try:
        near = cpus_in((sysfs / "bus/pci/devices" / pci_address / "local_cpulist").read_text())
    except (OSError, ValueError):
        return frozenset()
    allowed = os.sched_getaffinity(0)
    return frozenset() if allowed <= near else near & allowed
