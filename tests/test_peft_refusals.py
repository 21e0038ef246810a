"""Contract under test: adapters that cannot be merged before quantizing, and what needs them merged, are refused."""

from pathlib import Path

import pytest
import torch.distributed as dist
from adapter_training import (
    BOTH,
    DISPATCHES,
    EXPERTS,
    LINEARS,
    RECIPE,
    base_model,
    expert_layers,
    trainer,
    with_adapters,
)
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from twins import experts_and_inputs, run_experts

import quads_qat as qq
from quads_qat.integrations.peft import lora_config, merged, quantize_merged


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_dropout": 0.1}, r"lora_dropout=0\.1 is not supported: dropout on x"),
        ({"use_dora": True}, "use_dora=True is not supported: DoRA"),
        ({"lora_bias": True}, "lora_bias=True is not supported: biases are not quantized"),
    ],
)
def test_what_cannot_be_merged_before_quantizing_is_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        get_peft_model(qq.convert(base_model(), "w4a16"), lora_config(**LINEARS, **options))
    model = qq.convert(get_peft_model(base_model(), LoraConfig(**LINEARS, **options)), "w4a16")
    with pytest.raises(ValueError, match=r"quantize_merged: .*q_proj has .*cannot be merged before quantizing"):
        quantize_merged(model)


def test_adapters_of_peft_itself_are_told_from_those_that_are_quantized_merged():
    """Merging them, which is the way out of the others, would quantize other weights than were trained with."""
    model = get_peft_model(qq.convert(base_model(), "w4a16"), LoraConfig(**LINEARS))
    for refused in (lambda: qq.export_weights(model, "modelopt"), lambda: qq.convert(model, "w4a4_residual")):
        with pytest.raises(ValueError, match=r"q_proj is wrapped by an adapter that was added to the quantized weight"):
            refused()
    quantize_merged(model)
    with pytest.raises(ValueError, match=r"is wrapped by an adapter that is not merged; call model\.merge_and"):
        qq.export_weights(model, "modelopt")


def test_an_unmerged_model_is_neither_exported_nor_reverted(tmp_path: Path):
    model = with_adapters("convert first", base_model(), **LINEARS)
    for refused in (
        lambda: qq.export_checkpoint(model, tmp_path / "x", dialect="modelopt"),
        lambda: qq.export_weights(model, "modelopt"),
        lambda: qq.convert(model, "w4a4_residual"),
        lambda: qq.revert(model),
        lambda: qq.verify(model, tmp_path),
    ):
        with pytest.raises(
            ValueError, match=r"q_proj is wrapped by an adapter that is not merged; call model\.merge_and"
        ):
            refused()
    rollout = qq.convert(base_model(), "w4a4_residual", recipe=RECIPE)
    for side in ({"rollout": rollout}, {"received": {}}):
        with pytest.raises(ValueError, match=r"^check_first_step: .*q_proj is wrapped .* or check_first_step of plain"):
            qq.check_first_step(model, **side)
    plain = get_peft_model(qq.convert(base_model(), "w4a16"), LoraConfig(**LINEARS))
    with pytest.raises(ValueError, match="does not train a quantized merged weight"), merged(plain):
        pass
    assert not (tmp_path / "x").exists()


def test_w4a4_trainers_take_no_adapters():
    with pytest.raises(ValueError, match="adapters need a trainer in mode 'w4a16'"):
        get_peft_model(qq.convert(base_model(), "w4a4"), lora_config(**LINEARS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_dropout": 0.1}, r"QuantizedLoraExperts: lora_dropout=0\.1 is not supported: dropout on x"),
        ({"use_dora": True}, "QuantizedLoraExperts: use_dora=True is not supported: DoRA"),
        ({"lora_bias": True}, "QuantizedLoraExperts: lora_bias=True is not supported: biases are not quantized"),
        (
            {"init_lora_weights": "pissa"},
            "QuantizedLoraExperts: init_lora_weights='pissa' is not supported for experts",
        ),
        (
            {"target_parameters": ["q_proj.weight"]},
            r"'weight' of '.*q_proj.weight', a linear; name the linear in target_m",
        ),
        (
            {"target_parameters": None, "target_modules": ["experts"]},
            "a stack of experts; name its parameters in target_p",
        ),
    ],
)
def test_what_cannot_be_merged_into_experts_is_refused(options: dict, message: str):
    config = EXPERTS | options
    with pytest.raises(ValueError, match=message):
        get_peft_model(qq.convert(base_model(), "w4a16"), lora_config(**config))


