"""Roots: what is in them, and which of them mean something in another process."""

from __future__ import annotations

import os

from kvbm_core.identity.roots import MAX_KNOWN_ROOTS, NO_ADAPTER, Roots, Stamp, process_stamp
from kvbm_core.tokens.namespace import KeyNamespace

NAMESPACE = KeyNamespace(model="m", block_size_tokens=16)
WEIGHTS = Stamp("sha256 of all", is_lasting=True)


def roots(weights: Stamp = WEIGHTS, *, is_lasting: bool = True) -> Roots:
    return Roots(NAMESPACE, lambda: weights, is_lasting=is_lasting)


def test_adapter_salt_layout_and_weights_are_in_the_root() -> None:
    plain = roots().of(NO_ADAPTER, None, "layout")
    assert plain == roots().of(NO_ADAPTER, None, "layout")
    assert plain.is_lasting
    others = [
        roots().of(Stamp("lora", is_lasting=True), None, "layout"),
        roots().of(NO_ADAPTER, "", "layout"),
        roots().of(NO_ADAPTER, None, "other"),
        roots(Stamp("others", is_lasting=True)).of(NO_ADAPTER, None, "layout"),
        roots(is_lasting=False).of(NO_ADAPTER, None, "layout"),
    ]
    assert len({plain.hash, *(root.hash for root in others)}) == len(others) + 1


def test_what_only_this_process_knows_does_not_last() -> None:
    assert not roots(process_stamp("dummy")).of(NO_ADAPTER, None, "").is_lasting
    assert not roots().of(process_stamp("lora 1"), None, "").is_lasting
    assert not roots(is_lasting=False).of(NO_ADAPTER, None, "").is_lasting


def test_weights_that_change_change_the_root() -> None:
    now = process_stamp("being read")
    changing = Roots(NAMESPACE, lambda: now)
    before = changing.of(NO_ADAPTER, None, "")
    now = WEIGHTS
    after = changing.of(NO_ADAPTER, None, "")
    assert before.hash != after.hash
    assert (before.is_lasting, after.is_lasting) == (False, True)
    assert after == roots().of(NO_ADAPTER, None, "")


def test_a_forked_process_is_another_one() -> None:
    mine = process_stamp("x").text
    assert process_stamp("x").text == mine
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, process_stamp("x").text.encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1000).decode() != mine
    os.close(reader)
    os.close(writer)


def test_roots_are_forgotten_before_there_are_too_many() -> None:
    many = roots()
    first = many.of(NO_ADAPTER, "0", "")
    for number in range(MAX_KNOWN_ROOTS + 1):
        many.of(NO_ADAPTER, str(number), "")
    assert many.of(NO_ADAPTER, "0", "") == first
