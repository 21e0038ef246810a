"""Contract under test: the compensated residual is its definition, channel by channel and product by product."""

import math
from fractions import Fraction

import pytest
import torch
from bits import assert_same, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quads_qat import ops, reference
from quads_qat.config import (
    ActivationFormat,
    ActivationScale,
    Recipe,
    ResidualConfig,
    ResidualNorm,
    ResidualScope,
)
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.reference_matmul import residual_mask, residual_quantize

SCALES = list(ActivationScale)
TOKEN = ActivationFormat()


def outliers(rows: int, k: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Gaussian rows in which every 11th channel is ten times larger."""
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed))
    x[:, ::11] *= 10
    return x.to(dtype)


def quantized_weight(n: int, k: int, seed: int = 1) -> NVFP4Tensor:
    return ops.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(seed)))


# --------------------------------------------------------------------------------------------------------------- mask


def slow_mask(r: list[list[float]], config: ResidualConfig) -> list[list[bool]]:
    """The definition in plain Python; float32 sums, in the order that the contract gives, by rounding each step."""
    rows, k = len(r), len(r[0])

    def fp32(value: float) -> float:
        return torch.tensor(value, dtype=torch.float64).float().item()

    def power(value: float) -> float:
        return fp32(value * value) if config.norm is ResidualNorm.L2 else abs(value)

    def over_rows(values: list[float]) -> float:
        if config.norm is ResidualNorm.MAX:
            return max(values, default=0.0)
        total = 0.0
        for start in range(0, len(values), 128):
            chunk = 0.0
            for value in values[start : start + 128]:
                chunk = fp32(chunk + value)
            total = fp32(total + chunk)
        return total

    def join(values: list[float]) -> float:
        if len(values) == 1:
            return values[0]
        pairs = zip(values[::2], values[1::2], strict=True)
        return join([max(a, b) if config.norm is ResidualNorm.MAX else fp32(a + b) for a, b in pairs])

    def chosen(scores: list[float]) -> set[int]:
        if config.granularity == 16:
            scores = [join(scores[i : i + 16]) for i in range(0, len(scores), 16)]
        n = math.floor(Fraction(config.fraction) * len(scores) + Fraction(1, 2))
        best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:n]
        return {i * config.granularity + j for i in best for j in range(config.granularity)}

    if config.scope is ResidualScope.BATCH and rows != 1:
        picked = [chosen([over_rows([power(row[i]) for row in r]) for i in range(k)])] * rows
    elif config.scope is not ResidualScope.BLOCK:
        picked = [chosen([power(v) if config.granularity == 16 else abs(v) for v in row]) for row in r]
    else:
        picked = [
            {start + i for start in range(0, k, 16) for i in chosen([abs(v) for v in row[start : start + 16]])}
            for row in r
        ]
    return [[i in row for i in range(k)] for row in picked]


@st.composite
def residuals(draw: st.DrawFn) -> Tensor:
    """[rows, 16 n] of few distinct magnitudes, so that many scores tie, in blocks of various sizes."""
    rows, blocks = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    some = [0.0, 0.25, -0.25, 0.5, 0.1, -0.1, 1.5, 3e-20, 1e-30, 2e-30, 1e20, 3e20]
    levels = draw(st.lists(st.sampled_from(some), min_size=1, max_size=4))
    index = draw(st.lists(st.integers(0, len(levels) - 1), min_size=rows * blocks * 16, max_size=rows * blocks * 16))
    return torch.tensor([levels[i] for i in index]).view(rows, blocks * 16)


configs = st.builds(
    ResidualConfig,
    fraction=st.one_of(st.sampled_from([0.0, 1 / 32, 0.125, 0.25, 0.5, 0.75, 1.0]), st.floats(0, 1)),
    scope=st.sampled_from(["batch", "token"]),
    norm=st.sampled_from(list(ResidualNorm)),
    granularity=st.sampled_from([1, 16]),
) | st.builds(
    ResidualConfig,
    fraction=st.one_of(st.sampled_from([0.0, 1 / 32, 0.03, 0.5, 1.0]), st.floats(0, 1)),
    scope=st.just("block"),
    norm=st.sampled_from(list(ResidualNorm)),
)


def as_rows(mask: Tensor | None, r: Tensor) -> list[list[bool]]:
    mask = torch.zeros_like(r, dtype=torch.bool) if mask is None else mask
    return mask.expand(r.shape).tolist()


@given(residuals(), configs)
@settings(max_examples=200)
def test_the_mask_is_its_definition(r: Tensor, config: ResidualConfig):
    assert as_rows(residual_mask(r, config), r) == slow_mask(r.tolist(), config)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("granularity", [1, 16])
@pytest.mark.parametrize("norm", list(ResidualNorm))
def test_the_batch_mask_adds_rows_in_chunks_of_128(norm: ResidualNorm, granularity: int, rows: int):
    # rows repeat few values: sums of many channels agree up to the order of addition, which decides
    r = torch.randn(4, 32, generator=torch.Generator().manual_seed(rows)).repeat(rows, 8)[:rows]
    r[:, torch.arange(0, 256, 2)] = r[:, torch.arange(0, 256, 2)].flip(0)
    r = r[:, :64].contiguous()
    config = ResidualConfig(fraction=0.4, scope=ResidualScope.BATCH, norm=norm, granularity=granularity)
    assert as_rows(residual_mask(r, config), r) == slow_mask(r.tolist(), config)


@pytest.mark.parametrize("scope", ["batch", "token", "block"])
def test_among_equal_scores_the_lower_channel_wins(scope: str):
    r = torch.full((3, 32), -0.25)
    mask = as_rows(residual_mask(r, ResidualConfig(fraction=0.25, scope=scope)), r)
    expected = [i % 16 < 4 for i in range(32)] if scope == "block" else [i < 8 for i in range(32)]
    assert mask == [expected] * 3


@pytest.mark.parametrize("size", [16, 17, 100, 4096])
@pytest.mark.parametrize("fraction", [0.0, 1e-9, 1 / 32, 0.03, 0.125, 0.5, 0.96875, 0.999, 1.0])
def test_the_number_of_channels_is_the_fraction_rounded_half_up(fraction: float, size: int):
    assert ResidualConfig(fraction=fraction).selected(size) == math.floor(Fraction(fraction) * size + Fraction(1, 2))


def test_a_batch_without_rows_has_a_mask_and_an_output():
    for scope in ("batch", "token", "block"):
        for granularity in (1, 16) if scope != "block" else (1,):
            for norm in ResidualNorm:
                config = ResidualConfig(scope=scope, norm=norm, granularity=granularity)
                assert as_rows(residual_mask(torch.empty(0, 32), config), torch.empty(0, 32)) == []
                assert ops.residual_linear(torch.empty(0, 32), quantized_weight(8, 32), config).shape == (0, 8)


# --------------------------------------------------------------------------------------------------------------- output

CONFIGS = pytest.mark.parametrize(
    "config",
    [
        ResidualConfig(fraction=f, scope=s, granularity=g)
        for f in (0.25, 0.5, 1.0)
        for s, g in (("batch", 1), ("batch", 16), ("token", 1), ("token", 16), ("block", 1))
    ],
    ids=lambda c: f"{c.scope}{c.granularity}-{c.fraction}",
)


def two_products(x: Tensor, w: NVFP4Tensor, config: ResidualConfig, activation: ActivationFormat, amax: Tensor | None):
    """``(terms, sum of magnitudes)`` of the definition in float64, from the quantizer alone."""
    if activation.scale is ActivationScale.STATIC:
        given_amax = amax
    else:
        given_amax = x.abs().amax(-1, keepdim=True) if activation.scale is ActivationScale.PER_TOKEN else x.abs().amax()
    q = reference.quantize(x, tensor_amax=given_amax, recipe=activation.recipe)
    first = reference.dequantize(q, torch.float32)
    r = x.float() - first
    mask = torch.tensor(slow_mask(r.tolist(), config))
    masked = torch.where(mask, r, torch.zeros(()))
    if activation.recipe is Recipe.ALIGNED and activation.scale is not ActivationScale.STATIC:
        second = reference.quantize(masked, q.per_tensor_scale / 4)
    else:
        second = reference.quantize(masked, tensor_amax=masked.abs().amax(-1, keepdim=True), recipe=activation.recipe)
    operands = [first.double(), reference.dequantize(second, torch.float32).double()]
    weight = reference.dequantize(w, torch.float32).double().t()
    return sum(a @ weight for a in operands), sum(a.abs() @ weight.abs() for a in operands)


@CONFIGS
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("recipe", [Recipe.ALIGNED, Recipe.TRANSFORMER_ENGINE])
def test_the_output_is_the_sum_of_two_products(recipe: Recipe, scale: ActivationScale, config: ResidualConfig):
    # A product of two operands is exact in fp32 (6 + 6 significant bits), or for the TE recipe rounded once. Sums of
    # K = 64 of them in any order, and the addition of the two sums: at most (K - 1) + 1 + 1 roundings, of 2^-24 each,
    # of no more than the sum of magnitudes.
    x, w = outliers(5, 64), quantized_weight(24, 64)
    activation, amax = ActivationFormat(scale=scale, recipe=recipe), x.abs().max() / 2
    found = ops.residual_linear(x, w, config, activation=activation, input_amax=amax)
    expected, magnitude = two_products(x, w, config, activation, amax)
    assert ((found.double() - expected).abs() <= 66 * 2**-24 * magnitude).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_bias_is_added_before_the_only_rounding(dtype: torch.dtype):
    x, w, bias = outliers(5, 64, dtype=dtype), quantized_weight(24, 64), torch.randn(24).to(dtype)
    config = ResidualConfig()
    exact = ops.residual_linear(x.float(), w, config)
    found = ops.residual_linear(x, w, config, bias)
    assert found.dtype == dtype
    assert_same_bits(found, (exact + bias.float()).to(dtype))


@pytest.mark.parametrize("scope", ["batch", "token", "block"])
@pytest.mark.parametrize("scale", SCALES)
def test_fraction_zero_is_naive_w4a4_bit_for_bit(scale: ActivationScale, scope: str):
    x, w, bias = outliers(7, 64, dtype=torch.bfloat16), quantized_weight(24, 64), torch.randn(24)
    arguments = {"activation": ActivationFormat(scale=scale), "input_amax": torch.tensor(20.0)}
    for fraction in (0.0, 0.499 / 64):
        config = ResidualConfig(fraction=fraction, scope=scope)
        found = ops.residual_linear(x, w, config, bias.bfloat16(), **arguments)
        assert_same_bits(found, ops.linear_w4a4(x, w, bias.bfloat16(), **arguments))


@pytest.mark.parametrize(
    ("scope", "granularity"), [("batch", 1), ("batch", 16), ("token", 1), ("token", 16), ("block", 1)]
)
def test_the_error_falls_with_the_fraction(scope: str, granularity: int):
    x, w = outliers(64, 256), quantized_weight(64, 256)
    exact = ops.linear_w4a16(x, w)
    errors = []
    for fraction in (0.0, 0.125, 0.25, 0.5, 0.75, 1.0):
        config = ResidualConfig(fraction=fraction, scope=scope, granularity=granularity)
        errors.append((ops.residual_linear(x, w, config) - exact).square().mean().sqrt().item())
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) == len(errors)
    assert errors[-1] < errors[0] / 5


@pytest.mark.parametrize("scope", ["token", "block"])
@pytest.mark.parametrize("granularity", [1, 16])
def test_per_token_scales_and_token_or_block_masks_are_batch_invariant(scope: str, granularity: int):
    if scope == "block" and granularity == 16:
        return
    x, w = outliers(9, 64), quantized_weight(24, 64)
    config = ResidualConfig(scope=scope, granularity=granularity)
    operands = residual_quantize(x, config, TOKEN)
    out = ops.residual_linear(x, w, config)
    other = outliers(9, 64, seed=5) * 100
    for row in range(9):
        alone = residual_quantize(x[row : row + 1], config, TOKEN)
        for one, all_ in zip(alone, operands, strict=True):
            assert_same_bits(one.qdata[0], all_.qdata[row])
            assert_same_bits(one.block_scale[0], all_.block_scale[row])
            assert_same_bits(one.per_tensor_scale[0], all_.per_tensor_scale[row])
        company = other.clone()
        company[row] = x[row]
        assert_same_bits(ops.residual_linear(company, w, config)[row], out[row])


def test_a_static_mask_and_a_static_scale_are_batch_invariant_and_a_batch_mask_or_a_tensor_scale_is_not():
    x, w, mask = outliers(9, 64), quantized_weight(24, 64), torch.arange(64) % 3 == 0
    company = torch.cat([outliers(8, 64, seed=5) * 1e5, x[-1:]])  # so large that block scales of x are subnormal
    static, tensor = (ActivationFormat(scale=s) for s in (ActivationScale.STATIC, ActivationScale.PER_TENSOR))

    def last(rows: Tensor, scope: str, activation: ActivationFormat) -> Tensor:
        config = ResidualConfig(scope=scope)
        amax = torch.tensor(30.0)
        return ops.residual_linear(rows, w, config, activation=activation, input_amax=amax, mask=mask)[-1]

    for scope, activation, invariant in (
        ("static", TOKEN, True),
        ("static", static, True),
        ("token", static, True),
        ("batch", TOKEN, False),
        ("token", tensor, False),
    ):
        assert torch.equal(last(x, scope, activation), last(company, scope, activation)) == invariant, (
            scope,
            activation,
        )


def test_a_static_mask_selects_its_channels_whatever_the_fraction():
    x, mask = outliers(9, 64), torch.arange(64) % 3 == 0
    for fraction in (0.1, 1.0):
        config = ResidualConfig(fraction=fraction, scope=ResidualScope.STATIC)
        _, second = residual_quantize(x, config, TOKEN, mask=mask)
        assert not reference.dequantize(second)[:, ~mask].any()
        assert reference.dequantize(second)[:, mask].any()
    assert residual_quantize(x, ResidualConfig(fraction=0, scope=ResidualScope.STATIC), TOKEN, mask=mask)[1] is None


# -------------------------------------------------------------------------------------------------- second quantization


@given(st.integers(0, 10_000), st.sampled_from([1e-30, 1.0, 1e30]), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_quarter_of_the_scale_always_suffices(seed: int, size: float, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-20, 3, (4, 64), generator=generator).float())
    x = (torch.randn(4, 64, generator=generator) * spread * size).to(dtype)
    for scale in (ActivationScale.PER_TOKEN, ActivationScale.PER_TENSOR):
        first, second = residual_quantize(x, ResidualConfig(fraction=1.0), ActivationFormat(scale=scale))
        assert_same_bits(second.per_tensor_scale, (first.per_tensor_scale / 4).clamp(min=2.0**-116))
        r = x.float() - reference.dequantize(first, torch.float32)
        assert (r.abs() <= 2688 * second.per_tensor_scale).all()  # the largest number that the second scale can hold


def test_a_static_scale_saturates_and_the_residual_takes_its_own_scale():
    x, amax = outliers(4, 64), torch.tensor(1.0)
    activation = ActivationFormat(scale=ActivationScale.STATIC)
    first, second = residual_quantize(x, ResidualConfig(fraction=1.0), activation, amax)
    limit = 2688 * first.per_tensor_scale
    assert x.abs().max() > 2 * limit
    assert reference.dequantize(first).abs().max() == limit
    r = x - reference.dequantize(first, torch.float32)
    assert_same(second, reference.quantize(r, tensor_amax=r.abs().amax(-1, keepdim=True)))
    restored = sum(reference.dequantize(q, torch.float32) for q in (first, second))
    assert (restored - x).abs().max() < (reference.dequantize(first, torch.float32) - x).abs().max() / 10


def test_rows_of_zeros_stay_zero():
    x = outliers(3, 32)
    x[1] = 0
    out = ops.residual_linear(x, quantized_weight(8, 32), ResidualConfig())
    assert not out[1].any()
    assert out[0].all()


@pytest.mark.gpu
@CONFIGS
def test_on_cuda_the_operands_have_the_bits_of_the_cpu(config: ResidualConfig):
    x = outliers(300, 256, dtype=torch.bfloat16)
    for scale in (ActivationScale.PER_TOKEN, ActivationScale.PER_TENSOR):
        on_cpu = residual_quantize(x, config, ActivationFormat(scale=scale))
        on_cuda = residual_quantize(x.cuda(), config, ActivationFormat(scale=scale))
        for one, other in zip(on_cpu, on_cuda, strict=True):
            assert_same(other.to("cpu"), one)
