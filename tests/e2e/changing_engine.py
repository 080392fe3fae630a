"""One real engine whose weights and adapters change while it runs:
python -m tests.e2e.changing_engine JOB.json RESULT.json

JOB: {"model", "llm": keyword arguments of vllm.LLM, "connector": bool, "steps": [...]}. A step is one of
{"generate": [[token, ...], ...], "lora": [name, number, path] or null, "salt": text or null};
{"reset_device": true} empties vLLM's own prefix cache, {"reset_all": true} kvbm's too; {"reload": folder}
reads the weights in place; {"load": folder} gives its norms to the model object, as TRL does with all weights
(its matrices vLLM keeps elsewhere, on a CPU); {"write": number} adds it to the model's tensors;
{"add_lora": [name, number, path], "inplace": bool}; {"copy": [from, to]} overwrites a folder's files. RESULT:
{"answers": of each generate, the tokens and cached tokens of each prompt, "to_disk": after each generate, how
many blocks have gone there, "metrics": at the end}.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.e2e.offline import main, make_engine, settle

MAX_TOKENS = 8


class Job:
    """One engine; ``do`` makes one step."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._llm = make_engine(job)
        self.answers: list[list[dict[str, Any]]] = []
        self.to_disk: list[float] = []
        self.metrics: dict[str, float] = {}

    def do(self, step: dict[str, Any]) -> None:
        """One of the steps above."""
        if "generate" in step:
            self.answers.append(self._generate(step))
        elif "reset_device" in step:
            assert self._llm.reset_prefix_cache()
        elif "reset_all" in step:
            assert self._llm.reset_prefix_cache(reset_connector=True)
        elif "load" in step:
            tensors = load_file(Path(step["load"]) / "model.safetensors").items()
            _model(self._llm).load_weights((name, tensor) for name, tensor in tensors if "norm" in name)
        elif "write" in step:
            for parameter in _model(self._llm).parameters():
                parameter.data += step["write"]
        elif "reload" in step:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": step["reload"]})
        elif "add_lora" in step:
            lora = _lora(step["add_lora"], inplace=step.get("inplace", False))
            assert self._llm.llm_engine.add_lora(lora)
        elif "copy" in step:
            source, target = map(Path, step["copy"])
            for path in source.iterdir():
                shutil.copy(path, target / path.name)

    def _generate(self, step: dict[str, Any]) -> list[dict[str, Any]]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
        request = _lora(step["lora"]) if step.get("lora") else None
        more = {"cache_salt": step["salt"]} if step.get("salt") else {}
        outputs = [
            self._llm.generate(
                {"prompt_token_ids": tokens, **more}, sampling, use_tqdm=False, lora_request=request
            )
            for tokens in step["generate"]
        ]
        leader = settle(self._llm)
        assert not leader.pending_jobs and not leader.open_requests and not leader.chain.storing_blocks
        self.metrics = leader.metrics.snapshot()
        self.to_disk.append(self.metrics["kvbm_offload_blocks_h2d"])
        return [
            {"tokens": list(output.outputs[0].token_ids), "cached_tokens": output.num_cached_tokens}
            for (output,) in outputs
        ]


def _model(llm: Any) -> Any:
    """Where a trainer finds it."""
    return llm.llm_engine.model_executor.driver_worker.model_runner.model


def _lora(names: list[Any], *, inplace: bool = False) -> Any:
    from vllm.lora.request import LoRARequest

    name, number, path = names
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path, load_inplace=inplace)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Makes the job's steps."""
    engine = Job(job)
    for step in job["steps"]:
        engine.do(step)
    return {"answers": engine.answers, "to_disk": engine.to_disk, "metrics": engine.metrics}


if __name__ == "__main__":
    main(run)
