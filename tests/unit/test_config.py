"""Settings: names and defaults of KVBM, one clear line for what is wrong, sizes to slots."""

from __future__ import annotations

import logging
import math
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm_core.clock import ManualClock
from kvbm_core.config import Adapter, KvbmSettings, SettingSource, readers
from kvbm_core.config.remote_url import remote_directory
from kvbm_core.errors import ConfigError, KvbmError
from kvbm_core.native import FALSE
from kvbm_core.runtime import assembly
from kvbm_core.storage.disk.allocate import FileOptions

# Name and default of everything that KVBM 1.6.1 reads, and of kvbm's own settings.
DEFAULTS = {
    "KVBM_PEERS": "off",
    "KVBM_PEER_BIND": "127.0.0.1:56100",
    "KVBM_PEER_DEADLINE_S": 2.0,
    "KVBM_PEER_EXPORT_GB": 0.25,
    "DYN_KVBM_CPU_CACHE_GB": None,
    "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": None,
    "DYN_KVBM_DISK_CACHE_GB": None,
    "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": None,
    "DYN_KVBM_DISK_CACHE_DIR": "/tmp",
    "DYN_KVBM_DISK_ZEROFILL_FALLBACK": False,
    "DYN_KVBM_DISK_DISABLE_O_DIRECT": False,
    "DYN_KVBM_DISK_ALLOCATOR_TYPE": "default",
    "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": False,
    "DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY": 0,
    "DYN_KVBM_MAX_CONCURRENT_TRANSFERS": 4,
    "DYN_KVBM_MAX_TRANSFER_BATCH_SIZE": 16,
    "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS": 1800,
    "DYN_KVBM_LEADER_ZMQ_HOST": "127.0.0.1",
    "DYN_KVBM_LEADER_ZMQ_PUB_PORT": 56001,
    "DYN_KVBM_LEADER_ZMQ_ACK_PORT": 56002,
    "ETCD_ENDPOINTS": "",
    "ETCD_AUTH_CA": "",
    "ETCD_AUTH_CLIENT_CERT": "",
    "ETCD_AUTH_CLIENT_KEY": "",
    "ETCD_AUTH_USERNAME": "",
    "ETCD_AUTH_PASSWORD": None,
    "KVBM_FLEET": "default",
    "KVBM_FLEET_LEASE_S": 15.0,
    "KVBM_FLEET_INSECURE": False,
    "KVBM_CURVE_KEY_FILE": "",
    "KVBM_CURVE_ALLOWED": "",
    "DYN_KVBM_METRICS": False,
    "DYN_KVBM_METRICS_PORT": 6880,
    "DYN_KVBM_CACHE_STATS_MAX_REQUESTS": 1000,
    "DYN_KVBM_CACHE_STATS_LOG_INTERVAL_SECS": 5,
    "KVBM_WHY_REQUESTS": 1000,
    "KVBM_TRACES": "auto",
    "DYN_KVBM_ENABLE_RECORD": False,
    "KVBM_RECORD_DIR": "/tmp/kvbm-record",
    "KVBM_RECORD_GB": 1.0,
    "DYN_KVBM_DISABLE_WRITE_COMBINED": False,
    "DYN_MEMORY_DISABLE_NUMA": False,
    "DYN_KVBM_ENABLE_NUMA": False,
    "DYN_KVBM_NCCL_MLA_MODE": False,
    "DYN_KVBM_NCCL_MAX_CTAS": None,
    "DYN_KVBM_KV_EVENTS_ENABLE_CONSOLIDATOR": True,
    "DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE": "dedup",
    "DYN_KVBM_TRTLLM_ZMQ_PORT": None,
    "DYN_RUNTIME_ENABLED_KVBM": False,
    "DYN_FATBIN_PATH": "",
    "DYN_LOG": "info",
    "KVBM_NATIVE": True,
    "KVBM_LEASE_TTL_S": 30,
    "KVBM_TRANSFER_DEADLINE_S": 60,
    "KVBM_SHARE_WAIT_S": 1,
    "KVBM_SYNC_ONBOARD_BYTES": 0,
    "KVBM_DECODE_RUN_TOKENS": 128,
    "KVBM_STATE_EVERY_TOKENS": 4096,
    "KVBM_EVICTION_POLICY": "lru",
    "KVBM_DISK_DEADLINE_S": 10.0,
    "KVBM_DISK_IO": "auto",
    "KVBM_DISK_TO_DEVICE": "off",
    "KVBM_REMOTE_URL": None,
    "KVBM_REMOTE_CACHE_GB": None,
    "KVBM_REMOTE_FILTER": "auto",
    "KVBM_REMOTE_TRUST": "user",
    "KVBM_REMOTE_USERNAME": "",
    "KVBM_REMOTE_PASSWORD_FILE": "",
    "KVBM_REMOTE_CA_FILE": "",
    "KVBM_REMOTE_CERT_FILE": "",
    "KVBM_REMOTE_DEADLINE_S": 5.0,
    "KVBM_REMOTE_SECRET_FILE": "",
    "KVBM_REMOTE_ENCRYPT": False,
    "KVBM_REMOTE_CODEC": "none",
    "KVBM_REMOTE_HEAD_SHARDS": 0,
    "KVBM_REMOTE_WAIT_S": 2.0,
    "KVBM_REMOTE_LOAD": "faster",
    "DYN_KVBM_OBJECT_ENABLED": False,
    "DYN_KVBM_OBJECT_BUCKET": None,
    "DYN_KVBM_OBJECT_ENDPOINT": None,
    "DYN_KVBM_OBJECT_REGION": None,
    "DYN_KVBM_OBJECT_ACCESS_KEY": None,
    "DYN_KVBM_OBJECT_SECRET_KEY": None,
    "DYN_KVBM_OBJECT_NUM_BLOCKS": None,
    "KVBM_DISK_CHECK_AT_START": None,
    "KVBM_START_WAIT_S": 5,
    "KVBM_VERIFY_ONBOARD": False,
    "KVBM_AUDIT_RATE": 0.0,
    "KVBM_EVENTS_MEDIUM": "CPU_TIER1",
    "KVBM_EVENTS": "off",
    "KVBM_EVENTS_ENDPOINT": "tcp://127.0.0.1:5567",
    "KVBM_EVENTS_REPLAY_ENDPOINT": "tcp://127.0.0.1:5667",
    "KVBM_EVENTS_TOPIC": "",
    "KVBM_INSTANCE": "",
    "KVBM_CONTROL": "socket",
    "KVBM_CONTROL_HTTP": "127.0.0.1:6890",
    "KVBM_CONTROL_TOKEN_FILE": "",
    "KVBM_CONTROL_OPERATORS": "",
    "NATS_SERVER": "nats://127.0.0.1:4222",
    "NATS_AUTH_USERNAME": None,
    "NATS_AUTH_PASSWORD": None,
    "NATS_AUTH_TOKEN": None,
    "NATS_AUTH_NKEY": None,
    "NATS_AUTH_CREDENTIALS_FILE": None,
    "KVBM_NATS_CA_FILE": None,
    "KVBM_NATS_CERT_FILE": None,
    "KVBM_LOAD_FAILURE_POLICY": "recompute",
    "KVBM_METRICS_HOST": "0.0.0.0",
}

