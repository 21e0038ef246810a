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
    cdiv,
    first_elements,
    grid_of,
    group_and_tile,
    is_transposed_stack,
    scale_pointer,
)
from quads_qat.kernels.pairs import amax_of_words, four_words, packed_word


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
def _load_scale(scale_ptr, p_ptr, index, tile, FROM_AMAX: tl.constexpr):
    """The per-tensor scale number ``index``; made from an amax, it is also stored, by a group's first program."""
    p = num.widen(tl.load(scale_ptr + index))
    if FROM_AMAX:
        p = num.power_of_two_scale(p)
        tl.store(p_ptr + index, p, mask=tile == 0)
    return p


@triton.jit
def _pairs_kernel(
    x_ptr,
    per_tensor_scale_ptr,
    p_ptr,
    qdata_ptr,
    scale_ptr,
    scale_stride,
    tiles,
    n_blocks,
    per_row,
    row_stride,
    group_stride,
    columns,
    padded_columns,
    padded_size,
    FROM_AMAX: tl.constexpr,
    STRIDED: tl.constexpr,
    SWIZZLED: tl.constexpr,
    FOLDED: tl.constexpr,
    TILE: tl.constexpr,
):
    group, tile = group_and_tile(tiles, FOLDED)
    block = tile * TILE + tl.arange(0, TILE)
    inside = block < n_blocks
    index = group * n_blocks + block
    # A block's two halves, 16 bytes each, go to one thread: what belongs to a block is computed once, without shuffles.
    start = first_elements(block, group, n_blocks, per_row, row_stride, group_stride, STRIDED) // 2
    words = x_ptr.to(tl.pointer_type(tl.int32)) + start[:, None] + tl.arange(0, 4)[None, :]
    first = four_words(tl.load(words, mask=inside[:, None], other=0))
    second = four_words(tl.load(words + 4, mask=inside[:, None], other=0))
    a, finite = amax_of_words(first, second)
    p = _load_scale(per_tensor_scale_ptr, p_ptr, group * scale_stride, tile, FROM_AMAX)
    inverse_p = num.reciprocal_of_power_of_two(p)
    s = num.aligned_block_scale(a, inverse_p, False)
    encode = (1.0 / s) * inverse_p
    codes = tl.join(packed_word(first, encode), packed_word(second, encode))
    out = qdata_ptr.to(tl.pointer_type(tl.int32)) + index[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(out, tl.where(finite[:, None], codes, 0), mask=inside[:, None])
    byte = tl.where(finite, num.e4m3_byte(s), 0x7F)
    _store_scale(scale_ptr, byte, group, block, n_blocks, inside, columns, padded_columns, padded_size, SWIZZLED)


@triton.jit
def _kernel(
    x_ptr,
    per_tensor_scale_ptr,
    stored_ptr,
    source_ptr,
    p_ptr,
    qdata_ptr,
    scale_ptr,
    scale_stride,
    tiles,
    n_blocks,
    per_row,
    row_stride,
    group_stride,
    columns,
    padded_columns,
    padded_size,
    k_stride,
    RECIPE: tl.constexpr,
    FROM_AMAX: tl.constexpr,
    SWIZZLED: tl.constexpr,
    FOLDED: tl.constexpr,
    TILE: tl.constexpr,
):
    group, tile = group_and_tile(tiles, FOLDED)
    block = tile * TILE + tl.arange(0, TILE)
    inside = block < n_blocks
    half = tl.arange(0, 8)[None, :]
    start = group * group_stride + (block // per_row).to(tl.int64) * row_stride
    start += (block % per_row).to(tl.int64) * 16 * k_stride
    offs = start[:, None] + 2 * half * k_stride
    p = _load_scale(per_tensor_scale_ptr, p_ptr, group * scale_stride, tile, FROM_AMAX)
    if FROM_AMAX:
        stored = p
        source = p
    else:
        stored = tl.load(stored_ptr + group * scale_stride)
        source = tl.load(source_ptr + group * scale_stride)
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
    x: Tensor,
    scale: Tensor,
    stored: Tensor | None = None,
    source: Tensor | None = None,
    *,
    recipe: Recipe,
    from_amax: bool = False,
    swizzled: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Triton twin of ``reference.quantize``: ``(qdata, block_scale, per_tensor_scale)``.

    Args:
        x: [..., K] fp32, bf16 or fp16; a transposed stack ([E, K, N].mT) is read without a copy.
        scale: per-tensor scales, float32 [] | [E] | [..., 1]; with ``from_amax`` (ALIGNED only) the amaxes they come
            from, in any dtype.
        stored: as the recipe stores the scale, same shape; None: ``scale``.
        source: what block scales are made from, same shape; None: ``scale``.
        recipe: the arithmetic.
        from_amax: derive the scale in the kernel, so that amax and quantize are two launches in all.
        swizzled: write scales in the tensor-core order, padded to [.., 128 m, 4 n]; needs a scale [] or [E].

    Returns:
        qdata [..., K/2] uint8, block_scale float8_e4m3fn, [..., K/16] or flat per matrix, and the float32 scales.
    """
    k, columns = x.shape[-1], x.shape[-1] // 16
    qdata = torch.empty(*x.shape[:-1], k // 2, dtype=torch.uint8, device=x.device)
    rows = x.shape[-2] if x.ndim > 1 else 1
    padded_columns = cdiv(columns, 4) * 4
    padded_size = cdiv(rows, 128) * 128 * padded_columns
    if swizzled:
        lead = x.shape[:-2] if x.ndim > 1 else ()
        scales = torch.zeros(*lead, padded_size, dtype=torch.uint8, device=x.device)
    else:
        scales = torch.empty(*x.shape[:-1], columns, dtype=torch.uint8, device=x.device)
    p = torch.empty(scale.shape, dtype=torch.float32, device=x.device) if from_amax else scale
    if scale.numel() == 0 or (x.numel() == 0 and not from_amax):
        return qdata, scales.view(torch.float8_e4m3fn), p
    transposed = is_transposed_stack(x, scale)
    if transposed:
        runs = Blocks(x, x.shape[0], rows * columns, columns, 1, rows * k)
    elif swizzled and x.ndim == 3:  # the kernel has to know the matrices of a stack apart
        runs = blocks_of(x, scale.expand(x.shape[0]))
    else:
        runs = blocks_of(x, scale)
    given, scale_stride = scale_pointer(scale), 0 if scale.numel() == 1 else 1
    shape = (runs.blocks, runs.per_row, runs.row_stride, runs.group_stride, columns, padded_columns, padded_size)
    if x.dtype == torch.bfloat16 and recipe is Recipe.ALIGNED and not transposed:
        grid = grid_of(runs.groups, runs.blocks, 128)
        _pairs_kernel[grid.size](
            runs.x,
            given,
            p,
            qdata,
            scales,
            scale_stride,
            grid.tiles,
            *shape,
            FROM_AMAX=from_amax,
            STRIDED=runs.strided,
            SWIZZLED=swizzled,
            FOLDED=grid.folded,
            TILE=128,
            num_warps=2,
        )
    else:
        grid = grid_of(runs.groups, runs.blocks, 64)
        _kernel[grid.size](
            runs.x,
            given,
            given if stored is None else scale_pointer(stored),
            given if source is None else scale_pointer(source),
            p,
            qdata,
            scales,
            scale_stride,
            grid.tiles,
            *shape,
            k_stride=rows if transposed else 1,
            RECIPE=RECIPES[recipe],
            FROM_AMAX=from_amax,
            SWIZZLED=swizzled,
            FOLDED=grid.folded,
            TILE=64,
        )
    return qdata, scales.view(torch.float8_e4m3fn), p
