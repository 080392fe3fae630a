"""Which store is behind a URL: the kinds of store that a lower tier by key can be, by the URL's scheme."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbm_core.config.remote_url import SCHEMES, remote_directory
from kvbm_core.errors import ConfigError
from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.storage.base import BlockStore

limited_log = RateLimitedLogger()
"""Of one directory once, also if each of an engine's pools opens it."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """``max_bytes``: of a store that bounds itself, of each model; None: no limit. ``trust``: whose blocks
    are read, see docs/remote.md. ``deadline_s``: of one call.
    """

    max_bytes: int | None = None
    trust: str = "user"
    deadline_s: float = 5.0


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """A store as one rank wants it. ``payload_bytes``: of each block. ``meaning``: what the bytes of a block
    mean; blocks of another meaning are not found. ``shard``: which part of a block this rank has, such as
    0of2. ``model``: for people, and what ``max_bytes`` bounds.
    """

    url: str
    payload_bytes: int
    meaning: str
    shard: str
    model: str = ""
    options: StoreOptions = field(default_factory=StoreOptions)


StoreMaker = Callable[[StoreSpec], BlockStore]


def _open_directory(spec: StoreSpec) -> BlockStore:
    from kvbm_core.storage.directory.names import FINGERPRINT_BYTES, Meaning
    from kvbm_core.storage.directory.store import DirectoryOptions, DirectoryStore

    path = remote_directory(spec.url)
    rank, _, num_ranks = spec.shard.partition("of")
    fingerprint = hashlib.sha256(f"{spec.meaning}/{spec.payload_bytes}".encode()).digest()[:FINGERPRINT_BYTES]
    model = _name_of(spec.model)
    meaning = Meaning(model, model.encode(), fingerprint, int(rank), int(num_ranks))
    options = DirectoryOptions(spec.options.max_bytes, trusts_group=spec.options.trust == "group")
    store = DirectoryStore(path, meaning, spec.payload_bytes, options)
    size = "no limit of size" if options.max_bytes is None else f"{options.max_bytes / 1e9:g} GB"
    line = "kvbm: shared directory: %s, %s for each model, blocks of this %s are read"
    limited_log.log(logging.INFO, path, line, path, size, spec.options.trust)
    return store


def _name_of(model: str) -> str:
    """The last name of a model's path or of its name in a hub: the same on machines where it is in another
    place.
    """
    names = [name for name in model.split("/") if name]
    hub = next((name for name in names if name.startswith("models--")), "")
    return hub.rpartition("--")[2] or (names[-1] if names else "")


_MAKERS: dict[str, StoreMaker] = {"file": _open_directory}


def register_store(scheme: str, make: StoreMaker) -> None:
    """Makes URLs of this scheme usable. ``make`` raises ConfigError, one line, for a store that cannot be
    had.
    """
    _MAKERS[scheme] = make
    SCHEMES.add(scheme)


def open_store(spec: StoreSpec) -> BlockStore:
    """The store. ConfigError, one line, if it cannot be had."""
    scheme, separator, _ = spec.url.partition("://")
    scheme = scheme.lower()
    if not separator or scheme not in _MAKERS:
        known = ", ".join(f"{name}://" for name in sorted(_MAKERS))
        raise ConfigError("KVBM_REMOTE_URL", spec.url, f"no store has such a URL; there are: {known}")
    return _MAKERS[scheme](spec)
