"""Namespaces, digests and chains: golden values, what makes keys differ, what does not."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from itertools import combinations, product

import pytest

from kvbm_core.tokens.chain import TokenChain
from kvbm_core.tokens.hashing import encode_fields, hash_block
from kvbm_core.tokens.namespace import KeyNamespace
from kvbm_core.types import SequenceHash

PLAIN = KeyNamespace("m")
FULL = KeyNamespace(
    model="org/model",
    revision="0123abcd",
    kv_dtype="bfloat16",
    layout="00112233445566778899aabbccddeeff",
    block_size_tokens=4,
    parallel="tp=2,pp=1",
    adapter="lora:/adapters/é",
    salt="tenant",
    extra=(("b", "2"), ("a", "1")),
)
TOKENS = [0, 1, 2, 2**32 - 1, 5, 6, 7, 8, 9, 10]

# Written once and never recomputed: if these change, everything that users have stored is lost to them.
GOLDEN = {
    "plain root": "0e1843cae0bc375779aec9b1f61fedce9444a2c8db0927d12fa0e8beb0ec7de6",
    "full root": "9596cb052e1b4c18f7455656e0d8e7810c85278e0527135c4fc821e38896329c",
    "full chain 0": "a3e0250e924473da1590caa4980ec406ba05c13bba862143d940efbb1113548f",
    "full chain 1": "ba97b0f3ac912212fd9f98edd0b2ae773aa99690d113e5040ef0ba037cdff3f4",
    "extra chain 1": "c7bf7fe5cbdd26389a27c72d4b83178d16adeff4765d1f48c8572d0beebeacf4",
    "encoded": "730200000000000000c3a96200000000000000006902000000000000002d316e0000000000000000",
}


def chain_of(
    namespace: KeyNamespace, tokens: list[int], extras: dict[int, bytes] | None = None
) -> list[SequenceHash]:
    """The hashes of ``tokens`` in blocks of 4."""
    extra_of_block = None if extras is None else lambda block: extras.get(block, b"")
    chain = TokenChain(namespace.root(), 4, extra_of_block)
    chain.extend(tokens)
    return chain.hashes


def golden_now() -> dict[str, str]:
    """What this version computes for GOLDEN."""
    chain = chain_of(FULL, TOKENS)
    extra = chain_of(FULL, TOKENS, {1: encode_fields("image", b"\0\1", 7, None)})
    values = [PLAIN.root(), FULL.root(), *chain, extra[1], encode_fields("é", b"", -1, None)]
    return {name: value.hex() for name, value in zip(GOLDEN, values, strict=True)}


def test_the_formats_have_not_changed() -> None:
    assert golden_now() == GOLDEN


def hashes_in_a_fresh_process(hash_seed: str) -> tuple[str, list[str]]:
    """That process's own hash of a text, and the hex of a chain."""
    script = (
        "from kvbm_core.tokens.namespace import KeyNamespace as N\n"
        "from kvbm_core.tokens.chain import TokenChain\n"
        "chain = TokenChain(N('m', salt='s', extra=(('b', '2'), ('a', '1'))).root(), 2, lambda i: "
        "b'%d' % i)\n"
        "chain.extend(range(7))\n"
        "print(hash('m'), *(digest.hex() for digest in chain.hashes))\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": path}
    run = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True, timeout=60
    )
    python_hash, *digests = run.stdout.split()
    return python_hash, digests


def test_hashes_do_not_depend_on_the_process() -> None:
    chain = TokenChain(
        KeyNamespace("m", salt="s", extra=(("a", "1"), ("b", "2"))).root(), 2, lambda i: b"%d" % i
    )
    chain.extend(range(7))
    runs = [hashes_in_a_fresh_process(seed) for seed in ("0", "1", "12345")]
    assert len({python_hash for python_hash, _ in runs}) == len(runs), "or else this test shows nothing"
    assert all(digests == [digest.hex() for digest in chain.hashes] for _, digests in runs)


# ---------------------------------------------------------------- namespaces


def variants_of(name: str) -> list[object]:
    """Values of a field that a sloppy encoding would mix up with each other, or with the next field's."""
    if name == "block_size_tokens":
        return [0, 1, 16, -1]
    if name == "salt":
        return [None, "", "X", "None", "XX"]
    if name == "extra":
        return [(), (("", ""),), (("X", ""),), (("", "X"),), (("X", "X"),), (("", ""), ("X", ""))]
    return ["", "X", "XX", "0", "16", "\0"]


def test_all_pairs_of_differing_fields_have_different_roots() -> None:
    base = KeyNamespace("m")
    namespaces = {base}
    for one, other in combinations([field.name for field in fields(KeyNamespace)], 2):
        for left, right in product(variants_of(one), variants_of(other)):
            namespaces.add(replace(base, **{one: left, other: right}))
    assert len(namespaces) > 700
    assert len({namespace.root() for namespace in namespaces}) == len(namespaces)


def test_an_adapter_is_not_a_salt() -> None:
    assert (
        PLAIN.with_request(adapter="X", salt=None).root() != PLAIN.with_request(adapter="", salt="X").root()
    )


def test_no_salt_is_not_the_empty_salt() -> None:
    assert PLAIN.with_request(adapter="", salt=None).root() != PLAIN.with_request(adapter="", salt="").root()


def test_a_text_cannot_pass_for_the_encoding_of_two() -> None:
    smuggled = encode_fields("a", "X")[9:].decode()  # what follows the first field's tag and length
    assert KeyNamespace(model=smuggled).root() != KeyNamespace(model="a", revision="X").root()


