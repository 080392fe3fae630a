"""The part of the suite about the disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.figures import Figure, Goal
from benchmarks.storage import checking, directory, heads, lookup, records, startup, throughput, weights
from benchmarks.storage.fio_side import DEPTH, ENGINES, HUGE_PAGES, MISSING, fio_problem, fio_version
from benchmarks.storage.kvbm_side import BATCH_BYTES
from benchmarks.storage.place import disk_facts, working_folder
from benchmarks.storage.throughput import Scene
from benchmarks.suite import Findings, Options

TOTAL_BYTES = 2 << 30
QUICK_BYTES = 256 << 20
SMALL_BYTES = 512 << 20
"""Beside vLLM, which takes long for many small files, and for checksums."""
FILES = 3  # ours, that of AIO alone, and a peer's
SPARE_BYTES = 2 << 30  # and room for the headers of 100 GB of records
QUICK_STORED_BYTES = 5 * 10**9


class StoragePart:
    """Blocks between a host slab and a file on a local disk."""

    name = "storage"
    help = "blocks to a local disk and back, beside fio and vLLM's fs tier; lookups; checksums"
    goals: Sequence[Goal] = (
        *throughput.FIO_GOALS,
        *throughput.VLLM_GOALS,
        *lookup.GOALS,
        *throughput.CHECKSUM_GOALS,
        *startup.GOALS,
        *checking.GOALS,
        *weights.GOALS,
        *directory.GOALS,
        *records.GOALS,
        *heads.GOALS,
    )

    def run(self, options: Options) -> Findings:
        """See Part."""
        total_bytes = options.choose(QUICK_BYTES, TOTAL_BYTES, TOTAL_BYTES)
        with working_folder(options, FILES * total_bytes + SPARE_BYTES) as folder:
            missing = {f"fio {engine}": why for engine in ENGINES if (why := fio_problem(engine, folder))}
            if why := throughput.vllm_problem():
                missing[throughput.VLLM] = why
            rounds = options.choose(2, 3, 10)
            scene = Scene(
                folder, total_bytes, rounds, options.seed, missing, options.told, disk_facts(folder)
            )
            beside_fio = _beside_fio(scene)
            small_bytes = min(total_bytes, SMALL_BYTES)
            beside_vllm = _beside_vllm(replace(scene, total_bytes=small_bytes))
            options.told("storage: lookups")
            found = lookup.measure(options.choose(5, 30, 100), options.seed)
            checked = _checksums(replace(scene, total_bytes=small_bytes, rounds=options.choose(2, 12, 40)))
            stored_bytes = options.choose(QUICK_STORED_BYTES, startup.STORED_BYTES, startup.STORED_BYTES)
            started = startup.measure(folder, options.choose(1, 3, 10), options.told, stored_bytes)
            bytes_checked = checking.measure(
                folder, rounds, options.seed, options.told, max(total_bytes, checking.LEAST_BYTES)
            )
            known = weights.measure(folder, rounds, options.seed, options.told, total_bytes)
            shared = directory.measure(replace(scene, total_bytes=small_bytes))
            encrypted = records.measure(replace(scene, total_bytes=small_bytes))
            by_heads = heads.measure(replace(scene, total_bytes=small_bytes))
        scene.facts["start-up"] = (
            f"{stored_bytes / 1e9:.0f} GB of records, {startup.BLOCKS_PER_CALL} to a call, their "
            "headers read from the"
            " disk (O_DIRECT); the blocks' own bytes are holes in the file"
        )
        return Findings(
            [
                *beside_fio,
                *beside_vllm,
                *found,
                *checked,
                *started,
                *bytes_checked,
                *known,
                *shared,
                *encrypted,
                *by_heads,
            ],
            (),
            _settings(scene, small_bytes),
        )


def _beside_fio(scene: Scene) -> list[Figure]:
    return [
        figure
        for size in throughput.FIO_BLOCKS_BYTES
        for figure in throughput.fio_figures(size, throughput.measure_beside_fio(size, scene), scene.missing)
    ]


def _beside_vllm(scene: Scene) -> list[Figure]:
    why = scene.missing.get(throughput.VLLM)
    if why is not None:
        return [Figure(goal, note=why) for goal in throughput.VLLM_GOALS]
    shown = throughput.measure_beside_vllm(throughput.VLLM_SHOWN_BYTES, scene)
    size = throughput.size_text(throughput.VLLM_SHOWN_BYTES)
    scene.facts[f"beside vLLM at {size}, for orientation"] = throughput.shown_text(shown)
    return [
        figure
        for size in throughput.VLLM_BLOCKS_BYTES
        for figure in throughput.pair_figures(
            throughput.vllm_goal, size, throughput.measure_beside_vllm(size, scene)
        )
    ]


def _checksums(scene: Scene) -> list[Figure]:
    return [
        figure
        for size in throughput.CHECKSUM_BLOCKS_BYTES
        for figure in throughput.pair_figures(
            throughput.checksum_goal, size, throughput.measure_checksums(size, scene)
        )
    ]


def _settings(scene: Scene, small_bytes: int) -> dict[str, str]:
    has_fio = MISSING not in scene.missing.values()
    settings = {
        "moved": f"{scene.total_bytes >> 20} MiB a turn ({small_bytes >> 20} MiB beside vLLM and "
        "for checksums):"
        " written, durable (fdatasync), then read; all bytes compared",
        "kvbm": f"batches of {BATCH_BYTES >> 20} MiB between a host slab and one block file, checksums on",
        "patterns": f"{throughput.PROMPTS}: neighboring slots in a batch, the batches in any order;"
        f" {throughput.SCATTERED}: single blocks, no two of a batch neighbors",
        throughput.AIO_ALONE: "Linux AIO into and from the same memory, blocks in random order, one "
        "request each;"
        " fio uses the same few buffers again and again, which stay in the CPU's cache",
        "checksums": "the peer has a constant in place of the digest of a block's bytes; its header "
        "is sealed as ever",
    }
    if has_fio:
        environment = ", ".join(f"{name}={value}" for name, value in HUGE_PAGES.items())
        settings["fio"] = (
            f"{fio_version()}, one process, random blocks each once, queue depth {DEPTH}, O_DIRECT, "
            "file preallocated,"
            f" end_fsync within its time, buffers on transparent huge pages as ours ({environment}, "
            "iomem_align=2m)"
        )
        settings[throughput.BETTER_FIO] = (
            "of the engines, the one with the higher median, at each size and direction"
        )
    left_out = "; ".join(f"{name}: {why}" for name, why in scene.missing.items())
    return {**settings, **scene.facts, "peers left out": left_out or "none"}
