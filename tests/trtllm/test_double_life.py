"""The double on the less common ways of a request: cancel, errors, replay, windows (S8 and S11)."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from threading import Barrier
from typing import Any

import pytest

from tests.trtllm.double import NEWEST, RELEASED, DoubleFailure, Executor, ExecutorConfig, ForwardError, World
from tests.trtllm.double.contract import current
from tests.trtllm.mocks import Script, make_classes, make_executor
from tests.trtllm.test_double import alloc_name, finish_name, ids_of, manager, outputs_of, polls_of, version

__all__ = ["manager", "version"]

OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["plain", "overlap"])


@pytest.fixture
def newest() -> Iterator[None]:
    """The newest contract, installed."""
    with World(NEWEST):
        yield


def layouts() -> Any:
    """The installed module of V2 layouts."""
    return import_module(f"{current().package}.kv_cache_layout")


# S8: nobody tells the connector


@OVERLAP
def test_cancel_of_a_queued_request_calls_nothing(manager: str, overlap: bool) -> None:
    executor = make_executor(manager=manager, overlap=overlap, max_batch_size=1)
    first, second = executor.submit(range(8), 3), executor.submit(range(20, 28), 3)
    executor.step()
    executor.cancel(second)
    executor.run_until_idle()
    assert executor.finish_reasons == {first: "length", second: "cancelled"}
    assert executor.calls.count("get_num_new_matched_tokens") == 1


@OVERLAP
def test_cancel_while_decoding_frees_at_once(manager: str, overlap: bool) -> None:
    executor = make_executor(Script(saves=True), manager=manager, overlap=overlap)
    request = executor.submit(range(8), 20)
    for _ in range(4):
        executor.step()
    executor.cancel(request)
    executor.step()
    assert executor.blocks_in_use == 0 and executor.finish_reasons[request] == "cancelled"
    executor.run_until_idle()
    assert executor.calls.count(finish_name(executor)) == 0
    assert all(poll == ([], []) for poll in polls_of(executor))


@pytest.mark.parametrize("name", [RELEASED, NEWEST])
def test_cancel_of_a_parked_request(name: str) -> None:
    with World(name):
        executor = make_executor(Script(matches={1: (8, True)}, polls_until_done=3))
        request = executor.submit(range(12), 4)
        executor.step()
        assert executor.state_of(request) == "loading" and executor.blocks_in_use == 3
        executor.cancel(request)
        executor.step()
        assert executor.blocks_in_use == (3 if name == NEWEST else 0), "only N waits for the transfer"
        executor.run_until_idle()
        assert executor.blocks_in_use == 0 and executor.finish_reasons[request] == "cancelled"
        assert executor.calls.count("build_connector_meta") == 1
        again = executor.submit(range(12), 4)
        executor.run_until_idle()
        assert executor.calls.named("get_num_new_matched_tokens")[-1].values["num_computed_tokens"] == 0
        assert len(executor.outputs[again]) == 4


@OVERLAP
def test_forward_error_drops_all_requests(manager: str, overlap: bool) -> None:
    executor = make_executor(
        Script(matches={3: (4, True)}, polls_until_done=2), manager=manager, overlap=overlap
    )
    for i in range(3):
        executor.submit(range(10 * i, 10 * i + 8), 6)
    executor.step()
    executor.fail_next_forward()
    executor.step()
    assert set(executor.finish_reasons.values()) == {"error"} and len(executor.finish_reasons) == 3
    assert isinstance(executor.errors[0], ForwardError)
    executor.run_until_idle()
    assert executor.blocks_in_use == executor.blocks_lost and executor.calls.count(finish_name(executor)) == 0
    later = executor.submit(range(8), 6)
    executor.run_until_idle()
    assert executor.finish_reasons[later] == "length"


@OVERLAP
@pytest.mark.parametrize("hook", ["wait_for_layer_load", "save_kv_layer", "callable", "wait_for_save"])
def test_what_hooks_raise_inside_the_forward_ends_requests_only(
    version: str, hook: str, overlap: bool
) -> None:
    executor = make_executor(Script(raises=hook), overlap=overlap)
    executor.submit(range(8), 6)
    executor.run_until_idle()
    assert executor.finish_reasons == {1: "error"} and isinstance(executor.errors[0], OSError)


# S0 and CUDA graphs


def test_start_up(version: str) -> None:
    executor = make_executor(warmup_forwards=3)
    assert executor.worker.calls_before_memory == 3
    names = ["register_forward_pass_callable", "register_kv_caches"]
    assert executor.calls.names() == names + ["wait_for_initialization"] * (version == NEWEST)
    assert executor.worker.memory.shape == (64, 2, 2, 16)


def test_constructors_may_wait_for_each_other(version: str) -> None:
    barrier = Barrier(2, timeout=30)
    leader_class, worker_class = make_classes(Script())

    def meet(cls: type) -> Any:
        return lambda llm_args: (barrier.wait(), cls(llm_args))[1]

    executor = Executor(meet(leader_class), meet(worker_class))
    assert executor.leader is not None and not barrier.broken


def test_llm_args(version: str) -> None:
    args = make_executor(tokens_per_block=8).worker._llm_args
    assert (args.kv_cache_config.tokens_per_block, args.tensor_parallel_size) == (8, 1)
    assert args.parallel_config.to_mapping().world_size == 1


def test_graphs_run_no_hooks_while_only_decoding(manager: str) -> None:
    executor = make_executor(manager=manager, cuda_graphs=True)
    executor.submit(range(8), 5)
    executor.run_until_idle()
    assert executor.calls.count("wait_for_layer_load") == executor.calls.count("save_kv_layer") == 2
    assert executor.calls.count("forward_pass_callable") == executor.calls.count("wait_for_save") == 5


# S11


def test_dummy_requests(manager: str) -> None:
    executor = make_executor(Script(saves=True), manager=manager)
    dummy = executor.submit(range(8), 2, dummy=True)
    executor.run_until_idle()
    asked = [call.values["request_id"] for call in executor.calls.named("get_num_new_matched_tokens")]
    assert asked == ([dummy] if executor.contract.version == RELEASED else [])
    assert [call.values["request_id"] for call in executor.calls.named(alloc_name(executor))] == [dummy]
    assert not executor.calls.named(finish_name(executor))


def test_a_generation_only_request_ends_the_loop_of_v1(version: str) -> None:
    executor = make_executor()
    executor.submit(range(30, 38), 4, generation_only=True)
    with pytest.raises(DoubleFailure, match="generation-only"):
        executor.run_until_idle()
    assert executor.calls.count("get_num_new_matched_tokens") == 0


def test_a_generation_only_request_on_v2(newest: None) -> None:
    executor = make_executor(Script(saves=True), manager="v2")
    decode = executor.submit(range(30, 38), 4, generation_only=True)
    executor.run_until_idle()
    assert not executor.calls.named("get_num_new_matched_tokens")
    for name in (alloc_name, finish_name):
        assert [call.values["request_id"] for call in executor.calls.named(name(executor))] == [decode]
    (first,) = [data for data in outputs_of(executor)[0].cached_requests if data.request_id == decode]
    assert (len(first.new_tokens), first.computed_position, first.num_scheduled_tokens) == (9, 8, 1)
    plain = Executor(None, None)
    plain.submit(range(30, 38), 4)
    assert executor.outputs[decode] == plain.run_until_idle()[1]


def test_a_batch_that_cannot_run_after_bind(newest: None) -> None:
    script = Script(matches={1: (4, False)}, loads_in_start=False)
    executor = make_executor(script)
    executor.submit(range(9), 2)
    executor.drop_next_batch()
    assert not executor.step()
    executor.run_until_idle()
    calls = executor.calls
    assert calls.count("bind_connector_meta") == calls.count("start_load_kv") + 1 == 3
    assert calls.count("get_num_new_matched_tokens") == calls.count("update_state_after_alloc") == 1
    new, again = outputs_of(executor)[0].new_requests[0], outputs_of(executor)[1].cached_requests[0]
    assert (new.computed_position, again.computed_position, again.new_tokens) == (0, 4, [])


@OVERLAP
def test_preempted_request_is_replayed_as_new(newest: None, overlap: bool) -> None:
    executor = make_executor(manager="v2", overlap=overlap)
    first = executor.submit(range(9), 8)
    for _ in range(4):
        executor.step()
    executor.drop_device_cache()
    executor.preempt(first)
    executor.run_until_idle()
    queries = executor.calls.named("get_num_new_matched_tokens")
    assert [call.values["request_id"] for call in queries] == [first, first]
    reports = [output.new_requests[0] for output in outputs_of(executor) if output.new_requests]
    assert [report.request_id for report in reports] == [first, first]
    assert len(reports[1].new_tokens) == 9 + 4 and reports[1].new_tokens[:9] == list(range(9))
    assert reports[1].computed_position + reports[1].num_scheduled_tokens == 9 + 4
    assert executor.calls.count(finish_name(executor)) == 1
    plain = Executor(None, None)
    plain.submit(range(9), 8)
    assert plain.run_until_idle() == executor.outputs


@OVERLAP
def test_full_cache_evicts_the_youngest(newest: None, overlap: bool) -> None:
    executor = make_executor(manager="v2", overlap=overlap, num_blocks=7, enable_block_reuse=False)
    for i in range(2):
        executor.submit(range(20 * i, 20 * i + 8), 12)
    executor.run_until_idle()
    asked = [call.values["request_id"] for call in executor.calls.named("get_num_new_matched_tokens")]
    assert asked.count(1) == 1 and asked.count(2) > 1
    assert {len(tokens) for tokens in executor.outputs.values()} == {12}


def test_offers_are_honoured_as_far_as_pages_go(newest: None) -> None:
    prompt = range(32)
    for refuse, honoured, scheduled in ((False, 16, 8), (True, 4, 4)):
        script = Script(matches={1: (16, False)})
        executor = make_executor(script, manager="v2", chunk_tokens=8, refuse_growth=refuse)
        executor.submit(prompt, 2)
        executor.run_until_idle()
        (alloc,) = executor.calls.named(alloc_name(executor))
        assert alloc.values["context_current_position"] == honoured
        data = outputs_of(executor)[0].new_requests[0]
        assert (data.computed_position, data.num_scheduled_tokens) == (0, scheduled)


def test_offer_of_the_whole_prompt_is_cut_on_v2(newest: None) -> None:
    executor = make_executor(Script(matches={1: (12, True)}), manager="v2")
    executor.submit(range(12), 2)
    executor.run_until_idle()
    assert executor.calls.named(alloc_name(executor))[0].values["context_current_position"] == 11


@OVERLAP
def test_windows_leave_gaps_in_place(newest: None, overlap: bool) -> None:
    config: dict[str, Any] = {"manager": "v2", "attention_windows": (None, 8), "overlap": overlap}
    executor = make_executor(Script(matches={1: (16, False)}), **config)
    executor.submit(range(30), 12)
    executor.run_until_idle()
    layout = executor.worker.memory
    assert [(group.layer_ids, group.window_size) for group in layout.groups] == [((0,), None), ((1,), 8)]
    (alloc,), (finish,) = (executor.calls.named(name(executor)) for name in (alloc_name, finish_name))
    full, window = alloc.values["block_ids_by_layer_group"]
    assert len(full) == len(window) == 8 and -1 not in full
    assert [slot == -1 for slot in window] == [True] * 2 + [False] * 6
    assert [slot == -1 for slot in finish.values["block_ids_by_layer_group"][1]] == [True] * 8 + [False] * 3
    data = outputs_of(executor)[0].new_requests[0]
    assert data.new_block_ids == [] and data.new_block_ids_by_layer_group == [full, window]


def test_flat_leader_is_refused_with_several_groups(newest: None) -> None:
    leader_class, worker_class = make_classes(Script())
    del leader_class.request_finished_by_layer_group  # type: ignore[attr-defined]
    with pytest.raises(DoubleFailure, match="request_finished_by_layer_group"):
        Executor(leader_class, worker_class, ExecutorConfig(manager="v2", attention_windows=(None, 8)))


def test_leader_may_take_its_offer_back(version: str) -> None:
    executor = make_executor(Script(matches={1: (8, False)}, resets_position_to=0))
    executor.submit(range(12), 2)
    executor.run_until_idle()
    assert executor.num_computed_tokens == 12 + 1


def test_regions_are_the_memory(newest: None) -> None:
    for split in (False, True):
        executor = make_executor(manager="v2", split_kv_regions=split, slot_padding_bytes=16)
        executor.submit(range(8), 2)
        executor.step()
        (slots,) = executor.slots_of(1)
        (group,) = executor.worker.memory.groups
        assert [region.size for region in group.regions] == ([64, 64] if split else [128])
        raw = b"".join(bytes(region.as_tensor()[slots[0]].numpy()) for region in group.regions)
        expected = executor._active[0].sequence.expected[:, :, 0]
        order = expected.transpose(1, 0, 2, 3, 4) if split else expected
        assert raw == order.tobytes()
        region = group.regions[0]
        assert region.address_of(1) - region.base == region.stride == region.size + 16


def test_what_is_the_same_on_all_ranks_has_regions_of_its_own(newest: None) -> None:
    if "replicated_regions" not in layouts().KvCacheLayerGroupLayout.__dataclass_fields__:
        pytest.skip("NOT RUN: regions that are the same on all ranks: the layouts of these files have none")
    shapes = {(): ([128], []), ("value",): ([32, 32], [32, 32]), ("key", "value"): ([], [128])}
    for roles, (own, shared) in shapes.items():
        executor = make_executor(manager="v2", replicated_roles=roles, slot_padding_bytes=16)
        executor.submit(range(8), 2)
        executor.step()
        layout, (slots,) = executor.worker.memory, executor.slots_of(1)
        (group,) = layout.groups
        assert [region.size for region in group.regions] == own
        assert [region.size for region in group.replicated_regions] == shared
        assert (group.bytes_per_page, group.replicated_bytes_per_page) == (sum(own), sum(shared))
        if hasattr(layout, "as_single_pool_tensor"):
            assert (layout.as_single_pool_tensor() is None) == bool(roles)
        for region in group.regions + group.replicated_regions:
            views = [
                executor.memory.view(ref.layer_id, ref.role == "value")[slots[0]] for ref in region.buffers
            ]
            assert bytes(region.as_tensor()[slots[0]].numpy()) == b"".join(view.tobytes() for view in views)


def test_worker_without_layout_gets_one_tensor(newest: None) -> None:
    if not hasattr(layouts().KvCacheLayout, "as_single_pool_tensor"):
        pytest.skip("NOT RUN: a worker without layouts: the layouts of these files are never one tensor")
    leader_class, worker_class = make_classes(Script())
    del worker_class.register_kv_cache_layout  # type: ignore[attr-defined]
    executor = Executor(leader_class, worker_class, ExecutorConfig(manager="v2", slot_padding_bytes=16))
    executor.submit(range(8), 2)
    executor.step()
    tensor = executor.worker.memory
    assert tensor.shape == (64, 2, 2, 16)
    slot = executor.slots_of(1)[0][1]
    for layer in range(2):
        for kv in range(2):
            assert (
                tensor[slot, layer, kv].numpy().tobytes() == executor.memory.view(layer, kv)[slot].tobytes()
            )
    with pytest.raises(NotImplementedError):
        Executor(leader_class, worker_class, ExecutorConfig(manager="v2", split_kv_regions=True))


def test_block_ids_are_of_the_request(manager: str) -> None:
    executor = make_executor(manager=manager)
    executor.submit(range(8), 2)
    executor.step()
    assert ids_of(executor.calls.named(alloc_name(executor))[0]) == executor.slots_of(1)[0][:2]
