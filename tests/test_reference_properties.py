"""What holds for every tensor: the invariants of the contract, each one property."""

from fractions import Fraction

import numpy as np
import oracle
import pytest
import torch
from bits import assert_same, assert_same_bits, assert_same_blocks, bits, part
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import DTYPES, Case, cases, layouts
from under_test import implementation

from quads_qat.config import Recipe
from quads_qat.packing import unpack_codes

reference = implementation()
recipes = st.sampled_from(Recipe)
others = st.sampled_from([recipe for recipe in Recipe if recipe is not Recipe.ALIGNED])


def any_recipe(**kwargs) -> st.SearchStrategy[tuple[Case, Recipe]]:
    """A case and a recipe that accepts it: ALIGNED with powers of two, the others with any scale."""
    aligned = st.tuples(cases(**kwargs), recipes)
    return aligned | st.tuples(cases(**kwargs, aligned=False), others)


def quantize(case: Case, recipe: Recipe = Recipe.ALIGNED):
    return reference.quantize(case.x, **case.scales, recipe=recipe)


# ----------------------------------------------------------------------------------------------------- the exact oracle


def hexadecimal(values: torch.Tensor) -> list[str]:
    return [v.hex() for v in values.flatten().tolist()]


@given(cases())
def test_aligned_is_one_rounding_of_an_exact_number(case: Case):
    q = quantize(case)
    name = str(case.x.dtype).removeprefix("torch.")
    if case.per_tensor_scale is None:
        given_amax = case.x.abs().max() if case.tensor_amax is None else case.tensor_amax
        expected = [float(oracle.per_tensor_scale(a)) for a in given_amax.flatten().tolist()]
        assert q.per_tensor_scale.flatten().tolist() == expected
    blocks = case.x.reshape(-1, 16).tolist()
    p = reference._per_block(q.per_tensor_scale, case.x)
    scales = p.expand(len(blocks)).tolist()
    results = [oracle.quantize_block(x, Fraction(scale), name) for x, scale in zip(blocks, scales, strict=True)]
    assert bits(q.block_scale).flatten().tolist() == [r.byte for r in results]
    assert unpack_codes(q.qdata).flatten().tolist() == [code for r in results for code in r.codes]
    assert hexadecimal(reference.dequantize(q, case.x.dtype)) == [value.hex() for r in results for value in r.values]


@given(cases(), st.sampled_from(DTYPES))
def test_dequantize_is_the_exact_product_rounded_once(case: Case, dtype: torch.dtype):
    q = quantize(case)
    p = reference._per_block(q.per_tensor_scale, case.x).expand(q.block_scale.numel()).tolist()
    bytes_, codes = bits(q.block_scale).flatten().tolist(), unpack_codes(q.qdata).view(-1, 16).tolist()
    expected = [
        oracle.decode(code, byte, Fraction(scale), str(dtype).removeprefix("torch.")).hex()
        for row, byte, scale in zip(codes, bytes_, p, strict=True)
        for code in row
    ]
    assert hexadecimal(reference.dequantize(q, dtype)) == expected


