"""The plain model that a converted one must equal: the same modules, unconverted, with the fake-quantized weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import quads_qat as qq
from quads_qat import reference
from quads_qat.config import Recipe

WHOLE_STACK = ("GptOssExperts", "Llama4TextExperts")
TRANSPOSED = (*WHOLE_STACK, "AriaExperts", "OpenAIPrivacyFilterExperts")


def original_class(module: nn.Module) -> str:
    return getattr(module, "original_class", type(module)).__name__


def plain_twin(
    model: nn.Module, recipe: Recipe = Recipe.ALIGNED, export_dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """A reverted copy of the converted ``model``; its weights are quantized here, by the rules, without its help."""
    groups = qq.coverage(model).groups
    masters = dict(model.named_parameters())
    twin = qq.revert(copy.deepcopy(model))
    with torch.no_grad():
        for members in groups.values():
            cast = {
                n: masters[n].to(export_dtype) if masters[n].dtype == torch.float32 else masters[n] for n in members
            }
            for name, weight in cast.items():
                kind = original_class(twin.get_submodule(name.rpartition(".")[0]))
                per_expert = weight.ndim == 3 and kind not in WHOLE_STACK
                amax = torch.stack(
                    [(w.abs().amax((1, 2)) if per_expert else w.abs().amax()) for w in cast.values()]
                ).amax(0)
                oriented = weight.transpose(-1, -2) if kind in TRANSPOSED else weight
                q = reference.fake_quantize(oriented, tensor_amax=amax, recipe=recipe, dtype=masters[name].dtype)
                twin.get_parameter(name).copy_(q.transpose(-1, -2) if kind in TRANSPOSED else q)
    return twin


def outputs_and_gradients(
    model: nn.Module, run: Callable[[nn.Module], Tensor], inputs: Iterable[Tensor] = ()
) -> dict[str, Tensor | None]:
    """The output of ``run(model)`` and, for a fixed random output gradient, the gradients of parameters and inputs."""
    model.zero_grad()
    inputs = list(inputs)
    for x in inputs:
        x.grad = None
    out = run(model)
    generator = torch.Generator(out.device).manual_seed(7)
    out.backward(torch.randn(out.shape, generator=generator, device=out.device).to(out.dtype))
    grads = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    grads |= {f"gradient of input {i}": x.grad for i, x in enumerate(inputs)}
    return {"output": out.detach(), **{name: None if g is None else g.clone() for name, g in grads.items()}}


def assert_equal_tensors(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """Same names, dtypes, shapes and values; NaN equals itself, and a zero may have either sign: see the callers."""
    __tracebackhide__ = True
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        got = actual[name]
        assert (got is None) == (wanted is None), f"{name}: {got if wanted is None else 'missing'}"
        if got is not None and wanted is not None:
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), name
            wrong = (got != wanted) & ~(got.isnan() & wanted.isnan())
            assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} elements differ"


class StraightThrough(torch.autograd.Function):
    """``Q(x)`` with the gradient of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: str, amax: Tensor | None) -> Tensor:
        if scale != "static":
            amax = x.abs().amax(-1, keepdim=True) if scale == "per_token" else x.abs().amax()
        return reference.fake_quantize(x, tensor_amax=amax)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class QuantizeLinearInputs(TorchFunctionMode):
    """Inside it, ``F.linear`` multiplies by ``Q(x)``: what W4A4 is, for a plain module that calls nothing else."""

    def __init__(self, scale: str = "per_token") -> None:
        super().__init__()
        self.scale = scale

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            args = (StraightThrough.apply(args[0], self.scale, None), *args[1:])
        return func(*args, **(kwargs or {}))


def experts_and_inputs(
    arch: str, implementation: str, dtype: torch.dtype = torch.bfloat16, tokens: int = 20, seed: int = 0
) -> tuple[nn.Module, list[Tensor]]:
    """The first routed experts of a tiny model, and hidden states, routing weights and indices for it.

    Expert 0 gets no token; of the others, each gets a different number.
    """
    model = tiny_model(arch, dtype=dtype, experts_implementation=implementation)
    experts = next(m for n, m in model.named_modules() if n.endswith(".experts"))
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 64, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(tokens, 2, generator=generator).to(dtype).requires_grad_()
    scores = torch.rand(tokens, experts.num_experts, generator=generator)  # pyright: ignore
    scores[:, 0] = -1.0
    scores[:, 1] += 0.2
    return experts, [hidden, weights, scores.topk(2, dim=-1).indices]


def run_experts(module: nn.Module, inputs: list[Tensor]) -> Tensor:
    hidden, weights, index = inputs
    return module(hidden, index, weights)
