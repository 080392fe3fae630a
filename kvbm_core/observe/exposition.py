"""
Prometheus text format 0.0.4, written by hand.

prometheus_client cannot write a counter without the suffix ``_total``, and KVBM's counters have none. It
would also put our numbers into the files of PROMETHEUS_MULTIPROC_DIR, which the engine sets for its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Sample:
    """One line: a name, its labels in order, a value."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float

    def series(self) -> str:
        """Name and labels as they are written, such as ``kvbm_bytes_total{direction="offload"}``."""
        if not self.labels:
            return self.name
        labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in self.labels)
        return f"{self.name}{{{labels}}}"


@dataclass(frozen=True, slots=True)
class Family:
    """Samples under one HELP and TYPE. ``kind`` is counter, gauge or histogram."""

    name: str
    kind: str
    doc: str
    samples: tuple[Sample, ...]


def render(families: Iterable[Family]) -> str:
    """The text of a scrape."""
    lines: list[str] = []
    for family in families:
        doc = family.doc.replace("\\", r"\\").replace("\n", r"\n")
        lines += [f"# HELP {family.name} {doc}", f"# TYPE {family.name} {family.kind}"]
        lines += [f"{sample.series()} {_number(sample.value)}" for sample in family.samples]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(value)


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
