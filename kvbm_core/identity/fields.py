"""An engine's configuration, classified field by field: in the key, or irrelevant for a stated reason.

Each adapter has one ``ConfigTable`` per configuration class of its engine. A field that no table names is
unknown: it may change what K and V are, so blocks that were computed under it keep to the process that
computed them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from fractions import Fraction
from pathlib import PurePath
from typing import Any, NamedTuple

from kvbm_core.tokens.hashing import encode_fields

log = logging.getLogger("kvbm")

NOT_ON_DISK = "nothing is kept on disk (the host tier works as always)"
"""For ``Description.tell``."""

MAX_DEPTH = 16
_SCALARS = (bool, int, float, str, bytes, type(None))


@dataclasses.dataclass(frozen=True)
class InKey:
    """The field's value is part of the key. ``read`` makes of it what counts (by default, the value as it
    is); with ``whole`` it is given the configuration that has the field. ``note``: what ``read`` does, for
    the docs.
    """

    read: Callable[[Any], object] | None = None
    note: str = ""
    whole: bool = False


@dataclasses.dataclass(frozen=True)
class Irrelevant:
    """The field changes no byte of K or V; ``reason`` says why, in a few words, for the docs."""

    reason: str


@dataclasses.dataclass(frozen=True)
class ThisProcessOnly:
    """The field's value, where ``applies`` to it, means nothing in another process; ``reason`` says why.
    Where it does not apply, the field is as ``otherwise`` says. With ``whole``, ``applies`` is given the
    configuration that has the field.
    """

    reason: str
    applies: Callable[[Any], bool] = bool
    otherwise: InKey | Irrelevant | None = None
    whole: bool = False


@dataclasses.dataclass(frozen=True)
class Nested:
    """The field holds another configuration, or None. ``tables`` by class name; another class is unknown."""

    tables: tuple[ConfigTable, ...]


Rule = InKey | Irrelevant | ThisProcessOnly | Nested


@dataclasses.dataclass(frozen=True)
class ConfigTable:
    """The rules of one configuration class."""

    class_name: str
    rules: Mapping[str, Rule]


class Description(NamedTuple):
    """``pairs``: names and values for the key, sorted by name. ``unknown``: fields that nobody has
    classified, or whose value has no stable text. ``process_only``: "field: reason" of those that mean
    nothing elsewhere.
    """

    pairs: tuple[tuple[str, str], ...]
    unknown: tuple[str, ...]
    process_only: tuple[str, ...]

    @property
    def is_lasting(self) -> bool:
        """Whether another process that has the same pairs computes the same bytes."""
        return not self.unknown and not self.process_only

    @property
    def digest(self) -> str:
        """Of its pairs."""
        return hashlib.sha256(encode_fields(*(text for pair in self.pairs for text in pair))).hexdigest()

    def without(self, names: AbstractSet[str]) -> Description:
        """As if these pairs were not in the key."""
        return self._replace(pairs=tuple(pair for pair in self.pairs if pair[0] not in names))

    @classmethod
    def joined(cls, parts: Iterable[Description]) -> Description:
        """What all of them say."""
        parts = tuple(parts)
        return cls(
            tuple(sorted(pair for part in parts for pair in part.pairs)),
            tuple(sorted(name for part in parts for name in part.unknown)),
            tuple(sorted(name for part in parts for name in part.process_only)),
        )

    def tell(self, engine: str, what: str) -> None:
        """One line if blocks keep to this process: which field, and what to do. ``what``: what does not
        happen. For who wants to know why two engines do not share blocks: what is in the key.
        """
        for name, text in self.pairs:
            log.debug("kvbm: in the name of a block: %s = %s", name, text)
        if self.process_only:
            reasons = "; ".join(self.process_only)
            log.warning("kvbm: %s, because it would mean nothing after a restart: %s", what, reasons)
        if self.unknown:
            log.warning(
                "kvbm: %s, because this version does not know whether these settings of %s change what K and "
                "V are: %s. Install a kvbm that knows this %s, or a version of docs/identity-fields.md",
                what,
                engine,
                ", ".join(self.unknown),
                engine,
            )


def describe(config: object, table: ConfigTable, prefix: str = "") -> Description:
    """What ``config`` adds to the key. Never raises for what a field holds; names begin with ``prefix``."""
    pairs: list[tuple[str, str]] = []
    unknown: list[str] = []
    process_only: list[str] = []
    for name in field_names(config):
        path, rule = f"{prefix}{name}", table.rules.get(name)
        try:
            value = getattr(config, name, None)
            if isinstance(rule, ThisProcessOnly):
                if rule.applies(config if rule.whole else value):
                    process_only.append(f"{path}: {rule.reason}")
                    continue
                rule = rule.otherwise or Irrelevant(rule.reason)
            if rule is None:
                unknown.append(path)
            elif isinstance(rule, Nested):
                below = _describe_nested(value, rule, path)
                pairs += below.pairs
                unknown += below.unknown
                process_only += below.process_only
            elif isinstance(rule, InKey):
                given = config if rule.whole else value
                pairs.append((path, canonical(given if rule.read is None else rule.read(given))))
        except Exception:  # whatever an engine's object does: in doubt, this process alone
            unknown.append(path)
    return Description(tuple(sorted(pairs)), tuple(sorted(unknown)), tuple(sorted(process_only)))


def _describe_nested(value: object, rule: Nested, path: str) -> Description:
    if value is None:
        return Description(((path, canonical(None)),), (), ())
    for table in rule.tables:
        if type(value).__name__ == table.class_name:
            below = describe(value, table, f"{path}.")
            return below._replace(pairs=(*below.pairs, (path, table.class_name)))
    return Description((), (f"{path} ({type(value).__name__})",), ())


def field_names(config: object) -> list[str]:
    """The fields of a dataclass, of a pydantic or msgspec object, or the attributes of any other, sorted."""
    if dataclasses.is_dataclass(config):  # without what is not stored: ClassVar and InitVar
        return sorted(field.name for field in dataclasses.fields(config))
    for attribute in ("model_fields", "__struct_fields__"):
        fields = getattr(type(config), attribute, None)
        if fields is not None:
            extra = getattr(config, "model_extra", None) if attribute == "model_fields" else None
            return sorted({*fields, *(extra or {})})
    return sorted(vars(config))


class UnstableValueError(ValueError):
    """A value that has no text that is the same in every process."""


def canonical(value: object) -> str:
    """The value as text: equal values have equal texts in every process, and different values different ones.

    UnstableValueError for an object that is none of: scalars, enums, paths, mappings, sequences, sets,
    fractions, patterns, dataclasses, pydantic objects, objects with ``to_dict``, torch dtypes and devices,
    named classes and functions.
    """
    return "".join(_canonical(value, 0))


def _canonical(value: object, depth: int) -> Iterator[str]:
    if depth > MAX_DEPTH:
        raise UnstableValueError("nested too deeply")
    if isinstance(value, Enum):
        yield f"{type(value).__name__}."
        yield from _canonical(value.name, depth + 1)
    elif isinstance(value, _SCALARS):
        kind = _kind_of(value)
        yield f"{kind.__name__}:{kind.__repr__(value)}"
    elif isinstance(value, PurePath):
        yield f"path:{str(value)!r}"
    elif isinstance(value, Mapping):
        yield "{" + ",".join(sorted(_pair(key, item, depth) for key, item in value.items())) + "}"
    elif isinstance(value, AbstractSet):
        yield "<" + ",".join(sorted("".join(_canonical(item, depth + 1)) for item in value)) + ">"
    elif isinstance(value, Sequence):
        yield "[" + ",".join("".join(_canonical(item, depth + 1)) for item in value) + "]"
    else:
        yield from _canonical_object(value, depth)


def _canonical_object(value: Any, depth: int) -> Iterator[str]:
    kind = type(value)
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        if "<locals>" in value.__qualname__ or "<lambda>" in value.__qualname__:
            raise UnstableValueError(f"{value.__qualname__} has no name that others know")
        yield f"name:{value.__module__}.{value.__qualname__}"
    elif kind.__module__ == "torch" and kind.__name__ in {"dtype", "device", "Size"}:
        yield f"{kind.__name__}:{value}"
    elif isinstance(value, Fraction):
        yield f"fraction:{value}"
    elif isinstance(value, re.Pattern):
        yield f"pattern:{value.flags}:{value.pattern!r}"
    elif dataclasses.is_dataclass(value) or hasattr(kind, "model_fields"):
        yield kind.__qualname__
        yield from _canonical({name: getattr(value, name) for name in field_names(value)}, depth + 1)
    elif callable(getattr(value, "to_dict", None)):
        yield kind.__qualname__
        yield from _canonical(value.to_dict(), depth + 1)
    else:
        raise UnstableValueError(f"a {kind.__qualname__} has no text that is the same in every process")


def _pair(key: object, item: object, depth: int) -> str:
    return "".join((*_canonical(key, depth + 1), "=", *_canonical(item, depth + 1)))


def _kind_of(value: object) -> Any:
    """1, 1.0 and True are equal: the kind keeps their texts apart. A subclass of str counts as str."""
    return next(kind for kind in _SCALARS if isinstance(value, kind))
