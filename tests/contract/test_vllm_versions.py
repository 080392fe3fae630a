"""kvbm_vllm against the signatures of every supported vLLM, read from the wheels without importing them.

``KVBM_CONTRACT_SOURCES`` names a folder with VERSION/vllm/... (deploy/contract_sources.py makes it, and so
does ``make test``). An installed vLLM is held to the same contract.
"""

from __future__ import annotations

import ast
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvbm_core.errors import UnsupportedError
from kvbm_vllm import engine_calls, versions
from tests.contract.source_reading import (
    Uses,
    attributes,
    class_of,
    decorators,
    defined_names,
    fields_of,
    function_of,
    guarded_lines,
    imports_of,
    methods,
    parse,
)
from tests.contract.vllm_fields import FIELDS, PROBED, PROBED_IN, TYPE_OF, WHERE

ADAPTER = Path(versions.__file__).parent
BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
VARIABLE = "KVBM_CONTRACT_SOURCES"
MINORS = range(versions.SUPPORTED_FROM[1], versions.SUPPORTED_BELOW[1])


def sources() -> dict[str, Path]:
    """Version -> folder of the package ``vllm``."""
    found: dict[str, Path] = {}
    spec = find_spec("vllm")
    if spec is not None and spec.origin is not None:
        found[versions.installed_version()] = Path(spec.origin).parent
    folder = os.environ.get(VARIABLE)
    if folder:
        found.update((path.parent.name, path) for path in sorted(Path(folder).glob("*/vllm")))
    return found


SOURCES = sources()
each_version = pytest.mark.parametrize("vllm", SOURCES.values(), ids=SOURCES.keys())


def our_class() -> ast.ClassDef:
    """DynamoConnector, as written."""
    return class_of(ADAPTER / "connector.py", "DynamoConnector")


def our_hooks() -> dict[str, ast.FunctionDef]:
    """What DynamoConnector defines for vLLM to call."""
    return {name: node for name, node in methods(our_class()).items() if not name.startswith("_")}


def test_every_minor_version_was_seen() -> None:
    missing = [f"0.{minor}" for minor in MINORS if not any(v.startswith(f"0.{minor}.") for v in SOURCES)]
    if missing:
        pytest.skip(f"NOT RUN: the contract with vLLM {', '.join(missing)}: set {VARIABLE} (make test does)")


# ---------------------------------------------------------------- the range


@pytest.mark.parametrize(
    "version", ["0.26.0", "0.32.0+cpu", "0.33.1", "0.33.0rc2", "0.30.1.dev3+g1234", "v0.27.0"]
)
def test_supported_versions_are_accepted(version: str) -> None:
    assert versions.check_version(version)


@pytest.mark.parametrize("version", ["0.34.0", "1.0.0", "2026.1", "", "unknown", "0.260.0"])
def test_newer_and_unreadable_versions_are_not_tested_and_not_refused(version: str) -> None:
    assert not versions.check_version(version)


