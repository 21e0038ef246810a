"""The GEMMs of packed weights on a GPU: operands for ``kernels.matmul``, and its operator. ``ops`` checks arguments.

The specification is ``reference_matmul``. bf16 inputs and ``Recipe.ALIGNED`` weights are multiplied as they are packed;
what the kernels do not know (fp32 and fp16 inputs of W4A16, other recipes there, whose decoded weights are rounded to
x's dtype, a scale for each row of the weight, gradients) is decoded first: the same operands, more traffic. Where
tensor cores multiply NVFP4 (sm_100, sm_120), W4A4 operands stay packed.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quads_qat import activations, library, reference_matmul
from quads_qat.config import ActivationFormat, ActivationScale, Recipe, ResidualConfig, ResidualScope
from quads_qat.qtensor import NVFP4Tensor


def _matmul(
    x: Tensor,
    second: Tensor | None,
    qdata: Tensor,
    block_scale: Tensor,
    per_tensor_scale: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    offs: Tensor | None,
    recipe: str,
    dtype: torch.dtype,
    ordered: bool = False,
) -> Tensor:
    from quads_qat.kernels.grouped_matmul import grouped_matmul
    from quads_qat.kernels.matmul import matmul as dense

    weight = qdata, block_scale, per_tensor_scale
    options = {"second": second, "row_scale": row_scale, "ordered": ordered, "dtype": dtype}
    if offs is not None:
        return grouped_matmul(x, *weight, offs, bias, **options)
    return dense(x, *weight, bias, recipe=Recipe(recipe), **options)


def _matmul_meta(
    x: Tensor,
    second: Tensor | None,
    qdata: Tensor,
    block_scale: Tensor,
    per_tensor_scale: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    offs: Tensor | None,
    recipe: str,
    dtype: torch.dtype,
    ordered: bool = False,
) -> Tensor:
    return x.new_empty((x.shape[0], qdata.shape[-2]), dtype=dtype)


_matmul_op = library.define("matmul", _matmul, _matmul_meta)


def _native_matmul(
    x: Tensor,
    x_block_scale: Tensor,
    row_scale: Tensor,
    qdata: Tensor,
    block_scale: Tensor,
    per_tensor_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    from quads_qat.kernels.native_matmul import native_matmul

    return native_matmul(x, x_block_scale, row_scale, qdata, block_scale, per_tensor_scale, bias, dtype=dtype)


def _native_matmul_meta(
    x: Tensor,
    x_block_scale: Tensor,
    row_scale: Tensor,
    qdata: Tensor,
    block_scale: Tensor,
    per_tensor_scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((x.shape[1], qdata.shape[0]), dtype=dtype)


_native_matmul_op = library.define("native_matmul", _native_matmul, _native_matmul_meta)


@lru_cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def _multiplies_fp4(device: torch.device) -> bool:
    """Whether tensor cores take NVFP4 operands as they are: sm_100, sm_120."""
    return _capability(device) >= 10


# What torch.compiler.assume_constant_result does, which imports Dynamo: half of the time of importing this package.
_multiplies_fp4._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def _native(terms: list[NVFP4Tensor], weight: NVFP4Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum of the terms, [M, K] each, times the weight, all of them packed -> [M, N]."""
    m = terms[0].qdata.shape[0]
    x = torch.stack([q.qdata for q in terms])
    scales = torch.stack([q.block_scale.view(torch.uint8) for q in terms]).view(torch.float8_e4m3fn)
    rows = torch.stack([q.per_tensor_scale.reshape(-1).expand(m) for q in terms])
    bias = None if bias is None else bias.detach()
    return _native_matmul_op(x, scales, rows, weight.qdata, weight.block_scale, weight.per_tensor_scale, bias, dtype)


def _multiply(
    x: Tensor,
    second: Tensor | None,
    weight: NVFP4Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    offs: Tensor | None,
    dtype: torch.dtype,
    ordered: bool = False,
) -> Tensor:
    """``(x + second) @ weight.T``: [M, K], ``ordered`` or not, -> [M, N] in ``dtype``."""
    parts = weight.qdata, weight.block_scale, weight.per_tensor_scale
    bias = None if bias is None else bias.detach()
    return _matmul_op(x, second, *parts, bias, row_scale, offs, weight.recipe.value, dtype, ordered)


def _scaled_by_row(weight: NVFP4Tensor) -> bool:
    """Whether rows of the weight have scales of their own, which the kernels do not know."""
    return weight.per_tensor_scale.numel() > 1 and weight.per_tensor_scale.ndim > 1


def shares_units(
    activation: ActivationFormat, residual: ResidualConfig | None = None, mask: Tensor | None = None
) -> bool:
    """Whether rows of one expert share a scale, a ranking or a mask that other experts do not."""
    ranked = residual is not None and residual.scope is ResidualScope.BATCH
    return ranked or activation.scale is ActivationScale.PER_TENSOR or (mask is not None and mask.ndim == 2)


def quantizes_groups(x: Tensor, activation: ActivationFormat) -> bool:
    """Whether such rows [M, K] of all experts are quantized together; else each expert's by themselves."""
    from quads_qat.kernels.residual import LONGEST_ROW

    return activation.recipe is Recipe.ALIGNED and x.shape[-1] <= LONGEST_ROW