def test_parameters_that_are_not_quantized_are_refused():
    targets = {"target_modules": [], "target_parameters": ["experts.down_proj", "experts.down_proj_bias"]}
    message = "down_proj_bias of GptOssExperts is not quantized.* takes gate_up_proj, down_proj"
    with pytest.raises(ValueError, match=message):
        get_peft_model(qq.convert(tiny_model("gpt_oss"), "w4a16"), lora_config(**targets))
    model = get_peft_model(qq.convert(tiny_model("gpt_oss"), "w4a16"), LoraConfig(**targets))
    kinds = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match=message):
        quantize_merged(model)
    assert [type(m) for m in model.modules()] == kinds
    linear = LoraConfig(target_modules=[], target_parameters=["q_proj.weight"])
    with pytest.raises(ValueError, match=r"q_proj adapts a linear through target_parameters"):
        quantize_merged(get_peft_model(qq.convert(base_model(), "w4a16"), linear))


def test_other_modes_and_rows_with_adapters_of_their_own_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="QuantizedLoraExperts: adapters need a trainer in mode 'w4a16'"):
        get_peft_model(qq.convert(base_model(), "w4a4"), lora_config(**EXPERTS))
    model = trainer()
    with pytest.raises(ValueError, match=r"adapter_names .one adapter for each row. is not supported"):
        run_experts(lambda *a: next(iter(expert_layers(model).values()))(*a, adapter_names=["x"]), [None] * 3)
    for refused in (
        lambda: qq.export_checkpoint(model, tmp_path / "x", dialect="modelopt"),
        lambda: qq.revert(model),
        lambda: qq.verify(model, tmp_path),
    ):
        with pytest.raises(ValueError, match=r"is wrapped by an adapter that is not merged; call model\.merge_and"):
            refused()
    qq.export_checkpoint(qq.convert(base_model(), "w4a16"), tmp_path / "packed", dialect="modelopt")
    with pytest.raises(ValueError, match=r"PackedLoraLinear: target_parameters=.*needs a trainer"):
        get_peft_model(qq.load_rollout(tmp_path / "packed", weights_only=True), lora_config(**BOTH))
    alone = lora_config(**EXPERTS)
    with pytest.raises(ValueError, match="no `target_parameters` found"):  # PEFT's words
        get_peft_model(qq.load_rollout(tmp_path / "packed", weights_only=True), alone)


@DISPATCHES
def test_stacks_that_are_sharded_on_experts_are_refused(dispatch: str):
    model = trainer(dispatch=dispatch)
    layer = next(iter(expert_layers(model).values()))
    inputs = experts_and_inputs("qwen3_moe", dispatch)[1]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, experts = init_device_mesh("cpu", (1,)), layer.get_base_layer()
        for name in experts.layout.parameters:
            sharded = distribute_tensor(experts.get_parameter(name).detach(), mesh, [Shard(0)])
            experts.register_parameter(name, nn.Parameter(sharded, requires_grad=False))
        with pytest.raises(
            ValueError, match=r"experts\.gate_up_proj: expert or tensor parallelism with adapters is not"
        ):
            run_experts(layer, inputs)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("saved", ["o_proj", "mlp"])
def test_what_is_quantized_is_no_module_to_save(saved: str):
    """Its copy would be quantized apart from the weights that share its scale, and be exported by nobody."""
    options = {"target_modules": ["q_proj"], "modules_to_save": [saved]}
    said = (
        rf".*model.layers.0.*{saved} is quantized, and trained in full as a copy \(modules_to_save\); name its linears "
        rf"in target_modules, or convert with exclude=\['\*\.{saved}\*'\]"
    )
    model = qq.convert(get_peft_model(base_model(), LoraConfig(**options)), "w4a16")
    with pytest.raises(ValueError, match=f"quantize_merged: {said}"):
        quantize_merged(model)
    first = with_adapters("convert first", base_model(), **options)
    assert "o_proj" in str(qq.coverage(first))
    with pytest.raises(ValueError, match=f"merged: {said}"), merged(first):
        pass
    with first.disable_adapter(), merged(first) as plain:  # the original
        assert len(dict(qq.export_weights(plain, "modelopt"))) > 30
    way_out = {"mode": "w4a16", "exclude": [f"*.{saved}*"]}
    trained = [
        get_peft_model(qq.convert(base_model(), **way_out), lora_config(**options)),
        quantize_merged(qq.convert(get_peft_model(base_model(), LoraConfig(**options)), **way_out)),
    ]
    assert qq.coverage(trained[0]) == qq.coverage(trained[1])
    for model in trained:
        with merged(model) as plain:
            assert sum(name.endswith("weight_scale") for name, _ in qq.export_weights(plain, "modelopt")) > 5
