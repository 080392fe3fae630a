"""What this process is called: in its fleet, on pages of metrics, in spans."""

from __future__ import annotations

import os
import secrets

from kvbm_core.config.settings import KvbmSettings

_own = (os.getpid(), secrets.token_hex(8))


def instance_of(settings: KvbmSettings) -> str:
    """As ``KVBM_INSTANCE`` says; else random, and the same for as long as this process lives."""
    global _own  # noqa: PLW0603 - one for each process, also of those that are forked
    if _own[0] != os.getpid():
        _own = (os.getpid(), secrets.token_hex(8))
    return settings.instance or _own[1]