def test_with_request_keeps_the_rest() -> None:
    request = FULL.with_request(adapter="other", salt=None)
    assert request == replace(FULL, adapter="other", salt=None)
    assert request.with_request(adapter=FULL.adapter, salt=FULL.salt).root() == FULL.root()


def test_the_order_of_extra_does_not_matter_and_names_are_unique() -> None:
    turned = replace(FULL, extra=FULL.extra[::-1])
    assert turned == FULL
    assert turned.root() == FULL.root()
    with pytest.raises(ValueError, match="twice"):
        KeyNamespace("m", extra=(("a", "1"), ("a", "2")))


def test_unicode_is_not_normalised_and_a_lone_surrogate_is_taken() -> None:
    salts = ["é", "e\u0301", "\ud800", "\ud83d\ude00", "😀"]
    assert len({PLAIN.with_request(adapter="", salt=salt).root() for salt in salts}) == len(salts)


# ---------------------------------------------------------------- digests


def test_tokens_and_extra_cannot_pass_for_each_other() -> None:
    root = PLAIN.root()
    splits = [(b"\1" * 8, b""), (b"\1" * 4, b"\1" * 4), (b"", b"\1" * 8), (b"\1" * 8, b"\0")]
    assert len({hash_block(root, tokens, extra) for tokens, extra in splits}) == len(splits)


def test_hash_block_refuses_what_is_no_parent_or_no_tokens() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        hash_block(SequenceHash(b"short"), b"\1" * 4)
    with pytest.raises(ValueError, match="whole 32 bit"):
        hash_block(PLAIN.root(), b"\1" * 5)


def test_encode_fields_takes_only_its_types() -> None:
    with pytest.raises(TypeError, match="float"):
        encode_fields(1.5)  # type: ignore[arg-type]


# ---------------------------------------------------------------- chains


def test_a_chain_grown_step_by_step_is_the_chain_of_the_whole() -> None:
    chain = TokenChain(FULL.root(), 4)
    for length in range(len(TOKENS) + 1):
        chain.extend(TOKENS[:length])
        assert len(chain.hashes) == length // 4
    assert chain.hashes == chain_of(FULL, TOKENS)


def test_a_chain_is_made_of_hash_block() -> None:
    raw = b"".join(token.to_bytes(4, "little") for token in TOKENS)
    first = hash_block(FULL.root(), raw[:16])
    assert chain_of(FULL, TOKENS) == [first, hash_block(first, raw[16:32])]


def test_a_hash_names_the_whole_prefix() -> None:
    other_start = chain_of(FULL, [99, *TOKENS[1:]])
    assert not set(other_start) & set(chain_of(FULL, TOKENS))
    assert not set(chain_of(PLAIN, TOKENS)) & set(chain_of(FULL, TOKENS))
    assert len(set(chain_of(PLAIN, [7] * 40))) == 10


def test_extra_changes_its_block_and_those_after_it() -> None:
    plain = chain_of(FULL, TOKENS)
    assert chain_of(FULL, TOKENS, {}) == plain
    assert chain_of(FULL, TOKENS, {1: b"image"})[0] == plain[0]
    assert chain_of(FULL, TOKENS, {1: b"image"})[1] != plain[1]
    assert not set(chain_of(FULL, TOKENS, {0: b"image"})) & set(plain)


def test_extra_is_asked_for_each_new_block_by_its_number() -> None:
    asked: list[int] = []

    def extra_of_block(block: int) -> bytes:
        asked.append(block)
        return b"%d" % block

    chain = TokenChain(FULL.root(), 4, extra_of_block)
    chain.extend(TOKENS[:5])
    chain.extend(TOKENS)
    assert asked == [0, 1]
    assert chain.hashes == chain_of(FULL, TOKENS, {0: b"0", 1: b"1"})


def test_total_tokens_limits_and_never_takes_back() -> None:
    chain = TokenChain(FULL.root(), 4)
    chain.extend(TOKENS, 7)
    assert chain.hashes == chain_of(FULL, TOKENS)[:1]
    chain.extend(TOKENS, 1000)
    assert chain.hashes == chain_of(FULL, TOKENS)
    chain.extend(TOKENS, 3)
    chain.extend([])
    assert chain.hashes == chain_of(FULL, TOKENS)


class SlicesOnly:
    """A long prompt that counts how many of its tokens were looked at."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.seen = 0

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, part: slice) -> list[int]:
        tokens = list(range(*part.indices(self.num_tokens)))
        self.seen += len(tokens)
        return tokens


def test_extend_looks_only_at_new_full_blocks() -> None:
    chain, prompt = TokenChain(FULL.root(), 4), SlicesOnly(4001)
    chain.extend(prompt)  # type: ignore[arg-type]
    assert prompt.seen == 4000
    for prompt.num_tokens in range(4002, 4010):
        chain.extend(prompt)  # type: ignore[arg-type]
    assert prompt.seen == 4008
    assert len(chain.hashes) == 1002


@pytest.mark.parametrize("token", [-1, 2**32, 1.5, "1", None])
def test_a_token_that_is_no_u32_is_refused_and_adds_nothing(token: int) -> None:
    chain = TokenChain(FULL.root(), 4)
    chain.extend(TOKENS[:4])
    with pytest.raises(ValueError, match="unsigned 32 bit"):
        chain.extend([*TOKENS[:4], 1, 2, 3, 4, 5, token, 7, 8])
    assert chain.hashes == chain_of(FULL, TOKENS[:4])


def test_a_chain_refuses_a_bad_root_or_block_size() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        TokenChain(SequenceHash(b""), 4)
    with pytest.raises(ValueError, match="at least one token"):
        TokenChain(FULL.root(), 0)
