"""What SGLang's weights are after its cache was flushed: those of the start if every tensor is the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="NOT RUN: SGLang's weights in memory; torch is missing")

from kvbm_core.identity import tensors  # noqa: E402
from kvbm_core.testing.executor_bench import LONG_S  # noqa: E402
from kvbm_sglang import weights as module  # noqa: E402
from kvbm_sglang.weights import EngineWeights, weights_identity  # noqa: E402
from tests.began import begins_now  # noqa: E402


class Model(torch.nn.Module):  # type: ignore[misc]
    """A matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3, 5), requires_grad=False)

    def load_weights(self, weights: float) -> None:
        """All of it."""
        self.weight.data.fill_(weights)


class Draft:
    """Of SGLang 0.5.23."""

    def __init__(self, model: Model) -> None:
        self.runner = SimpleNamespace(model=model)

    def weight_update_runners(self) -> list[tuple[str, Any]]:
        """One."""
        return [("draft", self.runner)]


class Scheduler:
    """With the form of SGLang's (tests/sglang has the real one), which makes its cache, and ``weights``."""

    def __init__(self, folder: Path, model: Model | None, draft: Any = None) -> None:
        if model is not None:
            self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
            self.draft_worker = draft
        with begins_now("kvbm_sglang.weights"):
            self.weights = self._weights(str(folder))
        self.weights.start()
        assert self.weights.wait(LONG_S)

    def _weights(self, folder: str) -> EngineWeights:
        return weights_identity(None, folder)

    def flush_cache(self, empty_cache: bool = True) -> bool:
        """Has nothing to empty."""
        return empty_cache

    def is_lasting(self) -> bool:
        """Whether what is computed now has a name that lasts."""
        return self.weights.stamp().is_lasting


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a model; schedulers' orders are heard of."""
    (tmp_path / "a.safetensors").write_bytes(b"weights")
    place = ModuleType("sglang.srt.managers.of_a_test")
    place.Scheduler = Scheduler  # type: ignore[attr-defined]
    monkeypatch.setattr(Scheduler, "__module__", place.__name__)
    monkeypatch.setitem(sys.modules, place.__name__, place)
    monkeypatch.setattr(Scheduler, "flush_cache", Scheduler.__dict__["flush_cache"])
    yield tmp_path
    for weights in list(module._watching):
        weights.close()


def test_a_flush_of_the_same_weights_costs_no_names(folder: Path) -> None:
    engine = Scheduler(folder, Model())
    before = engine.weights.stamp()
    for _ in range(3):
        assert engine.flush_cache()
        assert engine.weights.doubted_generation == 0
        assert engine.weights.stamp() == before and before.is_lasting
        assert engine.weights.generation == 0


@pytest.mark.parametrize("what", ["model", "draft"])
def test_weights_that_were_written_before_a_flush_never_last(folder: Path, what: str) -> None:
    models = {"model": Model(), "draft": Model()}
    engine = Scheduler(folder, models["model"], Draft(models["draft"]))
    engine.flush_cache()
    assert engine.is_lasting()
    models[what].weight.data[1, 2] = 1
    names = {engine.weights.stamp()}
    for _ in range(2):
        engine.flush_cache()
        names.add(engine.weights.stamp())
        assert not engine.is_lasting()
    models[what].weight.data[1, 2] = 0
    engine.flush_cache()
    names.add(engine.weights.stamp())
    assert not engine.is_lasting() and len(names) == 4, "after a change nobody looks any more"


def test_a_load_into_the_model_object_is_a_change_without_a_flush(folder: Path) -> None:
    model = Model()
    engine = Scheduler(folder, model)
    model.load_weights(0.0)
    assert not engine.is_lasting()


def test_a_large_model_has_no_lasting_name_until_a_thread_has_looked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "AT_ONCE_BYTES", 1)
    monkeypatch.setattr(module, "ASK_AGAIN_S", 0.0)
    model = Model()
    engine = Scheduler(folder, model)
    watched = engine.weights._tensors
    assert watched is not None and watched._then.is_over.wait(LONG_S)
    for written in (False, True):
        if written:
            model.weight.data += 1
        engine.flush_cache()
        engine.is_lasting()
        assert watched._now.is_over.wait(LONG_S)
        assert engine.is_lasting() is not written


@pytest.mark.parametrize("why", ["no scheduler", "an older draft"])
def test_a_model_that_cannot_be_reached_may_be_any_after_a_flush(
    folder: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Scheduler(folder, None if why == "no scheduler" else Model(), object())
    assert engine.is_lasting() and len(module._watching) == 1
    with caplog.at_level("INFO", "kvbm"):
        engine.flush_cache()
    assert not engine.is_lasting()
    (line,) = [line for line in caplog.messages if "flush_cache" in line]
    assert "until the engine is started again" in line


@pytest.mark.parametrize("is_written", [False, True])
def test_all_ranks_have_to_find_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    monkeypatch.setattr(module, "ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(module, "RANKS_WAIT_S", 0.01)
    models = [Model(), Model()]
    ranks = [Scheduler(folder, model) for model in models]
    store, now = torch.distributed.HashStore(), [0]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: now[0])
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_get_default_store", lambda: store)

    def found(rank: int) -> bool:
        now[0] = rank
        return ranks[rank].is_lasting()

    for flush in (1, 2):
        models[1].weight.data += flush == 2 and is_written
        for rank in ranks:
            rank.weights.flushed(flush)
        assert not found(0), "the other one has not looked yet"
        assert found(1) is found(0) is (flush == 1 or not is_written)


def test_a_scheduler_that_is_closed_looks_no_more(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "AT_ONCE_BYTES", 1)
    engine = Scheduler(folder, Model())
    watched = engine.weights._tensors
    engine.weights.close()
    assert watched is not None
    assert watched._then.is_stopped or watched._then.found is not None
