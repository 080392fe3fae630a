"""Where the keys of a bucket come from: each way of AWS's chain, and what happens when they are wrong."""

from __future__ import annotations

import json
import logging
import os
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs

import pytest

from kvbm_core.config import KvbmSettings
from kvbm_core.config.remote_url import remote_bucket
from kvbm_core.errors import Outcome
from kvbm_core.runtime.assembly import store_options
from kvbm_core.storage.remote.engine import PutItem
from kvbm_core.storage.remote.s3 import S3Engine
from kvbm_core.storage.remote.s3_client import S3Options, store_maker
from tests.engines.certificates import Certificates, make_certificates
from tests.engines.faulty_store import FaultyStore, faulty_store
from tests.engines.object_servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, SeaweedServer
from tests.engines.ports import HOST, free_port

DEADLINE_S = 20.0
OK, IO_ERROR = Outcome.OK, Outcome.IO_ERROR
SECRET = "hunter2"
"""A part of every secret here."""


class TokenService(BaseHTTPRequestHandler):
    """AWS's services of tokens (STS) and of a machine's role (IMDS). Keys are good for a minute."""

    tokens: list[str]

    def do_POST(self) -> None:
        body = parse_qs(self.rfile.read(int(self.headers.get("content-length") or 0)).decode())
        query = {**parse_qs(self.path.partition("?")[2]), **body}
        self.tokens.append(query["WebIdentityToken"][0])
        fields = "".join(f"<{name}>{value}</{name}>" for name, value in self._keys().items())
        self._answer(
            f"<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials>{fields}"
            "</Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"
        )

    def do_PUT(self) -> None:
        self.tokens.append("session")
        self._answer("session-token")

    def do_GET(self) -> None:
        is_role = self.path.endswith("/security-credentials/")
        self._answer("a-role" if is_role else json.dumps({**self._keys(), "Code": "Success"}))

    def _keys(self) -> dict[str, str]:
        ends = datetime.now(timezone.utc) + timedelta(minutes=1)
        return {
            "AccessKeyId": f"ASIA{len(self.tokens)}",
            "SecretAccessKey": f"{SECRET}-temporary",
            "SessionToken": f"{SECRET}-session",
            "Token": f"{SECRET}-session",
            "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def token_service(certificates: Certificates | None = None) -> Iterator[tuple[str, list[str]]]:
    """Its URL, and the tokens that it was shown. obstore speaks to STS by TLS alone."""
    kind = type("Service", (TokenService,), {"tokens": []})
    server = ThreadingHTTPServer((HOST, 0), kind)
    server.daemon_threads = True
    if certificates is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.certificate, certificates.key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        scheme = "http" if certificates is None else "https"
        yield f"{scheme}://{HOST}:{server.server_address[1]}", kind.tokens
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def _own_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://{HOST}:{free_port()}")  # nobody is there
    caplog.set_level(logging.DEBUG)
    yield
    assert SECRET not in caplog.text and SECRET_KEY not in caplog.text


@contextmanager
def engine_of(url: str, options: S3Options | None = None, bucket: str = BUCKET) -> Iterator[S3Engine]:
    """As the environment says, at the server ``url``."""
    place = remote_bucket(f"s3://{bucket}/x")
    options = options or S3Options(url, REGION)
    engine = S3Engine(store_maker(place, options), place, DEADLINE_S)
    try:
        yield engine
    finally:
        engine.close()


def put(engine: S3Engine, name: str = "a") -> Outcome:
    """Its outcome."""
    return engine.put([PutItem(name, [memoryview(b"content")])], deadline_s=DEADLINE_S)[0]


def key_ids(store: FaultyStore) -> list[str]:
    """Of the requests that came."""
    return [
        headers["authorization"].partition("Credential=")[2].partition("/")[0] for headers in store.headers
    ]


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said to fail."""
    return [record.getMessage() for record in caplog.records if " fail: " in record.getMessage()]


@pytest.mark.shows(
    "DYN_KVBM_OBJECT_ENDPOINT",
    "DYN_KVBM_OBJECT_REGION",
    "DYN_KVBM_OBJECT_ACCESS_KEY",
    "DYN_KVBM_OBJECT_SECRET_KEY",
)
def test_a_server_that_checks_refuses_a_wrong_key_and_takes_a_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with SeaweedServer(tmp_path) as server:
        server.make_bucket()
        for access_key, secret in ((ACCESS_KEY, f"{SECRET}/wrong"), (f"{ACCESS_KEY}X", SECRET_KEY)):
            caplog.clear()
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", access_key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
            with engine_of(server.base_url) as engine:
                assert put(engine) is IO_ERROR
                assert engine.exists(["a"], deadline_s=DEADLINE_S) == [IO_ERROR]
                told = failures(caplog)
                assert len(told) == 2 and all("the credentials are wrong" in line for line in told), told
                with pytest.raises(OSError, match="cannot be listed: 403"):
                    list(engine.scan("", deadline_s=DEADLINE_S))
        given = {"ENDPOINT": server.base_url, "REGION": REGION}
        given |= {"ACCESS_KEY": ACCESS_KEY, "SECRET_KEY": SECRET_KEY}
        for name, value in given.items():
            monkeypatch.setenv(f"DYN_KVBM_OBJECT_{name}", value)
        with engine_of("", store_options(KvbmSettings.from_env()).s3) as engine:
            assert put(engine) is OK, "KVBM's names win over the environment's"


def test_a_profile_is_read_by_boto3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "credentials").write_text(
        f"[default]\naws_access_key_id=AKIADEFAULT\naws_secret_access_key={SECRET}1\n"
        f"[team]\naws_access_key_id=AKIATEAM\naws_secret_access_key={SECRET}2\n"
    )
    with faulty_store() as store:
        with engine_of(store.url) as engine:
            assert put(engine) is OK
        monkeypatch.setenv("AWS_PROFILE", "team")
        with engine_of(store.url) as engine:
            assert put(engine) is OK
        monkeypatch.delenv("AWS_PROFILE")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAVARIABLE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET}3")
        with engine_of(store.url) as engine:
            assert put(engine) is OK
        assert key_ids(store) == ["AKIADEFAULT", "AKIATEAM", "AKIAVARIABLE"]


def test_a_profile_that_is_not_there_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with faulty_store() as store, engine_of(store.url) as engine:
        assert put(engine) is IO_ERROR and not store.headers
    assert ["there is no way to get credentials" in line for line in failures(caplog)] == [True]


def test_a_web_identity_is_read_anew_when_its_keys_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/kvbm")
    certificates = make_certificates(tmp_path)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificates.authority))
    with token_service(certificates) as (url, tokens), faulty_store() as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", url)
        with engine_of(store.url) as engine:
            assert put(engine) is OK
            token.write_text("second")
            ends_at_s = time.monotonic() + DEADLINE_S
            while "second" not in tokens and time.monotonic() < ends_at_s:
                assert put(engine, "b") is OK
        assert tokens[0] == "first" and tokens[-1] == "second"
        assert key_ids(store)[0] == "ASIA1" and key_ids(store)[-1] == f"ASIA{len(tokens)}"
    caplog.clear()
    with faulty_store() as store, engine_of(store.url) as engine:
        assert put(engine) is IO_ERROR, "the service is gone"
        token.unlink()
    assert ["there is no way to get credentials" in line for line in failures(caplog)] == [True]


def test_a_machines_role_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with token_service() as (url, _), faulty_store() as store:
        monkeypatch.setenv("AWS_METADATA_ENDPOINT", url)
        with engine_of(store.url) as engine:
            assert put(engine) is OK
        assert key_ids(store)[0].startswith("ASIA")
        assert store.headers[0]["x-amz-security-token"] == f"{SECRET}-session"


def test_no_credentials_at_all_are_said(caplog: pytest.LogCaptureFixture) -> None:
    with faulty_store() as store, engine_of(store.url) as engine:
        assert [put(engine), put(engine)] == [IO_ERROR, IO_ERROR] and not store.headers
    assert ["there are no credentials; see docs/remote.md" in line for line in failures(caplog)] == [True]
