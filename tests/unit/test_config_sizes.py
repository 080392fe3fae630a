"""Settings: gigabytes and blocks to slots of the host and disk tiers, and whether that fits into memory."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import ConfigError
from tests.unit.test_config import clean_environment  # noqa: F401 (a fixture, for every test)


@pytest.mark.parametrize("env", ["DYN_KVBM_DISK_CACHE_GB", "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS"])
def test_a_disk_of_size_zero_is_no_disk(monkeypatch: pytest.MonkeyPatch, env: str) -> None:
    monkeypatch.setenv(env, "0")
    settings = KvbmSettings.from_env({"cpu_cache_gb": 1})
    assert settings.warnings == () and not settings.has_disk_tier and settings.disk_tier_slots(1000) == 0
    with pytest.raises(ConfigError, match="no cache tier is configured"):
        KvbmSettings.from_env().require_tier()


def test_no_disk_blocks_win_over_gigabytes() -> None:
    settings = KvbmSettings.from_env(
        {"disk_cache_gb": 8, "disk_cache_override_num_blocks": 0, "cpu_cache_gb": 1}
    )
    assert settings.disk_tier_slots(1000) == 0 and not settings.has_disk_tier


def test_no_tier() -> None:
    with pytest.raises(ConfigError, match=r"DYN_KVBM_CPU_CACHE_GB=\(unset\): no cache tier"):
        KvbmSettings.from_env().require_tier()


@pytest.mark.parametrize(
    ("disk", "block_bytes", "slots"),
    [
        ({"disk_cache_gb": 8}, 1_000_000, 512),  # half a gigabyte passes through
        ({"disk_cache_gb": 8}, 100_000_000, 64),  # large blocks: enough of them to have the disk busy
        ({"disk_cache_gb": 0.01}, 1_000_000, 10),  # never more than the disk has
        ({"disk_cache_override_num_blocks": 3}, 1_000_000, 3),
    ],
)
def test_disk_alone_takes_a_little_host_memory(disk: dict[str, object], block_bytes: int, slots: int) -> None:
    settings = KvbmSettings.from_env(disk)
    settings.require_tier()
    assert settings.has_disk_tier and not settings.has_host_tier
    assert settings.host_tier_slots(block_bytes) == slots


def test_a_shared_directory_alone_is_told_what_to_add() -> None:
    alone = {"remote_url": "file:///mnt/kv/blocks", "remote_cache_gb": 500}
    with pytest.raises(
        ConfigError,
        match=r"DYN_KVBM_CPU_CACHE_GB=\(unset\): blocks reach KVBM_REMOTE_URL by way of host memory",
    ) as caught:
        KvbmSettings.from_env(alone).require_tier()
    assert "such as 20" in str(caught.value)
    KvbmSettings.from_env({**alone, "cpu_cache_gb": 20}).require_tier()


@pytest.mark.shows("DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS")
def test_the_disks_size_is_total_over_all_ranks_and_the_number_of_blocks_wins() -> None:
    assert KvbmSettings.from_env({"disk_cache_gb": 0.5094}).disk_tier_slots(100_000) == 5094
    both = KvbmSettings.from_env({"disk_cache_gb": 8, "disk_cache_override_num_blocks": 7})
    assert both.disk_tier_slots(10**12) == 7
    assert KvbmSettings.from_env({"cpu_cache_gb": 1}).disk_tier_slots(1000) == 0


def test_a_disk_that_holds_no_block_is_said_in_one_line() -> None:
    alone = KvbmSettings.from_env({"disk_cache_gb": 0.001})
    for size in (alone.disk_tier_slots, alone.host_tier_slots):
        with pytest.raises(
            ConfigError, match=r"DYN_KVBM_DISK_CACHE_GB=0\.001: holds no block; one takes 0\.002000000 GB$"
        ):
            size(2_000_000)


@pytest.mark.parametrize(
    ("gb", "block_bytes", "slots"),
    [(0.001, 1000, 1000), (0.001, 4000, 250), (20, 3, 6666666666), (0.5094, 100_000, 5094)],
)
def test_size_is_total_over_all_ranks(gb: float, block_bytes: int, slots: int) -> None:
    settings = KvbmSettings.from_env({"cpu_cache_gb": gb})
    settings.require_tier()
    assert settings.host_tier_slots(block_bytes) == slots


@pytest.mark.shows("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS")
def test_override_wins_and_is_a_tier_by_itself() -> None:
    settings = KvbmSettings.from_env({"cpu_cache_gb": 1, "cpu_cache_override_num_blocks": 7})
    assert settings.host_tier_slots(10**12) == 7
    KvbmSettings.from_env({"cpu_cache_override_num_blocks": "7"}).require_tier()


def test_less_than_one_block() -> None:
    settings = KvbmSettings.from_env({"cpu_cache_gb": 0.001})
    with pytest.raises(
        ConfigError, match=r"DYN_KVBM_CPU_CACHE_GB=0\.001: holds no block; one takes 0\.002000000 GB"
    ):
        settings.host_tier_slots(2_000_000)
    with pytest.raises(ValueError, match="cannot have 0 bytes"):
        settings.host_tier_slots(0)


def test_what_says_how_large_the_host_tier_is() -> None:
    assert KvbmSettings.from_env({"cpu_cache_gb": 20}).host_size == ("DYN_KVBM_CPU_CACHE_GB", 20.0)
    both = KvbmSettings.from_env({"cpu_cache_gb": 20, "cpu_cache_override_num_blocks": 5})
    assert both.host_size == ("DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS", 5)


@given(st.decimals("0.000001", "1000000", places=6), st.integers(1, 10**10))
def test_slots_are_exact(gb: object, block_bytes: int) -> None:
    exact = int(Fraction(str(gb)) * 10**9) // block_bytes
    settings = KvbmSettings.from_env({"cpu_cache_gb": str(gb)})
    if exact == 0:
        with pytest.raises(ConfigError, match="holds no block"):
            settings.host_tier_slots(block_bytes)
    else:
        assert settings.host_tier_slots(block_bytes) == exact
