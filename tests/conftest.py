"""What every test run shares: one seed, the order of tests, and honest words about what was not run."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests import costs, effort, hangs, leftovers, nights, second_try
from tests.engines.etcd_server import find_etcd
from tests.engines.mooncake_pool import find_mooncake
from tests.engines.nats_server import find_server as find_nats
from tests.engines.sglang.environment import PYTHON as SGLANG_PYTHON
from tests.engines.tiny_model import build_model
from tests.engines.valkey_server import find_server

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController

# What makes tables as wide as a terminal that is not there, or colors them: rich and typer look for these.
for _name in (
    "COLUMNS",
    "LINES",
    "FORCE_COLOR",
    "PY_COLORS",
    "GITHUB_ACTIONS",
    "TTY_COMPATIBLE",
    "TERMINAL_WIDTH",
):
    os.environ.pop(_name, None)

SEED_VARIABLE = "KVBM_TEST_SEED"
SEED = 1_126_208_001
"""The seed of each run of `make test`: the same code is tried in the same way wherever it runs. `make
nightly` draws one.
"""
TESTS = Path(__file__).parent
ENGINES = {
    "vllm": "vLLM",
    "sglang": "SGLang",
    "e2e": "vLLM",
    "dynamo": "Dynamo",
    "valkey": "a Valkey or Redis server",
    "mooncake": "Mooncake Store",
    "etcd": "etcd",
    "nats": "a NATS server",
}  # the marker and folder of tests, and what they need
RUN_ORDER = ("e2e", "sglang", "dynamo", "vllm")  # the longest files first: at the end one would be alone
# Tests that try more at night, or more of their combinations (tests/effort.py).
DEEPER = {
    *(TESTS / "property", TESTS / "faults", TESTS / "unit" / "test_peer_tier.py"),
    *(
        TESTS / "trtllm" / f"test_{name}.py"
        for name in ("random", "attention_dp", "double_soak", "double_ranks")
    ),
    *(TESTS / "vllm" / f"test_{name}.py" for name in ("arguments", "newest")),
    TESTS / "e2e" / "test_main_job.py",
    TESTS / "sglang" / "test_identity.py",
}
SHARED_NOT_RUN = "kvbm_not_run"  # a worker's NOT_RUN_KEY, on its way to the process that started it
NIGHTLY = "nightly"  # the marker of tests that `make test` leaves out, and their key in NOT_RUN_KEY
TOLD = "told"  # the property of a test that `tell` adds to
DYNAMO_PYTHON = Path(os.environ.get("KVBM_DYNAMO_PYTHON") or TESTS.parent / ".venv-dynamo" / "bin" / "python")

SEED_KEY = pytest.StashKey[int]()
NOT_RUN_KEY = pytest.StashKey[dict[tuple[str, str], int]]()

# No verdict by the clock: how long an example takes, and how long drawing it takes, is the machine's matter.
settings.register_profile(
    "kvbm",
    deadline=None,
    max_examples=50,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(NIGHTLY, settings.get_profile("kvbm"), max_examples=300)
settings.load_profile("kvbm")


def missing_engines() -> set[str]:
    """Those that the tests cannot use; nothing is imported to find out. SGLang and Dynamo have their own
    environments.
    """
    is_there = {
        "vLLM": find_spec("vllm") is not None,
        "SGLang": SGLANG_PYTHON.exists(),
        "Dynamo": DYNAMO_PYTHON.exists(),
        "a Valkey or Redis server": find_server() is not None,
        "Mooncake Store": find_mooncake() is not None,
        "etcd": find_etcd() is not None and find_spec("etcd3") is not None,
        "a NATS server": find_nats() is not None and find_spec("nats") is not None,
    }
    return {engine for engine, found in is_there.items() if not found}


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make nightly` says, and `make test`."""
    second_try.pytest_addoption(parser)
    costs.pytest_addoption(parser)
    nights.pytest_addoption(parser)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """One seed for our own random tests and for hypothesis, unless --hypothesis-seed says another.

    A worker of pytest-xdist has it from the process that started it.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # or all that tests start would ignore it
    hangs.pytest_configure(config)
    second_try.pytest_configure(config)
    costs.pytest_configure(config)
    leftovers.pytest_configure(config)
    nights.pytest_configure(config)
    effort.IS_NIGHTLY = config.getoption(nights.NIGHTLY_OPTION)
    if effort.IS_NIGHTLY:
        settings.load_profile(NIGHTLY)
    drawn = random.SystemRandom().randrange(2**32) if effort.IS_NIGHTLY else SEED
    seed = int(_worker(config).get(SEED_VARIABLE) or os.environ.get(SEED_VARIABLE) or drawn)
    config.stash[SEED_KEY] = seed
    os.environ[SEED_VARIABLE] = str(seed)  # for what draws as it is imported, and for processes of tests
    config.stash[NOT_RUN_KEY] = {}
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(seed)


def _worker(config: pytest.Config) -> dict[str, Any]:
    """What a worker of pytest-xdist was given; nothing in any other process."""
    return getattr(config, "workerinput", {})


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    """The seed, before a worker starts."""
    node.workerinput[SEED_VARIABLE] = node.config.stash[SEED_KEY]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: WorkerController, error: object) -> None:
    """What a worker has not run, as each of them collects everything; one that died says nothing."""
    node.config.stash[NOT_RUN_KEY].update(getattr(node, "workeroutput", {}).get(SHARED_NOT_RUN, {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker's last words."""
    if _worker(session.config):
        session.config.workeroutput[SHARED_NOT_RUN] = session.config.stash[NOT_RUN_KEY]  # type: ignore[attr-defined]


