"""KvbmSettings: reads the settings, complains in one clear line, and turns sizes into slots."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from pydantic import PrivateAttr, ValidationError
from pydantic.fields import FieldInfo

from kvbm_core.config.fields import Adapter, SettingFields
from kvbm_core.config.installed import POLICIES, STORES, package_of
from kvbm_core.config.names import is_of_kubernetes, overrides_by_env, unknown_variable_warnings
from kvbm_core.config.readers import shown, without_password
from kvbm_core.config.remote_url import BUCKET_SCHEMES, SCHEMES, remote_bucket, scheme_of, split_urls
from kvbm_core.config.server_url import SERVER_SCHEMES, TLS_SCHEMES, VALKEY_SCHEMES
from kvbm_core.errors import ConfigError

_CPU_GB = "DYN_KVBM_CPU_CACHE_GB"
_CPU_BLOCKS = "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS"
_DISK_GB = "DYN_KVBM_DISK_CACHE_GB"
_REMOTE_URL = "KVBM_REMOTE_URL"
_OBJECT_BUCKET = "DYN_KVBM_OBJECT_BUCKET"
_OF_TLS = ("remote_ca_file", "remote_cert_file")
_OF_VALKEY = ("remote_username", "remote_password_file", *_OF_TLS)
_OF_DIRECTORIES = ("remote_cache_gb", "remote_trust")
_OF_RECORDS = ("remote_secret_file", "remote_encrypt", "remote_codec")
_EXAMPLE_URLS = {**dict.fromkeys(_OF_RECORDS, "s3://BUCKET"), **dict.fromkeys(_OF_VALKEY, "redis://HOST")}
"""Of stores that heed a setting, where file:///mnt/kv does not."""
_BOUND_ELSEWHERE = {*SERVER_SCHEMES, *BUCKET_SCHEMES}
_STAGED_BYTES = 512_000_000
_MIN_STAGED_BLOCKS = 64
_PORTS = ("leader_zmq_pub_port", "leader_zmq_ack_port", "metrics_port")
_BYTES_PER_GB = 1e9
_FIRST_FREE_PORT = 1024
_OF_A_SERVICE = re.compile("(tcp|udp|sctp)://")


class SettingSource(str, Enum):
    """Where a setting's value came from."""

    DEFAULT = "default"
    ENV = "env"
    EXTRA_CONFIG = "extra_config"

    def __str__(self) -> str:
        return self.value


class SettingRow(NamedTuple):
    """One setting as a table shows it."""

    name: str
    env: str
    value: object
    source: SettingSource
    doc: str
    no_effect: str
    """Why it has none; empty: it has."""
    only: tuple[Adapter, ...]
    """Those that heed it."""


