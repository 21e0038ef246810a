"""What README says of ``Recipe.ALIGNED``: exact weights in bf16, for next to no loss of quality."""

import pytest
import torch
from torch import Tensor

from quads_qat import reference
from quads_qat.config import Recipe


def weights(kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 1024, generator=generator)
    if kind == "laplace":
        x = x.sign() * -torch.rand(x.shape, generator=generator).log()
    if kind == "outlier channels":
        x[:, ::64] *= 20
    return (x * 0.02).bfloat16()


def inexact(w: Tensor, recipe: Recipe) -> float:
    """Share of decoded weights that bf16 cannot hold."""
    exact = reference.fake_quantize(w, recipe=recipe, dtype=torch.float32)
    return float((exact != exact.bfloat16().float()).double().mean())


def sqnr(w: Tensor, recipe: Recipe) -> float:
    """Signal to quantization noise in dB."""
    noise = w.double() - reference.fake_quantize(w, recipe=recipe, dtype=torch.float32).double()
    return float(10 * torch.log10(w.double().square().sum() / noise.square().sum()))


@pytest.mark.parametrize("kind", ["gauss", "laplace", "outlier channels"])
def test_aligned_weights_are_exact_where_others_are_not_and_lose_no_quality(kind: str):
    w = weights(kind)
    assert inexact(w, Recipe.ALIGNED) == 0.0
    assert inexact(w, Recipe.MODELOPT) > 0.8
    assert sqnr(w, Recipe.MODELOPT) - sqnr(w, Recipe.ALIGNED) < 0.02
