"""kvbm plan and kvbm replay as they are typed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvbm_core.cli.main import app
from kvbm_core.replay.trace import read_trace, write_trace
from kvbm_core.sizing.load import Load
from tests.unit.test_replay import PROMPTS, trace_of
from tests.unit.test_sizing import LLAMA_8B, busy_trace

runner = CliRunner()
SIZES = ("--device", "2", "--host", "2x", "--disk", "none,2x", "--processes", "1")
GPU = ("--gpu", "l4", "--device-cache-gb", "10")


def run(*words: object) -> Result:
    return runner.invoke(app, [str(word) for word in words])


def line_of(result: Result) -> str:
    """Of a complaint; there is no other."""
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture
def small(tmp_path: Path) -> Path:
    write_trace(tmp_path / "small.jsonl", trace_of(PROMPTS))
    return tmp_path / "small.jsonl"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path / "model"


@pytest.fixture
def busy(tmp_path: Path) -> Path:
    write_trace(tmp_path / "busy.jsonl", busy_trace())
    return tmp_path / "busy.jsonl"


@pytest.fixture(params=[60, 80, 110, 200])
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("COLUMNS", str(request.param))
    return int(request.param)


def test_a_replay_is_a_table_at_every_width(small: Path, width: int) -> None:
    result = run("replay", small, *SIZES)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= width
    for word in ("filter", "all", "2x: 4", "2x: 8", "all that there is"):
        assert word in result.stdout
    assert ("written / read" in result.stdout) is (width == 200)
    assert "…" not in result.stdout


def test_a_replay_as_json_has_every_count(small: Path) -> None:
    result = run("replay", small, *SIZES, "--json")
    found = json.loads(result.stdout)
    assert [(row["host_blocks"], row["disk_blocks"], row["policy"]) for row in found["rows"]] == [
        (4, 0, "filter"),
        (4, 8, "filter"),
        (4, 8, "all"),
    ]
    assert found["rows"][2]["written_blocks"] == 10 and found["trace"]["requests"] == 9


def test_sizes_in_gigabytes_are_those_of_a_model(small: Path, model: Path) -> None:
    block_gb = 131072 * 512 / 1e9
    sizes = ("--device", f"{2.1 * block_gb}GB", "--host", f"{4.1 * block_gb}GB", "--disk", "none")
    found = json.loads(run("replay", small, *sizes, "--model", model, "--json", "--processes", "1").stdout)
    assert [(row["device_blocks"], row["host_blocks"]) for row in found["rows"]] == [(2, 4)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", "4GB"), "kvbm replay: 4GB: how many tokens that is depends on the model; give --model"),
        (("--host", "big"), "kvbm replay: 'big' is no size; write 80GB, 4x, 500000t"),
        (("--policy", "lru"), "kvbm replay: --policy lru: one of all, filter"),
        (("--model", "no/such"), "kvbm replay: --model no/such: neither a folder nor in the hub's cache"),
        (("--plot", "/dev/null/x.png"), "kvbm replay: /dev/null/x.png: the plot cannot be written"),
    ],
)
def test_what_a_replay_cannot_use_is_one_line(words: tuple[str, ...], said: str, small: Path) -> None:
    result = run("replay", small, *SIZES, *words)
    assert result.exit_code in (1, 2)
    assert result.stderr.splitlines()[-1].startswith(said)
    assert "Traceback" not in result.output


def test_traces_that_are_none(tmp_path: Path, model: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": []}\n{"times\n')
    for words in (("replay", bad), ("plan", bad, "--model", model)):
        assert line_of(run(*words)).startswith(f"{bad}: line 2: ")
    assert line_of(run("replay", tmp_path / "none")) == f"{tmp_path / 'none'}: No such file or directory"


def test_a_plan_is_a_table_with_lines_to_paste(busy: Path, model: Path, width: int) -> None:
    result = run("plan", busy, "--model", model, *GPU)
    assert result.exit_code == 0, result.output
    table = result.stdout[result.stdout.index("┏") : result.stdout.rindex("┘") + 1]
    assert max(map(len, table.splitlines())) <= width
    assert "128 KiB of KV per token, 10.0 GB on the device" in " ".join(result.stdout.split())
    assert re.search(r"^export DYN_KVBM_CPU_CACHE_GB=\d+$", result.stdout, re.MULTILINE)
    assert "→" in table and "…" not in table


def test_no_number_of_a_plan_is_cut_or_broken(model: Path, tmp_path: Path, width: int) -> None:
    """Long prompts, on a GPU that is fast with them: times with as many digits as they can have."""
    load = Load(users=20, turns=3, prompt_tokens=12_000, think_s=20, seconds=200)
    write_trace(busy := tmp_path / "t.jsonl", load.trace(256))
    result = run("plan", busy, "--model", model, "--gpu", "h100")
    assert result.exit_code == 0, result.output
    found = json.loads(run("plan", busy, "--model", model, "--gpu", "h100", "--json").stdout)
    spans = {"{better:.2g}-{worse:.2g}".format(**choice["ttft_p50_s"]) for choice in found["choices"]}
    assert max(map(len, spans)) >= len("0.23-0.45")
    assert "…" not in result.stdout and all(span in result.stdout for span in spans)
    assert max(map(len, result.stdout[result.stdout.index("┏") :].split("export")[0].splitlines())) <= width


def test_a_plan_as_json(busy: Path, model: Path) -> None:
    found = json.loads(run("plan", busy, "--model", model, *GPU, "--json").stdout)
    assert found["kv_bytes_per_token"] == 131072 and found["device_cache_gb"] == 10
    assert found["advice"] in found["choices"]
    assert found["advice"]["hit_rate"] > found["choices"][0]["hit_rate"]
    assert found["environment"][0].startswith("export DYN_KVBM_CPU_CACHE_GB=")


def test_what_a_plan_promises_the_leader_reaches(model: Path, tmp_path: Path) -> None:
    """By way of the command line alone: the sizes of a plan, replayed."""
    load = Load(users=12, turns=5, prompt_tokens=2500, think_s=20, seconds=150)
    write_trace(busy := tmp_path / "t.jsonl", load.trace(256))
    limits = ("--gpu", "l4", "--device-cache-gb", "2", "--max-host-gb", "5", "--max-disk-gb", "40")
    found = json.loads(run("plan", busy, "--model", model, *limits, "--json").stdout)
    tried = [choice for choice in found["choices"] if choice["host_gb"]]
    assert len(tried) >= 4
    for choice in tried[::4]:
        sizes = (choice["device_blocks"], choice["host_blocks"], choice["disk_blocks"] or "none")
        given = [word for pair in zip(("--device", "--host", "--disk"), sizes, strict=True) for word in pair]
        given += ["--policy", choice["disk_takes"] or "filter", "--processes", "1", "--json"]
        (row,) = json.loads(run("replay", busy, *given).stdout)["rows"]
        assert abs(row["hit_rate"] - choice["hit_rate"]) <= 0.02


def test_without_a_trace_a_load_is_made_up_and_can_be_kept(tmp_path: Path, model: Path) -> None:
    words = ("--users", "5", "--hours", "0.1", "--save-trace", tmp_path / "kept.jsonl")
    result = run("plan", "--model", model, "--gpu", "h100", *words)
    assert result.exit_code == 0, result.output
    assert "5 users" in " ".join(result.stdout.split())
    assert read_trace(tmp_path / "kept.jsonl").requests


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "kvbm plan: --model is missing"),
        (("--model", "{model}", "--gpu", "z80"), "kvbm plan: --gpu z80: not known; one of a10"),
        (("--model", "{model}", "--tp", "3"), "kvbm plan: --tp 3: the 8 KV heads cannot be split so"),
        (("--model", "{model}", "--weights-gb", "100"), "kvbm plan: the weights (100.0 GB) leave no room"),
        (("--model", "{model}", "--save-trace", "/dev/null/x"), "kvbm plan: /dev/null/x: Not a directory"),
        (("--model", "{model}", "--kv-dtype", "fp3"), "kvbm plan: --kv-dtype fp3: write auto"),
        (("--model", "{model}", "--device-cache-gb", "0"), "kvbm plan: 0.000 GB on the device hold no block"),
    ],
)
def test_what_a_plan_cannot_use_is_one_line(words: tuple[str, ...], said: str, model: Path) -> None:
    result = run("plan", *(word.format(model=model) for word in words), "--hours", "0.05")
    assert result.exit_code in (1, 2)
    (line,) = result.stderr.splitlines()
    assert line.startswith(said)


def test_pictures(small: Path, busy: Path, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for words in (("replay", small, *SIZES), ("plan", busy, "--model", model, *GPU)):
        picture = tmp_path / f"{words[0]}.png"
        assert run(*words, "--plot", picture).exit_code == 0
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_picture_is_one_line(
    small: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("plan", small, "--model", model, *GPU, "--plot", "x.png")
    assert result.exit_code == 1 and not result.stdout, "told before anything is computed"
    assert result.stderr.splitlines() == ["kvbm plan: --plot needs matplotlib: pip install matplotlib"]
    result = run("replay", small, *SIZES, "--plot", "x.png")
    assert not result.stdout
    assert result.exit_code == 1
    assert result.stderr.splitlines() == ["kvbm replay: --plot needs matplotlib: pip install matplotlib"]


def test_commands_start_without_matplotlib() -> None:
    program = "import sys, kvbm_core.cli.main; print('matplotlib' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "False"
