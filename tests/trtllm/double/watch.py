"""Every call into the connector: noted with its values, and checked.

What would end the real executor's loop raises DoubleFailure: an exception, an answer of a wrong type, an id
that is not open. The hooks inside a forward pass are left alone: there the real loop catches what they raise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from tests.trtllm.double.calls import Call, Calls
from tests.trtllm.double.failure import DoubleFailure

Values = Callable[..., dict[str, Any]]


def _alloc(request: Any, **blocks: Any) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "context_current_position": request.context_current_position,
        **blocks,
    }


LEADER: dict[str, Values] = {
    "get_num_new_matched_tokens": lambda request, num_computed_tokens: {
        "request_id": request.request_id,
        "num_computed_tokens": num_computed_tokens,
    },
    "update_state_after_alloc": lambda request, ids: _alloc(request, block_ids=[*ids]),
    "update_state_after_alloc_by_layer_group": lambda request, groups: _alloc(
        request, block_ids_by_layer_group=[[*ids] for ids in groups]
    ),
    "request_finished": lambda request, ids: {"request_id": request.request_id, "block_ids": [*ids]},
    "request_finished_by_layer_group": lambda request, groups: {
        "request_id": request.request_id,
        "block_ids_by_layer_group": [[*ids] for ids in groups],
    },
    "build_connector_meta": lambda output: {"output": output},
}
WORKER: dict[str, Values] = {
    "bind_connector_meta": lambda metadata: {},
    "start_load_kv": lambda stream: {},
    "get_finished": lambda saving, loading: {
        "finished_gen_req_ids": [*saving],
        "started_loading_req_ids": [*loading],
    },
}
IN_FORWARD: dict[str, Values] = {
    "wait_for_layer_load": lambda layer, stream: {"layer_idx": layer},
    "save_kv_layer": lambda layer, stream: {"layer_idx": layer},
    "wait_for_save": lambda stream: {},
}


class Watch:
    """Stands before the methods of one rank's connector; its classes stay as they are. ``step``: now."""

    def __init__(self, calls: Calls, leader: Any, worker: Any) -> None:
        self.step = 0
        self._calls = calls
        self._is_inside = False
        self._open: dict[str, set[int]] = {"saving": set(), "loading": set()}
        if leader is not None:
            self._stand_before(leader, LEADER)
        self._stand_before(worker, {**WORKER, **IN_FORWARD})

    def _stand_before(self, connector: Any, methods: dict[str, Values]) -> None:
        # No reference to the connector: it ends what it has opened when nobody has it any more.
        found = weakref.ref(connector)
        for name, values_of in methods.items():
            function = getattr(type(connector), name, None)
            if function is not None:
                setattr(connector, name, self._watched(name, found, function, values_of))

    def _watched(
        self, name: str, found: Callable[[], Any], function: Callable[..., Any], values_of: Values
    ) -> Any:
        def call(*arguments: Any) -> Any:
            if self._is_inside:
                return function(found(), *arguments)  # one form of a callback in terms of another
            values = values_of(*arguments)
            if name in IN_FORWARD:
                self._calls.add(Call(self.step, name, values))
                return function(found(), *arguments)
            self._is_inside = True
            try:
                result = function(found(), *arguments)
            except Exception as error:
                self._calls.add(Call(self.step, name, values, repr(error)))
                raise DoubleFailure(f"{name} raised {error!r}, which ends the executor's loop") from error
            finally:
                self._is_inside = False
            self._calls.add(Call(self.step, name, values, result))
            self._check(name, values, result)
            return result

        return call

    def _check(self, name: str, values: dict[str, Any], result: Any) -> None:
        if name == "get_num_new_matched_tokens":
            _check_match(name, result)
        elif name.startswith("request_finished"):
            _must_be_bool(name, result)
        elif name == "build_connector_meta":
            try:
                ForkingPickler.dumps(result)
            except Exception as error:
                raise DoubleFailure(f"{name} returned what cannot be pickled: {result!r}") from error
        elif name == "get_finished":
            self._open["saving"].update(values["finished_gen_req_ids"])
            self._open["loading"].update(values["started_loading_req_ids"])
            self._check_finished(name, result)

    def _check_finished(self, name: str, result: Any) -> None:
        try:
            ended = [*zip(("saving", "loading"), ([*ids] for ids in result), strict=True)]
        except (TypeError, ValueError) as error:
            raise DoubleFailure(f"{name} returned {result!r}") from error
        for what, ids in ended:
            for request_id in ids:
                if request_id not in self._open[what]:
                    raise DoubleFailure(
                        f"{name} returned id {request_id!r} in {what}: not open there, or twice (KeyError)"
                    )
                self._open[what].discard(request_id)


def _check_match(name: str, result: Any) -> None:
    try:
        num_tokens, is_async = result
    except (TypeError, ValueError) as error:
        raise DoubleFailure(f"{name} returned {result!r}") from error
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 0:
        raise DoubleFailure(f"{name} returned {num_tokens!r} tokens")
    _must_be_bool(name, is_async)


def _must_be_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise DoubleFailure(f"{name} returned {value!r} where a bool is due")
