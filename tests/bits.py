"""Equality of tensors means equality of bits: -0.0 is not 0.0. NaN is NaN, except as a scale byte."""

from __future__ import annotations

import torch
from torch import Tensor

from quads_qat.qtensor import NVFP4Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(x: Tensor) -> Tensor:
    """``x`` as integers of its width."""
    return x.contiguous().view(INTEGERS[x.element_size()])


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """Same dtype, same shape, same bits; the message counts the differences and shows the first."""
    __tracebackhide__ = True
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} instead of {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    wrong = (bits(actual) != bits(expected)).flatten()
    if actual.is_floating_point() and actual.dtype != torch.float8_e4m3fn:
        wrong &= ~(actual.isnan() & expected.isnan()).flatten()
    if wrong.any():
        first = int(wrong.nonzero()[0])
        got, wanted = (t.flatten()[first].item() for t in (actual, expected))
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ; element {first} is {got!r}, not {wanted!r}"
        )


def assert_same(actual: NVFP4Tensor, expected: NVFP4Tensor) -> None:
    """Codes, block scales and both forms of the per-tensor scale, bit for bit."""
    __tracebackhide__ = True
    assert actual.recipe is expected.recipe
    for name in ("qdata", "block_scale", "per_tensor_scale", "stored_scale"):
        assert_same_bits(getattr(actual, name), getattr(expected, name), name)


def assert_same_blocks(actual: NVFP4Tensor, expected: NVFP4Tensor) -> None:
    """Codes and block scales alone: for two ways to say the same scale."""
    __tracebackhide__ = True
    for name in ("qdata", "block_scale"):
        assert_same_bits(getattr(actual, name), getattr(expected, name), name)


def part(q: NVFP4Tensor, index: int | tuple[int, ...]) -> NVFP4Tensor:
    """``q[index]`` for an index of leading dims; a scale [E] or [..., 1] becomes the [] of that part."""
    p, stored = (s if s.ndim == 0 else s[index].squeeze() for s in (q.per_tensor_scale, q.stored_scale))
    return NVFP4Tensor(q.qdata[index], q.block_scale[index], p, q.recipe, stored)
