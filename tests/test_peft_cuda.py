"""Contract under test, on a GPU: adapters of linears and experts are merged, multiplied by and exported as on a CPU."""

import copy
from pathlib import Path

import pytest
import torch
from adapter_training import ORDERS, train, trainer
from bits import assert_same_bits
from torch import Tensor, nn

import quads_qat as qq
from quads_qat.adapters import Factors, merge
from quads_qat.experts import W4A16Experts
from quads_qat.integrations.peft import merged

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU: the interpreter has no devices")


def exported(model: nn.Module) -> dict[str, Tensor]:
    with merged(model) as plain:
        return {name: tensor.cpu().clone() for name, tensor in qq.export_weights(plain, "modelopt")}


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exported_bytes_are_those_of_a_cpu(order: str, dtype: torch.dtype):
    on_cpu = trainer(order, dtype=dtype, rank=8)
    wanted, got = exported(on_cpu), exported(copy.deepcopy(on_cpu).cuda())
    assert wanted.keys() == got.keys()
    for name, tensor in wanted.items():
        assert_same_bits(got[name], tensor, name)


@ORDERS
def test_what_was_trained_there_is_exported_bit_for_bit(order: str, tmp_path: Path):
    model = trainer(order, rank=8).cuda()
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    losses = train(model, 3)
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        if name in frozen:
            assert_same_bits(parameter.detach(), frozen[name], name)
    used = {
        f"{n.replace('.base_layer', '').removeprefix('base_model.model.')}.{p}": m._quantized(p, m.source(p)).detach()
        for n, m in model.named_modules()
        if isinstance(m, W4A16Experts)
        for p in m.layout.parameters
    }
    assert len(used) == 4
    with merged(model) as plain:
        qq.export_checkpoint(plain, tmp_path, dialect="modelopt")
        assert qq.verify(plain, tmp_path)
    loaded = qq.load_model(tmp_path, dtype=torch.bfloat16)
    for name, weight in used.items():
        assert_same_bits(loaded.get_parameter(name).detach(), weight.cpu(), name)


def test_merging_real_experts_keeps_no_second_stack():
    experts, n, k, rank = 128, 1536, 2048, 16
    generator = torch.Generator("cuda").manual_seed(0)
    weight = torch.randn(experts, n, k, device="cuda", dtype=torch.bfloat16, generator=generator)
    a, b = (
        torch.randint(-3, 4, shape, device="cuda", generator=generator).bfloat16() / 16
        for shape in ((experts, rank, k), (experts, n, rank))
    )
    merge(weight[:2], [Factors(a[:2], b[:2], 0.5)])  # cuBLAS takes its workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    total = merge(weight, [Factors(a, b, 0.5)])
    assert torch.cuda.max_memory_allocated() - before < 1.5 * weight.nbytes
    for i in (0, 77, experts - 1):
        exact = weight[i].double() + 0.5 * (b[i].double() @ a[i].double())
        assert_same_bits(total[i], exact.float().to(total.dtype))
