"""What ``kvbm doctor`` looks at of TensorRT-LLM."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from importlib.util import find_spec

from kvbm_core.cli.doctor.check import Check, Finding, Subject, error, note
from kvbm_core.cli.doctor.settings import unheeded
from kvbm_core.config.fields import Adapter

NAME = "trtllm"
OLDEST = (1, 1)
REMEDY = "install tensorrt-llm 1.1.0rc5 or newer"
_RELEASE = re.compile(r"(\d+)\.(\d+)")


def look_at_trtllm(subject: Subject) -> Iterator[Finding]:
    """Its version, what of it is tested, and settings that it does not heed."""
    try:
        version = importlib.metadata.version("tensorrt-llm")
    except importlib.metadata.PackageNotFoundError:
        if subject.engine == NAME:
            yield error("TensorRT-LLM is not installed in this environment", REMEDY)
        return
    found = _RELEASE.match(version)
    if find_spec("tensorrt_llm") is None or not found or tuple(map(int, found.groups())) < OLDEST:
        yield error(f"TensorRT-LLM {version} is older than what kvbm serves", REMEDY)
        return
    remedy = "compare some answers with those of a server without kvbm (docs/trtllm.md)"
    yield note(f"TensorRT-LLM {version}: kvbm was tested on a double of its executor, never for real", remedy)
    yield from unheeded(subject.settings, (Adapter.TRTLLM,))


CHECKS = (
    Check(NAME, "TensorRT-LLM: its version, what of it is tested, settings that it ignores", look_at_trtllm),
)
