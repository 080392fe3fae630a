"""What a second engine, and an engine after a restart, find of prompts that users share, with the filters
that there are by default.

What the device serves counts as used, and nothing lies behind a head that is not there.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.storage.remote.names import plain_name
from kvbm_core.testing import memory_engine
from kvbm_core.types import BlockKey, group_of
from tests.vllm.kvbm_engine import KvbmEngine

HEAD = list(range(100, 148))
OWN_TOKENS = 40
USERS = 6
HIT_TOKENS = 84  # of 88: one is left to compute, and blocks have 4
DEVICE_BLOCKS = 60
"""Room for the head, and not for what all users have behind it."""
STORE = "memory://sharing?seed=1"
BUCKET: dict[str, Any] = {
    "host_blocks": 200,
    "store": STORE,
    "extra": {"remote_filter": "hit", "remote_load": "always"},  # hit: as of a bucket by default
}
DISK: dict[str, Any] = {
    "host_blocks": 200,
    "disk_blocks": 1000,
    "extra": {"disable_disk_offload_filter": False},
}


def prompts_of(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [HEAD + [draw.randrange(3, 90) for _ in range(OWN_TOKENS)] for _ in range(USERS)]


@pytest.fixture(autouse=True)
def an_empty_store() -> Iterator[None]:
    memory_engine.forget_all()
    yield
    memory_engine.forget_all()


@contextmanager
def engine_of(folder: Path, shape: dict[str, Any]) -> Iterator[KvbmEngine]:
    with KvbmEngine(folder, num_blocks=DEVICE_BLOCKS, **shape) as engine:
        yield engine
        engine.assert_clean()


def ask(engine: KvbmEngine, prompts: Iterable[list[int]], rounds: int = 1) -> list[int]:
    """Prompt by prompt, as often as told; what the tiers had for the last round's."""
    found: list[int] = []
    for number in range(rounds):
        found = []
        for user, prompt in enumerate(prompts):
            name = f"{engine.record.steps} {number} {user}"
            engine.ask(name, prompt, 1)
            engine.settle()
            found.append(engine.external_tokens(name))
    return found


def note_chains(engine: KvbmEngine) -> list[list[BlockKey]]:
    """The keys of each request that ends from now on."""
    chains: list[list[BlockKey]] = []
    finish = engine.leader.finish

    def noting(state: Any) -> tuple[int, ...]:
        chains.append(list(state.keys(0)))
        return finish(state)

    engine.leader.finish = noting  # type: ignore[method-assign]
    return chains


def in_bucket(chains: list[list[BlockKey]]) -> set[BlockKey]:
    """The blocks of these chains that lie in some record."""
    names = {name.rpartition("/")[2] for name in memory_engine._SHARED["sharing"].objects}
    return {
        key
        for chain in chains
        for end in range(1, len(chain) + 1)
        for num_blocks in range(1, end + 1)
        if plain_name(chain[end - 1], group_of(chain[end - 1]), num_blocks) in names
        for key in chain[end - num_blocks : end]
    }


def behind_a_missing_head(chains: list[list[BlockKey]], there: set[BlockKey]) -> int:
    """How many blocks are there without all that come before them."""
    heads = [next((i for i, key in enumerate(chain) if key not in there), len(chain)) for chain in chains]
    return sum(len(there.intersection(chain[end:])) for chain, end in zip(chains, heads, strict=True))


@pytest.mark.parametrize("shape", [BUCKET, DISK], ids=["bucket", "disk"])
def test_prompts_that_were_asked_again_are_found_elsewhere_and_after_a_restart(
    shape: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    prompts = prompts_of(seed)
    with engine_of(tmp_path, shape) as engine:
        chains = note_chains(engine)
        ask(engine, prompts, rounds=3)
        there = in_bucket(chains) if shape is BUCKET else set(engine.disk.slots.keys())
        assert there and behind_a_missing_head(chains, there) == 0
    with engine_of(tmp_path, shape) as engine:
        if shape is DISK:
            engine.wait_for(lambda: engine.disk.slots.resident_blocks == len(there))
        found = ask(engine, prompts)
        on_device = len(HEAD) // 4 * 4
        assert found[0] == HIT_TOKENS, "not even the first request hits"
        assert min(found) >= HIT_TOKENS - on_device


def test_one_round_stores_the_head_that_all_have(tmp_path: Path, seed: int) -> None:
    prompts = prompts_of(seed)
    with engine_of(tmp_path, BUCKET) as engine:
        chains = note_chains(engine)
        ask(engine, prompts)
        assert in_bucket(chains).issuperset(chains[0][:8]), "extents end at 8 and 16"
        assert behind_a_missing_head(chains, in_bucket(chains)) == 0


def test_a_head_that_the_host_has_lost_is_offloaded_again_from_the_device(tmp_path: Path, seed: int) -> None:
    first, *others = prompts_of(seed)
    with engine_of(tmp_path, BUCKET) as engine:
        chains = note_chains(engine)
        ask(engine, [first])
        engine.leader.chain.host.forget(chains[0][:6])
        ask(engine, others[:1])
        assert engine.leader.chain.host.match_prefix(chains[1]) == len(chains[1])
        assert in_bucket(chains).issuperset(chains[1][:8])
        assert behind_a_missing_head(chains, in_bucket(chains)) == 0
