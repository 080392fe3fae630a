"""Whether stored KV is what was computed again: equal but for rounding.

The same tokens computed in another batch, or in other chunks, round otherwise. KV of other tokens, weights or
settings differs by about as much as it is large.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PIECE_BYTES = 16_384
"""Compared by itself, so that one wrong layer is not hidden among the others."""


def _halves(raw: Bytes) -> npt.NDArray[Any]:
    return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _float8(exponent_bits: int, bias: int) -> npt.NDArray[np.float32]:
    """The value of each byte: sign, exponent, mantissa; all ones in the exponent counts as a number."""
    mantissa_bits = 7 - exponent_bits
    byte = np.arange(256)
    exponent = (byte >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (byte & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    size = np.where(
        exponent == 0, mantissa * 2.0 ** (1 - bias), (1 + mantissa) * 2.0 ** (exponent.astype(float) - bias)
    )
    return np.where(byte < 128, size, -size).astype(np.float32)


_E4M3, _E5M2, _E4M3_FNUZ = _float8(4, 7), _float8(5, 15), _float8(4, 8)
_E4M3_FNUZ[128] = np.nan  # elsewhere it is minus zero

_READ: dict[str, Callable[[Bytes], npt.NDArray[Any]]] = {
    "float32": lambda raw: raw.view(np.float32),
    "float16": lambda raw: raw.view(np.float16).astype(np.float32),
    "bfloat16": _halves,
    "float8_e4m3fn": lambda raw: _E4M3[raw],
    "float8_e4m3fnuz": lambda raw: _E4M3_FNUZ[raw],
    "float8_e5m2": lambda raw: _E5M2[raw],
}
TOLERANCE = {
    "float32": 0.01,
    "float16": 0.05,
    "bfloat16": 0.15,
    "float8_e4m3fn": 0.25,
    "float8_e4m3fnuz": 0.25,
    "float8_e5m2": 0.35,
}
"""By dtype: how large the difference of a piece may be."""
NOTHING = 1e-5
"""Numbers below this share of the block's own size count as zero."""


def can_compare(dtype: str) -> bool:
    """Whether numbers of this torch dtype (its name without ``torch.``) can be compared."""
    return dtype in _READ


def difference(stored: Bytes, computed: Bytes, dtype: str) -> float:
    """The largest difference of any piece: 0 for equal numbers, about 0.6 for KV of other tokens, 1 at most.

    The difference of two numbers is |a - b| / (|a| + |b|), that of a piece the mean over its numbers. So it
    does not depend on how large numbers are: neither a few large channels of K, which are the same for all
    tokens, nor a large layer beside a small one hide what is wrong. Both are one block's content, of equal
    size. ValueError for a dtype that cannot be compared.
    """
    if not can_compare(dtype):
        raise ValueError(f"numbers of type {dtype!r} cannot be compared")
    if np.array_equal(stored, computed):
        return 0.0
    with np.errstate(all="ignore"):  # bytes that are no KV may be any number
        one, other = _READ[dtype](stored).astype(np.float64), _READ[dtype](computed).astype(np.float64)
        finite = other[np.isfinite(other)]
        floor = NOTHING * float(np.sqrt(np.mean(finite**2))) if finite.size else 0.0
        apart = np.abs(one - other) / np.maximum(np.abs(one) + np.abs(other), max(floor, 1e-300))
        apart = np.where(np.isfinite(apart), np.minimum(apart, 1.0), 1.0)
    apart[(one == other) | (np.isnan(one) & np.isnan(other))] = 0.0
    numbers = max(1, PIECE_BYTES * len(apart) // len(stored))
    return max(float(apart[start : start + numbers].mean()) for start in range(0, len(apart), numbers))


def is_other(stored: Bytes, computed: Bytes, dtype: str) -> bool:
    """Whether the two differ by more than rounding explains."""
    return difference(stored, computed, dtype) > TOLERANCE[dtype]
