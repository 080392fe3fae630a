"""Reading Python sources without importing them: classes, signatures, imports, and which attributes are
used.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path


@cache
def parse(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def find_class(path: Path, name: str) -> ast.ClassDef | None:
    """The class ``name`` at the top level of a file."""
    return next(
        (node for node in parse(path).body if isinstance(node, ast.ClassDef) and node.name == name), None
    )


def class_of(path: Path, name: str) -> ast.ClassDef:
    """The same, of a class that must be there."""
    node = find_class(path, name)
    assert node is not None, f"{name} is not in {path}"
    return node


def function_of(source: str) -> ast.FunctionDef:
    """The function that a text defines."""
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    return node


def fields_of(path: Path, name: str) -> dict[str, bool]:
    """Fields of a dataclass, in order -> whether each has a default."""
    fields = [item for item in class_of(path, name).body if isinstance(item, ast.AnnAssign)]
    return {ast.unparse(item.target): item.value is not None for item in fields}


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """Methods, properties and class methods defined in the class itself."""
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def decorators(function: ast.FunctionDef) -> set[str]:
    """Names of a function's decorators."""
    return {ast.unparse(item) for item in function.decorator_list}


def attributes(path: Path, name: str) -> set[str]:
    """What instances of the class have: fields, methods, what __init__ assigns; with its bases in this
    file.
    """
    node = find_class(path, name)
    if node is None:
        return set()
    found = set(methods(node))
    for item in ast.walk(node):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            found.add(item.target.id)
        elif (
            isinstance(item, ast.Attribute)
            and isinstance(item.ctx, ast.Store)
            and ast.unparse(item.value) == "self"
        ):
            found.add(item.attr)
    for base in node.bases:
        found |= attributes(path, ast.unparse(base))
    return found


def defined_names(path: Path) -> set[str]:
    """What can be imported from a module: anything bound at its top level, also inside try and if."""
    found: set[str] = set()
    pending = list(parse(path).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Try | ast.If):
            pending += [*node.body, *node.orelse, *getattr(node, "finalbody", [])]
            pending += [item for handler in getattr(node, "handlers", []) for item in handler.body]
        else:
            found |= {
                item.id
                for item in ast.walk(node)
                if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store)
            }
    return found


def guarded_lines(tree: ast.Module) -> set[int]:
    """Lines that need not work: in a ``try`` that catches ImportError, or under TYPE_CHECKING."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        is_tried = isinstance(node, ast.Try) and any("ImportError" in ast.unparse(h) for h in node.handlers)
        is_for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if isinstance(node, ast.Try | ast.If) and (is_tried or is_for_types):
            for item in node.body:
                lines |= set(range(item.lineno, (item.end_lineno or item.lineno) + 1))
    return lines


def imports_of(tree: ast.Module, package: str) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of each ``from package... import name``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == package:
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)


@dataclass
class Uses:
    """Attributes read of objects whose class is known: (class, attribute) -> where."""

    types: dict[tuple[str, str], str]
    classes: set[str]
    direct: dict[tuple[str, str], str] = field(default_factory=dict)
    probed: dict[tuple[str, str], str] = field(default_factory=dict)

    def read(self, path: Path) -> None:
        """Adds all functions of one file. Types are taken from annotations and followed through names and
        loops.
        """
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef):
                self._read_function(node, path.name)

    def _read_function(self, function: ast.FunctionDef, file_name: str) -> None:
        arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
        known = {
            a.arg: kind for a in arguments if a.annotation is not None and (kind := self._named(a.annotation))
        }
        for _ in range(3):  # a name may be used before the walk has met what binds it
            for node in ast.walk(function):
                self._bind(node, known)
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = self._type(node.value, known)
                if owner in self.classes:
                    self.direct[owner, node.attr] = f"{file_name}:{node.lineno}"
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
                owner = self._type(node.args[0], known)
                if owner in self.classes and isinstance(node.args[1], ast.Constant):
                    self.probed[owner, node.args[1].value] = f"{file_name}:{node.lineno}"

    def _named(self, annotation: ast.expr) -> str | None:
        words = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
        found = words & (self.classes | {owner for owner, _ in self.types})
        if len(found) != 1:
            return None
        is_one = isinstance(annotation, ast.Name | ast.BinOp)
        return found.pop() if is_one else "*" + found.pop()

    def _type(self, node: ast.expr, known: dict[str, str]) -> str | None:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._type(node.value, known)
            return self.types.get((owner, node.attr)) if owner else None
        if isinstance(node, ast.BoolOp):
            return self._type(node.values[0], known)
        if isinstance(node, ast.Subscript):
            return (self._type(node.value, known) or "").removeprefix("*") or None
        if isinstance(node, ast.Call) and ast.unparse(node.func) in {
            "enumerate",
            "iter",
            "list",
            "reversed",
            "next",
        }:
            return self._type(node.args[0], known)
        return None

    def _bind(self, node: ast.AST, known: dict[str, str]) -> None:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._assign(node.targets[0], node.value, known)
        elif isinstance(node, ast.For | ast.comprehension):
            self._loop(node.target, node.iter, known)

    def _assign(self, target: ast.expr, value: ast.expr, known: dict[str, str]) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._assign(one, its, known)
        elif isinstance(target, ast.Name) and (kind := self._type(value, known)):
            known[target.id] = kind

    def _loop(self, target: ast.expr, source: ast.expr, known: dict[str, str]) -> None:
        if (
            isinstance(source, ast.Call)
            and ast.unparse(source.func) == "zip"
            and isinstance(target, ast.Tuple)
        ):
            for one, its in zip(target.elts, source.args, strict=False):
                self._loop(one, its, known)
            return
        kind = self._type(source, known) or ""
        if isinstance(target, ast.Tuple):  # enumerate
            target = target.elts[-1]
        if kind.startswith("*") and isinstance(target, ast.Name):
            known[target.id] = kind[1:]
