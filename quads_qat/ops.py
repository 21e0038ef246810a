"""The only door to the arithmetic: argument checks and backend choice. Gradients live in ``autograd.py``.

Every function calls an operator that ``library`` registers, so that graphs keep it whole.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from quads_qat import activations, checks, gemms, library, no_gradient, reference_matmul
from quads_qat.config import (
    ActivationFormat,
    Backend,
    Recipe,
    ResidualConfig,
    ResidualScope,
)
from quads_qat.qtensor import NVFP4Tensor

_HAS_TRITON = find_spec("triton") is not None


def _resolve(backend: Backend | str, x: Tensor) -> str:
    """The backend to use for ``x``: Triton for CUDA tensors where it is installed, else the reference."""
    if not isinstance(backend, Backend):  # torch 2.11 cannot trace Backend(...) of a member
        backend = Backend(backend)
    if backend is Backend.AUTO:
        return (Backend.TRITON if x.is_cuda and _HAS_TRITON else Backend.REFERENCE).value
    if backend is Backend.TRITON and not _HAS_TRITON:
        raise ValueError("backend='triton' needs the triton package; pip install triton, or use backend='auto'")
    if backend is Backend.TRITON and not x.is_cuda and not _interpreting():
        raise ValueError(f"backend='triton' needs a CUDA tensor, got one on {x.device}; move it, or use backend='auto'")
    return backend.value


def _interpreting() -> bool:
    from triton import knobs

    return knobs.runtime.interpret


# --------------------------------------------------------------------------------------------------------------- public


def amax(*tensors: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Largest finite magnitude over all ``tensors`` (a scale group), in their dtype.

    Args:
        tensors: one or more, same dtype and device.
        dim: dims to reduce; None reduces all -> []; (1, 2) of [E, N, K] -> [E]; -1 is kept -> [..., 1].

    Raises:
        TypeError, ValueError: no tensors, mixed dtypes or devices, or dims that do not fit.

    >>> amax(torch.tensor([1.0, -3.0]), torch.tensor([2.0]))
    tensor(3.)
    """
    checks.check_scale_group(tensors)
    dims = None if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if dims is not None:
        checks.check_amax_dims(tensors, dims)
    return library.amax([x.detach() for x in tensors], dims, _resolve(Backend.AUTO, tensors[0]))


def per_tensor_scale(
    x: Tensor, *, recipe: Recipe | str = Recipe.ALIGNED, dim: int | tuple[int, ...] | None = None
) -> Tensor:
    """The float32 scale (it multiplies) that ``recipe`` gives ``x``; ``dim`` as in :func:`amax`.

    >>> per_tensor_scale(torch.tensor([2688.0]))
    tensor(1.)
    """
    return scale_from_amax(amax(x, dim=dim), recipe=recipe)[0]


def scale_from_amax(tensor_amax: Tensor, *, recipe: Recipe | str = Recipe.ALIGNED) -> tuple[Tensor, Tensor]:
    """``(per_tensor_scale, stored_scale)``, float32, of a tensor with this amax (in its dtype): same shape."""
    checks.check_amax("scale_from_amax", tensor_amax)
    return library.scale_from_amax(tensor_amax.detach(), Recipe(recipe).value)


