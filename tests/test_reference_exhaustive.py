"""Sweeps over every value there is: bf16 elements, block amaxes and tensor amaxes, codes, scale bytes, midpoints.

Expected results come from numpy in float64, where products of these short numbers are exact and a quotient cannot round
onto a midpoint without being it.
"""

import numpy as np
import pytest
import torch
from bits import assert_same_bits, bits
from strategies import DTYPES, rounded
from under_test import implementation

from quads_qat.config import Recipe
from quads_qat.packing import unpack_codes
from quads_qat.qtensor import NVFP4Tensor

reference = implementation()

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.concatenate([np.arange(8) * 2.0**-9, [m * 2.0**e for e in range(-9, 6) for m in range(8, 16)]])[:127]

# All finite numbers >= 0, ascending.
POSITIVE_BF16 = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
POSITIVE_FP16 = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16)


def e2m1_codes(ascending: np.ndarray, unit: float) -> np.ndarray:
    """Codes 0..7 of the numbers ``ascending`` >= 0 under the decode scale ``unit``: seven steps at known places."""
    codes = np.zeros(len(ascending), dtype=np.uint8)
    for i, midpoint in enumerate((E2M1[1:] + E2M1[:-1]) / 2):
        codes[np.searchsorted(ascending, midpoint * unit, side="left" if i % 2 else "right") :] += 1  # ties to even
    return codes


def round_e4m3_bytes(quotient: np.ndarray) -> np.ndarray:
    """Bytes 0x00..0x7e of ``quotient`` >= 0, saturated."""
    step = 2.0 ** (np.maximum(np.floor(np.log2(np.maximum(quotient, 2.0**-20))), -6) - 3)
    return np.searchsorted(E4M3, np.minimum(np.rint(quotient / step) * step, 448.0)).astype(np.uint8)


def test_expected_rounding_of_e4m3_agrees_with_the_cast():
    quotient = np.concatenate([E4M3, (E4M3[1:] + E4M3[:-1]) / 2])
    cast = torch.from_numpy(quotient).float().to(torch.float8_e4m3fn)
    assert (bits(cast).numpy() == round_e4m3_bytes(quotient)).all()


@pytest.mark.parametrize("k", [-116, 0, 117])
def test_every_bf16_element_under_every_block_scale(k: int):
    """Each block starts with the largest bf16 amax that gets the scale byte in question; 15 elements follow."""
    p, magnitudes = torch.tensor(2.0**k), POSITIVE_BF16.double().numpy()
    bytes_ = np.maximum(round_e4m3_bytes(magnitudes / (6 * 2.0**k)), 1)
    for byte in np.unique(bytes_):
        largest = np.flatnonzero(bytes_ == byte)[-1]
        positive = POSITIVE_BF16[: largest + 1]
        x = torch.cat([positive, -positive])
        blocks = torch.cat([x, x.new_zeros(-len(x) % 15)]).view(-1, 15)
        q = reference.quantize(torch.cat([positive[-1].expand(len(blocks), 1), blocks], dim=1), p)
        assert (bits(q.block_scale) == byte).all()
        codes = unpack_codes(q.qdata)[:, 1:].flatten()[: len(x)].numpy()
        expected = e2m1_codes(magnitudes[: largest + 1], E4M3[byte] * 2.0**k)
        negative = expected | 8
        negative[0] = 0  # -0.0
        wrong = np.flatnonzero(codes != np.concatenate([expected, negative]))
        assert not len(wrong), f"byte {byte}, p = 2**{k}: {len(wrong)} codes, first x = {x[wrong[0]].item()!r}"
    assert len(np.unique(bytes_)) == (123 if k == 117 else 126)  # bf16 ends before the last three under 2**117


@pytest.mark.parametrize("k", [-116, -60, -9, 0, 3, 64, 117])
@pytest.mark.parametrize("every", [POSITIVE_BF16, POSITIVE_FP16], ids=["bf16", "fp16"])
def test_every_block_amax(every: torch.Tensor, k: int):
    x = torch.zeros(len(every), 16, dtype=every.dtype)
    x[:, 5] = -every
    got = bits(reference.quantize(x, torch.tensor(2.0**k)).block_scale).flatten().numpy()
    expected = np.maximum(round_e4m3_bytes(every.double().numpy() / (6 * 2.0**k)), 1)
    expected[0] = 0x38
    assert (got == expected).all()


