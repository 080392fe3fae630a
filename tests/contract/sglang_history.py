"""What of HiCache came and went with which release of SGLang: what docs/sglang.md says, and how it is
seen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.contract.sglang_reading import CONTROLLER, HYBRID, STORAGE, enum_values
from tests.contract.source_reading import attributes


def has_field(name: str, field: str) -> Callable[[Path], bool]:
    """Whether a class of the interface has this field or method."""
    return lambda sglang: field in attributes(sglang / STORAGE, name)


def has_text(path: Path | str, text: str) -> Callable[[Path], bool]:
    """Whether this file is there, with this text in it."""
    return lambda sglang: (sglang / path).exists() and text in (sglang / path).read_text(encoding="utf-8")


LINKER = Path("srt/mem_cache/unified_cache/unified_cache_linker.py")
LINKER_FACTORY = Path("srt/mem_cache/unified_cache/linker_factory.py")
SERVER_ARGS = Path("srt/server_args.py")
RUNTIME_CONTEXT = Path("srt/runtime_context.py")
ANCHOR = "self.storage_host_pool = mem_pool_host.anchor_entry.host_pool"
# First release that has it (0.5.10: or an older one), first that has it no more, how it is seen.
HISTORY: dict[str, tuple[str, str | None, Callable[[Path], bool]]] = {
    "batch_*_v2": ("0.5.10", None, has_field("HiCacheStorage", "batch_get_v2")),
    "attach at run time": ("0.5.10", None, has_text(CONTROLLER, "def attach_storage_backend(")),
    "detach at run time": ("0.5.10", None, has_text(CONTROLLER, "def detach_storage_backend(")),
    "pp_rank": ("0.5.10", None, has_field("HiCacheStorageConfig", "pp_rank")),
    "own tree of HiCache": (
        "0.5.10",
        "0.5.21",
        has_text("srt/mem_cache/hiradix_cache.py", "class HiRadixCache("),
    ),
    "get_global_server_args": (
        "0.5.10",
        "0.5.20",
        has_text(SERVER_ARGS, "def get_global_server_args() -> ServerArgs"),
    ),
    "str(PoolName) is its value": ("0.5.11", None, has_field("PoolName", "__str__")),
    "attn_cp_rank": ("0.5.11", None, has_field("HiCacheStorageConfig", "attn_cp_rank")),
    "prefix_keys is None by default": (
        "0.5.12",
        None,
        has_text(STORAGE, "prefix_keys: Optional[List[str]] = None"),
    ),
    "draft pages by keys of their own": (
        "0.5.13",
        "0.5.19",
        has_text(CONTROLLER, "def _draft_page_set_generic("),
    ),
    "unified tree": ("0.5.13", None, has_text("srt/mem_cache/unified_radix_cache.py", "storage_backend")),
    "get_server_args": ("0.5.15", None, has_text(RUNTIME_CONTEXT, "def get_server_args() -> ServerArgs")),
    "restorable_prefix_pages": ("0.5.19", None, has_field("PoolTransferResult", "restorable_prefix_pages")),
    "the KV pool itself is registered": ("0.5.19", None, has_text(HYBRID, ANCHOR)),
    "linker": ("0.5.19", None, has_text(LINKER, "class UnifiedCacheLinker(ABC)")),
    "extra_info for batch_get_v2": ("0.5.21", None, has_text(HYBRID, "extra_info=extra_info")),
    "dp_rank": ("0.5.21", None, has_field("HiCacheStorageConfig", "dp_rank")),
    "block groups": (
        "0.5.22",
        None,
        lambda sglang: "block_groups" in enum_values(sglang / STORAGE, "PoolHitPolicy"),
    ),
    "on_host_pools_registered": ("0.5.23", None, has_field("HiCacheStorage", "on_host_pools_registered")),
    "dcp_rank": ("0.5.23", None, has_field("HiCacheStorageConfig", "dcp_rank")),
    "linker from outside": ("0.5.23", None, has_text(LINKER_FACTORY, "linker_module_path")),
}
