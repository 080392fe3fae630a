"""A streaming client of the OpenAI endpoints that measures, and a reader of both metrics endpoints."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

REQUEST_TIMEOUT_S = 120.0
SETTLE_TIMEOUT_S = 60.0
POLL_S = 0.05
SAMPLE = re.compile(r"^(?P<name>[A-Za-z_:][\w:]*)(?:\{.*\})? (?P<value>\S+)", re.MULTILINE)
AUDITED = re.compile(
    r'^kvbm_audited_blocks_total\{.*result="(?P<result>\w+)".*\} (?P<blocks>\S+)', re.MULTILINE
)

Message = dict[str, str]


@dataclass(frozen=True)
class Answer:
    """One finished answer. Times are seconds from sending the request, as the client saw them."""

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    ttft_s: float
    total_s: float


@dataclass(frozen=True)
class CacheCounts:
    """What a prompt did not have to compute: tokens found on the device, and tokens and blocks kvbm brought
    back.

    ``disk_blocks``: those of them that came from the disk.
    """

    device_tokens: int
    kvbm_tokens: int
    onboarded_blocks: int
    disk_blocks: int = 0

    def since(self, earlier: CacheCounts) -> CacheCounts:
        """The difference to an earlier reading."""
        return CacheCounts(
            self.device_tokens - earlier.device_tokens,
            self.kvbm_tokens - earlier.kvbm_tokens,
            self.onboarded_blocks - earlier.onboarded_blocks,
            self.disk_blocks - earlier.disk_blocks,
        )


@dataclass(frozen=True)
class Audits:
    """Blocks that were computed again to be compared, by what came of it."""

    equal: int
    wrong: int
    not_compared: int


class EngineClient:
    """Talks to one server; an async context manager. Greedy, and never stopped by an end token."""

    def __init__(
        self,
        base_url: str,
        model: str,
        metrics_url: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._model = model
        self._metrics_url = metrics_url
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers=headers,
            timeout=REQUEST_TIMEOUT_S,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def complete(self, prompt: Sequence[int] | str, max_tokens: int, **fields: object) -> Answer:
        """POST /v1/completions with text or token ids; ``fields`` are further fields of the request."""
        body = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        return await self._ask("/v1/completions", body, max_tokens, fields)

    async def complete_batch(
        self, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[tuple[int, ...]]:
        """Prompts that come in one request, and so reach the engine together: the tokens of each one's
        answer.
        """
        request = self._request({"prompt": [list(prompt) for prompt in prompts]}, max_tokens) | {
            "stream": False
        }
        response = await self._http.post("/v1/completions", json=request)
        choices = sorted(
            response.raise_for_status().json()["choices"], key=lambda choice: int(choice["index"])
        )
        return [tuple(choice["token_ids"]) for choice in choices]

    async def chat(self, messages: Sequence[Message], max_tokens: int, **fields: object) -> Answer:
        """POST /v1/chat/completions; ``fields`` are further fields of the request."""
        return await self._ask("/v1/chat/completions", {"messages": list(messages)}, max_tokens, fields)

    def _request(self, body: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        return {
            **body,
            "model": self._model,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    async def _ask(
        self, path: str, body: dict[str, Any], max_tokens: int, fields: Mapping[str, object]
    ) -> Answer:
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        request = {**self._request(body, max_tokens), **streamed, **fields}
        sent_s = time.perf_counter()
        ttft_s, prompt_tokens = 0.0, 0
        text: list[str] = []
        token_ids: list[int] = []
        async for chunk in self._stream(path, request):
            prompt_tokens = (chunk.get("usage") or {}).get("prompt_tokens", prompt_tokens)
            for choice in chunk["choices"]:
                text.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
                token_ids += choice.get("token_ids") or []
            if token_ids and not ttft_s:
                ttft_s = time.perf_counter() - sent_s
        total_s = time.perf_counter() - sent_s
        return Answer("".join(text), tuple(token_ids), prompt_tokens, ttft_s, total_s)

    async def _stream(self, path: str, request: Mapping[str, object]) -> AsyncIterator[dict[str, Any]]:
        async with self._http.stream("POST", path, json=request) as response:
            if response.status_code != httpx.codes.OK:
                detail = (await response.aread()).decode(errors="replace")
                raise httpx.HTTPStatusError(detail, request=response.request, response=response)
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise httpx.StreamError(str(chunk["error"]))
                    yield chunk

    async def reset_prefix_cache(self, *, with_kvbm: bool = False) -> bool:
        """Empty the device cache, and kvbm's tiers too if asked.

        Tries again for a while, as vLLM refuses while blocks are in use; False if it never agreed.
        """
        parameters = {"reset_external": with_kvbm}
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while time.monotonic() < deadline_s:
            response = await self._http.post("/reset_prefix_cache", params=parameters)
            if response.raise_for_status().json()["success"]:
                return True
            await asyncio.sleep(POLL_S)
        return False

    async def engine_metrics(self) -> dict[str, float]:
        """vLLM's own samples by name."""
        return parse_metrics((await self._http.get("/metrics")).raise_for_status().text)

    async def kvbm_metrics(self) -> dict[str, float]:
        """kvbm's samples by name; empty when the server runs without kvbm."""
        if self._metrics_url is None:
            return {}
        return parse_metrics((await self._http.get(self._metrics_url)).raise_for_status().text)

    async def audits(self) -> Audits:
        """What kvbm's audits have found so far; of the last request the engine may not have said it yet."""
        text = "" if self._metrics_url is None else (await self._http.get(self._metrics_url)).text
        return read_audits(text)

    async def kvbm_metrics_once(self, reached: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """kvbm's samples as soon as they fulfil ``reached``: an answer does not wait for its offloads.

        After SETTLE_TIMEOUT_S they are returned as they are.
        """
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        samples = await self.kvbm_metrics()
        while not reached(samples) and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S)
            samples = await self.kvbm_metrics()
        return samples

    async def cache_counts(self) -> CacheCounts:
        """Counters of both endpoints at this moment; device tokens as vLLM counts its prefix cache hits."""
        engine, kvbm = await self.engine_metrics(), await self.kvbm_metrics()
        from_disk = int(kvbm.get("kvbm_onboard_blocks_d2d", 0))
        return CacheCounts(
            device_tokens=int(engine.get("vllm:prefix_cache_hits_total", 0)),
            kvbm_tokens=int(kvbm.get("kvbm_matched_tokens", 0)),
            onboarded_blocks=int(kvbm.get("kvbm_onboard_blocks_h2d", 0)) + from_disk,
            disk_blocks=from_disk,
        )


def read_audits(text: str) -> Audits:
    """What kvbm's page of metrics says of them."""
    found = {match["result"]: int(float(match["blocks"])) for match in AUDITED.finditer(text)}
    return Audits(*(found.get(result, 0) for result in ("equal", "wrong", "not_compared")))


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as sample name -> value, names as written, summed over labels, without buckets."""
    totals: dict[str, float] = {}
    for match in SAMPLE.finditer(text):
        name = match["name"]
        if not name.endswith("_bucket"):
            totals[name] = totals.get(name, 0.0) + float(match["value"])
    return totals
