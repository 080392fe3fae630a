"""Which store is behind a URL: the kinds of store that a lower tier by key can be, by the URL's scheme."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from kvbm_core.config.installed import BROKEN, made, made_by, package_of
from kvbm_core.config.readers import shown
from kvbm_core.config.remote_url import (
    BUCKET_SCHEMES,
    SCHEMES,
    installed_store,
    remote_bucket,
    remote_directory,
    scheme_of,
)
from kvbm_core.config.server_url import MOONCAKE_SCHEME, VALKEY_SCHEMES, ServerUrl, server_url
from kvbm_core.errors import ConfigError
from kvbm_core.layout.heads import FP8, HeadShards
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.storage.base import BlockStore
from kvbm_core.storage.extents import EXTENT_BYTES
from kvbm_core.storage.remote.login import ServerLogin
from kvbm_core.storage.remote.s3_client import S3Options, endpoint_of, store_maker

if TYPE_CHECKING:
    from kvbm_core.storage.inspection import StoreInspection
    from kvbm_core.storage.names import Meaning
    from kvbm_core.storage.remote.engine import ObjectEngine
    from kvbm_core.storage.remote.head_store import HeadRecords
    from kvbm_core.storage.remote.record_store import RecordStore

limited_log = RateLimitedLogger()
"""Of one store once, also if each of an engine's pools opens it."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """``max_bytes``: of a store that bounds itself, of each model; None: no limit, or, with ``shares_size``,
    the one that all engines of a shared directory have agreed on. ``trust``: whose blocks are read, see
    docs/remote.md. ``deadline_s``: of one call. ``login``: at a server that asks for one.
    ``s3``: at an object store.

    Of records: ``secret_file`` holds the secret that names are made with, empty: none; ``encrypts`` blocks
    with it; ``codec``: see remote/encoding.py, the same as that of head shards if it is theirs.
    """

    max_bytes: int | None = None
    trust: str = "user"
    deadline_s: float = 5.0
    secret_file: str = ""
    encrypts: bool = False
    codec: str = "none"
    login: ServerLogin = field(default_factory=ServerLogin)
    s3: S3Options = field(default_factory=S3Options)
    shares_size: bool = False


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """A store as one rank wants it. ``payload_bytes``: of each block. ``meaning``: what the bytes of a block
    mean; blocks of another meaning are not found. ``shard``: which part of a block this rank has, such as
    0of2. ``model``: for people, and what ``max_bytes`` bounds. ``heads``: blocks are kept as head shards, and
    it is these that have a size, a meaning and a number in the store.
    """

    url: str
    payload_bytes: int
    meaning: str
    shard: str
    model: str = ""
    options: StoreOptions = field(default_factory=StoreOptions)
    heads: HeadShards | None = None

    def by_shard(self) -> list[StoreSpec]:
        """The same store for each of this rank's head shards; itself if there are none."""
        heads = self.heads
        if heads is None:
            return [self]
        shard = replace(self, payload_bytes=heads.shard_bytes, meaning=heads.meaning, heads=None)
        return [replace(shard, shard=f"{number}of{heads.num_shards}") for number in heads.own]


StoreMaker = Callable[[StoreSpec], BlockStore]
EngineMaker = Callable[[str, StoreOptions], "ObjectEngine"]
"""Makes the engine of a URL; an entry point of the group ``kvbm.stores`` names one. ConfigError, one line,
for what cannot be had.
"""


def record_store(engine: ObjectEngine, spec: StoreSpec) -> RecordStore | HeadRecords:
    """Records on ``engine``, which it closes. ConfigError, one line, for a secret or a package that cannot be
    had; the engine is closed then.
    """
    from kvbm_core.storage.remote.encoding import Encoding
    from kvbm_core.storage.remote.head_store import HeadRecords
    from kvbm_core.storage.remote.names import RecordNames
    from kvbm_core.storage.remote.record_store import RecordStore
    from kvbm_core.storage.remote.secret import SETTING, Secret

    options = spec.options
    try:
        secret = Secret.read(options.secret_file)
        if options.encrypts and secret is None:
            raise ConfigError("KVBM_REMOTE_ENCRYPT", True, f"needs a secret; set {SETTING} too")
        if (options.codec == FP8) is not (spec.heads is not None and spec.heads.codec == FP8):
            remedy = "is for blocks that are kept by KV heads, which is not so here; set it to none or zstd"
            raise ConfigError("KVBM_REMOTE_CODEC", options.codec, remedy)
        encoding = Encoding(options.codec, secret if options.encrypts else None)
    except ConfigError:
        engine.close()
        raise
    meanings = [(own, _meaning_of(own, f"/{encoding.number}")) for own in spec.by_shard()]
    stores = [
        RecordStore(engine, RecordNames(meaning, secret), own.payload_bytes, encoding)
        for own, meaning in meanings
    ]
    return stores[0] if spec.heads is None else HeadRecords(spec.heads, stores, spec.payload_bytes)


