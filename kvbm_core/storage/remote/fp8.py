"""Numbers of KV as float8 (e4m3fn), a byte each, and one scale for each part of a head of a block.

Scales are powers of two, as in the MX formats: a part's largest number becomes at most 448. What comes back
is then a number of the same type without further rounding, and stays what it is however often it goes this
way. Of a number x comes back x' with |x - x'| <= max(|x| / 16, scale / 1024); zeros keep their sign. The
smallest scale is 2**-116.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]
Codes = npt.NDArray[np.uint8]
Scales = npt.NDArray[np.float32]

NUMPY_OF = {"bfloat16": "u2", "float16": "f2", "float32": "f4"}
"""How numpy has numbers of these types: it knows no bfloat16, the upper half of a float32."""

# Of the upper half of a float32: its exponent begins with bit 7, and is 127 more than it says.
_ONE = 1 << 7
_BIAS = 127
_MIN_SCALE = -116
_MAX_EXPONENT, _MAX_FRACTION = 8, 96
"""Of 448, the largest e4m3."""
_HALF_OF_SMALLEST = -10
"""The exponent of the largest number that is rounded to zero."""
_LARGEST = {name: (_BIAS + e) * _ONE + 112 for name, e in (("u2", 127), ("f4", 127), ("f2", 15))}
"""1.875 times the largest power of two: what is larger may become infinite."""


def _values() -> npt.NDArray[np.float32]:
    """Of each byte: sign, 4 bits of exponent, 3 of mantissa."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.ldexp(np.where(exponent, mantissa + 8, mantissa * 2) / 8, np.where(exponent, exponent, 0) - 7)
    return np.where(code < 128, size, -size).astype(np.float32)


def _codes() -> Codes:
    """Of the numbers from ``2**_HALF_OF_SMALLEST`` to 448 whose float32 ends with 16 zeros, in order: the
    nearest e4m3, and of two the even one.
    """
    first, last = (_BIAS + _HALF_OF_SMALLEST) * _ONE, (_BIAS + _MAX_EXPONENT) * _ONE + _MAX_FRACTION
    numbers = (np.arange(first, last + 1, dtype=np.uint32) << 16).view(np.float32)
    middles = (_VALUES[:126] + _VALUES[1:127]) / 2
    codes = np.searchsorted(middles, numbers)
    is_tie = numbers == middles[np.minimum(codes, len(middles) - 1)]
    nearest: Codes = (codes + (is_tie & (codes % 2 == 1))).astype(np.uint8)
    return nearest


_VALUES = _values()
_CODES = _codes()


class Encoded(NamedTuple):
    """``scales``: one for each part, with as many axes as the cuts say."""

    codes: Codes
    scales: Scales


def encode(numbers: Numbers, cuts: Sequence[int]) -> Encoded | None:
    """``numbers``: contiguous, of a type of NUMPY_OF; the last axes are each cut into so many parts. None if
    one of them is not finite, or so large that it might come back as infinite.
    """
    upper = _upper_halves(numbers)
    sizes = upper & np.uint16(0x7FFF)
    parts, within = _in_parts(sizes, cuts)
    largest = parts.max(axis=within, keepdims=True)
    if largest.max() > _LARGEST[numbers.dtype.str[1:]]:
        return None
    exponents = (largest >> 7).astype(np.int32) - (_BIAS + _MAX_EXPONENT)
    exponents += largest % _ONE > _MAX_FRACTION
    np.maximum(exponents, _MIN_SCALE, out=exponents)
    lowest = ((exponents + _BIAS + _HALF_OF_SMALLEST) * _ONE).astype(np.uint16)
    np.maximum(parts, lowest, out=parts)
    np.subtract(parts, lowest, out=parts)
    codes = _CODES.take(sizes, mode="clip")
    codes |= (upper >> np.uint16(8)).astype(np.uint8) & np.uint8(0x80)
    scales = np.ldexp(np.float32(1), exponents)
    return Encoded(codes, scales.reshape(*numbers.shape[: -len(cuts)], *cuts))


def decode(encoded: Encoded, dtype: str, cuts: Sequence[int]) -> Numbers:
    """The opposite; ``dtype`` is one of numpy's in NUMPY_OF. Numbers that ``encode`` did not make may become
    anything.
    """
    numbers = _VALUES.take(encoded.codes, mode="clip")
    parts, within = _in_parts(numbers, cuts)
    with np.errstate(all="ignore"):
        parts *= np.expand_dims(encoded.scales, tuple(within))
        if dtype == "f2":
            return numbers.astype(np.float16)
    return numbers if dtype == "f4" else numbers.view(np.uint16)[..., 1::2]


def _upper_halves(numbers: Numbers) -> npt.NDArray[np.uint16]:
    """Of float32; the lowest bit is set if anything was cut off, which is enough to round rightly."""
    if numbers.dtype == np.uint16:
        return numbers
    bits = numbers.astype(np.float32, copy=False).view(np.uint32)
    upper: npt.NDArray[np.uint16] = (bits >> 16).astype(np.uint16)
    upper |= (bits & 0xFFFF) != 0
    return upper


def _in_parts(array: Numbers, cuts: Sequence[int]) -> tuple[Numbers, tuple[int, ...]]:
    """The same memory with two axes for each that is cut: the part, and what is within it; and the numbers of
    these last ones.
    """
    first = array.ndim - len(cuts)
    sizes = chain.from_iterable((cut, n // cut) for cut, n in zip(cuts, array.shape[first:], strict=True))
    within = tuple(range(first + 1, first + 2 * len(cuts), 2))
    return array.reshape(*array.shape[:first], *sizes), within
