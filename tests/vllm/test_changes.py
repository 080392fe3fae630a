"""Weights and adapters that change while vLLM serves: no block of the old ones answers the new ones, as the
model checks of every byte, and none that is of both is kept.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from kvbm_core.identity import tensors
from kvbm_core.types import Direction
from kvbm_vllm import changes, engine_calls
from kvbm_vllm.tensors import _watched
from tests.engines import PATIENCE_S
from tests.vllm.engine_config import write_weights
from tests.vllm.kvbm_engine import KvbmEngine

PROMPT = range(50)
DISK: dict[str, Any] = {"host_blocks": 60, "disk_blocks": 1000}
TO_DISK = "kvbm_offload_blocks_h2d"


def change(engine: KvbmEngine, weights: str = "new") -> None:
    """What RL frameworks do between two steps."""
    engine.executor.collective_rpc("update_weights", kwargs={"update_info": weights})


def load(engine: KvbmEngine, weights: str = "new") -> None:
    """What a trainer does that has the model object."""
    engine.executor.driver_worker.get_model().load_weights(weights)  # type: ignore[operator]


def fresh(engine: KvbmEngine, name: str) -> int:
    """How many tokens of the prompt come from kvbm, with nothing on the device."""
    engine.forget_device()
    engine.ask(name, PROMPT, 8)
    return engine.external_tokens(name)


# ---------------------------------------------------------------- weights


def test_blocks_of_old_weights_answer_nobody_and_those_of_the_new_ones_do(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        first = engine.ask("a", PROMPT, 8)
        assert fresh(engine, "b") == 48
        engine.forget_device()
        change(engine)
        second = engine.ask("c", PROMPT, 8)
        assert second != first and not engine.external_tokens("c")
        assert fresh(engine, "d") == 48 and engine.record.outputs["d"] == second
        change(engine, "")  # rolled back: nobody knows that
        assert not fresh(engine, "e") and engine.record.outputs["e"] == first
        engine.assert_clean()


def test_the_host_tier_is_free_for_the_new_ones(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("a", PROMPT, 8)
        engine.settle()
        assert engine.leader.chain.host.resident_blocks
        change(engine)
        engine.forget_device()
        engine.add("b", range(500, 510))
        engine.step()
        assert not engine.leader.chain.host.resident_blocks
        engine.run()
        engine.assert_clean()


@pytest.mark.parametrize("running", [False, True])
def test_a_trainer_resets_the_cache_while_blocks_of_the_last_answers_are_copied(
    tmp_path: Path, *, running: bool
) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.hold(Direction.OFFLOAD)
        first = engine.ask_until_done("a", PROMPT, 8)
        assert engine.hooks._copying
        load(engine)
        assert engine.reset_device(running=running), "nobody makes a step before the next request"
        assert engine.ask_until_done("b", PROMPT, 8) != first
        engine.add("c", range(500, 550), 8)
        engine.step()
        assert not engine.reset_device(), "a request has blocks too"
        engine.release(Direction.OFFLOAD)
        engine.assert_clean()


@pytest.mark.parametrize("how", [change, load])
def test_a_request_that_runs_across_the_change_leaves_nothing(
    tmp_path: Path, how: Callable[[KvbmEngine], None]
) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.add("a", PROMPT, 30)
        engine.run(until=lambda: len(engine.record.outputs["a"]) >= 10)
        how(engine)
        engine.run()
        engine.settle()
        assert not engine.leader.chain.host.resident_blocks
        tokens = [*PROMPT, *engine.record.outputs["a"]]
        engine.forget_device()
        engine.ask("b", tokens, 1)
        assert not engine.external_tokens("b")
        assert fresh(engine, "c") == 48
        engine.assert_clean()


@pytest.mark.parametrize("is_preempted", [False, True])
def test_without_a_reset_of_vllms_own_cache_its_old_blocks_are_not_taken_for_new(
    tmp_path: Path, is_preempted: bool
) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("a", PROMPT, 1)
        change(engine)
        # vLLM's own mistake, as nobody has reset its cache: "b" reads old KV. kvbm must not keep it.
        for rank in engine.ranks:
            rank._check = lambda *_: None  # type: ignore[method-assign]
        engine.ask("b", PROMPT, 8)
        assert engine.record.matches[-1].computed_tokens == 48
        engine.settle()
        assert not engine.leader.chain.host.resident_blocks
        for rank in engine.ranks:
            del rank._check
        if is_preempted:
            engine.add("c", range(300, 350), 20)
            engine.run(until=lambda: len(engine.record.outputs["c"]) == 2)
            assert engine.reset_device(running=True)
            engine.run()
        assert not fresh(engine, "d"), "what was kept is of both weights"
        assert fresh(engine, "e") == 48
        engine.assert_clean()


def test_what_vllm_computes_anew_after_a_pause_is_kept(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.add("a", PROMPT, 30)
        engine.run(until=lambda: len(engine.record.outputs["a"]) >= 10)
        change(engine)
        assert engine.reset_device(running=True)
        engine.run()
        assert engine.record.preemptions == 1
        assert fresh(engine, "b") == 48
        engine.assert_clean()


def test_a_load_of_old_blocks_that_is_under_way_fails_and_the_request_is_computed(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("a", PROMPT, 8)
        engine.forget_device()
        engine.hold(Direction.ONBOARD)
        engine.add("b", PROMPT, 8)
        engine.step()
        engine.step()
        change(engine)
        engine.step()
        engine.release(Direction.ONBOARD)
        engine.run()  # the model would find old KV
        assert engine.record.outputs["b"] != engine.record.outputs["a"]
        assert fresh(engine, "c") == 48
        engine.assert_clean()


def test_a_copy_that_is_under_way_is_not_found_later(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.hold(Direction.OFFLOAD)
        engine.add("a", PROMPT, 4)
        engine.run(until=lambda: len(engine.record.outputs["a"]) == 4)
        change(engine)
        engine.release(Direction.OFFLOAD)
        engine.run()
        assert not fresh(engine, "b")
        engine.assert_clean()


def test_requests_that_were_queued_before_the_tier_was_ready_are_not_taken_for_new_ones(
    tmp_path: Path,
) -> None:
    with KvbmEngine(tmp_path) as engine:
        leader = engine.leader
        leader.disabled_reason = "not yet"
        engine.add("a", PROMPT, 30)
        engine.run(until=lambda: len(engine.record.outputs["a"]) >= 2)
        change(engine)
        engine.step()
        leader.disabled_reason = None
        engine.run()
        engine.settle()
        assert not leader.chain.host.resident_blocks
        engine.assert_clean()


def test_old_blocks_stay_on_disk_for_who_has_those_weights_and_new_ones_do_not_go_there(
    tmp_path: Path,
) -> None:
    with KvbmEngine(tmp_path, **DISK) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.settle()
        stored = engine.metric(TO_DISK)
        assert stored >= 12
        change(engine)
        engine.forget_device()
        engine.ask("b", PROMPT, 8)
        engine.settle()
        assert engine.metric(TO_DISK) == stored
        engine.assert_clean()
    with KvbmEngine(tmp_path, **DISK) as engine:
        assert fresh(engine, "c") == 48 and engine.record.outputs["c"] == first
        engine.assert_clean()


# ---------------------------------------------------------------- weights, with no order


def change_unseen(engine: KvbmEngine, weights: str = "new") -> None:
    """What a trainer does that writes to the model's tensors."""
    for rank in engine.ranks:
        rank.change_weights(weights)


