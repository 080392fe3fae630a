"""The table of model families: the tests that it names are there; what a config says of a model's layers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.identity.layers import BOTH, CONVOLUTION, FULL, NONE, STATE, WINDOW, keeps_states, layer_kinds
from tests import model_families
from tests.model_families import FAMILIES, NOT_RUN, NOT_TRIED, REFUSED, SERVED, Family

ROOT = Path(__file__).resolve().parents[2]
each_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)


def named_by(family: Family) -> tuple[str, ...]:
    return (*family.vllm_tests, *family.sglang_tests, *model_families.sglang_tests(family))


def is_there(path: str, name: str) -> bool:
    file = ROOT / path
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    return re.search(rf"^def {name}\(", text, re.MULTILINE) is not None


@each_family
def test_tests_that_a_row_names_are_there(family: Family) -> None:
    missing = [test for test in named_by(family) if not is_there(*test.split("::"))]
    assert not missing


@each_family
def test_what_is_refused_names_the_kind_and_what_to_do(family: Family) -> None:
    verdict, line = model_families.of_vllm(family)
    assert verdict in {SERVED, NOT_RUN, REFUSED, NOT_TRIED, ""} and bool(line) == (verdict == REFUSED)
    if line:
        assert line.startswith(f"kvbm: MODEL ({family.architecture}): ") and "kvbm" in line[10:]
        assert family.vllm_tests  # which show that it is


def test_the_table_has_all_verdicts_and_a_row_for_each_family() -> None:
    verdicts = [model_families.of_vllm(family)[0] for family in FAMILIES]
    assert {SERVED, NOT_RUN, REFUSED} <= set(verdicts)
    assert len(list(model_families.rows())) == len(FAMILIES) + 2 == len(list(model_families.details())) + 2
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_a_kind_that_is_no_longer_served_is_refused_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table asks the code: nobody has to change it."""
    from kvbm_vllm import kinds

    row = next(family for family in FAMILIES if family.architecture == "Gemma3ForCausalLM")
    assert model_families.of_vllm(row)[0] == SERVED
    monkeypatch.setattr(kinds, "SERVED", kinds.SERVED - kinds.WINDOWED)
    verdict, line = model_families.of_vllm(row)
    assert verdict == REFUSED and "SlidingWindowSpec" in line


def test_tensorrt_llm_is_asked_with_the_models_config() -> None:
    verdicts = {family.name: model_families.of_trtllm(family) for family in FAMILIES}
    states = [verdicts[family.name] for family in model_families.STATES if family.config is not None]
    assert len(states) > 5
    assert all(verdict == REFUSED and "layers with states" in line for verdict, line in states)
    assert {verdict for verdict, _ in verdicts.values()} == {"served ¹", "served ²", REFUSED, ""}


# ---------------------------------------------------------------- layers, by config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (FULL,) * 4),
        ({"layer_types": ["sliding_attention", "full_attention"]}, (WINDOW, FULL)),
        ({"layer_types": ["linear_attention", "full_attention"]}, (STATE, FULL)),  # Qwen3-Next
        ({"linear_num_value_heads": 32}, (STATE, STATE, STATE, FULL)),
        ({"linear_num_value_heads": 32, "full_attention_interval": 2}, (STATE, FULL, STATE, FULL)),
        ({"hybrid_override_pattern": "M-M*E"}, (STATE, NONE, STATE, FULL, NONE)),  # Nemotron-H
        ({"layers_block_type": ["mamba", "moe", "attention", "mlp"]}, (STATE, NONE, FULL, NONE)),
        ({"layer_types": ["mamba", "attention"]}, (STATE, FULL)),  # Granite 4
        ({"model_type": "falcon_h1"}, (BOTH,) * 4),
        ({"model_type": "mamba2"}, (STATE,) * 4),
        ({"model_type": "falcon_mamba"}, (STATE,) * 4),
        ({"linear_attn_config": {"kda_layers": [1, 2, 3]}}, (STATE, STATE, STATE, FULL)),  # Kimi-Linear
        ({"layer_types": ["conv", "full_attention"]}, (CONVOLUTION, FULL)),  # LFM2
        ({"attn_layer_period": 4, "attn_layer_offset": 1}, (STATE, FULL, STATE, STATE)),  # Jamba
        ({"attn_layer_indices": [3]}, (STATE, STATE, STATE, FULL)),  # Bamba
        ({"attn_type_list": [0, 0, 1, 0]}, (STATE, STATE, FULL, STATE)),  # MiniMax-01
        ({"layers_block_type": ["mamba", "hybrid"]}, (STATE, BOTH)),  # Zamba2
    ],
)
def test_layers_of_a_config(config: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert layer_kinds(config, 4) == expected
    has_states = bool({STATE, CONVOLUTION, BOTH} & set(expected))
    assert keeps_states({**config, "num_hidden_layers": 4}) is has_states
    assert keeps_states({"text_config": {**config, "num_hidden_layers": 4}}) is has_states


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"mamba_d_state": 16}, True),  # of a family that nobody has heard of
        ({"layer_types": ["attention"] * 2, "mamba_d_state": 16}, False),  # Granite 4 without the H
        ({"vision_config": {"mamba_d_state": 16}}, False),
    ],
)
def test_what_only_looks_like_states(config: dict[str, Any], expected: bool) -> None:
    assert keeps_states(config) is expected
