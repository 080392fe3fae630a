#!/usr/bin/env python3
"""One address before vLLM's prefill and decode workers with NixlConnector.

    python3 deploy/launch/pd_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200

vLLM has such a proxy among its tests and ships none. A prefill worker computes a request's prompt; then the
request goes to a decode worker, with what the first one said about where its KV is. Workers of a kind take
turns, but requests of one session (the header X-Session-ID, or the body's "user") have the same prefill
worker, where kvbm has their earlier turns. A worker that fails, or answers no /health for --stall-timeout
seconds while it has requests, is passed over for a while; without any prefill worker the decode workers
compute prompts too. A request that ends in the middle of its answer is not repeated.

Requests for more than one answer (several prompts, n, best_of, beams) are computed by a decode worker: vLLM
hands over one prompt, once. It is a small proxy for a trusted network, without TLS;
Dynamo's frontend does more.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import logging
import sys
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web

log = logging.getLogger("pd_proxy")

MAX_REQUEST_BYTES = 256 << 20
CONNECT_TIMEOUT_S = 5.0
PREFILL_TIMEOUT_S = 300.0
HEALTH_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 30.0
AWAY_S = 10.0
FAILURES = (ClientError, asyncio.TimeoutError, ValueError, RecursionError)  # of a worker
ONE_TOKEN = {"max_tokens": 1, "stream": False}
NOT_FOR_PREFILL = ("stream_options", "min_tokens", "max_completion_tokens")
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
PASSED_ON = ("authorization", "x-request-id")  # of a request's headers
COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
Body = dict[str, Any]
T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="One address before vLLM's prefill and decode workers.")
    parser.add_argument("--prefill", action="append", required=True, metavar="URL", help="may be repeated")
    parser.add_argument("--decode", action="append", required=True, metavar="URL", help="may be repeated")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--stall-timeout", type=float, default=STALL_TIMEOUT_S, metavar="SECONDS")
    options = parser.parse_args(argv)
    for url in (*options.prefill, *options.decode):
        if not _is_base_url(url):
            parser.error(f"{url!r} is no address of a worker, such as http://127.0.0.1:8100")
    if not 0.1 <= options.stall_timeout <= 3600:
        parser.error(f"--stall-timeout {options.stall_timeout}: 0.1 to 3600 seconds")
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s pd_proxy: %(message)s")
    app = Proxy(options.prefill, options.decode, options.stall_timeout).application()
    try:
        # A client that goes away ends its request at the workers, too.
        web.run_app(app, host=options.host, port=options.port, handler_cancellation=True, access_log=None)
    except OSError as error:
        log.error("cannot listen at %s:%d: %s", options.host, options.port, error.strerror)
        return 1
    return 0


def _is_base_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


class StalledError(ClientError):
    """A worker answers no /health any more."""


class Worker:
    """A server behind the proxy."""

    def __init__(self, url: str, stall_timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self._away_until_s = 0.0
        self._is_stalled = False
        self._stall_timeout_s = stall_timeout_s
        self._well_at_s = 0.0
        self._under_way: set[asyncio.Future[None]] = set()

    def fails(self, error: BaseException) -> None:
        """It is passed over for a while, or until it answers /health again."""
        log.warning("worker %s: %s", self.url, error or type(error).__name__)
        self._away_until_s = time.monotonic() + AWAY_S
        self._is_stalled = isinstance(error, StalledError)

    @property
    def is_away(self) -> bool:
        """Whether others come first."""
        return self._is_stalled or time.monotonic() < self._away_until_s

    async def is_up(self, http: ClientSession, timeout_s: float = HEALTH_TIMEOUT_S) -> bool:
        """Whether it answers /health."""
        try:
            async with http.get(f"{self.url}/health", timeout=ClientTimeout(total=timeout_s)) as answer:
                return bool(answer.status == 200)
        except FAILURES:
            return False

    async def unless_stalled(self, work: Coroutine[Any, Any, T]) -> T:
        """What it comes to. StalledError as soon as the worker has answered no /health for too long."""
        if not self._under_way:
            self._well_at_s = time.monotonic()
        stalled = asyncio.get_running_loop().create_future()
        self._under_way.add(stalled)
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, stalled}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise StalledError(f"no answer to /health for {self._stall_timeout_s:g} s")
        finally:
            self._under_way.discard(stalled)
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError, *FAILURES):
                    await task

    async def watch(self, http: ClientSession) -> None:
        """Asks /health while there are requests, or none come because it did not answer; for ever."""
        while True:
            await asyncio.sleep(self._stall_timeout_s / 4)
            if not self._under_way and not self._is_stalled:
                continue
            if await self.is_up(http, self._stall_timeout_s / 2):
                self._well_at_s = time.monotonic()
                if self._is_stalled:
                    log.info("worker %s answers again", self.url)
                    self._is_stalled, self._away_until_s = False, 0.0
            elif time.monotonic() - self._well_at_s >= self._stall_timeout_s:
                for stalled in self._under_way:
                    if not stalled.done():
                        stalled.set_result(None)


class Proxy:
    """Sends each request to a prefill worker, then to a decode worker."""

    def __init__(self, prefills: Sequence[str], decodes: Sequence[str], stall_timeout_s: float) -> None:
        self._prefills = [Worker(url, stall_timeout_s) for url in prefills]
        self._decodes = [Worker(url, stall_timeout_s) for url in decodes]
        self._turns = {"prefill": itertools.count(), "decode": itertools.count()}
        self._http: ClientSession | None = None

    def application(self) -> web.Application:
        """What aiohttp serves."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.cleanup_ctx.append(self._client)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        for path in COMPLETIONS:
            app.router.add_post(path, self.complete)
        return app

    async def health(self, request: web.Request) -> web.Response:
        """Which workers answer; 503 if no decode worker does."""
        workers = [*self._prefills, *self._decodes]
        answers = await asyncio.gather(*(worker.is_up(self._client_session) for worker in workers))
        are_up = {worker.url: is_up for worker, is_up in zip(workers, answers, strict=True)}
        is_serving = any(are_up[worker.url] for worker in self._decodes)
        return web.json_response(are_up, status=200 if is_serving else 503)

    async def models(self, request: web.Request) -> web.StreamResponse:
        """As the first decode worker that answers says."""
        return await self._from_decode(request, "GET", None, {})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """A completion, of text or of a chat."""
        try:
            body = await request.json()
        except (ValueError, RecursionError) as error:
            return _error(400, f"the request is no JSON: {error}")
        if not isinstance(body, dict):
            return _error(400, "the request is no JSON object")
        headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
        headers.setdefault("x-request-id", uuid.uuid4().hex)
        body["kv_transfer_params"] = own = _own_params(body)
        if _has_one_answer(body):
            handed = await self._prefill(request, body, headers)
            if isinstance(handed, web.Response):
                return handed
            body["kv_transfer_params"] = {**own, **handed}
        return await self._from_decode(request, "POST", body, headers)

    # ---------------------------------------------------------------- the two workers

    async def _prefill(
        self, request: web.Request, body: Body, headers: Mapping[str, str]
    ) -> Body | web.Response:
        """Where the prompt's KV is: nothing if nobody could compute it. A response if the request is bad."""
        first = {name: value for name, value in body.items() if name not in NOT_FOR_PREFILL} | ONE_TOKEN
        first["kv_transfer_params"] = {**body["kv_transfer_params"], **REMOTE_DECODE}
        for worker in self._in_turn("prefill", self._prefills, _session_of(request, body)):
            try:
                status, kind, said = await worker.unless_stalled(
                    self._computed(worker, request.path, first, headers)
                )
                if 400 <= status < 500:
                    return web.Response(status=status, body=said, content_type=kind)
                answer = json.loads(said)
            except FAILURES as error:
                worker.fails(error)
                continue
            handed = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
            return handed if isinstance(handed, dict) else {}
        log.warning("no prefill worker answers: a decode worker computes the prompt")
        return {}

    async def _computed(
        self, worker: Worker, path: str, body: Body, headers: Mapping[str, str]
    ) -> tuple[int, str, bytes]:
        """Status, type and content of a prefill worker's answer. ClientError unless it is one."""
        timeout = ClientTimeout(total=PREFILL_TIMEOUT_S, sock_connect=CONNECT_TIMEOUT_S)
        async with self._client_session.post(
            worker.url + path, json=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as answer:
            if answer.status >= 500:
                answer.raise_for_status()
            return answer.status, answer.content_type, await answer.read()

    async def _from_decode(
        self, request: web.Request, method: str, body: Body | None, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        timeout = ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        for worker in self._in_turn("decode", self._decodes):
            asked = self._client_session.request(
                method,
                worker.url + request.path,
                json=body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            )
            try:
                answer = await worker.unless_stalled(asked)
            except FAILURES as error:
                worker.fails(error)
                continue
            async with answer:
                return await _relay(request, worker, answer)
        return _error(503, "no decode worker answers")

    def _in_turn(self, kind: str, workers: Sequence[Worker], session: str | None = None) -> list[Worker]:
        """All of them, beginning with the one whose turn it is, or with the session's own. Those that have
        failed just now come last.
        """
        if session is None:
            first = next(self._turns[kind])
        else:
            first = int.from_bytes(hashlib.sha256(session.encode()).digest()[:8], "big")
        in_turn = [workers[(first + i) % len(workers)] for i in range(len(workers))]
        return sorted(in_turn, key=lambda worker: worker.is_away)

    # ---------------------------------------------------------------- the client

    @property
    def _client_session(self) -> ClientSession:
        assert self._http is not None, "the application has not begun"  # noqa: S101
        return self._http

    async def _client(self, app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(connector=TCPConnector(limit=0), trust_env=False) as self._http:
            workers = [*self._prefills, *self._decodes]
            watches = [asyncio.ensure_future(worker.watch(self._http)) for worker in workers]
            yield
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)


async def _relay(request: web.Request, worker: Worker, answer: ClientResponse) -> web.StreamResponse:
    response = web.StreamResponse(status=answer.status)
    response.content_type = answer.content_type
    await response.prepare(request)
    try:
        await worker.unless_stalled(_pass_on(answer, response))
    except (*FAILURES, ConnectionResetError) as error:
        if request.transport is not None and not request.transport.is_closing():  # or the client has left
            worker.fails(error)
            request.transport.abort()  # or the client would take what it has for the whole
        return response
    await response.write_eof()
    return response


async def _pass_on(answer: ClientResponse, response: web.StreamResponse) -> None:
    async for piece in answer.content.iter_any():
        await response.write(piece)


def _has_one_answer(body: Body) -> bool:
    prompt = body.get("prompt")
    is_batch = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    is_searched = bool(body.get("use_beam_search")) or body.get("prompt_embeds") is not None
    return not is_batch and not is_searched and all(body.get(name) in (None, 1) for name in ("n", "best_of"))


def _own_params(body: Body) -> Body:
    """Of the client's kv_transfer_params those for kvbm: where KV comes from is not for a client to say."""
    params = body.get("kv_transfer_params")
    return {"kvbm": params["kvbm"]} if isinstance(params, dict) and "kvbm" in params else {}


def _session_of(request: web.Request, body: Body) -> str | None:
    session = request.headers.get("x-session-id") or body.get("user")
    return session if isinstance(session, str) and session else None


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


if __name__ == "__main__":
    sys.exit(main())
