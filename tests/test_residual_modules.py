"""Contract under test: packed modules compute what ``ops`` does for each GEMM; only a load changes a code."""

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bits import assert_same, assert_same_bits
from safetensors.torch import load_file, save_file
from small_modules import ListModel, fill
from tiny_models import tiny_inputs, tiny_model
from torch import Tensor, nn
from twins import experts_and_inputs, run_experts

import quads_qat as qq
from quads_qat import ops
from quads_qat.config import ActivationFormat, ActivationScale, ResidualConfig
from quads_qat.conversion import conversion_of
from quads_qat.convert import install, install_packed
from quads_qat.quantized_weights import quantize_weight
from quads_qat.residual import ResidualCompensatedExperts, ResidualCompensatedLinear
from quads_qat.select_weights import select

TOKEN = ActivationFormat()
MASK = torch.arange(64) % 3 == 0


def packed_linear(**arguments: object) -> ResidualCompensatedLinear:
    linear = fill(nn.Linear(64, 24))
    q = ops.quantize(linear.weight.detach().bfloat16())
    defaults = {"activation": TOKEN, "residual": ResidualConfig()}
    return ResidualCompensatedLinear(q, linear.bias, **{**defaults, **arguments})


def weight_only(model: nn.Module) -> nn.Module:
    """A copy of the trainer ``model`` with packed weights and untouched activations."""
    model = copy.deepcopy(model)
    _, conversion = conversion_of(model, "test")
    packed = {name: quantize_weight(model, conversion, weight) for name, weight in conversion.weights.items()}
    install_packed(model, conversion, packed, dict.fromkeys(packed), None, None)
    return model


def x_of(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).to(dtype)


# -------------------------------------------------------------------------------------------------------------- forward


def test_a_packed_linear_calls_the_op_of_its_formats():
    x, static = x_of(), ActivationFormat(scale=ActivationScale.STATIC)
    module = packed_linear()
    q, bias = module.packed(), module.bias.bfloat16()
    module.bias.data = bias
    assert_same_bits(module(x), ops.residual_linear(x, q, ResidualConfig(), bias))
    assert_same_bits(packed_linear(residual=None).bfloat16()(x), ops.linear_w4a4(x, q, bias))
    assert_same_bits(packed_linear(activation=None).bfloat16()(x), ops.linear_w4a16(x, q, bias))
    amax, config = torch.tensor(2.0), ResidualConfig(scope="static")
    module = packed_linear(activation=static, residual=config, input_amax=amax, residual_mask=MASK).bfloat16()
    expected = ops.residual_linear(x, q, config, bias, activation=static, input_amax=amax, mask=MASK)
    assert_same_bits(module(x), expected)


def test_its_weight_can_be_read_in_the_dtype_of_the_model():
    module = packed_linear()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert_same_bits(module.to(dtype).weight, ops.dequantize(module.packed(), dtype))
    assert "weight" not in module.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe", "gpt_oss", "nemotron_h", "llama4", "inkling"])
def test_weight_only_is_the_trainers_w4a16_forward_bit_for_bit(arch: str, dtype: torch.dtype):
    model = qq.convert(tiny_model(arch, dtype=dtype), "w4a16")
    rollout = weight_only(model)
    found, expected = (m(**tiny_inputs(model)).logits.detach() for m in (rollout, model))
    if arch in ("gpt_oss", "llama4", "inkling"):
        # Their own code is x @ W + b or a batched product, where ours is F.linear: other roundings of the same terms.
        limit = 2**-6 if dtype == torch.bfloat16 else 2**-18
        assert (found - expected).abs().max() <= limit * expected.abs().max()
    else:
        assert_same_bits(found, expected)


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
def test_a_rollout_gives_the_same_bits_in_inference_mode(arch: str):
    model = qq.convert(tiny_model(arch), "w4a4_residual")
    expected = model(**tiny_inputs(model)).logits
    with torch.inference_mode():
        assert_same_bits(model(**tiny_inputs(model)).logits, expected)


