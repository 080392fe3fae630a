"""Scenarios of requests that meet, and of ends that nobody announces: cancels, errors, failed copies,
replays.
"""

from __future__ import annotations

from types import SimpleNamespace

from kvbm_core.errors import Outcome
from kvbm_core.types import Direction
from tests.trtllm.double import EARLY
from tests.trtllm.harness import KeepingExecutor, Kind, Serving, serve
from tests.trtllm.scenarios import (
    ALL_SYNC,
    BLOCK,
    CAP,
    EACH_BLOCK,
    PROMPT,
    cap_of,
    is_newest,
    is_v1,
    scenario_list,
)

SCENARIOS, scenario = scenario_list()


# ---------------------------------------------------------------- many at once


@scenario(is_essential=True)
def several_in_one_iteration(rank: int, kind: Kind) -> None:
    with serve(rank, kind, num_blocks=200) as serving:
        for turn in range(2):
            hits = [
                serving.submit([*PROMPT[: 8 * i], *range(100 * i, 100 * i + 20)], 3 + i) for i in range(6)
            ]
            starts = (5000 + 1000 * turn, 5500 + 1000 * turn)
            misses = [serving.submit(range(start, start + 20), 4) for start in starts]
            serving.executor.run_until_idle()
            for i, request in enumerate(hits):
                matched = cap_of(8 * i + 20) if turn else 0
                serving.expect_match(request, (matched, turn > 0))
            for request in misses:
                serving.expect_match(request, (0, False))
            serving.forget_device()


@scenario(is_essential=True)
def several_small_loads(rank: int, kind: Kind) -> None:
    with serve(rank, kind, env=ALL_SYNC, num_blocks=200) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        requests = [serving.submit(PROMPT[: 12 + 4 * i], 5) for i in range(5)]
        serving.executor.run_until_idle()
        for i, request in enumerate(requests):
            serving.expect_match(request, (cap_of(12 + 4 * i), False))


@scenario(is_essential=True)
def finish_while_saving(rank: int, kind: Kind) -> None:
    with serve(rank, kind) as serving:
        serving.gate.hold(Direction.OFFLOAD)
        requests = [serving.submit(range(100 * i, 100 * i + 20), 4) for i in range(3)]
        serving.step_until(lambda: all(request in serving.executor.outputs for request in requests))
        for _ in range(4):
            serving.executor.step()
        assert serving.executor.blocks_in_use > 0, (
            "the blocks of finished requests must be kept while they are read"
        )
        serving.executor.cancel(requests[0])  # over already: ignored
        serving.executor.step()
        serving.gate.release(Direction.OFFLOAD)
        serving.wake_until_nothing_is_open()
        assert serving.executor.blocks_in_use == 0
        serving.forget_device()
        serving.expect_match(serving.ask(range(20)), (16, True))


# ---------------------------------------------------------------- cancels


@scenario(is_essential=True)
def cancel_when_queued(rank: int, kind: Kind) -> None:
    with serve(rank, kind, max_batch_size=1) as serving:
        first, second = serving.submit(PROMPT, 6), serving.submit(PROMPT, 6)
        serving.executor.step()
        serving.executor.cancel(second)
        serving.executor.run_until_idle()
        assert (serving.reason(first), serving.reason(second)) == ("length", "cancelled")
        serving.expect_match(second)


@scenario(is_essential=True)
def cancel_when_decoding(rank: int, kind: Kind) -> None:
    with serve(rank, kind, num_blocks=40, env=EACH_BLOCK) as serving:
        serving.gate.hold(Direction.OFFLOAD)
        request = serving.submit(range(10), 60)
        for _ in range(30):
            serving.executor.step()
        serving.executor.cancel(request)
        serving.executor.step()
        # 1.1 says that it has ended, and keeps its blocks until the copies are over.
        assert (serving.executor.blocks_in_use > 0) == (kind.version == EARLY)
        # Its blocks are somebody else's at once, while copies of them wait.
        serving.executor.drop_device_cache()
        others = [serving.submit(range(1000 * i, 1000 * i + 40), 20) for i in (1, 2)]
        for _ in range(5):
            serving.executor.step()
        serving.gate.release(Direction.OFFLOAD)
        serving.executor.run_until_idle()
        assert {serving.reason(other) for other in others} == {"length"}
        serving.may_fail = True  # what was cancelled in its copy is counted as dropped
        for prompt in (range(10), range(1000, 1040), range(2000, 2040)):
            serving.forget_device()
            serving.ask(prompt, 40)


