"""Weights and adapters that change while real vLLM serves: with kvbm the answers are those without a
cache.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.engine_child import run_engine
from tests.engines.shared_stores import directory

BLOCK = 32
PROMPT_TOKENS = 300
FOUND = PROMPT_TOKENS // BLOCK * BLOCK

pytestmark = pytest.mark.timeout(600)


def further_trained(model: Path, to: Path, seed: int, *, norms: bool = False) -> Path:
    """The same model, but for seven of its tensors, which are matrices or ``norms``."""
    shutil.copytree(model, to)
    path = to / "model.safetensors"
    tensors, generator = load_file(path), torch.Generator().manual_seed(seed)
    of_layers = sorted(name for name, tensor in tensors.items() if "layers" in name)
    for name in [name for name in of_layers if (tensors[name].ndim == 1) is norms][::3][:7]:
        old = tensors[name].float()
        noise = torch.randn(old.shape, generator=generator)
        tensors[name] = (old + (1.0 if norms else old.std()) * noise).to(tensors[name].dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    return to


def adapter(model: Path, to: Path, seed: int) -> Path:
    """A LoRA for the model's queries and values."""
    to.mkdir()
    config = json.loads((model / "config.json").read_text())
    tensors, generator = {}, torch.Generator().manual_seed(seed)
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "v_proj.weight")):
            start = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{start}.lora_A.weight"] = torch.randn(8, config["hidden_size"], generator=generator) / 2
            tensors[f"{start}.lora_B.weight"] = torch.randn(weight.shape[0], 8, generator=generator) / 2
    save_file(tensors, to / "adapter_model.safetensors")
    peft = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (to / "adapter_config.json").write_text(json.dumps({**peft, "bias": "none", "task_type": "CAUSAL_LM"}))
    return to


def test_no_answer_is_of_weights_or_adapters_that_are_no_more(
    tiny_model: Path, tmp_path: Path, rng: random.Random
) -> None:
    prompts = [[rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(2)]
    trained = further_trained(tiny_model, tmp_path / "trained", rng.randrange(1 << 30))
    first, second = (adapter(tiny_model, tmp_path / f"lora{n}", rng.randrange(1 << 30)) for n in (1, 2))
    live = shutil.copytree(first, tmp_path / "live")
    lora = ["poet", 1, str(live)]
    steps: list[dict[str, Any]] = []

    def ask(salt: str | None, **more: Any) -> None:
        steps.extend([{"reset_device": True}, {"generate": prompts, "salt": salt, **more}])

    def ask_all(name: str, **more: Any) -> None:
        # Without a cache (nobody else has this salt), with one, and once more.
        for salt in (name, None, None):
            ask(salt, **more)

    ask_all("start")
    steps.append({"reload": str(trained)})
    ask_all("trained")
    ask_all("lora", lora=lora)
    steps.append({"copy": [str(second), str(live)]})
    ask_all("overwritten", lora=lora)
    steps.append({"add_lora": lora, "inplace": True})
    ask_all("in place", lora=lora)
    steps += [{"copy": [str(first), str(live)]}, {"add_lora": lora, "inplace": True}]
    ask_all("rolled back", lora=lora)
    llm = {"block_size": BLOCK, "max_model_len": 1024, "num_gpu_blocks_override": 200}
    llm |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "dtype": "float32"}
    job = {"model": str(tiny_model), "llm": llm, "connector": True, "steps": steps}
    answers = run_engine(tmp_path / "engine", job, "tests.e2e.changing_engine")["answers"]
    rounds = [answers[start : start + 3] for start in range(0, len(answers), 3)]
    rights = []
    for right, cold, warm in rounds:
        rights.append([answer["tokens"] for answer in right])
        for found in (cold, warm):
            assert [answer["tokens"] for answer in found] == rights[-1]
    found = [[each[0]["cached_tokens"] for each in round_] for round_ in rounds]
    assert found == [[0, 0, FOUND]] * 3 + [[0, 0, 0]] + [[0, 0, FOUND]] * 2
    start, after, with_lora, overwritten, in_place, rolled_back = rights
    assert start != after != with_lora != in_place != rolled_back
    assert overwritten == with_lora == rolled_back, "what is on the disk is not what is in memory"


