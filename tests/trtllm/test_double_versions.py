"""What tells the double's versions before and between 1.2 and September 2026 from these."""

from __future__ import annotations

from dataclasses import fields

import pytest

from tests.trtllm.double import EARLY, MID, Executor, ExecutorConfig, World
from tests.trtllm.mocks import Script, api, make_classes, make_executor
from tests.trtllm.test_double import outputs_of

FIRST_FIELDS = ["request_id", "new_tokens", "new_block_ids", "computed_position"]


def test_early() -> None:
    with World(EARLY):
        assert [field.name for field in fields(api().RequestData)] == FIRST_FIELDS
        executor = make_executor()
        # The warm-up asks about a request that TensorRT-LLM made up, and there is no callable for forward
        # passes.
        assert executor.calls.names() == ["get_num_new_matched_tokens", "register_kv_caches"]
        assert executor.leader.requests[0].is_dummy_request
        executor.submit(range(12), 4)
        executor.run_until_idle()
        assert (
            executor.calls.count("forward_pass_callable") == 0 and executor.calls.count("save_kv_layer") == 8
        )
        for config in (ExecutorConfig(cuda_graphs=True), ExecutorConfig(manager="v2")):
            with pytest.raises(ValueError):
                Executor(*make_classes(Script()), config)
        with pytest.raises(ValueError):
            executor.drop_next_batch()


def test_mid() -> None:
    with World(MID):
        more = ["num_scheduled_tokens", "priorities", "cache_salt_id"]
        assert [field.name for field in fields(api().RequestData)] == FIRST_FIELDS + more
        assert api().__name__.endswith(".connectors.kv_cache_connector")
        executor = make_executor(Script(matches={1: (8, False)}))
        assert executor.calls.names()[-1] == "wait_for_initialization"
        executor.calls.clear()
        executor.submit(range(12), 4, cache_salt="tenant", priority=50)
        executor.submit(range(50, 62), 4)
        executor.run_until_idle()
        # All queries of an iteration come before its first allocation.
        names = executor.calls.names()
        assert names[:4] == ["get_num_new_matched_tokens"] * 2 + ["update_state_after_alloc"] * 2
        first, second = outputs_of(executor)[0].new_requests
        assert first.priorities == [50] * 3 and isinstance(first.cache_salt_id, int)
        assert second.priorities is None and second.cache_salt_id is None
