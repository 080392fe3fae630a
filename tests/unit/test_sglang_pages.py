"""Pages of host pools by their identity. The pools are doubles: this environment has no SGLang (tests/sglang
has).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT RUN: SGLang's pages; torch is missing")

from kvbm_core.errors import LayoutError, Outcome  # noqa: E402
from kvbm_core.identity.fields import Description  # noqa: E402
from kvbm_core.identity.roots import Stamp  # noqa: E402
from kvbm_core.storage.disk.allocate import FileOptions  # noqa: E402
from kvbm_core.types import Tier  # noqa: E402
from kvbm_sglang.identity import KV, namespace_of, page_keys  # noqa: E402
from kvbm_sglang.pages import Pages  # noqa: E402
from kvbm_sglang.store import DEADLINE_S, OwnFile, PageStore  # noqa: E402

PAGE_TOKENS, NUM_PAGES = 4, 8
ENGINE = Description((("kv_cache_dtype", "auto"),), (), ())
WEIGHTS = Stamp("weights", is_lasting=True)
RANKS = ("tp", "pp", "attn_cp", "dcp")
CONFIG = SimpleNamespace(
    model_name="a-model",
    is_mla_model=False,
    **{f"{what}_rank": 0 for what in RANKS},
    **{f"{what}_size": 1 for what in RANKS},
)


class Pool:
    """[K and V, layer, token, bytes], as SGLang's layer_first, or [K and V, token, layer, bytes], its
    page_first.
    """

    def __init__(self, layout: str = "page_first", layer_num: int = 3, token_bytes: int = 1024) -> None:
        self.layout, self.layer_num, self.page_size, self.dtype = layout, layer_num, PAGE_TOKENS, torch.uint8
        self.token_bytes, self.size = token_bytes, NUM_PAGES * PAGE_TOKENS
        self.kv_buffer = torch.randint(0, 256, (2 * layer_num * self.size * token_bytes,), dtype=torch.uint8)

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """As SGLang's pools answer."""
        base, half = self.kv_buffer.data_ptr(), self.layer_num * self.size * self.token_bytes
        starts = indices.tolist()[::PAGE_TOKENS]
        if self.layout == "page_first":
            size = self.layer_num * PAGE_TOKENS * self.token_bytes
            places = [
                base + start * self.layer_num * self.token_bytes + kv * half
                for start in starts
                for kv in (0, 1)
            ]
        else:
            size = PAGE_TOKENS * self.token_bytes
            places = [
                base + (layer * self.size + start) * self.token_bytes + kv * half
                for start in starts
                for layer in range(self.layer_num)
                for kv in (0, 1)
            ]
        return places, [size] * len(places)


def indices_of(*pages: int) -> Any:
    return torch.cat([torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS) for page in pages])


def store_of(folder: Path, pool: Pool, config: Any = CONFIG, num_slots: int = 16) -> PageStore:
    pages = Pages(pool)
    namespace = namespace_of(config, pool, KV, pages.piece_bytes, "a-model", engine=ENGINE, weights=WEIGHTS)
    disk = OwnFile(folder, namespace, pages.page_bytes, num_slots, FileOptions(is_direct=False), shares=False)
    assert disk.wait_recovered(30.0)
    return PageStore(disk, None, pages, namespace, DEADLINE_S)


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_come_back_to_other_places_and_after_a_restart(layout: str, tmp_path: Path) -> None:
    pool = Pool(layout)
    content = pool.kv_buffer.clone()
    store = store_of(tmp_path, pool)
    keys = ["aa", "bb", "cc"]
    assert store.put(keys, indices_of(5, 0, 3)) == [Outcome.OK] * 3
    store.close()
    pool.kv_buffer.zero_()
    store = store_of(tmp_path, pool)
    assert store.find(["aa", "zz", "cc"]) == [Tier.DISK, None, Tier.DISK]
    assert store.get(keys, indices_of(5, 0, 3)).outcomes == [Outcome.OK] * 3
    assert store.get(["aa"], indices_of(7)).outcomes == [Outcome.OK]
    source = Pool(layout)
    source.kv_buffer = content
    at = {page: _bytes_of(pool, page) for page in range(NUM_PAGES)}
    assert [at[page] for page in (5, 0, 3)] == [_bytes_of(source, page) for page in (5, 0, 3)]
    assert at[7] == at[5] and not any(at[1])
    store.clear()
    assert store.find(keys) == [None] * 3
    store.close()


def _bytes_of(pool: Pool, page: int) -> bytes:
    return b"".join(bytes(part) for part in Pages(pool).memory_of(indices_of(page), 1)[0])  # type: ignore[arg-type]


def test_everything_that_bytes_depend_on_changes_the_key() -> None:
    def root(
        pool: Pool | None = None,
        name: str = KV,
        model: str = "a-model",
        engine: Description = ENGINE,
        weights: Stamp = WEIGHTS,
        **config: Any,
    ) -> bytes:
        pool = pool or Pool()
        whole = SimpleNamespace(**{**vars(CONFIG), **config})
        pieces = Pages(pool).piece_bytes
        return namespace_of(whole, pool, name, pieces, model, engine=engine, weights=weights).root()

    other_dtype = Pool()
    other_dtype.dtype = torch.bfloat16
    roots = [
        root(),
        root(Pool("layer_first")),
        root(Pool(layer_num=4)),
        root(Pool(token_bytes=2048)),
        root(other_dtype),
        root(name="swa"),
        root(model="another-model"),
        root(engine=Description((("kv_cache_dtype", "fp8_e5m2"),), (), ())),
        root(weights=Stamp("others", is_lasting=True)),
        *(root(**{f"{what}_size": 2, f"{what}_rank": rank}) for what in RANKS for rank in (0, 1)),
    ]
    assert len(set(roots)) == len(roots)
    mla = {root(is_mla_model=True, tp_size=2, tp_rank=rank) for rank in (0, 1)}
    assert len(mla) == 1, "one copy for all ranks"
    assert len({root(name="mamba", is_mla_model=True, tp_size=2, tp_rank=rank) for rank in (0, 1)}) == 2
    assert len({*page_keys(root(), ["a", "b"]), *page_keys(roots[1], ["a", "b"])}) == 4


def test_another_layout_in_the_same_folder_finds_nothing(tmp_path: Path) -> None:
    one, two = Pool("page_first"), Pool("layer_first")
    first, second = store_of(tmp_path, one), store_of(tmp_path, two)
    assert first.put(["aa"], indices_of(0)) == [Outcome.OK]
    assert second.get(["aa"], indices_of(0)).outcomes == [Outcome.MISS] and second.find(["aa"]) == [None]
    first.close()
    second.close()


def test_what_is_no_whole_page_or_no_memory_is_refused() -> None:
    pages = Pages(Pool())
    with pytest.raises(LayoutError, match="are not 1 pages of 4"):
        pages.memory_of(torch.arange(3), 1)
    with pytest.raises(LayoutError, match="names no memory"):
        Pages(SimpleNamespace(page_size=4))
    with pytest.raises(LayoutError, match="names no memory"):
        Pages(SimpleNamespace(page_size=4, get_page_buffer_meta=lambda indices: ([], [])))
