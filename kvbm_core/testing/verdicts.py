"""What tests say of kvbm that no busy machine excuses: wrong bytes, and what is held for nobody."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from kvbm_core.errors import IntegrityError

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Wrong(AssertionError):
    """kvbm did something that is wrong whenever it is done."""


def judges(check: Callable[Given, Result]) -> Callable[Given, Result]:
    """``check`` raises Wrong for whatever it finds, also for what did not come to be in its patience."""

    @wraps(check)
    def judging(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        try:
            return check(*args, **kwargs)
        except (AssertionError, IntegrityError) as error:
            raise Wrong(str(error)) from error

    return judging
