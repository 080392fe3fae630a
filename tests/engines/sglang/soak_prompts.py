"""The prompts of a soak, who asks for them, and what every answer must be."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import httpx

from tests.engines.sglang.engine import HICACHE, PAGE_TOKENS
from tests.engines.sglang.soak_server import ADMIN_KEY

ANSWER_TOKENS = 8
PREFIXES_TOKENS = (128, 256, 384, 512)
MIN_TOKENS, MAX_TOKENS = 200, 1000
FEWEST_PREFETCHED_TOKENS = 256  # SGLang's own default; shorter prompts do not ask kvbm
NUM_PROBES = 3
BYTE_TOKENS = (3, 259)  # of the tiny model's tokenizer
REQUEST_TIMEOUT_S = 60.0
IDLE_TIMEOUT_S = 30.0
STORAGE = "/hicache/storage-backend"
# What SGLang's bf16 rounds otherwise when it computes a prompt beside others, with kvbm or without: the tiny
# model's logits are from 8 to 16, where two neighbours in bf16 are 0.0625 apart, and a log-probability has
# moved by two steps.
ROUNDING = 0.125


def pool_of(seed: int, num_prompts: int) -> list[list[int]]:
    """Prompts in families that share a prefix, MIN_TOKENS to MAX_TOKENS long."""
    rng = random.Random(seed)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(*BYTE_TOKENS) for _ in range(number)]

    prefixes = [tokens(length) for length in PREFIXES_TOKENS]
    pool = []
    for number in range(num_prompts):
        prefix = prefixes[number % len(prefixes)]
        shortest = max(MIN_TOKENS, len(prefix) + PAGE_TOKENS)
        pool.append(prefix + tokens(rng.randint(shortest, MAX_TOKENS) - len(prefix)))
    return pool


@dataclass(frozen=True)
class Answer:
    """``cached``: prompt tokens that were not computed.

    ``runners_up``: at each position the next best token and how far its log-probability is behind; only if
    asked for.
    """

    tokens: list[int]
    logprobs: list[float]
    cached: int
    runners_up: list[tuple[int, float]]

    def divergence(self, other: Answer) -> int:
        """The first position with another token, or the number of tokens; what follows it has another
        prompt.
        """
        pairs = zip(self.tokens, other.tokens, strict=True)
        return next((at for at, (mine, theirs) in enumerate(pairs) if mine != theirs), len(self.tokens))

    def moved(self, other: Answer) -> float:
        """The largest difference of a log-probability up to the divergence."""
        pairs = list(zip(self.logprobs, other.logprobs, strict=True))[: self.divergence(other) + 1]
        return max(abs(mine - theirs) for mine, theirs in pairs)

    def is_rounded(self, other: Answer) -> bool:
        """Whether ``other``, to the same prompt computed beside others, is this one but for ROUNDING."""
        at = self.divergence(other)
        if at == len(self.tokens):
            return self.moved(other) <= ROUNDING
        runner_up, behind = self.runners_up[at]
        return self.moved(other) <= ROUNDING and other.tokens[at] == runner_up and behind <= ROUNDING


def runner_up(chosen: int, best: list[Any], second: list[Any]) -> tuple[int, float]:
    """The one of the two best (log-probability, token, text) that was not chosen; equals come in any
    order.
    """
    return (best if second[1] == chosen else second)[1], best[0] - second[0]


@dataclass
class Tally:
    """What the answers and requests of a soak came to. ``complaints``: each with how often it was heard."""

    answers: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    other_last_bits: int = 0
    near_ties: int = 0
    largest_difference: float = 0.0
    complaints: Counter[str] = field(default_factory=Counter)


class Askers:
    """Clients of one server; an async context manager for one event loop.

    Whatever goes wrong is a complaint in ``tally``, and the soak goes on.
    """

    def __init__(self, base_url: str, pool: list[list[int]], seed: int) -> None:
        self.tally = Tally()
        self.is_detached = False
        self._pool = pool
        self._rng = random.Random(seed)
        self._first: list[Answer] = []
        # Log-probabilities of a prompt asked alone, by its cached tokens: all new, and with all whole pages
        # there.
        self._alone: list[dict[int, list[float]]] = []
        self._probes = _probes(pool)
        self._http = httpx.AsyncClient(
            base_url=base_url,
            timeout=REQUEST_TIMEOUT_S,
            # The server ends a connection that was idle for 5 s, also one that a late client just writes to.
            limits=httpx.Limits(max_keepalive_connections=0),
            trust_env=False,
            headers={"Authorization": f"Bearer {ADMIN_KEY}"},
        )

    async def __aenter__(self) -> Askers:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def learn(self) -> None:
        """Each prompt's first answer, cold and alone, and again from the device; kvbm is detached
        meanwhile.
        """
        await self.flush()
        await self.detach()
        for number, prompt in enumerate(self._pool):
            own = {"extra_key": f"first {number}"}  # nobody else's prefix
            cold, again = [await self._ask(prompt, top_logprobs_num=2, **own) for _ in range(2)]
            if cold.cached or again.cached != _whole_pages(prompt) or cold.tokens != again.tokens:
                self.tally.complaints["SGLang alone does not answer a prompt twice the same"] += 1
            self._first.append(cold)
            self._alone.append({answer.cached: answer.logprobs for answer in (cold, again)})
        await self.attach()
        await self.flush()

    async def play(self, num_clients: int, seconds: float, fewest_prompts: int) -> None:
        """All clients at once, each one prompt after the other; no fewer than ``fewest_prompts`` of each."""
        ends_at_s = time.monotonic() + seconds
        rngs = [random.Random(self._rng.random()) for _ in range(num_clients)]
        await asyncio.gather(*(self._play_one(rng, ends_at_s, fewest_prompts) for rng in rngs))

    async def probe(self, *, is_stored: bool, when: str) -> None:
        """Some prompts, alone: all of their whole pages are to come from kvbm, or none."""
        for number in self._probes:
            prompt = self._pool[number]
            answer = await self._checked(number, when)
            if answer is None:
                continue
            expected = _whole_pages(prompt) if is_stored else 0
            if answer.cached != expected:
                self._complain(f"{when}: prompt {number} had {answer.cached} cached tokens, not {expected}")
            elif answer.logprobs != self._alone[number][expected]:
                self._complain(f"{when}: prompt {number}, asked alone, has other log-probabilities")

    async def flush(self) -> None:
        """Waits until the server is idle, and empties SGLang's own tiers."""
        await self._admin("POST", "/flush_cache", params={"timeout": IDLE_TIMEOUT_S})

    async def clear(self) -> None:
        """Empties kvbm's file."""
        await self._admin("POST", f"{STORAGE}/clear")

    async def detach(self) -> None:
        """Closes kvbm."""
        await self._admin("DELETE", STORAGE)
        self.is_detached = True

    async def attach(self) -> None:
        """Opens kvbm with the settings of the start."""
        named = {
            "hicache_storage_backend": "hicache_storage_backend",
            "hicache_storage_backend_extra_config_json": "hicache_storage_backend_extra_config",
            "hicache_storage_prefetch_policy": "hicache_storage_prefetch_policy",
            "hicache_write_policy": "hicache_write_policy",
        }
        self.is_detached = False
        await self._admin("PUT", STORAGE, json={field: HICACHE[name] for field, name in named.items()})

    # ---------------------------------------------------------------- inside

    async def _play_one(self, rng: random.Random, ends_at_s: float, fewest_prompts: int) -> None:
        num_asked = 0
        while num_asked < fewest_prompts or time.monotonic() < ends_at_s:
            number = rng.randrange(len(self._pool))
            await self._checked(number, "clients together")
            num_asked += 1

    async def _checked(self, number: int, when: str) -> Answer | None:
        prompt = self._pool[number]
        try:
            answer = await self._ask(prompt)
        except (httpx.HTTPError, KeyError, ValueError) as error:
            self._complain(f"{when}: {error!r}")
            return None
        self.tally.answers += 1
        self.tally.prompt_tokens += len(prompt)
        self.tally.cached_tokens += answer.cached
        first, tally = self._first[number], self.tally
        tally.other_last_bits += answer.logprobs != first.logprobs
        tally.near_ties += answer.tokens != first.tokens
        tally.largest_difference = max(tally.largest_difference, first.moved(answer))
        if not first.is_rounded(answer):
            self._complain(f"{when}: prompt {number} was answered otherwise than at first")
        return answer

    async def _ask(self, prompt: list[int], **more: object) -> Answer:
        sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, **more}
        response = await self._http.post("/generate", json=body)
        if response.status_code != httpx.codes.OK:
            raise httpx.HTTPStatusError(_brief(response), request=response.request, response=response)
        meta: dict[str, Any] = response.json()["meta_info"]
        pairs = meta["output_token_logprobs"]
        tokens, logprobs = [token for _, token, _ in pairs], [logprob for logprob, _, _ in pairs]
        # Nothing unless asked for.
        tops = zip(tokens, meta.get("output_top_logprobs") or (), strict=False)
        return Answer(
            tokens, logprobs, meta["cached_tokens"], [runner_up(token, *top) for token, top in tops]
        )

    async def _admin(self, method: str, path: str, **more: Any) -> None:
        try:
            response = await self._http.request(method, path, **more)
            if response.status_code != httpx.codes.OK:
                self._complain(f"{method} {path}: {_brief(response)}")
        except httpx.HTTPError as error:
            self._complain(f"{method} {path}: {error!r}")

    def _complain(self, what: str) -> None:
        self.tally.complaints[what] += 1


def _whole_pages(prompt: list[int]) -> int:
    """Tokens of a prompt that can come from a cache: at least one must be computed."""
    return (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS


def _probes(pool: list[list[int]]) -> list[int]:
    """One prompt of each of some families, long enough to be asked of kvbm."""
    found: dict[int, int] = {}
    for number, prompt in enumerate(pool):
        if _whole_pages(prompt) >= FEWEST_PREFETCHED_TOKENS:
            found.setdefault(number % len(PREFIXES_TOKENS), number)
    return list(found.values())[:NUM_PROBES]


def _brief(response: httpx.Response) -> str:
    return f"status {response.status_code}: {json.dumps(response.text[:300])}"
