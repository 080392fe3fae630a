"""What waits for a lower tier: in orders of limited size, not without bound, and not for one that fails."""

from __future__ import annotations

from kvbm_core.errors import Outcome
from kvbm_core.policy.admission import AdmitAll
from kvbm_core.tiers.slotted import SlottedTier
from kvbm_core.tiers.storing import STORE_BLOCKS, StoringOptions
from kvbm_core.types import BlockKey, Tier
from tests.unit.tier_bench import TierBench


class Bench(TierBench[SlottedTier]):
    """A tier of 300 slots below a host in which all of ``keys`` are."""

    def __init__(self, keys: list[BlockKey], options: StoringOptions) -> None:
        super().__init__(
            lambda around: SlottedTier("disk", Tier.DISK, AdmitAll(), around, options), num_slots=len(keys)
        )
        self.in_host(keys)
        self.tier.expect(300, [0])
        self.tier.take_in(0, 300, [])


def test_long_prompts_go_in_several_orders_and_what_is_too_much_waits_or_is_dropped() -> None:
    keys = [BlockKey(bytes([number]) * 32) for number in range(200)]
    bench = Bench(keys, StoringOptions(max_storing_blocks=STORE_BLOCKS + 5, max_waiting_blocks=150))
    bench.offer(keys)
    assert [len(order.keys) for order in bench.sent] == [STORE_BLOCKS, 5]
    assert bench.metrics.snapshot()['kvbm_dropped_blocks_total{reason="queue_full"}'] == 50
    assert bench.tier.storing_blocks == 150
    bench.host.forget(keys[100:110])  # what has left the host meanwhile is left out, and what is behind it
    answered = 0
    while answered < len(bench.sent):
        assert bench.tier.slots.pending_blocks <= STORE_BLOCKS + 5
        bench.answer(bench.sent[answered])
        answered += 1
    assert [key for order in bench.sent for key in order.keys] == keys[:100]
    assert bench.tier.storing_blocks == 0
    bench.assert_idle()


def test_a_tier_that_fails_is_not_waited_for() -> None:
    keys = [BlockKey(bytes([number]) * 32) for number in range(20)]
    bench = Bench(keys, StoringOptions(max_storing_blocks=1))
    for key in keys:
        bench.offer([key])
    for number in range(3):
        bench.answer(bench.sent[number], Outcome.IO_ERROR)
    assert bench.tier.storing_blocks == 0 and len(bench.sent) == 3
    assert bench.metrics.snapshot()['kvbm_dropped_blocks_total{reason="transfer_failed"}'] == 20
    bench.assert_idle()


def test_of_an_order_that_failed_in_part_the_rest_is_stored() -> None:
    keys = [BlockKey(bytes([number]) * 32) for number in range(5)]
    bench = Bench(keys, StoringOptions())
    bench.offer(keys)
    (order,) = bench.sent
    bench.answer(order, failed={2: Outcome.NO_SPACE})
    assert [bench.tier.contains(key) for key in keys] == [True, True, False, True, True]
    assert bench.tier.slots.pending_blocks == 0
    values = bench.metrics.snapshot()
    assert values["kvbm_offload_blocks_h2d"] == 4
    assert values['kvbm_dropped_blocks_total{reason="transfer_failed"}'] == 1
    assert values['kvbm_failures_total{kind="offload_no_space"}'] == 1
    bench.offer(keys)
    assert bench.sent[1].keys == (keys[2],)
    bench.answer(bench.sent[1])
    bench.assert_idle()


def test_what_one_rank_could_not_store_is_not_there_and_the_rest_is() -> None:
    keys = [BlockKey(bytes([number]) * 32) for number in range(3)]
    bench = Bench(keys, StoringOptions())
    bench.tier.expect(300, [0, 1])
    bench.offer(keys)
    (order,) = bench.sent
    bench.answer(order, failed={0: Outcome.IO_ERROR}, ranks=[0])
    assert not any(map(bench.tier.contains, keys))
    bench.answer(order, failed={1: Outcome.IO_ERROR}, ranks=[1])
    assert [bench.tier.contains(key) for key in keys] == [False, False, True]
    bench.assert_idle()
