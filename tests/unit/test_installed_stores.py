"""Stores of installed packages, by the scheme of a URL, and one line for what cannot be had."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import kvbm
from kvbm_core.cli.main import app
from kvbm_core.clock import ManualClock
from kvbm_core.config import KvbmSettings
from kvbm_core.config.installed import STORES
from kvbm_core.errors import ConfigError, Outcome
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.runtime.assembly import lower_makers, store_options
from kvbm_core.storage import stores
from kvbm_core.storage.extents import EXTENT_BYTES
from kvbm_core.storage.names import ObjectInfo
from kvbm_core.storage.remote import guarded
from kvbm_core.storage.remote.engine import GetItem, Got, PutItem
from kvbm_core.storage.remote.guarded import GuardedEngine
from kvbm_core.storage.stores import (
    StoreOptions,
    StoreSpec,
    extent_bytes,
    open_engine,
    open_store,
    register_engine,
    register_store,
)
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
    "leave": f"{__name__}:leave",
    "LARGE": f"{__name__}:Mine",
    "bad": f"{__name__}:Bad",
    "old": f"{__name__}:Old",
}
SETTING = "kvbm: KVBM_REMOTE_URL="
URL = "mine://A/b?c=1"


class Mine(MemoryEngine):
    """Remembers for what it was made."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        super().__init__()
        self.made_for = url, options


class Bad(MemoryEngine):
    """Each call goes wrong in a way of its own."""

    def __init__(self, url: str, options: StoreOptions) -> None:
        super().__init__()

    def put(self, items: Sequence[PutItem], *, deadline_s: float) -> list[Outcome]:
        raise RuntimeError("boom in\na call")

    def get(self, items: Sequence[GetItem], *, deadline_s: float) -> list[Got]:
        return ["fine"] * len(items)  # type: ignore[list-item]

    def exists(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        return [Outcome.OK] * (len(names) + 1)

    def remove(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        return None  # type: ignore[return-value]

    def renew(self, names: Sequence[str], *, deadline_s: float) -> list[Outcome]:
        sys.exit(3)

    def scan(self, prefix: str, *, deadline_s: float) -> Iterator[ObjectInfo]:
        yield from super().scan(prefix, deadline_s=deadline_s)
        raise KeyError(prefix)

    def close(self) -> None:
        raise RuntimeError("not yet")


class Old(Mine):
    """Waits to be asked what memory it still touches."""

    def holds(self, target: object) -> bool:
        raise AssertionError("nobody asks")

    def close(self) -> None:
        super().close()
        sys.exit(3)


def fail(url: str, options: StoreOptions) -> MemoryEngine:
    """As a driver may."""
    raise RuntimeError("out of\norder")


def leave(url: str, options: StoreOptions) -> MemoryEngine:
    """As a program does that cannot go on."""
    sys.exit(3)


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
    assert isinstance(engine, GuardedEngine) and isinstance(engine._engine, Mine)
    assert engine._engine.made_for == (URL, options) and options.deadline_s == 3


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
        ("leave", "SystemExit: 3"),
    ],
)
def test_what_cannot_be_used_is_told_with_its_package(scheme: str, why: str) -> None:
    said = (
        f"{POINTS[scheme]} of the package mine-package cannot be used: {why}; mend or reinstall that package"
    )
    assert refused(f"{scheme}://x") == f"{SETTING}{scheme}://x: {said}"
    (finding,) = look("stores", cpu_cache_gb=1, remote_url=f"{scheme}://x")
    assert (finding.seen, finding.remedy) == (f"KVBM_REMOTE_URL={scheme}://x", said)


