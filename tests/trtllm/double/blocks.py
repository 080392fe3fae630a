"""Blocks on the device: prefix reuse, a free list that hands out the block freed last, and pins.

One manager serves both of TensorRT-LLM's: V1 is one layer group whose tables are grown to the whole prompt at
once; V2 grows them per chunk, and blocks that an attention window has passed are given back, -1 in their
place.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tests.trtllm.double.failure import DoubleFailure
from tests.trtllm.double.memory import Memory
from tests.trtllm.double.requests import Core

NO_PAGE = -1


class Pool:
    """The slots of one layer group."""

    def __init__(self, num_slots: int) -> None:
        self.refs = [0] * num_slots
        self._unused = list(range(num_slots - 1, -1, -1))  # the last one goes first
        self._cached: OrderedDict[int, None] = OrderedDict()  # free but reusable, oldest first
        self._key_of: dict[int, int] = {}
        self._slot_of: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Slots that can be handed out."""
        return len(self._unused) + len(self._cached)

    def take(self) -> int:
        """A slot of nobody's; the reusable one that was not used for longest if there is no other."""
        if self._unused:
            slot = self._unused.pop()
        else:
            slot, _ = self._cached.popitem(last=False)
            self._forget(slot)
        self.refs[slot] = 1
        return slot

    def find(self, key: int) -> int | None:
        """The slot with this content."""
        return self._slot_of.get(key)

    def share(self, slot: int) -> int:
        """One more user of a slot."""
        if self.refs[slot] == 0:
            del self._cached[slot]
        self.refs[slot] += 1
        return slot

    def release(self, slot: int) -> None:
        """One user less."""
        if self.refs[slot] <= 0:
            raise DoubleFailure(f"slot {slot} was freed twice; this is the double's own mistake")
        self.refs[slot] -= 1
        if self.refs[slot] == 0:
            if slot in self._key_of:
                self._cached[slot] = None
            else:
                self._unused.append(slot)

    def commit(self, slot: int, key: int) -> None:
        """From now on the content can be found; the first slot with it stays the one."""
        if slot not in self._key_of and key not in self._slot_of:
            self._key_of[slot] = key
            self._slot_of[key] = slot

    def drop_cache(self) -> None:
        """Nothing is found any more."""
        self._unused.extend(self._cached)
        self._cached.clear()
        self._key_of.clear()
        self._slot_of.clear()

    def _forget(self, slot: int) -> None:
        del self._slot_of[self._key_of.pop(slot)]


@dataclass(frozen=True)
class Pin:
    """Slots held for a transfer, per layer group."""

    slots: list[list[int]]


