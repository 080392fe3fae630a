"""An instance that takes orders, around a cache that only counts them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvbm_core.config import KvbmSettings
from kvbm_core.control.desk import About, AtOnce, Controlled
from kvbm_core.control.operators import OperatorKey, new_operator_key
from kvbm_core.control.service import ControlService
from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.readiness import Readiness
from kvbm_core.runtime.assembly import control_service
from kvbm_core.types import Tier

PATIENCE_S = 30.0
NAMESPACE = "0123456789abcdef"


class Cache:
    """``resets``: what was forgotten."""

    def __init__(self) -> None:
        self.resets: list[frozenset[Tier]] = []
        self.control = AtOnce(lambda: frozenset({Tier.HOST, Tier.DISK}), self._reset)

    def _reset(self, tiers: frozenset[Tier]) -> bool:
        self.resets.append(tiers)
        return True


@contextmanager
def taking_orders(
    settings: dict[str, object], controlled: Controlled, metrics: Metrics | None = None
) -> Iterator[ControlService]:
    """Until the end of it."""
    about = About("an engine", "a/model", 0, lambda: NAMESPACE)
    read = KvbmSettings.from_env({"cpu_cache_gb": 0.1, **settings})
    service = control_service(read, about, controlled, metrics or Metrics(), lambda: Readiness(True))
    assert service is not None
    try:
        yield service
    finally:
        service.close()


@pytest.fixture
def here(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sockets of this test's engines, and of no other's."""
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    monkeypatch.setenv("TMPDIR", str(short_path))
    return short_path


def operator(folder: Path, name: str = "operator") -> tuple[OperatorKey, Path]:
    """A new key, and its file."""
    path = folder / f"{name}.nk"
    new_operator_key(path)
    return OperatorKey(path), path


def wait_for(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Fails if it does not come."""
    ends_at_s = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < ends_at_s, "what was waited for did not come"
        time.sleep(0.01)
