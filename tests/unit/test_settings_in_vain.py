"""What `kvbm config` says of settings that have no effect, or none without another one, is so."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError
from kvbm_core.runtime.assembly import lower_makers, peer_options, rank_options, remote_tiers, store_options
from kvbm_core.storage.remote.login import ServerLogin
from kvbm_core.storage.remote.s3_client import S3Options
from kvbm_core.storage.stores import StoreSpec, open_store
from kvbm_core.testing.store_contract import key_of
from tests.unit.test_config import LATER, clean_environment

__all__ = ["clean_environment"]

ROOT = Path(__file__).resolve().parents[2]
ENV = KvbmSettings.env_names()
KEYS = {"object_access_key": "name", "object_secret_key": "not-a-secret"}
"""Come in the environment, both or none."""
OF_STORES: dict[str, tuple[str, object]] = {
    "remote_cache_gb": ("max_bytes", 0.5),
    "remote_trust": ("trust", "group"),
    "remote_username": ("username", "kv"),
    "remote_password_file": ("password_file", __file__),
    "remote_ca_file": ("ca_file", "/nowhere/ca.pem"),
    "remote_cert_file": ("cert_file", "/nowhere/cert.pem"),
    "remote_secret_file": ("secret_file", __file__),
    "remote_encrypt": ("encrypts", True),
    "remote_codec": ("codec", "zstd"),
    "object_endpoint": ("endpoint", "http://127.0.0.1:9"),
    "object_region": ("region", "eu-north-7"),
    "object_access_key": ("access_key", ""),
    "object_secret_key": ("secret_key", ""),
}
"""What each is called in a store's options, and a value."""


class Looked:
    """Options that note in ``read`` which of their fields somebody reads."""

    def __init__(self, options: object, read: set[str]) -> None:
        self._options, self._read = options, read

    def __getattr__(self, name: str) -> Any:
        method = getattr(type(self._options), name, None)
        if callable(method):
            return partial(method, self)
        value = getattr(self._options, name)
        if isinstance(value, ServerLogin | S3Options):
            return Looked(value, self._read)
        self._read.add(name)
        return value


