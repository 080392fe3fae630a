"""What ``kvbm doctor`` looks at of SGLang."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator

from kvbm_core.cli.doctor.check import Check, Finding, Subject, error, note, ok, warning
from kvbm_core.cli.doctor.settings import unheeded
from kvbm_core.config.fields import Adapter

NAME = "sglang"
OLDEST, NEWEST = (0, 5, 10), (0, 5, 23)
_RELEASE = re.compile(r"(\d+)\.(\d+)\.(\d+)")


def look_at_sglang(subject: Subject) -> Iterator[Finding]:
    """Its version, what of it is tested, and settings that it does not heed."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        if subject.engine == NAME:
            yield error("SGLang is not installed in this environment", "install sglang 0.5.10 to 0.5.23")
        return
    yield _about(version)
    if subject.settings.has_host_tier or subject.settings.has_disk_tier or subject.settings.has_remote_tier:
        yield from unheeded(subject.settings, (Adapter.HICACHE, Adapter.LINKER))


def _about(version: str) -> Finding:
    found = _RELEASE.match(version)
    release = tuple(map(int, found.groups())) if found else ()
    if release < OLDEST:
        return error(f"SGLang {version} is older than what kvbm serves", "install 0.5.10 to 0.5.23")
    if release > NEWEST:
        remedy = "compare some answers with those of a server without kvbm"
        return warning(f"SGLang {version} is newer than what kvbm was tested with (0.5.10 to 0.5.23)", remedy)
    if release == NEWEST:
        return ok(f"SGLang {version}: this kvbm was run with it, HiCache and the linker")
    return note(f"SGLang {version}: HiCache was tested against its sources; the linker needs 0.5.23")


CHECKS = (Check(NAME, "SGLang: its version, what of it is tested, settings that it ignores", look_at_sglang),)
