"""Which environment variables are in the name of a block, under each engine."""

from __future__ import annotations

import pytest

import kvbm_sglang.config_tables as of_sglang
import kvbm_trtllm.config_tables as of_trtllm
import kvbm_vllm.config_tables as of_vllm
from kvbm_core.identity.environment import describe_environment, is_of_kubernetes
from kvbm_core.identity.fields import Description

ENGINES = [of_vllm, of_sglang, of_trtllm]
OF_LIBRARIES = """
NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE HIPBLASLT_ALLOW_TF32 ONEDNN_DEFAULT_FPMATH_MODE
DNNL_DEFAULT_FPMATH_MODE TRITON_F32_DEFAULT CUBLAS_EMULATE_SINGLE_PRECISION CUBLAS_EMULATION_STRATEGY
ROCM_QUICK_REDUCE_QUANTIZATION ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH
TRTLLM_DISABLE_FP4_QUANT_FAST_MATH FLASHINFER_NVFP4_4OVER6 FLA_TRIL_PRECISION FLA_USE_FAST_OPS
AITER_FORCE_A8W4
"""
SILENT = """
PATH HOME PYTHONHASHSEED OMP_NUM_THREADS CUDA_VISIBLE_DEVICES NCCL_ALGO AITER_LOG_LEVEL AITER_JIT_DIR
FLA_CACHE_RESULTS TRITON_CACHE_DIR VLLM_7_SERVICE_HOST SGLANG_ROUTER_PORT_8000_TCP TRTLLM_SERVICE_PORT_HTTP
"""


def described(engine: object, **environ: str) -> Description:
    parts = ("ENVIRONMENT", "IRRELEVANT_ENVIRONMENT", "PROCESS_ONLY_ENVIRONMENT")
    of_engine, irrelevant, process_only = (getattr(engine, name) for name in parts)
    return describe_environment(environ, of_engine, irrelevant, process_only)


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
    "name",
    [
        "OVERRIDE_QUANT_ALGO",
        "FORCE_LOW_PRECISION_ALL_REDUCE_STRATEGY",
        "ENABLE_CONFIGURABLE_MOE",
        "TRTLLM_MOE_USE_LOW_PRECISION_COMBINE",
    ],
)
def test_variables_of_tensorrt_llm_without_its_name(name: str) -> None:
    assert described(of_trtllm, **{name: "1"}).pairs != described(of_trtllm, **{name: "2"}).pairs
    assert described(of_trtllm, **{name: "1"}).is_lasting


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
