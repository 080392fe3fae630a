"""kvbm_sglang against the sources of SGLang's releases, read from the wheels without importing them.

``KVBM_CONTRACT_SOURCES`` names a folder with sglang-VERSION/sglang/... (deploy/contract_sources.py makes
it, and so does ``make test``). What the newest of them does is also seen by running it: tests/sglang.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from inspect import Signature
from pathlib import Path

import pytest

from kvbm_sglang.side_pools import KEPT, REFUSED
from tests.contract.sglang_history import HISTORY
from tests.contract.sglang_reading import (
    CONTROLLER,
    FACTORY,
    HYBRID,
    STORAGE,
    AdapterUses,
    CallForm,
    allowed_forms,
    backend_attributes,
    backend_calls,
    constructor_of,
    enum_values,
    form_of,
    loaded_with,
    signature_of,
    string_keys,
)
from tests.contract.source_reading import (
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

ROOT = Path(__file__).resolve().parents[2]
ADAPTER = ROOT / "kvbm_sglang"
VARIABLE = "KVBM_CONTRACT_SOURCES"
RELEASES = ("0.5.10", "0.5.13", "0.5.16", "0.5.19", "0.5.21", "0.5.22", "0.5.23")
CALLED = {
    *("batch_exists", "batch_exists_v2", "batch_get", "batch_get_v1", "batch_get_v2"),
    *("batch_set", "batch_set_v1", "batch_set_v2"),
    *("register_mem_pool_host", "register_mem_host_pool_v2", "clear", "close", "get_stats"),
}


def number_of(version: str) -> tuple[int, ...]:
    """0.5.10.post1 -> (0, 5, 10)."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def sources() -> dict[str, Path]:
    """Version -> folder of the package ``sglang``, oldest first."""
    folder = os.environ.get(VARIABLE)
    paths = Path(folder).glob("sglang-*/sglang") if folder else ()
    found = {path.parent.name.removeprefix("sglang-"): path for path in paths}
    return dict(sorted(found.items(), key=lambda item: number_of(item[0])))


SOURCES = sources()
each_version = pytest.mark.parametrize("sglang", SOURCES.values(), ids=SOURCES.keys())
in_between = pytest.mark.nightly("a process more of a release between those that are played; 4 s")
PLAYED = {RELEASES[0], RELEASES[-1]}
"""Whose classes every run loads: the oldest and the newest."""


def our_class() -> ast.ClassDef:
    """KvbmHiCache, as written."""
    return class_of(ADAPTER / "hicache.py", "KvbmHiCache")


def base_methods(sglang: Path) -> dict[str, ast.FunctionDef]:
    """What HiCacheStorage of this version defines."""
    return methods(class_of(sglang / STORAGE, "HiCacheStorage"))


def pool_class(sglang: Path, name: str) -> Path:
    """The file that defines this class of host pools."""
    files = (sglang / "srt/mem_cache").rglob("*.py")
    found = [path for path in files if re.search(rf"^class {name}\b", path.read_text(encoding="utf-8"), re.M)]
    assert len(found) == 1, f"{name} is defined in {found}"
    return found[0]


def test_every_sampled_release_was_seen() -> None:
    missing = [version for version in RELEASES if version not in SOURCES]
    if missing:
        pytest.skip(
            f"NOT RUN: the contract with SGLang {', '.join(missing)}: set {VARIABLE} (make test does)"
        )


def test_the_sampled_releases_are_fetched() -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT / 'deploy')!r}); "
    program += "from contract_sources import WHEELS as all; "
    program += "print(*(wheel.version for wheel in all if wheel.distribution == 'sglang'))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert tuple(result.stdout.split()) == RELEASES


# ---------------------------------------------------------------- how we are made and called


@each_version
def test_nothing_abstract_is_left(sglang: Path) -> None:
    abstract = {name for name, node in base_methods(sglang).items() if "abstractmethod" in decorators(node)}
    assert len(abstract) >= 5
    assert not abstract - set(methods(our_class()))


@each_version
def test_our_methods_take_what_the_base_takes(sglang: Path) -> None:
    base = base_methods(sglang)
    ours = {name: node for name, node in methods(our_class()).items() if name in base and name != "__init__"}
    assert len(ours) >= 14
    wrong = [
        why
        for name, node in ours.items()
        for f in allowed_forms(base[name])
        if (why := f.misfit(signature_of(node)))
    ]
    assert not wrong