def _meaning_of(spec: StoreSpec, encoding: str = "") -> Meaning:
    """What the blocks of ``spec`` mean. ``encoding``: how records keep them; empty: they are files."""
    from kvbm_core.storage.names import FINGERPRINT_BYTES, Meaning

    rank, _, num_ranks = spec.shard.partition("of")
    what = f"{spec.meaning}/{spec.payload_bytes}{encoding}"
    fingerprint = hashlib.sha256(what.encode()).digest()[:FINGERPRINT_BYTES]
    model = _name_of(spec.model)
    return Meaning(model, model.encode(), fingerprint, int(rank), int(num_ranks))


def _open_directory(spec: StoreSpec) -> BlockStore:
    from kvbm_core.storage.directory.size import size_text
    from kvbm_core.storage.directory.store import DirectoryOptions, DirectoryStore
    from kvbm_core.storage.remote.head_store import HeadStore

    path = remote_directory(spec.url)
    _refuse_what_records_need(spec.options)
    options = DirectoryOptions(
        spec.options.max_bytes,
        trusts_group=spec.options.trust == "group",
        shares_size=spec.options.shares_size,
    )
    stores = [DirectoryStore(path, _meaning_of(own), own.payload_bytes, options) for own in spec.by_shard()]
    size = "the size in its folder" if options.shares_size else size_text(options.max_bytes)
    line = "kvbm: shared directory: %s, %s for each model, blocks of this %s are read"
    limited_log.log(logging.INFO, path, line, path, size, spec.options.trust)
    return stores[0] if spec.heads is None else HeadStore(spec.heads, stores, spec.payload_bytes)


def _refuse_what_records_need(options: StoreOptions) -> None:
    """ConfigError for settings that only records heed: no store is better than a less private one."""
    asked = (
        ("KVBM_REMOTE_ENCRYPT", options.encrypts, False),
        ("KVBM_REMOTE_SECRET_FILE", options.secret_file, ""),
        ("KVBM_REMOTE_CODEC", options.codec, "none"),
    )
    for setting, value, default in asked:
        if value != default:
            raise ConfigError(setting, value, "is not for a shared directory (file://); unset it")


def _name_of(model: str) -> str:
    """The last name of a model's path or of its name in a hub: the same on machines where it is in another
    place.
    """
    names = [name for name in model.split("/") if name]
    hub = next((name for name in names if name.startswith("models--")), "")
    return hub.rpartition("--")[2] or (names[-1] if names else "")


def _bucket_engine(url: str, options: StoreOptions) -> ObjectEngine:
    from kvbm_core.storage.remote.s3 import S3Engine

    bucket = remote_bucket(url)
    engine = S3Engine(store_maker(bucket, options.s3), bucket, options.deadline_s)
    endpoint = endpoint_of(options.s3)[1] if bucket.scheme == "s3" else None
    plain = "; plain HTTP: whoever is on the wire can read it" if (endpoint or "").startswith("http:") else ""
    line = "kvbm: object store: %s%s%s"
    limited_log.log(logging.INFO, bucket.url, line, bucket.url, f" at {endpoint}" if endpoint else "", plain)
    return engine


def _valkey_engine(url: str, options: StoreOptions) -> ObjectEngine:
    from kvbm_core.storage.remote.valkey import ValkeyEngine

    return ValkeyEngine(_server_of(url), options.login)


def _mooncake_engine(url: str, options: StoreOptions) -> ObjectEngine:
    from kvbm_core.storage.remote.mooncake import MooncakeEngine

    return MooncakeEngine(_server_of(url))


def _server_of(url: str) -> ServerUrl:
    try:
        return server_url(url)
    except ValueError as error:
        raise ConfigError("KVBM_REMOTE_URL", shown(url), str(error)) from None


_MAKERS: dict[str, StoreMaker] = {"file": _open_directory}
_ENGINES: dict[str, EngineMaker] = {
    **dict.fromkeys(VALKEY_SCHEMES, _valkey_engine),
    MOONCAKE_SCHEME: _mooncake_engine,
    **dict.fromkeys(BUCKET_SCHEMES, _bucket_engine),
}
"""Those of other schemes are of installed packages."""
VALKEY_EXTENT_BYTES = 1 << 20
"""Values of 4 MiB are read at 0.5 to 0.85 of the speed, with up to twice the client's CPU time."""
_EXTENT_BYTES = {"file": 0, **dict.fromkeys(VALKEY_SCHEMES, VALKEY_EXTENT_BYTES)}
"""By the scheme, where it is not EXTENT_BYTES; 0: such stores keep no extents. It decides which blocks a name
stands for, so all engines that share a store need the same: it depends on the kind of store alone.
"""


