"""What is installed: whose package, the native module, packages that the settings need."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

from kvbm_core import __version__
from kvbm_core.cli.doctor.check import Check, Finding, Subject, error, note, ok, warning
from kvbm_core.cli.whose import REMEDY, owner_of_guide_names
from kvbm_core.config import KvbmSettings
from kvbm_core.config.remote_url import BUCKET_SCHEMES, scheme_of
from kvbm_core.native import native

NEEDS_LIBRARIES = {"mooncake.store": "libibverbs1"}
"""A module that is there may not load without a package of the system."""
TESTED_MACHINES = ("x86_64",)
UNTESTED_PYTHON = (3, 14)


def look_at_package(subject: Subject) -> Iterator[Finding]:
    """Whose modules the guides' names lead to, and what Python and machine these are."""
    is_ours, line = owner_of_guide_names()
    if is_ours:
        yield ok(f"kvbm {__version__}, and {line}")
    else:
        yield error(line.removesuffix(f"; {REMEDY}"), REMEDY)
    machine, version = platform.machine(), platform.python_version()
    if machine not in TESTED_MACHINES:
        yield note(f"{machine}: kvbm was never run on one", "compare some answers with those without kvbm")
    if sys.version_info[:2] >= UNTESTED_PYTHON:
        yield note(f"Python {version} is newer than what kvbm was tested with (3.10 to 3.13)")


def look_at_native(subject: Subject) -> Iterator[Finding]:
    """Whether the C module was built, and is used."""
    if native is not None:
        yield ok("the native module is there")
    elif not subject.settings.native:
        yield note("KVBM_NATIVE switches the native module off: hashing and copies are slower", "unset it")
    else:
        remedy = "install a C compiler and Python's headers, and kvbm again (pip -v shows what fails)"
        yield warning("the native module is missing: hashing and copies are slower", remedy)


def look_at_extras(subject: Subject) -> Iterator[Finding]:
    """Packages beyond kvbm's own that the settings need."""
    missing = False
    for setting, modules, extra in _needed(subject.settings):
        absent = [name for name in modules if find_spec(name.partition(".")[0]) is None]
        if absent:
            missing = True
            remedy = f"install kvbm with its extra {extra}: pip install '.[{extra}]' in its checkout"
            yield error(f"{setting} needs {' and '.join(absent)}, which cannot be imported", remedy)
        for name in NEEDS_LIBRARIES.keys() & {*modules} - {*absent}:
            if why := _why_not_loaded(name):
                missing = True
                yield error(f"{setting} needs {name}: {why}", f"install {NEEDS_LIBRARIES[name]}")
    if not missing:
        yield ok("every package that the settings need is there")


def _why_not_loaded(module: str) -> str:
    try:
        import_module(module)
    except ImportError as failure:
        return str(failure)
    return ""


def _needed(settings: KvbmSettings) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """(setting, modules, extra) of what is configured."""
    if settings.etcd_endpoints:
        yield (
            "ETCD_ENDPOINTS",
            ("etcd3", "google.protobuf" if find_spec("google") else "google", "grpc"),
            "etcd",
        )
    if "nats" in settings.event_ways:
        yield "KVBM_EVENTS", ("nats",), "nats"
    if "nats" in settings.control_ways:
        yield "KVBM_CONTROL", ("nats", "nacl"), "nats"
    schemes = {scheme_of(url) for url in settings.store_urls}
    if not schemes.isdisjoint(BUCKET_SCHEMES):
        yield "KVBM_REMOTE_URL", ("obstore",), "s3"
    if "mooncake" in schemes:
        yield "KVBM_REMOTE_URL", ("mooncake.store",), "mooncake"
    if settings.remote_encrypt:
        yield "KVBM_REMOTE_ENCRYPT", ("cryptography",), "crypto"
    if settings.remote_codec == "zstd":
        yield "KVBM_REMOTE_CODEC", ("zstandard",), "zstd"
    for name, value in (
        ("KVBM_DISK_IO", settings.disk_io),
        ("KVBM_DISK_TO_DEVICE", settings.disk_to_device),
        ("KVBM_PEERS", settings.peers),
    ):
        if value.startswith("nixl"):
            yield name, ("nixl",), "nixl"


CHECKS = (
    Check(
        "package", "whether engines load this package or NVIDIA's, which has the same name", look_at_package
    ),
    Check("native", "whether the C module was built and is used", look_at_native),
    Check("extras", "packages beyond kvbm's own that the settings need", look_at_extras),
)
