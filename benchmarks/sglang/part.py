"""The part of the suite about SGLang: its storage backends beside kvbm, on its own pools and in its own
engine.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import LIMIT, Figure, Goal
from benchmarks.storage.place import disk_facts, working_folder
from benchmarks.suite import CannotRun, Findings, Options, WrongAnswer
from tests.engines import REPOSITORY
from tests.engines.job import EngineFailed
from tests.engines.sglang.engine import (
    HICACHE,
    NIXL,
    PAGE_TOKENS,
    WHOLE_PAGES,
    prompts_of,
    run_engine,
)
from tests.engines.sglang.environment import PYTHON, build_tiny_model, is_installed, variables

PAGES_BYTES = (32 << 10, 128 << 10, 512 << 10, 2 << 20)
PEERS = {"file": 3.0, "nixl": 1.5}
"""SGLang's own backends, and how many times theirs ours is to be."""
DIRECTIONS = ("backup", "prefetch")
QUICK_BYTES, TOTAL_BYTES = 64 << 20, 128 << 20
ENGINES_BYTES = 2 << 30  # what the engines' tiers and the peers' files may need
TTFT_TOKENS = 3072
DRIVER_TIMEOUT_S = 1800


def page_goal(direction: str, page_bytes: int, peer: str) -> Goal:
    """Ours over one peer's."""
    size = f"{page_bytes >> 10} KiB" if page_bytes < 1 << 20 else f"{page_bytes >> 20} MiB"
    return Goal(
        f"{direction}, pages of {size}, against {peer}", "GB/s", PEERS[peer], "higher", f"SGLang {peer}"
    )


PAGE_GOALS = {
    (direction, size, peer): page_goal(direction, size, peer)
    for size in PAGES_BYTES
    for direction in DIRECTIONS
    for peer in PEERS
}
STATS = Goal("1,000 calls of get_stats", "ms", 5.0, "lower", LIMIT)
COLD, DEVICE = "cold", "hit on the device"
TTFT = Goal(f"TTFT of a hit on disk, {TTFT_TOKENS:,} tokens", "s", 0.5, "lower", COLD)
EXACT = {
    parallel: Goal(
        f"{parallel.upper()}=2, after a flush: difference of log-probabilities", "", 0.0, "lower", LIMIT
    )
    for parallel in ("tp", "pp")
}


class SglangPart:
    """Pages between SGLang's host pools and the disk, TTFT of a hit, and whether answers stay the same."""

    name = "sglang"
    help = "SGLang HiCache: kvbm beside its file and nixl backends; TTFT of a hit; exactness with two ranks"
    goals: Sequence[Goal] = (*PAGE_GOALS.values(), STATS, TTFT, *EXACT.values())

    def run(self, options: Options) -> Findings:
        """See Part."""
        if not is_installed():
            raise CannotRun("the environment with SGLang is missing: make setup-sglang")
        total_bytes = options.choose(QUICK_BYTES, TOTAL_BYTES, TOTAL_BYTES)
        with working_folder(options, 5 * total_bytes + ENGINES_BYTES) as folder:
            pages = _pages(folder, total_bytes, options)
            try:
                model = build_tiny_model(options.output.absolute() / "tiny-qwen3-sglang")
                engines = [_ttft(folder, model, options), *_exactness(folder, model, options)]
            except EngineFailed as error:
                raise CannotRun(str(error).partition("\n")[0] + f"; see {folder}") from error
            settings = {
                "SGLang": "0.5.23 on a CPU, its own host pools (page first), controller and engine",
                "pages": f"{total_bytes >> 20} MiB a turn, batches of 128 pages, one call at a time "
                "as SGLang does",
                "backup": "until durable: the file system is synchronized within the time, for every backend",
                "prefetch": "from the disk: what the kernel keeps of the files is dropped before; "
                "all bytes compared",
                "nixl": "POSIX, O_DIRECT (its default)",
                "ttft": f"{TTFT_TOKENS} tokens, one new token, one request at a time; tiny Qwen3; "
                "attention of new "
                "tokens alone, as on a GPU: SGLang's own for a CPU computes the whole prompt's at a hit",
                **disk_facts(folder),
            }
        return Findings([*pages, *engines], (), settings)


# ---------------------------------------------------------------- pages


def _pages(folder: Path, total_bytes: int, options: Options) -> Iterator[Figure]:
    job = {
        "folder": str(folder / "pages"),
        "pages_bytes": list(PAGES_BYTES),
        "total_bytes": total_bytes,
        "rounds": options.choose(2, 5, 12),
        "seed": options.seed,
        "sides": ["kvbm", *PEERS],
    }
    found = _driven(folder, job, options)
    return iter([*_page_figures(found["pages"]), Figure(STATS, tuple(found["get_stats_ms"]))])


