"""Which environment variables are in the name of a block, under each engine."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvbm_sglang.config_tables as of_sglang
import kvbm_trtllm.config_tables as of_trtllm
import kvbm_vllm.config_tables as of_vllm
from kvbm_core.config.names import is_of_kubernetes
from kvbm_core.identity import environment
from kvbm_core.identity.environment import describe_environment
from kvbm_core.identity.fields import Description

ENGINES = [of_vllm, of_sglang, of_trtllm]
OF_LIBRARIES = """
NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE HIPBLASLT_ALLOW_TF32 ONEDNN_DEFAULT_FPMATH_MODE
DNNL_DEFAULT_FPMATH_MODE TRITON_F32_DEFAULT CUBLAS_EMULATE_SINGLE_PRECISION CUBLAS_EMULATION_STRATEGY
ROCM_QUICK_REDUCE_QUANTIZATION ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH
TRTLLM_DISABLE_FP4_QUANT_FAST_MATH FLASHINFER_NVFP4_4OVER6 FLA_TRIL_PRECISION FLA_USE_FAST_OPS
AITER_FORCE_A8W4 TORCHINDUCTOR_EMULATE_PRECISION_CASTS TORCHINDUCTOR_USE_FAST_MATH PYTORCH_TUNABLEOP_ENABLED
"""
SILENT = """
PATH HOME PYTHONHASHSEED OMP_NUM_THREADS CUDA_VISIBLE_DEVICES NCCL_ALGO AITER_LOG_LEVEL AITER_JIT_DIR
FLA_CACHE_RESULTS TRITON_CACHE_DIR VLLM_7_SERVICE_HOST SGLANG_ROUTER_PORT_8000_TCP TRTLLM_SERVICE_PORT_HTTP
"""


def described(engine: object, **environ: str) -> Description:
    parts = ("ENVIRONMENT", "IRRELEVANT_ENVIRONMENT", "PROCESS_ONLY_ENVIRONMENT")
    of_engine, irrelevant, process_only = (getattr(engine, name) for name in parts)
    contents = getattr(engine, "CONTENTS", {})
    return describe_environment(environ, of_engine, irrelevant, process_only, contents)


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.__name__)
def test_variables_of_shared_libraries_count_under_every_engine(engine: object) -> None:
    for name in OF_LIBRARIES.split():
        texts = {described(engine, **{name: value}).pairs for value in ("0", "1", "2")}
        assert len(texts) == 3 and () not in texts, name
        assert name.rstrip("_") in engine.ENVIRONMENT_WORDS or any(  # type: ignore[attr-defined]
            name.startswith(start) and f"`{start}`" in engine.ENVIRONMENT_WORDS  # type: ignore[attr-defined]
            for start in ("CUBLAS_EMULAT", "ROCM_QUICK_REDUCE_", "FLASHINFER_NVFP4_", "FLA_", "AITER_")
        ), f"{name} is in the docs"


@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.__name__)
def test_variables_that_shape_nothing_change_no_key(engine: object) -> None:
    assert described(engine, **dict.fromkeys(SILENT.split(), "1")) == Description((), (), ())


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        (of_trtllm, "OVERRIDE_QUANT_ALGO"),
        (of_trtllm, "FORCE_LOW_PRECISION_ALL_REDUCE_STRATEGY"),
        (of_trtllm, "ENABLE_CONFIGURABLE_MOE"),
        (of_trtllm, "TRTLLM_MOE_USE_LOW_PRECISION_COMBINE"),
        (of_vllm, "USE_FLAGOS"),
        (of_sglang, "CK_MOE"),
        (of_sglang, "ASCEND_USE_FIA"),
        (of_sglang, "MINIMAX_NPU_PREFILL_BSQ"),
    ],
)
def test_variables_of_an_engine_without_its_name(engine: object, name: str) -> None:
    assert described(engine, **{name: "1"}).pairs != described(engine, **{name: "2"}).pairs
    assert described(engine, **{name: "1"}).is_lasting
    assert f"`{name}`" in engine.ENVIRONMENT_WORDS or name.startswith("TRTLLM_")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        (engine, f"{prefix}_HUMMING_{kind}_QUANT_CONFIG")
        for engine, prefix in ((of_vllm, "VLLM"), (of_sglang, "SGLANG"))
        for kind in ("ONLINE", "INPUT")
    ],
)
def test_of_a_file_that_a_variable_may_name_the_content_counts(
    engine: object, name: str, tmp_path: Path
) -> None:
    assert f"`{name}`" in engine.ENVIRONMENT_WORDS  # type: ignore[attr-defined]
    named, found = tmp_path / "quantization.json", set()
    for text in ('{"bits": 4}', '{"bits": 8}'):
        named.write_text(text)
        for value in (text, str(named)):
            description = described(engine, **{name: value})
            assert description.is_lasting
            found.add(description.pairs)
    assert len(found) == 4
    unreadable = described(engine, **{name: str(tmp_path)})
    assert unreadable.process_only == (f"{name}: what it names cannot be read",)


def test_of_a_package_that_a_variable_names_the_code_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    variable, module = "SGLANG_EXTERNAL_MODEL_PACKAGE", tmp_path / "my_models" / "mine.py"
    assert described(of_sglang, **{variable: "my_models"}).process_only, "there is none yet"
    assert described(of_sglang, **{variable: ""}).is_lasting
    module.parent.mkdir()
    (module.parent / "__init__.py").write_text("raise SystemExit")
    found = set()
    for text in ("x = 1", "x = 2"):
        module.write_text(text)
        importlib.invalidate_caches()
        found.add(described(of_sglang, **{variable: "my_models"}))
    assert len(found) == 2 and all(description.is_lasting for description in found)


def test_experts_that_the_model_does_not_choose_mean_nothing_in_another_process() -> None:
    assert not described(of_trtllm, ENABLE_PERFECT_ROUTER="1").is_lasting
    assert described(of_trtllm, ENABLE_PERFECT_ROUTER="0").is_lasting


def test_a_star_stands_for_any_end() -> None:
    names = (
        "TRTLLM_KVCACHE_SEND_MAX_CONCURRENCY_NUM",
        "TRTLLM_USE_NIXL_KVCACHE",
        "TRTLLM_RAY_BUNDLE_INDICES",
    )
    assert not described(of_trtllm, **dict.fromkeys(names, "1")).pairs
    assert described(of_trtllm, TRTLLM_KVCACHE="1").pairs


def test_what_kubernetes_sets() -> None:
    assert is_of_kubernetes("VLLM_PORT_8000_TCP_ADDR") and not is_of_kubernetes("VLLM_PORT_OF_TOMORROW")


def test_texts_are_not_told_they_may_be_secrets() -> None:
    assert "secret" not in repr(described(of_vllm, VLLM_OF_TOMORROW="secret"))


# ---------------------------------------------------------------- packages, and what a CPU has


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    cached = (environment.packages, environment.vector_units, environment.changed_code)
    for read in cached:
        read.cache_clear()
    yield
    for read in cached:
        read.cache_clear()


def install(site: Path, name: str, version: str, *, is_editable: bool = False) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    origin = {"url": "file:///a", "dir_info": {"editable": is_editable}}
    (info / "direct_url.json").write_text(json.dumps(origin))


def develop(checkout: Path, name: str, version: str) -> None:
    """As ``setup.py develop`` leaves it."""
    info = checkout / f"{name}.egg-info"
    info.mkdir(parents=True)
    (info / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("name", "version", "counted"),
    [
        ("deep-gemm", "2.1", "2.1"),
        ("torch", "2.13.0+cpu", "2.13"),
        ("torch", "2.13.1+cu130", "2.13"),
        ("torch", "2.13.1.post2+rocm7.1", "2.13"),
        ("torch", "2.14.0.dev20261101+cu130", "2.14.0.dev20261101+cu130"),
        ("torch", "2.14.0a0+9f1c2de", "2.14.0a0+9f1c2de"),
        ("deep-gemm", "2.1.1+9f1c2de", "2.1.1+9f1c2de"),
        ("sgl-kernel", "0.3.20", "0.3.20"),
        ("vllm-xpu-kernels", "0.1.4", "0.1.4"),
    ],
)
def test_packages_by_which_engines_choose_kernels_count_with_their_versions(
    name: str, version: str, counted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, name, version)
    install(tmp_path, "of-no-account", "1.0")
    found = environment.packages().split()
    assert f"{name}=={counted}" in found and not any(one.startswith("of-no-account") for one in found)


@pytest.mark.parametrize("module", ["deep_gemm", "hpc"])
def test_a_module_by_which_engines_choose_counts_whatever_its_package_is_called(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    before = environment.packages()
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").write_text("raise SystemExit")
    importlib.invalidate_caches()
    environment.packages.cache_clear()
    assert set(environment.packages().split()) - set(before.split()) == {module}


@pytest.mark.parametrize("way", ["a wheel", "editable", "setup.py develop", "on the path", "not at all"])
def test_the_code_of_an_engine_counts_that_is_not_as_it_was_installed(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, checkout = tmp_path / "site", tmp_path / "checkout"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    if way in {"a wheel", "editable", "on the path"}:
        install(site, "my-engine", "1.0", is_editable=way == "editable")
    if way == "setup.py develop":
        develop(checkout, "my_engine", "1.0")
    code = site if way == "a wheel" else checkout
    monkeypatch.syspath_prepend(code)
    folder = code / "my_engine" / "models"
    folder.mkdir(parents=True)
    files = (folder.parent / "__init__.py", folder / "mine.py", folder / "kernel.so")
    found = set()
    for number, changed in enumerate((*files, *files[1:])):
        changed.write_text(f"x = {number}")
        importlib.invalidate_caches()
        environment.changed_code.cache_clear()
        found.add(environment.changed_code("my_engine", "not_there"))
    assert found == {""} if way == "a wheel" else len(found) == 5


def test_a_library_counts_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "linked_engine").mkdir()
    (tmp_path / "linked_engine" / "__init__.py").touch()
    library, found = tmp_path / "linked_engine" / "kernel.so", []
    for content, time_ns in ((b"one", 1), (b"one", 2), (b"two", 2)):
        library.write_bytes(content)
        os.utime(library, ns=(time_ns, time_ns))
        importlib.invalidate_caches()
        found.append(environment.code_of_package("linked_engine"))
    assert found[0] == found[1] != found[2]


def record(site: Path, files: list[Path]) -> Path:
    """What an installer notes of the package, when all files are there."""
    notes = site / "my_engine-1.0.dist-info" / "RECORD"
    rows = [f"{notes.relative_to(site)},,"]
    for file in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).decode().rstrip("=")
        rows.append(f"{file.relative_to(site)},sha256={digest},{file.stat().st_size}")
    notes.write_text("\n".join(rows))
    newest_ns = max(file.stat().st_mtime_ns for file in files)
    os.utime(notes, ns=(newest_ns, newest_ns))
    return notes


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("way", ["another size", "the same size", "gone", "as before"])
def test_the_code_of_a_wheel_counts_that_somebody_has_changed(
    way: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    site = tmp_path / "site"
    install(site, "my-engine", "1.0")
    monkeypatch.syspath_prepend(site)
    folder = site / "my_engine" / "models"
    folder.mkdir(parents=True)
    files = [folder.parent / "__init__.py", folder / "mine.py", folder / "kernel.so"]
    for file in files:
        file.write_text("x = 1")
    notes = record(site, files)
    importlib.invalidate_caches()
    assert environment.changed_code("my_engine") == ""
    files[number].unlink()
    if way != "gone":
        texts = {"another size": "x = 12", "the same size": "x = 2"}
        files[number].write_text(texts.get(way, "x = 1"))
        later_ns = notes.stat().st_mtime_ns + 1
        os.utime(files[number], ns=(later_ns, later_ns))
    environment.changed_code.cache_clear()
    assert (environment.changed_code("my_engine") == "") is (way == "as before")


def test_a_wheel_as_it_was_installed_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, "my-engine", "1.0")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_engine").mkdir()
    file = tmp_path / "my_engine" / "__init__.py"
    file.write_text("x = 1")
    record(tmp_path, [file])
    importlib.invalidate_caches()
    monkeypatch.setattr(environment, "Digester", lambda _: pytest.fail("it was read"))
    assert environment.changed_code("my_engine") == ""


def test_of_a_cpu_its_kind_and_what_torch_says_of_amx_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "vector_units", lambda: "avx2")
    found = set[str]()
    for has_tiles in (None, lambda: False, lambda: True):
        torch = SimpleNamespace(cpu=SimpleNamespace(_is_amx_tile_supported=has_tiles))
        monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
        for kind in ("x86_64", "aarch64"):
            monkeypatch.setattr(platform, "machine", lambda kind=kind: kind)
            found.add(environment.processor())
    assert len(found) == 6


def test_what_a_cpu_can_compute_with_is_read_from_the_kernel(tmp_path: Path) -> None:
    said = tmp_path / "cpuinfo"
    said.write_text("processor : 0\nflags\t\t: fpu smep avx2 amx_fp8 avx512_bf16 rdrand\n")
    assert environment.vector_units(str(said)) == "amx_fp8 avx2 avx512_bf16"
    environment.vector_units.cache_clear()
    said.write_text("Features : fp asimd sve2 i8mm\n")
    assert environment.vector_units(str(said)) == "asimd i8mm sve2"
    environment.vector_units.cache_clear()
    said.write_text("nothing\n")
    with pytest.raises(LookupError):
        environment.vector_units(str(said))


@pytest.mark.parametrize(
    ("text", "units"),
    [
        ("vendor_id : IBM/S390\nfeatures\t: esan3 te vx vxd nnpa\n", "esan3 te vx vxd nnpa"),
        ("processor : 0\nhart : 1\nisa\t\t: rv64imafdcv_zvfbfmin\n", "rv64imafdcv_zvfbfmin"),
        ("processor : 0\ncpu\t\t: POWER10, altivec supported\n", "POWER10, altivec supported"),
    ],
)
def test_what_other_kinds_of_cpus_say_of_themselves_counts(text: str, units: str, tmp_path: Path) -> None:
    said = tmp_path / "cpuinfo"
    said.write_text(text)
    assert environment.vector_units(str(said)) == units
