"""How each command of the pages is tested: one line for each, in the order of its page, by its beginning.

``tests/unit/test_page_commands.py`` fails for a command that is not here, ``tests/vllm`` runs those that need
no engine; ``tests/e2e``, ``tests/sglang`` and ``tests/dynamo`` run the others, nightly.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.engines.pages import Command, commands_of, pages
from tests.engines.reader import lines_of

PAGES = [page for page in pages() if commands_of(page)]


class How(NamedTuple):
    """``place`` empty: not run by these tests, and ``why``."""

    place: str
    why: str = ""
    statuses: tuple[int, ...] = (0,)
    keys: str = ""

    def lines(self, command: Command) -> str:
        """For a script."""
        return lines_of(command, self.statuses, self.keys)


HOME, CHECKOUT = How("home"), How("checkout")
"""Run without an engine: in a folder with nothing but ``deploy/launch``, or with the whole checkout."""
WARNS = How("home", statuses=(0, 1))  # kvbm doctor: 1 is a warning, and a machine may have some
SERVES = How("server")
"""Starts servers, alone, and a prompt is answered."""
BESIDE = How("beside")
"""Run beside the server of its page."""
ENDLESS = How("beside", statuses=(124,))  # a program that goes on until it is ended
PASTED = How("", "the quick start's test pastes it, with the wheel")


def seen_by(test: str) -> How:
    """A test runs it, or its like."""
    return How("", test)


def same_as(page: str) -> How:
    """Run where ``page`` has it, word for word."""
    return How("same", page)


INDEX = How("", "takes packages from an index; gigabytes")
LONG = How("", "minutes to hours; the tests and benchmarks themselves")
GPU = How("", "needs GPUs")
TRTLLM = How("", "TensorRT-LLM needs a GPU; tests/trtllm has a double of its executor")
DOTS = How("", "has dots for what the reader fills in")
HUB = How("", "takes a program from GitHub; tests/benchmarks/test_lmbenchmark.py knows it")
KEYS_OF_NATS = seen_by("tests/e2e/test_serve_line.py")
PAIR = seen_by("tests/e2e/test_disaggregated.py")
REASONS = (PASTED, INDEX, LONG, GPU, TRTLLM, DOTS, HUB)
"""All that there are for a command that no test sees as it is written."""

TABLE: dict[str, list[tuple[str, How]]] = {
    "CONTRIBUTING.md": [
        ("make test ", LONG),
        ("make quick", LONG),
        ("make packaging", LONG),
        ("make nightly", LONG),
        ("make lint typecheck", LONG),
        ("make docs", seen_by("tests/unit/test_site.py")),
        *[(f".venv/bin/pytest {what}", LONG) for what in ("tests/unit", "tests/property")],
        *[(f".venv/bin/pytest -m {what}", LONG) for what in ("vllm", "sglang", "dynamo", "e2e")],
        ("make test SETUP_FLAGS", LONG),
        ("make test PYTEST_ARGS", LONG),
        *[(f".venv/bin/python -m tests.mutants {words}", LONG) for words in ("  ", "audit LoRA")],
        *[(f".venv/bin/python -m tests.shake tests/{what}", LONG) for what in ("trtllm", "faults")],
        ("make newest", LONG),
        ("make locks", INDEX),
        ("gcc ", LONG),
        ("export ASAN_OPTIONS", LONG),
        ("LD_PRELOAD", LONG),
        ("KVBM_TRTLLM_SOURCE=DIR", TRTLLM),
    ],
    "README.md": [
        ("make demo", seen_by("tests/benchmarks/test_demo.py")),
        ("make test", LONG),
        ("pip install .", CHECKOUT),
        ("kvbm version", HOME),
        ("kvbm doctor", WARNS),
        ("export DYN_KVBM_CPU_CACHE_GB=20", SERVES),
        ("vllm serve Qwen/Qwen3-0.6B", SERVES),
        ("export DYN_KVBM_DISK_CACHE_DIR", SERVES),
        ("python -m sglang.launch_server", SERVES),
        ("export DYN_KVBM_CPU_CACHE_GB=20", HOME),
        ("trtllm-serve", TRTLLM),
        ("export DYN_KVBM_DISK_CACHE_GB", HOME),
        ("export KVBM_REMOTE_URL=redis", HOME),
        ("export KVBM_REMOTE_URL=file", HOME),
        ('pip install ".[s3]"', INDEX),
        ('pip install ".[mooncake]"', INDEX),
    ],
    "docs/benchmarks.md": [
        ("make bench  ", LONG),
        ("make bench ONLY", LONG),
        ("make bench-full", LONG),
        ("make bench BENCH_ARGS", LONG),
        ("python -m benchmarks.trace", CHECKOUT),
        ("python -m benchmarks.trace.sharing", seen_by("tests/benchmarks/test_trace_bench.py")),
        ("python -m benchmarks.plan", seen_by("tests/benchmarks/test_trace_bench.py")),
        ("python -m benchmarks.fleet", seen_by("tests/benchmarks/test_fleet_bench.py")),
        ("git clone", HUB),
        ("python3 -m venv lmbenchmark-venv", HUB),
        ("python -m benchmarks.lmbenchmark", HUB),
    ],
    "docs/configuration.md": [("vllm serve MODEL", SERVES)],
    "docs/disk-files.md": [
        ("export DYN_KVBM_DISK_CACHE_GB", HOME),
        ("export KVBM_DISK_TO_DEVICE", HOME),
        ("kvbm disk inspect /mnt/nvme", HOME),
        ("kvbm disk verify /mnt/nvme", HOME),
    ],
    "docs/doctor.md": [
        ("kvbm doctor  ", WARNS),
        ("kvbm doctor --engine vllm --model", WARNS),
        ("kvbm doctor --problems", WARNS),
        ("kvbm doctor --json", WARNS),
        ("kvbm doctor --engine vllm; [", DOTS),
    ],
    "docs/dynamo.md": [
        ("pip uninstall kvbm", same_as("docs/migrating.md")),
        ('pip install "ai-dynamo[vllm]', INDEX),
        ("deploy/launch/dynamo/agg_kvbm.sh", PASTED),
        ("WORKERS=2 deploy/launch/dynamo/agg_kvbm.sh", seen_by("tests/dynamo/test_serving.py")),
        ("deploy/launch/dynamo/disagg_kvbm.sh", seen_by("tests/dynamo/test_serving.py")),
        ("deploy/launch/dynamo/disagg_kvbm_2p2d.sh", seen_by("tests/dynamo/test_command_lines.py")),
        *[(text, PASTED) for text in ("python3 - > prompt.json", "ask()", "ask ", "ask ")],
        ("kvbm why", PASTED),
        ("kvbm status", PASTED),
        ("python -m dynamo.frontend", SERVES),
        ("export DYN_KVBM_CPU_CACHE_GB", SERVES),
        ("python -m dynamo.vllm --model MODEL", SERVES),
        ("export VLLM_NIXL_SIDE_CHANNEL_HOST", seen_by("tests/dynamo/test_command_lines.py")),
        ("python -m dynamo.vllm --model MODEL", seen_by("tests/dynamo/test_command_lines.py")),
        ("python -m dynamo.vllm --model MODEL", seen_by("tests/dynamo/test_command_lines.py")),
        ("deploy/launch/dynamo/clear_kv_blocks.py", seen_by("tests/dynamo/test_serving.py")),
    ],
    "docs/events.md": [
        ("from kvbm_core.events.consumer import ZmqReader", ENDLESS),
        ("kvbm keys new /etc/kvbm/keys --name router", HOME),
        ("export KVBM_CURVE_KEY_FILE", HOME),
        ("from kvbm_core.config import KvbmSettings", HOME),
    ],
    "docs/extending.md": [
        ("from kvbm_core.testing.policy_contract", seen_by("tests/contract/test_extending.py")),
        ("from __future__", HOME),
        ("from contextlib", seen_by("tests/contract/test_extending.py")),
        ("from __future__", HOME),
        (
            "export DYN_KVBM_CPU_CACHE_GB=1 KVBM_REMOTE_URL=sqlite",
            seen_by("tests/contract/test_extending.py"),
        ),
        ("kvbm doctor", seen_by("tests/contract/test_extending.py")),
        ("kvbm remote ls sqlite", seen_by("tests/contract/test_extending.py")),
        ("import numpy", seen_by("tests/contract/test_extending.py")),
        ("from __future__", HOME),
    ],
    "docs/fleet.md": [
        ("kvbm keys new /etc/kvbm/keys", HOME),
        ("export KVBM_CURVE_KEY_FILE", HOME),
        ("export KVBM_CURVE_ALLOWED", HOME),
        ("export ETCD_ENDPOINTS", HOME),
        ("export ETCD_AUTH_CA", HOME),
        ("export ETCD_AUTH_CLIENT_CERT", HOME),
        ("export DYN_KVBM_CPU_CACHE_GB=20", HOME),
        ("CONFIG=", HOME),
        ("vllm serve MODEL --tensor-parallel-size 2", seen_by("tests/e2e/test_apart.py")),
        ("vllm serve MODEL --tensor-parallel-size 2", seen_by("tests/e2e/test_apart.py")),
        ("kvbm fleet status", BESIDE),
        ("kvbm fleet reset --all --tier disk", BESIDE),
        ("kvbm fleet drain --instance node-1", BESIDE),
        ("kvbm fleet resume --instance node-1", BESIDE),
        ("curl -s localhost:8000/tokenize", BESIDE),
        ("kvbm pin chat", BESIDE),
        ("kvbm pin system", BESIDE),
        ("kvbm lookup", BESIDE),
        ("kvbm quota", BESIDE),
        ("kvbm clear --all --salt-file", BESIDE),
        ("kvbm clear --all --tokens", BESIDE),
        ("kvbm unpin", BESIDE),
        ("(umask 077; openssl rand", HOME),
        ("export KVBM_CONTROL=socket,http", HOME),
        ("curl -s http://127.0.0.1:6890/v1/orders", BESIDE),
        ("kvbm keys operator ~/operator.nk", HOME),
        ("export KVBM_CONTROL=nats", DOTS),
        ("export NATS_SERVER", HOME),
        ("kvbm fleet status --key", KEYS_OF_NATS),
    ],
    "docs/gpu.md": [
        ("python -m benchmarks.gpu  ", GPU),
        ("python -m benchmarks.gpu --dry-run", seen_by("tests/benchmarks/test_gpu_bench.py")),
    ],
    "docs/kubernetes.md": [
        ("container/build.sh", seen_by("tests/unit/test_containers.py")),
        ("container/run.sh", seen_by("tests/unit/test_containers.py")),
        ("container/build.sh", seen_by("tests/unit/test_containers.py")),
        ("kubectl apply", seen_by("tests/unit/test_containers.py")),
    ],
    "docs/library.md": [
        ("pip install .", same_as("README.md")),
        ("import numpy", HOME),
        ("import tempfile", HOME),
        ("import subprocess", HOME),
    ],
    "docs/metrics.md": [
        ("DYN_KVBM_METRICS=true vllm serve ...", DOTS),
        ("kvbm status", BESIDE),
        ("kvbm top", BESIDE),
        ("docker compose", seen_by("tests/unit/test_deploy_and_docs.py")),
        ("DYN_KVBM_METRICS=true deploy/launch/agg_kvbm.sh", SERVES),
    ],
    "docs/migrating.md": [
        ("pip uninstall kvbm", How("checkout", keys="y")),
        ('pip install ".[vllm]"', CHECKOUT),
        ("kvbm version", HOME),
        ("kvbm doctor --engine vllm", WARNS),
    ],
    "docs/operating.md": [
        ("kvbm top  ", BESIDE),
        ("kvbm top http://node-1:6880 node-2:6881", BESIDE),
        ("kvbm top --key", KEYS_OF_NATS),
        ("ETCD_ENDPOINTS=https://etcd:2379 kvbm top", seen_by("tests/unit/test_instances.py")),
        ("kvbm top --instance node-1", BESIDE),
        ("kvbm top --once", BESIDE),
        ("kvbm top --json", BESIDE),
        ("kvbm status  ", BESIDE),
        ("kvbm status --watch 2", BESIDE),
        ("kvbm status --port 6881", BESIDE),
        ("kvbm status --json", BESIDE),
    ],
    "docs/peers.md": [
        ("export DYN_KVBM_CPU_CACHE_GB=20 KVBM_PEERS=zmq", HOME),
        ("export KVBM_PEER_BIND", HOME),
        ("export KVBM_CURVE_KEY_FILE", HOME),
    ],
    "docs/quick-start.md": [
        ("pip install .", same_as("README.md")),
        ("kvbm version", same_as("README.md")),
        ("kvbm doctor", same_as("README.md")),
        ("export DYN_KVBM_CPU_CACHE_GB=20", same_as("README.md")),
        ("vllm serve Qwen/Qwen3-0.6B", same_as("README.md")),
        ("export DYN_KVBM_DISK_CACHE_DIR", same_as("README.md")),
        ("python -m sglang.launch_server", same_as("README.md")),
        ("export DYN_KVBM_CPU_CACHE_GB=20", same_as("README.md")),
        ("trtllm-serve", TRTLLM),
        ('pip install "ai-dynamo[vllm]', INDEX),
        ("deploy/launch/dynamo/agg_kvbm.sh", PASTED),
        ("kvbm status", BESIDE),
        ("kvbm why", BESIDE),
        ("export DYN_KVBM_DISK_CACHE_GB", HOME),
    ],
    "docs/remote.md": [
        ("mkdir -m 700 /mnt/kv/blocks", SERVES),
        ("export KVBM_REMOTE_URL=file:///mnt/kv/blocks", SERVES),
        ("export DYN_KVBM_CPU_CACHE_GB=20", SERVES),
        ("vllm serve Qwen/Qwen3-0.6B", SERVES),
        ("python -m benchmarks.remote.sharing", seen_by("tests/benchmarks/test_sharing_bench.py")),
        ("export KVBM_REMOTE_URL", HOME),
        ("mkdir -m 700 /dev/shm/kv", HOME),
        ("export KVBM_REMOTE_URL=file:///dev/shm/kv", HOME),
        ("openssl rand -base64 32 > /run/secrets/kv", HOME),
        ("export KVBM_REMOTE_SECRET_FILE", HOME),
        ("printf '%s' 'the password'", HOME),
        ("export KVBM_REMOTE_URL=rediss", HOME),
        ("pip install mooncake", INDEX),
        ("mooncake_master", seen_by("tests/contract/test_mooncake_engine.py")),
        ("mooncake_client", DOTS),
        ("export KVBM_REMOTE_URL=mooncake", HOME),
        ("pip install obstore", INDEX),
        ("export KVBM_REMOTE_URL=s3", HOME),
        ("export AWS_REGION", HOME),
        ("15 * * * * kvbm remote sweep", seen_by("tests/unit/test_cli_remote_engines.py")),
    ],
    "docs/sglang.md": [
        ('pip install ".[sglang]"', INDEX),
        ("export DYN_KVBM_DISK_CACHE_DIR", PASTED),
        ("python -m sglang.launch_server", PASTED),
        *[(text, PASTED) for text in ("python3 - > prompt.json", "ask()", "ask ", "curl ", "ask ")],
        ("kvbm status", PASTED),
        ("export DYN_KVBM_CPU_CACHE_GB=20", SERVES),
        ("python -m sglang.launch_server", SERVES),
    ],
    "docs/sizing.md": [
        ("kvbm plan --model meta-llama/Llama-3.1-8B", HOME),
        ("kvbm plan trace.jsonl", HOME),
        ("export DYN_KVBM_ENABLE_RECORD", HOME),
        ("kvbm plan /var/log/kvbm/20261123", seen_by("tests/e2e/test_recording.py")),
        ("kvbm replay trace.jsonl --device 40GB", HOME),
        ("kvbm replay trace.jsonl --device 512000t", HOME),
    ],
    "docs/tracing.md": [
        ("pip install opentelemetry-sdk", INDEX),
        ("export OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", HOME),
        ("vllm serve ...", DOTS),
        ("nsys profile", GPU),
        ("nsys stats", GPU),
        ("nsys-ui", GPU),
    ],
    "docs/troubleshooting.md": [
        ("kvbm doctor --engine vllm --problems", WARNS),
        ("kvbm why --missed", BESIDE),
    ],
    "docs/trtllm.md": [
        ("pip install .", same_as("README.md")),
        ("pip install --extra-index-url", INDEX),
        *[("export DYN_KVBM_", HOME)] * 4,
        ("export KVBM_DISK_TO_DEVICE", HOME),
        ("cat > /tmp/kvbm_llm_api_config.yaml", TRTLLM),
        ("trtllm-serve", TRTLLM),
        ("curl localhost:8000/v1/chat/completions", TRTLLM),
        ("docker compose", seen_by("tests/unit/test_deploy_and_docs.py")),
        ("DYN_KVBM_METRICS=true DYN_KVBM_CPU_CACHE_GB=20 trtllm-serve", TRTLLM),
        ("kvbm status", TRTLLM),
        ("git clone", HUB),
        ("./long_input_short_output_run.sh", HUB),
        ("cat > /tmp/llm_api_config.yaml", TRTLLM),
        ("trtllm-serve", TRTLLM),
        ("./long_input_short_output_run.sh", HUB),
    ],
    "docs/vllm.md": [
        ("pip install .", same_as("README.md")),
        ('pip install ".[vllm]"', same_as("docs/migrating.md")),
        ("export DYN_KVBM_CPU_CACHE_GB=20", PASTED),
        ("vllm serve Qwen/Qwen3-0.6B", PASTED),
        ("export VLLM_CPU_KVCACHE_SPACE", PASTED),
        ("deploy/launch/disagg_kvbm.sh", PAIR),
        ("deploy/launch/disagg_kvbm_2p2d.sh", seen_by("tests/vllm/test_launch_scripts.py")),
        ("vllm serve MODEL", PAIR),
        ("vllm serve MODEL", PAIR),
        ("export DYN_KVBM_METRICS=true VLLM_SERVER_DEV_MODE=1", PASTED),
        *[(text, PASTED) for text in ("python3 - > prompt.json", "ask()", "ask ", "curl ", "ask ")],
        ("kvbm why", PASTED),
        ("kvbm status", PASTED),
        ("git clone", HUB),
        ("./long_input_short_output_run.sh", HUB),
    ],
    "docs/why.md": [
        ("kvbm why ", BESIDE),
        ("kvbm why chatcmpl-7f3", BESIDE),
        ("kvbm why --missed --json", BESIDE),
    ],
}


def told(page: str) -> list[tuple[Command, How]]:
    """Each command of a page, and how it is tested."""
    commands, rows = commands_of(page), TABLE.get(page, [])
    table = "tests/page_commands.py"
    for number, command in enumerate(commands):
        row, where = rows[number][0] if number < len(rows) else None, f"{page}:{command.line}"
        assert row is not None and f"{command.text} ".startswith(row), (
            f"{where}: {table} has to say how {command.text.splitlines()[0]!r} is tested, or why not; "
            f"there is {row!r} in its place"
        )
    assert len(rows) == len(commands), f"{page}: {table} has commands that are gone"
    return [(command, how) for command, (_, how) in zip(commands, rows, strict=True)]
