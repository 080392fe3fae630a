"""Scenarios of attention data parallelism: every rank with a leader and requests of its own.

Each is run on every rank; all ranks make the same calls of ``Serving`` and of ``Executor.step``, equally
often.
"""

from __future__ import annotations

import errno
import random
import socket
from typing import Any
from unittest.mock import patch
from urllib.request import urlopen

from kvbm_core.runtime import assembly
from kvbm_core.storage import memory_room
from kvbm_core.storage.memory_room import MemoryRoom
from kvbm_core.types import Direction
from tests.trtllm.double import comm
from tests.trtllm.harness import KeepingExecutor, Kind, Serving, serve
from tests.trtllm.scenarios import BLOCK, CAP, EACH_BLOCK, PROMPT, scenario_list

SCENARIOS, scenario = scenario_list()


def outputs_of(serving: Serving) -> list[Any]:
    """What the leader of this rank was given in each iteration."""
    return [call.values["output"] for call in serving.executor.calls.named("build_connector_meta")]


def steps(serving: Serving, count: int) -> None:
    """Iterations."""
    for _ in range(count):
        serving.executor.step()


# ---------------------------------------------------------------- ranks of their own


@scenario()
def different_loads(rank: int, kind: Kind) -> None:
    """Rank 0 has nothing to do, the others more and more."""
    with serve(rank, kind, num_blocks=200) as serving:
        for turn in range(2):
            prompts = [
                range(1000 * rank + 100 * i, 1000 * rank + 100 * i + 13 + 4 * rank) for i in range(3 * rank)
            ]
            requests = [serving.submit(prompt, 3 + 2 * i) for i, prompt in enumerate(prompts)]
            serving.executor.run_until_idle()
            matched = (12 + 4 * rank) if turn else 0
            for request in requests:
                assert serving.reason(request) == "length"
                serving.expect_match(request, (matched, turn > 0))
            serving.forget_device()
        outputs = outputs_of(serving)
        assert {output.attention_dp_rank for output in outputs} == {rank}
        scheduled = [
            data.request_id for output in outputs for data in output.new_requests + output.cached_requests
        ]
        assert all((number - 1) % kind.ranks == rank for number in scheduled)
        assert bool(scheduled) == (rank > 0)
        forwards = comm.mpi_allgather(serving.executor.calls.count("wait_for_save"))
        assert forwards[0] > 10 and len(set(forwards)) == 1, "an idle rank takes part in every forward pass"


