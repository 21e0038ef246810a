"""Rollout-side modules: packed NVFP4 weights, quantized activations, and the compensated residual.

``y = Q(x) @ W.T + Q(m * (x - Q(x))) @ W.T`` with the mask ``m`` of :class:`~quads_qat.config.ResidualConfig`
(arXiv 2607.15810; cf. ARCQuant, arXiv 2601.07475, and CHON, arXiv 2602.02047, for fixed channels). Weights are held as
codes and scales only, 0.5625 bytes each; a dtype move never touches them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import ops
from quads_qat.config import ActivationFormat, Recipe, ResidualConfig
from quads_qat.experts import ExpertsLayout, StandsFor, W4A16Experts, experts_loop
from quads_qat.qtensor import NVFP4Tensor

_FIELDS = ("qdata", "block_scale", "per_tensor_scale", "stored_scale")
_OPTIONAL = ("input_amax", "residual_mask")


class _Packed(nn.Module):
    """Holds :class:`NVFP4Tensor` objects as buffers that ``.to(dtype)``, ``.half()`` and friends leave alone."""

    recipes: dict[str, Recipe]

    def set_packed(self, name: str, q: NVFP4Tensor) -> None:
        """Register the fields of ``q`` as buffers ``<name>_qdata``, ``<name>_block_scale``, ..."""
        self.recipes[name] = q.recipe
        for part in _FIELDS:
            self.register_buffer(f"{name}_{part}", getattr(q, part))

    def packed(self, name: str = "weight") -> NVFP4Tensor:
        """The codes and scales of a weight, as they are now (no copy)."""
        parts = {part: getattr(self, f"{name}_{part}") for part in _FIELDS}
        return NVFP4Tensor(recipe=self.recipes[name], **parts)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Packed:
        kept = {f"{name}_{part}": self._buffers[f"{name}_{part}"] for name in self.recipes for part in _FIELDS}
        kept |= {name: b for name, b in self._buffers.items() if name.endswith(_OPTIONAL)}
        moved = {name: None if buffer is None else _moved(buffer, fn) for name, buffer in kept.items()}
        self._buffers.update(dict.fromkeys(kept))
        try:
            super()._apply(fn, recurse)
        except BaseException:
            self._buffers.update(kept)  # a failed move (out of memory, say) loses nothing
            raise
        self._buffers.update(moved)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Block scales as bytes: plain pickle cannot load a float8 tensor."""
        return {**self.__dict__, "_buffers": self._viewed_scales(torch.uint8)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._buffers = self._viewed_scales(torch.float8_e4m3fn)

    def _viewed_scales(self, dtype: torch.dtype) -> dict[str, Tensor | None]:
        scales = {f"{name}_block_scale" for name in self.recipes}
        return {
            name: buffer.view(dtype) if name in scales and buffer is not None else buffer
            for name, buffer in self._buffers.items()
        }

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name, buffer in self._buffers.items():
            if buffer is None and name.endswith(_OPTIONAL) and prefix + name in state_dict:
                device = next(b.device for b in self._buffers.values() if b is not None)
                self._buffers[name] = torch.empty_like(state_dict[prefix + name], device=device)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _moved(buffer: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """``fn(buffer)`` without its dtype: of what a module's methods do, the device, sharing and emptiness are kept."""
    if buffer.dtype == torch.float8_e4m3fn:
        return _moved(buffer.view(torch.uint8), fn).view(buffer.dtype)  # as bytes: a float would be converted
    moved = fn(buffer)
    return moved if moved.dtype == buffer.dtype else buffer.to(moved.device)


class ResidualCompensatedLinear(_Packed):
    """A linear with packed weights [N, K] that quantizes its input and compensates the worst of the residual.

    x [..., K] -> [..., N] in x's dtype. ``activation=None`` multiplies x as it is (weight-only, W4A16): the same bits
    as the trainer's W4A16 forward. ``residual=None`` is naive W4A4.

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
        self.activation, self.residual, self.recipes = activation, residual, {}
        self.set_packed("weight", weight)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_buffer("input_amax", input_amax)
        self.register_buffer("residual_mask", residual_mask)
        self.register_buffer("_like", torch.empty(0, dtype=dtype), persistent=False)  # follows .to(dtype), codes do not

    @property
    def weight(self) -> Tensor:
        """The weight, decoded anew [N, K] into the model's dtype: for code that reads it, its dtype or its shape."""
        return ops.dequantize(self.packed(), self._like.dtype)  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor) -> Tensor:
        """X [..., K] -> [..., N]."""
        return _project(
            x, self.packed(), self.bias, self.activation, self.residual, self.input_amax, self.residual_mask
        )

    def extra_repr(self) -> str:
        """Shapes and formats, for ``print(model)``."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, recipe={self.recipes['weight']}, "
            f"activation={self.activation}, residual={self.residual}"
        )


class ResidualCompensatedExperts(StandsFor, _Packed):
    """A fused expert stack with packed weights; each projection of each expert compensates its own input rows.

    Same arguments as the original experts module. Buffers as in :class:`ResidualCompensatedLinear`, one set for each
    projection (``gate_up_proj_qdata`` [E, N, K/2], ...), always with blocks along the last dim.
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
        self.activation, self.residual, self.recipes = activation, residual, {}
        for name, q in weights.items():
            self.set_packed(name, q)
            self.register_buffer(f"{name}_input_amax", input_amax[name])
            self.register_buffer(f"{name}_residual_mask", None)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The original module's arguments and result."""
        packed = {name: self.packed(name) for name in self.layout.parameters}

        def project(name: str, expert: int, x: Tensor) -> Tensor:
            bias = getattr(self, f"{name}_bias")[expert] if self.layout.bias else None
            amax, mask = getattr(self, f"{name}_input_amax"), getattr(self, f"{name}_residual_mask")
            return _project(x, _one_expert(packed[name], expert), bias, self.activation, self.residual, amax, mask)

        return experts_loop(self, self.layout, project, *args, **kwargs)

    def extra_repr(self) -> str:
        """Shapes and formats, for ``print(model)``."""
        shapes = ", ".join(f"{name}={tuple(self.packed(name).shape)}" for name in self.layout.parameters)
        return f"{self.original_class.__name__}, {shapes}, activation={self.activation}, residual={self.residual}"


def _one_expert(q: NVFP4Tensor, expert: int) -> NVFP4Tensor:
    def pick(scale: Tensor) -> Tensor:
        return scale if scale.ndim == 0 else scale[expert]

    return NVFP4Tensor(q.qdata[expert], q.block_scale[expert], pick(q.per_tensor_scale), q.recipe, pick(q.stored_scale))


def _project(
    x: Tensor,
    weight: NVFP4Tensor,
    bias: Tensor | None,
    activation: ActivationFormat | None,
    residual: ResidualConfig | None,
    input_amax: Tensor | None,
    residual_mask: Tensor | None,
) -> Tensor:
    if activation is None:
        return ops.linear_w4a16(x, weight, bias)
    if residual is None:
        return ops.linear_w4a4(x, weight, bias, activation=activation, input_amax=input_amax)
    return ops.residual_linear(
        x, weight, residual, bias, activation=activation, input_amax=input_amax, mask=residual_mask
    )
