"""Layouts are pure permutations: golden bytes of the 128x4 swizzle, its formula, and round trips."""

from pathlib import Path

import pytest
import torch
from bits import assert_same_bits
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from quads_qat.packing import pack_codes, swizzle_block_scale, unpack_codes, unswizzle_block_scale

GOLDEN = load_file(Path(__file__).parent / "data" / "golden" / "swizzle.safetensors")
SHAPES = sorted(key.removeprefix("linear_") for key in GOLDEN if key.startswith("linear_"))

leads = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def random_bytes(*shape: int, high: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randint(high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------------- codes


def test_the_even_element_is_in_the_low_nibble():
    assert pack_codes(torch.tensor([0x1, 0xF, 0x8, 0x0], dtype=torch.uint8)).tolist() == [0xF1, 0x08]
    assert unpack_codes(torch.tensor([0xF1, 0x08], dtype=torch.uint8)).tolist() == [0x1, 0xF, 0x8, 0x0]


def test_every_byte_survives():
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    assert_same_bits(pack_codes(unpack_codes(every)), every)


@given(leads, st.integers(0, 20), st.integers(0, 2**16))
def test_packing_and_unpacking(lead: tuple[int, ...], pairs: int, seed: int):
    codes = random_bytes(*lead, 2 * pairs, high=16, seed=seed)
    assert_same_bits(unpack_codes(pack_codes(codes)), codes)
    assert_same_bits(pack_codes(codes.mT.contiguous().mT) if codes.ndim > 1 else pack_codes(codes), pack_codes(codes))


# ------------------------------------------------------------------------------------------------------------- scales


def offset(n: int, k: int, cols: int) -> int:
    """Where the docstring of ``swizzle_block_scale`` puts the scale of row ``n`` and block ``k``."""
    return ((n // 128) * -(-cols // 4) + k // 4) * 512 + (n % 32) * 16 + ((n % 128) // 32) * 4 + k % 4


@pytest.mark.parametrize("shape", SHAPES)
def test_golden_swizzle(shape: str):
    linear, swizzled = GOLDEN[f"linear_{shape}"], GOLDEN[f"swizzled128x4_{shape}"]
    assert_same_bits(swizzle_block_scale(linear), swizzled)
    assert_same_bits(unswizzle_block_scale(swizzled, *linear.shape), linear)


@given(st.integers(1, 300), st.integers(1, 11))
def test_the_offset_formula(rows: int, cols: int):
    scales = random_bytes(rows, cols)
    expected = torch.zeros(-(-rows // 128) * 128 * -(-cols // 4) * 4, dtype=torch.uint8)
    for n in range(rows):
        for k in range(cols):
            expected[offset(n, k, cols)] = scales[n, k]
    assert_same_bits(swizzle_block_scale(scales), expected)


@given(leads, st.integers(0, 140), st.integers(1, 9), st.sampled_from([torch.uint8, torch.float8_e4m3fn]))
def test_swizzling_and_back(lead: tuple[int, ...], rows: int, cols: int, dtype: torch.dtype):
    scales = random_bytes(*lead, rows, cols).view(dtype)
    swizzled = swizzle_block_scale(scales)
    assert swizzled.is_contiguous()
    assert swizzled.shape == (*lead, -(-rows // 128) * 128 * -(-cols // 4) * 4)
    assert_same_bits(unswizzle_block_scale(swizzled, rows, cols), scales)


def test_leading_dims_are_swizzled_one_by_one():
    scales = random_bytes(2, 3, 130, 5)
    swizzled = swizzle_block_scale(scales)
    for i in range(2):
        for j in range(3):
            assert_same_bits(swizzled[i, j], swizzle_block_scale(scales[i, j]))


def test_views_are_swizzled_like_their_copies():
    scales = random_bytes(6, 256).t()
    assert_same_bits(swizzle_block_scale(scales), swizzle_block_scale(scales.contiguous()))
    swizzled = swizzle_block_scale(scales)
    twice = torch.stack([swizzled, swizzled], dim=-1).flatten()[::2]
    assert_same_bits(unswizzle_block_scale(twice, 256, 6), scales.contiguous())


def test_padding_is_zero():
    swizzled = swizzle_block_scale(torch.full((5, 3), 0x38, dtype=torch.uint8))
    assert int((swizzled == 0).sum()) == 512 - 15
    assert int((swizzled == 0x38).sum()) == 15
