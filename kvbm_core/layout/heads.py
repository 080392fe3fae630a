"""Which KV heads a tensor parallel rank holds."""

from __future__ import annotations

from kvbm_core.errors import LayoutError


def kv_heads_of_rank(total_kv_heads: int, tp_size: int, tp_rank: int) -> range:
    """The KV heads of ``tp_rank``. With more ranks than heads, neighbouring ranks hold the same head.

    Raises LayoutError if heads and ranks do not divide.
    """
    if total_kv_heads < 1 or not 0 <= tp_rank < tp_size:
        raise LayoutError(f"{total_kv_heads} KV heads, rank {tp_rank} of {tp_size}")
    if total_kv_heads % tp_size == 0:
        heads = total_kv_heads // tp_size
        return range(tp_rank * heads, (tp_rank + 1) * heads)
    if tp_size % total_kv_heads == 0:
        head = tp_rank // (tp_size // total_kv_heads)
        return range(head, head + 1)
    raise LayoutError(f"{total_kv_heads} KV heads cannot be shared by {tp_size} ranks")
