"""Contract under test: frameworks that own their modules find on a fake-quantized weight what they look for on a
parameter. The grouped linear and the hook imitate TransformerEngine's (``fuse_wgrad_accumulation``) and Megatron's
(``DistributedDataParallel``): the GEMM adds to ``main_grad`` and hands on memory as it was found; the hook adds a
gradient unless the parameter says that it was added already.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from torch import Tensor, nn

import quads_qat as qq
from quads_qat import autograd


class FusedGroupedLinear(torch.autograd.Function):
    """One GEMM for each expert's rows; weight gradients go straight to ``main_grad`` where there is one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, splits: list[int], fused: bool, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.splits, ctx.fused = splits, fused
        return torch.cat([rows @ w.t() for rows, w in zip(x.split(splits), weights, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        grads = []
        parts = zip(grad.split(ctx.splits), x.split(ctx.splits), weights, strict=True)
        for g, rows, w in parts:
            wgrad = g.t() @ rows
            if ctx.fused:
                w.main_grad.add_(wgrad.float())
                if hasattr(w, "grad_added_to_main_grad"):
                    w.grad_added_to_main_grad = True
                    wgrad = torch.full_like(w, float("nan"))  # memory as it was found
                else:
                    wgrad = None
            grads.append(wgrad)
        dx = torch.cat([g @ w for g, w in zip(grad.split(ctx.splits), weights, strict=True)])
        return dx, None, None, *grads


class GroupedExperts(nn.Module):
    """Experts as one parameter each, under a hook that collects gradients in fp32 ``main_grad``."""

    def __init__(self, fused: bool, flagged: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.fused = fused
        for i in range(3):
            weight = nn.Parameter(torch.randn(32, 48, generator=generator).bfloat16() * 0.1)
            self.register_parameter(f"weight{i}", weight)
            weight.main_grad = torch.zeros(32, 48)
            if flagged:
                weight.grad_added_to_main_grad = False
            weight.register_post_accumulate_grad_hook(self.collect)

    @staticmethod
    def collect(parameter: Tensor) -> None:
        if parameter.grad is not None and not getattr(parameter, "grad_added_to_main_grad", False):
            parameter.main_grad.add_(parameter.grad.float())
        parameter.grad = None

    def forward(self, x: Tensor, splits: list[int]) -> Tensor:
        weights = [qq.fake_quantize_ste(w) for w in self.parameters()]
        return FusedGroupedLinear.apply(x, splits, self.fused, *weights)


def main_grads(model: GroupedExperts, micro_batches: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(micro_batches):
        for parameter in model.parameters():
            if hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = False  # as a framework does when it zeroes its buffers
        x = torch.randn(9, 48, generator=generator).bfloat16().requires_grad_()
        model(x, [2, 0, 7]).float().square().sum().backward()
    return [p.main_grad for p in model.parameters()]


@pytest.mark.parametrize("flagged", [True, False])
def test_fused_accumulation_writes_to_the_parameters_main_grad_and_nothing_else(flagged: bool):
    expected = main_grads(GroupedExperts(fused=False))
    model = GroupedExperts(fused=True, flagged=flagged)
    for got, wanted in zip(main_grads(model), expected, strict=True):
        assert_same_bits(got, wanted)
    assert all(p.grad is None for p in model.parameters())
    assert not flagged or all(p.grad_added_to_main_grad for p in model.parameters())
    assert expected[0].any()
    assert not expected[1].any()  # an expert without rows


def test_attributes_are_carried_and_belong_to_each_use():
    weight = nn.Parameter(torch.ones(2, 16))
    plain = qq.fake_quantize_ste(weight)
    assert not any(hasattr(plain, name) for name in autograd.CARRIED)
    for name in autograd.CARRIED:
        setattr(weight, name, object())
    weight.grad_added_to_main_grad = True
    first, second = qq.fake_quantize_ste(weight), qq.fake_quantize_ste(weight)
    for name in set(autograd.CARRIED) - {"grad_added_to_main_grad"}:
        assert getattr(first, name) is getattr(second, name) is getattr(weight, name)
    assert first.grad_added_to_main_grad is False
    weight.grad_added_to_main_grad = False
    second.grad_added_to_main_grad = True
    first.sum().backward()
    assert weight.grad_added_to_main_grad is False
    second.sum().backward()
    assert weight.grad_added_to_main_grad is True
    with torch.no_grad():
        assert qq.fake_quantize_ste(weight).main_grad is weight.main_grad


def test_a_carrying_weight_is_freed_without_a_backward():
    weight = nn.Parameter(torch.ones(2, 16))
    weight.main_grad = torch.zeros(2, 16)
    gc.disable()
    try:
        quantized = qq.fake_quantize_ste(weight)
        alive = weakref.ref(quantized)
        del quantized
        assert alive() is None
    finally:
        gc.enable()
