"""Device memory on the CPU, and a model whose KV bytes depend on the whole prefix and are checked before
every use.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.trtllm.double.failure import DoubleFailure
from tests.trtllm.double.memory import Memory

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

_RADIX = np.uint64(0x9E3779B97F4A7C15)


def _mix(words: Words) -> Words:
    """A permutation of 64-bit words in which every bit depends on every bit (splitmix64's)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = words ^ (words >> np.uint64(31))
    return mixed


def _powers(count: int) -> Words:
    """1, r, r^2, ...; kept, as every sequence needs them."""
    if len(_table[0]) < count:
        factors = np.full(2 * count, _RADIX, dtype=np.uint64)
        factors[0] = 1
        _table[0] = np.cumprod(factors, dtype=np.uint64)
    return _table[0][:count]


_table: list[Words] = [np.ones(1, dtype=np.uint64)]


class Sequence:
    """What the device knows of a request: one seed per position, and the bytes that its blocks must hold.

    ``seeds[i]`` depends on the tokens up to i and on the identity (adapter, salt, images). ``expected`` is
    [num_layers, kv_factor, blocks, heads, tokens_per_block, head_bytes] of this rank.
    """

    def __init__(self, model: Model, identity: object, tokens: list[int], max_tokens: int) -> None:
        self._model = model
        digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
        self.sum = np.uint64(int.from_bytes(digest, "little"))
        self.length = 0
        self.seeds: Words = np.zeros(max_tokens, dtype=np.uint64)
        memory = model.memory
        blocks = -(-max_tokens // memory.tokens_per_block)
        self.expected: Bytes = np.zeros(
            (memory.num_layers, memory.kv_factor, blocks, *memory.block_shape), dtype=np.uint8
        )
        self.extend(tokens)

    def extend(self, tokens: list[int]) -> None:
        """Appends tokens that are known to the device."""
        start, end = self.length, self.length + len(tokens)
        powers = _powers(end)[start:]
        sums = (
            np.cumsum(_mix(np.array(tokens, dtype=np.uint64) + np.uint64(1)) * powers, dtype=np.uint64)
            + self.sum
        )
        self.sum = sums[-1]
        self.seeds[start:end] = _mix(sums)
        self.length = end
        values = self._model.bytes_of(self.seeds[start:end])
        size = self._model.memory.tokens_per_block
        for block in range(start // size, (end - 1) // size + 1):
            low, high = max(start, block * size), min(end, (block + 1) * size)
            part = values[low - start : high - start].transpose(1, 2, 3, 0, 4)
            self.expected[:, :, block, :, low - block * size : high - block * size] = part

    def next_token(self) -> int:
        """The model's answer to all tokens so far; the same on every rank."""
        return int(self.seeds[self.length - 1] % np.uint64(self._model.vocab_size))

    def block_key(self, block: int, tokens_per_block: int) -> int:
        """What tells the content of this full block from all others."""
        return int(self.seeds[(block + 1) * tokens_per_block - 1])


@dataclass(frozen=True)
class Work:
    """One request in one forward pass: it computes positions ``start`` to ``end``."""

    request_id: int
    sequence: Sequence
    slots: list[list[int]]
    start: int
    end: int


class Model:
    """Checks and writes one layer of a batch at a time."""

    def __init__(self, memory: Memory, rank: int, vocab_size: int) -> None:
        self.memory = memory
        self.weights = ""
        self.vocab_size = vocab_size
        self._size = memory.tokens_per_block
        heads, _, head_bytes = memory.block_shape
        count = memory.num_layers * memory.kv_factor * heads * head_bytes // 8
        # MLA's latent (kv_factor 1) is the same on every rank; heads are not.
        place = 0 if memory.kv_factor == 1 else rank
        self._salts = _mix(np.arange(count, dtype=np.uint64) + np.uint64(1 + 104729 * place))

    def bytes_of(self, seeds: Words) -> Bytes:
        """[positions, num_layers, kv_factor, heads, head_bytes]"""
        heads, _, head_bytes = self.memory.block_shape
        words = _mix(seeds[:, None] ^ self._salts[None, :])
        return words.view(np.uint8).reshape(
            len(seeds), self.memory.num_layers, self.memory.kv_factor, heads, head_bytes
        )

    def sample(self, sequences: list[Sequence]) -> list[int]:
        """The next token of each sequence, which is appended to it; what ``extend`` does, for all at once."""
        if not sequences:
            return []
        lengths = [sequence.length for sequence in sequences]
        tokens = [sequence.next_token() for sequence in sequences]
        factors = _powers(max(lengths) + 1)[lengths]
        sums = np.array([sequence.sum for sequence in sequences], dtype=np.uint64)
        sums += _mix(np.array(tokens, dtype=np.uint64) + np.uint64(1)) * factors
        seeds = _mix(sums)
        values = self.bytes_of(seeds)
        for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            sequence.sum = sums[i]
            sequence.seeds[length] = seeds[i]
            sequence.expected[:, :, length // self._size, :, length % self._size] = values[i]
            sequence.length += 1
        return tokens

    def check_layer(self, batch: list[Work], layer: int) -> None:
        """Raises DoubleFailure if a position that the batch will read is not as computing it would have left
        it.
        """
        group = self.memory.group_of_layer[layer]
        window = self.memory.windows[group]
        slots: list[int] = []
        places: list[
            tuple[Work, int, int]
        ] = []  # (request, its first block to look at, the first it computes into)
        parts: list[tuple[Work, int]] = []  # (request, tokens before those it computes in that block)
        for work in batch:
            low = 0 if window is None else max(0, work.start - window + 1) // self._size
            high, rest = divmod(work.start, self._size)
            if high > low:
                slots += work.slots[group][low:high]
                places.append((work, low, high))
            if rest:
                parts.append((work, rest))
        part_slots = [work.slots[group][work.start // self._size] for work, _ in parts]
        is_read = np.arange(self._size) < np.array([rest for _, rest in parts]).reshape(-1, 1)
        for kv in range(self.memory.kv_factor):
            view = self.memory.view(layer, kv)
            is_right = min([*slots, *part_slots], default=0) >= 0
            if slots and is_right:
                wanted = [work.sequence.expected[layer, kv, low:high] for work, low, high in places]
                is_right = np.array_equal(view[slots], np.concatenate(wanted))
            if parts and is_right:
                blocks = [work.sequence.expected[layer, kv, work.start // self._size] for work, _ in parts]
                differs = (view[part_slots] != np.stack(blocks)).any(axis=(1, 3))
                is_right = not (differs & is_read).any()
            if not is_right:
                for work in batch:
                    self._complain(work, layer, kv)

    def _complain(self, work: Work, layer: int, kv: int) -> None:
        """Raises for the first wrong position of this request, if it has one."""
        group = self.memory.group_of_layer[layer]
        window = self.memory.windows[group]
        view = self.memory.view(layer, kv)
        low = 0 if window is None else max(0, work.start - window + 1) // self._size * self._size
        for position in range(low, work.start):
            block, offset = divmod(position, self._size)
            slot = work.slots[group][block]
            expected = work.sequence.expected[layer, kv, block, :, offset]
            if slot < 0 or not np.array_equal(view[slot, :, offset], expected):
                state = (
                    "never written"
                    if slot >= 0 and (view[slot, :, offset] == Memory.POISON).all()
                    else "wrong"
                )
                raise DoubleFailure(
                    f"{state} KV: request {work.request_id}, block {block} (slot {slot} of group "
                    f"{group}), position "
                    f"{position}, layer {layer}, kv {kv}; the forward pass computes {work.start} to "
                    f"{work.end}"
                )

    def write_layer(self, batch: list[Work], layer: int) -> None:
        """Computes the batch's positions in one layer; blocks without a page are left out."""
        group = self.memory.group_of_layer[layer]
        for kv in range(self.memory.kv_factor):
            view = self.memory.view(layer, kv)
            slots, offsets, values = [], [], []
            for work in batch:
                expected = work.sequence.expected[layer, kv]
                if work.end - work.start > 1:
                    self._write_chunk(view, work, group, expected)
                    continue
                block, offset = divmod(work.start, self._size)
                if work.slots[group][block] >= 0:
                    slots.append(work.slots[group][block])
                    offsets.append(offset)
                    values.append(expected[block, :, offset])
            if slots:
                view[slots, :, offsets] = np.stack(values)

    def _write_chunk(self, view: Bytes, work: Work, group: int, expected: Bytes) -> None:
        first, last = work.start // self._size, (work.end - 1) // self._size
        for block in range(first, last + 1):
            low = max(work.start - block * self._size, 0)
            high = min(work.end - block * self._size, self._size)
            if work.slots[group][block] >= 0:
                view[work.slots[group][block], :, low:high] = expected[block, :, low:high]