def pytest_report_header(config: pytest.Config) -> list[str]:
    """The seed, to repeat this very run; and what TensorRT-LLM's own files lack, if there are any."""
    seed = config.stash[SEED_KEY]
    said = [f"random seed: {seed} (repeat with {SEED_VARIABLE}={seed})"]
    if os.environ.get("KVBM_TRTLLM_SOURCE") and find_spec("torch"):
        from tests.trtllm.double import lacking

        said += filter(None, [lacking.line()])
    return said


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Folders that need a missing engine are not even looked into; their files are counted instead."""
    missing = missing_engines()
    for name, engine in ENGINES.items():
        folder = TESTS / name
        inside = (
            folder in (collection_path, *collection_path.parents) and collection_path.name != "conftest.py"
        )
        if engine in missing and inside:
            config.stash[NOT_RUN_KEY][engine, f"tests/{name}"] = len(list(folder.rglob("test_*.py")))
            return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks by folder, then real engines first and fast tests last."""
    missing = missing_engines()
    for item in items:
        for name in ENGINES:
            if TESTS / name in item.path.parents:
                item.add_marker(name)
    items.sort(key=_rank)
    for item in items:
        for engine in {ENGINES[name] for name in ENGINES if item.get_closest_marker(name)} & missing:
            item.add_marker(pytest.mark.skip(reason=f"{engine} is not installed"))
            counts = config.stash[NOT_RUN_KEY]
            counts[engine, "marked tests"] = counts.get((engine, "marked tests"), 0) + 1
    _leave_out(config, items)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported by now stays to the end: no later collection of garbage has to look at it.

    Engines are millions of objects, and many tests collect garbage to see that nothing is left. Python lets
    garbage grow to a quarter of what the last collection has left: that is little after the second one here,
    and was gigabytes in each worker.
    """
    gc.collect()
    gc.freeze()
    gc.collect()


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Nightly tests, which are counted; with --nightly all others but those that try more then."""
    markers = [item.get_closest_marker(NIGHTLY) for item in items]
    for item, marker in zip(items, markers, strict=True):
        assert marker is None or marker.args, f"{item.nodeid}: say why it is nightly"
    if effort.IS_NIGHTLY:
        is_run = [
            marker is not None or not DEEPER.isdisjoint((item.path, *item.path.parents))
            for item, marker in zip(items, markers, strict=True)
        ]
    else:
        is_run = [marker is None for marker in markers]
        if not all(is_run):
            config.stash[NOT_RUN_KEY][NIGHTLY, "tests"] = is_run.count(False)
    config.hook.pytest_deselected(items=[item for item, runs in zip(items, is_run, strict=True) if not runs])
    items[:] = [item for item, runs in zip(items, is_run, strict=True) if runs]


def _rank(item: pytest.Item) -> int:
    ranks = [rank for rank, name in enumerate(RUN_ORDER) if item.get_closest_marker(name)]
    return min(ranks, default=len(RUN_ORDER))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Just above the closing line: what tests told, the seed, and what a missing engine kept from being
    tested.
    """
    for report in [report for reports in terminalreporter.stats.values() for report in reports]:
        if getattr(report, "when", "") == "call":
            for line in [line for name, line in report.user_properties if name == TOLD]:
                terminalreporter.write_line(f"{report.nodeid}: {line}")
    terminalreporter.write_line(f"random seed: {config.stash[SEED_KEY]}")
    not_run = config.stash[NOT_RUN_KEY]
    for engine in sorted({engine for engine, _ in not_run}):
        what = ", ".join(
            f"{label}: {count}" for (of, label), count in sorted(not_run.items()) if of == engine
        )
        why = f"{engine} is not installed; make test installs it"
        if engine == NIGHTLY:
            why = "nightly, as CONTRIBUTING.md says; make nightly runs them"
        line = f"NOT RUN ({what}): {why}"
        terminalreporter.write_line(line, yellow=True, bold=True)


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    """This run's seed, for tests that draw their own numbers."""
    return request.config.stash[SEED_KEY]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with random weights: one KV cache group. Built once for real engines."""
    return build_model(tmp_path_factory.mktemp("tiny") / "qwen3")


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder for sockets: tmp_path grows with a test's name and its worker's, and a socket's path must be
    short.
    """
    # Now, or that would be below this one, in a test that makes it the place for such.
    tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory(prefix="kvbm-") as folder:
        yield Path(folder)


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Puts a line on what a test has seen into the summary; a worker's own output is seen by nobody."""
    return lambda line: request.node.user_properties.append((TOLD, line))


@pytest.fixture(autouse=True)
def _shared_generators(seed: int) -> None:
    """The generators that libraries and tests share begin each test alike."""
    random.seed(seed)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Random numbers that are the same for the same seed, whatever ran before."""
    return random.Random(seed)
