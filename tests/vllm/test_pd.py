"""PdConnector under vLLM's own scheduler: kvbm beside a connector that moves KV between two engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import KVConnectorOutput

from kvbm_core.runtime.leader import Leader
from kvbm_core.testing.gate import Gate
from kvbm_core.tiers.slotted import SlottedTier
from kvbm_core.transfer.executor import Executor
from kvbm_core.types import Direction
from kvbm_vllm.connector import DynamoConnector
from tests.vllm.engine_config import DYNAMO, EngineSpec
from tests.vllm.harness import PATIENCE_S, Engine
from tests.vllm.near_nixl import NixlConnector

PROMPT = range(50)
FULL_TOKENS = 48
BLOCKS = "cpu_cache_override_num_blocks"
WITHOUT_KVBM = {"kv_transfer_params": {"kvbm": {"skip": True}}}
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
NIXL = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": NixlConnector.__module__,
    "kv_role": "kv_both",
}


class PdEngine(Engine):
    """Serves with the guides' PdConnector. ``kvbm``: settings of its first child."""

    def __init__(self, folder: Path, kvbm: dict[str, Any] | None = None, **spec: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.executors: list[Gate] = []
        settings = {BLOCKS: 64, **(kvbm or {})}
        children = [{**DYNAMO, "kv_role": "kv_both", "kv_connector_extra_config": settings}, NIXL]
        connector = {**DYNAMO, "kv_connector": "PdConnector"}
        super().__init__(
            EngineSpec(connector=connector, extra_config={"connectors": children}, **spec), folder
        )
        cache, transport = self.connector._connectors
        assert isinstance(cache, DynamoConnector) and isinstance(transport, NixlConnector)
        self.transport = transport
        self.leader: Leader = cache.scheduler_side.hooks.leader
        self._wait_for(lambda: self.leader.chain.host.capacity_blocks == settings[BLOCKS])

    def prepare_worker(self, rank: int, connector: KVConnectorBase_V1) -> None:
        """Puts the gate around the executor that this rank will make."""
        worker = connector._connectors[0].worker_side.worker

        def wrap(inner: Executor) -> Executor:
            self.executors.append(Gate(inner, worker._finished))
            return self.executors[-1]

        worker.wrap_executor(wrap)

    def forget_device(self) -> None:
        """Leaves what kvbm has, once all of it is stored."""
        self._wait_for(self._is_settled)
        assert self.reset_device()

    def _is_settled(self) -> bool:
        with self.leader.lock:  # its other thread may be between an end and what follows from it
            return self.leader.pending_jobs == 0 == self.leader.chain.storing_blocks

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, "what was waited for did not come"
            self.leader.poll()
            for rank in self.ranks:  # carried by hand, as no step does
                said = rank.connector.build_connector_worker_meta()
                if said is not None:
                    self.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=said))

    def prefill(self, request_id: str, prompt: Sequence[int]) -> dict[str, Any]:
        """What a prefill worker answers a proxy."""
        self.ask(request_id, prompt, 1, extra_args={"kv_transfer_params": dict(REMOTE_DECODE)})
        return self.record.handed[request_id]

    def decode(self, request_id: str, prompt: Sequence[int], handed: dict[str, Any]) -> list[int]:
        """What a proxy asks a decode worker."""
        return self.ask(request_id, prompt, 8, extra_args={"kv_transfer_params": dict(handed)})

    def disk_blocks(self) -> int:
        """How many blocks are on disk when nothing moves any more."""
        disk = self.leader.chain.named("disk")
        assert isinstance(disk, SlottedTier)
        return disk.usage[0]


def test_a_load_that_failed_is_computed(tmp_path: Path) -> None:
    # vLLM reads the policy from PdConnector's configuration, and kvbm has a copy of its own.
    with PdEngine(tmp_path) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.forget_device()
        engine.executors[0].fail_next(Direction.ONBOARD)
        assert engine.ask("b", PROMPT, 8) == first
        assert engine.record.reasons["b"] == FinishReason.LENGTH
        assert engine.external_tokens("b") == FULL_TOKENS


def test_a_user_can_choose_that_it_fails_the_request(tmp_path: Path) -> None:
    with PdEngine(tmp_path, {"load_failure_policy": "fail"}) as engine:
        engine.ask("a", PROMPT, 8)
        engine.forget_device()
        engine.executors[0].fail_next(Direction.ONBOARD)
        engine.ask("b", PROMPT, 8)
        assert engine.record.reasons["b"] == FinishReason.ERROR


