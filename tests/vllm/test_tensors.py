"""The digest of a model's tensors: it tells any two apart that compute otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvbm_core.identity import tensors
from kvbm_core.identity.tensors import Seen, digest_of
from kvbm_vllm.tensors import look, rest


class Worker:
    """As vLLM's, of one model and, perhaps, a draft."""

    model_runner: Any = None

    def __init__(self, model: torch.nn.Module, draft: torch.nn.Module | None = None) -> None:
        self._model = model
        self.vllm_config = None
        if draft is not None:
            self.model_runner = type("Runner", (), {"drafter": type("Drafter", (), {"model": draft})})

    def get_model(self) -> torch.nn.Module:
        """The model."""
        return self._model


class Model(torch.nn.Module):
    """A parameter and two buffers, one of which no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(24.0).reshape(4, 6).t(), requires_grad=False)
        self.register_buffer("scale", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("table", torch.zeros(2, dtype=torch.int32), persistent=False)


def digest(model: torch.nn.Module) -> str:
    """Of all of it."""
    return digest_of([*model.named_parameters(), *model.named_buffers()], lambda: False)


def test_any_bit_of_any_tensor_counts_and_how_it_is_read() -> None:
    found = [digest(Model())]
    for name in ("weight", "scale", "table"):
        model = Model()
        getattr(model, name).data.view(-1 if name != "weight" else (6, 4))[-1] += 1
        found.append(digest(model))
    model = Model()
    model.weight.data = model.weight.data.contiguous()
    found.append(digest(model))
    model = Model()
    model.scale = model.scale.view(torch.float16)  # type: ignore[operator]
    found.append(digest(model))
    assert len(set(found)) == len(found)
    assert digest(Model()) == found[0]


def test_memory_in_chunks_counts_once_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.arange(100, dtype=torch.uint8)
    parts = [("a", memory[:50]), ("b", memory[50:])]
    monkeypatch.setattr(tensors, "CHUNK_BYTES", 7)
    before = digest_of(parts, lambda: False)
    asked: list[None] = []
    assert digest_of(parts, lambda: bool(asked.append(None))) == before and len(asked) == 15
    memory[99] = 0
    assert digest_of(parts, lambda: False) != before


def test_tensors_that_are_made_of_others_count_by_these() -> None:
    class Pair:
        one = torch.zeros(3)

        def __tensor_flatten__(self) -> tuple[list[str], None]:
            return ["one"], None

    before = digest_of([("pair", Pair())], lambda: False)  # type: ignore[list-item]
    Pair.one[1] = 1
    assert digest_of([("pair", Pair())], lambda: False) != before  # type: ignore[list-item]


def test_a_draft_model_counts() -> None:
    draft = Model()
    worker = Worker(Model(), draft)
    assert look(worker, 0, 0) is Seen.OTHERS
    assert look(worker, 0, 1) is Seen.SAME
    draft.scale[0] = 2  # type: ignore[index]
    assert look(worker, 0, 2) is Seen.OTHERS
    assert look(worker, 2, 2) is Seen.OTHERS and look(worker, 2, 3) is Seen.SAME


def test_what_cannot_be_looked_at_may_be_anything() -> None:
    assert look(object(), 0, 0) is Seen.OTHERS
    worker = Worker(Model())
    worker.get_model().register_buffer("sparse", torch.eye(3).to_sparse())
    assert [look(worker, 0, now) for now in (0, 1)] == [Seen.OTHERS] * 2
    rest(object())


def test_another_model_is_not_the_one_that_was_looked_at() -> None:
    worker = Worker(Model())
    look(worker, 0, 0)
    worker._model = Model()
    assert look(worker, 0, 1) is Seen.OTHERS


def test_a_load_of_the_same_weights_is_a_change_all_the_same() -> None:
    class Loading(Model):
        def load_weights(self, weights: object) -> None:
            """Changes nothing."""

    model = Loading()
    worker = Worker(model)
    look(worker, 0, 0)
    assert look(worker, 0, 1) is Seen.SAME
    model.load_weights(())
    assert look(worker, 0, 2) is Seen.OTHERS
    assert look(worker, 2, 2) is Seen.OTHERS and look(worker, 2, 3) is Seen.SAME
