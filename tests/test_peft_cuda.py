"""Contract under test, on a GPU: adapters of linears and experts are merged, multiplied by and exported as on a CPU."""

import copy
from pathlib import Path

import pytest
import torch
from adapter_training import ids
from bits import assert_same_bits
from tiny_models import tiny_model
from torch import Tensor, nn

pytest.importorskip("peft", reason="needs peft (the extra dev brings it)")

from peft import LoraConfig, get_peft_model

import quads_qat as qq
from quads_qat.adapters import Factors, merge
from quads_qat.experts import W4A16Experts
from quads_qat.integrations.peft import lora_config, merged, quantize_merged

pytestmark = pytest.mark.gpu

TARGETS = {
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}
RECIPE = qq.Recipe.MODELOPT  # with powers of two (aligned) another amax seldom shows in the weights
ORDERS = pytest.mark.parametrize("order", ["convert first", "peft first"])


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU: the interpreter has no devices")


def trainer(order: str, dtype: torch.dtype) -> nn.Module:
    """A converted model on the CPU; few bits in its factors, so that B A and its sums are exact in any order."""
    base = tiny_model("qwen3_moe", dtype=dtype, experts_implementation="grouped_mm")
    if order == "convert first":
        model = get_peft_model(qq.convert(base, "w4a16", recipe=RECIPE), lora_config(**TARGETS, r=8))
    else:
        base = get_peft_model(base, LoraConfig(**TARGETS, r=8))
        model = quantize_merged(qq.convert(base, "w4a16", recipe=RECIPE))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            with torch.no_grad():
                parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator) / 16)
    return model


def exported(model: nn.Module) -> dict[str, Tensor]:
    with merged(model) as plain:
        return {name: tensor.cpu().clone() for name, tensor in qq.export_weights(plain, "modelopt")}


def steps(model: nn.Module, count: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = model(input_ids=ids().cuda(), labels=ids().cuda()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@ORDERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exported_bytes_are_those_of_a_cpu(order: str, dtype: torch.dtype):
    on_cpu = trainer(order, dtype)
    wanted, got = exported(on_cpu), exported(copy.deepcopy(on_cpu).cuda())
    assert wanted.keys() == got.keys()
    for name, tensor in wanted.items():
        assert_same_bits(got[name], tensor, name)


@ORDERS
def test_what_was_trained_there_is_exported_bit_for_bit(order: str, tmp_path: Path):
    model = trainer(order, torch.bfloat16).cuda()
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    losses = steps(model)
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
