"""``quantize``: read x once, write two codes a byte and one E4M3 byte a block, row-major or 128x4-swizzled."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads_qat.config import Recipe
from quads_qat.kernels import numerics as num
from quads_qat.kernels.launch import RECIPES, blocks_of, grid_of, is_transposed_stack, scale_pointer
from quads_qat.kernels.pairs import block_scale_of_pairs, halves, packed_pairs


@triton.jit
def swizzled_offset(row, column, padded_columns):
    """Where the scale (row, column) lies in the tensor-core order; see ``packing.swizzle_block_scale``."""
    tile = (row // 128) * (padded_columns // 4) + column // 4
    return tile * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + column % 4


@triton.jit
def _store_scale(scale_ptr, byte, group, block, n_blocks, inside, columns, padded_columns, padded_size, SWIZZLED: tl.constexpr):
    if SWIZZLED:
        row = block // columns
        offs = group.to(tl.int64) * padded_size + swizzled_offset(row.to(tl.int64), block % columns, padded_columns)
    else:
        offs = group.to(tl.int64) * n_blocks + block
    tl.store(scale_ptr + offs, byte.to(tl.uint8), mask=inside)


@triton.jit
def _pairs_kernel(
    x_ptr,
    per_tensor_scale_ptr,
    qdata_ptr,
    scale_ptr,
    n_blocks,
    tiles,
    per_row,
    row_stride,
    group_stride,
    columns,
    padded_columns,
    padded_size,
    STRIDED: tl.constexpr,
    SWIZZLED: tl.constexpr,
    TILE: tl.constexpr,
):
    pid = tl.program_id(0)
    group = pid // tiles
    block = (pid % tiles) * TILE + tl.arange(0, TILE)
    inside = block < n_blocks
    lane = tl.arange(0, 8)[None, :]
    out_offs = (group.to(tl.int64) * n_blocks + block)[:, None] * 8 + lane
    if STRIDED:
        start = group.to(tl.int64) * group_stride + (block // per_row).to(tl.int64) * row_stride + (block % per_row) * 16
        offs = (start // 2)[:, None] + lane
    else:
        offs = out_offs
    x = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + offs, mask=inside[:, None], other=0)
    inverse_p = num.reciprocal_of_power_of_two(tl.load(per_tensor_scale_ptr + group))
    low, high = halves(x)
    s, finite = block_scale_of_pairs(low, high, inverse_p)
    codes = packed_pairs(low, high, s, finite, inverse_p)
    tl.store(qdata_ptr + out_offs, codes.to(tl.uint8), mask=inside[:, None])
    byte = tl.where(finite, num.e4m3_byte(s), 0x7F)
    _store_scale(scale_ptr, byte, group, block, n_blocks, inside, columns, padded_columns, padded_size, SWIZZLED)


@triton.jit
def _kernel(
    x_ptr,
    per_tensor_scale_ptr,
    stored_ptr,
    source_ptr,
    qdata_ptr,
    scale_ptr,
    n_blocks,
    tiles,
    per_row,
    row_stride,
    group_stride,
    columns,
    padded_columns,
    padded_size,
    k_stride,
    RECIPE: tl.constexpr,
    SWIZZLED: tl.constexpr,
    TILE: tl.constexpr,
):
    pid = tl.program_id(0)
    group = pid // tiles
    block = (pid % tiles) * TILE + tl.arange(0, TILE)
    inside = block < n_blocks
    half = tl.arange(0, 8)[None, :]
    start = group.to(tl.int64) * group_stride + (block // per_row).to(tl.int64) * row_stride
    start += (block % per_row).to(tl.int64) * 16 * k_stride
    offs = start[:, None] + 2 * half * k_stride
    p = tl.load(per_tensor_scale_ptr + group)
    stored = tl.load(stored_ptr + group)
    source = tl.load(source_ptr + group)
    even = tl.load(x_ptr + offs, mask=inside[:, None], other=0.0).to(tl.float32)
    odd = tl.load(x_ptr + offs + k_stride, mask=inside[:, None], other=0.0).to(tl.float32)
    largest = tl.max(tl.maximum(num.bits(tl.abs(even)), num.bits(tl.abs(odd))), 1)
    finite = largest < 0x7F800000
    a = num.from_bits(tl.where(finite, largest, 0))
    s = num.block_scale_of(a, p, source, RECIPE, x_ptr.dtype.element_ty)
    low, low_sign = num.quotient_of(even, s[:, None], p, stored, RECIPE)
    high, high_sign = num.quotient_of(odd, s[:, None], p, stored, RECIPE)
    byte = num.e2m1_code(low) | (num.e2m1_code(high) << 4) | tl.where(low_sign, 8, 0) | tl.where(high_sign, 128, 0)
    byte = tl.where(finite[:, None], byte, 0)
    out_offs = (group.to(tl.int64) * n_blocks + block)[:, None] * 8 + half
    tl.store(qdata_ptr + out_offs, byte.to(tl.uint8), mask=inside[:, None])
    scale = tl.where(finite, num.e4m3_byte(s), 0x7F)
    _store_scale(scale_ptr, scale, group, block, n_blocks, inside, columns, padded_columns, padded_size, SWIZZLED)


def quantize(
    x: Tensor, per_tensor_scale: Tensor, stored: Tensor, source: Tensor, *, recipe: Recipe, swizzled: bool = False
) -> tuple[Tensor, Tensor]:
    """Triton twin of ``reference.quantize``: ``(qdata, block_scale)``.

    Args:
        x: [..., K] fp32, bf16 or fp16; a transposed stack ([E, K, N].mT) is read without a copy.
        per_tensor_scale: float32 [] | [E] | [..., 1].
        stored: as the recipe stores it, same shape.
        source: what block scales are made from, same shape.
        recipe: the arithmetic.
        swizzled: write scales in the tensor-core order, padded to [.., 128 m, 4 n]; needs a scale [] or [E].

    Returns:
        qdata [..., K/2] uint8 and block_scale float8_e4m3fn, [..., K/16] or flat per matrix.
    """
    k, columns = x.shape[-1], x.shape[-1] // 16
    qdata = torch.empty(*x.shape[:-1], k // 2, dtype=torch.uint8, device=x.device)
    rows = x.shape[-2] if x.ndim > 1 else 1
    padded_rows, padded_columns = triton.cdiv(rows, 128) * 128, triton.cdiv(columns, 4) * 4
    if swizzled:
        lead = x.shape[:-2] if x.ndim > 1 else ()
        scales = torch.zeros(*lead, padded_rows * padded_columns, dtype=torch.uint8, device=x.device)
    else:
        scales = torch.empty(*x.shape[:-1], columns, dtype=torch.uint8, device=x.device)
    if x.numel() == 0:
        return qdata, scales.view(torch.float8_e4m3fn)
    transposed = is_transposed_stack(x, per_tensor_scale)
    per_tensor_scale, stored, source = (_per_matrix(t, x, split=swizzled or transposed) for t in (per_tensor_scale, stored, source))
    if transposed:
        groups, blocks, per_row, row_stride, group_stride, k_stride = x.shape[0], rows * columns, columns, 1, rows * k, rows
        source_tensor, strided = x, True
    else:
        runs = blocks_of(x, per_tensor_scale)
        groups, blocks, per_row, row_stride, group_stride = runs.groups, runs.blocks, runs.per_row, runs.row_stride, runs.group_stride
        source_tensor, strided, k_stride = runs.x, runs.strided, 1
    layout = (columns, padded_columns, padded_rows * padded_columns)
    if x.dtype == torch.bfloat16 and recipe is Recipe.ALIGNED and not transposed:
        programs, tiles = grid_of(groups, blocks, 128)
        _pairs_kernel[(programs,)](
            source_tensor, scale_pointer(per_tensor_scale), qdata, scales, blocks, tiles, per_row, row_stride, group_stride,
            *layout, STRIDED=strided, SWIZZLED=swizzled, TILE=128, num_warps=4,
        )  # fmt: skip
    else:
        programs, tiles = grid_of(groups, blocks, 64)
        _kernel[(programs,)](
            source_tensor, scale_pointer(per_tensor_scale), scale_pointer(stored), scale_pointer(source), qdata, scales,
            blocks, tiles, per_row, row_stride, group_stride, *layout, k_stride,
            RECIPE=RECIPES[recipe], SWIZZLED=swizzled, TILE=64,
        )  # fmt: skip
    return qdata, scales.view(torch.float8_e4m3fn)


def _per_matrix(scale: Tensor, x: Tensor, *, split: bool) -> Tensor:
    """One scale becomes one per matrix of a stack where the kernel has to know the matrices apart."""
    return scale.expand(x.shape[0]) if split and scale.ndim == 0 and x.ndim == 3 else scale
