"""Gradients that low-rank adapters need: through packed weights, and through a quantized merged weight.

``y = x @ Q(W + sum s B A).T``: quantizing comes after merging, so that what is trained is what a merged export holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from quads_qat import autograd, library, ops, sharding
from quads_qat.config import Recipe, WeightFormat
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.scale_groups import whole


class Factors(NamedTuple):
    """One low-rank update ``scaling * b @ a`` of a weight [N, K], or of a stack of experts [E, N, K].

    Of a stack that is stored [E, K, N] the update is the transposed one: N and K change places.
    """

    a: Tensor  #: [r, K] or [E, r, K]
    b: Tensor  #: [N, r] or [E, N, r]
    scaling: float


@dataclass(eq=False)
class Adapted:
    """What is quantized in the place of a parameter: kept as ``module.__dict__["adapted"][parameter]``.

    Attributes:
        factors: gives the updates that are active now.
    """

    factors: Callable[[], list[Factors]]

    def __call__(self, weight: Tensor) -> Tensor:
        """The merged weight. No gradient."""
        return merge(weight, self.factors())


_PIECE = 1 << 24  # elements


def _pieces(stack: Tensor) -> list[slice]:
    """Of the experts of a stack [E, ...]: what is made of them in fp32 is made of one piece at a time."""
    experts = max(1, _PIECE // max(1, stack.shape[1:].numel()))
    return [slice(i, i + experts) for i in range(0, stack.shape[0], experts)]


# ---------------------------------------------------------------------------------------------------- merged, quantized


@torch.library.custom_op("quads_qat::merge_adapters", mutates_args=())
def _merge(weight: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], scaling: Sequence[float]) -> Tensor:
    """In a graph too this is one call: a compiler that fused the product would change its bits."""
    with torch.autocast(weight.device.type, enabled=False):  # a merge outside of autocast must give the same
        if weight.ndim == 2:
            total = weight.float()
            for right, left, factor in zip(a, b, scaling, strict=True):
                total = total + (left.float() @ right.float()) * factor
            return total.to(weight.dtype)
        out = torch.empty_like(weight)
        for part in _pieces(weight):
            total = weight[part].to(torch.float32, copy=True)
            for right, left, factor in zip(a, b, scaling, strict=True):
                total.baddbmm_(left[part].float(), right[part].float(), alpha=factor)
            out[part] = total
        return out


@_merge.register_fake
def _(weight: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], scaling: Sequence[float]) -> Tensor:
    return torch.empty_like(weight)


def merge(weight: Tensor, factors: Sequence[Factors]) -> Tensor:
    """``weight + sum s B A``, summed in fp32 and rounded once to the weight's dtype. No gradient.

    A stack of experts costs, besides the result, fp32 copies of 2**24 of its elements (at least one expert).

    A sharded weight (DTensor) gives one sharded alike, after a gather that all its ranks must take part in: the GEMM is
    the whole one on every rank, so that its bits are.

    >>> merge(torch.zeros(2, 16), [Factors(torch.ones(1, 16), torch.ones(2, 1), 0.5)])[0, 0]
    tensor(0.5000)
    """
    if not factors:
        return weight
    a, b = ([whole(t.detach()) for t in ts] for ts in ([f.a for f in factors], [f.b for f in factors]))
    merged = _merge(whole(weight.detach()), a, b, [f.scaling for f in factors])
    if not sharding.is_sharded(weight):
        return merged
    from torch.distributed.tensor import distribute_tensor  # slow to import, and needed here only

    mesh, placements = weight.device_mesh, weight.placements  # pyright: ignore[reportAttributeAccessIssue]
    return distribute_tensor(merged, mesh, placements, src_data_rank=None)


class _MergedLinear(torch.autograd.Function):
    """``y = x @ Q(W + sum s B A).T + bias``; keeps x, W and the factors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        amax: Tensor | None,
        fmt: WeightFormat | None,
        scaling: tuple[float, ...],
        *factors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, amax, *factors)
        ctx.fmt, ctx.scaling = fmt, scaling
        ctx.bias_dtype = None if bias is None else bias.dtype
        weight = merge(weight, _factors(factors, scaling))
        used = weight.to(x.dtype) if fmt is None else autograd.fake_quantize_weight(weight, amax, fmt, x.dtype)
        return library.own(F.linear(x, used, None if bias is None else bias.to(x.dtype)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, amax, *factors = ctx.saved_tensors
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        grads: list[Tensor | None] = [None] * (6 + len(factors))
        if ctx.needs_input_grad[0]:
            grads[0] = rows.mm(_used_again(ctx, weight, amax, factors, x.dtype, grad)).view(x.shape)
        if ctx.needs_input_grad[1]:
            grads[1] = rows.t().mm(inputs).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grads[2] = rows.sum(0).to(ctx.bias_dtype)
        for i, (a, b, scaling) in enumerate(_factors(factors, ctx.scaling)):
            # the gradient of the whole weight, rows.T @ inputs, is never made: r rows or columns of it will do
            if ctx.needs_input_grad[6 + 2 * i]:
                grads[6 + 2 * i] = (rows.to(b.dtype) @ b).t().mm(inputs.to(b.dtype)).to(a.dtype) * scaling
            if ctx.needs_input_grad[7 + 2 * i]:
                grads[7 + 2 * i] = rows.to(a.dtype).t().mm(inputs.to(a.dtype) @ a.t()).to(b.dtype) * scaling
        return tuple(grads)


def _factors(flat: Sequence[Tensor], scaling: Sequence[float]) -> list[Factors]:
    return [Factors(flat[2 * i], flat[2 * i + 1], s) for i, s in enumerate(scaling)]


def _used_again(
    ctx: Any, weight: Tensor, amax: Tensor | None, flat: Sequence[Tensor], dtype: torch.dtype, grad: Tensor
) -> Tensor:
    """The weight that forward multiplied by; in a graph, not to be had before ``grad``."""
    first = autograd.after(flat[0], grad) if torch.compiler.is_compiling() else flat[0]
    weight = merge(weight, _factors((first, *flat[1:]), ctx.scaling))
    if ctx.fmt is None:
        return weight.to(dtype)
    return autograd.fake_quantize_weight_again(weight, amax, ctx.fmt, dtype, grad)


def merged_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: Sequence[Factors],
    amax: Tensor | None,
    fmt: WeightFormat | None,
) -> Tensor:
    """``F.linear`` by the fake-quantized merged weight: x [..., K], weight [N, K] -> [..., N].

    Gradients are straight-through to every factor: dA = s B.T (g.T x), dB = s (g.T x) A.T, in the factors' dtype.

    Args:
        x: [..., K]; cast to the autocast dtype under autocast.
        weight: [N, K], the base weight.
        bias: [N] or None.
        factors: at least one.
        amax: of the scale group, of merged weights.
        fmt: layout and recipe; None multiplies by the merged weight as it is.
    """
    if any(sharding.is_sharded(t) for t in (weight, *(t for f in factors for t in f[:2]))):
        raise ValueError(
            "merged_linear: tensor parallelism with adapters is not supported; shard with FSDP2, the base weight and "
            "its adapters in one unit"
        )
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        x = x.to(torch.get_autocast_dtype(kind))
    flat = [t for f in factors for t in (f.a, f.b)]
    scaling = tuple(f.scaling for f in factors)
    return _MergedLinear.apply(x, weight, bias, amax, fmt, scaling, *flat)  # pyright: ignore[reportReturnType]


# -------------------------------------------------------------------------------------------- merged, quantized, stacks


def _gradients_of_stack(grad: Tensor, factors: Sequence[Factors], needed: Sequence[bool]) -> list[Tensor | None]:
    """Of a, b, a, b, ...: ``s b.T grad`` and ``s grad a.T`` for each expert, ``grad`` [E, N, K] being the stack's."""
    grads: list[Tensor | None] = [None] * (2 * len(factors))
    for i, (a, b, scaling) in enumerate(factors):
        of_a, of_b = [], []
        for part in _pieces(grad) if any(needed[2 * i : 2 * i + 2]) else ():
            piece = grad[part].to(b.dtype)
            if needed[2 * i]:
                of_a.append(b[part].transpose(-2, -1) @ piece)
            if needed[2 * i + 1]:
                of_b.append(piece.to(a.dtype) @ a[part].transpose(-2, -1))
        if of_a:
            grads[2 * i] = torch.cat(of_a).to(a.dtype) * scaling
        if of_b:
            grads[2 * i + 1] = torch.cat(of_b).to(b.dtype) * scaling
    return grads


class _MergedStack(torch.autograd.Function):
    """``W + sum s B A``; keeps the factors."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, scaling: tuple[float, ...], *factors: Tensor) -> Tensor:
        ctx.save_for_backward(*factors)
        ctx.scaling = scaling
        return merge(weight, _factors(factors, scaling))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        factors = _factors(ctx.saved_tensors, ctx.scaling)
        of_factors = _gradients_of_stack(grad, factors, ctx.needs_input_grad[2:])
        return grad if ctx.needs_input_grad[0] else None, None, *of_factors


def merged_stack(weight: Tensor, factors: Sequence[Factors]) -> Tensor:
    """:func:`merge` of experts that lets gradients through, to the weight and every factor: for forwards not ours.

    Keeps nothing but the factors, and in backward makes the gradient of the whole stack. Without factors: ``weight``.
    """
    if not factors:
        return weight
    flat = [t for f in factors for t in (f.a, f.b)]
    return _MergedStack.apply(weight, tuple(f.scaling for f in factors), *flat)  # pyright: ignore[reportReturnType]


class _MergedGroupedLinear(torch.autograd.Function):
    """``y[rows of expert e] = x[...] @ Q(W[e] + sum s B[e] A[e]).T``; keeps x, W and the factors."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        offs: Tensor,
        amax: Tensor,
        fmt: WeightFormat,
        scaling: tuple[float, ...],
        *factors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, offs, amax, *factors)
        ctx.fmt, ctx.scaling = fmt, scaling
        used = autograd.fake_quantize_weight(merge(weight, _factors(factors, scaling)), amax, fmt, x.dtype)
        return autograd.grouped_mm(x, used if fmt.transposed else used.transpose(-2, -1), offs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, offs, amax, *factors = ctx.saved_tensors
        grad_x = grad_weight = None
        of_factors: list[Tensor | None] = [None] * len(factors)
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            used = _used_again(ctx, weight, amax, factors, x.dtype, grad)
            grad_x = autograd.grouped_mm(grad, used.transpose(-2, -1) if ctx.fmt.transposed else used, offs)
            del used  # before the stack's gradient is there
        if ctx.needs_input_grad[1] or any(ctx.needs_input_grad[6:]):
            left, right = (x, grad) if ctx.fmt.transposed else (grad, x)
            grad_weight = autograd.grouped_mm(left.transpose(-2, -1), right, offs).to(weight.dtype)
            of_factors = _gradients_of_stack(grad_weight, _factors(factors, ctx.scaling), ctx.needs_input_grad[6:])
        return grad_x, grad_weight if ctx.needs_input_grad[1] else None, None, None, None, None, *of_factors


def merged_grouped_linear(
    x: Tensor, weight: Tensor, offs: Tensor, factors: Sequence[Factors], amax: Tensor, fmt: WeightFormat
) -> Tensor:
    """``autograd.grouped_linear`` by the fake-quantized merged stack: x [M, K] -> [M, N], in the weight's dtype.

    Gradients are straight-through to every factor: dA = s B.T dW, dB = s dW A.T for each expert. dW, the gradient of
    the whole stack in the weight's dtype, is made for that and let go: one GEMM without a host sync, where products
    with r columns in fp32 would need a loop over experts.

    Args:
        x: [M, K], rows sorted by expert.
        weight: [E, N, K], or [E, K, N] when ``fmt.transposed``: the base weight.
        offs: [E] int32, end row of each expert's group; a group may be empty.
        factors: at least one.
        amax: [E] or [], of the scale group, of merged weights.
        fmt: layout and recipe.
    """
    flat = [t for f in factors for t in (f.a, f.b)]
    scaling = tuple(f.scaling for f in factors)
    return _MergedGroupedLinear.apply(x.to(weight.dtype), weight, offs, amax, fmt, scaling, *flat)  # pyright: ignore[reportReturnType]


# --------------------------------------------------------------------------------------------------------------- packed


class _PackedLinear(torch.autograd.Function):
    """``y = x @ dequantize(W).T + bias`` with a gradient for x; keeps the codes, which are there anyway."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, offs: Tensor | None, recipe: Recipe, *parts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(offs, *parts)
        ctx.recipe, ctx.shape = recipe, x.shape
        ctx.bias_dtype = None if bias is None else bias.dtype
        weight = _packed(parts, recipe)
        if offs is None:
            return library.own(ops.linear_w4a16(x, weight, bias))
        return library.own(ops.grouped_linear_w4a16(x, weight, offs, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        offs, *parts = ctx.saved_tensors
        grad_x = grad_bias = None
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[0]:
            weight = ops.dequantize(_packed(parts, ctx.recipe), grad.dtype)
            product = rows.mm(weight) if offs is None else autograd.grouped_mm(rows.contiguous(), weight, offs)
            grad_x = product.view(ctx.shape)
        if offs is None and ctx.needs_input_grad[1]:
            grad_bias = rows.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_bias, None, None, *(None for _ in parts)


def _packed(parts: Sequence[Tensor], recipe: Recipe) -> NVFP4Tensor:
    qdata, block_scale, per_tensor_scale, stored_scale = parts
    return NVFP4Tensor(qdata, block_scale, per_tensor_scale, recipe, stored_scale)


def packed_linear(x: Tensor, weight: NVFP4Tensor, bias: Tensor | None = None, offs: Tensor | None = None) -> Tensor:
    """``ops.linear_w4a16``, with ``offs`` ``ops.grouped_linear_w4a16``, that lets a gradient through to x.

    The weight is decoded for the backward GEMM alone: nothing but its codes is kept. Biases of experts get none.
    """
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        parts = weight.qdata, weight.block_scale, weight.per_tensor_scale, weight.stored_scale
        return _PackedLinear.apply(x, bias, offs, weight.recipe, *parts)  # pyright: ignore[reportReturnType]
    if offs is None:
        return ops.linear_w4a16(x, weight, bias)
    return ops.grouped_linear_w4a16(x, weight, offs, bias)
