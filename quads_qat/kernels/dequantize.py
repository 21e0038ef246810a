"""``dequantize``: read codes and scales once, write decoded values once.

bf16 from Recipe.ALIGNED takes the road of *pairs* (``pairs.py``); everything else takes one fp32 lane an element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads_qat.config import Recipe
from quads_qat.kernels import numerics as num
from quads_qat.kernels.launch import RECIPES, grid_of, group_and_tile, scale_pointer
from quads_qat.kernels.pairs import decoded_words


@triton.jit
def _signed(code, decode, KEEPS_NEGATIVE_ZERO: tl.constexpr):
    """Codes 0..15 (int32) times their decode scale, as fp32."""
    if KEEPS_NEGATIVE_ZERO:
        # the code's bit 3 to bit 31, bits 0 to 2 to bits 22 to 24: 2**-126 of its signed value
        return num.from_bits((code * 0x10400000) & -2118123520) * 8.507059173023462e37 * decode
    magnitude = code & 7
    value = num.e2m1_magnitude(magnitude) * decode
    return num.from_bits(num.bits(value) ^ tl.where((code > 7) & (magnitude > 0), -2147483648, 0))


@triton.jit
def _pairs_kernel(
    qdata_ptr, block_scale_ptr, scale_ptr, out_ptr, n_blocks, tiles, FOLDED: tl.constexpr, TILE: tl.constexpr
):
    """ALIGNED to bf16, where s p and all values are exact: half a block to a thread, two values to a register."""
    group, tile = group_and_tile(tiles, FOLDED)
    half = tile * TILE + tl.arange(0, TILE)
    inside = half < 2 * n_blocks
    index = group * (2 * n_blocks) + half
    word = tl.load(qdata_ptr.to(tl.pointer_type(tl.int32)) + index, mask=inside, other=0)
    s = num.e4m3_value(tl.load(block_scale_ptr + index // 2, mask=inside, other=0).to(tl.int32))
    out = out_ptr.to(tl.pointer_type(tl.int32)) + index[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(out, decoded_words(word, s * tl.load(scale_ptr + group)), mask=inside[:, None])


@triton.jit
def _kernel(
    qdata_ptr,
    block_scale_ptr,
    scale_ptr,
    stored_ptr,
    out_ptr,
    n_blocks,
    tiles,
    RECIPE: tl.constexpr,
    KEEPS_NEGATIVE_ZERO: tl.constexpr,
    FOLDED: tl.constexpr,
    TILE: tl.constexpr,
):
    group, tile = group_and_tile(tiles, FOLDED)
    block = tile * TILE + tl.arange(0, TILE)
    inside = block < n_blocks
    index = group * n_blocks + block
    half = tl.arange(0, 8)[None, :]
    packed = tl.load(qdata_ptr + index[:, None] * 8 + half, mask=inside[:, None], other=0).to(tl.int32)
    s = num.e4m3_value(tl.load(block_scale_ptr + index, mask=inside, other=0).to(tl.int32))
    p = tl.load(scale_ptr + group)
    stored = tl.load(stored_ptr + group)
    decode = num.decode_scale_of(s, p, stored, RECIPE)[:, None]
    even = _signed(packed & 15, decode, KEEPS_NEGATIVE_ZERO)
    odd = _signed(packed >> 4, decode, KEEPS_NEGATIVE_ZERO)
    value = tl.interleave(even, odd)
    offs = index[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + offs, num.round_to(value, out_ptr.dtype.element_ty), mask=inside[:, None])


def dequantize(
    qdata: Tensor, block_scale: Tensor, per_tensor_scale: Tensor, stored: Tensor, *, recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    """Triton twin of ``reference.dequantize``: [..., K] in ``dtype``.

    ``qdata`` [..., K/2], ``block_scale`` [..., K/16] row-major, scales [] | [E] | [..., 1].
    """
    out = torch.empty(*qdata.shape[:-1], 2 * qdata.shape[-1], dtype=dtype, device=qdata.device)
    if out.numel() == 0:
        return out
    groups = max(1, per_tensor_scale.numel())
    blocks = block_scale.numel() // groups
    qdata, block_scale = qdata.contiguous(), block_scale.contiguous().view(torch.uint8)
    given = scale_pointer(per_tensor_scale)
    if dtype == torch.bfloat16 and recipe is Recipe.ALIGNED:
        grid = grid_of(groups, 2 * blocks, 256)
        _pairs_kernel[grid.size](
            qdata, block_scale, given, out, blocks, grid.tiles, FOLDED=grid.folded, TILE=256, num_warps=4
        )
        return out
    grid = grid_of(groups, blocks, 64)
    _kernel[grid.size](
        qdata,
        block_scale,
        given,
        scale_pointer(stored),
        out,
        blocks,
        grid.tiles,
        RECIPE=RECIPES[recipe],
        KEEPS_NEGATIVE_ZERO=not recipe.value.startswith("modelopt"),
        FOLDED=grid.folded,
        TILE=64,
        num_warps=1,
    )
    return out
