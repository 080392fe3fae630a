# The types of _kvbm.c, _copy.c, _index.c, _aio.c and _names.c;
# Native in kvbm_core/native/__init__.py says what the functions promise.
from collections.abc import Sequence

from kvbm_core.native import Bytes, Ids, Numbers, Seconds, Slots
from kvbm_core.types import BlockKey, SequenceHash

def chain(
    parent: bytes, header: bytes, tokens: bytes | bytearray | memoryview, step: int, /
) -> list[SequenceHash]: ...
def chain_portable(
    parent: bytes, header: bytes, tokens: bytes | bytearray | memoryview, step: int, /
) -> list[SequenceHash]: ...
def copy_blocks(dst: Bytes, dst_ids: Ids, src: Bytes, src_ids: Ids, /) -> None: ...
def copy_blocks_plain(dst: Bytes, dst_ids: Ids, src: Bytes, src_ids: Ids, /) -> None: ...
def copy_blocks_streaming(dst: Bytes, dst_ids: Ids, src: Bytes, src_ids: Ids, /) -> None: ...
def note_departures(
    rows: Numbers, keys: Sequence[BlockKey], why: int, at_s: float, idle_s: Seconds, /
) -> None: ...
def pack_u32(tokens: Sequence[int], /) -> bytes: ...
def record_names(keys: Sequence[BlockKey], folder: str, num_blocks: int, /) -> list[str]: ...

class Index:
    """Which block is in which slot: what a BlockRegistry asks, with arrays in place of results.

    The methods that have a namesake there do the same; ``slots`` that are filled are at least as long as
    ``keys``. ``in`` and ``len`` are about resident blocks. TypeError for a key that is not bytes, ValueError
    for one of another length than a BlockKey's. A call that raises has changed nothing, and leaves what it
    was to fill undefined. One thread only.
    """

    def __init__(self, seed: int, /) -> None: ...
    def grow(self, capacity_slots: int, /) -> None:
        """As the registry's. MemoryError, or ValueError for more than 2 ** 30 slots."""

    def new_of(self, keys: Sequence[BlockKey], /) -> tuple[BlockKey, ...]:
        """As the registry's."""

    def reserve(self, keys: Sequence[BlockKey], slots: Slots, /) -> None:
        """As the registry's."""

    def commit(self, keys: Sequence[BlockKey], slots: Slots, /) -> None:
        """As the registry's; fills ``slots``."""

    def cancel(self, keys: Sequence[BlockKey], slots: Slots, /) -> None:
        """As the registry's; fills ``slots``."""

    def drop(self, slots: Slots, /) -> list[BlockKey]:
        """As the registry's."""

    def find(self, keys: Sequence[BlockKey], slots: Slots, /) -> int:
        """Fills in the slots of the leading resident ``keys``; returns how many."""

    def slots_of(self, keys: Sequence[BlockKey], slots: Slots, /) -> int:
        """Fills in the slots of those of ``keys`` that are resident; returns how many."""

    def keys_in(self, slots: Slots, /) -> list[BlockKey | None]:
        """As the registry's."""

    def is_pending(self, key: BlockKey, /) -> bool:
        """As the registry's."""

    def pending_blocks(self) -> int:
        """As the registry's."""

    def check(self) -> str | None:
        """What is wrong with the index; None if nothing is."""

    def __contains__(self, key: BlockKey, /) -> bool: ...
    def __len__(self) -> int: ...

class Aio:
    """Requests to one open file by Linux AIO, which takes and ends them asynchronously with O_DIRECT only.

    Without O_DIRECT ``submit`` waits for the data. ``fd`` stays open until ``close`` has answered True, and
    memory that is in flight stays where it is. One thread only: RuntimeError for a call while another one is
    under way.
    """

    def __init__(self, fd: int, depth: int, /) -> None: ...
    def submit(self, is_write: bool, tags: Ids, offsets: Ids, counts: Slots, pieces: Numbers, /) -> None:
        """Starts requests, as many as ``depth`` allows; the others as those end that are collected.

        Request ``i`` has ``counts[i]`` of ``pieces``, which are pairs of address and bytes, and follow each
        other as the requests do. What the kernel refuses ends as any other. ValueError for arrays that do not
        fit each other, or after ``close``, and nothing has been started. The GIL is not held while the kernel
        works.
        """

    def collect(self, timeout_s: float, /) -> list[tuple[int, int]]:
        """(tag, bytes moved or -errno) of those that have ended, at least one unless ``timeout_s`` goes by.

        Waits only if something is in flight, and without the GIL. What a signal's handler raises comes out of
        here, and nothing is lost.
        """

    @property
    def in_flight(self) -> int:
        """How many were submitted and not collected."""

    def close(self, timeout_s: float, /) -> bool:
        """Collects until nothing is in flight, and gives everything back; False if time was over before that.

        Then, what the kernel still works on stays in memory for good, unless a later call finds it ended.
        """