@scenario(is_essential=True)
def cancel_when_loading(rank: int, kind: Kind) -> None:
    for is_cancellable in (True, False):
        with serve(rank, kind, num_blocks=24) as serving:
            serving.may_fail = True
            serving.gate.is_cancellable = is_cancellable
            serving.ask(PROMPT)
            serving.forget_device()
            serving.gate.hold(Direction.ONBOARD)
            request = serving.submit(PROMPT)
            serving.executor.step()
            serving.executor.cancel(request)
            serving.executor.step()
            assert serving.reason(request) == "cancelled"
            other = serving.submit(range(500, 560), 20)  # needs the blocks that are still being written
            for _ in range(4):
                serving.executor.step()
            serving.gate.release(Direction.ONBOARD)
            serving.executor.run_until_idle()
            assert serving.reason(other) == "length"
            serving.forget_device()
            serving.ask(PROMPT)


@scenario()
def cancel_in_the_iteration_of_the_query(rank: int, kind: Kind) -> None:
    with serve(rank, kind) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        request = serving.submit(PROMPT)
        other = serving.submit(PROMPT)
        serving.executor.cancel(request)
        serving.executor.run_until_idle()
        assert (serving.reason(request), serving.reason(other)) == ("cancelled", "length")


@scenario()
def prefix_of_a_cancelled_load(rank: int, kind: Kind) -> None:
    for is_cancellable in (True, False):
        with serve(rank, kind, executor_class=KeepingExecutor) as serving:
            serving.may_fail = True
            serving.gate.is_cancellable = is_cancellable
            serving.ask(PROMPT)
            serving.forget_device()
            serving.gate.hold(Direction.ONBOARD)
            first = serving.submit(PROMPT)
            serving.executor.step()
            serving.executor.cancel(first)
            serving.executor.step()
            again = serving.submit(
                PROMPT
            )  # on V1 of the released line its device blocks can be found already
            for _ in range(3):
                serving.executor.step()
            serving.gate.release(Direction.ONBOARD)
            serving.executor.run_until_idle()
            assert serving.reason(again) == "length"


@scenario(lambda kind: not is_newest(kind), is_essential=True)
def prefix_of_a_cancelled_load_that_fails(rank: int, kind: Kind) -> None:
    with serve(rank, kind, executor_class=KeepingExecutor) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        serving.gate.hold(Direction.ONBOARD)
        first = serving.submit(PROMPT)
        serving.executor.step()
        serving.executor.cancel(first)
        serving.executor.step()
        serving.fails_here(Direction.ONBOARD)
        again = serving.ask(PROMPT)  # the load is waited for, and fails
        assert serving.device_hit(again) == CAP
        assert serving.reason(again) == "error"


# ---------------------------------------------------------------- errors


@scenario(is_essential=True)
def a_forward_pass_fails(rank: int, kind: Kind) -> None:
    with serve(rank, kind) as serving:
        serving.may_fail = True
        serving.ask(PROMPT)
        serving.forget_device()
        serving.gate.hold(Direction.ONBOARD)
        parked = serving.submit(PROMPT)
        running = [serving.submit(range(100 * i, 100 * i + 30), 20) for i in (1, 2)]
        for _ in range(5):
            serving.executor.step()
        serving.executor.fail_next_forward()
        serving.executor.step()
        assert {serving.reason(request) for request in (parked, *running)} == {"error"}
        serving.gate.release(Direction.ONBOARD)
        serving.executor.run_until_idle()
        for prompt in (PROMPT, range(100, 130)):
            serving.forget_device()
            assert serving.reason(serving.ask(prompt, 20)) == "length"


