"""What one request says to kvbm, in vLLM's ``kv_transfer_params``, and where a router has found its blocks.

``{"kvbm": {"skip": true}}``: such a request neither loads nor stores blocks. ``max_load_tokens`` and
``max_offload_tokens``: as vLLM's own offloading means them. ``kvbm_prefilled_as``: the name
under which the worker that computed the prompt keeps it. Hints are read there too, and in ``kv_hints`` (vLLM
0.32 and later). The other keys are other connectors'.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvbm_core.observe.log import RateLimitedLogger
from kvbm_core.runtime.request import TokenLimits

if TYPE_CHECKING:
    from vllm.v1.request import Request

KEY = "kvbm"
MAX_LOAD, MAX_OFFLOAD = "max_load_tokens", "max_offload_tokens"
PREFILLED_AS = "kvbm_prefilled_as"
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
    log.warning(
        KEY,
        'kvbm: kv_transfer_params: "%s" is %s: ignored; the only value is {"skip": true} or {"skip": false}',
        KEY,
        _shown(wish),
    )
    return False


def token_limits(request: Request, log: RateLimitedLogger) -> TokenLimits:
    """How much may be loaded for the request, and stored of it. What is no number of tokens is ignored, with
    a warning for all clients.
    """
    load, offload = (_limit(request, name, log) for name in (MAX_LOAD, MAX_OFFLOAD))
    return TokenLimits(load, offload)


def _limit(request: Request, name: str, log: RateLimitedLogger) -> int | None:
    value = _param(request, name)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    line = 'kvbm: kv_transfer_params: "%s" is %s: ignored; write a number of tokens, 0 or more'
    log.warning(name, line, name, _shown(value))
    return None


def _shown(value: object) -> str:
    shown = reprlib.repr(value)  # clients may send millions of numbers, or lists in lists without end
    return shown if len(shown) <= _MAX_SHOWN_CHARS else f"{shown[:_MAX_SHOWN_CHARS]}..."


def is_to_be_decoded_elsewhere(request: Request) -> bool:
    """Whether this worker is asked to compute the prompt, for another one to go on."""
    return bool(_param(request, "do_remote_decode"))


def is_prefilled_elsewhere(request: Request) -> bool:
    """Whether NIXL is about to bring the prompt's blocks, from the worker that has computed them."""
    return bool(_param(request, "do_remote_prefill"))


def holds_foreign_blocks(request: Request, root: str) -> bool:
    """Whether NIXL brings, or has brought, blocks of another worker that does not call them as this one does,
    ``root``. NIXL compares models by name: nobody knows which weights made these.
    """
    return bool(_param(request, "remote_engine_id")) and _param(request, PREFILLED_AS) != root


def hinted_peer(request: Request) -> str:
    """The instance that a router has named for this request's blocks, as tcp://HOST:PORT; empty: none."""
    from kvbm_vllm.hints import is_understood, source_of  # only where there are peers

    envelope = getattr(request, "kv_hints", None)
    is_ours = is_understood(getattr(envelope, "protocol_version", None))
    found = (
        tuple(getattr(action, name, None) for name in ("action_type", "action_version", "payload"))
        for action in (getattr(envelope, "actions", ()) if is_ours else ())
    )
    return source_of(
        request.kv_transfer_params, [(kind, version, payload) for kind, version, payload in found]
    )


def _param(request: Request, key: str) -> object:
    params = request.kv_transfer_params
    return params.get(key) if isinstance(params, Mapping) else None
