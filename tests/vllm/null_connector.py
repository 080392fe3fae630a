"""Connectors that do nothing or lie, to test the harness itself."""

from __future__ import annotations

from typing import Any

from tests.engines.empty_connector import EmptyConnector


class NullConnector(EmptyConnector):
    """Finds nothing, moves nothing."""


class LyingConnector(NullConnector):
    """Promises the first block of every prompt at once and never brings it."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """A synchronous hit of one block."""
        return (4, False) if num_computed_tokens == 0 else (0, False)
