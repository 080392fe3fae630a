"""CPUs near a device, from sysfs as Linux writes it, and the slab's thread among them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.storage.numa import cpus_in, cpus_near, leave_bound_core

ADDRESS = "0000:1b:00.0"
WAIT_S = 30.0


def sysfs_with(tmp_path: Path, cpulist: str) -> Path:
    folder = tmp_path / "bus/pci/devices" / ADDRESS
    folder.mkdir(parents=True)
    (folder / "local_cpulist").write_text(cpulist)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8\n", {0, 1, 2, 3, 8}), ("5", {5}), ("\n", set()), ("0-1,64-65\n", {0, 1, 64, 65})],
)
def test_the_kernels_lists_are_read(text: str, cpus: set[int]) -> None:
    assert cpus_in(text) == cpus


def test_only_cpus_that_this_process_may_use_are_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 9})
    assert cpus_near(ADDRESS, sysfs_with(tmp_path, "0-3\n")) == {1, 2}


@pytest.mark.parametrize("cpulist", ["0-9\n", "5-6\n", "\n", "what\n"])
def test_no_binding_where_there_is_nothing_to_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpulist: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2})
    assert cpus_near(ADDRESS, sysfs_with(tmp_path, cpulist)) == frozenset()


def test_an_unknown_device_is_near_nothing(tmp_path: Path) -> None:
    assert cpus_near("", tmp_path) == cpus_near(ADDRESS, tmp_path) == frozenset()


def test_the_slab_is_touched_on_the_cpus_it_was_given() -> None:
    chosen = max(os.sched_getaffinity(0))
    ran_on: list[set[int]] = []
    slab = HostSlab(
        2, 4096, prepare=lambda address, nbytes: ran_on.append(os.sched_getaffinity(0)), cpus={chosen}
    )
    try:
        assert slab.wait_ready(WAIT_S)
        assert ran_on == [{chosen}]
    finally:
        slab.close()


def test_cpus_that_do_not_exist_are_no_reason_to_fail() -> None:
    slab = HostSlab(2, 4096, cpus={100_000})
    try:
        assert slab.wait_ready(WAIT_S)
    finally:
        slab.close()


def _worker(bound: set[int], answer: multiprocessing.SimpleQueue[tuple[set[int], set[int]]]) -> None:
    """An engine's worker process: binds its thread, then starts another one."""
    os.sched_setaffinity(0, bound)
    found: list[set[int]] = []

    def copy() -> None:
        leave_bound_core()
        found.append(os.sched_getaffinity(0))

    def wait() -> None:  # as the channel's thread does, which starts the one that copies
        copy()
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert found[0] == found[1]
    answer.put((found[0], os.sched_getaffinity(0)))


@pytest.mark.parametrize("cores", [1, 2])
def test_a_thread_that_copies_leaves_the_core_that_the_engine_computes_on_and_no_wider_binding(
    cores: int,
) -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("NOT RUN: threads beside the core that computes: needs two CPUs")
    bound = set(sorted(allowed)[:cores])
    context = multiprocessing.get_context("spawn")
    answer: multiprocessing.SimpleQueue[tuple[set[int], set[int]]] = context.SimpleQueue()
    process = context.Process(target=_worker, args=(bound, answer))
    process.start()
    copying, computing = answer.get()
    process.join(WAIT_S)
    assert process.exitcode == 0 and computing == bound
    # With all CPUs but one gone there is no other to go to; a binding to several cores is not the engine's
    # own.
    assert copying == (allowed - bound if cores == 1 else bound)
