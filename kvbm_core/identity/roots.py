"""The first parent of a request's blocks, and whether names made from it mean the same in another process."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.types import SequenceHash

MAX_KNOWN_ROOTS = 1024
LONG_SALT_CHARS = 128


class Stamp(NamedTuple):
    """What tells weights, an adapter or an image from others. ``is_lasting``: the text means the same in
    every process; one that does not must reach neither the disk nor anything that is shared.
    """

    text: str
    is_lasting: bool


NO_ADAPTER = Stamp("", is_lasting=True)


class RootFacts(NamedTuple):
    """What a root was made of besides what the whole engine has in common. For this process: a salt is a
    secret.
    """

    adapter: str
    salt: str | None
    weights: str
    layout: str


class Root(NamedTuple):
    """The parent of a sequence's first block. Blocks of one that is not lasting stay in this process's
    memory.
    """

    hash: SequenceHash
    is_lasting: bool
    facts: RootFacts | None = None


def short_salt(salt: str | None) -> str | None:
    """What stands for a salt where it is remembered: itself, or of a long one a digest, which is longer than
    any short one, so that no salt stands for another. Clients choose how long theirs are, and memory for many
    of them has to be bounded.
    """
    if salt is None or len(salt) <= LONG_SALT_CHARS:
        return salt
    digest = hashlib.sha256(salt.encode(errors="surrogatepass")).hexdigest()
    return digest.rjust(LONG_SALT_CHARS + 1)


def process_stamp(what: str) -> Stamp:
    """``what`` as this process knows it, and no other: also not one that was forked from it."""
    global _nonce  # noqa: PLW0603 - one for each process
    if _nonce[0] != os.getpid():
        _nonce = (os.getpid(), secrets.token_hex(16))
    return Stamp(f"{what} of process {_nonce[1]}", is_lasting=False)


_nonce = (os.getpid(), secrets.token_hex(16))


class Roots:
    """Roots by adapter and salt: most requests share theirs with others. One thread only.

    ``weights`` answers at once what is known of the model's weights now; it may answer otherwise later, and
    roots change with it. ``is_lasting``: False if the namespace itself means nothing in another process.
    """

    def __init__(
        self, namespace: KeyNamespace, weights: Callable[[], Stamp], *, is_lasting: bool = True
    ) -> None:
        self._namespace = namespace
        self._weights_of_now = weights
        self._weights = weights()
        self._is_lasting = is_lasting
        self.on_change: Callable[[], None] = lambda: None
        """Called by ``of`` before it answers a root under other weights than before: blocks that were named
        from those roots are not asked for any more.
        """
        self._known: dict[tuple[Stamp, str | None], Root] = {}

    @property
    def block_size_tokens(self) -> int:
        """Of the namespace."""
        return self._namespace.block_size_tokens

    def of(self, adapter: Stamp, salt: str | None, layout_fingerprint: str) -> Root:
        """The root for requests with this adapter and salt, in this layout, with the weights as they are
        now.
        """
        weights = self._weights_of_now()
        if weights != self._weights or layout_fingerprint != self._namespace.layout:
            self._weights = weights
            self._namespace = replace(self._namespace, layout=layout_fingerprint)
            was_used = bool(self._known)
            self._known.clear()
            if was_used:
                self.on_change()
        name = adapter, short_salt(salt)
        root = self._known.get(name)
        if root is None:
            if len(self._known) >= MAX_KNOWN_ROOTS:
                self._known.clear()
            root = self._known[name] = self._make(adapter, salt)
        return root

    def _make(self, adapter: Stamp, salt: str | None) -> Root:
        namespace = replace(self._namespace, extra=(*self._namespace.extra, ("weights", self._weights.text)))
        is_lasting = self._is_lasting and self._weights.is_lasting and adapter.is_lasting
        if not is_lasting:  # as if the whole namespace were another one: nobody else makes the same keys
            namespace = replace(namespace, extra=(*namespace.extra, ("process", process_stamp("").text)))
        root = namespace.with_request(adapter=adapter.text, salt=salt).root()
        facts = RootFacts(adapter.text, short_salt(salt), self._weights.text, self._namespace.layout)
        return Root(root, is_lasting, facts)
