"""``kvbm remote`` on real servers: SeaweedFS, moto and Valkey take what it asks for, and its page says."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvbm_core.cli.main import app
from kvbm_core.config import KvbmSettings
from kvbm_core.errors import Outcome
from kvbm_core.runtime.assembly import store_options
from kvbm_core.storage.extents import Extent, ExtentStore
from kvbm_core.storage.stores import StoreSpec, open_engine, open_store
from kvbm_core.testing.store_contract import LONG_S, buffers, key_of
from tests.engines.faulty_store import Fault, faulty_store
from tests.engines.mooncake_pool import MooncakePool
from tests.engines.object_servers import BUCKET, MotoServer, ObjectServer, SeaweedServer
from tests.engines.valkey_server import ValkeyServer

BLOCK_BYTES = 100_000
PAGE = Path(__file__).resolve().parents[2] / "docs" / "remote.md"
EXTENTS = [
    Extent(8, tuple(key_of(number) for number in range(start, start + 8))) for start in range(0, 64, 8)
]


CREDENTIALS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_REGION": "us-east-1"}


def forget_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of kvbm and of S3, in the environment, but for a deadline that a server on a busy machine keeps."""
    for name in [*KvbmSettings.env_names().values(), *filter(lambda n: n.startswith("AWS_"), [*os.environ])]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KVBM_REMOTE_DEADLINE_S", str(LONG_S))


def kvbm(command: str, url: str, *more: str) -> Result:
    """``kvbm remote`` in this process."""
    return CliRunner().invoke(app, ["remote", command, url, *more])


