"""What ``ops`` demands of its arguments: each error says who, the rule, what was got, and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from quads_qat import formats
from quads_qat.config import ActivationFormat, ActivationScale, Recipe, ResidualConfig, ResidualScope, require_kind
from quads_qat.formats import BLOCK_SIZE, FLOATS
from quads_qat.qtensor import NVFP4Tensor

T = TypeVar("T")


def check_input(who: str, x: Tensor) -> None:
    """X is a floating tensor [..., K] with K % 16 == 0."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{who}: x must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in FLOATS:
        raise TypeError(
            f"{who}: x must be float32, bfloat16 or float16, got {x.dtype}; convert it with x.to(torch.bfloat16)"
        )
    if x.ndim == 0:
        raise ValueError(f"{who}: x must have at least one dim (blocks run along the last), got a 0-dim tensor")
    if x.shape[-1] % BLOCK_SIZE:
        raise ValueError(
            f"{who}: the last dim must be a multiple of 16 (one NVFP4 block), got x.shape={tuple(x.shape)}; "
            f"pad it with {-x.shape[-1] % BLOCK_SIZE} zeros"
        )


def check_output_dtype(who: str, dtype: torch.dtype) -> None:
    """``dtype`` is one that values decode into."""
    if dtype not in FLOATS:
        raise TypeError(f"{who}: dtype must be float32, bfloat16 or float16, got {dtype}; decode, then convert")


def check_scale_shape(who: str, name: str, scale: Tensor, x: Tensor) -> None:
    """A scale or amax is [] | [E] for [E, N, K] | [..., 1]."""
    per_expert = x.ndim >= 2 and scale.shape == x.shape[:1] and scale.ndim < x.ndim
    per_row = scale.ndim == x.ndim and all(s in (1, n) for s, n in zip(scale.shape, (*x.shape[:-1], 1), strict=True))
    if scale.ndim and not (per_expert and x.ndim >= 3) and not per_row:
        raise ValueError(
            f"{who}: {name} must be [] (one for the tensor), [E] (one per expert of [E, N, K]) or [..., 1] (one per "
            f"row), got {name}.shape={tuple(scale.shape)} for x.shape={tuple(x.shape)}; reshape it"
        )


def check_aligned_scale(who: str, p: Tensor) -> None:
    """``Recipe.ALIGNED``: every scale is a power of two in range."""
    mantissa, exponent = torch.frexp(p)
    low, high = formats.ALIGNED_MIN_EXPONENT, formats.ALIGNED_MAX_EXPONENT
    valid = (mantissa == 0.5) & (exponent - 1 >= low) & (exponent - 1 <= high)
    if not bool(valid.all()):
        raise ValueError(
            f"{who}: Recipe.ALIGNED needs per_tensor_scale = 2**k with {low} <= k <= {high}, "
            f"got {p.flatten()[~valid.flatten()][0].item()}; use ops.per_tensor_scale(x), or round an imported scale "
            "up to a power of two"
        )


def check_scales(who: str, x: Tensor, p: Tensor | None, tensor_amax: Tensor | None, recipe: Recipe) -> None:
    """At most one of scale and amax is given, on x's device, of a right shape, dtype and value."""
    if p is not None and tensor_amax is not None:
        raise ValueError(f"{who}: give per_tensor_scale or tensor_amax, got both; drop one")
    for name, scale in (("per_tensor_scale", p), ("tensor_amax", tensor_amax)):
        if scale is None:
            continue
        if not isinstance(scale, Tensor):
            raise TypeError(
                f"{who}: {name} must be a torch.Tensor, got {type(scale).__name__}; wrap it in torch.tensor"
            )
        if scale.device != x.device:
            raise ValueError(f"{who}: {name} is on {scale.device}, x on {x.device}; move it with {name}.to(x.device)")
        check_scale_shape(who, name, scale, x)
    if p is not None:
        if p.dtype != torch.float32:
            raise TypeError(f"{who}: per_tensor_scale must be float32, got {p.dtype}; convert it with .float()")
        if can_look(p):
            if recipe is Recipe.ALIGNED:
                check_aligned_scale(who, p)
            else:
                check_values(who, "per_tensor_scale", p, torch.isfinite(p) & (p > 0), "finite and > 0")
    if tensor_amax is not None:
        check_amax(who, tensor_amax)


