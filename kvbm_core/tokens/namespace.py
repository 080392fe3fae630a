"""KeyNamespace: two requests share blocks only if everything in here is the same."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from kvbm_core.tokens.hashing import encode_fields
from kvbm_core.types import SequenceHash

_TAG = "kvbm/namespace/1"
WEIGHTS = "weights"
"""The name in ``extra`` of what tells the weights from others of the same model."""


@dataclass(frozen=True)
class KeyNamespace:
    """Everything that makes the bytes of two blocks with the same tokens interchangeable.

    ``layout`` is the layout fingerprint (hex), ``parallel`` the parallel shape ("tp=2,pp=1"), ``adapter`` the
    LoRA's name and path ("" = none). ``salt`` None means unsalted, which is not the salt "". ``extra`` are
    further (name, value) pairs; their order does not matter, a name given twice raises ValueError.
    """

    model: str
    revision: str = ""
    kv_dtype: str = ""
    layout: str = ""
    block_size_tokens: int = 0
    parallel: str = ""
    adapter: str = ""
    salt: str | None = None
    extra: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.extra]
        if len(set(names)) != len(names):
            raise ValueError(f"a namespace's extra names a thing twice: {names}")
        object.__setattr__(self, "extra", tuple(sorted(self.extra)))

    def root(self) -> SequenceHash:
        """The parent of every sequence's first block in this namespace; equal only for equal namespaces."""
        fields = encode_fields(
            _TAG,
            self.model,
            self.revision,
            self.kv_dtype,
            self.layout,
            self.block_size_tokens,
            self.parallel,
            self.adapter,
            self.salt,
            encode_fields(*(text for pair in self.extra for text in pair)),
        )
        return SequenceHash(hashlib.sha256(fields).digest())

    def without_weights(self) -> KeyNamespace:
        """This namespace whatever the weights are: not for keys, but for a place where blocks of all of them
        may lie.
        """
        extra = tuple(pair for pair in self.extra if pair[0] != WEIGHTS)
        return replace(self, revision="", extra=extra)

    @property
    def digest(self) -> str:
        """A short name of it for people: the same for all ranks, whatever the weights are."""
        return replace(self.without_weights(), parallel="").root().hex()[:16]

    def with_request(self, *, adapter: str, salt: str | None) -> KeyNamespace:
        """This namespace for a request with its own LoRA adapter and salt."""
        return replace(self, adapter=adapter, salt=salt)
