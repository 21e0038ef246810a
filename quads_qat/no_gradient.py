"""Results that no gradient goes through: a backward pass that gets to them fails, with the way out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quads_qat import library

STRAIGHT_THROUGH = "has no gradient of its own; use quads_qat.fake_quantize_ste (straight-through) or convert()"
WEIGHTS_ONLY = (
    "lets no gradient through its quantized activations; run it under torch.no_grad(), train with mode='w4a16', or "
    "take a rollout with weights_only=True"
)


def refuse(who: str, values: Tensor, why: str, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``values``, which are made from x and a bias; a backward pass that gets to them fails."""
    wants = x.requires_grad or (bias is not None and bias.requires_grad)
    if not (wants and torch.is_grad_enabled()):
        return values
    return _NoGradient.apply(values.detach(), f"{who} {why}", x, bias)  # pyright: ignore[reportReturnType]


class _NoGradient(torch.autograd.Function):
    """A backward pass that gets here fails, where a detached tensor would train nothing in silence."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, message: str, *made_from: Tensor | None) -> Tensor:
        ctx.message = message
        return library.own(values.view_as(values))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(ctx.message)
