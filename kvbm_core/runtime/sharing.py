"""A rank's part in a group whose first rank loads for all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from kvbm_core.transfer.executor import DeviceMemory, Executor
from kvbm_core.transfer.executors.broadcast import BroadcastExecutor
from kvbm_core.transfer.executors.broadcast_group import Group
from kvbm_core.transfer.plan import GroupMove, JobResult, TransferPlan
from kvbm_core.types import Direction

OnDone = Callable[[JobResult], None]

_TURN = 1 << 62


def turn_of(number: int, name: str) -> int:
    """What ranks without a leader call their ``number``-th load, which is for ``name``: the same on all that
    are in step, and no number that a JobTable gives.
    """
    digest = hashlib.sha256(f"{number} {name}".encode()).digest()
    return _TURN | int.from_bytes(digest[:8], "big") >> 3


def onboard_plan(turn: int, device_blocks: tuple[int, ...]) -> TransferPlan:
    """Of a rank that has no slots: the numbers that it names in their place mean nothing."""
    move = GroupMove(0, device_blocks, tuple(range(len(device_blocks))))
    return TransferPlan(turn, Direction.ONBOARD, (move,))


class Sharing:
    """``make_loader``, ``verifies``: see BroadcastExecutor. ``is_broken``: loads can only fail now."""

    def __init__(
        self,
        memory: DeviceMemory,
        group: Group,
        on_done: OnDone,
        make_loader: Callable[[OnDone], Executor] | None = None,
        *,
        verifies: bool = False,
    ) -> None:
        self.is_broken = False
        self.executor = BroadcastExecutor(
            memory,
            group,
            on_done,
            make_loader=make_loader,
            on_broken=self._broke,
            verifies=verifies,
        )

    def skip(self, turn: int, num_blocks: int) -> None:
        """See BroadcastExecutor."""
        self.executor.skip(onboard_plan(turn, tuple(range(num_blocks))))

    def _broke(self, reason: str) -> None:
        self.is_broken = True
