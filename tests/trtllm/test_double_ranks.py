"""The double with two rank processes in lock step (S10)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.effort import tries
from tests.trtllm.double import NEWEST, RELEASED, DoubleFailure, World
from tests.trtllm.mocks import Script, make_executor
from tests.trtllm.test_double import polls_of
from tests.trtllm.test_double_soak import live


@pytest.fixture(scope="module", params=[RELEASED, NEWEST])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Two ranks of each contract in turn; a rank takes seconds to start."""
    with World(request.param, 2) as world:
        yield world


def two_ranks(rank: int, name: str, slow_rank: int) -> dict[str, Any]:
    """An async load and an async save where one rank needs three polls more."""
    script = Script(matches={1: (8, True)}, saves=True, polls_until_done=3, slow_rank=slow_rank)
    executor = make_executor(script, manager=name)
    executor.submit(range(12), 4)
    executor.run_until_idle()
    return {
        "outputs": executor.outputs,
        "leads": executor.leader is not None,
        "polls": polls_of(executor),
        "metas": executor.calls.count("build_connector_meta"),
        "binds": executor.calls.count("bind_connector_meta"),
        "in_use": executor.blocks_in_use,
        "bytes": executor.memory.view(0, 0)[:3].tobytes(),
    }


def latent_bytes(rank: int) -> bytes:
    """The memory after a request on a model with MLA."""
    executor = make_executor(kv_factor=1)
    executor.submit(range(12), 4)
    executor.run_until_idle()
    return executor.memory.view(0, 0)[:3].tobytes()


def collectives(rank: int) -> list[Any]:
    """What a connector may say to the other ranks."""
    from tensorrt_llm import mpi_rank, mpi_world_size
    from tensorrt_llm._utils import mpi_allgather, mpi_broadcast

    assert mpi_rank() == rank
    return [
        mpi_world_size(),
        mpi_allgather(rank * 10),
        mpi_broadcast(f"from {rank}"),
        mpi_broadcast(rank, root=1),
    ]


def brings_nothing(rank: int) -> None:
    """The worker of one rank only brings nothing."""
    executor = make_executor(Script(matches={1: (8, False)}, loads_nothing=rank == 1))
    executor.submit(range(12), 4)
    executor.run_until_idle()


def leader_raises(rank: int) -> None:
    """Rank 0 fails while rank 1 waits for its broadcast."""
    executor = make_executor(Script(raises="request_finished"))
    executor.submit(range(12), 4)
    executor.run_until_idle()


def ranks_disagree(rank: int) -> None:
    """One rank's hook raises, so only that rank drops its requests."""
    executor = make_executor(Script(raises="save_kv_layer" if rank else ""))
    executor.submit(range(12), 4)
    executor.run_until_idle()


def rank_of(rank: int) -> int:
    """Its own number."""
    return rank


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_transfers_end_when_every_rank_says_so(world: World, slow_rank: int) -> None:
    for name in ("v1", "v2") if world.version == NEWEST else ("v1",):
        one, two = world.run(two_ranks, name, slow_rank)
        assert one["outputs"] == two["outputs"] and one["polls"] == two["polls"]
        assert (one["leads"], two["leads"]) == (True, False)
        assert (one["metas"], two["metas"], one["binds"], two["binds"]) == (5, 0, 5, 5)
        assert one["polls"] == [([], [1])] + [([], [])] * 6 + [([1], [])] + [([], [])] * 3
        assert one["in_use"] == two["in_use"] == 0
        assert one["bytes"] != two["bytes"], "each rank has heads of its own"


def test_latents_are_the_same_on_all_ranks(world: World) -> None:
    one, two = world.run(latent_bytes)
    assert one == two


def test_collectives(world: World) -> None:
    expected = [2, [0, 10], "from 0", 1]
    assert world.run(collectives) == [expected, expected]


def test_random_lives_of_two_ranks(world: World, rng: random.Random) -> None:
    for _ in range(tries(2, nightly=20)):
        one, two = world.run(live, rng.randrange(2**32))
        assert one == two


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (brings_nothing, "rank 1 failed(.|\n)*never written KV: request 1, block 0"),
        (leader_raises, "rank 0 failed(.|\n)*request_finished raised"),
        (ranks_disagree, "same batch|is at allgather while another rank is at the end of its job"),
    ],
)
def test_a_failure_of_one_rank_is_raised_and_the_world_goes_on(job: Any, message: str) -> None:
    with World(RELEASED, 2) as world:
        with pytest.raises(DoubleFailure, match=message):
            world.run(job)
        if job is brings_nothing:
            assert [answer["in_use"] for answer in world.run(two_ranks, "v1", 1)] == [0, 0]


def test_ranks_are_replaced_where_a_job_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a test's time limit does it: no answer of the job that was left is taken for the next one's."""

    def interrupt(pipes: list[Any]) -> Any:
        raise KeyboardInterrupt

    with World(RELEASED, 2) as world:
        with monkeypatch.context() as patch:
            patch.setattr("tests.trtllm.double.world.wait", interrupt)
            with pytest.raises(KeyboardInterrupt):
                world.run(latent_bytes)
        assert world.run(rank_of) == [0, 1]
