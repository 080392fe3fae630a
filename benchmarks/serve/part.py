"""Both servers are started, measured in turns and stopped."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from contextlib import ExitStack

import httpx

from benchmarks.figures import Figure, Goal
from benchmarks.serve import audit, throughput, ttft
from benchmarks.serve.workload import Side
from benchmarks.suite import CannotRun, Findings, Options
from tests.engines.client import EngineClient
from tests.engines.hybrid_model import ensure_hybrid
from tests.engines.process import ServerError
from tests.engines.tiny_model import ensure_model
from tests.engines.vllm_server import ServerOptions, VllmServer

DEVICE_BLOCKS = 280  # of 32 tokens: room for two prompts of 4,000, or for 64 short requests at once
HOST_CACHE_GB = 1.0
EMPTY_CONNECTOR = (
    "--kv-transfer-config",
    '{"kv_connector":"EmptyConnector","kv_role":"kv_both",'
    '"kv_connector_module_path":"tests.engines.empty_connector"}',
)


class ServePart:
    """TTFT and throughput on real servers, with kvbm and without."""

    name = "serve"
    help = "TTFT of a host hit, throughput and CPU time with nothing to reuse, cost of audits; vLLM servers"
    goals: Sequence[Goal] = (
        *(ttft.GOAL, ttft.STATES_GOAL),
        *(goal for load in throughput.LOADS for goal in (load.goal, load.cpu_goal)),
        *(audit.GOAL, audit.CPU_GOAL),
    )

    def run(self, options: Options) -> Findings:
        """See Part."""
        if importlib.util.find_spec("vllm") is None:
            raise CannotRun("vLLM is not installed")
        try:
            return self._run(options)
        except (ServerError, httpx.HTTPError) as error:
            raise CannotRun(str(error).partition("\n")[0]) from error

    def _run(self, options: Options) -> Findings:
        with ExitStack() as stack:
            options.told("building the model")
            model = ensure_model(options.output / "tiny-qwen3")
            servers = []
            for name, host_cache_gb in (("with-kvbm", HOST_CACHE_GB), ("without-kvbm", None)):
                options.told(f"starting vllm serve {name}")
                extra = EMPTY_CONNECTOR if options.empty_connector and host_cache_gb is None else ()
                settings = ServerOptions(
                    model, DEVICE_BLOCKS, host_cache_gb, dtype=options.dtype, arguments=extra
                )
                servers.append(stack.enter_context(VllmServer(settings, options.output / f"vllm-{name}.log")))
            peer = "vLLM, empty connector" if options.empty_connector else "vLLM, no connector"
            figures, complaints = asyncio.run(_measure(*servers, peer=peer, options=options))
            servers[1].stop()
            options.told("starting vllm serve with every hit audited")
            audited = ServerOptions(
                model, DEVICE_BLOCKS, HOST_CACHE_GB, dtype=options.dtype, env={"KVBM_AUDIT_RATE": "1"}
            )
            server = stack.enter_context(VllmServer(audited, options.output / "vllm-audited.log"))
            more, wrong = asyncio.run(_measure_audits(servers[0], server, options))
            figures += more
            complaints += wrong
            for running in (servers[0], server):
                running.stop()
            more, wrong = _measure_states(stack, options)
            figures += more
            complaints += wrong
        settings_of_run = {
            "model": "tiny Qwen3, random weights, 4 layers",
            "dtype": options.dtype,
            "device cache": f"{DEVICE_BLOCKS} blocks of 32 tokens",
            "host cache": f"{HOST_CACHE_GB:g} GB",
            "ttft": f"{ttft.PROMPT_TOKENS} tokens, one request at a time",
            "ttft with states": "tiny Qwen3-Next, random weights, 2 gated delta nets, 2 layers of attention",
            **{load.goal.name: load.text for load in throughput.LOADS},
        }
        return Findings(figures, complaints, settings_of_run)


async def _measure(
    with_kvbm: VllmServer, without: VllmServer, *, peer: str, options: Options
) -> tuple[list[Figure], list[str]]:
    """The figures, and what was wrong with the answers."""
    pairs, rounds = options.choose(8, 30, 60), options.choose(3, 30, 80)
    model = str(with_kvbm.options.model)
    async with (
        EngineClient(with_kvbm.base_url, model, with_kvbm.metrics_url) as ours,
        EngineClient(without.base_url, model) as plain,
    ):
        measured = await ttft.measure(ours, pairs, options.seed, options.told)
        figures, complaints = [ttft.figure(measured)], ttft.complaints(measured)
        for number, load in enumerate(throughput.LOADS, 1):
            loaded = await throughput.measure(
                *(Side(with_kvbm, ours), Side(without, plain), load),
                rounds=rounds,
                seed=options.seed + number,
                told=options.told,
            )
            options.told(f"{load.goal.name}: asking again what was answered otherwise")
            complaints += await throughput.ask_again_alone(ours, plain, load, loaded)
            figures += throughput.figures(load, loaded, peer)
    return figures, complaints


def _measure_states(stack: ExitStack, options: Options) -> tuple[list[Figure], list[str]]:
    """A model with states; vLLM's kernels for it know bfloat16 alone. vLLM's own offloading needs a GPU."""
    options.told("starting vllm serve of a model with states")
    model = ensure_hybrid(options.output / "tiny-qwen3-next", "qwen3_next")
    settings = ServerOptions(
        model, DEVICE_BLOCKS, HOST_CACHE_GB, dtype="bfloat16", arguments=("--enable-prefix-caching",)
    )
    server = stack.enter_context(VllmServer(settings, options.output / "vllm-states.log"))
    pairs = asyncio.run(_measure_hits(server, options))
    return [ttft.figure(pairs, ttft.STATES_GOAL)], [f"with states: {line}" for line in ttft.complaints(pairs)]


async def _measure_hits(server: VllmServer, options: Options) -> list[ttft.Pair]:
    async with EngineClient(server.base_url, str(server.options.model), server.metrics_url) as client:
        return await ttft.measure(client, options.choose(8, 30, 60), options.seed, options.told)


async def _measure_audits(
    plain: VllmServer, audited: VllmServer, options: Options
) -> tuple[list[Figure], list[str]]:
    model = str(plain.options.model)
    async with (
        EngineClient(plain.base_url, model, plain.metrics_url) as ours,
        EngineClient(audited.base_url, model, audited.metrics_url) as other,
    ):
        turns = await audit.measure(
            Side(plain, ours),
            Side(audited, other),
            options.choose(6, 20, 40),
            options.seed + 9,
            options.told,
        )
    return audit.figures(turns), audit.complaints(turns)
