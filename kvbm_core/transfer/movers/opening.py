"""How a rank opens its part of a lower tier: a registry of kinds, and the two that come with kvbm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvbm_core.layout.heads import HeadShards
from kvbm_core.storage.disk.allocate import OFF, FileOptions
from kvbm_core.storage.disk.block_file import SUFFIX
from kvbm_core.storage.disk.folder import DiskFolder, has_claim
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.storage.remote.engine import TakesMemory
from kvbm_core.storage.stores import StoreOptions, StoreSpec, open_store
from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.transfer.movers.base import Mover, TierListener
from kvbm_core.transfer.movers.disk_direct import DirectReader
from kvbm_core.transfer.movers.disk_file import RankFile
from kvbm_core.transfer.movers.store import StoreMover
from kvbm_core.transfer.plan import BLOCK_FILE, STORE, TierPlace


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank ``rank`` of ``num_ranks`` that store. ``fingerprint``: what the bytes of its blocks mean.
    ``heads``: how they may be divided in stores that others share.
    """

    rank: int
    num_ranks: int
    fingerprint: str
    heads: HeadShards | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """What a mover is put into, by ``join(name of the tier, mover, reader)``, from any thread, at once or
    later. ``reader``: reads its blocks straight to the device. ``files``, by the tier's name, are closed
    before the movers: one that is still waited for must not join any more. ``closes`` are called after that.
    """

    device: DeviceMemory
    slab: HostSlab
    shard: Shard
    listener: TierListener
    disk: FileOptions
    store: StoreOptions
    join: Callable[[str, Mover, DirectReader | None], None]
    files: dict[str, RankFile] = field(default_factory=dict)
    closes: list[Callable[[], None]] = field(default_factory=list)


Opener = Callable[[Site, TierPlace], None]
"""Opens a tier and calls ``site.join``. ConfigError or OSError, one line: the rank serves without it."""


def open_block_file(site: Site, place: TierPlace) -> None:
    """This rank's file of blocks; later, if another process has it still."""
    shard, file = site.shard, RankFile(place.name, site.disk, site.listener)
    path = _folder_of(site, place) / f"rank-{shard.rank}-of-{shard.num_ranks}{SUFFIX}"
    site.files[place.name] = file
    if file.open(path, place.num_slots, site.slab.slot_bytes, shard.fingerprint):
        _join(site, place.name, file)
    elif file.is_busy:
        file.open_later(partial(_join, site, place.name, file))


def _folder_of(site: Site, place: TierPlace) -> Path:
    """The leader's, or one of this rank's own on its own machine, the same again after a restart.
    ConfigError.
    """
    leaders = Path(place.location)
    if not place.claim or has_claim(leaders, place.claim):
        return leaders
    identity = f"rank {site.shard.rank} of {leaders.name.rpartition('-')[0]}"
    folder = DiskFolder(Path(site.disk.directory), site.shard.fingerprint, identity=identity)
    site.closes.append(folder.close)
    return folder.path


def _join(site: Site, name: str, file: RankFile) -> None:
    mover, reader = file.start(site.slab), None
    if site.disk.to_device != OFF:
        reader = DirectReader(name, file.opened, site.device, site.listener)
        file.stop_first(reader.close)
    site.join(name, mover, reader)
    file.look()


def open_store_mover(site: Site, place: TierPlace) -> None:
    """The store with a URL."""
    shard, slab = site.shard, site.slab
    spec = StoreSpec(
        place.location,
        slab.slot_bytes,
        shard.fingerprint,
        f"{shard.rank}of{shard.num_ranks}",
        place.model,
        site.store,
        shard.heads if place.head_shards else None,
    )
    store = open_store(spec)
    if isinstance(store, TakesMemory):
        store.register(slab.address, slab.num_slots * slab.slot_bytes)
    mover = StoreMover(place.name, store, slab, io_deadline_s=site.store.deadline_s)
    site.join(place.name, mover, None)


OPENERS: dict[str, Opener] = {BLOCK_FILE: open_block_file, STORE: open_store_mover}
"""By the kind of a TierPlace."""
