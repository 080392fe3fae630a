"""What TensorRT-LLM's own files need that the double does not have, said before any test is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

from tests.trtllm.double import contract, source
from tests.trtllm.double.config import ExecutorConfig
from tests.trtllm.double.pages import Pages


def line() -> str | None:
    """One line on the files of KVBM_TRTLLM_SOURCE; None without it."""
    where = source.folder()
    if where is None:
        return None
    found = lacking(where)
    return f"TensorRT-LLM's own files in {where}: " + ("; ".join(found) if found else "nothing is missing")


def lacking(where: Path) -> list[str]:
    """Files that are not in the folder, and names without a stand-in."""
    missing = source.missing_in(where)
    if missing is not None:
        return [missing]
    try:
        found = source.find_in(where)
    except source.SourceError as error:
        return [str(error)]
    said = [f"no stand-in for {name} ({found.connector.name})" for name in _unknown(found.connector, found)]
    if found.layout is not None:
        said += [f"no stand-in for {name} ({found.layout.name})" for name in _unknown(found.layout, found)]
        pages = Pages(ExecutorConfig(manager="v2"), [])
        read = sorted({*_read_of_the_manager(found.layout)} - {*dir(pages)})
        said += [f"the double's V2 cache has no {name} ({found.layout.name})" for name in read]
    arguments = where / source.LLM_ARGS
    return said if arguments.is_file() else [*said, f"there is no {arguments}"]


def _unknown(path: Path, found: source.Source) -> list[str]:
    """What a file imports of TensorRT-LLM and the double's modules of that version do not have."""
    modules = contract.modules_of(found.version)
    package = next(name for name in modules if name.endswith(f".{path.stem}")).rpartition(".")[0]
    return [
        f"{module}.{name}" if name else module
        for module, name in _imports(ast.parse(path.read_text(encoding="utf-8")), package)
        if module.split(".")[0] == "tensorrt_llm"
        and not (module in modules and (not name or hasattr(modules[module], name)))
    ]


def _imports(node: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """(module, name) of each import, wherever it stands; not those for type checkers alone."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        module = resolve_name("." * node.level + (node.module or ""), package)
        yield from ((module, alias.name) for alias in node.names)
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, package)


def _read_of_the_manager(path: Path) -> Iterator[str]:
    """The attributes of whatever is called ``manager`` there, as the builder of layouts calls the cache."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "manager"
        ):
            yield node.attr
