"""docs/configuration.md says all of each setting, docs/identity-fields.md what the code does with each field
of an engine's configuration, docs/doctor.md what each check looks at, and docs/commands.md what each command
takes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deploy import pages
from kvbm_core.config import KvbmSettings
from kvbm_core.identity.fields import ConfigTable, InKey, Irrelevant, Nested, ThisProcessOnly
from tests.unit.doctor_bench import CHECKS

ROOT = Path(__file__).resolve().parents[2]
SETTINGS, IDENTITY, DOCTOR, COMMANDS, HYBRID = pages.PAGES
TEXTS = {page: page.read_text(encoding="utf-8") for page in pages.PAGES}


@pytest.mark.parametrize("page", pages.PAGES, ids=lambda page: page.name)
def test_the_page_is_as_the_code_would_write_it(page: Path) -> None:
    assert pages.page_with(TEXTS[page], pages.PAGES[page]) == TEXTS[page], "run python -m deploy.pages"


def test_what_is_changed_by_hand_is_written_anew() -> None:
    text = TEXTS[IDENTITY]
    assert "`hf_text_config` (as vLLM computes with it" in text and " `download_dir`," in text
    changed = text.replace(" `download_dir`,", "")
    assert pages.page_with(changed, pages.PAGES[IDENTITY]) == text
    with pytest.raises(ValueError, match="no line"):
        pages.page_with("words", pages.PAGES[IDENTITY])


def test_every_setting_is_there_with_its_default_and_who_heeds_it() -> None:
    text = " ".join(TEXTS[SETTINGS].partition(pages.MARK)[2].split())
    for variable in KvbmSettings.env_names().values():
        assert text.count(f"**`{variable}=") == 1
    for item in (
        "**`KVBM_DISK_DEADLINE_S=10`** A read or write of the disk that takes longer is given up.",
        "**`DYN_LOG=info`** (key `log_level`) Log level of kvbm",
        "**`DYN_KVBM_METRICS=false`** Serve Prometheus metrics.",
        "**`DYN_KVBM_NCCL_MAX_CTAS=`** Limit of NCCL's CTAs",
        "the same as `KVBM_REMOTE_URL=s3://BUCKET`.",
        "*No effect: kvbm needs no kernel file.*",
        "in KV events. *Only vLLM, TensorRT-LLM and SGLang's linker.*",
        "### Transfers * **`DYN_KVBM_MAX_CONCURRENT_TRANSFERS=4`** Transfers in flight at once between a "
        "rank's GPU and host memory, both ways together; a KV cache in CPU memory: always one. *Only vLLM, "
        "TensorRT-LLM and SGLang's linker.*",
    ):
        assert item in text


def test_every_check_is_there() -> None:
    text = TEXTS[DOCTOR].partition(pages.MARK)[2]
    for name in CHECKS:
        assert text.count(f"* **`{name}`**: ") == 1


def test_every_command_is_there_with_what_it_takes() -> None:
    text = TEXTS[COMMANDS].partition(pages.MARK)[2]
    for command in ("doctor", "why", "disk inspect", "remote sweep", "fleet reset", "serve-line"):
        assert text.count(f"\n## kvbm {command}\n") == 1
    assert "`kvbm remote ls URL [OPTIONS]`" in text
    assert "* **`--last`** How many requests. *Default: 20.*" in text
    assert "completion" not in text and "\n\n\n" not in text


def test_an_item_for_each_kind_of_rule() -> None:
    below = ConfigTable("Below", {})
    rules = {
        "a": InKey(note="as it is"),
        "b": Irrelevant("why"),
        "c": Nested((below,)),
        "d": ThisProcessOnly("because", otherwise=InKey(note="the rest")),
        "e": ThisProcessOnly("because"),
        "f": ThisProcessOnly("because", otherwise=Irrelevant("why")),
        "g": InKey(),
        "h": Irrelevant("why"),
    }
    words = {name: pages._words(rule) for name, rule in rules.items()}
    assert list(pages._grouped(words)) == [
        "* **In the name**: `a` (as it is), `c` (field by field: Below), `g`",
        "* **In the name, or blocks are of this process only** (because): `d` (else the rest)",
        "* **Not in the name** (why): `b`, `h`",
        "* **Not in the name, or blocks are of this process only** (because): `e`, `f` (else why)",
    ]


@pytest.mark.parametrize("module", pages.ENGINES.values())
def test_tables_are_read_without_the_engine(module: str) -> None:
    engines = {"vllm", "sglang", "tensorrt_llm", "torch"}
    code = f"import sys, {module}; assert not {engines} & set(sys.modules)"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_check_says_whether_pages_are_as_they_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = {tmp_path / page.name: lines for page, lines in pages.PAGES.items()}
    for page in pages.PAGES:
        (tmp_path / page.name).write_text(TEXTS[page], encoding="utf-8")
    monkeypatch.setattr(pages, "PAGES", copies)
    assert pages.main(["--check"]) == 0
    for copy in copies:
        copy.write_text(copy.read_text(encoding="utf-8") + "more\n", encoding="utf-8")
        assert pages.main(["--check"]) == 1
        assert pages.main([]) == 0
        assert pages.main(["--check"]) == 0
