"""Trainer-side linears: ``nn.Linear`` whose forward multiplies by the weight that the engine will multiply by.

Conversion swaps a module's class and adds plain attributes; parameters keep their name, shape, dtype and identity, so
optimizers, state dicts and sharding do not notice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quads_qat import autograd, checks, ops, sharding
from quads_qat.config import ActivationFormat, WeightFormat
from quads_qat.formats import FLOATS
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.scale_groups import ScaleGroup


@dataclass(eq=False)
class ActivationObserver:
    """Running amax of one activation group's inputs; counts only while ``enabled``.

    Attributes:
        name: the activation group, e.g. ``model.layers.0.self_attn.{q_proj,k_proj,v_proj}``.
        amax: float32 [], None before the first observation.
        enabled: in how many contexts of ``observe_activations`` it is.
    """

    name: str
    amax: Tensor | None = None
    enabled: int = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"enabled": 0}  # a copy is in no context

    def update(self, x: Tensor) -> None:
        """Fold the amax of x [..., K] in. Seeing a batch twice (a recompute) changes nothing."""
        if x.numel() == 0:
            return
        seen = ops.amax(x.detach()).float()
        self.amax = seen if self.amax is None else torch.maximum(self.amax.to(seen.device), seen)
        if not torch.compiler.is_compiling():  # a graph cannot ask; ``observe_activations`` does at its end
            self.leave_inference_mode()

    def leave_inference_mode(self) -> None:
        """Make an amax that was seen in inference mode one that training may use."""
        if self.amax is not None and self.amax.is_inference():
            with torch.inference_mode(False):
                self.amax = self.amax.clone()


@dataclass(eq=False)
class FullPrecision:
    """Switch of ``full_precision``: shared by all converted modules of a model."""

    active: int = 0  #: contexts that are open: they may overlap, in threads or generators
    entered_with_grad: int = 0  #: of these, opened while gradients were on
    start_step: int = 0  #: of the ``Schedule``
    delayed: bool = False  #: until ``Schedule.start_step``; ``step`` alone changes it, so a recompute sees the same

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"active": 0, "entered_with_grad": 0}  # a copy is in no context

    def on(self) -> bool:
        """Whether to skip fake quantization now.

        Raises:
            RuntimeError: inside activation checkpointing, whose recompute would run quantized later.
        """
        if self.delayed:
            return True
        if self.active and (torch.is_grad_enabled() or self.entered_with_grad) and _inside_checkpoint():
            raise RuntimeError(
                "full_precision: a checkpointed forward would be recomputed with fake quantization on in backward; "
                "evaluate under torch.no_grad() and model.eval(), or turn activation checkpointing off"
            )
        return self.active > 0


def _inside_checkpoint() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("torch/utils/checkpoint.py"):
            return True
        frame = frame.f_back
    return False


@dataclass(eq=False)
class CodeCache:
    """Codes of weights between the micro-batches of ``accumulate``: shared by all converted modules of a model."""

    active: bool = False
    debug: bool = False
    entries: dict[tuple[int, str], tuple[Tensor, NVFP4Tensor, int]] = field(default_factory=dict)
    amaxes: dict[ScaleGroup, Tensor] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return {"active": False, "debug": False, "entries": {}, "amaxes": {}}  # a copy is in no block

    def clear(self) -> None:
        """End of the block."""
        self.active = False
        self.entries.clear()
        self.amaxes.clear()

    def source(
        self, module: nn.Module, parameter: str, group: ScaleGroup, fmt: WeightFormat
    ) -> tuple[Tensor, NVFP4Tensor | None]:
        """The amax of a parameter's scale group, and the codes that it gives, made at its first use.

        Without codes outside ``accumulate``, and if an adapter changes the scale. The amax is given with codes too, so
        that a GEMM saves the same tensors inside the block as when a checkpoint recomputes it after the block.

        Raises:
            RuntimeError: in debug mode, the weight is not the one that was quantized.
        """
        if not self.active or group.adapted():  # adapters can be switched off and on inside the block
            return autograd.amax_of(group, fmt), None
        # A forward of the block that trains could not save what inference mode has made; a graph cannot leave the mode.
        if torch.compiler.is_compiling():
            if not torch.is_grad_enabled() and (id(module), parameter) not in self.entries:
                return autograd.amax_of(group, fmt), None
        elif torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return self.source(module, parameter, group, fmt)
        weight: Tensor = module._parameters[parameter]  # pyright: ignore[reportAssignmentType]
        key = (id(module), parameter)
        if key not in self.entries:
            if group not in self.amaxes:  # members of a group take it once, together
                self.amaxes[group] = autograd.amax_of(group, fmt)
            elif self.debug and not torch.equal(self.amaxes[group], autograd.amax_of(group, fmt)):
                raise _changed(f"a weight of {group.name}")
            codes = autograd.weight_codes(weight.detach(), self.amaxes[group], fmt)
            self.entries[key] = self.amaxes[group], codes, _checksum(weight) if self.debug else 0
        amax, codes, checksum = self.entries[key]
        if self.debug and _checksum(weight) != checksum:
            raise _changed(name_of(module, parameter, group))
        return amax, codes


def _changed(what: str) -> RuntimeError:
    return RuntimeError(
        f"accumulate: {what} has changed since it was quantized; leave the block before optimizer.step(), "
        "load_state_dict or any other edit"
    )


def _checksum(weight: Tensor) -> int:
    """Of bytes and their places, a piece at a time: int64 takes eight times the memory of a byte."""
    bits = sharding.local(weight.detach()).contiguous().view(torch.uint8).flatten()
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in bits.split(65521 * 256):
        total += (piece.to(torch.int64) * (torch.arange(piece.numel(), device=bits.device) % 65521 + 1)).sum()
    return int(total)


def name_of(module: nn.Module, parameter: str, group: ScaleGroup) -> str:
    """The full name of a weight, from the scale group that it is in."""
    return next(full for owner, p, full in group.members if owner is module and p == parameter)


def refuse_other_dtype(module: nn.Module, parameter: str, weight: Tensor, fmt: WeightFormat, group: ScaleGroup) -> None:
    """A weight that comes in 16 bits of another kind than it is exported from has been rounded once too often.

    Unless these are its own: masters that were cast after ``convert`` are exported from there too (``cast_dtype``).
    """
    if weight.dtype in (torch.float32, fmt.export_dtype, module.cast_dtype):
        return
    raise ValueError(
        f"{name_of(module, parameter, group)}: "
        f"its forward sees {weight.dtype}, but it is exported from {fmt.export_dtype}, so the two would be "
        f"rounded differently; with FSDP2 take MixedPrecisionPolicy(param_dtype={fmt.export_dtype}), else cast the "
        "model before quads_qat.convert"
    )


TRAINER = "quads_qat_trainer"
"""Key in the metadata of a state_dict, beside the tensors of a module that is quantized: what they do not tell."""


def tell_trainer(
    destination: dict[str, Any],
    prefix: str,
    groups: Iterable[ScaleGroup],
    formats: Iterable[WeightFormat],
    switch: FullPrecision,
) -> None:
    """Note in a state_dict that is being made that a module's weights are quantized, and from what."""
    metadata = getattr(destination, "_metadata", None)
    if metadata is not None:
        groups, fmt = [*groups], next(iter(formats))
        metadata.setdefault(prefix.removesuffix("."), {})[TRAINER] = {
            "recipe": fmt.recipe.value,
            "export_dtype": str(fmt.export_dtype).removeprefix("torch."),
            "groups": [group.name for group in groups],
            "held": any(group.held is not None for group in groups),
            "start_step": switch.start_step if switch.delayed else 0,
        }


