"""An engine adapter: an engine with a paged KV cache keeps blocks in host memory beyond its own pages."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvbm_core.errors import Outcome
from kvbm_core.layout.view import BlockView, Segment
from kvbm_core.runtime.local import LocalOptions, LocalTiers
from kvbm_core.tokens.chain import TokenChain
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.types import BlockKey, block_key

LAYERS, PAGES, PAGE_TOKENS, WIDTH = 4, 8, 16, 32
Layer = npt.NDArray[np.float32]


class Adapter:
    """What the engine calls. Hits are held from ``lookup`` to ``load``, so they cannot be evicted between."""

    def __init__(self, layers: Sequence[Layer], host_blocks: int) -> None:
        # Where each block has its bytes: one piece in each layer's array.
        page_bytes = layers[0][0].nbytes
        pieces = (Segment(number, 0, page_bytes, page_bytes) for number in range(len(layers)))
        storages = [layer.reshape(-1).view(np.uint8) for layer in layers]
        memory = DeviceMemory((BlockView(PAGES, tuple(pieces)),), storages)
        # All that the bytes depend on besides tokens: a real adapter also names weights and configuration.
        layout = f"layers={LAYERS},width={WIDTH}"
        self._root = KeyNamespace(
            "toy", kv_dtype="float32", layout=layout, block_size_tokens=PAGE_TOKENS
        ).root()
        self._tiers = LocalTiers(memory, LocalOptions(num_slots=host_blocks))
        self._tiers.wait_ready(host_blocks, timeout_s=60)

    def _keys(self, tokens: Sequence[int]) -> list[BlockKey]:
        chain = TokenChain(self._root, PAGE_TOKENS)
        chain.extend(tokens)
        return [block_key(one, group=0) for one in chain.hashes]

    def lookup(self, request: str, tokens: Sequence[int]) -> int:
        """How many leading pages can be loaded. The last token is always computed: an engine needs its
        logits.
        """
        return self._tiers.match(request, self._keys(tokens[:-1]))

    def load(self, request: str, tokens: Sequence[int], pages: Sequence[int]) -> bool:
        """Fills the engine's ``pages``. False: they hold garbage, and have to be computed."""
        claim = self._tiers.claim(request, self._keys(tokens)[: len(pages)])
        if claim is None:
            return False
        end = _End()
        self._tiers.load(claim, pages, end)
        return end.wait() is Outcome.OK

    def store(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Keeps the full pages of a computed prompt. They may be given to others when this returns."""
        keys = self._keys(tokens)
        end = _End()
        self._tiers.store(keys, pages[: len(keys)], end)
        end.wait()

    def close(self) -> None:
        """Gives memory and threads back."""
        self._tiers.close()


class _End:
    """Of one transfer; called from a thread of kvbm's. A real adapter does not wait, but looks each step."""

    def __init__(self) -> None:
        self._outcome = Outcome.REJECTED
        self._over = threading.Event()

    def __call__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._over.set()

    def wait(self) -> Outcome:
        self._over.wait()
        return self._outcome


class ToyEngine:
    """Serves one request at a time on few pages; its KV depends on all tokens before, as a model's does."""

    def __init__(self) -> None:
        self.layers = [np.zeros((PAGES, PAGE_TOKENS, WIDTH), np.float32) for _ in range(LAYERS)]
        self.adapter = Adapter(self.layers, host_blocks=64)
        self.computed_tokens = 0

    def serve(self, request: str, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """The KV of the whole prompt."""
        pages = list(range(-(-len(tokens) // PAGE_TOKENS)))
        found = self.adapter.lookup(request, tokens)
        if found and not self.adapter.load(request, tokens, pages[:found]):
            found = 0
        self._compute(tokens, found * PAGE_TOKENS)
        self.adapter.store(tokens, pages)
        flat = [layer.reshape(-1, WIDTH)[: len(tokens)] for layer in self.layers]
        return np.stack(flat)

    def _compute(self, tokens: Sequence[int], start: int) -> None:
        sums = np.cumsum(tokens).astype(np.float32)
        for number, layer in enumerate(self.layers):
            layer.reshape(-1, WIDTH)[start : len(tokens)] = sums[start:, None] * (number + 1)
        self.computed_tokens += len(tokens) - start


def main() -> None:
    """The same prompt again, after another one has used its pages."""
    engine = ToyEngine()
    prompt = list(range(100))
    first = engine.serve("a", prompt).copy()
    engine.serve("b", [7] * 120)
    engine.computed_tokens = 0
    again = engine.serve("c", prompt)
    print(engine.computed_tokens, "of", len(prompt), "tokens computed:", np.array_equal(first, again))
    engine.adapter.close()


if __name__ == "__main__":
    main()
