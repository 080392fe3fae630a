"""Why a request missed: each way to miss has its own reason, under vLLM's own scheduler. What is asked over
the socket of the engine, by the command, is what the leader noted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvbm_core.cli.main import app
from kvbm_core.control.messages import Order, Verb
from kvbm_core.errors import Outcome
from kvbm_core.observe.labels import MissReason
from kvbm_core.observe.why import Account
from kvbm_core.testing import toy_store
from kvbm_core.types import Direction
from tests.unit.control_bench import here
from tests.vllm.harness import adapter
from tests.vllm.kvbm_engine import KvbmEngine
from tests.vllm.test_changes import change
from tests.vllm.test_orders import CONTROL, give

__all__ = ["here"]

PROMPT, OTHER = range(50), range(500, 550)
BLOCKS = 12
"""Of 4 tokens, that each of them fills."""


def account(engine: KvbmEngine, request_id: str) -> Account:
    """What is told of a request."""
    (found,) = engine.leader.metrics.why.find(request_id)
    return found


def missed(engine: KvbmEngine, request_id: str = "again", tokens: int = 48, **how: Any) -> Account:
    """Asks for PROMPT with nothing on the device: what is told of it, once it is over."""
    engine.forget_device()
    engine.ask(request_id, how.pop("prompt", PROMPT), 1, **how)
    engine.settle()
    found = account(engine, request_id)
    assert found.missed_tokens == tokens and found.device_tokens == 0
    reason = found.reason
    if reason is not None:
        label = f'{{reason="{reason}"}}'
        assert engine.metric(f"kvbm_missed_requests_total{label}") >= 1
        assert engine.metric(f"kvbm_missed_tokens_total{label}") >= tokens
    engine.assert_clean()
    return found


def test_never_seen(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("first", OTHER, 1)
        found = missed(engine)
        assert found.reason is MissReason.NEVER_SEEN and "from token 0 on: never seen" in found.text
        found = missed(engine, "longer", tokens=48, prompt=[*PROMPT, *OTHER])
        assert found.reason is MissReason.NEVER_SEEN and "from token 48 on" in found.text
        assert found.host_tokens == 48 and found.prompt_tokens == 100


def test_a_whole_hit_misses_nothing(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("first", PROMPT, 1)
        found = missed(engine, tokens=0)
        assert found.reason is None and not found.text and found.host_tokens == 48
        engine.ask("on the device", PROMPT, 1)
        found = account(engine, "on the device")
        assert found.reason is None and found.device_tokens == 48 and not found.host_tokens


def test_evicted(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, host_blocks=BLOCKS) as engine:
        engine.ask("first", PROMPT, 1)
        engine.forget_device()
        engine.ask("other", OTHER, 1)
        found = missed(engine)
        assert found.reason is MissReason.EVICTED
        assert "evicted from the host tier" in found.text and "after its last use" in found.text


def test_forgotten(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("first", PROMPT, 1)
        engine.settle()
        assert engine.reset_device(with_connector=True)
        found = missed(engine)
        assert found.reason is MissReason.FORGOTTEN and "a reset" in found.text


def test_salted(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("first", PROMPT, 1, salt="tenant one")
        found = missed(engine)
        assert found.reason is MissReason.SALTED and "cache_salt" in found.text
        found = missed(engine, "third", salt="tenant two")
        assert found.reason is MissReason.SALTED and "tenant" not in found.text


def test_another_adapter(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, lora=True) as engine:
        engine.ask("first", PROMPT, 1)
        found = missed(engine, lora=adapter("fine", 1))
        assert found.reason is MissReason.OTHER_ADAPTER and "another adapter" in found.text


def test_other_weights(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("first", PROMPT, 1)
        engine.forget_device()
        change(engine)
        found = missed(engine)
        assert found.reason is MissReason.OTHER_WEIGHTS and "weights" in found.text


def test_the_nearest_of_other_names_is_told(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, lora=True) as engine:
        engine.ask("both", PROMPT, 1, lora=adapter("fine", 1), salt="a")
        engine.forget_device()
        engine.ask("salt", PROMPT, 1, salt="b")
        found = missed(engine)
        assert found.reason is MissReason.SALTED and "adapter" not in found.text


def test_the_field_that_differs_from_an_earlier_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KvbmEngine(tmp_path, disk_blocks=64) as engine:
        engine.ask("first", PROMPT, 1)
        engine.settle()
    monkeypatch.setenv("VLLM_A_NEW_VARIABLE", "a secret")
    with KvbmEngine(tmp_path, disk_blocks=64) as engine:
        found = missed(engine)
        assert found.reason is MissReason.OTHER_NAMESPACE
        assert "another configuration: VLLM_A_NEW_VARIABLE: not set there, set here" in found.text
        assert missed(engine, "other", prompt=OTHER).reason is MissReason.NEVER_SEEN
    monkeypatch.delenv("VLLM_A_NEW_VARIABLE")
    with KvbmEngine(tmp_path, disk_blocks=64, layout="LBHNC") as engine:
        assert "cache_config.kv_cache_layout: LBNHC there, LBHNC here" in missed(engine).text
    notes = [path.read_text() for path in (tmp_path / "disk" / "kvbm" / "namespaces").iterdir()]
    assert len(notes) == 3 and not any("secret" in note for note in notes)


def test_filtered(tmp_path: Path) -> None:
    extra = {"disable_disk_offload_filter": False}
    with KvbmEngine(tmp_path, host_blocks=BLOCKS, disk_blocks=64, extra=extra) as engine:
        engine.ask("first", PROMPT, 1)
        engine.forget_device()
        engine.ask("other", OTHER, 1)
        found = missed(engine)
        assert found.reason is MissReason.FILTERED and "the disk tier's filter" in found.text


def test_evicted_from_the_disk_too(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, host_blocks=BLOCKS, disk_blocks=BLOCKS) as engine:
        engine.ask("first", PROMPT, 1)
        engine.forget_device()
        engine.ask("other", OTHER, 1)
        found = missed(engine)
        assert found.reason is MissReason.EVICTED and "evicted from the disk tier" in found.text


def test_a_state_that_went_with_the_kv_behind_it(tmp_path: Path) -> None:
    """KV is left, and no state in it: not for the distance between them."""
    with KvbmEngine(tmp_path, host_blocks=26, num_blocks=160, windows=("state", None)) as engine:
        engine.ask("first", PROMPT, 1)
        engine.forget_device()
        engine.ask("other", OTHER, 1)
        engine.forget_device()
        engine.ask("third", range(900, 918), 1)  # 4 blocks and a state: first's state and its last KV go
        found = missed(engine)
        assert found.reason is MissReason.NO_STATE and "its KV is there up to token 32" in found.text
        assert "evicted from the host tier" in found.text


def test_no_room_for_all_of_it(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, host_blocks=4) as engine:
        engine.ask("first", PROMPT, 1)
        found = missed(engine, tokens=32)
        assert found.reason is MissReason.NOT_KEPT and "no free slot" in found.text
        assert found.host_tokens == 16


def test_no_room_for_what_is_on_the_disk(tmp_path: Path) -> None:
    """All of the host is being read, and what is on the disk comes by way of it."""
    with KvbmEngine(tmp_path, host_blocks=BLOCKS, disk_blocks=64) as engine:
        for name, prompt in (("first", PROMPT), ("other", OTHER)):
            engine.ask(name, prompt, 1)
            engine.forget_device()
        engine.hold(Direction.ONBOARD)
        engine.add("reads", OTHER, 1)
        engine.step()
        engine.add("again", PROMPT, 1)
        engine.step()
        found = account(engine, "again")
        assert found.reason is MissReason.NO_ROOM and "too many blocks are in use" in found.text
        assert found.missed_tokens == 48
        engine.release(Direction.ONBOARD)
        engine.run()
        engine.forget_device()
        engine.ask("later", PROMPT, 1)
        assert account(engine, "later").reason is None
        engine.assert_clean()


def test_not_ready(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("first", PROMPT, 1)
        engine.forget_device()
        engine.leader.disable("injected")
        found = missed(engine)
        assert found.reason is MissReason.NOT_READY and "injected" in found.text


@pytest.mark.parametrize("outcome", [Outcome.IO_ERROR, Outcome.CORRUPT])
def test_failed(outcome: Outcome, tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("first", PROMPT, 1)
        engine.forget_device()
        engine.executors[0].fail_next(Direction.ONBOARD, outcome)
        found = missed(engine)
        assert found.reason is MissReason.FAILED and f"its load failed: {outcome}" in found.text
        assert not found.host_tokens


def test_too_short(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        found = missed(engine, tokens=3, prompt=range(4))
        assert found.reason is MissReason.TOO_SHORT and "(5 tokens)" in found.text


def test_opted_out(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("first", PROMPT, 1)
        found = missed(engine, extra_args={"kv_transfer_params": {"kvbm": {"skip": True}}})
        assert found.reason is MissReason.OPTED_OUT and "kv_transfer_params" in found.text
        found = missed(engine, "logprobs", prompt_logprobs=1)
        assert found.reason is MissReason.OPTED_OUT and "not to read caches" in found.text


def test_limited(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("first", PROMPT, 1)
        found = missed(engine, tokens=28, extra_args={"kv_transfer_params": {"max_load_tokens": 20}})
        assert found.reason is MissReason.LIMITED and "20 tokens be loaded (max_load_tokens)" in found.text


def test_uncached(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.ask("first", PROMPT, 1)
        engine.forget_device()
        engine.add("again", PROMPT, 1).resumable = True
        engine.step()
        found = account(engine, "again")
        assert found.reason is MissReason.UNCACHED and "streaming session" in found.text
        engine.abort("again")
        engine.run()


@pytest.mark.shows("KVBM_AUDIT_RATE")
def test_audited(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra={"audit_rate": 1.0}) as engine:
        engine.ask("first", PROMPT, 1)
        found = missed(engine)
        assert found.reason is MissReason.AUDITED and "compared" in found.text


def test_changed_under_the_request(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path) as engine:
        engine.add("first", PROMPT, 30)
        engine.run(until=lambda: len(engine.record.outputs["first"]) >= 5)
        change(engine)
        engine.add("again", [*PROMPT, *OTHER], 1)
        engine.scheduler.schedule()  # finds blocks of the old weights in the engine's own cache
        found = account(engine, "again")
        assert found.reason is MissReason.CHANGED and found.device_tokens == found.missed_tokens == 48


@pytest.mark.shows("KVBM_REMOTE_WAIT_S")
def test_a_store_that_does_not_bring_it_in_time(tmp_path: Path) -> None:
    toy_store.forget_all()
    extra = {"remote_wait_s": 0.01, "remote_load": "always"}
    with KvbmEngine(
        tmp_path, host_blocks=60, store="toy://blocks?seed=1&latency_ms=300", extra=extra
    ) as engine:
        found = missed(engine)
        assert found.reason is MissReason.TOO_SLOW and "KVBM_REMOTE_WAIT_S" in found.text
    toy_store.forget_all()


# ---------------------------------------------------------------- asked from outside


@pytest.mark.shows("KVBM_CONTROL=socket", "KVBM_INSTANCE")
def test_the_command_tells_what_the_engine_noted(here: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    with KvbmEngine(tmp_path, extra=CONTROL) as engine:
        assert run(app, ["why"]).exit_code == 0
        engine.ask("chat-1", PROMPT, 1)
        engine.forget_device()
        engine.ask("chat-2", PROMPT, 1)
        engine.ask("short", range(3), 1)
        result = run(app, ["why", "--json", "--last", "2"])
        (told,) = json.loads(result.stdout)
        assert told["instance"] == "one"
        assert [one["request"] for one in told["requests"]] == ["short", "chat-2"]
        assert [one["reason"] for one in told["requests"]] == ["too_short", ""]
        assert told["requests"][1]["host_tokens"] == 48
        result = run(app, ["why", "--missed"])
        assert "never_seen" in result.stdout and "chat-2" not in result.stdout
        assert "missed tokens by reason: never_seen 48, too_short 2" in result.stdout
        result = run(app, ["why", "hat-1"])
        assert result.exit_code == 0 and "never seen" in result.stdout and "short" not in result.stdout
        result = run(app, ["why", "nobody"])
        assert result.exit_code == 1 and "KVBM_WHY_REQUESTS" in result.stderr
        assert len(give(Order(verb=Verb.WHY, count=1)).why) == 1
        engine.assert_clean()


@pytest.mark.shows("KVBM_WHY_REQUESTS")
def test_only_so_many_requests_are_remembered(tmp_path: Path) -> None:
    with KvbmEngine(tmp_path, extra={"why_requests": 3}) as engine:
        for number in range(5):
            engine.ask(f"r{number}", range(100 * number, 100 * number + 10), 1)
        book = engine.leader.metrics.why
        assert [found.request_id for found in book.last(10)] == ["r4", "r3", "r2"] and not book.find("r1")
        assert engine.metric('kvbm_missed_requests_total{reason="never_seen"}') == 5