def _pair(terms: Tensor | list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """[T, M, K] -> the first term and the second, if there is one."""
    return terms[0], terms[1] if len(terms) == 2 else None


def _wants_order(
    rows: Tensor, weight: NVFP4Tensor, activation: ActivationFormat, terms: int, offs: Tensor | None
) -> bool:
    """Whether quantized activations are to be written in the order of K in which the GEMM reads them: a pass less.

    The bits of the product are the same. Not in a compiled graph, where it would make each number of rows a case.
    """
    if torch.compiler.is_compiling() or not activations.fits_the_kernel(rows, activation):
        return False
    from quads_qat.kernels import grouped_matmul, matmul

    m, k = rows.shape
    if offs is not None:
        return grouped_matmul.takes_order(m, weight.shape[-2], k, len(weight.qdata), terms)
    return matmul.takes_order(m, weight.shape[-2], k, terms, rows.device)


def linear_w4a16(x: Tensor, weight: NVFP4Tensor, bias: Tensor | None = None, offs: Tensor | None = None) -> Tensor:
    """``reference_matmul.linear_w4a16`` and, with ``offs``, ``grouped_linear_w4a16``."""
    packed = x.dtype == torch.bfloat16 and weight.recipe is Recipe.ALIGNED and not _scaled_by_row(weight)
    if packed and not (torch.is_grad_enabled() and x.requires_grad):
        rows = x.reshape(-1, x.shape[-1])
        return _multiply(rows, None, weight, bias, None, offs, x.dtype).view(*x.shape[:-1], weight.shape[-2])
    if offs is not None and x.dtype != torch.bfloat16:  # grouped_mm is for bf16
        return reference_matmul.grouped_linear_w4a16(x, weight, offs, bias)
    parts = weight.qdata, weight.block_scale, weight.per_tensor_scale, weight.stored_scale
    decoded = library.dequantize(*parts, weight.recipe.value, x.dtype, "triton")
    if offs is None:
        return F.linear(x, decoded, bias)
    out = F.grouped_mm(x, decoded.mT, offs=offs)
    return out if bias is None else out + bias[activations.expert_of_rows(offs, len(x))].to(out.dtype)


def _operand(q: NVFP4Tensor) -> Tensor:
    """Codes times block scales of activations [M, K], exact in bf16: their rows are still to be scaled."""
    one = torch.ones((), dtype=torch.float32, device=q.device)
    return library.dequantize(q.qdata, q.block_scale, one, one, Recipe.ALIGNED.value, torch.bfloat16, "triton")


def _quantized(
    x: Tensor,
    activation: ActivationFormat,
    residual: ResidualConfig | None,
    input_amax: Tensor | None,
    mask: Tensor | None,
) -> list[NVFP4Tensor]:
    """``Q(x)`` and, where ``residual`` selects something, ``Q(m * (x - Q(x)))``."""
    if residual is not None:
        both = reference_matmul.residual_quantize(x, residual, activation, input_amax, mask)
        return [q for q in both if q is not None]
    if activation.scale is ActivationScale.STATIC:
        amax = input_amax
    else:
        amax = library.amax([x], [-1] if activation.scale is ActivationScale.PER_TOKEN else None, "triton")
    recipe = activation.recipe
    qdata, block_scale, p, stored = library.quantize(x, None, amax, recipe.value, "triton")
    return [NVFP4Tensor(qdata, block_scale, p, recipe, stored if stored.numel() else p)]


def linear_w4a4(
    x: Tensor,
    weight: NVFP4Tensor,
    bias: Tensor | None,
    activation: ActivationFormat,
    input_amax: Tensor | None,
    residual: ResidualConfig | None = None,
    mask: Tensor | None = None,
    offs: Tensor | None = None,
) -> Tensor:
    """``reference_matmul.linear_w4a4``, with ``residual`` its ``residual_linear``.

    With ``offs`` of each expert, as far as :func:`quantizes_groups` goes. Both terms of a residual meet each tile of
    the weight while it is decoded: one pass over the weights.
    """
    if _scaled_by_row(weight):
        options: dict[str, Any] = {"activation": activation, "input_amax": input_amax}
        if residual is None:
            return reference_matmul.linear_w4a4(x.detach(), weight, bias, **options)
        return reference_matmul.residual_linear(x.detach(), weight, residual, bias, mask=mask, **options)
    rows = x.detach().reshape(-1, x.shape[-1])
    native = offs is None and _multiplies_fp4(x.device)
    if activation.recipe is Recipe.ALIGNED and not native:
        ordered = _wants_order(rows, weight, activation, activations.count_of_terms(residual, rows.shape[-1]), offs)
        groups = offs if shares_units(activation, residual, mask) else None
        how = activation, residual, input_amax, mask, False, "triton", ordered, groups
        terms, _ = activations.quantize_activation(rows, *how)
        y = _multiply(*_pair(terms), weight, bias, None, offs, x.dtype, ordered)
    else:
        packed = _quantized(rows, activation, residual, input_amax, mask)
        if native:
            y = _native(packed, weight, bias, x.dtype)
        else:
            scales = torch.stack([q.per_tensor_scale.reshape(-1).expand(len(rows)) for q in packed])
            y = _multiply(*_pair([_operand(q) for q in packed]), weight, bias, scales, offs, x.dtype)
    return y.view(*x.shape[:-1], weight.shape[-2])