@scenario()
def blocks_are_not_shared(rank: int, kind: Kind) -> None:
    with serve(rank, kind, host_blocks=20) as serving:
        for asking in range(kind.ranks):
            # Nobody finds what another rank has stored; its own it does.
            for is_again in (False, True):
                if rank == asking:
                    request = serving.submit(PROMPT)
                serving.executor.run_until_idle()
                if rank == asking:
                    serving.expect_match(request, (CAP if is_again else 0, is_again))
                serving.forget_device()
        tier = serving.leader.chain.host
        assert serving.look(lambda: (tier.capacity_blocks, tier.resident_blocks)) == (20, 47 // BLOCK)


@scenario()
def a_load_while_others_compute(rank: int, kind: Kind) -> None:
    """All but rank 0 decode; rank 0's only request is parked, and dummies run in its place."""
    with serve(rank, kind) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        serving.gate.hold(Direction.ONBOARD)
        request = serving.submit(PROMPT) if rank == 0 else serving.submit(range(500, 520), 12)
        steps(serving, 8)
        assert serving.executor.state_of(request) == ("loading" if rank == 0 else "generation")
        serving.gate.release(Direction.ONBOARD)
        serving.executor.run_until_idle()
        assert serving.reason(request) == "length"


@scenario()
def no_room_for_a_dummy(rank: int, kind: Kind) -> None:
    """The others wait for rank 0's load, within an iteration or over several."""
    for defers in (False, True):
        with serve(rank, kind, dummies_fit=False, defers_when_full=defers) as serving:
            serving.may_fail = defers  # what a batch that has not run was to store
            serving.ask(PROMPT)
            serving.forget_device()
            if rank == 0:
                request = serving.submit(PROMPT)
                second = serving.submit([*PROMPT[:21], *range(700, 720)])
            else:
                request, second = serving.submit(range(500, 520), 12), serving.submit(PROMPT[:30])
            serving.executor.run_until_idle()
            assert serving.reason(request) == serving.reason(second) == "length"
            serving.forget_device()
            serving.expect_match(serving.ask(PROMPT), (CAP, True))


# ---------------------------------------------------------------- ends


@scenario()
def cancelled_while_loading(rank: int, kind: Kind) -> None:
    """TensorRT-LLM waits for the load before it lets go; others go on meanwhile."""
    with serve(rank, kind) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        serving.gate.hold(Direction.ONBOARD)
        request = serving.submit(PROMPT)
        steps(serving, 2)
        if rank == 0:
            serving.executor.cancel(request)
        other = serving.submit(range(500, 520), 5)
        serving.step_until(lambda: other in serving.executor.outputs)
        assert serving.executor.state_of(request) == "loading"
        serving.gate.release(Direction.ONBOARD)
        serving.executor.run_until_idle()
        assert serving.reason(request) == ("cancelled" if rank == 0 else "length")
        serving.forget_device()
        serving.expect_match(serving.ask(PROMPT), (CAP, True))


@scenario()
def finished_while_saving(rank: int, kind: Kind) -> None:
    with serve(rank, kind) as serving:
        serving.ask(range(900, 910), 1)
        if rank == 0:
            serving.gate.hold(Direction.OFFLOAD)
        requests = [serving.submit(range(100 * i, 100 * i + 20), 4) for i in range(1, 3 - rank % 2)]
        longer = serving.submit(range(500, 520), 30)
        serving.step_until(lambda: all(request in serving.executor.outputs for request in requests))
        pending = [serving.executor.manager.has_pending(request) for request in requests]
        assert rank > 0 or all(pending), "the blocks of finished requests must be kept while they are read"
        serving.gate.release(Direction.OFFLOAD)
        serving.executor.run_until_idle()
        serving.wake_until_nothing_is_open()
        assert serving.reason(longer) == "length" and serving.executor.blocks_in_use == 0
        serving.forget_device()
        serving.expect_match(serving.ask(range(100, 120)), (16, True))


@scenario()
def finished_while_saving_and_then_idle(rank: int, kind: Kind) -> None:
    """With overlap, a dummy may already run when the end is told: what has not been read by then is not
    cached.
    """
    with serve(rank, kind) as serving:
        serving.may_fail = True
        if rank == 0:
            serving.gate.hold(Direction.OFFLOAD)
        request = serving.submit(range(100, 120), 4 + 20 * rank)
        serving.step_until(lambda: rank > 0 or request in serving.executor.outputs)
        steps(serving, 3)
        serving.gate.release(Direction.OFFLOAD)
        serving.executor.run_until_idle()
        serving.forget_device()
        assert serving.reason(serving.ask(range(100, 120))) == "length"


@scenario()
def a_dummy_takes_blocks_that_are_read(rank: int, kind: Kind) -> None:
    """Nobody says that a cancelled request's blocks are a dummy's now."""
    for is_cancellable in (True, False):
        with serve(rank, kind, num_blocks=30, env=EACH_BLOCK) as serving:
            serving.may_fail = True
            serving.gate.is_cancellable = is_cancellable
            serving.gate.hold(Direction.OFFLOAD)
            request = serving.submit(PROMPT, 40)
            steps(serving, 8)
            if rank == 0:
                serving.executor.cancel(request)
            steps(serving, 1)
            serving.executor.drop_device_cache()
            steps(serving, 5)
            serving.gate.release(Direction.OFFLOAD)
            serving.executor.run_until_idle()
            serving.forget_device()
            assert serving.reason(serving.ask(PROMPT, 40)) == "length"


@scenario()
def a_dummy_after_a_failed_forward_pass(rank: int, kind: Kind) -> None:
    """As before, with requests that have all failed; then only one rank has something to run."""
    with serve(rank, kind, num_blocks=30, executor_class=KeepingExecutor, env=EACH_BLOCK) as serving:
        serving.may_fail = True
        serving.gate.hold(Direction.OFFLOAD)
        request = serving.submit(PROMPT, 40)
        steps(serving, 8)
        serving.executor.fail_next_forward()
        steps(serving, 1)
        assert serving.reason(request) == "error"
        serving.executor.drop_device_cache()
        if rank > 0:
            serving.submit(range(500, 540), 6)
        steps(serving, 3)
        serving.gate.release(Direction.OFFLOAD)
        serving.executor.run_until_idle()
        serving.forget_device()
        assert serving.reason(serving.ask(PROMPT, 40)) == "length"


# ---------------------------------------------------------------- what a machine has once


def is_bound(port: int) -> bool:
    """Whether somebody listens there, without a knock: who knocks and has not the secret is counted."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            other.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def sees_its_own_metrics(rank: int, kind: Kind, port: int) -> None:
    """A job: every leader serves its numbers on a port of its own; workers meet it on a port of its own,
    too.
    """
    env = {
        "DYN_KVBM_METRICS": "true",
        "DYN_KVBM_METRICS_PORT": str(port),
        "KVBM_METRICS_HOST": "127.0.0.1",
        "DYN_KVBM_LEADER_ZMQ_ACK_PORT": str(port + 100),
    }
    with serve(rank, kind, env=env) as serving:
        for _ in range(rank):
            serving.submit(range(100 * rank, 100 * rank + 20))
        serving.executor.run_until_idle()
        serving.settle()
        with urlopen(f"http://127.0.0.1:{port + rank}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        series = serving.leader.metrics.snapshot()
        line = next(line for line in text.splitlines() if line.startswith("kvbm_offload_blocks_d2h"))
        assert float(line.split()[-1]) == series["kvbm_offload_blocks_d2h"] == (6 if rank else 0)
        assert is_bound(port + 100 + rank)


def has_its_own_memory(rank: int, kind: Kind) -> None:
    """A job: the size in GB is of each leader."""
    with serve(rank, kind, host_blocks=None, env={"DYN_KVBM_CPU_CACHE_GB": "0.0001"}) as serving:
        block_bytes = 2 * 2 * BLOCK * 8
        assert serving.look(lambda: serving.leader.chain.host.capacity_blocks) == 100_000 // block_bytes


def needs_memory_with_all_others(rank: int, kind: Kind, num_ranks_with_room: float) -> bool | None:
    """A job: whether the host tier is there on a machine with room for so many ranks' 10 MB."""
    room_bytes = int(num_ranks_with_room * 10**7)
    room = patch.object(assembly, "available_memory", lambda: MemoryRoom(room_bytes, room_bytes, "a test"))
    taken = patch.object(memory_room, "taken_by_siblings_bytes", lambda: 0)
    with (
        room,
        taken,
        serve(rank, kind, host_blocks=None, env={"DYN_KVBM_CPU_CACHE_GB": "0.01"}, is_ready=False) as serving,
    ):
        serving.may_begin.set()
        if serving.executor.leader is None:
            return None
        serving.may_fail = True  # for want of memory
        leader = serving.leader
        while not leader.chain.host.capacity_blocks and leader.disabled_reason is None:
            serving.side.poll()
        assert leader.disabled_reason is None or "of host memory but" in leader.disabled_reason
        return leader.disabled_reason is None


def _disk_blocks(serving: Serving) -> tuple[int, int]:
    """What this rank's leader says: (capacity, resident)."""
    tier = serving.disk.slots
    return serving.look(lambda: (tier.capacity_blocks, tier.resident_blocks))


def has_its_own_folder(rank: int, kind: Kind, directory: str) -> list[str]:
    """A job: both tiers in one directory, twice; the folders of both lives."""
    folders = []
    env = {
        "DYN_KVBM_DISK_CACHE_OVERRIDE_NUM_BLOCKS": "200",
        "DYN_KVBM_DISK_CACHE_DIR": f"{directory}/disk",
        "DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER": "true",
    }
    for life in range(2):
        with serve(rank, kind, host_blocks=30, env=env, model=f"{directory}/model") as serving:
            serving.may_fail = True  # blocks that find no room in so small a host
            serving.step_until(lambda: _disk_blocks(serving)[0] == 200)
            folders.append(str(serving.executor.leader.part._process._lower._folder.path))
            stored = _disk_blocks(serving)[1]
            assert (stored > 0) == (life > 0), "what an earlier life has left is found again"
            prompts = [range(s, s + 60) for s in range(1000 * rank, 1000 * rank + 800, 100)]
            for prompt in prompts:
                serving.ask(prompt, 2)
                serving.forget_device()
            before = serving.metric("kvbm_onboard_blocks_d2d")
            serving.expect_match(serving.ask(prompts[0], 2), (56, True))
            assert serving.metric("kvbm_onboard_blocks_d2d") > before
    return folders


def a_load_fails_on_one_rank(rank: int, kind: Kind) -> None:
    """A job, which does not come to an end: rank 0 alone leaves its forward pass, others decode."""
    with serve(rank, kind) as serving:
        serving.ask(PROMPT)
        serving.forget_device()
        if rank == 0:
            serving.fails_here(Direction.ONBOARD)
        serving.submit(PROMPT if rank == 0 else range(500, 520), 30)
        serving.executor.run_until_idle()


def random_life(rank: int, kind: Kind, seed: int, num_steps: int) -> None:
    """A job: requests come, hit, are cancelled and end at random on each rank, with few blocks and slow
    copies.
    """
    rng = random.Random(seed * 8 + rank)
    env = EACH_BLOCK if rng.random() < 0.5 else {}
    with serve(rank, kind, num_blocks=40, defers_when_full=True, env=env) as serving:
        serving.may_fail = True  # blocks are left out where others need theirs
        alive: list[int] = []
        for _ in range(num_steps):
            if rng.random() < 0.25 and len(alive) < 4:
                start = 100 * rng.randrange(4)
                alive.append(serving.submit(range(start, start + rng.randint(5, 45)), rng.choice([1, 3, 30])))
            if alive and rng.random() < 0.05:
                serving.executor.cancel(alive[rng.randrange(len(alive))])
            direction = rng.choice([Direction.ONBOARD, Direction.OFFLOAD])
            if rng.random() < 0.1:
                serving.gate.is_cancellable = rng.random() < 0.5
                serving.gate.hold(direction)
            elif rng.random() < 0.3:
                serving.gate.release(direction)
            if rng.random() < 0.05:
                serving.executor.drop_device_cache()
            serving.executor.step()
            alive = [request for request in alive if request not in serving.executor.outputs]
        for direction in Direction:
            serving.gate.release(direction)
