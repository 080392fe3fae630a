"""Disk, bucket, audit and, at night, two ranks on real vLLM, with two or three engines for all of them.

The first has one rank, a disk and a bucket, and is killed. The second has two ranks and the same bucket. The
third has what the first had. Each finds what those before it have computed, byte for byte; in float32, so
that an answer behind a hit is the one that was computed (test_main_job.py compares with vLLM without kvbm).

Disk and bucket have the filters that they have by default: what was used again goes there. Of prompts that
come in turns, and that leave device and host in between, that is what is computed a second time; of users
with one system prompt, what the device had of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.e2e.engine_child import (
    Engine,
    answers,
    assert_bytes_equal,
    assert_nothing_left,
    cached,
    run_engine,
)
from tests.e2e.test_audit import EQUAL, NUM_PROMPTS, PROMPT_BLOCKS, WRONG, conversations
from tests.engines.object_servers import SECRET_KEY
from tests.engines.shared_stores import bucket

BLOCK = 32
TOKENS = 1200
BLOCKS = TOKENS // BLOCK
HIT_TOKENS = TOKENS - BLOCK
IN_HOST = 3
DEVICE_FOR_TWO = 2 * (BLOCKS + 2) + 1
USERS = 8
SYSTEM_TOKENS, USER_TOKENS = 20 * BLOCK, 10 * BLOCK
"""The device has the system prompt, and not what all users have behind it; the host has all of that."""
Prompts = list[list[int]]

pytestmark = pytest.mark.timeout(900)
in_full = pytest.mark.nightly("two ranks that wait spin: beside others on two cores they take minutes")


class Life(NamedTuple):
    """What engines of this module have in common: ``settings`` of all of them, and ``disk`` of those that
    have one.
    """

    model: Path
    folder: Path
    settings: dict[str, str]
    disk: dict[str, str]
    of_one: Prompts
    """What the first engine computes: more than its host tier has room for."""
    of_two: Prompts
    """What the engine of two ranks computes."""
    of_users: Prompts
    """That begin with one system prompt, and are asked of the first engine before all others."""

    def job(self, *rounds: Prompts, **more: Any) -> dict[str, Any]:
        """Each of the rounds, prompt by prompt."""
        llm = {"block_size": BLOCK, "max_model_len": 2048, "dtype": "float32"}
        llm |= {"num_gpu_blocks_override": DEVICE_FOR_TWO, **more.pop("llm", {})}
        job = {"model": str(self.model), "llm": llm, "connector": True}
        return {**job, "rounds": rounds_of(*rounds), **more}


def rounds_of(*rounds: Prompts) -> list[dict[str, Any]]:
    """Eight tokens are answered to each."""
    return [{"prompts": prompts, "max_tokens": 8} for prompts in rounds]


@pytest.fixture(scope="module")
def life(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, seed: int) -> Iterator[Life]:
    folder, draw = tmp_path_factory.mktemp("tiers"), random.Random(seed)
    prompts = [[draw.randrange(3, 500) for _ in range(TOKENS)] for _ in range(IN_HOST + 3)]
    system = [draw.randrange(3, 500) for _ in range(SYSTEM_TOKENS)]
    of_users = [system + [draw.randrange(3, 500) for _ in range(USER_TOKENS + 1)] for _ in range(USERS)]
    disk = {
        "DYN_KVBM_DISK_CACHE_GB": "1.5",
        "DYN_KVBM_DISK_CACHE_DIR": str(folder / "cache"),
        "KVBM_TEST_DISK_LEDGER": str(folder / "ledger"),
    }
    settings = {
        "DYN_KVBM_CPU_CACHE_OVERRIDE_NUM_BLOCKS": str(IN_HOST * BLOCKS),
        "KVBM_REMOTE_LOAD": "always",  # models this small are computed sooner
        "KVBM_REMOTE_WAIT_S": "200",  # guards alone: two ranks that wait spin, and this machine may be busy
        "KVBM_REMOTE_DEADLINE_S": "200",
        "KVBM_DISK_DEADLINE_S": "200",
        "KVBM_REMOTE_HEAD_SHARDS": "2",
    }
    with bucket(folder) as store:
        yield Life(tiny_model, folder, {**settings, **store}, disk, prompts[:-1], prompts[-1:], of_users)


@pytest.fixture(scope="module")
def first(life: Life) -> dict[str, Any]:
    """The result of the engine that computes, is asked three times, and is killed."""
    job = life.job(*[life.of_users] * 3, *[life.of_one] * 3, dies=True)
    return run_engine(life.folder / "first", job, **life.settings, **life.disk)


@pytest.fixture(scope="module")
def two_ranks(life: Life, first: dict[str, Any]) -> dict[str, Any]:
    """The result of the engine that finds two of the first one's prompts, and computes and finds its own."""
    some, own = life.of_one[:2], life.of_two
    job = life.job(some, own, some, own, llm={"tensor_parallel_size": 2})
    return run_engine(life.folder / "two-ranks", job, **life.settings)


