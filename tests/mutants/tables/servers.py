"""Servers that died, engines that stopped, disks that filled."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

STRANGERS = "tests/unit/test_strangers.py"
HANDSHAKE = "tests/unit/test_handshake.py"
RANKS = "tests/unit/test_rank_watch.py"
OPENING = "tests/faults/test_opening.py"
DEAD = "tests/unit/test_dead_disk.py"
FILES = "tests/unit/test_disk_files.py"
FOLDER = "tests/unit/test_disk_folder.py"
ENDPOINT = "tests/unit/test_endpoint.py"
METRICS = "tests/unit/test_metrics.py"

MUTANTS = (
    Mutant(
        "the documented PdConnector line killed the server at its first stats report",
        "kvbm_vllm/connector.py",
        "\n\nregister_names()\n",
        "\n",
        "tests/vllm/test_scheduler_composed.py::test_a_childs_stats_reach_vllms_log_and_its_metrics",
    ),
    # ------------------------------------------------------------ strangers
    Mutant(
        "a second engine with the same ports turned the first one's tier off: a newcomer took its rank",
        "kvbm_core/runtime/handshake.py",
        "        if peer is not None and peer != identity:\n"
        "            return self._rival(identity, hello, peer, problem)\n",
        "",
        f"{HANDSHAKE}::test_a_second_process_of_a_rank_that_lives_is_refused_and_nothing_else_happens",
    ),
    Mutant(
        "a newcomer whose blocks do not fit turned off a tier that was in service",
        "kvbm_core/runtime/handshake.py",
        "            if self._num_slots is None:  # else every rank is there, and this is none of them\n"
        '                self._disable(f"worker {hello.rank} {problem}")\n',
        '            self._disable(f"worker {hello.rank} {problem}")\n',
        f"{HANDSHAKE}::test_whatever_a_stranger_says_a_tier_in_service_stays",
    ),
    Mutant(
        "anybody spoke for any rank",
        "kvbm_core/runtime/handshake.py",
        "        return peer == identity\n",
        "        return True\n",
        f"{HANDSHAKE}::test_nobody_speaks_for_a_rank_that_is_not_his",
    ),
    Mutant(
        "on TCP one message of any local user turned the tier off",
        "kvbm_core/runtime/channel.py",
        "            self.socket.setsockopt(zmq.CURVE_SERVER, 1)\n",
        "            self.socket.setsockopt(zmq.CURVE_SERVER, 0)\n",
        f"{STRANGERS}::test_whoever_has_not_the_secret_is_not_heard",
    ),
    Mutant(
        "all engines had one secret",
        "kvbm_core/runtime/endpoint.py",
        "            os.write(fd, secrets.token_bytes(SECRET_BYTES))\n",
        "            os.write(fd, bytes(SECRET_BYTES))\n",
        f"{ENDPOINT}::test_every_engine_has_a_secret_of_its_own_and_each_of_its_processes_reads_the_same",
    ),
    Mutant(
        "two engines with one engine_id met",
        "kvbm_vllm/config.py",
        "    return f\"{engine_id} {getattr(vllm_config, 'instance_id', '')}\"\n",
        "    return engine_id\n",
        "tests/vllm/test_startup.py::test_engines_with_one_engine_id_do_not_meet",
    ),
    # ------------------------------------------------------------ ranks that are silent
    Mutant(
        "one rank was silent for 40 requests, and jobs and requests were held for ever",
        "kvbm_core/runtime/rank_watch.py",
        "        self.away = away\n",
        "",
        f"{RANKS}::test_a_rank_that_is_silent_for_forty_requests_holds_little_and_delays_nobody",
    ),
    Mutant(
        "a rank that is slow and alive was taken out of service",
        "kvbm_core/runtime/rank_watch.py",
        "        for rank in [rank for rank in self._asked_first_s if self._was_heard(rank)]:\n"
        "            del self._asked_first_s[rank]\n",
        "",
        f"{RANKS}::test_a_rank_that_is_slow_and_alive_stays_in_service_until_a_job_is_past_its_deadline",
    ),
    Mutant(
        "a rank came back, and was never served again",
        "kvbm_core/runtime/rank_watch.py",
        "        self.away = away\n",
        "        self.away |= away\n",
        f"{RANKS}::test_a_rank_that_is_silent_for_forty_requests_holds_little_and_delays_nobody",
    ),
    Mutant(
        "a rank that lives and never answers a job was waited for without a deadline",
        "kvbm_core/runtime/rank_watch.py",
        "is_past_deadline = oldest_s >= self._job_deadline_s",
        "is_past_deadline = False",
        f"{RANKS}::test_a_rank_that_is_slow_and_alive_stays_in_service_until_a_job_is_past_its_deadline",
    ),
    Mutant(
        "a rank was started anew, and its empty memory was taken for what the old process had",
        "kvbm_core/runtime/handshake.py",
        "        self.inbox.append(RankReplaced(rank, first_job_id))\n",
        "",
        f"{HANDSHAKE}::test_a_process_in_the_place_of_one_that_died_gets_its_rank_and_starts_empty",
    ),
    Mutant(
        "blocks of a rank that was started anew were still matched",
        "kvbm_core/runtime/leader.py",
        "        self._let_all_go()\n        self.chain.host.reset()\n        for job",
        "        self._let_all_go()\n        for job",
        f"{RANKS}::test_a_new_process_in_a_ranks_place_starts_empty_and_what_the_old_one_owed_is_over",
    ),
    Mutant(
        "slots of a silent rank were used again while it might still write them",
        "kvbm_core/runtime/leader.py",
        "        expired = self.chain.mind(self._onboarding.held())\n",
        "        expired = self.chain.mind([])\n",
        f"{RANKS}::test_slots_of_a_silent_rank_are_not_used_again_however_long_it_takes",
    ),
    # ------------------------------------------------------------ disks
    Mutant(
        "a block file that did not fit on a full disk left 280 MB behind, and others without space",
        "kvbm_core/storage/disk/allocate.py",
        "        _give_back(opened.fd, before)\n",
        "",
        f"{OPENING}::test_a_limit_of_the_size_of_files[BUFFERED]",
    ),
    Mutant(
        "a block file that cannot fit took all the space there was before it failed",
        "kvbm_core/storage/disk/allocate.py",
        "        if num_bytes - before.st_blocks * STAT_BLOCK_BYTES > _free_bytes(opened.path):\n",
        "        if False:\n",
        f"{OPENING}::test_nothing_is_taken_of_a_disk_that_is_too_small",
    ),
    Mutant(
        "a dead disk: shutdown took 119 s",
        "kvbm_core/transfer/movers/disk.py",
        "            record_io.stop(STOP_TIMEOUT_S)\n"
        "        is_over = self.stop_others()\n"
        "        ends_at_s = time.monotonic() + 2 * STOP_TIMEOUT_S\n"
        "        for thread in self._threads:\n"
        "            thread.join(max(0.0, ends_at_s - time.monotonic()))\n",
        "            pass\n"
        "        is_over = self.stop_others()\n"
        "        for thread in self._threads:\n"
        "            thread.join()\n",
        f"{DEAD}::test_the_end_of_a_mover_does_not_wait_for_a_dead_disk",
    ),
    Mutant(
        "a dead disk: a burst of loads failed one by one, every 10 s",
        "kvbm_core/storage/disk/record_io.py",
        "            if not self._owner._is_left_alone():\n                self._move()\n",
        "            self._move()\n",
        f"{DEAD}::test_a_burst_on_a_dead_disk_fails_together",
    ),
    Mutant(
        "a disk that answered again was left alone all the same",
        "kvbm_core/storage/disk/record_io.py",
        "        return self._is_suspect and self._clock.now_s() < self._quiet_until_s\n",
        "        return self._clock.now_s() < self._quiet_until_s\n",
        f"{DEAD}::test_a_disk_that_answers_again_is_used_at_once",
    ),
    Mutant(
        "a pipe named like a block file hung the start",
        "kvbm_core/storage/disk/files.py",
        "    if not stat.S_ISREG(status.st_mode):\n",
        "    if False:\n",
        f"{FILES}::test_what_is_no_file_is_not_opened",
    ),
    Mutant(
        "a pipe that comes after the first look hung the start",
        "kvbm_core/storage/disk/files.py",
        "fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC, mode)",
        "fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC, mode)",
        f"{FILES}::test_a_pipe_that_comes_after_the_first_look_holds_nobody_up",
    ),
    Mutant(
        "after SIGKILL of a process that had forked, the folder's lock was held until the child ended",
        "kvbm_core/storage/disk/files.py",
        "        with suppress(OSError):\n            os.close(file.fd)\n        file.fd = -1\n",
        "        pass\n",
        f"{FILES}::test_a_child_keeps_no_lock_of_a_process_that_was_killed",
    ),
    Mutant(
        "what was found on the disk cost the scheduler's thread 30 to 70 ms in a step",
        "kvbm_core/runtime/leader.py",
        "        self._take_in_found(TAKE_IN_BLOCKS)\n",
        '        self._take_in_found(float("inf"))\n',
        "tests/unit/test_slotted_tier.py"
        "::test_a_step_takes_in_a_little_of_what_was_found_and_the_start_all_of_it",
    ),
    Mutant(
        "a folder's lock that outlived SIGKILL turned the disk off for the new engine's life",
        "kvbm_core/storage/disk/folder.py",
        "            is_taken = _is_held_by_ending_process(self._lock)\n",
        "            is_taken = False\n",
        f"{FOLDER}::test_a_killed_engine_that_gives_its_memory_back_is_waited_for",
    ),
    Mutant(
        "a block file that another process still had was not tried again",
        "kvbm_core/transfer/movers/opening.py",
        "        file.open_later(partial(_join, site, place.name, file))\n",
        "        pass\n",
        "tests/unit/test_worker_disk.py::test_a_file_that_another_engine_has_joins_when_that_gives_it_up",
    ),
    Mutant(
        "the device failed to come up, and recovery went on reading by a closed file's number",
        "kvbm_core/transfer/movers/disk.py",
        "        is_over = self.stop_others()\n",
        "        is_over = True\n",
        f"{DEAD}::test_nothing_is_read_by_a_number_that_was_given_up",
    ),
    Mutant(
        "two models that share a cache folder found their blocks only if started in the same order",
        "kvbm_core/runtime/assembly.py",
        "DiskFolder(directory, fingerprint, self._claim, identity=self._model)",
        'DiskFolder(directory, fingerprint, self._claim, identity="")',
        f"{FOLDER}::test_leaders_of_two_models_of_one_layout_keep_their_folders",
    ),
    Mutant(
        "folders that a group can write to (770, 2775) were taken",
        "kvbm_core/storage/disk/folder.py",
        "    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):\n",
        "    if status.st_mode & stat.S_IWOTH:\n",
        f"{FOLDER}::test_a_folder_that_its_group_can_write_to_is_refused",
    ),
    Mutant(
        "a kvbm-UID folder in the temporary directory, made by somebody else, stopped the start",
        "kvbm_core/runtime/endpoint.py",
        "    for folder in (common, own):\n",
        "    for folder in (common,):\n",
        f"{ENDPOINT}::test_a_folder_that_somebody_else_has_made_is_not_used_and_does_not_stop_the_start",
    ),
    Mutant(
        "that folder, which others can enter, was used",
        "kvbm_core/control/place.py",
        " and found.st_uid == os.getuid() and not found.st_mode & 0o077\n",
        " and found.st_uid == os.getuid()\n",
        f"{ENDPOINT}::test_a_folder_that_somebody_else_has_made_is_not_used_and_does_not_stop_the_start",
    ),
    # ------------------------------------------------------------ memory, threads, pages
    Mutant(
        "SGLang: 8 ranks of 100 GB passed on 500 GB",
        "kvbm_sglang/linker_assembly.py",
        "share_bytes * part.num_here)\n",
        "share_bytes)\n",
        "tests/unit/test_sglang_linker.py::test_the_memory_of_all_ranks_together_has_to_be_there",
    ),
    Mutant(
        "TensorRT-LLM: 8 ranks of 100 GB passed on 500 GB",
        "kvbm_core/runtime/assembly.py",
        "int(slots * block_bytes * self._tiers_here))",
        "int(slots * block_bytes))",
        "tests/trtllm/test_attention_dp.py::test_the_memory_of_all_ranks_together_has_to_be_there",
    ),
    Mutant(
        "a first request with a LoRA cost the scheduler's thread 50 to 580 ms: it read the adapter",
        "kvbm_vllm/adapters.py",
        "            self._to_digest.put(adapter)\n",
        "            self._digester.content(Path(path))\n            self._to_digest.put(adapter)\n",
        "tests/unit/test_identity_adapters.py::test_the_scheduler_does_not_wait_for_a_digest",
    ),
    Mutant(
        "eight idle connections closed the metrics page to all others",
        "kvbm_core/observe/server.py",
        "            self._end(next(iter(self._connections)))\n",
        "            request.close()\n            return\n",
        f"{METRICS}::test_neither_idle_nor_slow_clients_keep_a_scrape_out",
    ),
    Mutant(
        "a client that says a little now and then held a thread for ever",
        "kvbm_core/observe/server.py",
        "if since_s < too_old_s]:",
        "if False]:",
        f"{METRICS}::test_a_client_that_says_a_little_now_and_then_is_cut_off",
    ),
    # ------------------------------------------------------------ a tier that never becomes ready
    Mutant(
        "a tier that never became ready said nothing",
        "kvbm_core/runtime/handshake.py",
        "waited_s >= self._init_timeout_s and not self._answered.is_set()",
        "False and not self._answered.is_set()",
        f"{HANDSHAKE}::test_ranks_that_are_missing_are_named_once_and_counted",
    ),
    Mutant(
        "a tier that never became ready was not counted as a failure",
        "kvbm_core/runtime/handshake.py",
        "            self._on_overdue()\n",
        "",
        f"{HANDSHAKE}::test_ranks_that_are_missing_are_named_once_and_counted",
    ),
    Mutant(
        "a start that waited in vain dropped the answer",
        "kvbm_core/runtime/handshake.py",
        "        if timeout_s and not is_over:\n",
        "        if False:\n",
        f"{HANDSHAKE}::test_a_start_that_waits_in_vain_says_for_whom",
    ),
    Mutant(
        "DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS was read and unused",
        "kvbm_core/runtime/assembly.py",
        "            init_timeout_s=settings.leader_worker_init_timeout_s,\n",
        "",
        "tests/unit/test_setting_effects.py::test_missing_workers_are_named_after_the_timeout",
    ),
    Mutant(
        "/health said ok while the tier was not in service",
        "kvbm_core/observe/server.py",
        "            if now.is_ready:\n",
        "            if True:\n",
        f"{METRICS}::test_health_says_what_is_not_ready"
        " tests/vllm/test_startup.py::test_health_says_whether_the_tier_is_in_service",
    ),
)
