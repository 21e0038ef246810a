"""The plain model that a converted one must equal: the same modules, unconverted, with the fake-quantized weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

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
                q = reference.fake_quantize(oriented, tensor_amax=amax, recipe=recipe)
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
    found = {f"gradient of {name}": p.grad for name, p in model.named_parameters()}
    found |= {f"gradient of input {i}": x.grad for i, x in enumerate(inputs)}
    return {"output": out.detach(), **found}


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