@pytest.mark.parametrize("with_connector", [False, True])
@pytest.mark.parametrize("how", [change_unseen, load])
def test_new_weights_after_a_reset_bear_a_name_of_their_own(
    tmp_path: Path, how: Callable[[KvbmEngine], None], with_connector: bool
) -> None:
    with KvbmEngine(tmp_path, **DISK) as engine:
        first = engine.ask("a", PROMPT, 8)
        engine.settle()
        stored = engine.metric(TO_DISK)
        how(engine)
        assert engine.reset_device(with_connector=with_connector)
        second = engine.ask("b", PROMPT, 8)
        assert second != first and not engine.external_tokens("b")
        assert fresh(engine, "c") == 48 and engine.record.outputs["c"] == second
        assert engine.metric(TO_DISK) == stored
        change_unseen(engine, "")  # rolled back
        assert engine.reset_device(with_connector=with_connector)
        assert engine.ask("d", PROMPT, 8) == first and not engine.external_tokens("d")
        engine.settle()
        assert engine.metric(TO_DISK) == stored
        engine.assert_clean()
    with KvbmEngine(tmp_path, **DISK) as engine:
        assert fresh(engine, "e") == (0 if with_connector else 48)
        assert engine.record.outputs["e"] == first
        engine.assert_clean()


