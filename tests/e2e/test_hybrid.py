"""Models with states on real vLLM, and drafts: what the device cache forgot comes back, token for token, and
from the disk after a kill.

The yardstick is the same engine with a connector that does nothing, and with room for everything on its
device. A prompt is cut at the same tokens in both: the kernels of these models compute in bfloat16, and round
otherwise where a prompt is cut otherwise, or where a token is decoded in place of prefilled. So states are
kept at the end of each block (``EACH``), and what is compared with a prompt that kvbm brings back is the same
prompt with as much of it on the device. In the last round states come back as zeros, and KV as it was: were
answers still equal, the comparison would see no state.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.engine_child import answers, assert_bytes_equal, assert_nothing_left, cached, run_engine
from tests.engines.hybrid_model import HybridKind, build_eagle, build_hybrid

BLOCK = 32
LENGTHS = (700, 300, 65, 33)
ANSWER_TOKENS = 40  # over the end of a block at least
QUESTION_TOKENS = 40
EACH = {"prefix_cache_retention_interval": BLOCK}
PLUGINS = "tests.engines.vllm_plugins"
EMPTY = {
    "kv_connector": "EmptyConnector",
    "kv_role": "kv_both",
    "kv_connector_module_path": "tests.engines.empty_connector",
}

pytestmark = pytest.mark.timeout(900)


class Case(NamedTuple):
    """A model, and how to serve it."""

    model: Path
    llm: dict[str, Any]
    plugins: tuple[str, ...] = ()
    block: int = BLOCK
    has_kv: bool = True

    def job(self, rounds: list[dict[str, Any]], *, connector: bool, **more: Any) -> dict[str, Any]:
        """``connector``: kvbm, or one that does nothing."""
        llm: dict[str, Any] = {
            "block_size": BLOCK,
            "max_model_len": 2048,
            "dtype": "bfloat16",
            "num_gpu_blocks_override": 1000,
            "max_num_batched_tokens": 256,
            "enable_prefix_caching": True,
            **self.llm,
        }
        if not connector:
            llm["kv_transfer_config"] = EMPTY
        plugins = [f"{PLUGINS}:{name}" for name in self.plugins]
        job = {"model": str(self.model), "llm": llm, "connector": connector, "plugins": plugins}
        return {**job, "rounds": rounds, **more}


def conversation(rng: random.Random) -> list[dict[str, Any]]:
    """A first turn, the second, and the second once more after the device has forgotten it."""
    first = [[rng.randrange(3, 500) for _ in range(length)] for length in LENGTHS]
    more = [[rng.randrange(3, 500) for _ in range(QUESTION_TOKENS)] for _ in LENGTHS]
    second = {"prompts": more, "after": 0, "max_tokens": ANSWER_TOKENS}
    return [{"prompts": first, "max_tokens": ANSWER_TOKENS}, second, {**second, "resets": True}]


def second_turn(rounds: list[dict[str, Any]], served: dict[str, Any]) -> list[list[int]]:
    """Its prompts: what was asked, the answers, and what is asked now."""
    told = zip(rounds[0]["prompts"], answers(served, 0), rounds[1]["prompts"], strict=True)
    return [prompt + answer + question for prompt, answer, question in told]


def environment(tmp_path: Path) -> dict[str, str]:
    return {
        "DYN_KVBM_CPU_CACHE_GB": "0.1",
        "DYN_KVBM_DISK_CACHE_GB": "0.5",
        "DYN_KVBM_DISK_CACHE_DIR": str(tmp_path / "cache"),
        "KVBM_TEST_DISK_LEDGER": str(tmp_path / "ledger"),
        "KVBM_TEST_STAND_INS": str(tmp_path / "stand-ins"),
    }


def answered_blocks(prompts: list[list[int]], block: int) -> list[int]:
    """Up to where prompts of a second turn can be known: the last token of an answer was not computed."""
    return [(len(prompt) - QUESTION_TOKENS - 1) // block * block for prompt in prompts]


def whole_blocks(prompts: list[list[int]], block: int) -> list[int]:
    """Up to where prompts can be known that were asked before: one token is always computed."""
    return [(len(prompt) - 1) // block * block for prompt in prompts]


def assert_comes_back(case: Case, tmp_path: Path, rng: random.Random, ranks: int = 1) -> None:
    """After a reset of the device, and after a kill from the disk; a state that is lost is seen."""
    rounds, env = conversation(rng), environment(tmp_path)
    right = run_engine(tmp_path / "right", case.job(rounds[:2], connector=False), **env)
    found = run_engine(tmp_path / "found", case.job(rounds, connector=True, dies=True), **env)
    prompts = second_turn(rounds, right)
    assert cached(right, 1) == cached(found, 1) == answered_blocks(prompts, case.block)
    assert [answers(found, turn) for turn in (0, 1)] == [answers(right, turn) for turn in (0, 1)]
    ends = whole_blocks(prompts, case.block)
    assert cached(found, 2) == ends
    assert answers(found, 2) == answers(right, 1), "after the device has forgotten it"
    at_least = sum(ends) // case.block if case.has_kv else len(ends)
    assert_bytes_equal(found, ranks=ranks, at_least=at_least)
    assert min(counts["states"] for counts in found["bytes"]) >= len(prompts)

    second: dict[str, Any] = {"prompts": prompts, "max_tokens": ANSWER_TOKENS}
    rounds = [second] if ranks > 1 else [second, {**second, "resets": True, "loses_states": True}]
    again = run_engine(tmp_path / "again", case.job(rounds, connector=True), **env)
    assert cached(again, 0) == ends
    assert answers(again, 0) == answers(right, 1), "after a kill, from the disk"
    assert min(counts["read"] for counts in again["bytes"]) >= at_least
    assert_bytes_equal(again, ranks=ranks, at_least=at_least)
    if ranks == 1:
        assert cached(again, 1) == ends and again["bytes"][0]["states_lost"] >= len(prompts)
        pairs = zip(answers(again, 1), answers(right, 1), strict=True)
        assert all(lost != kept for lost, kept in pairs), "no state is seen by this comparison"
        assert_nothing_left(found)
        assert_nothing_left(again)


def has_avx512() -> bool:
    """Whether this processor can run the kernels of vLLM's gated delta net, which are for bfloat16 alone."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return any(line.startswith("flags") and " avx512f" in line for line in lines)


