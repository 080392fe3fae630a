"""Whether the names of the KVBM guides lead to this package: NVIDIA's own is called kvbm as well."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

GUIDE_MODULE = "kvbm.vllm_integration.connector"
"""What engines are told to load. NVIDIA's is a folder, which hides our file of that name where both are
installed.
"""
NVIDIA_MODULE = "kvbm._core"
REMEDY = "run `pip uninstall -y kvbm` until it finds nothing more, then install this one again"


class Owner(NamedTuple):
    """``line`` says where the guides' names lead, and what to do if not here."""

    is_ours: bool
    line: str


def owner_of_guide_names() -> Owner:
    """Looks at what Python would import; imports nothing but the parents of that."""
    try:
        spec = find_spec(GUIDE_MODULE)
        has_nvidia = find_spec(NVIDIA_MODULE) is not None
    except (ImportError, ValueError):
        spec, has_nvidia = None, False
    where = Path(spec.origin).as_posix() if spec is not None and spec.origin else "nowhere"
    if spec is None:
        return Owner(False, f"{GUIDE_MODULE} cannot be imported; {REMEDY}")
    if has_nvidia or Path(where).name == "__init__.py":
        return Owner(False, f"{GUIDE_MODULE} is NVIDIA's ({where}); {REMEDY}")
    return Owner(True, f"{GUIDE_MODULE} is ours ({where})")
