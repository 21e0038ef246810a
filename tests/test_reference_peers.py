"""``Recipe.LLM_COMPRESSOR`` against the installed compressed-tensors, live, on tensors that no golden file holds."""

import pytest
import torch
from bits import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from strategies import Case, cases

from quads_qat import reference
from quads_qat.config import Recipe

compressed_tensors = pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor  # noqa: E402
from compressed_tensors.quantization import preset_name_to_scheme  # noqa: E402
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam  # noqa: E402

SCHEME = preset_name_to_scheme("NVFP4A16", ["Linear"])


def compress(weight: torch.Tensor, gparam: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """What llm-compressor's observers and compressor make of ``weight`` [N, K]."""
    if gparam is None:
        gparam = generate_gparam(weight.min(), weight.max())
    blocks = weight.unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), SCHEME.weights, global_scale=gparam)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": gparam}
    return NVFP4PackedCompressor.compress(state, SCHEME)


def decompress(state: dict[str, torch.Tensor]) -> torch.Tensor:
    return NVFP4PackedCompressor.decompress(state, SCHEME)["weight"]


def check(weight: torch.Tensor, expected: dict[str, torch.Tensor], **scales) -> None:
    q = reference.quantize(weight, **scales, recipe=Recipe.LLM_COMPRESSOR)
    assert_same_bits(q.stored_scale.reshape(1), expected["weight_global_scale"], "global scale")
    assert_same_bits(q.block_scale, expected["weight_scale"], "block scales")
    assert_same_bits(q.qdata, expected["weight_packed"], "codes")
    assert_same_bits(reference.dequantize(q, torch.bfloat16), decompress(expected), "values")


@pytest.mark.parametrize("spread", [1e-4, 0.02, 1.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_random_weights_have_the_bytes_of_compressed_tensors(dtype: torch.dtype, spread: float):
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((64, 256), (3, 16), (1, 48), (17, 640)):
        weight = (spread * torch.randn(rows, columns, generator=generator)).to(dtype)
        check(weight, compress(weight))


@given(cases(leads=[(1,), (3,), (4,)], kinds=["own"], aligned=False))
def test_chosen_weights_have_the_bytes_of_compressed_tensors(case: Case):
    check(case.x, compress(case.x))


@given(cases(leads=[(1,), (3,)], kinds=["own"]), st.floats(2.0**-6, 8.0, width=32))
def test_members_of_a_fused_group_share_the_global_scale_of_the_largest(case: Case, larger: float):
    sibling = (case.x * larger).clamp(-torch.finfo(case.x.dtype).max, torch.finfo(case.x.dtype).max)
    both = torch.cat([case.x, sibling])
    gparam = generate_gparam(both.min(), both.max())
    for member in (case.x, sibling):
        check(member, compress(member, gparam), tensor_amax=reference.amax(case.x, sibling))


def test_a_weight_of_zeros():
    weight = torch.zeros(4, 32, dtype=torch.bfloat16)
    check(weight, compress(weight))
