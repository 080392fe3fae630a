"""Rules of the house that a machine can hold: sizes, imports, names, forbidden calls, no local paths."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT_FOLDERS = (
    "kvbm_core",
    "kvbm_vllm",
    "kvbm_sglang",
    "kvbm_trtllm",
    "compat",
    "benchmarks",
    "tests/engines",
    "deploy",
    "examples",
)
"""What users run, and the helpers of the demo and the benchmarks."""
ALL_FOLDERS = (*PRODUCT_FOLDERS, "container", "tests", "docs", ".ci")
ADAPTERS = {"kvbm_vllm": "vllm", "kvbm_sglang": "sglang", "kvbm_trtllm": "tensorrt_llm"}
"""Each with its engine."""
MAX_FUNCTION_LINES = 60
MAX_CONSTRUCTOR_PARAMETERS = 7
MAX_LINE_CHARACTERS = 110
LIBRARY_API = {
    "register_engine",
    "register_store",
    "register_tier",
    "open_requests",
    "log_entries",
    "wrap_executor",
    "judge_results",
    "pack_record",
    "KvbmHiCache",
    "set_consumer",
    "ZmqReader",
    "NatsReader",
    "wait_until",
    "num_loans",
    "copied_blocks",
    "free_calls",
}
"""What the product does not call itself: engines do, other people's code may, or tests look by it."""
ENGINE_NAME = re.compile("vllm|sglang|tensorrt|trtllm|hicache", re.IGNORECASE)
NAMES_ENGINES = {
    "config/fields.py": "a setting's data: which adapters heed it",
    "config/settings.py": "the same",
    "cli/whose.py": "the module that engines are told to load",
    "identity/environment.py": "names of variables of libraries",
}

# Left to right as data flows; a module imports from its own place or further left.
CORE_ORDER = (
    ("types", "errors", "config", "clock", "ending", "native"),
    ("tokens",),
    ("identity",),
    ("layout",),
    ("policy",),
    ("blocks",),
    ("storage",),
    ("transfer",),
    ("fleet",),
    ("events",),
    ("control",),
    ("tiers",),
    ("peers",),
    ("runtime",),
    ("library",),
    ("replay",),
    ("sizing",),
    ("cli",),
    ("__main__",),
)
CORE_RANK = {name: rank for rank, names in enumerate(CORE_ORDER) for name in names}
NETWORK_MODULES = {"zmq", "aetcd", "nats", "boto3", "httpx", "requests", "aiohttp"}
ENGINE_MODULES = {
    "torch",
    "vllm",
    "sglang",
    "tensorrt_llm",
    "tokenizers",
    "transformers",
    "huggingface_hub",
    "cuda",
    "nixl",
}
OPTIONAL_MODULES = {
    "boto3",
    "cryptography",
    "etcd3",
    "google",
    "grpc",
    "matplotlib",
    "nacl",
    "nats",
    "nkeys",
    "nvtx",
    "obstore",
    "opentelemetry",
    "zstandard",
}
"""Of extras: imported where they are used."""
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


@functools.cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a file named from the root."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of its tree."""
    return tuple(ast.walk(parse(path)))


