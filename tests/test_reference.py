"""``reference`` against what the peers wrote, and on the inputs that the contract names one by one."""

from pathlib import Path

import numpy as np
import pytest
import torch
from bits import assert_same, assert_same_bits, assert_same_blocks, bits, part
from safetensors.torch import load_file

from quads_qat import reference
from quads_qat.config import Recipe
from quads_qat.packing import unpack_codes

GOLDEN = Path(__file__).parent / "data" / "golden"
# Exempt from byte identity: the peers disagree there, and the contract has its own rules (tested below).
EXEMPT = ("nan", "naninf", "all_zero")
FAMILIES = sorted(p.stem for p in GOLDEN.glob("*.safetensors") if p.stem != "swizzle" and not p.stem.startswith(EXEMPT))

PEERS = {
    "modelopt": Recipe.MODELOPT_IEEE,
    "modelopt_static": Recipe.MODELOPT_STATIC_IEEE,
    "modelopt_cudaeager": Recipe.MODELOPT,
    "modelopt_static_cudaeager": Recipe.MODELOPT_STATIC,
    "compressed_tensors_0_20_1": Recipe.LLM_COMPRESSOR,
    "te_1d": Recipe.TRANSFORMER_ENGINE,
}

# recipe -> scale byte of a block of zeros beside other blocks, and in a tensor of zeros
ZERO_BLOCK_BYTES = {
    Recipe.ALIGNED: (0x38, 0x38),
    Recipe.MODELOPT: (0x38, 0x38),
    Recipe.MODELOPT_IEEE: (0x38, 0x38),
    Recipe.MODELOPT_STATIC: (0x7E, 0x7E),
    Recipe.MODELOPT_STATIC_IEEE: (0x7E, 0x7E),
    Recipe.LLM_COMPRESSOR: (0x20, 0x20),
    Recipe.TRANSFORMER_ENGINE: (0x00, 0x00),
}


# --------------------------------------------------------------------------------------------------------------- golden


