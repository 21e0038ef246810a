"""Contract under test: what is static in a rollout is set by ``calibrate``, exactly, and by a loaded state."""

import copy
import importlib
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from safetensors.torch import load_file, save_file
from small_modules import ListModel, fill, linears
from test_residual import slow_mask
from tiny_models import tiny_inputs, tiny_model
from torch import Tensor, nn
from twins import experts_and_inputs, run_experts

import quads_qat as qq
from quads_qat import ops
from quads_qat.config import ActivationFormat
from quads_qat.residual import ResidualCompensatedLinear, residual_rows

STATIC = qq.ResidualConfig(fraction=0.25, scope="static")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rollout(model: nn.Module, **options: Any) -> Any:
    return qq.convert(model, "w4a4_residual", **{"residual": STATIC, **options})


def one_linear(**options: Any) -> Any:
    return rollout(nn.Sequential(fill(nn.Linear(64, 24)).bfloat16()), **options)


def mask_of(rows: Tensor, config: qq.ResidualConfig) -> Tensor:
    """The definition in plain Python of what scope batch selects for rows of activations."""
    batch = qq.ResidualConfig(fraction=config.fraction, scope="batch", norm=config.norm, granularity=config.granularity)
    return torch.tensor(slow_mask(residual_rows(rows, ActivationFormat()).tolist(), batch)[0])


# ---------------------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("granularity", [1, 16])
@pytest.mark.parametrize("norm", ["l2", "l1", "max"])
@pytest.mark.parametrize("cuts", [[131], [1, 130], [60, 68, 1, 2], [127, 4], [128, 3], [5, 126]], ids=str)
def test_a_mask_is_that_of_all_rows_however_they_are_cut(cuts: list[int], norm: str, granularity: int):
    config = qq.ResidualConfig(fraction=0.25, scope="static", norm=norm, granularity=granularity)
    x = normal(sum(cuts), 64)
    model = one_linear(residual=config)
    qq.calibrate(model, x.split(cuts))
    assert_same_bits(model[0].residual_mask, mask_of(x, config))
    assert int(model[0].residual_mask.sum()) == 16


def test_long_batches_add_up_in_chunks_of_128_rows():
    x = normal(700, 64) * torch.linspace(0.1, 30, 700).bfloat16()[:, None]
    expected = one_linear(residual=qq.ResidualConfig(fraction=0.25, scope="batch"))(x)
    for cuts in ([700], [300, 400], [128] * 5 + [60], [1, 699]):
        model = one_linear()
        qq.calibrate(model, x.split(cuts))
        assert_same_bits(model(x), expected)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 1.0])
def test_a_mask_has_its_share_of_channels(fraction: float):
    model = one_linear(residual=qq.ResidualConfig(fraction=fraction, scope="static"))
    if fraction == 0:
        with pytest.raises(ValueError, match="nothing in this rollout is static"):
            qq.calibrate(model, [normal(4, 64)])
        assert_same_bits(model(normal(4, 64)), one_linear(residual=qq.ResidualConfig(fraction=0))(normal(4, 64)))
    else:
        qq.calibrate(model, [normal(4, 64)])
        assert int(model[0].residual_mask.sum()) == int(fraction * 64 + 0.5)


def test_inputs_come_from_the_weight_only_forward():
    """So a second calibration on the same batches, or one with other settings, sees the same inputs."""
    trainer = qq.convert(tiny_model("qwen3_moe"), "w4a16")
    inputs: list[Tensor] = []
    hook = trainer.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    batches = [tiny_inputs(trainer), {"input_ids": tiny_inputs(trainer)["input_ids"].flip(0) + 3}]
    for batch in batches:
        trainer(**batch)
    hook.remove()
    model = rollout(trainer)
    for _ in range(2):
        qq.calibrate(model, batches)
        found = model.model.layers[1].self_attn.o_proj.residual_mask
        assert_same_bits(found, mask_of(torch.cat([x.flatten(0, 1) for x in inputs]), STATIC))


