"""Two real vLLM servers at once over one bucket, and no disk that both have: what the first has computed is a
hit in the second, also after that was killed and has started anew, and after the first was killed while it
wrote.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.e2e.test_peers import BLOCK_TOKENS, PATIENCE_S, PROMPT_BLOCKS, Peers, prompts_of
from tests.engines import REPOSITORY
from tests.engines.shared_stores import bucket
from tests.engines.vllm_server import ONE_THREAD, ServerOptions, VllmServer

NUM_PROMPTS = 3
KILLS = 2
WAIT_S = 20.0
STORED, BROUGHT = "kvbm_offload_blocks_d2o", "kvbm_onboard_blocks_o2d"

pytestmark = [
    pytest.mark.nightly("two servers, four starts; test_remote.py has engines one after the other"),
    pytest.mark.timeout(1800),
]


@pytest.fixture
def both(tiny_model: Path, tmp_path: Path) -> Iterator[Peers]:
    """With one bucket, and tiers of their own."""
    settings = {
        "KVBM_REMOTE_LOAD": "always",  # models this small are computed sooner
        "KVBM_REMOTE_WAIT_S": f"{WAIT_S:.0f}",
        "KVBM_REMOTE_DEADLINE_S": "20",
        **ONE_THREAD,
    }
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor() as pool, bucket(tmp_path) as of_store:
        patch.setenv("PYTHONPATH", str(REPOSITORY), prepend=os.pathsep)
        options = ServerOptions(
            tiny_model, 8 * PROMPT_BLOCKS, 0.2, max_model_len_tokens=2048, env={**settings, **of_store}
        )
        servers = [VllmServer(options, tmp_path / f"{name}.log") for name in ("first", "second")]
        try:
            list(pool.map(VllmServer.start, servers))
            asking = Peers(*servers, 0)
            with asking.http:
                yield asking
        finally:
            list(pool.map(VllmServer.stop, servers))
    assert [server.processes() for server in servers] == [[], []]


def kill(server: VllmServer) -> None:
    """Nothing of its memory is left."""
    server.kill()
    server.stop()


def ask_twice(both: Peers, server: VllmServer, prompt: list[int]) -> list[int]:
    """What is used again goes to the bucket."""
    answer = both.ask(server, prompt)
    assert both.ask(server, prompt) == answer
    return answer


def compute(both: Peers, server: VllmServer, prompts: list[list[int]]) -> list[list[int]]:
    """Asks for what nobody has computed, twice, and waits until the bucket has it."""
    stored, brought = both.metric(server, STORED), both.metric(server, BROUGHT)
    answers = [ask_twice(both, server, prompt) for prompt in prompts]
    both.metric_once(server, STORED, stored + len(prompts) * PROMPT_BLOCKS)
    assert both.metric(server, BROUGHT) == brought
    return answers


def find(both: Peers, server: VllmServer, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Asks a server for what it has not computed: it comes from the bucket, with the same tokens."""
    brought, matched = both.metric(server, BROUGHT), both.metric(server, "kvbm_matched_tokens")
    for prompt, answer in zip(prompts, answers, strict=True):
        assert both.ask(server, prompt) == answer
    whole = len(prompts) * PROMPT_BLOCKS
    assert both.metric(server, BROUGHT) == brought + whole
    assert both.metric(server, "kvbm_matched_tokens") == matched + whole * BLOCK_TOKENS
    assert_no_failure(both, server)


def assert_no_failure(both: Peers, server: VllmServer) -> None:
    assert both.metric(server, "kvbm_object_read_failures") == 0
    assert both.metric(server, "kvbm_guarded_errors_total") == 0


def kill_while_it_writes(
    both: Peers, server: VllmServer, prompts: list[list[int]], rng: random.Random
) -> list[list[int] | None]:
    """What it has answered before; an answer does not wait for what is stored."""
    stored = both.metric(server, STORED)
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked: list[Future[list[int]]] = [pool.submit(ask_twice, both, server, prompt) for prompt in prompts]
        wait(asked, return_when=FIRST_COMPLETED)
        some, ends_at_s = (
            stored + rng.randrange(len(prompts) * PROMPT_BLOCKS // 2),
            time.monotonic() + PATIENCE_S,
        )
        while both.metric(server, STORED) < some and time.monotonic() < ends_at_s:
            if all(one.done() for one in asked):
                break  # it makes no step any more
        kill(server)
    return [None if one.exception() else one.result() for one in asked]


def test_what_one_server_has_computed_is_a_hit_in_another(both: Peers, rng: random.Random) -> None:
    first, second = both.first, both.second
    prompts, more = prompts_of(rng, NUM_PROMPTS), prompts_of(rng, NUM_PROMPTS)
    answers = compute(both, first, prompts)
    find(both, second, prompts, answers)
    of_second = compute(both, second, more)
    find(both, first, more, of_second)

    kill(second)
    second.start()
    find(both, second, [*prompts, *more], [*answers, *of_second])


def test_the_first_is_killed_while_it_writes_and_the_second_goes_on(
    both: Peers, rng: random.Random, tell: Callable[[str], None]
) -> None:
    first, second = both.first, both.second
    for turn in range(KILLS):
        if turn:
            first.start()
        prompts = prompts_of(rng, 2 * NUM_PROMPTS)
        answers = kill_while_it_writes(both, first, prompts, rng)
        before, stored = both.metric(second, BROUGHT), both.metric(second, STORED)
        started_s = time.monotonic()
        served = [both.ask(second, prompt) for prompt in prompts]
        took_s = time.monotonic() - started_s
        assert all(answer in (None, own) for answer, own in zip(answers, served, strict=True))
        assert_no_failure(both, second)
        brought = both.metric(second, BROUGHT) - before
        tell(
            f"killed after {len(answers) - answers.count(None)} of {len(answers)} answers; the second was "
            f"brought {brought:.0f} of {len(prompts) * PROMPT_BLOCKS} blocks and answered in {took_s:.1f} s"
        )
        assert brought
        assert [both.ask(second, prompt) for prompt in prompts] == served
        both.metric_once(
            second, STORED, stored + len(prompts) * PROMPT_BLOCKS - brought
        )  # the rest is its own
        both.forget(second)
        find(both, second, prompts, served)
