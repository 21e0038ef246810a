"""What every launcher needs: the shape of a problem as blocks, scale groups and row strides."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads_qat.config import Recipe
from quads_qat.formats import BLOCK_SIZE

RECIPES = {
    Recipe.ALIGNED: 0,
    Recipe.MODELOPT: 1,
    Recipe.MODELOPT_IEEE: 1,
    Recipe.MODELOPT_STATIC: 2,
    Recipe.MODELOPT_STATIC_IEEE: 3,
    Recipe.LLM_COMPRESSOR: 4,
    Recipe.TRANSFORMER_ENGINE: 5,
}
TL_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Blocks(NamedTuple):
    """``x`` [..., K] as ``groups`` equal runs of blocks that have one per-tensor scale each.

    Attributes:
        x: the tensor to read; its last dim is contiguous (``transposed``: its second to last).
        groups: how many scales; a run belongs to each.
        blocks: blocks in a run.
        per_row: blocks between jumps of ``row_stride`` elements, >= 1; ``blocks`` where the run is contiguous.
        row_stride: elements from row to row.
        group_stride: elements from run to run.
    """

    x: Tensor
    groups: int
    blocks: int
    per_row: int
    row_stride: int
    group_stride: int

    @property
    def strided(self) -> bool:
        """Whether a run, or the step from run to run, leaves gaps."""
        return self.per_row < self.blocks or self.group_stride != self.blocks * BLOCK_SIZE


def blocks_of(x: Tensor, scale: Tensor | None) -> Blocks:
    """The runs of ``x`` for a scale [] | [E] | [..., 1] (None as []); copies only strides that no run can express."""
    k = x.shape[-1]
    rows = x.numel() // k if k else 0
    groups = 1 if scale is None or scale.ndim == 0 else scale.numel()
    if groups and rows % groups:
        raise ValueError(
            f"{groups} per-tensor scales for {rows} rows; give one, one for each expert, or one for each row"
        )
    rows_per_group = rows // groups if groups else 0
    blocks = rows_per_group * (k // BLOCK_SIZE)
    if x.data_ptr() % 16:  # pairs and vectors want aligned rows; only odd slices of a tensor are not
        x = x.clone(memory_format=torch.contiguous_format)
    if not x.is_contiguous():
        row_stride = _row_stride(x)
        if row_stride is None:
            x = x.contiguous()
        else:
            per_row = max(1, k // BLOCK_SIZE)
            return Blocks(x, groups, blocks, per_row, row_stride, rows_per_group * row_stride)
    return Blocks(x, groups, blocks, max(1, blocks), k, blocks * BLOCK_SIZE)


def _row_stride(x: Tensor) -> int | None:
    """The one stride between rows if all leading dims are evenly strided and the last is contiguous."""
    if x.ndim < 2 or x.stride(-1) != 1 or x.stride(-2) % 8:
        return None
    for i in range(x.ndim - 3, -1, -1):
        if x.shape[i] != 1 and x.stride(i) != x.stride(i + 1) * x.shape[i + 1]:
            return None
    return x.stride(-2)


def is_transposed_stack(x: Tensor, scale: Tensor | None) -> bool:
    """Whether ``x`` [E, N, K] is a contiguous [E, K, N] seen through ``.mT``, with one scale or one per expert."""
    if x.ndim != 3 or x.is_contiguous() or not x.mT.is_contiguous():
        return False
    return scale is None or scale.ndim == 0 or scale.ndim == 1


def scale_pointer(scale: Tensor) -> Tensor:
    """The scales as a contiguous tensor for a kernel; its shape does not matter there."""
    return scale.contiguous()


def cdiv(a: int, b: int) -> int:
    """Ceiling division; ``triton.cdiv`` takes 3 us for it, on the host of every call."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two from ``n`` on; ``triton.next_power_of_2`` takes as long."""
    return 1 << (n - 1).bit_length() if n > 0 else n


@triton.jit
def first_elements(block, group, n_blocks, per_row, row_stride, group_stride, STRIDED: tl.constexpr):
    """Where the blocks ``block`` of a group begin, in elements (int64)."""
    if STRIDED:
        start = group * group_stride + (block // per_row).to(tl.int64) * row_stride + (block % per_row) * 16
    else:
        start = (group * n_blocks + block) * 16
    return start


_MOST_ROWS_OF_A_GRID = 65535  # CUDA's limit of its second dim


class Grid(NamedTuple):
    """Programs for tiles of several groups: (tiles, groups), or ``folded`` into one dim for very many groups."""

    size: tuple[int, ...]
    tiles: int
    folded: bool


def grid_of(groups: int, per_group: int, tile: int) -> Grid:
    """At least one tile for each group, since the first has more to do than its blocks."""
    tiles = max(1, cdiv(per_group, tile))
    if groups > _MOST_ROWS_OF_A_GRID:
        return Grid((groups * tiles,), tiles, True)
    return Grid((tiles, groups), tiles, False)


@triton.jit
def group_and_tile(tiles, FOLDED: tl.constexpr):
    """Which scale group a program belongs to (int64), and which tile of it: the last ones first.

    An amax of the same tensor has often just run, and what it read last is still in the L2 cache.
    """
    if FOLDED:
        program = tl.num_programs(0) - 1 - tl.program_id(0)
        group = program // tiles
        tile = program % tiles
    else:  # no division: it costs a tenth of a small program
        group = tl.num_programs(1) - 1 - tl.program_id(1)
        tile = tiles - 1 - tl.program_id(0)
    return group.to(tl.int64), tile
