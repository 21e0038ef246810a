"""The mask of scope ``batch``: channels of a whole batch of rows, or of each expert's, ranked by one score each.

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
from quads_qat.kernels.groups import group_of_tile, tiles_of_groups
from quads_qat.kernels.launch import cdiv, next_power_of_2
from quads_qat.kernels.pairs import halves
from quads_qat.kernels.residual import joined, kind_of_pairs, powered, tree

ROW_CHUNK = tl.constexpr(128)


@triton.jit
def _chunk_scores_kernel(
    x_ptr,
    q_ptr,
    ends_ptr,
    out_ptr,
    rows,
    words,
    row_quads,
    groups,
    NORM: tl.constexpr,
    WHOLE_BLOCKS: tl.constexpr,
    IS_RESIDUAL: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Scores of up to 128 rows of one group -> fp32 [chunks, 2 words].

    The residual is x - Q(x), words [rows, words] both, or with IS_RESIDUAL x is the residual itself, fp32.
    """
    word = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = word < words
    chunk = tl.program_id(1)
    if GROUPS > 0:
        group, first, end = group_of_tile(chunk, ends_ptr, groups, GROUPS, ROW_CHUNK)
        start = tl.load(ends_ptr + group - 1, mask=(group > 0) & (group < groups), other=0)
        alone = end - start == 1
        count = end - first  # 0 beyond the last chunk
        first = first.to(tl.int64)
    else:
        first = chunk.to(tl.int64) * ROW_CHUNK
        count = rows - first
        alone = rows == 1
    # its channels rank by their magnitudes, as in scope token
    alone = alone & (not WHOLE_BLOCKS)
    low_score = tl.zeros((TILE,), tl.float32)
    high_score = tl.zeros((TILE,), tl.float32)
    if IS_RESIDUAL:
        x_ptr = x_ptr + first * (2 * words)
    else:
        x_ptr = x_ptr.to(tl.pointer_type(tl.int32)) + first * (row_quads * 4)
        q_ptr = q_ptr.to(tl.pointer_type(tl.int32)) + first * words
    for _ in range(tl.minimum(count, ROW_CHUNK).to(tl.int32)):
        if IS_RESIDUAL:
            low = tl.load(x_ptr + 2 * word, mask=inside, other=0.0)
            high = tl.load(x_ptr + 2 * word + 1, mask=inside, other=0.0)
            x_ptr += 2 * words
        else:
            x_low, x_high = halves(tl.load(x_ptr + word, mask=inside, other=0))
            q_low, q_high = halves(tl.load(q_ptr + word, mask=inside, other=0))
            low = x_low - q_low
            high = x_high - q_high
            x_ptr += row_quads * 4
            q_ptr += words
        low_score = joined(low_score, tl.where(alone, tl.abs(low), powered(low, NORM)), NORM)
        high_score = joined(high_score, tl.where(alone, tl.abs(high), powered(high, NORM)), NORM)
    out = out_ptr + chunk.to(tl.int64) * (2 * words) + 2 * word
    tl.store(out, low_score, mask=inside)
    tl.store(out + 1, high_score, mask=inside)


@triton.jit
def _total_scores_kernel(
    parts_ptr, ends_ptr, out_ptr, chunks, k, groups, NORM: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr
):
    """fp32 [chunks, k] -> [groups, k], chunks ascending; eight are on their way at a time."""
    channel = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = channel < k
    this = tl.program_id(1)
    first = 0
    if GROUPS > 0:
        group, _, _, tiles, upto = tiles_of_groups(ends_ptr, groups, GROUPS, ROW_CHUNK)
        chunks = tl.sum(tl.where(group == this, tiles, 0), 0)
        first = tl.sum(tl.where(group == this, upto - tiles, 0), 0)
    score = tl.zeros((TILE,), tl.float32)
    for start in range(0, chunks, 8):
        for i in tl.static_range(8):
            there = inside & (start + i < chunks)  # beyond the last chunk 0, which changes no score
            offs = tl.cast(first + start + i, tl.int64) * k + channel
            score = joined(score, tl.load(parts_ptr + offs, mask=there, other=0.0), NORM)
    tl.store(out_ptr + tl.cast(this, tl.int64) * k + channel, score, mask=inside)


@triton.jit
def _nth_and_end(low, high, places, inside, n, total, KIND: tl.constexpr):
    """Keys of channels 0 to 7 and 8 to 15 of blocks -> the keys, the n-th largest, and where its kept equals end.

    The search looks at the upper halves of keys first, in pairs, and then at the keys that agree in it: from then on
    keys above them are the largest integer, those below -1.
    """
    low_upper = tl.minimum(low >> 16, 0x7F80)
    high_upper = tl.minimum(high >> 16, 0x7F80)
    pairs = low_upper | (high_upper << 16)
    guess = tl.max(tl.ravel(tl.maximum(low_upper, high_upper)), 0)
    upper, wanted = topk.nth_magnitude(pairs, n, total, guess, KIND)
    nth = upper << 16
    end = total
    if wanted < total:
        low_few = tl.where((low_upper == upper) & inside[:, :, None], low, -1)
        high_few = tl.where((high_upper == upper) & inside[:, :, None], high, -1)
        low = tl.where(low_upper > upper, 0x7FFFFFFF, low_few)
        high = tl.where(high_upper > upper, 0x7FFFFFFF, high_few)
        keys = tl.join(low_few, high_few)
        there = tl.sum(tl.ravel((keys >= nth).to(tl.int32)), 0)
        beyond = tl.where(upper == 0x7F80, topk.FLOAT32_END, nth + 65536)
        third = (beyond - nth) // 3
        nth, rest = topk.nth_largest(keys, wanted, there, nth, beyond, nth + third, beyond - third, topk.WIDE)
        if rest < there:
            ties = ((low == nth).to(tl.int32) << places) | ((high == nth).to(tl.int32) << (places + 8))
            end = topk.end_of_ties(tl.sum(tl.sum(ties, 2), 1), rest)
    return low, high, nth, end


