"""What one request says to kvbm in vLLM's ``kv_transfer_params``: ``{"kvbm": {"skip": true}}``.

Such a request neither loads nor stores blocks. The other keys belong to other connectors.
"""

from __future__ import annotations

import functools
import logging
import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("kvbm")

KEY = "kvbm"
_MAX_SHOWN_CHARS = 80


def opts_out(request: Request) -> bool:
    """Whether the request wants to be served without kvbm. What cannot be read is ignored, with a warning."""
    params = request.kv_transfer_params
    wish = params.get(KEY) if isinstance(params, Mapping) else None
    if wish is None:
        return False
    if isinstance(wish, Mapping) and wish.keys() <= {"skip"} and isinstance(wish.get("skip", False), bool):
        return bool(wish.get("skip", False))
    shown = reprlib.repr(wish)  # clients may send millions of numbers, or lists in lists without end
    _warn(shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}...")
    return False


@functools.lru_cache(maxsize=64)  # clients repeat themselves
def _warn(shown: str) -> None:
    log.warning(
        'kvbm: kv_transfer_params: "%s" is %s: ignored; the only value is {"skip": true} or {"skip": false}',
        KEY,
        shown,
    )