@pytest.mark.parametrize("with_connector", [False, True])
def test_the_same_weights_after_a_reset_keep_their_name(tmp_path: Path, with_connector: bool) -> None:
    with KvbmEngine(tmp_path, **DISK) as engine:
        engine.ask("a", PROMPT, 8)
        engine.settle()
        stored = engine.metric(TO_DISK)
        assert engine.reset_device(with_connector=with_connector)
        engine.ask("b", PROMPT, 8)
        assert engine.external_tokens("b") == (0 if with_connector else 48)
        engine.ask("c", range(100, 150), 8)
        engine.settle()
        assert engine.metric(TO_DISK) > stored
        engine.assert_clean()
    with KvbmEngine(tmp_path, **DISK) as engine:
        assert fresh(engine, "d") == 48
        engine.assert_clean()


def test_a_request_that_runs_across_a_reset_of_kvbm_is_stored_if_the_weights_are_the_same(
    tmp_path: Path,
) -> None:
    for name, is_same in (("same", True), ("others", False)):
        (tmp_path / name).mkdir()
        with KvbmEngine(tmp_path / name) as engine:
            engine.add("a", PROMPT, 30)
            engine.run(until=lambda engine=engine: len(engine.record.outputs["a"]) >= 10)
            if not is_same:
                change_unseen(engine)
            assert not engine.reset_device(with_connector=True), "the device's blocks are in use"
            engine.run()
            engine.settle()
            assert bool(engine.leader.chain.host.resident_blocks) is is_same
            assert not fresh(engine, "b") and fresh(engine, "c") == 48
            engine.assert_clean()


def test_a_reset_in_a_server_is_no_doubt_unless_it_reaches_kvbm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "name", "EngineCore_DP0")
    with KvbmEngine(tmp_path) as engine:
        monkeypatch.undo()
        engine.ask("a", PROMPT, 8)
        engine.executor.driver_worker.get_model = None  # type: ignore[method-assign, assignment]
        assert fresh(engine, "b") == 48
        assert engine.reset_device(with_connector=True)
        assert not fresh(engine, "c") and engine.hooks._changes.weights.generation
        engine.assert_clean()


def test_without_anybody_to_ask_a_reset_is_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_calls, "ask", lambda *_: [])
    with KvbmEngine(tmp_path, **DISK) as engine:
        engine.ask("a", PROMPT, 8)
        engine.settle()
        stored = engine.metric(TO_DISK)
        assert stored and not fresh(engine, "b")
        engine.settle()
        assert engine.metric(TO_DISK) == stored
        engine.assert_clean()


