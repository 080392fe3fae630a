"""Memory, limits and the clock of this machine, or of this container."""

from __future__ import annotations

import ctypes
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from kvbm_core.cli.doctor.check import Check, Finding, Subject, error, note, ok, warning
from kvbm_core.config import KvbmSettings
from kvbm_core.control.operators import MAX_SKEW_S
from kvbm_core.control.place import is_private, private_place
from kvbm_core.runtime.assembly import store_options
from kvbm_core.runtime.endpoint import MAX_SOCKET_PATH_BYTES
from kvbm_core.storage.memory_room import available_memory
from kvbm_core.storage.numa import cpus_in
from kvbm_core.storage.remote.s3_client import endpoint_of

MIN_OPEN_FILES = 1024
MIN_SHARED_BYTES = 256 << 20
"""Docker gives 64 MiB if nobody asks for more."""
COMFORTABLE_SHARE = 0.8
"""Of available memory: the engine needs some for itself."""
SOCKET_NAME_BYTES = 40
BUCKET_SKEW_S = 900.0
"""S3 refuses requests of a clock that is further off."""
HTTP_TIMEOUT_S = 5.0
_UNSYNCHRONIZED = 0x40
_GB = 1e9


def look_at_host_memory(subject: Subject) -> Iterator[Finding]:
    """The host tier's size against what this process can have."""
    room = available_memory(subject.root)
    available_gb = room.available_bytes / _GB
    wanted_gb = subject.settings.cpu_cache_gb
    if wanted_gb is None:
        yield ok(f"{available_gb:.1f} GB of memory are available")
        return
    seen = f"the host tier is to have {wanted_gb:g} GB, and {available_gb:.1f} GB of memory are available"
    if wanted_gb > available_gb:
        remedy = "lower DYN_KVBM_CPU_CACHE_GB, or free memory or raise the container's limit"
        yield error(
            f"{seen} ({room.source})", f"{remedy}; over several machines, each needs its own ranks' part only"
        )
    elif wanted_gb > COMFORTABLE_SHARE * available_gb:
        yield warning(seen, "leave room for the engine and the page cache: lower DYN_KVBM_CPU_CACHE_GB")
    else:
        yield ok(seen)


def look_at_locked_memory(subject: Subject) -> Iterator[Finding]:
    """ulimit -l: what may be locked, as RDMA and NIXL do."""
    settings = subject.settings
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    needs = "nixl" in (settings.peers, settings.disk_io[:4], settings.disk_to_device[:4]) or any(
        url.startswith("mooncake:") for url in settings.store_urls
    )
    wanted_bytes = (settings.cpu_cache_gb or 0.0) * _GB
    remedy = "raise it: --ulimit memlock=-1 for a container, LimitMEMLOCK=infinity for a service"
    if limit == resource.RLIM_INFINITY or limit >= wanted_bytes > 0:
        shown = "is not limited" if limit == resource.RLIM_INFINITY else f"up to {limit / _GB:.1f} GB"
        yield ok(f"locked memory {shown} (ulimit -l)")
    elif needs:
        yield warning(
            f"only {limit / 1e6:.3g} MB may be locked (ulimit -l), and NIXL or RDMA locks memory", remedy
        )
    else:
        yield note(
            f"only {limit / 1e6:.3g} MB may be locked (ulimit -l); nothing here needs more yet", remedy
        )


