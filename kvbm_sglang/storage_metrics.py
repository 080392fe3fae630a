"""Batches as SGLang's StorageMetrics, which feed its own histograms of prefetch and backup."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from kvbm_core.types import Direction
from kvbm_sglang.stats import Batch

_PLACE = "sglang.srt.observability.metrics_collector"


def find_storage_metrics() -> Any:
    """SGLang's class; None where this version has it elsewhere. The first time takes a tenth of a second."""
    try:
        return importlib.import_module(_PLACE).StorageMetrics
    except (ImportError, AttributeError):
        return None


def filled(kind: Any, batches: Mapping[Direction, list[Batch]]) -> Any:
    """An instance of ``kind``."""
    prefetched, backed_up = batches[Direction.ONBOARD], batches[Direction.OFFLOAD]
    return kind(
        prefetch_pgs=[batch.pages for batch in prefetched],
        backup_pgs=[batch.pages for batch in backed_up],
        prefetch_bandwidth=[batch.gb_per_s for batch in prefetched],
        backup_bandwidth=[batch.gb_per_s for batch in backed_up],
    )
