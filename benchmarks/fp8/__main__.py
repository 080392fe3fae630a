"""What KVBM_REMOTE_CODEC=fp8 does to answers: ``python -m benchmarks.fp8 [MODEL...]``.

Without a model it is measured with the tests' tiny ones, whose weights are random.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.console import report_console
from benchmarks.fp8 import speed
from benchmarks.fp8.answers import Asked, Effect, measure_all
from benchmarks.fp8.speed import Speed
from benchmarks.suite import WrongAnswer
from tests.engines.job import EngineFailed
from tests.engines.tiny_model import Kind, ensure_model

KINDS: tuple[Kind, ...] = ("qwen3", "gemma3")
"""vLLM's MLA for CPUs does not take the third one's sizes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; 0 when everything was measured, 1 when an engine failed or had nothing from the store."""
    arguments = _parse(argv)
    console = report_console()
    asked = Asked(
        arguments.dtype,
        arguments.prompts,
        arguments.prompt_tokens,
        arguments.answer_tokens,
        arguments.seed,
    )
    folder = arguments.output / f"fp8-{asked.dtype}"
    models = {path.name: path for path in arguments.models}
    try:
        with console.status("speed") as status:
            speeds = [speed.measure(dtype, asked.seed) for dtype in speed.ITEM_BYTES]
            console.print(_speeds_table(speeds))
            if not models:
                models = {f"tiny {kind}": ensure_model(folder / f"tiny-{kind}", kind) for kind in KINDS}
            effects = measure_all(models, asked, folder, status.update)
    except (WrongAnswer, EngineFailed) as problem:
        console.print(f"✗ {problem}", style="red", markup=False, highlight=False)
        return 1
    console.print(_effects_table(effects, asked))
    return 0


def _speeds_table(speeds: Sequence[Speed]) -> Table:
    table = Table("numbers", title="float8 for blocks of 2 MiB in bfloat16: GB/s on one thread")
    for column in ("to the store", "from the store", "stored"):
        table.add_column(column, justify="right")
    for one in speeds:
        table.add_row(one.dtype, f"{one.to_store:.2f}", f"{one.from_store:.2f}", f"{one.stored:.3f}")
    return table


def _effects_table(effects: Sequence[Effect], asked: Asked) -> Table:
    what = f"{asked.num_prompts} prompts of {asked.prompt_tokens} tokens, answers of {asked.answer_tokens}"
    table = Table("model", "codec", title=f"answers after a load, {asked.dtype}: {what}, seed {asked.seed}")
    columns = ("tokens that agree", "whole answers", "log-probability off by, mean", "most")
    for column in columns:
        table.add_column(column, justify="right")
    for one in effects:
        shares = f"{one.agreed:.1%}", f"{one.same_answers:.0%}"
        table.add_row(one.model, one.codec, *shares, f"{one.mean_off:.4f}", f"{one.max_off:.3f}")
    return table


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8", description=__doc__)
    parser.add_argument("models", nargs="*", type=Path, help="folders of models that vLLM serves here")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=1040, help="random ones")
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1, help="of prompts")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results"), help="folder of models and logs"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
