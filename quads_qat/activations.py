"""``quads_qat::quantize_activation``: the operands of W4A4 GEMMs, by the reference or by kernels. ``ops`` checks.

The fused kernel takes bf16 rows, Recipe.ALIGNED and a dynamic scale; everything else is put together from the
element-wise kernels and the reference's mask.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from quads_qat import library, reference, reference_matmul
from quads_qat.config import ActivationFormat, ActivationScale, Recipe, ResidualConfig, ResidualScope
from quads_qat.formats import ALIGNED_MIN_EXPONENT, BLOCK_SIZE


def values_dtype(recipe: Recipe) -> torch.dtype:
    """What decoded activations are held in: values of ALIGNED are exact in bf16, others are rounded once to fp32."""
    return torch.bfloat16 if recipe is Recipe.ALIGNED else torch.float32


@lru_cache
def count_of_terms(residual: ResidualConfig | None, k: int) -> int:
    """2 where ``residual`` selects at least one of k channels, else 1."""
    if residual is None or residual.scope is ResidualScope.STATIC:
        return 1 + (residual is not None and residual.fraction > 0)
    size = BLOCK_SIZE if residual.scope is ResidualScope.BLOCK else k // residual.granularity
    return 1 + (residual.selected(size) > 0)


def quantize_activation(
    x: Tensor,
    activation: ActivationFormat,
    residual: ResidualConfig | None,
    input_amax: Tensor | None,
    mask: Tensor | None,
    return_mask: bool,
    backend: str,
    ordered: bool = False,
    offs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The operator with enums in place of strings: ``(terms [T, ..., K], mask [..., K] or empty)``.

    ``ordered``: K of the terms is in the tensor-core order of ``kernels.decode``; K % 64 == 0.
    ``offs`` [E] int32, of backend ``triton`` and without ``return_mask``: x are rows [M, K] of experts, each a unit of
    its own to scope ``batch`` and to a scale ``per_tensor``; ``mask`` may then be [E, K].
    """
    config = (None, 0.0, "l2", 1) if residual is None else _plain(residual)
    recipe, scale = activation.recipe.value, activation.scale.value
    return _operator(x, input_amax, mask, recipe, scale, *config, return_mask, backend, ordered, offs)


def _plain(residual: ResidualConfig) -> tuple[str, float, str, int]:
    return residual.scope.value, float(residual.fraction), residual.norm.value, residual.granularity


@lru_cache
def _config(scope: str | None, fraction: float, norm: str, granularity: int) -> ResidualConfig | None:
    if scope is None:
        return None
    return ResidualConfig(fraction=fraction, scope=scope, norm=norm, granularity=granularity)  # pyright: ignore[reportArgumentType]


@lru_cache
def _format(recipe: str, scale: str) -> ActivationFormat:
    return ActivationFormat(scale=ActivationScale(scale), recipe=Recipe(recipe))


