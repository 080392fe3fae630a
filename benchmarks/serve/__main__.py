"""The serving part alone: as ``python -m benchmarks --only serve``."""

from __future__ import annotations

import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
    sys.exit(main(program="python -m benchmarks.serve", only="serve"))
