"""Batches as SGLang's StorageMetrics, which feed its own histograms of prefetch and backup."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from kvbm_core.types import Direction
from kvbm_sglang.stats import Batch

# Newest first.
_PLACES = ("sglang.srt.observability.metrics_collector", "sglang.srt.metrics.collector")


def as_storage_metrics(batches: Mapping[Direction, list[Batch]]) -> Any:
    """An instance of SGLang's class; None where this version has it elsewhere."""
    for place in _PLACES:
        try:
            kind = importlib.import_module(place).StorageMetrics
        except (ImportError, AttributeError):
            continue
        prefetched, backed_up = batches[Direction.ONBOARD], batches[Direction.OFFLOAD]
        return kind(
            prefetch_pgs=[batch.pages for batch in prefetched],
            backup_pgs=[batch.pages for batch in backed_up],
            prefetch_bandwidth=[batch.gb_per_s for batch in prefetched],
            backup_bandwidth=[batch.gb_per_s for batch in backed_up],
        )
    return None
