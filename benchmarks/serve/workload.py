"""What is asked of servers: prompts that share nothing, each drawn from the seed and its own number."""

from __future__ import annotations

import random
from typing import NamedTuple

from tests.engines.client import EngineClient
from tests.engines.vllm_server import VllmServer

FIRST_PRINTABLE_ID = 36  # of the tiny model's tokenizer; any ids below the size of the vocabulary would do
LAST_PRINTABLE_ID = 129
TIE_NATS = 0.125
"""Two steps of bfloat16 between logits of 8 to 16, as the tiny model has them: so far rounding decides."""


class Side(NamedTuple):
    """A server, and a client of it."""

    server: VllmServer
    client: EngineClient


class UniquePrompts:
    """Token ids of prompts that differ from their first block on; the same seed gives the same prompts."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def next(self, tokens: int) -> list[int]:
        """A prompt of this many tokens that was never given before."""
        return [self._draw.randint(FIRST_PRINTABLE_ID, LAST_PRINTABLE_ID) for _ in range(tokens)]