@pytest.fixture(scope="module")
def third(life: Life, first: dict[str, Any]) -> Iterator[Engine]:
    """The engine that starts where the first one was."""
    engine = Engine(life.folder / "third", life.job(), **life.settings, **life.disk)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def restarted(life: Life, third: Engine) -> dict[str, Any]:
    """What it finds before it has forgotten anything."""
    return third.serve(rounds_of(life.of_users, life.of_one), forgets=False)


def test_what_the_host_has_no_room_for_comes_back_from_the_disk(life: Life, first: dict[str, Any]) -> None:
    """The first engine's last three rounds."""
    prompts = len(life.of_one)
    assert max(cached(first, 3)) == 0 and min(cached(first, 5)) >= HIT_TOKENS
    assert answers(first, 5) == answers(first, 4) == answers(first, 3)
    assert_bytes_equal(first, ranks=1, at_least=prompts * (BLOCKS - 1))
    # LRU has never the one that is wanted of those that come in turns.
    assert first["metrics"]["kvbm_onboard_blocks_d2d"] >= (prompts - IN_HOST) * (BLOCKS - 1)
    stored = first["bytes"][0]["stored"]
    failed = {name: count for name, count in first["metrics"].items() if "fail" in name and count}
    assert stored == first["metrics"]["kvbm_offload_blocks_h2d"] >= prompts * BLOCKS, failed
    assert_nothing_left(first)


def test_after_sigkill_the_next_engine_finds_it_on_the_disk(
    life: Life, first: dict[str, Any], restarted: dict[str, Any]
) -> None:
    """The first engine's disk, and the third one's first requests: users' first, of which the first engine
    never loaded what they have in common.
    """
    at_least = len(life.of_one) * (BLOCKS - 1)
    assert answers(first, 0) == answers(first, 1) == answers(first, 2)
    assert min(cached(first, 2)) >= SYSTEM_TOKENS + USER_TOKENS
    assert min(cached(restarted, 0)) >= SYSTEM_TOKENS + USER_TOKENS, "not even the first request hit the disk"
    assert min(cached(restarted, 1)) >= HIT_TOKENS
    assert answers(restarted, 0) == answers(first, 0) and answers(restarted, 1) == answers(first, 3)
    assert_bytes_equal(restarted, ranks=1, at_least=at_least)
    assert restarted["metrics"]["kvbm_onboard_blocks_d2d"] >= at_least
    assert restarted["metrics"]["kvbm_onboard_blocks_o2d"] == 0
    assert_nothing_left(restarted)


