"""kvbm's leader side under TensorRT-LLM's iterations, without TensorRT-LLM, which cannot be had everywhere.

Reports have the fields of its newest ``RequestData``; making them is the engine's cost and not measured.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from benchmarks.suite import expect
from benchmarks.timing import timed
from kvbm_core.clock import SystemClock
from kvbm_core.identity.roots import Roots
from kvbm_core.identity.weights import WeightsIdentity
from kvbm_core.observe.guard import GuardState
from kvbm_core.observe.metrics import Metrics
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.testing.leader_bench import LeaderBench
from kvbm_core.tiers.groups import GroupSpec
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_trtllm.contract import BAD_PAGE
from kvbm_trtllm.metadata import decode
from kvbm_trtllm.scheduler import Options, SchedulerSide


@dataclass
class Report:
    """As ``RequestData`` of TensorRT-LLM's main branch, September 2026."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


class TrtllmSteps:
    """Requests that decode together, one token in each iteration."""

    def __init__(self, num_slots: int, block_tokens: int, run_tokens: int, seed: int) -> None:
        groups = (GroupSpec(0, block_tokens),)
        options = LeaderOptions(share_loads=False, null_block=BAD_PAGE)
        self._bench = LeaderBench(num_slots, groups=groups, options=options)
        self._guards = Metrics()
        self._hooks = SchedulerSide(
            self._bench.leader,
            Roots(KeyNamespace("benchmark"), WeightsIdentity({}, 0).stamp),
            SystemClock(),
            lambda note: None,
            guard_state=GuardState(self._guards),
            options=Options(decode_run_tokens=run_tokens),
        )
        self._block_tokens = block_tokens
        self._draw = random.Random(seed)
        self._tokens: dict[int, list[int]] = {}
        self._next_block = 0
        self.offloaded_blocks = 0

    def prefill(self, lengths: Sequence[int], vocabulary: int) -> None:
        """New requests, all computed in one iteration."""
        reports = []
        for number, length in enumerate(lengths, 1):
            tokens = self._tokens[number] = [self._draw.randrange(vocabulary) for _ in range(length)]
            blocks = self._blocks(-(-length // self._block_tokens))
            request = SimpleNamespace(
                request_id=number, get_tokens=lambda beam, tokens=tokens: tokens, context_current_position=0
            )
            expect(self._hooks.get_num_new_matched_tokens(request, 0) == (0, False), "a new prompt was found")
            self._hooks.update_state_after_alloc(request, [blocks])
            reports.append(Report(number, list(tokens), blocks, 0, length))
        self._iterate(SimpleNamespace(new_requests=reports, cached_requests=[]))
        self.offloaded_blocks = 0

    def decode(self, vocabulary: int) -> float:
        """One iteration; the seconds of the leader's side, with what it heard of the one before."""
        reports = []
        for number, tokens in self._tokens.items():
            tokens.append(self._draw.randrange(vocabulary))
            position = len(tokens) - 1
            blocks = self._blocks(1) if position % self._block_tokens == 0 else []
            reports.append(Report(number, tokens[-1:], blocks, position, 1))
        return self._iterate(SimpleNamespace(new_requests=[], cached_requests=reports))

    def check(self) -> None:
        """Nothing went wrong behind a guard, and the leader's books agree."""
        errors = sum(value for name, value in self._guards.snapshot().items() if "guarded" in name)
        expect(errors == 0, f"{errors:.0f} exceptions were caught by a guard")
        self._bench.leader.check_integrity()

    def _iterate(self, output: SimpleNamespace) -> float:
        seconds, metadata = timed(lambda: self._hooks.build_connector_meta(output))
        plans = decode(metadata)
        for plan in plans.offloads if plans is not None else ():
            self.offloaded_blocks += plan.num_blocks
            self._bench.say(plan.job_id)  # heard in the next iteration
        return seconds

    def _blocks(self, count: int) -> list[int]:
        first = self._next_block
        self._next_block += count
        return list(range(first, first + count))
