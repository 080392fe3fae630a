"""The parts of the suite, in the order in which they run. A new part is one more line here."""

from __future__ import annotations

from benchmarks.leader.part import LeaderPart
from benchmarks.remote.deadlines import DeadlinesPart
from benchmarks.remote.part import RemotePart
from benchmarks.serve.part import ServePart
from benchmarks.sglang.part import SglangPart
from benchmarks.storage.part import StoragePart
from benchmarks.suite import Part
from benchmarks.transfer.part import TransferPart

PARTS: tuple[Part, ...] = (
    LeaderPart(),
    TransferPart(),
    StoragePart(),
    RemotePart(),
    DeadlinesPart(),
    ServePart(),
    SglangPart(),
)
