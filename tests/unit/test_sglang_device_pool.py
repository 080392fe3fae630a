"""Device pools as pages: where they are, what they mean, and which are refused. The pools are doubles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT RUN: SGLang's device pools; torch is missing")

from kvbm_core.errors import LayoutError  # noqa: E402
from kvbm_core.identity.fields import Description  # noqa: E402
from kvbm_sglang.device_pool import DevicePages  # noqa: E402
from kvbm_sglang.identity import device_namespace_of  # noqa: E402
from tests.unit.sglang_pools import (  # noqa: E402
    HEAD_DIM,
    HEADS,
    LAYERS,
    NUM_PAGES,
    PAGE_TOKENS,
    MHATokenToKVPool,
    MLATokenToKVPool,
    fill,
    indices_of,
    rows_of,
    tensors_of,
)

KINDS: dict[str, Callable[[], Any]] = {
    "mha": MHATokenToKVPool,
    "hnd": lambda: MHATokenToKVPool(layout="hnd"),
    "mla": MLATokenToKVPool,
}


def content(pages: DevicePages, page: int) -> bytes:
    """By the view, which is what executors copy."""
    storages = pages.memory.storages
    return b"".join(storages[s][at : at + n].tobytes() for s, at, n in pages.memory.views[0].regions(page))


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_is_its_rows_of_every_layer(kind: str) -> None:
    pool = KINDS[kind]()
    pages = DevicePages(pool, PAGE_TOKENS)
    assert pages.num_pages == NUM_PAGES + 1
    for page in range(1, 1 + NUM_PAGES):
        fill(pool, page, f"page {page}")
    for page in range(1 + NUM_PAGES):
        rows = [tensor[rows_of(pool, page)].contiguous().view(torch.uint8) for tensor in tensors_of(pool)]
        if kind != "mla":  # K and V of a layer together
            rows = [rows[side * LAYERS + layer] for layer in range(LAYERS) for side in (0, 1)]
        assert content(pages, page) == b"".join(row.numpy().tobytes() for row in rows)
    assert pages.page_bytes == sum(row.numel() for row in rows)


def test_pages_are_whole_aligned_and_there() -> None:
    pages = DevicePages(MHATokenToKVPool(), PAGE_TOKENS)
    assert pages.numbers(indices_of(3, 1, 8)) == (3, 1, 8)
    assert pages.numbers(indices_of()) == ()
    for wrong in (
        indices_of(1)[:3],
        indices_of(1) + 1,
        indices_of(1).flip(0),
        indices_of(9),
        indices_of(1) - 8,
    ):
        with pytest.raises(LayoutError):
            pages.numbers(wrong)


def test_an_incomplete_last_page_is_nobodys() -> None:
    pool = MHATokenToKVPool()
    pool.size -= 1
    pool.k_buffer = [layer[:-1] for layer in pool.k_buffer]
    pool.v_buffer = [layer[:-1] for layer in pool.v_buffer]
    assert DevicePages(pool, PAGE_TOKENS).num_pages == NUM_PAGES


def refused(change: Callable[[Any], None]) -> str:
    """The line that says why."""
    pool = MHATokenToKVPool()
    change(pool)
    with pytest.raises(LayoutError) as error:
        DevicePages(pool, PAGE_TOKENS)
    return str(error.value)


def test_what_is_not_known_is_refused() -> None:
    class MHATokenToKVPoolFP4(MHATokenToKVPool):
        pass

    with pytest.raises(LayoutError, match="MHATokenToKVPoolFP4 are not known"):
        DevicePages(MHATokenToKVPoolFP4(), PAGE_TOKENS)
    some = [torch.zeros(4)]
    assert "k_scale_buffer" in refused(lambda pool: setattr(pool, "k_scale_buffer", some))
    assert "is_quantized" in refused(lambda pool: setattr(pool, "is_quantized_kv_cache", True))
    assert "translate" in refused(
        lambda pool: setattr(pool, "host_transfer_translate", lambda indices: indices)
    )
    assert "index_k" in refused(lambda pool: setattr(pool, "index_k", [None, *some]))
    assert "not as many" in refused(lambda pool: pool.v_buffer.pop())
    assert "rows" in refused(lambda pool: setattr(pool, "size", pool.size - 2 * PAGE_TOKENS))
    assert "without tensors" in refused(lambda pool: (pool.k_buffer.clear(), pool.v_buffer.clear()))


def test_strides_that_overlap_are_refused() -> None:
    def overlap(pool: Any) -> None:
        rows = (NUM_PAGES + 1) * PAGE_TOKENS
        pool.k_buffer[1] = pool.k_buffer[1].as_strided(
            (rows, HEADS, HEAD_DIM), (HEADS * HEAD_DIM // 2, HEAD_DIM, 1)
        )

    assert "overlapping" in refused(overlap)


def test_what_the_bytes_depend_on_changes_the_namespace_and_capacity_does_not() -> None:
    ranks = {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1}

    def root(
        pool: Any = None,
        page_tokens: int = PAGE_TOKENS,
        settings: Any = None,
        **more: int,
    ) -> bytes:
        pages = DevicePages(pool or MHATokenToKVPool(), page_tokens)
        given = Description(tuple(sorted({"dtype": "auto", **(settings or {})}.items())), (), ())
        namespace = device_namespace_of("a-model", pages.layout, page_tokens, {**ranks, **more}, given)
        return namespace.root()

    fp8 = MHATokenToKVPool()
    fp8.dtype = torch.float8_e4m3fn  # SGLang stores all kinds of it as bytes
    double = MHATokenToKVPool(num_pages=7)
    double.size, double.page_size = 6 * PAGE_TOKENS, 2 * PAGE_TOKENS
    later = MHATokenToKVPool()
    later.start_layer, later.end_layer = LAYERS, 2 * LAYERS - 1
    roots = [
        root(),
        root(MHATokenToKVPool(layers=LAYERS + 1)),
        root(MHATokenToKVPool(layout="hnd")),
        root(MLATokenToKVPool()),
        root(fp8),
        root(double, 2 * PAGE_TOKENS),
        root(later),
        root(settings={"quantization": "fp8"}),
        *(root(tp_size=2, tp_rank=rank) for rank in (0, 1)),
        *(root(pp_size=2, pp_rank=rank) for rank in (0, 1)),
    ]
    assert len(set(roots)) == len(roots)
    assert root(MHATokenToKVPool(num_pages=3)) == root()