class SlowLooks:
    """A model so large that it is looked at in a thread; ``go_on`` lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.go_on.set()
        self._digest_of = tensors.digest_of
        monkeypatch.setattr(tensors, "digest_of", self._slow)
        monkeypatch.setattr(tensors, "AT_ONCE_BYTES", 0)
        monkeypatch.setattr(changes, "ASK_AGAIN_S", 0.0)

    def _slow(self, of: Any, is_stopped: Callable[[], bool]) -> str:
        of = [(name, tensor.clone()) for name, tensor in of]
        while not self.go_on.wait(0.01):
            if is_stopped():
                raise tensors._StoppedError
        return self._digest_of(of, is_stopped)

    def wait(self, engine: KvbmEngine) -> None:
        """Until the model of this engine has been looked at."""
        watched = _watched[engine.executor.driver_worker.get_model()]
        assert watched._now.is_over.wait(PATIENCE_S)


@pytest.mark.parametrize("is_same", [True, False])
def test_while_a_large_model_is_looked_at_nothing_of_before_is_served_and_nothing_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_same: bool
) -> None:
    looks = SlowLooks(monkeypatch)
    with KvbmEngine(tmp_path, **DISK) as engine:
        looks.wait(engine)
        first = engine.ask("a", PROMPT, 8)
        engine.ask("a2", range(400, 450), 8)
        engine.settle()
        stored = engine.metric(TO_DISK)
        looks.go_on.clear()
        if not is_same:
            change_unseen(engine)
        assert not fresh(engine, "b") and (engine.record.outputs["b"] == first) is is_same
        assert fresh(engine, "b2") == 0, "each reset is a doubt of its own"
        engine.add("c", range(200, 250), 30)
        engine.run(until=lambda: len(engine.record.outputs["c"]) >= 10)
        assert engine.metric(TO_DISK) == stored
        looks.go_on.set()
        looks.wait(engine)
        engine.run()
        engine.ask("d", range(300, 350), 8)
        engine.settle()
        assert (engine.metric(TO_DISK) > stored) is is_same
        engine.ask("e", range(400, 450), 8)
        assert engine.external_tokens("e") == (48 if is_same else 0)
        engine.assert_clean()


def test_a_reset_before_the_first_look_is_over_is_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = SlowLooks(monkeypatch)
    looks.go_on.clear()
    with KvbmEngine(tmp_path, **DISK) as engine:
        engine.ask("a", PROMPT, 8)
        engine.settle()
        assert not fresh(engine, "b") and not engine.hooks._changes.weights.stamp().is_lasting
        looks.go_on.set()
        assert not fresh(engine, "c"), "who changes weights once does it again"
        assert not engine.hooks._changes.weights.stamp().is_lasting
        engine.assert_clean()


def test_no_thread_looks_at_weights_that_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = SlowLooks(monkeypatch)
    with KvbmEngine(tmp_path, **DISK) as engine:
        looks.wait(engine)
        engine.ask("a", PROMPT, 8)
        looks.go_on.clear()
        assert not fresh(engine, "b")
        watched = _watched[engine.executor.driver_worker.get_model()]
        assert not watched._now.is_over.is_set()
        engine.executor.collective_rpc("sleep", kwargs={"level": 1})
        assert watched._now.is_over.is_set()
        looks.go_on.set()
        engine.ask("c", range(300, 350), 8)  # begins another look
        looks.wait(engine)
        engine.ask("d", range(400, 450), 8)
        assert engine.hooks._changes.weights.stamp().is_lasting
        engine.assert_clean()


# ---------------------------------------------------------------- weights, others at the next start


def test_other_weights_in_the_next_start_find_nothing(tmp_path: Path, rng: random.Random) -> None:
    old = rng.randbytes(5000)
    new = old[:2500] + bytes(byte ^ 1 for byte in old[2500:3300]) + old[3300:]
    stored = 0.0
    for name, weights, found in (("a", old, 0), ("b", new, 0), ("c", old, 48)):
        with KvbmEngine(tmp_path, **DISK, weights=weights) as engine:
            assert fresh(engine, name) == found
            engine.settle()
            stored += engine.metric(TO_DISK)
            engine.assert_clean()
    assert stored


@pytest.mark.parametrize(
    ("order", "args", "kwargs", "changes"),
    [
        ("get_model_inspection", (), {}, False),
        ("sleep", (), {"level": 1}, False),
        ("sleep", (1,), {}, False),
        ("sleep", (), {"level": 2}, True),
        ("discard", (("kv_cache",),), {}, False),
        ("discard", (("kv_cache", "weights"),), {}, True),
        ("discard", (), {"tags": "weights"}, True),
        ("discard", (), {}, True),
        ("update_weights", ("x",), {}, True),
        (lambda worker: None, (), {}, True),
    ],
)
def test_orders_that_may_change_weights_do_and_others_do_not(
    tmp_path: Path, order: str | Callable[..., Any], args: tuple[Any, ...], kwargs: Any, changes: bool
) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("a", PROMPT, 8)
        engine.executor.collective_rpc(order, args=args, kwargs=kwargs)
        for rank in engine.ranks:
            rank.change_weights("")
        assert fresh(engine, "b") == (0 if changes else 48)


def test_another_engines_orders_are_not_ours(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("a", PROMPT, 8)
        (tmp_path / "other").mkdir()
        with KvbmEngine(tmp_path / "other") as other:
            assert engine.config.instance_id != other.config.instance_id
            change(other)
        assert fresh(engine, "b") == 48


def test_orders_are_noticed_once_vllm_has_renamed_the_engine(tmp_path: Path) -> None:
    """A core in a process of its own makes its configuration's id anew once it has started."""
    with KvbmEngine(tmp_path) as engine:
        engine.ask("a", PROMPT, 8)
        engine.config.instance_id = "another"
        change(engine)
        assert fresh(engine, "b") == 0