def rows_of(index: Tensor, expert: int) -> Tensor:
    return torch.where(index.t() == expert)[1]


def test_each_expert_of_a_stack_has_its_mask_and_one_without_rows_that_of_all():
    experts, inputs = experts_and_inputs("qwen3_moe", "eager")
    hidden, _, index = (t.detach() for t in inputs)
    model = rollout(nn.ModuleList([experts]))
    model.forward = lambda *args: run_experts(model[0], list(args))
    qq.calibrate(model, [tuple(inputs)])
    masks = model[0].gate_up_proj_residual_mask
    assert masks.shape == (4, 64)
    assert model[0].down_proj_residual_mask.shape == (4, 32)
    for expert in range(1, 4):
        assert_same_bits(masks[expert], mask_of(hidden[rows_of(index, expert)], STATIC))
    all_rows = torch.cat([rows_of(index, expert) for expert in range(4)])
    assert_same_bits(masks[0], mask_of(hidden[all_rows], STATIC))
    assert len(masks.unique(dim=0)) == 4
    assert_same_bits(run_experts(model[0], inputs), by_hand(model[0], inputs, masks, model[0].down_proj_residual_mask))


def by_hand(module: Any, inputs: list[Tensor], first_masks: Tensor, down_masks: Tensor | None) -> Tensor:
    """The experts one by one, with fixed masks [E, K] or [K]; without ``down_masks`` down's are of scope batch."""
    hidden, weights, index = (t.detach() for t in inputs)
    out = torch.zeros_like(hidden)
    for e in range(4):
        slot, token = torch.where(index.t() == e)
        if not token.numel():
            continue
        q1, q2 = (
            qq.NVFP4Tensor(q.qdata[e], q.block_scale[e], q.per_tensor_scale[e], q.recipe, q.stored_scale[e])
            for q in (module.packed("gate_up_proj"), module.packed("down_proj"))
        )
        mask = first_masks if first_masks.ndim == 1 else first_masks[e]
        gate, up = ops.residual_linear(hidden[token], q1, STATIC, mask=mask).chunk(2, -1)
        y = nn.functional.silu(gate) * up
        if down_masks is None:
            y = ops.residual_linear(y, q2, qq.ResidualConfig(fraction=0.25, scope="batch"))
        else:
            y = ops.residual_linear(y, q2, STATIC, mask=down_masks if down_masks.ndim == 1 else down_masks[e])
        out = out.index_add(0, token, y * weights[token, slot, None])
    return out


@pytest.mark.parametrize("scope", ["static", "batch"])
def test_before_dispatch_all_experts_share_the_mask_of_the_hidden_states(scope: str):
    experts, inputs = experts_and_inputs("qwen3_moe", "eager")
    hidden = inputs[0].detach()
    config = qq.ResidualConfig(fraction=0.25, scope=scope, expert_mask="before_dispatch")
    model = rollout(nn.ModuleList([experts]), residual=config)
    down_mask = None
    if scope == "static":
        model.forward = lambda *args: run_experts(model[0], list(args))
        qq.calibrate(model, [tuple(inputs)])
        assert_same_bits(model[0].gate_up_proj_residual_mask, mask_of(hidden, config))
        down_mask = model[0].down_proj_residual_mask
        assert down_mask.shape == (32,)
    expected = by_hand(model[0], inputs, mask_of(hidden, config), down_mask)
    assert_same_bits(run_experts(model[0], inputs), expected)
    other = rollout(
        nn.ModuleList([experts_and_inputs("qwen3_moe", "eager")[0]]),
        residual=qq.ResidualConfig(fraction=0.25, scope="batch"),
    )
    assert not torch.equal(run_experts(other[0], inputs), expected)


