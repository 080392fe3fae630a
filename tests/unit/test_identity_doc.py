"""docs/identity.md says of every field what the code does with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy import identity_doc
from kvbm_core.identity.fields import ConfigTable, InKey, Irrelevant, Nested, ThisProcessOnly

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_as_the_code_would_write_it() -> None:
    text = identity_doc.PAGE.read_text(encoding="utf-8")
    assert identity_doc.page_with(text) == text, "run python -m deploy.identity_doc"


def test_another_rule_makes_another_page() -> None:
    text = identity_doc.PAGE.read_text(encoding="utf-8")
    assert "| LoadConfig | `download_dir` | no |" in text
    assert "| ModelConfig | `hf_config` | yes | as vLLM computes with it" in text
    assert identity_doc.page_with(text.replace("`download_dir` | no", "`download_dir` | yes")) == text
    with pytest.raises(ValueError, match="no line"):
        identity_doc.page_with("words")


def test_a_row_for_each_kind_of_rule() -> None:
    below = ConfigTable("Below", {})
    table = ConfigTable(
        "Config",
        {
            "a": InKey(note="as it is"),
            "b": Irrelevant("why"),
            "c": Nested((below,)),
            "d": ThisProcessOnly("because", otherwise=InKey(note="the rest")),
            "e": ThisProcessOnly("because"),
        },
    )
    assert list(identity_doc._rows(table)) == [
        "| Config | `a` | yes | as it is |",
        "| Config | `b` | no | why |",
        "| Config | `c` | yes | field by field: Below |",
        "| Config | `d` | yes, or this process only | this process only: because; else the rest |",
        "| Config | `e` | no, or this process only | this process only: because |",
    ]


@pytest.mark.parametrize("module", identity_doc.ENGINES.values())
def test_tables_are_read_without_the_engine(module: str) -> None:
    engines = {"vllm", "sglang", "tensorrt_llm", "torch"}
    code = f"import sys, {module}; assert not {engines} & set(sys.modules)"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_check_says_whether_the_page_is_as_it_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "identity.md"
    page.write_text(identity_doc.PAGE.read_text(encoding="utf-8") + "more\n", encoding="utf-8")
    monkeypatch.setattr(identity_doc, "PAGE", page)
    assert identity_doc.main(["--check"]) == 1
    assert identity_doc.main([]) == 0
    assert identity_doc.main(["--check"]) == 0