def test_the_core_that_makes_the_connector_is_asked(tmp_path: Path) -> None:
    """In a process of its own its executor was made before anything of kvbm's was loaded."""

    class Core:
        def __init__(self, executor: Any, config: Any) -> None:
            self.model_executor = executor
            engine_calls.find_executor(config)

    with KvbmEngine(tmp_path) as engine:
        asked = engine_calls.ask(engine.config, type_of)
        engine_calls._executors.clear()
        assert not engine_calls.ask(engine.config, type_of)
        Core(engine.executor, engine.config)
        assert engine_calls.ask(engine.config, type_of) == asked != []


def type_of(worker: Any) -> str:
    """A question to a rank."""
    return type(worker).__name__


def test_an_engine_that_does_not_say_when_it_loads_adapters_has_none_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_calls, "watch", lambda: False)
    with KvbmEngine(tmp_path, lora=True) as engine:
        engine.ask("a", PROMPT, 8, lora=adapter(tmp_path, "one"))
        engine.settle()
        assert not engine.leader.chain.host.resident_blocks
        assert engine.metric('kvbm_uncached_requests_total{reason="adapter"}') == 1


# ---------------------------------------------------------------- adapters


def adapter(folder: Path, content: str, number: int = 1, *, inplace: bool = False) -> LoRARequest:
    """An adapter that holds ``content``, written now."""
    files = {"adapter_model.safetensors": content.encode(), "adapter_config.json": b"{}"}
    path = write_weights(folder / f"adapter{number}", files)
    return LoRARequest(lora_name="x", lora_int_id=number, lora_path=str(path), load_inplace=inplace)


def fresh_with(engine: KvbmEngine, name: str, lora: LoRARequest) -> int:
    """As ``fresh``."""
    engine.forget_device()
    request = LoRARequest(lora.lora_name, lora.lora_int_id, lora.lora_path)
    engine.ask(name, PROMPT, 8, lora=request)
    return engine.external_tokens(name)


def load_adapter(engine: KvbmEngine, lora: LoRARequest) -> None:
    """What the server does when it is told to load an adapter."""
    engine.executor.collective_rpc("add_lora", args=(lora,))


def test_an_adapter_overwritten_between_load_and_first_request_is_not_cached(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, lora=True, **DISK) as engine:
        load_adapter(engine, adapter(tmp_path, "one"))
        lora = adapter(tmp_path, "two")
        assert not fresh_with(engine, "a", lora) and not fresh_with(engine, "b", lora)
        engine.settle()
        assert not engine.leader.chain.host.resident_blocks and not engine.metric(TO_DISK)
        engine.assert_clean()
    with KvbmEngine(tmp_path, lora=True, **DISK) as engine:
        assert not fresh_with(engine, "c", lora)
        engine.assert_clean()


def test_loaded_in_place_and_rolled_back_each_answers_for_itself(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, lora=True) as engine:
        answers = []
        for turn, content in enumerate(("one", "two", "one")):
            lora = adapter(tmp_path, content, inplace=True)
            load_adapter(engine, lora)
            assert not fresh_with(engine, f"a{turn}", lora)
            assert fresh_with(engine, f"b{turn}", lora) == 48
            answers.append(engine.record.outputs[f"b{turn}"])
        assert answers[0] == answers[2] != answers[1]
        engine.assert_clean()