def quantize(
    x: Tensor,
    per_tensor_scale: Tensor | None = None,
    *,
    tensor_amax: Tensor | None = None,
    recipe: Recipe | str = Recipe.ALIGNED,
    check_finite: bool | None = None,
    backend: Backend | str = Backend.AUTO,
) -> NVFP4Tensor:
    """Quantize ``x`` to E2M1 codes, E4M3 block scales and a per-tensor scale.

    Args:
        x: [..., K] float32, bfloat16 or float16, any strides, K % 16 == 0. It is never cast.
        per_tensor_scale: float32 [] | [E] for [E, N, K] | [..., 1], used as given. ALIGNED needs powers of two
            (checked on a CPU, a precondition on a GPU).
        tensor_amax: amax of the whole scale group instead of ``x``'s own; same shapes.
        recipe: the arithmetic, see ``reference``.
        check_finite: raise on NaN and inf. None: on a CPU only. Unchecked, their blocks become NaN.
        backend: which implementation; the bits do not depend on it.

    Raises:
        TypeError, ValueError: dtype, shape or values outside the above.

    >>> q = quantize(torch.ones(2, 32))
    >>> q.qdata.shape, q.block_scale.shape, q.per_tensor_scale
    (torch.Size([2, 16]), torch.Size([2, 2]), tensor(0.0005))
    """
    recipe = Recipe(recipe)
    checks.check_quantize("quantize", x, per_tensor_scale, tensor_amax, recipe, check_finite)
    resolved = _resolve(backend, x)
    qdata, block_scale, p, stored = library.quantize(
        x.detach(), *_plain(per_tensor_scale, tensor_amax), recipe.value, resolved
    )
    return NVFP4Tensor(qdata, block_scale, p, recipe, stored if recipe in library.STORED_APART else p)


def _plain(*scales: Tensor | None) -> list[Tensor | None]:
    """Without gradients: a scale has none."""
    return [None if scale is None else scale.detach() for scale in scales]