def test_golden_files_are_there():
    assert len(FAMILIES) >= 20


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("peer", PEERS)
def test_golden_bytes(peer: str, family: str):
    golden = load_file(GOLDEN / f"{family}.safetensors")
    q = reference.quantize(golden["input"], recipe=PEERS[peer])
    assert_same_bits(q.stored_scale.reshape(1), golden[f"{peer}.global_scale"], "stored scale")
    assert_same_bits(q.block_scale.view(torch.uint8), golden[f"{peer}.scale"], "block scale bytes")
    assert_same_bits(q.qdata, golden[f"{peer}.packed"], "codes")
    assert_same_bits(reference.dequantize(q, torch.bfloat16), golden[f"{peer}.dequant_bf16"], "bf16 values")
    assert_same_bits(
        reference.fake_quantize(golden["input"], recipe=PEERS[peer], dtype=torch.bfloat16),
        golden[f"{peer}.dequant_bf16"],
        "fake-quantized bf16 values",
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_flashinfer_exact_mode_is_transformer_engine_up_to_the_sign_of_zeros(family: str):
    file = load_file(GOLDEN / f"{family}.safetensors")
    golden = {key.partition(".")[2]: value for key, value in file.items() if "flashinfer_exact" in key}
    q = reference.quantize(file["input"], recipe=Recipe.TRANSFORMER_ENGINE)
    # It stores G = 2688 / A, a true division, where TransformerEngine stores A; it decodes code * (s * (1 / G)).
    g = (torch.full((1,), 2688.0) / q.stored_scale).clamp(max=torch.finfo(torch.float32).max)
    assert_same_bits(g, golden["global_scale"], "stored scale")
    assert_same_bits(q.block_scale.view(torch.uint8), golden["scale"], "block scale bytes")
    codes = unpack_codes(q.qdata)
    unsigned_zero = torch.where(codes == 8, 0, codes)
    golden_codes = unpack_codes(golden["packed"])
    assert_same_bits(unsigned_zero, torch.where(golden_codes == 8, 0, golden_codes), "codes")
    scale = (q.block_scale.float() * g.reciprocal()).repeat_interleave(16, dim=-1)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = grid[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0) * scale
    assert torch.equal(values.bfloat16(), golden["dequant_bf16"])


def test_aligned_needs_no_golden_file_to_differ_from_the_others():
    """Each peer's recipe is told apart from ALIGNED by a file, so that a mix-up of recipes cannot pass."""
    inputs = [load_file(GOLDEN / f"{family}.safetensors")["input"] for family in FAMILIES]
    for recipe in PEERS.values():
        differing = [
            x for x in inputs if not torch.equal(reference.fake_quantize(x), reference.fake_quantize(x, recipe=recipe))
        ]
        assert differing, recipe


# -------------------------------------------------------------------------------------------- zeros, NaN and infinities


def gaussian(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("zero", [0.0, -0.0])
@pytest.mark.parametrize("recipe", Recipe)
def test_a_tensor_of_zeros(recipe: Recipe, zero: float, dtype: torch.dtype):
    q = reference.quantize(torch.full((2, 32), zero, dtype=dtype), recipe=recipe)
    assert q.per_tensor_scale.item() == 1.0
    assert q.stored_scale.item() == (0.0 if recipe is Recipe.TRANSFORMER_ENGINE else 1.0)
    assert (q.block_scale.view(torch.uint8) == ZERO_BLOCK_BYTES[recipe][1]).all()
    assert (q.qdata == 0).all()
    assert_same_bits(reference.dequantize(q, dtype), torch.zeros(2, 32, dtype=dtype))


@pytest.mark.parametrize("recipe", Recipe)
def test_a_block_of_zeros(recipe: Recipe):
    x = gaussian(4, 64)
    x[1, 16:32], x[2, :16] = 0.0, -0.0
    q = reference.quantize(x, recipe=recipe)
    for row, block in ((1, 1), (2, 0)):
        assert q.block_scale.view(torch.uint8)[row, block] == ZERO_BLOCK_BYTES[recipe][0]
        assert (q.qdata[row, 8 * block : 8 * block + 8] == 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", Recipe)
def test_a_non_finite_element_spoils_its_own_block_only(recipe: Recipe, dtype: torch.dtype, bad: float):
    x = gaussian(4, 64, dtype=dtype)
    x[0, 0], x[2, 40] = 30.0, -20.0  # the tensor amax, finite, shares a block with a bad element
    without = x.clone()
    for row, column in ((0, 3), (3, 63)):
        x[row, column], without[row, column] = bad, 0.0
    spoiled = torch.zeros(4, 4, dtype=torch.bool)
    spoiled[0, 0] = spoiled[3, 3] = True

    assert_same_bits(reference.amax(x), reference.amax(without))
    q, expected = reference.quantize(x, recipe=recipe), reference.quantize(without, recipe=recipe)
    assert_same_bits(q.per_tensor_scale, expected.per_tensor_scale)
    assert_same_bits(q.stored_scale, expected.stored_scale)
    assert (bits(q.block_scale)[spoiled] == 0x7F).all()
    assert (q.qdata.unflatten(-1, (4, 8))[spoiled] == 0).all()
    assert_same_bits(bits(q.block_scale)[~spoiled], bits(expected.block_scale)[~spoiled])
    assert_same_bits(q.qdata.unflatten(-1, (4, 8))[~spoiled], expected.qdata.unflatten(-1, (4, 8))[~spoiled])

    for values in (reference.dequantize(q, dtype), reference.fake_quantize(x, recipe=recipe)):
        blocks = values.unflatten(-1, (4, 16))
        assert blocks[spoiled].isnan().all()
        assert_same_bits(blocks[~spoiled], reference.dequantize(expected, dtype).unflatten(-1, (4, 16))[~spoiled])


@pytest.mark.parametrize("recipe", Recipe)
def test_nothing_finite_counts_as_a_tensor_of_zeros(recipe: Recipe):
    q = reference.quantize(torch.full((1, 16), float("nan")), recipe=recipe)
    assert q.per_tensor_scale.item() == 1.0
    assert bits(q.block_scale).item() == 0x7F
    assert reference.dequantize(q).isnan().all()


def test_amax_of_rows_and_experts_ignores_what_is_not_finite():
    x = torch.tensor(
        [[[1.0, float("nan")], [-3.0, 2.0]], [[float("inf"), -float("inf")], [float("nan"), float("inf")]]]
    )
    assert_same_bits(reference.amax(x), torch.tensor(3.0))
    assert_same_bits(reference.amax(x, dim=(1, 2)), torch.tensor([3.0, 0.0]))
    assert_same_bits(reference.amax(x, dim=-1), torch.tensor([[[1.0], [3.0]], [[0.0], [0.0]]]))
    assert_same_bits(reference.amax(x[0], x[1, :1]), torch.tensor(3.0))


@pytest.mark.parametrize("largest", [1e-45, 1e-42, 1e-38, 1.0, 3.4e38])
@pytest.mark.parametrize("recipe", Recipe)
def test_the_ends_of_fp32(recipe: Recipe, largest: float):
    """Scales that would under- or overflow: no NaN is made of finite numbers, and no scale of zero."""
    x = torch.zeros(2, 32)
    x[0, 0], x[0, 1], x[1, 3] = largest, -largest / 4, 1e-45
    p, stored = reference.scale_from_amax(reference.amax(x), recipe)
    assert p.isfinite().all()
    assert stored.isfinite().all()
    assert (p > 0).all()
    for scales in ({}, {"per_tensor_scale": torch.tensor(2.0**117)}, {"per_tensor_scale": torch.tensor(2.0**-116)}):
        q = reference.quantize(x, **scales, recipe=recipe)
        assert (bits(q.block_scale) < 0x7F).all()
        assert_same_bits(reference.fake_quantize(x, **scales, recipe=recipe), reference.dequantize(q, torch.float32))
    if not (
        recipe is Recipe.TRANSFORMER_ENGINE and largest > 7e35
    ):  # there its decoding overflows at s A, by definition
        assert not reference.fake_quantize(x, recipe=recipe).isnan().any()


def test_a_quotient_that_underflows_is_zero_to_modelopt_only():
    x = torch.zeros(2, 16)
    x[0, 0], x[1, 0] = 3e38, 1e-45
    for recipe, byte in ((Recipe.ALIGNED, 0x01), (Recipe.MODELOPT, 0x38), (Recipe.MODELOPT_IEEE, 0x38)):
        assert bits(reference.quantize(x, recipe=recipe).block_scale)[1].item() == byte


@pytest.mark.parametrize("recipe", Recipe)
def test_an_amax_of_zero_given_for_a_tensor_that_is_not(recipe: Recipe):
    """Used as given: p = 1, and TransformerEngine's G = 1."""
    q = reference.quantize(torch.full((16,), 24.0), tensor_amax=torch.tensor(0.0), recipe=recipe)
    assert q.per_tensor_scale.item() == 1.0
    assert q.block_scale.item() == (448.0 if recipe.value.startswith("modelopt-static") else 4.0)


@pytest.mark.parametrize("p", [1e-45, 1e-40, 3.4e38])
@pytest.mark.parametrize("recipe", [recipe for recipe in Recipe if recipe is not Recipe.ALIGNED])
def test_a_useless_scale_still_gives_codes(recipe: Recipe, p: float):
    x = torch.tensor([1.0, -1.0, 0.0, -0.0, 1e-45, 3.4e38] + [0.0] * 10 + [0.0] * 16)
    q = reference.quantize(x, torch.tensor(p), recipe=recipe)
    assert_same_bits(reference.fake_quantize(x, torch.tensor(p), recipe=recipe), reference.dequantize(q, torch.float32))


def test_signs_of_zero():
    """ALIGNED: -0.0 is code 0 and decodes to +0.0; a negative that rounds to 0 is code 8 and decodes to -0.0."""
    x = torch.tensor([6.0, -0.0, 0.0, -0.01, 0.01, -1e-45] + [0.0] * 10)
    one = torch.tensor(1.0)
    assert unpack_codes(reference.quantize(x, one).qdata)[:6].tolist() == [7, 0, 0, 8, 0, 8]
    assert_same_bits(reference.fake_quantize(x, one)[:6], torch.tensor([6.0, 0.0, 0.0, -0.0, 0.0, -0.0]))
    for recipe in (Recipe.MODELOPT, Recipe.MODELOPT_IEEE, Recipe.MODELOPT_STATIC, Recipe.MODELOPT_STATIC_IEEE):
        codes = unpack_codes(reference.quantize(x, one, recipe=recipe).qdata)
        assert codes[[1, 3]].tolist() == [0, 8], "code 8 is written"
        assert not reference.fake_quantize(x, one, recipe=recipe)[1:5].signbit().any(), "and decodes to +0"


# ---------------------------------------------------------------------------------------------- shapes, scales, strides


@pytest.mark.parametrize("recipe", Recipe)
@pytest.mark.parametrize("shape", [(0,), (0, 16), (4, 0), (4, 0, 32), (0, 4, 32)])
def test_empty_tensors(shape: tuple[int, ...], recipe: Recipe):
    x = torch.empty(shape, dtype=torch.bfloat16)
    q = reference.quantize(x, recipe=recipe)
    assert q.shape == x.shape
    assert q.per_tensor_scale.item() == 1.0
    assert_same_bits(reference.dequantize(q), x)
    assert_same_bits(reference.fake_quantize(x, recipe=recipe), x)


@pytest.mark.parametrize("experts", [0, 3])
@pytest.mark.parametrize("recipe", Recipe)
def test_experts_without_rows_have_scale_one(recipe: Recipe, experts: int):
    x = torch.empty(experts, 0, 32)
    amax = reference.amax(x, dim=(1, 2))
    assert_same_bits(amax, torch.zeros(experts))
    q = reference.quantize(x, tensor_amax=amax, recipe=recipe)
    assert_same_bits(q.per_tensor_scale, torch.ones(experts))
    assert q.shape == (experts, 0, 32)


@pytest.mark.parametrize("recipe", Recipe)
def test_a_stack_of_experts_equals_one_call_per_expert(recipe: Recipe):
    x = gaussian(5, 6, 48) * torch.logspace(-3, 2, 5).bfloat16()[:, None, None]
    x[3] = 0.0
    amax = reference.amax(x, dim=(1, 2))
    stack = reference.quantize(x, tensor_amax=amax, recipe=recipe)
    again = reference.quantize(x, stack.per_tensor_scale, recipe=recipe)
    assert stack.per_tensor_scale.shape == again.per_tensor_scale.shape == (5,)
    for e in range(5):
        for q, single in (
            (stack, reference.quantize(x[e], recipe=recipe)),
            (again, reference.quantize(x[e], stack.per_tensor_scale[e], recipe=recipe)),
        ):
            assert_same(part(q, e), single)
            assert_same_bits(reference.dequantize(q)[e], reference.dequantize(single))
    assert_same_bits(reference.fake_quantize(x, tensor_amax=amax, recipe=recipe), reference.dequantize(stack))


@pytest.mark.parametrize("lead", [(7,), (2, 3), (2, 2, 2)])
@pytest.mark.parametrize("recipe", Recipe)
def test_per_row_scales_equal_one_call_per_row(recipe: Recipe, lead: tuple[int, ...]):
    x = gaussian(*lead, 32) * 2.0 ** torch.arange(torch.Size(lead).numel()).view(*lead, 1)
    x = x.bfloat16()
    amax = reference.amax(x, dim=-1)
    assert amax.shape == (*lead, 1)
    q = reference.quantize(x, tensor_amax=amax, recipe=recipe)
    values = reference.dequantize(q)
    for row in np.ndindex(*lead):
        single = reference.quantize(x[row], recipe=recipe)
        assert_same(part(q, row), single)
        assert_same_bits(values[row], reference.dequantize(single))


@pytest.mark.parametrize("recipe", Recipe)
def test_a_per_row_scale_may_be_shared_by_a_dim(recipe: Recipe):
    x = gaussian(2, 3, 32)
    amax = reference.amax(x, dim=(1, 2)).view(2, 1, 1)
    wide = reference.quantize(x, tensor_amax=amax.expand(2, 3, 1), recipe=recipe)
    narrow = reference.quantize(x, tensor_amax=amax, recipe=recipe)
    assert_same_blocks(narrow, wide)
    assert_same_bits(reference.dequantize(narrow), reference.dequantize(wide))


@pytest.mark.parametrize("recipe", Recipe)
def test_expanded_and_transposed_inputs(recipe: Recipe):
    row = gaussian(1, 48)
    expanded = row.expand(5, 48)
    assert_same(reference.quantize(expanded, recipe=recipe), reference.quantize(expanded.contiguous(), recipe=recipe))
    column = gaussian(6, 1).expand(6, 32)
    assert_same(reference.quantize(column, recipe=recipe), reference.quantize(column.contiguous(), recipe=recipe))
    experts = gaussian(3, 32, 10).transpose(1, 2)  # [E, K, N] seen as [E, N, K], as gpt-oss stores its experts
    amax = reference.amax(experts, dim=(1, 2))
    q = reference.quantize(experts, tensor_amax=amax, recipe=recipe)
    assert_same(q, reference.quantize(experts.contiguous(), tensor_amax=amax, recipe=recipe))
    assert_same_bits(reference.fake_quantize(experts, tensor_amax=amax, recipe=recipe), reference.dequantize(q))


def test_the_scale_of_a_transposed_stack_may_be_a_view():
    """Scales with strides of their own: a column of a wider tensor, an expanded one."""
    x = gaussian(4, 32)
    table = torch.stack([reference.amax(x, dim=-1).squeeze(-1), torch.full((4,), 99.0).bfloat16()], dim=-1)
    expected = reference.quantize(x, tensor_amax=reference.amax(x, dim=-1))
    assert_same(reference.quantize(x, tensor_amax=table[:, :1]), expected)
    one = torch.tensor([[2.0**-9]]).expand(4, 1)
    assert_same_blocks(reference.quantize(x, one), reference.quantize(x, torch.tensor(2.0**-9)))


def test_the_stored_form_of_a_given_scale():
    p = torch.tensor([0.3, 2.0**-9, 1e-30])
    x = gaussian(3, 2, 16)
    for recipe in [recipe for recipe in Recipe if recipe is not Recipe.ALIGNED]:
        stored = {Recipe.LLM_COMPRESSOR: 1 / p, Recipe.TRANSFORMER_ENGINE: p * 2688}.get(recipe, p)
        q = reference.quantize(x, p, recipe=recipe)
        assert_same_bits(q.per_tensor_scale, p)
        assert_same_bits(q.stored_scale, stored)


def test_the_input_is_not_changed():
    for dtype in (torch.bfloat16, torch.float32):
        x = gaussian(3, 32, dtype=dtype)
        before = x.clone()
        for recipe in Recipe:
            reference.quantize(x, recipe=recipe)
            reference.fake_quantize(x, recipe=recipe)
        assert_same_bits(x, before)


def test_blocks_are_handled_alike_beyond_one_chunk():
    """More blocks than one internal chunk holds, with a scale per row."""
    x = gaussian(300, 512)
    q = reference.quantize(x, tensor_amax=reference.amax(x, dim=-1))
    part = reference.quantize(x[290:], tensor_amax=reference.amax(x[290:], dim=-1))
    assert_same_bits(q.qdata[290:], part.qdata)
    assert_same_bits(bits(q.block_scale)[290:], bits(part.block_scale))
    assert_same_bits(reference.dequantize(q), reference.fake_quantize(x, tensor_amax=reference.amax(x, dim=-1)))


# ------------------------------------------------------------------------------------- counter-examples of the contract


def test_quantizing_twice_moves_a_block_with_a_subnormal_scale():
    a = 1.625 * 6 * 2**-9
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 2688.0, a
    once = reference.fake_quantize(x)
    assert once[0, 16] == 0.015625
    assert reference.fake_quantize(once)[0, 16] == 0.01171875


def test_quantizing_twice_may_halve_the_per_tensor_scale():
    x = torch.zeros(1, 16)
    x[0, 0] = 1352.0
    once = reference.fake_quantize(x)
    assert reference.per_tensor_scale(x) == 1.0
    assert reference.per_tensor_scale(once) == 0.5
    assert_same_bits(reference.fake_quantize(once), once)  # the values stay: the block scale doubles


def test_fp16_values_from_64544_decode_to_infinity():
    every = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16)  # all finite values >= 0
    x = torch.zeros(len(every), 16, dtype=torch.float16)
    x[:, 0] = every
    amax = reference.amax(x, dim=-1)
    values = reference.fake_quantize(x, tensor_amax=amax)[:, 0]
    assert torch.equal(values.isinf(), every >= 64544)
    assert reference.fake_quantize(x, tensor_amax=amax, dtype=torch.float32).isfinite().all()
