"""The reference computes the same bits on a GPU as on a CPU, where all other tests look at it."""

from pathlib import Path

import pytest
import torch
from bits import assert_same, assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from strategies import Case, cases, layouts

from quads_qat import ops, reference
from quads_qat.config import Recipe

pytestmark = pytest.mark.gpu

GOLDEN = sorted(p for p in (Path(__file__).parent / "data" / "golden").glob("*.safetensors") if p.stem != "swizzle")
RECIPES = st.sampled_from(Recipe)


def check(
    x: torch.Tensor, recipe: Recipe, scales: dict[str, torch.Tensor | None], layout=torch.Tensor.contiguous
) -> None:
    on_gpu = layout(x.cuda())
    gpu_scales = {name: None if s is None else s.cuda() for name, s in scales.items()}
    q, expected = (
        reference.quantize(on_gpu, **gpu_scales, recipe=recipe),
        reference.quantize(x, **scales, recipe=recipe),
    )
    assert_same(q.to("cpu"), expected)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_same_bits(reference.dequantize(q, dtype).cpu(), reference.dequantize(expected, dtype))
    values = reference.fake_quantize(on_gpu, **gpu_scales, recipe=recipe)
    assert_same_bits(values.cpu(), reference.dequantize(expected, x.dtype))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda p: p.stem)
def test_golden_inputs(path: Path):
    for recipe in Recipe:
        check(load_file(path)["input"], recipe, {})


@given(cases() | cases(aligned=False, kinds=["own", "amax"]), RECIPES, layouts)
def test_chosen_blocks(case: Case, recipe: Recipe, layout):
    check(case.x, recipe, case.scales, layout)


@given(cases(aligned=False), RECIPES.filter(lambda recipe: recipe is not Recipe.ALIGNED), layouts)
def test_chosen_blocks_under_any_scale(case: Case, recipe: Recipe, layout):
    check(case.x, recipe, case.scales, layout)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", Recipe)
def test_random_weights_with_bad_elements(recipe: Recipe, dtype: torch.dtype):
    x = torch.randn(256, 2048, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[3, 5], x[100, 1000], x[7, :16] = float("nan"), float("inf"), 0.0
    check(x, recipe, {})
    check(x, recipe, {"tensor_amax": reference.amax(x, dim=-1)})


def test_amax_is_the_same():
    x = torch.randn(4, 32, 64).bfloat16()
    x[1, 2, 3] = float("nan")
    for dim in (None, -1, (1, 2)):
        assert_same_bits(reference.amax(x.cuda(), dim=dim).cpu(), reference.amax(x, dim=dim))


def test_no_call_waits_for_the_gpu():
    """Neither values nor shapes travel to the host while tensors are quantized."""
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    ops.dequantize(ops.quantize(x))
    ops.fake_quantize(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for recipe in Recipe:
            amax = ops.amax(x, dim=-1)
            ops.dequantize(ops.quantize(x, tensor_amax=amax, recipe=recipe))
            ops.fake_quantize(x, ops.per_tensor_scale(x, recipe=recipe), recipe=recipe)
    finally:
        torch.cuda.set_sync_debug_mode("default")
