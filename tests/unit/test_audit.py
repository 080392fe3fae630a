"""The audit: which hits are drawn, what counts as other KV, and what becomes of a wrong block."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import pytest

from kvbm_core.errors import Outcome
from kvbm_core.layout.tensors import TensorInfo, view_of_tensors
from kvbm_core.policy.frequency import FrequencyFilter
from kvbm_core.runtime.audit import AuditSampler
from kvbm_core.runtime.leader import MAX_DISTRUSTED_NAMESPACES
from kvbm_core.runtime.leader_options import LeaderOptions
from kvbm_core.runtime.request import RequestState
from kvbm_core.storage.host_slab import HostSlab
from kvbm_core.testing.executor_bench import LONG_S, Listener
from kvbm_core.testing.leader_bench import ROOT, BenchDisk, LeaderBench
from kvbm_core.transfer.compare import TOLERANCE, can_compare, difference, is_other
from kvbm_core.transfer.executor import DeviceMemory
from kvbm_core.transfer.executors.memcpy import MemcpyExecutor
from kvbm_core.transfer.plan import GroupMove, JobResult, OrderKind, TransferPlan
from kvbm_core.types import Direction, SequenceHash
from tests.unit.disk_bench import OTHER, PROMPT, leave_host, reads_of

SEED = int(os.environ["KVBM_TEST_SEED"])
ALL = LeaderOptions(5.0, audit_rate=1.0)
TABLE = [[11, 12, 13, 14, 15]]


# ---------------------------------------------------------------- which hits


@pytest.mark.parametrize("rate", [0.11, 0.4, 0.6, 0.75, 1.0])
def test_large_rates_are_that_share(rate: float) -> None:
    sampler, hits = AuditSampler(rate, SEED), 20_000
    assert sum(sampler.draws() for _ in range(hits)) == pytest.approx(rate * hits, rel=0.12)  # 5 sigma


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.1])
def test_of_each_run_of_hits_one_is_drawn(rate: float) -> None:
    sampler, every = AuditSampler(rate, SEED), round(1 / rate)
    for _ in range(20):
        assert sum(sampler.draws() for _ in range(every)) == 1


def test_which_one_is_drawn_is_not_the_same_each_time() -> None:
    sampler = AuditSampler(0.01, SEED)
    places = {
        next(i for i, drawn in enumerate([sampler.draws() for _ in range(100)]) if drawn) for _ in range(50)
    }
    assert len(places) > 10


def test_none_is_drawn_at_a_rate_of_0() -> None:
    sampler = AuditSampler(0.0)
    assert not any(sampler.draws() for _ in range(1000))


def test_what_came_to_nothing_is_made_up_for() -> None:
    sampler = AuditSampler(0.001, SEED)
    while not sampler.draws():
        pass
    sampler.came_to_nothing()
    assert sampler.draws()


# ---------------------------------------------------------------- what is other KV

KV = np.random.default_rng(SEED).standard_normal(40_000).astype(np.float32)


def as_bytes(numbers: np.ndarray, dtype: str) -> np.ndarray:  # type: ignore[type-arg]
    if dtype == "bfloat16":
        return (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    if dtype.startswith("float8"):
        torch = pytest.importorskip("torch", reason="NOT RUN: float8: no torch")
        return torch.from_numpy(numbers).to(getattr(torch, dtype)).view(torch.uint8).numpy()
    return numbers.astype(dtype).view(np.uint8)


@pytest.mark.parametrize("dtype", sorted(TOLERANCE))
def test_rounding_is_the_same_kv_and_other_tokens_are_not(dtype: str) -> None:
    stored = as_bytes(KV, dtype)
    steps = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 5e-2)
    rounded = KV * (1 + steps * np.random.default_rng(SEED + 1).standard_normal(len(KV)).astype(np.float32))
    assert not is_other(stored, as_bytes(rounded, dtype), dtype)
    others = np.random.default_rng(SEED + 2).standard_normal(len(KV)).astype(np.float32)
    assert difference(stored, as_bytes(others, dtype), dtype) > 0.5
    assert is_other(stored, as_bytes(others, dtype), dtype)


def test_one_wrong_layer_among_many_is_found() -> None:
    wrong = KV.copy()
    wrong[8192:12288] = wrong[:4096]
    assert is_other(as_bytes(wrong, "bfloat16"), as_bytes(KV, "bfloat16"), "bfloat16")


def test_large_channels_and_layers_hide_nothing() -> None:
    """K of other tokens beside a bias that all tokens share (Qwen2), and a small layer beside a large one."""
    random_numbers = np.random.default_rng(SEED + 3)
    one, other = (random_numbers.standard_normal((600, 64)).astype(np.float32) for _ in range(2))
    one[:, :2] += 200
    other[:, :2] += 200
    assert is_other(as_bytes(one.ravel(), "bfloat16"), as_bytes(other.ravel(), "bfloat16"), "bfloat16")
    one[:, 32:] *= 0.01
    other[:, :32] = one[:, :32]
    other[:, 32:] *= 0.01
    assert is_other(as_bytes(one.ravel(), "bfloat16"), as_bytes(other.ravel(), "bfloat16"), "bfloat16")


def test_numbers_that_are_nothing_are_no_other_kv() -> None:
    zeros, minus = np.zeros(9000, np.float32), -np.zeros(9000, np.float32)
    assert difference(as_bytes(zeros, "float32"), as_bytes(minus, "float32"), "float32") == 0
    padded, noisy = KV.copy(), KV.copy()
    padded[:9000], noisy[:9000] = 1e-12, -1e-12
    assert difference(as_bytes(padded, "float32"), as_bytes(noisy, "float32"), "float32") < 1e-3
    padded[:9000] = noisy[:9000] = np.nan
    noisy[20_000] *= 1.0001
    assert difference(as_bytes(padded, "float32"), as_bytes(noisy, "float32"), "float32") < 1e-3
    noisy[:9000] = 1.0
    assert is_other(as_bytes(padded, "float32"), as_bytes(noisy, "float32"), "float32")


def test_float8_is_read_as_torch_reads_it() -> None:
    torch = pytest.importorskip("torch", reason="NOT RUN: float8: no torch")
    finite = np.arange(256, dtype=np.uint8)
    for dtype in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"):
        values = torch.from_numpy(finite.copy()).view(getattr(torch, dtype)).float().numpy()
        for byte in np.flatnonzero(np.isfinite(values)):
            one, twice = np.array([byte], np.uint8), np.array([finite[byte]], np.uint8)
            assert difference(one, twice, dtype) == 0.0
        a, b = np.uint8(0x30), np.uint8(0x34)
        expected = abs(values[a] - values[b]) / (abs(values[a]) + abs(values[b]))
        assert difference(np.array([a]), np.array([b]), dtype) == pytest.approx(expected)


def test_what_cannot_be_read_is_not_compared() -> None:
    assert not can_compare("uint8") and not can_compare("")
    with pytest.raises(ValueError, match="uint8"):
        difference(np.zeros(4, np.uint8), np.ones(4, np.uint8), "uint8")


# ---------------------------------------------------------------- the leader


def audited(
    bench: LeaderBench, request_id: str = "r", root: SequenceHash = ROOT
) -> tuple[RequestState, TransferPlan]:
    """A request that finds PROMPT, is not given it, and computes it; the plan that compares."""
    state = bench.leader.open(request_id, root, None)
    assert bench.match(state, PROMPT) == 0
    assert bench.match(state, PROMPT) == 0, "asked again before it is scheduled"
    assert bench.leader.offload(state, PROMPT, 0, len(PROMPT), TABLE) is not None
    assert bench.take_offloads() is None, "all of it is there"
    (job,) = bench.leader.take_audits()
    return state, job.plan()


def bench_of(disk: BenchDisk | None = None, options: LeaderOptions = ALL) -> LeaderBench:
    return LeaderBench(16, disk=disk, options=options)


def test_a_hit_is_computed_again_and_compared() -> None:
    bench = bench_of()
    bench.store(PROMPT)
    state, plan = audited(bench)
    assert plan.compares and plan.direction is Direction.OFFLOAD and plan.reads == ()
    (move,) = plan.moves
    assert move.device_blocks == (11, 12, 13, 14), "the last block is computed by everybody"
    assert bench.leader.finish(state) == (plan.job_id,), "its device blocks are read still"
    assert bench.leader.readers_of([12]) == {plan.job_id}
    bench.answer(plan)
    assert bench.metric('kvbm_audited_blocks_total{result="equal"}') == 4
    assert bench.resident_blocks(PROMPT) == 5
    bench.assert_idle()


def test_nothing_is_stored_anew_before_it_has_been_compared() -> None:
    """A prompt computed in parts: what is on the disk alone is not in the host after the first part."""
    bench = bench_of(BenchDisk())
    bench.store(PROMPT)
    bench.write_to_disk()
    leave_host(bench, range(5))
    state = bench.open()
    assert bench.match(state, PROMPT) == 0
    assert bench.leader.offload(state, PROMPT, 0, 8, TABLE) is None and bench.take_offloads() is None
    bench.leader.offload(state, PROMPT, 8, len(PROMPT), TABLE)
    (job,) = bench.leader.take_audits()
    plan, rest = job.plan(), bench.take_offloads()
    assert len(reads_of(plan).keys) == 4
    assert rest is not None and rest.num_blocks == 1, "the last block alone, which nobody has found"
    bench.answer(plan)
    bench.answer(rest)
    bench.leader.finish(state)
    bench.assert_idle()


def test_what_is_on_the_disk_is_read_up_and_compared() -> None:
    bench = bench_of(BenchDisk())
    bench.store(PROMPT)
    bench.write_to_disk()
    leave_host(bench, [1, 3])
    state, plan = audited(bench)
    reads = reads_of(plan)
    assert reads.kind is OrderKind.FETCH and len(reads.keys) == 2
    assert bench.resident_blocks(PROMPT) == 1
    bench.answer(plan)
    assert bench.resident_blocks(PROMPT) == 5
    bench.leader.finish(state)
    bench.assert_idle()


def test_an_audited_hit_counts_as_a_hit_for_a_place_on_the_disk() -> None:
    bench = bench_of(BenchDisk(make_admission=FrequencyFilter))
    bench.store(PROMPT)
    assert bench.write_to_disk() == 0
    state, plan = audited(bench)
    bench.answer(plan)
    bench.leader.finish(state)
    assert bench.write_to_disk() == 4
    bench.assert_idle()


@pytest.mark.parametrize(
    ("outcome", "is_kept"), [(Outcome.MISS, False), (Outcome.IO_ERROR, False), (Outcome.TIMED_OUT, True)]
)
def test_an_audit_that_the_disk_failed_distrusts_nothing_and_forgets_what_is_useless(
    outcome: Outcome, is_kept: bool
) -> None:
    bench = bench_of(BenchDisk())
    bench.store(PROMPT)
    bench.write_to_disk()
    leave_host(bench, [1, 3])
    state, plan = audited(bench)
    reads, keys = reads_of(plan), bench.keys(PROMPT)
    result = JobResult(plan.job_id, outcome, 0, 0.5, 0.25, failed=((reads.slots[0], outcome),))
    bench.leader.acknowledge(0, [result])
    assert bench.metric('kvbm_audited_blocks_total{result="not_compared"}') == 4
    assert bench.metric('kvbm_audited_blocks_total{result="wrong"}') == 0
    assert [bench.disk.contains(key) for key in keys] == [True, is_kept, True, True, True]
    bench.leader.finish(state)
    bench.assert_idle()


def test_a_wrong_block_is_not_hidden_by_another_one_that_the_disk_lost() -> None:
    bench = bench_of(BenchDisk())
    bench.store(PROMPT)
    bench.write_to_disk()
    leave_host(bench, [1, 3])
    state, plan = audited(bench)
    (move,) = plan.moves
    failed = ((move.slots[1], Outcome.MISS), (move.slots[2], Outcome.CORRUPT))
    bench.leader.acknowledge(0, [JobResult(plan.job_id, Outcome.MISS, 0, 0.5, 0.25, failed=failed)])
    assert bench.metric('kvbm_audited_blocks_total{result="wrong"}') == 4
    bench.leader.finish(state)
    bench.assert_idle()


@pytest.mark.parametrize("disk", [None, BenchDisk()], ids=["host", "disk"])
def test_after_a_wrong_block_nothing_of_its_namespace_is_served(
    disk: BenchDisk | None, caplog: pytest.LogCaptureFixture
) -> None:
    bench = bench_of(disk)
    bench.store(PROMPT)
    bench.write_to_disk()
    running = bench.leader.open("running", ROOT, None)
    state, plan = audited(bench)
    bench.answer(plan, Outcome.CORRUPT)
    assert bench.metric('kvbm_audited_blocks_total{result="wrong"}') == 4
    assert "AUDIT: blocks in the cache are not what the engine computes" in caplog.text
    assert bench.resident_blocks(PROMPT) == 0
    if disk is not None:
        assert [order.kind for order in bench.take_sent()] == [OrderKind.FORGET]
    for request in (running, state, bench.open("new")):
        assert bench.offload(request, OTHER) is None
        assert bench.match(request, PROMPT) == 0
        bench.leader.finish(request)
    other = bench.leader.open("other", SequenceHash(bytes(31) + b"1"), None)
    bench.answer(bench.offload(other, PROMPT))
    bench.leader.finish(other)
    bench.write_to_disk()
    bench.assert_idle()


def test_namespaces_that_are_distrusted_are_bounded() -> None:
    bench = bench_of()
    for number in range(MAX_DISTRUSTED_NAMESPACES + 1):
        root = SequenceHash(number.to_bytes(32, "big"))
        first = bench.leader.open("first", root, None)
        bench.answer(bench.offload(first, PROMPT))
        bench.leader.finish(first)
        state, plan = audited(bench, root=root)
        bench.answer(plan, Outcome.CORRUPT)
        bench.leader.finish(state)
    assert bench.leader.disabled_reason is not None and "audits" in bench.leader.disabled_reason


@pytest.mark.parametrize("outcome", [Outcome.REJECTED, Outcome.TIMED_OUT, Outcome.INCOMPATIBLE])
def test_an_audit_that_came_to_nothing_distrusts_nothing(outcome: Outcome) -> None:
    bench = bench_of()
    bench.store(PROMPT)
    state, plan = audited(bench)
    bench.answer(plan, outcome)
    bench.leader.finish(state)
    assert bench.metric('kvbm_audited_blocks_total{result="not_compared"}') == 4
    assert bench.resident_blocks(PROMPT) == 5
    bench.assert_idle()


def test_blocks_that_have_gone_meanwhile_are_not_compared() -> None:
    bench = bench_of()
    bench.store(PROMPT)
    state = bench.open()
    assert bench.match(state, PROMPT) == 0
    leave_host(bench, [2])
    bench.offload(state, PROMPT)
    assert bench.leader.take_audits() == []
    bench.leader.abandon(next(iter(bench.leader.offloads()), 0))
    bench.leader.finish(state)


@pytest.mark.parametrize("end", ["open", "retire", "finish"])
def test_an_audit_whose_request_goes_is_made_up_for_with_the_next_hit(end: str) -> None:
    bench = bench_of(options=LeaderOptions(5.0, audit_rate=0.001, audit_seed=SEED))
    bench.store(PROMPT)
    for _ in range(1000):
        state = bench.open()
        if not bench.match(state, PROMPT):
            break
        bench.leader.finish(state)
    assert state.audited is not None
    if end == "open":
        state = bench.open()
    elif end == "retire":
        bench.leader.retire(state)
    else:
        bench.leader.finish(state)
    other = bench.open("other")
    assert bench.match(other, PROMPT) == 0 and other.audited is not None
    for request in (state, other):
        bench.leader.finish(request)
    bench.assert_idle()


class Ranks:
    """One rank's memory and its executor, without an engine: float32, blocks of one page."""

    PAGE_NUMBERS = 1024

    def __init__(self, audited: tuple[tuple[slice, ...] | None, ...] = ()) -> None:
        shape, strides = (16, self.PAGE_NUMBERS), (self.PAGE_NUMBERS, 1)
        self.kv = np.zeros(shape, np.float32)
        info = TensorInfo("kv", shape, strides, 4, "float32", 0, 0, self.kv.nbytes)
        memory = DeviceMemory(
            (view_of_tensors([info], 16),), [self.kv.reshape(-1).view(np.uint8)], ("float32",), audited
        )
        self.host = HostSlab(16, self.PAGE_NUMBERS * 4)
        assert self.host.wait_ready(LONG_S)
        self._listener = Listener()
        self._executor = MemcpyExecutor(memory, self.host, on_done=self._listener)

    def compute(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """As a model does: KV of its tokens, which are the same each time but for rounding."""
        for number, block in enumerate(blocks):
            prefix = tokens[: 4 * (number + 1)]
            exact = np.random.default_rng(list(prefix)).standard_normal(self.PAGE_NUMBERS)
            self.kv[block] = exact * (1 + 1e-6 * np.random.default_rng(SEED).random(self.PAGE_NUMBERS))

    def run(self, plan: TransferPlan) -> Outcome:
        """Does it; what came of it."""
        self._executor.submit(plan)
        assert self._listener.wait_for(plan.job_id)
        return self._listener.outcomes()[plan.job_id]

    def close(self) -> None:
        """Ends the threads."""
        self._executor.close()
        self.host.close()


def test_a_planted_block_that_is_hit_each_time_is_found_within_10_000_hits() -> None:
    """At a rate of 0.001, on the real executor: right KV under a wrong name is loaded until it is found."""
    bench, ranks = bench_of(options=LeaderOptions(5.0, audit_rate=0.001, audit_seed=SEED)), Ranks()
    try:
        state = bench.open()
        ranks.compute(PROMPT, TABLE[0])
        plan = bench.offload(state, PROMPT, TABLE[0][0])
        assert plan is not None
        bench.answer(plan, ranks.run(plan))
        bench.leader.finish(state)
        slots = ranks.host.array.reshape(16, -1)
        slots[plan.moves[0].slots[2]] = slots[plan.moves[0].slots[3]]
        hits = 0
        while bench.metric('kvbm_audited_blocks_total{result="wrong"}') == 0:
            hits += 1
            assert hits <= 10_000, "the wrong block was never found"
            state = bench.open()
            found = bench.match(state, PROMPT)
            if found:
                load = bench.leader.onboard(state, found, TABLE)
                assert load is not None and ranks.run(load) is Outcome.OK
                bench.answer(load)
            else:
                ranks.compute(PROMPT, TABLE[0])
                bench.leader.offload(state, PROMPT, 0, len(PROMPT), TABLE)
                assert bench.take_offloads() is None, "all of it is there"
                (job,) = bench.leader.take_audits()
                bench.answer(job.plan(), ranks.run(job.plan()))
            bench.leader.finish(state)
        assert bench.resident_blocks(PROMPT) == 0
        bench.assert_idle()
    finally:
        ranks.close()


@pytest.mark.parametrize(
    ("audited", "outcome"),
    [
        ((), Outcome.CORRUPT),
        (((slice(0, 1024), slice(2048, 4096)),), Outcome.OK),
        (((slice(0, 1024), slice(1024, 4096)),), Outcome.CORRUPT),
        (((),), Outcome.INCOMPATIBLE),
    ],
    ids=["all", "left out", "a part", "nothing"],
)
def test_parts_of_blocks_are_left_out(audited: tuple[tuple[slice, ...], ...], outcome: Outcome) -> None:
    ranks = Ranks(audited)
    try:
        ranks.compute(PROMPT, [1])
        move = (GroupMove(0, (1,), (3,)),)
        assert ranks.run(TransferPlan(1, Direction.OFFLOAD, move)) is Outcome.OK
        ranks.kv[1, 256:512] += 1000
        assert ranks.run(TransferPlan(2, Direction.OFFLOAD, move, compares=True)) is outcome
    finally:
        ranks.close()
