"""Rollout-side modules: packed NVFP4 weights, quantized activations, and the compensated residual.

``y = Q(x) @ W.T + Q(m * (x - Q(x))) @ W.T`` with the mask ``m`` of :class:`~quads_qat.config.ResidualConfig`
(arXiv 2607.15810; cf. ARCQuant, arXiv 2601.07475, and CHON, arXiv 2602.02047, for fixed channels). Weights are
codes and scales only (``packed_module``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import adapters, checks, ops
from quads_qat.autograd import activation_amax
from quads_qat.config import ActivationFormat, ActivationScale, ExpertMask, ResidualConfig, ResidualScope
from quads_qat.experts import W4A16Experts
from quads_qat.experts_dispatch import StandsFor, experts_loop, grouped_forward
from quads_qat.experts_layout import ExpertsLayout
from quads_qat.packed_module import PackedModule, SyncState
from quads_qat.qtensor import NVFP4Tensor

_UNCALIBRATED = (
    "this rollout has {} and was not calibrated; run quads_qat.calibrate(rollout, batches), load the state of a "
    "calibrated one with quads_qat.load_quant_state_dict, or use {}"
)


class ResidualCompensatedLinear(PackedModule):
    """A linear with packed weights [N, K] that quantizes its input and compensates the worst of the residual.

    x [..., K] -> [..., N] in x's dtype. ``activation=None`` multiplies x as it is (weight-only, W4A16): the same
    products as the trainer's W4A16 forward; on a GPU they are summed in another order. x gets a gradient then, for
    adapters on a frozen base (``integrations.peft``). ``residual=None`` is naive W4A4.

    Buffers: ``weight_qdata`` [N, K/2], ``weight_block_scale`` [N, K/16], ``weight_per_tensor_scale``,
    ``weight_stored_scale``, ``input_amax`` [] (static activation scale), ``residual_mask`` [K] bool (scope static).
    """

    input_amax: Tensor | None
    residual_mask: Tensor | None

    def __init__(
        self,
        weight: NVFP4Tensor,
        bias: Tensor | None = None,
        *,
        activation: ActivationFormat | None,
        residual: ResidualConfig | None,
        input_amax: Tensor | None = None,
        residual_mask: Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.activation, self.residual, self.recipes, self.sync = activation, residual, {}, SyncState()
        self.set_packed("weight", weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_buffer("input_amax", None if input_amax is None else input_amax.clone())
        self.register_buffer("residual_mask", residual_mask)
        like = torch.empty(0, dtype=dtype, device=weight.qdata.device)  # follows .to(dtype), codes do not
        self.register_buffer("_like", like, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The weight, decoded anew [N, K] into the model's dtype: for code that reads it, its dtype or its shape."""
        return ops.dequantize(self.packed(), self._like.dtype)  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor) -> Tensor:
        """X [..., K] -> [..., N]."""
        self.require_usable()
        if self.record is not None:
            self.record(self, "weight", None, x)
        how = self.activation, self.residual, self.input_amax, self.residual_mask
        return checks.naming(lambda: self.full_name, lambda: projection(x, self.packed(), self.bias, *how))

    def extra_repr(self) -> str:
        """Shapes and formats, for ``print(model)``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, recipe={self.recipes['weight']}, "
            f"activation={self.activation}, residual={self.residual}"
        )


class ResidualCompensatedExperts(StandsFor, PackedModule):
    """A fused expert stack with packed weights; each projection of each expert compensates its own input rows.

    Same arguments as the original experts module. Buffers as in :class:`ResidualCompensatedLinear`, one set for each
    projection (``gate_up_proj_qdata`` [E, N, K/2], ...), always with blocks along the last dim; ``residual_mask`` is
    [K], or [E, K] with a mask for each expert (``ResidualConfig.expert_mask``).
    """

    def __init__(
        self,
        original: nn.Module,
        original_class: type[nn.Module],
        layout: ExpertsLayout,
        weights: dict[str, NVFP4Tensor],
        *,
        activation: ActivationFormat | None,
        residual: ResidualConfig | None,
        input_amax: dict[str, Tensor | None],
    ) -> None:
        super().__init__()
        trainers = W4A16Experts.__annotations__.keys()  # scale groups among them, which would keep the master weights
        kept = {k: v for k, v in original.__dict__.items() if k not in self.__dict__ and k not in trainers}
        self.__dict__.update(kept)  # num_experts, config, limits, ...: what the original's gate function reads
        self._modules.update(original._modules)
        self._parameters.update({k: v for k, v in original._parameters.items() if k not in weights})
        self.original_class, self.layout = original_class, layout
        self.activation, self.residual, self.recipes, self.sync = activation, residual, {}, SyncState()
        for name, q in weights.items():
            self.set_packed(name, q)
            amax = input_amax[name]  # one for a whole scale group
            self.register_buffer(f"{name}_input_amax", None if amax is None else amax.clone())
            self.register_buffer(f"{name}_residual_mask", None)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The original module's arguments and result."""
        self.require_usable()
        packed = {name: self.packed(name) for name in self.layout.parameters}
        hidden_states = args[0] if args else kwargs["hidden_states"]
        if self.record is not None:
            self.record(self, self.layout.first[0], -1, hidden_states)
        before_dispatch = self._mask_before_dispatch(hidden_states)
        fixed = None if self.residual is None else replace(self.residual, scope=ResidualScope.STATIC)

        def project(name: str, x: Tensor, expert: int | None = None, offs: Tensor | None = None) -> Tensor:
            bias = getattr(self, f"{name}_bias") if self.layout.bias else None
            bias = bias if bias is None or expert is None else bias[expert]
            amax, mask, residual = getattr(self, f"{name}_input_amax"), before_dispatch, fixed
            if mask is None or name == self.layout.down:
                mask, residual = getattr(self, f"{name}_residual_mask"), self.residual
                mask = mask if mask is None or mask.ndim == 1 or expert is None else mask[expert]
            q = packed[name] if expert is None else packed[name].expert(expert)
            named = lambda: f"{self.full_name}.{name}" if self.full_name else name  # noqa: E731
            return checks.naming(named, lambda: projection(x, q, bias, self.activation, residual, amax, mask, offs))

        def project_expert(name: str, expert: int, x: Tensor) -> Tensor:
            if self.record is not None:
                self.record(self, name, expert, x)
            return project(name, x, expert)

        if self._multiplies_grouped(hidden_states, packed):
            return grouped_forward(self, lambda name, x, offs, _: project(name, x, offs=offs), *args, **kwargs)
        return experts_loop(self, project_expert, *args, **kwargs)

    def _multiplies_grouped(self, hidden_states: Tensor, packed: dict[str, NVFP4Tensor]) -> bool:
        """Whether all experts go through one call of a GEMM per projection, with no value read by the host.

        On a GPU, for experts that transformers dispatches as well; else they run one by one. The two add up the
        experts' outputs in another order.
        """
        dispatched = hasattr(self, "has_gate") and not getattr(self, "_is_expert_parallel", False)
        scales = all(q.per_tensor_scale.ndim <= 1 for q in packed.values())
        return self.grouped_on(hidden_states) and dispatched and scales and self.record is None

    @staticmethod
    def grouped_on(x: Tensor) -> bool:
        """Where grouped GEMMs are the faster way."""
        return x.is_cuda

    def _mask_before_dispatch(self, hidden_states: Tensor) -> Tensor | None:
        """One mask [K] for the first projection of all experts, where the config asks for it."""
        residual = self.residual
        if self.activation is None or residual is None or residual.fraction == 0:
            return None
        if residual.scope is not ResidualScope.BATCH or residual.expert_mask is not ExpertMask.BEFORE_DISPATCH:
            return None
        rows = hidden_states.detach().reshape(-1, hidden_states.shape[-1])
        amax = getattr(self, f"{self.layout.first[0]}_input_amax")
        options = {"input_amax": amax, "return_mask": True}
        _, mask = ops.quantize_activation(rows, self.activation, residual, **options)
        return None if mask is None or len(mask) == 0 else mask[0]

    def extra_repr(self) -> str:
        """Shapes and formats, for ``print(model)``."""
        shapes = ", ".join(f"{name}={tuple(self.packed(name).shape)}" for name in self.layout.parameters)
        return f"{self.original_class.__name__}, {shapes}, activation={self.activation}, residual={self.residual}"


