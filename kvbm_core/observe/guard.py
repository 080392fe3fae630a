"""A guard turns a bug into "no hit" and a count: the engine's loop never sees an exception of ours."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

from kvbm_core.errors import StuckCopyError
from kvbm_core.observe.log import RateLimitedLogger, get_logger
from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.ranges import ranged

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class GuardState:
    """Where guarded errors are counted and logged."""

    metrics: Metrics = field(default_factory=Metrics)
    log: RateLimitedLogger = field(default_factory=RateLimitedLogger)


class Guarded(Protocol):
    """An object whose methods may be guarded."""

    @property
    def guard_state(self) -> GuardState:
        """Where its errors go."""


S = TypeVar("S", bound=Guarded)


class _Raise:
    """The type of RAISE, so that None can be a last resort."""


RAISE: Final = _Raise()
_SEAM = "kvbm_seam"  # the attribute of a guarded method that has its name


def guarded(
    seam: str, fallback: Callable[..., T], *, last_resort: T | _Raise = RAISE
) -> Callable[[Callable[Concatenate[S, P], T]], Callable[Concatenate[S, P], T]]:
    """
    Decorates a method that the engine calls: on an exception, counts and logs it and returns
    ``fallback(self, *args, **kwargs)``, the safe answer.

    If the fallback fails too, ``last_resort`` is returned (share nothing mutable through it); without one,
    its error goes on to the engine. StuckCopyError, KeyboardInterrupt, SystemExit and other BaseExceptions
    always pass. Where a profiler is attached, the call is a range in what it records (ranges.py).
    ``seam`` names the hook in the log and in ``kvbm_guarded_errors_total``; see ``seams_of``.
    """

    def decorate(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
        @functools.wraps(method)
        def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return method(self, *args, **kwargs)
            except StuckCopyError:
                raise
            except Exception as error:
                _note(self, seam, error)
            try:
                return fallback(self, *args, **kwargs)
            except StuckCopyError:
                raise
            except Exception as error:
                if isinstance(last_resort, _Raise):
                    raise
                _note(self, seam, error)
                return last_resort

        setattr(call, _SEAM, seam)
        return ranged(call)

    return decorate


def seams_of(*classes: type) -> tuple[str, ...]:
    """The names of all guarded methods of ``classes``: what Metrics counts their errors under."""
    found = (
        getattr(method, _SEAM, None)
        for of in classes
        for base in of.__mro__
        for method in vars(base).values()
    )
    return tuple(dict.fromkeys(seam for seam in found if seam is not None))


def _note(owner: Guarded, seam: str, error: Exception) -> None:
    """Counts and logs; must not fail even if ``owner`` is half built."""
    try:
        state = owner.guard_state
        state.metrics.guarded_error(seam)
        state.log.warning(
            (seam, type(error)), "kvbm: error in %s, the engine goes on without it", seam, exc_info=error
        )
    except Exception as trouble:
        get_logger().error("kvbm: error in %s (%r), which could not be counted (%r)", seam, error, trouble)