def test_a_request_that_runs_while_its_adapter_is_loaded_anew_leaves_nothing(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, lora=True) as engine:
        lora = adapter(tmp_path, "one")
        load_adapter(engine, lora)
        engine.add("a", PROMPT, 30, lora=lora)
        engine.add("plain", range(100, 150), 30)
        engine.run(until=lambda: len(engine.record.outputs["a"]) >= 3)
        engine.settle()
        before = engine.leader.chain.host.resident_blocks
        load_adapter(engine, adapter(tmp_path, "two", inplace=True))
        engine.run()
        engine.settle()
        plain = engine.leader.chain.host.resident_blocks - before
        assert 0 < plain <= 8, "those of the request without an adapter"
        assert not fresh_with(engine, "b", adapter(tmp_path, "two"))
        engine.assert_clean()


def test_changed_on_disk_and_loaded_again_unseen_it_answers_nobody(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, lora=True, **DISK) as engine:
        lora = adapter(tmp_path, "one")
        fresh_with(engine, "a", lora)
        assert fresh_with(engine, "b", lora) in {0, 48}  # its digest may have come in between
        lora = adapter(tmp_path, "two")
        engine.executor.driver_worker.remove_lora(1)  # vLLM's worker makes room: no order says so
        assert not fresh_with(engine, "c", lora) and not fresh_with(engine, "d", lora)
        engine.assert_clean()


def test_an_adapter_that_changes_while_its_request_runs_leaves_nothing(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, lora=True, **DISK) as engine:
        lora = adapter(tmp_path, "one")
        load_adapter(engine, lora)
        wait_known(engine, lora)
        engine.add("a", PROMPT, 20, lora=lora)
        engine.run(until=lambda: len(engine.record.outputs["a"]) >= 3)
        adapter(tmp_path, "two")
        engine.run()
        engine.settle()
        assert not engine.leader.chain.host.resident_blocks and not engine.metric(TO_DISK)
        engine.assert_clean()


def test_an_adapters_blocks_are_found_on_disk_by_the_next_engine_under_another_name(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, lora=True, **DISK) as engine:
        lora = adapter(tmp_path, "one")
        load_adapter(engine, lora)
        wait_known(engine, lora)
        fresh_with(engine, "a", lora)
        engine.settle()
        assert engine.metric(TO_DISK) >= 12
        first = engine.record.outputs["a"]
    with KvbmEngine(tmp_path, lora=True, **DISK) as engine:
        others = adapter(tmp_path, "two", 1), adapter(tmp_path, "one", 7)
        for lora in others:
            load_adapter(engine, lora)
            wait_known(engine, lora)
        assert not fresh_with(engine, "b", others[0])
        assert fresh_with(engine, "c", others[1]) == 48 and engine.record.outputs["c"] == first
        engine.assert_clean()


def wait_known(engine: KvbmEngine, lora: LoRARequest) -> None:
    """Until the adapter's digest is known."""
    changes = engine.connector.scheduler_side.changes
    engine.wait_for(lambda: (stamp := changes.adapter_of(lora)) is not None and stamp.is_lasting)


def test_a_request_that_loads_its_adapter_anew_in_each_step_is_not_cached(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, lora=True) as engine:
        engine.ask("a", PROMPT, 8, lora=adapter(tmp_path, "one", inplace=True))
        engine.settle()
        assert not engine.leader.chain.host.resident_blocks


def test_a_request_that_loads_another_path_in_place_takes_the_number_from_all_others(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with KvbmEngine(tmp_path, lora=True) as engine:
        lora = adapter(tmp_path / "one", "one")
        load_adapter(engine, lora)
        engine.add("a", PROMPT, 30, lora=lora)
        engine.run(until=lambda: len(engine.record.outputs["a"]) >= 3)
        engine.settle()
        before = engine.leader.chain.host.resident_blocks
        engine.add("b", PROMPT, 4, lora=adapter(tmp_path / "two", "two", inplace=True))
        engine.run()
        engine.settle()
        now = engine.leader.chain.host.resident_blocks
        assert now == before, "the rest of the running request is of both"
        assert not fresh_with(engine, "c", lora) and not fresh_with(engine, "d", lora)
        engine.settle()
        assert engine.leader.chain.host.resident_blocks == before