def test_what_another_worker_computed_is_kept(tmp_path: Path) -> None:
    with PdEngine(tmp_path / "p") as prefill, PdEngine(tmp_path / "d") as decode:
        answer = prefill.ask("alone", PROMPT, 8)
        handed = prefill.prefill("a", PROMPT)
        assert decode.decode("b", PROMPT, handed) == answer
        assert decode.transport.brought_tokens == {"b": len(PROMPT)}
        decode.forget_device()
        assert decode.ask("c", PROMPT, 8) == answer
        assert decode.external_tokens("c") == FULL_TOKENS
        prefill.forget_device()
        prefill.prefill("d", range(60))  # the next turn
        assert prefill.external_tokens("d") == FULL_TOKENS


@pytest.mark.parametrize("restarted", ["prefill", "decode"])
def test_either_may_be_restarted_between_two_turns(restarted: str, tmp_path: Path) -> None:
    disk = {
        "disk_cache_override_num_blocks": 64,
        "disk_cache_dir": str(tmp_path / "disk"),
        "disable_disk_offload_filter": True,
    }
    with ExitStack() as stack:

        def start(name: str) -> PdEngine:
            return stack.enter_context(PdEngine(tmp_path / name, disk if name == "prefill" else None))

        engines = {name: start(name) for name in ("prefill", "decode")}
        answer = engines["decode"].decode("a", PROMPT, engines["prefill"].prefill("a", PROMPT))
        engines["prefill"].forget_device()
        assert engines["prefill"].disk_blocks() > 0
        engines[restarted].__exit__()
        engines[restarted] = start(restarted)
        next_turn = [*PROMPT, *answer, *range(100, 110)]
        alone = engines["decode"].ask("alone", next_turn, 8, extra_args=WITHOUT_KVBM)
        engines["decode"].forget_device()
        engines["prefill"].forget_device()
        handed = engines["prefill"].prefill("b", next_turn)
        assert engines["prefill"].external_tokens("b") == FULL_TOKENS
        assert engines["decode"].decode("b", next_turn, handed) == alone
        assert engines["decode"].transport.brought_tokens["b"] == len(next_turn)


def test_a_part_of_a_prompt_does_not_keep_nixl_from_bringing_the_whole(tmp_path: Path) -> None:
    with PdEngine(tmp_path / "p") as prefill, PdEngine(tmp_path / "d") as decode:
        decode.ask("half", range(24), 1)
        decode.forget_device()
        handed = prefill.prefill("a", PROMPT)
        before_tokens = decode.record.computed_tokens
        decode.decode("b", PROMPT, handed)
        assert decode.transport.brought_tokens == {"b": len(PROMPT)}
        assert decode.record.computed_tokens - before_tokens == 8, "the prompt was computed a second time"


def test_what_nixl_fails_to_bring_is_found_or_computed(tmp_path: Path) -> None:
    with PdEngine(tmp_path / "p") as prefill, PdEngine(tmp_path / "d") as decode:
        answer = decode.ask("half", range(24), 1) and prefill.ask("alone", PROMPT, 8)
        decode.forget_device()
        handed = prefill.prefill("a", PROMPT)
        transport = decode.ranks[0].connector._connectors[1]
        transport.is_broken = True
        assert decode.decode("b", PROMPT, handed) == answer
        assert decode.record.reasons["b"] == FinishReason.LENGTH
        assert [tokens for name, tokens in decode.record.allocs if name == "b"] == [50, 24, 0]
        transport.is_broken = False
        assert decode.decode("c", range(100, 150), prefill.prefill("c", range(100, 150)))
        assert decode.transport.brought_tokens["c"] == 50


@pytest.mark.parametrize("weights", [b"the fake model has none", b"those of last week"])
def test_on_disk_only_if_the_other_worker_has_the_same_weights(weights: bytes, tmp_path: Path) -> None:
    def tiers(name: str) -> dict[str, Any]:
        disk = {"disk_cache_override_num_blocks": 64, "disk_cache_dir": str(tmp_path / name / "disk")}
        return {**disk, "disable_disk_offload_filter": True}

    with (
        PdEngine(tmp_path / "p", tiers("p"), weights=weights) as prefill,
        PdEngine(tmp_path / "d", tiers("d")) as decode,
    ):
        decode.decode("b", PROMPT, prefill.prefill("a", PROMPT))
        decode.forget_device()
        is_same = weights == EngineSpec().weights
        assert decode.disk_blocks() == (14 if is_same else 0)
        assert decode.ask("c", PROMPT, 8)
        assert decode.external_tokens("c") == FULL_TOKENS, "host memory forgets with the process"
