"""vLLM request -> what its blocks depend on besides their tokens and the engine (identity.py).

In doubt about an input, the request is not cached: ``uncacheable_reason`` names why, and it is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvbm_core.tokens.hashing import encode_fields

if TYPE_CHECKING:
    from vllm.v1.request import Request


def uncacheable_reason(request: Request) -> str | None:
    """Why blocks of this request must not be stored or loaded; None if they may."""
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "prompt_embeds"
    if request.resumable:
        # A streaming session replaces tokens that were computed already.
        return "streaming_session"
    return None


def has_lasting_names(request: Request) -> bool:
    """Whether all that the request's blocks are named by means the same in every process.

    Names of multimodal items do not. vLLM makes one of an item's content, or of a client's name for it
    (``multi_modal_uuids``), or of that name and the request's ``mm_processor_kwargs`` or ``media_io_kwargs``.
    The last looks like a digest of content, and nothing in the request tells the two apart.
    """
    return not request.mm_features


def multimodal_extras(request: Request, block_size_tokens: int) -> Callable[[int], bytes] | None:
    """For each block, the ids of the multimodal items that overlap it and where they start; None without
    items.
    """
    spans = [
        (feature.mm_position.offset, feature.mm_position.length, feature.identifier)
        for feature in request.mm_features
    ]
    if not spans:
        return None

    def extra_of_block(block: int) -> bytes:
        start, end = block * block_size_tokens, (block + 1) * block_size_tokens
        overlapping = [span for span in spans if span[0] < end and span[0] + span[1] > start]
        fields = [value for offset, length, name in overlapping for value in (name, offset, length)]
        return encode_fields(*fields) if fields else b""

    return extra_of_block
