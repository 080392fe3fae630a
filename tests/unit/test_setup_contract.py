"""deploy/setup_env.py --contract-wheels: which wheels are asked for, what of them is kept. The registry is a
double.
"""

from __future__ import annotations

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
    tmp_path: Path, members: tuple[str, ...] = MEMBERS
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """What fetching into ``tmp_path``/kept said, and what was asked of the registry."""
    log, python = tmp_path / "asked", tmp_path / "python"
    log.write_text("")
    python.write_text(PIP.format(python=sys.executable, log=str(log), members=members))
    python.chmod(0o755)
    program = (
        f"import sys; sys.path.insert(0, {str(DEPLOY)!r}); import setup_env; from pathlib import Path; "
        + (f"setup_env.fetch_contract_sources(Path({str(tmp_path / 'kept')!r}), Path({str(python)!r}))")
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return result, log.read_text().splitlines()


def test_the_interfaces_of_both_engines_are_kept_and_nothing_else(tmp_path: Path) -> None:
    result, asked = fetch(tmp_path)
    assert result.returncode == 0, result.stderr
    kept = {
        path.relative_to(tmp_path / "kept").as_posix()
        for path in (tmp_path / "kept").rglob("*")
        if path.is_file() and path.name != "kvbm-parts.txt"
    }
    vllm = {path for path in kept if path.startswith("0.26.0/")}
    assert vllm == {f"0.26.0/vllm/{name}" for name in ("__init__.py", "config/vllm.py", "v1/outputs.py")}
    sglang = {path for path in kept if path.startswith("sglang-0.5.10/")}
    names = ("mem_cache/hicache_storage.py", "mem_cache/pool_host/mha.py", "managers/cache_controller.py")
    assert sglang == {f"sglang-0.5.10/sglang/srt/{name}" for name in names}
    assert (tmp_path / "kept/sglang-0.5.10/sglang/srt/mem_cache/hicache_storage.py").read_text() == "0.5.10"
    folders = {path.split("/")[0] for path in kept}
    assert len(folders) == len(asked) == len(set(asked))
    assert {line.split()[1] for line in asked if line.startswith("sglang==")} == {"any"}
    assert {line.split()[1] for line in asked if line.startswith("vllm")} == {"this"}


def test_what_was_fetched_when_less_was_kept_is_fetched_anew(tmp_path: Path) -> None:
    fetch(tmp_path)
    stated = tmp_path / "kept/sglang-0.5.10/kvbm-parts.txt"
    stated.write_text(stated.read_text().replace("sglang/srt/arg_groups/fields/\n", ""))
    old = tmp_path / "kept/sglang-0.5.10/of_before.py"
    old.touch()
    result, asked = fetch(tmp_path)
    assert result.returncode == 0 and [line.split()[0] for line in asked] == ["sglang==0.5.10"]
    assert not old.exists() and "arg_groups" in stated.read_text()


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    _, first = fetch(tmp_path)
    (tmp_path / "kept/sglang-0.5.10").rename(tmp_path / "kept/elsewhere")
    result, again = fetch(tmp_path)
    assert first and again == ["sglang==0.5.10 any"]
    assert "interface of vllm 0.33.0 is there" in result.stdout


@pytest.mark.parametrize("members", [("model_executor/layer.py",), ()])
def test_a_wheel_without_sources_is_refused_in_one_line(tmp_path: Path, members: tuple[str, ...]) -> None:
    result, asked = fetch(tmp_path, members)
    assert result.returncode != 0 and 1 <= len(asked) <= 3, "those that were under way, and no more"
    assert "has no interface sources in it" in result.stderr.splitlines()[-1]
    assert not (tmp_path / "kept").exists()