@pytest.mark.parametrize("k", [-9, 0, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_midpoint_and_its_neighbours(dtype: torch.dtype, k: int):
    """x = m s p moved by -2..2 units in the last place, for each E2M1 midpoint m under each of the 126 block scales."""
    scales, midpoints = E4M3[1:] * 2.0**k, (E2M1[1:] + E2M1[:-1]) / 2
    exact = np.repeat((scales[:, None] * midpoints).reshape(-1), 5)
    steps = np.tile([-2, -1, 0, 1, 2], len(exact) // 5)
    elements = rounded(torch.from_numpy(exact), dtype, torch.from_numpy(steps))
    x = torch.zeros(126, 7, 16, dtype=dtype)
    x[..., 0] = torch.from_numpy(6 * scales[:, None]).to(dtype)  # the block amax that makes that scale
    x[..., 1:6] = elements.view(126, 7, 5)
    q = reference.quantize(x, torch.tensor(2.0**k))
    assert (bits(q.block_scale)[..., 0].numpy() == np.arange(1, 127)[:, None]).all()
    codes = unpack_codes(q.qdata)[..., 1:6].numpy()
    below, above = np.arange(7)[:, None], np.arange(1, 8)[:, None]
    even = np.where(below % 2, above, below)
    moved = elements.double().numpy().reshape(126, 7, 5) - exact.reshape(126, 7, 5)
    assert (codes == np.where(moved < 0, below, np.where(moved > 0, above, even))).all()


@pytest.mark.parametrize("k", [-9, 0, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_block_scale_midpoint_and_its_neighbours(dtype: torch.dtype, k: int):
    """a = 6 m p moved by -2..2 units in the last place, for each midpoint m of neighbouring E4M3 numbers."""
    exact = np.repeat(3 * (E4M3[1:] + E4M3[:-1]) * 2.0**k, 5)
    amaxes = rounded(torch.from_numpy(exact), dtype, torch.tensor([-2, -1, 0, 1, 2]).repeat(126))
    x = torch.zeros(630, 16, dtype=dtype)
    x[:, 9] = -amaxes
    got = bits(reference.quantize(x, torch.tensor(2.0**k)).block_scale).view(126, 5).numpy()
    below = np.arange(126)[:, None]
    moved = (amaxes.double().numpy() - exact).reshape(126, 5)
    expected = np.where(moved < 0, below, np.where(moved > 0, below + 1, below + below % 2))
    assert (got == np.maximum(expected, 1)).all()


@pytest.mark.parametrize("every", [POSITIVE_BF16, POSITIVE_FP16], ids=["bf16", "fp16"])
def test_every_tensor_amax(every: torch.Tensor):
    """ALIGNED: the least p = 2**k that makes room, found by comparing with all of them."""
    a = every.double().numpy()[1:, None]
    candidates = 2.0 ** np.arange(-116, 118)
    room = a <= 2688 * candidates
    expected = candidates[np.where(room.any(1), room.argmax(1), len(candidates) - 1)]
    got = reference.scale_from_amax(every, Recipe.ALIGNED)[0]
    assert got[0] == 1.0
    assert (got[1:].double().numpy() == expected).all()


@pytest.mark.parametrize("every", [POSITIVE_BF16, POSITIVE_FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("recipe", [recipe for recipe in Recipe if recipe is not Recipe.ALIGNED])
def test_every_tensor_amax_of_the_peers(recipe: Recipe, every: torch.Tensor):
    """The stored scale, as numpy computes it in fp32 (LLM_COMPRESSOR: in the tensor's dtype, here with torch)."""
    a = every.float().numpy()
    per_tensor, stored = (t.numpy() for t in reference.scale_from_amax(every, recipe))
    if recipe is Recipe.LLM_COMPRESSOR:
        g = (every.clamp(min=torch.finfo(every.dtype).tiny).reciprocal() * 2688.0).float().nan_to_num(1.0, 1.0, 1.0)
        assert (stored == g.numpy()).all()
        assert (per_tensor == np.float32(1) / stored).all()
        return
    ieee = recipe in (Recipe.MODELOPT_IEEE, Recipe.MODELOPT_STATIC_IEEE)
    expected = a / np.float32(2688) if ieee else a * (np.float32(1) / np.float32(2688))
    expected[0] = 1.0
    assert (per_tensor == expected).all()
    assert (stored == (a if recipe is Recipe.TRANSFORMER_ENGINE else expected)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", Recipe)
def test_every_code_under_every_scale_byte(recipe: Recipe, dtype: torch.dtype):
    """Decoding is defined for all 256 scale bytes, the negative ones and NaN included."""
    aligned = recipe is Recipe.ALIGNED  # which takes powers of two only
    codes = torch.arange(16, dtype=torch.uint8)
    qdata = (codes[::2] | codes[1::2] << 4).expand(256, 8)
    scales = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(256, 1).view(torch.float8_e4m3fn)
    modelopt = recipe.value.startswith("modelopt")
    grid = np.float32([*E2M1, 0.0 if modelopt else -0.0, *-E2M1[1:]])
    for p in (2.0**-116, 2.0**-9, 1.0, 2.0**117) if aligned else (2.0**-116, 2.0**-9, 1.0, 0.0123, 1 / 3, 2.0**117):
        p = torch.tensor(p)
        stored = {Recipe.LLM_COMPRESSOR: 1 / p, Recipe.TRANSFORMER_ENGINE: p * 2688}.get(recipe, p)
        with np.errstate(all="ignore"):
            if recipe is Recipe.TRANSFORMER_ENGINE:
                decode_scale = (scales.float().numpy() * stored.numpy()) * (np.float32(1) / np.float32(2688))
            else:
                decode_scale = scales.float().numpy() * p.numpy()
            expected = torch.from_numpy(grid * decode_scale).to(dtype)
        got = reference.dequantize(NVFP4Tensor(qdata, scales, p, recipe, stored), dtype)
        assert_same_bits(got, expected, f"p = {p}")
