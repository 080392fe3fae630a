"""Sixteen clients at once, with shared and unique prompts and cancellations, on a real server.

Every answer is held against an engine without kvbm that is asked the same prompt alone. A batch rounds
otherwise than a prompt alone, so an answer given under load, or from blocks that were computed under load,
may leave the reference at a token where the reference's two best were practically equal, and nowhere else.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path

import pytest

from tests.e2e.engine_child import run_engine
from tests.engines.client import Answer, EngineClient
from tests.engines.vllm_server import ServerOptions, VllmServer

CLIENTS = 16
ASKED_EACH = 60
DOCUMENTS, DOCUMENT_TOKENS = 8, 900
QUESTIONS, QUESTION_TOKENS = 4, 60
UNIQUE_TOKENS = 400
ANSWER_TOKENS = 12
DEVICE_BLOCKS = (
    257  # of 32 tokens: less than sixteen prompts need, so that they queue and push each other out
)
HOST_CACHE_GB = 1.0
SHARE_UNIQUE, SHARE_CANCELLED = 0.15, 0.2
LONGEST_PATIENCE_S = 0.4
TIE_NATS = 0.01

Prompt = tuple[int, ...]

pytestmark = pytest.mark.timeout(900)


@dataclass
class Observed:
    """What the clients saw."""

    answers: dict[Prompt, list[tuple[int, ...]]] = field(default_factory=dict)
    cancelled: int = 0

    def add(self, prompt: Prompt, answer: Answer) -> None:
        """Note one finished answer."""
        self.answers.setdefault(prompt, []).append(answer.token_ids)


def tokens(number: int, length: int) -> Prompt:
    """Printable tokens of the tiny model, always the same for the same number."""
    draw = random.Random(number)
    return tuple(draw.randint(36, 129) for _ in range(length))


async def one_client(
    client: EngineClient, number: int, seed: int, fresh: Iterable[int], seen: Observed
) -> None:
    """Ask one after the other; some requests are dropped half way."""
    draw = random.Random(seed * CLIENTS + number)
    numbers = iter(fresh)
    for _ in range(ASKED_EACH):
        if draw.random() < SHARE_UNIQUE:
            prompt = tokens(next(numbers), UNIQUE_TOKENS)
        else:
            document, question = draw.randrange(DOCUMENTS), draw.randrange(QUESTIONS)
            prompt = tokens(document, DOCUMENT_TOKENS) + tokens(100 + question, QUESTION_TOKENS)
        asking = asyncio.create_task(client.complete(prompt, ANSWER_TOKENS))
        patience_s = draw.uniform(0, LONGEST_PATIENCE_S) if draw.random() < SHARE_CANCELLED else None
        done, _ = await asyncio.wait({asking}, timeout=patience_s)
        if done:
            seen.add(prompt, await asking)
        else:
            asking.cancel()
            await asyncio.wait({asking})
            seen.cancelled += 1


async def load(client: EngineClient, seed: int) -> Observed:
    """All clients at once."""
    seen = Observed()
    fresh = count(1000)
    await asyncio.gather(*(one_client(client, number, seed, fresh, seen) for number in range(CLIENTS)))
    return seen


async def ask_alone(client: EngineClient, prompts: Iterable[Prompt]) -> dict[Prompt, Answer]:
    """One prompt at a time."""
    return {prompt: await client.complete(prompt, ANSWER_TOKENS) for prompt in prompts}


def _is_idle(samples: dict[str, float]) -> bool:
    return samples["kvbm_pending_jobs"] == samples["kvbm_live_leases"] == 0


async def under_load(
    server: VllmServer, seed: int
) -> tuple[Observed, dict[Prompt, Answer], dict[str, float]]:
    """The load, then every prompt alone out of host memory; kvbm's samples at the end."""
    async with EngineClient(server.base_url, str(server.options.model), server.metrics_url) as client:
        seen = await load(client, seed)
        await client.kvbm_metrics_once(_is_idle)  # or what is asked first may not be there yet
        assert await client.reset_prefix_cache()
        before = await client.kvbm_metrics()
        alone = await ask_alone(client, seen.answers)
        idle = await client.kvbm_metrics_once(_is_idle)
        onboarded = idle["kvbm_onboard_blocks_h2d"] - before["kvbm_onboard_blocks_h2d"]
        documents = {prompt[:DOCUMENT_TOKENS] for prompt in alone if len(prompt) > DOCUMENT_TOKENS}
        assert onboarded >= len(documents) * (DOCUMENT_TOKENS // 32), "nothing came back after the load"
        return seen, alone, idle


@dataclass(frozen=True)
class Reference:
    """What a prompt's answer has to be, and by how many nats each of its tokens beat the second best."""

    token_ids: tuple[int, ...]
    margins: tuple[float, ...]


def reference_answers(
    options: ServerOptions, folder: Path, prompts: Iterable[Prompt]
) -> dict[Prompt, Reference]:
    """The same prompts alone on an engine without kvbm, each computed from its first token."""
    llm = {
        "block_size": options.block_size_tokens,
        "dtype": options.dtype,
        "enable_prefix_caching": False,
        "max_model_len": options.max_model_len_tokens,
        "max_num_batched_tokens": options.max_batched_tokens,
        "num_gpu_blocks_override": options.device_blocks,
    }
    asked = list(prompts)
    round_ = {"prompts": asked, "max_tokens": ANSWER_TOKENS, "margins": True}
    job = {"model": str(options.model), "llm": llm, "connector": False, "rounds": [round_]}
    (answers,) = run_engine(folder, job)["rounds"]
    assert not any(answer["cached_tokens"] for answer in answers)
    return {
        prompt: Reference(tuple(answer["tokens"]), tuple(answer["margins"]))
        for prompt, answer in zip(asked, answers, strict=True)
    }


def is_reference(token_ids: tuple[int, ...], reference: Reference) -> bool:
    """Whether the first token that differs, if any, is one that the reference chose by less than TIE_NATS."""
    pairs = zip(token_ids, reference.token_ids, strict=True)
    differing = (place for place, (ours, theirs) in enumerate(pairs) if ours != theirs)
    return all(reference.margins[place] < TIE_NATS for place in islice(differing, 1))


@pytest.mark.nightly("a server and an engine: two minutes; tests/vllm/test_scheduler_soak.py")
def test_sixteen_clients_at_once(tiny_model: Path, tmp_path: Path, seed: int) -> None:
    """Nothing wrong, nothing left over, nothing stuck."""
    options = ServerOptions(
        tiny_model, DEVICE_BLOCKS, HOST_CACHE_GB, max_model_len_tokens=2048, max_batched_tokens=2048
    )
    with VllmServer(options, tmp_path / "kvbm.log") as server:
        seen, alone, samples = asyncio.run(under_load(server, seed))
    assert server.processes() == []
    reference = reference_answers(options, tmp_path / "plain", seen.answers)

    wrong_alone = [prompt for prompt in alone if not is_reference(alone[prompt].token_ids, reference[prompt])]
    assert not wrong_alone, (
        f"{len(wrong_alone)} of {len(alone)} prompts are answered otherwise when asked alone"
    )
    given = [(prompt, token_ids) for prompt, all_ids in seen.answers.items() for token_ids in all_ids]
    wrong = [prompt for prompt, ids in given if not is_reference(ids, reference[prompt])]
    assert not wrong, f"{len(wrong)} of {len(given)} answers under load are wrong"

    assert len(given) > 2 * CLIENTS
    assert seen.cancelled > 0
    assert samples["kvbm_matched_tokens"] > 0
    left = {
        name: samples[name] for name in ("kvbm_pending_jobs", "kvbm_live_leases", "kvbm_guarded_errors_total")
    }
    assert set(left.values()) == {0.0}, left
    assert samples["kvbm_failures_total"] == 0, samples
