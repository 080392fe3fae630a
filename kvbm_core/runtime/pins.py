"""Prompts that operators pin: their blocks are not evicted, for a while."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbm_core.clock import Clock
from kvbm_core.runtime.request import RequestState
from kvbm_core.runtime.tenants import Tenant
from kvbm_core.tiers.chain import TierChain
from kvbm_core.tiers.groups import GroupSpec, base_block_tokens
from kvbm_core.tokens.chain import TokenChain
from kvbm_core.types import BlockKey, SequenceHash

MAX_PINS = 64
MAX_PINNED_SHARE = 0.5
"""Of each tier's blocks; else nothing could be evicted for what is new."""


def prompt_of(groups: tuple[GroupSpec, ...], root: SequenceHash, tokens: Sequence[int]) -> RequestState:
    """A request with this prompt, of nobody: the names of its full blocks."""
    chain = TokenChain(root, base_block_tokens(groups))
    chain.extend(tokens)
    return RequestState("", chain, groups)


def told_groups(groups: tuple[GroupSpec, ...]) -> list[int]:
    """The positions of those whose blocks operators are told of: not of states, of which there are few,
    unless there is nothing else.
    """
    return [position for position, group in enumerate(groups) if not group.is_state] or [*range(len(groups))]


def told_keys(prompt: RequestState) -> list[BlockKey]:
    """The names of its blocks in these groups."""
    return [key for position in told_groups(prompt.groups) for key in prompt.keys(position)]


def num_blocks(groups: tuple[GroupSpec, ...], tokens: Sequence[int]) -> int:
    """How many full blocks a prompt has."""
    return sum(len(tokens) // group.block_size_tokens for group in groups)


@dataclass(eq=False)
class _Pin:
    tenant: Tenant
    tokens: tuple[int, ...]
    ends_at_s: float
    num_blocks: int
    keys: list[BlockKey] = field(default_factory=list)


class LeaderPins:
    """Of one leader, on its thread. A pin has effect from when its tenant's root is known: before that
    nothing of it is stored. ``has_host_tier``: False if blocks only pass through the host.
    """

    def __init__(
        self, groups: tuple[GroupSpec, ...], chain: TierChain, clock: Clock, *, has_host_tier: bool
    ) -> None:
        self._groups = groups
        self._tiers = chain.books if has_host_tier else chain.books[1:]
        self._clock = clock
        self._pins: dict[str, _Pin] = {}
        self._next_end_s = float("inf")

    def __len__(self) -> int:
        return len(self._pins)

    def refusal(self, name: str, tokens: Sequence[int]) -> str:
        """Why such a pin cannot be; "" if it can."""
        size, wanted = base_block_tokens(self._groups), num_blocks(self._groups, tokens)
        if not wanted:
            return f"the prompt has {len(tokens)} tokens, less than a block ({size}): nothing to pin"
        if name not in self._pins and len(self._pins) >= MAX_PINS:
            return f"there are {MAX_PINS} pins already; unpin one"
        others = sum(pin.num_blocks for key, pin in self._pins.items() if key != name)
        ready = [tier for tier in self._tiers if tier.capacity_blocks]  # a disk may never be
        if not ready:
            return "no tier is ready that keeps blocks; ask again later"
        least = min(ready, key=lambda tier: tier.capacity_blocks)
        most = int(MAX_PINNED_SHARE * least.capacity_blocks)
        if others + wanted > most:
            share = f"{MAX_PINNED_SHARE:.0%} of {least.capacity_blocks:,} {least.tier.name.lower()} blocks"
            return f"{wanted:,} blocks and {others:,} pinned already are more than {most:,} ({share})"
        return ""

    def pin(
        self, name: str, tenant: Tenant, tokens: Sequence[int], ttl_s: float, root: SequenceHash | None
    ) -> None:
        """In place of the pin of this name, if there is one. It must not be refused."""
        self.unpin(name)
        wanted = num_blocks(self._groups, tokens)
        pin = _Pin(tenant, tuple(tokens), self._clock.now_s() + ttl_s, wanted)
        self._pins[name] = pin
        self._next_end_s = min(self._next_end_s, pin.ends_at_s)
        if root is not None:
            self._name(pin, root)

    def unpin(self, name: str) -> bool:
        """False if there is no such pin."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._let_go(pin)
        return pin is not None

    def on_root(self, tenant: Tenant, root: SequenceHash) -> None:
        """The names of this tenant's blocks begin there from now on."""
        for pin in self._pins.values():
            if pin.tenant == tenant:
                self._let_go(pin)
                self._name(pin, root)

    def mind(self) -> None:
        """Ends the pins whose time is over. Costs nothing if there is none."""
        now_s = self._clock.now_s()
        for name in [name for name, pin in self._pins.items() if pin.ends_at_s <= now_s]:
            self.unpin(name)
        self._next_end_s = min((pin.ends_at_s for pin in self._pins.values()), default=float("inf"))

    @property
    def is_due(self) -> bool:
        """Whether ``mind`` has something to do."""
        return bool(self._pins) and self._next_end_s <= self._clock.now_s()

    def _name(self, pin: _Pin, root: SequenceHash) -> None:
        pin.keys = prompt_of(self._groups, root, pin.tokens).chain_keys()
        for tier in self._tiers:
            tier.keep(pin.keys)

    def _let_go(self, pin: _Pin) -> None:
        for tier in self._tiers:
            tier.unkeep(pin.keys)
        pin.keys = []
