"""Two GEMM kernels over packed weights, dense or grouped by experts, with one or two activation terms.

Weights are the *left* operand, y.T = W x.T: they come from registers, and one row of x costs eight columns of a
tensor-core instruction instead of sixteen. A tile of W is decoded once and multiplied with both terms.

*narrow*, for few rows: each warp takes a slice of every step of K (a 3-D dot, one slice an entry of its batch); the
slices are summed at the end, in order, inside the program.
*wide*, for more rows: ``wgmma`` on activations in tensor-core order; programs that share a tile of y split K among
them, leave their parts in a workspace, and the last one to arrive sums all of them in the order of K.

Both sum in a fixed order: the bits of a row depend on the configuration, never on timing or on the other rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quads_qat.kernels import numerics as num
from quads_qat.kernels.decode import (
    TILE_SCALE,
    narrow_activations,
    narrow_vector,
    narrow_weights,
    prefetch,
    stride_between,
    wide_weights,
)
from quads_qat.kernels.groups import group_of_row, group_of_tile


@triton.jit
def _as(x, DTYPE: tl.constexpr):
    """bf16 activations as the operand type: the interpreter's dot wants fp32."""
    if tl.float32 == DTYPE:
        x = num.widen(x)
    return x


@triton.jit
def _finished(acc, ASSEMBLY: tl.constexpr):
    """``acc``, of a ``wgmma`` that is over: the next decoded weights go into the registers that it reads.

    Triton itself leaves it in flight then (github.com/triton-lang/triton/issues/9433).
    """
    if ASSEMBLY:
        acc = tl.inline_asm_elementwise("", "=f,0", [acc], tl.float32, False, 1)
    return acc


