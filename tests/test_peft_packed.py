"""Contract under test: adapters on a packed base: it stays packed, and lets gradients through."""

import gc
from pathlib import Path

import pytest
import torch
from adapter_training import LINEARS, base_model, ids, randomized, train
from bits import assert_same_bits
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

import quads_qat as qq
from quads_qat import adapters, ops
from quads_qat.integrations.peft import PackedLoraLinear, lora_config


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nvfp4") / "checkpoint"
    model = qq.convert(base_model(), "w4a16")
    qq.export_checkpoint(model, path, dialect="modelopt")
    return path


def packed_model(checkpoint: Path) -> PeftModel:
    rollout = qq.load_rollout(checkpoint, weights_only=True)
    return randomized(get_peft_model(rollout, lora_config(**LINEARS, r=4)))


def test_lora_on_a_packed_base_equals_lora_on_its_decoded_weights(checkpoint: Path):
    model = packed_model(checkpoint)
    assert sum(isinstance(m, PackedLoraLinear) for m in model.modules()) == 2 * len(LINEARS["target_modules"])
    plain = get_peft_model(qq.load_model(checkpoint), LoraConfig(**LINEARS, r=4))
    plain.load_state_dict({n: t for n, t in model.state_dict().items() if "lora" in n}, strict=False)
    plain.set_experts_implementation("eager")
    losses = []
    for m in (model, plain):
        m(input_ids=ids(), labels=ids()).loss.backward()
        losses.append(m(input_ids=ids(), labels=ids()).loss.detach())
    assert_same_bits(losses[0], losses[1])
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * len(LINEARS["target_modules"])
    for name, parameter in trained.items():
        assert_same_bits(parameter.grad, plain.get_parameter(name).grad, name)
    before = {n: b.clone() for n, b in model.named_buffers()}
    assert train(model, 6)[-1] < losses[0]
    for name, buffer in model.named_buffers():
        same = buffer.float() == before[name].float()
        assert bool(same.all()), name


def test_a_packed_base_takes_0_5625_bytes_per_weight_and_keeps_no_decoded_one(checkpoint: Path):
    model = packed_model(checkpoint)
    layer = next(m for m in model.modules() if isinstance(m, PackedLoraLinear))
    parts = [layer.base_layer.weight_qdata, layer.base_layer.weight_block_scale]
    assert sum(p.nbytes for p in parts) == 0.5625 * layer.in_features * layer.out_features
    assert not layer.base_layer._parameters.get("weight")
    x = torch.randn(2, layer.in_features).bfloat16().requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        out = layer(x)
    gc.collect()
    assert all(t.shape != (layer.out_features, layer.in_features) for t in saved)
    assert out.requires_grad


def test_experts_of_a_packed_base_let_gradients_through(checkpoint: Path):
    rollout, plain = qq.load_rollout(checkpoint, weights_only=True), qq.load_model(checkpoint)
    plain.set_experts_implementation("eager")
    grads = []
    for model in (rollout, plain):
        experts = model.get_submodule("model.layers.0.mlp.experts")
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(6, 64, generator=generator).bfloat16().requires_grad_()
        index = torch.randint(0, 4, (6, 2), generator=generator)
        out = experts(x, index, torch.full((6, 2), 0.5).bfloat16())
        grads.append((out.detach(), *torch.autograd.grad(out.float().square().sum(), x)))
    for got, wanted in zip(*grads, strict=True):
        assert_same_bits(got, wanted)


def test_grouped_packed_experts_give_the_gradient_of_decoded_ones():
    generator = torch.Generator().manual_seed(0)
    q = ops.quantize(torch.randn(3, 32, 48, generator=generator).bfloat16())
    offs = torch.tensor([2, 2, 7], dtype=torch.int32)  # the second expert has no rows
    grads = []
    for decoded in (False, True):
        x = torch.randn(7, 48, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        if decoded:
            out = torch.cat([x[:2] @ ops.dequantize(q)[0].t(), x[2:] @ ops.dequantize(q)[2].t()])
        else:
            out = adapters.packed_linear(x, q, None, offs)
        grads.append((out.detach(), *torch.autograd.grad(out.float().square().sum(), x)))
    for got, wanted in zip(*grads, strict=True):
        assert_same_bits(got, wanted)


def test_a_packed_base_refuses_what_needs_its_weights(checkpoint: Path):
    model = packed_model(checkpoint)
    with pytest.raises(ValueError, match="merge: the base is packed in NVFP4"):
        model.merge_and_unload()
    for refused in (lambda: qq.update_weights(model, []), lambda: qq.quant_state_dict(model)):
        with pytest.raises(
            ValueError, match=r"q_proj is wrapped by an adapter that hides its packed weights; call model"
        ):
            refused()
    assert qq.quant_state_dict(model.unload()) == {}
    with pytest.raises(ValueError, match="a base that quantizes activations gives x no gradient"):
        get_peft_model(qq.load_rollout(checkpoint, residual=qq.ResidualConfig()), lora_config(**LINEARS))
    rollout = qq.load_rollout(checkpoint, weights_only=True)
    with pytest.raises(ValueError, match="init_lora_weights='pissa' would change the base weight"):
        get_peft_model(rollout, lora_config(**LINEARS, init_lora_weights="pissa"))
