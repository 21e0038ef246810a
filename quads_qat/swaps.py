"""A trainer that runs with ingredients of a rollout: its weights, and what it does with activations.

Everything stays in the trainer's modules, dtype and order of operations. What changes is what a quantized module
multiplies; the parameters that neither side quantizes are exchanged with the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quads_qat import ops, reference, reference_matmul
from quads_qat.config import ActivationFormat, ActivationScale, ResidualConfig, ResidualScope
from quads_qat.conversion import STATE, Conversion, conversion_of, require_model
from quads_qat.experts_dispatch import StandsFor, expert_bias, experts_loop
from quads_qat.experts_layout import ExpertsLayout, layout_of
from quads_qat.packed_module import PackedModule
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.quantized_weights import quantize_weight
from quads_qat.residual import ResidualCompensatedExperts


@dataclass(frozen=True, eq=False)
class Ingredients:
    """What one model multiplies in one GEMM, or in one projection of all experts.

    Attributes:
        weight: [N, K] or [E, N, K], packed or dense.
        activation: how the input is quantized; None leaves it alone.
        residual: which part of its residual is quantized again; None for none.
        input_amax: of a static scale.
        residual_mask: of scope static, [K] or [E, K].
        before_dispatch: hidden states -> the mask [K] of all experts, or None where each has its own.
    """

    weight: NVFP4Tensor | Tensor
    activation: ActivationFormat | None = None
    residual: ResidualConfig | None = None
    input_amax: Tensor | None = None
    residual_mask: Tensor | None = None
    before_dispatch: Callable[[Tensor], Tensor | None] | None = None

    def matrix(self, expert: int | None, like: Tensor) -> Tensor:
        """The weight [N, K] of one expert, or of a linear, decoded into the dtype and onto the device of ``like``."""
        weight: Any = self.weight
        if isinstance(weight, NVFP4Tensor):
            weight = ops.dequantize(weight if expert is None else weight.expert(expert), like.dtype)
        elif expert is not None:
            weight = weight[expert]
        return weight.to(like)

    def treat(self, x: Tensor, expert: int | None = None) -> list[Tensor]:
        """The operands that x [..., K] becomes, in its dtype: x, or Q(x), or Q(x) and the quantized residual."""
        return [x] if self.activation is None else [reference.dequantize(q, x.dtype) for q in self.quantize(x, expert)]

    def quantize(self, x: Tensor, expert: int | None = None) -> list[NVFP4Tensor]:
        """The packed operands; needs an ``activation``."""
        assert self.activation is not None
        amax = None if self.input_amax is None else self.input_amax.to(x.device)
        if self.residual is None:
            return [reference_matmul.quantize_activation(x, self.activation, amax)]
        mask = self.residual_mask
        mask = mask[expert] if mask is not None and mask.ndim == 2 and expert is not None else mask
        mask = None if mask is None else mask.to(x.device)
        found = reference_matmul.residual_quantize(x, self.residual, self.activation, amax, mask)
        return [q for q in found if q is not None]

    def same_activation(self, other: Ingredients) -> bool:
        """Whether both do the same with activations."""

        def key(side: Ingredients) -> tuple[Any, ...]:
            static = side.activation is not None and side.activation.scale is ActivationScale.STATIC
            return side.activation, side.residual, side.input_amax if static else None, side.residual_mask

        return all(
            torch.equal(a.cpu(), b.cpu()) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b
            for a, b in zip(key(self), key(other), strict=True)
        )


Sources = dict[str, dict[str, Ingredients]]
"""Module -> parameter -> what goes into it."""

Seen = Callable[[str, str, "int | None", Ingredients, Tensor], None]
"""Told of every GEMM: (module, parameter, expert, what goes into it, input rows)."""


# -------------------------------------------------------------------------------------------------------- what there is


def root_of(model: nn.Module) -> tuple[nn.Module, Conversion | None]:
    """The model without wrappers (DDP, torch.compile), and its conversion if it has one."""
    require_model("diagnose", "each side", model)
    if any(STATE in module.__dict__ for module in model.modules()):
        return conversion_of(model, "diagnose")
    while isinstance(inner := getattr(model, "_orig_mod", getattr(model, "module", None)), nn.Module):
        model = inner
    return model, None


def experts_layout(module: nn.Module) -> ExpertsLayout | None:
    """Of a fused expert stack, converted or not; None for other modules."""
    return module.layout if isinstance(module, StandsFor) else layout_of(module)  # pyright: ignore[reportReturnType]


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """Names of the weights that a linear or a fused expert stack, converted or not, multiplies by; () for others."""
    if isinstance(module, PackedModule):
        return tuple(module.recipes)
    if isinstance(module, nn.Linear):
        return ("weight",)
    layout = experts_layout(module)
    return () if layout is None else layout.parameters


def ingredients_of(root: nn.Module, conversion: Conversion | None, module: str, parameter: str) -> Ingredients:
    """What this model multiplies there now."""
    owner = root.get_submodule(module)
    weight = None if conversion is None else conversion.weights.get(f"{module}.{parameter}" if module else parameter)
    if isinstance(owner, PackedModule):
        residual = None if owner.residual is None or owner.residual.fraction == 0 else owner.residual
        experts = isinstance(owner, ResidualCompensatedExperts) and parameter != owner.layout.down
        before_dispatch: Any = owner._mask_before_dispatch if experts else None
        return Ingredients(
            owner.packed(parameter),
            owner.activation,
            residual if owner.activation is not None else None,
            owner.calibrated(parameter, "input_amax"),
            owner.calibrated(parameter, "residual_mask"),
            before_dispatch,
        )
    if conversion is None or weight is None or conversion.full_precision.on():
        return Ingredients(master_of(root, module, parameter))
    converted: Any = owner
    observer = converted.observer if isinstance(owner, nn.Linear) else converted.observers[parameter]
    packed = quantize_weight(root, conversion, weight)
    return Ingredients(packed, converted.activation_format, input_amax=observer.amax)


def master_of(root: nn.Module, module: str, parameter: str) -> Tensor:
    """The weight before quantization, [(E,) N, K]."""
    owner: Any = root.get_submodule(module)
    layout = experts_layout(owner)
    dense = owner._parameters[parameter].detach()
    return dense.mT if layout is not None and layout.transposed else dense


def experts_in(weight: NVFP4Tensor | Tensor) -> list[int | None]:
    """The experts of a stack; [None] for a matrix."""
    return [None] if len(weight.shape) == 2 else list(range(weight.shape[0]))


# ---------------------------------------------------------------------------------------------------------- what is run


def multiply(x: Tensor, source: Ingredients, expert: int | None, bias: Tensor | None, like: Tensor) -> Tensor:
    """One GEMM in the dtype of the trainer's weight: the two operands of a compensated input lie along one K."""
    return product(source.treat(x, expert), source.matrix(expert, like), bias)