# Set by a user of KVBM, without effect in this release.
LATER = {
    "DYN_RUNTIME_ENABLED_KVBM": "1",
    "DYN_FATBIN_PATH": "/opt/k.fatbin",
    "DYN_KVBM_OBJECT_NUM_BLOCKS": "100000",
}

FIELD_OF = {env: name for name, env in KvbmSettings.env_names().items()}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in DEFAULTS or name.upper().startswith(("DYN_KVBM_", "KVBM_", "DYN_REGISTRY_")):
            monkeypatch.delenv(name)


def error_of(overrides: dict[str, object] | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        KvbmSettings.from_env(overrides)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 400
    return caught.value


def test_every_name_has_kvbms_default() -> None:
    settings = KvbmSettings.from_env()
    assert {row.env: row.value for row in settings.describe()} == DEFAULTS
    assert settings.warnings == ()


def test_environment_is_read() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DYN_KVBM_CPU_CACHE_GB", " 2.5 ")
        patch.setenv("DYN_KVBM_METRICS", "True")
        patch.setenv("DYN_KVBM_LEADER_ZMQ_PUB_PORT", "56003")
        patch.setenv("dyn_kvbm_max_concurrent_transfers", "9")  # case as is: not ours
        settings = KvbmSettings.from_env()
    assert settings.cpu_cache_gb == 2.5
    assert settings.metrics is True
    assert settings.leader_zmq_pub_port == 56003
    assert settings.max_concurrent_transfers == 4
    (unknown,) = settings.warnings
    assert "did you mean DYN_KVBM_MAX_CONCURRENT_TRANSFERS" in unknown


def test_an_empty_variable_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "")
    settings = KvbmSettings.from_env()
    assert settings.cpu_cache_gb is None
    assert settings.source("cpu_cache_gb") is SettingSource.DEFAULT


