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
) -> tuple[Tensor, Tensor | None]:
    """``(terms [T, M, K], mask)`` of x [M, K] bf16: the twin of ``reference_matmul.residual_quantize``, decoded.

    Args:
        x: any strides, K <= LONGEST_ROW.
        amax: [] of the tensor; None: each row has its own.
        residual: selects at least one channel; None: T is 1.
        mask: [K] bool of scope ``static``.
        return_mask: whether the mask is wanted: [M, K] or [K] bool.
        ordered: terms in tensor-core order; K % 64 == 0.
    """
    k = x.shape[-1]
    if x.stride(-1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    if residual is None:
        return residual_kernels.rows(x, amax=amax, ordered=ordered)
    if residual.scope is ResidualScope.STATIC:
        assert mask is not None
        aligned = mask.contiguous() if mask.data_ptr() % 16 == 0 else mask.clone()
        return residual_kernels.rows(x, amax=amax, select=residual_kernels.FIXED.value, mask=aligned, ordered=ordered)[
            0
        ], mask
    size = BLOCK_SIZE if residual.scope is ResidualScope.BLOCK else k // residual.granularity
    n, norm, whole_blocks = residual.selected(size), _NORMS[residual.norm], residual.granularity == BLOCK_SIZE
    if n == size or x.shape[0] == 0:
        return residual_kernels.rows(
            x, amax=amax, select=residual_kernels.ALL.value, return_mask=return_mask, ordered=ordered
        )
    if residual.scope is ResidualScope.BATCH and x.shape[0] > 1:
        # ranking reads what is in ordinary order; the final launch writes both terms where another order is wanted
        terms = torch.empty(2, *x.shape, dtype=x.dtype, device=x.device)
        residual_kernels.rows(x, amax=amax, terms=terms)
        mask = batch_mask(x, terms[0], n=n, norm=norm, whole_blocks=whole_blocks)
        select = residual_kernels.FIXED.value
        residual_kernels.rows(
            x, amax=amax, select=select, mask=mask, terms=terms, stores_first=ordered, ordered=ordered
        )
        return terms, mask
    if residual.scope is ResidualScope.BLOCK:
        select = residual_kernels.BLOCK.value
    else:
        select = residual_kernels.TOKEN_BLOCKS.value if whole_blocks else residual_kernels.TOKEN.value
    return residual_kernels.rows(x, amax=amax, select=select, n=n, norm=norm, return_mask=return_mask, ordered=ordered)
