"""What is around the engine, in the name of a block: environment variables, versions, plugins."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from kvbm_core.config.names import is_of_kubernetes
from kvbm_core.identity.digest import Digester, default_memory
from kvbm_core.identity.effective import file_digest
from kvbm_core.identity.fields import Description

OF_LIBRARIES = re.compile(
    r"NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|HIPBLASLT_ALLOW_TF32|TRITON_F32_DEFAULT"
    r"|(ONEDNN|DNNL)_DEFAULT_FPMATH_MODE|CUBLAS_EMULAT\w+|ROCM_QUICK_REDUCE_\w+"
    r"|(FLASHINFER|TRTLLM)_DISABLE_FP4_QUANT_FAST_MATH|FLASHINFER_NVFP4_\w+|FLA_\w+|AITER_\w+"
    r"|TORCHINDUCTOR_(EMULATE_PRECISION_CASTS|USE_FAST_MATH)|PYTORCH_TUNABLEOP_ENABLED"
)
"""Variables of cuBLAS, PyTorch, oneDNN, Triton and kernel libraries that choose in which format of numbers is
computed.
"""

WORDS_OF_LIBRARIES = (
    "So are those of libraries: `NVIDIA_TF32_OVERRIDE`, `TORCH_ALLOW_TF32_CUBLAS_OVERRIDE`,\n"
    "`HIPBLASLT_ALLOW_TF32`, `TRITON_F32_DEFAULT`, `ONEDNN_DEFAULT_FPMATH_MODE`,\n"
    "`DNNL_DEFAULT_FPMATH_MODE`, `FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH`,\n"
    "`TRTLLM_DISABLE_FP4_QUANT_FAST_MATH`, `TORCHINDUCTOR_EMULATE_PRECISION_CASTS`,\n"
    "`TORCHINDUCTOR_USE_FAST_MATH`, `PYTORCH_TUNABLEOP_ENABLED`, and all that begin with `CUBLAS_EMULAT`,\n"
    "`ROCM_QUICK_REDUCE_`, `FLASHINFER_NVFP4_`, `FLA_` or `AITER_`, but for `AITER_JIT_DIR`, `AITER_LOG_*`,\n"
    "`FLA_CACHE_RESULTS` and `FLA_CI_ENV`, which shape nothing."
)

IRRELEVANT_OF_LIBRARIES = {
    "AITER_JIT_DIR": "where kernels are kept",
    "AITER_LOG_*": "what is logged",
    "FLA_CACHE_RESULTS": "where kernels are kept",
    "FLA_CI_ENV": "only for tests of that library",
}


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


PACKAGES_THAT_COMPUTE = _names(
    "aiter amd-aiter amd-mori amd-quark apex auto-round b12x bitsandbytes causal-conv1d"
    " compressed-tensors conch-triton-kernels deep-ep deep-gemm fbgemm-gpu fast-hadamard-transform"
    " flag-gems flash-attn flash-attn-3 flash-attn-4 flash-linear-attention flash-mla fla-core"
    " flashinfer-cubin flashinfer-jit-cache flashinfer-python gptqmodel helion hpc-ops humming-kernels"
    " intel-extension-for-pytorch kernels mamba-ssm mori mslk nvidia-cutlass-dsl nvidia-modelopt"
    " petit-kernel pytorch-triton pytorch-triton-rocm quack-kernels sgl-deep-ep sgl-deep-gemm"
    " sgl-flash-mla sgl-kernel sgl-kernel-npu sglang-kernel tilelang torch torch-npu torchao"
    " transformer-engine triton triton-kernels vllm-xpu-kernels xformers zentorch"
)
MODULES_THAT_COMPUTE = _names(
    "aiter b12x conch cutlass deep_ep deep_gemm fbgemm_gpu flash_attn flashinfer flashinfer_cubin fmha_sm100"
    " helion hpc humming moonep mori nixl_ep petit_kernel quark sageattn3 tilelang torchao triton"
    " triton_kernels zentorch"
)
"""Engines choose kernels, and with them formats of numbers, by which of these are there. They ask for
modules, whatever the package is called that has them.
"""
# Its local part names a kind of device alone: torch's builds for others are of the same code.
_RELEASE = re.compile(r"(\d+\.\d+)(\.\d+)*(\.post\d+)?(\+(cpu|xpu|cu\d+|rocm[\d.]+))?")
_VECTORS = re.compile(r"(amx|avx|fma|f16c|vnni|asimd|bf16|i8mm|sve|sme(?!p)|fphp)\w*")

_OFF = frozenset(("", "0", "0.0", "false"))


def describe_environment(
    environ: Mapping[str, str],
    of_engine: re.Pattern[str],
    irrelevant: Mapping[str, str],
    process_only: Mapping[str, str],
    contents: Mapping[str, Callable[[str], str]] = {},
) -> Description:
    """Variables that are set and may change what is computed. ``of_engine``: names of the engine's own.
    ``irrelevant``, ``process_only``: patterns (``*`` stands for any end) -> why. ``contents``: names of those
    that name a file or a package -> what makes of their text a digest of what is in it. Pairs hold digests of
    the texts: they are logged, and what an unknown variable holds may be a secret.
    """
    names = [
        name
        for name in sorted(environ)
        if (of_engine.fullmatch(name) or OF_LIBRARIES.fullmatch(name))
        and not is_of_kubernetes(name)
        and _reason(name, irrelevant) is None
        and _reason(name, IRRELEVANT_OF_LIBRARIES) is None
    ]
    pairs = [(name, _digest(environ[name])) for name in names]
    only_here = [
        f"{name}: {reason}"
        for name in names
        if (reason := _reason(name, process_only)) is not None and environ[name].lower() not in _OFF
    ]
    for name in (name for name in names if name in contents and environ[name]):
        try:
            pairs.append((f"content of {name}", contents[name](environ[name])))
        except Exception:  # whatever the import of a package's parents raises
            only_here.append(f"{name}: what it names cannot be read")
    return Description(tuple(pairs), (), tuple(only_here))


def content_of_file(text: str) -> str:
    """sha256 of the file that ``text`` names; "" if it names none. OSError if it cannot be read."""
    return (file_digest(text) or "") if os.path.exists(text) else ""


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


@cache
def packages() -> str:
    """Those of PACKAGES_THAT_COMPUTE that are installed, with their versions, and which of
    MODULES_THAT_COMPUTE are there. Of a release, major and minor count; an engine's own kernels, and what is
    no release, may change with every build.
    """
    found = [f"{name}=={version}" for name in sorted(PACKAGES_THAT_COMPUTE) if (version := _version(name))]
    return " ".join([*found, *(name for name in sorted(MODULES_THAT_COMPUTE) if _has_module(name))])


def _has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ValueError:  # imported, in a way that tells nothing of where it is from
        return True


def _version(name: str) -> str:
    version = next((found.version for found in metadata.distributions(name=name)), "")
    release = None if name.startswith(("sgl", "vllm")) else _RELEASE.fullmatch(version)
    return version if release is None else release[1]


def processor() -> str:
    """What a CPU is and can compute with. vLLM orders K and V in a block by whether torch finds AMX's tiles.
    LookupError if the kernel does not say.
    """
    has_tiles = getattr(getattr(sys.modules.get("torch"), "cpu", None), "_is_amx_tile_supported", None)
    return f"{platform.machine()} {vector_units()} AMX: {has_tiles and has_tiles()}"


@cache
def vector_units(path: str = "/proc/cpuinfo") -> str:
    """What a CPU can compute with, of all cores alike: engines choose formats by it. LookupError if the
    kernel does not say.
    """
    for line in Path(path).read_text().splitlines():
        name, _, text = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return " ".join(sorted(flag for flag in text.split() if _VECTORS.fullmatch(flag)))
        if name.strip() in {"features", "isa", "cpu"}:  # s390x, RISC-V, POWER: all that they say
            return " ".join(text.split())
    raise LookupError(f"{path} names no flags")


@cache
def changed_code(*names: str) -> str:
    """ "" for packages whose version says which code they have; of one that is installed editable, or is used
    from where it was not installed, the sha256 of its Python files and libraries; of any other, which of
    these are not as they were installed. LookupError if they cannot be found.
    """
    found = {name: _patches(name) if _is_where_installed(name) else code_of_package(name) for name in names}
    return " ".join(f"{name}={code}" for name, code in found.items() if code)


def _patches(name: str) -> str:
    """Files that are not as the installer noted (PEP 376), with their digests."""
    installed = next(iter(metadata.distributions(name=name)), None)
    notes = installed and installed.read_text("RECORD")
    if not installed or not notes:
        return ""
    root, rows = f"{installed.locate_file('')}/", list(filter(None, csv.reader(notes.splitlines())))
    notes_ns = os.stat(root + next(row[0] for row in rows if row[0].endswith("info/RECORD"))).st_mtime_ns
    files = (row for row in rows if row[0].endswith((".py", ".so")) and row[1].startswith("sha256="))
    found = ((text, _patched(root + text, noted, size, notes_ns)) for text, noted, size in files)
    return " ".join(f"{text}={digest}" for text, digest in found if digest)


def _patched(path: str, noted: str, size: str, notes_ns: int) -> str:
    """The digest of what is not as noted. Only what has another size, or is younger, is read."""
    if not os.path.exists(path):
        return "none"
    found = os.stat(path)
    if str(found.st_size) == size and found.st_mtime_ns <= notes_ns:
        return ""
    digest = Digester(default_memory()).file(Path(path))
    return "" if bytes.fromhex(digest) == base64.urlsafe_b64decode(f"{noted[7:]}=") else digest


def _is_where_installed(name: str) -> bool:
    """Whether the package is not installed editable, and its code is beside what its installer wrote of it.
    It is not with a checkout on the path, nor after ``setup.py develop``.
    """
    spec = find_spec(name)
    installed = next(iter(metadata.distributions(name=name)), None)
    if installed is None:  # made by a program, if nothing of it is in a file
        return spec is None or not (spec.origin or spec.submodule_search_locations)
    if is_editable(installed.read_text("direct_url.json")):
        return False
    is_noted = installed.read_text("METADATA") is not None  # what lies in a checkout has none
    beside = Path(str(installed.locate_file(name)))
    folders = [] if spec is None else spec.submodule_search_locations or []
    return is_noted and all(Path(folder).resolve() == beside.resolve() for folder in folders)


def is_editable(direct_url: str | None) -> bool:
    """By what pip has noted of where a package came from (PEP 610)."""
    return bool(json.loads(direct_url or "{}").get("dir_info", {}).get("editable"))


def code_of_package(name: str) -> str:
    """sha256 of its Python files and libraries, whose digests are remembered. LookupError if it has no
    folder.
    """
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise LookupError(f"{name} has no folder")
    code, digester = hashlib.sha256(), Digester(default_memory())
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).rglob("*")):
            if path.suffix in {".py", ".so"}:
                digest = file_digest(path) if path.suffix == ".py" else digester.file(path)
                code.update(f"{path.relative_to(folder)} {digest}\n".encode())
    return code.hexdigest()


def _reason(name: str, reasons: Mapping[str, str]) -> str | None:
    return next((reason for pattern, reason in reasons.items() if fnmatchcase(name, pattern)), None)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
