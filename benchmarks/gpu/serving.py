"""Real vLLM with kvbm, with its own OffloadingConnector and with neither, one server after the other."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu.chat import Load, Pair, Played, measure, percentile
from benchmarks.gpu.rows import Cell, Goal, Result, Row
from benchmarks.gpu.stages import Options, told_by
from kvbm_core.storage.memory_room import available_memory
from tests.engines.client import EngineClient
from tests.engines.process import ServerError, exit_on_sigterm
from tests.engines.tiny_model import ensure_model
from tests.engines.vllm_server import ServerOptions, VllmServer

OURS, OFFLOADING, NONE = "kvbm", "OffloadingConnector", "no connector"
NEEDS_GPU = "only supported on CUDA"
SIDES = (OURS, OFFLOADING, NONE)
TABLE = "chat"
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4} | {
    "num_key_value_heads": 2,
    "head_dim": 64,
}
KV_BYTES_PER_TOKEN = 36 * 2 * 8 * 128 * 2
DEVICE_TOKENS, MAX_HOST_BYTES = 81_920, 44_000_000_000
START_TIMEOUT_S = (300, 180)  # dry, real

HIT = Goal("TTFT of a host hit", "ms", "the same prompt cold", 0.2)
HIT_PEER = Goal("TTFT of a host hit, beside vLLM's own", "ms", OFFLOADING, 1.0)
P50 = Goal("chat, TTFT p50", "ms", OFFLOADING, 1.0)
P99 = Goal("chat, TTFT p99", "ms", OFFLOADING, 1.0)
WORST = Goal("chat, TTFT p50 of our worst round", "ms", OFFLOADING, 1.0)
RATE = Goal("chat, throughput", "tokens/s", OFFLOADING, 1.0, "higher")
P50_NONE = Goal("chat, TTFT p50, beside no cache", "ms", NONE, 1.0)
RATE_NONE = Goal("chat, throughput, beside no cache", "tokens/s", NONE, 1.0, "higher")
ANSWERS = Goal("host hits answered otherwise, or that were none", "pairs", bound=0)

Measured = tuple[list[Pair], Played]


class ServingStage:
    """See the module."""

    name = "serving"
    help = (
        "vLLM with a Qwen3-8B of random weights: TTFT and throughput of a chat larger than the device cache"
    )
    share = 0.55

    def goals(self, options: Options) -> Sequence[Goal]:
        """See Stage."""
        return (HIT, ANSWERS, HIT_PEER, P50, P99, WORST, RATE, P50_NONE, RATE_NONE)

    def run(self, options: Options) -> Iterator[Result]:
        """See Stage. Ours comes first: if time runs out, a peer is missing."""
        exit_on_sigterm()
        install(options)
        host_bytes = min(10**9 if options.is_dry else MAX_HOST_BYTES, available_memory().available_bytes // 2)
        load, model = load_of(options, host_bytes), write_model(options)
        found: dict[str, Measured] = {}
        failures: dict[str, str] = {}
        for side in SIDES:
            try:
                found[side] = _measure_or_stand_in(side, load, model, host_bytes, options)
                yield from _cells(side, found[side][1])
            except Exception as error:  # a side that does not start leaves the others to be measured
                failures[side] = f"{side}: {told_by(error)}"
                traceback.print_exc()
            yield from _rows(side, found, failures, load)


def load_of(options: Options, host_bytes: int) -> Load:
    """16 users whose conversations end at 16k tokens, three times the device cache; fewer on a small host."""
    if options.is_dry:
        return Load(512, 1, 6, 2, 256, 64, 8, 2, 151_936)
    load = Load(16_384, 5, 16, 4, 8_192, 2_600, 64, 4, 151_936)
    users = int(0.9 * host_bytes) // (load.final_tokens * KV_BYTES_PER_TOKEN)
    if users * load.final_tokens <= DEVICE_TOKENS:
        raise MemoryError(f"{host_bytes / 1e9:.0f} GB for the host cache hold no more than the device cache")
    return Load(16_384, 5, min(load.users, users), 4, 8_192, 2_600, 64, 4, 151_936)


def write_model(options: Options) -> Path:
    """A folder with a Qwen3-8B's config and a tokenizer of bytes; prompts are token ids, weights are drawn by
    vLLM.
    """
    tiny, folder = ensure_model(options.output / "tiny-qwen3"), options.output / "qwen3-8b"
    folder.mkdir(exist_ok=True)
    for path in tiny.glob("*token*"):
        shutil.copy(path, folder)
    config = QWEN3_8B | (SMALL if options.is_dry else {})
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return folder


def install(options: Options) -> None:
    """Makes the wheels of ``--vllm-wheel`` importable here and by the servers. ImportError if there is no
    vLLM then.
    """
    if options.wheels:
        site = (options.output / "site").resolve()
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
        subprocess.run([*command, "--target", str(site), *map(str, options.wheels)], check=True)
        sys.path.insert(0, str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        os.environ["PATH"] = os.pathsep.join([str(site / "bin"), os.environ["PATH"]])
        importlib.invalidate_caches()
    if importlib.util.find_spec("vllm") is None:
        raise ImportError("vLLM is not installed (--vllm-wheel takes wheels of it and of what it needs)")


def server_options(side: str, load: Load, model: Path, host_bytes: int, options: Options) -> ServerOptions:
    """The same server but for its connector."""
    arguments = ["--load-format", "dummy", "--max-num-seqs", "32"]
    if not options.is_dry:
        arguments += ["--gpu-memory-utilization", "0.85"]
    if side == OFFLOADING:
        extra = {"cpu_bytes_to_use": host_bytes}
        config = {"kv_connector": OFFLOADING, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        arguments += ["--kv-transfer-config", json.dumps(config)]
    block = options.choose(32, 16)
    return ServerOptions(
        model,
        device_blocks=options.choose(1024, DEVICE_TOKENS) // block + 1,
        host_cache_gb=host_bytes / 1e9 if side == OURS else None,
        dtype="bfloat16",
        block_size_tokens=block,
        max_model_len_tokens=max(load.hit_tokens, load.final_tokens) + 256,
        arguments=tuple(arguments),
    )


def _measure_or_stand_in(side: str, load: Load, model: Path, host_bytes: int, options: Options) -> Measured:
    """In a dry run, a peer that has read its configuration and then misses a GPU is played by a server
    without it.
    """
    try:
        return _measure(side, load, model, host_bytes, options)
    except ServerError as error:
        if not (options.is_dry and NEEDS_GPU in str(error)):
            raise
        print(f"{side} needs a GPU: a server without a connector stands in", flush=True)
        return _measure(NONE, load, model, host_bytes, options)


def _measure(side: str, load: Load, model: Path, host_bytes: int, options: Options) -> Measured:
    log_path = options.output / f"vllm-{side.replace(' ', '-')}.log"
    server = VllmServer(server_options(side, load, model, host_bytes, options), log_path)
    print(f"{side}: starting", flush=True)
    try:
        server.start(options.choose(*START_TIMEOUT_S))
        print(f"{side}: answers after {server.start_s:.0f} s", flush=True)

        async def ask() -> Measured:
            async with EngineClient(server.base_url, str(model)) as client:
                return await measure(client, load, options.seed)

        return asyncio.run(ask())
    finally:
        server.stop()


def _cells(side: str, played: Played) -> Iterator[Cell]:
    for number, turns in enumerate(played.ttft_s):
        yield Cell(
            TABLE,
            {
                "server": side,
                "round": str(number),
                "TTFT p50, ms": f"{1e3 * median(turns):.1f}",
                "TTFT p99, ms": f"{1e3 * percentile(turns, 0.99):.1f}",
                "tokens/s of all rounds": f"{played.tokens_per_s:,.0f}",
                "tokens from beyond the device": f"{played.external_tokens:,}",
            },
        )


def _rows(side: str, found: dict[str, Measured], failures: dict[str, str], load: Load) -> Iterator[Row]:
    """The rows that can be made now that ``side`` is through."""
    of_side = {
        OURS: (HIT, ANSWERS),
        OFFLOADING: (HIT_PEER, P50, P99, WORST, RATE),
        NONE: (P50_NONE, RATE_NONE),
    }[side]
    missing = [failures[each] for each in (OURS, side) if each in failures]
    if missing:
        yield from (Row(goal, failure=missing[0]) for goal in of_side)
        return
    pairs, ours = found[OURS]
    hits = tuple(1e3 * pair.hit_s for pair in pairs)
    if side == OURS:
        yield Row(HIT, hits, tuple(1e3 * pair.cold_s for pair in pairs))
        full = load.hit_tokens - 2 * 32  # but for the last token's block, and rounding
        wrong = sum(not pair.same_answer or pair.external_tokens < full for pair in pairs)
        yield Row(ANSWERS, (float(wrong),))
        return
    peer_pairs, theirs = found[side]
    if side == OFFLOADING:
        yield Row(HIT_PEER, hits, tuple(1e3 * pair.hit_s for pair in peer_pairs))
        yield _percentile(P50, ours, theirs, 0.5)
        yield _percentile(P99, ours, theirs, 0.99)
        rounds = [(1e3 * median(a), 1e3 * median(b)) for a, b in zip(ours.ttft_s, theirs.ttft_s, strict=True)]
        worst = max(rounds, key=lambda pair: pair[0] / pair[1])
        yield Row(WORST, worst[:1], worst[1:])
        yield Row(RATE, (ours.tokens_per_s,), (theirs.tokens_per_s,))
    else:
        yield _percentile(P50_NONE, ours, theirs, 0.5)
        yield Row(RATE_NONE, (ours.tokens_per_s,), (theirs.tokens_per_s,))


def _percentile(goal: Goal, ours: Played, theirs: Played, share: float) -> Row:
    return Row(
        goal, (1e3 * percentile(ours.all_ttft_s, share),), (1e3 * percentile(theirs.all_ttft_s, share),)
    )
