"""Names of operators that torchvision's import looks for; its own library, a CUDA build, cannot be loaded
here.

Imported by a .pth file when Python starts: it must do nothing until torchvision is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[object] = []  # a library's names go with it


class _BeforeTorchvision(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision" and not _kept:
            from torch.library import Library

            library = Library("torchvision", "DEF")
            library.define(f"nms{_BOXES}")
            library.define(f"qnms{_BOXES}")
            _kept.append(library)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
