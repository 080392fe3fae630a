"""What waits for the disk: in orders of limited size, not without bound, and not for a disk that fails."""

from __future__ import annotations

from itertools import count

from kvbm_core.clock import ManualClock
from kvbm_core.errors import Outcome
from kvbm_core.observe.metrics import Metrics
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.policy.lru import LruPolicy
from kvbm_core.runtime.disk import STORE_BLOCKS, DiskOptions, DiskTier
from kvbm_core.runtime.messages import JobAck, Message, Store
from kvbm_core.tiers.tier import BlockTier
from kvbm_core.types import BlockKey, Tier


def test_long_prompts_go_in_several_orders_and_what_is_too_much_waits_or_is_dropped() -> None:
    clock, metrics = ManualClock(), Metrics()
    host, sent = BlockTier(Tier.HOST, LruPolicy(), clock), list[Message]()
    keys = [BlockKey(bytes([number]) * 32) for number in range(200)]
    host.grow(200)
    host.commit(host.reserve(keys, frozenset))
    limit = DiskOptions(max_storing_blocks=STORE_BLOCKS + 5, max_waiting_blocks=150)
    disk = DiskTier(host, AdmitAll(), sent.append, count(1).__next__, 1, clock, metrics, limit)
    disk.take_in(0, 300, [])
    disk.offer(keys)

    def orders() -> list[Store]:
        return [message for message in sent if isinstance(message, Store)]

    assert [len(order.keys) for order in orders()] == [STORE_BLOCKS, 5]
    assert metrics.snapshot()['kvbm_dropped_blocks_total{reason="queue_full"}'] == 50
    assert disk.storing_blocks == 150
    host.forget(keys[100:110])  # what has left the host meanwhile is left out
    answered = 0
    while answered < len(orders()):
        assert disk.tier.pending_blocks <= STORE_BLOCKS + 5
        assert disk.acknowledge(0, JobAck(orders()[answered].job_id, Outcome.OK, 1, 0.0, 0.0))
        answered += 1
    assert [BlockKey(key) for order in orders() for key in order.keys] == [*keys[:100], *keys[110:150]]
    assert disk.storing_blocks == 0
    disk.check_integrity()


def test_a_disk_that_fails_is_not_waited_for() -> None:
    clock, metrics = ManualClock(), Metrics()
    host, sent = BlockTier(Tier.HOST, LruPolicy(), clock), list[Message]()
    keys = [BlockKey(bytes([number]) * 32) for number in range(20)]
    host.grow(20)
    host.commit(host.reserve(keys, frozenset))
    disk = DiskTier(
        host, AdmitAll(), sent.append, count(1).__next__, 1, clock, metrics, DiskOptions(max_storing_blocks=2)
    )
    disk.take_in(0, 300, [])
    disk.offer(keys)
    for number in (1, 2, 3):
        disk.acknowledge(0, JobAck(number, Outcome.IO_ERROR, 0, 0.0, 0.0))
    assert disk.storing_blocks == 0 and len(sent) == 3
    assert metrics.snapshot()['kvbm_dropped_blocks_total{reason="transfer_failed"}'] == 20
    disk.check_integrity()
