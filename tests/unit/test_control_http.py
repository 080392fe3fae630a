"""Orders over HTTP: nobody without the token can give any, and what the server is sent does not hurt it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.control.http_wire import PATH
from kvbm_core.control.messages import MAX_ORDER_BYTES, Verb
from kvbm_core.control.service import ControlService
from kvbm_core.types import Tier
from tests.engines.ports import free_port
from tests.unit.control_bench import NAMESPACE, Cache, here, taking_orders

__all__ = ["here"]

TOKEN = "a token that nobody else has"


class Serving:
    """An engine with ``cache``, and who asks it."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "token"
        self.file.write_text(f"{TOKEN}\n", encoding="ascii")
        self.file.chmod(0o600)
        self.cache = Cache()
        self.port = free_port()
        self.settings: dict[str, object] = {
            "control": "http",
            "instance": "one",
            "control_http": f"127.0.0.1:{self.port}",
            "control_token_file": str(self.file),
        }
        self.service: ControlService | None = None

    def post(
        self, body: bytes, token: str | None = TOKEN, path: str = PATH, method: str = "POST"
    ) -> tuple[int, dict[str, Any]]:
        """Status and answer."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()


@pytest.fixture
def serving(tmp_path: Path, here: Path) -> Iterator[Serving]:
    made = Serving(tmp_path)
    with taking_orders(made.settings, made.cache.control) as made.service:
        yield made


def order(verb: str, **what: object) -> bytes:
    return json.dumps({"verb": verb, **what}).encode()


@pytest.mark.shows("KVBM_CONTROL=http", "KVBM_CONTROL_HTTP", "KVBM_CONTROL_TOKEN_FILE")
def test_who_has_the_token_is_heard(serving: Serving) -> None:
    code, answer = serving.post(order("status"))
    assert code == 200 and answer["status"]["namespace"] == NAMESPACE
    assert serving.post(order("reset", tier="disk"))[0] == 200
    assert serving.cache.resets == [frozenset({Tier.DISK})]
    code, answer = serving.post(order("pin", pin="p", tokens=[1]))
    assert code == 409 and answer["result"] == "refused"


WRONG_TOKENS = {"none": None, "empty": "", "another": "b" * len(TOKEN), "its beginning": TOKEN[:-1]}
WRONG_TOKENS |= {"more": f"{TOKEN}x", "in Latin": "\xe4" * len(TOKEN)}


@pytest.mark.shows("KVBM_CONTROL_TOKEN_FILE")
@pytest.mark.parametrize("verb", list(Verb))
@pytest.mark.parametrize("token", WRONG_TOKENS)
def test_nobody_without_the_token_is_heard(verb: Verb, token: str, serving: Serving) -> None:
    code, answer = serving.post(order(verb.value, tokens=[1], pin="p", salt="s"), WRONG_TOKENS[token])
    assert code == 401 and set(answer) == {"text"} and TOKEN not in answer["text"]
    assert not serving.cache.resets and not serving.cache.control.is_draining


@pytest.mark.parametrize(
    ("body", "path", "method", "code"),
    [
        (b"", PATH, "POST", 400),
        (b"\xff{", PATH, "POST", 400),
        (b"[" * 10_000, PATH, "POST", 400),
        (order("erase"), PATH, "POST", 400),
        (order("reset", more=1), PATH, "POST", 400),
        (b" " * (MAX_ORDER_BYTES + 1), PATH, "POST", 413),
        (order("reset"), "/", "POST", 404),
        (b"", PATH, "GET", 405),
    ],
)
def test_what_is_no_order_changes_nothing(
    body: bytes, path: str, method: str, code: int, serving: Serving
) -> None:
    try:
        assert serving.post(body, path=path, method=method)[0] == code
    except (BrokenPipeError, ConnectionResetError):  # it does not read what is too large
        assert code == 413
    assert not serving.cache.resets
    assert serving.post(order("status"))[0] == 200


def test_a_flood_is_refused(serving: Serving) -> None:
    codes = [serving.post(order("status"), "wrong")[0] for _ in range(200)]
    assert codes[0] == 401 and 429 in codes
    assert serving.post(order("status"))[0] == 200  # strangers keep nobody out
    codes = [serving.post(order("status"))[0] for _ in range(200)]
    assert codes[0] == 200 and 429 in codes


def test_an_order_for_another_instance_is_refused(serving: Serving) -> None:
    assert serving.post(order("reset", instance="two"))[0] == 409 and not serving.cache.resets


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("no file", "KVBM_CONTROL_TOKEN_FILE=(unset): nobody could give orders"),
        ("missing", "No such file"),
        ("readable", "chmod 600"),
        ("short", "holds 5 bytes"),
        ("everywhere", "KVBM_FLEET_INSECURE=1"),
        ("taken", "cannot be had"),
    ],
)
def test_what_cannot_be_is_one_line(
    what: str, line: str, tmp_path: Path, serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    mine = Serving(tmp_path)
    settings = {**mine.settings, "control": "socket,http"}
    if what == "no file":
        settings["control_token_file"] = ""
    elif what == "missing":
        mine.file.unlink()
    elif what == "readable":
        mine.file.chmod(0o644)
    elif what == "short":
        mine.file.write_text("short", encoding="ascii")
    elif what == "everywhere":
        settings["control_http"] = f"0.0.0.0:{mine.port}"
    else:
        settings["control_http"] = serving.settings["control_http"]
    with taking_orders(settings, mine.cache.control):
        (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert line in said and "not taken over http" in said and "\n" not in said and TOKEN not in said