@each_version
def test_every_call_of_sglang_fits(sglang: Path) -> None:
    calls = list(backend_calls(sglang))
    assert {call.name for call in calls} >= CALLED, "the reader does not see SGLang's calls any more"
    ours, base = methods(our_class()), base_methods(sglang)
    unknown = backend_attributes(sglang) - set(ours) - set(base)
    assert not unknown, "neither we nor the base have these"
    wrong = [
        why for call in calls if (why := call.misfit(signature_of(ours.get(call.name, base.get(call.name)))))
    ]
    assert not wrong


def test_the_fit_itself_is_checked() -> None:
    def signature(parameters: str) -> Signature:
        return signature_of(function_of(f"def f(self, {parameters}): ..."))

    taken = signature("a, b=1, *, c=2")
    assert not CallForm("f", "", 2, ("c",)).misfit(taken)
    assert not CallForm("f", "", 0, ("b", "a")).misfit(taken)
    assert CallForm("f", "", 3, ()).misfit(taken) and CallForm("f", "", 0, ("b",)).misfit(taken)
    assert CallForm("f", "", 1, ("d",)).misfit(taken) and CallForm("f", "", 1, ("a",)).misfit(taken)
    base = allowed_forms(function_of("def f(self, keys, info=None): ..."))
    for fits in ("keys, info=None", "keys, info=None, more=1", "*args, **kwargs"):
        assert not [why for form in base if (why := form.misfit(signature(fits)))]
    for does_not in ("keys", "info, keys=None", "keys, info", "keys, more, info=None", "keys, extra=None"):
        assert [why for form in base if (why := form.misfit(signature(does_not)))]


@each_version
def test_we_are_made_as_the_factory_makes_backends(sglang: Path) -> None:
    create = methods(class_of(sglang / FACTORY, "StorageBackendFactory"))["_create_dynamic_backend"]
    assert "backend_class(storage_config, kwargs)" in ast.unparse(create)
    made = CallForm("KvbmHiCache", "the factory", 2, ())
    assert not made.misfit(signature_of(methods(our_class())["__init__"]))
    lists = [
        item.value
        for item in ast.walk(create)
        if isinstance(item, ast.Assign) and isinstance(item.value, ast.List)
    ]
    assert [ast.literal_eval(value) for value in lists] == [["backend_name", "module_path", "class_name"]]


@each_version
def test_keys_that_sglang_leaves_in_the_config_are_known_not_to_be_ours(sglang: Path) -> None:
    common = Path("srt/mem_cache/pool_host/common.py")
    files = [CONTROLLER, HYBRID, *([common] if (sglang / common).exists() else [])]
    left = string_keys(sglang, files, "get") | {"backend_name", "module_path", "class_name"}
    assert "interface_v1" in left
    taken = string_keys(
        sglang, [path.relative_to(sglang) for path in (sglang / "srt/mem_cache").glob("*.py")], "pop"
    )
    taken |= string_keys(sglang, [CONTROLLER, HYBRID], "pop")
    assert {"prefetch_threshold", "prefetch_timeout_base", "tp_lcm_size"} <= taken
    assigned = [item for item in parse(ADAPTER / "hicache.py").body if isinstance(item, ast.Assign)]
    not_ours = next(ast.literal_eval(i.value) for i in assigned if ast.unparse(i.targets[0]) == "_NOT_OURS")
    assert not left - set(not_ours)
    assert not set(not_ours) - left - taken - {"allocator"}, "no SGLang reads these"


@each_version
def test_what_comes_before_pages_is_told_if_it_is_asked_for(sglang: Path) -> None:
    told = "HiCacheStorageExtraInfo(prefix_keys=prefix_keys)"
    backup = (sglang / CONTROLLER).read_text(encoding="utf-8").partition("def _page_backup(")[2]
    assert told in backup[:1500]
    trees = [path.read_text(encoding="utf-8") for path in (sglang / "srt/mem_cache").rglob("*.py")]
    assert any('"hicache_storage_pass_prefix_keys", False' in text for text in trees)


@each_version
def test_pages_in_place_are_asked_of_a_dynamic_backend(sglang: Path) -> None:
    text = (sglang / CONTROLLER).read_text(encoding="utf-8")
    condition = text[: text.index("self.page_get_func = self._page_get_zero_copy")][-300:]
    assert '== "dynamic"' in condition and 'extra_config.get("interface_v1", 0)' in condition


