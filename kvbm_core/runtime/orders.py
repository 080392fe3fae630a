"""An operator's orders to a leader, carried out in its ``poll``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container
from functools import partial
from typing import NamedTuple

from kvbm_core.control.desk import PROMPT_VERBS, Desk, Report, Task
from kvbm_core.control.messages import FoundPrompt, Order, Result, Verb
from kvbm_core.control.tiers import refusal, tiers_of, told
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.pins import LeaderPins, prompt_of, told_groups, told_keys
from kvbm_core.runtime.tenants import Chosen, QuotaRule, Tenant, TenantTable
from kvbm_core.tiers.chain import TierChain
from kvbm_core.tiers.groups import GroupSpec, longest_prefix_tokens
from kvbm_core.types import Tier

log = logging.getLogger("kvbm")

UNKNOWN = "no request of this salt and adapter has come since the engine began"


class _Clearing(NamedTuple):
    """A reset of what is somebody's, which waits for their loads."""

    task: Task
    tenants: frozenset[int]


class LeaderActs(NamedTuple):
    """What orders ask of the leader itself."""

    reset: Callable[[Container[Tier]], None]
    has_loads: Callable[[], bool]
    has_loads_of: Callable[[Collection[int]], bool]
    block_bytes: Callable[[], int]
    """0 until a rank has said it."""