@pytest.fixture
def _unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line was logged so far."""
    monkeypatch.setattr(guarded, "limited_log", RateLimitedLogger())


@pytest.mark.usefixtures("_unsaid")
def test_a_call_that_goes_wrong_costs_its_items_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    engine = open_engine("bad://x", StoreOptions())
    assert engine.remove(["a"], deadline_s=1) == [Outcome.IO_ERROR]
    for _ in range(3):
        assert engine.put([PutItem("a", [])] * 2, deadline_s=1) == [Outcome.IO_ERROR] * 2
        assert engine.get([GetItem("a", [])], deadline_s=1) == [Got(Outcome.IO_ERROR)]
        for call in (engine.exists, engine.remove, engine.renew):
            assert call(["a", "b"], deadline_s=1) == [Outcome.IO_ERROR] * 2
    said = "bad://x: the package mine-package fails in "
    remedy = "; run kvbm_core.testing.engine_contract on it"
    with pytest.raises(OSError, match=f"^{said}scan: KeyError: 'kvbm'{remedy}$"):
        list(engine.scan("kvbm", deadline_s=1))
    engine.close()
    assert caplog.messages == [
        f"kvbm: {said}remove: TypeError: it answered None where 1 of Outcome were expected{remedy}",
        f"kvbm: {said}put: RuntimeError: boom in a call{remedy}",
        f"kvbm: {said}renew: SystemExit: 3{remedy}",
    ]


@pytest.mark.usefixtures("_unsaid")
def test_the_commands_name_the_package_of_a_bad_store() -> None:
    (finding,) = look("stores", cpu_cache_gb=1, remote_url="bad://x")
    said = "the package mine-package fails in "
    assert finding.seen == f"bad://x: cannot write: {said}put: RuntimeError: boom in a call"
    assert finding.remedy == "run kvbm_core.testing.engine_contract on it"
    result = CliRunner().invoke(app, ["remote", "ls", "bad://x"])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"kvbm remote ls: bad://x: {said}scan: KeyError: 'kvbm")
    assert result.stderr.count("\n") == 1


@pytest.mark.usefixtures("_unsaid")
def test_the_library_goes_on_without_a_bad_store(caplog: pytest.LogCaptureFixture) -> None:
    spec = kvbm.BlockSpec("stores", shape=(2, 16, 64), dtype="float16", tokens=16)
    blocks = np.ones((4, *spec.shape), spec.dtype)
    with kvbm.open_cache(spec, host_bytes=1 << 24, remote="bad://x") as cache:
        assert cache.put(list(range(64)), blocks) == cache.get(list(range(64)), blocks) == 4
        assert cache.flush()
    assert all("Traceback" not in line for line in caplog.messages)
    assert not [record for record in caplog.records if record.exc_info]


def test_the_library_says_once_what_a_store_wants() -> None:
    spec = kvbm.BlockSpec("stores", shape=(2, 16, 64), dtype="float16", tokens=16)
    with pytest.raises(ConfigError) as caught:
        kvbm.open_cache(spec, host_bytes=1 << 24, remote="broken://x")
    what = f"{POINTS['broken']} of the package mine-package cannot be used: RuntimeError: out of order"
    assert str(caught.value) == f"kvbm: remote=broken://x: {what}; mend or reinstall that package"


@pytest.fixture
def _registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered is forgotten."""
    for table in ("_ENGINES", "_MAKERS", "_EXTENT_BYTES", "SCHEMES"):
        monkeypatch.setattr(stores, table, getattr(stores, table).copy())


@pytest.mark.usefixtures("_unsaid", "_registers")
def test_what_a_program_registers_is_guarded_as_a_package_is(caplog: pytest.LogCaptureFixture) -> None:
    register_engine("own", Bad)
    engine = open_engine("own://x", StoreOptions())
    assert engine.put([PutItem("a", [])] * 2, deadline_s=1) == [Outcome.IO_ERROR] * 2
    assert engine.remove(["a"], deadline_s=1) == [Outcome.IO_ERROR]
    engine.close()
    remedy = "; run kvbm_core.testing.engine_contract on it"
    said = "kvbm: own://x: the registered Bad fails in "
    assert caplog.messages == [
        f"{said}put: RuntimeError: boom in a call{remedy}",
        f"{said}remove: TypeError: it answered None where 1 of Outcome were expected{remedy}",
    ]
    register_engine("own", fail)
    why = "what is registered for own:// cannot be used: RuntimeError: out of order; mend it"
    assert refused("own://x") == f"{SETTING}own://x: {why}"
    register_engine("own", refuse)
    assert refused("own://x") == "kvbm: MINE_KEY=(unset): set it"


@pytest.mark.usefixtures("_registers")
def test_one_that_waits_to_be_asked_for_late_memory_is_refused() -> None:
    register_engine("own", Old)
    register_store("whole", lambda spec: Old(spec.url, spec.options))  # type: ignore[arg-type, return-value]
    why = (
        "Old has a method holds, which nobody calls: let it enter memory of requests that it has given up in "
        "kvbm_core.storage.late.LATE, and take the method away (docs/extending.md)"
    )
    for url in ("old://x", "own://x"):
        assert refused(url) == f"{SETTING}{url}: {why}"
    with pytest.raises(ConfigError) as caught:
        open_store(StoreSpec("whole://x", 4096, "", "0of1"))
    assert str(caught.value) == f"{SETTING}whole://x: {why}"


def test_a_name_in_large_letters_is_found_too() -> None:
    assert isinstance(open_engine("LARGE://x", StoreOptions()), GuardedEngine)


def test_a_slash_too_few_is_told_with_the_scheme() -> None:
    with pytest.raises(ConfigError, match=r"KVBM_REMOTE_URL=mine:/tmp/x: write mine:// and what follows"):
        KvbmSettings.from_env({"cpu_cache_gb": 1, "remote_url": "mine:/tmp/x"})


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
