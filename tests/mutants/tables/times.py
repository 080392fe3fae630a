"""Bytes that come to a block when it is somebody else's; records and slots that are not what they seem."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

EXECUTORS = "tests/contract/test_executors.py"
STAGED_ENDS = "tests/unit/test_staged_ends.py"
WORKER = "tests/unit/test_worker.py"
LINKER = "tests/unit/test_sglang_linker.py"
RECORDS = "tests/unit/test_disk_record_checks.py"
PROMISES = "tests/unit/test_local_promises.py"
SCENARIO = "tests/trtllm/test_scenarios.py::test_one_rank"

MUTANTS = (
    # ------------------------------------------------------------ a load that was given up
    Mutant(
        "a load was canceled while the disk stalled, went on later, and landed in the new owner's block",
        "kvbm_core/transfer/staged.py",
        "            if load.is_cancelled or load.has_ended:\n                return\n",
        "",
        f"{STAGED_ENDS}::test_a_cancelled_load_begins_no_further_chunk_and_waits_for_those_that_copy",
    ),
    Mutant(
        "cancel refused every load that still read",
        "kvbm_core/transfer/staged.py",
        "                load.is_cancelled = True\n                parts = list(load.copying)\n",
        "                return False\n",
        f"{EXECUTORS}::TestStagedExecutor::test_a_load_that_is_cancelled_before_it_copies_never_does",
    ),
    Mutant(
        "a load canceled between the decision to copy and the copy was copied",
        "kvbm_core/transfer/staged.py",
        "        if load.is_cancelled:  # between the decision to copy and this\n"
        "            self._copier.cancel(part.job_id)\n",
        "",
        f"{STAGED_ENDS}::test_a_copy_that_was_on_its_way_to_the_device_at_a_cancel_is_taken_back",
    ),
    Mutant(
        "a canceled load's host slots were free while the disk still wrote into them",
        "kvbm_core/transfer/staged.py",
        "            is_over = all(read.is_over for read in load.reads)\n",
        "            is_over = True\n",
        f"{STAGED_ENDS}::test_a_late_load_holds_its_slots_until_the_disk_is_done",
    ),
    Mutant(
        "a fence gave up after its time and nobody looked at its answer",
        "kvbm_core/runtime/worker.py",
        "        if loads:\n            raise self._stuck(loads)\n",
        "",
        f"{WORKER}::test_a_load_that_hangs_is_never_taken_for_over"
        " tests/trtllm/test_disk.py::test_no_forward_pass_while_a_load_hangs_that_writes_its_blocks",
    ),
    Mutant(
        "an offload outlived its fence, read the next owner's bytes, and was stored",
        "kvbm_core/runtime/worker.py",
        "            self._overwritten.update(stuck)\n",
        "",
        f"{WORKER}::test_a_copy_that_outlives_its_fence_is_reported_as_failed",
    ),
    Mutant(
        "a fence canceled and did not wait for what copies",
        "kvbm_core/runtime/worker.py",
        "        if not copying or self._executor.wait(copying, FENCE_TIMEOUT_S):\n",
        "        if True:\n",
        f"{WORKER}::test_a_load_that_hangs_is_never_taken_for_over",
    ),
    Mutant(
        "sleep unmapped the device's cache while a copy was under way",
        "kvbm_core/runtime/worker.py",
        "            raise self._stuck(stuck)\n",
        "            self._stuck(stuck)\n",
        f"{WORKER}::test_device_memory_is_not_left_while_a_copy_reads_it"
        " tests/vllm/test_startup.py::test_no_sleep_while_a_copy_hangs",
    ),
    Mutant(
        "a worker whose hook failed ended loads that still wrote",
        "kvbm_vllm/worker.py",
        "        self.worker.fence(self._loads)\n        loads, self._loads = self._loads, {}\n",
        "        loads, self._loads = self._loads, {}\n",
        "tests/vllm/test_scheduler_faults.py::test_a_load_is_not_given_up_while_it_copies",
    ),
    Mutant(
        "SGLang: quiesce ignored a load that did not end",
        "kvbm_sglang/linker_tiers.py",
        "            if self._loading:\n                raise StuckCopyError(\n",
        "            if self._loading:\n                StuckCopyError(\n",
        f"{LINKER}::test_quiesce_says_so_when_a_load_does_not_end",
    ),
    Mutant(
        "SGLang: a store that did not end before a quiesce was kept, of pages that were others' by then",
        "kvbm_sglang/linker_tiers.py",
        "            self._tiers.disown()\n",
        "            pass\n",
        f"{LINKER}::test_a_store_that_copies_while_quiesce_gives_up_is_not_kept",
    ),
    Mutant(
        "SGLang: a load that waits for the device was waited for, and not given up",
        "kvbm_sglang/linker_tiers.py",
        "            elif not was_over:\n",
        "            elif False:\n",
        f"{LINKER}::test_a_load_that_waits_for_the_device_is_given_up_at_once",
    ),
    Mutant(
        "SGLang: a load of a batch that was given up wrote its pages when the disk went on",
        "kvbm_sglang/linker_tiers.py",
        "                self._tiers.cancel(load.claim)\n",
        "                pass\n",
        f"{LINKER}::test_a_load_that_was_given_up_writes_nothing_when_its_read_ends_well",
    ),
    # ------------------------------------------------------------ behind the engine's stream
    Mutant(
        "a load from disk was ordered behind the stream of the disk's thread, not behind the engine's",
        "kvbm_core/transfer/staged.py",
        "            load.mark = self._copier.mark()\n",
        "",
        f"{EXECUTORS}::TestCudaStagedExecutor"
        "::test_a_load_from_the_disk_lands_after_what_the_engine_computed_before"
        f" {STAGED_ENDS}::test_all_copies_of_a_load_start_after_the_mark_of_its_submission",
    ),
    Mutant(
        "the double of CUDA answered the same stream for every thread, and hid that",
        "kvbm_core/testing/cuda_double.py",
        'return self._record(getattr(self._current, "stream", self.default))',
        "return self._record(self.compute)",
        f"{EXECUTORS}::test_each_thread_of_the_double_has_a_current_stream_of_its_own",
    ),
    Mutant(
        "a CUDA job did not wait for the engine's stream",
        "kvbm_core/transfer/executors/cuda.py",
        "            self._api.wait_event(stream, job.token)\n",
        "",
        f"{EXECUTORS}::TestCudaExecutor::test_an_offload_starts_after_the_forward_and_submit_does_not_wait",
    ),
    Mutant(
        "a CUDA job ended before its event",
        "kvbm_core/transfer/executors/cuda.py",
        "            return self._api.is_done(flight.event)\n",
        "            return True\n",
        f"{EXECUTORS}::TestCudaExecutor::test_bytes_come_back_exactly_for_every_group",
    ),
    Mutant(
        "a CUDA job without an event ended before its copies",
        "kvbm_core/transfer/executors/cuda.py",
        "        return self._api.is_idle(self._streams[flight.job.plan.direction])\n",
        "        return True\n",
        f"{EXECUTORS}::TestCudaExecutor"
        "::test_a_job_whose_copies_have_no_event_is_over_when_they_are[onboard]",
    ),
    # ------------------------------------------------------------ TensorRT-LLM
    Mutant(
        "V1 with MLA: blocks of 64 tokens were taken for blocks of the 32 in its arguments",
        "kvbm_trtllm/block_size.py",
        "        if not _fits(self.block_tokens, num_tokens, num_blocks, spare):\n",
        "        if False:\n",
        f"{SCENARIO}[blocks_of_another_size_than_was_said-released-v1-overlap-1]",
    ),
    Mutant(
        "V1 with MLA: blocks were stored before it was known how many tokens one holds",
        "kvbm_trtllm/follow.py",
        "        if followed.state is None or not self._block_size.is_known:\n",
        "        if followed.state is None:\n",
        f"{SCENARIO}[blocks_of_another_size_than_was_said-released-v1-overlap-1]",
    ),
    Mutant(
        "1.1: of a request that was canceled in its prompt, what was never computed was offered",
        "kvbm_trtllm/scheduler.py",
        "        if has_answer and followed.status is RequestStatus.RUNNING and all(tables):\n",
        "        if followed.status is RequestStatus.RUNNING and all(tables):\n",
        f"{SCENARIO}[cancel_in_the_prompt-early-v1-overlap-1]",
    ),
    Mutant(
        "DSA on V1: the indexer's keys are in no pool that connectors get",
        "kvbm_trtllm/worker.py",
        "        if reason is not None:\n            raise LayoutError(\n"
        '                f"kvbm: sparse attention',
        '        if False:\n            raise LayoutError(\n                f"kvbm: sparse attention',
        f"{SCENARIO}[sparse_attention_with_keys_elsewhere-released-v1-overlap-1]",
    ),
    Mutant(
        "DSA that only the model's configuration turns on was not refused",
        "kvbm_trtllm/config.py",
        '    has_indexer = "index_topk" in model or "index_head_dim" in model\n',
        "    has_indexer = False\n",
        "tests/trtllm/test_mla.py::test_an_indexer_that_only_the_model_knows_of",
    ),
    Mutant(
        "int8 and uint8 pools of V1 (NVFP4 by checkpoint) were cached without their scales",
        "kvbm_trtllm/layout.py",
        "    if infos[0].dtype in UNSCALED_DTYPES:\n",
        "    if False:\n",
        f"{SCENARIO}[packed_numbers_without_their_scales-released-v1-overlap-1]",
    ),
    Mutant(
        "a CUDA-graph padding dummy took a freed block while its copy was still read",
        "kvbm_trtllm/scheduler.py",
        "        elif self._options.pads_graphs:\n",
        "        elif False:\n",
        f"{SCENARIO}[graph_padding_takes_a_block_that_is_read-newest-v2-overlap-1]",
    ),
    Mutant(
        "the last blocks of the last turn never reached host and disk: an idle loop polls nothing",
        "kvbm_trtllm/worker.py",
        "            self.worker.submit(note.plan)\n",
        "            pass\n",
        f"{SCENARIO}[the_last_turn_while_the_loop_sleeps-released-v1-overlap-1]",
    ),
    Mutant(
        "what workers said while the loop slept was taken in by nobody",
        "kvbm_trtllm/assembly.py",
        "        self._process.poll_with(self._poll_if_quiet)\n",
        "",
        f"{SCENARIO}[the_last_turn_while_the_loop_sleeps-released-v1-overlap-1]",
    ),
    Mutant(
        "what workers said while vLLM was idle was taken in by nobody",
        "kvbm_vllm/assembly.py",
        "    process.poll_with(hooks.poll_if_quiet)\n",
        "",
        "tests/vllm/test_idle.py::test_what_went_to_the_disk_is_known_before_the_next_step",
    ),
    Mutant(
        "py_multimodal_data without hashes was cached as text",
        "kvbm_trtllm/contract.py",
        '    "py_multimodal_data",\n',
        "",
        f"{SCENARIO}[an_image_without_hashes-released-v1-overlap-1]",
    ),
    Mutant(
        "an image that the query does not show got the blocks of a text",
        "kvbm_trtllm/scheduler.py",
        "        if followed.state is not None and has_other_inputs(request):",
        "        if False:",
        f"{SCENARIO}[a_text_of_the_same_tokens_as_an_image-released-v1-overlap-1]",
    ),
    Mutant(
        "cancel_load was defined, which an unmerged budgeting mode takes for consent",
        "kvbm_trtllm/connector.py",
        "    def wait_for_save(self, stream: Any) -> None:\n",
        "    def cancel_load(self, request_id: int) -> None: ...\n\n"
        "    def wait_for_save(self, stream: Any) -> None:\n",
        "tests/trtllm/test_real_package.py::test_nothing_of_ours_is_taken_for_consent",
    ),
    Mutant(
        "after a failed load the request computed with blocks that were not filled",
        "kvbm_trtllm/worker.py",
        "        if refused:\n            self._offloads.abandon()\n            raise LoadFailedError(\n",
        "        if False:\n            self._offloads.abandon()\n            raise LoadFailedError(\n",
        f"{SCENARIO}[a_load_fails-released-v1-overlap-1]",
    ),
    # ------------------------------------------------------------ slots, records, promises
    Mutant(
        "a plan that named the slot just beyond those that are ready was begun",
        "kvbm_core/transfer/executor.py",
        "    if highest >= host.ready_slots:\n",
        "    if highest > host.ready_slots:\n",
        "tests/unit/test_transfer.py::test_the_slot_just_beyond_those_that_are_ready_is_busy",
    ),
    Mutant(
        "a block that only some of three ranks found at start was there",
        "kvbm_core/tiers/slotted.py",
        "            if all((slot, key) in other for other in others)\n",
        "            if any((slot, key) in other for other in others)\n",
        "tests/unit/test_slotted_tier.py"
        "::test_of_three_ranks_a_block_is_there_if_all_of_them_have_it_in_the_same_slot",
    ),
    Mutant(
        "an expired promise was trusted",
        "kvbm_core/runtime/local.py",
        "claim.keys == wanted and self._chain.is_good(claim.held)",
        "claim.keys == wanted",
        f"{PROMISES}::test_leases_that_have_ended_behind_a_promise_are_not_trusted"
        f" {PROMISES}::test_a_promise_of_blocks_that_were_forgotten_since_is_not_trusted",
    ),
    Mutant(
        "a promise was held for ever",
        "kvbm_core/runtime/local.py",
        "if promise.expires_at_s <= now_s]:",
        "if False]:",
        f"{PROMISES}::test_of_an_expired_promise_the_blocks_are_held_anew"
        f" {PROMISES}::test_a_promise_ends_when_its_time_is_over_and_not_before",
    ),
    Mutant(
        "the slot in a record was not compared on a read",
        "kvbm_core/storage/disk/record.py",
        "    if (header.key, header.life, header.slot) != (key, file.life, slot):\n",
        "    if (header.key, header.life) != (key, file.life):\n",
        f"{RECORDS}::test_a_record_in_another_slot_than_its_own_is_not_loaded"
        f" {RECORDS}::test_a_record_is_what_its_header_says_in_all_fields",
    ),
    Mutant(
        "the fingerprint in a record was not compared on a read",
        "kvbm_core/storage/disk/record.py",
        "(file.fingerprint, file.payload_bytes):\n        return Outcome.INCOMPATIBLE\n",
        "(header.fingerprint, file.payload_bytes):\n        return Outcome.INCOMPATIBLE\n",
        f"{RECORDS}::test_a_record_is_what_its_header_says_in_all_fields",
    ),
    Mutant(
        "the key in a record was not compared on a read",
        "kvbm_core/storage/disk/record.py",
        "    if (header.key, header.life, header.slot) != (key, file.life, slot):\n",
        "    if (header.life, header.slot) != (file.life, slot):\n",
        f"{RECORDS}::test_a_record_is_what_its_header_says_in_all_fields",
    ),
    Mutant(
        "the digest in a record was not compared on a read",
        "kvbm_core/storage/disk/record_io.py",
        "if header is not None and outcome is Outcome.OK and owner._digest(record) != header.digest:\n",
        "if False:\n",
        "tests/unit/test_worker_disk_lives.py::test_a_damaged_record_is_a_miss_and_no_wrong_byte",
    ),
    Mutant(
        "a late write's slot was free at once (a store)",
        "kvbm_core/storage/disk/store.py",
        "                self._late.append(part)\n",
        "                self._tier.abort(part)\n",
        "tests/unit/test_disk_store.py::test_a_late_write_keeps_its_slot_until_it_has_ended"
        f" {RECORDS}::test_the_slot_of_a_late_write_is_not_given_to_another_block",
    ),
    Mutant(
        "a late write's slot was free at once (a rank's answer)",
        "kvbm_core/transfer/movers/disk.py",
        "        LATE.tell_when_free([(record.address, record.address + size) for record in records], end)\n",
        "        end(is_late=False)\n",
        "tests/unit/test_disk_mover.py::test_a_late_write_keeps_its_slots_until_it_ends",
    ),
    Mutant(
        "memory of a request that was given up was freed before its end",
        "kvbm_core/storage/late.py",
        "        self._requests[token] = tuple(spans), keep\n",
        "        self._requests[token] = tuple(spans), None\n",
        "tests/unit/test_late.py::test_memory_is_neither_freed_nor_unmapped_until_its_request_ends"
        " tests/unit/test_disk_mover_ends.py::test_close_with_a_late_read_leaves_file_and_memory_to_it",
    ),
    Mutant(
        "whoever waited behind one that failed never had the memory back",
        "kvbm_core/storage/late.py",
        "                except Exception:  # a bug of the listener must not cost others their memory\n",
        "                except ZeroDivisionError:\n",
        "tests/unit/test_late.py::test_one_that_fails_when_it_is_called_keeps_nobody_waiting",
    ),
    Mutant(
        "who asked while a request ended was called for memory that was late again",
        "kvbm_core/storage/late.py",
        "        waiters = list(self._waiters.values())\n"
        "        if not waiters:\n"
        "            return\n"
        "        touched = self._touched()  # not before: who asks after this sees himself what is late\n",
        "        touched = self._touched()\n        waiters = list(self._waiters.values())\n",
        "tests/unit/test_late.py::test_a_call_amid_another_one_of_the_same_thread_loses_nothing[end]",
    ),
    Mutant(
        "a forgotten cache whose garbage its own thread collected waited for that thread",
        "kvbm_core/ending.py",
        "    if threading.current_thread().name.startswith(OWN_THREADS):\n",
        "    if False:\n",
        "tests/unit/test_ending.py::test_a_cache_ends_that_one_of_its_threads_finds_forgotten",
    ),
    Mutant(
        "a late write's slot was free at once (the leader)",
        "kvbm_core/tiers/jobs.py",
        "            job.on_late(result)\n            return\n",
        "            job.on_late(result)\n",
        f"{RECORDS}::test_the_places_of_a_late_order_are_free_with_its_second_answer",
    ),
)
