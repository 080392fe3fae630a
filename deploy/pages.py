"""Writes what five pages say of the code: docs/configuration.md of kvbm's settings, docs/identity-fields.md
of engines' settings, which are in the name of a block or not, docs/doctor.md of the doctor's checks,
docs/commands.md of the ``kvbm`` command, and docs/hybrid.md of which models are served.

python -m deploy.pages          # from the repository's root; no engine need be installed
python -m deploy.pages --check  # exit status 1 if a page is not as this would write it
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from textwrap import TextWrapper
from typing import Any, NamedTuple, cast

import typer
from pydantic.fields import FieldInfo

from kvbm_core.cli.app import App
from kvbm_core.cli.doctor.catalog import OWN
from kvbm_core.cli.main import app
from kvbm_core.config.settings import KvbmSettings, limits_of
from kvbm_core.identity.fields import InKey, Nested, Rule, ThisProcessOnly
from tests import model_families

DOCS = Path(__file__).resolve().parents[1] / "docs"
MARK = "<!-- From here on written by `python -m deploy.pages`. -->"
LINE_CHARACTERS = 110


def page_with(text: str, lines: Callable[[], Iterator[str]]) -> str:
    """``text`` with everything below the mark written anew. ValueError without a mark."""
    head, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"the page has no line {MARK}")
    return head + mark + "\n\n" + "\n".join(lines()).strip() + "\n"


def _item(text: str) -> list[str]:
    """The lines of one item of a list."""
    return _wrapped(text, "* ", "  ")


def _wrapped(text: str, first: str = "", others: str = "") -> list[str]:
    wrapper = TextWrapper(LINE_CHARACTERS, initial_indent=first, subsequent_indent=others)
    wrapper.break_long_words = wrapper.break_on_hyphens = False
    return wrapper.wrap(text)


# -------------------------------------------------------------------- kvbm's settings

SECTIONS = {
    "cpu_cache_gb": ("Host memory", ""),
    "disk_cache_gb": ("Disk", "Which of these to choose, and why: [disk-files.md](disk-files.md)."),
    "remote_url": (
        "Stores that machines share",
        "All of it in [remote.md](remote.md), also [names that tell nothing](remote.md#secret), [other\n"
        "tensor-parallel sizes](remote.md#other-tensor-parallel-sizes) and [fp8](remote.md#codec-fp8). How\n"
        "many requests a prompt costs in each of them, by the size of a block:\n"
        "[scale.md](scale.md#requests-of-a-prompt).",
    ),
    "object_enabled": ("A bucket, as KVBM names it", ""),
    "host_offload_prefix_min_priority": ("Host memory, seldom needed", ""),
    "max_concurrent_transfers": ("Transfers", ""),
    "leader_worker_init_timeout_s": ("Leader and workers", ""),
    "metrics": ("Metrics, logs, events", ""),
}
"""By the field that a section begins with: its title, and what stands above its settings."""
_VARIABLE = re.compile(r"\b(?:DYN|KVBM|AWS)_[A-Z0-9_]+(?:=[\w:/]+)?")


def _settings() -> Iterator[str]:
    for key, info in KvbmSettings.model_fields.items():
        if key in SECTIONS:
            title, above = SECTIONS[key]
            yield from ("", f"### {title}", "")
            if above:
                yield from (above, "")
        yield from _item(_setting(key, info))


def _setting(key: str, info: FieldInfo) -> str:
    variable, extra = str(info.validation_alias), cast(Mapping[str, Any], info.json_schema_extra)
    parts = []
    if key != re.sub("^(DYN_)?KVBM_", "", variable).lower():
        parts.append(f"(key `{key}`)")
    parts.append(info.description or "")
    parts += [f"*{sentence}*" for sentence in limits_of(extra["later"], extra["only"])]
    said = _VARIABLE.sub(r"`\g<0>`", " ".join(parts))
    return f"**`{variable}={_shown(info.default)}`** {said}"


def _shown(default: object) -> str:
    if default is None:
        return ""
    if isinstance(default, bool):
        return str(default).lower()
    return f"{default:g}" if isinstance(default, float) else str(default)


# -------------------------------------------------------------------- engines' settings

ENGINES = {
    "vLLM": "kvbm_vllm.identity",
    "SGLang": "kvbm_sglang.identity",
    "TensorRT-LLM": "kvbm_trtllm.identity",
}
"""Each has ``TABLES``. Where environment variables count, it also has ``ENVIRONMENT_WORDS`` (which they are),
``IRRELEVANT_ENVIRONMENT`` and, where there are such, ``PROCESS_ONLY_ENVIRONMENT`` (name -> why).
"""
IN_NAME, NOT_IN_NAME = "In the name", "Not in the name"
THIS_PROCESS = "Blocks are of this process only"


def _identity() -> Iterator[str]:
    for engine, module_name in ENGINES.items():
        module = import_module(module_name)
        yield from (f"## {engine}, field by field", "")
        for table in module.TABLES:
            yield from (f"### {table.class_name}", "")
            yield from _grouped({name: _words(rule) for name, rule in table.rules.items()})
            yield ""
        environment = getattr(module, "ENVIRONMENT_WORDS", "")
        if environment:
            yield from (f"## {engine}, environment", "", environment, "")
            only_here = getattr(module, "PROCESS_ONLY_ENVIRONMENT", {})
            words = {name: Words(NOT_IN_NAME, why) for name, why in module.IRRELEVANT_ENVIRONMENT.items()}
            words |= {name: Words(THIS_PROCESS, why) for name, why in only_here.items()}
            yield from _grouped(words)
            yield ""


class Words(NamedTuple):
    """Of a field: whether it is in the name, why so, and what is to be said of this field alone."""

    answer: str
    why: str = ""
    note: str = ""


def _grouped(words: Mapping[str, Words]) -> Iterator[str]:
    """An item for each answer and reason: the names of its fields, with their notes."""
    for answer, why in sorted({(of.answer, of.why) for of in words.values()}):
        names = [
            f"`{name}`" + (f" ({of.note})" if of.note else "")
            for name, of in sorted(words.items())
            if (of.answer, of.why) == (answer, why)
        ]
        yield from _item(f"**{answer}**{f' ({why})' if why else ''}: {', '.join(names)}")


def _words(rule: Rule) -> Words:
    if isinstance(rule, InKey):
        return Words(IN_NAME, note=rule.note)
    if isinstance(rule, Nested):
        return Words(IN_NAME, note="field by field: " + ", ".join(table.class_name for table in rule.tables))
    if isinstance(rule, ThisProcessOnly):
        other = _words(rule.otherwise) if rule.otherwise is not None else Words(NOT_IN_NAME)
        rest = other.note or other.why
        return Words(f"{other.answer}, or {THIS_PROCESS.lower()}", rule.reason, rest and f"else {rest}")
    return Words(NOT_IN_NAME, rule.reason)


# -------------------------------------------------------------------- checks

CHECKS_OF_ENGINES = ("kvbm_vllm.doctor", "kvbm_sglang.doctor", "kvbm_trtllm.doctor")


def _checks() -> Iterator[str]:
    of_engines = [check for name in CHECKS_OF_ENGINES for check in import_module(name).CHECKS]
    for check in (*of_engines, *OWN):
        about = _VARIABLE.sub(r"`\g<0>`", check.about)
        yield from _item(f"**`{check.name}`**: {about}")


# -------------------------------------------------------------------- the command

COMMANDS_OF_ENGINES = {"serve-line": ("kvbm_vllm.serve_line", "serve_line")}
_NO_COMMAND = {"kvbm"}
"""Its help is this page's head, and what it has beside commands is typer's."""


def _commands() -> Iterator[str]:
    yield from _command("kvbm", typer.main.get_command(app))
    for name, (module, function) in COMMANDS_OF_ENGINES.items():
        alone = App(name=name, help="")
        alone.command(name)(getattr(import_module(module), function))
        yield from _command(f"kvbm {name}", typer.main.get_command(alone))


def _command(name: str, command: Any) -> Iterator[str]:
    below = getattr(command, "commands", {})
    if name not in _NO_COMMAND:
        names = "".join(f" {_argument(param)}" for param in command.params if not _is_option(param))
        yield from (f"## {name}", "")
        if not below:
            yield from (f"`{name}{names} [OPTIONS]`", "")
        for paragraph in (command.help or "").split("\n\n"):
            yield from (*_wrapped(" ".join(paragraph.split())), "")
        params = [param for param in command.params if not param.name.endswith("_completion")]
        for param in params:
            yield from _item(_parameter(param))
        if params:
            yield ""
    for word, one in below.items():
        yield from _command(f"{name} {word}", one)


def _is_option(param: Any) -> bool:
    return bool(param.opts[0].startswith("-"))


def _argument(param: Any) -> str:
    shown = param.metavar or param.name.upper()
    return shown if param.required or shown.startswith("[") else f"[{shown}]"


def _parameter(param: Any) -> str:
    name = ", ".join(param.opts) if _is_option(param) else _argument(param)
    if _is_option(param) and param.metavar:
        name += f" {param.metavar}"
    about = _VARIABLE.sub(r"`\g<0>`", param.help or "")
    if param.default not in (None, "", False, 0):
        about += f" *Default: {_shown(param.default)}.*"
    return f"**`{name}`** {about}"


# -------------------------------------------------------------------- models


def _families() -> Iterator[str]:
    yield from (*model_families.rows(), "")
    for text in model_families.details():
        yield from _item(text)


# -------------------------------------------------------------------- all

PAGES = {
    DOCS / "configuration.md": _settings,
    DOCS / "identity-fields.md": _identity,
    DOCS / "doctor.md": _checks,
    DOCS / "commands.md": _commands,
    DOCS / "hybrid.md": _families,
}


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if there were something")
    is_check = parser.parse_args(argv).check
    changed = False
    for page, lines in PAGES.items():
        before = page.read_text(encoding="utf-8")
        after = page_with(before, lines)
        changed |= before != after
        if not is_check:
            page.write_text(after, encoding="utf-8")
    return int(changed and is_check)


if __name__ == "__main__":
    sys.exit(main())
