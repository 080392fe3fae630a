"""No command of the pages is forgotten: each is run by a test, or there is a reason why not."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest

from tests.engines import REPOSITORY
from tests.engines.pages import SHELL, blocks_in, commands_in
from tests.page_commands import PAGES, REASONS, TABLE, How, told

PROGRAM = re.compile(
    r"^(kvbm|pip|python3?|make|docker|kubectl|curl|export|vllm|deploy/.*|container/.*) ", re.M
)


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_run_or_has_a_reason(page: str) -> None:
    for command, how in told(page):
        assert how.place or how.why, command
        if how.why.startswith("tests/"):
            assert (REPOSITORY / how.why).is_file(), how.why


def test_how_many_are_run_is_told(tell: Callable[[str], None]) -> None:
    """The reasons of the others come from a short list; a test that sees a command is one of them."""
    hows = [how for page in PAGES for _, how in told(page)]
    reasons = Counter("seen by another test" if how.why.startswith("tests/") else how.why for how in hows)
    run = sum(how.place not in ("", "same") for how in hows)
    others = Counter({why: count for why, count in reasons.items() if why and why not in PAGES})
    assert others.keys() <= {"seen by another test", *(how.why for how in REASONS)}
    tell(
        f"{len(hows)} commands of the pages: {run} run; "
        + "; ".join(f"{count}: {why}" for why, count in others.most_common())
    )


def test_the_table_has_no_page_that_is_gone() -> None:
    assert [page for page in TABLE if page not in PAGES] == []


def test_what_runs_elsewhere_is_the_same_there() -> None:
    found = 0
    for page in PAGES:
        for command, how in told(page):
            if how.place == "same":
                there = {bare(one.text): other for one, other in told(how.why)}
                assert there[bare(command.text)].place not in ("", "same"), command
                found += 1
    assert found > 5


def bare(text: str) -> str:
    """Without what is said beside it."""
    return re.sub(r"\s+#.*$", "", text, flags=re.MULTILINE)


def test_what_pages_show_has_no_commands() -> None:
    """In a block without a language a command begins with a dollar, or is not found."""
    shown = defaultdict(list)
    for page in PAGES:
        text = (REPOSITORY / page).read_text(encoding="utf-8")
        for _, language, block in blocks_in(text):
            shown[page] += PROGRAM.findall(block) if language in ("", "text") else []
    # kvbm plan's answer, which is a line to copy.
    assert {page: words for page, words in shown.items() if words} == {"docs/sizing.md": ["export"]}


def test_commands_are_split_as_bash_does() -> None:
    page = """
```bash
# a remark
one --flag \\
  --more   # beside it
cat > file <<EOF
a: 1
EOF
two '{"a":
  1}'

ask() { curl; }
```

- ```bash
  three
  ```

```python
x = 1
```

```
$ four
its answer
```
"""
    found = [(command.line, command.language, command.text) for command in commands_in("page", page)]
    assert [text for *_, text in found] == [
        "one --flag \\\n  --more   # beside it",
        "cat > file <<EOF\na: 1\nEOF",
        "two '{\"a\":\n  1}'",
        "ask() { curl; }",
        "three",
        "x = 1\n",
        "four",
    ]
    assert [line for line, *_ in found] == [4, 6, 9, 12, 16, 20, 24]
    assert [language for _, language, _ in found].count(SHELL) == 6


def test_a_command_that_nobody_has_told_of_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "docs/why.md"
    for rows in (TABLE[page][:-1], TABLE[page][1:], [*TABLE[page], ("kvbm", How("home"))]):
        monkeypatch.setitem(TABLE, page, rows)
        with pytest.raises(AssertionError, match="page_commands"):
            told(page)