def look_at_open_files(subject: Subject) -> Iterator[Finding]:
    """ulimit -n."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= MIN_OPEN_FILES:
        yield ok(f"{limit:,} files may be open (ulimit -n)")
    else:
        yield warning(
            f"only {limit:,} files may be open (ulimit -n)", f"raise it to {MIN_OPEN_FILES:,} at least"
        )


def look_at_huge_pages(subject: Subject) -> Iterator[Finding]:
    """Transparent huge pages, which host memory asks for."""
    choice = subject.told("sys/kernel/mm/transparent_hugepage/enabled")
    if "[never]" in choice:
        remedy = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root, on the host)"
        yield warning("transparent huge pages are off: copies of scattered blocks are slower", remedy)
    elif not choice:
        yield note("this kernel has no transparent huge pages: copies of scattered blocks are slower")
    else:
        yield ok("transparent huge pages are given to those who ask (madvise) or to all")


def look_at_numa(subject: Subject) -> Iterator[Finding]:
    """Nodes, and whether this process is near the GPU."""
    nodes = list((subject.root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) < 2:
        yield ok("one NUMA node: all memory is equally near")
        return
    if subject.settings.disable_numa:
        seen = f"{len(nodes)} NUMA nodes, and DYN_MEMORY_DISABLE_NUMA takes memory from any of them"
        yield warning(seen, "unset it, unless the GPUs are used from all nodes on purpose")
    allowed = os.sched_getaffinity(0)
    for device in sorted((subject.root / "proc/driver/nvidia/gpus").glob("*")):
        near = cpus_in(subject.told(f"sys/bus/pci/devices/{device.name}/local_cpulist"))
        if near and not near & allowed:
            remedy = (
                f"start the engine on CPUs {','.join(map(str, sorted(near)))[:60]} (numactl, taskset, cpuset)"
            )
            yield warning(
                f"none of this process' CPUs is on the NUMA node of the GPU at {device.name}", remedy
            )
    yield ok(f"{len(nodes)} NUMA nodes")


def look_at_shared_memory(subject: Subject) -> Iterator[Finding]:
    """Memory by which the ranks of an engine talk."""
    path = subject.root / "dev/shm"
    name = f"/{path.relative_to(subject.root)}"
    try:
        room = os.statvfs(path)
    except OSError as problem:
        yield warning(
            f"{name}: {problem.strerror}", "mount a tmpfs there: engines with several ranks need it"
        )
        return
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    seen = f"{name} has {total / _GB:.2f} GB, {free / _GB:.2f} GB free"
    if free < MIN_SHARED_BYTES:
        remedy = (
            "engines with several ranks talk through it: --shm-size=8g, --ipc=host, or remove what is there"
        )
        yield warning(seen, remedy)
    else:
        yield ok(seen)


def look_at_sockets(subject: Subject) -> Iterator[Finding]:
    """The folder in which leader and workers meet."""
    place = private_place()
    parent = place.parent
    if len(os.fsencode(place)) + SOCKET_NAME_BYTES > MAX_SOCKET_PATH_BYTES:
        yield error(f"TMPDIR={parent} is too long for the path of a socket", "set a shorter TMPDIR")
    elif place.exists() or place.is_symlink():
        if is_private(place):
            yield ok(f"{place} is private to this user")
        else:
            remedy = "remove it, or set another TMPDIR: else each engine makes a folder of its own"
            yield warning(f"{place} is not private to this user", remedy)
    else:
        try:
            with tempfile.TemporaryFile(dir=parent):
                yield ok(f"{place} can be made")
        except OSError as problem:
            seen = f"TMPDIR={parent}: leader and workers cannot meet there: {problem.strerror}"
            yield error(seen, "set TMPDIR to a directory that can be written")


def look_at_clock(subject: Subject) -> Iterator[Finding]:
    """Whether the clock is kept right, and how far it is from the object store's."""
    settings = subject.settings
    skew_s = _skew_of_bucket_s(settings)
    if skew_s is not None:
        seen = (
            f"this clock is {abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the object store's"
        )
        if abs(skew_s) > BUCKET_SKEW_S:
            yield error(f"{seen}: it refuses every request", "set the clock right (chrony, ntpd)")
            return
        if abs(skew_s) > MAX_SKEW_S:
            remedy = (
                f"set it right (chrony): orders over NATS allow {MAX_SKEW_S:.0f} s, S3 {BUCKET_SKEW_S:.0f} s"
            )
            yield warning(seen, remedy)
            return
    status = (ctypes.c_int * 128)()  # struct timex, with room to spare; 0: nothing is set
    ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(status))
    if status[_TIMEX_STATUS] & _UNSYNCHRONIZED:
        yield note(
            "nothing keeps this clock right that the kernel knows of", "run chrony or ntpd on the host"
        )
    else:
        yield ok("the clock is kept right")


_TIMEX_STATUS = 10 if ctypes.sizeof(ctypes.c_long) == 8 else 5
"""Where ``status`` is in struct timex, in units of an int: after ``modes`` and four longs."""


def _skew_of_bucket_s(settings: KvbmSettings) -> float | None:
    """This clock less that of the object store's server; None if there is none, or it does not say."""
    if not settings.has_object_store:
        return None
    _, endpoint = endpoint_of(store_options(settings).s3)
    url = urlsplit(endpoint or "https://s3.amazonaws.com")
    kind = HTTPSConnection if url.scheme == "https" else HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=HTTP_TIMEOUT_S)
    try:
        connection.request("HEAD", "/")
        date = connection.getresponse().headers.get("Date", "")
        return time.time() - parsedate_to_datetime(date).timestamp()
    except (OSError, HTTPException, ValueError, TypeError):
        return None
    finally:
        connection.close()


CHECKS = (
    Check("host-memory", "the host tier's size against the memory that can be had", look_at_host_memory),
    Check("locked-memory", "how much memory may be locked (ulimit -l)", look_at_locked_memory),
    Check("open-files", "how many files may be open (ulimit -n)", look_at_open_files),
    Check("huge-pages", "transparent huge pages", look_at_huge_pages),
    Check("numa", "NUMA nodes, and whether this process runs near the GPU", look_at_numa),
    Check("shared-memory", "the size of /dev/shm", look_at_shared_memory),
    Check("sockets", "the folder in TMPDIR where leader and workers meet", look_at_sockets),
    Check(
        "clock", "whether the clock is kept right, and its difference to the object store's", look_at_clock
    ),
)
