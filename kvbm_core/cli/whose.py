"""Whether the names of the KVBM guides lead to this package: NVIDIA's own is called kvbm as well."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

GUIDE_MODULE = "kvbm.vllm_integration.connector"
"""What engines are told to load. NVIDIA's is a folder, which hides our file of that name where both are
installed.
"""
NVIDIA_MODULE = "kvbm._core"
REMEDY = "run `pip uninstall -y kvbm` until it finds nothing more, then install this one again"


def owner_of_guide_names() -> tuple[bool, str]:
    """Whether the guides' names lead here, and a line that says where they lead, and what to do if not here.

    Looks at what Python would import; imports nothing but the parents of that.
    """
    try:
        spec = find_spec(GUIDE_MODULE)
        has_nvidia = find_spec(NVIDIA_MODULE) is not None
    except (ImportError, ValueError):
        spec, has_nvidia = None, False
    where = Path(spec.origin).as_posix() if spec is not None and spec.origin else "nowhere"
    if spec is None:
        return False, f"{GUIDE_MODULE} cannot be imported; {REMEDY}"
    if has_nvidia or Path(where).name == "__init__.py":
        return False, f"{GUIDE_MODULE} is NVIDIA's ({where}); {REMEDY}"
    return True, f"{GUIDE_MODULE} is ours ({where})"
