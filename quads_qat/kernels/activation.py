"""Which kernels a :class:`~quads_qat.config.ResidualConfig` takes."""

from __future__ import annotations

import torch
from torch import Tensor

from quads_qat.config import ResidualConfig, ResidualNorm, ResidualScope
from quads_qat.formats import BLOCK_SIZE
from quads_qat.kernels import residual as residual_kernels
from quads_qat.kernels.residual_batch import batch_mask

_NORMS = {
    ResidualNorm.L2: residual_kernels.L2.value,
    ResidualNorm.L1: residual_kernels.L1.value,
    ResidualNorm.MAX: residual_kernels.MAX.value,
}


def activation_terms(
    x: Tensor,
    amax: Tensor | None,
    residual: ResidualConfig | None,
    mask: Tensor | None,
    return_mask: bool,
    ordered: bool = False,
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``(terms [T, M, K], mask)`` of x [M, K] bf16: the twin of ``reference_matmul.residual_quantize``, decoded.

    Args:
        x: any strides, K <= LONGEST_ROW.
        amax: [] of the tensor, [G] of the groups; None: each row has its own.
        residual: selects at least one channel; None: T is 1.
        mask: [K] bool of scope ``static``, or [G, K].
        return_mask: whether the mask is wanted: [M, K], [K] or [G, K] bool.
        ordered: terms in tensor-core order; K % 64 == 0.
        ends: [G] int32, the row after each group's last: groups have a mask, and an amax, of their own.
    """
    k = x.shape[-1]
    if x.stride(-1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    options = {"amax": amax, "ends": ends, "ordered": ordered}
    if residual is None:
        return residual_kernels.rows(x, **options)
    if residual.scope is ResidualScope.STATIC:
        assert mask is not None
        own = mask if ends is None else mask.expand(len(ends), k)
        aligned = own.contiguous() if own.data_ptr() % 16 == 0 else own.clone(memory_format=torch.contiguous_format)
        return residual_kernels.rows(x, **options, select=residual_kernels.FIXED.value, mask=aligned)[0], mask
    size = BLOCK_SIZE if residual.scope is ResidualScope.BLOCK else k // residual.granularity
    n, norm, whole_blocks = residual.selected(size), _NORMS[residual.norm], residual.granularity == BLOCK_SIZE
    if n == size or x.shape[0] == 0:
        return residual_kernels.rows(x, **options, select=residual_kernels.ALL.value, return_mask=return_mask)
    if residual.scope is ResidualScope.BATCH and (x.shape[0] > 1 or ends is not None):
        # ranking reads what is in ordinary order; the final launch writes both terms where another order is wanted
        terms = torch.empty(2, *x.shape, dtype=x.dtype, device=x.device)
        residual_kernels.rows(x, amax=amax, ends=ends, terms=terms)
        mask = batch_mask(x, terms[0], ends, n=n, norm=norm, whole_blocks=whole_blocks)
        select = residual_kernels.FIXED.value
        residual_kernels.rows(x, **options, select=select, mask=mask, terms=terms, stores_first=ordered)
        return terms, mask
    if residual.scope is ResidualScope.BLOCK:
        select = residual_kernels.BLOCK.value
    else:
        select = residual_kernels.TOKEN_BLOCKS.value if whole_blocks else residual_kernels.TOKEN.value
    return residual_kernels.rows(x, **options, select=select, n=n, norm=norm, return_mask=return_mask)


def mask_of_residual(r: Tensor, residual: ResidualConfig, ends: Tensor | None) -> Tensor:
    """The mask of scope ``batch`` of residuals r [M, K] fp32: [K] bool, or [G, K] with ``ends``.

    M > 0, K <= LONGEST_ROW, ``residual`` selects some units and not all: ``reference_matmul.residual_mask``.
    """
    size = r.shape[-1] // residual.granularity
    whole_blocks = residual.granularity == BLOCK_SIZE
    options = {"n": residual.selected(size), "norm": _NORMS[residual.norm], "whole_blocks": whole_blocks}
    return batch_mask(r.contiguous(), None, ends, **options)
