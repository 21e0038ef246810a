"""``quantize``: read x once, write two codes a byte and one E4M3 byte a block, row-major or 128x4-swizzled."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads_qat.config import Recipe
from quads_qat.kernels import numerics as num
from quads_qat.kernels.launch import (
    RECIPES,
    Blocks,
    blocks_of,
    grid_of,
    group_and_tile,
    is_transposed_stack,
    scale_pointer,
)
from quads_qat.kernels.pairs import amax_and_zero, halves, packed_word


@triton.jit
def swizzled_offset(row, column, padded_columns):
    """Where the scale (row, column) lies in the tensor-core order; see ``packing.swizzle_block_scale``."""
    tile = (row // 128) * (padded_columns // 4) + column // 4
    return tile * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + column % 4


@triton.jit
def _store_scale(
    scale_ptr, byte, group, block, n_blocks, inside, columns, padded_columns, padded_size, SWIZZLED: tl.constexpr
):
    """Store the scale byte of each block, row-major or where the tensor-core order wants it."""
    if SWIZZLED:
        row = block // columns
        offs = group * padded_size + swizzled_offset(row.to(tl.int64), block % columns, padded_columns)
    else:
        offs = group * n_blocks + block
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
    ONE_GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    group, tile = group_and_tile(tl.program_id(0), tiles, ONE_GROUP)
    block = tile * TILE + tl.arange(0, TILE)
    inside = block < n_blocks
    index = group * n_blocks + block
    lane = tl.arange(0, 4)[None, :]
    if STRIDED:
        start = group * group_stride + (block // per_row).to(tl.int64) * row_stride + (block % per_row) * 16
        offs = (start // 2)[:, None] + lane
    else:
        offs = index[:, None] * 8 + lane
    # A block's two halves, 16 bytes each, go to one thread: what belongs to a block is computed once, without shuffles.
    words = x_ptr.to(tl.pointer_type(tl.int32)) + offs
    low0, high0 = halves(tl.load(words, mask=inside[:, None], other=0))
    low1, high1 = halves(tl.load(words + 4, mask=inside[:, None], other=0))
    inverse_p = num.reciprocal_of_power_of_two(tl.load(per_tensor_scale_ptr + group))
    a0, zero0 = amax_and_zero(low0, high0)
    a1, zero1 = amax_and_zero(low1, high1)
    finite = zero0 + zero1 == 0.0
    s = num.aligned_block_scale(tl.where(finite, tl.maximum(a0, a1), 0.0), inverse_p, False)
    encode = ((1.0 / s) * inverse_p)[:, None]
    first = tl.where(finite, packed_word(low0, high0, encode), 0)
    second = tl.where(finite, packed_word(low1, high1, encode), 0)
    out = qdata_ptr.to(tl.pointer_type(tl.int32)) + index[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(out, tl.join(first, second), mask=inside[:, None])
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
    ONE_GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    group, tile = group_and_tile(tl.program_id(0), tiles, ONE_GROUP)
    block = tile * TILE + tl.arange(0, TILE)
    inside = block < n_blocks
    half = tl.arange(0, 8)[None, :]
    start = group * group_stride + (block // per_row).to(tl.int64) * row_stride
    start += (block % per_row).to(tl.int64) * 16 * k_stride
    offs = start[:, None] + 2 * half * k_stride
    p = tl.load(per_tensor_scale_ptr + group)
    stored = tl.load(stored_ptr + group)
    source = tl.load(source_ptr + group)
    even = num.widen(tl.load(x_ptr + offs, mask=inside[:, None], other=0.0))
    odd = num.widen(tl.load(x_ptr + offs + k_stride, mask=inside[:, None], other=0.0))
    largest = tl.max(tl.maximum(num.bits(tl.abs(even)), num.bits(tl.abs(odd))), 1)
    finite = largest < 0x7F800000
    a = num.from_bits(tl.where(finite, largest, 0))
    s = num.block_scale_of(a, p, source, RECIPE, x_ptr.dtype.element_ty)
    low, low_sign = num.quotient_of(even, s[:, None], p, stored, RECIPE)
    high, high_sign = num.quotient_of(odd, s[:, None], p, stored, RECIPE)
    byte = num.e2m1_code(low) | (num.e2m1_code(high) << 4) | tl.where(low_sign, 8, 0) | tl.where(high_sign, 128, 0)
    byte = tl.where(finite[:, None], byte, 0)
    out_offs = (group * n_blocks + block)[:, None] * 8 + half
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
    split = swizzled or transposed
    per_tensor_scale, stored, source = (_per_matrix(t, x, split) for t in (per_tensor_scale, stored, source))
    if transposed:
        runs = Blocks(x, x.shape[0], rows * columns, columns, 1, rows * k)
    else:
        runs = blocks_of(x, per_tensor_scale)
    shared = {
        "n_blocks": runs.blocks,
        "per_row": runs.per_row,
        "row_stride": runs.row_stride,
        "group_stride": runs.group_stride,
        "columns": columns,
        "padded_columns": padded_columns,
        "padded_size": padded_rows * padded_columns,
        "SWIZZLED": swizzled,
        "ONE_GROUP": runs.groups == 1,
    }
    p = scale_pointer(per_tensor_scale)
    if x.dtype == torch.bfloat16 and recipe is Recipe.ALIGNED and not transposed:
        programs, tiles = grid_of(runs.groups, runs.blocks, 512)
        _pairs_kernel[(programs,)](
            runs.x, p, qdata, scales, tiles=tiles, **shared, STRIDED=runs.strided, TILE=512, num_warps=4
        )
    else:
        programs, tiles = grid_of(runs.groups, runs.blocks, 64)
        k_stride = rows if transposed else 1
        recipe_number = RECIPES[recipe]
        _kernel[(programs,)](
            runs.x,
            p,
            scale_pointer(stored),
            scale_pointer(source),
            qdata,
            scales,
            tiles=tiles,
            **shared,
            k_stride=k_stride,
            RECIPE=recipe_number,
            TILE=64,
        )
    return qdata, scales.view(torch.float8_e4m3fn)


def _per_matrix(scale: Tensor, x: Tensor, split: bool) -> Tensor:
    """One scale becomes one per matrix of a stack where the kernel has to know the matrices apart."""
    return scale.expand(x.shape[0]) if split and scale.ndim == 0 and x.ndim == 3 else scale
