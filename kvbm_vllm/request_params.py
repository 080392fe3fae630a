"""What one request says to kvbm in vLLM's ``kv_transfer_params``: ``{"kvbm": {"skip": true}}``.

Such a request neither loads nor stores blocks. The other keys belong to other connectors.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvbm_core.observe.log import RateLimitedLogger

if TYPE_CHECKING:
    from vllm.v1.request import Request

KEY = "kvbm"
_MAX_SHOWN_CHARS = 80


def opts_out(request: Request, log: RateLimitedLogger) -> bool:
    """Whether the request wants to be served without kvbm. What cannot be read is ignored, with a warning:
    one for all clients, as each of them may say something else each time.
    """
    params = request.kv_transfer_params
    wish = params.get(KEY) if isinstance(params, Mapping) else None
    if wish is None:
        return False
    if isinstance(wish, Mapping) and wish.keys() <= {"skip"} and isinstance(wish.get("skip", False), bool):
        return bool(wish.get("skip", False))
    shown = reprlib.repr(wish)  # clients may send millions of numbers, or lists in lists without end
    log.warning(
        KEY,
        'kvbm: kv_transfer_params: "%s" is %s: ignored; the only value is {"skip": true} or {"skip": false}',
        KEY,
        shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}...",
    )
    return False