@pytest.mark.parametrize("key", ["cpu_cache_gb", "DYN_KVBM_CPU_CACHE_GB"])
def test_extra_config_wins(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "not even readable")
    settings = KvbmSettings.from_env({key: 3, "connectors": [{"kv_connector": "X"}], "block_size": 16})
    assert settings.cpu_cache_gb == 3.0
    row = next(row for row in settings.describe() if row.name == "cpu_cache_gb")
    assert (row.source, row.doc != "") == (SettingSource.EXTRA_CONFIG, True)


def test_none_in_extra_config_leaves_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "4")
    settings = KvbmSettings.from_env({"cpu_cache_gb": None})
    assert (settings.cpu_cache_gb, settings.source("cpu_cache_gb")) == (4.0, SettingSource.ENV)


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("cpu_cache_gbs", "cpu_cache_gb"),
        ("dyn_kvbm_cpu_cache_gb", "DYN_KVBM_CPU_CACHE_GB"),
        ("DYN_KVBM_CPU_CACHE_GIB", "DYN_KVBM_CPU_CACHE_GB"),
        ("KVBM_LEASE_TTL", "KVBM_LEASE_TTL_S"),
        ("max_transfer_batch", "max_transfer_batch_size"),
    ],
)
def test_a_misspelt_key_gets_a_hint(key: str, hint: str) -> None:
    error = error_of({key: 1})
    assert error.setting == key
    assert error.remedy.endswith(f"did you mean {hint}?")


def test_an_unknown_key_of_ours_is_refused_without_showing_its_value() -> None:
    error = error_of({"DYN_KVBM_OBJECT_TOKEN": "hunter2"})
    assert "hunter2" not in str(error)
    assert error.setting == "DYN_KVBM_OBJECT_TOKEN"


def test_one_setting_under_two_names() -> None:
    assert "DYN_KVBM_CPU_CACHE_GB" in str(error_of({"cpu_cache_gb": 1, "DYN_KVBM_CPU_CACHE_GB": 2}))
    assert KvbmSettings.from_env({"cpu_cache_gb": 1, "DYN_KVBM_CPU_CACHE_GB": 1}).cpu_cache_gb == 1


@pytest.mark.shows("KVBM_DISK_TO_DEVICE")
def test_without_a_disk_or_with_a_host_tier_nothing_goes_straight_to_the_device() -> None:
    given: dict[str, object] = {"disk_to_device": "nixl-gds", "disk_cache_gb": 2}
    for sizes, env in (
        ({"cpu_cache_gb": 1}, "DYN_KVBM_CPU_CACHE_GB"),
        ({"cpu_cache_override_num_blocks": 9}, "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS"),
    ):
        settings = KvbmSettings.from_env({**given, **sizes})
        why = "has no effect with a host tier, which keeps what comes from disk"
        assert settings.warnings == (f"kvbm: KVBM_DISK_TO_DEVICE=nixl-gds: {why}; leave {env} out",)
        assert FileOptions.of(settings, io_deadline_s=1.0, check_at_start=False).to_device == "off"
    (line,) = KvbmSettings.from_env({"disk_to_device": "nixl-gds", "cpu_cache_gb": 1}).warnings
    assert "leave DYN_KVBM_CPU_CACHE_GB out" in line
    (line,) = KvbmSettings.from_env({"disk_to_device": "nixl-gds"}).warnings
    assert line.endswith("has no effect without a disk tier; set DYN_KVBM_DISK_CACHE_GB too")
    settings = KvbmSettings.from_env(given)
    assert settings.warnings == ()
    assert FileOptions.of(settings, io_deadline_s=1.0, check_at_start=False).to_device == "nixl-gds"