@in_full
def test_an_engine_of_another_tensor_parallel_size_finds_it_in_the_bucket(
    life: Life, first: dict[str, Any], two_ranks: dict[str, Any]
) -> None:
    """What another size has computed differs by the order of additions alone. The engine of two ranks
    computes, keeps and finds blocks of its own too.
    """
    assert first["metrics"]["kvbm_offload_blocks_d2o"] >= len(life.of_one) * BLOCKS
    assert min(cached(two_ranks, 0)) >= HIT_TOKENS and max(cached(two_ranks, 1)) == 0
    assert answers(two_ranks, 0) == answers(two_ranks, 2) == answers(first, 3)[:2]
    assert min(cached(two_ranks, 3)) >= HIT_TOKENS and answers(two_ranks, 3) == answers(two_ranks, 1)
    assert len(two_ranks["bytes"]) == 2
    for counts in two_ranks["bytes"]:  # what it has not seen, another engine had stored
        assert counts["onboarded"] - counts["unknown"] >= BLOCKS - 4 and counts["different"] == 0


def test_without_disk_and_host_the_bucket_has_what_another_engine_computed(
    life: Life, first: dict[str, Any], restarted: dict[str, Any], third: Engine
) -> None:
    """The third engine, when it has forgotten all that is its own: as a second one would."""
    found = third.serve(rounds_of(life.of_users))
    assert min(cached(found, 0)) >= SYSTEM_TOKENS + USER_TOKENS, "not even the first request hit the bucket"
    assert answers(found, 0) == answers(first, 0)
    blocks = (SYSTEM_TOKENS + USERS * USER_TOKENS) // BLOCK
    assert found["metrics"]["kvbm_onboard_blocks_o2d"] >= blocks
    found = third.serve(rounds_of(life.of_one))
    assert_found(found, first, life.of_one, answers(first, 3))


@in_full
def test_one_rank_finds_what_two_have_computed(
    life: Life, first: dict[str, Any], two_ranks: dict[str, Any], third: Engine
) -> None:
    """The third engine, likewise."""
    found = third.serve(rounds_of(life.of_two))
    assert_found(found, two_ranks, life.of_two, answers(two_ranks, 1))


def assert_found(found: dict[str, Any], by: dict[str, Any], prompts: Prompts, expected: list[Any]) -> None:
    """All of ``prompts`` came from the bucket, where the engine ``by`` had brought them."""
    assert min(cached(found, 0)) >= HIT_TOKENS and answers(found, 0) == expected
    (counts,) = found["bytes"]  # this engine has not seen what was stored: the store's own checks have
    at_least = len(prompts) * (BLOCKS - 1)
    assert counts["onboarded"] >= at_least and counts["different"] == 0
    assert found["metrics"]["kvbm_onboard_blocks_o2d"] >= at_least
    assert found["metrics"]["kvbm_object_read_failures"] == 0
    assert_nothing_left(found)
    logs = [by["log"], found["log"]]
    assert all("kvbm: object store: s3://" in log and SECRET_KEY not in log for log in logs)


def test_all_hits_are_what_is_computed_and_a_wrong_block_is_found(
    restarted: dict[str, Any], third: Engine, rng: random.Random
) -> None:
    """The third engine's last hours: it serves nothing from the cache any more."""
    rounds = [{"prompts": prompts, "max_tokens": 40, "audited": True} for prompts in conversations(rng)]
    rounds = [{**asked, "resets": True} for asked in rounds]
    rounds.append({**rounds[-1], "swaps": True})
    rounds.append({**rounds[0]})
    result = third.serve(rounds, audits=True)
    right, found, after = result["audited"][:3], result["audited"][3], result["audited"][4]
    assert [entry[WRONG] for entry in right] == [0, 0, 0]
    assert right[-1][EQUAL] >= 2 * NUM_PROMPTS * (PROMPT_BLOCKS - 1)
    assert found[WRONG] > 0
    assert "AUDIT: blocks in the cache are not what the engine computes" in result["log"]
    assert after == found, "nothing is served, so nothing is audited"
    for served in range(5):
        assert not any(cached(result, served)), "what is audited is computed"
    assert answers(result, 3) == answers(result, 2) and answers(result, 4) == answers(result, 0)
    assert result["metrics"]["kvbm_matched_tokens"] == 0
    assert_nothing_left(result)
