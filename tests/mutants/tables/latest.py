"""Mends of stores, fleets, audits and hybrid models that came after the others."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RECORD_STORE = "tests/unit/test_record_store.py"
TLS = "tests/unit/test_nats_tls.py"
EVICTOR = "tests/unit/test_directory_evictor.py"
FETCH = "tests/unit/test_leader_fetch.py"
STATES = "tests/unit/test_leader_states.py"
NUMBERS = "tests/vllm/test_kv_numbers.py"
SLOTTED = "tests/unit/test_slotted_tier.py"
EXTENTS = "tests/unit/test_keyed_extents.py"

MUTANTS = (
    Mutant(
        "an engine that only reads renewed nothing in a bucket",
        "kvbm_core/storage/remote/renewals.py",
        "                    timer.start()\n",
        "                    pass\n",
        f"{RECORD_STORE}::test_what_is_read_is_renewed_at_most_once_an_hour",
    ),
    Mutant(
        "what is read again and again was renewed each time",
        "kvbm_core/storage/remote/renewals.py",
        "if renewed_s is None or now_s - renewed_s > RENEW_EVERY_S:",
        "if True:",
        f"{RECORD_STORE}::test_what_is_read_is_renewed_at_most_once_an_hour",
    ),
    Mutant(
        "a renewal that raised ended renewals for good",
        "kvbm_core/storage/remote/renewals.py",
        "                    self._renewed_s.pop(name, None)\n",
        "                    pass\n",
        f"{RECORD_STORE}::test_an_engine_whose_renewal_raises_is_asked_again",
    ),
    Mutant(
        "a store that was closed went on renewing",
        "kvbm_core/storage/remote/renewals.py",
        "            self._is_closed = True\n            timer = self._timer\n",
        "            timer = None\n",
        f"{RECORD_STORE}::test_a_store_that_is_closed_renews_nothing_more",
    ),
    Mutant(
        "what a store has was given to it anew every minute (a leader)",
        "kvbm_core/tiers/known.py",
        "    kept_s: float = 4 * 3600.0\n",
        "    kept_s: float = 60.0\n",
        "tests/unit/test_keyed_tier.py"
        "::test_what_is_hit_for_hours_in_the_host_is_stored_once_and_one_block_of_it_looked_for",
    ),
    Mutant(
        "what a store has was given to it anew every minute (SGLang's HiCache)",
        "kvbm_sglang/store_chain.py",
        "KNOWN = KnownOptions(max_known=100_000)\n",
        "KNOWN = KnownOptions(max_known=100_000, kept_s=60.0)\n",
        "tests/contract/test_store_chain.py"
        "::test_what_is_used_on_the_disk_for_hours_is_put_once_and_again_only_if_it_is_missed",
    ),
    Mutant(
        "a store that had lost all stayed without it for four hours (a leader)",
        "kvbm_core/tiers/keyed.py",
        "                self._known.doubt(self._names_backwards(run))\n",
        "                pass\n",
        "tests/unit/test_keyed_tier.py::test_what_a_store_has_lost_while_the_host_had_it_is_stored_anew",
    ),
    Mutant(
        "a store that had lost all stayed without it for four hours (SGLang's HiCache)",
        "kvbm_sglang/store_chain.py",
        "        self._look_again(keys)\n",
        "",
        "tests/contract/test_store_chain.py"
        "::test_what_is_used_on_the_disk_for_hours_is_put_once_and_again_only_if_it_is_missed",
    ),
    Mutant(
        "a sealed header that gives blocks no bytes, or all of them, ended kvbm disk with a traceback",
        "kvbm_core/storage/disk/record.py",
        "    return header if 0 < header.payload_bytes <= MAX_PAYLOAD_BYTES and header.num_slots else None\n",
        "    return header\n",
        "tests/unit/test_any_bytes.py::test_a_sealed_header_of_a_block_file_may_say_anything",
    ),
    Mutant(
        "a time that no calendar has ended kvbm remote inspect with a traceback",
        "kvbm_core/cli/report.py",
        "    except (ValueError, OverflowError, OSError):  # a file system keeps any time that it is given\n",
        "    except KeyError:\n",
        "tests/unit/test_any_bytes.py::test_any_time_of_a_file_is_told",
    ),
    Mutant(
        "a sealed record with a block of no bytes was an I/O error of the whole store at each request",
        "kvbm_core/storage/remote/judge.py",
        "    if not all(sizes):\n        return None\n",
        "",
        "tests/unit/test_record_check.py"
        "::test_a_block_that_takes_nothing_is_damage_and_engines_remove_its_record",
    ),
    Mutant(
        "an eviction policy that raised left jobs behind that nobody ended",
        "kvbm_core/policy/guarded.py",
        "        except BROKEN as error:\n",
        "        except ZeroDivisionError as error:\n",
        "tests/unit/test_policies.py::test_a_policy_that_raises_is_not_asked_any_more",
    ),
    Mutant(
        "TensorRT-LLM: tokens of a request with a salt were told to routers once it was replayed",
        "kvbm_trtllm/scheduler.py",
        "            followed.status, followed.is_private = former.status, former.is_private\n",
        "            followed.status = former.status\n",
        "tests/trtllm/test_kv_events.py::test_of_a_replay_with_a_salt_no_tokens_are_told",
    ),
    Mutant(
        "a block that a reader held was overwritten, as somebody else's eviction policy had chosen it",
        "kvbm_core/policy/guarded.py",
        "                super().remove(slots)\n",
        "",
        "tests/unit/test_policies.py::test_a_policy_that_chooses_what_must_stay_is_not_asked_any_more",
    ),
    # ------------------------------------------------------------ NATS
    Mutant(
        "events: a server without TLS was told the password though TLS was wanted",
        "kvbm_core/events/nats_session.py",
        "            client = new_client()\n",
        "            from nats.aio.client import Client as Plain\n\n            client = Plain()\n",
        f"{TLS}::test_events_wait",
    ),
    Mutant(
        "orders taken: a server without TLS was told the password",
        "kvbm_core/events/nats_session.py",
        'if self._wants_tls and (writer is None or writer.get_extra_info("ssl_object") is None):\n',
        "if False:\n",
        f"{TLS}::test_no_orders_are_taken {TLS}::test_servers_that_it_names_hear_nothing_either",
    ),
    Mutant(
        "an operator's order: a server without TLS was told the password",
        "kvbm_core/control/nats_wire.py",
        "    client, answers = new_client(), list[Answer]()\n",
        "    from nats.aio.client import Client as Plain\n\n    client, answers = Plain(), list[Answer]()\n",
        f"{TLS}::test_no_order_is_given",
    ),
    Mutant(
        "kvbm doctor: a server without TLS was told the password",
        "kvbm_core/cli/doctor/servers.py",
        "    client = new_client()\n",
        "    from nats.aio.client import Client as Plain\n\n    client = Plain()\n",
        f"{TLS}::test_the_doctor_says_so",
    ),
    # ------------------------------------------------------------ stores that fail
    Mutant(
        "writes that succeed hid reads that fail from the breaker",
        "kvbm_core/tiers/breaker.py",
        "        num_proved = PROOF[kind] + 1\n",
        "        num_proved = len(self._rows)\n",
        "tests/unit/test_breaker.py::test_only_what_proves_as_much_as_what_failed_counts"
        " tests/unit/test_keyed_tier.py::test_a_store_that_takes_everything_and_gives_nothing_is_left_alone",
    ),
    Mutant(
        "the chain under HiCache did not tell the breaker what had worked",
        "kvbm_sglang/store_chain.py",
        "if trouble is None and self._breaker.succeeded(kind):",
        "if trouble is None and self._breaker.succeeded():",
        "tests/contract/test_store_chain.py::test_one_that_takes_everything_and_gives_nothing_is_left_alone",
    ),
    Mutant(
        "a directory on a full file system was not evicted from: its lock needs space",
        "kvbm_core/storage/directory/evictor.py",
        "if error.errno not in FULL:\n                raise\n            with suppress(OSError):\n",
        "if True:\n                raise\n            with suppress(OSError):\n",
        f"{EVICTOR}::test_a_lock_that_has_no_space_keeps_nobody_from_evicting",
    ),
    Mutant(
        "an engine that found no space from its start on evicted nothing",
        "kvbm_core/storage/directory/evictor.py",
        "        if num_bytes or is_full:\n",
        "        if num_bytes:\n",
        f"{EVICTOR}::test_an_engine_that_finds_no_space_from_its_start_on_evicts",
    ),
    Mutant(
        "who asks a store only once never had its prompt brought up",
        "kvbm_core/tiers/chain.py",
        "        if asks_again:\n",
        "        if True:\n",
        f"{FETCH}::test_who_asks_once_has_it_brought_up_for_the_next_one",
    ),
    Mutant(
        "of a long prompt only the first part was brought up for who asks once",
        "kvbm_core/tiers/chain.py",
        "            tier.on_news = self._go_on\n",
        "            pass\n",
        f"{FETCH}::test_of_a_long_prompt_all_is_brought_up_for_who_asks_once",
    ),
    Mutant(
        "prompts that are brought up for nobody were not bounded",
        "kvbm_core/tiers/chain.py",
        "            while len(self._errands) > MOST_ERRANDS:\n",
        "            while False:\n",
        f"{FETCH}::test_prompts_that_are_brought_up_at_once_are_bounded_and_the_newest_count",
    ),
    Mutant(
        "prompts for which the host was too small were fetched again and again",
        "kvbm_core/tiers/chain.py",
        "        if errand.left_blocks > 0 and (sought",
        "        if (sought",
        "tests/property/test_leader_sim_stores.py"
        "::test_prompts_for_which_the_host_is_too_small_are_not_fetched_again_and_again",
    ),
    Mutant(
        "prompts went on being brought up after their time",
        "kvbm_core/tiers/chain.py",
        "            if errand.ends_at_s > self._clock.now_s() and not self.holds_back():\n",
        "            if not self.holds_back():\n",
        f"{FETCH}::test_nothing_is_brought_up_that_was_reset_or_that_took_too_long",
    ),
    # ------------------------------------------------------------ audits and states
    Mutant(
        "audits took a draft layer's KV, which depends on the next token, for wrong blocks",
        "kvbm_core/transfer/executors/base.py",
        "dtype, parts = self._device.dtype_of(group), self._device.audited_of(group)",
        "dtype, parts = self._device.dtype_of(group), (slice(None),)",
        "tests/unit/test_audit.py::test_parts_of_blocks_are_left_out",
    ),
    Mutant(
        "vLLM did not say which layers are a draft's",
        "kvbm_vllm/layout.py",
        "    own = None if num_layers is None else own_layers(unique, num_layers)\n",
        "    own = None\n",
        f"{NUMBERS}::test_an_audit_leaves_out_a_drafts_part_of_a_block"
        " tests/vllm/test_draft_heads.py::test_another_next_token_is_no_wrong_block",
    ),
    Mutant(
        "a state counted as the newest before its KV was stored: the one before it went",
        "kvbm_core/runtime/states.py",
        "        while end and not all(map(self._chain.residents.contains, self._kv_at(state, end))):\n",
        "        while False:\n",
        f"{STATES}::test_a_state_whose_kv_is_kept_back_does_not_follow_another_one_yet",
    ),
    Mutant(
        "a state whose KV came later never went down to the disk",
        "kvbm_core/runtime/states.py",
        "                self._chain.offer(self.runs_at(state, {newest}))\n",
        "                pass\n",
        f"{STATES}::test_states_whose_kv_is_kept_back_go_down_as_others_do",
    ),
    Mutant(
        "what the device had served never counted as used: heads stayed away from disk and bucket",
        "kvbm_core/runtime/leader.py",
        "        state.hit_tokens = computed_tokens\n",
        "",
        f"{SLOTTED}::test_what_the_device_has_served_was_used_once_the_request_ends_or_is_preempted",
    ),
    Mutant(
        "blocks went to a disk that lacked what comes before them",
        "kvbm_core/tiers/storing.py",
        "                if before is None or before in batch or not self._new_of([before]):\n",
        "                if True:\n",
        f"{SLOTTED}::test_a_tail_is_not_stored_without_its_head",
    ),
    Mutant(
        "extents went to a store that lacked what comes before them",
        "kvbm_core/tiers/keyed.py",
        "            has_head = before is None or before in batch or self._is_there(before)\n",
        "            has_head = True\n",
        f"{EXTENTS}::test_extents_are_stored_when_all_of_their_blocks_are_in_the_host",
    ),
)
