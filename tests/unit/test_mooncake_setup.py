"""Mooncake's own configuration, read as its other users read it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvbm_core.config.addresses import own_address
from kvbm_core.config.server_url import server_url
from kvbm_core.errors import ConfigError
from kvbm_core.storage.remote import mooncake
from kvbm_core.storage.remote.mooncake_setup import TIMEOUTS, read_setup, set_timeouts

MASTER = server_url("mooncake://10.0.0.9:50051")


def test_without_any_no_memory_is_given() -> None:
    setup = read_setup(MASTER, {})
    assert setup == ("10.0.0.9:50051", "", "P2PHANDSHAKE", 0, 0, "tcp", "", "default", 9003)


def test_the_file_goes_before_the_variables_and_the_url_before_both(tmp_path: Path) -> None:
    file = tmp_path / "mooncake.json"
    content = {"protocol": "RDMA", "global_segment_size": "4GB", "master_server_address": "elsewhere:1"}
    file.write_text(json.dumps(content))
    environ = {
        "MOONCAKE_CONFIG_PATH": str(file),
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_DEVICE": "mlx5_0",
        "MOONCAKE_LOCAL_BUFFER_SIZE": "16777216",
        "MOONCAKE_LOCAL_HOSTNAME": "node-7",
        "MOONCAKE_TE_META_DATA_SERVER": "etcd://e:2379",
        "MOONCAKE_TENANT_ID": "blue",
        "MOONCAKE_MASTER": "elsewhere:1",
        "MOONCAKE_MASTER_METRICS_PORT": "9103",
    }
    sizes = (4 << 30, 16 << 20)
    expected = ("10.0.0.9:50051", "node-7", "etcd://e:2379", *sizes, "rdma", "mlx5_0", "blue", 9103)
    assert read_setup(MASTER, environ) == expected


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "much"),
        ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "-1"),
        ("MOONCAKE_GLOBAL_SEGMENT_SIZE", "inf"),
        ("MOONCAKE_LOCAL_BUFFER_SIZE", "GB"),
        ("MOONCAKE_MASTER_METRICS_PORT", "x"),
        ("MOONCAKE_CONFIG_PATH", "no-such-file.json"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^kvbm: {name}={text}: [^\n]*$"):
        read_setup(MASTER, {name: text})


@pytest.mark.parametrize("content", ["", "[1]", "{"])
def test_a_file_that_is_none_is_one_clear_line(tmp_path: Path, content: str) -> None:
    file = tmp_path / "mooncake.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"MOONCAKE_CONFIG_PATH=.*JSON"):
        read_setup(MASTER, {"MOONCAKE_CONFIG_PATH": str(file)})


def test_time_outs_are_set_where_the_user_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = TIMEOUTS
    for name in others:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(first, "77")
    set_timeouts()
    assert [os.environ[name] for name in TIMEOUTS] == ["77", *(TIMEOUTS[name] for name in others)]


def test_the_address_that_others_reach_is_that_towards_the_master() -> None:
    assert own_address("127.0.0.1", 50051) == "127.0.0.1"


def test_without_the_package_the_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name}")

    monkeypatch.setattr(mooncake.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="install mooncake-transfer-engine"):
        mooncake.MooncakeEngine(MASTER)