@triton.jit
def _store_tile(y_ptr, tile, row, column, mask, n, scale, bias_ptr, BIAS: tl.constexpr):
    """Scale a tile [N, M], add the bias in fp32, round once, store it into y [M, N]."""
    tile = tile * scale
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=column < n, other=0.0)
        tile += num.widen(bias)[:, None]
    offs = row.to(tl.int64)[None, :] * n + column[:, None]
    tl.store(y_ptr + offs, num.round_to(tile, y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["m", "groups"])
def narrow_kernel(
    x_ptr,
    second_ptr,
    words_ptr,
    block_scale_ptr,
    per_tensor_scale_ptr,
    row_scale_ptr,
    bias_ptr,
    ends_ptr,
    y_ptr,
    m,
    n,
    blocks,
    groups,
    row_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLICES: tl.constexpr,
    STAGES: tl.constexpr,
    TERMS: tl.constexpr,
    ONE_ROW: tl.constexpr,
    EVEN: tl.constexpr,
    RUNS: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALE_PER_GROUP: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """ROWS of W, all of K: SLICES warps, each BLOCKS blocks a step. COLUMNS = TERMS * rows of x, term after term.

    ONE_ROW: one row of one term fills all columns; by groups, no search for the tiles before it. RUNS: of 64, fill K.
    """
    HALF: tl.constexpr = COLUMNS // TERMS
    if RUNS:
        blocks = blocks // 4 * 4  # is itself; the compiler sees that rows can be copied by words
    term_stride = stride_between(x_ptr, second_ptr)
    STEP: tl.constexpr = SLICES * BLOCKS
    weight_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = 0
    end = m
    if GROUPS > 0:
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        if ONE_ROW:
            first = tl.program_id(1)
            end = first + 1
            group = group_of_row(first, ends_ptr, groups, GROUPS)
            x_ptr += first.to(tl.int64) * row_stride
        else:
            group, first, end = group_of_tile(tl.program_id(1), ends_ptr, groups, GROUPS, HALF)
        if group >= groups:
            return
        start = group.to(tl.int64) * n * blocks
        words_ptr += start * 2
        block_scale_ptr += start
        if SCALE_PER_GROUP:
            per_tensor_scale_ptr += group
        if BIAS:
            bias_ptr += group * n
    elif PDL:
        first_row = tl.minimum(weight_row, n - 1).to(tl.int64)[:, None]
        line = tl.minimum(tl.arange(0, (STEP + 15) // 16) * 32, 2 * blocks - 1)[None, :]
        prefetch(words_ptr + first_row * (2 * blocks) + line)
        prefetch(block_scale_ptr + first_row * blocks)
        gdc_wait()
        gdc_launch_dependents()

    row = tl.arange(0, ROWS)[None, :, None] + tl.program_id(0) * ROWS
    block = tl.arange(0, SLICES)[:, None, None] * BLOCKS
    scale_column = block + tl.arange(0, BLOCKS)[None, None, :]
    word_column = 2 * block + tl.arange(0, 2 * BLOCKS)[None, None, :]
    scale_offs = row * blocks + scale_column
    word_offs = row * (2 * blocks) + word_column
    column = tl.arange(0, COLUMNS)
    x_row = first + column % HALF
    x_start = (column // HALF).to(tl.int64) * term_stride + x_row.to(tl.int64) * row_stride
    channel = 16 * tl.arange(0, SLICES)[:, None, None] * BLOCKS + tl.arange(0, 16 * BLOCKS)[None, None, :]
    vector = 16 * tl.arange(0, SLICES)[:, None] * BLOCKS + tl.arange(0, 16 * BLOCKS)[None, :]
    acc = tl.zeros((SLICES, ROWS, COLUMNS), tl.float32)
    for t in tl.range(0, blocks, STEP, num_stages=STAGES):
        if EVEN:
            words = tl.load(words_ptr + 2 * t + word_offs)
            scale = tl.load(block_scale_ptr + t + scale_offs)
        else:
            words = tl.load(words_ptr + 2 * t + word_offs, (row < n) & (2 * t + word_column < 2 * blocks), 0)
            scale = tl.load(block_scale_ptr + t + scale_offs, (row < n) & (t + scale_column < blocks), 0)
        w = narrow_weights(tl.reshape(words, (SLICES, ROWS, BLOCKS, 2)), scale, ASSEMBLY, DTYPE)
        if ONE_ROW:
            mask = (16 * t + vector < 16 * blocks) if not EVEN else (vector >= 0)
            x = narrow_vector(tl.load(x_ptr + 16 * t + vector, mask, 0.0), BLOCKS)
            x = tl.broadcast_to(x[:, :, None], (SLICES, 16 * BLOCKS, COLUMNS))
        else:
            mask = (x_row < end)[None, :, None] & ((16 * t + channel < 16 * blocks) if not EVEN else (channel >= 0))
            x = tl.load(x_ptr + x_start[None, :, None] + 16 * t + channel, mask, 0.0)
            x = narrow_activations(x, BLOCKS)
        acc = tl.dot(w, _as(x, DTYPE), acc)
    tile = tl.sum(acc, 0)
    if ROW_SCALE:
        term_row = (column // HALF) * m + x_row
        tile *= tl.load(row_scale_ptr + term_row, x_row < end, 0.0)[None, :]
    if TERMS == 2:
        tile = tl.sum(tl.reshape(tile, (ROWS, 2, HALF)), 1)
    y_row = first + tl.arange(0, HALF)
    inside = (weight_row < n)[:, None] & (y_row < end)[None, :]
    p = tl.load(per_tensor_scale_ptr) * TILE_SCALE
    _store_tile(y_ptr, tile, y_row, weight_row, inside, n, p, bias_ptr, BIAS)


@triton.jit(do_not_specialize=["m", "groups", "steps_per_split"])
def wide_kernel(
    x_ptr,
    second_ptr,
    words_ptr,
    block_scale_ptr,
    per_tensor_scale_ptr,
    row_scale_ptr,
    bias_ptr,
    ends_ptr,
    y_ptr,
    workspace_ptr,
    counter_ptr,
    m,
    n,
    blocks,
    groups,
    steps_per_split,
    row_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    TERMS: tl.constexpr,
    STACKED: tl.constexpr,
    EVEN: tl.constexpr,
    GROUPS: tl.constexpr,
    SCALE_PER_GROUP: tl.constexpr,
    ROW_SCALE: tl.constexpr,
    BIAS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """ROWS of W with COLUMNS rows of x in tensor-core order; program_id(1) of SPLITS takes some steps of K.

    Two terms are STACKED, half of the columns each, or have a tile of x and an accumulator each.
    """
    HEIGHT: tl.constexpr = COLUMNS // 2 if STACKED else COLUMNS  # rows of y
    blocks = blocks // 4 * 4  # is itself, K being a multiple of 64; the compiler sees that rows can be copied by words
    term_stride = stride_between(x_ptr, second_ptr)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    tile_id = tl.program_id(0)
    row_tiles = tl.cdiv(n, ROWS)
    end = m
    if GROUPS > 0:
        group, first, end = group_of_tile(tile_id // row_tiles, ends_ptr, groups, GROUPS, HEIGHT)
        if group >= groups:
            return
        weight_tile = tile_id % row_tiles
        start = group.to(tl.int64) * n * blocks
        words_ptr += start * 2
        block_scale_ptr += start
        if SCALE_PER_GROUP:
            per_tensor_scale_ptr += group
        if BIAS:
            bias_ptr += group * n
    else:
        BAND: tl.constexpr = 8  # tiles of x side by side: they and the tiles of W that they meet stay in the L2
        band = tile_id // (BAND * row_tiles)
        height = tl.minimum(tl.cdiv(m, HEIGHT) - band * BAND, BAND)
        inside_band = tile_id % (BAND * row_tiles)
        first = (band * BAND + inside_band % height) * HEIGHT
        weight_tile = inside_band // height

    row = weight_tile * ROWS + tl.arange(0, ROWS)
    scale_column = tl.arange(0, BLOCKS)[None, :]
    word_column = tl.arange(0, 2 * BLOCKS)[None, :]
    scale_offs = row[:, None] * blocks + scale_column
    word_offs = row[:, None] * (2 * blocks) + word_column
    column = tl.arange(0, COLUMNS)
    x_row = first + column % HEIGHT
    channel = tl.arange(0, 16 * BLOCKS)[None, :]
    x_offs = ((column // HEIGHT).to(tl.int64) * term_stride + x_row.to(tl.int64) * row_stride)[:, None] + channel
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    acc2 = tl.zeros((ROWS, COLUMNS), tl.float32)
    split = tl.program_id(1)
    begin = split * steps_per_split * BLOCKS
    stop = tl.minimum(begin + steps_per_split * BLOCKS, blocks)
    for t in tl.range(begin, stop, BLOCKS, num_stages=STAGES):
        if EVEN:
            words = tl.load(words_ptr + 2 * t + word_offs)
            scale = tl.load(block_scale_ptr + t + scale_offs)
            mask = (x_row < end)[:, None]
        else:
            rows_inside = (row < n)[:, None]
            words = tl.load(words_ptr + 2 * t + word_offs, rows_inside & (2 * t + word_column < 2 * blocks), 0)
            scale = tl.load(block_scale_ptr + t + scale_offs, rows_inside & (t + scale_column < blocks), 0)
            mask = (x_row < end)[:, None] & (16 * t + channel < 16 * blocks)
        x = tl.load(x_ptr + 16 * t + x_offs, mask, 0.0)
        w = wide_weights(tl.reshape(words, (ROWS, BLOCKS, 2)), scale, ASSEMBLY, DTYPE)
        acc = tl.dot(w, tl.trans(_as(x, DTYPE)), acc)
        if TERMS == 2 and not STACKED:
            x2 = tl.load(x_ptr + term_stride + 16 * t + x_offs, mask, 0.0)
            acc2 = _finished(tl.dot(w, tl.trans(_as(x2, DTYPE)), acc2), ASSEMBLY)
        acc = _finished(acc, ASSEMBLY)
    if ROW_SCALE:
        term_row = (column // HEIGHT) * m + x_row
        acc *= tl.load(row_scale_ptr + term_row, x_row < end, 0.0)[None, :]
        if TERMS == 2 and not STACKED:
            acc2 *= tl.load(row_scale_ptr + m + x_row, x_row < end, 0.0)[None, :]
    if STACKED:
        acc = tl.sum(tl.reshape(acc, (ROWS, 2, HEIGHT)), 1)
    elif TERMS == 2:
        acc += acc2
    y_row = first + tl.arange(0, HEIGHT)
    inside = (row < n)[:, None] & (y_row < end)[None, :]
    p = tl.load(per_tensor_scale_ptr) * TILE_SCALE
    if SPLITS == 1:
        _store_tile(y_ptr, acc, y_row, row, inside, n, p, bias_ptr, BIAS)
    else:
        part = tl.arange(0, ROWS)[:, None] + tl.arange(0, HEIGHT)[None, :] * ROWS
        workspace_ptr += tile_id.to(tl.int64) * (SPLITS * ROWS * HEIGHT)
        tl.store(workspace_ptr + split * (ROWS * HEIGHT) + part, acc, mask=inside)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + tile_id, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            total = tl.zeros((ROWS, HEIGHT), tl.float32)
            for i in tl.static_range(SPLITS):
                parts = workspace_ptr + i * (ROWS * HEIGHT) + part
                total += tl.load(parts, mask=inside, other=0.0, cache_modifier=".cg")
            _store_tile(y_ptr, total, y_row, row, inside, n, p, bias_ptr, BIAS)
            tl.store(counter_ptr + tile_id, 0)  # ready for the next launch
