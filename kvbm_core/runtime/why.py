"""Why a request missed what it missed: found when it is answered, from what the leader knows then."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvbm_core.blocks.departures import Leave
from kvbm_core.blocks.slot_tier import BlockTier
from kvbm_core.clock import Clock
from kvbm_core.identity.roots import RootFacts
from kvbm_core.observe.labels import MissReason
from kvbm_core.observe.metrics import Metrics
from kvbm_core.observe.why import MAX_ID_CHARS, Account, told_s
from kvbm_core.runtime.namesakes import MAX_BEGINNINGS, Namesakes, beginning_of
from kvbm_core.runtime.request import RequestState, Seen
from kvbm_core.tiers.chain import TierChain
from kvbm_core.tiers.groups import (
    GroupSpec,
    alignment_tokens,
    attention_reach_tokens,
    base_block_tokens,
    longest_prefix_tokens,
    needed_blocks,
)
from kvbm_core.tiers.lower import LowerTier
from kvbm_core.types import BlockKey, Tier

MAX_ROOTS = 4
"""Of one beginning, the last ones."""
_FIELDS = (
    (
        "weights",
        MissReason.OTHER_WEIGHTS,
        "other weights (they have changed, or their name was not known yet)",
    ),
    ("adapter", MissReason.OTHER_ADAPTER, "another adapter"),
    ("salt", MissReason.SALTED, "another cache_salt, or none"),
    ("layout", MissReason.OTHER_NAMESPACE, "another layout of the KV cache"),
)
_LEFT = {
    Leave.EVICTED: (MissReason.EVICTED, "evicted from the {tier} tier"),
    Leave.QUOTA: (MissReason.QUOTA, "evicted from the {tier} tier, as its salt or adapter has a quota,"),
    Leave.RESET: (MissReason.FORGOTTEN, "forgotten with all of the {tier} tier (a reset, or a lost rank),"),
    Leave.FAILED: (MissReason.FAILED, "lost to the {tier} tier, as a copy of it failed,"),
    Leave.NO_SPACE: (MissReason.NOT_KEPT, "computed when the {tier} tier had no free slot,"),
    Leave.OVER_QUOTA: (
        MissReason.QUOTA,
        "computed when its salt or adapter had all that its quota of the {tier} tier allows,",
    ),
    Leave.PREEMPTED: (MissReason.NOT_KEPT, "needed again by the engine before it was copied,"),
}

NEVER_SEEN = "never seen by this cache, as far as it remembers"
Why = tuple[MissReason, str]


def _off(tier: LowerTier) -> str:
    return tier.off_reason or "it fails, and is left alone for a while"


class Asked(NamedTuple):
    """What an engine has asked for: the tokens from ``computed_tokens`` to ``limit_tokens``. The request
    itself allows those up to ``allowed_tokens``.
    """

    tokens: Sequence[int]
    computed_tokens: int
    limit_tokens: int
    allowed_tokens: int


class Absences:
    """What the tiers know of blocks that they do not have. Wherever the chain may be looked at."""

    def __init__(self, chain: TierChain, *, has_host_tier: bool) -> None:
        self._chain = chain
        self._books: list[tuple[str, BlockTier]] = [("host", chain.host)] if has_host_tier else []
        self._books += [(tier.name, tier.slots) for tier in chain.lower if tier.slots is not None]

    def hidden(self, missing: Sequence[BlockKey]) -> Why | None:
        """A tier that is not asked now, and has one of them, or may have."""
        off = [tier for tier in self._chain.lower if not tier.is_usable]
        hiding = [tier for tier in off if tier.slots is None or any(map(tier.slots.contains, missing))]
        if not hiding:
            return None
        return MissReason.FAILED, f"the {hiding[0].name} tier is not asked: {_off(hiding[0])}"

    def left(self, missing: Sequence[BlockKey]) -> Why | None:
        """From which tier one of them went, when and why; None if nothing is known of them."""
        found = [
            (book, gone) for book in self._books for key in missing if (gone := book[1].departures.find(key))
        ]
        if not found:
            return None
        # The newest counts: what left before may have come again since. Of one moment the lower tier's does.
        (name, _), gone = min(found, key=lambda one: (one[1].ago_s, one[0][1].tier is Tier.HOST))
        reason, words = _LEFT[gone.why]
        text = f"{words.format(tier=name)} {told_s(gone.ago_s)} ago"
        if gone.why is Leave.EVICTED:
            text += f", to make room, {told_s(gone.idle_s)} after its last use"
        elif gone.why is Leave.QUOTA:
            text += f", {told_s(gone.idle_s)} after its last use"
        if gone.why is Leave.EVICTED and name == "host":
            off = [tier for tier in self._chain.lower if tier.slots is not None and not tier.is_usable]
            if off:
                return reason, f"{text}; the {off[0].name} tier takes nothing: {_off(off[0])}"
            filtering = [tier.name for tier in self._chain.lower if tier.is_filtered]
            if filtering:
                return (
                    MissReason.FILTERED,
                    f"{text}; not used often enough for the {filtering[0]} tier's filter",
                )
        return reason, text

    def first(self, key: BlockKey) -> Why:
        """Why this block cannot be loaded now, as far as the tiers know."""
        if self._chain.residents.contains(key):
            return MissReason.NO_ROOM, "it is there, and could not be held: too many blocks are in use"
        if not self._chain.host.new_of([key]):
            return MissReason.IN_FLIGHT, "being copied to the host tier at that moment"
        return self.hidden([key]) or self.left([key]) or (MissReason.NEVER_SEEN, NEVER_SEEN)


class MissFinder:
    """Part of the Leader, on its thread. Looks at one block of a request that missed, and at its beginning.
    ``open_state``: of the request with this id, until it ends.
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        chain: TierChain,
        open_state: Callable[[str], RequestState | None],
        *,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._groups = groups
        self._chain = chain
        self._open_state = open_state
        self._metrics = metrics
        self._clock = clock
        self._align = alignment_tokens(groups)
        self._state_positions = [position for position, group in enumerate(groups) if group.is_state]
        self._first_tokens = base_block_tokens(groups)
        self._absences = Absences(chain, has_host_tier=metrics.has_host_tier)
        self._beginnings: OrderedDict[int, tuple[Seen, ...]] = OrderedDict()
        self.namesakes: Namesakes | None = None
        """What is known of other configurations of this model."""

    def passed_by(
        self, request_id: str, num_tokens: int, device_tokens: int, reason: MissReason, text: str
    ) -> Account:
        """A request that the tiers are not asked for."""
        missed = max(0, num_tokens - 1 - device_tokens)
        if reason is not MissReason.TOO_SHORT:
            missed -= missed % self._align
        account = Account(request_id, num_tokens, device_tokens, missed, reason, text)
        self._metrics.why.add(account)
        return account

    def answered(self, state: RequestState, asked: Asked, matched_tokens: int, why: Why | None) -> None:
        """The first answer to a request; ``why``: it was not looked up, for this reason."""
        limit, computed = asked.limit_tokens, asked.computed_tokens
        wanted = max(0, limit - computed) // self._align * self._align
        missed = max(0, wanted - matched_tokens)
        if not missed and not matched_tokens and not computed:
            reason, text = (
                MissReason.TOO_SHORT,
                f"shorter than a block and a token ({self._align + 1} tokens)",
            )
            state.account = self.passed_by(state.request_id, len(asked.tokens), computed, reason, text)
            return
        if missed and why is None:
            have = computed + matched_tokens
            why = self._limited(state, asked, have) or self._why(state, asked, have)
        found, text = why if missed and why is not None else (None, "")
        state.account = Account(state.request_id, len(asked.tokens), computed, missed, found, text)
        self._metrics.why.add(state.account)

    # ---------------------------------------------------------------- beginnings

    def began(self, state: RequestState, tokens: Sequence[int]) -> None:
        """Remembers how the request begins, once."""
        if state.beginning is not None or len(tokens) < self._first_tokens:
            return
        state.beginning = name = beginning_of(tokens, self._first_tokens)
        root = state.chain.root
        request_id = state.request_id if len(state.request_id) <= MAX_ID_CHARS else ""
        seen = Seen(root, state.facts, self._clock.now_s(), request_id)
        known = self._beginnings.pop(name, ())  # the newest is at the end, of all and of one beginning's
        if known:
            state.before = next((one for one in known if one.root == root), None)
            known = tuple(one for one in known[1 - MAX_ROOTS :] if one.root != root)
        self._beginnings[name] = (*known, seen)
        if self.namesakes is not None:
            self.namesakes.began(name)
        if len(self._beginnings) > MAX_BEGINNINGS:
            self._beginnings.popitem(last=False)

    def _under_another_root(self, state: RequestState, tokens: Sequence[int]) -> Why | None:
        known = self._beginnings.get(state.beginning, ()) if state.beginning is not None else ()
        others = [seen for seen in known if seen.root != state.chain.root]
        if not others:
            return self._elsewhere(tokens) if state.before is None else None
        differing = [(self._differing(state.facts, seen.facts), seen) for seen in others]
        fields, seen = min(differing, key=lambda one: (len(one[0]), -one[1].at_s))
        ago = told_s(self._clock.now_s() - seen.at_s)
        if not fields:
            text = f"the same beginning came {ago} ago under another salt, adapter or weights"
            return MissReason.OTHER_NAMESPACE, text
        words = " and ".join(words for _, words in fields)
        return fields[0][0], f"the same beginning came {ago} ago with {words}"

    def _elsewhere(self, tokens: Sequence[int]) -> Why | None:
        told = "" if self.namesakes is None else self.namesakes.elsewhere(tokens)
        if not told:
            return None
        return MissReason.OTHER_NAMESPACE, f"the same beginning came under another configuration: {told}"

    @staticmethod
    def _differing(mine: RootFacts | None, other: RootFacts | None) -> list[tuple[MissReason, str]]:
        if mine is None or other is None:
            return []
        return [
            (reason, words) for name, reason, words in _FIELDS if getattr(mine, name) != getattr(other, name)
        ]

    # ---------------------------------------------------------------- one block

    def _limited(self, state: RequestState, asked: Asked, have_tokens: int) -> Why | None:
        """If there is more than the request allows to be loaded, or nobody has asked whether there is."""
        allowed, computed = asked.allowed_tokens, asked.computed_tokens
        if allowed >= asked.limit_tokens or computed % self._align:
            return None
        state.chain.extend(asked.tokens)
        within, without = (
            longest_prefix_tokens(self._groups, state.keys, computed, end, self._chain.residents)
            for end in (max(allowed, computed), asked.limit_tokens)
        )
        is_unasked = self._chain.is_asked and have_tokens + self._align > allowed
        if within > have_tokens or (without <= have_tokens and not is_unasked):
            return None
        text = f"it lets {allowed - computed:,} tokens be loaded (max_load_tokens)"
        return MissReason.LIMITED, f"from token {have_tokens} on: {text}"

    def _why(self, state: RequestState, asked: Asked, have_tokens: int) -> Why:
        limit_tokens = asked.limit_tokens
        end = min(have_tokens + self._align, limit_tokens)
        where = f"from token {have_tokens} on: "
        if self._state_positions:
            reach = attention_reach_tokens(
                self._groups, state.keys, have_tokens, limit_tokens, self._chain.residents
            )
            if reach > have_tokens and (found := self._without_state(state, have_tokens, reach)):
                return found[0], where + found[1]
        missing = self._missing(state, have_tokens, end)
        if not missing and self._chain.host.is_quota_full(state.tenant):
            text = "it is there, and could not be held: its salt or adapter has a quota of the host tier"
            return MissReason.QUOTA, where + text
        if not missing:
            text = "it is there, and could not be held: too many blocks are in use"
            return MissReason.NO_ROOM, where + text
        host = self._chain.host
        if len(host.new_of(missing)) < len(missing):
            return MissReason.IN_FLIGHT, where + "being copied to the host tier at that moment"
        reason, text = (
            self._below(state, missing)
            or self._absences.left(missing)
            or (self._under_another_root(state, asked.tokens) if not have_tokens else None)
            or self._before(state, missing, have_tokens)
        )
        return reason, where + text

    def _without_state(self, state: RequestState, have_tokens: int, reach_tokens: int) -> Why | None:
        """Why there is no state at any end up to ``reach_tokens``, as far as there is KV. None if there is
        one; or if none is known to have been there, and the model has no KV.
        """
        host, contains = self._chain.host, self._chain.residents.contains
        at_ends = [
            [
                state.keys(position)[end // self._groups[position].block_size_tokens - 1]
                for position in self._state_positions
            ]
            for end in range(have_tokens + self._align, reach_tokens + 1, self._align)
        ]
        if any(all(map(contains, keys)) for keys in at_ends):
            return None
        missing = [key for keys in at_ends for key in keys if not contains(key)]
        if len(host.new_of(missing)) < len(missing):
            return MissReason.IN_FLIGHT, "its state is being copied to the host tier at that moment"
        has_attention = len(self._state_positions) < len(self._groups)
        why = (
            self._below(state, missing)
            or self._absences.left(missing)
            or self._absences.left(self._states_beyond(state, reach_tokens))
        )
        if why is None and not has_attention:
            return None
        text = f"its KV is there up to token {reach_tokens}, but no state" if has_attention else "no state"
        _, words = why or (None, "none that is known was kept (KVBM_STATE_EVERY_TOKENS)")
        return MissReason.NO_STATE, f"{text}: {words}"

    def _states_beyond(self, state: RequestState, reach_tokens: int) -> list[BlockKey]:
        """Where there was KV once, there may have been a state, and the state goes first."""
        return [
            key
            for position in self._state_positions
            for key in state.keys(position)[reach_tokens // self._groups[position].block_size_tokens :]
        ]

    def _missing(self, state: RequestState, have_tokens: int, end_tokens: int) -> list[BlockKey]:
        found, contains = list[BlockKey](), self._chain.residents.contains
        has_attention = len(self._state_positions) < len(self._groups)
        for position, group in enumerate(self._groups):
            if group.is_state and has_attention:
                continue
            span = needed_blocks(group, have_tokens, end_tokens)
            found += [key for key in state.keys(position)[span.start : span.stop] if not contains(key)]
        return found

    def _below(self, state: RequestState, missing: Sequence[BlockKey]) -> Why | None:
        """What only lower tiers can say. Of a tier with slots it is known here what it has; of others not."""
        if not self._chain.lower:
            return None
        if (hidden := self._absences.hidden(missing)) is not None:
            return hidden
        if state.seeker.is_computed:
            return MissReason.TOO_SLOW, "computing is faster than loading it from the shared store"
        if state.fetch_wanted_since_s is not None:
            return MissReason.TOO_SLOW, "the shared store did not bring it within KVBM_REMOTE_WAIT_S"
        return None

    def _before(self, state: RequestState, missing: Sequence[BlockKey], have_tokens: int) -> Why:
        before = state.before
        other = None if before is None else self._open_state(before.request_id)
        if other is not None and other is not state and other.own_keys().issuperset(missing):
            return MissReason.IN_FLIGHT, "another request is computing it"
        if before is None or have_tokens:
            return MissReason.NEVER_SEEN, NEVER_SEEN
        ago = told_s(self._clock.now_s() - before.at_s)
        text = f"it came {ago} ago, and was not kept (kvbm_dropped_blocks_total says why)"
        return MissReason.NOT_KEPT, text
