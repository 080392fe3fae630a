"""Every setting made at once, and which of them an adapter reads, or tells its user not to heed."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvbm_core import config
from kvbm_core.config import Adapter, KvbmSettings
from kvbm_core.fleet.keys import new_keys
from kvbm_core.runtime.endpoint import endpoint_apart
from kvbm_core.testing import memory_engine
from tests.engines.certificates import make_certificates
from tests.engines.ports import free_port
from tests.policies import installed

_CONFIG = str(Path(config.__file__).parent)
# What a caller outside learns of settings without naming them.
_ANSWERS = {
    "control_ways",
    "event_ways",
    "fleet_root",
    "has_host_tier",
    "has_disk_tier",
    "host_tier_slots",
    "instance_of",
    "disk_tier_slots",
    "has_lower_tier",
    "has_remote_tier",
    "has_peers",
    "peer_export_bytes",
    "record_bytes",
    "remote_max_bytes",
    "store_urls",
    "way_to_device",
}
READ_IN_VAIN = {"peers", "remote_load", "share_wait_s", "why_requests"}
"""Read by what engines have in common, where nothing comes of it: no hint names an instance, the pace of
computing is not known, no load is shared, no request is told of.
"""
_OF_FLEETS = ("ETCD_", "KVBM_FLEET", "KVBM_CURVE_")
_BLOCKS = ("cpu_cache_override_num_blocks", "disk_cache_override_num_blocks")


@dataclass
class Seen:
    """``read``: fields that code outside of ``kvbm_core.config`` looked at. ``told``: lines of the log."""

    read: set[str] = field(default_factory=set)
    told: list[str] = field(default_factory=list)


def values(folder: str, metrics_port: int) -> dict[str, str]:
    """A value other than the default for each field, as text."""
    return {
        "cpu_cache_gb": "0.01",
        "cpu_cache_override_num_blocks": "24",
        **_disk(folder),
        **_remote(folder),
        "host_offload_prefix_min_priority": "1",
        "disable_write_combined": "1",
        "disable_numa": "true",
        "enable_numa": "true",
        "max_concurrent_transfers": "3",
        "max_transfer_batch_size": "15",
        "transfer_deadline_s": "50",
        "lease_ttl_s": "20",
        "share_wait_s": "0.5",
        "sync_onboard_bytes": "1",
        "decode_run_tokens": "64",
        "state_every_tokens": "1024",
        "verify_onboard": "true",
        "audit_rate": "0.5",
        "load_failure_policy": "fail",
        "nccl_mla_mode": "true",
        "nccl_max_ctas": "4",
        "leader_worker_init_timeout_s": "900",
        "start_wait_s": "0.01",
        "leader_zmq_host": "127.0.0.1",
        "leader_zmq_pub_port": str(free_port()),
        "leader_zmq_ack_port": str(free_port()),
        **_fleet(folder),
        "runtime_enabled": "true",
        "metrics": "true",
        "metrics_port": str(metrics_port),
        "metrics_host": "127.0.0.1",
        "cache_stats_max_requests": "500",
        "cache_stats_log_interval_s": "60",
        "log_level": "debug",
        "peers": "zmq",
        "peer_bind": f"127.0.0.1:{free_port()}",
        "peer_deadline_s": "1.5",
        "peer_export_gb": "0.125",
        "native": "false",
        **_recordings(folder),
        "events_medium": "CPU",
        **_events(folder),
        "kv_events_enable_consolidator": "true",
        "kv_events_consolidator_mode": "passthrough",
        "trtllm_zmq_port": "5555",
        "fatbin_path": "x.fatbin",
    }


def _recordings(folder: str) -> dict[str, str]:
    return {"enable_record": "true", "record_dir": f"{folder}/recordings", "record_gb": "0.5"}


def _fleet(folder: str) -> dict[str, str]:
    """Of an etcd that is not there."""
    public, secret = new_keys(Path(folder) / "keys", f"walk-{secrets.token_hex(4)}")
    certificates = make_certificates(Path(folder) / "certificates")
    return {
        "etcd_endpoints": f"https://127.0.0.1:{free_port()}",
        "etcd_auth_ca": str(certificates.authority),
        "etcd_auth_client_cert": str(certificates.certificate),
        "etcd_auth_client_key": str(certificates.key),
        "etcd_auth_username": "kv",
        "etcd_auth_password": "not-a-password",
        "fleet": "walk",
        "fleet_lease_s": "3",
        "fleet_insecure": "true",
        "curve_key_file": str(secret),
        "curve_allowed": str(public),
    }


def _events(folder: str) -> dict[str, str]:
    token = Path(folder) / f"token-{secrets.token_hex(4)}"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return {
        "events": "zmq,nats",
        "events_endpoint": f"tcp://127.0.0.1:{free_port()}",
        "events_replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
        "events_topic": "walk",
        "instance": "walk",
        "control": "socket,http,nats",
        "control_http": f"127.0.0.1:{free_port()}",
        "control_token_file": str(token),
        "why_requests": "7",
        "traces": "off",
        "control_operators": "UCHF6ALSLLYZ7DZR4OMEJBHTZ3OU2AQHYCCBMMZVDC5JHUD7NNH56CZJ",
        "nats_server": "nats://127.0.0.1:4222",
        "nats_username": "walk",
        "nats_password": "walk",
        "nats_token": "walk",
        "nats_nkey": "walk",
        "nats_credentials_file": "walk",
        "nats_ca_file": "walk",
        "nats_cert_file": "walk",
    }


def _disk(folder: str) -> dict[str, str]:
    return {
        "disk_cache_gb": "0.01",
        "disk_cache_override_num_blocks": "32",
        "disk_cache_dir": folder,
        "disk_zerofill_fallback": "1",
        "disk_disable_o_direct": "1",
        "disk_allocator_type": "open-direct",
        "disable_disk_offload_filter": "true",
        "eviction_policy": "walk",
        "disk_deadline_s": "30",
        "disk_io": "threads",
        "disk_to_device": "nixl-posix",
        "disk_check_at_start": "true",
    }


def _remote(folder: str) -> dict[str, str]:
    return {
        "remote_url": "memory://walk memory://second",
        "remote_cache_gb": "0.01",
        "remote_filter": "hit",
        "remote_trust": "group",
        "remote_deadline_s": "4",
        "remote_head_shards": "2",
        "remote_secret_file": config.__file__,
        "remote_encrypt": "true",
        "remote_codec": "zstd",
        "remote_wait_s": "0.5",
        "remote_load": "always",
        "remote_username": "kv",
        "remote_password_file": f"{folder}/password",
        "remote_ca_file": f"{folder}/ca.pem",
        "remote_cert_file": f"{folder}/cert.pem",
        "object_enabled": "false",
        "object_bucket": "blocks",
        "object_endpoint": "http://127.0.0.1:9",
        "object_region": "eu-west-1",
        "object_access_key": "name",
        "object_secret_key": "not-a-secret",
        "object_num_blocks": "1000",
    }


@contextmanager
def everything_set(
    folder: str, metrics_port: int, *, in_blocks: bool, has_fleet: bool = True
) -> Iterator[Seen]:
    """Each setting is made in the environment. ``in_blocks``: sizes in blocks win, else there are none.
    Without ``has_fleet`` leader and workers meet on this machine, and not in an etcd that is not there.
    """
    names = KvbmSettings.env_names()
    made = values(folder, metrics_port)
    assert made.keys() == names.keys(), "a new setting needs a value here"
    memory_engine.register()
    given = {names[name]: text for name, text in made.items() if in_blocks or name not in _BLOCKS}
    if not has_fleet:
        given = {name: text for name, text in given.items() if not name.startswith(_OF_FLEETS)}
    seen = Seen()
    handler = logging.Handler()
    handler.emit = lambda record: seen.told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("kvbm")
    level = logger.level
    logger.addHandler(handler)
    try:
        with (
            installed(Path(folder) / "installed", walk="kvbm_core.policy.lru:LruPolicy"),
            patch.dict(os.environ, given),
            _recording(seen.read),
        ):
            yield seen
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextmanager
def _recording(read: set[str]) -> Iterator[None]:
    fields = set(KvbmSettings.model_fields)
    plain_source, plain_is_set = KvbmSettings.source, KvbmSettings.is_set

    def is_from_outside(depth: int) -> bool:
        code = sys._getframe(depth).f_code
        return not code.co_filename.startswith(_CONFIG) or code.co_name in _ANSWERS

    def look(self: KvbmSettings, name: str) -> Any:
        if name in fields and is_from_outside(2):
            read.add(name)
        return object.__getattribute__(self, name)

    def source(self: KvbmSettings, name: str) -> Any:
        if is_from_outside(2):
            read.add(name)
        return plain_source(self, name)

    def is_set(self: KvbmSettings, name: str) -> bool:
        if is_from_outside(2):
            read.add(name)
        return plain_is_set(self, name)

    with (
        patch.object(KvbmSettings, "__getattribute__", look),
        patch.object(KvbmSettings, "source", source),
        patch.object(KvbmSettings, "is_set", is_set),
    ):
        yield


def apart(folder: str) -> Seen:
    """What is read where ranks may be on several machines."""
    with everything_set(folder, free_port(), in_blocks=True) as seen:
        assert endpoint_apart(KvbmSettings.from_env(), "walk", 0) is not None
    return seen


def neither_read_nor_told(adapter: Adapter, runs: list[Seen]) -> list[str]:
    """Settings that do nothing under ``adapter`` without its user hearing of it. [] is good.

    One that says it is heeded has to be read; one that is not has to be told, and not to be read; what is
    always so need not.
    """
    read = set().union(*(run.read for run in runs))
    told = "\n".join(line for run in runs for line in run.told)
    is_all_used = adapter is not Adapter.HICACHE  # which takes the options of a whole rank, and uses some
    wrong = []
    for name, info in KvbmSettings.model_fields.items():
        extra = info.json_schema_extra
        assert isinstance(extra, dict)
        is_told = f"kvbm: {info.validation_alias}=" in told
        only = extra["only"]
        assert isinstance(only, tuple)
        is_heeded = adapter in only and not extra["later"]
        if extra["granted"]:
            continue
        if is_heeded and name not in read:
            wrong.append(f"{name}: is not read")
        elif not is_heeded and not is_told:
            wrong.append(f"{name}: has no effect, and nobody is told")
        elif not is_heeded and is_all_used and name in read - READ_IN_VAIN:
            wrong.append(f"{name}: is said to have no effect, and is read")
    return wrong
