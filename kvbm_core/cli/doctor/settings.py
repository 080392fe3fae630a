"""The settings alone: names, values, and whether they go together. Of the machine, only how much memory it
has for a host tier to propose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvbm_core.cli.doctor.check import Check, Finding, Subject, note, ok, warning
from kvbm_core.cli.doctor.run import of_config_error
from kvbm_core.config import KvbmSettings
from kvbm_core.config.fields import Adapter
from kvbm_core.config.instance import instance_of
from kvbm_core.control.http_wire import http_address, read_token
from kvbm_core.control.operators import Operators
from kvbm_core.errors import ConfigError
from kvbm_core.fleet.keys import CurveKeys
from kvbm_core.policy.named import make_policy
from kvbm_core.runtime.assembly import store_options
from kvbm_core.storage.memory_room import available_memory
from kvbm_core.storage.remote.secret import Secret

_BEFORE = "kvbm: "


def of_warning(line: str) -> Finding:
    """A line of KvbmSettings.warnings: what was seen, and what to do."""
    text = line.removeprefix(_BEFORE)
    for mark in ("; ", ": "):
        seen, found, remedy = text.rpartition(mark)
        if found:
            return warning(seen, remedy)
    return warning(text, "see docs/configuration.md")


def unheeded(settings: KvbmSettings, adapters: Sequence[Adapter]) -> Iterator[Finding]:
    """Settings that are made and that none of an engine's adapters heeds, or only some of them."""
    lines: dict[str, list[str]] = {}
    for adapter in adapters:
        for line in settings.warnings_under(adapter)[len(settings.warnings) :]:
            lines.setdefault(line.partition("=")[0], []).append(line.removeprefix(_BEFORE))
    for found in lines.values():
        seen, _, reason = found[0].partition(": ")
        if len(found) == len(adapters):
            yield warning(f"{seen}: {reason}", "unset it, or use an engine that heeds it")
        else:
            yield note(f"{seen}: {reason}")


def look_at_settings(subject: Subject) -> Iterator[Finding]:
    """Unknown names, values that were replaced, settings that are ignored or have no effect."""
    settings = subject.settings
    yield from map(of_warning, settings.warnings)
    if not settings.warnings:
        number = sum(map(settings.is_set, settings.env_names()))
        yield ok(f"{number} settings are made in this shell; their names and values are in order")


def look_at_tiers(subject: Subject) -> Iterator[Finding]:
    """Whether there is a tier, and whether their sizes go together."""
    settings = subject.settings
    if not (settings.has_host_tier or settings.has_disk_tier or settings.has_remote_tier):
        size_gb = max(1, min(20, int(available_memory(subject.root).available_bytes / 2e9)))
        remedy = f"export DYN_KVBM_CPU_CACHE_GB={size_gb}, or give the engine a size in its own configuration"
        yield warning("no cache tier is configured in this shell: kvbm would refuse to start", remedy)
        return
    yield ok(f"tiers: {', '.join(_tiers(settings))}")
    host_gb, disk_gb = settings.cpu_cache_gb, settings.disk_cache_gb
    if host_gb and disk_gb and disk_gb <= host_gb:
        seen = f"the disk tier ({disk_gb:g} GB) is not larger than the host tier ({host_gb:g} GB)"
        yield warning(seen, "raise DYN_KVBM_DISK_CACHE_GB: else the disk holds what the host holds anyway")
    if settings.has_remote_tier and not (settings.has_host_tier or settings.has_disk_tier):
        seen = "blocks reach KVBM_REMOTE_URL by way of host memory, and none is configured"
        yield warning(seen, "set DYN_KVBM_CPU_CACHE_GB too")


def _tiers(settings: KvbmSettings) -> Iterator[str]:
    sizes = (
        ("host", settings.has_host_tier, settings.cpu_cache_gb, settings.cpu_cache_override_num_blocks),
        ("disk", settings.has_disk_tier, settings.disk_cache_gb, settings.disk_cache_override_num_blocks),
    )
    for name, is_there, gigabytes, blocks in sizes:
        if is_there:
            yield f"{name} {gigabytes:g} GB" if blocks is None else f"{name} {blocks:,} blocks"
    yield from settings.store_urls


def look_at_eviction(subject: Subject) -> Iterator[Finding]:
    """The eviction policy, which may be of somebody else's package."""
    name = subject.settings.eviction_policy
    try:
        make_policy(name)
    except ConfigError as problem:
        yield of_config_error(problem)
    else:
        yield ok(f"KVBM_EVICTION_POLICY={name} can be used")


def look_at_secrets(subject: Subject) -> Iterator[Finding]:
    """Files that hold secrets of shared stores."""
    settings = subject.settings
    files: tuple[tuple[str, str, Callable[[], object]], ...] = (
        (
            "KVBM_REMOTE_SECRET_FILE",
            settings.remote_secret_file,
            lambda: Secret.read(settings.remote_secret_file),
        ),
        ("KVBM_REMOTE_PASSWORD_FILE", settings.remote_password_file, store_options(settings).login.password),
    )
    for name, path, read in files:
        if path:
            try:
                read()
                yield ok(f"{name} can be read")
            except ConfigError as problem:
                yield of_config_error(problem)


def look_at_curve_keys(subject: Subject) -> Iterator[Finding]:
    """This machine's key pair and the keys that it trusts: there, readable, and nobody else's to write."""
    settings = subject.settings
    keys = CurveKeys.from_settings(settings)
    if keys is None:
        return
    if keys.is_allowed(keys.own.public):
        yield ok("the CURVE key pair and the list of keys can be used")
    else:
        remedy = "put this machine's .key file there too, if ranks or peers on it are to meet"
        yield note("KVBM_CURVE_ALLOWED does not hold this machine's own public key", remedy)


def look_at_operators(subject: Subject) -> Iterator[Finding]:
    """Keys of those whose orders are taken over NATS; address and token of orders over HTTP."""
    settings = subject.settings
    if "http" in settings.control_ways:
        try:
            read_token(settings)
            http_address(settings)
            yield ok("KVBM_CONTROL_TOKEN_FILE and KVBM_CONTROL_HTTP can be used")
        except ConfigError as problem:
            yield of_config_error(problem)
    if "nats" in settings.control_ways:
        Operators(settings.control_operators, settings.fleet, instance_of(settings))
        yield ok("KVBM_CONTROL_OPERATORS names who may give orders")
    elif settings.control_operators:
        yield warning(
            "KVBM_CONTROL_OPERATORS is set, and orders do not come over NATS", "set KVBM_CONTROL=nats"
        )


CHECKS = (
    Check("settings", "unknown names, values that are replaced, settings without effect", look_at_settings),
    Check("tiers", "whether a tier is configured, and whether the sizes go together", look_at_tiers),
    Check("eviction", "whether the policy that KVBM_EVICTION_POLICY names can be made", look_at_eviction),
    Check("secrets", "files with the secret and the password of shared stores", look_at_secrets),
    Check("curve-keys", "the CURVE key pair and the list of keys: readable, and whose", look_at_curve_keys),
    Check(
        "operators",
        "keys of those whose orders are taken over NATS, token and address of orders over HTTP",
        look_at_operators,
    ),
)
