"""``fake_quantize``: read x once, write the decoded values once.

bf16 with Recipe.ALIGNED takes the road of *pairs* (``pairs.py``): two bf16 numbers travel in one int32. Everything else
takes one fp32 lane an element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads_qat.config import Recipe
from quads_qat.kernels import numerics as num
from quads_qat.kernels.launch import (
    RECIPES,
    blocks_of,
    cdiv,
    first_elements,
    grid_of,
    group_and_tile,
    is_transposed_stack,
    scale_pointer,
)
from quads_qat.kernels.pairs import block_scale_of_pairs, decoded_pairs, halves


@triton.jit
def _pairs_kernel(
    x_ptr,
    scale_ptr,
    out_ptr,
    n_blocks,
    tiles,
    per_row,
    row_stride,
    group_stride,
    FROM_AMAX: tl.constexpr,
    STRIDED: tl.constexpr,
    FOLDED: tl.constexpr,
    TILE: tl.constexpr,
):
    group, tile = group_and_tile(tiles, FOLDED)
    block = tile * TILE + tl.arange(0, TILE)
    inside = block < n_blocks
    lane = tl.arange(0, 8)[None, :]
    out_offs = (group * n_blocks + block)[:, None] * 8 + lane
    offs = (first_elements(block, group, n_blocks, per_row, row_stride, group_stride, STRIDED) // 2)[:, None] + lane
    x = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + offs, mask=inside[:, None], other=0)
    p = num.widen(tl.load(scale_ptr + group))
    if FROM_AMAX:
        p = num.power_of_two_scale(p)
    inverse_p = num.reciprocal_of_power_of_two(p)
    low, high = halves(x)
    s, finite = block_scale_of_pairs(low, high, inverse_p)
    out = decoded_pairs(low, high, s, finite, p, inverse_p)
    tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + out_offs, out, mask=inside[:, None])


@triton.jit
def _kernel(
    x_ptr,
    scale_ptr,
    stored_ptr,
    source_ptr,
    out_ptr,
    n_blocks,
    tiles,
    per_row,
    row_stride,
    group_stride,
    RECIPE: tl.constexpr,
    FROM_AMAX: tl.constexpr,
    STRIDED: tl.constexpr,
    KEEPS_NEGATIVE_ZERO: tl.constexpr,
    FOLDED: tl.constexpr,
    TILE: tl.constexpr,
):
    group, tile = group_and_tile(tiles, FOLDED)
    block = tile * TILE + tl.arange(0, TILE)
    inside = (block < n_blocks)[:, None]
    lane = tl.arange(0, 16)[None, :]
    out_offs = (group * n_blocks + block)[:, None] * 16 + lane
    offs = first_elements(block, group, n_blocks, per_row, row_stride, group_stride, STRIDED)[:, None] + lane
    x = num.widen(tl.load(x_ptr + offs, mask=inside, other=0.0))
    p = num.widen(tl.load(scale_ptr + group))
    if FROM_AMAX:
        p = num.power_of_two_scale(p)
        stored = p
        source = p
    else:
        stored = tl.load(stored_ptr + group)
        source = tl.load(source_ptr + group)
    value = decoded_block(x, p, stored, source, RECIPE, x_ptr.dtype.element_ty, KEEPS_NEGATIVE_ZERO)
    tl.store(out_ptr + out_offs, num.round_to(value, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def decoded_block(
    x,
    p,
    stored,
    source,
    RECIPE: tl.constexpr,
    DTYPE: tl.constexpr,
    KEEPS_NEGATIVE_ZERO: tl.constexpr,
    AXIS: tl.constexpr = 1,
):
    """fp32 ``x``, 16 elements of a block along AXIS -> its decoded values, NaN where the block is not finite."""
    magnitude = tl.abs(x)
    a = tl.max(magnitude, AXIS)
    finite = tl.max(num.bits(magnitude), AXIS) < 0x7F800000
    a = tl.where(finite, a, 0.0)
    s = num.block_scale_of(a, p, source, RECIPE, DTYPE)
    decode = tl.expand_dims(num.decode_scale_of(s, p, stored, RECIPE), AXIS)
    y, negative = num.quotient_of(x, tl.expand_dims(s, AXIS), p, stored, RECIPE)
    value = num.e2m1_value(y) * decode
    sign = negative if KEEPS_NEGATIVE_ZERO else negative & (y > 0.25)
    value = num.from_bits(num.bits(value) | tl.where(sign, -2147483648, 0))
    return tl.where(tl.expand_dims(finite, AXIS), value, float("nan"))


@triton.jit
def _transposed_kernel(
    x_ptr,
    scale_ptr,
    stored_ptr,
    source_ptr,
    out_ptr,
    k,
    n,
    blocks_k,
    tiles_n,
    RECIPE: tl.constexpr,
    FROM_AMAX: tl.constexpr,
    PER_EXPERT: tl.constexpr,
    KEEPS_NEGATIVE_ZERO: tl.constexpr,
    TILE: tl.constexpr,
):
    pid = tl.program_id(0)
    tile = pid % tiles_n
    block = (pid // tiles_n) % blocks_k
    expert = pid // (tiles_n * blocks_k)
    column = tile * TILE + tl.arange(0, TILE)[None, :]
    row = block * 16 + tl.arange(0, 16)[:, None]
    offs = expert.to(tl.int64) * k * n + row.to(tl.int64) * n + column
    inside = column < n
    x = num.widen(tl.load(x_ptr + offs, mask=inside, other=0.0))
    index = expert if PER_EXPERT else 0
    p = num.widen(tl.load(scale_ptr + index))
    if FROM_AMAX:
        p = num.power_of_two_scale(p)
        stored = p
        source = p
    else:
        stored = tl.load(stored_ptr + index)
        source = tl.load(source_ptr + index)
    value = decoded_block(x, p, stored, source, RECIPE, x_ptr.dtype.element_ty, KEEPS_NEGATIVE_ZERO, 0)
    tl.store(out_ptr + offs, num.round_to(value, out_ptr.dtype.element_ty), mask=inside)


def fake_quantize(
    x: Tensor, scale: Tensor, stored: Tensor, source: Tensor, *, from_amax: bool, recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    """Triton twin of ``reference.fake_quantize``.

    Args:
        x: [..., K] fp32, bf16 or fp16; a transposed stack ([E, K, N].mT) is read and written without a copy.
        scale: per-tensor scales [] | [E] | [..., 1]; with ``from_amax`` (ALIGNED only) the amaxes they come from.
        stored: as the recipe stores the scale, same shape; ignored with ``from_amax``.
        source: what block scales are made from, same shape; ignored with ``from_amax``.
        from_amax: derive p in the kernel, so that amax and fake_quantize are two launches in all.
        recipe: the arithmetic.
        dtype: of the result.

    Returns:
        [..., K] in ``dtype``, laid out like ``x``.
    """
    if is_transposed_stack(x, scale):
        return _fake_quantize_transposed(x, scale, stored, source, from_amax=from_amax, recipe=recipe, dtype=dtype)
    runs = blocks_of(x, scale)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel() == 0:
        return out
    if x.dtype == dtype == torch.bfloat16 and recipe is Recipe.ALIGNED:
        tile = 128
        grid = grid_of(runs.groups, runs.blocks, tile)
        _pairs_kernel[grid.size](
            runs.x,
            scale_pointer(scale),
            out,
            runs.blocks,
            grid.tiles,
            runs.per_row,
            runs.row_stride,
            runs.group_stride,
            FROM_AMAX=from_amax,
            STRIDED=runs.strided,
            FOLDED=grid.folded,
            TILE=tile,
            num_warps=2,
        )
        return out
    tile = 64
    grid = grid_of(runs.groups, runs.blocks, tile)
    _kernel[grid.size](
        runs.x,
        scale_pointer(scale),
        scale_pointer(stored),
        scale_pointer(source),
        out,
        runs.blocks,
        grid.tiles,
        runs.per_row,
        runs.row_stride,
        runs.group_stride,
        RECIPE=RECIPES[recipe],
        FROM_AMAX=from_amax,
        STRIDED=runs.strided,
        KEEPS_NEGATIVE_ZERO=not recipe.value.startswith("modelopt"),
        FOLDED=grid.folded,
        TILE=tile,
    )
    return out


def _fake_quantize_transposed(
    x: Tensor, scale: Tensor, stored: Tensor, source: Tensor, *, from_amax: bool, recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    experts, n, k = x.shape
    out = torch.empty(experts, k, n, dtype=dtype, device=x.device)
    if x.numel() == 0:
        return out.mT
    tile = 128
    blocks_k, tiles_n = k // 16, cdiv(n, tile)
    _transposed_kernel[(experts * blocks_k * tiles_n,)](
        x,
        scale_pointer(scale),
        scale_pointer(stored),
        scale_pointer(source),
        out,
        k,
        n,
        blocks_k,
        tiles_n,
        RECIPE=RECIPES[recipe],
        FROM_AMAX=from_amax,
        PER_EXPERT=scale.ndim == 1,
        KEEPS_NEGATIVE_ZERO=not recipe.value.startswith("modelopt"),
        TILE=tile,
    )
    return out.mT
