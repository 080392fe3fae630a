"""Rules of the house that a machine can hold: sizes, import directions, forbidden calls, no local paths."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT_FOLDERS = ("kvbm_core", "kvbm_vllm", "kvbm_sglang", "kvbm_trtllm", "compat", "benchmarks", "deploy")
ALL_FOLDERS = (*PRODUCT_FOLDERS, "tests", "docs", ".ci")
ADAPTERS = {"kvbm_vllm": "vllm", "kvbm_sglang": "sglang", "kvbm_trtllm": "tensorrt_llm"}
"""Each with its engine."""
MAX_FUNCTION_LINES = 60

# Left to right as data flows; a module imports from its own place or further left.
CORE_ORDER = (
    ("types", "errors", "config", "clock", "native"),
    ("tokens",),
    ("identity",),
    ("layout",),
    ("policy",),
    ("blocks",),
    ("storage",),
    ("transfer",),
    ("tiers",),
    ("runtime",),
    ("cli",),
)
CORE_RANK = {name: rank for rank, names in enumerate(CORE_ORDER) for name in names}
NETWORK_MODULES = {"zmq", "aetcd", "nats", "boto3", "httpx", "requests", "aiohttp"}
ENGINE_MODULES = {
    "torch",
    "vllm",
    "sglang",
    "tensorrt_llm",
    "transformers",
    "huggingface_hub",
    "cuda",
    "nixl",
}
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "os.system", "os.popen"}
GENERATED = {"__pycache__", "results"}  # what Python and `make bench` write
LOCAL_PATH = re.compile(r"(?<![\w.$}/])/(?:work|root|home/[a-z]\w*|Users/\w+|opt/[a-z][\w-]*)/")


def python_files(folders: tuple[str, ...]) -> Iterator[Path]:
    """Every Python file of ``folders``, as path from the repository's root."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if "__pycache__" not in path.parts:
                yield path.relative_to(ROOT)


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file named from the root."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


def imported_names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything that ``path`` imports, inside functions too."""
    package = path.with_suffix("").parts[:-1]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def test_the_rules_see_the_code() -> None:
    seen = {path.as_posix() for path in python_files(PRODUCT_FOLDERS)}
    assert {"kvbm_core/types.py", "kvbm_core/cli/main.py", "deploy/setup_env.py"} <= seen


def test_functions_are_short() -> None:
    long = []
    for path in python_files((*PRODUCT_FOLDERS, "tests")):
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{path}:{node.lineno} {node.name}: {lines} lines")
    assert not long, "\n".join(long)


def core_import_allowed(importer: str, imported: str) -> bool:
    """Whether core package (or module) ``importer`` may import ``imported``; both are first-level names."""
    if importer in (imported, "testing"):
        return True
    if imported == "testing":
        return False
    if importer == "observe":
        return imported in CORE_ORDER[0]
    if imported == "observe":
        return importer not in CORE_ORDER[0]
    return CORE_RANK[imported] <= CORE_RANK[importer]


def test_the_direction_rule_itself() -> None:
    assert core_import_allowed("tiers", "blocks")
    assert core_import_allowed("transfer", "observe")
    assert not core_import_allowed("blocks", "tiers")
    assert not core_import_allowed("config", "observe")
    assert not core_import_allowed("observe", "tokens")
    assert not core_import_allowed("runtime", "testing")


def test_core_imports_never_point_right() -> None:
    wrong = []
    for path in python_files(("kvbm_core",)):
        importer = path.parts[1].removesuffix(".py")
        for line, name in imported_names(path):
            parts = name.split(".")
            if parts[0] != "kvbm_core" or parts[1] == "__version__":
                continue
            if not core_import_allowed(importer, parts[1]):
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_packages_know_only_what_is_below_them() -> None:
    hidden = {
        "kvbm_core": {*ADAPTERS, *ADAPTERS.values(), "kvbm", "dynamo", "benchmarks", "tests"},
        "compat": {"benchmarks", "tests"},
    }
    for adapter, engine in ADAPTERS.items():
        others = {*ADAPTERS, *ADAPTERS.values()} - {adapter, engine}
        hidden[adapter] = {*others, "kvbm", "dynamo", "benchmarks", "tests"}
    wrong = [
        f"{path}:{line} imports {name}"
        for folder, names in hidden.items()
        for path in python_files((folder,))
        for line, name in imported_names(path)
        if name.split(".")[0] in names or (folder in ADAPTERS and name.startswith("kvbm_core.testing"))
    ]
    assert not wrong, "\n".join(wrong)


def modules_after_importing(modules: list[str]) -> set[str]:
    """Top-level names in sys.modules of a fresh interpreter that imported ``modules``."""
    program = f"import sys, {', '.join(modules)}\nprint(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def core_modules(*, without: set[str]) -> list[str]:
    """Dotted names of the core's modules, leaving out the first-level names in ``without``."""
    dotted = (
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path in python_files(("kvbm_core",))
    )
    return [name for name in dotted if not set(name.split(".")[1:2]) & without]