@contextmanager
def urls(folder: Path) -> Iterator[dict[str, str]]:
    """A store of each kind; a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = f"127.0.0.1:{silent.getsockname()[1]}"
        yield {
            "file": f"file://{folder}",
            "s3": "s3://bucket",
            "redis": f"redis://{server}",
            "rediss": f"rediss://{server}",
        }


def read_by_store(url: str, settings: KvbmSettings) -> set[str]:
    """What a store reads of its options when it is opened and asked for a block, if it can be."""
    read = set[str]()
    options: Any = Looked(store_options(settings), read)
    with (
        suppress(ConfigError),
        closing(open_store(StoreSpec(url, 4096, "m", "0of1", "model", options))) as one,
    ):
        one.contains_many([key_of(1)], deadline_s=0.05)
    return read


def settings_with(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, **others: object
) -> KvbmSettings:
    """And with memory for a host tier."""
    if name in KEYS:
        for key, text in KEYS.items():
            monkeypatch.setenv(ENV[key], text)
        return KvbmSettings.from_env({"cpu_cache_gb": 1, **others})
    return KvbmSettings.from_env({"cpu_cache_gb": 1, **others, name: value})


def is_noted(settings: KvbmSettings, name: str) -> bool:
    """As `kvbm config` shows it below the table, and the log at the start."""
    return any(line.startswith(f"kvbm: {ENV[name]}=") for line in settings.warnings)


@pytest.mark.parametrize("scheme", ["file", "s3", "redis", "rediss"])
@pytest.mark.parametrize("name", OF_STORES)
def test_what_a_store_does_not_read_is_noted_and_nothing_else(
    name: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    field, value = OF_STORES[name]
    with urls(tmp_path) as stores:
        others: dict[str, object] = {"remote_url": stores[scheme]}
        if scheme == "file":
            others["remote_cache_gb"] = 0
        if name == "remote_encrypt":
            (tmp_path / "secret").write_text("a secret of this test")
            others["remote_secret_file"] = str(tmp_path / "secret")
        settings = settings_with(monkeypatch, name, value, **others)
        is_read = field in read_by_store(stores[scheme], settings)
        if scheme == "rediss" and field in ("username", "password_file"):
            is_read = True  # behind a handshake that does not end here: as with redis
        assert is_noted(settings, name) is not is_read


OF_STORES_ALONE = {
    **{name: value for name, (_, value) in OF_STORES.items() if name != "remote_encrypt"},
    "remote_filter": "hit",
    "remote_deadline_s": 1,
    "remote_wait_s": 1,
    "remote_load": "always",
    "remote_head_shards": 4,
    "object_bucket": "bucket",
}


@pytest.mark.parametrize("name", OF_STORES_ALONE)
def test_without_a_store_what_is_for_stores_is_noted_and_there_is_none(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_with(monkeypatch, name, OF_STORES_ALONE[name])
    assert is_noted(settings, name)
    assert not remote_tiers(settings) and not lower_makers(settings, ManualClock())
    assert not settings.has_lower_tier and not settings.keeps_heads and not settings.is_lossy


@pytest.mark.parametrize(("name", "value"), [("remote_wait_s", 1), ("remote_load", "always")])
def test_what_is_for_peers_too_is_not_noted_where_there_are_peers(name: str, value: object) -> None:
    settings = KvbmSettings.from_env({"cpu_cache_gb": 1, "peers": "zmq", name: value})
    assert not is_noted(settings, name) and list(lower_makers(settings, ManualClock())) == ["peers"]


@pytest.mark.parametrize(
    ("name", "given", "has_peers"),
    [
        ("peers", {"peers": "zmq", "disk_cache_gb": 1}, False),
        ("peers", {"peers": "zmq", "cpu_cache_gb": 1}, True),
        ("peer_bind", {"peer_bind": "127.0.0.1:7", "cpu_cache_gb": 1}, False),
        ("peer_bind", {"peer_bind": "127.0.0.1:7", "cpu_cache_gb": 1, "peers": "zmq"}, True),
        ("peer_deadline_s", {"peer_deadline_s": 1, "cpu_cache_gb": 1}, False),
        ("peer_export_gb", {"peer_export_gb": 1, "cpu_cache_gb": 1}, False),
    ],
)
def test_what_is_for_peers_is_noted_where_there_are_none(
    name: str, given: dict[str, object], has_peers: bool
) -> None:
    settings = KvbmSettings.from_env(given)
    assert is_noted(settings, name) is not has_peers
    assert (peer_options(settings, "namespace", 0) is not None) is has_peers
    assert ("peers" in lower_makers(settings, ManualClock())) is has_peers


@pytest.mark.parametrize(
    ("sizes", "is_straight"),
    [
        ({"disk_cache_gb": 1}, True),
        ({"disk_cache_gb": 1, "cpu_cache_gb": 0.5}, False),
        ({"disk_cache_gb": 1, "cpu_cache_override_num_blocks": 9}, False),
        ({"cpu_cache_gb": 1}, False),
        ({"disk_cache_gb": 0, "cpu_cache_gb": 1}, False),
    ],
)
def test_the_way_straight_to_the_device_is_noted_where_it_is_not_gone(
    sizes: dict[str, object], is_straight: bool
) -> None:
    settings = KvbmSettings.from_env({**sizes, "disk_to_device": "nixl-gds"})
    assert is_noted(settings, "disk_to_device") is not is_straight
    is_gone = settings.has_disk_tier and rank_options(settings).disk.to_device == "nixl-gds"
    assert is_gone is is_straight


@pytest.mark.parametrize("env", sorted(LATER))
def test_what_has_no_effect_at_all_is_noted_and_nobody_reads_it(
    env: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = (name for name, alias in ENV.items() if alias == env)
    monkeypatch.setenv(env, LATER[env])
    assert is_noted(KvbmSettings.from_env({"cpu_cache_gb": 1}), name)
    folders = ("kvbm_core", "kvbm_vllm", "kvbm_sglang", "kvbm_trtllm")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 100
    users = [path.name for path in paths if re.search(rf"\.{name}\b", path.read_text(encoding="utf-8"))]
    assert not users
