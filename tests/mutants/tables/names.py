"""What a block's name has to hold: weights, adapters, settings, items of a prompt; and audits."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DIGEST = "tests/unit/test_identity_digest.py"
WEIGHTS = "tests/unit/test_identity_weights.py"
ADAPTERS = "tests/unit/test_identity_adapters.py"
FIELDS = "tests/unit/test_identity_fields.py"
ENVIRONMENT = "tests/unit/test_identity_environment.py"
SGLANG = "tests/unit/test_sglang_weights.py"
VLLM = "tests/vllm/test_identity.py"
CHANGES = "tests/vllm/test_changes.py"
AUDIT = "tests/unit/test_audit.py"

MUTANTS = (
    # ------------------------------------------------------------ the content of weights
    Mutant(
        "7 of 47 tensors of a file changed and the stamp did not: it sampled the file",
        "kvbm_core/identity/digest.py",
        "                    digest.update(piece)\n",
        "                    digest.update(piece[:4096])\n",
        f"{DIGEST}::test_a_part_of_the_tensors_in_the_middle_of_a_file_counts_and_the_old_ones_are_known_again",
    ),
    Mutant(
        "tensors moved from one file to another without another stamp: names and sizes were not in it",
        "kvbm_core/identity/digest.py",
        r'whole.update(f"{name}\0{sizes[name]}\0{parts[name].sha256}\n".encode())',
        r"whole.update(parts[name].sha256.encode())",
        f"{DIGEST}::test_names_configuration_code_and_new_files_count",
    ),
    Mutant(
        "a weights file with another suffix was not looked at",
        "kvbm_core/identity/digest.py",
        '        ".ckpt",\n',
        "",
        f"{DIGEST}::test_every_kind_of_weights_counts_also_as_a_single_file",
    ),
    Mutant(
        "a changed modeling_*.py beside the weights had the same key",
        "kvbm_core/identity/digest.py",
        '_OTHER_SUFFIXES = frozenset(\n    (\n        ".md",\n',
        '_OTHER_SUFFIXES = frozenset(\n    (\n        ".py",\n        ".md",\n',
        f"{DIGEST}::test_names_configuration_code_and_new_files_count",
    ),
    Mutant(
        "code beside the weights reads a table of text that was not in the stamp",
        "kvbm_vllm/weights.py",
        "        runs_code=bool(model.trust_remote_code),\n",
        "",
        f"{VLLM}::test_all_values_of_all_things_have_keys_of_their_own",
    ),
    Mutant(
        "a file was remembered by its size and time alone: another one with both was taken for it",
        "kvbm_core/identity/digest.py",
        'return found[6] if found and Signature(*map(int, found.groups()[:5])) == signature else ""',
        'return found[6] if found else ""',
        f"{DIGEST}::test_a_second_start_reads_nothing",
    ),
    Mutant(
        "a file written this very moment was remembered, and changed again within its time stamp",
        "kvbm_core/identity/digest.py",
        "if self._folder is None or time.time_ns() - newest_ns < RACY_NS:",
        "if self._folder is None:",
        f"{DIGEST}::test_a_file_that_has_just_been_written_is_not_remembered",
    ),
    Mutant(
        "a second start read all weights again",
        "kvbm_core/identity/digest.py",
        "            self._memory.remember(signature, digest.hexdigest())\n",
        "            pass\n",
        f"{DIGEST}::test_a_second_start_reads_nothing",
    ),
    Mutant(
        "weights that the hub's cache names by their content were read all the same at each change of place",
        "kvbm_core/identity/digest.py",
        "if not is_as_downloaded(path, sha256):",
        "if True:",
        f"{DIGEST}::test_what_the_hubs_cache_names_by_its_content_is_read_once",
    ),
    Mutant(
        "weights changed while they were read, and what was read was called a digest of them",
        "kvbm_core/identity/digest.py",
        "if not signature == after == Signature.of(path.stat()) or place != signature.size_bytes:",
        "if place != signature.size_bytes:",
        f"{DIGEST}::test_weights_that_change_while_they_are_read_have_no_digest",
    ),
    # ------------------------------------------------------------ weights in memory, not those on the disk
    Mutant(
        "weights were overwritten after the engine had loaded them: the stamp was that of the disk",
        "kvbm_core/identity/weights.py",
        "        if changed_ns >= loaded_after_ns - CLOCK_TICK_NS:\n",
        "        if False:\n",
        f"{WEIGHTS}::test_what_changed_after_the_engine_began_to_load_may_not_be_what_it_has",
    ),
    Mutant(
        "another folder was put in place of the one that the engine had loaded from",
        "kvbm_core/identity/weights.py",
        "if not _is_same(source, self._beginning.get(role), content.signatures):",
        "if False:",
        f"{WEIGHTS}::test_others_put_in_place_further_up_are_not_what_the_engine_has"
        f" {VLLM}::test_other_weights_put_in_place_after_vllm_began_to_load_are_not_what_it_has",
    ),
    Mutant(
        "weights updated in place while the server runs: the stamp was taken once",
        "kvbm_core/identity/weights.py",
        "        self._stamp = self._stamp_of_generation()\n\n    def _stamp_of",
        "\n    def _stamp_of",
        f"{WEIGHTS}::test_a_change_in_place_makes_a_generation_that_never_lasts",
    ),
    Mutant(
        "after an update of weights the host tier was full of blocks that nobody could hit",
        "kvbm_vllm/scheduler.py",
        "            self.leader.new_generation(keeps_host=weights.doubted_generation is not None)\n",
        "            pass\n",
        f"{CHANGES}::test_the_host_tier_is_free_for_the_new_ones",
    ),
    Mutant(
        "weights updated in place while they were being digested got the digest of the old ones",
        "kvbm_core/identity/weights.py",
        "                elif self._is_first:\n                    self._stamp = stamp\n",
        "                else:\n                    self._stamp = stamp\n",
        f"{WEIGHTS}::test_a_change_while_it_is_found_out_is_not_undone_by_the_answer",
    ),
    Mutant(
        "update_weights was not heard of",
        "kvbm_vllm/engine_calls.py",
        '            follower.weights_change(f"vLLM\'s workers were told to {_name_of(method)}")',
        "            pass",
        f"{CHANGES}::test_orders_that_may_change_weights_do_and_others_do_not",
    ),
    Mutant(
        "sleep at level 2 and a reload were not heard of",
        "kvbm_vllm/engine_calls.py",
        'return _first(args, kwargs, "level", 1) == 1',
        "return True",
        f"{CHANGES}::test_orders_that_may_change_weights_do_and_others_do_not",
    ),
    Mutant(
        "the memory of weights was given back without keeping them, and that was not heard of",
        "kvbm_vllm/engine_calls.py",
        ' and "weights" not in tags',
        "",
        f"{CHANGES}::test_orders_that_may_change_weights_do_and_others_do_not",
    ),
    Mutant(
        "SGLang's check of its weights overwrote them, and nobody heard of it",
        "kvbm_sglang/weights.py",
        "name in {_RELEASE, _CHECK, _FLUSH}",
        "name in {_RELEASE, _FLUSH}",
        "tests/unit/test_sglang_settings.py::test_orders_that_change_weights_make_a_generation",
    ),
    Mutant(
        "a load of old weights' blocks was under way when the weights changed, and was taken for new KV",
        "kvbm_vllm/worker.py",
        "                failed = _blocks_of(moves) if is_revoked else _failed_blocks(moves, result)\n",
        "                failed = _failed_blocks(moves, result)\n",
        f"{CHANGES}::test_a_load_of_old_blocks_that_is_under_way_fails_and_the_request_is_computed",
    ),
    Mutant(
        "vLLM's own prefix cache still had blocks of the old weights, which were stored under the new name",
        "kvbm_vllm/changes.py",
        "        self._has_old = True\n",
        "",
        f"{CHANGES}::test_without_a_reset_of_vllms_own_cache_its_old_blocks_are_not_taken_for_new",
    ),
    Mutant(
        "weights were written to the model object, kvbm's cache was reset, and the old name stayed in force",
        "kvbm_vllm/scheduler.py",
        "        self._changes.weights.doubt()\n",
        "",
        f"{CHANGES}::test_new_weights_after_a_reset_bear_a_name_of_their_own[change_unseen-True]",
    ),
    Mutant(
        "weights were written to the model object, vLLM's cache was reset, and the host answered with old KV",
        "kvbm_vllm/scheduler.py",
        "        if was_reset and changes.heeds_resets:\n",
        "        if False:\n",
        f"{CHANGES}::test_new_weights_after_a_reset_bear_a_name_of_their_own[change_unseen-False]",
    ),
    Mutant(
        "load_weights of the model object was not heard of",
        "kvbm_core/identity/tensors.py",
        "            on_load()\n",
        "",
        f"{CHANGES}::test_a_request_that_runs_across_the_change_leaves_nothing[load]",
    ),
    Mutant(
        "weights were looked at once, and what was seen answered for every later reset",
        "kvbm_core/identity/tensors.py",
        "        if now != self._number or self._now.is_stopped:\n",
        "        if self._now.is_stopped:\n",
        "tests/vllm/test_tensors.py::test_a_draft_model_counts",
    ),
    Mutant(
        "a thread read weights whose memory sleep mode had unmapped",
        "kvbm_vllm/engine_calls.py",
        "        follower.memory_goes()\n",
        "        pass\n",
        f"{CHANGES}::test_no_thread_looks_at_weights_that_sleep",
    ),
    Mutant(
        "SGLang: update_weights was not heard of",
        "kvbm_sglang/weights.py",
        '            weights.changed(f"SGLang is about to {name}")\n',
        "            pass\n",
        "tests/unit/test_sglang_settings.py::test_orders_that_change_weights_make_a_generation",
    ),
    Mutant(
        "SGLang: weights were written to the tensors, its cache was flushed, and the old name stayed",
        "kvbm_sglang/weights.py",
        "                self.doubt()\n",
        "                pass\n",
        f"{SGLANG}::test_weights_that_were_written_before_a_flush_never_last[model]",
    ),
    Mutant(
        "SGLang: one rank of an engine took its part of the weights for all of them",
        "kvbm_sglang/weights.py",
        "    if size == 1:\n",
        "    if True:\n",
        f"{SGLANG}::test_all_ranks_have_to_find_the_same[True]",
    ),
    Mutant(
        "TensorRT-LLM: a trainer's reset of its cache was not heard of",
        "kvbm_trtllm/weights.py",
        "            changes.hear(order)\n",
        "            pass\n",
        "tests/trtllm/test_weights.py::test_blocks_of_old_weights_answer_nobody[released-v1-overlap-1-write]",
    ),
    Mutant(
        "TensorRT-LLM: a request that ran across a change of weights was stored under the new name",
        "kvbm_trtllm/scheduler.py",
        "            self.leader.new_generation(keeps_host=False)\n",
        "            pass\n",
        "tests/trtllm/test_weights.py::test_a_request_that_runs_across_the_change_leaves_nothing",
    ),
    # ------------------------------------------------------------ adapters
    Mutant(
        "a LoRA was overwritten on disk between its load and its first request",
        "kvbm_vllm/adapters.py",
        "        elif files != adapter.files:\n",
        "        elif False:\n",
        f"{ADAPTERS}::test_overwritten_after_it_was_known_nobody_can_tell_what_a_later_load_has"
        f" {CHANGES}::test_an_adapter_overwritten_between_load_and_first_request_is_not_cached",
    ),
    Mutant(
        "a LoRA was changed while the engine read it, and named by what lies there now",
        "kvbm_vllm/adapters.py",
        "                and content.changed_ns < adapter.seen_ns - CLOCK_TICK_NS\n",
        "",
        f"{ADAPTERS}::test_a_change_while_it_is_loaded_leaves_it_to_this_process",
    ),
    Mutant(
        "a LoRA was loaded in place, then rolled back: the stamp of its first load answered",
        "kvbm_vllm/adapters.py",
        "        self._known.pop(number, None)\n        if path is not None:\n"
        "            self._first_seen(number, path)\n",
        "        if path is not None and number not in self._known:\n"
        "            self._first_seen(number, path)\n",
        f"{ADAPTERS}::test_loaded_in_place_and_rolled_back_each_load_has_what_it_read",
    ),
    Mutant(
        "vLLM refused a trainer's reset for blocks that kvbm still copied, and served those of old weights",
        "kvbm_vllm/changes.py",
        "            if not blocks or used != len(blocks):\n",
        "            if True:\n",
        f"{CHANGES}::test_a_trainer_resets_the_cache_while_blocks_of_the_last_answers_are_copied",
    ),
    Mutant(
        "a request that loads its LoRA anew in each step was cached by the path that it names",
        "kvbm_vllm/changes.py",
        '        if getattr(lora, "load_inplace", False):\n',
        "        if False:\n",
        f"{CHANGES}::test_a_request_that_loads_its_adapter_anew_in_each_step_is_not_cached",
    ),
    Mutant(
        "a request went on while its LoRA was loaded anew, and stored blocks of both",
        "kvbm_vllm/changes.py",
        "        self._adapters.changes(number, path)\n        self._changed_adapters.add(number)\n",
        "        self._adapters.changes(number, path)\n",
        f"{CHANGES}::test_a_request_that_runs_while_its_adapter_is_loaded_anew_leaves_nothing",
    ),
    Mutant(
        "an adapter was cached by a vLLM that does not say when it loads adapters",
        "kvbm_vllm/adapters.py",
        "        if not self._sees_loads:\n            return None\n",
        "",
        f"{ADAPTERS}::test_without_notice_of_loads_nothing_is_known",
    ),
    Mutant(
        "TensorRT-LLM: a LoRA's number meant another adapter after a restart",
        "kvbm_core/identity/roots.py",
        "is_lasting = self._is_lasting and self._weights.is_lasting and adapter.is_lasting",
        "is_lasting = self._is_lasting and self._weights.is_lasting",
        "tests/unit/test_identity_roots.py::test_what_only_this_process_knows_does_not_last",
    ),
    # ------------------------------------------------------------ settings
    Mutant(
        "--hf-config-path with another rope_theta had the same key",
        "kvbm_vllm/config_tables.py",
        '"hf_config": InKey(effective_config, "as vLLM computes with it, after all overrides"),\n        '
        '"hf_text_config": InKey(effective_config, "as vLLM computes with it, after all overrides"),\n',
        '**_irrelevant("of no use", "hf_config hf_text_config"),\n',
        f"{VLLM}::test_what_the_default_is_does_not_matter_only_what_is_computed_with"
        f" {VLLM}::test_all_values_of_all_things_have_keys_of_their_own",
    ),
    Mutant(
        "--load-format dummy in two runs had the same key",
        "kvbm_vllm/config_tables.py",
        "            applies=_loads_elsewhere,\n",
        "            applies=lambda config: False,\n",
        f"{VLLM}::test_configuration_and_weights_each_say_what_cannot_be_told_apart[dummy]",
    ),
    Mutant(
        "made-up weights had a stamp by the folder that they are named after",
        "kvbm_vllm/weights.py",
        '    load_format = load_format_of(load)\n    if load_format == "dummy":\n',
        '    return ""\n    load_format = load_format_of(load)\n    if load_format == "dummy":\n',
        f"{VLLM}::test_configuration_and_weights_each_say_what_cannot_be_told_apart",
    ),
    Mutant(
        "weights of another URI had the same key",
        "kvbm_vllm/config_tables.py",
        "            applies=_names_a_place,\n",
        "            applies=lambda value: False,\n",
        f"{VLLM}::test_configuration_and_weights_each_say_what_cannot_be_told_apart[elsewhere]",
    ),
    Mutant(
        "files of another kind in the same folder were read by another load format under the same key",
        "kvbm_core/identity/weights.py",
        r'whole.update(f"{role}\0{content.sha256}\0{_reading(source, content)}\n".encode())',
        r'whole.update(f"{role}\0{content.sha256}\n".encode())',
        f"{WEIGHTS}::test_which_of_the_files_are_read_counts",
    ),
    Mutant(
        "a draft model's weights were not in the key",
        "kvbm_vllm/weights.py",
        '        sources["draft"] = _source(draft, load)\n',
        "        pass\n",
        f"{VLLM}::test_weights_and_code_of_a_draft_model_are_sources",
    ),
    Mutant(
        "code of a model in another repository of the hub was not in the key",
        "kvbm_vllm/weights.py",
        '                sources[f"{prefix}code {repository}"] = code\n',
        "                pass\n",
        f"{VLLM}::test_weights_and_code_of_a_draft_model_are_sources",
    ),
    Mutant(
        "max_model_len chooses the factors of longrope and was not in the key",
        "kvbm_vllm/config_tables.py",
        "    return model_config.max_model_len if reads or kinds - ROPE_OF_ANY_LENGTH else None\n",
        "    return model_config.max_model_len if reads else None\n",
        f"{VLLM}::test_the_length_counts_where_the_rope_depends_on_it",
    ),
    Mutant(
        "the scales of a quantized encoder come from a file whose name alone was in the key",
        "kvbm_vllm/config_tables.py",
        '        "mm_encoder_fp8_scale_path": InKey(file_digest, "the file\'s content"),\n',
        '        "mm_encoder_fp8_scale_path": InKey(),\n',
        f"{VLLM}::test_scales_of_the_encoder_are_read_from_their_file",
    ),
    Mutant(
        "a class that a plugin registered for the architecture was not in the key",
        "kvbm_vllm/identity.py",
        'for role, read in (("model class", _model_class), ("named classes", _named_classes)):',
        'for role, read in (("named classes", _named_classes),):',
        f"{VLLM}::test_the_class_that_is_registered_for_the_architecture_counts",
    ),
    Mutant(
        "an environment variable of vLLM that changes numbers was not in the key",
        "kvbm_vllm/identity.py",
        "        describe_environment(environ),\n",
        "",
        f"{VLLM}::test_all_values_of_all_things_have_keys_of_their_own",
    ),
    Mutant(
        "a CPU with AMX, for which vLLM orders K and V otherwise, shared keys with others",
        "kvbm_core/identity/environment.py",
        "AMX: {has_tiles and has_tiles()}",
        "AMX: ",
        f"{ENVIRONMENT}::test_of_a_cpu_its_kind_and_what_torch_says_of_amx_count"
        f" {VLLM}::test_what_a_cpu_can_compute_with_counts",
    ),
    Mutant(
        "the layout's fingerprint was of the first layer alone",
        "kvbm_core/layout/fingerprint.py",
        "for layer in self.layers for field",
        "for layer in self.layers[:1] for field",
        "tests/unit/test_layout.py::test_every_layer_changes_the_fingerprint"
        " tests/vllm/test_cache_kinds.py::test_each_layer_shapes_the_name_of_the_layout",
    ),
    Mutant(
        "an installed engine whose code somebody had changed shared keys with the released one",
        "kvbm_core/identity/environment.py",
        '    return " ".join(f"{text}={digest}" for text, digest in found if digest)\n',
        '    return ""\n',
        f"{ENVIRONMENT}::test_the_code_of_a_wheel_counts_that_somebody_has_changed",
    ),
    Mutant(
        "a library of an editable engine was built anew, with its old size and time",
        "kvbm_core/identity/environment.py",
        'if path.suffix == ".py" else digester.file(path)\n',
        'if path.suffix == ".py" else path.stat().st_size\n',
        f"{ENVIRONMENT}::test_a_library_counts_by_its_content",
    ),
    Mutant(
        "a file that a variable names was known by its path",
        "kvbm_core/identity/environment.py",
        "for name in names if name in contents and environ[name]):",
        "for name in ()):",
        f"{ENVIRONMENT}::test_of_a_file_that_a_variable_may_name_the_content_counts"
        f" {ENVIRONMENT}::test_of_a_package_that_a_variable_names_the_code_counts",
    ),
    Mutant(
        "a field that nobody has classified went to the disk",
        "kvbm_core/identity/fields.py",
        "            if rule is None:\n                unknown.append(path)\n",
        "            if rule is None:\n                pass\n",
        f"{FIELDS}::test_a_field_that_nobody_has_classified_does_not_last"
        f" {VLLM}::test_a_field_that_nobody_has_classified_keeps_blocks_in_this_process_and_is_named",
    ),
    Mutant(
        "a new field of vLLM was noticed by nobody",
        "kvbm_vllm/config_tables.py",
        '" is_submodel_config model_class_overrides model_impl override_attention_dtype quantization"',
        '" is_submodel_config model_class_overrides model_impl override_attention_dtype"',
        "tests/contract/test_vllm_identity.py::test_every_field_is_classified"
        f" {VLLM}::test_every_field_of_the_installed_version_is_classified",
    ),
    Mutant(
        "SGLang: a new argument was noticed by nobody",
        "kvbm_sglang/config_tables.py",
        "json_model_override_args modelopt_quant quantize_and_serve",
        "json_model_override_args quantize_and_serve",
        "tests/contract/test_sglang_identity.py::test_every_argument_is_classified",
    ),
    Mutant(
        "TensorRT-LLM: a new argument was noticed by nobody",
        "kvbm_trtllm/config_tables.py",
        '            "smoothquant_val",\n',
        "",
        "tests/trtllm/test_identity.py::test_every_field_is_classified",
    ),
    Mutant(
        "a configuration of another class was read by the rules of the one that is known",
        "kvbm_core/identity/fields.py",
        "        if type(value).__name__ == table.class_name:\n",
        "        if True:\n",
        f"{FIELDS}::test_another_class_of_a_nested_configuration_is_unknown",
    ),
    # ------------------------------------------------------------ names of a process or a request
    Mutant(
        "an image's name meant another image after a restart: its blocks went to the disk",
        "kvbm_vllm/keys.py",
        "    return not request.mm_features\n",
        "    return True\n",
        f"{VLLM}::test_requests_with_items_stay_off_the_disk_whatever_the_items_are_named"
        f" {VLLM}::test_what_vllm_makes_of_a_clients_name_is_not_trusted",
    ),
    Mutant(
        "two images at the same place of the same prompt shared blocks",
        "kvbm_vllm/keys.py",
        "for value in (name, offset, length)]",
        "for value in (offset, length)]",
        "tests/vllm/test_scheduler_scenarios.py::test_what_differs_besides_the_tokens_is_kept_apart",
    ),
    Mutant(
        "what means nothing in another process went to the disk",
        "kvbm_core/identity/roots.py",
        "        return Root(root, is_lasting, facts)\n",
        "        return Root(root, True, facts)\n",
        "tests/unit/test_identity_roots.py::test_what_only_this_process_knows_does_not_last",
    ),
    Mutant(
        "a forked process took its parent's names of its own for the same",
        "kvbm_core/identity/roots.py",
        "    if _nonce[0] != os.getpid():\n",
        "    if False:\n",
        "tests/unit/test_identity_roots.py::test_a_forked_process_is_another_one",
    ),
    # ------------------------------------------------------------ audits
    Mutant(
        "a wrong block under a right name was hit for ever: nothing compared",
        "kvbm_core/transfer/compare.py",
        "    return difference(stored, computed, dtype) > TOLERANCE[dtype]\n",
        "    return difference(stored, computed, dtype) > 1.0\n",
        f"{AUDIT}::test_rounding_is_the_same_kv_and_other_tokens_are_not",
    ),
    Mutant(
        "rounding of bfloat16 was taken for a wrong block",
        "kvbm_core/transfer/compare.py",
        '    "bfloat16": 0.15,\n',
        '    "bfloat16": 0.0,\n',
        f"{AUDIT}::test_rounding_is_the_same_kv_and_other_tokens_are_not",
    ),
    Mutant(
        "one wrong layer was hidden among the others",
        "kvbm_core/transfer/compare.py",
        "    return max(float(apart[start : start + numbers].mean())"
        " for start in range(0, len(apart), numbers))\n",
        "    return float(apart.mean())\n",
        f"{AUDIT}::test_one_wrong_layer_among_many_is_found",
    ),
    Mutant(
        "hits were drawn for audits by chance alone: a planted block could escape 10,000 times",
        "kvbm_core/runtime/audit.py",
        "self._every = round(1 / rate) if 0 < rate <= MAX_RATE_OF_RUNS else 0",
        "self._every = 0",
        f"{AUDIT}::test_of_each_run_of_hits_one_is_drawn",
    ),
    Mutant(
        "an audit whose request went away was not made up for",
        "kvbm_core/runtime/audit.py",
        "        self._owed = min(self._owed + 1, 1)\n",
        "        pass\n",
        f"{AUDIT}::test_what_came_to_nothing_is_made_up_for",
    ),
)
