"""What of an SGLang engine is in a page's key. The engine is a double with the form of 0.5.10's: this
environment has no SGLang (tests/sglang has, and asks its own arguments).
"""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from kvbm_core.identity.fields import InKey, Irrelevant
from kvbm_sglang.config_tables import HICACHE, SERVER_ARGS
from kvbm_sglang.engine_settings import code_of, describe_engine, describe_environment, effective
from kvbm_sglang.weights import weight_sources, weights_identity


class Arguments(SimpleNamespace):
    """ServerArgs, and the model's configuration that SGLang makes of them."""

    hf: ClassVar[Any] = {"rope_theta": 10_000.0}
    is_multimodal = False

    def get_model_config(self) -> SimpleNamespace:
        return SimpleNamespace(hf_config=self.hf, dtype="bfloat16", is_multimodal=self.is_multimodal)


def described(storage_config: Any = None, environ: dict[str, str] | None = None, **arguments: Any) -> Any:
    found = describe_engine(Arguments(**arguments), storage_config, environ or {})
    return found._replace(unknown=tuple(name for name in found.unknown if name != "transformers"))


@pytest.mark.parametrize("name", sorted(SERVER_ARGS.rules))
def test_each_argument_does_what_its_rule_says(name: str) -> None:
    rule = SERVER_ARGS.rules[name]
    one, other = described(**{name: None}), described(**{name: "something"})
    if isinstance(rule, InKey) and rule.read is None:
        assert one.pairs != other.pairs and one.is_lasting and other.is_lasting
    elif isinstance(rule, InKey):
        assert other.unknown == (name,), "a file that is not there"
    elif isinstance(rule, Irrelevant):
        assert one.pairs == other.pairs and other.is_lasting
    else:
        assert one.is_lasting and not other.is_lasting and name in other.process_only[0]


def test_what_is_not_known_does_not_last() -> None:
    assert described(of_tomorrow=1).unknown == ("of_tomorrow",)
    assert not describe_engine(None).is_lasting
    assert not describe_engine(SimpleNamespace(model_path="m")).is_lasting, "no configuration of the model"
    newer = SimpleNamespace(**dict.fromkeys(HICACHE.rules), of_tomorrow=1)
    assert described(newer).unknown == ("hicache.of_tomorrow",)


def test_the_models_configuration_counts_as_it_is_in_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    before = described()
    monkeypatch.setattr(Arguments, "hf", {"rope_theta": 5_000.0})
    assert described().pairs != before.pairs
    monkeypatch.setattr(Arguments, "is_multimodal", True)
    (line,) = described().process_only
    assert "does not name them" in line


def test_variables() -> None:
    found = describe_environment(
        {
            "SGLANG_OPT_OF_TOMORROW": "1",
            "SGLANG_RUN_ID": "9f3",
            "SGLANG_LOG_MS": "1",
            "SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS": "0",
            "SGLANG_ROUTER_SERVICE_HOST": "10.0.0.1",
            "PATH": "/bin",
        }
    )
    names = [name for name, _ in found.pairs]
    assert names == ["SGLANG_KV_CANARY_PERTURB_WARMUP_STEPS", "SGLANG_OPT_OF_TOMORROW"] and found.is_lasting
    assert describe_environment({"SGLANG_OPT_OF_TOMORROW": "2"}).pairs[0] != found.pairs[1]
    assert not describe_environment({"SGLANG_SIMULATE_UNIFORM_EXPERTS": "true"}).is_lasting


def test_the_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="NOT RUN: SGLang's device: torch is missing")
    before = described()
    found = {before.pairs}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability in ((9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda of=capability: of)
        found.add(described().pairs)
    assert len(found) == 3 and before.is_lasting


def test_how_fast_weights_are_read_does_not_count() -> None:
    plain = described(model_loader_extra_config="{}")
    for text in ('{"enable_multithread_load": true, "num_threads": 8}', "", None):
        assert described(model_loader_extra_config=text) == plain
        source = weight_sources(SimpleNamespace(model_loader_extra_config=text), "m")["model"]
        assert not source.unknown
    for text in ('{"uri": "s3://a"}', "not JSON", "[1]"):
        assert not described(model_loader_extra_config=text).is_lasting
        assert weight_sources(SimpleNamespace(model_loader_extra_config=text), "m")["model"].unknown


HARMLESS = ("checksum", "compare", "snapshot")


def test_orders_that_change_weights_make_a_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class with the form of SGLang's (tests/sglang watches the real ones)."""

    class Updater:
        def update_weights_from_disk(self, request: object) -> str:
            return "updated"

        def release_memory_occupation(self, request: object) -> str:
            return "released"

        def resume_memory_occupation(self, request: object) -> str:
            return "resumed"

        def begin_weight_update(self, request: object) -> str:
            return "restored"

        def end_weight_update(self, *, run_post_load: bool = False) -> str:
            return "finalized"

        def check_weights(self, request: object = None, *, action: str | None = None) -> str:
            return "checked"

    module = ModuleType("sglang.srt.managers.of_a_test")
    Updater.__module__ = module.__name__
    module.Updater = Updater  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    weights, engine = weights_identity(Arguments(), "m"), Updater()
    orders = [
        (engine.update_weights_from_disk, SimpleNamespace(), 1),
        (engine.release_memory_occupation, SimpleNamespace(tags=["kv_cache"]), 0),
        (engine.release_memory_occupation, SimpleNamespace(tags=["weights"]), 1),
        (engine.release_memory_occupation, SimpleNamespace(tags=None), 1),
        (engine.resume_memory_occupation, SimpleNamespace(tags=["weights"]), 0),
        (engine.begin_weight_update, SimpleNamespace(selector="all"), 1),
        (lambda request: engine.end_weight_update(run_post_load=True), None, 1),
        *((engine.check_weights, SimpleNamespace(action=action), 0) for action in HARMLESS),
        *((lambda action: engine.check_weights(action=action), action, 0) for action in HARMLESS),
        (engine.check_weights, SimpleNamespace(action="reset_tensors"), 1),
        (lambda action: engine.check_weights(action=action), "reset_tensors", 1),
    ]
    for order, request, more in orders:
        before, stamp = weights.generation, weights.stamp()
        assert order(request).endswith("ed")
        assert weights.generation - before == more and (weights.stamp() != stamp) is bool(more), request
        assert not weights.stamp().is_lasting


def test_what_keeps_the_disk_off_is_said_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvbm"):
        described().tell("SGLang", "nothing is cached")
        assert not caplog.records
        described(enable_lora=True, load_format="dummy").tell("SGLang", "nothing is cached")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("kvbm: nothing is cached") and "enable_lora" in line and "load_format" in line


def test_code_from_another_repository_is_a_part_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Arguments, "hf", SimpleNamespace(auto_map={"AutoModel": "org/other--modeling.Model", "x": "here.Y"})
    )
    trusting = Arguments(model_path="m", trust_remote_code=True)
    assert code_of(trusting) == {"org/other"} and not code_of(Arguments(model_path="m"))
    sources = weight_sources(effective(trusting), "m", code_of(trusting))
    assert sources["code org/other"].is_code