def on_the_page(word: str) -> str:
    """The one block of docs/remote.md that has this word in it."""
    blocks = re.findall(r"^```\w*\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (found,) = [block for block in blocks if word in block]
    return str(found)


def put(url: str) -> list[Outcome]:
    """EXTENTS, by a store such as engines open."""
    options = store_options(KvbmSettings.from_env(None))
    store = open_store(StoreSpec(url, BLOCK_BYTES, "meaning", "0of1", "org/Model", options))
    assert isinstance(store, ExtentStore)
    payloads = [[*buffers(8, BLOCK_BYTES)] for _ in EXTENTS]
    try:
        return store.put_extents(EXTENTS, payloads, deadline_s=LONG_S)
    finally:
        store.close()


def walk_through(url: str) -> str:
    """Lists and checks what was put; the model's folder."""
    ((model, found),) = json.loads(kvbm("inspect", url, "--json").output)["namespaces"].items()
    assert (found["records"], found["blocks"]) == (8, 64)
    assert found["bytes"] == 8 * (8 * BLOCK_BYTES + 4096)
    told = kvbm("verify", url)
    assert (told.exit_code, told.output) == (0, "all 8 records are good\n")
    return str(model)


@pytest.fixture(params=[SeaweedServer, MotoServer])
def bucket(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectServer]:
    """A server with an empty bucket, and credentials in the environment."""
    with request.param(tmp_path) as server:
        server.make_bucket()
        forget_settings(monkeypatch)
        for name, value in server.client_environment.items():
            monkeypatch.setenv(name, value)
        yield server


def test_a_bucket(bucket: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://{BUCKET}/team"
    assert put(url) == [Outcome.OK] * 8
    model = walk_through(url)
    engine = open_engine(url, store_options(KvbmSettings.from_env(None)))
    record = next(engine.scan("", deadline_s=LONG_S)).name
    engine.close()
    admin = bucket.admin()
    admin.put_object(Bucket=BUCKET, Key=f"team/{record}", Body=b"something else")
    admin.put_object(Bucket=BUCKET, Key=f"team/kvbm2/{model}/notes", Body=b"by hand")
    told = kvbm("verify", url, "--remove-damaged")
    assert told.exit_code == 1 and "1 of 8 records are damaged" in told.output
    assert kvbm("sweep", url, "--max-gb", "0.005").exit_code == 1, "all of it was used just now"
    told = kvbm("sweep", url, "--max-gb", "0.005", "--grace-s", "0")
    assert told.exit_code == 0 and "7 records, 5.63 MB, limit 5 MB: 2 records, 1.61 MB removed" in told.output
    assert f"{model}: 5 records removed" in kvbm("rm", url, model, "--yes").output
    left = [found["Key"] for found in admin.list_objects_v2(Bucket=BUCKET)["Contents"]]
    assert left == [f"team/kvbm2/{model}/notes"]
    admin.put_bucket_lifecycle_configuration(
        Bucket=BUCKET, LifecycleConfiguration=json.loads(on_the_page("Rules"))
    )
    (taken,) = admin.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"]
    assert (taken["Filter"], taken["Expiration"]) == ({"Prefix": "team/kvbm2/"}, {"Days": 7})
    rights = on_the_page("Statement").replace("arn:aws:s3:::kv-cache", f"arn:aws:s3:::{BUCKET}")
    admin.put_bucket_policy(Bucket=BUCKET, Policy=rights)
    assert len(json.loads(admin.get_bucket_policy(Bucket=BUCKET)["Policy"])["Statement"]) == 2
    if isinstance(bucket, SeaweedServer):  # moto checks no signature
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "NeverShown")
        told = kvbm("ls", url)
        assert_said(told, "the credentials are wrong")
        assert "NeverShown" not in told.output
    bucket.stop()
    told = kvbm("ls", url)
    assert told.exit_code == 2 and told.output.count("\n") == 1 and url in told.output


@pytest.mark.shows("KVBM_REMOTE_USERNAME", "KVBM_REMOTE_PASSWORD_FILE")
@pytest.mark.valkey
def test_a_server_of_valkey_with_the_rights_that_the_page_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_settings(monkeypatch)
    password = "a-password-of-the-test"
    config = tmp_path / "valkey.conf"
    config.write_text(on_the_page("maxmemory").replace(">PASSWORD", f">{password}"))
    secret = tmp_path / "password"
    secret.write_text(password)
    with ValkeyServer(tmp_path, "--include", str(config)) as server:
        monkeypatch.setenv("KVBM_REMOTE_USERNAME", "kvbm")
        monkeypatch.setenv("KVBM_REMOTE_PASSWORD_FILE", str(secret))
        assert put(server.url) == [Outcome.OK] * 8
        model = walk_through(server.url)
        told = kvbm("sweep", server.url, "--max-gb", "0.001")
        assert told.exit_code == 0 and "evicts by itself" in told.output
        assert f"{model}: 8 records removed" in kvbm("rm", server.url, "--all", "--yes").output
        secret.write_text("another one")
        assert_said(
            kvbm("ls", server.url), "WRONGPASS", "set KVBM_REMOTE_PASSWORD_FILE, and KVBM_REMOTE_USERN"
        )


@pytest.mark.valkey
def test_what_a_server_of_valkey_refuses_is_said_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_settings(monkeypatch)
    secret = tmp_path / "password"
    secret.write_text("may-only-read")
    config = tmp_path / "valkey.conf"
    config.write_text("user reader on >may-only-read ~kvbm2/* -@all +get +info\n")
    with ValkeyServer(tmp_path, "--include", str(config)) as server:
        assert_said(kvbm("ls", server.url), "NOAUTH", "set KVBM_REMOTE_PASSWORD_FILE")
        monkeypatch.setenv("KVBM_REMOTE_USERNAME", "reader")
        monkeypatch.setenv("KVBM_REMOTE_PASSWORD_FILE", str(secret))
        assert_said(kvbm("ls", server.url), "NOPERM", "docs/remote.md lists the rights")


@pytest.mark.parametrize(
    ("fault", "words", "remedy"),
    [
        (Fault.FORBIDDEN, "403 AccessDenied", "docs/remote.md lists the rights"),
        (Fault.BAD_SIGNATURE, "SignatureDoesNotMatch", "the credentials are wrong; see docs/remote.md"),
        (Fault.SKEWED, "RequestTimeTooSkewed", "the clock of this machine is wrong; let NTP set it"),
        (Fault.NO_BUCKET, "404 NoSuchBucket", "make it, or correct its name"),
        (Fault.NOT_MODIFIED, "304", ""),
        (Fault.NONE, "not found", "correct the bucket's name, or the server's address"),
    ],
    ids=str,
)
def test_what_an_object_store_refuses_is_said_with_a_remedy(
    fault: Fault, words: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``NONE``: a server of objects that knows no listing."""
    forget_settings(monkeypatch)
    with faulty_store() as server:
        server.fault = fault
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": server.url}.items():
            monkeypatch.setenv(name, value)
        assert_said(kvbm("ls", f"s3://{BUCKET}/team"), words, remedy)


def assert_said(told: Result, *words: str) -> None:
    """In one line, of a store that cannot be listed."""
    assert told.exit_code == 2 and told.output.count("\n") == 1, told.output
    assert all(word in told.output for word in words), told.output


@pytest.mark.mooncake
def test_a_pool_of_mooncake_whose_own_log_stays_off_the_terminal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    forget_settings(monkeypatch)
    with MooncakePool(tmp_path) as pool:
        url = f"mooncake://{pool.address}"
        assert put(url) == [Outcome.OK] * 8
        monkeypatch.setenv("MOONCAKE_MASTER_METRICS_PORT", str(pool.metrics_port))
        assert "client_service.cpp" in capfd.readouterr().err, "an engine's log has what Mooncake says"
        assert kvbm("verify", url).output == "all 8 records are good\n"
        assert capfd.readouterr().err == ""
        monkeypatch.setenv("MC_LOG_LEVEL", "INFO")
        assert kvbm("ls", url).exit_code == 0
        assert "client_service.cpp" in capfd.readouterr().err, "who has set the level sees it"
        monkeypatch.setenv("MOONCAKE_TE_META_DATA_SERVER", "http://me:NeverShown@127.0.0.1:9/metadata")
        assert_said(kvbm("ls", url), f"kvbm remote ls: {url}: the master does not say how large objects are")
        line = caplog.messages[-1]
        assert "Mooncake cannot join (code 255): PUT http://***@127.0.0.1:9/" in line
        assert "Failed to initialize transfer engine" in line and "NeverShown" not in caplog.text
