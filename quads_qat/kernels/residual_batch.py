"""The mask of scope ``batch``: channels of a whole batch of rows, ranked by one score each.

Scores of l2 and l1 add rows one after the other in chunks of 128, then the chunks, ascending: the order is part of the
contract, so that no number of programs changes a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads_qat.formats import BLOCK_SIZE
from quads_qat.kernels import topk
from quads_qat.kernels.pairs import halves
from quads_qat.kernels.residual import joined, kind_of_pairs, powered, tree

ROW_CHUNK = tl.constexpr(128)


@triton.jit
def _chunk_scores_kernel(x_ptr, q_ptr, out_ptr, rows, words, row_quads, NORM: tl.constexpr, TILE: tl.constexpr):
    """Scores of up to 128 rows: x and Q(x) as words [rows, words] -> fp32 [chunks, 2 words]."""
    word = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = word < words
    chunk = tl.program_id(1)
    low_score = tl.zeros((TILE,), tl.float32)
    high_score = tl.zeros((TILE,), tl.float32)
    first = chunk.to(tl.int64) * ROW_CHUNK
    x_ptr = x_ptr.to(tl.pointer_type(tl.int32)) + first * (row_quads * 4)
    q_ptr = q_ptr.to(tl.pointer_type(tl.int32)) + first * words
    for _ in range(tl.minimum(rows - first, ROW_CHUNK).to(tl.int32)):
        x_low, x_high = halves(tl.load(x_ptr + word, mask=inside, other=0))
        q_low, q_high = halves(tl.load(q_ptr + word, mask=inside, other=0))
        low_score = joined(low_score, powered(x_low - q_low, NORM), NORM)
        high_score = joined(high_score, powered(x_high - q_high, NORM), NORM)
        x_ptr += row_quads * 4
        q_ptr += words
    out = out_ptr + chunk.to(tl.int64) * (2 * words) + 2 * word
    tl.store(out, low_score, mask=inside)
    tl.store(out + 1, high_score, mask=inside)


@triton.jit
def _total_scores_kernel(parts_ptr, out_ptr, chunks, k, NORM: tl.constexpr, TILE: tl.constexpr):
    """fp32 [chunks, k] -> [k], chunks ascending; eight are on their way at a time."""
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = channel < k
    score = tl.zeros((TILE,), tl.float32)
    for start in range(0, chunks, 8):
        for i in tl.static_range(8):
            there = inside & (start + i < chunks)  # beyond the last chunk 0, which changes no score
            part = tl.load(parts_ptr + tl.cast(start + i, tl.int64) * k + channel, mask=there, other=0.0)
            score = joined(score, part, NORM)
    tl.store(out_ptr + channel, score, mask=inside)


@triton.jit
def _nth_of_few(near, far, n, total, low, upper):
    """The n-th largest of the keys >= low, which agree in their upper half; -1 is no key."""
    high = tl.where(upper == 0x7F80, topk.FLOAT32_END, low + 65536)
    keys = tl.join(near, far)
    there = tl.sum(tl.ravel((keys >= low).to(tl.int32)), 0)
    third = (high - low) // 3
    nth, wanted = topk.nth_largest(keys, n, there, low, high, low + third, high - third, topk.WIDE)
    return nth, tl.where(wanted == there, total, wanted)


@triton.jit
def _mask_kernel(
    score_ptr,
    mask_ptr,
    n_blocks,
    n,
    NORM: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    KIND: tl.constexpr,
    T: tl.constexpr,
):
    """The n channels, or whole blocks, of the largest scores [16 n_blocks]: one program."""
    block = tl.arange(0, T)
    places = 4 * tl.arange(0, 4)[None, :, None] + tl.arange(0, 2)[None, None, :]
    channel = block[:, None, None] * 16 + places
    inside = (block < n_blocks)[:, None, None]
    # channels 4i, 4i+1 and 4i+2, 4i+3 of a block: a tile [T, 4, 2] each
    near = tl.load(score_ptr + channel, mask=inside, other=0.0)
    far = tl.load(score_ptr + channel + 2, mask=inside, other=0.0)
    if WHOLE_BLOCKS:
        near_even, near_odd = tl.split(near)
        far_even, far_odd = tl.split(far)
        fours = joined(joined(near_even, near_odd, NORM), joined(far_even, far_odd, NORM), NORM)
        key = topk.score_key(tree(fours, NORM))
        nth, wanted = topk.nth_score(key, n, n_blocks, tl.max(key, 0))
        kept = (key > nth) | ((key == nth) & (block < topk.end_of_equals(key == nth, wanted)))
        near_kept = tl.broadcast_to(kept[:, None, None], near.shape)
        far_kept = near_kept
    else:
        near = topk.score_key(near)
        far = topk.score_key(far)
        total = n_blocks * 16
        # first by their upper halves, in pairs; then those that agree in it
        near_upper = tl.minimum(near >> 16, 0x7F80)
        far_upper = tl.minimum(far >> 16, 0x7F80)
        guess = tl.max(tl.ravel(tl.maximum(near_upper, far_upper)), 0)
        upper, wanted = topk.nth_magnitude(near_upper | (far_upper << 16), n, total, guess, KIND)
        nth = upper << 16
        end = total
        if wanted < total:
            near = tl.where(near_upper > upper, 0x7FFFFFFF, tl.where(near_upper < upper, -1, near))
            far = tl.where(far_upper > upper, 0x7FFFFFFF, tl.where(far_upper < upper, -1, far))
            bounded = tl.where(near == 0x7FFFFFFF, -1, near)
            nth, wanted = _nth_of_few(bounded, tl.where(far == 0x7FFFFFFF, -1, far), wanted, total, nth, upper)
            if wanted < total:
                ties = ((near == nth).to(tl.int32) << places) | ((far == nth).to(tl.int32) << (places + 2))
                ties = tl.where(inside, ties, 0)
                end = topk.end_of_ties(tl.sum(tl.sum(ties, 2), 1), wanted)
        near_kept = (near > nth) | ((near == nth) & (channel < end))
        far_kept = (far > nth) | ((far == nth) & (channel + 2 < end))
    tl.store(mask_ptr + channel, near_kept.to(tl.int8), mask=inside)
    tl.store(mask_ptr + channel + 2, far_kept.to(tl.int8), mask=inside)


def batch_mask(x: Tensor, q1: Tensor, *, n: int, norm: int, whole_blocks: bool) -> Tensor:
    """The mask [K] bool of the n channels, or whole blocks, of x - q1 [M, K] bf16 with the largest scores; M > 0."""
    m, k = x.shape
    chunks = triton.cdiv(m, ROW_CHUNK.value)
    score = torch.empty(chunks, k, dtype=torch.float32, device=x.device)
    words = k // 2
    tile = 128
    _chunk_scores_kernel[(triton.cdiv(words, tile), chunks)](
        x, q1, score, m, words, x.stride(0) // 8, NORM=norm, TILE=tile, num_warps=4, enable_fp_fusion=False
    )
    if chunks > 1:
        total = torch.empty(k, dtype=torch.float32, device=x.device)
        _total_scores_kernel[(triton.cdiv(k, 128),)](score, total, chunks, k, NORM=norm, TILE=128, num_warps=4)
        score = total
    mask = torch.empty(k, dtype=torch.bool, device=x.device)
    n_blocks = k // BLOCK_SIZE
    t = triton.next_power_of_2(n_blocks)
    warps = min(32, max(1, t // 32))
    _mask_kernel[(1,)](
        score,
        mask.view(torch.int8),
        n_blocks,
        n,
        NORM=norm,
        WHOLE_BLOCKS=whole_blocks,
        KIND=kind_of_pairs(x.device),
        T=t,
        num_warps=warps,
    )
    return mask