class W4A16Linear(nn.Linear):
    """``y = x @ fake_quantize(weight).T + bias``; ``weight`` is the full-precision master weight.

    ``weight.grad`` is the gradient of the rounded weight, unchanged (STE); x is never rounded. Shapes: x [..., K] ->
    y [..., N], K % 16 == 0. State-dict keys equal those of ``nn.Linear``. Made by ``quads_qat.convert``.
    """

    weight_format: WeightFormat
    scale_group: ScaleGroup
    observer: ActivationObserver
    full_precision: FullPrecision
    code_cache: CodeCache
    activation_format: ActivationFormat | None = None
    cast_dtype: torch.dtype | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> W4A16Linear:
        super()._apply(fn, recurse)
        self.cast_dtype = self.weight.dtype
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        tell_trainer(destination, prefix, [self.scale_group], [self.weight_format], self.full_precision)

    def forward(self, x: Tensor) -> Tensor:
        """X [..., K] -> [..., N]."""
        if self.observer.enabled:
            self.observer.update(x)
        if self.full_precision.on():
            return F.linear(x, self.weight, self.bias)
        if sharding.is_sharded(self.weight) and (problem := sharding.cut_block(self.weight, -1)):
            raise ValueError(
                f"{name_of(self, 'weight', self.scale_group)}: "
                f"{problem}; list such layers with quads_qat.check_tp(model, tp), then exclude them from "
                "quantization or from row-wise sharding"
            )
        refuse_other_dtype(self, "weight", self.weight, self.weight_format, self.scale_group)
        return checks.naming(lambda: name_of(self, "weight", self.scale_group), lambda: self._multiply(x))

    def _multiply(self, x: Tensor) -> Tensor:
        amax, codes = self.code_cache.source(self, "weight", self.scale_group, self.weight_format)
        if x.dtype not in FLOATS:
            name = name_of(self, "weight", self.scale_group)
            raise TypeError(f"{name}: its input must be float32, bfloat16 or float16, got {x.dtype}; cast it")
        return autograd.linear(
            x,
            self.weight,
            self.bias,
            amax,
            self.weight_format,
            self.activation_format,
            self.observer.amax if self.activation_format is not None else None,
            codes,
        )

    def extra_repr(self) -> str:
        """Shapes, recipe and scale group, for ``print(model)``."""
        return f"{super().extra_repr()}, recipe={self.weight_format.recipe}, scale_group={self.scale_group.name}"


class W4A4Linear(W4A16Linear):
    """``y = fake_quantize(x) @ fake_quantize(weight).T + bias``: the symmetric variant, for ablations.

    Gradients: dX = g Q(W), dW = g.T Q(X), both straight-through. Expect a larger log-prob gap than with W4A16
    (arXiv 2607.15810): the trainer's activations are not the rollout's.
    """