@pytest.mark.parametrize("scope", ["token", "batch"])
def test_each_projection_of_each_expert_compensates_its_own_rows(scope: str):
    experts, inputs = experts_and_inputs("qwen3_moe", "grouped_mm")
    config = ResidualConfig(fraction=0.25, scope=scope)
    model = qq.convert(nn.ModuleList([experts]), "w4a4_residual", residual=config)
    assert isinstance(model[0], ResidualCompensatedExperts)
    first, down = (model[0].packed(name) for name in ("gate_up_proj", "down_proj"))
    hidden, weights, index = inputs
    expected = torch.zeros_like(hidden)
    for e in range(4):
        slot, token = torch.where(index.t() == e)
        if token.numel():
            one = [qq.NVFP4Tensor(q.qdata[e], q.block_scale[e], q.per_tensor_scale[e], q.recipe, q.stored_scale[e])
                   for q in (first, down)]  # fmt: skip
            gate, up = ops.residual_linear(hidden[token].detach(), one[0], config).chunk(2, -1)
            y = ops.residual_linear(nn.functional.silu(gate) * up, one[1], config)
            expected = expected.index_add(0, token, y * weights[token, slot, None])
    assert_same_bits(run_experts(model[0], inputs).detach(), expected.detach())


@pytest.mark.parametrize("make", [ListModel, lambda: tiny_model("gpt_oss")], ids=["list", "fused"])
def test_a_rollout_is_near_its_trainer_and_nearer_with_more_compensation(make: Callable[[], nn.Module]):
    trainer = qq.convert(fill(make(), scale=0.2), "w4a16")
    x = torch.randn(4, 7, 32) if isinstance(trainer, ListModel) else tiny_inputs(trainer)

    def run(model: nn.Module) -> Tensor:
        return model(x) if isinstance(x, Tensor) else model(**x).logits.float()

    gaps = []
    for fraction in (0.0, 0.5, 1.0):
        rollout = qq.convert(copy.deepcopy(trainer), "w4a4_residual", residual=ResidualConfig(fraction=fraction))
        gaps.append((run(rollout) - run(trainer)).abs().mean().item())
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < gaps[0] / 4


def test_convert_has_the_default_of_half_the_channels_per_token_and_passes_choices_on():
    def first(**arguments: object) -> ResidualCompensatedLinear:
        model = qq.convert(fill(nn.Sequential(nn.Linear(64, 24))), "w4a16")
        with qq.observe_activations(model):
            model(x_of(torch.float32))
        return qq.convert(model, "w4a4_residual", **arguments)[0]

    assert (first().residual, first().activation) == (ResidualConfig(fraction=0.5, scope="token"), ActivationFormat())
    module = first(
        residual=ResidualConfig(fraction=0), activation_scale="static", activation_recipe="transformer-engine"
    )
    assert module.residual.fraction == 0
    assert module.activation == ActivationFormat(scale=ActivationScale.STATIC, recipe=qq.Recipe.TRANSFORMER_ENGINE)
    assert_same_bits(module.input_amax, x_of(torch.float32).abs().max())


# ---------------------------------------------------------------------------------------------- state, copies and moves

CAST = {
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.bfloat16(),
    "float": lambda m: m.float(),
    "double": lambda m: m.double(),
    "to": lambda m: m.to(torch.float16),
    "to a device and a dtype": lambda m: m.to("cpu", torch.bfloat16),
    "type": lambda m: m.type(torch.float16),
    "there and back": lambda m: m.half().bfloat16().float(),
}


def full_module() -> nn.Module:
    static = ActivationFormat(scale=ActivationScale.STATIC)
    return packed_linear(
        activation=static,
        residual=ResidualConfig(scope="static"),
        input_amax=torch.tensor(2.3456789),
        residual_mask=MASK.clone(),
    )


@pytest.mark.parametrize("cast", CAST)
@pytest.mark.parametrize("inside", [False, True])
def test_a_change_of_dtype_touches_no_code_no_scale_no_mask(cast: str, inside: bool):
    module = full_module()
    before = {name: buffer.clone() for name, buffer in module.state_dict().items() if name != "bias"}
    CAST[cast](nn.Sequential(module) if inside else module)
    for name, buffer in before.items():
        assert_same_bits(module.state_dict()[name], buffer, name)
    expected = {"there and back": torch.float32, "to": torch.float16, "type": torch.float16, "half": torch.float16}
    assert module.bias.dtype == expected.get(cast, getattr(torch, cast, torch.bfloat16))


def test_experts_keep_their_codes_too():
    model = qq.convert(tiny_model("gpt_oss"), "w4a4_residual")
    experts = next(m for m in model.modules() if isinstance(m, ResidualCompensatedExperts))
    before = {name: copy.deepcopy(experts.packed(name)) for name in ("gate_up_proj", "down_proj")}
    model.float()
    for name, q in before.items():
        assert_same(experts.packed(name), q)
    assert experts.gate_up_proj_bias.dtype == torch.float32
    assert model(**tiny_inputs(model)).logits.dtype == torch.float32


