"""From device memory through host memory into a real pooled store, and back in another process's place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.config import KvbmSettings
from kvbm_core.errors import Outcome
from kvbm_core.runtime.assembly import rank_options
from kvbm_core.storage.remote.mooncake import MooncakeEngine
from kvbm_core.storage.remote.record_store import RecordStore
from kvbm_core.testing.executor_bench import LONG_S
from tests.engines.mooncake_pool import MooncakePool
from tests.engines.valkey_server import ValkeyServer
from tests.unit.local_bench import KEYS, LocalBench


@pytest.fixture
def valkey_url(tmp_path: Path) -> Iterator[str]:
    with ValkeyServer(tmp_path, password="") as server:
        yield server.url


@pytest.fixture
def mooncake_url(tmp_path: Path) -> Iterator[str]:
    with MooncakePool(tmp_path) as pool:
        yield f"mooncake://{pool.address}"


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("valkey", marks=pytest.mark.valkey),
        pytest.param(
            "mooncake",
            marks=[
                pytest.mark.mooncake,
                pytest.mark.nightly("joins and leaves for seconds, or 90; test_pooled_stores.py has a pool"),
            ],
        ),
    ],
)
def test_what_one_process_has_stored_another_one_finds(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[tuple[object, int, int]] = []

    def watch(taker: type[RecordStore] | type[MooncakeEngine]) -> None:
        plain: Any = taker.register

        def register(self: object, address: int, num_bytes: int) -> None:
            registered.append((taker, address, num_bytes))
            plain(self, address, num_bytes)

        monkeypatch.setattr(taker, "register", register)

    watch(RecordStore)
    watch(MooncakeEngine)
    url = request.getfixturevalue(f"{kind}_url")
    first = LocalBench(tmp_path / "one", 4, store=url)
    assert first.store(KEYS[:4]) is Outcome.OK
    slab = first.tiers._memory.slab
    span = (slab.address, slab.num_slots * slab.slot_bytes)
    told = {taker for taker, *memory in registered if tuple(memory) == span}
    wanted = {RecordStore, MooncakeEngine} if kind == "mooncake" else {RecordStore}
    assert told == wanted, "who wants to know memory is told"
    first.close()
    second = LocalBench(tmp_path / "two", 40, store=url)
    asked = [*KEYS[:4], KEYS[7]]
    second.tiers.match("a", asked)
    with second.tiers._lock:
        while second.tiers._chain.host.resident_blocks < 4:
            assert second.tiers._lock.wait_for(lambda: not len(second.tiers._jobs), LONG_S)
            second.tiers.match("a", asked)
    assert second.tiers.match("a", asked) == 4
    assert second.load("a", KEYS[:4]) is Outcome.OK and second.came(KEYS[:4])
    second.close()


@pytest.mark.shows(
    "KVBM_REMOTE_USERNAME", "KVBM_REMOTE_PASSWORD_FILE", "KVBM_REMOTE_CA_FILE", "KVBM_REMOTE_CERT_FILE"
)
def test_a_servers_settings_reach_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"USERNAME": "kv", "PASSWORD_FILE": "p", "CA_FILE": "c", "CERT_FILE": "d"}
    for name, value in values.items():
        monkeypatch.setenv(f"KVBM_REMOTE_{name}", value)
    monkeypatch.setenv("KVBM_REMOTE_URL", "rediss://kv.example")
    login = rank_options(KvbmSettings.from_env()).store.login
    assert [login.username, login.password_file, login.ca_file, login.cert_file] == [*values.values()]
