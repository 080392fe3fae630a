"""Asynchronous disk I/O on a kernel that keeps requests, refuses them for a while, or is interrupted."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from textwrap import dedent

import pytest

from kvbm_core.testing.file_io_contract import why_no_aio

NO_AIO = why_no_aio()

# Under the module, in place of libc's: a kernel that has no room for requests, or keeps those that it has.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <sys/syscall.h>

int refusals, is_stuck, destroyed;

long syscall(long number, ...)
{
    long a[6];
    va_list list;
    va_start(list, number);
    for (int n = 0; n < 6; n++)
        a[n] = va_arg(list, long);
    va_end(list);
    if (number == SYS_io_submit && refusals > 0) {
        refusals--;
        errno = EAGAIN;
        return -1;
    }
    if (number == SYS_io_getevents && is_stuck)
        return ppoll(0, 0, (struct timespec *)a[4], 0);
    destroyed += number == SYS_io_destroy;
    long (*real)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
"""
PRELUDE = """
import ctypes, os, signal, sys
from kvbm_core.storage.disk.aio_io import AioIo
from kvbm_core.testing.file_io_contract import AGES_S, LONG_S, UNIT_BYTES, finish, memory_of, whole
refusals, is_stuck, destroyed = (
    ctypes.c_int.in_dll(ctypes.CDLL(None), name) for name in ("refusals", "is_stuck", "destroyed")
)
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, UNIT_BYTES)
memory = memory_of(4 * UNIT_BYTES)
transfers = [whole(part, n) for n, part in enumerate(memory.reshape(4, -1))]
done = {n: UNIT_BYTES for n in range(4)}
"""
FAULTS = {
    "a request does not end": """
        is_stuck.value = 1
        io = AioIo(fd, depth=2)
        io.submit(transfers, is_write=False)
        assert io.collect(0) == [] and io.collect(0.01) == [] and io.in_flight == 4
        assert io.close(0) is False and io.close(0.01) is False
        assert io.in_flight == 4 and destroyed.value == 0
        is_stuck.value = 0
        assert io.close(LONG_S) and io.in_flight == 0 and destroyed.value == 1
        assert io.close(0) and destroyed.value == 1
    """,
    "a request does not end, and nobody waits": """
        is_stuck.value = 1
        io = AioIo(fd, depth=2)
        io.submit(transfers, is_write=False)
        del io
        assert destroyed.value == 0
        is_stuck.value = 0
        io = AioIo(fd, depth=2)
        io.submit(transfers, is_write=False)
        del io
        assert destroyed.value == 1
    """,
    "the kernel has no room for a while": """
        io = AioIo(fd, depth=2)
        refusals.value = 5
        io.submit(transfers, is_write=False)
        assert io.in_flight == 4 and finish(io) == done and refusals.value == 0
        refusals.value = 2**31 - 1
        io.submit(transfers, is_write=True)
        assert io.collect(0) == [] and io.collect(0.01) == [] and io.in_flight == 4
        assert io.close(0) is False and io.close(0.01) is False
        del io
        assert destroyed.value == 1
    """,
    "a signal comes while it waits": """
        def refuse(*_):
            raise InterruptedError("enough")
        def release(*_):
            try:
                io.collect(0)
            except RuntimeError:
                is_stuck.value = 0
        is_stuck.value = 1
        io = AioIo(fd)
        io.submit(transfers, is_write=False)
        for wait in (io.collect, io.close):
            signal.signal(signal.SIGALRM, refuse)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.05)
                wait(AGES_S)
                raise AssertionError("no signal came")
            except InterruptedError:
                assert io.in_flight == 4
        signal.signal(signal.SIGALRM, release)
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        assert io.collect(AGES_S)
        signal.setitimer(signal.ITIMER_REAL, 0)
        finish(io)
        assert io.close(LONG_S)
    """,
}


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SHIM as a library."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        pytest.skip("NOT RUN: AIO on a kernel that fails: no C compiler")
    source = tmp_path_factory.mktemp("shim") / "shim.c"
    source.write_text(SHIM)
    target = source.with_suffix(".so")
    subprocess.run([*compiler, "-shared", "-fPIC", "-O1", str(source), "-o", str(target), "-ldl"], check=True)
    return target


@pytest.mark.skipif(NO_AIO is not None, reason=f"NOT RUN: asynchronous disk I/O: {NO_AIO}")
@pytest.mark.parametrize("fault", FAULTS)
def test_aio_outlives_what_the_kernel_may_do(fault: str, shim: Path, tmp_path: Path) -> None:
    program = PRELUDE + dedent(FAULTS[fault])
    environment = {**os.environ, "LD_PRELOAD": str(shim)}
    command = [sys.executable, "-c", program, str(tmp_path / "file")]
    result = subprocess.run(command, env=environment, capture_output=True)
    assert result.returncode == 0, result.stderr.decode()
