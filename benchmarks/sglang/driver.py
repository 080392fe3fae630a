"""Backup and prefetch of pages, backend by backend in turns. Runs in SGLang's environment.

    python -m benchmarks.sglang.driver JOB.json RESULT.json

A job: {"folder": ..., "pages_bytes": [...], "total_bytes": n, "rounds": n, "seed": n, "sides": [...]}. The
result: GB/s (backup, prefetch) of each turn by page size and side, and milliseconds of 1,000 get_stats calls
of kvbm's.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from benchmarks.sglang.sides import Side, make_sides
from benchmarks.timing import rotated

PAGE_TOKENS = 16
HEAD_DIM = 64
SHAPES = {32 << 10: (4, 2), 128 << 10: (8, 4), 512 << 10: (16, 8), 2 << 20: (32, 16)}
"""Layers and heads of a page of so many bytes, in bfloat16."""
STATS_CALLS = 1000


def main(job_file: str, result_file: str) -> None:
    """Runs the job."""
    job = json.loads(Path(job_file).read_text())
    result: dict[str, Any] = {"pages": {}, "get_stats_ms": []}
    for page_bytes in job["pages_bytes"]:
        folder = Path(job["folder"]) / str(page_bytes)
        pool = make_pool(page_bytes, job["total_bytes"], job["seed"])
        sides = make_sides(job["sides"], pool, folder, job["total_bytes"])
        result["pages"][page_bytes] = _measure(sides, pool, page_bytes, job)
        for side in sides:
            if side.name == "kvbm":
                result["get_stats_ms"].append(_stats_ms(side.backend))
            if hasattr(side.backend, "close"):
                side.backend.close()
        shutil.rmtree(folder, ignore_errors=True)
    Path(result_file).write_text(json.dumps(result))


def make_pool(page_bytes: int, total_bytes: int, seed: int) -> Any:
    """A page-first host pool of SGLang's with ``total_bytes`` of random bytes."""
    layers, heads = SHAPES[page_bytes]
    tokens = total_bytes // page_bytes * PAGE_TOKENS
    device = MHATokenToKVPool(
        size=4 * PAGE_TOKENS,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=HEAD_DIM,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    pool = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        PAGE_TOKENS,
        "page_first",
        pin_memory=False,
        device_capacity_tokens=tokens,
        start_layer=0,
        end_layer=layers,
    )
    raw = pool.kv_buffer.view(torch.uint8)
    raw.random_(generator=torch.Generator().manual_seed(seed))
    if pool.get_page_buffer_meta(torch.arange(PAGE_TOKENS))[1] != [page_bytes // 2] * 2:
        raise RuntimeError(
            f"a page is not {page_bytes} bytes: {pool.get_page_buffer_meta(torch.arange(PAGE_TOKENS))}"
        )
    return pool


def _measure(sides: Sequence[Side], pool: Any, page_bytes: int, job: dict[str, Any]) -> dict[str, list[Any]]:
    samples: dict[str, list[Any]] = {side.name: [] for side in sides}
    num_pages = job["total_bytes"] // page_bytes
    indices = torch.arange(num_pages * PAGE_TOKENS)
    expected = pool.kv_buffer.clone()
    for number in range(job["rounds"] + 1):
        for side in rotated(sides, number):
            print(f"{page_bytes >> 10} KiB, round {number} of {job['rounds']}: {side.name}", flush=True)
            rates = _turn(side, pool, expected, keys_of(num_pages, f"{side.name} {number}"), indices)
            if number:  # the first warms up
                samples[side.name].append(rates)
    return samples


def _turn(
    side: Side, pool: Any, expected: torch.Tensor, keys: list[str], indices: torch.Tensor
) -> tuple[float, float]:
    """GB/s of backup and prefetch; all bytes are compared."""
    started_s = time.perf_counter()
    side.backup(keys, indices)
    backup_s = time.perf_counter() - started_s
    side.forget_cached()
    pool.kv_buffer.zero_()
    started_s = time.perf_counter()
    side.prefetch(keys, indices)
    prefetch_s = time.perf_counter() - started_s
    if not torch.equal(_bytes(pool.kv_buffer, len(indices)), _bytes(expected, len(indices))):
        raise RuntimeError(f"{side.name}: other bytes came back")
    pool.kv_buffer.copy_(expected)
    side.backend.clear()
    num_bytes = _bytes(expected, len(indices)).numel()
    return num_bytes / backup_s / 1e9, num_bytes / prefetch_s / 1e9


def _bytes(buffer: torch.Tensor, num_tokens: int) -> torch.Tensor:
    return buffer[:, :num_tokens].view(torch.uint8)


def _stats_ms(backend: Any) -> float:
    started_s = time.perf_counter()
    for _ in range(STATS_CALLS):
        backend.get_stats()
    return 1e3 * (time.perf_counter() - started_s)


def keys_of(count: int, salt: str) -> list[str]:
    """Page keys as SGLang makes them: hexadecimal SHA-256."""
    return [hashlib.sha256(f"{salt} {number}".encode()).hexdigest() for number in range(count)]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
