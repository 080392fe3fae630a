"""Modules that an engine looks for: each is in the names of blocks, or known to choose no kernel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvbm_core.identity.environment import MODULES_THAT_COMPUTE
from tests.contract.test_sglang_versions import SOURCES as SGLANG
from tests.contract.test_vllm_versions import SOURCES as VLLM

PROBE = re.compile(r"""(?:\b_has_module|\b_has_module_spec|\bfind_spec)\(\s*["']([\w.\-]+)""")
OF_NO_ACCOUNT = {
    "arctic_inference",
    "cache_dit",
    "cosmos_guardrail",
    "cupy",
    "mooncake",
    "numba",
    "nvidia",
    "orjson",
}
OF_NO_ACCOUNT |= {"pip", "pytorch-triton-xpu", "ray", "sglang", "termplotlib", "torch", "vllm", "vllm_omni"}
"""Drafts by suffixes, images, transports, plots, other front ends; the engines themselves, and torch, without
which there is none.
"""
ENGINES = {
    f"{name} {version}": path
    for name, of in (("vllm", VLLM), ("sglang", SGLANG))
    for version, path in of.items()
}


@pytest.mark.parametrize("sources", ENGINES.values(), ids=ENGINES.keys())
def test_each_module_that_an_engine_looks_for_is_classified(sources: Path) -> None:
    probed = {
        found.partition(".")[0]
        for path in sources.rglob("*.py")
        for found in PROBE.findall(path.read_text(errors="replace"))
    }
    assert probed - MODULES_THAT_COMPUTE - OF_NO_ACCOUNT == set()
