"""How the native module is built, left out, and switched off."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="NOT RUN: the build of the native module: hatchling is not installed")
from hatch_build import SOURCE, NativeBuildHook

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / SOURCE.parent).glob("*.[ch]"))
BUILT = SOURCE.with_suffix(str(sysconfig.get_config_var("EXT_SUFFIX")))
COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")

needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER[0]) is None or not Path(sysconfig.get_paths()["include"], "Python.h").exists(),
    reason="NOT RUN: the build of the native module: no C compiler or no Python.h",
)


class Notes:
    """The part of hatchling's application that the hook speaks to."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)


def run_hook(root: Path) -> tuple[dict[str, object], list[str]]:
    """What the hook adds to a wheel made in ``root``, and its warnings."""
    (root / SOURCE).parent.mkdir(parents=True)
    for source in SOURCES:
        shutil.copy(source, root / SOURCE.parent)
    (root / BUILT).write_bytes(b"an older build")
    notes, build_data = Notes(), dict[str, object]()
    hook = NativeBuildHook(str(root), {}, None, None, str(root), "wheel", notes)  # type: ignore[arg-type]
    hook.initialize("standard", build_data)
    return build_data, notes.warnings


@needs_compiler
def test_the_source_compiles_without_a_warning_and_makes_the_wheel_one_for_this_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", f"{shlex.join(COMPILER)} -Werror")
    build_data, warnings = run_hook(tmp_path)
    assert build_data == {"artifacts": [f"/{BUILT.as_posix()}"], "pure_python": False, "infer_tag": True}
    assert warnings == []
    assert (tmp_path / BUILT).stat().st_size > 1000
    assert sorted(path.name for path in (tmp_path / SOURCE).parent.iterdir()) == sorted(
        [*(source.name for source in SOURCES), BUILT.name]
    )


@pytest.mark.parametrize("compiler", ["/bin/false", "/nowhere/cc"])
def test_without_a_compiler_there_is_one_warning_and_a_pure_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    build_data, warnings = run_hook(tmp_path)
    assert build_data == {}
    (warning,) = warnings
    assert "without its native module" in warning and compiler in warning
    assert not (tmp_path / BUILT).exists(), "an older build would be imported"


def test_two_environments_are_made_side_by_side(tmp_path: Path) -> None:
    """Each build has a file of its own until it is whole, and what is there is there at any time."""
    log, target, compiler = tmp_path / "log", tmp_path / "module.so", tmp_path / "cc"
    compiler.write_text(
        f'#!/bin/sh\nfor output; do :; done\necho "$output" $(cat {target}) >> {log}\necho new > "$output"\n'
    )
    compiler.chmod(0o755)
    target.write_text("old")
    program = (
        "import hatch_build, pathlib; hatch_build.compile_native(pathlib.Path(), "
        f"pathlib.Path({str(target)!r}))"
    )
    for _ in range(2):
        subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env={**os.environ, "CC": str(compiler)}, check=True
        )
    (first, there), (second, there_then) = (line.split() for line in log.read_text().splitlines())
    assert len({first, second, str(target)}) == 3
    assert (there, there_then, target.read_text()) == ("old", "new", "new\n")


@pytest.mark.shows("KVBM_NATIVE")
@pytest.mark.parametrize(("value", "is_off"), [("0", True), ("Off", True), ("", False), ("2", False)])
def test_a_variable_switches_it_off(value: str, is_off: bool) -> None:
    program = "from kvbm_core.native import native; print(native is None)"
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "KVBM_NATIVE": value},
        capture_output=True,
    )
    built = (ROOT / BUILT).exists()
    assert result.stdout.decode().strip() == str(is_off or not built), result.stderr