class BlockManager:
    """The tables of all requests."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._size = memory.tokens_per_block
        self._windows = memory.windows
        self._reuses = memory.config.enable_block_reuse
        self._reuses_parts = self._reuses and memory.config.enable_partial_reuse
        self._children: dict[int, dict[int, list[int]]] = {}
        self.pools = [Pool(memory.config.num_blocks) for _ in self._windows]

    @property
    def num_free(self) -> int:
        """Blocks that can still be had in every group."""
        return min(pool.num_free for pool in self.pools)

    def begin(self, core: Core) -> int:
        """Takes over what the device has of the prompt; returns the tokens (at most all but the last)."""
        keys = [core.sequence.block_key(b, self._size) for b in range((core.prompt_len - 1) // self._size)]
        count = self._match(keys) if self._reuses else 0
        core.slots = []
        for pool, window in zip(self.pools, self._windows, strict=True):
            live = self._first_live(window, count * self._size)
            core.slots.append(
                [NO_PAGE] * live + [pool.share(self._slot(pool, key)) for key in keys[live:count]]
            )
        core.num_committed = count
        return count * self._size + (self._copy_part(core, count) if self._reuses_parts else 0)

    def grow(self, core: Core, num_tokens: int, history: int) -> bool:
        """Makes room for ``num_tokens`` positions, of which ``history`` are computed; False, and nothing, if
        full.
        """
        target = -(-num_tokens // self._size)
        new: list[list[int]] = []
        for group, pool in enumerate(self.pools):
            live = self._first_live(self._windows[group], history)
            new.append([b for b in range(len(core.slots[group]), target) if b >= live])
            if len(new[group]) > pool.num_free:
                return False
        for group, pool in enumerate(self.pools):
            table, wanted = core.slots[group], set(new[group])
            table += [pool.take() if b in wanted else NO_PAGE for b in range(len(table), target)]
            if new[group]:
                self._memory.poison(group, [table[b] for b in new[group]])
        return True

    def retire(self, core: Core, history: int) -> None:
        """Gives back what the windows have passed once ``history`` positions are computed."""
        for group, window in enumerate(self._windows):
            if window is not None:
                table = core.slots[group]
                for block in range(min(self._first_live(window, history), len(table))):
                    if table[block] != NO_PAGE:
                        self.pools[group].release(table[block])
                        table[block] = NO_PAGE

    def commit(self, core: Core, num_tokens: int) -> None:
        """Lets others find the full blocks of the first ``num_tokens`` positions, which hold their KV."""
        if not self._reuses:
            return
        for block in range(core.num_committed, num_tokens // self._size):
            key = core.sequence.block_key(block, self._size)
            for pool, table in zip(self.pools, core.slots, strict=True):
                if table[block] != NO_PAGE:
                    pool.commit(table[block], key)
            if self._reuses_parts:
                self._remember_part(core, block, key)
            core.num_committed = block + 1

    def free(self, core: Core) -> None:
        """The request has no blocks any more; one that was preempted has none already."""
        if not core.slots:
            return
        for pool, table in zip(self.pools, core.slots, strict=True):
            # Last block first, so that a prefix is evicted from its end.
            for slot in reversed(table):
                if slot != NO_PAGE:
                    pool.release(slot)
        core.slots = []
        core.num_committed = 0

    def pin(self, core: Core) -> Pin:
        """Holds the request's blocks beyond its end."""
        pin = Pin([[slot for slot in table if slot != NO_PAGE] for table in core.slots])
        for pool, slots in zip(self.pools, pin.slots, strict=True):
            for slot in slots:
                pool.share(slot)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Ends a pin."""
        for pool, slots in zip(self.pools, pin.slots, strict=True):
            for slot in reversed(slots):
                pool.release(slot)

    def drop_cache(self) -> None:
        """Forgets all reuse; blocks in use stay with their requests."""
        self._children.clear()
        for pool in self.pools:
            pool.drop_cache()

    def _match(self, keys: list[int]) -> int:
        """The longest prefix, in blocks, of which every group has what its window needs."""
        count = len(keys)
        for pool, window in zip(self.pools, self._windows, strict=True):
            if window is None:
                have = next((i for i, key in enumerate(keys) if pool.find(key) is None), len(keys))
                count = min(count, have)
        while count and not self._has_windows(keys, count):
            count -= 1
        return count

    def _has_windows(self, keys: list[int], count: int) -> bool:
        return all(
            pool.find(key) is not None
            for pool, window in zip(self.pools, self._windows, strict=True)
            if window is not None
            for key in keys[self._first_live(window, count * self._size) : count]
        )

    def _first_live(self, window: int | None, history: int) -> int:
        """The first block that the position after ``history`` can see."""
        return 0 if window is None else max(0, history - window + 1) // self._size

    def _slot(self, pool: Pool, key: int) -> int:
        slot = pool.find(key)
        if slot is None:
            raise DoubleFailure("a matched block has no slot; this is the double's own mistake")
        return slot

    def _remember_part(self, core: Core, block: int, key: int) -> None:
        parent = core.sequence.block_key(block - 1, self._size) if block else 0
        tokens = core.tokens[block * self._size : (block + 1) * self._size]
        self._children.setdefault(parent, {})[key] = tokens

    def _copy_part(self, core: Core, count: int) -> int:
        """V1's partial reuse: the first tokens of another request's block are copied into a new one."""
        parent = core.sequence.block_key(count - 1, self._size) if count else 0
        wanted = core.tokens[count * self._size : core.prompt_len - 1]
        best, best_slot = 0, NO_PAGE
        for key, tokens in self._children.get(parent, {}).items():
            slot = self.pools[0].find(key)
            same = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b), None)
            same = min(len(tokens), len(wanted)) if same is None else same
            if slot is not None and same > best and self._is_same_prefix(core, count, same, slot):
                best, best_slot = same, slot
        if not best or not self.num_free:
            return 0
        self.pools[0].share(best_slot)  # not to be evicted by the very block that gets its copy
        grown = self.grow(core, (count + 1) * self._size, count * self._size)
        if grown:
            for layer in range(self._memory.num_layers):
                for kv in range(self._memory.kv_factor):
                    view = self._memory.view(layer, kv)
                    view[core.slots[0][count], :, :best] = view[best_slot, :, :best]
        self.pools[0].release(best_slot)
        return best if grown else 0

    def _is_same_prefix(self, core: Core, block: int, tokens: int, slot: int) -> bool:
        """Whether the block holds this request's KV; another adapter or salt has the same first tokens."""
        found = self._memory.view(0, 0)[slot, :, :tokens]
        return bool((found == core.sequence.expected[0, 0, block, :, :tokens]).all())
