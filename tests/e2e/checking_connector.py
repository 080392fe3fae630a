"""DynamoConnector that checks every byte: what an onboard left on the device against what the offload read
there.

Loaded by real engines in place of DynamoConnector. The comparison is of digests, made from the device tensors
with plain indexing and kept here; it shares no code with the transfer engine. Counts go to the file named by
KVBM_TEST_BYTES_REPORT, one file per rank. ``fail_every`` makes every n-th onboard fail; ``lose_states`` makes
states come back as zeros, which a comparison of answers has to see. What goes to the disk is noted in the
file named by KVBM_TEST_DISK_LEDGER (one per rank), for the engine that comes after a kill.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from kvbm_core.errors import Outcome
from kvbm_core.runtime import rank_watch
from kvbm_core.transfer.executor import Executor
from kvbm_core.transfer.movers.base import OnResult
from kvbm_core.transfer.plan import JobResult, OrderKind, TierOrder, TransferPlan
from kvbm_core.transfer.rank import RankMemory
from kvbm_core.types import Direction
from kvbm_vllm.config import layer_specs
from kvbm_vllm.connector import DynamoConnector

rank_watch.ANSWER_WITHIN_S = 300.0  # no test ends a rank and goes on: one that is silent is busy


class ByteLedger:
    """Digests of what was offloaded, by (group, slot); compared after each onboard."""

    def __init__(
        self,
        layers: list[list[torch.Tensor]],
        states: frozenset[int],
        num_blocks: int,
        report: Path,
        disk_ledger: Path,
    ) -> None:
        self.layers = layers
        self.states = states
        """The groups that are states."""
        self.num_blocks = num_blocks
        self.report = report
        self.disk_ledger = disk_ledger
        self.copies: dict[tuple[int, int], str] = {}
        # Disk slot -> its digest in each group (a block is of one group only).
        self.on_disk: dict[int, dict[int, str]] = {}
        if disk_ledger.exists():
            for line in disk_ledger.read_text().splitlines():
                slot, digests = json.loads(line)
                self.on_disk[slot] = {int(group): digest for group, digest in digests.items()}
        self.counts = {"offloaded": 0, "onboarded": 0, "different": 0, "unknown": 0, "failed_on_purpose": 0}
        self.counts |= {"stored": 0, "read": 0, "states": 0, "states_lost": 0}

    def digest(self, group: int, block: int) -> str:
        """Of all layers of one device block."""
        parts = []
        for tensor in self.layers[group]:
            per_block = tensor.shape[0] // self.num_blocks
            piece = tensor[block * per_block : (block + 1) * per_block].contiguous().view(torch.uint8)
            parts.append(piece.numpy().tobytes())
        return blake2b(b"".join(parts), digest_size=16).hexdigest()

    def note_offload(self, plan: TransferPlan) -> None:
        """The device bytes of a plan, before anything else can change them."""
        for move in plan.moves:
            for block, slot in zip(move.device_blocks, move.slots, strict=True):
                self.note_others(slot)
                self.copies[move.group, slot] = self.digest(move.group, block)
                self.counts["offloaded"] += 1

    def note_store(self, order: TierOrder) -> None:
        """Host slots that go to the disk now; nobody writes to them meanwhile."""
        lines = []
        for slot, disk_slot in zip(order.slots, order.places, strict=True):
            groups = [group for group in range(len(self.layers)) if (group, slot) in self.copies]
            self.on_disk[disk_slot] = {group: self.copies[group, slot] for group in groups}
            lines.append(json.dumps([disk_slot, self.on_disk[disk_slot]]) + "\n")
        with self.disk_ledger.open("a") as file:
            file.writelines(lines)
        self.counts["stored"] += len(order.slots)

    def note_others(self, slot: int) -> None:
        """A host slot that gets what another engine may have stored."""
        for group in range(len(self.layers)):
            self.copies.pop((group, slot), None)

    def note_reads(self, reads: TierOrder, failed: Collection[int]) -> None:
        """Host slots that hold now what is in these disk slots, but for those that ``failed``."""
        for slot, disk_slot in zip(reads.slots, reads.places, strict=True):
            self.note_others(slot)
            if slot in failed:
                continue
            self.counts["read"] += 1
            for group, digest in self.on_disk.get(disk_slot, {}).items():
                self.copies[group, slot] = digest

    def check_onboard(self, plan: TransferPlan, failed: Collection[int]) -> None:
        """The device bytes after a load, against the digest of their slot, but for slots that ``failed``."""
        for move in plan.moves:
            for block, slot in zip(move.device_blocks, move.slots, strict=True):
                if slot in failed:
                    continue
                self.counts["onboarded"] += 1
                self.counts["states"] += move.group in self.states
                expected = self.copies.get((move.group, slot))
                if expected is None:
                    self.counts["unknown"] += 1
                elif expected != self.digest(move.group, block):
                    self.counts["different"] += 1
        self.write()

    def lose_states(self, plan: TransferPlan) -> None:
        """Zeros in place of the states that a load has brought."""
        for move in plan.moves:
            if move.group in self.states:
                for tensor in self.layers[move.group]:
                    tensor[list(move.device_blocks)] = 0
                self.counts["states_lost"] += len(move.device_blocks)

    def write(self) -> None:
        """The counts so far."""
        self.report.write_text(json.dumps(self.counts))


class CheckingExecutor:
    """An executor that keeps the ledger; each n-th onboard is reported as failed, with garbage in its
    target.
    """

    def __init__(self, inner: Executor, ledger: ByteLedger) -> None:
        self._inner = inner
        self._ledger = ledger
        self.fails_every = 0
        self.loses_states = False
        self._onboards = 0
        self.plans: dict[int, TransferPlan] = {}
        self.to_fail: set[int] = set()

    def submit(self, plan: TransferPlan, *, deadline_s: float | None = None) -> None:
        self.plans[plan.job_id] = plan
        if plan.compares:
            pass  # it writes nothing
        elif plan.direction is Direction.OFFLOAD:
            self._ledger.note_offload(plan)
        else:
            self._onboards += 1
            if self.fails_every and self._onboards % self.fails_every == 0:
                self.to_fail.add(plan.job_id)
        self._inner.submit(plan, deadline_s=deadline_s)

    def judge(self, result: JobResult) -> JobResult:
        """Called with each result before anybody else sees it."""
        plan = self.plans.pop(result.job_id, None)
        if plan is None:
            return result
        moved = [slot for move in plan.moves for slot in move.slots]
        failed = result.failures([slot for reads in plan.reads for slot in reads.slots] + moved)
        for reads in plan.reads:
            self._ledger.note_reads(reads, failed)
        if plan.direction is Direction.OFFLOAD or (failed and not result.failed):
            return result
        if result.job_id in self.to_fail:
            self._ledger.counts["failed_on_purpose"] += 1
            for move in plan.moves:
                for tensor in self._ledger.layers[move.group]:
                    tensor[list(move.device_blocks)] = 7.0
            return replace(result, outcome=Outcome.IO_ERROR, detail="failed on purpose", failed=())
        self._ledger.check_onboard(plan, failed)
        if self.loses_states:
            self._ledger.lose_states(plan)
        return result

    def cancel(self, job_id: int) -> bool:
        return self._inner.cancel(job_id)

    def wait(self, job_ids: Collection[int] | None, timeout_s: float) -> bool:
        return self._inner.wait(job_ids, timeout_s)

    def close(self) -> None:
        self._ledger.write()
        self._inner.close()


class CheckingConnector(DynamoConnector):
    """The real connector with the checking executor inside its worker."""

    _checking: CheckingExecutor

    def fail_every(self, number: int) -> None:
        """From now on each onboard of this number fails; with 0 none."""
        self._checking.fails_every = number

    def lose_states(self, loses: bool) -> None:
        """From now on states come back as zeros, or as they are."""
        self._checking.loses_states = loses

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        config = self._kv_cache_config
        groups = config.kv_cache_groups
        layers = [[kv_caches[name] for name in group.layer_names] for group in groups]
        specs = [layer_specs(group) for group in groups]
        states = frozenset(place for place, found in enumerate(specs) if hasattr(found[0], "mamba_type"))
        worker = self.worker_side.worker
        report = Path(f"{os.environ['KVBM_TEST_BYTES_REPORT']}.{worker.rank}")
        disk_ledger = Path(f"{os.environ.get('KVBM_TEST_DISK_LEDGER', report)}.{worker.rank}.disk")
        ledger = ByteLedger(layers, states, int(config.num_blocks), report, disk_ledger)
        real_submit = RankMemory.submit

        def submit(memory: RankMemory, order: TierOrder, on_result: OnResult) -> None:
            if order.kind is OrderKind.STORE and order.places:
                ledger.note_store(order)
            elif order.kind is OrderKind.FETCH:
                for slot in order.slots:
                    ledger.note_others(slot)
            real_submit(memory, order, on_result)

        RankMemory.submit = submit  # type: ignore[method-assign]

        def wrap(inner: Executor) -> Executor:
            self._checking = CheckingExecutor(inner, ledger)
            return self._checking

        def judge(result: JobResult) -> JobResult:
            return self._checking.judge(result)

        worker.wrap_executor(wrap)
        worker.judge_results(judge)
        super().register_kv_caches(kv_caches)