@each_version
def test_a_call_ends_before_sglang_gives_up_its_threads(sglang: Path) -> None:
    joins = [
        keyword.value.value
        for node in ast.walk(parse(sglang / CONTROLLER))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".join")
        for keyword in node.keywords
        if keyword.arg == "timeout" and isinstance(keyword.value, ast.Constant)
    ]
    assigned = [item for item in parse(ADAPTER / "store.py").body if isinstance(item, ast.Assign)]
    deadline_s = next(
        ast.literal_eval(i.value) for i in assigned if ast.unparse(i.targets[0]) == "DEADLINE_S"
    )
    assert joins and 2 * deadline_s < min(joins)


# ---------------------------------------------------------------- names and fields


@each_version
def test_what_we_import_is_there(sglang: Path) -> None:
    missing = []
    for path in files_for(sglang):
        tree = parse(path)
        tolerated = guarded_lines(tree) - {
            line for line, *_ in imports_of(tree, "sglang") if is_for_types(tree, line)
        }
        for line, module, name in imports_of(tree, "sglang"):
            target = sglang.joinpath(*module.split(".")[1:]).with_suffix(".py")
            if line not in tolerated and (not target.exists() or name not in defined_names(target)):
                missing.append(f"{path.name}:{line} from {module} import {name}")
    assert not missing


def is_for_types(tree: ast.Module, line: int) -> bool:
    """Whether a line stands under TYPE_CHECKING: what is there must be in every version all the same."""
    blocks = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return any(node.lineno <= line <= (node.end_lineno or 0) for node in blocks)


READ_CLASSES = {"HiCacheStorageConfig", "HiCacheStorageExtraInfo", "PoolTransfer"}


def files_for(sglang: Path) -> list[Path]:
    """Those of kvbm_sglang that this version can load: the linker only where one from outside is possible."""
    files = loaded_with(ADAPTER / "hicache.py")
    if HISTORY["linker from outside"][2](sglang) and (ADAPTER / "linker.py").exists():
        files += [path for path in loaded_with(ADAPTER / "linker.py") if path not in files]
    return files


def uses_in(sglang: Path) -> AdapterUses:
    """What kvbm_sglang reads of SGLang's objects when it meets this version."""
    known = {
        "PoolHitPolicy": set().union(
            *(enum_values(other / STORAGE, "PoolHitPolicy") for other in SOURCES.values())
        )
    }
    absent = known["PoolHitPolicy"] - enum_values(sglang / STORAGE, "PoolHitPolicy")
    uses = AdapterUses(READ_CLASSES, absent)
    for path in files_for(sglang):
        uses.read(path)
    return uses


@each_version
def test_each_pool_is_kept_or_refused_by_its_name(sglang: Path) -> None:
    unknown = enum_values(sglang / STORAGE, "PoolName") - set(KEPT) - set(REFUSED)
    assert not unknown, "classify them in kvbm_sglang/side_pools.py"


def test_pools_that_are_classified_exist_in_some_version() -> None:
    if not SOURCES:
        pytest.skip(f"NOT RUN: set {VARIABLE} (make test does)")
    named = set().union(*(enum_values(sglang / STORAGE, "PoolName") for sglang in SOURCES.values()))
    assert set(KEPT) | set(REFUSED) == named
    assert not set(KEPT) & set(REFUSED)


@each_version
def test_fields_that_we_read_exist(sglang: Path) -> None:
    uses = uses_in(sglang)
    assert {("HiCacheStorageConfig", "extra_config"), ("PoolTransfer", "keys")} <= set(uses.direct)
    has = {name: attributes(sglang / STORAGE, name) for name in READ_CLASSES}
    missing = [
        f"{name}.{field} at {at}" for (name, field), at in uses.direct.items() if field not in has[name]
    ]
    assert not missing, "read these with getattr(..., default)"


def test_fields_that_we_ask_for_exist_somewhere() -> None:
    if not SOURCES:
        pytest.skip(f"NOT RUN: set {VARIABLE} (make test does)")
    newest = list(SOURCES.values())[-1]
    has = {name: attributes(newest / STORAGE, name) for name in READ_CLASSES}
    unknown = [
        f"{name}.{field} at {at}"
        for (name, field), at in uses_in(newest).probed.items()
        if field not in has[name]
    ]
    assert not unknown


# Ranks that hold the same bytes for the same page.
NOT_IN_KEYS = {"dp_rank": "replicas"}