def quantize_swizzled(
    x: Tensor,
    per_tensor_scale: Tensor | None = None,
    *,
    tensor_amax: Tensor | None = None,
    recipe: Recipe | str = Recipe.ALIGNED,
    check_finite: bool | None = None,
    backend: Backend | str = Backend.AUTO,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`quantize` with block scales in the order that Blackwell's tensor cores read, written by the same kernel.

    Args and errors as in :func:`quantize`; ``x`` is [..., N, K].

    Returns:
        qdata [..., N, K/2] uint8, block scales float8_e4m3fn [..., padded N * padded K/16] as
        ``packing.swizzle_block_scale`` arranges them, and the float32 per-tensor scale.

    >>> [t.shape for t in quantize_swizzled(torch.ones(2, 32))]
    [torch.Size([2, 16]), torch.Size([512]), torch.Size([])]
    """
    recipe = Recipe(recipe)
    checks.check_quantize("quantize_swizzled", x, per_tensor_scale, tensor_amax, recipe, check_finite)
    if x.ndim < 2:
        raise ValueError(
            f"quantize_swizzled: x must be [..., N, K], since tiles span rows, got {tuple(x.shape)}; use x[None]"
        )
    resolved = _resolve(backend, x)
    return library.quantize(x.detach(), *_plain(per_tensor_scale, tensor_amax), recipe.value, resolved, True)[:3]


def dequantize(q: NVFP4Tensor, dtype: torch.dtype = torch.bfloat16, *, backend: Backend | str = Backend.AUTO) -> Tensor:
    """Decode ``q`` into [..., K] of ``dtype``; exact in bfloat16 for ``Recipe.ALIGNED``.

    >>> dequantize(quantize(torch.full((16,), 5.25)))[0]
    tensor(5.2500, dtype=torch.bfloat16)
    """
    if not isinstance(q, NVFP4Tensor):
        raise TypeError(f"dequantize: q must be an NVFP4Tensor, got {type(q).__name__}; quantize it first")
    checks.check_output_dtype("dequantize", dtype)
    resolved = _resolve(backend, q.qdata)
    scales = q.per_tensor_scale, q.stored_scale
    return library.dequantize(q.qdata, q.block_scale, *scales, q.recipe.value, dtype, resolved)


def fake_quantize(
    x: Tensor,
    per_tensor_scale: Tensor | None = None,
    *,
    tensor_amax: Tensor | None = None,
    recipe: Recipe | str = Recipe.ALIGNED,
    dtype: torch.dtype | None = None,
    check_finite: bool | None = None,
    backend: Backend | str = Backend.AUTO,
) -> Tensor:
    """``dequantize(quantize(x, ...), dtype or x.dtype)``, the same bits, in one pass. No gradient: see ``autograd``.

    Args and errors as in :func:`quantize`; ``dtype`` is what the values are decoded into.

    >>> fake_quantize(torch.tensor([5.0] + [0.3] * 15))[:2]
    tensor([4.8750, 0.4062])
    """
    recipe = Recipe(recipe)
    checks.check_quantize("fake_quantize", x, per_tensor_scale, tensor_amax, recipe, check_finite)
    checks.check_output_dtype("fake_quantize", dtype or x.dtype)
    resolved = _resolve(backend, x)
    scales = _plain(per_tensor_scale, tensor_amax)
    values = library.fake_quantize(x.detach(), *scales, recipe.value, dtype or x.dtype, resolved)
    return no_gradient.refuse("fake_quantize", values, no_gradient.STRAIGHT_THROUGH, x)


def fake_quantize_again(x: Tensor, *, tensor_amax: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """:func:`fake_quantize` for a backward pass: the same bits from an op of its own, checks done by the forward."""
    backend = _resolve(Backend.AUTO, x)
    return library.fake_quantize_backward(x, None, tensor_amax, recipe.value, dtype, backend)


# ---------------------------------------------------------------------------------------------------------- activations


def quantize_activation(
    x: Tensor,
    activation: ActivationFormat | None = None,
    residual: ResidualConfig | None = None,
    *,
    input_amax: Tensor | None = None,
    mask: Tensor | None = None,
    return_mask: bool = False,
    backend: Backend | str = Backend.AUTO,
) -> tuple[Tensor, Tensor | None]:
    """The operands of a W4A4 GEMM, decoded: ``Q(x)`` and ``Q(m * (x - Q(x)))``. No gradient.

    Args:
        x: [..., K] float32, bfloat16 or float16, K % 16 == 0; a device's NaN and inf make their blocks NaN. For scope
            ``batch`` its rows form one unit.
        activation: recipe and scale of Q; None: ALIGNED, per token.
        residual: which channels are quantized a second time; None: none.
        input_amax: [] amax of a static activation scale.
        mask: [K] bool, the fixed mask of scope ``static``.
        return_mask: also return what was selected.
        backend: which implementation; the bits do not depend on it.

    Returns:
        ``(terms, mask)``. terms [T, ..., K], T = 2 where ``residual`` selects something, else 1: bfloat16 for ALIGNED,
        whose values are exact in it, float32 for other recipes. mask [..., K] bool, or None.

    >>> terms, _ = quantize_activation(torch.randn(4, 32), residual=ResidualConfig(fraction=0.5))
    >>> terms.shape, terms.dtype
    (torch.Size([2, 4, 32]), torch.bfloat16)
    """
    activation = activation or ActivationFormat()
    checks.check_input("quantize_activation", x)
    checks.check_activation("quantize_activation", x, activation, input_amax)
    if residual is not None:
        checks.check_static_mask("quantize_activation", x, residual, mask)
    terms, chosen = activations.quantize_activation(
        x.detach(), activation, residual, input_amax, mask, return_mask, _resolve(backend, x)
    )
    terms = no_gradient.refuse("quantize_activation", terms, no_gradient.WEIGHTS_ONLY, x)
    return terms, chosen if return_mask and terms.shape[0] == 2 else None


# ---------------------------------------------------------------------------------------------------------------- GEMMs


def linear_w4a16(
    x: Tensor, weight: NVFP4Tensor, bias: Tensor | None = None, *, backend: Backend | str = Backend.AUTO
) -> Tensor:
    """``x @ dequantize(weight).T + bias`` in x's dtype: x [..., K], weight [N, K] -> [..., N]. Weight-only.

    Backends differ in the order of the fp32 sum. On a GPU it is fixed, so that the same call gives the same bits, and
    a row's bits do not depend on what other rows hold; on how many there are only by the kernel and tiles that
    ``kernels.tiles.configuration`` chooses for them (of a stream: and how many tiles).
    """
    checks.check_gemm("linear_w4a16", x, weight)
    if _resolve(backend, x) == "triton":
        return gemms.linear_w4a16(x, weight, bias)
    return reference_matmul.linear_w4a16(x, weight, bias)


def linear_w4a4(
    x: Tensor,
    weight: NVFP4Tensor,
    bias: Tensor | None = None,
    *,
    activation: ActivationFormat | None = None,
    input_amax: Tensor | None = None,
    backend: Backend | str = Backend.AUTO,
) -> Tensor:
    """``Q(x) @ weight.T + bias``: accumulated in fp32, rounded once to x's dtype.

    Args:
        x: [..., K] float32, bfloat16 or float16.
        weight: [N, K].
        bias: [N] or None.
        activation: recipe and scale of Q; None: ALIGNED, per token.
        input_amax: [] amax that a static activation scale is made from.
        backend: backends differ in the order of the sum, not in the operands.

    Returns:
        [..., N] in x's dtype.
    """
    activation = activation or ActivationFormat()
    checks.check_gemm("linear_w4a4", x, weight)
    checks.check_activation("linear_w4a4", x, activation, input_amax)
    return _w4a4("linear_w4a4", x, weight, bias, backend, activation, input_amax)


def _w4a4(
    who: str,
    x: Tensor,
    weight: NVFP4Tensor,
    bias: Tensor | None,
    backend: Backend | str,
    activation: ActivationFormat,
    input_amax: Tensor | None,
    residual: ResidualConfig | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """:func:`linear_w4a4` or, with ``residual``, :func:`residual_linear`, of arguments that were checked."""
    if _resolve(backend, x) == "triton":
        out = gemms.linear_w4a4(x, weight, bias, activation, input_amax, residual, mask)
    else:
        options: dict[str, Any] = {"activation": activation, "input_amax": input_amax}
        if residual is None:
            out = reference_matmul.linear_w4a4(x, weight, bias, **options)
        else:
            out = reference_matmul.residual_linear(x, weight, residual, bias, mask=mask, **options)
    return no_gradient.refuse(who, out, no_gradient.WEIGHTS_ONLY, x, bias)


def residual_linear(
    x: Tensor,
    weight: NVFP4Tensor,
    residual: ResidualConfig,
    bias: Tensor | None = None,
    *,
    activation: ActivationFormat | None = None,
    input_amax: Tensor | None = None,
    mask: Tensor | None = None,
    backend: Backend | str = Backend.AUTO,
) -> Tensor:
    """``Q(x) @ weight.T + Q(m * (x - Q(x))) @ weight.T + bias``: the compensated W4A4 linear of QUADS.

    Args:
        x: [..., K]. For scope ``batch`` its rows form one unit, and a row's output depends on the others.
        weight: [N, K].
        residual: what is selected.
        bias: [N] or None.
        activation: recipe and scale of Q; None: ALIGNED, per token.
        input_amax: [] amax of a static activation scale.
        mask: [K] bool, the fixed mask of scope ``static``.
        backend: backends differ in the order of the sum, not in the operands.

    Returns:
        [..., N] in x's dtype.

    >>> q = quantize(torch.randn(8, 32))
    >>> residual_linear(torch.randn(4, 32), q, ResidualConfig(fraction=0.5)).shape
    torch.Size([4, 8])
    """
    activation = activation or ActivationFormat()
    checks.check_gemm("residual_linear", x, weight)
    checks.check_activation("residual_linear", x, activation, input_amax)
    checks.check_static_mask("residual_linear", x, residual, mask)
    return _w4a4("residual_linear", x, weight, bias, backend, activation, input_amax, residual, mask)


def grouped_linear_w4a16(
    x: Tensor, weight: NVFP4Tensor, offs: Tensor, bias: Tensor | None = None, *, backend: Backend | str = Backend.AUTO
) -> Tensor:
    """:func:`linear_w4a16` of each expert with its own rows. Of bf16 rows on a GPU the host reads no value of ``offs``.

    Args:
        x: [M, K], rows sorted by expert.
        weight: [E, N, K].
        offs: [E] int32, the row after each expert's last; ``offs[-1]`` = M. Experts may have no rows.
        bias: [E, N] or None.
        backend: backends differ in the order of the sum, not in the operands.

    Returns:
        [M, N] in x's dtype.

    >>> q = quantize(torch.randn(2, 8, 32))
    >>> grouped_linear_w4a16(torch.randn(3, 32), q, torch.tensor([1, 3], dtype=torch.int32)).shape
    torch.Size([3, 8])
    """
    checks.check_grouped_gemm("grouped_linear_w4a16", x, weight, offs)
    offs = offs.contiguous()
    if _resolve(backend, x) == "triton":
        return gemms.linear_w4a16(x, weight, bias, offs)
    return reference_matmul.grouped_linear_w4a16(x, weight, offs, bias)


def grouped_linear_w4a4(
    x: Tensor,
    weight: NVFP4Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    *,
    activation: ActivationFormat | None = None,
    input_amax: Tensor | None = None,
    backend: Backend | str = Backend.AUTO,
) -> Tensor:
    """:func:`linear_w4a4` of each expert with its own rows: arguments as there and in :func:`grouped_linear_w4a16`.

    An activation scale ``per_tensor`` is one for the rows of each expert. With a recipe other than ALIGNED it makes the
    host read ``offs`` on a GPU.
    """
    activation = activation or ActivationFormat()
    checks.check_grouped_gemm("grouped_linear_w4a4", x, weight, offs)
    checks.check_activation("grouped_linear_w4a4", x, activation, input_amax)
    return _grouped_w4a4("grouped_linear_w4a4", x, weight, offs, bias, backend, activation, input_amax)


def _grouped_w4a4(
    who: str,
    x: Tensor,
    weight: NVFP4Tensor,
    offs: Tensor,
    bias: Tensor | None,
    backend: Backend | str,
    activation: ActivationFormat,
    input_amax: Tensor | None,
    residual: ResidualConfig | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """:func:`_w4a4` of each expert: in one call where that quantizes the rows of all experts, else one by one."""
    offs = offs.contiguous()
    together = not gemms.shares_units(activation, residual, mask) or gemms.quantizes_groups(x, activation)
    if _resolve(backend, x) == "triton" and together:
        out = gemms.linear_w4a4(x, weight, bias, activation, input_amax, residual, mask, offs)
        return no_gradient.refuse(who, out, no_gradient.WEIGHTS_ONLY, x, bias)

    def of_expert(rows: Tensor, w: NVFP4Tensor, b: Tensor | None, expert: int) -> Tensor:
        fixed = mask[expert] if mask is not None and mask.ndim == 2 else mask
        return _w4a4(who, rows, w, b, backend, activation, input_amax, residual, fixed)

    return reference_matmul.grouped(x, weight, offs, bias, of_expert)


def grouped_residual_linear(
    x: Tensor,
    weight: NVFP4Tensor,
    offs: Tensor,
    residual: ResidualConfig,
    bias: Tensor | None = None,
    *,
    activation: ActivationFormat | None = None,
    input_amax: Tensor | None = None,
    mask: Tensor | None = None,
    backend: Backend | str = Backend.AUTO,
) -> Tensor:
    """:func:`residual_linear` of each expert with its own rows: arguments as there and in the grouped functions above.

    ``mask`` is [K], or [E, K] with a mask for each expert. Scope ``batch`` ranks the rows of each expert apart. It, a
    mask for each expert and an activation scale ``per_tensor`` make the host read ``offs`` on a GPU where the recipe of
    activations is not ALIGNED.
    """
    activation = activation or ActivationFormat()
    checks.check_grouped_gemm("grouped_residual_linear", x, weight, offs)
    checks.check_activation("grouped_residual_linear", x, activation, input_amax)
    checks.check_static_mask("grouped_residual_linear", x, residual, mask, len(weight.qdata))
    mask = mask if residual.scope is ResidualScope.STATIC else None
    return _grouped_w4a4(
        "grouped_residual_linear", x, weight, offs, bias, backend, activation, input_amax, residual, mask
    )