def register_store(scheme: str, make: StoreMaker, *, extent_bytes: int = 0) -> None:
    """Makes URLs of this scheme usable. ``make`` raises ConfigError, one line, for a store that cannot be
    had. ``extent_bytes``: what it makes is an ExtentStore, and is given extents of about this size on each
    rank; 0: it is given each block alone.
    """
    _MAKERS[scheme] = partial(_registered_store, make)
    SCHEMES.add(scheme)
    _EXTENT_BYTES[scheme] = extent_bytes


def register_engine(scheme: str, make: EngineMaker) -> None:
    """Makes URLs of this scheme usable in this process: records on the engine that ``make`` makes, guarded as
    those of packages are.
    """
    _ENGINES[scheme] = partial(_registered_engine, make)
    SCHEMES.add(scheme)


def extent_bytes(url: str) -> int:
    """How large extents are in the store of this URL, on each rank; 0: it is given each block alone. For the
    leader, which has the URL and no engine.
    """
    return _EXTENT_BYTES.get(scheme_of(url), EXTENT_BYTES)


def open_store(spec: StoreSpec) -> BlockStore:
    """The store. ConfigError, one line, if it cannot be had."""
    scheme = scheme_of(spec.url)
    if scheme in _MAKERS:
        return _MAKERS[scheme](spec)
    url = spec.url.replace("{worker_id}", spec.shard.partition("of")[0])
    return record_store(open_engine(url, spec.options), spec)


def open_engine(url: str, options: StoreOptions) -> ObjectEngine:
    """The engine that keeps the records of the store with this URL. ConfigError, one line, if it cannot be
    had.
    """
    make = _ENGINES.get(scheme_of(url), _installed_engine)
    return make(url, options)


def _registered_store(make: StoreMaker, spec: StoreSpec) -> BlockStore:
    store = make(spec)
    _refuse_holds(store, spec.url)
    return store


def _registered_engine(make: EngineMaker, url: str, options: StoreOptions) -> ObjectEngine:
    from kvbm_core.storage.remote.engine import ObjectEngine

    given, what = ("KVBM_REMOTE_URL", shown(url)), f"what is registered for {scheme_of(url)}://"
    engine = made(lambda: make(url, options), ObjectEngine, given, what, "mend it")
    return _guarded(engine, url, f"the registered {type(engine).__name__}")


def _installed_engine(url: str, options: StoreOptions) -> ObjectEngine:
    """The engine that an installed package makes."""
    from kvbm_core.storage.remote.engine import ObjectEngine

    try:
        entry = installed_store(scheme_of(url))
    except ValueError as error:
        raise ConfigError("KVBM_REMOTE_URL", shown(url), str(error)) from None
    engine = made_by(entry, "KVBM_REMOTE_URL", shown(url), ObjectEngine, url, options)
    return _guarded(engine, url, f"the package {package_of(entry)}")


def _guarded(engine: ObjectEngine, url: str, whose: str) -> ObjectEngine:
    from kvbm_core.storage.remote.guarded import GuardedEngine

    _refuse_holds(engine, url)
    return GuardedEngine(engine, f"{shown(url)}: {whose}")


def _refuse_holds(store: BlockStore | ObjectEngine, url: str) -> None:
    """A store of others that waits to be asked what memory it still touches is a ConfigError: nobody asks."""
    if hasattr(store, "holds"):
        with suppress(*BROKEN):
            store.close()
        remedy = (
            f"{type(store).__name__} has a method holds, which nobody calls: let it enter memory of requests "
            "that it has given up in kvbm_core.storage.late.LATE, and take the method away "
            "(docs/extending.md)"
        )
        raise ConfigError("KVBM_REMOTE_URL", shown(url), remedy)


def inspect_store(url: str, options: StoreOptions) -> StoreInspection:
    """The store with this URL, for ``kvbm remote``. ConfigError, one line, if it cannot be had."""
    if scheme_of(url) == "file":
        from kvbm_core.storage.directory.inspect import DirectoryInspection

        return DirectoryInspection(remote_directory(url))
    from kvbm_core.storage.remote.inspect import RecordInspection
    from kvbm_core.storage.remote.secret import Secret

    return RecordInspection(open_engine(url, options), url, Secret.read(options.secret_file))