@pytest.mark.parametrize(
    ("env", "value"),
    [
        *(
            ("DYN_KVBM_CPU_CACHE_GB", bad)
            for bad in ("20GB", "abc", "-1", "0", "0.0", "nan", "inf", "1e400", "0x10")
        ),
        *(("DYN_KVBM_CPU_CACHE_GB", bad) for bad in ("1_000", "٣", "1,5", "1000001", "true")),
        *(("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", bad) for bad in ("0", "-3", "1.5", "many", "9" * 5000)),
        ("DYN_KVBM_DISK_CACHE_GB", "-1"),
        ("DYN_KVBM_DISK_ALLOCATOR_TYPE", "direct"),
        *(("DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS", bad) for bad in ("-1", "1.5", "many")),
        *(("KVBM_DISK_DEADLINE_S", bad) for bad in ("0", "-1", "soon", "inf")),
        *(("KVBM_DISK_IO", bad) for bad in ("nixl", "GDS", "0")),
        *(("KVBM_DISK_TO_DEVICE", bad) for bad in ("1", "gds", "auto")),
        *(("KVBM_REMOTE_URL", bad) for bad in ("/mnt/kv", "kv", "file://", "file:///", "file://nas/mnt/kv")),
        *(("KVBM_REMOTE_URL", bad) for bad in ("file:mnt", "file:///kv?x=1", "file:///kv#1", "://")),
        *(("KVBM_REMOTE_URL", bad) for bad in ("file:///a%00b", "file://[/kv")),
        *(("KVBM_REMOTE_CACHE_GB", bad) for bad in ("-1", "lots", "nan")),
        ("KVBM_REMOTE_FILTER", "some"),
        ("KVBM_REMOTE_TRUST", "world"),
        ("KVBM_REMOTE_DEADLINE_S", "0"),
        ("KVBM_REMOTE_ENCRYPT", "perhaps"),
        ("KVBM_REMOTE_CODEC", "fp4"),
        ("DYN_KVBM_MAX_CONCURRENT_TRANSFERS", "0"),
        ("DYN_KVBM_MAX_TRANSFER_BATCH_SIZE", "x"),
        ("DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS", "0"),
        ("DYN_KVBM_CACHE_STATS_MAX_REQUESTS", "0"),
        ("DYN_KVBM_METRICS", "maybe"),
        ("DYN_KVBM_LEADER_ZMQ_HOST", "tcp://127.0.0.1"),
        ("KVBM_LOAD_FAILURE_POLICY", "ignore"),
        ("KVBM_EVENTS_MEDIUM", "a b"),
        ("KVBM_EVENTS", "kafka"),
        ("KVBM_INSTANCE", "a.*.>"),
        ("KVBM_EVENTS", "zmq,zmq"),
        ("KVBM_EVENTS", "off,nats"),
        ("KVBM_CONTROL", "https"),
        ("KVBM_CONTROL", "nats,nats"),
        ("KVBM_CONTROL", "off,socket"),
        ("KVBM_LEASE_TTL_S", "-1"),
    ],
)
def test_a_bad_value_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, env: str, value: str) -> None:
    monkeypatch.setenv(env, value)
    error = error_of()
    assert str(error).startswith(f"kvbm: {env}={value[:80]}")
    assert error.remedy.startswith("write ")


@pytest.mark.parametrize("value", [True, False, [], {}, math.nan, -math.inf, 10**400, "1\n2", b"5"])
def test_bad_types_in_extra_config(value: object) -> None:
    assert error_of({"cpu_cache_gb": value}).setting == "DYN_KVBM_CPU_CACHE_GB"


@pytest.mark.parametrize(
    ("env", "bad", "default"),
    [
        ("DYN_KVBM_LEADER_ZMQ_PUB_PORT", "70000", 56001),
        ("DYN_KVBM_LEADER_ZMQ_ACK_PORT", "zero", 56002),
        ("DYN_KVBM_METRICS_PORT", "0", 6880),
        ("DYN_KVBM_TRTLLM_ZMQ_PORT", "-1", None),
        ("DYN_KVBM_KV_EVENTS_CONSOLIDATOR_MODE", "both", "dedup"),
    ],
)
def test_where_kvbm_warns_and_falls_back(
    monkeypatch: pytest.MonkeyPatch, env: str, bad: str, default: object
) -> None:
    monkeypatch.setenv(env, bad)
    settings = KvbmSettings.from_env()
    assert getattr(settings, FIELD_OF[env]) == default
    assert not settings.is_set(FIELD_OF[env])
    (warning,) = settings.warnings
    assert warning.startswith(f"kvbm: {env}={bad}: write ")
    assert warning.endswith(f"using {'none' if default is None else default}")


