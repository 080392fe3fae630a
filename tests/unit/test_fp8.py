"""Numbers in float8 with a scale for each part: how near they come back, and what cannot be kept.

torch's own conversion is the reference, on the same numbers divided by the same scales.
"""

from __future__ import annotations

import random
from itertools import product
from math import prod

import numpy as np
import pytest
import torch

from kvbm_core.storage.remote.fp8 import NUMPY_OF, Encoded, Numbers, decode, encode

SHAPE, CUTS = (2, 3, 4, 2, 8, 6), (1, 2, 2)
"""Tensors, shards, heads, and of each head [kernel blocks, tokens, content]."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def raw(tensor: torch.Tensor) -> Numbers:
    """As kvbm sees its memory."""
    is_bfloat16 = tensor.dtype == torch.bfloat16
    return tensor.view(torch.int16).numpy().view(np.uint16) if is_bfloat16 else tensor.numpy()


def tensor_of(numbers: Numbers, dtype: torch.dtype) -> torch.Tensor:
    """The opposite."""
    own = torch.from_numpy(np.ascontiguousarray(numbers).view(np.uint8).copy())
    return own.view(dtype).reshape(numbers.shape)


def encoded(tensor: torch.Tensor) -> Encoded:
    """Of one that can be kept."""
    made = encode(np.ascontiguousarray(raw(tensor)), CUTS)
    assert made is not None
    return made


def there_and_back(tensor: torch.Tensor) -> torch.Tensor:
    """What comes back."""
    dtype = NUMPY_OF[str(tensor.dtype).removeprefix("torch.")]
    return tensor_of(decode(encoded(tensor), dtype, CUTS), tensor.dtype)


def scales_of(made: Encoded) -> torch.Tensor:
    """The scale of each number."""
    scales = torch.from_numpy(made.scales)
    for axis, (size, cut) in enumerate(zip(SHAPE[-3:], CUTS, strict=True), len(SHAPE) - 3):
        scales = scales.repeat_interleave(size // cut, dim=axis)
    return scales


def some_numbers(dtype: torch.dtype, rng: random.Random, exponent: float = 0.0) -> torch.Tensor:
    """Of heads and parts that are of very different sizes."""
    made = torch.Generator().manual_seed(rng.getrandbits(32))
    sizes = torch.exp(2 * torch.randn((*SHAPE[:3], 1, SHAPE[4], SHAPE[5]), generator=made))
    numbers = torch.randn(SHAPE, generator=made) * sizes * 2.0**exponent
    return numbers.clamp(-60_000, 60_000).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("exponent", [0, -13, 9])
def test_each_number_is_the_nearest_one(dtype: torch.dtype, exponent: int, rng: random.Random) -> None:
    numbers = some_numbers(dtype, rng, exponent)
    made, back = encoded(numbers), there_and_back(numbers)
    scales = scales_of(made)
    codes = (numbers.float() / scales).to(torch.float8_e4m3fn)
    assert torch.equal(torch.from_numpy(made.codes), codes.view(torch.uint8))
    assert torch.equal(back.float(), codes.float() * scales), "another rounding came on top"
    off = (numbers.double() - back.double()).abs()
    assert (off <= torch.maximum(numbers.double().abs() / 16, scales.double() / 1024)).all()
    assert off.max() > 0


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_came_back_once_stays_as_it_is(dtype: torch.dtype, rng: random.Random) -> None:
    once = there_and_back(some_numbers(dtype, rng))
    assert torch.equal(there_and_back(once), once)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_scales_are_of_one_part_of_one_head(dtype: torch.dtype) -> None:
    """A thousandth beside a number of a thousand would be lost in its part."""
    numbers = torch.full(SHAPE, 2.0**-10, dtype=dtype)
    numbers[1, 2, 3, 1, 5, 2] = 1000.0
    made = encoded(numbers)
    assert made.scales.shape == (2, 3, 4, *CUTS)
    large = np.argwhere(made.scales > 1)
    assert large.tolist() == [[1, 2, 3, 0, 1, 0]]
    is_lost = there_and_back(numbers) != numbers
    assert is_lost.sum() == prod(SHAPE[3:]) // prod(CUTS), "of its part alone, and itself"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_zeros_keep_their_sign_and_small_heads_their_numbers(dtype: torch.dtype) -> None:
    numbers = torch.zeros(SHAPE, dtype=dtype)
    numbers[0] = -0.0
    tiny = torch.finfo(dtype).tiny
    numbers[1, 1] = 1.5 * 2 * tiny
    back = there_and_back(numbers)
    if dtype is torch.float16:
        assert torch.equal(back, numbers)
    assert torch.equal(torch.signbit(back), torch.signbit(numbers))
    off = (back.double() - numbers.double()).abs()
    assert off.max() <= 2.0**-126, "the smallest scale is 2**-116"
    assert (np.log2(encoded(numbers).scales) >= -116).all()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_is_not_finite_or_may_become_so_is_not_kept(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    for number in (float("nan"), float("inf"), -float("inf"), largest, -largest):
        numbers = torch.zeros(SHAPE, dtype=dtype)
        numbers[1, 0, 2, 0, 3, 4] = number
        assert encode(raw(numbers), CUTS) is None, f"{number}"
    numbers = torch.full(SHAPE, largest * 0.93, dtype=dtype)
    assert there_and_back(numbers).isfinite().all()


def test_every_bfloat16_comes_back_as_near_as_it_can() -> None:
    """Alone in its part, all of them."""
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(-1, 1, 1)
    numbers = tensor_of(bits, torch.bfloat16).double()
    kept = (numbers.abs() <= 1.875 * 2.0**127).numpy().reshape(-1)
    assert not kept.all()
    made = encode(np.ascontiguousarray(bits[kept]), (1, 1))
    assert made is not None
    back = tensor_of(decode(made, "u2", (1, 1)), torch.bfloat16).double()
    off = (back - numbers[kept]).abs()
    assert (off <= torch.maximum(numbers[kept].abs() / 16, torch.tensor(2.0**-126).double())).all()


@pytest.mark.parametrize(("tokens", "content"), [*product((1, 3, 8), (1, 5, 6))])
def test_axes_of_any_size(tokens: int, content: int) -> None:
    cuts = tuple(2 if n % 2 == 0 else 1 for n in (tokens, content))
    numbers = torch.linspace(-3, 5, 2 * tokens * content).reshape(2, tokens, content)
    made = encode(raw(numbers), cuts)
    assert made is not None and made.scales.shape == (2, *cuts)
    back = tensor_of(decode(made, "f4", cuts), torch.float32)
    assert torch.allclose(back, numbers, rtol=1 / 16, atol=1e-3)