def test_metadata_code_loads_no_engine_and_no_network_library() -> None:
    loaded = modules_after_importing(core_modules(without={"runtime", "cli", "testing"}))
    assert "kvbm_core" in loaded
    assert not loaded & (ENGINE_MODULES | NETWORK_MODULES)


def test_no_core_module_loads_an_engine() -> None:
    loaded = modules_after_importing(core_modules(without={"testing"}))
    assert not loaded & ENGINE_MODULES
    assert not loaded & (NETWORK_MODULES - {"zmq"})


def test_sockets_are_opened_in_one_place() -> None:
    users = {
        path.as_posix()
        for path in python_files(("kvbm_core", *ADAPTERS))
        for _, name in imported_names(path)
        if name.split(".")[0] == "zmq"
    }
    assert all(user.startswith("kvbm_core/runtime/") for user in users), users


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name or attribute, else an empty string."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def forbidden_in(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) of calls that would turn data into code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if dotted(node.func) in FORBIDDEN_CALLS:
                yield node.lineno, dotted(node.func)
            for keyword in node.keywords:
                if keyword.arg == "shell" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    yield node.lineno, "shell="


def test_the_forbidden_calls_are_recognised() -> None:
    source = "eval('1')\nimport torch\ntorch.load('x')\nrun('ls', shell=True)\nmodel.eval()\nrun('ls')"
    assert list(forbidden_in(ast.parse(source))) == [(1, "eval"), (3, "torch.load"), (4, "shell=")]


def test_data_is_never_code() -> None:
    wrong = []
    for path in python_files(PRODUCT_FOLDERS):
        wrong += [f"{path}:{line} {what}" for line, what in forbidden_in(parse(path))]
        wrong += [
            f"{path}:{line} imports {name}"
            for line, name in imported_names(path)
            if name.split(".")[0] in FORBIDDEN_MODULES
        ]
    assert not wrong, "\n".join(wrong)


def test_no_path_of_a_developers_machine_is_in_the_repository() -> None:
    assert LOCAL_PATH.search("see " + "/".join(("", "home", "ada", "notes")))
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a worktree's
    for folder in ALL_FOLDERS:
        files += [
            p for p in (ROOT / folder).rglob("*") if p.is_file() and not GENERATED.intersection(p.parts)
        ]
    found = []
    for path in files:
        if path.suffix in {".png", ".gz", ".whl", ".zip"}:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if LOCAL_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_core_dependencies_are_those_that_are_imported() -> None:
    declared = re.search(
        r"^dependencies = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M | re.S
    )
    assert declared is not None
    names = {re.split(r"[<>=!]", text)[0] for text in re.findall(r'"([^"]+)"', declared[1])}
    modules = {{"pyzmq": "zmq"}.get(name, name.replace("-", "_")) for name in names}
    used = {
        name.split(".")[0]
        for path in python_files(("kvbm_core", *ADAPTERS, "compat"))
        for _, name in imported_names(path)
    }
    ours = {"kvbm_core", *ADAPTERS, "kvbm", "dynamo"}
    assert modules == used - set(sys.stdlib_module_names) - ENGINE_MODULES - ours


def test_dynamo_stays_a_namespace_that_others_can_share() -> None:
    inits = sorted((ROOT / "compat" / "dynamo").rglob("__init__.py"))
    assert not inits, "an __init__.py here would overwrite or hide ai-dynamo's own"


@pytest.mark.vllm
def test_public_names_import_and_are_the_same_classes() -> None:
    program = (
        "from kvbm.vllm_integration import connector as ours, consolidator_config\n"
        "from dynamo.llm.vllm_integration import connector as old\n"
        "for name in ('DynamoConnector', 'DynamoConnectorMetadata', 'PdConnector'):\n"
        "    assert getattr(ours, name) is getattr(old, name), name\n"
        "assert consolidator_config.get_consolidator_endpoints(None) is None\n"
        "assert consolidator_config.should_enable_consolidator(None) is False\n"
    )
    paths = f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'compat')!r}]\n"
    result = subprocess.run([sys.executable, "-c", paths + program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
