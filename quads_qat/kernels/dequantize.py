"""``dequantize``: read codes and scales once, write decoded values once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads_qat.config import Recipe
from quads_qat.kernels import numerics as num
from quads_qat.kernels.launch import RECIPES, grid_of, group_and_tile, scale_pointer


@triton.jit
def _signed(code, decode, KEEPS_NEGATIVE_ZERO: tl.constexpr):
    """Codes 0..15 (int32) times their decode scale, as fp32."""
    if KEEPS_NEGATIVE_ZERO:
        # the code's bit 3 to bit 31, bits 0 to 2 to bits 22 to 24: 2**-126 of its signed value
        return num.from_bits((code * 0x10400000) & -2118123520) * 8.507059173023462e37 * decode
    magnitude = code & 7
    value = num.e2m1_magnitude(magnitude) * decode
    return num.from_bits(num.bits(value) | tl.where((code > 7) & (magnitude > 0), -2147483648, 0))


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
    PAIRS: tl.constexpr,
    ONE_GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    group, tile = group_and_tile(tl.program_id(0), tiles, ONE_GROUP)
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
    if PAIRS:  # exact in bf16: the high halves of the fp32 values, two to a word
        pair = ((num.bits(even) >> 16) & 0xFFFF) | (num.bits(odd) & -65536)
        tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + index[:, None] * 8 + half, pair, mask=inside[:, None])
    else:
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
    tile = 128
    programs, tiles = grid_of(groups, blocks, tile)
    _kernel[(programs,)](
        qdata.contiguous(),
        block_scale.contiguous().view(torch.uint8),
        scale_pointer(per_tensor_scale),
        scale_pointer(stored),
        out,
        blocks,
        tiles,
        RECIPE=RECIPES[recipe],
        KEEPS_NEGATIVE_ZERO=not recipe.value.startswith("modelopt"),
        PAIRS=dtype == torch.bfloat16 and recipe is Recipe.ALIGNED,
        ONE_GROUP=groups == 1,
        TILE=tile,
        num_warps=4,
    )
    return out
