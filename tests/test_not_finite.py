"""Contract under test: an error over NaN or inf names the weight or module in the model, and a way out that exists."""

import re
from collections.abc import Callable

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor, nn

import quads_qat as qq

IDS = torch.arange(3, 15)[None]
Q = "model.layers.1.self_attn.q_proj"
EXPERTS = "model.layers.1.mlp.experts"


def message(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match="NaN or inf") as error:
        call()
    assert "check_finite" not in str(error.value)  # none of these take it
    assert re.search("; (find|go back|download)", str(error.value))
    return str(error.value)


def poisoned(name: str, mode: str = "w4a16", experts: str = "eager") -> nn.Module:
    model = qq.convert(tiny_model("qwen3_moe"), mode)
    model.set_experts_implementation(experts)
    model.get_parameter(name).data.view(-1)[3] = torch.nan
    return model


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", [f"{Q}.weight", f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"])
def test_a_weight_in_a_trainer(name: str, experts: str):
    model = poisoned(name, experts=experts)
    assert message(lambda: model(IDS)).startswith(f"{name}: fake_quantize: the weight holds 1 NaN or inf of ")

    def accumulating() -> None:
        with qq.accumulate(model):
            model(IDS)

    assert message(accumulating).startswith(f"{name}: quantize: the weight holds 1 NaN or inf of ")


@pytest.mark.parametrize("name", [f"{Q}.weight", f"{EXPERTS}.down_proj"])
def test_a_weight_elsewhere(name: str, tmp_path):
    model = poisoned(name)
    assert message(lambda: qq.step(model, track_codes=True)).startswith(f"step: {name} holds 1 NaN or inf")
    for call in (
        lambda: list(qq.export_weights(model, "modelopt")),
        lambda: qq.convert(model, "w4a4_residual"),
        lambda: qq.update_weights(qq.convert(tiny_model("qwen3_moe"), "w4a4_residual"), model.state_dict()),
    ):
        assert f"{name}: the weight holds 1 NaN or inf of " in message(call)
    qq.revert(model).save_pretrained(tmp_path / "source")
    where = message(lambda: qq.quantize_checkpoint(tmp_path / "source", tmp_path / "out"))
    assert re.search(r"layers\.1\..*(q|down)_proj.*: the weight holds 1 NaN or inf of ", where)


def spoil(model: nn.Module, module: str) -> None:
    """NaN in the input of a linear, or in the hidden states that a stack of experts gets."""

    def with_nan(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        first = given[0].clone()
        first.view(-1)[3] = torch.nan
        return first, *given[1:]

    model.get_submodule(module).register_forward_pre_hook(with_nan)


@pytest.mark.parametrize(("module", "names"), [(Q, f"{Q}.weight"), (EXPERTS, f"{EXPERTS}.gate_up_proj")])
def test_an_input(module: str, names: str):
    trainer = qq.convert(tiny_model("qwen3_moe"), "w4a4")
    spoil(trainer, module)
    assert message(lambda: trainer(IDS)).startswith(f"{names}: fake_quantize: the input holds 1 NaN or inf of ")
    for residual in (None, qq.ResidualConfig(scope="token")):
        rollout = qq.convert(tiny_model("qwen3_moe"), "w4a4_residual", residual=residual)
        spoil(rollout, module)
        assert re.match(rf"{names.removesuffix('.weight')}: \w+: x holds 1 NaN", message(lambda m=rollout: m(IDS)))
    static = qq.convert(tiny_model("qwen3_moe"), "w4a4_residual", residual=qq.ResidualConfig(scope="static"))
    spoil(static, module)
    assert message(lambda: qq.calibrate(static, [IDS])).startswith(f"calibrate: {names}: ")