@functools.cache
def outline(path: Path) -> tuple[list[tuple[int, str]], list[tuple[int, str, int]]]:
    """(line, dotted name) of each import, inside functions too, and (line, name, lines) of each function.

    Plain data: the trees of all tests would be millions of objects to keep.
    """
    imports, functions = [], []
    package = path.with_suffix("").parts[:-1]
    left: list[ast.AST] = [ast.parse((ROOT / path).read_text(encoding="utf-8"))]
    while left:
        for node in ast.iter_child_nodes(left.pop()):
            if isinstance(node, ast.Import):
                imports += [(node.lineno, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else ()
                module = ".".join((*base, *filter(None, [node.module])))
                imports += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((node.lineno, node.name, (node.end_lineno or node.lineno) - node.lineno + 1))
            if not isinstance(node, ast.expr):
                left.append(node)
    return imports, functions


def imported_names(path: Path) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of everything that ``path`` imports, inside functions too."""
    return outline(path)[0]


def test_the_rules_see_the_code() -> None:
    seen = {path.as_posix() for path in python_files(PRODUCT_FOLDERS)}
    assert {"kvbm_core/types.py", "kvbm_core/cli/main.py", "deploy/setup_env.py"} <= seen


def test_functions_are_short() -> None:
    long = [
        f"{path}:{line} {name}: {lines} lines"
        for path in python_files((*PRODUCT_FOLDERS, "tests"))
        for line, name, lines in outline(path)[1]
        if lines > MAX_FUNCTION_LINES
    ]
    assert not long, "\n".join(long)


def constructors(path: Path) -> Iterator[tuple[str, int, int]]:
    """(class, line, parameters besides self) of what is constructed with an ``__init__`` of its own."""
    for node in nodes_of(path):
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                    found = method.args
                    parameters = [*found.posonlyargs, *found.args, *found.kwonlyargs]
                    yield node.name, method.lineno, len(parameters) - 1


def test_constructors_take_few_parameters() -> None:
    wrong = [
        f"{path}:{line} {name}: {number} parameters"
        for path in python_files(("kvbm_core", *ADAPTERS, "compat"))
        for name, line, number in constructors(path)
        if number > MAX_CONSTRUCTOR_PARAMETERS
    ]
    assert not wrong, "\n".join(wrong)


def names_in(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every name and string in the code of ``path``; not of its words about itself."""
    words = {id(node.value) for node in nodes_of(path) if isinstance(node, ast.Expr)}
    for node in nodes_of(path):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in words:
            yield node.lineno, node.value


def guarded_hooks() -> set[str]:
    """What the adapters call the hooks of their engines, where that is more than an everyday word."""
    return {
        node.args[0].value
        for path in python_files(tuple(ADAPTERS))
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and dotted(node.func) == "guarded"
        if isinstance(node.args[0], ast.Constant) and str(node.args[0].value).count("_") > 1
    }


def test_the_core_names_no_engine_and_none_of_its_hooks() -> None:
    hooks, wrong = guarded_hooks(), []
    assert {"start_load_kv", "get_num_new_matched_tokens", "register_mem_host_pool"} <= hooks
    for path in python_files(("kvbm_core",)):
        inside = path.relative_to("kvbm_core")
        if inside.as_posix() not in NAMES_ENGINES and inside.parts[0] != "testing":
            wrong += [
                f"{path}:{line} {text!r}"
                for line, text in names_in(path)
                if ENGINE_NAME.search(text) or text in hooks
            ]
    assert not wrong, "\n".join(wrong)


def used_names() -> set[str]:
    """What the product's code reads, imports or writes as a word by itself, and what its package names."""
    found = set(re.findall(r'"[\w.]+:(\w+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    for path in product_files():
        for node in nodes_of(path):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                found.add(node.attr)
            elif isinstance(node, ast.alias):
                found.add(node.name.split(".")[-1])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value.rpartition(":")[2])
    return found


def product_files() -> list[Path]:
    """What users load: without what is there for tests."""
    return [path for path in python_files(("kvbm_core", *ADAPTERS, "compat")) if "testing" not in path.parts]


def public_names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of functions, classes and methods that somebody has to call.

    Not of methods of a class with a base, which may call them, nor of what a decorator hands on.
    """
    for node in parse(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.decorator_list:
            yield node.lineno, node.name
        if isinstance(node, ast.ClassDef) and not node.bases:
            for method in node.body:
                if isinstance(method, ast.FunctionDef):
                    yield method.lineno, method.name


def test_no_public_name_is_dead() -> None:
    used = used_names()
    dead = {
        name: f"{path}:{line} {name}"
        for path in product_files()
        for line, name in public_names(path)
        if not name.startswith("_") and name not in used
    }
    wrong = [text for name, text in dead.items() if name not in LIBRARY_API]
    assert not wrong, "\n".join(wrong)
    assert dead.keys() >= LIBRARY_API, f"take off the list: {LIBRARY_API - dead.keys()}"


def test_lines_of_text_are_short_enough_to_review() -> None:
    """But for what is to be pasted. A table's row cannot be broken: write fewer columns, or a list."""
    long = []
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]):
        name, is_code = path.relative_to(ROOT).as_posix(), False
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            is_code ^= line.lstrip().startswith("```")
            if len(line) > MAX_LINE_CHARACTERS and not is_code:
                long.append(f"{name}:{number}: {len(line)} characters")
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


def test_helpers_of_engines_belong_to_the_tests_and_stand_alone() -> None:
    """Benchmarks and the demo import tests.engines; the tests import no benchmark but to test it."""
    wrong = []
    for path in python_files(("tests",)):
        for line, name in imported_names(path):
            is_helper = path.parts[1] == "engines"
            if name.split(".")[0] == "benchmarks" and path.parts[1] != "benchmarks":
                wrong.append(f"{path}:{line} imports {name}")
            if is_helper and name.startswith("tests.") and not name.startswith("tests.engines."):
                wrong.append(f"{path}:{line} imports {name}")
    assert not wrong, "\n".join(wrong)


def modules_after_importing(*steps: list[str]) -> list[set[str]]:
    """Top-level names in sys.modules of a fresh interpreter, after it imported the modules of each step."""
    program = "import sys\n" + "".join(
        f"import {', '.join(modules)}\nprint(*{{m.split('.')[0] for m in sys.modules}})\n"
        for modules in steps
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [set(line.split()) for line in result.stdout.splitlines()]


def core_modules(*, without: set[str]) -> list[str]:
    """Dotted names of the core's modules, leaving out the first-level names in ``without``."""
    dotted = (
        ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        for path in python_files(("kvbm_core",))
    )
    return [name for name in dotted if not set(name.split(".")[1:2]) & without]


def test_no_core_module_loads_an_engine_and_metadata_code_no_network_library() -> None:
    metadata, core = modules_after_importing(
        core_modules(
            without={
                "fleet",
                "events",
                "control",
                "peers",
                "runtime",
                "library",
                "cli",
                "__main__",
                "testing",
            }
        ),
        core_modules(without={"testing"}),
    )
    assert "kvbm_core" in metadata
    assert not metadata & NETWORK_MODULES
    assert not core & (ENGINE_MODULES | OPTIONAL_MODULES)
    assert not core & (NETWORK_MODULES - {"zmq"})
    assert not core & ADAPTERS.keys()


def test_sockets_are_opened_in_one_place() -> None:
    users = {
        path.as_posix()
        for path in python_files(("kvbm_core", *ADAPTERS))
        for _, name in imported_names(path)
        if name.split(".")[0] == "zmq"
    }
    places = tuple(f"kvbm_core/{name}/" for name in ("fleet", "events", "peers", "runtime"))
    assert all(user.startswith(places) for user in users), users


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name or attribute, else an empty string."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def forbidden_in(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, what) of calls that would turn data into code."""
    for node in nodes:
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
    assert list(forbidden_in(ast.walk(ast.parse(source)))) == [(1, "eval"), (3, "torch.load"), (4, "shell=")]


def test_data_is_never_code() -> None:
    wrong = []
    for path in python_files(PRODUCT_FOLDERS):
        wrong += [f"{path}:{line} {what}" for line, what in forbidden_in(nodes_of(path))]
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
    assert modules == used - set(sys.stdlib_module_names) - ENGINE_MODULES - OPTIONAL_MODULES - ours


def test_dynamo_stays_a_namespace_that_others_can_share() -> None:
    inits = sorted((ROOT / "compat" / "dynamo").rglob("__init__.py"))
    assert not inits, "an __init__.py here would overwrite or hide ai-dynamo's own"


def test_contributing_names_each_file_with_nightly_tests() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    marked = {
        path.as_posix()
        for path in python_files(("tests",))
        if "mark.nightly" in (ROOT / path).read_text(encoding="utf-8")
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and dotted(node.func) == "pytest.mark.nightly"
    }
    assert marked
    missing = [path for path in marked if path not in page and f"`{path.rpartition('/')[0]}`" not in page]
    assert not missing
