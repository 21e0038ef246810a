"""The activation side of a compensated GEMM in one launch: ``Q(x)`` and ``Q(m * (x - Q(x)))`` of bf16 rows, decoded.

Recipe.ALIGNED with a dynamic scale p. Then r = x - Q(x) is a bf16 number itself: with s p in [2**f, 2**(f+1)) an
element below s p / 4 is its own residual, and the others are multiples of 2**(f-9) with residuals of at most 8 bits (a
test walks through all of them). So r needs no wider type, the second quantization is like the first, and the 15 bits of
|r| are exact keys for the selection.

Two numbers travel in one int32, a tile of them is [T, 4, 2]: T blocks of 8 words, each in one thread. A row belongs to
one program; where rows are few, several programs share one: each reads all of it for the amax and the ranks, and writes
its own slice.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads_qat.formats import BLOCK_SIZE
from quads_qat.kernels import numerics as num
from quads_qat.kernels import topk
from quads_qat.kernels.groups import group_of_row
from quads_qat.kernels.launch import cdiv, next_power_of_2
from quads_qat.kernels.pairs import HIGH, halves
from quads_qat.kernels.two_steps import first_step, largest_bits, row_scale, second_step

NONE = tl.constexpr(0)  # no second quantization
ALL = tl.constexpr(1)  # every channel
FIXED = tl.constexpr(2)  # a mask [K]
TOKEN = tl.constexpr(3)  # the n largest channels of a row
TOKEN_BLOCKS = tl.constexpr(4)  # the n largest blocks of a row
BLOCK = tl.constexpr(5)  # the n largest channels of a block

L2 = tl.constexpr(0)
L1 = tl.constexpr(1)
MAX = tl.constexpr(2)


DIRECT = tl.constexpr(0)  # each thread writes its blocks, two pieces each
STAGED = tl.constexpr(1)  # threads exchange words first, so that neighbours write neighbours
ORDERED = tl.constexpr(2)  # likewise, and K is in the tensor-core order of ``decode``; K % 64 == 0


# ------------------------------------------------------------------------------------------------------------- memory


@triton.jit
def _load(pointer, start, block, n_blocks):
    """Words [T, 4, 2] of the blocks ``block`` from word ``start`` on, 0 beyond the last block: a block to a thread."""
    inside = (block < n_blocks)[:, None]
    half = pointer + start + block[:, None] * 8 + tl.arange(0, 4)[None, :]
    return tl.join(tl.load(half, mask=inside, other=0), tl.load(half + 4, mask=inside, other=0))


@triton.jit
def _store(pointer, start, block, n_blocks, words, LAYOUT: tl.constexpr):
    """The inverse of ``_load``, see DIRECT, STAGED and ORDERED."""
    inside = (block < n_blocks)[:, None]
    if LAYOUT == STAGED:
        words = tl.reshape(tl.permute(words, (0, 2, 1)), (block.shape[0], 8))
        tl.store(pointer + start + block[:, None] * 8 + tl.arange(0, 8)[None, :], words, mask=inside)
    elif LAYOUT == ORDERED:
        RUNS: tl.constexpr = block.shape[0] // 4
        run = tl.min(tl.reshape(block, (RUNS, 4)), 1) // 4
        offs = start + run[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(pointer + offs, _in_tensor_core_order(words), mask=(run * 4 < n_blocks)[:, None])
    else:
        half = pointer + start + block[:, None] * 8 + tl.arange(0, 4)[None, :]
        first, second = tl.split(words)
        tl.store(half, first, mask=inside)
        tl.store(half + 4, second, mask=inside)


@triton.jit
def _in_tensor_core_order(words):
    """Words [T, 4, 2] -> [T / 4, 32]: number 16 t + 8 i + 4 h + q of 64 at 32 i + 8 q + 2 t + h, see ``decode``."""
    T: tl.constexpr = words.shape[0]
    # numbers q and q + 4 of a half become a pair: words 0 and 2 make q = 0 and 1, words 1 and 3 make 2 and 3
    a, b = tl.split(tl.permute(tl.reshape(words, (T, 2, 2, 2)), (0, 2, 3, 1)))  # [T, which two, i]
    low = (a & 0xFFFF) | (b << 16)
    high = ((a >> 16) & 0xFFFF) | (b & HIGH)
    pairs = tl.permute(tl.join(low, high), (0, 2, 1, 3))  # [T, i, which two, h of q]
    return tl.reshape(tl.permute(tl.reshape(pairs, (T // 4, 4, 2, 4)), (0, 2, 3, 1)), (T // 4, 32))


@triton.jit
def _places():
    """Where in its block the first number of each word lies: [1, 4, 2]."""
    return 2 * tl.arange(0, 4)[None, :, None] + 8 * tl.arange(0, 2)[None, None, :]


# ----------------------------------------------------------------------------------------------------------- selection
# Each returns int32 words with 0xffff where a number is kept.


@triton.jit
def _kept(low, high):
    return tl.where(low, 0xFFFF, 0) | tl.where(high, -65536, 0)


@triton.jit
def _channels_of_row(row, rest, block, n_blocks, top, p, n, KIND: tl.constexpr):
    """The n largest channels of ``row``, for the blocks ``block`` whose words are ``rest``."""
    keys = topk.magnitude_keys(row, top)
    total = n_blocks * 16
    guess = num.bits(448.0 * p) >> 16  # of a finite row |r| <= 448 p
    nth, wanted = topk.nth_magnitude(keys, n, total, guess, KIND)
    end = total
    if wanted < total:
        end = topk.end_of_ties(topk.equal_channels(keys, nth), wanted)
    return topk.kept_channels(topk.magnitude_keys(rest, top), block, nth, end, KIND)


@triton.jit
def joined(a, b, NORM: tl.constexpr):
    """One score of two: their sum, or the larger, NaN before all."""
    if NORM == MAX:
        c = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    else:
        c = a + b
    return c


@triton.jit
def powered(r, NORM: tl.constexpr):
    """What a residual adds to a score."""
    return r * r if NORM == L2 else tl.abs(r)


@triton.jit
def tree(fours, NORM: tl.constexpr):
    """Scores of four neighbours each [T, 4] -> of 16 [T]: the upper half of the fixed binary tree."""
    even, odd = tl.split(tl.reshape(fours, (fours.shape[0], 2, 2)))
    first, second = tl.split(joined(even, odd, NORM))
    return joined(first, second, NORM)


@triton.jit
def _block_keys(words, NORM: tl.constexpr):
    """Keys of the scores of blocks [T]: the fixed binary tree over 16 neighbours."""
    T: tl.constexpr = words.shape[0]
    low, high = halves(words)
    first, second = tl.split(joined(powered(low, NORM), powered(high, NORM), NORM))
    a, b = tl.split(tl.reshape(first, (T, 2, 2)))
    c, d = tl.split(tl.reshape(second, (T, 2, 2)))
    fours = tl.join(joined(a, b, NORM), joined(c, d, NORM))  # [T, which four of its half, half]
    return topk.score_key(tree(tl.reshape(tl.permute(fours, (0, 2, 1)), (T, 4)), NORM))


@triton.jit
def _blocks_of_row(row, rest, block, n_blocks, p, n, NORM: tl.constexpr):
    """The n blocks of ``row`` with the largest scores."""
    keys = _block_keys(row, NORM)
    guess = num.bits(powered(448.0 * p, NORM) * 4.0)
    nth, wanted = topk.nth_score(keys, n, n_blocks, guess)
    end = n_blocks
    if wanted < n_blocks:
        end = topk.end_of_equals(keys == nth, wanted)
    keys = _block_keys(rest, NORM)
    kept = (keys > nth) | ((keys == nth) & (block < end))
    return tl.broadcast_to(tl.where(kept, -1, 0)[:, None, None], rest.shape)


@triton.jit
def _channels_of_block(rest, N: tl.constexpr):
    """The N largest channels of each block."""
    places = 15 - _places()  # equal magnitudes: the lower channel has the larger key
    low = ((rest << 16) & 0x7FFF0000) | places
    high = (rest & 0x7FFF0000) | (places - 1)
    nth = topk.nth_of_16(low, high, N)[:, None, None]
    return _kept(low >= nth, high >= nth)


# -------------------------------------------------------------------------------------------------------------- kernel


@triton.jit(do_not_specialize=["row_quads", "slices", "n", "groups"])
def _rows_kernel(
    x_ptr,
    amax_ptr,
    mask_ptr,
    ends_ptr,
    terms_ptr,
    kept_ptr,
    n_blocks,
    row_quads,
    slices,
    n,
    groups,
    PER_TOKEN: tl.constexpr,
    SELECT: tl.constexpr,
    NORM: tl.constexpr,
    N_OF_16: tl.constexpr,
    KIND: tl.constexpr,
    STORES_FIRST: tl.constexpr,
    STORES_MASK: tl.constexpr,
    SHARED: tl.constexpr,
    LAYOUT: tl.constexpr,
    GROUPS: tl.constexpr,
    ROW: tl.constexpr,
    TILE: tl.constexpr,
):
    pid = tl.program_id(0)
    if SHARED:
        row_index = (pid // slices).to(tl.int64)
        block = (pid % slices) * TILE + tl.arange(0, TILE)
    else:
        row_index = pid.to(tl.int64)
        block = tl.arange(0, TILE)
    start = row_index * (row_quads * 4)
    out_start = row_index * (n_blocks * 8)
    RANKS: tl.constexpr = (SELECT == TOKEN) | (SELECT == TOKEN_BLOCKS)
    x = _load(x_ptr.to(tl.pointer_type(tl.int32)), start, block, n_blocks)
    largest = largest_bits(x)
    if SHARED and (PER_TOKEN or RANKS):
        row = _load(x_ptr.to(tl.pointer_type(tl.int32)), start, tl.arange(0, ROW), n_blocks)
        row_largest = largest_bits(row)
    else:
        row = x
        row_largest = largest
    top = tl.max(row_largest, 0)
    if GROUPS > 0:
        group = group_of_row(row_index, ends_ptr, groups, GROUPS)
        amax_ptr += group
        mask_ptr += group.to(tl.int64) * (n_blocks * 16)
    if PER_TOKEN:
        p = row_scale(row, top)
    else:
        p = num.power_of_two_scale(num.widen(tl.load(amax_ptr)))

    q1, rest = first_step(x, largest, p)
    if STORES_FIRST:
        _store(terms_ptr.to(tl.pointer_type(tl.int32)), out_start, block, n_blocks, q1, LAYOUT)
    if SELECT != NONE:
        if SHARED and RANKS:
            _, row = first_step(row, row_largest, p)
        else:
            row = rest
        if SELECT == TOKEN:
            kept = _channels_of_row(row, rest, block, n_blocks, top, p, n, KIND)
        elif SELECT == TOKEN_BLOCKS:
            kept = _blocks_of_row(row, rest, block, n_blocks, p, n, NORM)
        elif SELECT == BLOCK:
            kept = _channels_of_block(rest, N_OF_16)
        elif SELECT == FIXED:
            bytes_ = _load(mask_ptr.to(tl.pointer_type(tl.int16)), 0, block, n_blocks)
            kept = _kept((bytes_ & 0xFF) != 0, (bytes_ & -256) != 0)
        else:
            kept = tl.full(rest.shape, -1, tl.int32)
        rest = rest & kept
        q2 = second_step(rest, largest_bits(rest), p)
        second = (tl.num_programs(0) // slices).to(tl.int64) * (n_blocks * 8) + out_start
        _store(terms_ptr.to(tl.pointer_type(tl.int32)), second, block, n_blocks, q2, LAYOUT)
        if STORES_MASK:
            bytes_ = ((kept & 1) | ((kept >> 8) & 0x100)).to(tl.int16)
            _store(kept_ptr.to(tl.pointer_type(tl.int16)), out_start, block, n_blocks, bytes_, DIRECT)


# ------------------------------------------------------------------------------------------------------------ launcher

LONGEST_ROW = 32767 // 16 * 16
"""Channels that a program can rank."""

_PROGRAMS = 256  # about two for each of an H200's multiprocessors


@lru_cache
def kind_of_pairs(device: torch.device) -> int:
    """FAST where the device compares pairs of bf16."""
    fast = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return (topk.FAST if fast else topk.PAIRS).value


def configuration(m: int, row: int, select: int) -> tuple[int, int, int]:
    """(blocks a program, warps, layout of stores) for m rows of ``row`` blocks, a power of two; measured on an H200."""
    warps = min(32, max(1, row // 64))
    if select in (TOKEN.value, TOKEN_BLOCKS.value):
        if m > 16:  # many rows hide what a search waits for; few warps exchange less
            return row, warps if m < 512 else min(warps, max(4, row // 128)), STAGED.value
        return max(row // 4, 16), warps, DIRECT.value
    if m > 128:
        return row, warps, STAGED.value
    tile = max(next_power_of_2(m * row // _PROGRAMS), min(64, row))
    return (row, warps, STAGED.value) if tile >= row else (tile, 4, DIRECT.value)


def rows(
    x: Tensor,
    *,
    amax: Tensor | None = None,
    select: int = 0,
    n: int = 0,
    norm: int = 0,
    mask: Tensor | None = None,
    ends: Tensor | None = None,
    terms: Tensor | None = None,
    stores_first: bool = True,
    return_mask: bool = False,
    ordered: bool = False,
    config: tuple[int, int, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``(terms [T, M, K], mask)`` of x [M, K] bf16: one launch.

    Args:
        x: its rows are runs that begin at multiples of 16 bytes.
        amax: [] of the tensor, [G] with ``ends``; None: each row's own.
        select: NONE, ALL, FIXED, TOKEN, TOKEN_BLOCKS or BLOCK.
        n: how many units are selected, fewer than there are.
        norm: L2, L1 or MAX, for TOKEN_BLOCKS.
        mask: [K] bool, [G, K] with ``ends``, contiguous, for FIXED.
        ends: [G] int32, the row after each group's last; None: all rows are one group.
        terms: where to write.
        stores_first: False where terms[0] is there already.
        return_mask: also return what was selected, [M, K] bool.
        ordered: write terms in the tensor-core order of ``decode``; K % 64 == 0.
        config: instead of the measured :func:`configuration`.
    """
    m, k = x.shape
    if terms is None:
        terms = torch.empty(2 if select else 1, m, k, dtype=torch.bfloat16, device=x.device)
    kept = torch.empty(m, k, dtype=torch.bool, device=x.device) if return_mask else None
    if m == 0:
        return terms, kept
    n_blocks = k // BLOCK_SIZE
    row = next_power_of_2(n_blocks)
    tile, warps, layout = config or configuration(m, row, select)
    slices = cdiv(n_blocks, tile)
    _rows_kernel[(m * slices,)](
        x,
        x if amax is None else amax,
        x if mask is None else mask.view(torch.int8),
        x if ends is None else ends,
        terms,
        x if kept is None else kept.view(torch.int8),
        n_blocks,
        x.stride(0) // 8,
        slices,
        n,
        1 if ends is None else len(ends),
        PER_TOKEN=amax is None,
        SELECT=select,
        NORM=norm,
        N_OF_16=n if select == BLOCK.value else 0,
        KIND=kind_of_pairs(x.device),
        STORES_FIRST=stores_first,
        STORES_MASK=return_mask,
        SHARED=slices > 1,
        LAYOUT=ORDERED.value if ordered else layout,
        GROUPS=0 if ends is None else next_power_of_2(len(ends)),
        ROW=row,
        TILE=min(tile, row),
        num_warps=warps,
    )
    return terms, kept
