"""Writes the tables of docs/identity.md from the code: which setting of an engine is in the name of a block.

python -m deploy.identity_doc          # from the repository's root; no engine need be installed
python -m deploy.identity_doc --check  # exit status 1 if the page is not as this would write it
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path

from kvbm_core.identity.fields import ConfigTable, InKey, Nested, Rule, ThisProcessOnly

PAGE = Path(__file__).resolve().parents[1] / "docs" / "identity.md"
MARK = "<!-- From here on written by `python -m deploy.identity_doc`. -->"
ENGINES = {
    "vLLM": "kvbm_vllm.identity",
    "SGLang": "kvbm_sglang.identity",
    "TensorRT-LLM": "kvbm_trtllm.identity",
}
"""Each has ``TABLES``. Where environment variables count, it also has ``ENVIRONMENT_WORDS`` (which they are),
``IRRELEVANT_ENVIRONMENT`` and, where there are such, ``PROCESS_ONLY_ENVIRONMENT`` (name -> why).
"""


def page_with(text: str) -> str:
    """``text`` with everything below the mark written anew. ValueError without a mark."""
    head, mark, _ = text.partition(MARK)
    if not mark:
        raise ValueError(f"{PAGE} has no line {MARK}")
    return head + mark + "\n\n" + "\n".join(_all_lines()).rstrip() + "\n"


def _all_lines() -> Iterator[str]:
    for engine, module_name in ENGINES.items():
        module = import_module(module_name)
        yield from (f"## {engine}, field by field", "")
        yield from ("| configuration | field | in the name | |", "|---|---|---|---|")
        for table in module.TABLES:
            yield from _rows(table)
        yield ""
        environment = getattr(module, "ENVIRONMENT_WORDS", "")
        if environment:
            yield from (f"## {engine}, environment", "", environment, "")
            yield from ("| variable | in the name | |", "|---|---|---|")
            yield from _rows_of_variables(module.IRRELEVANT_ENVIRONMENT, "no")
            yield from _rows_of_variables(
                getattr(module, "PROCESS_ONLY_ENVIRONMENT", {}), "this process only"
            )
            yield ""


def _rows(table: ConfigTable) -> Iterator[str]:
    for name, rule in sorted(table.rules.items()):
        answer, note = _words(rule)
        yield f"| {table.class_name} | `{name}` | {answer} | {note} |"


def _words(rule: Rule) -> tuple[str, str]:
    if isinstance(rule, InKey):
        return "yes", rule.note
    if isinstance(rule, Nested):
        return "yes", "field by field: " + ", ".join(table.class_name for table in rule.tables)
    if isinstance(rule, ThisProcessOnly):
        otherwise, note = _words(rule.otherwise) if rule.otherwise is not None else ("no", "")
        return (
            f"{otherwise}, or this process only",
            f"this process only: {rule.reason}{note and '; else '}{note}",
        )
    return "no", rule.reason


def _rows_of_variables(reasons: Mapping[str, str], answer: str) -> Iterator[str]:
    for reason in sorted(set(reasons.values())):
        names = sorted(name for name, why in reasons.items() if why == reason)
        yield f"| {', '.join(f'`{name}`' for name in names)} | {answer} | {reason} |"


def main(argv: list[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if there were something")
    options = parser.parse_args(argv)
    before = PAGE.read_text(encoding="utf-8")
    after = page_with(before)
    if options.check:
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
