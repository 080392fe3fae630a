"""Traces in Mooncake's format: one request a line, its prompt as ids of blocks of 512 tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec

BLOCK_TOKENS = 512
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class TraceError(ValueError):
    """The file is not such a trace; one line that says where."""


class Request(msgspec.Struct, frozen=True):
    """One line. ``timestamp`` in ms since the trace began; lengths in tokens; equal ``hash_ids`` are equal
    prefixes.

    The last id may be that of a block that the prompt does not fill.
    """

    timestamp: Count
    input_length: Count
    output_length: Count
    hash_ids: list[BlockId]

    @property
    def full_block_ids(self) -> Sequence[int]:
        """Those that can be kept: only full blocks move."""
        return self.hash_ids[: self.input_length // BLOCK_TOKENS]

    @property
    def reusable_blocks(self) -> int:
        """How many of them can be taken instead of computed: at least one token is left to compute."""
        return max(0, self.input_length - 1) // BLOCK_TOKENS


def read_trace(path: Path) -> list[Request]:
    """All requests, in the order of their times. TraceError if the file is no trace, OSError if it cannot be
    read.
    """
    decoder = msgspec.json.Decoder(Request)
    requests = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                request = decoder.decode(line)
            except msgspec.DecodeError as error:
                raise TraceError(f"line {number}: {error}") from None
            if len(request.hash_ids) != -(-request.input_length // BLOCK_TOKENS):
                raise TraceError(
                    f"line {number}: {len(request.hash_ids)} ids for {request.input_length} tokens"
                )
            requests.append(request)
    if not requests:
        raise TraceError("no request in it")
    if any(later.timestamp < earlier.timestamp for earlier, later in pairwise(requests)):
        raise TraceError("its times go back")
    return requests
