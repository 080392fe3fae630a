"""Scenarios of requests that meet, and of ends that nobody announces: cancels, errors, failed copies,
replays.
"""

from __future__ import annotations

from kvbm_core.errors import Outcome
from kvbm_core.types import Direction
from tests.trtllm.harness import KeepingExecutor, Kind, serve
from tests.trtllm.scenarios import ALL_SYNC, BLOCK, CAP, EACH_BLOCK, PROMPT, cap_of, is_newest, scenario_list

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
        serving.executor.run_until_idle()
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
        assert serving.executor.blocks_in_use == 0
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
    with serve(rank, kind, env=ALL_SYNC) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        serving.fails_here(Direction.ONBOARD)
        serving.executor.drop_next_batch()
        assert serving.reason(serving.ask(PROMPT)) == "error"
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


@scenario()
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