def residual_rows(x: Tensor, activation: ActivationFormat, input_amax: Tensor | None = None) -> Tensor:
    """``x - Q(x)``, exact in float32: x [..., K] -> [M, K]."""
    rows = x.detach().reshape(-1, x.shape[-1])
    if checks.can_look(rows):
        checks.require_finite("residual_rows", rows, "x", checks.OF_AN_INPUT)
    amax = activation_amax(rows, activation, input_amax)
    q = ops.quantize(rows, tensor_amax=amax, recipe=activation.recipe, check_finite=False)
    return rows.float() - ops.dequantize(q, torch.float32)


def projection(
    x: Tensor,
    weight: NVFP4Tensor,
    bias: Tensor | None,
    activation: ActivationFormat | None,
    residual: ResidualConfig | None,
    input_amax: Tensor | None,
    residual_mask: Tensor | None,
    offs: Tensor | None = None,
) -> Tensor:
    """What a packed module multiplies: one linear or, with ``offs``, one projection of all experts."""
    if activation is None:
        return adapters.packed_linear(x, weight, bias, offs)
    if activation.scale is ActivationScale.STATIC and input_amax is None:
        raise ValueError(_UNCALIBRATED.format("activation_scale='static'", "activation_scale='per_token'"))
    how: dict[str, Any] = {"activation": activation, "input_amax": input_amax}
    if residual is None:
        if offs is None:
            return ops.linear_w4a4(x, weight, bias, **how)
        return ops.grouped_linear_w4a4(x, weight, offs, bias, **how)
    if residual.scope is ResidualScope.STATIC and residual.fraction > 0 and residual_mask is None:
        raise ValueError(_UNCALIBRATED.format("scope='static'", "scope='token'"))
    if offs is None:
        return ops.residual_linear(x, weight, residual, bias, mask=residual_mask, **how)
    return ops.grouped_residual_linear(x, weight, offs, residual, bias, mask=residual_mask, **how)
