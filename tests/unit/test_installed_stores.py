"""Stores of installed packages, by the scheme of a URL, and one line for what cannot be had."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbm_core.clock import ManualClock
from kvbm_core.config import KvbmSettings
from kvbm_core.config.remote_url import STORES
from kvbm_core.errors import ConfigError
from kvbm_core.runtime.assembly import lower_makers, store_options
from kvbm_core.storage.extents import EXTENT_BYTES
from kvbm_core.storage.stores import StoreOptions, extent_bytes, open_engine
from kvbm_core.testing.memory_engine import MemoryEngine
from tests.outside import installed
from tests.unit.doctor_bench import look

POINTS = {
    "mine": f"{__name__}:Mine",
    "broken": f"{__name__}:fail",
    "nothing": f"{__name__}:forget",
    "shut": f"{__name__}:refuse",
    "text": f"{__name__}:STORES",
    "gone": "no_such_module:make",
}
SETTING = "kvbm: KVBM_REMOTE_URL="
URL = "mine://A/b?c=1"


class Mine(MemoryEngine):
    """Remembers for what it was made."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        super().__init__()
        self.made_for = url, options


def fail(url: str, options: StoreOptions) -> MemoryEngine:
    """As a driver may."""
    raise RuntimeError("out of\norder")


def forget(url: str, options: StoreOptions) -> None:
    """To return what was made."""


def refuse(url: str, options: StoreOptions) -> MemoryEngine:
    """As one should."""
    raise ConfigError("MINE_KEY", "(unset)", "set it")


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path / "mine", STORES, POINTS, "mine-package"):
        yield


def refused(url: str) -> str:
    """What opening says, in one line."""
    with pytest.raises(ConfigError) as caught:
        open_engine(url, StoreOptions())
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_package_makes_the_engine_of_its_url_with_the_options() -> None:
    settings = KvbmSettings.from_env({"cpu_cache_gb": 1, "remote_url": URL, "remote_deadline_s": 3})
    assert settings.store_urls == (URL,) and settings.warnings == (), "it needs no size"
    options = store_options(settings)
    engine = open_engine(URL, options)
    assert isinstance(engine, Mine) and engine.made_for == (URL, options) and options.deadline_s == 3


def test_the_leader_needs_the_name_alone() -> None:
    settings = KvbmSettings.from_env({"cpu_cache_gb": 1, "remote_url": "gone://x"})
    assert list(lower_makers(settings, ManualClock())) == ["remote"]
    assert extent_bytes("gone://x") == EXTENT_BYTES and "no_such_module" not in sys.modules


def test_a_size_is_said_to_be_in_vain() -> None:
    given = {"cpu_cache_gb": 1, "remote_url": "mine://x", "remote_cache_gb": 5}
    (line,) = KvbmSettings.from_env(given).warnings
    assert line.startswith("kvbm: KVBM_REMOTE_CACHE_GB=5.0: is for a shared directory; ")


@pytest.mark.parametrize(
    ("scheme", "why"),
    [
        ("broken", "RuntimeError: out of order"),
        ("nothing", "TypeError: it makes no ObjectEngine, but a NoneType"),
        ("text", "TypeError: 'str' object is not callable"),
        ("gone", "ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_what_cannot_be_used_is_told_with_its_package(scheme: str, why: str) -> None:
    said = f"{POINTS[scheme]} of the package mine-package cannot be used: {why}"
    assert refused(f"{scheme}://x") == f"{SETTING}{scheme}://x: {said}"
    (finding,) = look("stores", cpu_cache_gb=1, remote_url=f"{scheme}://x")
    assert (finding.seen, finding.remedy) == (f"KVBM_REMOTE_URL={scheme}://x", said)


def test_what_a_package_says_itself_is_said_as_it_is() -> None:
    assert refused("shut://x") == "kvbm: MINE_KEY=(unset): set it"


def test_a_scheme_that_nobody_has_is_told_with_the_packages_that_were_found() -> None:
    known = "no store has such a URL; there are az://, file://, gs://"
    found = "; of installed packages: " + ", ".join(f"{name}:// of mine-package" for name in sorted(POINTS))
    with pytest.raises(ConfigError) as caught:
        KvbmSettings.from_env({"cpu_cache_gb": 1, "remote_url": "other://x"})
    for said in (str(caught.value), refused("other://x")):
        assert said.startswith(f"{SETTING}other://x: {known}") and said.endswith(found)


def test_of_two_packages_with_one_scheme_neither_is_taken(tmp_path: Path) -> None:
    line = (
        "there is more than one such store: mine:// of mine-package, mine:// of yours; uninstall all but one"
    )
    with installed(tmp_path / "yours", STORES, {"mine": POINTS["mine"]}, "yours"):
        assert refused("mine://x") == f"{SETTING}mine://x: {line}"
        with pytest.raises(ConfigError, match=line):
            KvbmSettings.from_env({"cpu_cache_gb": 1, "remote_url": "mine://x"})


def test_one_package_that_is_found_twice_is_one(tmp_path: Path) -> None:
    with installed(tmp_path / "again", STORES, POINTS, "mine-package"):
        open_engine("mine://x", StoreOptions()).close()


def test_kvbms_own_schemes_stay_its_own(tmp_path: Path) -> None:
    with installed(tmp_path / "yours", STORES, {"mooncake": f"{__name__}:fail"}, "yours"):
        assert KvbmSettings.from_env({"cpu_cache_gb": 1, "remote_url": "mooncake://host"}).store_urls
        assert "yours" not in refused("mooncake://")


def test_a_password_in_a_url_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match="no name or password belongs there") as caught:
        KvbmSettings.from_env({"cpu_cache_gb": 1, "remote_url": "mine://me:hunter2@host"})
    assert "hunter2" not in str(caught.value)
