"""What only the registry in C refuses."""

from __future__ import annotations

import numpy as np
import pytest

from kvbm_core.blocks.registry import BlockRegistry
from kvbm_core.native import native
from kvbm_core.policy.recency import as_slots
from kvbm_core.testing.policy_contract import sample_keys
from kvbm_core.types import BlockKey

pytestmark = pytest.mark.skipif(
    native is None,
    reason="NOT RUN: the registry in C (no C compiler when kvbm was installed, or KVBM_NATIVE=0)",
)

(A,) = sample_keys(0, 1)


@pytest.mark.parametrize(
    ("error", "key"),
    [(ValueError, b""), (ValueError, b"k" * 31), (ValueError, A + b"\0"), (TypeError, "k" * 32)],
)
def test_the_registry_in_c_takes_nothing_but_block_keys(error: type[Exception], key: BlockKey) -> None:
    registry = BlockRegistry()
    registry.grow(10)
    for call in (registry.find, registry.slots_of, registry.new_of, registry.commit, registry.cancel):
        with pytest.raises(error):
            call([A, key])
    for ask in (registry.is_pending, registry.__contains__):
        with pytest.raises(error):
            ask(key)
    with pytest.raises(error):
        registry.reserve([A, key], as_slots([0, 1]))
    registry.check_integrity()
    assert registry.pending_blocks == 0


def test_the_registry_in_c_takes_nothing_but_int32_slots() -> None:
    registry = BlockRegistry()
    registry.grow(10)
    for wrong in (np.zeros(1, np.int64), np.zeros((1, 1), np.int32), np.zeros(1, np.uint32)):
        with pytest.raises(ValueError, match="int32"):
            registry.keys_in(wrong)
        with pytest.raises(ValueError, match="int32"):
            registry.reserve([A], wrong)
    with pytest.raises(ValueError, match="more than"):
        registry.grow((1 << 30) + 1)
