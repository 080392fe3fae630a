"""Which of vLLM's own arguments and variables the name of a block depends on. They are drawn from vLLM, not
from a list of ours, which cannot find what it does not know.
"""

from __future__ import annotations

import dataclasses
import random
from fnmatch import fnmatchcase
from pathlib import Path

from vllm.engine.arg_utils import EngineArgs

from kvbm_vllm.config_tables import IRRELEVANT_ENVIRONMENT
from kvbm_vllm.identity import describe_engine, describe_environment
from tests.effort import tries
from tests.vllm.arguments import HARMLESS, Folder, drawn, is_harmless, shown, variables

NUM_PAIRS = tries(40, nightly=10_000)
SEED = 34
"""The pairs are the same in every run: one that fails says something of a change."""


def test_two_starts_that_differ_in_one_argument_share_their_keys_if_it_is_declared_harmless(
    tmp_path: Path,
) -> None:
    folder = Folder(tmp_path / "model")
    folder.config()  # the first one of a process finds another executor than all others
    base = folder.config()
    held, key = shown(base), describe_engine(base).pairs
    pairs, compared, wrong = list(drawn()), 0, []
    random.Random(SEED).shuffle(pairs)
    for name, value in pairs:
        try:
            config = folder.config(**{name: value})
        except Exception:  # vLLM does not start with it on this machine
            continue
        found = describe_engine(config)
        if not found.is_lasting:  # blocks are of this process
            continue
        is_equal = found.pairs == key
        if shown(config) == held:  # it has no effect on this model
            wrong += [] if is_equal else [f"{name}={value!r}: it has no effect, and another key"]
            continue
        if is_equal is not is_harmless(name, value):
            wrong.append(f"{name}={value!r}: {'the same key' if is_equal else 'another key'}")
        compared += 1
        if compared == NUM_PAIRS:
            break
    assert not wrong, "\n".join(wrong)
    assert compared >= 40


def test_what_is_declared_harmless_is_an_argument_and_in_no_table_as_such() -> None:
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    assert not HARMLESS.keys() - names
    reasons = dict(HARMLESS)
    HARMLESS.clear()
    try:
        assert not [name for name in reasons if is_harmless(name)]
    finally:
        HARMLESS.update(reasons)


def test_every_variable_of_vllm_counts_unless_it_is_declared_harmless() -> None:
    found = variables()
    assert len(found) > 100
    for name in found:
        is_declared = any(fnmatchcase(name, pattern) for pattern in IRRELEVANT_ENVIRONMENT)
        first, second = (describe_environment({name: text}).pairs for text in ("1", "2"))
        assert (first == second) is is_declared, name
