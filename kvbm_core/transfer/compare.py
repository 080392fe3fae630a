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


_E4M3, _E5M2 = _float8(4, 7), _float8(5, 15)

_READ: dict[str, Callable[[Bytes], npt.NDArray[Any]]] = {
    "float32": lambda raw: raw.view(np.float32),
    "float16": lambda raw: raw.view(np.float16).astype(np.float32),
    "bfloat16": _halves,
    "float8_e4m3fn": lambda raw: _E4M3[raw],
    "float8_e5m2": lambda raw: _E5M2[raw],
}
TOLERANCE = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.2, "float8_e4m3fn": 0.4, "float8_e5m2": 0.5}
"""By dtype: how large the difference of a piece may be, relative to the piece (both as Euclidean norms)."""


def can_compare(dtype: str) -> bool:
    """Whether numbers of this torch dtype (its name without ``torch.``) can be compared."""
    return dtype in _READ


def difference(stored: Bytes, computed: Bytes, dtype: str) -> float:
    """The largest difference of any piece, relative to its size: 0 for equal bytes, about 1.4 for other KV.

    Both are one block's content, of equal size. ValueError for a dtype that cannot be compared.
    """
    if not can_compare(dtype):
        raise ValueError(f"numbers of type {dtype!r} cannot be compared")
    if np.array_equal(stored, computed):
        return 0.0
    return max(
        _difference(stored[start : start + PIECE_BYTES], computed[start : start + PIECE_BYTES], dtype)
        for start in range(0, len(stored), PIECE_BYTES)
    )


def is_other(stored: Bytes, computed: Bytes, dtype: str) -> bool:
    """Whether the two differ by more than rounding explains."""
    return difference(stored, computed, dtype) > TOLERANCE[dtype]


def _difference(stored: Bytes, computed: Bytes, dtype: str) -> float:
    if np.array_equal(stored, computed):
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):  # bytes that are no KV may be any number
        one, other = _READ[dtype](stored).astype(np.float64), _READ[dtype](computed).astype(np.float64)
        size, apart = float(np.linalg.norm(other)), float(np.linalg.norm(one - other))
    if not np.isfinite(apart) or not np.isfinite(size):
        return float("inf")
    return apart / size if size else float("inf")