@scenario(is_essential=True)
def a_first_forward_pass_fails(rank: int, kind: Kind) -> None:
    with serve(rank, kind) as serving:
        serving.may_fail = True
        serving.executor.fail_next_forward()
        assert serving.reason(serving.ask(PROMPT)) == "error"
        serving.settle()
        # What was to be stored of it has not been computed for certain.
        again = serving.ask(PROMPT)
        serving.expect_match(again, (0, False))
        assert serving.reason(again) == "length"
        serving.forget_device()
        serving.expect_match(serving.ask(PROMPT), (CAP, True))


@scenario(is_essential=True)
def a_load_fails(rank: int, kind: Kind) -> None:
    for outcome in (Outcome.IO_ERROR, Outcome.TIMED_OUT):
        with serve(rank, kind, executor_class=KeepingExecutor) as serving:
            serving.ask(PROMPT)
            serving.forget_device()
            serving.fails_here(Direction.ONBOARD, outcome)
            failed = serving.ask(PROMPT)
            assert serving.reason(failed) == "error" and serving.output(failed) == []
            assert serving.metric(f'kvbm_failures_total{{kind="onboard_{outcome.value}"}}') == 1
            assert "promised to request" in str(serving.executor.errors[-1])
            # The device still has blocks under that name, and nobody may read them.
            again = serving.ask(PROMPT)
            assert serving.device_hit(again) == CAP
            assert serving.reason(again) == "error"
            serving.ask(range(700, 720))  # others are served
            serving.forget_device()
            last = serving.ask(PROMPT)
            serving.expect_match(last, (0, False))
            assert serving.reason(last) == "length"
            serving.forget_device()
            serving.expect_match(serving.ask(PROMPT), (CAP, True))


@scenario(is_essential=True)
def a_waited_for_load_fails(rank: int, kind: Kind) -> None:
    with serve(rank, kind, env=ALL_SYNC) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        serving.fails_here(Direction.ONBOARD)
        assert serving.reason(serving.ask(PROMPT)) == "error"
        serving.executor.drop_device_cache()
        assert serving.reason(serving.ask(PROMPT)) == "length"


@scenario(is_essential=True)
def an_offload_fails(rank: int, kind: Kind) -> None:
    with serve(rank, kind) as serving:
        serving.fails_here(Direction.OFFLOAD, times=100)
        serving.ask(PROMPT)
        serving.forget_device()
        assert serving.metric("kvbm_offload_blocks_d2h") == 0
        serving.expect_match(serving.ask(PROMPT), (0, False))


@scenario(is_newest, is_essential=True)
def a_batch_is_dropped(rank: int, kind: Kind) -> None:
    with serve(rank, kind) as serving:
        serving.executor.drop_next_batch()
        first = serving.submit(PROMPT)
        serving.executor.run_until_idle()
        assert serving.reason(first) == "length"
        serving.may_fail = True  # what was to be stored in that batch
        serving.forget_device()
        again = serving.submit(PROMPT)
        serving.executor.drop_next_batch()
        serving.executor.run_until_idle()
        assert serving.reason(again) == "length"
        serving.ask(PROMPT)
        serving.forget_device()
        serving.executor.drop_next_batch()
        assert serving.reason(serving.ask(PROMPT)) == "length"


@scenario(is_newest, is_essential=True)
def a_batch_of_a_failed_load_is_dropped(rank: int, kind: Kind) -> None:
    with serve(rank, kind) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        serving.gate.hold(Direction.ONBOARD)
        request = serving.submit(PROMPT)
        serving.executor.step()
        serving.fails_here(Direction.ONBOARD)
        serving.gate.release(Direction.ONBOARD)
        serving.step_until(lambda: serving.executor.manager.has_transfers is False)  # type: ignore[union-attr]
        serving.executor.drop_next_batch()
        serving.executor.run_until_idle()
        assert serving.reason(request) == "error"


@scenario(is_newest)
def a_batch_of_a_waited_for_load_that_fails_is_dropped(rank: int, kind: Kind) -> None:
    for times in (1, 2):  # the second time, nothing but the leader knows that it has failed
        with serve(rank, kind, env=ALL_SYNC) as serving:
            serving.ask(PROMPT)
            serving.forget_device()
            serving.fails_here(Direction.ONBOARD)
            request = serving.submit(PROMPT)
            for _ in range(times):
                serving.executor.drop_next_batch()
                serving.executor.step()
            serving.executor.run_until_idle()
            assert serving.reason(request) == "error"
            assert serving.reason(serving.ask(range(900, 920))) == "length"


