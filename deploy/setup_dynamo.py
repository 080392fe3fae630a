#!/usr/bin/env python3
"""Makes a virtual environment with NVIDIA Dynamo and the vLLM that it asks for, for tests/dynamo.

    .venv/bin/python deploy/setup_dynamo.py .venv-dynamo

To be run with the Python of the environment that setup_env.py made: on a machine without a GPU the new one
lies on top of it, so that torch and most of what vLLM needs is not installed twice. A machine where
nvidia-smi works gets Dynamo with vLLM as they are published. A second run with nothing changed returns at
once.
"""

from __future__ import annotations

import argparse
import hashlib
import site
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import setup_env as env

DYNAMO_VERSION = "1.6.1"
VLLM_VERSION = "0.31.0"  # as ai-dynamo[vllm] asks for
# Their own requirements are for GPUs.
WITHOUT_THEIR_REQUIREMENTS = (
    f"ai-dynamo=={DYNAMO_VERSION}",
    f"ai-dynamo-runtime=={DYNAMO_VERSION}",
    "torchvision==0.28.0",
)
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Make a virtual environment with kvbm and Dynamo in it.")
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
        dynamo = f"ai-dynamo[vllm]=={DYNAMO_VERSION}"
        env.pip(venv, f"Dynamo {DYNAMO_VERSION} for CUDA", "install", dynamo)
        env.pip(venv, "kvbm from this checkout", "install", "-e", str(env.REPOSITORY))
    else:
        _install_for_cpu(venv)
    env.run(
        "checking that Dynamo imports",
        [str(env.python_of(venv)), "-c", "import dynamo.vllm.main, dynamo.frontend.main, kvbm_vllm"],
    )
    wanted.write(stamp_path)
    env.say(f"{venv} is ready ({time.monotonic() - started_s:.0f} s)")


def _install_for_cpu(venv: Path) -> None:
    below = site.getsitepackages()[0]
    for site_packages in venv.glob("lib/python3.*/site-packages"):
        start = site_packages / "zz_environment_below.pth"
        start.write_text(f"import site; site.addsitedir({below!r})\n", encoding="utf-8")
    constraints = env.constraints_of("dynamo")
    env.install_vllm(venv, VLLM_VERSION, cuda=False, constraints=constraints)
    env.pip(venv, f"Dynamo {DYNAMO_VERSION}", "install", "--no-deps", *WITHOUT_THEIR_REQUIREMENTS)
    env.pip(venv, "what Dynamo needs", "install", *REQUIREMENTS, *constraints)
    for registrations in venv.glob("lib/python3.*/site-packages/torchvision/_meta_registrations.py"):
        # For operators of torchvision's own library, a CUDA build that cannot be loaded here.
        registrations.write_text("import torch\n", encoding="utf-8")


def _fingerprint() -> str:
    digest = hashlib.sha256(f"{env.fingerprint()} {sys.executable}".encode())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
