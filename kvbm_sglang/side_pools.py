"""Every pool that SGLang names beside the KV pool (0.5.10 to 0.5.23), and what kvbm does with it. A pool that
is not here is one of a newer SGLang: nothing of its engine is cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STATES = "mamba"
KEPT: Mapping[str, str] = {
    "kv": "keys and values, or latents",
    STATES: "states of Mamba and linear attention: one for each node of the tree",
    "swa": "keys and values of sliding windows",
    "indexer": "keys of a sparse attention's indexer",
    "draft": "keys and values of a draft model",
    "draft_indexer": "keys of a draft model's indexer",
    "draft_swa": "keys and values of a draft model's sliding windows",
}
"""Kept page by page, as SGLang names their memory."""
_COMPRESSED = "DeepSeek-V4's compressed pages, whose KV pool has no memory of its own"
REFUSED: Mapping[str, str] = {
    "auxiliary_swa": "windows beside the model's own",
    **dict.fromkeys(
        (
            *(
                f"deepseek_v4_c{ratio}{part}"
                for ratio in (1, 2, 4)
                for part in ("", "_indexer", "_indexer_scale")
            ),
            *("deepseek_v4_c4_rope", "deepseek_v4_c4_state", "deepseek_v4_c4_indexer_state"),
            *("deepseek_v4_c128", "deepseek_v4_c128_rope", "deepseek_v4_c128_state"),
        ),
        _COMPRESSED,
    ),
}
"""Nothing of a model that has one is cached; what they are."""


def why_not_kept(name: str, pool: Any, arguments: Any, *, is_mla_model: bool, tp_size: int) -> str:
    """Why nothing of an engine with this pool may be cached; "" if it may. ``arguments``: in effect, or None.

    ``is_mla_model``: as SGLang says it: all ranks have the same KV.
    """
    if name not in KEPT:
        what = REFUSED.get(name, "this SGLang is newer than this kvbm, or a plugin made it")
        return f"pool {name} is not supported ({what})"
    if flag := flag_of_rows(arguments):
        return f"what {flag} returns is not known of pages that come back; leave it out"
    if name == STATES:
        return next(
            (reason for field, reason in _SPOILS_STATES.items() if getattr(arguments, field, False)), ""
        )
    # SGLang lets the first of such ranks alone write, but for states.
    if is_mla_model and tp_size > 1 and getattr(pool, "head_num", None) is not None:
        return f"pool {name} is divided by heads, and SGLang stores it for one of {tp_size} ranks alone"
    return ""


def flag_of_rows(arguments: Any) -> str:
    """The flag by which SGLang returns something of each token that it keeps for device memory alone: of a
    page that comes back it would return what others left there. "" if there is none.
    """
    given = (name for name in _RETURNING_ROWS if getattr(arguments, name, False))
    return next((f"--{name.replace('_', '-')}" for name in given), "")


_RETURNING_ROWS = ("enable_return_routed_experts", "enable_return_indexer_topk")
# By argument.
_SPOILS_STATES: Mapping[str, str] = {
    # In some versions a batch that mixes prefill and decoding writes no state into a slot that the tree gets
    # all the same (sglang issue 39342): on a disk it would stay wrong for good.
    "enable_mixed_chunk": "with --enable-mixed-chunk states of SGLang's tree may be wrong; leave it out",
    # The tree then holds numbers of another pool than the one that HiCache copies from.
    "enable_int8_mamba_checkpoint": "states in 8 bits (--enable-int8-mamba-checkpoint) are not known",
}