def test_a_fallback_does_not_hide_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_METRICS_PORT", "0")
    monkeypatch.setenv("KVBM_LEASE_TTL_S", "soon")
    assert error_of().setting == "KVBM_LEASE_TTL_S"


@pytest.mark.shows("DYN_KVBM_LEADER_ZMQ_PUB_PORT")
def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = KvbmSettings.from_env({"metrics_port": 80}).warnings
    assert warning.startswith("kvbm: DYN_KVBM_METRICS_PORT=80:")
    assert error_of({"leader_zmq_ack_port": 56001}).setting == "DYN_KVBM_LEADER_ZMQ_ACK_PORT"
    monkeypatch.setenv("DYN_KVBM_LEADER_ZMQ_ACK_PORT", "x")  # falls back to the port that the other one has
    assert "must differ" in str(error_of({"leader_zmq_pub_port": 56002}))


@pytest.mark.shows("DYN_KVBM_OBJECT_NUM_BLOCKS", "DYN_RUNTIME_ENABLED_KVBM", "DYN_FATBIN_PATH")
@pytest.mark.parametrize("env", sorted(LATER))
def test_what_is_not_in_this_release_says_so(monkeypatch: pytest.MonkeyPatch, env: str) -> None:
    monkeypatch.setenv(env, LATER[env])
    (warning,) = KvbmSettings.from_env({"cpu_cache_gb": 1}).warnings
    assert warning.startswith(f"kvbm: {env}=")
    assert warning.endswith("the setting is ignored")


def test_the_disks_settings_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "DYN_KVBM_DISK_CACHE_GB": ("8", 8.0),
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": ("100", 100),
        "DYN_KVBM_DISK_CACHE_DIR": ("/mnt/x", "/mnt/x"),
        "DYN_KVBM_DISK_ZEROFILL_FALLBACK": ("true", True),
        "DYN_KVBM_DISK_DISABLE_O_DIRECT": ("1", True),
        "DYN_KVBM_DISK_ALLOCATOR_TYPE": ("open-direct", "open-direct"),
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": ("true", True),
        "KVBM_DISK_DEADLINE_S": ("2.5", 2.5),
        "KVBM_DISK_IO": ("nixl-posix", "nixl-posix"),
        "KVBM_DISK_TO_DEVICE": ("nixl-gds-mt", "nixl-gds-mt"),
        "KVBM_DISK_CHECK_AT_START": ("off", False),
    }
    for env, (text, _) in given.items():
        monkeypatch.setenv(env, text)
    settings = KvbmSettings.from_env()
    assert {env: getattr(settings, FIELD_OF[env]) for env in given} == {
        env: value for env, (_, value) in given.items()
    }
    assert settings.warnings == () and settings.has_disk_tier and not settings.has_host_tier


def test_a_shared_directory_has_a_url_and_a_size_or_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVBM_REMOTE_URL", " file:///mnt/a%20share ")
    for text, limit_bytes in ((None, None), ("1.5", 1_500_000_000), ("0", None)):
        if text is not None:
            monkeypatch.setenv("KVBM_REMOTE_CACHE_GB", text)
        settings = KvbmSettings.from_env()
        assert assembly.store_options(settings).shares_size is (text is None)
        assert settings.has_remote_tier and settings.remote_max_bytes == limit_bytes
        assert settings.remote_url is not None
        assert remote_directory(settings.remote_url) == Path("/mnt/a share")
    assert remote_directory("file://localhost/mnt/kv") == Path("/mnt/kv")


