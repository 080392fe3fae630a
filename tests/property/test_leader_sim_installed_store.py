"""Small engines with stores from an installed package, the one of docs/extending.md, below host and disk:
records on real clients of it, which other engines write, lose and damage too. Right bytes through everything.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, ValuesView
from itertools import count
from pathlib import Path
from random import Random
from typing import ClassVar, cast

import pytest

from kvbm_core.errors import Outcome
from kvbm_core.storage.extents import Extent
from kvbm_core.storage.remote.engine import GetItem, PutItem
from kvbm_core.storage.remote.record_store import RecordStore
from kvbm_core.storage.stores import StoreOptions, StoreSpec, open_engine, open_store
from kvbm_core.testing.sim_store import SimBlock, SimStore, StoreLeaderSim
from kvbm_core.testing.sim_worker import PAGE_BYTES
from kvbm_core.testing.store_contract import LONG_S
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.tiers.lower import Name
from kvbm_core.types import BlockKey
from tests.outside import sqlite_store
from tests.property.simulations import play
from tests.property.test_leader_sim_disk import GROUPS, has_states, run, sim_of

SEEDS_EACH = 4
ROOM_BYTES = 1 << 16
"""More than a record has here."""


class Records(MutableMapping[Name, dict[BlockKey, SimBlock]]):
    """What one rank has in the store, as the simulation reads and writes it."""

    def __init__(self, url: str, shard: str) -> None:
        self.store = cast(RecordStore, open_store(StoreSpec(url, PAGE_BYTES, "meaning", shard)))
        self._keys: dict[Name, tuple[BlockKey, ...]] = {}  # of all that was ever put there

    def __setitem__(self, name: Name, blocks: dict[BlockKey, SimBlock]) -> None:
        extent = Extent(name[1], tuple(blocks))
        payloads = [memoryview(block.payload) for block in blocks.values()]
        assert self.store.put_extents([extent], [payloads], deadline_s=LONG_S) == [Outcome.OK]
        self._keys[name] = extent.keys

    def __getitem__(self, name: Name) -> dict[BlockKey, SimBlock]:
        keys = self._keys[name]
        targets = [memoryview(bytearray(PAGE_BYTES)) for _ in keys]
        (outcomes,) = self.store.get_extents([Extent(name[1], keys)], [targets], deadline_s=LONG_S)
        assert set(outcomes) <= {Outcome.OK, Outcome.MISS, Outcome.CORRUPT}
        if Outcome.MISS in outcomes:
            raise KeyError(name)
        found = zip(keys, targets, outcomes, strict=True)
        return {key: SimBlock(bytes(target), end is Outcome.CORRUPT) for key, target, end in found}

    def __delitem__(self, name: Name) -> None:
        extent = Extent(name[1], self._keys.pop(name))
        assert self.store.remove_extents([extent], deadline_s=LONG_S) == [Outcome.OK]

    def __contains__(self, name: object) -> bool:
        key, num_blocks = cast(Name, name)
        return self.store.contains_extents([Extent(num_blocks, (key,))], deadline_s=LONG_S) == [Outcome.OK]

    def __iter__(self) -> Iterator[Name]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def values(self) -> ValuesView[dict[BlockKey, SimBlock]]:
        """Of those that are there still."""
        return {name: found for name in self if (found := self.get(name))}.values()


class InstalledStore(SimStore):
    """A SimStore in the package's store."""

    folder: ClassVar[Path]
    opened: ClassVar[list[RecordStore]]
    _numbers = count()

    def __init__(self, num_ranks: int) -> None:
        super().__init__(0)
        self._url = f"sqlite://{self.folder}/{next(self._numbers)}.db"
        for rank in range(num_ranks):
            records = Records(self._url, f"{rank}of{num_ranks}")
            self.extents.append(records)
            self.opened.append(records.store)

    def lose(self, random: Random) -> None:
        """By another client of the store: a bit of an object changes, or it goes."""
        other = open_engine(self._url, StoreOptions())
        for name in sorted(info.name for info in other.scan("", deadline_s=LONG_S)):
            if random.random() < 0.1:
                if random.random() < 0.3:
                    room = memoryview(bytearray(ROOM_BYTES))
                    (got,) = other.get([GetItem(name, [room])], deadline_s=LONG_S)
                    room[random.randrange(got.num_bytes)] ^= 1
                    done = other.put([PutItem(name, [room[: got.num_bytes]])], deadline_s=LONG_S)
                else:
                    done = other.remove([name], deadline_s=LONG_S)
                assert done == [Outcome.OK]
        other.close()


class InstalledLeaderSim(StoreLeaderSim):
    """A StoreLeaderSim whose stores are the package's."""

    make_store = InstalledStore


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    opened: list[RecordStore] = []
    monkeypatch.setattr(InstalledStore, "folder", tmp_path, raising=False)
    monkeypatch.setattr(InstalledStore, "opened", opened, raising=False)
    with sqlite_store(tmp_path / "site"):
        yield
        for store in opened:
            store.close()


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_bytes_stay_right_through_a_store_of_somebody_else(groups: tuple[GroupSpec, ...], seed: int) -> None:
    least = {"fetched": 1 if has_states(groups) else SEEDS_EACH, "stored": SEEDS_EACH}
    play(seed, SEEDS_EACH, lambda random: run(sim_of(groups, random, InstalledLeaderSim)), seen, least)


def seen(sim: StoreLeaderSim) -> dict[str, float]:
    """What it did that not each of them does."""
    return {"fetched": sim.moved("fetched"), "stored": sim.moved("stored")}
