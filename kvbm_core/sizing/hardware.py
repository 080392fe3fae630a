"""What machines can do, as their makers say, and how much of that to expect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvbm_core.sizing.model import SizingError


class Gpu(NamedTuple):
    """``tflops``: dense, in bf16. ``host_gb_s``: to or from host memory, one way."""

    memory_gb: float
    tflops: float
    host_gb_s: float


GPUS = {
    "a10": Gpu(24, 125, 32),
    "a100-40gb": Gpu(40, 312, 32),
    "a100-80gb": Gpu(80, 312, 32),
    "l4": Gpu(24, 121, 32),
    "l40s": Gpu(48, 362, 32),
    "rtx4090": Gpu(24, 165, 32),
    "h20": Gpu(96, 148, 64),
    "h100": Gpu(80, 989, 64),
    "h200": Gpu(141, 989, 64),
    "gh200": Gpu(96, 989, 450),
    "b200": Gpu(180, 2250, 64),
}
"""From data sheets."""


class Span(NamedTuple):
    """From the worse to the better."""

    worse: float
    better: float


PREFILL_SHARE = Span(0.3, 0.6)
"""Of a GPU's peak that engines reach in prefill."""
COPY_SHARE = Span(0.6, 0.9)
"""Of a link's peak that copies of blocks reach."""
DISK_SHARE = Span(0.6, 1.0)
"""Of what a disk reads alone, while it is written to as well."""
MEASURED_SHARE = Span(0.8, 1.1)
"""Of a speed that was measured, on another day."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One engine's machine. ``prefill_tokens_s``: measured; it wins over what the GPU's peak suggests.
    ``device_cache_gb``: the engine's KV cache over all ranks, if it is known.
    """

    gpu: Gpu
    num_ranks: int = 1
    memory_share: float = 0.9
    disk_gb_s: float = 5.0
    weights_gb: float | None = None
    device_cache_gb: float | None = None
    prefill_tokens_s: float | None = None

    def device_gb(self, weights_bytes: float) -> float:
        """What is left for KV on all ranks. SizingError if there is nothing."""
        if self.device_cache_gb is not None:
            return self.device_cache_gb
        weights_gb = self.weights_gb if self.weights_gb is not None else weights_bytes / 1e9
        room_gb = self.num_ranks * self.gpu.memory_gb * self.memory_share
        left_gb = room_gb - weights_gb - 0.02 * self.num_ranks * self.gpu.memory_gb  # activations
        if left_gb <= 0:
            raise SizingError(
                f"the weights ({weights_gb:.1f} GB) leave no room for KV in {room_gb:.1f} GB; raise --tp, or "
                "say what the engine says: --device-cache-gb"
            )
        return left_gb


def gpu_of(name: str) -> Gpu:
    """SizingError for one that is not known."""
    gpu = GPUS.get(name.lower().replace(" ", "-"))
    if gpu is None:
        raise SizingError(f"--gpu {name}: not known; one of {', '.join(GPUS)}")
    return gpu


def with_overrides(gpu: Gpu, memory_gb: float | None, tflops: float | None, host_gb_s: float | None) -> Gpu:
    """``gpu`` with what somebody knows better."""
    given = {"memory_gb": memory_gb, "tflops": tflops, "host_gb_s": host_gb_s}
    return gpu._replace(**{name: value for name, value in given.items() if value is not None})
