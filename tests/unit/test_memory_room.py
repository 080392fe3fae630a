"""How much memory a process can still have."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from kvbm_core.errors import ConfigError
from kvbm_core.storage.memory_room import MemoryRoom, available_memory, taken_by_siblings_bytes

GB = 10**9


def machine(root: Path, available_kib: int, cgroup: str, files: dict[str, str]) -> Path:
    """A made-up /proc and /sys."""
    for name, text in {
        "proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n",
        "proc/self/cgroup": cgroup,
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_cgroup(tmp_path: Path) -> None:
    room = available_memory(machine(tmp_path, 1000, "", {}))
    assert room == (1000 * 1024, 1000 * 1024, "MemAvailable of /proc/meminfo")


def pod(limit: str, usage_gb: int, stat: str) -> dict[str, str]:
    """A container of cgroup v2, below one without a limit."""
    folder = "sys/fs/cgroup/pod"
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": f"{usage_gb * GB}\n",
        f"{folder}/memory.stat": stat,
        f"{folder}/box/memory.max": "max\n",
        f"{folder}/box/memory.current": f"{usage_gb * GB}\n",
        f"{folder}/box/memory.stat": stat,
    }


def stat(**counters_gb: int) -> str:
    """The text of memory.stat."""
    return "".join(f"{name} {size * GB}\n" for name, size in counters_gb.items())


def test_weights_in_the_page_cache_are_room(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """64 GB, of which the engine has read 40 GB of weights: a host tier of 40 GB starts, with a line."""
    caplog.set_level(logging.WARNING)
    files = pod(
        f"{64 * GB}\n", 45, stat(anon=3, file=42, active_file=30, inactive_file=8, slab_reclaimable=1)
    )
    room = available_memory(machine(tmp_path, 10**9, "0::/pod/box\n", files))
    assert (room.available_bytes, room.free_bytes) == (58 * GB, 28 * GB)
    room.check("SIZE", 28, 28 * GB)
    assert not caplog.records
    room.check("SIZE", 40, 40 * GB)
    assert [record.getMessage() for record in caplog.records] == [
        "kvbm: SIZE=40 takes 12.00 GB from cached files in use (memory.max of the container: 64.00 GB; "
        "45.00 GB in use, 39.00 GB of them cached files that can go)"
    ]
    with pytest.raises(
        ConfigError,
        match=r"SIZE=59: needs 59\.00 GB of host memory but 58\.00 GB is available "
        r"\(memory\.max of the container: 64\.00 GB; 45\.00 GB in use.*\); lower it",
    ):
        room.check("SIZE", 59, 59 * GB)


def test_files_in_memory_are_no_room(tmp_path: Path) -> None:
    """They count as "file", and never leave."""
    files = pod(f"{64 * GB}\n", 45, stat(anon=3, file=42, shmem=40, active_file=1, inactive_file=1))
    assert available_memory(machine(tmp_path, 10**9, "0::/pod/box\n", files)).available_bytes == 21 * GB


def test_no_limit_is_none(tmp_path: Path) -> None:
    files = pod("max\n", 45, stat(inactive_file=1))
    assert available_memory(machine(tmp_path, 1000, "0::/pod/box\n", files)).available_bytes == 1000 * 1024


def test_a_kernel_that_does_not_tell_of_files(tmp_path: Path) -> None:
    files = pod(f"{64 * GB}\n", 45, "anon 5\n")
    assert available_memory(machine(tmp_path, 10**9, "0::/pod/box\n", files)).available_bytes == 19 * GB


def test_an_old_cgroup(tmp_path: Path) -> None:
    """Version 1: what is below it counts in the totals alone."""
    folder = "sys/fs/cgroup/memory/pod"
    files = {
        f"{folder}/memory.limit_in_bytes": "400000\n",
        f"{folder}/memory.usage_in_bytes": "399000\n",
        f"{folder}/memory.stat": "inactive_file 9\ntotal_inactive_file 20\ntotal_active_file 300\n",
    }
    room = available_memory(machine(tmp_path, 1000, "3:cpu:/x\n2:memory:/pod\n", files))
    assert (room.available_bytes, room.free_bytes) == (1320, 1020)


def test_more_in_use_than_allowed(tmp_path: Path) -> None:
    """As after a limit was lowered."""
    files = pod(f"{4 * GB}\n", 5, stat(anon=5))
    assert available_memory(machine(tmp_path, 10**9, "0::/pod\n", files)).available_bytes == 0


@pytest.mark.parametrize("text", ["", "many\n", "\xff", None])
@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("proc/meminfo", 19 * GB),
        ("proc/self/cgroup", 1024 * GB),
        ("sys/fs/cgroup/pod/memory.max", 1024 * GB),
        ("sys/fs/cgroup/pod/memory.current", 1024 * GB),
    ],
)
def test_what_nobody_can_read_is_no_limit(name: str, left: int, text: str | None, tmp_path: Path) -> None:
    root = machine(tmp_path, 10**9, "0::/pod\n", pod(f"{64 * GB}\n", 45, stat(anon=5)))
    (root / name).unlink()
    if text is not None:
        (root / name).write_text(f"MemAvailable: {text}" if "meminfo" in name else text, "latin-1")
    assert available_memory(root).available_bytes == left


def test_nothing_is_known(tmp_path: Path) -> None:
    available_memory(tmp_path).check("SIZE", 40, 40 * GB)


def test_this_machine() -> None:
    assert available_memory().available_bytes > 1 << 20


SIBLING = """
import sys
from kvbm_core.storage.host_slab import HostSlab
slab = HostSlab(32, 1 << 20)
assert slab.wait_ready(60.0)
print("ready", flush=True)
sys.stdin.read()
"""
ASK = "from kvbm_core.storage.memory_room import taken_by_siblings_bytes as taken; print(taken())"


def test_what_siblings_have_taken_is_known() -> None:
    """So that ranks that start one after the other all see the same room."""
    root = Path(__file__).resolve().parents[2]

    def ask() -> int:
        command = [sys.executable, "-c", ASK]
        return int(subprocess.run(command, cwd=root, check=True, capture_output=True).stdout)

    before = ask()
    command = [sys.executable, "-c", SIBLING]
    with subprocess.Popen(
        command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sibling:
        try:
            assert sibling.stdout is not None and sibling.stdout.readline() == "ready\n"
            assert 32 << 20 <= ask() - before < 48 << 20
            assert taken_by_siblings_bytes() < 32 << 20, "a child is none"
        finally:
            sibling.kill()


def test_what_siblings_have_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbm_core.storage.memory_room.taken_by_siblings_bytes", lambda: 7)
    assert MemoryRoom(10, 5, "here").with_siblings() == (17, 12, "here")
