"""The two layouts that kvbm itself allocates: blocks in one piece, or one storage per layer."""

from __future__ import annotations

from dataclasses import dataclass

from kvbm_core.errors import LayoutError
from kvbm_core.layout.view import BlockView, Segment


@dataclass(frozen=True, kw_only=True)
class LayoutDims:
    """Sizes of a layout. ``outer_dim`` is 2 for K and V, 1 for MLA; ``inner_dim`` is elements per token."""

    num_blocks: int
    num_layers: int
    outer_dim: int
    page_size_tokens: int
    inner_dim: int
    dtype_width_bytes: int = 2
    alignment_bytes: int = 1

    def __post_init__(self) -> None:
        counts = (self.num_blocks, self.num_layers, self.page_size_tokens)
        if min(*counts, self.inner_dim, self.dtype_width_bytes) < 1 or self.outer_dim not in (1, 2):
            raise LayoutError(f"sizes must be positive and outer_dim 1 or 2: {self}")
        if self.alignment_bytes < 1 or self.alignment_bytes & (self.alignment_bytes - 1):
            raise LayoutError(f"alignment must be a power of two: {self}")

    @property
    def region_bytes(self) -> int:
        """K or V of one layer of one block."""
        return self.page_size_tokens * self.inner_dim * self.dtype_width_bytes

    def align_up(self, nbytes: int) -> int:
        """The next multiple of the alignment."""
        return -(-nbytes // self.alignment_bytes) * self.alignment_bytes


@dataclass(frozen=True, kw_only=True)
class FullyContiguous(LayoutDims):
    """``[block, layer, outer, page, inner]`` in one storage."""

    @property
    def block_bytes(self) -> int:
        """One block without padding."""
        return self.region_bytes * self.outer_dim * self.num_layers

    @property
    def block_stride_bytes(self) -> int:
        """From one block to the next."""
        return self.align_up(self.block_bytes)

    @property
    def total_bytes(self) -> int:
        """All blocks; the last one needs no padding."""
        return (self.num_blocks - 1) * self.block_stride_bytes + self.block_bytes

    @property
    def allocation_bytes(self) -> int:
        """What to allocate so that an aligned start with ``total_bytes`` behind it can be found."""
        return self.total_bytes + self.alignment_bytes - 1

    def view(self, base_offset_bytes: int = 0) -> BlockView:
        """All segments, layer by layer; ``base_offset_bytes`` aligns the start of the storage."""
        starts = (base_offset_bytes + i * self.region_bytes for i in range(self.num_layers * self.outer_dim))
        return BlockView(
            self.num_blocks,
            tuple(Segment(0, start, self.block_stride_bytes, self.region_bytes) for start in starts),
        )


@dataclass(frozen=True, kw_only=True)
class LayerSeparate(LayoutDims):
    """One storage per layer: ``[outer, block, page, inner]`` or ``[block, outer, page, inner]``."""

    outer_contiguous: bool

    @property
    def block_stride_bytes(self) -> int:
        """From one block to the next within a layer."""
        pieces = 1 if self.outer_contiguous else self.outer_dim
        return self.align_up(self.region_bytes * pieces)

    @property
    def outer_stride_bytes(self) -> int:
        """From K to V of the same block."""
        return self.block_stride_bytes * self.num_blocks if self.outer_contiguous else self.region_bytes

    @property
    def total_bytes(self) -> int:
        """Of each layer's storage."""
        pieces = self.outer_dim if self.outer_contiguous else 1
        return self.block_stride_bytes * self.num_blocks * pieces

    def view(self) -> BlockView:
        """All segments, layer by layer; layer i is storage i."""
        return BlockView(
            self.num_blocks,
            tuple(
                Segment(layer, outer * self.outer_stride_bytes, self.block_stride_bytes, self.region_bytes)
                for layer in range(self.num_layers)
                for outer in range(self.outer_dim)
            ),
        )
