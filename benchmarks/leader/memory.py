"""Memory per resident block: what a fresh process grows by, keys, tables, arrays and allocator included.

``python -m benchmarks.leader.memory kvbm 1000000`` prints bytes per block.
"""

from __future__ import annotations

import ctypes
import gc
import random
import subprocess
import sys
from pathlib import Path

from benchmarks.figures import LIMIT, Figure, Goal
from benchmarks.leader.index import BATCH_BLOCKS, LARGE_BLOCKS, new_hashes
from benchmarks.leader.sides import OurSide, Side

GOAL = Goal("leader memory per resident block", "bytes", 256.0, "lower", LIMIT)
TIMEOUT_S = 120
OURS, PEERS = "kvbm", ("vLLM LRU", "vLLM ARC")


def measure(has_vllm: bool, seed: int) -> Figure:
    """One process per side. CalledProcessError if one fails."""
    peers = {name: (_in_a_process(name, seed),) for name in PEERS} if has_vllm else {}
    return Figure(GOAL, (_in_a_process(OURS, seed),), peers)


def _in_a_process(name: str, seed: int) -> float:
    command = [sys.executable, "-m", "benchmarks.leader.memory", name, str(LARGE_BLOCKS), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return float(done.stdout.split()[-1])


def bytes_per_block(name: str, num_blocks: int, seed: int) -> float:
    """How much this process grows by per block while a side is made and filled. Meant for a process of its
    own.
    """
    draw = random.Random(seed)
    side = _make(name, BATCH_BLOCKS)  # so that what is loaded or made once is there
    side.store(side.keys(new_hashes(draw, BATCH_BLOCKS)))
    before_bytes = _resident_bytes()
    side = _make(name, num_blocks)
    for start in range(0, num_blocks, BATCH_BLOCKS):
        side.store(side.keys(new_hashes(draw, min(BATCH_BLOCKS, num_blocks - start))))
    after_bytes = _resident_bytes()
    if side.resident() != num_blocks:
        raise RuntimeError(f"{name} holds {side.resident()} of {num_blocks} blocks")
    return (after_bytes - before_bytes) / num_blocks


def _make(name: str, num_blocks: int) -> Side:
    if name == OURS:
        return OurSide(num_blocks)
    from benchmarks.leader.vllm_sides import VllmSide

    return VllmSide(num_blocks, name.rsplit(maxsplit=1)[-1].lower())


def _resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS:")
    )
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    print(bytes_per_block(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1))
