"""GEMMs of NVFP4 operands in plain torch, and the compensated residual: the specification for their kernels.

Operands are exact: with ``Recipe.ALIGNED`` every decoded code fits bf16. ``linear_w4a16`` multiplies in x's dtype, as
the trainer does. The W4A4 functions multiply in fp32 and round once to x's dtype, so that fraction 0 and naive W4A4 are
the same bits and the two terms of a compensated output are added before any rounding.

Arguments are checked in ``ops``, not here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quads_qat import reference
from quads_qat.config import ActivationFormat, ActivationScale, Recipe, ResidualConfig, ResidualNorm, ResidualScope
from quads_qat.formats import ALIGNED_MIN_EXPONENT, BLOCK_SIZE
from quads_qat.qtensor import NVFP4Tensor

_ROW_CHUNK = 128
"""Rows that a batch-scope score sums one after the other; the chunks' sums are then added in ascending order."""


def linear_w4a16(x: Tensor, weight: NVFP4Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` with the weight decoded into x's dtype: x [..., K], weight [N, K] -> [..., N]."""
    return F.linear(x, reference.dequantize(weight, x.dtype), bias)


def linear_w4a4(
    x: Tensor,
    weight: NVFP4Tensor,
    bias: Tensor | None = None,
    *,
    activation: ActivationFormat,
    input_amax: Tensor | None = None,
) -> Tensor:
    """``Q(x) @ weight.T + bias``, accumulated in fp32, rounded once to x's dtype."""
    first = quantize_activation(x, activation, input_amax)
    return _matmul(reference.dequantize(first, torch.float32), weight, bias, x.dtype)


def residual_linear(
    x: Tensor,
    weight: NVFP4Tensor,
    residual: ResidualConfig,
    bias: Tensor | None = None,
    *,
    activation: ActivationFormat,
    input_amax: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """``(Q(x) + Q(m * (x - Q(x)))) @ weight.T + bias`` as two fp32 products, added, rounded once to x's dtype.

    ``mask`` [K] bool is the fixed mask of scope ``static``.
    """
    first, second = residual_quantize(x, residual, activation, input_amax, mask)
    operands = [reference.dequantize(q, torch.float32) for q in (first, second) if q is not None]
    return _matmul(operands[0], weight, bias, x.dtype, *operands[1:])


def _matmul(a: Tensor, weight: NVFP4Tensor, bias: Tensor | None, dtype: torch.dtype, *more: Tensor) -> Tensor:
    w = reference.dequantize(weight, torch.float32).t()
    with torch.autocast(a.device.type, enabled=False):  # it would multiply in 16 bits
        out = a @ w
        for term in more:
            out = out + term @ w
        return (out if bias is None else out + bias.float()).to(dtype)


def grouped(
    x: Tensor,
    weight: NVFP4Tensor,
    offs: Tensor,
    bias: Tensor | None,
    of_expert: Callable[[Tensor, NVFP4Tensor, Tensor | None, int], Tensor],
) -> Tensor:
    """``of_expert(rows, weight, bias, e)`` of each expert that has rows: x [M, K], weight [E, N, K], offs [E] ends."""
    out, start = x.new_empty(x.shape[0], weight.shape[1]), 0
    for expert, end in enumerate(offs.tolist()):
        if end > start:
            own = None if bias is None else bias[expert]
            out[start:end] = of_expert(x[start:end], weight.expert(expert), own, expert)
        start = max(start, end)
    return out


def grouped_linear_w4a16(x: Tensor, weight: NVFP4Tensor, offs: Tensor, bias: Tensor | None = None) -> Tensor:
    """:func:`linear_w4a16` of each expert with its own rows."""
    return grouped(x, weight, offs, bias, lambda rows, w, b, _: linear_w4a16(rows, w, b))


def quantize_activation(x: Tensor, activation: ActivationFormat, input_amax: Tensor | None = None) -> NVFP4Tensor:
    """``Q(x)`` of x [..., K]: one scale per token, per tensor, or from ``input_amax`` (static)."""
    if activation.scale is ActivationScale.STATIC:
        amax = input_amax
    else:
        amax = reference.amax(x, dim=-1 if activation.scale is ActivationScale.PER_TOKEN else None)
    return reference.quantize(x, tensor_amax=amax, recipe=activation.recipe)


def residual_quantize(
    x: Tensor,
    residual: ResidualConfig,
    activation: ActivationFormat,
    input_amax: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[NVFP4Tensor, NVFP4Tensor | None]:
    """``Q(x)`` and ``Q(m * R)`` with R = x - Q(x), exact in fp32; the second is None when nothing is selected.

    With ALIGNED and a dynamic scale p the second scale is max(p/4, 2**-116), no second amax: |R| <= block_scale * p
    <= 448 p = 2688 * (p / 6). Otherwise (a static scale saturates) it comes from the masked residual, per token.
    """
    first = quantize_activation(x, activation, input_amax)
    r = x.float() - reference.dequantize(first, torch.float32)
    selected = residual_mask(r.reshape(-1, r.shape[-1]), residual, mask)
    if selected is None:
        return first, None
    masked = torch.where(selected.view(r.shape) if selected.ndim == 2 else selected, r, 0)
    if activation.recipe is Recipe.ALIGNED and activation.scale is not ActivationScale.STATIC:
        p = (first.per_tensor_scale / 4).clamp(min=2.0**ALIGNED_MIN_EXPONENT)
        return first, reference.quantize(masked, p, recipe=Recipe.ALIGNED)
    return first, reference.quantize(masked, tensor_amax=reference.amax(masked, dim=-1), recipe=activation.recipe)


def residual_mask(r: Tensor, residual: ResidualConfig, static_mask: Tensor | None = None) -> Tensor | None:
    """Which channels of the residual r [M, K] (fp32) are compensated: bool [K] or [M, K]; None for none of them.

    n = floor(fraction * size + 1/2) units of each scope unit, the largest scores, equal scores: the lower channel
    first. A single channel of one row ranks by its magnitude under every norm, since its square might over- or
    underflow: a batch of one row is like scope ``token``. A whole block's score is the fixed binary tree over its 16
    channels' scores.
    """
    if residual.scope is ResidualScope.STATIC:
        return static_mask if residual.fraction > 0 else None
    size = BLOCK_SIZE if residual.scope is ResidualScope.BLOCK else r.shape[-1] // residual.granularity
    n = residual.selected(size)
    if n == 0:
        return None
    if n == size:
        return torch.ones(r.shape[-1], dtype=torch.bool, device=r.device)
    if residual.scope is ResidualScope.BATCH and r.shape[0] != 1:
        score = _channel_score(r, residual.norm)
    else:
        score = r.abs() if residual.granularity == 1 else _powered(r, residual.norm)
        score = score[0] if residual.scope is ResidualScope.BATCH else score
    return _largest(score, residual, n)


def mask_of_score(score: Tensor, residual: ResidualConfig) -> Tensor:
    """Which channels the scores [K] of :class:`ChannelScores` select: bool [K], as scope ``batch`` selects them."""
    return _largest(score, residual, residual.selected(score.shape[-1] // residual.granularity))


def _largest(score: Tensor, residual: ResidualConfig, n: int) -> Tensor:
    """The n best units of scores [..., K], a unit being a channel or a whole block."""
    if residual.granularity == BLOCK_SIZE:
        score = _tree(score.unflatten(-1, (-1, BLOCK_SIZE)), residual.norm)
    elif residual.scope is ResidualScope.BLOCK:
        score = score.unflatten(-1, (-1, BLOCK_SIZE))
    order = torch.sort(score, dim=-1, descending=True, stable=True).indices[..., :n]
    chosen = torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order, True)
    if residual.granularity == BLOCK_SIZE:
        return chosen.repeat_interleave(BLOCK_SIZE, dim=-1)
    return chosen.flatten(-2) if residual.scope is ResidualScope.BLOCK else chosen


def _powered(r: Tensor, norm: ResidualNorm) -> Tensor:
    return r * r if norm is ResidualNorm.L2 else r.abs()


def _channel_score(r: Tensor, norm: ResidualNorm) -> Tensor:
    """[M, K] -> [K]: squares (l2) or magnitudes (l1) added row by row in chunks of 128, chunks ascending; or max."""
    powered = _powered(r, norm)
    if norm is ResidualNorm.MAX:
        return powered.amax(0) if r.shape[0] else powered.new_zeros(r.shape[-1])
    total = powered.new_zeros(r.shape[-1])
    for chunk in _chunk_sums(powered):
        total = total + chunk
    return total


class ChannelScores:
    """The channels' scores of a stream of residual rows, for a static mask.

    They are those of scope ``batch`` for all rows in one call, however the rows are cut into calls of :meth:`add`:
    row by row in chunks of 128 rows of the stream, chunks ascending.
    """

    def __init__(self, k: int, norm: ResidualNorm, device: torch.device) -> None:
        self.norm, self.filled = norm, 0  # rows in the chunk that is not complete yet
        self.total, self.chunk = (torch.zeros(k, dtype=torch.float32, device=device) for _ in range(2))

    def add(self, r: Tensor) -> None:
        """Rows [M, K] float32."""
        powered = _powered(r, self.norm)
        if self.norm is ResidualNorm.MAX:
            self.total = torch.maximum(self.total, _channel_score(r, self.norm))
        else:
            head = min(-self.filled % _ROW_CHUNK, r.shape[0])
            self._add_rows(powered[:head])
            whole = head + (r.shape[0] - head) // _ROW_CHUNK * _ROW_CHUNK
            for chunk in _chunk_sums(powered[head:whole]):
                self.total = self.total + chunk
            self._add_rows(powered[whole:])

    def _add_rows(self, powered: Tensor) -> None:
        for row in powered:
            self.chunk = self.chunk + row
        self.filled = (self.filled + powered.shape[0]) % _ROW_CHUNK
        if self.filled == 0:
            self.total, self.chunk = self.total + self.chunk, torch.zeros_like(self.chunk)

    def score(self) -> Tensor:
        """[K] float32."""
        return self.total + self.chunk


def _chunk_sums(powered: Tensor) -> Tensor:
    """[M, K] -> [M/128 rounded up, K]: rows added one after the other."""
    chunks = F.pad(powered, (0, 0, 0, -powered.shape[0] % _ROW_CHUNK)).unflatten(0, (-1, _ROW_CHUNK))  # x + 0 is x
    sums = torch.zeros_like(chunks[:, 0])
    for row in range(min(_ROW_CHUNK, powered.shape[0])):
        sums = sums + chunks[:, row]
    return sums


def _tree(score: Tensor, norm: ResidualNorm) -> Tensor:
    """[..., 16] -> [...]: neighbours are joined pairwise, four times."""
    while score.shape[-1] > 1:
        even, odd = score[..., ::2], score[..., 1::2]
        score = torch.maximum(even, odd) if norm is ResidualNorm.MAX else even + odd
    return score[..., 0]
