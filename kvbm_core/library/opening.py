"""From the arguments of ``open_cache`` to tiers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from kvbm_core.config import KvbmSettings
from kvbm_core.config.remote_url import remote_directory, scheme_of
from kvbm_core.errors import ConfigError
from kvbm_core.library.cache import BlockCache
from kvbm_core.library.spec import BlockSpec
from kvbm_core.library.stage import Stage
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.runtime.assembly import DISK, REMOTE, evicting, rank_options
from kvbm_core.runtime.local import LocalOptions, LocalTiers
from kvbm_core.storage.disk.folder import DiskFolder
from kvbm_core.storage.disk.record import SECTOR_BYTES, whole_sectors
from kvbm_core.storage.memory_room import available_memory
from kvbm_core.tiers.keyed import KeyedOptions, keyed_tier
from kvbm_core.tiers.kinds import kind_of, registered_tier
from kvbm_core.tiers.slotted import slotted_tier
from kvbm_core.transfer.plan import BLOCK_FILE, TierPlace
from kvbm_core.types import Tier

BYTES_PER_GB = 1e9
KEYED = KeyedOptions(absent_s=1.0, always_loads=True)
"""Callers ask when they want to know: that a store had nothing is not believed for long."""
ARGUMENTS = {
    "DYN_KVBM_CPU_CACHE_GB": "host_bytes",
    "DYN_KVBM_DISK_CACHE_DIR": "disk",
    "KVBM_REMOTE_URL": "remote",
    "KVBM_REMOTE_CACHE_GB": "remote_bytes",
}
"""What a setting of engines is called here."""
_SETTING = re.compile(r"^kvbm: (KVBM_REMOTE_URL=.*?: )?")


def open_cache(
    spec: BlockSpec,
    *,
    host_bytes: int,
    disk: str | Path | None = None,
    disk_bytes: int = 0,
    remote: str | Sequence[str] = (),
    remote_bytes: int | None = None,
) -> BlockCache:
    """Opens a cache of blocks of ``spec``. Close it, or use it in a ``with`` statement.

    ``host_bytes``: memory of this process. ``disk`` and ``disk_bytes``: a directory of a local disk, and how
    much of it is used; a later process with the same spec finds there what this one left, also after it was
    killed. Of several processes at once each uses a part of its own. ``remote``: the URL of a store that
    processes and machines share, or several in the order of the search: ``file:///mnt/kv`` (a directory),
    ``s3://bucket/prefix``, ``redis://host:6379``, ``mooncake://host:50051``. ``remote_bytes``: how large such
    a directory may grow for each model, 0 for no limit; other stores are bounded by themselves.

    Everything else is taken from the environment, as engines take it (docs/configuration.md): credentials of
    a store, its deadline, encryption, how the disk is read. Sizes and places never are.

    Waits until the first host memory is ready and what is on the disk is known, KVBM_START_WAIT_S (5 s) at
    most. ConfigError, one line, for what cannot be had.
    """
    urls = [remote] if isinstance(remote, str) else list(remote)
    slot_bytes = whole_sectors(spec.block_bytes) if disk is not None or urls else spec.block_bytes
    num_slots = _slots_of("host_bytes", host_bytes, slot_bytes)
    available_memory().check("host_bytes", host_bytes, host_bytes)
    num_disk_slots = 0
    if disk is not None:
        num_disk_slots = _slots_of("disk_bytes", disk_bytes, slot_bytes + SECTOR_BYTES)
    elif disk_bytes:
        raise ConfigError("disk_bytes", disk_bytes, "needs a directory; pass disk= too")
    with ExitStack() as opened:
        try:
            settings = _settings(num_slots, num_disk_slots, urls, remote_bytes)
            fingerprint, places = spec.namespace.root().hex(), list[TierPlace]()
            if disk is not None:
                folder = DiskFolder(Path(disk), fingerprint, identity=spec.model)
                opened.callback(folder.close)
                places.append(TierPlace(DISK, str(folder.path), num_disk_slots, kind=BLOCK_FILE))
            names = (REMOTE if number == 1 else f"{REMOTE}-{number}" for number in count(1))
            places += [
                TierPlace(name, url, model=spec.model, kind=kind_of(url))
                for name, url in zip(names, urls, strict=False)
            ]
            # Half of the host at most: what comes must not drive out what came just before.
            stage = Stage(spec.block_bytes, max(1, num_slots // 2))
            tiers = LocalTiers(stage.memory, _options(num_slots, places, fingerprint, settings))
            opened.callback(tiers.close)
            tiers.wait_ready(1, *(place.num_slots for place in places), timeout_s=settings.start_wait_s)
            for name, reason in tiers.off_tiers.items():
                why = _SETTING.sub("", reason)
                raise ConfigError(DISK if name == DISK else REMOTE, disk if name == DISK else remote, why)
        except ConfigError as error:
            name = ARGUMENTS.get(error.setting, error.setting)
            raise ConfigError(name, error.value, error.remedy) from None
        return BlockCache(spec, stage, tiers, num_slots, opened.pop_all().close)


def _options(
    num_slots: int, places: Sequence[TierPlace], fingerprint: str, settings: KvbmSettings
) -> LocalOptions:
    make = evicting(settings)
    makers = tuple(
        slotted_tier(DISK, Tier.DISK, AdmitAll(), make)
        if place.kind == BLOCK_FILE
        else registered_tier(place.name, place.location)
        or keyed_tier(place.name, Tier.REMOTE, AdmitAll(), KEYED)
        for place in places
    )
    ttl_s, memory = settings.lease_ttl_s, rank_options(settings)
    return LocalOptions(num_slots, makers, tuple(places), fingerprint, ttl_s, memory, make_policy=make)


def _slots_of(argument: str, size_bytes: int, block_bytes: int) -> int:
    if size_bytes < block_bytes:
        raise ConfigError(argument, size_bytes, f"holds no block; one takes {block_bytes} bytes here")
    return size_bytes // block_bytes


def _settings(
    num_slots: int, num_disk_slots: int, urls: Sequence[str], remote_bytes: int | None
) -> KvbmSettings:
    """The environment's, but for sizes and places."""
    if remote_bytes is None and any(scheme_of(url) == "file" for url in urls):
        remedy = "a shared directory needs a size in bytes, or 0 for no limit"
        raise ConfigError("remote_bytes", remote_bytes, remedy)
    overrides: dict[str, object] = {
        "cpu_cache_override_num_blocks": num_slots,
        "disk_cache_override_num_blocks": num_disk_slots,
        "remote_cache_gb": (remote_bytes or 0) / BYTES_PER_GB,
        "remote_url": " ".join(urls) or None,
        "object_enabled": False,
        "peers": "off",
    }
    settings = KvbmSettings.from_env(overrides)
    for url in urls:
        if scheme_of(url) == "file" and not remote_directory(url).is_dir():
            raise ConfigError("remote", url, "is no directory; make it, or mount what it is on")
    return settings