@pytest.mark.parametrize("through_file", [False, True])
@pytest.mark.parametrize("arch", ["list", "qwen2_moe", "gpt_oss"])
def test_a_state_dict_round_trips_also_through_safetensors(arch: str, through_file: bool, tmp_path: Path):
    def make(seed: int) -> nn.Module:
        return qq.convert(fill(ListModel(), seed) if arch == "list" else tiny_model(arch, seed=seed), "w4a4_residual")

    def run(model: nn.Module) -> Tensor:
        return model(torch.ones(2, 3, 32)) if arch == "list" else model(**tiny_inputs(model)).logits

    model, other = make(1), make(2)
    expected = run(model)
    assert not torch.equal(run(other), expected)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if through_file:
        save_file(model.state_dict(), tmp_path / "model.safetensors")  # refuses tensors that share memory
        state = load_file(tmp_path / "model.safetensors")
    places = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    other.load_state_dict(state, strict=True)
    assert_same_bits(run(other), expected)
    assert {name: tensor.data_ptr() for name, tensor in other.state_dict().items()} == places


def test_a_state_dict_brings_a_static_scale_and_a_mask_to_a_module_without():
    full, empty = full_module(), packed_linear()
    empty.load_state_dict(full.state_dict(), strict=True)
    assert_same_bits(empty.input_amax, full.input_amax)
    assert_same_bits(empty.residual_mask, full.residual_mask)
    with pytest.raises(RuntimeError, match="Missing key"):
        full.load_state_dict(packed_linear().state_dict(), strict=True)


