"""Builds the C files of kvbm_core/native into the wheel, or beside them for an editable installation.

Optional: without a working C compiler (CC, or the one that Python was built with) or Python's headers there
is one warning, and a wheel for any platform on which Python code does the same.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# One module of all C files in this one's folder; it has the name of this one.
SOURCE = Path("kvbm_core", "native", "_kvbm.c")
# Nothing that only this machine's CPU has: what there is beyond the baseline is found out when the module is
# loaded. NDEBUG is for the checks inside Python's own headers.
FLAGS = ("-std=c11", "-O3", "-DNDEBUG", "-fPIC", "-shared", "-Wall", "-Wextra")


def compile_native(root: Path, target: Path, *flags: str) -> str | None:
    """Builds the module as ``target``; None, or in one text why it could not be built.

    Several processes may do this at once, as two environments of one checkout are made side by side.
    """
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    include = sysconfig.get_paths()["include"]
    partial = target.with_suffix(f".{os.getpid()}.partial")
    sources = sorted(str(path) for path in (root / SOURCE.parent).glob("*.c"))
    command = [*compiler, *FLAGS, *flags, f"-I{include}", *sources, "-o", str(partial)]
    try:
        result = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        return f"{compiler[0]}: {error}"
    if result.returncode != 0 or not partial.exists():
        partial.unlink(missing_ok=True)
        return f"{shlex.join(command)} exited with status {result.returncode}\n{result.stdout}".rstrip()
    partial.replace(target)
    return None


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """What hatchling calls before it makes a wheel."""

    def initialize(self, version: str, build_data: dict[str, object]) -> None:
        """Builds the module and adds it to the wheel, whose tag then names Python and platform."""
        root = Path(self.root)
        name = SOURCE.with_suffix(str(sysconfig.get_config_var("EXT_SUFFIX")))
        failure = "not Linux" if sys.platform != "linux" else compile_native(root, root / name)
        if failure is None:
            build_data.update(artifacts=[f"/{name.as_posix()}"], pure_python=False, infer_tag=True)
        else:
            (root / name).unlink(missing_ok=True)  # an older build must not be taken for this one
            self.app.display_warning(
                f"kvbm: built without its native module, Python code does the same: {failure}"
            )