@pytest.mark.parametrize("scope", ["token", "block"])
def test_rows_that_rank_alone_do_not_care_where_experts_rank(scope: str):
    outs = []
    for where in ("per_expert", "before_dispatch"):
        experts, inputs = experts_and_inputs("gpt_oss", "eager")
        model = rollout(nn.ModuleList([experts]), residual=qq.ResidualConfig(scope=scope, expert_mask=where))
        outs.append(run_experts(model[0], inputs))
    assert_same_bits(*outs)


@pytest.mark.parametrize("arch", ["qwen2_moe", "gpt_oss", "llama4", "nemotron_h", "inkling", "step3p7"])
@pytest.mark.parametrize("where", ["per_expert", "before_dispatch"])
def test_every_layout_of_experts_is_calibrated(arch: str, where: str):
    config = qq.ResidualConfig(scope="static", expert_mask=where)
    model = rollout(tiny_model(arch), residual=config, activation_scale="static")
    inputs = tiny_inputs(model)
    qq.calibrate(model, [inputs])
    assert bool(torch.isfinite(model(**inputs).logits).all())
    state = qq.quant_state_dict(model)
    assert sum(key.endswith(".mask") for key in state) == len(qq.coverage(model).quantized)


def test_experts_that_are_linears_have_a_mask_each_and_the_unreached_that_of_all():
    model = rollout(fill(ListModel()).bfloat16())
    x = normal(1, 1, 32)
    qq.calibrate(model, [x])
    state = qq.quant_state_dict(model)
    rows: dict[int, Tensor] = {}
    moe = model.layers[0].mlp
    chosen = moe.gate(x.reshape(-1, 32)).float().softmax(-1).topk(2, dim=-1).indices
    for expert in range(4):
        token = torch.where(chosen == expert)[0]
        rows[expert] = x.reshape(-1, 32)[token]
    assert sorted(len(own) for own in rows.values()) == [0, 0, 1, 1]
    for expert, own in rows.items():
        expected = mask_of(own if len(own) else torch.cat([*rows.values()]), STATIC)
        for projection in ("gate_proj", "up_proj"):
            assert_same_bits(state[f"layers.0.mlp.experts.{expert}.{projection}.weight.mask"], expected)


# --------------------------------------------------------------------------------------------------------------- scales


@pytest.mark.parametrize(
    "make", [lambda: tiny_model("qwen3_moe"), lambda: fill(ListModel()).bfloat16()], ids=["fused", "list"]
)
def test_static_scales_are_what_the_trainer_observes(make: Any):
    trainer = qq.convert(make(), "w4a16")
    batches = [normal(2, 3, 32), normal(4, 5, 32) * 3]
    if not isinstance(trainer, ListModel):
        batches = [tiny_inputs(trainer), {"input_ids": tiny_inputs(trainer)["input_ids"].flip(1)}]
    with qq.observe_activations(trainer):
        for batch in batches:
            trainer(**batch) if isinstance(batch, dict) else trainer(batch)
    observed = qq.quant_state_dict(trainer)
    model = rollout(make(), activation_scale="static", residual=qq.ResidualConfig(fraction=0.5, scope="token"))
    with pytest.raises(ValueError, match=r"activation_scale='static' and was not calibrated; run quads_qat\.calibrate"):
        model(**batches[0]) if isinstance(batches[0], dict) else model(batches[0])
    qq.calibrate(model, iter(batches))
    found = qq.quant_state_dict(model)
    assert found.keys() == observed.keys()
    for key, value in observed.items():
        assert_same_bits(found[key], value, key)


def test_static_masks_see_the_residual_of_the_static_scale():
    model = one_linear(activation_scale="static")
    x = normal(40, 64) * torch.linspace(0.1, 4, 64).bfloat16()
    qq.calibrate(model, [x[:20], x[20:]])
    assert_same_bits(model[0].input_amax, x.abs().max().float())
    static = ActivationFormat(scale=qq.config.ActivationScale.STATIC)
    r = residual_rows(x, static, model[0].input_amax)
    expected = torch.tensor(slow_mask(r.tolist(), qq.ResidualConfig(fraction=0.25, scope="batch"))[0])
    assert_same_bits(model[0].residual_mask, expected)


