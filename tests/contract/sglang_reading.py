"""Reading SGLang's and kvbm_sglang's sources: signatures, calls of a storage backend, what is read of whose
objects.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path

from tests.contract.source_reading import Uses, class_of, fields_of, imports_of, parse

STORAGE = Path("srt/mem_cache/hicache_storage.py")
CONTROLLER = Path("srt/managers/cache_controller.py")
HYBRID = Path("srt/mem_cache/hybrid_cache/hybrid_cache_controller.py")
FACTORY = Path("srt/mem_cache/storage/backend_factory.py")


def signature_of(function: ast.FunctionDef) -> Signature:
    """What a call of this method may give, without self; a default stands for itself, whatever it is."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    plain = Parameter.POSITIONAL_OR_KEYWORD
    num_required = len(positional) - len(args.defaults)
    found = [
        Parameter(a.arg, plain, default=Parameter.empty if place < num_required else None)
        for place, a in enumerate(positional)
    ][1:]
    if args.vararg is not None:
        found.append(Parameter(args.vararg.arg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        given = Parameter.empty if default is None else None
        found.append(Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=given))
    if args.kwarg is not None:
        found.append(Parameter(args.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(found)


def constructor_of(path: Path, name: str) -> Signature:
    """What a dataclass is made with."""
    kind = Parameter.POSITIONAL_OR_KEYWORD
    fields = fields_of(path, name).items()
    return Signature(
        [Parameter(field, kind, default=None if has else Parameter.empty) for field, has in fields]
    )


def enum_values(path: Path, name: str) -> set[str]:
    """The string values of an enum."""
    values = [item.value for item in class_of(path, name).body if isinstance(item, ast.Assign)]
    return {
        value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)
    }


# ---------------------------------------------------------------- calls


@dataclass(frozen=True)
class CallForm:
    """How something is called: how many positional arguments, which keywords."""

    name: str
    where: str
    positional: int
    keywords: tuple[str, ...]

    def misfit(self, signature: Signature) -> str | None:
        """Why it cannot be called like this; None if it can."""
        try:
            signature.bind(*[None] * self.positional, **dict.fromkeys(self.keywords))
        except TypeError as error:
            return f"{self.where} {self.name}{signature}: {error}"
        return None


def form_of(call: ast.Call, name: str, where: str) -> CallForm | None:
    """None where * or ** hides what is given."""
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(
        k.arg is None for k in call.keywords
    ):
        return None
    return CallForm(
        name, f"{where}:{call.lineno}", len(call.args), tuple(k.arg for k in call.keywords if k.arg)
    )


def is_backend(node: ast.expr) -> bool:
    """``storage_backend`` of any object, or the ``_backend`` that SGLang's proxy holds."""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in {"storage_backend", "_backend"}


def backend_calls(sglang: Path) -> Iterator[CallForm]:
    """Every call of a storage backend's method outside of the backends themselves."""
    for path in caller_files(sglang):
        for node in ast.walk(parse(path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and is_backend(node.func.value)
            ):
                form = form_of(node, node.func.attr, path.name)
                assert form is not None, (
                    f"{path}:{node.lineno} hides its arguments: read it, and teach this reader"
                )
                yield form


def backend_attributes(sglang: Path) -> set[str]:
    """Every attribute of a storage backend that is read, called or not."""
    return {
        node.attr
        for path in caller_files(sglang)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and is_backend(node.value)
    }


def caller_files(sglang: Path) -> list[Path]:
    """Files that may hold a storage backend: not those of one vendor's."""
    vendors = sglang / "srt/mem_cache/storage"
    files = sorted((sglang / "srt/mem_cache").rglob("*.py"))
    own = [path for path in files if vendors not in path.parents or path.parent == vendors]
    return [path for path in [sglang / CONTROLLER, *own] if "_backend." in path.read_text(encoding="utf-8")]


def allowed_forms(function: ast.FunctionDef) -> list[CallForm]:
    """The calls that a base's signature invites: everything, the required alone; by place, by name."""
    parameters = signature_of(function).parameters.values()
    everything = tuple(p.name for p in parameters if p.kind is Parameter.POSITIONAL_OR_KEYWORD)
    required = tuple(p.name for p in parameters if p.name in everything and p.default is Parameter.empty)
    return [
        CallForm(function.name, "the base allows", len(places), names)
        for places, names in ((everything, ()), ((), everything), (required, ()), ((), required))
    ]


def string_keys(sglang: Path, files: Iterable[Path], method: str) -> set[str]:
    """Keys that these files take out of an extra config by ``get`` or ``pop``."""
    found = set()
    for path in files:
        for node in ast.walk(parse(sglang / path)):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == method
            ):
                is_config = ast.unparse(node.func.value).endswith("config")
                if is_config and node.args and isinstance(node.args[0], ast.Constant):
                    found.add(str(node.args[0].value))
    return found


# ---------------------------------------------------------------- our reads


def loaded_with(entry: Path) -> list[Path]:
    """The module and those of its package that it imports, by whatever way."""
    found, pending = [], [entry]
    while pending:
        path = pending.pop()
        if path not in found:
            found.append(path)
            modules = {module.split(".")[1] for _, module, _ in imports_of(parse(path), entry.parent.name)}
            pending += [entry.with_name(f"{module}.py") for module in modules]
    return sorted(found)


class AdapterUses(Uses):
    """What an adapter reads of objects by their annotations, through ``self.x = argument`` too.

    Left out is what stands under ``if x == "value"`` or ``if hasattr(x, "value")``, where the value is in
    ``absent``.
    """

    def __init__(self, classes: set[str], absent: set[str]) -> None:
        super().__init__({}, classes)
        self._absent = absent

    def read(self, path: Path) -> None:
        """Adds all functions of one file."""
        tree = _Pruned(self._absent).visit(ast.parse(path.read_text(encoding="utf-8")))
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        self.types = {}
        for function in functions:
            arguments = {
                a.arg: self._named(a.annotation) for a in function.args.args if a.annotation is not None
            }
            for item in ast.walk(function):
                if isinstance(item, ast.Assign) and isinstance(item.value, ast.Name):
                    kind = arguments.get(item.value.id)
                    targets = map(ast.unparse, item.targets)
                    self.types.update(
                        {("self", text): kind for text in targets if kind and text.startswith("self.")}
                    )
        for function in functions:
            self._read_function(function, path.name)

    def _type(self, node: ast.expr, known: dict[str, str]) -> str | None:
        return self.types.get(("self", ast.unparse(node))) or super()._type(node, known)


class _Pruned(ast.NodeTransformer):
    def __init__(self, absent: set[str]) -> None:
        self._absent = absent

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        constants = {item.value for item in ast.walk(node.test) if isinstance(item, ast.Constant)}
        is_equal = isinstance(node.test, ast.Compare) and isinstance(node.test.ops[0], ast.Eq)
        is_asked = isinstance(node.test, ast.Call) and ast.unparse(node.test.func) == "hasattr"
        return node.orelse if constants & self._absent and (is_equal or is_asked) else node