def product(operands: list[Tensor], weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The sum of the operands' products with one weight [N, K], as one product over a longer K."""
    row = operands[0] if len(operands) == 1 else torch.cat(operands, dim=-1)
    column = weight if len(operands) == 1 else torch.cat([weight] * len(operands), dim=-1)
    return F.linear(row.to(column.dtype), column, bias)


@contextmanager
def running_with(root: nn.Module, sources: Sources, seen: Seen | None = None) -> Iterator[None]:
    """Inside this context the modules named in ``sources`` multiply by these ingredients."""
    patched = []
    try:
        for name, of_module in sources.items():
            module = root.get_submodule(name)
            before = module.__dict__.get("forward")
            patched.append((module, before))
            forward = _linear if isinstance(module, nn.Linear) else _experts
            module.__dict__["forward"] = forward(module, name, of_module, seen)
        yield
    finally:
        for module, before in patched:
            module.__dict__.pop("forward", None)
            if before is not None:
                module.__dict__["forward"] = before


def _linear(module: Any, name: str, sources: dict[str, Ingredients], seen: Seen | None) -> Callable[..., Tensor]:
    def forward(x: Tensor) -> Tensor:
        if seen is not None:
            seen(name, "weight", None, sources["weight"], x)
        return multiply(x, sources["weight"], None, module.bias, module.weight)

    return forward


def _experts(module: Any, name: str, sources: dict[str, Ingredients], seen: Seen | None) -> Callable[..., Tensor]:
    owner: Any = module
    if not isinstance(module, StandsFor):  # not converted: lend its class' gate and constants to the loop
        owner = object.__new__(StandsFor)
        owner.__dict__.update(module.__dict__, original_class=type(module), layout=layout_of(module))

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        hidden_states = args[0] if args else kwargs["hidden_states"]
        first = sources[owner.layout.first[0]]
        mask = None if first.before_dispatch is None else first.before_dispatch(hidden_states)
        used = sources if mask is None else {p: _with_mask(s, mask) for p, s in sources.items()}

        def project(parameter: str, expert: int, x: Tensor) -> Tensor:
            bias = expert_bias(owner, parameter, expert)
            if seen is not None:
                seen(name, parameter, expert, used[parameter], x)
            like: Any = module._parameters[parameter]
            return multiply(x, used[parameter], expert, bias, like)

        return experts_loop(owner, project, *args, **kwargs)

    return forward


def _with_mask(source: Ingredients, mask: Tensor) -> Ingredients:
    if source.before_dispatch is None or source.residual is None:  # the down projection
        return source
    return replace(source, residual=replace(source.residual, scope=ResidualScope.STATIC), residual_mask=mask)


@contextmanager
def with_tensors(root: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """Inside this context these parameters and buffers stand for the model's own."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, value in tensors.items():
            module_name, _, leaf = name.rpartition(".")
            module = root.get_submodule(module_name)
            held: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
            before.append((held, leaf, held[leaf]))
            is_parameter = held is module._parameters
            held[leaf] = nn.Parameter(value, requires_grad=False) if is_parameter else value
        yield
    finally:
        for held, leaf, value in reversed(before):
            held[leaf] = value