@pytest.mark.parametrize("version", ["0.25.1", "0.3.0", "0.9.2.dev1"])
def test_older_versions_are_refused_in_one_line(version: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        versions.check_version(version)
    message = str(caught.value)
    assert "\n" not in message
    assert f"vLLM {version}" in message and ">=0.26,<0.34" in message and "install" in message


# ---------------------------------------------------------------- hooks


def positional(function: ast.FunctionDef) -> list[str]:
    """Names of positional parameters without self or cls."""
    names = [argument.arg for argument in function.args.posonlyargs + function.args.args]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def mismatch(ours: ast.FunctionDef, base: ast.FunctionDef) -> str | None:
    """Why a call that the base accepts would not fit ours; None if all do."""
    kinds = {"property", "classmethod", "staticmethod"}
    if decorators(ours) & kinds != decorators(base) & kinds:
        ours_is, base_is = (decorators(of) & kinds or "a method" for of in (ours, base))
        return f"is {ours_is}, the base is {base_is}"
    mine, theirs = positional(ours), positional(base)
    if mine[: len(theirs)] != theirs and ours.args.vararg is None:
        return f"takes {mine}, the base {theirs}"
    if base.args.kwarg is not None and ours.args.kwarg is None:
        return "does not accept **kwargs"
    base_keywords = {argument.arg for argument in base.args.kwonlyargs}
    if base_keywords - {argument.arg for argument in ours.args.kwonlyargs} and ours.args.kwarg is None:
        return f"does not accept the keywords {base_keywords}"
    required = len(mine) - len(ours.args.defaults)
    if required > len(theirs) or any(default is None for default in ours.args.kw_defaults):
        return f"requires more than the base gives: {mine} against {theirs}"
    return None


def base_methods(vllm: Path) -> dict[str, ast.FunctionDef]:
    """Everything the two base classes of this version define."""
    found: dict[str, ast.FunctionDef] = {}
    for name in ("KVConnectorBase_V1", "SupportsHMA"):
        found.update(methods(class_of(vllm / BASE, name)))
    return found


@each_version
def test_our_hooks_fit_the_base(vllm: Path) -> None:
    base = base_methods(vllm)
    wrong = {
        name: why
        for name, node in our_hooks().items()
        if name in base and (why := mismatch(node, base[name]))
    }
    assert not wrong


def test_the_fit_itself_is_checked() -> None:
    base = function_of("def f(self, a, b, **kwargs): ...")
    assert mismatch(function_of("def f(self, a, b, **kwargs): ..."), base) is None
    assert mismatch(function_of("def f(self, a, b, c=1, **kwargs): ..."), base) is None
    assert mismatch(function_of("def f(self, *args, **kwargs): ..."), base) is None
    assert mismatch(function_of("def f(self, a, b): ..."), base)
    assert mismatch(function_of("def f(self, b, a, **kwargs): ..."), base)
    assert mismatch(function_of("def f(self, a, b, c, **kwargs): ..."), base)
    assert mismatch(function_of("@classmethod\ndef f(cls, a, b, **kwargs): ..."), base)


@each_version
def test_nothing_abstract_is_left(vllm: Path) -> None:
    abstract = {name for name, node in base_methods(vllm).items() if "abstractmethod" in decorators(node)}
    assert len(abstract) >= 8
    assert not abstract - set(methods(our_class()))


def test_every_hook_of_ours_is_called_by_some_version() -> None:
    if not SOURCES:
        pytest.skip(f"NOT RUN: neither vLLM nor {VARIABLE} is there")
    known = set().union(*(base_methods(vllm) for vllm in SOURCES.values()))
    own = {"scheduler_side", "worker_side", "join_transport"}
    newest = max(int(version.split(".")[1]) for version in SOURCES)
    later = {"unregister_kv_caches", "restore_kv_caches", "supports_sleep_mode"} if newest < 33 else set()
    assert not set(our_hooks()) - known - own - later


@each_version
def test_the_constructor_is_called_with_what_it_takes(vllm: Path) -> None:
    base_init = base_methods(vllm)["__init__"]
    assert positional(base_init) == ["vllm_config", "role", "kv_cache_config"]
    assert positional(methods(our_class())["__init__"]) == positional(base_init)
    factory = parse(vllm / "distributed/kv_transfer/kv_connector/factory.py")
    calls = [ast.unparse(n) for n in ast.walk(factory) if isinstance(n, ast.Call)]
    assert "connector_cls(config, role, kv_cache_config)" in calls


@each_version
def test_the_failure_policy_is_read_after_our_constructor_ran(vllm: Path) -> None:
    scheduler = class_of(vllm / "v1/core/sched/scheduler.py", "Scheduler")
    lines = ast.unparse(methods(scheduler)["__init__"]).splitlines()
    made = next(i for i, line in enumerate(lines) if "KVConnectorFactory.create_connector(" in line)
    read = [i for i, line in enumerate(lines) if "kv_transfer_config.kv_load_failure_policy" in line]
    assert read and min(read) > made


@each_version
def test_multi_connector_has_its_children_where_pd_connector_looks(vllm: Path) -> None:
    multi = class_of(vllm / BASE.replace("base.py", "multi_connector.py"), "MultiConnector")
    assert "self._connectors.append(connector_cls(" in ast.unparse(methods(multi)["__init__"])


@each_version
def test_nixl_says_what_request_params_reads(vllm: Path) -> None:
    nixl = vllm / BASE.replace("base.py", "nixl")
    pull = methods(class_of(nixl / "pull_scheduler.py", "NixlPullConnectorScheduler"))
    taken = ast.unparse(pull["get_num_new_matched_tokens"])
    handed = ast.unparse(pull["request_finished"])
    for word in ("do_remote_prefill", "do_remote_decode", "remote_engine_id"):
        assert f"'{word}'" in taken and f"{word}=" in handed, word
    assert "params['do_remote_prefill'] = False" in ast.unparse(pull["update_state_after_alloc"])


@each_version
def test_where_saves_are_not_waited_for_it_can_be_seen(vllm: Path) -> None:
    # versions.probe reads this parameter: a version without it calls wait_for_save in every step.
    mixin = class_of(vllm / "v1/worker/kv_connector_model_runner_mixin.py", "KVConnectorModelRunnerMixin")
    step = methods(mixin)["_get_kv_connector_output"]
    without_forward = ast.unparse(methods(mixin)["kv_connector_no_forward"])
    assert ("wait_for_save" in positional(step)) == ("wait_for_save=False" in without_forward)


@each_version
def test_a_vllm_that_can_limit_hits_to_the_rows_it_has_does(vllm: Path) -> None:
    # versions.probe asks for this method: without it --enable-return-routed-experts is refused.
    rows = vllm / "distributed/aux_output_connector/connector.py"
    can = rows.is_file() and "cap_external_hit" in methods(class_of(rows, "AuxOutputSchedulerConnector"))
    scheduler = class_of(vllm / "v1/core/sched/scheduler.py", "Scheduler")
    does = "num_external_computed_tokens = self.aux_output_connector.cap_external_hit(" in ast.unparse(
        methods(scheduler)["schedule"]
    )
    assert can == does


# ---------------------------------------------------------------- what changes weights and adapters

CHANGING = {
    "apply_model",
    "elastic_ep_execute",
    "finish_weight_update",
    "handle_ft_command",
    "load_model",
    "reinitialize_distributed",
    "reload_weights",
    "reset_weights",
    "start_draft_weight_update",
    "start_weight_update",
    "update_config",
    "update_weights",
}
"""Orders of vLLM's own that change weights, or may; as does every order that nobody has classified."""


@each_version
def test_every_order_that_vllm_gives_its_workers_is_classified(vllm: Path) -> None:
    judged = {*engine_calls.ADAPTER_ORDERS, engine_calls.SLEEP, engine_calls.DISCARD}
    known = {*engine_calls.HARMLESS, *judged, *CHANGING}
    unknown = set()
    for path in vllm.rglob("*.py"):
        is_giving = "collective_rpc(" in path.read_text(encoding="utf-8")
        for node in ast.walk(parse(path)) if is_giving else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            order = node.args[0]
            if node.func.attr == "collective_rpc" and isinstance(order, ast.Constant):
                unknown |= {str(order.value)} - known
    assert not unknown
    assert not engine_calls.HARMLESS & {*judged, *CHANGING}


@each_version
def test_orders_and_the_reset_of_the_prefix_cache_are_where_we_look(vllm: Path) -> None:
    executors = 0
    for path in (vllm / "v1/executor").glob("*.py"):
        for kind in (node for node in parse(path).body if isinstance(node, ast.ClassDef)):
            if "collective_rpc" in methods(kind):
                executors += 1
                order = ["method", "timeout", "args", "kwargs"]
                assert positional(methods(kind)["collective_rpc"])[:4] == order, path
    assert executors >= 3
    # changes.DeviceCache: a map that is another object has been emptied.
    pool = methods(class_of(vllm / "v1/core/block_pool.py", "BlockPool"))
    assert "self.cached_block_hash_to_block = " in ast.unparse(pool["reset_prefix_cache"])


# ---------------------------------------------------------------- names and fields


def not_called_lines(path: Path, vllm: Path) -> set[int]:
    """Lines of those hooks of DynamoConnector that this version does not know."""
    if path.name != "connector.py":
        return set()
    unknown = [node for name, node in our_hooks().items() if name not in base_methods(vllm)]
    return {line for node in unknown for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


@each_version
def test_what_we_import_is_there(vllm: Path) -> None:
    missing = []
    for path in sorted(ADAPTER.glob("*.py")):
        tree = parse(path)
        tolerated = guarded_lines(tree) | not_called_lines(path, vllm)
        for line, module, name in imports_of(tree, "vllm"):
            target = vllm.joinpath(*module.split(".")[1:])
            file = target.with_suffix(".py") if target.with_suffix(".py").exists() else target / "__init__.py"
            if line not in tolerated and (not file.exists() or name not in defined_names(file)):
                missing.append(f"{path.name}:{line} from {module} import {name}")
    assert not missing


@each_version
def test_fields_that_we_read_exist(vllm: Path) -> None:
    missing = []
    for name, fields in FIELDS.items():
        has = attributes(vllm / WHERE[name], name)
        missing += [f"{name}.{field}" for field in sorted(fields - has)]
    assert not missing


def our_uses() -> Uses:
    """What kvbm_vllm reads of vLLM's objects."""
    uses = Uses(TYPE_OF, set(FIELDS))
    for path in sorted(ADAPTER.glob("*.py")):
        uses.read(path)
    return uses


def test_we_read_only_what_is_listed_and_list_only_what_we_read() -> None:
    uses = our_uses()
    listed = {(name, field) for name, fields in FIELDS.items() for field in fields}
    probed = {(name, field) for name, fields in PROBED.items() for field in fields}
    unlisted = {f"{n}.{f} at {where}" for (n, f), where in uses.direct.items() if (n, f) not in listed}
    unlisted |= {
        f"{n}.{f} at {where}" for (n, f), where in uses.probed.items() if (n, f) not in probed | listed
    }
    unused = {f"{n}.{f}" for n, f in listed - set(uses.direct) - set(uses.probed)}
    assert not unlisted, "put these into vllm_fields.FIELDS (every version) or PROBED (getattr)"
    assert not unused, "the adapter does not read these any more"


def test_probed_fields_exist_somewhere() -> None:
    if len(SOURCES) < len(MINORS):
        pytest.skip(f"NOT RUN: needs all versions, set {VARIABLE} (make test does)")
    for name, fields in PROBED.items():
        owner = PROBED_IN.get(name, name)
        for field in fields:
            having = [v for v, vllm in SOURCES.items() if field in attributes(vllm / WHERE[name], owner)]
            assert having, f"no version has {name}.{field}"


@each_version
def test_events_are_built_with_fields_that_exist(vllm: Path) -> None:
    text = (ADAPTER / "events.py").read_text(encoding="utf-8")
    for name, required in (
        (
            "BlockStored",
            {
                "block_hashes",
                "parent_block_hash",
                "token_ids",
                "block_size",
                "lora_id",
                "medium",
                "lora_name",
            },
        ),
        ("BlockRemoved", {"block_hashes", "medium"}),
    ):
        must = {field for field, has in fields_of(vllm / "distributed/kv_events.py", name).items() if not has}
        assert must == required, f"{name} of this version requires {must}"
        assert all(re.search(rf'"{field}":', text) for field in must), (
            f"events.py does not give {name} all of {must}"
        )