def ieee_division(x: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Block scales [...] and codes [..., 16] of ``x`` [..., 16] with plain fp32 divisions and casts."""
    a = x.abs().amax(-1).float()
    s = torch.where(a == 0, 1.0, (a / (6 * p)).clamp(2.0**-9, 448.0)).to(torch.float8_e4m3fn)
    y = x.float() / (s.float() * p)[..., None]
    magnitude = y.abs().clamp(max=6.0)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    magnitude = (magnitude / step).round() * step  # half to even
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return s, torch.searchsorted(grid, magnitude) + 8 * (x < 0)  # not y: a tiny quotient may become -0.0


@given(cases())
def test_aligned_equals_ieee_division_in_fp32(case: Case):
    """For fp32 inputs too: m s p is an fp32 number for each midpoint m, and a quotient x / (s p) rounds onto m only if
    |x - m s p| <= s p ulp(m) / 2; that is less than the distance from m s p to its neighbours, so x = m s p.
    """
    q = quantize(case)
    p = reference._per_block(q.per_tensor_scale, case.x)
    s, codes = ieee_division(case.x.reshape(-1, 16), p)
    assert_same_bits(q.block_scale.flatten(), s)
    assert torch.equal(unpack_codes(q.qdata).view(-1, 16).long(), codes)


# ----------------------------------------------------------------------------------------------------- for every recipe


@given(any_recipe(), layouts, st.sampled_from(DTYPES))
def test_fake_quantize_is_quantize_and_dequantize(case_recipe, layout, dtype: torch.dtype):
    case, recipe = case_recipe
    q = quantize(case, recipe)
    for out in (None, dtype):
        values = reference.fake_quantize(layout(case.x), **case.scales, recipe=recipe, dtype=out)
        assert_same_bits(values, reference.dequantize(q, out or case.x.dtype))


@given(any_recipe(), layouts)
def test_strides_do_not_matter(case_recipe, layout):
    case, recipe = case_recipe
    assert_same(reference.quantize(layout(case.x), **case.scales, recipe=recipe), quantize(case, recipe))


@given(any_recipe(kinds=["scale", "amax"], leads=[(3,), (2, 2), (3, 1), (2, 1, 2)]))
def test_a_row_does_not_depend_on_the_others(case_recipe):
    case, recipe = case_recipe
    q = quantize(case, recipe)
    values = reference.dequantize(q, case.x.dtype)
    given_scale = case.per_tensor_scale if case.tensor_amax is None else case.tensor_amax
    for row in np.ndindex(*case.x.shape[:-1]):
        scale = given_scale
        if scale.ndim:
            scale = scale[row[: scale.ndim]].squeeze()
        kwargs = {"per_tensor_scale": scale} if case.tensor_amax is None else {"tensor_amax": scale}
        alone = reference.quantize(case.x[row], **kwargs, recipe=recipe)
        assert_same_blocks(alone, part(q, row) if q.per_tensor_scale.ndim != 1 else part(part(q, row[0]), row[1:]))
        assert_same_bits(reference.dequantize(alone, case.x.dtype), values[row])


@given(any_recipe(kinds=["own"], leads=[(3,), (2, 2)]))
def test_given_its_own_amax_or_none_is_the_same(case_recipe):
    case, recipe = case_recipe
    assert_same(reference.quantize(case.x, tensor_amax=reference.amax(case.x), recipe=recipe), quantize(case, recipe))


@given(cases(kinds=["scale"]), recipes)
def test_a_given_scale_is_that_of_the_amax_2688_times_it(case: Case, recipe: Recipe):
    assume(recipe is not Recipe.LLM_COMPRESSOR)  # its G = 2688 / A is rounded twice in the tensor's dtype
    p = case.per_tensor_scale
    assume(p.max() <= 2.0**100)
    q, from_amax = quantize(case, recipe), reference.quantize(case.x, tensor_amax=2688 * p, recipe=recipe)
    assert_same(q, from_amax)
    assert_same_bits(q.stored_scale, 2688 * p if recipe is Recipe.TRANSFORMER_ENGINE else p)


@given(cases([torch.bfloat16, torch.float16], kinds=["amax"]), recipes)
def test_an_amax_in_fp32_or_in_the_tensor_s_dtype_is_the_same(case: Case, recipe: Recipe):
    q = reference.quantize(case.x, tensor_amax=case.tensor_amax.float(), recipe=recipe)
    assert_same(q, quantize(case, recipe))


@given(any_recipe(kinds=["own"], leads=[(3,), (4,), (2, 2)]), st.integers(0, 4))
def test_a_scale_group_quantized_together_or_apart(case_recipe, cut: int):
    case, recipe = case_recipe
    x = case.x.flatten(0, -2)
    cut = min(cut, x.shape[0])
    together = reference.quantize(x, recipe=recipe)
    members = [x[:cut], x[cut:]]
    apart = [reference.quantize(m, tensor_amax=reference.amax(*members), recipe=recipe) for m in members]
    assert_same_bits(torch.cat([q.qdata for q in apart]), together.qdata)
    assert_same_bits(torch.cat([bits(q.block_scale) for q in apart]), bits(together.block_scale))
    for q in apart:
        assert_same_bits(q.per_tensor_scale, together.per_tensor_scale)
        assert_same_bits(q.stored_scale, together.stored_scale)


@given(any_recipe(dtypes=[torch.bfloat16, torch.float32], exponents=st.integers(-12, 12)), st.integers(-24, 24))
def test_scaling_by_a_power_of_two_commutes(case_recipe, k: int):
    """While nothing over- or underflows. The static recipes' scale of a zero block is no exception worth a rule."""
    case, recipe = case_recipe
    magnitude = case.x.abs()
    assume(((magnitude == 0) | (magnitude > 2.0**-90) & (magnitude < 2.0**90)).all())
    assume(not recipe.value.startswith("modelopt-static") or case.x.reshape(-1, 16).any(-1).all())
    factor = 2.0**k
    scales = {name: None if s is None else s * factor for name, s in case.scales.items()}
    scaled, q = reference.quantize(case.x * factor, **scales, recipe=recipe), quantize(case, recipe)
    assert_same_blocks(scaled, q)
    assert_same_bits(scaled.per_tensor_scale, q.per_tensor_scale * factor)
    assert_same_bits(reference.dequantize(scaled, torch.float32), reference.dequantize(q, torch.float32) * factor)


@given(any_recipe())
def test_negation_changes_sign_bits_alone(case_recipe):
    case, recipe = case_recipe
    q, negated = quantize(case, recipe), reference.quantize(-case.x, **case.scales, recipe=recipe)
    assert_same_bits(negated.block_scale, q.block_scale)
    codes, negated_codes = unpack_codes(q.qdata), unpack_codes(negated.qdata)
    assert_same_bits(negated_codes & 7, codes & 7)
    signed = (case.x != 0) if recipe is Recipe.ALIGNED else (codes & 7) != 0  # elsewhere a tiny quotient may become 0
    assert_same_bits(negated_codes[signed], codes[signed] ^ 8)


# --------------------------------------------------------------------------------------------------- ALIGNED's promises


def within_15_16(x: torch.Tensor) -> bool:
    """Beyond this share of the dtype's range a block scale that was rounded up may decode to inf."""
    return bool(x.abs().max() <= torch.finfo(x.dtype).max * 15 / 16)


def per_element(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.repeat_interleave(16, dim=-1)


def decode_scales(q) -> torch.Tensor:
    """s p of every element, float64."""
    return per_element(q.block_scale.double()) * q.per_tensor_scale.double()


def is_normal(q) -> torch.Tensor:
    """Elements of blocks with block_scale >= 2**-6."""
    return per_element(bits(q.block_scale) >= 0x08)


@given(cases(kinds=["own"]))
def test_quantizing_again_changes_nothing_where_block_scales_are_normal(case: Case):
    """The values, that is: a -0.0 of the first pass is +0.0 in the second."""
    assume(within_15_16(case.x))
    q = quantize(case)
    for dtype in (torch.float32, torch.bfloat16):
        once = reference.dequantize(q, dtype)
        again = reference.fake_quantize(once)
        assert torch.equal(again[is_normal(q)], once[is_normal(q)])


@given(cases([torch.float16], kinds=["own"], exponents=st.integers(-12, 4)))
def test_quantizing_again_in_fp16_while_its_values_are_exact(case: Case):
    assume(within_15_16(case.x))
    q = quantize(case)
    once = reference.dequantize(q, torch.float16)
    assert torch.equal(reference.fake_quantize(once)[is_normal(q)], once[is_normal(q)])


@given(cases(kinds=["own"]))
def test_the_error_is_at_most_half_the_local_step(case: Case):
    """In the top step, saturation included, that is s p."""
    assume(within_15_16(case.x))
    q = quantize(case)
    unit, x, normal = decode_scales(q), case.x.double(), is_normal(q)
    y = x.abs() / unit
    half_step = torch.where(y < 2, 0.25, torch.where(y < 4, 0.5, 1.0)) * unit
    error = (x - reference.dequantize(q, torch.float32).double()).abs()
    assert (error <= half_step)[normal].all()


@given(cases(kinds=["own"]))
def test_the_error_is_at_most_three_units_where_block_scales_are_subnormal(case: Case):
    assume(within_15_16(case.x))
    q = quantize(case)
    error = (case.x.double() - reference.dequantize(q, torch.float32).double()).abs()
    assert (error <= 3 * decode_scales(q)).all()


@given(cases(kinds=["own"]))
def test_the_residual_is_exact_and_fits_a_quarter_of_the_scale(case: Case):
    assume(within_15_16(case.x))
    q = quantize(case)
    values = reference.dequantize(q, torch.float32)
    residual = case.x.float() - values
    assert torch.equal(residual.double(), case.x.double() - values.double())
    p2 = (q.per_tensor_scale / 4).clamp(min=2.0**-116)
    assert residual.abs().max() <= 2688 * p2, "it would saturate"
    second = reference.quantize(residual, p2)
    left = (residual.double() - reference.dequantize(second, torch.float32).double()).abs()
    assert (left <= 3 * decode_scales(second)).all()


@given(cases([torch.bfloat16, torch.float32]))
def test_values_are_exact_in_bf16(case: Case):
    q = quantize(case)
    exact = reference.dequantize(q, torch.float32)
    assume(exact.isfinite().all())
    assert_same_bits(reference.dequantize(q, torch.bfloat16).float(), exact)


@pytest.mark.parametrize("distribution", ["gaussian", "laplace", "student-t"])
def test_no_bf16_weight_is_inexact(distribution: str):
    rng = np.random.default_rng(0)
    draw = {
        "gaussian": rng.standard_normal,
        "laplace": lambda n: rng.laplace(size=n),
        "student-t": lambda n: rng.standard_t(2, n),
    }
    w = torch.from_numpy(0.02 * draw[distribution](64 * 512)).view(64, 512).bfloat16()
    q = reference.quantize(w)
    exact = reference.dequantize(q, torch.float32)
    assert_same_bits(reference.dequantize(q, torch.bfloat16).float(), exact)
    assert_same_bits(reference.fake_quantize(w).float(), exact)
    assert_same_bits(reference.dequantize(q, torch.float16).float(), exact)
