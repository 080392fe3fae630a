"""deploy/launch/pd_proxy.py before servers that answer as vLLM does, or not at all.

The servers are doubles, to be silent, broken or gone at a given moment; tests/e2e/test_disaggregated.py has
the proxy before vLLM's own.
"""

from __future__ import annotations

import importlib.util
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engines.disaggregated import Proxy, wait_for
from tests.engines.launched import LAUNCH
from tests.engines.ports import HOST

HANDED = {"do_remote_prefill": True, "remote_block_ids": [1, 2], "remote_engine_id": "p"}
STALL_TIMEOUT_S, SLOW_S = 1.5, 2.2
BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 5}


class Worker(ThreadingHTTPServer):
    """A double of vLLM's server. ``mood``: "well", "broken" (500), "refuses" (400), "dies" in its answer,
    "freezes" in its answer, "frozen" (no answer to anything), "slow" (a while, with every other /health
    refused), or bytes that it says in place of an answer.
    """

    daemon_threads = True

    def __init__(self, name: str) -> None:
        super().__init__((HOST, 0), Handler)
        self.name = name
        self.mood: str | bytes = "well"
        self.is_over = threading.Event()
        self.looked_at = 0
        self.asked: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.url = f"http://{HOST}:{self.server_address[1]}"
        self.thread = threading.Thread(target=self.serve_forever, args=(0.01,), name=name)
        self.thread.start()

    def params(self) -> list[Any]:
        """kv_transfer_params of all requests."""
        return [body.get("kv_transfer_params") for body, _ in self.asked]

    def leave(self) -> None:
        """Nobody listens at its address any more."""
        self.is_over.set()
        self.shutdown()
        self.thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Worker

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        if self.server.mood in {"frozen", "freezes"}:
            self._freeze()
            return
        if self.server.mood == "gone":  # and this connection is from before
            self.close_connection = True
            return
        self.server.looked_at += 1
        if self.server.mood == "slow" and self.server.looked_at % 2:
            self._say(503, {})
            return
        self._say(200, {"data": self.server.name} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.asked.append((body, headers))
        mood = self.server.mood
        if mood == "slow":
            self.server.is_over.wait(SLOW_S)
        if mood == "gone":  # and this connection is from before
            self.close_connection = True
        elif mood == "frozen":
            self._freeze()
        elif isinstance(mood, bytes):
            self.wfile.write(mood)
            self.close_connection = True
        elif mood in {"broken", "refuses"}:
            self._say({"broken": 500, "refuses": 400}[mood], {"said": self.server.name})
        elif (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            self._say(200, {"kv_transfer_params": HANDED})
        else:
            self._stream()

    def _freeze(self) -> None:
        self.server.is_over.wait()
        self.close_connection = True

    def _say(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for piece in (f"from {self.server.name}", " on"):
            self.wfile.write(f"{len(piece):x}\r\n{piece}\r\n".encode())
            self.wfile.flush()
            if self.server.mood == "freezes":
                self._freeze()
                return
            if self.server.mood == "dies":
                self.close_connection = True
                return
        self.wfile.write(b"0\r\n\r\n")


class Serving:
    """A proxy with two workers of each kind."""

    def __init__(self, proxy: Proxy, prefills: list[Worker], decodes: list[Worker]) -> None:
        self.proxy, self.prefills, self.decodes = proxy, prefills, decodes
        self.http = httpx.Client(base_url=proxy.base_url, timeout=20.0, trust_env=False)

    def post(self, path: str = "/v1/completions", session: str = "", **more: Any) -> httpx.Response:
        """A request of a client."""
        headers = {"X-Session-ID": session} if session else {}
        return self.http.post(path, json={**BODY, **more}, headers=headers)

    @property
    def prefilled(self) -> int:
        """How often a prompt was to be computed for another worker."""
        return sum(len(worker.asked) for worker in self.prefills)


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    """All of them are well."""
    yield from serve(tmp_path)


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Serving]:
    """The same, and who answers nothing for STALL_TIMEOUT_S is given up."""
    yield from serve(tmp_path, STALL_TIMEOUT_S)


def serve(tmp_path: Path, stall_timeout_s: float | None = None) -> Iterator[Serving]:
    """Until the test is over."""
    workers = [Worker(name) for name in ("p0", "p1", "d0", "d1")]
    urls = [worker.url for worker in workers]
    with Proxy(tmp_path / "log", urls[:2], urls[2:], stall_timeout_s) as proxy, ExitStack() as stack:
        serving = Serving(proxy, workers[:2], workers[2:])
        stack.enter_context(serving.http)
        yield serving
    for worker in workers:
        if worker.thread.is_alive():
            worker.leave()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prompt_is_computed_once_and_handed_over(serving: Serving, path: str) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 3}
    response = serving.post(path, **more)
    assert (response.status_code, response.text) == (200, "from d0 on")
    assert response.headers["content-type"].startswith("text/event-stream")
    ((first, first_headers),) = serving.prefills[0].asked
    assert first["max_tokens"] == 1 and first["stream"] is False
    assert not {"stream_options", "min_tokens"} & first.keys()
    assert first["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    ((second, second_headers),) = serving.decodes[0].asked
    assert second == {**BODY, **more, "kv_transfer_params": HANDED}
    assert first_headers["x-request-id"] == second_headers["x-request-id"]


def test_workers_take_turns_and_sessions_stay(serving: Serving) -> None:
    assert [serving.post().text for _ in range(4)] == ["from d0 on", "from d1 on"] * 2
    assert [len(worker.asked) for worker in serving.prefills] == [2, 2]
    for turn in range(3):
        serving.post(session="anna", turn=turn)
        serving.post(user="bob", turn=turn)
    for worker in serving.prefills:
        assert len(worker.asked) - 2 in (0, 3, 6)


def test_only_what_is_for_kvbm_is_taken_from_a_client(serving: Serving) -> None:
    wish = {"kvbm": {"skip": True}, "do_remote_prefill": True, "remote_host": "elsewhere"}
    serving.post(kv_transfer_params=wish)
    assert serving.prefills[0].params()[0]["kvbm"] == {"skip": True}
    assert serving.decodes[0].params() == [{"kvbm": {"skip": True}, **HANDED}]
    serving.prefills[1].mood = serving.prefills[0].mood = "broken"
    serving.post(kv_transfer_params=wish)
    assert serving.decodes[1].params() == [{"kvbm": {"skip": True}}]


def test_what_has_several_answers_is_computed_where_it_is_answered(serving: Serving) -> None:
    # vLLM would give all of them the KV of one prompt.
    for more in (
        {"prompt": ["a", "b"]},
        {"prompt": [[1], [2]]},
        {"n": 2},
        {"best_of": 3},
        {"use_beam_search": True},
        {"prompt_embeds": ["AA"]},
    ):
        assert serving.post(**more).status_code == 200
        assert serving.prefilled == 0, more
    assert not any(param for worker in serving.decodes for param in worker.params())
    assert serving.post(prompt=["a"]).status_code == serving.post(prompt=[1, 2]).status_code == 200
    assert serving.prefilled == 2


@pytest.mark.parametrize("mood", ["broken", "gone"])
def test_a_worker_that_is_away_is_passed_over(serving: Serving, mood: str) -> None:
    def lose(worker: Worker) -> None:
        worker.mood = mood
        if mood == "gone":
            worker.leave()

    lose(serving.prefills[0])
    assert [serving.post().status_code for _ in range(4)] == [200] * 4
    assert [bool(worker.params()[0]) for worker in serving.decodes] == [True, True]
    assert len(serving.prefills[0].asked) <= 1, "it was asked again at once"
    lose(serving.prefills[1])
    assert serving.post().text == "from d0 on"
    assert not serving.decodes[0].params()[-1], "nobody has computed the prompt"
    if mood == "gone":
        lose(serving.decodes[1])
        assert [serving.post().text for _ in range(2)] == ["from d0 on"] * 2
        assert serving.http.get("/v1/models").json() == {"data": "d0"}
        health = serving.http.get("/health")
        assert (health.status_code, list(health.json().values())) == (200, [False, False, True, False])
        lose(serving.decodes[0])
        assert serving.http.get("/health").status_code == 503
        response = serving.post()
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "no decode worker answers"


def test_a_bad_request_is_answered_by_the_first_worker(serving: Serving) -> None:
    serving.prefills[0].mood = "refuses"
    response = serving.post()
    assert (response.status_code, response.json()) == (400, {"said": "p0"})
    assert not any(worker.asked for worker in serving.decodes)


def test_what_is_no_request_is_said(serving: Serving) -> None:
    for content in (b"{", b"[]", b"7", b"\xff", b"[" * 200_000):
        response = serving.http.post("/v1/completions", content=content)
        assert response.status_code == 400, content[:9]
        assert "no JSON" in response.json()["error"]["message"]


def test_half_an_answer_is_not_taken_for_a_whole_one(serving: Serving) -> None:
    serving.decodes[0].mood = "dies"
    with pytest.raises(httpx.RemoteProtocolError):
        serving.post()
    assert serving.post().text == "from d1 on"


def test_a_worker_that_freezes_is_passed_over(impatient: Serving) -> None:
    impatient.prefills[0].mood = impatient.decodes[0].mood = "frozen"
    assert [impatient.post().text for _ in range(3)] == ["from d1 on"] * 3
    assert [len(worker.asked) for worker in impatient.decodes] == [1, 3]
    assert [len(worker.asked) for worker in impatient.prefills] == [1, 3]
    assert all(impatient.decodes[1].params())
    for worker in (impatient.prefills[0], impatient.decodes[0]):
        worker.mood = "well"
        worker.is_over.set()  # it thaws
    wait_for(lambda: impatient.post().text == "from d0 on")
    wait_for(lambda: impatient.post() is not None and len(impatient.prefills[0].asked) > 1)


def test_an_answer_that_freezes_is_not_taken_for_a_whole_one(impatient: Serving) -> None:
    impatient.decodes[0].mood = "freezes"
    with pytest.raises(httpx.RemoteProtocolError):
        impatient.post()
    assert [impatient.post().text for _ in range(2)] == ["from d1 on"] * 2


def test_a_slow_worker_is_waited_for(impatient: Serving) -> None:
    impatient.prefills[0].mood = "slow"
    assert impatient.post().text == "from d0 on"
    assert not impatient.prefills[1].asked and impatient.decodes[0].params() == [HANDED]


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


NONSENSE = [
    b"HTTP/1.1 200 OK\r\n",
    b"no HTTP at all\r\n\r\n",
    HEAD + b"content-length: 1000\r\n\r\n{",
    HEAD + b"content-length: 1\r\n\r\n{",
    HEAD + b"content-length: 2\r\n\r\n[]",
    HEAD + b"content-length: 200000\r\n\r\n" + b"[" * 200_000,
    HEAD + b"content-length: 27\r\n\r\n" + b'{"kv_transfer_params": [7]}',
    b"HTTP/1.1 307 Elsewhere\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    HEAD + b"content-encoding: gzip\r\ncontent-length: 1\r\n\r\n{",
]


def test_nonsense_from_a_prefill_worker_is_no_error_of_the_client(serving: Serving) -> None:
    for said in NONSENSE:
        for worker in serving.prefills:
            worker.mood = said
        assert serving.post().status_code == 200, said[:80]
    for worker in serving.prefills:
        worker.mood = "well"
    assert serving.post().status_code == 200
    params = [param for worker in serving.decodes for param in worker.params()]
    assert len(params) == len(NONSENSE) + 1
    assert [param for param in params if param] == [HANDED], "what it said went to a decode worker"


def test_a_client_that_leaves_ends_its_request_and_nothing_else(serving: Serving) -> None:
    serving.decodes[0].mood = "freezes"
    with serving.http.stream("POST", "/v1/completions", json=BODY) as response:
        assert next(response.iter_bytes())
    serving.decodes[0].mood = "well"
    assert [serving.post().text for _ in range(2)] == ["from d1 on", "from d0 on"]
    assert "worker" not in serving.proxy.log_path.read_text()


def test_what_it_cannot_do_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("pd_proxy", LAUNCH / "pd_proxy.py")
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    for words, expected in (
        (("127.0.0.1:8100",), "'127.0.0.1:8100' is no address of a worker"),
        (("http://",), "'http://' is no address of a worker"),
        (("http://h:99999",), "'http://h:99999' is no address of a worker"),
        (("http://h", "--stall-timeout", "0"), "--stall-timeout 0.0: 0.1 to 3600 seconds"),
    ):
        with pytest.raises(SystemExit, match="2"):
            program.main(["--decode", "http://h", "--prefill", *words])
        assert expected in capsys.readouterr().err.splitlines()[-1]


def test_a_port_that_is_taken_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        arguments = ("--decode", "http://h", "--prefill", "http://h", "--port", port)
        done = subprocess.run(
            [sys.executable, str(LAUNCH / "pd_proxy.py"), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"cannot listen at {HOST}:{port}: " in line


def test_many_at_once(serving: Serving) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: serving.post().text, range(64)))
    assert answers.count("from d0 on") == answers.count("from d1 on") == 32
    assert serving.prefilled == 64
