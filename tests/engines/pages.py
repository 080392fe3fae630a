"""What the pages tell a reader to run: the commands of their fenced blocks, one by one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from tests.engines import REPOSITORY

_BLOCK = re.compile(r"^([ -]*)```(\S*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHELL, PYTHON = "bash", "python"
SHOWN = ("", "text", "json", "yaml")
"""Languages of blocks that are no commands, but for lines that begin with ``$ ``."""


class Command(NamedTuple):
    """One command, or a whole program in Python, and where it stands."""

    page: str
    line: int
    block: int  # the line at which its block begins
    language: str
    text: str


def pages() -> list[str]:
    """All that a reader of the repository or of the site finds."""
    folders = (".", "docs", "examples", "deploy", "container", "compat", "benchmarks")
    found = {path for folder in folders[1:] for path in (REPOSITORY / folder).rglob("*.md")}
    found |= {*REPOSITORY.glob("*.md")} - {REPOSITORY / "CHANGELOG.md"}
    return sorted(path.relative_to(REPOSITORY).as_posix() for path in found if "results" not in path.parts)


@cache
def commands_of(page: str) -> list[Command]:
    """In the order of the page."""
    return list(commands_in(page, (REPOSITORY / page).read_text(encoding="utf-8")))


def commands_in(page: str, text: str) -> Iterator[Command]:
    """Those of a page with this text."""
    for start, language, inside in blocks_in(text):
        if language == PYTHON:
            yield Command(page, start, start, PYTHON, inside)
        elif language == SHELL:
            for number, command in _split(page, start, inside):
                yield Command(page, number, start, SHELL, command)
        else:
            assert language in SHOWN, f"{page}:{start}: a block of {language!r}; commands are in {SHELL!r}"
            for number, line in enumerate(inside.splitlines(), start):
                if line.startswith("$ "):
                    yield Command(page, number, start, SHELL, line[2:])


def blocks_in(text: str) -> Iterator[tuple[int, str, str]]:
    """First line, language and content of the fenced blocks of a page."""
    for block in _BLOCK.finditer(text):
        inside = re.sub(rf"^ {{{len(block[1])}}}", "", block[3], flags=re.MULTILINE)
        yield text.count("\n", 0, block.start(3)) + 1, block[2], inside


def _split(page: str, start: int, text: str) -> Iterator[tuple[int, str]]:
    """Commands as bash ends them: after quotes, here-documents and lines that go on."""
    open_lines: list[str] = []
    for number, line in enumerate(text.splitlines(), start):
        if not open_lines and (not line.strip() or line.startswith("#")):
            continue
        open_lines.append(line)
        command = "\n".join(open_lines)
        if _is_whole(command):
            yield number - len(open_lines) + 1, command
            open_lines = []
    assert not open_lines, f"{page}:{start}: bash cannot read this block: {open_lines[0]}"


def _is_whole(command: str) -> bool:
    if command.endswith("\\"):
        return False
    checked = subprocess.run(["bash", "-n"], input=command, capture_output=True, text=True, timeout=60)
    return not checked.returncode and not checked.stderr
