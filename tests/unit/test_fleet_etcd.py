"""What the settings say of etcd; no server."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError
from kvbm_core.fleet.etcd import EtcdOptions, load_etcd3
from tests.engines.certificates import make_certificates

FILE = __file__  # one that can be read


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in KvbmSettings.env_names().values():
        monkeypatch.delenv(variable, raising=False)


def options(**given: object) -> EtcdOptions | None:
    return EtcdOptions.from_settings(KvbmSettings.from_env(given))


@pytest.mark.parametrize(
    ("endpoints", "servers"),
    [
        ("http://127.0.0.1:2379", (("127.0.0.1", 2379),)),
        ("127.0.0.1:1,localhost", (("127.0.0.1", 1), ("localhost", 2379))),
        ("http://[::1]:7, http://127.0.0.1", (("::1", 7), ("127.0.0.1", 2379))),
    ],
)
def test_servers(endpoints: str, servers: tuple[tuple[str, int], ...]) -> None:
    found = options(etcd_endpoints=endpoints)
    assert found is not None and found.servers == servers and not found.is_tls


def test_none_without_endpoints() -> None:
    assert options(etcd_auth_ca=FILE) is None


@pytest.mark.shows("ETCD_AUTH_CA", "ETCD_AUTH_CLIENT_CERT", "ETCD_AUTH_CLIENT_KEY")
def test_tls(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    key = str(files.key)
    names = {"etcd_auth_client_cert": str(files.certificate), "etcd_auth_client_key": key}
    names["etcd_auth_ca"] = str(files.authority)
    for given in ({"etcd_endpoints": "10.0.0.1", **names}, {"etcd_endpoints": "https://10.0.0.1", **names}):
        found = options(**given)
        assert found is not None and found.is_tls
        files_of = found.ca_file, found.cert_file, found.key_file
        assert files_of == (names["etcd_auth_ca"], names["etcd_auth_client_cert"], key)
    system = options(etcd_endpoints="https://10.0.0.1")
    assert system is not None and Path(system.ca_file).exists(), "the system's authorities"


@pytest.mark.shows("KVBM_FLEET_INSECURE")
def test_a_plain_wire_to_another_machine_has_to_be_asked_for() -> None:
    with pytest.raises(
        ConfigError, match=r"^kvbm: ETCD_ENDPOINTS=http://10\.0\.0\.1:2379: .*KVBM_FLEET_INSECURE=1"
    ):
        options(etcd_endpoints="http://127.0.0.1:1,http://10.0.0.1")
    assert options(etcd_endpoints="http://10.0.0.1", fleet_insecure=True) is not None


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({"etcd_endpoints": "ftp://127.0.0.1"}, "ETCD_ENDPOINTS"),
        ({"etcd_endpoints": "http://127.0.0.1:port"}, "ETCD_ENDPOINTS"),
        ({"etcd_endpoints": "http://127.0.0.1:99999"}, "ETCD_ENDPOINTS"),
        ({"etcd_endpoints": "http://"}, "ETCD_ENDPOINTS"),
        ({"etcd_endpoints": ","}, "ETCD_ENDPOINTS"),
        ({"etcd_endpoints": "http://[::1"}, "ETCD_ENDPOINTS"),
        ({"etcd_endpoints": "http://127.0.0.1:0"}, "ETCD_ENDPOINTS"),
        ({"etcd_endpoints": "127.0.0.1,http://kv:word@127.0.0.1"}, "ETCD_ENDPOINTS"),
        ({"etcd_endpoints": "https://x,http://127.0.0.1"}, "ETCD_ENDPOINTS"),
        ({"etcd_endpoints": "https://x", "etcd_auth_ca": FILE}, "ETCD_AUTH_CA"),
        ({"etcd_endpoints": "https://x", "etcd_auth_ca": "/not/there"}, "ETCD_AUTH_CA"),
        ({"etcd_endpoints": "https://x", "etcd_auth_client_cert": FILE}, "ETCD_AUTH_CLIENT_KEY"),
        ({"etcd_endpoints": "https://x", "etcd_auth_client_key": FILE}, "ETCD_AUTH_CLIENT_CERT"),
        ({"etcd_endpoints": "127.0.0.1", "etcd_auth_username": "kv"}, "ETCD_AUTH_PASSWORD"),
    ],
)
def test_what_cannot_be_used_is_one_line(given: dict[str, object], setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        options(**given)
    assert caught.value.setting == setting and "\n" not in str(caught.value)


def test_certificates_that_do_not_go_together_are_one_line(tmp_path: Path) -> None:
    files, other = make_certificates(tmp_path / "ours"), make_certificates(tmp_path / "other")
    for certificate, key in ((files.certificate, other.key), (files.key, files.certificate), (FILE, FILE)):
        given = {"etcd_auth_client_cert": str(certificate), "etcd_auth_client_key": str(key)}
        with pytest.raises(ConfigError, match=f"does not go with the key {key}") as caught:
            options(etcd_endpoints="https://127.0.0.1", **given)
        assert caught.value.setting == "ETCD_AUTH_CLIENT_CERT" and "\n" not in str(caught.value)


def test_a_password_stays_out_of_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETCD_AUTH_PASSWORD", "hidden-word")
    found = options(etcd_endpoints="127.0.0.1", etcd_auth_username="kv")
    assert found is not None and found.password == "hidden-word" and "hidden-word" not in repr(found)
    with pytest.raises(ConfigError, match="command line"):
        options(etcd_auth_password="hidden-word")
    for url in (
        "http://kv:hidden-word@10.0.0.1",
        "https://kv:hidden-word@[::1",
        "kv:hidden-word@x:port",
        "kv:hidden-word,@x",
    ):
        with pytest.raises(ConfigError) as caught:
            options(etcd_endpoints=f"http://127.0.0.1,{url}", fleet_insecure=True)
        assert "hidden-word" not in str(caught.value)


def test_without_the_package_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "etcd3", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^kvbm: ETCD_ENDPOINTS=.*extra etcd") as caught:
        load_etcd3()
    assert "\n" not in str(caught.value)
