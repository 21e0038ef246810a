"""``amax``: the largest finite magnitude of a tensor, of each expert, of each row, or of a scale group in one launch.

Magnitudes of finite floats order like their bits, so the maximum is an integer atomic: exact and independent of order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quads_qat.kernels import numerics as num
from quads_qat.kernels.launch import cdiv, next_power_of_2

_INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


@triton.jit
def _finite_magnitude(x, INFINITY: tl.constexpr):
    """Bits of |x| of int32 words (one element or two halves), 0 where it is not finite; the larger of two halves."""
    if INFINITY == 0x7F800000:
        m = x & 0x7FFFFFFF
        m = tl.where(m < INFINITY, m, 0)
    else:
        low = x & 0x7FFF
        high = (x >> 16) & 0x7FFF
        low = tl.where(low < INFINITY, low, 0)
        high = tl.where(high < INFINITY, high, 0)
        m = tl.maximum(low, high)
    return m


@triton.jit
def _amax_of(x_ptr, out_ptr, words, group, part, parts, INFINITY: tl.constexpr, TILE: tl.constexpr):
    """Fold part ``part`` of ``parts`` of a run of int32 words into out[group]."""
    base = x_ptr.to(tl.pointer_type(tl.int32)) + group.to(tl.int64) * words
    lane = tl.arange(0, TILE)
    largest = tl.zeros((TILE,), tl.int32)
    for start in range(part * TILE, words, parts * TILE):
        offs = tl.cast(start, tl.int64) + lane
        x = tl.load(base + offs, mask=offs < words, other=0)
        largest = tl.maximum(largest, _finite_magnitude(x, INFINITY))
    tl.atomic_max(out_ptr + group, tl.max(largest, 0), sem="relaxed")


@triton.jit
def _amax_kernel(
    x0_ptr,
    x1_ptr,
    x2_ptr,
    out_ptr,
    words0,
    words1,
    words2,
    parts0,
    parts1,
    parts2,
    INFINITY: tl.constexpr,
    TILE: tl.constexpr,
):
    pid = tl.program_id(0)
    group = tl.program_id(1)
    if pid < parts0:
        _amax_of(x0_ptr, out_ptr, words0, group, pid, parts0, INFINITY, TILE)
    elif pid < parts0 + parts1:
        _amax_of(x1_ptr, out_ptr, words1, group, pid - parts0, parts1, INFINITY, TILE)
    else:
        _amax_of(x2_ptr, out_ptr, words2, group, pid - parts0 - parts1, parts2, INFINITY, TILE)


@triton.jit
def _odd_amax_kernel(x_ptr, out_ptr, numel, groups, TILE: tl.constexpr):
    """Any alignment, any length: one element a lane, one program a tile."""
    pid = tl.program_id(0)
    group = pid % groups
    offs = (pid // groups).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = num.widen(tl.load(x_ptr + group.to(tl.int64) * numel + offs, mask=offs < numel, other=0.0))
    m = _finite_magnitude(x.to(tl.int32, bitcast=True), 0x7F800000)
    tl.atomic_max(out_ptr + group, tl.max(m, 0), sem="relaxed")


@triton.jit
def _row_amax_kernel(x_ptr, out_ptr, rows, k, row_stride, TILE: tl.constexpr):
    """One program a row of k elements."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, TILE)
    largest = tl.zeros((TILE,), tl.int32)
    for start in range(0, k, TILE):
        offs = start + lane
        x = num.widen(tl.load(x_ptr + row * row_stride + offs, mask=offs < k, other=0.0))
        largest = tl.maximum(largest, _finite_magnitude(x.to(tl.int32, bitcast=True), 0x7F800000))
    value = tl.max(largest, 0).to(tl.float32, bitcast=True)
    tl.store(out_ptr + row, value.to(out_ptr.dtype.element_ty))


_PARTS = 1056  # programs for a large tensor: eight for each of an H200's 132 multiprocessors
_TILE = 2048


def amax(tensors: list[Tensor], dim: tuple[int, ...] | None) -> Tensor:
    """Triton twin of ``reference.amax``, for one dtype and the reductions that quantization needs.

    Args:
        tensors: dense, any layout (an amax does not care for the order); with ``dim`` of equal leading size.
        dim: None -> []; all dims but the first -> [E]; (-1,) -> [..., 1].

    Returns:
        the tensors' dtype.
    """
    if dim == (-1,):
        return _row_amax(tensors)
    dtype, device = tensors[0].dtype, tensors[0].device
    groups = 1 if dim is None else tensors[0].shape[0]
    out = torch.zeros(groups, dtype=torch.int32, device=device)
    dense = [_dense(x) for x in tensors if x.numel()]
    for i in range(0, len(dense), 3):
        _launch(dense[i : i + 3], out, groups, dtype)
    # the bits of a 16-bit amax are the low half of its word: a view, where a conversion would be a launch
    values = out.view(dtype)[:: out.element_size() // dtype.itemsize]
    return values[0] if dim is None else values.contiguous()


def _dense(x: Tensor) -> Tensor:
    """``x`` itself if its elements fill its memory without gaps or overlap, expert by expert; else a copy."""
    if x.is_contiguous() or (x.ndim >= 2 and x.mT.is_contiguous()):
        return x
    return x.contiguous()


def _launch(tensors: list[Tensor], out: Tensor, groups: int, dtype: torch.dtype) -> None:
    per_word = 4 // dtype.itemsize
    odd = [x for x in tensors if (x.numel() // groups) % per_word or x.data_ptr() % 16]
    for x in odd:
        numel = x.numel() // groups
        wide = torch.zeros(groups, dtype=torch.int32, device=out.device)
        _odd_amax_kernel[(cdiv(numel, 1024) * groups,)](x, wide, numel, groups, TILE=1024)
        torch.maximum(out, _narrow_bits(wide, dtype), out=out)
    even = [x for x in tensors if not any(x is o for o in odd)]
    if not even:
        return
    words = [x.numel() // groups // per_word for x in even]
    parts = [min(cdiv(w, _TILE), max(1, _PARTS // groups)) for w in words]
    pad = 3 - len(even)
    _amax_kernel[(sum(parts), groups)](
        *even,
        *even[:1] * pad,
        out,
        *words,
        *[0] * pad,
        *parts,
        *[0] * pad,
        INFINITY=_INFINITY[dtype],
        TILE=_TILE,
        num_warps=8,
    )


def _narrow_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 bits of values that ``dtype`` holds -> their bits in ``dtype``, as int32."""
    if dtype == torch.float32:
        return bits
    return bits.view(torch.float32).to(dtype).view(torch.int16).to(torch.int32)


def _row_amax(tensors: list[Tensor]) -> Tensor:
    results = []
    for x in tensors:
        out = torch.empty(*x.shape[:-1], 1, dtype=x.dtype, device=x.device)
        if out.numel():
            runs = x if x.is_contiguous() else x.contiguous()
            k = x.shape[-1]
            tile = min(4096, next_power_of_2(max(k, 16)))
            _row_amax_kernel[(out.numel(),)](runs, out, out.numel(), k, k, TILE=tile)
        results.append(out)
    return results[0] if len(results) == 1 else torch.stack(results).amax(0)