def _quantize_activation(
    x: Tensor,
    input_amax: Tensor | None,
    mask: Tensor | None,
    recipe: str,
    scale: str,
    scope: str | None,
    fraction: float,
    norm: str,
    granularity: int,
    return_mask: bool,
    backend: str = "reference",
    ordered: bool = False,
    offs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    activation = _format(recipe, scale)
    residual = _config(scope, fraction, norm, granularity)
    residual = residual if count_of_terms(residual, x.shape[-1]) == 2 else None
    if backend == "triton" and fits_the_kernel(x, activation):
        terms, chosen = _by_kernel(x, activation, residual, mask, return_mask, ordered, offs)
    else:
        if backend == "triton":
            terms, chosen = _by_parts(x, activation, residual, input_amax, mask, offs)
        else:
            terms, chosen = _by_reference(x, activation, residual, input_amax, mask)
        terms = _in_tensor_core_order(terms) if ordered else terms
    if not return_mask or chosen is None:
        return terms, torch.empty(0, dtype=torch.bool, device=x.device)
    return terms, chosen.expand(x.numel() // x.shape[-1] if x.numel() else 0, x.shape[-1]).reshape(x.shape).clone()


def _quantize_activation_meta(
    x: Tensor,
    input_amax: Tensor | None,
    mask: Tensor | None,
    recipe: str,
    scale: str,
    scope: str | None,
    fraction: float,
    norm: str,
    granularity: int,
    return_mask: bool,
    backend: str = "reference",
    ordered: bool = False,
    offs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    count = count_of_terms(_config(scope, fraction, norm, granularity), x.shape[-1])
    terms = x.new_empty((count, *x.shape), dtype=values_dtype(Recipe(recipe)))
    return terms, x.new_empty(x.shape if return_mask and count == 2 else (0,), dtype=torch.bool)


_operator = library.define("quantize_activation", _quantize_activation, _quantize_activation_meta)


def _by_reference(
    x: Tensor,
    activation: ActivationFormat,
    residual: ResidualConfig | None,
    input_amax: Tensor | None,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    dtype = values_dtype(activation.recipe)
    if residual is None:
        first = reference_matmul.quantize_activation(x, activation, input_amax)
        return reference.dequantize(first, dtype)[None], None
    first, second = reference_matmul.residual_quantize(x, residual, activation, input_amax, mask)
    assert second is not None
    r = x.float() - reference.dequantize(first, torch.float32)
    chosen = reference_matmul.residual_mask(r.reshape(-1, x.shape[-1]), residual, mask)
    return torch.stack([reference.dequantize(q, dtype) for q in (first, second)]), chosen


def _by_parts(
    x: Tensor,
    activation: ActivationFormat,
    residual: ResidualConfig | None,
    input_amax: Tensor | None,
    mask: Tensor | None,
    offs: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Any dtype, recipe and scale: the steps of ``reference_matmul.residual_quantize``, quantized by kernels."""
    recipe, dtype = activation.recipe, values_dtype(activation.recipe)
    amax = input_amax
    if activation.scale is ActivationScale.PER_TENSOR and offs is not None:
        amax = _amax_of_groups(x, offs)[expert_of_rows(offs, len(x))][:, None]
    elif activation.scale is not ActivationScale.STATIC:
        amax = library.amax([x], [-1] if activation.scale is ActivationScale.PER_TOKEN else None, "triton")
    q1 = library.fake_quantize(x, None, amax, recipe.value, dtype, "triton")
    if residual is None:
        return q1[None], None
    r = x.float() - q1.float()
    chosen = _mask(r.reshape(-1, r.shape[-1]), residual, mask, offs)
    masked = torch.where(chosen.view(r.shape) if chosen.ndim == 2 else chosen, r, 0)
    if recipe is Recipe.ALIGNED and activation.scale is not ActivationScale.STATIC:
        p = (library.scale_from_amax(amax, recipe.value)[0] / 4).clamp(min=2.0**ALIGNED_MIN_EXPONENT)
        q2 = library.fake_quantize(masked, p, None, recipe.value, dtype, "triton")
    else:
        q2 = library.fake_quantize(masked, None, library.amax([masked], [-1], "triton"), recipe.value, dtype, "triton")
    return torch.stack([q1, q2]), chosen


def _mask(r: Tensor, residual: ResidualConfig, mask: Tensor | None, offs: Tensor | None) -> Tensor:
    """``reference_matmul.residual_mask`` of r [M, K], of each expert's rows by themselves: [K] or [M, K]."""
    from quads_qat.kernels.activation import mask_of_residual
    from quads_qat.kernels.residual import LONGEST_ROW

    m, k = r.shape
    size = k // residual.granularity
    if residual.scope is ResidualScope.BATCH and residual.selected(size) < size and m > 0 and k <= LONGEST_ROW:
        chosen = mask_of_residual(r, residual, offs)
    else:
        chosen = mask if residual.scope is ResidualScope.STATIC else reference_matmul.residual_mask(r, residual)
    assert chosen is not None
    if offs is None or chosen.ndim == 1 or residual.scope not in (ResidualScope.BATCH, ResidualScope.STATIC):
        return chosen
    return chosen[expert_of_rows(offs, m)]


def _amax_of_groups(x: Tensor, offs: Tensor) -> Tensor:
    """The amax [E] of each expert's rows of x [M, K]."""
    of_rows = library.amax([x], [-1], "triton").view(-1)
    amax = torch.zeros(len(offs), dtype=of_rows.dtype, device=x.device)
    return amax.scatter_reduce(0, expert_of_rows(offs, len(x)), of_rows, "amax")


def expert_of_rows(offs: Tensor, rows: int) -> Tensor:
    """The expert [M] of each row."""
    row = torch.arange(rows, device=offs.device, dtype=offs.dtype)
    return torch.searchsorted(offs, row, right=True).clamp(max=len(offs) - 1)


def _in_tensor_core_order(terms: Tensor) -> Tensor:
    """Number 16 t + 8 i + 4 h + q of each run of 64 moves to 32 i + 8 q + 2 t + h."""
    runs = terms.unflatten(-1, (-1, 4, 2, 2, 4))  # t, i, h, q
    *lead, t, i, h, q = range(runs.ndim)
    return runs.permute(*lead, i, q, t, h).reshape(terms.shape)


def fits_the_kernel(x: Tensor, activation: ActivationFormat) -> bool:
    """Whether one kernel makes all terms of x, in either order of K."""
    from quads_qat.kernels.residual import LONGEST_ROW

    dynamic = activation.scale is not ActivationScale.STATIC and activation.recipe is Recipe.ALIGNED
    return dynamic and x.dtype is torch.bfloat16 and 0 < x.shape[-1] <= LONGEST_ROW


def _by_kernel(
    x: Tensor,
    activation: ActivationFormat,
    residual: ResidualConfig | None,
    mask: Tensor | None,
    return_mask: bool,
    ordered: bool,
    offs: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    from quads_qat.kernels.activation import activation_terms

    amax = None
    if activation.scale is ActivationScale.PER_TENSOR:
        amax = library.amax([x], None, "triton") if offs is None else _amax_of_groups(x, offs)
    rows = x.reshape(-1, x.shape[-1])
    terms, chosen = activation_terms(rows, amax, residual, mask, return_mask, ordered, offs)
    return terms.view(terms.shape[0], *x.shape), chosen