@pytest.mark.shows("KVBM_REMOTE_URL")
def test_several_stores_are_named_in_the_order_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBM_REMOTE_URL", " mooncake://m:50051\ts3://kv/team, file:///mnt/a share, kept ")
    monkeypatch.setenv("KVBM_REMOTE_CACHE_GB", "500")
    settings = KvbmSettings.from_env()
    assert settings.store_urls == ("mooncake://m:50051", "s3://kv/team", "file:///mnt/a share, kept")
    assert settings.has_object_store and settings.warnings == ()
    assert list(assembly.lower_makers(settings, ManualClock())) == ["remote", "remote-2", "remote-3"]
    for urls, said in (
        ("s3://kv/a s3://kv/a/", "names a store twice"),
        ("file:///mnt/kv, file://localhost/mnt//kv/", "names a store twice"),
        ("redis://KV.example valkey://kv.example:6379/0", "names a store twice"),
        ("mooncake://m s3://kv mooncake://m:50051", "names a store twice"),
        (", ,", "write file://"),
        ("s3://kv ftp://x", "number 2: no store has such a URL; there are az://, file://, gs://"),
    ):
        monkeypatch.setenv("KVBM_REMOTE_URL", urls)
        assert said in str(error_of())
    monkeypatch.setenv("KVBM_REMOTE_URL", ",redis://kv.example/0,,redis://kv.example/1 ,file:///mnt/kv,")
    stores = ("redis://kv.example/0", "redis://kv.example/1", "file:///mnt/kv")
    assert KvbmSettings.from_env().store_urls == stores


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("file://mnt/kv", "what follows two slashes names a machine"),
        ("file:///mnt/kv?x=1", "write %3F or %23"),
        ("file:///mnt/kv#1", "write %3F or %23"),
        ("file:///", "the root of all files"),
        ("/mnt/kv", "write file:// and the absolute path"),
    ],
)
def test_a_url_of_no_directory_is_told_what_is_wrong_with_it(
    url: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBM_REMOTE_URL", url)
    error = error_of()
    assert error.setting == "KVBM_REMOTE_URL" and said in str(error)


def test_settings_of_a_shared_directory_without_one_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBM_REMOTE_CACHE_GB", "500")
    remedy = "has no effect without KVBM_REMOTE_URL; set that too, such as file:///mnt/kv"
    assert KvbmSettings.from_env().warnings == (f"kvbm: KVBM_REMOTE_CACHE_GB=500.0: {remedy}",)
    for name, value, url in (
        ("KVBM_REMOTE_CODEC", "zstd", "s3://BUCKET"),
        ("KVBM_REMOTE_USERNAME", "me", "redis://HOST"),
    ):
        monkeypatch.setenv(name, value)
        warned = KvbmSettings.from_env().warnings
        assert f"kvbm: {name}={value}: {remedy.replace('file:///mnt/kv', url)}" in warned
        monkeypatch.delenv(name)
    monkeypatch.setenv("KVBM_REMOTE_URL", "file:///mnt/kv")
    assert KvbmSettings.from_env().warnings == ()


def test_encryption_needs_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBM_REMOTE_URL", "file:///mnt/kv")
    monkeypatch.setenv("KVBM_REMOTE_CACHE_GB", "0")
    monkeypatch.setenv("KVBM_REMOTE_ENCRYPT", "1")
    error = error_of()
    assert error.setting == "KVBM_REMOTE_ENCRYPT" and "KVBM_REMOTE_SECRET_FILE" in str(error)
    monkeypatch.setenv("KVBM_REMOTE_SECRET_FILE", "/run/secrets/kv")
    settings = KvbmSettings.from_env()
    assert settings.remote_encrypt and settings.remote_secret_file == "/run/secrets/kv"


def test_no_password_of_a_url_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBM_REMOTE_URL", "s3://name:secret@host/bucket")
    error = error_of()
    assert "credentials do not belong in a URL" in str(error)
    assert "secret" not in str(error) and "name" not in str(error.value)


@pytest.mark.shows("DYN_KVBM_DISABLE_WRITE_COMBINED")
def test_presence_switches_as_in_kvbm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_DISABLE_WRITE_COMBINED", "anything")
    assert KvbmSettings.from_env().disable_write_combined is True
    monkeypatch.setenv("DYN_KVBM_DISABLE_WRITE_COMBINED", "false")
    assert KvbmSettings.from_env().disable_write_combined is False


def test_unknown_variables_are_named_without_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_OBJECT_TOKEN", "hunter2")
    monkeypatch.setenv("DYN_KVBM_SLEEP", "5")
    monkeypatch.setenv("KVBM_CONFIG_PATH", "/else")  # another program's
    for i in range(100):
        monkeypatch.setenv(f"DYN_REGISTRY_{i}", "x")
    warnings = KvbmSettings.from_env().warnings
    assert len(warnings) == 20
    assert not any("hunter2" in line or "KVBM_CONFIG_PATH" in line for line in warnings)
    assert "DYN_KVBM_OBJECT_TOKEN" in warnings[0]
    assert "DYN_KVBM_SLEEP" in warnings[1]


def test_services_of_kubernetes_bring_no_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of Services called dyn-kvbm, dyn-kvbm-metrics and kvbm, which every pod of the namespace has."""
    for service in ("DYN_KVBM", "DYN_KVBM_METRICS", "KVBM"):
        monkeypatch.setenv(f"{service}_SERVICE_HOST", "10.0.0.1")
        monkeypatch.setenv(f"{service}_SERVICE_PORT", "80")
        monkeypatch.setenv(f"{service}_SERVICE_PORT_HTTP", "80")
        monkeypatch.setenv(f"{service}_PORT", "tcp://10.0.0.1:80")
        monkeypatch.setenv(f"{service}_PORT_80_TCP", "tcp://10.0.0.1:80")
        monkeypatch.setenv(f"{service}_PORT_80_TCP_ADDR", "10.0.0.1")
    settings = KvbmSettings.from_env()
    assert settings.warnings == ()
    assert (settings.metrics_port, settings.source("metrics_port")) == (6880, SettingSource.DEFAULT)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"ETCD_ENDPOINTS": "http://10.0.0.1:2379"},
            "ETCD_ENDPOINTS=http://10.0.0.1:2379: not used without KVBM_CURVE_KEY_FILE",
        ),
        (
            {"NATS_SERVER": "nats://user:hunter2@10.0.0.1:4222", "KVBM_EVENTS": "zmq"},
            "NATS_SERVER=nats:***@10.0.0.1:4222: not used without KVBM_EVENTS=nats or KVBM_CONTROL=nats",
        ),
    ],
)
def test_a_server_that_is_not_used_is_told_of(
    given: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    (line,) = KvbmSettings.from_env().warnings
    assert line.startswith(f"kvbm: {words}") and "hunter2" not in line
    monkeypatch.setenv("KVBM_CURVE_KEY_FILE", "/keys/own.key_secret")
    monkeypatch.setenv("KVBM_CURVE_ALLOWED", "/keys/allowed")
    monkeypatch.setenv("KVBM_CONTROL", "socket,nats")
    assert KvbmSettings.from_env().warnings == ()


def test_frozen_and_portable() -> None:
    settings = KvbmSettings.from_env({"cpu_cache_gb": 1, "runtime_enabled": True})
    with pytest.raises(ValueError, match="frozen"):
        settings.cpu_cache_gb = 2
    copy = pickle.loads(pickle.dumps(settings))
    assert copy == settings
    assert copy.warnings == settings.warnings != ()


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)
)


@given(st.sampled_from(sorted(KvbmSettings.env_names())), SCALARS)
def test_any_value_is_used_or_refused_in_one_line(name: str, value: object) -> None:
    try:
        settings = KvbmSettings.from_env({name: value})
    except KvbmError as error:
        assert isinstance(error, ConfigError)
        assert error.setting == KvbmSettings.env_names()[name]
        assert len(str(error).splitlines()) == 1
        assert len(str(error)) < 400
    else:
        number = getattr(settings, name)
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            assert math.isfinite(number)
            assert number >= 0
        assert all(len(line.splitlines()) == 1 for line in settings.warnings)


@given(st.dictionaries(st.text(max_size=30), SCALARS, max_size=4))
def test_foreign_keys_never_matter(extra: dict[str, object]) -> None:
    try:
        settings = KvbmSettings.from_env(extra)
    except ConfigError as error:
        assert error.setting != ""
    else:
        assert settings.cpu_cache_gb is None or "cpu_cache_gb" in extra


def test_what_only_another_engine_heeds_is_said_in_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBM_DECODE_RUN_TOKENS", "64")
    monkeypatch.setenv("DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY", "40")
    settings = KvbmSettings.from_env()
    assert settings.warnings == settings.warnings_under(Adapter.TRTLLM) == ()
    (said,) = settings.warnings_under(Adapter.VLLM)
    assert said.startswith("kvbm: DYN_KVBM_HOST_OFFLOAD_PREFIX_MIN_PRIORITY=")
    assert said.endswith("has no effect here, it is for TensorRT-LLM")
    said_of_both = settings.warnings_under(Adapter.LINKER)
    assert ["for vLLM and TensorRT-LLM" in line for line in said_of_both] == [False, True]


def test_who_sets_what_sglang_has_itself_is_told_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "20")
    settings = KvbmSettings.from_env()
    assert settings.warnings_under(Adapter.HICACHE) == (
        "kvbm: DYN_KVBM_CPU_CACHE_GB=20.0: has no effect here, it is for vLLM, TensorRT-LLM and SGLang's "
        "linker; SGLang has the host tier: --hicache-size or --hicache-ratio",
    )
    assert settings.warnings_under(Adapter.LINKER) == ()


def test_the_native_modules_variable_reads_as_a_setting_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FALSE == readers._FALSE
    for value in FALSE:
        monkeypatch.setenv("KVBM_NATIVE", value)
        assert not KvbmSettings.from_env().native
    monkeypatch.setenv("KVBM_NATIVE", "2")
    settings = KvbmSettings.from_env()
    assert settings.native
    (line,) = settings.warnings
    assert line.startswith("kvbm: KVBM_NATIVE=2: write true or false") and line.endswith("using true")


@pytest.mark.parametrize(("is_loaded", "num_lines"), [(True, 1), (False, 0)])
def test_switching_the_native_module_off_too_late_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_loaded: bool, num_lines: int
) -> None:
    """As a key of an engine's extra config it comes when the module has been loaded."""
    monkeypatch.setattr(assembly, "native", object() if is_loaded else None)
    settings = KvbmSettings.from_env({"native": False, "cpu_cache_gb": 1})
    with caplog.at_level(logging.WARNING, "kvbm"):
        assembly.announce(settings, Adapter.VLLM)
    assert len([line for line in caplog.messages if "KVBM_NATIVE=false" in line]) == num_lines


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"cpu_cache_gb": 20, "disk_cache_gb": 20},
            "DYN_KVBM_DISK_CACHE_GB=20: holds no more than DYN_KVBM_CPU",
        ),
        (
            {"cpu_cache_gb": 20, "disk_cache_gb": 8},
            "DYN_KVBM_DISK_CACHE_GB=8: holds no more than DYN_KVBM_CPU",
        ),
        (
            {"cpu_cache_override_num_blocks": 9, "disk_cache_override_num_blocks": 9},
            "_NUM_BLOCKS=9: holds no more than DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS=9",
        ),
        ({"cpu_cache_gb": 20, "disk_cache_gb": 21}, ""),
        ({"cpu_cache_gb": 20, "disk_cache_gb": 0}, ""),
        ({"disk_cache_gb": 8}, ""),
        ({"cpu_cache_gb": 20, "disk_cache_override_num_blocks": 9}, ""),  # not before a block's size is known
    ],
)
def test_a_disk_that_is_no_larger_than_the_host_is_told(given: dict[str, object], said: str) -> None:
    warnings = KvbmSettings.from_env(given).warnings
    assert len(warnings) == bool(said) and all(said in line for line in warnings)


@pytest.mark.parametrize(
    ("given", "num_lines"),
    [
        ({"cpu_cache_gb": 0.001, "disk_cache_override_num_blocks": 1000}, 1),
        ({"cpu_cache_gb": 0.001, "disk_cache_override_num_blocks": 1001}, 0),
        ({"cpu_cache_override_num_blocks": 1000, "disk_cache_gb": 0.001}, 1),
        ({"cpu_cache_gb": 0.001, "disk_cache_gb": 0.001}, 0),  # told before
        ({"disk_cache_override_num_blocks": 10}, 0),
    ],
)
def test_sizes_of_other_measures_are_compared_when_a_blocks_size_is_known(
    given: dict[str, object], num_lines: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = KvbmSettings.from_env({**given, "disk_cache_dir": str(tmp_path)})
    tiers = assembly.LowerTiers(settings, 1, ManualClock(), "model")
    with caplog.at_level(logging.WARNING, "kvbm"):
        tiers.plans()["disk"](1000, "fingerprint")
    tiers.close()
    told = [line for line in caplog.messages if "is no larger than the host tier (" in line]
    assert len(told) == num_lines
