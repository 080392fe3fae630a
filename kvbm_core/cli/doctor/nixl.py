"""NIXL and GPUDirect Storage: which plugins work, found out in a process of its own: libraries may end it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec

from kvbm_core.cli.doctor.check import Check, Finding, Subject, error, note, ok, warning

PROBE_S = 100.0
DEADLINE_S = 110.0
_SIZE = 4096
_WANTED = {"nixl-posix": "POSIX", "nixl-gds": "GDS", "nixl-gds-mt": "GDS_MT"}
_GDS = ("GDS", "GDS_MT")


def look_at_nixl(subject: Subject) -> Iterator[Finding]:
    """Each plugin that kvbm can use."""
    settings = subject.settings
    wanted = {_WANTED[value] for value in (settings.disk_io, settings.disk_to_device) if value in _WANTED}
    if settings.peers == "nixl":
        wanted.add("UCX")
    if find_spec("nixl") is None:
        return  # the check of packages says so if it is needed
    answers = _asked()
    for plugin, trouble in answers.items():
        if not trouble:
            yield ok(f"NIXL's {plugin} plugin works")
        elif plugin in wanted:
            yield error(f"NIXL's {plugin} plugin: {trouble}", _remedy(plugin))
        else:
            yield note(f"NIXL's {plugin} plugin: {trouble}; no setting asks for it")


def look_at_gds(subject: Subject) -> Iterator[Finding]:
    """What GPUDirect Storage needs of the kernel."""
    wanted = {subject.settings.disk_io, subject.settings.disk_to_device} & {"nixl-gds", "nixl-gds-mt"}
    has_gpu = bool(list((subject.root / "proc/driver/nvidia/gpus").glob("*")))
    if not wanted and not has_gpu:
        return
    if (subject.root / "proc/driver/nvidia-fs").is_dir():
        yield ok("the kernel has nvidia-fs: GPUDirect Storage may go straight to the disk")
    elif wanted and not has_gpu:
        yield error(f"{sorted(wanted)[0]} is asked for, and there is no NVIDIA GPU", "set KVBM_DISK_IO=auto")
    else:
        remedy = "load it (nvidia-gds), or leave KVBM_DISK_IO=auto"
        tell = warning if wanted else note
        yield tell("the kernel has no nvidia-fs: GPUDirect Storage copies through host memory", remedy)


def _remedy(plugin: str) -> str:
    if plugin in _GDS:
        return "it needs an NVIDIA GPU, its driver and libcufile; else set KVBM_DISK_IO=auto"
    return "allow io_uring or Linux AIO in the container, or set KVBM_DISK_IO=auto"


def _asked() -> dict[str, str]:
    """Plugin -> what is wrong with it; empty: it works."""
    try:
        done = subprocess.run(  # noqa: S603 - this very module
            [sys.executable, "-m", __name__], capture_output=True, timeout=PROBE_S, check=False, text=True
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        found: dict[str, str] = json.loads(lines[-1])
        return found
    except subprocess.TimeoutExpired:
        trouble = f"did not start within {PROBE_S:g} s"
    except (ValueError, LookupError):
        trouble = f"ended its process ({done.returncode}): {' '.join(done.stderr.split())[-200:]}"
    return dict.fromkeys(("POSIX", *_GDS), trouble)


def _probe() -> dict[str, str]:
    from kvbm_core.storage.disk.nixl_io import NixlIo

    answers: dict[str, str] = {}
    for plugin in ("POSIX", *_GDS):
        with tempfile.TemporaryFile() as file:
            file.truncate(_SIZE)
            try:
                NixlIo(file.fileno(), plugin).close(1.0)
                answers[plugin] = ""
            except OSError as problem:
                answers[plugin] = (problem.strerror or str(problem)).partition(": ")[2] or str(problem)
    answers["UCX"] = _try_ucx()
    return answers


def _try_ucx() -> str:
    from kvbm_core.peers.ucx import prepare

    prepare()  # as engines use it
    try:
        import nixl

        agent = nixl.nixl_agent(f"kvbm-doctor-{os.getpid()}", nixl.nixl_agent_config(backends=[]))
        agent.create_backend("UCX", {})
    except Exception as problem:  # NIXL's have no class in common
        return f"{type(problem).__name__}: {problem}"
    return ""


CHECKS = (
    Check("nixl", "which of NIXL's plugins work", look_at_nixl, DEADLINE_S),
    Check("gds", "what GPUDirect Storage needs of the kernel", look_at_gds),
)

if __name__ == "__main__":
    print(json.dumps(_probe()), flush=True)
    os._exit(0)  # whatever NIXL's threads still do
