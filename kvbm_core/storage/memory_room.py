"""How much memory this process can still have, by the machine and by the container it is in."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import NamedTuple

from kvbm_core.errors import ConfigError

_FILE_PAGES = ("active_file", "inactive_file", "slab_reclaimable")
"""What the kernel gives up for us. Not "file": files in memory (tmpfs) are in it, and stay."""
_GB = 1e9

log = logging.getLogger("kvbm")


class MemoryRoom(NamedTuple):
    """What can be had; how much of it without cached files in use giving way; and which figures say so."""

    available_bytes: int
    free_bytes: int
    source: str

    def check(self, setting: str, value: object, needed_bytes: int) -> None:
        """Raises ConfigError for memory that cannot be had. A warning if files in use, as weights that are
        read again, have to leave the page cache for it.
        """
        if needed_bytes > self.available_bytes:
            raise ConfigError(
                setting,
                value,
                f"needs {_gb(needed_bytes)} of host memory but {_gb(self.available_bytes)} is available "
                f"({self.source}); lower it, or free memory or raise the container's limit",
            )
        if needed_bytes > self.free_bytes:
            taken = _gb(needed_bytes - self.free_bytes)
            log.warning(
                "kvbm: %s=%s takes %s from cached files in use (%s)", setting, value, taken, self.source
            )

    def with_siblings(self) -> MemoryRoom:
        """As before this process's siblings took what they have."""
        taken_bytes = taken_by_siblings_bytes()
        return self._replace(
            available_bytes=self.available_bytes + taken_bytes, free_bytes=self.free_bytes + taken_bytes
        )


_UNKNOWN = MemoryRoom(sys.maxsize, sys.maxsize, "nothing says how much there is")


def available_memory(root: Path = Path("/")) -> MemoryRoom:
    """What this process can still allocate: MemAvailable or the room in its cgroup, the smaller. What nobody
    can read is no limit.
    """
    rooms = [*_of_machine(root / "proc/meminfo"), *_of_cgroups(root)]
    return min(rooms, key=lambda room: room.available_bytes, default=_UNKNOWN)


def _of_machine(path: Path) -> list[MemoryRoom]:
    try:
        lines = path.read_text().splitlines()
        sizes = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        return []
    return [MemoryRoom(size, size, "MemAvailable of /proc/meminfo") for size in sizes]


def _of_cgroups(root: Path) -> list[MemoryRoom]:
    """The room in our cgroup and in all above it."""
    rooms: list[MemoryRoom] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return rooms
    for line in lines:
        _, controllers, path = f"{line}::".split(":", 2)
        path = path.removesuffix("::")
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            room = _of_cgroup(folder, *names)
            if room is not None:
                rooms.append(room)
            if folder == base:
                break
    return rooms


def _of_cgroup(folder: Path, limit_name: str, usage_name: str) -> MemoryRoom | None:
    try:
        limit, usage = (int((folder / name).read_text()) for name in (limit_name, usage_name))
        stat = (folder / "memory.stat").read_text().split()
        counters = dict(zip(stat[::2], stat[1::2], strict=False))
        active, *others = (
            int(counters.get(f"total_{name}", counters.get(name, "0"))) for name in _FILE_PAGES
        )
    except (OSError, ValueError):  # "max" is no number either
        return None
    free_bytes = limit - usage + sum(others)
    used = f"{_gb(usage)} in use, {_gb(active + sum(others))} of them cached files that can go"
    source = f"{limit_name} of the container: {_gb(limit)}; {used}"
    return MemoryRoom(max(0, free_bytes + active), max(0, free_bytes), source)


def _gb(nbytes: int) -> str:
    return f"{nbytes / _GB:.2f} GB"


def taken_by_siblings_bytes(proc: Path = Path("/proc")) -> int:
    """Memory that host tiers of this process's siblings, the other ranks of its engine here, have by now.

    They take it in the background, so that what is available says nothing of how much it was for all of them.
    Found as what slabs are: anonymous and not inherited by forks. Whatever else is like that counts too.
    """
    parent, taken = os.getppid(), 0
    for process in proc.glob("[0-9]*"):
        try:
            is_sibling = int((process / "stat").read_text().rpartition(")")[2].split()[1]) == parent
            if is_sibling and int(process.name) != os.getpid():
                taken += _slab_bytes((process / "smaps").read_text())
        except (OSError, IndexError, ValueError):  # it has ended, or is somebody else's
            continue
    return taken


def _slab_bytes(smaps: str) -> int:
    rss_kb = taken_kb = 0
    is_anonymous = False
    for line in smaps.splitlines():
        name, _, rest = line.partition(":")
        if name == "Rss":
            rss_kb = int(rest.split()[0])
        elif name == "VmFlags":
            taken_kb += rss_kb if is_anonymous and "dc" in rest.split() else 0
        elif "-" in name.split(" ")[0]:  # a mapping begins: addresses, ..., and a file if it has one
            is_anonymous = len(line.split()) == 5
    return taken_kb * 1024
