#!/usr/bin/env python3
"""Makes a virtual environment with kvbm and SGLang in it, beside the one with vLLM: their pins do not agree.

    python3 deploy/setup_sglang.py .venv-sglang

A machine where nvidia-smi works gets SGLang as it is published; every other one gets a CPU build of torch,
SGLang without its kernels, and deploy/sglang_cpu in their place: real engine, real HiCache, for tests. A
second run with nothing changed returns at once. The first query of a store compiles a small extension of
SGLang's: g++ and OpenSSL's headers (Debian: g++, libssl-dev) must be there.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import setup_env as env
from packages import REPOSITORY, Packages, has_cuda, install, say, site_packages_of

SGLANG = "sglang==0.5.23"
CPU_PACKAGE = REPOSITORY / "deploy" / "sglang_cpu"
EXTRAS = ("crypto", "s3", "zstd")
FOR_CPU = Packages(
    "sglang",
    ("pip", env.CPU_TORCH, f"-r {CPU_PACKAGE / 'requirements.txt'}"),
    EXTRAS,
    (SGLANG, "torchvision==0.28.0", "compressed-tensors==0.18.0", "xgrammar==0.2.7"),
)
OPENSSL_HEADER = Path("/usr/include/openssl/sha.h")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = env.parser_of("SGLang").parse_args(argv)
    return env.guarded(lambda: make_environment(options.venv.absolute()))


def make_environment(venv: Path) -> None:
    """Brings ``venv`` to the state that this checkout asks for."""
    cuda = has_cuda()
    packages = Packages("", ("pip", SGLANG), EXTRAS) if cuda else FOR_CPU

    def fill() -> None:
        packages.install(venv)
        if not cuda:
            _install_stand_ins(venv)
        env.install_nixl(venv)
        env.install_mooncake(venv)
        _tell_what_is_missing()
        packages.check(venv, "import torch, sglang, kvbm_sglang")

    env.bring(venv, env.Stamp(_fingerprint(), "cuda" if cuda else "cpu"), fill)


def _install_stand_ins(venv: Path) -> None:
    again = ("--reinstall-package", "kvbm-sglang-cpu")  # a build of before may be of other files
    install(venv, "what stands in for SGLang's kernels", "--no-deps", *again, str(CPU_PACKAGE))
    start = site_packages_of(venv) / "kvbm_sglang_cpu.pth"
    start.write_text("import kvbm_sglang_cpu.torchvision_ops\n", encoding="utf-8")


def _tell_what_is_missing() -> None:
    if shutil.which("g++") is None or not OPENSSL_HEADER.exists():
        say(
            "g++ or OpenSSL's headers are missing: SGLang's HiCache compiles with them (apt install "
            "g++ libssl-dev)"
        )


def _fingerprint() -> str:
    digest = hashlib.sha256(env.fingerprint().encode())
    for path in (Path(__file__), *sorted(CPU_PACKAGE.rglob("*.py")), *sorted(CPU_PACKAGE.glob("*.t*"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
