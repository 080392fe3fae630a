"""Where the files of a run are, and what is known of the disk below them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.suite import CannotRun, Options


@contextmanager
def working_folder(options: Options, needed_bytes: int) -> Iterator[Path]:
    """A new folder under TMPDIR, or under the output folder; removed at the end, whatever happens.

    CannotRun if less than ``needed_bytes`` are free there.
    """
    chosen = os.environ.get("TMPDIR")
    parent = Path(chosen) if chosen else options.output
    try:
        parent.mkdir(parents=True, exist_ok=True)
        room = os.statvfs(parent)
    except OSError as error:
        raise CannotRun(
            f"{parent}: {error.strerror}; set TMPDIR to a folder on the disk to measure"
        ) from error
    free_bytes = room.f_bavail * room.f_frsize
    if free_bytes < needed_bytes:
        raise CannotRun(
            f"{parent}: {free_bytes / 1e9:.1f} GB are free, {needed_bytes / 1e9:.1f} GB are needed;"
            " set TMPDIR to a folder on a larger disk"
        )
    with tempfile.TemporaryDirectory(prefix="kvbm-storage-", dir=parent) as name:
        yield Path(name)


def disk_facts(folder: Path) -> dict[str, str]:
    """File system and device under ``folder``, as far as the system tells."""
    number = os.stat(folder).st_dev
    major_minor = f"{os.major(number)}:{os.minor(number)}"
    room = os.statvfs(folder)
    return {
        "file system": _file_system(major_minor),
        "device": _device(Path("/sys/dev/block") / major_minor),
        "space": f"{room.f_bavail * room.f_frsize / 1e9:.0f} of "
        f"{room.f_blocks * room.f_frsize / 1e9:.0f} GB free",
    }


def _file_system(major_minor: str, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Type, source and options of the mount, such as "ext4 on /dev/vda (rw,relatime)"."""
    lines = mounts.read_text(errors="replace").splitlines() if mounts.exists() else []
    for line in reversed(lines):  # the newest mount is the one that is seen
        before, _, after = line.partition(" - ")
        fields, described = before.split(), after.split()
        if len(described) >= 2 and len(fields) > 5 and fields[2] == major_minor:
            return f"{described[0]} on {described[1]} ({fields[5]})"
    return "unknown"


def _device(folder: Path) -> str:
    """What the kernel says of a block device; a partition's facts are those of its disk."""
    if not folder.exists():
        return "no block device of its own (memory, network or layered)"
    disk = folder.resolve()
    disk = disk.parent if (disk / "partition").exists() else disk
    model = _word(disk / "device" / "model") or (disk / "device" / "driver").resolve().name
    kind = {"0": "no moving parts", "1": "reported as rotational"}.get(
        _word(disk / "queue" / "rotational"), ""
    )
    facts = (disk.name, model, kind, f"scheduler {_word(disk / 'queue' / 'scheduler') or 'unknown'}")
    return ", ".join(fact for fact in facts if fact)


def _word(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