# ---------------------------------------------------------------------------------------------------------------- state


def test_a_state_goes_from_one_rollout_to_another_in_place_and_is_no_alias():
    one, two = (rollout(tiny_model("qwen3_moe"), activation_scale="static") for _ in range(2))
    inputs = tiny_inputs(one)
    qq.calibrate(one, [inputs])
    state, expected = qq.quant_state_dict(one), one(**inputs).logits
    qq.load_quant_state_dict(two, state)
    assert_same_bits(two(**inputs).logits, expected)
    addresses = {name: tensor.data_ptr() for name, tensor in two.state_dict().items()}
    qq.calibrate(two, [{"input_ids": inputs["input_ids"] + 1}])
    qq.load_quant_state_dict(two, state)
    assert {name: tensor.data_ptr() for name, tensor in two.state_dict().items()} == addresses
    for value in state.values():
        value.zero_()
    assert_same_bits(two(**inputs).logits, expected)
    qq.load_quant_state_dict(two, {})
    assert qq.quant_state_dict(two) == {}
    with pytest.raises(ValueError, match="was not calibrated"):
        two(**inputs)


def test_a_rollout_takes_the_amaxes_of_a_trainer():
    trainer = qq.convert(tiny_model("qwen3_moe"), "w4a16")
    with qq.observe_activations(trainer):
        trainer(**tiny_inputs(trainer))
    model = rollout(tiny_model("qwen3_moe"), activation_scale="static", residual=qq.ResidualConfig(scope="token"))
    qq.load_quant_state_dict(model, {**qq.quant_state_dict(model), **qq.quant_state_dict(trainer)})
    expected = rollout(trainer, activation_scale="static", residual=qq.ResidualConfig(scope="token"))
    assert_same_bits(model(**tiny_inputs(model)).logits, expected(**tiny_inputs(model)).logits)