def check_quantize(
    who: str,
    x: Tensor,
    per_tensor_scale: Tensor | None,
    tensor_amax: Tensor | None,
    recipe: Recipe,
    check_finite: bool | None,
) -> None:
    """``x``, its scale or amax, and by default on a CPU that it is finite."""
    check_input(who, x)
    check_scales(who, x, per_tensor_scale, tensor_amax, recipe)
    if check_finite or (check_finite is None and can_look(x)):
        way_out = "find the step that made them, or pass check_finite=False to turn their blocks into NaN"
        require_finite(who, x, "x", way_out)


def check_amax(who: str, tensor_amax: Tensor) -> None:
    """``tensor_amax`` is a floating tensor, finite and >= 0."""
    dtype = getattr(tensor_amax, "dtype", type(tensor_amax).__name__)
    if dtype not in FLOATS:
        raise TypeError(f"{who}: tensor_amax must be float32, bfloat16 or float16, got {dtype}; use ops.amax(x)")
    if can_look(tensor_amax):
        check_values(who, "tensor_amax", tensor_amax, tensor_amax.isfinite() & (tensor_amax >= 0), "finite and >= 0")


def check_values(who: str, name: str, scale: Tensor, valid: Tensor, rule: str) -> None:
    """All of ``valid`` holds; the error shows the first value that breaks ``rule``."""
    if not bool(valid.all()):
        got = scale.flatten()[~valid.flatten()][0].item()
        raise ValueError(
            f"{who}: {name} must be {rule}, got {got}; let ops.{name.removeprefix('tensor_')}(x) compute it"
        )


def check_scale_group(tensors: tuple[Tensor, ...]) -> None:
    """The members that ``amax`` reduces: floating tensors of one dtype, on one device."""
    if not tensors:
        raise ValueError("amax: give at least one tensor, got none; pass the members of the scale group")
    for x in tensors:
        if not isinstance(x, Tensor):
            raise TypeError(
                f"amax: members must be torch.Tensor, got {type(x).__name__}; unpack a list: amax(*members)"
            )
        if x.dtype not in FLOATS:
            raise TypeError(
                f"amax: tensors must be float32, bfloat16 or float16, got {x.dtype}; convert with x.to(torch.bfloat16)"
            )
        if x.dtype != tensors[0].dtype or x.device != tensors[0].device:
            raise ValueError(
                f"amax: the members of a scale group must share dtype and device, got {tensors[0].dtype} on "
                f"{tensors[0].device} and {x.dtype} on {x.device}; convert them first"
            )


def check_amax_dims(tensors: tuple[Tensor, ...], dims: list[int]) -> None:
    """``dims`` are dims of every tensor, and what they leave is equal."""
    for x in tensors:
        if any(not -x.ndim <= d < x.ndim for d in dims):
            raise ValueError(
                f"amax: dim must name dims of each tensor, got dim={dims} for shape {tuple(x.shape)}; fix it"
            )
    left = [[n for i, n in enumerate(x.shape) if i not in dims and i - x.ndim not in dims] for x in tensors]
    if any(shape != left[0] for shape in left):
        raise ValueError(
            f"amax: the shapes left after reducing dim={dims} must be equal, got {left}; reduce more dims, or call "
            "amax for each"
        )


def can_look(x: Tensor) -> bool:
    """Whether reading a value costs nothing: on a CPU, and not while a graph is being traced."""
    return (
        x.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(x, torch._subclasses.FakeTensor)
    )


class NotFiniteError(ValueError):
    """A tensor holds NaN or inf."""


OF_A_WEIGHT = "go back to a checkpoint without them, and find the step that made them"
OF_AN_INPUT = "find the layer before that made them"


def require_finite(who: str, x: Tensor, what: str, way_out: str) -> None:
    """Raise :class:`NotFiniteError` if ``x``, which is ``what`` to its caller, holds NaN or inf; syncs on a GPU."""
    if x.numel() == 0:
        return
    low, high = torch.aminmax(x.detach())
    if not bool(torch.isfinite(low) & torch.isfinite(high)):
        bad = int((~torch.isfinite(x)).sum())
        raise NotFiniteError(
            f"{who}: {what} holds {bad} NaN or inf of {x.numel()} elements (shape {tuple(x.shape)}); {way_out}"
        )