@pytest.fixture(scope="module")
def qwen3_next(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_hybrid(tmp_path_factory.mktemp("tiny") / "qwen3-next", "qwen3_next")


def test_states_come_back(qwen3_next: Path, tmp_path: Path, rng: random.Random) -> None:
    if not (has_avx512() and os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT") in ("DEFAULT", "ALL")):
        pytest.skip("NOT RUN: Qwen3-Next on a real vLLM: its kernel for bfloat16 needs AVX-512")
    assert_comes_back(Case(qwen3_next, EACH), tmp_path, rng)


@pytest.mark.nightly("three engines more for each; tests/vllm has states on vLLM's scheduler")
@pytest.mark.parametrize("kind", ["qwen3_5", "nemotron_h", "granite4", "falcon_h1", "mamba2"])
def test_states_of_other_families(kind: HybridKind, tmp_path: Path, rng: random.Random) -> None:
    plugin = "torchvision_stand_in" if kind == "qwen3_5" else "whole_prefill_states"
    block = 96 if kind == "granite4" else BLOCK  # its heads are as small as its hidden size says
    model = build_hybrid(tmp_path / kind, kind)
    kept = {"prefix_cache_retention_interval": block}
    assert_comes_back(Case(model, kept, (plugin,), block, kind != "mamba2"), tmp_path, rng)


@pytest.mark.nightly("three engines of two ranks; tests/vllm has states on vLLM's scheduler, with two ranks")
def test_states_of_two_ranks(qwen3_next: Path, tmp_path: Path, rng: random.Random) -> None:
    case = Case(qwen3_next, EACH | {"tensor_parallel_size": 2})
    assert_comes_back(case, tmp_path, rng, ranks=2)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
# The device then has as much of a prompt as kvbm has; else vLLM computes its last block again for the drafts.
WHOLE = {"disable_eagle_block_drop": True}


@pytest.mark.nightly("two or three engines for each; tests/vllm has drafts on vLLM's scheduler")
@pytest.mark.parametrize(
    ("target", "drafts"),
    [("qwen3", "ngram"), ("qwen3", "known"), ("qwen3", "eagle"), ("states", "known"), ("states", "mtp")],
)
def test_what_is_drafted_comes_back(
    target: str, drafts: str, tiny_model: Path, tmp_path: Path, rng: random.Random
) -> None:
    """Also blocks of answers, whose tokens were drafted, and rejected or not.

    The yardstick drafts the same: vLLM has no state at an end that drafts jumped over, and then computes
    a part of the answer again, which rounds otherwise. So in the last round it has as much on its device as
    kvbm brings.
    """
    model, speculative = tiny_model, NGRAM
    if target == "states":
        model = build_hybrid(tmp_path / "model", "qwen3_next", drafts=True)
    if drafts == "mtp":
        speculative = {"method": "mtp", "num_speculative_tokens": 2, **WHOLE}
    elif drafts == "eagle":
        eagle = str(build_eagle(tmp_path / "eagle", hidden=256))
        speculative = {"method": "eagle", "model": eagle, "num_speculative_tokens": 3, **WHOLE}
    plugins = ("drafts_over_states",) * (target == "states") + ("known_drafts",) * (drafts == "known")
    kept = EACH if target == "states" else {}
    case = Case(model, {"speculative_config": speculative, **kept}, plugins)
    rounds, env = conversation(rng), environment(tmp_path)
    if drafts == "known":
        told = run_engine(tmp_path / "told", case.job(rounds[:2], connector=False), **env)
        asked = [*rounds[0]["prompts"], *second_turn(rounds, told)]
        answered = [*answers(told, 0), *answers(told, 1)]
        known = [prompt + answer for prompt, answer in zip(asked, answered, strict=True)]
        env["KVBM_TEST_DRAFTS"] = str(tmp_path / "drafts")
        (tmp_path / "drafts").write_text(json.dumps(known))
    right = run_engine(tmp_path / "right", case.job([*rounds[:2], rounds[1]], connector=False), **env)
    lost = [{**rounds[2], "loses_states": True}] if target == "states" else []
    found = run_engine(tmp_path / "found", case.job([*rounds, *lost], connector=True), **env)
    prompts = second_turn(rounds, right)
    assert cached(found, 1) == cached(right, 1)
    if target == "qwen3":
        assert cached(found, 1) == answered_blocks(prompts, case.block)
    assert cached(found, 2) == cached(right, 2) == whole_blocks(prompts, case.block)
    assert [answers(found, turn) for turn in (0, 1)] == [answers(right, turn) for turn in (0, 1)]
    assert answers(found, 2) == answers(right, 2), "after the device has forgotten it"
    if lost:
        pairs = zip(answers(found, 3), answers(right, 2), strict=True)
        assert all(zeros != kept for zeros, kept in pairs), "no state is seen by this comparison"
    counts = found["metrics"]
    # What random weights say next is seldom what stands in the prompt.
    at_least = {"known": len(LENGTHS) * ANSWER_TOKENS // 2, "ngram": 0}.get(drafts, 1)
    assert counts["drafted"] > counts["accepted"] >= at_least
    assert_bytes_equal(found, ranks=1, at_least=sum(cached(found, 2)) // case.block)
    assert_nothing_left(found)