def test_after_a_restart_no_answer_is_of_weights_that_a_trainer_gave_to_the_model_object(
    tiny_model: Path, tmp_path: Path, rng: random.Random
) -> None:
    def some() -> list[list[int]]:
        return [[rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)] for _ in range(2)]

    def ask(prompts: list[list[int]], salt: str | None = None) -> list[dict[str, Any]]:
        return [{"reset_device": True}, {"generate": prompts, "salt": salt}]

    def run(name: str, steps: list[dict[str, Any]]) -> dict[str, Any]:
        llm = {"block_size": BLOCK, "max_model_len": 1024, "num_gpu_blocks_override": 200, "dtype": "float32"}
        job = {"model": str(tiny_model), "llm": llm, "connector": True, "steps": steps}
        disk = {"DYN_KVBM_DISK_CACHE_GB": "0.5", "DYN_KVBM_DISK_CACHE_DIR": str(tmp_path / "disk")}
        disk["KVBM_TEST_DISK_LEDGER"] = str(tmp_path / "ledger")
        return run_engine(tmp_path / name, job, "tests.e2e.changing_engine", **disk)

    def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
        return [answer["tokens"] for answer in answers]

    early, late, later = some(), some(), some()
    trained = further_trained(tiny_model, tmp_path / "trained", rng.randrange(1 << 30), norms=True)
    result = run(
        "first",
        [*ask(early), *ask(early), {"load": str(trained)}, *ask(late, "salt"), *ask(late), *ask(late)],
    )
    cold, warm, right, found, again = result["answers"]
    assert tokens(cold) == tokens(warm) and tokens(right) == tokens(found) == tokens(again)
    cached = [[answer["cached_tokens"] for answer in answers] for answers in result["answers"]]
    assert cached == [[0, 0], [FOUND] * 2, [0, 0], [0, 0], [FOUND] * 2]
    _, lasting, *later_on = result["to_disk"]  # they go there when they are used again
    assert lasting and set(later_on) == {lasting}, "blocks of the new weights have gone to the disk"

    reset = {"reset_all": True}
    steps = [
        *ask(early),
        *ask(late),
        *ask(late, "salt"),
        {"write": 0.05},
        reset,
        *ask(later, "salt"),
        *ask(later),
    ]
    result = run("second", [*steps, reset, *ask(later)])
    restarted, found, right, *changed = result["answers"]
    assert tokens(restarted) == tokens(cold) and [each["cached_tokens"] for each in restarted] == [FOUND] * 2
    assert tokens(found) == tokens(right) != tokens(again)
    assert tokens(changed[0]) == tokens(changed[1]) == tokens(changed[2])
    assert not any(answer["cached_tokens"] for answers in (found, *changed) for answer in answers)
    assert len(set(result["to_disk"][2:])) == 1, "blocks of the new weights have gone to the disk"


NUM_UPDATES = 20


@pytest.mark.nightly("twenty updates on two engines; the tests above have one of each kind")
@pytest.mark.timeout(1200)
def test_no_answer_is_wrong_after_any_of_twenty_updates(
    tiny_model: Path, tmp_path: Path, rng: random.Random
) -> None:
    """By the model object, an order, a LoRA in place, and a LoRA's files alone, in turn; with host, disk and
    a store, and a restart in between.
    """
    prompts = [[rng.randrange(3, 500) for _ in range(PROMPT_TOKENS)]]
    live = adapter(tiny_model, tmp_path / "live", rng.randrange(1 << 30))
    lora = ["poet", 1, str(live)]

    def asked(name: str) -> list[dict[str, Any]]:
        """Without a cache (nobody else has this salt), with one, and once more; with and without a LoRA."""
        return [
            step
            for more in ({}, {"lora": lora})
            for salt in (name, None, None)
            for step in ({"reset_device": True}, {"generate": prompts, "salt": salt, **more})
        ]

    def update(number: int) -> list[dict[str, Any]]:
        made, way, seed = tmp_path / f"update {number}", number % 4, rng.randrange(1 << 30)
        if way < 2:
            folder = str(further_trained(tiny_model, made, seed, norms=way == 0))
            return [{"load": folder} if way == 0 else {"reload": folder}]
        copied = {"copy": [str(adapter(tiny_model, made, seed)), str(live)]}
        return [copied, {"add_lora": lora, "inplace": True}] if way == 2 else [copied]

    llm = {"block_size": BLOCK, "max_model_len": 1024, "num_gpu_blocks_override": 200, "dtype": "float32"}
    llm |= {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    tiers = {"DYN_KVBM_DISK_CACHE_GB": "0.5", "DYN_KVBM_DISK_CACHE_DIR": str(tmp_path / "disk")}
    tiers |= {"KVBM_TEST_DISK_LEDGER": str(tmp_path / "ledger")}
    starts = []
    with directory(tmp_path) as store:
        for life in range(2):
            numbers = range(life * NUM_UPDATES // 2, (life + 1) * NUM_UPDATES // 2)
            steps = [
                *asked(f"start {life}"),
                *(step for n in numbers for step in (*update(n), *asked(f"{n}"))),
            ]
            job = {"model": str(tiny_model), "llm": llm, "connector": True, "steps": steps}
            engine = run_engine(tmp_path / f"{life}", job, "tests.e2e.changing_engine", **tiers, **store)
            answers = [[answer["tokens"] for answer in each] for each in engine["answers"]]
            cached = [[answer["cached_tokens"] for answer in each] for each in engine["answers"]]
            for right, cold, warm in zip(answers[::3], answers[1::3], answers[2::3], strict=True):
                assert right == cold == warm
            assert len({str(right) for right in answers[::6]}) > 3
            assert sum(each == [FOUND] for each in cached[2::3]) > NUM_UPDATES // 2
            starts.append((answers[1], cached[1]))
    assert starts == [(starts[0][0], [0]), (starts[0][0], [FOUND])]
