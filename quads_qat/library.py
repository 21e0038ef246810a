"""The element-wise operators as ``torch.library`` sees them: backend dispatch and shapes, no checks.

Each has a fake kernel, so ``torch.compile(fullgraph=True)`` keeps it as one opaque call and the bits stay those of the
backend. ``ops`` checks arguments and calls them; tensors come detached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quads_qat import reference
from quads_qat.config import Recipe
from quads_qat.formats import BLOCK_SIZE
from quads_qat.packing import swizzle_block_scale
from quads_qat.qtensor import NVFP4Tensor

STORED_APART = (Recipe.LLM_COMPRESSOR, Recipe.TRANSFORMER_ENGINE)
"""Recipes that store another number than the per-tensor scale."""

_RECIPES = {recipe.value: recipe for recipe in Recipe}  # a lookup, where Recipe(...) takes a microsecond
_LIBRARY = torch.library.Library("quads_qat", "FRAGMENT")


def define(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register ``function`` as ``quads_qat::name``, ``fake`` as its shapes; neither sees tensors that want gradients.

    ``torch.library.custom_op`` would do, but adds some 20 us of Python to every call, as much as a launch.
    """
    _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, _undisturbed(function), "CompositeExplicitAutograd")
    torch.library.register_fake(f"quads_qat::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.quads_qat, name).default


def _undisturbed(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the GPU of its first argument as the current one, and without autocast.

    Triton launches on whichever GPU is current; layers lie on several of one process (``device_map="auto"``), or
    trainer and rollout do. Autocast to another 16-bit dtype than the tensors' refuses some of what is inside.
    """

    def call(first: Tensor | list[Tensor], *args: Any, **kwargs: Any) -> Any:
        x = first[0] if isinstance(first, list | tuple) else first
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return call(first, *args, **kwargs)
        if x.is_cuda and x.device.index != torch.cuda.current_device():
            with torch.cuda.device(x.device):
                return function(first, *args, **kwargs)
        return function(first, *args, **kwargs)

    return call


def own(out: Tensor) -> Tensor:
    """``out``, no view in autograd's eyes: of an autograd function, a view could not be changed in place after it."""
    if type(out) is Tensor and (torch.compiler.is_compiling() or out._is_view()):  # a graph cannot ask
        return torch.ops.aten._unsafe_view.default(out, out.shape)
    return out


def _amax(tensors: list[Tensor], dim: list[int] | None, backend: str = "reference") -> Tensor:
    dims = None if dim is None else tuple(dim)
    if backend == "triton" and _kernel_reduces(tensors[0], dims):
        from quads_qat.kernels.amax import amax as kernel

        return kernel(tensors, dims)
    return reference.amax(*tensors, dim=dims).clone()


def _amax_meta(tensors: list[Tensor], dim: list[int] | None, backend: str = "reference") -> Tensor:
    x = tensors[0]
    return x.new_empty(()) if dim is None else x.sum(dim, keepdim=dim == [-1])  # its shape; amax refuses empty dims


amax = define("amax", _amax, _amax_meta)


def _kernel_reduces(x: Tensor, dim: tuple[int, ...] | None) -> bool:
    """Whether the kernel knows this reduction: everything, all but the first dim, or the last dim."""
    return dim is None or dim == (-1,) or (x.ndim > 1 and tuple(d % x.ndim for d in dim) == tuple(range(1, x.ndim)))


def _spread(scale: Tensor, x: Tensor) -> Tensor:
    """A scale [..., 1] that rows of ``x`` share, one for each row; any other as it is. Kernels do not broadcast."""
    if scale.numel() == 1 or scale.ndim < x.ndim or scale.shape[:-1] == x.shape[:-1]:
        return scale
    return scale.expand(*x.shape[:-1], 1)


def _scale_from_amax(tensor_amax: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    p, stored = reference.scale_from_amax(tensor_amax, _RECIPES[recipe])
    return p.clone(), stored.clone()


def _scale_from_amax_meta(tensor_amax: Tensor, recipe: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tensor_amax, dtype=torch.float32), torch.empty_like(tensor_amax, dtype=torch.float32)


scale_from_amax = define("scale_from_amax", _scale_from_amax, _scale_from_amax_meta)


def _quantize(
    x: Tensor,
    per_tensor_scale: Tensor | None,
    tensor_amax: Tensor | None,
    recipe: str,
    backend: str = "reference",
    swizzled: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    which = _RECIPES[recipe]
    written = False  # whether the kernel wrote swizzled scales
    if backend == "triton":
        from quads_qat.kernels.amax import amax
        from quads_qat.kernels.quantize import quantize as kernel

        if per_tensor_scale is None and tensor_amax is None:
            tensor_amax = amax([x], None)
        given = per_tensor_scale if tensor_amax is None else tensor_amax
        written = swizzled and x.ndim <= 3 and given is not None and given.ndim < x.ndim
        if which is Recipe.ALIGNED and tensor_amax is not None and _spread(tensor_amax, x) is tensor_amax:
            qdata, block_scale, p = kernel(x, tensor_amax, recipe=which, from_amax=True, swizzled=written)
            stored = p
        else:
            p, stored, source = reference.scales(x, per_tensor_scale, tensor_amax, which)
            spread = (_spread(t, x) for t in (p, stored, source))
            qdata, block_scale, _ = kernel(x, *spread, recipe=which, swizzled=written)
    else:
        q = reference.quantize(x, per_tensor_scale, tensor_amax=tensor_amax, recipe=which)
        qdata, block_scale, p, stored = q.qdata, q.block_scale, q.per_tensor_scale, q.stored_scale
    if swizzled and not written:
        block_scale = swizzle_block_scale(block_scale)
    p = p.clone() if p is per_tensor_scale else p  # an operator may not return what it was given
    return qdata, block_scale, p, stored.clone() if which in STORED_APART else p.new_empty(0)


def _quantize_meta(
    x: Tensor,
    per_tensor_scale: Tensor | None,
    tensor_amax: Tensor | None,
    recipe: str,
    backend: str = "reference",
    swizzled: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *lead, k = x.shape
    given = per_tensor_scale if per_tensor_scale is not None else tensor_amax
    scale = x.new_empty(() if given is None else given.shape, dtype=torch.float32)
    block_scale = x.new_empty((*lead, k // BLOCK_SIZE), dtype=torch.float8_e4m3fn)
    return (
        x.new_empty((*lead, k // 2), dtype=torch.uint8),
        swizzle_block_scale(block_scale) if swizzled else block_scale,
        scale,
        torch.empty_like(scale) if _RECIPES[recipe] in STORED_APART else scale.new_empty(0),
    )


quantize = define("quantize", _quantize, _quantize_meta)


def _dequantize(
    qdata: Tensor,
    block_scale: Tensor,
    per_tensor_scale: Tensor,
    stored_scale: Tensor,
    recipe: str,
    dtype: torch.dtype,
    backend: str = "reference",
) -> Tensor:
    if backend == "triton":
        from quads_qat.kernels.dequantize import dequantize as kernel

        p, stored = _spread(per_tensor_scale, qdata), _spread(stored_scale, qdata)
        return kernel(qdata, block_scale, p, stored, recipe=_RECIPES[recipe], dtype=dtype)
    return reference.dequantize(
        NVFP4Tensor(qdata, block_scale, per_tensor_scale, _RECIPES[recipe], stored_scale), dtype
    )


def _dequantize_meta(
    qdata: Tensor,
    block_scale: Tensor,
    per_tensor_scale: Tensor,
    stored_scale: Tensor,
    recipe: str,
    dtype: torch.dtype,
    backend: str = "reference",
) -> Tensor:
    return qdata.new_empty((*qdata.shape[:-1], 2 * qdata.shape[-1]), dtype=dtype)


dequantize = define("dequantize", _dequantize, _dequantize_meta)


def _fake_quantize(
    x: Tensor,
    per_tensor_scale: Tensor | None,
    tensor_amax: Tensor | None,
    recipe: str,
    dtype: torch.dtype,
    backend: str = "reference",
) -> Tensor:
    which = _RECIPES[recipe]
    if backend == "triton":
        from quads_qat.kernels.amax import amax
        from quads_qat.kernels.fake_quantize import fake_quantize as kernel

        if per_tensor_scale is None and tensor_amax is None:
            tensor_amax = amax([x], None)
        if which is Recipe.ALIGNED and tensor_amax is not None:
            given = _spread(tensor_amax, x)
            return kernel(x, given, given, given, from_amax=True, recipe=which, dtype=dtype)
        scales = (_spread(t, x) for t in reference.scales(x, per_tensor_scale, tensor_amax, which))
        return kernel(x, *scales, from_amax=False, recipe=which, dtype=dtype)
    return reference.fake_quantize(x, per_tensor_scale, tensor_amax=tensor_amax, recipe=which, dtype=dtype)


def _fake_quantize_meta(
    x: Tensor,
    per_tensor_scale: Tensor | None,
    tensor_amax: Tensor | None,
    recipe: str,
    dtype: torch.dtype,
    backend: str = "reference",
) -> Tensor:
    scale = tensor_amax if per_tensor_scale is None else per_tensor_scale
    stack = x.ndim == 3 and not x.is_contiguous() and x.mT.is_contiguous() and (scale is None or scale.ndim <= 1)
    if backend == "triton" and stack:  # the kernel keeps the layout of a transposed stack
        return x.new_empty(x.mT.shape, dtype=dtype).mT
    return x.new_empty(x.shape, dtype=dtype)


fake_quantize = define("fake_quantize", _fake_quantize, _fake_quantize_meta)

# A second op with the same arithmetic. With one op for both, the compiled joint graph would merge the backward's call
# with the forward's and keep the quantized weight alive in between.
fake_quantize_backward = define("fake_quantize_backward", _fake_quantize, _fake_quantize_meta)
