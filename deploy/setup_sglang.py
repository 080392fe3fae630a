#!/usr/bin/env python3
"""Makes a virtual environment with kvbm and SGLang in it, beside the one with vLLM: their pins do not agree.

    python3 deploy/setup_sglang.py .venv-sglang

A machine where nvidia-smi works gets SGLang as it is published; every other one gets a CPU build of torch,
SGLang without its kernels, and deploy/sglang_cpu in their place: real engine, real HiCache, for tests. A
second run with nothing changed returns at once. The first query of a store compiles a small extension of
SGLang's: g++ and OpenSSL's headers (Debian: g++, libssl-dev) must be there.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import setup_env as env

SGLANG_VERSION = "0.5.23"
CPU_PACKAGE = env.REPOSITORY / "deploy" / "sglang_cpu"
# Their own requirements are for GPUs.
WITHOUT_THEIR_REQUIREMENTS = (
    f"sglang=={SGLANG_VERSION}",
    "torchvision==0.28.0",
    "compressed-tensors==0.18.0",
    "xgrammar==0.2.7",
)
OPENSSL_HEADER = Path("/usr/include/openssl/sha.h")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Make a virtual environment with kvbm and SGLang in it.")
    parser.add_argument("venv", type=Path, help="directory of the environment (made if absent)")
    options = parser.parse_args(argv)
    try:
        make_environment(options.venv.absolute())
    except env.SetupError as error:
        print(f"kvbm setup: error: {error}", file=sys.stderr)
        return 1
    return 0


def make_environment(venv: Path) -> None:
    """Brings ``venv`` to the state that this checkout asks for; nothing to do is quick."""
    cuda = env.has_cuda()
    wanted = env.Stamp(_fingerprint(), "cuda" if cuda else "cpu", ())
    stamp_path = venv / env.STAMP_NAME
    found = env.Stamp.read(stamp_path)
    if found is not None and found.satisfies(wanted) and env.python_of(venv).exists():
        env.say(f"{venv} is up to date")
        return
    started_s = time.monotonic()
    env.make_venv(venv)
    stamp_path.unlink(missing_ok=True)
    if cuda:
        env.pip(venv, f"SGLang {SGLANG_VERSION} for CUDA", "install", f"sglang=={SGLANG_VERSION}")
    else:
        _install_for_cpu(venv)
    own = ("-e", f"{env.REPOSITORY}[crypto,s3,zstd]", *env.constraints_of("sglang"))
    env.pip(venv, "kvbm from this checkout", "install", *own)
    env.install_nixl(venv)
    env.install_mooncake(venv)
    env.run(
        "checking that SGLang imports", [str(env.python_of(venv)), "-c", "import torch, sglang, kvbm_sglang"]
    )
    wanted.write(stamp_path)
    _tell_what_is_missing()
    env.say(f"{venv} is ready ({time.monotonic() - started_s:.0f} s)")


def _install_for_cpu(venv: Path) -> None:
    torch, constraints = f"torch=={env.CPU_TORCH_VERSION}", env.constraints_of("sglang")
    env.pip(venv, f"{torch} (large; CPU build where the registry has one)", "install", torch, *constraints)
    env.pip(venv, f"SGLang {SGLANG_VERSION}", "install", "--no-deps", *WITHOUT_THEIR_REQUIREMENTS)
    needed = ("-r", str(CPU_PACKAGE / "requirements.txt"), *constraints)
    env.pip(venv, "what SGLang needs", "install", *needed)
    arguments = ("install", "--no-deps", "--no-build-isolation", str(CPU_PACKAGE))
    env.pip(venv, "what stands in for its kernels", *arguments)
    for site_packages in venv.glob("lib/python3.*/site-packages"):
        start = site_packages / "kvbm_sglang_cpu.pth"
        start.write_text("import kvbm_sglang_cpu.torchvision_ops\n", encoding="utf-8")


def _tell_what_is_missing() -> None:
    if shutil.which("g++") is None or not OPENSSL_HEADER.exists():
        env.say(
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
