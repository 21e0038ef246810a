"""Contract under test: grouped GEMMs are the dense ones expert by expert, and refuse what they cannot mean."""

from __future__ import annotations

import pytest
import torch
from bits import assert_same_bits

from quads_qat import ops, reference
from quads_qat.config import ActivationFormat, ActivationScale, ResidualConfig, ResidualScope
from quads_qat.qtensor import NVFP4Tensor


def experts(count: int = 3, n: int = 8, k: int = 32) -> NVFP4Tensor:
    rows = torch.randn(count, n, k, generator=torch.Generator().manual_seed(0))
    return reference.quantize(rows, tensor_amax=reference.amax(rows, dim=(1, 2)))


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


STATIC = {"activation": ActivationFormat(scale=ActivationScale.STATIC), "input_amax": torch.tensor(3.0)}
OPS = {
    "w4a16": (ops.grouped_linear_w4a16, ops.linear_w4a16, {}),
    "w4a4": (ops.grouped_linear_w4a4, ops.linear_w4a4, {}),
    "w4a4 static": (ops.grouped_linear_w4a4, ops.linear_w4a4, STATIC),
    "token": (ops.grouped_residual_linear, ops.residual_linear, {"residual": ResidualConfig(fraction=0.25)}),
    "batch": (
        ops.grouped_residual_linear,
        ops.residual_linear,
        {"residual": ResidualConfig(fraction=0.25, scope=ResidualScope.BATCH)},
    ),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("offs", [ends(2, 2, 7), ends(0, 7, 7), ends(1, 4, 7)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_is_dense_expert_by_expert(name: str, offs: torch.Tensor, dtype: torch.dtype):
    grouped, dense, options = OPS[name]
    q, x, bias = experts(), torch.randn(7, 32).to(dtype), torch.randn(3, 8).to(dtype)
    y, start = grouped(x, q, offs, bias=bias, **options), 0
    for expert, end in enumerate(offs.tolist()):
        p = q.per_tensor_scale[expert]
        own = NVFP4Tensor(q.qdata[expert], q.block_scale[expert], p, q.recipe, p)
        if end > start:
            wanted = dense(x[start:end], own, bias=bias[expert], **options)
            assert_same_bits(y[start:end].contiguous(), wanted, f"expert {expert}")
        start = end


def test_each_expert_may_have_its_mask():
    q, x, offs = experts(), torch.randn(7, 32), ends(2, 2, 7)
    masks = torch.rand(3, 32) < 0.5
    residual = ResidualConfig(fraction=0.5, scope=ResidualScope.STATIC)
    y = ops.grouped_residual_linear(x, q, offs, residual, mask=masks)
    p = q.per_tensor_scale[2]
    last = NVFP4Tensor(q.qdata[2], q.block_scale[2], p, q.recipe, p)
    assert_same_bits(y[2:].contiguous(), ops.residual_linear(x[2:], last, residual, mask=masks[2]))


def test_no_rows():
    assert ops.grouped_linear_w4a16(torch.zeros(0, 32), experts(), ends(0, 0, 0)).shape == (0, 8)


WRONG = {
    "offs must be int32": (torch.zeros(7, 32), torch.tensor([2, 2, 7])),
    "offs must rise to the number of rows 7": (torch.zeros(7, 32), ends(2, 2, 6)),
    "offs must rise": (torch.zeros(7, 32), ends(4, 2, 7)),
    "x must be": (torch.zeros(1, 7, 32), ends(2, 2, 7)),
    "weight": (torch.zeros(7, 48), ends(2, 2, 7)),
}


@pytest.mark.parametrize("message", WRONG)
def test_refusals(message: str):
    x, offs = WRONG[message]
    with pytest.raises(ValueError, match=f"grouped_linear_w4a16: .*{message}"):
        ops.grouped_linear_w4a16(x, experts(), offs)


def test_shapes_without_data():
    q = experts().to("meta")
    x = torch.zeros(7, 32, dtype=torch.bfloat16, device="meta")
    parts = q.qdata, q.block_scale, q.per_tensor_scale
    y = torch.ops.quads_qat.matmul(x, None, *parts, None, None, ends(2, 2, 7), "aligned", torch.float32)
    assert (y.shape, y.dtype) == ((7, 8), torch.float32)
    packed = torch.zeros(2, 7, 16, dtype=torch.uint8, device="meta")
    y = torch.ops.quads_qat.native_matmul(packed, packed, packed, q.qdata[0], *parts[1:], None, torch.bfloat16)
    assert (y.shape, y.dtype) == ((7, 8), torch.bfloat16)


def test_compiles_as_one_graph():
    q = reference.quantize(torch.randn(8, 32))
    compiled = torch.compile(lambda x: ops.linear_w4a16(x, q), backend="eager", fullgraph=True)
    x = torch.randn(3, 32)
    assert_same_bits(compiled(x), ops.linear_w4a16(x, q))