class KvbmSettings(SettingFields):
    """All settings of one kvbm instance: frozen, built with ``from_env``."""

    _sources: dict[str, SettingSource] = PrivateAttr(default_factory=dict)
    _warnings: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def from_env(cls, overrides: Mapping[str, object] | None = None) -> KvbmSettings:
        """
        The settings from the environment, with ``overrides`` (kv_connector_extra_config) winning over it.

        Override keys are field names or variable names; see ``names.overrides_by_env``. Raises ConfigError,
        one line, for the first value that cannot be used. What can be lived with is in ``warnings``.
        """
        environ = os.environ
        given = overrides_by_env(overrides or {}, cls.env_names())
        cls._refuse_secrets(given)
        settings, replaced = cls._build(given)
        settings._note_sources(given, environ, replaced)
        settings._check_ports()
        settings._check_remote()
        settings._check_keys()
        settings._warnings = (
            *filter(None, replaced.values()),
            *settings._low_port_warnings(),
            *settings._later_warnings(),
            *settings._lone_disk_warnings(),
            *settings._small_disk_warnings(),
            *settings._lone_remote_warnings(),
            *settings._lone_peer_warnings(),
            *settings._idle_server_warnings(),
            *settings._own_name_warnings(),
            *unknown_variable_warnings(environ, cls.env_names().values()),
        )
        return settings

    @classmethod
    def env_names(cls) -> dict[str, str]:
        """Field name to variable name, in the order of the table."""
        return {name: str(info.validation_alias) for name, info in cls.model_fields.items()}

    @classmethod
    def _build(cls, given: Mapping[str, object]) -> tuple[KvbmSettings, dict[str, str]]:
        """The settings, and a warning for each bad value that gave way to the default, as in KVBM. Empty for
        what Kubernetes has set.
        """
        values: dict[str, Any] = dict(given)
        try:
            return cls(**values), {}
        except ValidationError as error:
            problems = error.errors(include_url=False)
        replaced: dict[str, str] = {}
        infos = {str(info.validation_alias): info for info in cls.model_fields.values()}
        for problem in problems:
            env = str(problem["loc"][0])
            value = "(not shown)" if _extra(infos[env])["is_secret"] else shown(problem["input"])
            remedy = str(problem["msg"]).removeprefix("Value error, ")
            if not _extra(infos[env])["lenient"]:
                raise ConfigError(env, value, remedy)
            default = infos[env].default
            values[env] = default
            is_address = is_of_kubernetes(env) and _OF_A_SERVICE.match(str(problem["input"]))
            line = f"kvbm: {env}={value}: {remedy}; using {_default_text(default)}"
            replaced[env] = "" if is_address else line
        return cls(**values), replaced

    def _note_sources(
        self, given: Mapping[str, object], environ: Mapping[str, str], replaced: Mapping[str, str]
    ) -> None:
        for name, env in self.env_names().items():
            if env in replaced:
                source = SettingSource.DEFAULT
            elif env in given:
                source = SettingSource.EXTRA_CONFIG
            else:
                source = SettingSource.ENV if environ.get(env) else SettingSource.DEFAULT
            self._sources[name] = source

    def _check_ports(self) -> None:
        if self.leader_zmq_pub_port == self.leader_zmq_ack_port:
            names = self.env_names()
            pub, ack = names["leader_zmq_pub_port"], names["leader_zmq_ack_port"]
            raise ConfigError(ack, self.leader_zmq_ack_port, f"must differ from {pub}; change one of them")

    @classmethod
    def _refuse_secrets(cls, given: Mapping[str, object]) -> None:
        """What engines are given on their command line, every process on the machine can read."""
        for info in cls.model_fields.values():
            env = str(info.validation_alias)
            if _extra(info)["is_secret"] and env in given:
                remedy = "does not belong on a command line; set it in the engine's environment"
                raise ConfigError(env, "(not shown)", remedy)

    def _check_remote(self) -> None:
        self._check_object_store()
        if self.remote_encrypt and not self.remote_secret_file:
            names = self.env_names()
            remedy = f"needs a secret; set {names['remote_secret_file']} to a file that holds one"
            raise ConfigError(names["remote_encrypt"], self.remote_encrypt, remedy)

    @property
    def _schemes(self) -> set[str]:
        """Of the stores."""
        return {scheme_of(url) for url in self.store_urls}

    @property
    def _has_directories(self) -> bool:
        """Whether one of the stores is to be bounded by kvbm. What an installed package has is not."""
        return bool(self._schemes & SCHEMES - _BOUND_ELSEWHERE)

    def _check_keys(self) -> None:
        """ConfigError for a key pair without a list of whom it may meet, or the other way round."""
        if bool(self.curve_key_file) is not bool(self.curve_allowed):
            given, other = ("curve_key_file", "curve_allowed")
            if self.curve_allowed:
                given, other = other, given
            names = self.env_names()
            remedy = f"goes together with {names[other]}; set both, or none"
            raise ConfigError(names[given], getattr(self, given), remedy)

    def _check_object_store(self) -> None:
        """ConfigError for KVBM's names of an object store if they are not whole, or not what the URL says."""
        if self.keeps_heads and any("{worker_id}" in url for url in self.store_urls):
            name = "remote_head_shards" if self.remote_head_shards else "remote_codec"
            env = self.env_names()[name]
            remedy = f"with {env} ranks share one bucket; leave {{worker_id}} out of its name"
            raise ConfigError(env, getattr(self, name), remedy)
        if (self.object_access_key is None) is not (self.object_secret_key is None):
            raise ConfigError(
                "DYN_KVBM_OBJECT_SECRET_KEY",
                "(not shown)",
                "an access key and its secret key go together; set both",
            )
        if not self.object_enabled:
            return
        if not self.object_bucket:
            raise ConfigError("DYN_KVBM_OBJECT_ENABLED", True, f"needs a bucket; name it in {_OBJECT_BUCKET}")
        try:
            bucket = remote_bucket(f"s3://{self.object_bucket}")
        except ValueError:
            remedy = "write the name of a bucket, without s3:// and without slashes"
            raise ConfigError(_OBJECT_BUCKET, shown(self.object_bucket), remedy) from None
        is_same = any(f"{url}/".startswith(f"{bucket.url}/") for url in self.store_urls)
        if bucket.prefix or not is_same:
            remedy = f"KVBM_REMOTE_URL says {shown(self.remote_url)}; keep one of them"
            if bucket.prefix:
                remedy = "is more than a bucket's name; write KVBM_REMOTE_URL=s3://BUCKET/PREFIX instead"
            raise ConfigError(_OBJECT_BUCKET, shown(self.object_bucket), remedy)

    @property
    def _of_more_than_stores(self) -> tuple[str, ...]:
        """Settings that are heeded, or told of, without a store too."""
        of_peers = ("remote_wait_s", "remote_load") if self.has_peers else ()
        return ("remote_url", "object_enabled", "object_num_blocks", *of_peers)

    def _lone_remote_warnings(self) -> Iterator[str]:
        """One line for each setting of a store that is not there, or that heeds no such setting."""
        for name, env in self.env_names().items():
            if not self.is_set(name) or name in self._of_more_than_stores:
                continue
            remedy = ""
            if name == "audit_rate" and self.audit_rate and self.is_lossy:
                remedy = (
                    "has no effect with KVBM_REMOTE_CODEC=fp8: what comes back is not quite what is computed"
                )
            elif name.startswith("remote_") and not self.store_urls:
                such = _EXAMPLE_URLS.get(name, "file:///mnt/kv")
                remedy = f"has no effect without {_REMOTE_URL}; set that too, such as {such}"
            elif name in _OF_DIRECTORIES and getattr(self, name) and not self._has_directories:
                instead = "rights and a lifecycle rule of the bucket do that"
                if not self.has_object_store:
                    instead = "the server's own settings bound it"
                remedy = f"is for a shared directory; {instead}"
            elif name in _OF_VALKEY and getattr(self, name) and self._schemes.isdisjoint(VALKEY_SCHEMES):
                remedy = "is for a Valkey or Redis server"
                if name == "remote_ca_file" and self.has_object_store:
                    remedy += "; a bucket's authorities are in AWS_CA_BUNDLE"
            elif name in _OF_TLS and getattr(self, name) and self._schemes.isdisjoint(TLS_SCHEMES):
                remedy = "has no effect without TLS; write rediss:// or valkeys://"
            elif name == "object_bucket" and not self.object_enabled:
                remedy = "has no effect without DYN_KVBM_OBJECT_ENABLED=1; set that too"
            elif name.startswith("object_") and not self.has_object_store:
                remedy = f"has no effect without a bucket; set {_REMOTE_URL}=s3://BUCKET"
            if remedy:
                yield f"kvbm: {env}={shown(getattr(self, name))}: {remedy}"

    def _lone_peer_warnings(self) -> Iterator[str]:
        """One line for each setting of peers that are off, and if there is nowhere to bring their blocks."""
        names = self.env_names()
        if self.peers != "off" and not self.has_host_tier:
            yield f"kvbm: {names['peers']}={self.peers}: has no effect without a host tier; set {_CPU_GB} too"
        for name in ("peer_bind", "peer_deadline_s", "peer_export_gb") if self.peers == "off" else ():
            if self.is_set(name):
                remedy = f"has no effect without {names['peers']}; set that to zmq or nixl"
                yield f"kvbm: {names[name]}={shown(getattr(self, name))}: {remedy}"

    def _idle_server_warnings(self) -> Iterator[str]:
        """One line for each server that is named, as Dynamo does for its own processes, and is not used."""
        names = self.env_names()
        if self.etcd_endpoints and not self.curve_key_file:
            remedy = (
                f"not used without {names['curve_key_file']}: leader and workers meet on this machine alone"
            )
            yield f"kvbm: {names['etcd_endpoints']}={shown(self.etcd_endpoints)}: {remedy}"
        if self.is_set("nats_server") and "nats" not in (*self.event_ways, *self.control_ways):
            remedy = f"not used without {names['events']}=nats or {names['control']}=nats"
            yield f"kvbm: {names['nats_server']}={shown(self.nats_server)}: {remedy}"

    def _own_name_warnings(self) -> Iterator[str]:
        """One line for what an installed package has under a name that is set, and is kvbm's own."""
        own = {"eviction_policy": (POLICIES, {"lru"}), "remote_url": (STORES, self._schemes & SCHEMES)}
        for name, (group, ours) in own.items():
            for entry in entry_points(group=group) if self.is_set(name) else ():
                if entry.name.lower() in ours:
                    why = f"is kvbm's own; that of {package_of(entry)} is not used: it needs another name"
                    yield f"kvbm: {self.env_names()[name]}={shown(getattr(self, name))}: {entry.name} {why}"

    def _lone_disk_warnings(self) -> Iterator[str]:
        """One line if the disk cannot be read straight into the device's memory, as the settings are."""
        if self.disk_to_device == "off" or (self.has_disk_tier and not self.has_host_tier):
            return
        remedy = f"has no effect without a disk tier; set {_DISK_GB} too"
        if self.has_host_tier:
            remedy = "has no effect with a host tier, which keeps what comes from disk"
            remedy += f"; leave {_CPU_GB if self.cpu_cache_gb is not None else _CPU_BLOCKS} out"
        yield f"kvbm: {self.env_names()['disk_to_device']}={self.disk_to_device}: {remedy}"

    @property
    def has_other_measures(self) -> bool:
        """Whether of host and disk one is given in GB and the other in blocks."""
        in_blocks = [self.cpu_cache_override_num_blocks, self.disk_cache_override_num_blocks]
        return self.has_host_tier and self.has_disk_tier and in_blocks.count(None) == 1

    def _small_disk_warnings(self) -> Iterator[str]:
        """One line if the disk holds no more than the host, by the same measure; else see
        ``has_other_measures``.
        """
        sizes = (("disk_cache_override_num_blocks", "cpu_cache_override_num_blocks"),)
        if self.disk_cache_override_num_blocks is self.cpu_cache_override_num_blocks is None:
            sizes = (("disk_cache_gb", "cpu_cache_gb"),)
        for name, above in sizes:
            disk, host = getattr(self, name), getattr(self, above)
            if disk and host and disk <= host:
                names = self.env_names()
                remedy = f"holds no more than {names[above]}={host:g}; a disk pays if it is larger"
                yield f"kvbm: {names[name]}={disk:g}: {remedy} (kvbm plan says how large)"

    def _low_port_warnings(self) -> list[str]:
        names = self.env_names()
        return [
            f"kvbm: {names[name]}={getattr(self, name)}: needs privileges; choose {_FIRST_FREE_PORT} or above"
            for name in _PORTS
            if getattr(self, name) < _FIRST_FREE_PORT
        ]

    def _later_warnings(self) -> list[str]:
        """One line for each setting that was switched on and has no effect in this release."""
        lines: list[str] = []
        for name, info in type(self).model_fields.items():
            value, later = getattr(self, name), _extra(info)["later"]
            if later and value and self._sources[name] is not SettingSource.DEFAULT:
                lines.append(f"kvbm: {info.validation_alias}={shown(value)}: {later}; the setting is ignored")
        return lines

    @property
    def warnings(self) -> tuple[str, ...]:
        """One line for each setting that was replaced, is risky, or has no effect."""
        return self._warnings

    def warnings_under(self, adapter: Adapter) -> tuple[str, ...]:
        """``warnings``, and one line for each setting that was made and has no effect under ``adapter``."""
        return (*self._warnings, *self._unheeded(adapter))

    def _unheeded(self, adapter: Adapter) -> Iterator[str]:
        for name, info in type(self).model_fields.items():
            extra = _extra(info)
            if adapter in extra["only"] or not self.is_set(name):
                continue
            heeding = listed(extra["only"])
            instead = f"; {extra['hicache']}" if adapter is Adapter.HICACHE and extra["hicache"] else ""
            value = shown(getattr(self, name))
            yield f"kvbm: {info.validation_alias}={value}: has no effect here, it is for {heeding}{instead}"

    def is_set(self, name: str) -> bool:
        """Whether the user gave the field ``name`` a value that is used."""
        return self.source(name) is not SettingSource.DEFAULT

    def source(self, name: str) -> SettingSource:
        """Where the value of the field ``name`` came from."""
        return self._sources.get(name, SettingSource.DEFAULT)

    def describe(self) -> list[SettingRow]:
        """All settings with value, source and meaning, for a table."""
        infos = type(self).model_fields
        return [
            SettingRow(
                name,
                env,
                self._told(name),
                self.source(name),
                infos[name].description or "",
                _extra(infos[name])["later"],
                _extra(infos[name])["only"],
            )
            for name, env in self.env_names().items()
        ]

    def _told(self, name: str) -> object:
        value = getattr(self, name)
        return without_password(value) if isinstance(value, str) else value

    def require_tier(self) -> None:
        """Raises ConfigError if no tier of this release is configured."""
        if self.has_host_tier or self.has_disk_tier:
            return
        why = "no cache tier is configured"
        if self.has_remote_tier:
            why = "blocks reach KVBM_REMOTE_URL by way of host memory, and none is configured"
        remedy = f"{why}; set it to gigabytes of host memory over all ranks, such as 20"
        raise ConfigError(_CPU_GB, "(unset)", remedy)

    @property
    def has_host_tier(self) -> bool:
        """Whether a size of the host tier is set."""
        return self.cpu_cache_gb is not None or self.cpu_cache_override_num_blocks is not None

    @property
    def has_disk_tier(self) -> bool:
        """Whether a size of the disk tier is set, and is not 0."""
        blocks = self.disk_cache_override_num_blocks
        return bool(self.disk_cache_gb) if blocks is None else blocks > 0

    @property
    def way_to_device(self) -> str:
        """How blocks are read from disk straight to the device, or "off". A host tier keeps what comes from
        disk, so it comes by way of that.
        """
        kind = self.disk_to_device
        return "off" if self.has_host_tier else kind

    @property
    def has_lower_tier(self) -> bool:
        """Whether blocks are kept outside of this process, so that their names must mean the same there."""
        return self.has_disk_tier or self.has_remote_tier or self.has_peers

    @property
    def has_peers(self) -> bool:
        """Whether blocks come from other instances, and go there."""
        return self.peers != "off" and self.has_host_tier

    @property
    def peer_export_bytes(self) -> int:
        """Of each rank."""
        return round((self.peer_export_gb or 0.0) * _BYTES_PER_GB)

    @property
    def record_bytes(self) -> int:
        """Of one recording."""
        return round((self.record_gb or 0.0) * _BYTES_PER_GB)

    @property
    def has_remote_tier(self) -> bool:
        """Whether blocks are kept somewhere for all machines."""
        return bool(self.store_urls)

    @property
    def store_urls(self) -> tuple[str, ...]:
        """Where blocks are kept for all, in the order of the search, by whichever name it was said."""
        bucket, is_enabled = self.object_bucket, self.object_enabled
        if self.remote_url is not None:
            return tuple(split_urls(self.remote_url))
        return (f"s3://{bucket}",) if bucket and is_enabled else ()

    @property
    def event_ways(self) -> tuple[str, ...]:
        """By which KV events are published: "zmq", "nats"."""
        return tuple(way for way in self.events.split(",") if way != "off")

    @property
    def control_ways(self) -> tuple[str, ...]:
        """Over which wires orders are taken: "socket", "http", "nats"."""
        return tuple(way for way in self.control.split(",") if way != "off")

    @property
    def fleet_root(self) -> str:
        """Of the fleet's records in etcd."""
        return f"/kvbm/v1/{self.fleet}/"

    @property
    def has_object_store(self) -> bool:
        """Whether one of them is a bucket."""
        return not self._schemes.isdisjoint(BUCKET_SCHEMES)

    @property
    def keeps_heads(self) -> bool:
        """Whether blocks are to be kept there by KV heads."""
        return self.has_remote_tier and (self.remote_head_shards > 0 or self.is_lossy)

    @property
    def is_lossy(self) -> bool:
        """Whether what comes back from there is to be not quite what was computed."""
        return self.has_remote_tier and self.remote_codec == "fp8"

    @property
    def remote_max_bytes(self) -> int | None:
        """Of each model there, all ranks and machines together; None: no limit, or none is set."""
        return round((self.remote_cache_gb or 0.0) * _BYTES_PER_GB) or None

    def disk_tier_slots(self, bytes_per_block_all_ranks: int) -> int:
        """Slots of the disk tier, the same number on every rank; 0 if there is none.

        The size is that of one block with its record's header, over all ranks. ConfigError if not even one
        fits.
        """
        if self.disk_cache_override_num_blocks is not None:
            return self.disk_cache_override_num_blocks
        slots = round((self.disk_cache_gb or 0.0) * _BYTES_PER_GB) // bytes_per_block_all_ranks
        if self.disk_cache_gb and not slots:
            need_gb = f"{bytes_per_block_all_ranks / _BYTES_PER_GB:.9f}"
            raise ConfigError(_DISK_GB, self.disk_cache_gb, f"holds no block; one takes {need_gb} GB")
        return slots

    def host_tier_slots(self, bytes_per_block_all_ranks: int) -> int:
        """
        Slots of the host tier, the same number on every rank. The size is that of one block over all ranks.

        Raises ConfigError if no tier is configured or not even one block fits, ValueError for a size below 1.
        """
        if bytes_per_block_all_ranks <= 0:
            raise ValueError(f"a block cannot have {bytes_per_block_all_ranks} bytes")
        self.require_tier()
        if not self.has_host_tier:  # disk alone: blocks pass through a little host memory on their way
            staged = max(_MIN_STAGED_BLOCKS, _STAGED_BYTES // bytes_per_block_all_ranks)
            return min(staged, max(1, self.disk_tier_slots(bytes_per_block_all_ranks)))
        if self.cpu_cache_override_num_blocks is not None:
            return self.cpu_cache_override_num_blocks
        slots = round((self.cpu_cache_gb or 0.0) * _BYTES_PER_GB) // bytes_per_block_all_ranks
        if slots == 0:
            need_gb = f"{bytes_per_block_all_ranks / _BYTES_PER_GB:.9f}"
            raise ConfigError(_CPU_GB, self.cpu_cache_gb, f"holds no block; one takes {need_gb} GB")
        return slots

    @property
    def host_size(self) -> tuple[str, object]:
        """The setting that says how large the host tier is, and its value."""
        blocks = self.cpu_cache_override_num_blocks
        return (_CPU_GB, self.cpu_cache_gb) if blocks is None else (_CPU_BLOCKS, blocks)


def limits_of(no_effect: str, only: Sequence[Adapter]) -> Iterator[str]:
    """In sentences: that a setting has no effect, or for whom."""
    if no_effect:
        yield f"No effect: {no_effect}."
    if len(only) < len(Adapter):
        yield f"Only {listed(only)}."


def listed(adapters: Sequence[Adapter]) -> str:
    """Their names in a sentence."""
    *first, last = map(str, adapters)
    return f"{', '.join(first)} and {last}" if first else last


def _extra(info: FieldInfo) -> dict[str, Any]:
    extra = info.json_schema_extra
    return dict(extra) if isinstance(extra, dict) else {}


def _default_text(default: object) -> str:
    """As one would write it."""
    if default is None:
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)
