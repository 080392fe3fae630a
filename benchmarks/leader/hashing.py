"""The chain of a long prompt's block hashes: made anew, and extended by one block."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial

from benchmarks.figures import LIMIT, Figure, Goal
from benchmarks.suite import expect
from benchmarks.timing import timed
from kvbm_core.tokens.chain import TokenChain
from kvbm_core.tokens.hashing import hash_block
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.types import SequenceHash

PROMPT_TOKENS = 131_072
BLOCK_TOKENS = 16
VOCABULARY = 150_000
EXTENSIONS = 8  # of the same chain, a round

HASH = Goal("hash chain of 131,072 tokens", "ms", 1 / 3, "lower")
EXTEND = Goal("hash chain of 131,072 tokens, one block more", "us", 20.0, "lower", LIMIT)
GOALS = (HASH, EXTEND)

Hasher = Callable[[list[int]], int]
"""Hashes a whole prompt; returns how many blocks it had."""


def peer_hashers() -> dict[str, Hasher]:
    """vLLM's collision-resistant hashes of the installed version; none without vLLM."""
    try:
        from vllm.utils.hashing import sha256, sha256_cbor
        from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash
    except ImportError:
        return {}

    def hasher(function: Callable[[object], bytes]) -> Hasher:
        def hash_prompt(tokens: list[int]) -> int:
            parent, hashes = None, []
            for start in range(0, len(tokens), BLOCK_TOKENS):
                parent = hash_block_tokens(function, parent, tokens[start : start + BLOCK_TOKENS])
                hashes.append(parent)
            return len(set(hashes))

        return hash_prompt

    init_none_hash(sha256)
    return {"vLLM sha256": hasher(sha256), "vLLM sha256_cbor": hasher(sha256_cbor)}


def measure(rounds: int, seed: int) -> list[Figure]:
    """Both figures; each round has a prompt of its own."""
    draw = random.Random(seed)
    root = KeyNamespace("benchmark").root()
    peers = peer_hashers()
    ours: list[float] = []
    extended: list[float] = []
    theirs: Mapping[str, list[float]] = {name: [] for name in peers}
    for number in range(rounds + 1):
        tokens = [draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS + EXTENSIONS * BLOCK_TOKENS)]
        prompt = tokens[:PROMPT_TOKENS]
        chain = TokenChain(root, BLOCK_TOKENS)
        seconds, _ = timed(partial(chain.extend, prompt))
        of_round = {name: timed(partial(hasher, prompt)) for name, hasher in peers.items()}
        extensions = [
            _extend(chain, tokens, PROMPT_TOKENS + i * BLOCK_TOKENS) for i in range(1, EXTENSIONS + 1)
        ]
        if number == 0:
            _check(chain, root, tokens)
            continue
        ours.append(1e3 * seconds)
        extended += extensions
        for name, (their_seconds, num_blocks) in of_round.items():
            expect(num_blocks == PROMPT_TOKENS // BLOCK_TOKENS, f"{name} hashed {num_blocks} blocks")
            theirs[name].append(1e3 * their_seconds)
    peer_samples = {name: tuple(samples) for name, samples in theirs.items()}
    return [Figure(HASH, tuple(ours), peer_samples), Figure(EXTEND, tuple(extended))]


def _extend(chain: TokenChain, tokens: list[int], total_tokens: int) -> float:
    seconds, _ = timed(lambda: chain.extend(tokens, total_tokens))
    expect(len(chain.hashes) == total_tokens // BLOCK_TOKENS, "the chain was not extended by one block")
    return 1e6 * seconds


def _check(chain: TokenChain, root: SequenceHash, tokens: list[int]) -> None:
    parent = root
    for place, found in enumerate(chain.hashes):
        block = tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS]
        parent = hash_block(parent, b"".join(token.to_bytes(4, "little") for token in block))
        expect(found == parent, f"block {place} of the chain has another hash than its definition says")
