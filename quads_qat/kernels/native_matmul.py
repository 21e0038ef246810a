"""``y = x @ W.T`` with both operands packed: the block-scaled FP4 tensor cores of sm_100 and sm_120.

The instruction multiplies codes and E4M3 block scales as they are; the per-tensor and per-row scales follow in fp32.
Against the kernels of ``matmul``, which decode to bf16, only the order of the fp32 sum differs: products of two decoded
codes are exact in both. A test compiles it ahead of time for both architectures and finds the instruction. It has not
run on such a GPU, and Triton's interpreter does not know ``dot_scaled``: there decoded operands stand in for it, so
that what the interpreter tests is everything around the instruction.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads_qat.kernels import numerics as num
from quads_qat.kernels.launch import cdiv, scale_pointer


@triton.jit
def _decoded(codes, scale_bytes):
    """[R, K/2] code pairs and [R, K/16] E4M3 bytes -> [R, K] fp32."""
    rows: tl.constexpr = codes.shape[0]
    half: tl.constexpr = codes.shape[1]
    code = tl.reshape(tl.join(codes & 15, codes >> 4).to(tl.int32), (rows, half // 8, 16))
    value = num.from_bits((code * 0x10400000) & -2118123520) * 8.507059173023462e37
    return tl.reshape(value * num.e4m3_value(scale_bytes.to(tl.int32))[:, :, None], (rows, 2 * half))


@triton.jit
def _scaled_dot(x, x_scale, w, w_scale, acc):
    """``acc + x @ w.T`` of packed operands."""
    if num.INTERPRETED:
        acc = tl.dot(_decoded(x, x_scale), tl.trans(_decoded(w, w_scale)), acc)
    else:
        x_scale = x_scale.to(tl.float8e4nv, bitcast=True)
        w_scale = w_scale.to(tl.float8e4nv, bitcast=True)
        acc = tl.dot_scaled(x, x_scale, "e2m1", tl.trans(w), w_scale, "e2m1", acc)
    return acc


@triton.jit(do_not_specialize=["m"])
def native_kernel(
    x_ptr,
    x_scale_ptr,
    row_scale_ptr,
    words_ptr,
    block_scale_ptr,
    per_tensor_scale_ptr,
    bias_ptr,
    y_ptr,
    m,
    n,
    k,
    TERMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
):
    """A tile of y: ROWS of x with COLUMNS of W, STEP channels at a time; a second term follows the first in memory."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    byte = tl.arange(0, STEP // 2)
    block = tl.arange(0, STEP // 16)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for term in tl.static_range(TERMS):
        term_row = (term * m + row).to(tl.int64)
        x_row = (row < m)[:, None]
        w_row = (column < n)[:, None]
        acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for t in tl.range(0, k, STEP, num_stages=STAGES):
            bytes_inside = (t // 2 + byte < k // 2)[None, :]
            blocks_inside = (t // 16 + block < k // 16)[None, :]
            x = tl.load(x_ptr + term_row[:, None] * (k // 2) + t // 2 + byte[None, :], x_row & bytes_inside, 0)
            xs_offs = term_row[:, None] * (k // 16) + t // 16 + block[None, :]
            xs = tl.load(x_scale_ptr + xs_offs, x_row & blocks_inside, 0)
            w_start = column.to(tl.int64)[:, None]
            w = tl.load(words_ptr + w_start * (k // 2) + t // 2 + byte[None, :], w_row & bytes_inside, 0)
            ws_offs = w_start * (k // 16) + t // 16 + block[None, :]
            ws = tl.load(block_scale_ptr + ws_offs, w_row & blocks_inside, 0)
            acc = _scaled_dot(x, xs, w, ws, acc)
        total += acc * tl.load(row_scale_ptr + term_row, row < m, 0.0)[:, None]
    total *= tl.load(per_tensor_scale_ptr)
    if BIAS:
        total += num.widen(tl.load(bias_ptr + column, column < n, 0.0))[None, :]
    offs = row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(y_ptr + offs, num.round_to(total, y_ptr.dtype.element_ty), (row < m)[:, None] & (column < n)[None, :])


def native_matmul(
    x: Tensor,
    x_block_scale: Tensor,
    row_scale: Tensor,
    qdata: Tensor,
    block_scale: Tensor,
    per_tensor_scale: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """``sum over terms of (row_scale * x) @ W.T + bias``, rounded once.

    Args:
        x: [T, M, K/2] uint8, T = 1 or 2.
        x_block_scale: [T, M, K/16] float8_e4m3fn.
        row_scale: [T, M] float32.
        qdata: [N, K/2] uint8.
        block_scale: [N, K/16] float8_e4m3fn.
        per_tensor_scale: [] float32.
        bias: [N] or None.
        dtype: of y.

    Returns:
        y [M, N].
    """
    terms, m, half = x.shape
    n, k = qdata.shape[0], 2 * half
    y = torch.empty(m, n, dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    rows = 128  # what the tensor cores of sm_100 take
    grid = cdiv(m, rows), cdiv(n, 128)
    native_kernel[grid](
        x.contiguous(),
        x_block_scale.contiguous().view(torch.uint8),
        row_scale.contiguous(),
        qdata.contiguous(),
        block_scale.contiguous().view(torch.uint8),
        scale_pointer(per_tensor_scale),
        x if bias is None else bias,
        y,
        m,
        n,
        k,
        TERMS=terms,
        ROWS=rows,
        COLUMNS=128,
        STEP=256,
        STAGES=3,
        BIAS=bias is not None,
        num_warps=4,
    )
    return y
