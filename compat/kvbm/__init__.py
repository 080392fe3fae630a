"""The module names of the KVBM guides, in front of kvbm_core and kvbm_vllm; no code lives here."""

from __future__ import annotations

from kvbm_core import __version__

__all__ = ["__version__"]
