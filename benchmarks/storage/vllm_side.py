"""vLLM's fs tier: its own FileSystemTierManager, called as its TieringOffloadingManager calls it.

It needs no engine and no GPU: it moves blocks between vLLM's CPU tier, any memory for it, and files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from benchmarks.storage.blocks import Blocks
from benchmarks.storage.sides import Rates
from benchmarks.suite import expect

NAME = "vLLM fs tier"
BLOCK_TOKENS = 16
JOB_BYTES = 16 << 20
"""A job is a request's blocks, and one thread of vLLM's does it: many jobs at once keep all its threads busy.
"""


class VllmFsSide:
    """A Side with a file per block in ``folder``, and as many threads as vLLM has by default."""

    name = NAME

    def __init__(self, folder: Path, blocks: Blocks) -> None:
        self._blocks = blocks
        self._folder = folder
        # Both halves of the slab are vLLM's CPU tier: chunk i is written from, chunk num_blocks + i is read
        # into.
        view = blocks.slab.array.reshape(2 * blocks.num_blocks, blocks.block_bytes).data
        spec = TieringOffloadingSpec(_config(blocks, folder))
        self._tier = FileSystemTierManager(spec, view, "fs", str(folder))
        self._keys = [make_offload_key(key, 0) for key in blocks.keys]
        self._jobs = count(1)

    @property
    def is_direct(self) -> bool:
        """Whether vLLM reads and writes past the page cache here."""
        return bool(self._tier._use_o_direct)

    def turn(self) -> Rates:
        """See Side. The files go afterwards: vLLM does not write a block that has one. Their directories
        stay.
        """
        first_target = self._blocks.num_blocks
        try:
            return self._blocks.turn(
                self.name,
                lambda: self._move(self._tier.submit_store, 0, is_load=False),
                lambda: self._move(self._tier.submit_load, first_target, is_load=True),
            )
        finally:
            self._remove_files()

    def close(self) -> None:
        """See Side."""
        self._tier.shutdown()

    def _move(self, submit: Callable[[TransferJob], None], first_chunk: int, *, is_load: bool) -> None:
        """All jobs at once, until the last has ended. vLLM does not make its files durable, and nobody does
        it here.
        """
        jobs = self._make_jobs(first_chunk, is_load)
        for job in jobs:
            submit(job)
        self._tier.drain_jobs()
        results = list(self._tier.get_finished_jobs())
        ended_well = sum(result.success for result in results)
        expect(ended_well == len(jobs), f"{self.name}: {ended_well} of {len(jobs)} jobs ended well")

    def _make_jobs(self, first_chunk: int, is_load: bool) -> list[Any]:
        step = max(1, JOB_BYTES // self._blocks.block_bytes)
        jobs = []
        for start in range(0, len(self._keys), step):
            keys: Sequence[Any] = self._keys[start : start + step]
            chunks = np.arange(first_chunk + start, first_chunk + start + len(keys), dtype=np.int32)
            number = next(self._jobs)
            jobs.append(TransferJob(number, keys, chunks, is_load, ReqContext(f"request {number}")))
        return jobs

    def _remove_files(self) -> None:
        for key in self._keys:
            with suppress(FileNotFoundError):
                os.unlink(self._tier.file_mapper.get_file_name(key))
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # the file system's work for that is not to meet whoever is next
        finally:
            os.close(folder)


def _config(blocks: Blocks, folder: Path) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(BLOCK_TOKENS, ("layer.0",), 0),),
        worker_kv_bytes_per_block=blocks.block_bytes,
        enable_kv_cache_events=False,
        extra_config={
            "cpu_bytes_to_use": 2 * blocks.total_bytes,
            "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
        },
        engine_id="benchmark",
        model=OffloadingModelConfig("benchmark", "bfloat16"),
        cache=OffloadingCacheConfig(BLOCK_TOKENS, 1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )
