"""Contract under test: conversion leaves parameters, state dicts and optimizers as they are, and can be undone, copied,
saved, moved and repeated only as documented; a refusal changes nothing.
"""

import copy
import gc
import io
import pickle
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from small_modules import ListModel, fill, linears
from tiny_models import tiny_inputs, tiny_model
from torch import Tensor, nn
from twins import assert_equal_tensors, outputs_and_gradients

import quads_qat as qq
from quads_qat.config import ActivationScale
from quads_qat.conversion import conversion_of
from quads_qat.linear import W4A4Linear, W4A16Linear
from quads_qat.residual import ResidualCompensatedExperts, ResidualCompensatedLinear

FUSED = lambda: tiny_model("gpt_oss")  # noqa: E731 - experts with biases, transposed
LISTED = lambda: fill(ListModel())  # noqa: E731
MODELS = pytest.mark.parametrize("make", [FUSED, LISTED], ids=["fused experts", "list of experts"])


def run(model: nn.Module) -> Tensor:
    if isinstance(model, ListModel):
        x = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(0))
        return model(x.to(next(model.parameters()).dtype))
    return model(**tiny_inputs(model)).logits


def snapshot(model: nn.Module) -> list[tuple[str, int, torch.dtype, torch.Size, bool]]:
    return [(name, id(p), p.dtype, p.shape, p.requires_grad) for name, p in model.named_parameters()]


def classes(model: nn.Module) -> dict[str, tuple[type, set[str]]]:
    return {name: (type(module), set(module.__dict__)) for name, module in model.named_modules()}


# ----------------------------------------------------------------------------------------------- parameters, state dict


@MODELS
@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
def test_parameters_keep_name_object_dtype_shape_and_value(make: Callable[[], nn.Module], mode: str):
    model = make()
    before, values = snapshot(model), {n: t.clone() for n, t in model.state_dict().items()}
    assert qq.convert(model, mode) is model
    run(model)
    assert snapshot(model) == before
    assert list(model.state_dict()) == list(values)
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, values[name], name)


@MODELS
def test_state_dicts_load_strictly_in_both_directions(make: Callable[[], nn.Module]):
    plain, converted = make(), qq.convert(make(), "w4a16")
    fill(plain, seed=1)
    converted.load_state_dict(plain.state_dict(), strict=True)
    expected = run(qq.convert(copy.deepcopy(plain), "w4a16"))
    assert_same_bits(run(converted), expected)
    fill(converted, seed=2)
    plain.load_state_dict(converted.state_dict(), strict=True)
    assert_same_bits(run(plain), run(qq.revert(converted)))


def test_an_optimizer_made_before_conversion_trains_the_converted_model():
    model = LISTED()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    qq.convert(model, "w4a16")
    weight = model.layers[0]["mlp"].experts[0].up_proj.weight
    before = weight.detach().clone()
    run(model).square().sum().backward()
    optimizer.step()
    assert weight.grad is not None
    assert_same_bits(weight.detach(), before - weight.grad)


@MODELS
def test_revert_restores_classes_attributes_parameters_and_output(make: Callable[[], nn.Module]):
    model = make()
    before, shape, output = snapshot(model), classes(model), run(model)
    for mode in ("w4a16", "w4a4"):
        assert qq.revert(qq.convert(model, mode)) is model
        assert (snapshot(model), classes(model)) == (before, shape)
        assert_same_bits(run(model), output)


@MODELS
def test_the_quantized_output_differs_from_the_plain_one(make: Callable[[], nn.Module]):
    model = make()
    assert not torch.equal(run(model), run(qq.convert(model, "w4a16")))


# ------------------------------------------------------------------------------------------------- copies, files, moves


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def through_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("clone", [copy.deepcopy, through_pickle, through_file])
@pytest.mark.parametrize("mode", ["w4a16", "w4a4", "w4a4_residual"])
@MODELS
def test_a_clone_gives_the_same_bits_and_shares_nothing(
    make: Callable[[], nn.Module], mode: str, clone: Callable[[nn.Module], nn.Module]
):
    model = qq.convert(make(), mode)
    expected = run(model)
    twin = clone(model)
    assert qq.coverage(twin) == qq.coverage(model)
    modules = set(twin.modules())
    for group in conversion_of(twin, "test")[1].groups.values():
        assert all(module in modules for module, _, _ in group.members)
    for module in model.modules():
        with torch.no_grad():
            for parameter in module._parameters.values():
                if parameter is not None:
                    parameter.zero_()
    assert_same_bits(run(twin), expected)
    assert not torch.equal(run(model), expected)


@MODELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_change_of_dtype_after_conversion_keeps_the_quantized_values(
    make: Callable[[], nn.Module], dtype: torch.dtype
):
    model = qq.convert(make().bfloat16(), "w4a16")
    module = next(m for m in model.modules() if isinstance(m, W4A16Linear))
    eye = torch.eye(module.in_features)
    with torch.no_grad():
        if module.bias is not None:
            module.bias.zero_()
        before = module(eye.bfloat16())
        model.to(dtype)
        after = module(eye.to(dtype))
    assert after.dtype == dtype
    assert torch.equal(after.float(), before.float())  # every value fits all three dtypes
    assert run(model).isfinite().all()


@MODELS
def test_frozen_weights_get_no_gradient_but_pass_one_on(make: Callable[[], nn.Module]):
    model = make()
    reference = outputs_and_gradients(qq.convert(copy.deepcopy(model), "w4a16"), run)
    model.requires_grad_(False)
    first = next(iter(model.parameters()))
    first.requires_grad_(True)
    found = outputs_and_gradients(qq.convert(model, "w4a16"), run)
    assert [name for name, t in found.items() if t is not None] == [
        "output",
        f"gradient of {next(iter(reference))}",
    ] or (sum(t is not None for t in found.values()) == 2)
    name = next(n for n, p in model.named_parameters() if p is first)
    assert_equal_tensors({"g": found[f"gradient of {name}"]}, {"g": reference[f"gradient of {name}"]})


def test_a_module_in_two_places_is_replaced_in_both():
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": nn.Sequential(shared), "b": nn.Sequential(shared, nn.Linear(32, 16))})
    assert set(qq.coverage(qq.convert(model, "w4a4_residual")).quantized) == {"a.0.weight", "b.1.weight"}
    assert model["a"][0] is model["b"][0]  # pyright: ignore[reportIndexIssue]
    assert all(isinstance(m, ResidualCompensatedLinear) for m in model.modules() if hasattr(m, "in_features"))


def test_a_rollout_model_keeps_no_master_weight_alive():
    model = tiny_model("qwen3_moe")
    qq.convert(model, "w4a16")
    masters = [weakref.ref(model.get_parameter(name)) for name in qq.coverage(model).quantized]
    qq.convert(model, "w4a4_residual")
    gc.collect()
    assert [m() for m in masters] == [None] * len(masters)
    experts = next(m for m in model.modules() if isinstance(m, ResidualCompensatedExperts))
    assert "scale_groups" not in experts.__dict__
    assert not any(p.requires_grad for p in model.parameters())


# --------------------------------------------------------------------------------------------------------------- modes

PLAIN, W4A16, W4A4, ROLLOUT = "plain", "w4a16", "w4a4", "w4a4_residual"
ALLOWED = {
    (PLAIN, W4A16),
    (PLAIN, W4A4),
    (PLAIN, ROLLOUT),
    (W4A16, W4A4),
    (W4A4, W4A16),
    (W4A16, ROLLOUT),
    (W4A4, ROLLOUT),
}
REFUSED = {
    (W4A16, W4A16): "already is in mode 'w4a16'; quads_qat.revert",
    (W4A4, W4A4): "already is in mode 'w4a4'; quads_qat.revert",
    **{(ROLLOUT, mode): "a rollout model (w4a4_residual) holds packed weights only" for mode in (W4A16, W4A4, ROLLOUT)},
}


@pytest.mark.parametrize("after", [W4A16, W4A4, ROLLOUT])
@pytest.mark.parametrize("before", [PLAIN, W4A16, W4A4, ROLLOUT])
def test_every_change_of_mode_is_allowed_or_refused(before: str, after: str):
    model = LISTED()
    if before != PLAIN:
        qq.convert(model, before)
    kept = classes(model)
    with (
        nullcontext()
        if (before, after) in ALLOWED
        else pytest.raises(ValueError, match=re.escape(REFUSED[before, after]))
    ):
        qq.convert(model, after)
        assert_same_bits(run(model), run(qq.convert(LISTED(), after)))
        return
    assert classes(model) == kept


@pytest.mark.parametrize(
    "arguments", [{"scope": "experts"}, {"recipe": "modelopt"}, {"exclude": ["layers.0"]}, {"groups": ["up_proj"]}]
)
def test_a_change_of_mode_keeps_recipe_scope_and_groups(arguments: dict):
    model = qq.convert(LISTED(), "w4a16")
    with pytest.raises(ValueError, match=r"keeps its recipe, scope and groups; call quads_qat\.revert"):
        qq.convert(model, "w4a4", **arguments)


def test_a_change_of_mode_may_repeat_recipe_and_scope():
    model = qq.convert(LISTED(), "w4a16", scope="mlp", recipe="modelopt")
    qq.convert(model, "w4a4", scope="mlp", recipe="modelopt")
    qq.convert(model, "w4a16")
    assert conversion_of(model, "test")[1].recipe is qq.Recipe.MODELOPT


def test_a_model_inside_can_be_converted_alone_and_reached_from_outside():
    model = LISTED()
    qq.convert(model.layers[0], "w4a16")
    assert isinstance(model.layers[0]["mlp"].experts[0].up_proj, W4A16Linear)
    assert type(model.layers[1]["mlp"].experts[0].up_proj) is nn.Linear
    with pytest.raises(ValueError, match=r"only a part of this model is converted, layers\.1"):
        qq.convert(model, "w4a4")
    with pytest.raises(ValueError, match="is part of a converted model; call convert on the whole model"):
        qq.convert(model.layers[0]["mlp"], "w4a4")
    wrapped = nn.Sequential(model.layers[0]["mlp"])
    assert type(qq.revert(model).layers[0]["mlp"].experts[0].up_proj) is nn.Linear
    qq.convert(wrapped[0], "w4a16")
    qq.convert(wrapped, "w4a4")
    assert isinstance(wrapped[0].experts[0].up_proj, W4A4Linear)
    qq.revert(wrapped)
    qq.convert(model.layers[0], "w4a16")
    qq.convert(model.layers[1], "w4a16")
    with pytest.raises(ValueError, match=r"coverage: layers\.0, layers\.1 were converted one by one"):
        qq.coverage(model)
    with pytest.raises(ValueError, match=r"convert: layers\.0, layers\.1 were converted one by one"):
        qq.convert(model, "w4a4")


def test_a_linear_itself_can_be_converted_but_not_replaced():
    linear = nn.Linear(32, 16)
    qq.convert(linear, "w4a16")
    assert isinstance(linear, W4A16Linear)
    assert list(qq.coverage(linear).quantized) == ["weight"]
    assert type(qq.revert(linear)) is nn.Linear
    with pytest.raises(ValueError, match="cannot replace the model itself; wrap it in a module"):
        qq.convert(linear, "w4a4_residual")
    assert type(linear) is nn.Linear


# ------------------------------------------------------------------------------------- refusals that look at the values


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("make", [FUSED, LISTED])
def test_a_weight_that_is_not_finite_is_named_when_packing_and_nothing_is_changed(
    make: Callable[[], nn.Module], bad: float
):
    model = make()
    name = list(qq.coverage(qq.convert(copy.deepcopy(model), "w4a16")).quantized)[-1]
    with torch.no_grad():
        model.get_parameter(name).view(-1)[5] = bad
    kept = classes(model)
    with pytest.raises(ValueError, match=re.escape(f"{name}: the weight holds 1 NaN or inf")):
        qq.convert(model, "w4a4_residual")
    assert classes(model) == kept
    qq.convert(model, "w4a16")
    with pytest.raises(ValueError, match=re.escape(name)):
        qq.convert(model, "w4a4_residual")
    assert conversion_of(model, "test")[1].mode is qq.Mode.W4A16


@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
def test_trainer_modes_work_on_the_meta_device_and_weights_can_follow(mode: str):
    with torch.device("meta"):
        model = ListModel()
    qq.convert(model, mode)
    y = model.layers[0]["mlp"].experts[0](torch.empty(5, 32, device="meta"))
    assert (y.is_meta, y.shape) == (True, (5, 32))
    model.to_empty(device="cpu")
    fill(model)
    assert_same_bits(run(model), run(qq.convert(LISTED(), mode)))


def test_a_rollout_from_the_meta_device_is_refused_and_nothing_is_changed():
    with torch.device("meta"):
        model = ListModel()
    kept = classes(model)
    with pytest.raises(
        ValueError, match=r"packs weights, but layers.*\.weight is on the meta device; load the weights"
    ):
        qq.convert(model, "w4a4_residual")
    assert classes(model) == kept


def test_a_static_activation_scale_without_observations_waits_for_a_calibration():
    model = qq.convert(LISTED(), "w4a4_residual", activation_scale=ActivationScale.STATIC)
    with pytest.raises(ValueError, match=r"activation_scale='static' and was not calibrated; run quads_qat.calibrate"):
        model(torch.ones(2, 32))


def test_a_rollout_of_weights_only_multiplies_as_the_trainer_does():
    trainer, x = LISTED(), torch.randn(3, 5, 32)
    rollout = qq.convert(copy.deepcopy(trainer), "w4a4_residual", weights_only=True)
    assert_same_bits(rollout(x), qq.convert(trainer, "w4a16")(x).detach())
    assert "activation=None, residual=None" in repr(rollout)


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "w4a16"},
        {"mode": "w4a4"},
        {"mode": "w4a4_residual", "residual": qq.ResidualConfig()},
        {"mode": "w4a4_residual", "activation_scale": "per_token"},
        {"mode": "w4a4_residual", "activation_recipe": "modelopt"},
    ],
    ids=str,
)
def test_weights_only_goes_with_nothing_about_activations(options: dict[str, Any]):
    with pytest.raises(ValueError, match="weights_only=True is for mode='w4a4_residual' and leaves activations alone"):
        qq.convert(LISTED(), weights_only=True, **options)


@pytest.mark.parametrize("name", ["coverage", "revert", "quant_state_dict", "full_precision", "observe_activations"])
def test_what_needs_a_converted_model_says_so(name: str):
    with pytest.raises(ValueError, match=f"{name}: this model has not been converted; call quads_qat.convert"):
        _enter(getattr(qq, name)(linears("fc")))


def test_what_needs_a_rollout_says_how_to_make_one():
    trainer, plain = qq.convert(linears("fc"), "w4a16"), linears("fc")
    way_out = r"call quads_qat.convert\(model, mode='w4a4_residual'\) first, or load it with quads_qat.load_rollout"
    with pytest.raises(ValueError, match=f"calibrate: this model has not been converted; {way_out}"):
        qq.calibrate(plain, [])
    with pytest.raises(ValueError, match=f"check_first_step: this model has not been converted; {way_out}"):
        qq.check_first_step(trainer, plain)


@pytest.mark.parametrize("name", ["revert", "full_precision"])
def test_what_needs_master_weights_refuses_a_rollout_model(name: str):
    model = qq.convert(linears("fc"), "w4a4_residual")
    with pytest.raises(ValueError, match=f"{name}: a rollout model holds packed weights only"):
        _enter(getattr(qq, name)(model))


def _enter(result: Any) -> None:
    if hasattr(result, "__enter__"):  # a context manager does nothing before
        with result:
            pass