def _page_figures(pages: Mapping[str, Mapping[str, list[tuple[float, float]]]]) -> Iterator[Figure]:
    for (direction, size, peer), goal in PAGE_GOALS.items():
        place = DIRECTIONS.index(direction)
        series = {name: tuple(rates[place] for rates in taken) for name, taken in pages[str(size)].items()}
        yield Figure(goal, series["kvbm"], {goal.against: series[peer]})


def _driven(folder: Path, job: dict[str, Any], options: Options) -> dict[str, Any]:
    job_file, result_file, log_file = (
        folder / name for name in ("pages.json", "pages-result.json", "pages.txt")
    )
    job_file.write_text(json.dumps(job))
    command = [str(PYTHON), "-m", "benchmarks.sglang.driver", str(job_file), str(result_file)]
    with log_file.open("w") as log:
        process = subprocess.Popen(
            command, cwd=REPOSITORY, env=variables(), stdout=subprocess.PIPE, stderr=log, text=True
        )
        assert process.stdout is not None  # noqa: S101 - for the type checker
        for line in process.stdout:
            if "round" in line:
                options.told(f"sglang: {line.strip()}")
        process.wait(DRIVER_TIMEOUT_S)
    if not result_file.exists():
        lines = log_file.read_text(errors="replace").strip().splitlines() or ["no output"]
        failure = WrongAnswer if "other bytes" in lines[-1] else CannotRun
        raise failure(f"the driver of SGLang's backends ended with {process.returncode}: {lines[-1]}")
    result: dict[str, Any] = json.loads(result_file.read_text())
    return result


# ---------------------------------------------------------------- engine


def _ttft(folder: Path, model: Path, options: Options) -> Figure:
    """Cold, a hit on disk and one on the device (the best that any cache can do) of each prompt.

    The first prompt warms up.
    """
    options.told("sglang: TTFT")
    place = folder / "ttft"
    place.mkdir()
    prompts = prompts_of(options.seed, 1 + options.choose(2, 8, 20), TTFT_TOKENS)
    pages = TTFT_TOKENS // PAGE_TOKENS
    steps: list[Any] = []
    for number in range(len(prompts)):
        steps += [{"ask": [number]}, {"stored": (number + 1) * pages}, "flush", {"ask": [number, number]}]
    found = run_engine(
        place,
        steps,
        prompts=prompts,
        answer_tokens=1,
        environment={"OMP_NUM_THREADS": "2"},
        # Most of a hit's time would be attention that is thrown away, wherever it comes from.
        only_new_rows=True,
        model_path=str(model),
        **{**HICACHE, "max_total_tokens": 8192, "dtype": "bfloat16"},
    )
    cold = [answer for (answer,) in found["answers"][2::2]]
    hit, again = zip(*found["answers"][3::2], strict=True)
    for answers, source in ((hit, "storage"), (again, "device")):
        sources = [answer["from"] for answer in answers]
        if any(tokens[source] < (pages - 1) * PAGE_TOKENS for tokens in sources):
            raise WrongAnswer(f"a prompt did not come from the {source}: {sources}")
        if [answer["tokens"] for answer in cold] != [answer["tokens"] for answer in answers]:
            raise WrongAnswer(f"a hit on the {source} was answered otherwise than cold")
    hits, colds, agains = (tuple(answer["seconds"] for answer in answers) for answers in (hit, cold, again))
    return Figure(TTFT, hits, {COLD: colds, DEVICE: agains})


def _exactness(folder: Path, model: Path, options: Options) -> Iterator[Figure]:
    """The largest difference of log-probabilities between a hit on the device and one of kvbm, or of
    SGLang's nixl backend.
    """
    prompts = prompts_of(options.seed, 2)
    for parallel, goal in EXACT.items():
        differences = {}
        for backend in ("kvbm", "nixl"):
            options.told(f"sglang: {parallel.upper()}=2, {backend}")
            place = folder / f"{parallel}-{backend}"
            place.mkdir()
            differences[backend] = _difference(place, model, prompts, backend, f"{parallel}_size")
        yield Figure(goal, (differences["kvbm"],), {"SGLang nixl": (differences["nixl"],)})


def _difference(folder: Path, model: Path, prompts: list[list[int]], backend: str, parallel: str) -> float:
    ranks, engine = 2, dict(HICACHE)
    stored: dict[str, int] = {"stored": ranks * WHOLE_PAGES * len(prompts)}
    if backend == "nixl":
        engine |= {
            "hicache_storage_backend": "nixl",
            "hicache_storage_backend_extra_config": json.dumps(NIXL),
        }
        # A file each for K and V; with PP its ranks write the same ones.
        stored = {"files": 2 * WHOLE_PAGES * len(prompts) * (ranks if parallel == "tp_size" else 1)}
    engine |= {"model_path": str(model), parallel: ranks}
    found = run_engine(folder, ["ask", stored, "ask", "flush", "ask"], prompts=prompts, **engine)
    _, own, warm = found["answers"]
    differences: list[float] = [
        abs(one - other)
        for before, after in zip(own, warm, strict=True)
        for one, other in zip(before["logprobs"], after["logprobs"], strict=True)
    ]
    return max(differences)
