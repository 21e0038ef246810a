"""What an adversary found: each was wrong numbers without a word, or a model lost."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import nn

import quads_qat as qq
from quads_qat.config import ActivationFormat, ActivationScale


@pytest.mark.parametrize(
    ("dialect", "name"), [("modelopt", "weight_scale_2"), ("compressed-tensors", "weight_global_scale")]
)
@pytest.mark.parametrize("bit", [0, 13, 22])
def test_verify_sees_every_bit_of_a_per_tensor_scale(dialect: str, name: str, bit: int, tmp_path: Path):
    """bf16 values hide a scale that is off in the last bits; engines multiply by all of them."""
    model = qq.convert(tiny_model("qwen3_moe"), "w4a16")
    qq.export_checkpoint(model, tmp_path / "out", dialect=dialect)
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    for tensor in (n for n in list(tensors) if n.endswith(f"q_proj.{name}")):
        tensors[tensor].view(torch.int32).bitwise_xor_(1 << bit)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(qq.VerificationError, match="q_proj"):
        qq.verify(model, tmp_path / "out")


def test_a_rollout_under_autocast_keeps_its_bits():
    model = qq.convert(nn.Sequential(nn.Linear(512, 64)), "w4a4_residual")
    x = torch.randn(8, 512)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), expected)


def test_a_failed_move_loses_nothing():
    model = qq.convert(nn.Sequential(nn.Linear(32, 16)), "w4a4_residual")
    x = torch.randn(2, 32)
    expected = model(x)

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        model._apply(fail)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("amax", [float("nan"), float("inf"), -1.0])
def test_a_static_amax_must_be_a_number(amax: float):
    q = qq.ops.quantize(torch.randn(16, 32))
    static = ActivationFormat(scale=ActivationScale.STATIC)
    with pytest.raises(ValueError, match="finite and >= 0"):
        qq.ops.linear_w4a4(torch.randn(2, 32), q, activation=static, input_amax=torch.tensor(amax))


def test_one_module_under_two_names_is_refused_at_export():
    shared = nn.Linear(32, 32)
    model = qq.convert(nn.ModuleDict({"a": shared, "b": shared}), "w4a16")
    with pytest.raises(ValueError, match="a and b are one module"):
        qq.export_weights(model, "modelopt")


def test_weights_that_change_during_an_export_are_noticed():
    model = qq.convert(tiny_model("llama"), "w4a16")
    stream = qq.export_weights(model, "modelopt")
    next(stream)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)
    with pytest.raises(RuntimeError, match="was changed while its model was being exported; export again"):
        list(stream)


def test_default_dtype_does_not_reach_scales(tmp_path: Path):
    model = qq.convert(tiny_model("qwen3_moe"), "w4a16", recipe="modelopt")
    qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt")
    expected = qq.load_rollout(tmp_path / "out").state_dict()
    torch.set_default_dtype(torch.bfloat16)
    try:
        loaded = qq.load_rollout(tmp_path / "out").state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    scales = [name for name in expected if name.endswith("per_tensor_scale")]
    assert scales
    assert all(torch.equal(loaded[name], expected[name]) and loaded[name].dtype == torch.float32 for name in scales)


def test_nested_observation_goes_on_after_the_inner_one_ends():
    model = qq.convert(nn.Sequential(nn.Linear(32, 16)), "w4a16")
    with qq.observe_activations(model):
        with qq.observe_activations(model):
            model(torch.ones(1, 32))
        model(torch.full((1, 32), 3.0))
    assert [v.item() for v in qq.quant_state_dict(model).values()] == [3.0]


def test_projections_that_fused_mamba_kernels_read_past_the_module_are_refused(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model("nemotron_h")
    projections = sorted(
        {n.rpartition(".")[2] for n, _ in model.named_modules() if n.endswith((".in_proj", ".out_proj"))}
    )
    assert "out_proj" in projections
    monkeypatch.setattr(sys.modules["quads_qat.convert"], "find_spec", lambda name: name == "mamba_ssm")
    with pytest.raises(ValueError, match=r"reads the master weight past the module; pass exclude="):
        qq.convert(model, "w4a16")
    qq.convert(model, "w4a16", exclude=[f"*.{name}" for name in projections])
