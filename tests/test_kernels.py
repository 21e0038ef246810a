"""Contract under test: every Triton kernel gives the reference's bits, for any input, layout and recipe.

On a GPU (``pytest -m gpu``), and on a CPU in Triton's interpreter, in a process of its own
(``test_kernels_interpreted.py``). Output buffers are poisoned before a kernel runs.
"""

from __future__ import annotations

import math

import pytest
import torch
from bits import assert_same, assert_same_bits
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from strategies import DTYPES, Case, cases
from torch import Tensor

from quads_qat import ops, packing, reference
from quads_qat.config import Recipe

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXAMPLES = 300 if DEVICE == "cuda" else 12  # the interpreter takes milliseconds for a launch
RECIPES = list(Recipe)


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten shows: NaN in floats, 0xff in bytes."""
    empty = torch.empty

    def poisoned(*args, **kwargs) -> Tensor:
        out = empty(*args, **kwargs)
        return (
            out
            if out.is_meta
            else out.fill_(math.nan if out.is_floating_point() else 255 % 2 ** (out.itemsize * 8 - 1))
        )

    monkeypatch.setattr(torch, "empty", poisoned)


def on_device(case: Case) -> tuple[Tensor, dict[str, Tensor | None]]:
    scales = {name: None if s is None else s.to(DEVICE) for name, s in case.scales.items()}
    return case.x.to(DEVICE), scales


def assert_kernels_match(x: Tensor, scales: dict[str, Tensor | None], recipe: Recipe) -> None:
    """All three kernels against the reference on the same device."""
    expected = reference.quantize(x, **scales, recipe=recipe)
    actual = ops.quantize(x, **scales, recipe=recipe, check_finite=False, backend="triton")
    assert_same(actual, expected)
    for dtype in DTYPES:
        wanted = reference.fake_quantize(x, **scales, recipe=recipe, dtype=dtype)
        got = ops.fake_quantize(x, **scales, recipe=recipe, dtype=dtype, check_finite=False, backend="triton")
        assert_same_bits(got.contiguous(), wanted.contiguous(), f"fake_quantize to {dtype}")
        decoded = ops.dequantize(expected, dtype, backend="triton")
        assert_same_bits(decoded, reference.dequantize(expected, dtype), f"dequantize to {dtype}")


@pytest.mark.parametrize("recipe", RECIPES)
@settings(max_examples=EXAMPLES, phases=[Phase.explicit, Phase.generate])  # shrinking takes hours here
@given(data=st.data())
def test_kernels_equal_the_reference(recipe: Recipe, data: st.DataObject):
    x, scales = on_device(data.draw(cases(aligned=recipe is Recipe.ALIGNED)))
    assert_kernels_match(x, scales, recipe)


def noise(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Gaussian blocks whose magnitudes span 2**-14 to 2**3, with zeros and negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    blocks = x.view(-1, 16) * torch.exp2(torch.randint(-14, 4, (x.numel() // 16, 1), generator=generator).float())
    blocks[torch.rand(blocks.shape, generator=generator) < 0.05] = -0.0
    blocks[::11] = 0.0
    return blocks.view(shape).to(dtype).to(DEVICE)


LAYOUTS = {
    "one block": lambda d: noise(16, dtype=d),
    "one row": lambda d: noise(1, 48, dtype=d),
    "odd rows": lambda d: noise(*((63, 592) if DEVICE == "cuda" else (9, 80)), dtype=d),
    "more than a tile": lambda d: noise(1031, 16, dtype=d),
    "rank 4": lambda d: noise(2, 3, 5, 32, dtype=d),
    "row stride": lambda d: noise(33, 96, dtype=d)[:, 16:64],
    "odd offset": lambda d: noise(17, 16, dtype=d).flatten()[1:-15].view(16, 16),
    "transposed": lambda d: noise(3, 40, 32, dtype=d).mT.contiguous().mT,
    "columns": lambda d: noise(64, 48, dtype=d).t().contiguous().t(),
    "expanded": lambda d: noise(1, 32, dtype=d).expand(5, 32),
    "no rows": lambda d: noise(16, dtype=d)[:0].view(0, 16),
    "no experts": lambda d: torch.zeros(0, 4, 32, dtype=d, device=DEVICE),
    "not finite": lambda d: with_nan_and_inf(noise(9, 64, dtype=d)),
}


def with_nan_and_inf(x: Tensor) -> Tensor:
    x[2, 5], x[4, 17], x[4, 40], x[8] = math.nan, math.inf, -math.inf, math.nan
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, dtype: torch.dtype):
    x = LAYOUTS[layout](dtype)
    for recipe in (Recipe.ALIGNED, Recipe.MODELOPT, Recipe.LLM_COMPRESSOR):
        assert_kernels_match(x, {"tensor_amax": reference.amax(x)}, recipe)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "rows with gaps"])
def test_scales_per_expert_and_per_row(recipe: Recipe, layout: str):
    x = noise(4, 24, 32) if DEVICE == "cuda" else noise(3, 4, 32)
    if layout == "transposed":
        x = x.mT.contiguous().mT
    if layout == "rows with gaps":
        x = torch.cat([x, x], -1)[..., :32]
    assert_kernels_match(x, {"tensor_amax": reference.amax(x, dim=(1, 2))}, recipe)
    assert_kernels_match(x, {"tensor_amax": reference.amax(x, dim=-1)}, recipe)


@pytest.mark.parametrize("shape", [(1, 5, 1), (3, 1, 1), (1, 1, 1), (3, 5, 1)])
def test_scales_that_rows_share(shape: tuple[int, ...]):
    amax = torch.linspace(0.1, 30.0, math.prod(shape)).view(shape).to(DEVICE)
    both = DEVICE == "cuda" or shape == (3, 1, 1)  # seconds each in the interpreter
    for recipe in (Recipe.ALIGNED, Recipe.TRANSFORMER_ENGINE) if both else (Recipe.ALIGNED,):
        assert_kernels_match(noise(3, 5, 32), {"tensor_amax": amax}, recipe)
        p = reference.scale_from_amax(amax, recipe)[0]
        assert_kernels_match(noise(3, 5, 32), {"per_tensor_scale": p}, recipe)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_amax_equals_the_reference(layout: str, dtype: torch.dtype):
    from quads_qat.kernels.amax import amax

    x = LAYOUTS[layout](dtype)
    assert_same_bits(amax([x], None), reference.amax(x))
    assert_same_bits(amax([x, x * 2, x / 3, x * 5], None), reference.amax(x, x * 2, x / 3, x * 5))
    if x.ndim > 1:
        assert_same_bits(amax([x], (-1,)), reference.amax(x, dim=-1))
    if x.ndim == 3:
        assert_same_bits(amax([x], (1, 2)), reference.amax(x, dim=(1, 2)))


@pytest.mark.parametrize("recipe", [Recipe.ALIGNED, Recipe.MODELOPT])
@pytest.mark.parametrize("shape", [(1, 16), (130, 96), (128, 64), (2, 130, 32), (2, 2, 5, 32)])
@pytest.mark.parametrize("per", ["tensor", "matrix", "row"])
def test_swizzled_scales(shape: tuple[int, ...], per: str, recipe: Recipe):
    if DEVICE == "cpu" and per == "row" and (recipe is not Recipe.ALIGNED or shape in ((128, 64), (2, 130, 32))):
        pytest.skip("a program a row is seconds in the interpreter; [130, 96] crosses a tile too")
    x = noise(*shape)
    amax = reference.amax(x, dim={"tensor": None, "matrix": tuple(range(1, x.ndim)), "row": -1}[per])
    if per == "matrix" and x.ndim == 2:
        amax = amax.amax()
    expected = reference.quantize(x, tensor_amax=amax, recipe=recipe)
    qdata, swizzled, p = ops.quantize_swizzled(x, tensor_amax=amax, recipe=recipe, backend="triton")
    assert_same_bits(qdata, expected.qdata)
    assert_same_bits(swizzled.view(torch.uint8), packing.swizzle_block_scale(expected.block_scale).view(torch.uint8))
    assert_same_bits(p, expected.per_tensor_scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_element_for_every_block_scale(dtype: torch.dtype):
    """All finite numbers below 448 * 6 as elements, beside an amax that makes each of the 126 block scales; p = 1."""
    if DEVICE == "cpu":
        pytest.skip("8 million elements: too many for the interpreter; the GPU run covers it")
    magnitudes = (
        torch.arange(0x7F80 if dtype is torch.bfloat16 else 0x7C00, dtype=torch.int32).to(torch.int16).view(dtype)
    )
    magnitudes = magnitudes[magnitudes <= 2688]
    elements = torch.cat([magnitudes, -magnitudes])
    one = torch.ones((), device=DEVICE)
    for byte in range(1, 0x7F):
        scale = torch.tensor(byte, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
        inside = elements[elements.abs().float() <= 6 * scale]
        padded = torch.cat([inside, inside.new_zeros(-len(inside) % 15)]).view(-1, 15)
        top = (6 * scale).to(dtype).expand(len(padded), 1)
        x = torch.cat([top, padded], 1).contiguous().to(DEVICE)
        assert_same(ops.quantize(x, one, backend="triton"), reference.quantize(x, one))
        assert_same_bits(ops.fake_quantize(x, one, backend="triton"), reference.fake_quantize(x, one))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_block_amax(dtype: torch.dtype):
    """Each finite 16-bit number as the amax of a block, for scales across the range."""
    magnitudes = (
        torch.arange(0x7F80 if dtype is torch.bfloat16 else 0x7C00, dtype=torch.int32).to(torch.int16).view(dtype)
    )
    if DEVICE == "cpu":
        magnitudes = magnitudes[::23]
    x = torch.zeros(len(magnitudes), 16, dtype=dtype)
    x[:, 3] = -magnitudes
    for exponent in (-116, -20, -3, 0, 9, 117):
        p = torch.tensor(2.0**exponent, device=DEVICE)
        assert_same(ops.quantize(x.to(DEVICE), p, backend="triton"), reference.quantize(x.to(DEVICE), p))


def test_all_codes_and_scales_decode():
    codes = torch.arange(256, dtype=torch.uint8).view(32, 8)  # every byte once
    block_scale = torch.arange(0x80, dtype=torch.uint8)
    if DEVICE == "cpu":  # the exhaustive suite has all of them in the interpreter, each code in one place
        block_scale = block_scale[[0, 1, 7, 8, 0x38, 0x7E, 0x7F]]
    qdata = codes.repeat(len(block_scale), 1).to(DEVICE)
    scales = block_scale.repeat_interleave(32).view(-1, 1).view(torch.float8_e4m3fn).to(DEVICE)
    for recipe in RECIPES:
        for value in (2.0**-20, 1.0) if recipe is Recipe.ALIGNED else (3e-5, 1.0):
            p = torch.tensor(value, device=DEVICE)
            q = ops.NVFP4Tensor(qdata, scales, p, recipe, reference.stored_from_scale(p, recipe))
            for dtype in DTYPES:
                assert_same_bits(
                    ops.dequantize(q, dtype, backend="triton"), reference.dequantize(q, dtype), f"{recipe}"
                )


def test_more_than_two_to_the_31_elements():
    if DEVICE == "cpu":
        pytest.skip("needs 15 GB; the GPU run covers it")
    rows, k = 2**17 + 3, 2**14 + 16
    x = torch.zeros(rows, k, dtype=torch.bfloat16, device=DEVICE)
    x[-1] = noise(1, k)[0]
    x[0] = noise(1, k, seed=1)[0]
    amax = ops.amax(x)
    assert_same_bits(amax, reference.amax(x[[0, -1]]))
    expected = reference.quantize(x[[0, -1]], tensor_amax=amax)
    q = ops.quantize(x, tensor_amax=amax)
    assert_same_bits(q.qdata[[0, -1]], expected.qdata)
    assert_same_bits(q.block_scale.view(torch.uint8)[[0, -1]], expected.block_scale.view(torch.uint8))
    assert not q.qdata[1:-1].any()
    wanted = reference.fake_quantize(x[[0, -1]], tensor_amax=amax)
    assert_same_bits(ops.fake_quantize(x, tensor_amax=amax)[[0, -1]], wanted)
    assert_same_bits(ops.dequantize(q)[[0, -1]], wanted)
