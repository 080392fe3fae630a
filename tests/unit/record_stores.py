"""Record stores in memory for tests, and objects changed behind their back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvbm_core.errors import Outcome
from kvbm_core.storage.base import Memory
from kvbm_core.storage.extents import Extent
from kvbm_core.storage.names import Meaning
from kvbm_core.storage.remote.encoding import Encoding
from kvbm_core.storage.remote.names import RecordNames
from kvbm_core.storage.remote.record_store import RecordStore
from kvbm_core.storage.remote.secret import Secret
from kvbm_core.testing.memory_engine import MemoryEngine, MemoryObjects
from kvbm_core.testing.store_contract import LONG_S, buffers, content_in, content_of, fill

PAYLOAD_BYTES = 1000
MEANING = Meaning("org/Model-7B", b"a namespace", b"fingerprint".ljust(16))
SECRET = Secret(b"a secret that is long enough")
OTHER_SECRET = Secret(b"another one that is long enough")


def compressible(key: bytes, num_bytes: int) -> bytes:
    """Content of a key, of which zstd makes less."""
    return (content_of(key, 97) * num_bytes)[:num_bytes]  # type: ignore[arg-type]


@dataclass
class Kind:
    """How a store is set up."""

    codec: str = "none"
    secret: Secret | None = None
    encrypts: bool = False
    meaning: Meaning = MEANING
    payload_bytes: int = PAYLOAD_BYTES
    objects: MemoryObjects = field(default_factory=MemoryObjects)

    def open(self, engine: MemoryEngine | None = None) -> RecordStore:
        """Another one of the same objects."""
        encoding = Encoding(self.codec, self.secret if self.encrypts else None)
        names = RecordNames(self.meaning, self.secret)
        return RecordStore(engine or MemoryEngine(objects=self.objects), names, self.payload_bytes, encoding)

    def name_of(self, extent: Extent) -> str:
        """Of its object."""
        return RecordNames(self.meaning, self.secret).name_of(extent.keys[-1], extent.num_blocks)

    def put(self, *extents: Extent) -> None:
        """Puts contents that can be compressed."""
        payloads: list[list[Memory]] = []
        for extent in extents:
            own = buffers(len(extent.keys), self.payload_bytes)
            for key, memory in zip(extent.keys, own, strict=True):
                fill(memory, compressible(key, self.payload_bytes))
            payloads.append([*own])
        store = self.open()
        assert store.put_extents(extents, payloads, deadline_s=LONG_S) == [Outcome.OK] * len(extents)

    def damage(self, extent: Extent, change: Callable[[bytes], bytes]) -> None:
        """Its object has other content from now on."""
        with self.objects.lock:
            self.objects.damage(self.name_of(extent), change)

    def content(self, extent: Extent) -> bytes:
        """Of its object."""
        return self.objects.objects[self.name_of(extent)].content

    def is_there(self, extent: Extent) -> bool:
        """Whether there is one."""
        return self.name_of(extent) in self.objects.objects


KINDS: dict[str, Callable[[], Kind]] = {
    "plain": Kind,
    "secret": lambda: Kind(secret=SECRET),
    "encrypted": lambda: Kind(secret=SECRET, encrypts=True),
    "zstd": lambda: Kind(codec="zstd"),
    "fp8": lambda: Kind(codec="fp8"),
    "zstd and encrypted": lambda: Kind(codec="zstd", secret=SECRET, encrypts=True),
}


def get(
    store: RecordStore, extent: Extent, size: int = PAYLOAD_BYTES, deadline_s: float = LONG_S
) -> list[Outcome]:
    """What is got of it; wrong bytes fail."""
    targets = buffers(len(extent.keys), size)
    (outcomes,) = store.get_extents([extent], [[*targets]], deadline_s=deadline_s)
    for key, target, outcome in zip(extent.keys, targets, outcomes, strict=True):
        assert outcome is not Outcome.OK or content_in(target) == compressible(key, size), "wrong bytes"
    return outcomes


def flipped(content: bytes, bits: Sequence[int]) -> bytes:
    """With these bits changed."""
    changed = bytearray(content)
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