def test_wrong_states_are_refused_and_change_nothing():
    model = rollout(tiny_model("qwen3_moe"))
    qq.calibrate(model, [tiny_inputs(model)])
    state = qq.quant_state_dict(model)
    experts = "model.layers.0.mlp.experts.gate_up_proj.mask"
    for wrong, error, message in (
        ({"x.mask": torch.ones(3)}, KeyError, "'x' is no activation group"),
        ({experts: torch.ones(64)}, ValueError, r"\.mask must be bool \[64\] or \[4, 64\], got torch.float32"),
        ({experts: torch.ones(63).bool()}, ValueError, r"must be bool \[64\] or \[4, 64\], got torch.bool \[63\]"),
        ({f"{experts[:-17]}down_proj.amax": torch.ones(2)}, ValueError, r"must be float32 \[\], got .*\[2\]"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            qq.load_quant_state_dict(model, state | wrong)
        assert all(torch.equal(value, state[key]) for key, value in qq.quant_state_dict(model).items())
    with pytest.raises(KeyError, match=r"'model\.layers.* is no activation group"):
        qq.load_quant_state_dict(qq.convert(tiny_model("qwen3_moe"), "w4a16"), {experts: state[experts]})


def test_masks_and_scales_travel_in_a_safetensors_file(tmp_path: Any):
    model = rollout(tiny_model("gpt_oss"), activation_scale="static")
    inputs = tiny_inputs(model)
    qq.calibrate(model, [inputs])
    save_file(model.state_dict(), tmp_path / "rollout.safetensors")
    other = rollout(tiny_model("gpt_oss", seed=1), activation_scale="static")
    other.load_state_dict(load_file(tmp_path / "rollout.safetensors"), strict=True)
    assert_same_bits(other(**inputs).logits, model(**inputs).logits)
    assert qq.quant_state_dict(other).keys() == qq.quant_state_dict(model).keys()


def test_new_weights_leave_masks_and_scales_alone():
    model = rollout(tiny_model("qwen3_moe"), activation_scale="static")
    qq.calibrate(model, [tiny_inputs(model)])
    before = qq.quant_state_dict(model)
    qq.update_weights(model, tiny_model("qwen3_moe", seed=1).state_dict())
    after = qq.quant_state_dict(model)
    assert after.keys() == before.keys()
    for key, value in before.items():
        assert_same_bits(after[key], value, key)


# ------------------------------------------------------------------------------------------------------------- refusals


def test_batches_are_keywords_positions_or_one_argument():
    masks = []
    for batch in ({"input": normal(5, 64)}, (normal(5, 64),), normal(5, 64)):
        model = one_linear()
        qq.calibrate(model, [batch])
        masks.append(model[0].residual_mask)
    assert torch.equal(masks[0], masks[1])
    assert torch.equal(masks[0], masks[2])


def test_one_batch_or_text_is_no_list_of_batches():
    with pytest.raises(TypeError, match=r"batches must be a list of batches, got one Tensor; pass \[batch\]"):
        qq.calibrate(one_linear(), normal(5, 64))
    with pytest.raises(TypeError, match="got the text 'hello'; tokenize it first"):
        qq.calibrate(one_linear(), ["hello"])


def test_what_cannot_be_calibrated():
    for model, batches, message in (
        (qq.convert(linears("fc"), "w4a16"), [1], "this model is a trainer; pass a rollout model"),
        (one_linear(residual=qq.ResidualConfig()), [normal(2, 64)], "nothing in this rollout is static"),
        (one_linear(), [], "batches must hold at least one batch, got none"),
        (one_linear(), [normal(0, 64)], r"no row reached 0\.weight in these batches"),
        (one_linear(activation_scale="static"), [normal(0, 64)], r"no row reached 0\.weight in these batches"),
    ):
        with pytest.raises(ValueError, match=message):
            qq.calibrate(model, batches)
    with pytest.raises(ValueError, match=r"scope='static' and was not calibrated; run quads_qat\.calibrate"):
        one_linear()(normal(2, 64))


def test_an_error_in_a_batch_leaves_the_rollout_as_it_was():
    model = one_linear(activation_scale="static")
    qq.calibrate(model, [normal(9, 64)])
    expected, before = model(normal(3, 64)), qq.quant_state_dict(model)
    with pytest.raises(ValueError, match="the last dim must be a multiple of 16"):
        qq.calibrate(model, [normal(9, 64, seed=1), normal(2, 3)])
    assert_same_bits(model(normal(3, 64)), expected)
    assert all(torch.equal(value, before[key]) for key, value in qq.quant_state_dict(model).items())
    assert isinstance(model[0], ResidualCompensatedLinear)
    assert "record" not in model[0].__dict__


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_batches_that_overflow_calibrate_nothing(value: float):
    model = one_linear(activation_scale="static")
    x = normal(3, 64)
    qq.calibrate(model, [x])
    before = qq.quant_state_dict(model)
    x[1, 5] = value
    with pytest.raises(ValueError, match=r"calibrate: 0\.weight: x holds 1 NaN or inf of 192 elements"):
        qq.calibrate(model, [x * 2])
    after = qq.quant_state_dict(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())


def test_a_compiled_rollout_is_calibrated_eagerly():
    eager, compiled = one_linear(), one_linear()
    qq.calibrate(eager, [normal(9, 64)])
    qq.calibrate(torch.compile(compiled, backend="eager"), [normal(9, 64)])
    assert_same_bits(compiled[0].residual_mask, eager[0].residual_mask)


def test_no_module_takes_the_place_of_the_function():
    for name in ("state", "quantize"):
        importlib.import_module(f"quads_qat.{name}")
    assert callable(copy.copy(qq.calibrate))
