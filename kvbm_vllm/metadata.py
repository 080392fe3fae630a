"""What the scheduler side sends to every worker with each step, and what comes back with the step's output.

Slots and device block ids, never addresses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvbm_core.transfer.plan import JobResult, TransferPlan


@dataclass
class DynamoConnectorMetadata(KVConnectorMetadata):
    """Plans of one step.

    ``onboards``: request id and its load. ``offloads``: reads of what this step computes, to start after the
    forward. ``failed_loads``: loads that were promised and cannot be made: request id and the device blocks
    left unwritten. ``fences``: offloads whose source this step overwrites. ``fence_all``: as if all were
    named. ``is_idle``: no token is computed in this step; the engine would only spin until a transfer is
    over. ``finishing``: finished requests whose device blocks wait for these offloads. ``revoked``: loads
    whose blocks are of other weights than the model has now; they end as failed.
    """

    onboards: list[tuple[str, TransferPlan]] = field(default_factory=list)
    offloads: list[TransferPlan] = field(default_factory=list)
    failed_loads: dict[str, tuple[int, ...]] = field(default_factory=dict)
    fences: tuple[int, ...] = ()
    fence_all: bool = False
    is_idle: bool = False
    finishing: dict[str, tuple[int, ...]] = field(default_factory=dict)
    revoked: tuple[int, ...] = ()

    def __reduce_ex__(self, protocol: Any) -> str | tuple[Any, ...]:
        """Of QUIET, which goes to every worker in most steps, its name is enough."""
        return "QUIET" if self is QUIET else super().__reduce_ex__(protocol)


QUIET: Final = DynamoConnectorMetadata()
"""A step that computes tokens and in which nothing of ours begins. Not to be changed."""


@dataclass
class DynamoWorkerMetadata(KVConnectorWorkerMetadata):
    """Acknowledgements by rank. They ride in the step's output, so that they cost neither a message nor a
    thread.
    """

    acks: dict[int, list[JobResult]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Those of both."""
        acks = {rank: list(said) for rank, said in self.acks.items()}
        if isinstance(other, DynamoWorkerMetadata):
            for rank, said in other.acks.items():
                acks.setdefault(rank, []).extend(said)
        return DynamoWorkerMetadata(acks)