class LeaderOrders:
    """A reset waits until what is being loaded has ended, so that no load fails by it; nothing new is matched
    or stored meanwhile. One of a salt, an adapter or a prompt holds back and waits for theirs alone. A leader
    that takes the place of another one goes on with its desk.
    """

    def __init__(
        self,
        desk: Desk,
        groups: tuple[GroupSpec, ...],
        chain: TierChain,
        metrics: Metrics,
        *,
        tenants: TenantTable,
        pins: LeaderPins,
        acts: LeaderActs,
    ) -> None:
        self._desk = desk
        self._groups, self._chain, self._metrics = groups, chain, metrics
        self._tenants, self._pins, self._acts = tenants, pins, acts
        self._resets: list[Task] = []
        self._clearing: list[_Clearing] = []

    @property
    def is_draining(self) -> bool:
        """Any thread."""
        return self._desk.is_draining

    @property
    def hold_back(self) -> bool:
        """Whether nothing is to be matched or stored now."""
        return self._desk.is_draining or bool(self._resets)

    def holds_back(self, tenant: int) -> bool:
        """Whether nothing of this tenant is to be matched now."""
        return bool(self._clearing) and any(tenant in clearing.tenants for clearing in self._clearing)

    @property
    def has_any(self) -> bool:
        """Whether ``mind`` has something to do. Any thread."""
        return bool(self._resets) or bool(self._clearing) or self._desk.has_waiting

    def mind(self) -> None:
        """Carries out what can be now."""
        while (task := self._desk.take()) is not None:
            verb = task.order.verb
            if verb in PROMPT_VERBS:
                _end(task, partial(self._answer, task.order))
            elif verb is not Verb.RESET:
                self._desk.is_draining = verb is Verb.DRAIN
                log.warning("kvbm: an operator's order: %s", verb)
                task.ended(Result.DONE)
            elif _is_of_somebody(task.order):
                self._clearing.append(_Clearing(task, self._meant(task.order)))
            else:
                self._resets.append(task)
        if self._resets and not self._acts.has_loads():
            resets, self._resets = self._resets, []
            for task in resets:
                _end(task, partial(self._reset, task.order))
        if self._clearing:
            self._clear_what_is_free()

    def _tiers_here(self) -> set[Tier]:
        here = {tier.tier for tier in self._chain.lower}
        if self._metrics.has_host_tier:
            here.add(Tier.HOST)
        return here

    def _reset(self, order: Order) -> Report:
        here = self._tiers_here()
        tiers = tiers_of(order, here)
        if not tiers:
            return Report(Result.REFUSED, refusal(order))
        # Without a host tier its slots are what the disk is read and written through.
        self._acts.reset(tiers if Tier.HOST in here else {*tiers, Tier.HOST})
        log.warning("kvbm: an operator's order: reset; %s", told(tiers))
        return Report(Result.DONE, told(tiers))

    # ---------------------------------------------------------------- of a salt, an adapter, a prompt

    def _meant(self, order: Order) -> frozenset[int]:
        tenants = self._tenants
        if not order.tokens:
            return tenants.numbers_of(Chosen.of(order.adapter, order.salt))
        number = tenants.number_of(_tenant(order))
        return frozenset() if number is None else frozenset({number})

    def _clear_what_is_free(self) -> None:
        waiting, self._clearing = self._clearing, []
        for clearing in waiting:
            if self._acts.has_loads_of(clearing.tenants):
                self._clearing.append(clearing)
            else:
                _end(clearing.task, partial(self._clear, clearing.task.order, clearing.tenants))

    def _clear(self, order: Order, tenants: Collection[int]) -> Report:
        here = self._tiers_here()
        tiers = tiers_of(order, here)
        if not tiers:
            return Report(Result.REFUSED, refusal(order))
        meant = tiers if Tier.HOST in here else frozenset({*tiers, Tier.HOST})
        if order.tokens:
            root = self._tenants.root_of(_tenant(order))
            keys = [] if root is None else prompt_of(self._groups, root, order.tokens).chain_keys()
            num_gone = self._chain.forget_prompt(keys, meant)
        else:
            num_gone = self._chain.forget_of(tenants, meant)
        names = ", ".join(tier.name.lower() for tier in sorted(tiers) if tier is not Tier.REMOTE)
        line = f"forgotten: {num_gone:,} blocks ({names}); what machines share stays"
        if not tenants:
            line = f"{UNKNOWN}; what it has left on disk before is not known (docs/fleet.md)"
        log.warning("kvbm: an operator's order: reset of a salt, an adapter or a prompt; %s", line)
        return Report(Result.DONE, line)

    # ---------------------------------------------------------------- what no load has to end for

    def _answer(self, order: Order) -> Report:
        act: dict[Verb, Callable[[Order], Report]] = {
            Verb.LOOKUP: self._look_up,
            Verb.PIN: self._pin,
            Verb.UNPIN: self._unpin,
            Verb.QUOTA: self._quota,
        }
        report = act[order.verb](order)
        if order.verb is not Verb.LOOKUP:
            log.warning("kvbm: an operator's order: %s; %s; %s", order.verb, report.result, report.text)
        return report

    def _look_up(self, order: Order) -> Report:
        root = self._tenants.root_of(_tenant(order))
        if root is None:
            return Report(Result.DONE, UNKNOWN)
        prompt, chain = prompt_of(self._groups, root, order.tokens), self._chain
        keys, limit = told_keys(prompt), len(order.tokens)
        matched_tokens = longest_prefix_tokens(self._groups, prompt.keys, 0, limit, chain.residents)
        found = FoundPrompt(
            num_blocks=len(keys),
            matched_blocks=sum(
                matched_tokens // self._groups[position].block_size_tokens
                for position in told_groups(self._groups)
            ),
            host_blocks=len(chain.host.resident_of(keys)),
            disk_blocks=max(
                (len(t.resident_of(keys)) for t in chain.lower if t.tier is Tier.DISK), default=0
            ),
        )
        line = (
            f"{found.matched_blocks:,} of {found.num_blocks:,} blocks would be found: "
            f"{found.host_blocks:,} in the host, {found.disk_blocks:,} on disk"
        )
        return Report(Result.DONE, line, found)

    def _pin(self, order: Order) -> Report:
        tenant = _tenant(order)
        if not order.pin:
            return Report(Result.REFUSED, "a pin needs a name")
        why = self._pins.refusal(order.pin, order.tokens)
        if why:
            return Report(Result.REFUSED, why)
        root = self._tenants.root_of(tenant)
        self._pins.pin(order.pin, tenant, order.tokens, order.ttl_s, root)
        if root is None:
            return Report(Result.DONE, "it holds from the first request of this salt and adapter on")
        keys = told_keys(prompt_of(self._groups, root, order.tokens))
        if not self._metrics.has_host_tier:
            return Report(Result.DONE, f"{len(keys):,} blocks stay on disk when they are there")
        num_here = len(self._chain.host.resident_of(keys))
        rest = "" if num_here == len(keys) else "; the rest when it is computed"
        return Report(Result.DONE, f"{num_here:,} of {len(keys):,} blocks are in the host and stay{rest}")

    def _unpin(self, order: Order) -> Report:
        if self._pins.unpin(order.pin):
            return Report(Result.DONE, "its blocks may be evicted")
        return Report(Result.DONE, "nothing to do: there is no such pin")

    def _quota(self, order: Order) -> Report:
        chosen = Chosen.of(order.adapter, order.salt)
        if chosen == (None, None):
            return Report(Result.REFUSED, "a quota needs a salt or an adapter")
        if not self._chain.host.capacity_blocks:
            return Report(Result.REFUSED, "the host tier is not ready; ask again later")
        block_bytes = max(1, self._acts.block_bytes())
        for size_gb in (order.host_gb, order.disk_gb):
            if size_gb and size_gb * 1e9 < block_bytes:
                why = f"{size_gb:g} GB are less than one block ({block_bytes:,} bytes); 0 is for none at all"
                return Report(Result.REFUSED, why)
        host, disk = (
            blocks if size_gb is None else int(size_gb * 1e9) // block_bytes
            for blocks, size_gb in ((order.host_blocks, order.host_gb), (order.disk_blocks, order.disk_gb))
        )
        rule = None if host is None and disk is None else QuotaRule(host, disk)
        if not self._tenants.set_rule(chosen, rule):
            return Report(Result.REFUSED, "there are too many quotas; take one away")
        if rule is None:
            return Report(Result.DONE, "no quota any more")
        limits = ((host, "in the host"), (disk, "on disk"))
        line = ", ".join(f"{limit:,} blocks {where}" for limit, where in limits if limit is not None)
        used = self._tenants.used_blocks(chosen)
        return Report(Result.DONE, f"at most {line}; {used:,} are in the host now")


def _end(task: Task, act: Callable[[], Report]) -> None:
    try:
        report = act()
    except Exception as error:  # the operator is to hear of it; the engine serves on, and so do other orders
        log.exception("kvbm: an operator's order could not be carried out")
        report = Report(Result.REFUSED, f"it failed: {type(error).__name__}: {error}")
    task.ended(*report)


def _is_of_somebody(order: Order) -> bool:
    return order.salt is not None or order.adapter is not None or bool(order.tokens)


def _tenant(order: Order) -> Tenant:
    return Tenant.of(order.adapter or "", order.salt)
