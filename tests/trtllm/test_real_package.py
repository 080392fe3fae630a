"""Our two classes against the base classes of an installed TensorRT-LLM; where there is none, against the
double's.

The double was written from reading: where the package can be installed, this says first what has changed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

pytest.importorskip(
    "torch", reason="NOT RUN: our connector against TensorRT-LLM's base classes; torch is missing"
)

from tests.trtllm.double import EARLY, MID, NEWEST, RELEASED, installed

REAL = "installed package"
KNOWN = {
    "KvCacheConnectorScheduler": set[str](),
    # The metadata is used up where it is bound.
    "KvCacheConnectorWorker": {"get_connector_meta"},
}
"""Public methods of the base classes that we leave as they are."""


@pytest.fixture(params=[EARLY, RELEASED, MID, NEWEST, REAL])
def pairs(request: pytest.FixtureRequest) -> Iterator[list[tuple[Any, Any]]]:
    """(our class, its base class), for leader and worker, under each version in turn."""
    if request.param != REAL:
        with installed(request.param):
            yield import_pairs()
    elif find_spec("tensorrt_llm") is None:
        pytest.skip("NOT RUN: our connector against the real TensorRT-LLM, which is not installed")
    else:
        yield import_pairs()
        for name in [name for name in sys.modules if name.split(".")[0] == "kvbm_trtllm"]:
            del sys.modules[name]


def import_pairs() -> list[tuple[Any, Any]]:
    """Ours and theirs, as imported now."""
    from kvbm_trtllm import connector
    from kvbm_trtllm.contract import connector_module

    api = connector_module()
    return [
        (connector.DynamoKVBMConnectorLeader, api.KvCacheConnectorScheduler),
        (connector.DynamoKVBMConnectorWorker, api.KvCacheConnectorWorker),
    ]


def public_methods(base: type) -> dict[str, Any]:
    """Methods that a subclass may override, by name."""
    found = inspect.getmembers(base, inspect.isfunction)
    return {name: method for name, method in found if not name.startswith("_")}


def test_ours_can_be_made(pairs: list[tuple[Any, Any]]) -> None:
    for ours, base in pairs:
        assert issubclass(ours, base)
        assert not inspect.isabstract(ours), ours.__abstractmethods__


def test_every_public_method_is_ours_or_known(pairs: list[tuple[Any, Any]]) -> None:
    for ours, base in pairs:
        left = {name for name, method in public_methods(base).items() if getattr(ours, name) is method}
        assert left <= KNOWN[base.__name__], f"{base.__name__} has methods that nobody has looked at"


def test_ours_take_what_theirs_take(pairs: list[tuple[Any, Any]]) -> None:
    for ours, base in pairs:
        for name, method in [*public_methods(base).items(), ("__init__", base.__init__)]:
            theirs = inspect.signature(method)
            arguments = [object() for _ in theirs.parameters]
            inspect.signature(getattr(ours, name)).bind(*arguments)
            names = list(theirs.parameters)[1:]
            inspect.signature(getattr(ours, name)).bind(object(), **dict.fromkeys(names))


def test_attention_dp_is_opted_in_where_it_can_be(pairs: list[tuple[Any, Any]]) -> None:
    for ours, base in pairs:
        assert ours.supports_attention_dp is True
        assert getattr(base, "supports_attention_dp", False) is False


def test_nothing_of_ours_is_taken_for_consent(pairs: list[tuple[Any, Any]]) -> None:
    """In a branch of TensorRT-LLM, having ``cancel_load`` says that a connector takes loads back in part."""
    for ours, _ in pairs:
        own = [cls for cls in ours.__mro__ if cls.__module__.split(".")[0] in {"kvbm_trtllm", "kvbm"}]
        assert own and not [cls for cls in own if "cancel_load" in vars(cls)]


def test_what_is_not_looked_at_is_found() -> None:
    with installed(NEWEST):
        (leader, base), _ = import_pairs()
        base.brand_new = lambda self, request: None
        try:
            with pytest.raises(AssertionError, match="nobody has looked at"):
                test_every_public_method_is_ours_or_known([(leader, base)])
        finally:
            del base.brand_new