def naming(name: Callable[[], str], call: Callable[[], T]) -> T:
    """``call()``; where it meets NaN or inf, which is looked for in eager mode only, the error says where."""
    if torch.compiler.is_compiling():
        return call()
    try:
        return call()
    except NotFiniteError as error:
        if not name():
            raise
        raise NotFiniteError(f"{name()}: {error}") from None


def check_gemm(who: str, x: Tensor, weight: NVFP4Tensor) -> None:
    """``weight`` is [N, K] with x's K, on x's device."""
    check_input(who, x)
    if len(weight.shape) != 2 or weight.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"{who}: weight must be [N, K] with x's K, got x.shape={tuple(x.shape)} and weight {tuple(weight.shape)}"
        )
    if weight.device != x.device:
        raise ValueError(f"{who}: the weight is on {weight.device}, x on {x.device}; move one of them")


def check_grouped_gemm(who: str, x: Tensor, weight: NVFP4Tensor, offs: Tensor) -> None:
    """X is [M, K], ``weight`` [E, N, K], ``offs`` [E] int32 that rises to M, all on one device."""
    check_input(who, x)
    if x.ndim != 2 or len(weight.shape) != 3 or weight.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"{who}: x must be [M, K] and weight [E, N, K], got x.shape={tuple(x.shape)} and weight "
            f"{tuple(weight.shape)}; flatten x to rows sorted by expert"
        )
    if offs.dtype != torch.int32 or offs.shape != weight.shape[:1]:
        raise ValueError(
            f"{who}: offs must be int32 [E={weight.shape[0]}] (the row after each expert's last), got {offs.dtype} "
            f"{tuple(offs.shape)}; torch.cumsum(counts, 0, dtype=torch.int32) makes one"
        )
    if weight.per_tensor_scale.ndim > 1:
        raise ValueError(
            f"{who}: the weight's per_tensor_scale must be [] or [E], got {tuple(weight.per_tensor_scale.shape)}; "
            "quantize it with one scale for each expert"
        )
    if not weight.device == offs.device == x.device:
        raise ValueError(f"{who}: x is on {x.device}, weight on {weight.device}, offs on {offs.device}; move them")
    if can_look(offs) and len(offs):
        ends = offs.tolist()
        if ends != sorted(ends) or ends[0] < 0 or ends[-1] != x.shape[0]:
            raise ValueError(f"{who}: offs must rise to the number of rows {x.shape[0]}, got {ends}")


def check_activation(who: str, x: Tensor, activation: ActivationFormat, input_amax: Tensor | None) -> None:
    """A static scale has its amax, and on a CPU x is finite."""
    require_kind(who, "activation", activation, ActivationFormat)
    if activation.scale is ActivationScale.STATIC and input_amax is None:
        raise ValueError(
            f"{who}: activation_scale='static' needs input_amax; calibrate the model, load a checkpoint that carries "
            "input scales, or use activation_scale='per_token'"
        )
    if input_amax is not None:
        if input_amax.numel() != 1:
            raise ValueError(f"{who}: input_amax must be one number [], got {tuple(input_amax.shape)}")
        check_amax(who, input_amax)
    if can_look(x):
        require_finite(who, x, "x", OF_AN_INPUT)


def check_static_mask(
    who: str, x: Tensor, residual: ResidualConfig, mask: Tensor | None, experts: int | None = None
) -> None:
    """Scope ``static`` has its mask, bool [K], or [E, K] of experts."""
    require_kind(who, "residual", residual, ResidualConfig)
    if residual.scope is not ResidualScope.STATIC or residual.fraction == 0:
        return
    if mask is None:
        raise ValueError(
            f"{who}: scope='static' needs a mask [K] (a packed module's residual_mask); set one, or use scope='token'"
        )
    k = x.shape[-1]
    shapes = [(k,)] if experts is None else [(k,), (experts, k)]
    if mask.dtype != torch.bool or tuple(mask.shape) not in shapes:
        shape = f"[K={k}]" if experts is None else f"[K={k}] or [E={experts}, K]"
        raise ValueError(f"{who}: mask must be bool {shape}, got {mask.dtype} {tuple(mask.shape)}")