@pytest.mark.parametrize("other", ["modelopt", "llm-compressor", "transformer-engine"])
def test_a_state_dict_of_another_recipe_is_refused(other: str):
    model = qq.convert(tiny_model("qwen3_moe"), "w4a4_residual")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = qq.convert(tiny_model("qwen3_moe", seed=1), "w4a4_residual", recipe=other).state_dict()
    with pytest.raises(
        RuntimeError, match=r"q_proj.weight: its per-tensor scale is no power of two.*nothing was loaded"
    ):
        model.load_state_dict(state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
@pytest.mark.parametrize("what", ["scale", "shape", "missing", "norm"])
def test_a_state_dict_with_one_tensor_that_does_not_fit_changes_nothing(what: str, again: Callable):
    model = again(qq.convert(tiny_model("qwen3_moe"), "w4a4_residual"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = dict(qq.convert(tiny_model("qwen3_moe", seed=1), "w4a4_residual").state_dict())
    name = "model.layers.1.mlp.experts.down_proj_per_tensor_scale"
    if what == "scale":
        state[name] = state[name] * 1.5
    elif what == "missing":
        del state[name]
    else:
        name = "model.norm.weight" if what == "norm" else name
        state[name] = torch.cat([state[name], state[name]])
    with pytest.raises(RuntimeError, match=re.escape(name.removesuffix("_per_tensor_scale")) + ".*nothing was loaded"):
        model.load_state_dict(state, strict=what != "missing")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_static_mask_of_another_fraction_is_refused():
    models = [
        qq.convert(tiny_model("qwen3_moe"), "w4a4_residual", residual=ResidualConfig(fraction=f, scope="static"))
        for f in (0.25, 0.75)
    ]
    few, many = models
    qq.calibrate(few, [tiny_inputs(few)])
    with pytest.raises(
        RuntimeError, match=r"residual_mask: the mask selects \d+ of \d+ channels, fraction=0.75 is \d+"
    ):
        many.load_state_dict(few.state_dict())
    with pytest.raises(ValueError, match=r"mask: the mask selects \d+ of \d+ channels, fraction=0.75 is \d+"):
        qq.load_quant_state_dict(many, qq.quant_state_dict(few))
    qq.calibrate(many, [tiny_inputs(many)])
    many.load_state_dict(many.state_dict())


def test_a_deep_copy_is_independent():
    module = full_module()
    twin, x = copy.deepcopy(module), x_of(torch.float32)
    expected = module(x)
    module.weight_qdata.zero_()
    module.weight_block_scale.view(torch.uint8).zero_()
    assert_same_bits(twin(x), expected)
    assert twin.weight_block_scale.dtype == torch.float8_e4m3fn


def scaled(q: qq.NVFP4Tensor, scale: Tensor) -> qq.NVFP4Tensor:
    return qq.NVFP4Tensor(q.qdata, q.block_scale, scale, q.recipe, scale.clone())


@pytest.mark.parametrize("shape", [(), (4,), (4, 48, 1)], ids=str)
def test_new_weights_are_loaded_in_place_whatever_the_shape_of_their_scale(shape: tuple[int, ...]):
    module = qq.convert(nn.ModuleList([tiny_model("qwen3_moe").model.layers[0].mlp.experts]), "w4a4_residual")[0]
    weight = torch.randn(4, 48, 16).transpose(1, 2).contiguous().transpose(1, 2)
    module.set_packed("up", ops.quantize(torch.zeros(4, 48, 16), tensor_amax=torch.zeros(shape)))
    module.refreshed = []
    module.refresh = module.refreshed.append
    places = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    q = ops.quantize(weight, tensor_amax=torch.tensor(3.0))
    for form in ((), (4,), (4, 48, 1)):
        module.load_packed("up", scaled(q, q.per_tensor_scale.expand(form)))
        assert_same(module.packed("up"), scaled(q, q.per_tensor_scale.expand(shape)))
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == places
    assert module.refreshed == ["up"] * 3
    module.load_state_dict(module.state_dict())
    assert set(module.refreshed[3:]) == {"up", "gate_up_proj", "down_proj"}
    per_expert, per_row = torch.tensor([1.0, 1, 2, 1]), torch.ones(4, 48, 1)
    per_row[3, 40] = 4.0
    for form, fits in ((per_expert, shape != ()), (per_row, len(shape) == 3)):
        if fits:
            module.load_packed("up", scaled(q, form))
            rows = form if form.ndim == 3 else form.view(4, 1, 1)
            assert torch.equal(module.packed("up").per_tensor_scale, rows.expand(4, 48, 1) if len(shape) == 3 else form)
        else:
            before = copy.deepcopy(module.packed("up"))
            with pytest.raises(
                ValueError, match=r"up has one per-tensor scale .* for parts that came with different ones"
            ):
                module.load_packed("up", scaled(q, form))
            assert_same(module.packed("up"), before)


def test_load_packed_refuses_another_shape_and_another_recipe():
    module = packed_linear()
    before = copy.deepcopy(module.packed())
    other = ops.quantize(torch.ones(24, 64), recipe="modelopt")
    for q, message in (
        (
            ops.quantize(torch.ones(24, 32)),
            r"weight must be \(24, 64\) of recipe 'aligned', got \(24, 32\) of 'aligned'",
        ),
        (other, r"weight must be \(24, 64\) of recipe 'aligned', got \(24, 64\) of 'modelopt'"),
    ):
        with pytest.raises(ValueError, match=message):
            module.load_packed("weight", q)
        assert_same(module.packed(), before)


@pytest.mark.parametrize("arch", ["qwen3_moe", "qwen2_moe", "gpt_oss", "nemotron_h"])
def test_a_rollout_holds_at_most_0_58_bytes_per_quantized_weight(arch: str):
    model = tiny_model(arch)
    before = sum(p.nbytes for p in model.parameters())
    qq.convert(model, "w4a4_residual")
    elements = sum(count for count, _ in qq.coverage(model).quantized.values())
    assert sum(t.nbytes for t in model.state_dict().values()) - (before - 2 * elements) <= 0.58 * elements


def test_packed_weights_take_at_most_0_57_bytes_per_element():
    model = tiny_model("qwen3_moe")
    elements = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    qq.convert(model, "w4a4_residual", scope="experts")
    held = sum(b.nbytes for n, b in model.state_dict().items() if ".experts." in n)
    assert held <= 0.57 * elements


def test_modules_can_be_built_on_meta_and_filled():
    model = tiny_model("qwen3_moe")
    expected = qq.convert(copy.deepcopy(model), "w4a4_residual")
    with torch.device("meta"):
        empty = copy.deepcopy(model).to("meta")
    conversion = select(empty)
    packed = {
        n: q.to("meta") for n, w in conversion_of(qq.convert(model, "w4a16"), "test")[1].weights.items()
        for q in [quantize_weight(model, conversion_of(model, "test")[1], w)]
    }  # fmt: skip
    install(empty, conversion)
    install_packed(empty, conversion, packed, dict.fromkeys(packed), TOKEN, ResidualConfig())
    empty.load_state_dict(expected.state_dict(), strict=True, assign=True)
    kept = {name: b for name, b in expected.named_buffers() if name not in expected.state_dict()}
    for name, buffer in kept.items():
        owner, _, leaf = name.rpartition(".")
        empty.get_submodule(owner)._buffers[leaf] = buffer
    assert_same_bits(empty(**tiny_inputs(model)).logits, expected(**tiny_inputs(model)).logits)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fraction": -0.1}, "fraction must be between 0 and 1, got -0.1"),
        ({"fraction": 1.1}, "fraction must be between 0 and 1, got 1.1"),
        ({"fraction": float("nan")}, "fraction must be between 0 and 1, got nan"),
        ({"fraction": "half"}, "fraction must be between 0 and 1, got 'half'"),
        ({"scope": "row"}, "ResidualScope: unknown value 'row'; choose one of batch, token, block, static"),
        ({"norm": "l3"}, "ResidualNorm: unknown value 'l3'; choose one of l2, l1, max"),
        ({"granularity": 8}, "granularity must be 1 or 16, got 8"),
        ({"scope": "block", "granularity": 16}, "scope='block' ranks channels inside a block; use granularity=1"),
    ],
)
def test_a_residual_config_refuses_what_it_does_not_know(arguments: dict, message: str):
    with pytest.raises(ValueError, match=re.escape(message)):
        ResidualConfig(**arguments)


STATIC_SCALE = ActivationFormat(scale=ActivationScale.STATIC)


@pytest.mark.parametrize(
    ("x", "arguments", "error", "message"),
    [
        (
            torch.ones(2, 48),
            {},
            ValueError,
            "weight must be [N, K] with x's K, got x.shape=(2, 48) and weight (24, 64)",
        ),
        (torch.ones(2, 40), {}, ValueError, "the last dim must be a multiple of 16"),
        (torch.ones(2, 64).int(), {}, TypeError, "x must be float32, bfloat16 or float16, got torch.int32"),
        (torch.ones(2, 64) / 0, {}, ValueError, "residual_linear: x holds 128 NaN or inf of 128 elements"),
        (
            torch.ones(2, 64),
            {"activation": STATIC_SCALE},
            ValueError,
            "activation_scale='static' and was not calibrated; run quads_qat.calibrate(rollout, batches)",
        ),
        (
            torch.ones(2, 64),
            {"residual": ResidualConfig(scope="static")},
            ValueError,
            "scope='static' and was not calibrated",
        ),
        (
            torch.ones(2, 64),
            {"residual": ResidualConfig(scope="static"), "residual_mask": torch.ones(32, dtype=torch.bool)},
            ValueError,
            "mask must be bool [K=64], got torch.bool (32,)",
        ),
        (
            torch.ones(2, 64),
            {"residual": ResidualConfig(scope="static"), "residual_mask": torch.ones(64)},
            ValueError,
            "mask must be bool [K=64], got torch.float32 (64,)",
        ),
    ],
)
def test_a_packed_linear_refuses_wrong_input(x: Tensor, arguments: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=re.escape(message)):
        packed_linear(**arguments)(x)


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize(
    "options",
    [
        {"weights_only": True},
        {"residual": ResidualConfig(fraction=0.0)},
        {"residual": ResidualConfig(scope="token")},
        {"residual": ResidualConfig(scope="batch")},
        {"residual": ResidualConfig(scope="batch", expert_mask="before_dispatch")},
    ],
    ids=["w4a16", "w4a4", "token", "batch", "before dispatch"],
)
def test_grouped_gemms_give_what_the_experts_give_one_by_one(arch: str, options: dict, monkeypatch):
    """With one expert a token there is no sum over experts, whose order differs."""
    model = tiny_model(arch)
    qq.convert(model, "w4a4_residual", **options)
    experts = next(m for m in model.modules() if isinstance(m, ResidualCompensatedExperts))
    k = experts.packed(experts.layout.first[0]).shape[-1]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, k, generator=generator).to(next(model.parameters()).dtype)
    index = torch.randint(0, 3, (9, 1), generator=generator)  # the last expert has no rows
    weights = torch.rand(9, 1, generator=generator).to(x.dtype)
    expected = experts(x, index, weights)
    monkeypatch.setattr(ResidualCompensatedExperts, "grouped_on", staticmethod(lambda x: True))
    monkeypatch.setattr("quads_qat.residual.experts_loop", None)
    assert_same_bits(experts(x, index, weights), expected)
