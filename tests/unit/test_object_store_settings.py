"""Where a bucket is, and with which keys: what is read, refused, warned of, and never shown."""

from __future__ import annotations

import logging
import os
import pickle
from contextlib import closing
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from kvbm_core.cli.main import app
from kvbm_core.clock import ManualClock
from kvbm_core.config import Adapter, KvbmSettings
from kvbm_core.config.remote_url import Bucket, remote_bucket
from kvbm_core.errors import ConfigError
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.policy.frequency import FrequencyFilter
from kvbm_core.runtime.assembly import lower_makers, remote_admission, store_options
from kvbm_core.storage.remote.login import ServerLogin
from kvbm_core.storage.remote.record_store import RecordStore
from kvbm_core.storage.remote.s3_client import S3Options, store_maker
from kvbm_core.storage.stores import StoreSpec, open_store
from kvbm_core.tiers.keyed import KeyedTier
from tests.engines.faulty_store import faulty_store
from tests.unit.tier_bench import TierBench

ACCESS_KEY, SECRET_KEY = "AKIAHUNTER2", "hunter2/with+slash"
OWN = {"DYN_KVBM_OBJECT_ENABLED": "1", "DYN_KVBM_OBJECT_BUCKET": "kv-{worker_id}"}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("DYN_KVBM_", "KVBM_", "AWS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def settings_of(monkeypatch: pytest.MonkeyPatch, **environment: str) -> KvbmSettings:
    """Read from these variables."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return KvbmSettings.from_env()


@pytest.mark.parametrize(
    ("url", "bucket"),
    [
        ("s3://kv-cache", Bucket("s3", "kv-cache", "")),
        ("S3://kv.cache/a/b/", Bucket("s3", "kv.cache", "a/b")),
        ("gs://kv_cache/team", Bucket("gs", "kv_cache", "team")),
        ("az://container", Bucket("az", "container", "")),
        ("s3://kv-{worker_id}/x", Bucket("s3", "kv-{worker_id}", "x")),
    ],
)
def test_urls_of_buckets(monkeypatch: pytest.MonkeyPatch, url: str, bucket: Bucket) -> None:
    settings = settings_of(monkeypatch, KVBM_REMOTE_URL=url)
    assert remote_bucket(settings.remote_url or "") == bucket and settings.store_urls == (bucket.url,)
    assert settings.has_remote_tier and settings.has_object_store and settings.warnings == ()


@pytest.mark.parametrize(
    "url",
    [
        *(
            "s3://",
            "s3:///prefix",
            "s3://b/a//b",
            "s3://b/../c",
            "s3://b/ü",
            "s3://b?x=1",
            "s3://b/p?secret=hunter2",
        ),
        *("s3://b#x", "s3://-b", "s3://b/a b"),
        *(f"s3://{ACCESS_KEY}:{SECRET_KEY}@bucket", f"s3://{ACCESS_KEY}:{SECRET_KEY}@host/bucket/x"),
    ],
)
def test_other_urls_are_refused_in_one_line_that_shows_no_key(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        settings_of(monkeypatch, KVBM_REMOTE_URL=url)
    text = str(raised.value)
    assert raised.value.setting == "KVBM_REMOTE_URL" and "\n" not in text
    assert "hunter2" not in text and "slash" not in text and ACCESS_KEY not in text


@pytest.mark.shows("DYN_KVBM_OBJECT_ENABLED", "DYN_KVBM_OBJECT_BUCKET")
def test_kvbms_names_mean_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(monkeypatch, **OWN)
    assert settings.store_urls == ("s3://kv-{worker_id}",) and settings.has_object_store
    assert settings.warnings == ()
    monkeypatch.setenv("KVBM_REMOTE_URL", "s3://kv-{worker_id}/prefix")
    assert KvbmSettings.from_env().store_urls == ("s3://kv-{worker_id}/prefix",), "the same bucket"


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({**OWN, "KVBM_REMOTE_URL": "s3://other"}, "KVBM_REMOTE_URL says s3://other; keep one"),
        ({**OWN, "KVBM_REMOTE_URL": "s3://kv-{worker_id}s"}, "keep one"),
        ({**OWN, "KVBM_REMOTE_URL": "file:///mnt/kv", "KVBM_REMOTE_CACHE_GB": "1"}, "keep one"),
        ({"DYN_KVBM_OBJECT_ENABLED": "1"}, "name it in DYN_KVBM_OBJECT_BUCKET"),
        ({**OWN, "DYN_KVBM_OBJECT_BUCKET": "bucket/b"}, "write KVBM_REMOTE_URL=s3://BUCKET/PREFIX instead"),
        ({**OWN, "DYN_KVBM_OBJECT_BUCKET": "s3://b"}, "without s3:// and without slashes"),
        ({**OWN, "DYN_KVBM_OBJECT_ACCESS_KEY": ACCESS_KEY}, "go together"),
        ({**OWN, "DYN_KVBM_OBJECT_SECRET_KEY": SECRET_KEY}, "go together"),
    ],
)
def test_what_contradicts_itself_is_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        settings_of(monkeypatch, **environment)
    assert "\n" not in str(raised.value) and "hunter2" not in str(raised.value).lower()


@pytest.mark.parametrize("key", ["object_secret_key", "DYN_KVBM_OBJECT_ACCESS_KEY"])
def test_keys_do_not_come_on_a_command_line(key: str) -> None:
    with pytest.raises(ConfigError, match="does not belong on a command line") as raised:
        KvbmSettings.from_env({key: SECRET_KEY})
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"DYN_KVBM_OBJECT_BUCKET": "kv"}, "has no effect without DYN_KVBM_OBJECT_ENABLED=1"),
        ({"DYN_KVBM_OBJECT_REGION": "eu-west-1"}, "has no effect without a bucket"),
        ({"KVBM_REMOTE_URL": "s3://kv", "KVBM_REMOTE_CACHE_GB": "5"}, "a lifecycle rule of the bucket"),
        ({"KVBM_REMOTE_URL": "s3://kv", "KVBM_REMOTE_TRUST": "group"}, "is for a shared directory"),
        ({**OWN, "DYN_KVBM_OBJECT_NUM_BLOCKS": "100"}, "a lifecycle rule does"),
    ],
)
def test_what_has_no_effect_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    (line,) = settings_of(monkeypatch, **environment).warnings
    assert said in line


@pytest.mark.parametrize(
    ("url", "num_blocks"),
    [
        ("s3://bucket", 32),
        ("mooncake://host", 32),
        *((f"{scheme}://host", 8) for scheme in ("redis", "rediss", "valkey", "VALKEYS")),
        ("file:///mnt/kv", 1),
    ],
)
def test_how_many_blocks_an_extent_has_depends_on_the_kind_of_store_alone(
    monkeypatch: pytest.MonkeyPatch, url: str, num_blocks: int
) -> None:
    more = {"KVBM_REMOTE_CACHE_GB": "1"} if url.startswith("file:") else {}
    settings = settings_of(monkeypatch, KVBM_REMOTE_URL=url, DYN_KVBM_CPU_CACHE_GB="1", **more)
    tier = TierBench(lower_makers(settings, ManualClock())["remote"]).tier
    tier.expect(0, [0], 128 << 10)
    assert isinstance(tier, KeyedTier) and tier.full_blocks == num_blocks


def test_kvbms_names_alone_make_a_tier_that_keeps_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_of(monkeypatch, **OWN, DYN_KVBM_CPU_CACHE_GB="1", KVBM_REMOTE_LOAD="always")
    makers = lower_makers(settings, ManualClock())
    assert list(makers) == ["remote"]
    tier = TierBench(makers["remote"]).tier
    tier.expect(0, [0], 1 << 20)
    assert isinstance(tier, KeyedTier) and tier.full_blocks == 4


def test_a_bucket_for_each_rank_has_no_blocks_for_other_numbers_of_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match=r"KVBM_REMOTE_HEAD_SHARDS=4: .*leave \{worker_id\} out"):
        settings_of(monkeypatch, **OWN, KVBM_REMOTE_HEAD_SHARDS="4")

    with pytest.raises(ConfigError, match=r"KVBM_REMOTE_CODEC=fp8: .*leave \{worker_id\} out"):
        settings_of(monkeypatch, **OWN, KVBM_REMOTE_HEAD_SHARDS="0", KVBM_REMOTE_CODEC="fp8")


@pytest.mark.parametrize(
    ("codec", "url", "is_told"),
    [("fp8", "s3://kv", True), ("zstd", "s3://kv", False), ("fp8", "", False)],
)
def test_audits_that_would_take_rounding_for_faults_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, codec: str, url: str, is_told: bool
) -> None:
    settings = settings_of(monkeypatch, KVBM_REMOTE_URL=url, KVBM_REMOTE_CODEC=codec, KVBM_AUDIT_RATE="0.5")
    told = [line for line in settings.warnings if "KVBM_AUDIT_RATE" in line]
    assert bool(told) is is_told is settings.is_lossy
    assert settings.keeps_heads is is_told
    if told:
        assert told[0].startswith("kvbm: KVBM_AUDIT_RATE=0.5: has no effect with KVBM_REMOTE_CODEC=fp8")


@pytest.mark.parametrize("arguments", [["config", "--changed"], ["config", "--json"]])
def test_a_password_in_a_url_is_not_shown(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    monkeypatch.setenv("KVBM_REMOTE_URL", "s3://bucket")
    monkeypatch.setenv("DYN_KVBM_OBJECT_ENDPOINT", "http://user:hunter2@127.0.0.1:1")
    monkeypatch.setenv("COLUMNS", "400")
    done = CliRunner().invoke(app, arguments)
    assert "127.0.0.1:1" in done.output and "hunter2" not in done.output


def test_a_password_before_anything_else_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as refused:
        settings_of(monkeypatch, KVBM_REMOTE_URL="user:hunter2@bucket")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "setting", "said"),
    [
        ("s3://bucket", "KVBM_REMOTE_USERNAME", "is for a Valkey or Redis server"),
        ("s3://bucket", "KVBM_REMOTE_CA_FILE", "AWS_CA_BUNDLE"),
        ("mooncake://host", "KVBM_REMOTE_PASSWORD_FILE", "is for a Valkey or Redis server"),
        ("redis://host", "KVBM_REMOTE_CA_FILE", "has no effect without TLS"),
    ],
)
def test_what_is_for_another_kind_of_store_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, url: str, setting: str, said: str
) -> None:
    given = {"KVBM_REMOTE_URL": url, "DYN_KVBM_CPU_CACHE_GB": "1", setting: "/there"}
    (warning,) = settings_of(monkeypatch, **given).warnings
    assert warning.startswith(f"kvbm: {setting}=/there: ") and said in warning


def test_a_password_file_that_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 5000)
    for name, said in (("pipe", "is not a file"), ("large", "holds more than 4096 bytes")):
        with pytest.raises(ConfigError, match=said):
            ServerLogin(password_file=str(tmp_path / name)).password()


def test_a_bad_key_is_refused_without_being_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError) as refused:
        settings_of(monkeypatch, **OWN, DYN_KVBM_OBJECT_SECRET_KEY="two words")
    assert "words" not in repr(refused.value) and "words" not in str(vars(refused.value))
    assert "DYN_KVBM_OBJECT_SECRET_KEY=(not shown)" in str(refused.value)


def test_keys_are_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {"DYN_KVBM_OBJECT_ACCESS_KEY": ACCESS_KEY, "DYN_KVBM_OBJECT_SECRET_KEY": SECRET_KEY}
    settings = settings_of(monkeypatch, **OWN, **keys)
    options = store_options(settings)
    shown = [
        repr(settings),
        str(settings),
        str(settings.model_dump()),
        repr(options),
        repr(settings.describe()),
    ]
    shown += [*settings.warnings_under(Adapter.HICACHE), *settings.warnings_under(Adapter.VLLM)]
    shown += [str(row.value) for row in settings.describe()]
    for arguments in (["config"], ["config", "--changed"], ["config", "--json"]):
        shown.append(CliRunner().invoke(app, arguments).output)
    assert "DYN_KVBM_OBJECT_SECRET_KEY" in "".join(shown)
    assert not any("hunter2" in text.lower() or "slash" in text for text in shown)
    assert options.s3 == S3Options(None, None, SecretStr(ACCESS_KEY), SecretStr(SECRET_KEY))
    assert pickle.loads(pickle.dumps(settings)).object_secret_key == SecretStr(SECRET_KEY)


@pytest.mark.shows("KVBM_REMOTE_FILTER=auto")
def test_what_was_used_again_goes_to_a_bucket_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, url = ManualClock(), "s3://kv"
    settings = settings_of(monkeypatch, KVBM_REMOTE_URL=f"redis://here {url}")
    assert isinstance(remote_admission(settings, url, clock), FrequencyFilter)
    assert isinstance(remote_admission(settings, "redis://here", clock), AdmitAll)
    all_of_them = settings_of(monkeypatch, KVBM_REMOTE_FILTER="all")
    assert isinstance(remote_admission(all_of_them, url, clock), AdmitAll)


@pytest.mark.shows(
    "DYN_KVBM_OBJECT_ENABLED",
    "DYN_KVBM_OBJECT_BUCKET",
    "DYN_KVBM_OBJECT_ENDPOINT",
    "DYN_KVBM_OBJECT_ACCESS_KEY",
)
def test_a_store_is_opened_with_the_rank_in_its_buckets_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="kvbm")
    with faulty_store() as server:
        keys = {"DYN_KVBM_OBJECT_ACCESS_KEY": ACCESS_KEY, "DYN_KVBM_OBJECT_SECRET_KEY": SECRET_KEY}
        settings = settings_of(monkeypatch, **OWN, **keys, DYN_KVBM_OBJECT_ENDPOINT=server.url)
        spec = StoreSpec(settings.store_urls[0], 4096, "meaning", "1of2", "model", store_options(settings))
        store = open_store(spec)
        try:
            assert isinstance(store, RecordStore)
            assert list(store.scan()) == []
        finally:
            store.close()
        assert server.requests["GET"] == 1 and "/kv-1?" in server.paths[0]
        assert f"Credential={ACCESS_KEY}/" in server.headers[0]["authorization"]
        assert "plain HTTP" in caplog.text and "hunter2" not in caplog.text.lower()


@pytest.mark.shows("DYN_KVBM_OBJECT_ENDPOINT", "DYN_KVBM_OBJECT_REGION", "DYN_KVBM_OBJECT_ACCESS_KEY")
@pytest.mark.parametrize(("region", "signed"), [("eu-north-7", "eu-north-7"), ("", "us-east-1")])
def test_requests_are_signed_for_the_region(
    region: str, signed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"DYN_KVBM_OBJECT_ACCESS_KEY": ACCESS_KEY, "DYN_KVBM_OBJECT_SECRET_KEY": SECRET_KEY}
    with faulty_store() as server:
        place = {"DYN_KVBM_OBJECT_ENDPOINT": server.url, "DYN_KVBM_OBJECT_REGION": region}
        options = store_options(settings_of(monkeypatch, KVBM_REMOTE_URL="s3://kv", **keys, **place))
        with closing(open_store(StoreSpec("s3://kv", 4096, "meaning", "0of1", "model", options))) as store:
            assert list(store.scan()) == []
        (header,) = {headers["authorization"].partition(",")[0] for headers in server.headers}
        assert f"Credential={ACCESS_KEY}/" in header and f"/{signed}/s3/" in header


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"AWS_ENDPOINT_URL_S3": "s3.example"}, "AWS_ENDPOINT_URL_S3=(not shown): write https://"),
        ({"AWS_ENDPOINT_URL": f"https://{ACCESS_KEY}:{SECRET_KEY}@host"}, "AWS_ENDPOINT_URL=(not shown)"),
        ({"AWS_CA_BUNDLE": "/no/such/file.pem"}, "AWS_CA_BUNDLE=/no/such/file.pem: No such file"),
        ({"AWS_CA_BUNDLE": __file__}, "no certificate is in it"),
    ],
)
def test_what_cannot_work_is_said_when_it_is_opened(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        store_maker(remote_bucket("s3://kv"), S3Options(), environment)
    assert said in str(raised.value) and "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("package", "environment", "said"),
    [
        ("obstore", {}, "KVBM_REMOTE_URL=s3://kv: needs obstore; run pip install"),
        ("boto3", {"AWS_PROFILE": "team"}, "AWS_PROFILE=team: needs boto3; run pip install boto3"),
    ],
)
def test_a_package_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, package: str, environment: dict[str, str], said: str
) -> None:
    from kvbm_core.storage.remote import s3_client

    real = s3_client.find_spec
    monkeypatch.setattr(s3_client, "find_spec", lambda name: None if name == package else real(name))
    with pytest.raises(ConfigError) as raised:
        store_maker(remote_bucket("s3://kv"), S3Options(), environment)
    assert said in str(raised.value)


def test_what_is_asked_of_records_is_asked_in_a_bucket_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = {"KVBM_REMOTE_SECRET_FILE": str(tmp_path / "secret"), "KVBM_REMOTE_ENCRYPT": "1"}
    options = store_options(settings_of(monkeypatch, **OWN, **asked, KVBM_REMOTE_CODEC="zstd"))
    assert (options.secret_file, options.encrypts, options.codec) == (str(tmp_path / "secret"), True, "zstd")
    with pytest.raises(ConfigError, match="KVBM_REMOTE_SECRET_FILE"):
        open_store(StoreSpec("s3://kv", 4096, "meaning", "0of1", "model", options))
