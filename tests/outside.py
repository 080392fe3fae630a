"""Packages of somebody else that are installed for a while, outside this repository: what their entry points
name, and the store of docs/extending.md.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from kvbm_core.config.installed import STORES

ROOT = Path(__file__).resolve().parents[1]
ENTRY_POINT = re.compile(rf'"{re.escape(STORES)}"\]\n(\w+) = "(\w+)\.(\w+):(\w+)"')
"""As docs/extending.md writes it: the scheme; the package, its module and what makes an engine."""


@contextmanager
def installed(
    folder: Path, group: str, points: Mapping[str, str], package: str = "of_somebody"
) -> Iterator[None]:
    """``points``: by name what the entry point says, ``module:attribute``. Modules may lie in ``folder``."""
    info = folder / f"{package.replace('-', '_')}-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    lines = [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def sqlite_store(site: Path) -> AbstractContextManager[None]:
    """The store of docs/extending.md as a package of the names that the page gives it, for URLs
    ``sqlite:///PATH``.
    """
    found = ENTRY_POINT.search((ROOT / "docs" / "extending.md").read_text(encoding="utf-8"))
    assert found is not None
    scheme, package, module, maker = found.groups()
    (site / package).mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "examples" / "extending" / f"{module}.py", site / package)
    return installed(site, STORES, {scheme: f"{package}.{module}:{maker}"}, package)