@triton.jit(do_not_specialize=["n"])
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
    """The n channels, or whole blocks, of the largest scores [groups, 16 n_blocks]: a program for each group."""
    block = tl.arange(0, T)
    group = tl.program_id(0).to(tl.int64)
    score_ptr += group * n_blocks * 16
    mask_ptr += group * n_blocks * 16
    # four channels each: all 16 of a block in one thread
    quad = block[:, None] * 16 + tl.arange(0, 4)[None, :]
    inside = (block < n_blocks)[:, None]
    q0 = tl.load(score_ptr + quad, mask=inside, other=0.0)
    q1 = tl.load(score_ptr + quad + 4, mask=inside, other=0.0)
    q2 = tl.load(score_ptr + quad + 8, mask=inside, other=0.0)
    q3 = tl.load(score_ptr + quad + 12, mask=inside, other=0.0)
    if WHOLE_BLOCKS:
        q0 = joined(tree(q0, NORM), tree(q1, NORM), NORM)
        q2 = joined(tree(q2, NORM), tree(q3, NORM), NORM)
        key = topk.score_key(joined(q0, q2, NORM))
        nth, wanted = topk.nth_score(key, n, n_blocks, tl.max(key, 0))
        kept = (key > nth) | ((key == nth) & (block < topk.end_of_equals(key == nth, wanted)))
        low = tl.broadcast_to(kept[:, None, None], (T, 4, 2))
        high = low
    else:
        places = tl.arange(0, 4)[None, :, None] + 4 * tl.arange(0, 2)[None, None, :]
        low = topk.score_key(tl.join(q0, q1))  # channels 0 to 7 of a block
        high = topk.score_key(tl.join(q2, q3))  # 8 to 15
        low, high, nth, end = _nth_and_end(low, high, places, inside, n, n_blocks * 16, KIND)
        channel = block[:, None, None] * 16 + places
        low = (low > nth) | ((low == nth) & (channel < end))
        high = (high > nth) | ((high == nth) & (channel + 8 < end))
    q0, q1 = tl.split(low.to(tl.int8))
    q2, q3 = tl.split(high.to(tl.int8))
    tl.store(mask_ptr + quad, q0, mask=inside)
    tl.store(mask_ptr + quad + 4, q1, mask=inside)
    tl.store(mask_ptr + quad + 8, q2, mask=inside)
    tl.store(mask_ptr + quad + 12, q3, mask=inside)


def batch_mask(
    x: Tensor, q1: Tensor | None, ends: Tensor | None = None, *, n: int, norm: int, whole_blocks: bool
) -> Tensor:
    """The n channels, or whole blocks, with the largest scores in all rows, or in those of each group.

    Args:
        x: [M, K] bf16 rows of any stride, M > 0; without ``q1`` fp32, contiguous.
        q1: Q(x) [M, K] bf16, contiguous; None: x is the residual itself.
        ends: [G] int32, the row after each group's last; None: all rows are one group.
        n: how many units, fewer than there are.
        norm: L2, L1 or MAX.
        whole_blocks: units are blocks.

    Returns:
        [K] bool, or [G, K] with ``ends``.
    """
    m, k = x.shape
    groups = 1 if ends is None else len(ends)
    used = min(groups, m)
    chunks = used + (m - used) // ROW_CHUNK.value  # every group with rows has a chunk, and one more when it is full
    score = torch.empty(chunks, k, dtype=torch.float32, device=x.device)
    words = k // 2
    tile = 128
    grouping = {"GROUPS": 0 if ends is None else next_power_of_2(groups)}
    _chunk_scores_kernel[(cdiv(words, tile), chunks)](
        x,
        x if q1 is None else q1,
        x if ends is None else ends,
        score,
        m,
        words,
        x.stride(0) // 8,
        groups,
        NORM=norm,
        WHOLE_BLOCKS=whole_blocks,
        IS_RESIDUAL=q1 is None,
        **grouping,
        TILE=tile,
        num_warps=4,
        enable_fp_fusion=False,
    )
    if chunks > 1 or ends is not None:
        total = torch.empty(groups, k, dtype=torch.float32, device=x.device)
        _total_scores_kernel[(cdiv(k, 128), groups)](
            score, x if ends is None else ends, total, chunks, k, groups, NORM=norm, **grouping, TILE=128, num_warps=4
        )
        score = total
    mask = torch.empty((k,) if ends is None else (groups, k), dtype=torch.bool, device=x.device)
    n_blocks = k // BLOCK_SIZE
    t = next_power_of_2(n_blocks)
    warps = min(32, max(1, t // 32))
    _mask_kernel[(groups,)](
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