@scenario(is_essential=True)
def idle_iterations(rank: int, kind: Kind) -> None:
    with serve(rank, kind) as serving:
        for _ in range(20):
            assert not serving.executor.step()
        serving.ask(PROMPT)
        serving.settle()
        for _ in range(20):
            assert not serving.executor.step()
        assert serving.metric("kvbm_offload_blocks_d2h") == 47 // BLOCK


@scenario(lambda kind: kind.is_v2)
def a_generation_only_request_takes_blocks_that_are_read(rank: int, kind: Kind) -> None:
    # Its first blocks are filled before the connector is told of them.
    with serve(rank, kind, num_blocks=24, spoils_late=False) as serving:
        serving.may_fail = True
        serving.gate.hold(Direction.OFFLOAD)
        request = serving.submit(PROMPT, 20)
        for _ in range(4):
            serving.executor.step()
        serving.executor.cancel(request)
        serving.executor.step()
        serving.executor.drop_device_cache()
        other = serving.submit(range(500, 540), 30, generation_only=True)
        for _ in range(25):
            serving.executor.step()
        serving.gate.release(Direction.OFFLOAD)
        serving.executor.run_until_idle()
        assert serving.reason(other) == "length"
        serving.forget_device()
        serving.ask(PROMPT, 20)


# ---------------------------------------------------------------- what TensorRT-LLM does not say


@scenario(is_essential=True)
def cancel_in_the_prompt(rank: int, kind: Kind) -> None:
    """1.1 says of a cancelled request, too, that it has finished: what was never computed is not stored."""
    with serve(rank, kind, chunk_tokens=8, num_blocks=40) as serving:
        serving.may_fail = True
        request = serving.submit(range(60), 8)
        for _ in range(3):
            serving.executor.step()
        serving.executor.cancel(request)
        serving.executor.run_until_idle()
        assert serving.reason(request) == "cancelled"
        serving.forget_device()
        again = serving.ask(range(60), 8)
        matched = serving.from_leader(
            lambda: serving.executor.calls.named("get_num_new_matched_tokens")[-1].result[0]
        )
        assert matched <= 4 * 8, "more is offered than was computed"
        assert serving.reason(again) == "length"


@scenario(lambda kind: kind.version != EARLY, is_essential=True)
def graph_padding_takes_a_block_that_is_read(rank: int, kind: Kind) -> None:
    options = {"num_blocks": 80, "chunk_tokens": 8, "cuda_graphs": True, "graph_padding": True}
    with serve(rank, kind, **options) as serving:
        serving.may_fail = True  # what is overwritten is not stored
        serving.executor.memory.poison = lambda group, slots: None  # type: ignore[method-assign]
        others = [serving.submit(range(100 * i, 100 * i + 5), 40) for i in (1, 2, 3, 4)]
        for _ in range(6):
            serving.executor.step()
        serving.gate.hold(Direction.OFFLOAD)
        request = serving.submit(PROMPT, 20)
        for _ in range(4):
            serving.executor.step()
        serving.executor.drop_device_cache()  # so that its blocks are handed out at once
        assert not serving.executor.padding.slots[0]
        serving.executor.cancel(others.pop())
        serving.executor.cancel(request)
        for _ in range(3):  # then three requests decode: a fourth is made up
            serving.executor.step()
        assert serving.executor.padding.slots[0], "nothing was filled up"
        serving.gate.release(Direction.OFFLOAD)
        serving.executor.run_until_idle()
        assert {serving.reason(other) for other in others} == {"length"}
        serving.forget_device()
        assert serving.reason(serving.ask(PROMPT, 20)) == "length"


@scenario(is_essential=True)
def an_image_without_hashes(rank: int, kind: Kind) -> None:
    with serve(rank, kind) as serving:
        for image in (1, 2, 1):
            request = serving.ask(PROMPT, image=image)
            serving.expect_match(request, (0, False))
            serving.forget_device()
        assert serving.from_leader(lambda: serving.leader.chain.host.resident_blocks) == 0
        assert serving.metric('kvbm_uncached_requests_total{reason="multimodal"}') == 3


