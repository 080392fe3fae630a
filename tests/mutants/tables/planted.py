"""Faults that tests have to see, whatever causes them: a wrong byte and a lost lease under each adapter, and
what a writer that is killed leaves half written.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ADAPTERS = {
    "vLLM": "tests/vllm/test_scheduler_scenarios.py::test_prompts_that_share_a_beginning_at_once",
    "TensorRT-LLM": "tests/trtllm/test_scenarios.py::test_one_rank[async_hit-released-v1-overlap-1]",
    "SGLang's linker": "tests/unit/test_sglang_linker_ranks.py::test_one_rank_stores_and_both_load",
}
HICACHE = "tests/sglang/test_pools.py::test_pages_come_back_also_after_a_restart[mha-page_first]"

MUTANTS = (
    Mutant(
        "a byte of a slot changes before it is loaded",
        "kvbm_core/transfer/executors/memcpy.py",
        "            copy_pieces([(piece.device, piece.host) for piece in pieces], device_blocks, slots)\n",
        "            pieces[0].host[0, slots[-1], -1] ^= 1\n"
        "            copy_pieces([(piece.device, piece.host) for piece in pieces], device_blocks, slots)\n",
        " ".join(ADAPTERS.values()),
    ),
    Mutant(
        "a byte of a page changes after it was read (SGLang's HiCache)",
        "kvbm_sglang/store.py",
        "        if self._chain is None:\n"
        "            return Answers(self.disk.get_many(named, memory, deadline_s=self._deadline_s), set())\n",
        "        if self._chain is None:\n"
        "            found = self.disk.get_many(named, memory, deadline_s=self._deadline_s)\n"
        "            part = memory[0] if isinstance(memory[0], memoryview) else memory[0][0]\n"
        "            part.cast('B')[0] ^= 1\n"
        "            return Answers(found, set())\n",
        HICACHE,
    ),
    Mutant(
        "a lease is never given back",
        "kvbm_core/blocks/slot_tier.py",
        "        if self._leases.release(lease):\n",
        "        if False:\n",
        " ".join(ADAPTERS.values()),
    ),
    Mutant(
        "what lies in a slot is taken for what the writer's log says (a disk that is read along)",
        "kvbm_core/storage/disk/record_io.py",
        "unpack_record(owner._sectors[cell])\n"
        "            outcome = judge_record(header, record.key, record.slot, file)\n",
        "unpack_record(owner._sectors[cell])\n"
        "            outcome = judge_record(header, header.key if header else b'', record.slot, file)\n",
        "tests/faults/test_shared_reading.py::test_a_killed_writer_and_the_next_one_are_read_along",
    ),
    Mutant(
        "a block appears under its name before it is whole (a shared directory)",
        "kvbm_core/storage/directory/record_files.py",
        "                self._write(fd, key, pieces, is_direct=is_direct)\n"
        "                if is_given_up():\n"
        "                    return Outcome.TIMED_OUT\n"
        "                self._calls.rename(temporary, path)\n",
        "                self._calls.rename(temporary, path)\n"
        "                self._write(fd, key, pieces, is_direct=is_direct)\n",
        "tests/faults/test_directory_kills.py::test_no_kill_costs_a_byte",
    ),
)
