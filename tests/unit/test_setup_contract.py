"""deploy/contract_sources.py: which wheels are asked for, what of them is kept. The registry is a double."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.packaging

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
# As `python -m pip download ... -d FOLDER NAME==VERSION`: a wheel with what MEMBERS says, and a line in a
# log.
PIP = """#!{python}
import sys, zipfile
from pathlib import Path
folder, wanted = sys.argv[sys.argv.index("-d") + 1], sys.argv[-1]
name, _, version = wanted.partition("==")
platform = "any" if "--platform" in sys.argv else "this"
with open({log!r}, "a") as log:
    log.write(f"{{wanted}} {{platform}}\\n")
package = name.partition("-")[0]
with zipfile.ZipFile(Path(folder) / f"{{package}}-{{version}}-py3-none-any.whl", "w") as archive:
    for member in {members!r}:
        archive.writestr(f"{{package}}/{{member}}", version)
"""
MEMBERS = (
    *(
        "__init__.py",
        "config/vllm.py",
        "v1/outputs.py",
        "model_executor/layer.py",
        "srt/managers/scheduler.py",
    ),
    *("srt/mem_cache/hicache_storage.py", "srt/mem_cache/pool_host/mha.py", "srt/mem_cache/readme.md"),
    *("srt/managers/cache_controller.py", "srt/mem_cache_of_others.py"),
)


def fetch(
    tmp_path: Path, members: tuple[str, ...] = MEMBERS, more: str = ""
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What fetching into ``tmp_path``/kept said, and what was asked of the registry. ``more`` goes before."""
    log, python = tmp_path / "asked", tmp_path / "bin" / "python"
    log.write_text("")
    python.parent.mkdir(exist_ok=True)
    python.write_text(PIP.format(python=sys.executable, log=str(log), members=members))
    python.chmod(0o755)
    program = (
        f"import sys; sys.path.insert(0, {str(DEPLOY)!r}); import contract_sources, packages; "
        f"from pathlib import Path; here = Path({str(tmp_path)!r}); "
        "contract_sources.tools = packages.tools = lambda: here; "
        f"{more}sys.exit(contract_sources.main([{str(tmp_path / 'kept')!r}]))"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    return result, log.read_text().splitlines()


def test_the_interfaces_of_both_engines_are_kept_and_nothing_else(tmp_path: Path) -> None:
    result, asked = fetch(tmp_path)
    assert result.returncode == 0, result.stderr
    folders = {path.name: path for path in (tmp_path / "kept").iterdir()}
    assert all(path.is_symlink() for path in folders.values()), "the sources are outside of the checkout"
    vllm = {path.relative_to(folders["0.26.0"]).as_posix() for path in files_in(folders["0.26.0"])}
    assert vllm == {f"vllm/{name}" for name in ("__init__.py", "config/vllm.py", "v1/outputs.py")}
    sglang = {path.relative_to(folders["sglang-0.5.10"]) for path in files_in(folders["sglang-0.5.10"])}
    names = ("mem_cache/hicache_storage.py", "mem_cache/pool_host/mha.py", "managers/cache_controller.py")
    assert sglang == {Path("sglang/srt", name) for name in names}
    assert (tmp_path / "kept/sglang-0.5.10/sglang/srt/mem_cache/hicache_storage.py").read_text() == "0.5.10"
    whole = {path.relative_to(folders["0.33.0"]).as_posix() for path in files_in(folders["0.33.0"])}
    assert {"vllm/model_executor/layer.py", "vllm-0.33.0+cpu.dist-info/METADATA"} < whole
    assert len(folders) == len(asked) == len(set(asked))
    assert {line.split()[1] for line in asked if line.startswith("sglang==")} == {"any"}
    assert {line.split()[1] for line in asked if line.startswith("vllm")} == {"this"}


def files_in(folder: Path) -> list[Path]:
    """All of them."""
    return [Path(base, name) for base, _, names in os.walk(folder) for name in names]


def test_a_checkout_that_keeps_more_leaves_what_others_have(tmp_path: Path) -> None:
    fetch(tmp_path)
    place = tmp_path / "kept/sglang-0.5.10"
    former = place.resolve()
    more = "contract_sources.PARTS['sglang'] += ('sglang/srt/managers/scheduler.py',); "
    result, asked = fetch(tmp_path, more=more)
    assert result.returncode == 0 and {line.split("==")[0] for line in asked} == {"sglang"}
    assert (place / "sglang/srt/managers/scheduler.py").exists()
    assert place.resolve() != former and former.is_dir()


def test_what_is_there_is_not_fetched_again_and_sources_of_before_make_room(tmp_path: Path) -> None:
    _, first = fetch(tmp_path)
    places = [tmp_path / "kept/sglang-0.5.10", tmp_path / "kept/sglang-0.5.13", tmp_path / "kept/0.33.0"]
    places[0].unlink()
    places[1].unlink()
    (places[1] / "sglang").mkdir(parents=True)
    shutil.rmtree(places[2].resolve())
    result, again = fetch(tmp_path)
    assert first and again == ["vllm==0.33.0 this"] and result.returncode == 0
    assert all(path.is_symlink() and path.is_dir() for path in places)


@pytest.mark.parametrize("members", [("model_executor/layer.py",), ()])
def test_a_wheel_without_sources_is_refused_in_one_line(tmp_path: Path, members: tuple[str, ...]) -> None:
    result, asked = fetch(tmp_path, members)
    assert result.returncode == 1 and 1 <= len(asked) <= 3, "those that were under way, and no more"
    assert "has no interface sources in it" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "kept").exists() and not files_of_cache(tmp_path)


def files_of_cache(tmp_path: Path) -> list[Path]:
    """But for the locks."""
    return [path for path in files_in(tmp_path / "cache") if path.suffix != ".lock"]
