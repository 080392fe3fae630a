"""NVTX ranges around what an engine calls: for Nsight Systems (docs/tracing.md).

Without the package ``nvtx`` there are none; where no profiler is attached when the process starts, the
package leaves functions as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

DOMAIN, COLOR = "kvbm", "green"

P = ParamSpec("P")
T = TypeVar("T")


@functools.cache
def _annotate() -> Callable[..., Any] | None:
    try:
        import nvtx
    except ImportError:
        return None
    return cast("Callable[..., Any]", nvtx.annotate)


def ranged(call: Callable[P, T]) -> Callable[P, T]:
    """``call`` within a range of its own name; the category says on which side of the connector."""
    annotate = _annotate()
    if annotate is None:
        return call
    category = "worker" if "Worker" in call.__qualname__ else "scheduler"
    ranged_call = annotate(message=call.__name__, color=COLOR, domain=DOMAIN, category=category)(call)
    return cast("Callable[P, T]", ranged_call)
