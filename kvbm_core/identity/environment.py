"""What is around the engine, in the name of a block: environment variables, versions, plugins."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib import metadata

from kvbm_core.identity.fields import Description

OF_LIBRARIES = re.compile(
    r"NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|HIPBLASLT_ALLOW_TF32|TRITON_F32_DEFAULT"
    r"|(ONEDNN|DNNL)_DEFAULT_FPMATH_MODE|CUBLAS_EMULAT\w+|ROCM_QUICK_REDUCE_\w+"
    r"|(FLASHINFER|TRTLLM)_DISABLE_FP4_QUANT_FAST_MATH|FLASHINFER_NVFP4_\w+|FLA_\w+|AITER_\w+"
)
"""Variables of cuBLAS, PyTorch, oneDNN, Triton and kernel libraries that choose in which format of numbers is
computed.
"""

WORDS_OF_LIBRARIES = (
    "So are those of libraries: `NVIDIA_TF32_OVERRIDE`, `TORCH_ALLOW_TF32_CUBLAS_OVERRIDE`,\n"
    "`HIPBLASLT_ALLOW_TF32`, `TRITON_F32_DEFAULT`, `ONEDNN_DEFAULT_FPMATH_MODE`,\n"
    "`DNNL_DEFAULT_FPMATH_MODE`, `FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH`,\n"
    "`TRTLLM_DISABLE_FP4_QUANT_FAST_MATH`, and all that begin with `CUBLAS_EMULAT`,\n"
    "`ROCM_QUICK_REDUCE_`, `FLASHINFER_NVFP4_`, `FLA_` or `AITER_`, but for `AITER_JIT_DIR`, `AITER_LOG_*`,\n"
    "`FLA_CACHE_RESULTS` and `FLA_CI_ENV`, which shape nothing."
)

IRRELEVANT_OF_LIBRARIES = {
    "AITER_JIT_DIR": "where kernels are kept",
    "AITER_LOG_*": "what is logged",
    "FLA_CACHE_RESULTS": "where kernels are kept",
    "FLA_CI_ENV": "only for tests of that library",
}

_OFF = frozenset(("", "0", "0.0", "false"))


def describe_environment(
    environ: Mapping[str, str],
    of_engine: re.Pattern[str],
    irrelevant: Mapping[str, str],
    process_only: Mapping[str, str],
) -> Description:
    """Variables that are set and may change what is computed. ``of_engine``: names of the engine's own.
    ``irrelevant``, ``process_only``: patterns (``*`` stands for any end) -> why. Pairs hold digests of the
    texts: they are logged, and what an unknown variable holds may be a secret.
    """
    names = [
        name
        for name in sorted(environ)
        if (of_engine.fullmatch(name) or OF_LIBRARIES.fullmatch(name))
        and not is_of_kubernetes(name)
        and _reason(name, irrelevant) is None
        and _reason(name, IRRELEVANT_OF_LIBRARIES) is None
    ]
    only_here = tuple(
        f"{name}: {reason}"
        for name in names
        if (reason := _reason(name, process_only)) is not None and environ[name].lower() not in _OFF
    )
    return Description(tuple((name, _digest(environ[name])) for name in names), (), only_here)


def describe_software(version: tuple[str, str], **read: Callable[[], str]) -> Description:
    """The engine's version (name, text), and what else is installed, by name. What cannot be read is unknown:
    of a driver or a package that answers otherwise.
    """
    pairs, unknown = [version], list[str]()
    for name, read_one in read.items():
        try:
            pairs.append((name, read_one()))
        except Exception:
            unknown.append(name)
    return Description(tuple(pairs), tuple(unknown), ())


@cache
def plugins(*groups: str) -> str:
    """Packages with entry points in ``groups``, which may replace models or layers, with their versions."""
    points = [point for group in groups for point in metadata.entry_points(group=group)]
    found = {
        f"{point.name}={point.value}=={'' if point.dist is None else point.dist.version}" for point in points
    }
    return " ".join(sorted(found))


def _reason(name: str, reasons: Mapping[str, str]) -> str | None:
    return next((reason for pattern, reason in reasons.items() if fnmatchcase(name, pattern)), None)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


_OF_A_SERVICE = re.compile(
    r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


def is_of_kubernetes(variable: str) -> bool:
    """Whether Kubernetes sets it in every pod for a Service of that name, also one that begins with the
    engine's: where the Service listens.
    """
    return _OF_A_SERVICE.fullmatch(variable) is not None