@each_version
def test_every_rank_is_in_the_keys(sglang: Path) -> None:
    ranks = {
        field
        for field in fields_of(sglang / STORAGE, "HiCacheStorageConfig")
        if field.endswith(("_rank", "_size"))
    }
    assert {"tp_rank", "tp_size", "pp_rank", "pp_size"} <= ranks
    constants = {
        node.value for node in ast.walk(parse(ADAPTER / "identity.py")) if isinstance(node, ast.Constant)
    }
    not_ranks = {"tp_lcm_size", "logical_page_size"}
    assert not ranks - constants - set(NOT_IN_KEYS) - not_ranks, (
        "a page may differ by these: put them into its key"
    )


@each_version
def test_results_are_made_with_fields_that_exist(sglang: Path) -> None:
    made = constructor_of(sglang / STORAGE, "PoolTransferResult")
    forms = [
        form_of(node, "PoolTransferResult", path.name)
        for path in files_for(sglang)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "PoolTransferResult"
    ]
    assert forms
    wrong = [why for form in forms if form is not None and (why := form.misfit(made))]
    assert not wrong, "restorable_prefix_pages is there from 0.5.19 on"


@each_version
def test_metrics_are_made_with_fields_that_exist(sglang: Path) -> None:
    fields = fields_of(sglang / "srt/observability/metrics_collector.py", "StorageMetrics")
    assert set(fields) == {"prefetch_pgs", "backup_pgs", "prefetch_bandwidth", "backup_bandwidth"}


# ---------------------------------------------------------------- host pools


@each_version
@pytest.mark.parametrize("name", ["MHATokenToKVPoolHost", "MLATokenToKVPoolHost"])
def test_host_pools_name_the_memory_of_pages(sglang: Path, name: str) -> None:
    meta = methods(class_of(pool_class(sglang, name), name))["get_page_buffer_meta"]
    assert not CallForm("get_page_buffer_meta", "Pages", 1, ()).misfit(signature_of(meta))
    returned = [item.value for item in ast.walk(meta) if isinstance(item, ast.Return)]
    assert returned and all(isinstance(value, ast.Tuple) and len(value.elts) == 2 for value in returned)


@each_version
def test_what_is_registered_says_dtype_layout_and_page_size(sglang: Path) -> None:
    registered = [call for call in backend_calls(sglang) if call.name == "register_mem_pool_host"]
    assert registered
    group = attributes(pool_class(sglang, "HostPoolGroup"), "HostPoolGroup")
    is_one_pool = HISTORY["the KV pool itself is registered"][2](sglang)
    if (
        not is_one_pool and "get_page_buffer_meta" in group
    ):  # the group itself is registered, and its pages cached
        assert {"dtype", "layout", "page_size", "size"} <= group


@each_version
def test_float8_looks_like_bytes_and_is_told_apart(sglang: Path) -> None:
    # A host pool's dtype is that of its storage: e5m2 and e4m3 have one, and their pages must not meet.
    memory_pool = (sglang / "srt/mem_cache/memory_pool.py").read_text(encoding="utf-8")
    assert "self.store_dtype = torch.uint8" in memory_pool
    ours = "".join(path.read_text(encoding="utf-8") for path in loaded_with(ADAPTER / "hicache.py"))
    assert "kv_cache_dtype" in ours or "uint8" in ours, (
        "neither the key has the dtype, nor are pages of bytes refused"
    )


# ---------------------------------------------------------------- what came when


@pytest.mark.parametrize("version", SOURCES)
@pytest.mark.parametrize("what", HISTORY)
def test_what_came_when_is_as_the_docs_say(version: str, what: str) -> None:
    first, gone, is_there = HISTORY[what]
    number = number_of(version)
    expected = number >= number_of(first) and (gone is None or number < number_of(gone))
    assert is_there(SOURCES[version]) is expected


# ---------------------------------------------------------------- with each version's own classes


@pytest.mark.parametrize(
    "sglang",
    [
        pytest.param(path, id=version, marks=() if version in PLAYED else in_between)
        for version, path in SOURCES.items()
    ],
)
def test_pages_go_and_come_with_this_versions_own_classes(sglang: Path, tmp_path: Path) -> None:
    if find_spec("torch") is None:
        pytest.skip("NOT RUN: KvbmHiCache with SGLang's classes; torch is missing")
    program = Path(__file__).with_name("sglang_life.py")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("DYN_KVBM_", "KVBM_"))
    }
    command = [sys.executable, str(program), str(sglang.parent.resolve()), str(tmp_path)]
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
