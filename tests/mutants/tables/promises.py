"""What documents promised and the product did not do."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

POOLS = "tests/sglang/test_pools.py"
PACKAGING = "tests/unit/test_packaging.py"

MUTANTS = (
    Mutant(
        "a line of the docs installed NVIDIA's package of that name",
        "docs/sglang.md",
        'pip install ".[sglang]"        # in a checkout',
        'pip install "kvbm[sglang]"     # in a checkout',
        f"{PACKAGING}::test_no_line_installs_the_package_that_the_index_has_under_our_name",
    ),
    Mutant(
        "nothing told our package from NVIDIA's",
        "kvbm_core/cli/whose.py",
        '    if has_nvidia or Path(where).name == "__init__.py":\n',
        "    if False:\n",
        f"{PACKAGING}::test_the_command_says_that_engines_load_nvidias",
    ),
    Mutant(
        "SGLang's HiCache ignored settings without a word",
        "kvbm_core/config/settings.py",
        "        return (*self._warnings, *self._unheeded(adapter))\n",
        "        return self._warnings\n",
        "tests/unit/test_config.py::test_what_only_another_engine_heeds_is_said_in_one_line_each",
    ),
    Mutant(
        "SGLang's linker ignored KVBM_DISK_DEADLINE_S",
        "kvbm_core/runtime/assembly.py",
        "    deadline_s = deadline_s or settings.disk_deadline_s\n",
        "    deadline_s = deadline_s or 60.0\n",
        "tests/unit/test_sglang_linker.py::test_a_read_of_the_disk_is_given_up_after_its_deadline",
    ),
    Mutant(
        "disk alone: what passed host memory was counted as blocks of the host tier",
        "kvbm_core/observe/metrics.py",
        "            if to_tier is Tier.HOST:\n                return\n            from_tier = Tier.DEVICE\n",
        "            pass\n",
        "tests/unit/test_metrics.py::test_without_a_host_tier_what_goes_to_the_remote_tier_is_counted_once",
    ),
    Mutant(
        "disk alone: loads were counted as from the host tier",
        "kvbm_core/observe/metrics.py",
        "            from_tier = Tier.DISK\n",
        "            pass\n",
        "tests/unit/test_slotted_tier.py"
        "::test_without_a_host_tier_a_block_counts_once_and_none_is_of_the_host",
    ),
    Mutant(
        "bytes and seconds of disk transfers were in no metric",
        "kvbm_core/tiers/jobs.py",
        "        metrics.tier_transfer(tier_of(name), target, read_bytes, read_s)\n",
        "        pass\n",
        "tests/unit/test_worker_disk_lives.py::test_bytes_and_seconds_are_counted_on_each_way_between_tiers",
    ),
    Mutant(
        "DYN_KVBM_NCCL_MLA_MODE did nothing on vLLM",
        "kvbm_vllm/config.py",
        'part = f"stage {stage}" if settings.nccl_mla_mode and',
        'part = f"stage {stage}" if False and',
        "tests/vllm/test_mla.py::test_rank_0_alone_has_host_memory_and_all_get_its_bytes",
    ),
    Mutant(
        "ranks that cannot meet turned everything off, and did not fall back to copies of their own",
        "kvbm_core/runtime/replicas.py",
        "        self._joins = {}\n        log.log(\n",
        "        log.log(\n",
        "tests/unit/test_handshake.py::test_ranks_that_cannot_meet_store_their_own",
    ),
    Mutant(
        "DYN_KVBM_LEADER_ZMQ_PUB_PORT is never bound, and switched to TCP all the same",
        "kvbm_core/runtime/endpoint.py",
        'settings.is_set("leader_zmq_host") or settings.is_set("leader_zmq_ack_port"):',
        'settings.is_set("leader_zmq_host") or settings.is_set("leader_zmq_pub_port"):',
        "tests/unit/test_trtllm_config.py::test_the_port_that_is_never_bound_switches_nothing",
    ),
    Mutant(
        "a request of vLLM could not opt out",
        "kvbm_vllm/request_params.py",
        '        return bool(wish.get("skip", False))\n',
        "        return False\n",
        "tests/vllm/test_scheduler_observed.py::test_a_request_can_opt_out",
    ),
    Mutant(
        "a vLLM beyond the tested range was refused though its interface fits",
        "kvbm_vllm/versions.py",
        "    if different:\n        raise UnsupportedError(\n",
        "    if True:\n        different = [*different, version]\n        raise UnsupportedError(\n",
        "tests/vllm/test_startup.py::test_a_newer_vllm_is_served_with_one_warning",
    ),
    Mutant(
        "a vLLM beyond the tested range that calls otherwise was served",
        "kvbm_vllm/versions.py",
        "    if different:\n        raise UnsupportedError(\n",
        "    if False:\n        raise UnsupportedError(\n",
        "tests/vllm/test_startup.py::test_a_newer_vllm_that_calls_otherwise_is_refused",
    ),
    Mutant(
        "the library's page gave KVBM's counters names that end in _total",
        "kvbm_core/observe/metrics.py",
        '        return _HEADER_OF_BARE.sub(r"\\1 ", generate_latest(self).decode())\n',
        "        return generate_latest(self).decode()\n",
        "tests/unit/test_metrics.py::test_names_and_types_on_the_page",
    ),
    Mutant(
        "SGLang's linker took DYN_KVBM_METRICS and served no page",
        "kvbm_sglang/linker.py",
        "        self._server = metrics_server(settings, self.guard_state.metrics, about)\n",
        "        self._server = None\n",
        f"{POOLS}::test_each_setting_is_read_by_the_linker_or_its_user_is_told",
    ),
    Mutant(
        "SGLang's HiCache said nothing of settings that it does not heed",
        "kvbm_sglang/hicache.py",
        "        announce(settings, Adapter.HICACHE, needs_tier=False)\n",
        "",
        f"{POOLS}::test_each_setting_is_read_by_hicache_or_its_user_is_told",
    ),
    Mutant(
        "SGLang's HiCache ignored KVBM_DISK_IO",
        "kvbm_core/storage/disk/allocate.py",
        "            io=settings.disk_io,\n",
        "",
        f"{POOLS}::test_each_setting_is_read_by_hicache_or_its_user_is_told",
    ),
    Mutant(
        "a package was not marked as typed",
        "pyproject.toml",
        'exclude = ["*.c", "*.h"]',
        'exclude = ["*.c", "*.h", "py.typed"]',
        f"{PACKAGING}::test_every_package_of_the_wheel_says_that_it_is_typed",
    ),
)
