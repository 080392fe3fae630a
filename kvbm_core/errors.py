"""What can go wrong: an Outcome for everything outside our control, an exception for bugs and misuse."""

from __future__ import annotations

from enum import Enum


class Outcome(str, Enum):
    """The one result type of anything that can fail outside our control."""

    OK = "ok"
    MISS = "miss"
    REJECTED = "rejected"
    BUSY = "busy"
    TIMED_OUT = "timed_out"
    IO_ERROR = "io_error"
    NO_SPACE = "no_space"
    CORRUPT = "corrupt"
    INCOMPATIBLE = "incompatible"

    def __str__(self) -> str:
        return self.value


class KvbmError(Exception):
    """Base of every exception that kvbm raises on purpose."""


class ConfigError(KvbmError, ValueError):
    """A setting that cannot be used: one line with the setting, its value and the remedy."""

    def __init__(self, setting: str, value: object, remedy: str) -> None:
        super().__init__(f"kvbm: {setting}={value!s}: {remedy}")
        self.setting = setting
        self.value = value
        self.remedy = remedy


class LayoutError(KvbmError, ValueError):
    """Device tensors that kvbm does not know how to cut into blocks; nothing is cached."""


class UnsupportedError(KvbmError, ValueError):
    """An engine version, model kind or parallel shape that kvbm refuses to serve."""


class StuckCopyError(KvbmError, RuntimeError):
    """A copy from or to device memory does not end: a fault of the GPU or its driver.

    The one error that no guard keeps from the engine: what it wants to do next would be done with memory that
    still changes, so it must not be done.
    """


class IntegrityError(KvbmError, AssertionError):
    """An internal invariant does not hold: a bug."""
