"""Command lines by Dynamo's own parsers: what our scripts start, what docs/dynamo.md says to write, and what
the guides wrote, which Dynamo refuses. Nothing is served.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.conftest import DYNAMO_PYTHON
from tests.engines import REPOSITORY
from tests.engines.stand_ins import started_by

PAGE = (REPOSITORY / "docs" / "dynamo.md").read_text(encoding="utf-8")
PARSING = Path(__file__).with_name("parsing.py")
SCRIPTS = {"agg_kvbm.sh": 2, "disagg_kvbm.sh": 3, "disagg_kvbm_2p2d.sh": 5}
# What older guides write, and a part of what Dynamo says to it.
REFUSED = {
    "python -m dynamo.vllm --model MODEL --connector kvbm": "--connector is no longer supported",
    "DYN_CONNECTOR=kvbm python -m dynamo.vllm --model MODEL": "--connector is no longer supported",
    "python -m dynamo.vllm --model MODEL --is-prefill-worker --connector kvbm nixl": "--is-prefill-worker",
    "python -m dynamo.vllm --model MODEL --is-decode-worker --connector nixl": "--is-decode-worker",
    "python -m dynamo.vllm --model MODEL --connector none": "Simply remove the --connector flag",
    "python -m dynamo.vllm --model MODEL --disaggregation-mode prefill": "explicitly provide",
}
WRITTEN = {
    "--kv-transfer-config",
    "--kv-events-config",
    "--disaggregation-mode prefill",
    "--disaggregation-mode decode",
    "--router-mode kv",
}


def split(line: str, model: Path) -> tuple[list[str], dict[str, str]]:
    """A line of the page: module and arguments, and the variables before it."""
    words = shlex.split(line.replace("MODEL", str(model)))
    env = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        env[name] = value
    assert words[:2] == ["python", "-m"], line
    return words[2:], env


def answers_to(lines: Sequence[tuple[list[str], dict[str, str]]]) -> list[tuple[str | None, str | None]]:
    """What Dynamo says against each; where kvbm publishes its KV events."""
    env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as scratch:  # Dynamo's log settings stay there
        done = subprocess.run(
            [str(DYNAMO_PYTHON), str(PARSING)],
            input=json.dumps(lines),
            env={**os.environ, **env, "TMPDIR": scratch},
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    assert len(answers) == len(lines)
    return [(said, stream) for said, stream in answers]


def lines_of_the_page() -> Iterator[str]:
    """All that start one of Dynamo's processes for vLLM and are no example of what is refused."""
    for block in PAGE.split("```bash\n")[1:]:
        text = block.split("```")[0].replace("\\\n", " ")
        yield from (line.rstrip(" &") for line in text.splitlines() if line.startswith("python -m"))


@pytest.fixture(scope="module")
def started(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """[module, *arguments] of all that the scripts start."""
    found = []
    for name, count in SCRIPTS.items():
        folder = tmp_path_factory.mktemp("launch")
        script, arguments = f"dynamo/{name}", (str(tiny_model), "--enforce-eager")
        with started_by(script, *arguments, count=count, folder=folder) as (_, all_of):
            ports = [
                each.env[variable]
                for each in all_of
                if "dynamo.vllm" in each.argv
                for variable in ("DYN_SYSTEM_PORT", "DYN_KVBM_METRICS_PORT", "VLLM_NIXL_SIDE_CHANNEL_PORT")
            ]
            assert len(set(ports)) == len(ports), "two processes would bind one port"
            assert all(each.argv[:2] == ("python3", "-m") for each in all_of)
            found += [list(each.argv[2:]) for each in all_of]
    return found


def test_dynamo_takes_what_we_write_and_refuses_what_the_page_says(
    started: list[list[str]], tiny_model: Path
) -> None:
    ours = [(argv, {}) for argv in started] + [split(line, tiny_model) for line in lines_of_the_page()]
    old = [split(line, tiny_model) for line in REFUSED]
    answers = answers_to(ours + old)
    said_to = {shlex.join(argv): said for (argv, _), (said, _) in zip(ours, answers, strict=False)}
    assert not {line: said for line, said in said_to.items() if said is not None}
    for (line, expected), (said, _) in zip(REFUSED.items(), answers[len(ours) :], strict=True):
        assert said is not None and expected in said.replace("\n", " "), (line, said)
    # Whoever has kvbm has one stream of all events, and no two have the same.
    streams = [stream for _, stream in answers[: len(ours)]]
    with_kvbm = ["DynamoConnector" in shlex.join(argv) for argv, _ in ours]
    assert [stream is not None for stream in streams] == with_kvbm
    assert len({stream for stream in streams if stream}) == sum(with_kvbm) > 3


def test_the_page_has_them_all() -> None:
    assert [line for line in REFUSED if f"`{line}`" not in PAGE] == []
    assert [text for text in WRITTEN if text not in "\n".join(lines_of_the_page())] == []