@scenario(is_v1)
def a_text_of_the_same_tokens_as_an_image(rank: int, kind: Kind) -> None:
    """The V1 manager's query does not show the image: the promise is found out when blocks are allocated."""
    with serve(rank, kind) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        with_image = serving.ask(PROMPT, image=1)
        serving.expect_match(with_image, (CAP, True))
        assert serving.reason(with_image) == "error"
        serving.may_fail = True


@scenario(is_essential=True)
def the_last_turn_while_the_loop_sleeps(rank: int, kind: Kind) -> None:
    """No request and no iteration comes after the last one: its blocks are stored all the same."""
    with serve(rank, kind) as serving:
        serving.gate.hold(Direction.OFFLOAD)
        first = serving.ask(PROMPT, 9)
        num_steps = serving.executor.num_steps
        serving.gate.release(Direction.OFFLOAD)
        serving.settle()
        assert serving.executor.num_steps == num_steps, "an iteration ran without a request"
        assert serving.from_leader(lambda: serving.leader.chain.host.resident_blocks) == 48 // BLOCK
        serving.executor.drop_device_cache()
        whole = [*PROMPT, *serving.output(first)]
        serving.expect_match(serving.ask(whole, 4), (48, True))


@scenario(is_v1, is_essential=True)
def blocks_of_another_size_than_was_said(rank: int, kind: Kind) -> None:
    """FlashMLA: 8 tokens in a block, 4 in llm_args. Short prompts cannot show it: nothing is stored yet."""
    with serve(rank, kind, tokens_per_block=2 * BLOCK, told_tokens_per_block=BLOCK) as serving:
        serving.may_fail = True  # counted, and said
        short, whole = (range(4), 3), (PROMPT, 1)
        for asked, is_found_out in ((short, False), (short, False), (whole, True), (whole, True)):
            serving.expect_match(serving.ask(*asked), (0, False))
            serving.forget_device()
            reason = serving.from_leader(lambda: serving.leader.disabled_reason)
            assert (reason is not None) == is_found_out
            assert serving.from_leader(lambda: serving.leader.chain.host.resident_blocks) == 0
        assert "set kv_cache_config.tokens_per_block=8" in reason
        assert serving.metric('kvbm_failures_total{kind="layout"}') == 1


@scenario(is_v1)
def blocks_of_another_size_are_found_out_while_decoding(rank: int, kind: Kind) -> None:
    for real, told in ((8, 4), (4, 8)):
        with serve(rank, kind, tokens_per_block=real, told_tokens_per_block=told) as serving:
            serving.may_fail = True
            serving.ask(range(2), 30)
            assert serving.from_leader(lambda: serving.leader.disabled_reason) is not None
            assert serving.from_leader(lambda: serving.leader.chain.host.resident_blocks) == 0


def _expect_refusal(serving: Serving, words: str) -> None:
    serving.may_fail = True
    serving.may_begin.set()
    serving.step_until(
        lambda: serving.from_leader(lambda: serving.leader.is_ready or serving.leader.disabled_reason)
    )
    assert words in serving.from_leader(lambda: serving.leader.disabled_reason or "it is in service")
    for _ in range(2):
        serving.expect_match(serving.ask(PROMPT), (0, False))
        serving.forget_device()


@scenario(is_v1, is_essential=True)
def sparse_attention_with_keys_elsewhere(rank: int, kind: Kind) -> None:
    sparse = SimpleNamespace(algorithm="dsa")
    with serve(rank, kind, kv_factor=1, sparse_attention=sparse, is_ready=False) as serving:
        _expect_refusal(serving, "sparse_attention_config.algorithm=dsa")


@scenario(is_v1)
def packed_numbers_without_their_scales(rank: int, kind: Kind) -> None:
    for dtype in ("int8", "uint8"):
        with serve(rank, kind, dtype=dtype, head_dim=8, is_ready=False) as serving:
            _expect_refusal(serving, f"a KV pool of {dtype}")
