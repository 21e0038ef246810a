"""Contract under test: LoRA on fused experts (PEFT's target_parameters) multiplies by Q(W + s B A) under every dispatch
and layout, trains the factors alone, and is exported bit for bit.
"""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapter_training import ids, train
from bits import assert_same_bits
from tiny_models import tiny_inputs, tiny_model
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from twins import assert_equal_tensors, experts_and_inputs, plain_twin, run_experts

pytest.importorskip("peft", reason="needs peft (the extra dev brings it)")

from peft import LoraConfig, PeftModel, get_peft_model

import quads_qat as qq
from quads_qat import adapters
from quads_qat.adapters import Factors
from quads_qat.config import WeightFormat
from quads_qat.experts import W4A16Experts
from quads_qat.integrations.peft import QuantizedLoraExperts, QuantizedLoraLinear, lora_config, merged, quantize_merged
from quads_qat.integrations.peft_layers import QuantizedLora

PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS = {"target_modules": ["q_proj", "v_proj"], "target_parameters": PARAMETERS}
RECIPE = qq.Recipe.MODELOPT  # with powers of two (aligned) another amax seldom shows in the weights
ORDERS = pytest.mark.parametrize("order", ["convert first", "peft first"])
DISPATCHES = pytest.mark.parametrize("dispatch", ["eager", "grouped_mm"])


def base_model(dispatch: str = "grouped_mm", dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return tiny_model("qwen3_moe", dtype=dtype, experts_implementation=dispatch)


def trainer(
    order: str = "convert first", dispatch: str = "grouped_mm", dtype: torch.dtype = torch.bfloat16
) -> PeftModel:
    """A converted model with adapters on attention and experts."""
    if order == "convert first":
        model = qq.convert(base_model(dispatch, dtype), "w4a16", recipe=RECIPE)
        model = get_peft_model(model, lora_config(**TARGETS, r=4))
    else:
        model = get_peft_model(base_model(dispatch, dtype), LoraConfig(**TARGETS, r=4))
        model = quantize_merged(qq.convert(model, "w4a16", recipe=RECIPE))
    return randomized(model)


def randomized(model: nn.Module, seed: int = 0) -> nn.Module:
    """Factors with few bits: B A and its sums are exact in fp32 in any order, and in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            with torch.no_grad():
                parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator) / 16)
    return model


def expert_layers(model: nn.Module) -> dict[str, QuantizedLoraExperts]:
    found = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLoraExperts)}
    assert found
    return found


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids()).logits


def with_merged_weights(base: nn.Module, model: nn.Module) -> nn.Module:
    """``base``, a converted model without adapters, with the masters of ``model`` and PEFT's own products added."""
    for layer in model.modules():
        if isinstance(layer, QuantizedLora):
            parameter = layer.get_param()
            full = next(
                full for m, p, full in _members(layer) if (m, p) == (layer.get_base_layer(), layer.parameter_name)
            )
            total = parameter.detach().float()
            for name in layer.active_adapters:
                total = total + layer.get_delta_weight(name).detach().float().view_as(total)
            with torch.no_grad():
                base.get_parameter(full).copy_(total)
    return base


def _members(layer: QuantizedLora) -> list[tuple[nn.Module, str, str]]:
    base = layer.get_base_layer()
    groups = base.scale_groups if isinstance(base, W4A16Experts) else {"weight": base.scale_group}
    return groups[layer.parameter_name].members


# -------------------------------------------------------------------------------------------------------------- forward

LAYOUTS = [
    *(("qwen3_moe", dispatch) for dispatch in ("eager", "batched_mm", "grouped_mm")),
    *(("gpt_oss", dispatch) for dispatch in ("eager", "grouped_mm")),  # [E, K, N], biases, one scale for all experts
    ("llama4", "eager"),  # [E, K, N] that PEFT takes for [E, N, K], sorted tokens
    ("aria", "grouped_mm"),  # [E, K, N], a scale for each expert
    ("step3p7", "eager"),  # gate and up apart, with one scale
]


@pytest.mark.parametrize(("arch", "dispatch"), LAYOUTS)
def test_every_layout_multiplies_by_the_quantized_merged_weight(arch: str, dispatch: str):
    def converted() -> nn.Module:
        return qq.convert(tiny_model(arch, experts_implementation=dispatch), "w4a16", recipe=RECIPE)

    model = converted()
    names = [
        f"{name}.{p}" for name, m in model.named_modules() if isinstance(m, W4A16Experts) for p in m.layout.parameters
    ]
    model = randomized(get_peft_model(model, lora_config(target_modules=[], target_parameters=names, r=4)))
    assert len(expert_layers(model)) == len(names) > 1
    whole = with_merged_weights(converted(), model)
    twin = plain_twin(whole, recipe=RECIPE)
    inputs = tiny_inputs(whole)
    with torch.no_grad():
        assert_same_bits(model(**inputs).logits, twin(**inputs).logits)
        assert not torch.equal(model(**inputs).logits, converted()(**inputs).logits)
    base = model.merge_and_unload()
    for name in names:
        assert_same_bits(base.get_parameter(name).detach(), whole.get_parameter(name).detach(), name)


@ORDERS
@DISPATCHES
def test_attention_and_experts_together_in_either_order(order: str, dispatch: str):
    model = trainer(order, dispatch)
    assert len(expert_layers(model)) == 4
    assert sum(isinstance(m, QuantizedLoraLinear) for m in model.modules()) == 4
    whole = with_merged_weights(qq.convert(base_model(dispatch), "w4a16", recipe=RECIPE), model)
    assert_same_bits(logits(model), logits(plain_twin(whole, recipe=RECIPE)))
    with qq.full_precision(model), qq.full_precision(whole):
        assert_same_bits(logits(model), logits(whole))
        assert_same_bits(logits(model), logits(qq.revert(copy.deepcopy(whole))))


def test_peft_first_leaves_the_record_of_convert_first():
    found = [qq.coverage(trainer(order)) for order in ("convert first", "peft first")]
    assert found[0].quantized == found[1].quantized
    assert found[0].groups == found[1].groups
    assert {s.module for s in found[0].skipped} == {s.module for s in found[1].skipped}
    assert not any("lora" in name or "base_layer" in name for name in found[1].quantized)


def test_a_stack_is_merged_in_pieces_with_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 32, 48, generator=generator)
    factors = [Factors(*(torch.randint(-3, 4, s, generator=generator) / 8 for s in ((5, 2, 48), (5, 32, 2))), 0.5)]
    whole = adapters.merge(weight, factors)
    assert_same_bits(whole, weight + (factors[0].b @ factors[0].a) * 0.5)
    for piece in (1, 2 * 32 * 48, 3 * 32 * 48 + 1):
        monkeypatch.setattr(adapters, "_PIECE", piece)
        assert_same_bits(adapters.merge(weight, factors), whole)


# ------------------------------------------------------------------------------------------------------------ gradients


@pytest.mark.parametrize("piece", [1, 1 << 24])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_are_straight_through_to_every_factor(
    frozen: bool, transposed: bool, piece: int, monkeypatch: pytest.MonkeyPatch
):
    # integers, so that every sum is exact in fp32 whatever its order
    def integers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).float()

    monkeypatch.setattr(adapters, "_PIECE", piece)
    generator = torch.Generator().manual_seed(0)
    offs = torch.tensor([0, 4, 4, 9], dtype=torch.int32)  # the first and the third expert have no rows
    x, grad = integers(9, 32), integers(9, 16)
    shape = (4, 32, 16) if transposed else (4, 16, 32)
    weight = integers(*shape)
    pairs = [(integers(4, r, shape[2]), integers(4, shape[1], r)) for r in (2, 3)]
    leaves = [x, weight, *(t for pair in pairs for t in pair)]
    for leaf in leaves:
        leaf.requires_grad_(not (frozen and leaf is weight))
    factors = [Factors(a, b, 0.5) for a, b in pairs]
    fmt = WeightFormat(export_dtype=torch.bfloat16, transposed=transposed, per_expert=True)
    amax = adapters.merge(weight, factors).abs().amax((1, 2)).bfloat16()

    def gradients(out: Tensor) -> list[Tensor | None]:
        for leaf in leaves:
            leaf.grad = None
        out.backward(grad)
        return [leaf.grad for leaf in leaves]

    def reference(whole: Tensor) -> Tensor:
        quantized = qq.fake_quantize_ste(whole, fmt=fmt, amax=amax)
        rows = x.tensor_split(offs[:-1].tolist())
        return torch.cat([r @ (q if transposed else q.t()) for r, q in zip(rows, quantized, strict=True)])

    expected = reference(weight + sum((b @ a) * 0.5 for a, b in pairs))
    for out in (
        adapters.merged_grouped_linear(x, weight, offs, factors, amax, fmt),
        reference(adapters.merged_stack(weight, factors)),
    ):
        assert_same_bits(out.detach() + 0.0, expected.detach() + 0.0)  # a zero's sign depends on the order of a sum
        for got, wanted in zip(gradients(out), gradients(expected), strict=True):
            assert (got is None) == (wanted is None)
            if wanted is not None:
                assert_same_bits(got + 0.0, wanted + 0.0)
        expected = reference(weight + sum((b @ a) * 0.5 for a, b in pairs))


@DISPATCHES
@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
def test_gradients_of_a_module_are_those_of_its_merged_weight(arch: str, dispatch: str):
    """The base is trained too, for its gradient: that of the merged stack, which the factors' follow from."""
    experts, inputs = experts_and_inputs(arch, dispatch)  # expert 0 gets no token
    converted = qq.convert(nn.ModuleDict({"experts": experts}), "w4a16")
    targets = [f"experts.{name}" for name in converted["experts"].layout.parameters]
    plain = copy.deepcopy(converted)
    model = randomized(get_peft_model(converted, lora_config(target_modules=[], target_parameters=targets, r=4)))
    whole = with_merged_weights(plain, model)
    layers = expert_layers(model)
    found, expected = {}, {}
    for module, results in ((next(iter(layers.values())), found), (whole["experts"], expected)):
        module.requires_grad_(True)
        out = run_experts(module, inputs)
        parameters = dict(module.named_parameters())
        grads = torch.autograd.grad(out.float().square().sum(), [*inputs[:2], *parameters.values()])
        results |= dict(zip(["hidden", "weights", *parameters], grads, strict=True)) | {"out": out.detach()}
    renamed = {n.replace("base_layer.", ""): g for n, g in found.items() if "lora" not in n}
    assert_equal_tensors(renamed, expected)
    for layer in layers.values():
        prefix = "base_layer." if layer is not next(iter(layers.values())) else ""  # nested in the other
        a, b = (linears["default"].weight.detach().double() for linears in (layer.lora_A, layer.lora_B))
        grad = expected[layer.parameter_name].double()
        exact = gradients_of_factors(layer, a, b, grad)
        sizes = gradients_of_factors(layer, a.abs(), b.abs(), grad.abs())
        # a sum of n products in fp32, in any order, is off by n 2**-24 of their sizes at most; s is a power of two
        for name, wanted, size in zip(("lora_A", "lora_B"), exact, sizes, strict=True):
            got = found[f"{prefix}{name}.default.weight"]
            assert got.dtype == torch.float32
            assert bool(((got - wanted).abs() <= max(grad.shape) * 2**-24 * size).all()), f"{prefix}{name}"
            assert bool((got != 0).any())


def gradients_of_factors(layer: QuantizedLoraExperts, a: Tensor, b: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """By PEFT's formula of the update (``ParamWrapper.get_delta_weight``), in the factors' dtype."""
    leaves = a.requires_grad_(), b.requires_grad_()
    a, b = a.reshape(layer.num_experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, layer.num_experts)
    order = "eoi" if layer._did_swap_in_out_features else "eio"
    return torch.autograd.grad(torch.einsum(f"ore,eri->{order}", b, a) * layer.scaling["default"], leaves, grad)


@DISPATCHES
def test_forward_keeps_inputs_factors_and_base_weights_only(dispatch: str):
    model = trainer(dispatch=dispatch)
    layer = next(iter(expert_layers(model).values()))
    inputs = experts_and_inputs("qwen3_moe", dispatch)[1]
    known = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    stack = min(layer.get_base_layer().get_parameter(name).numel() for name in ("gate_up_proj", "down_proj"))

    def kept(run: nn.Module) -> list[Tensor]:
        """What a backward will be given: hooks of the module's own forward are in front of these."""
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
            run_experts(run, inputs)
        return saved

    for context in (None, qq.full_precision):
        if context is None:
            saved = kept(layer)
        else:
            with context(model):
                saved = kept(layer)
        others = [t for t in saved if t.untyped_storage().data_ptr() not in known]
        assert others
        # rows of activations; the loop over experts cuts stacks into views, so storages count
        assert all(t.untyped_storage().nbytes() < 2 * stack for t in others), context


@DISPATCHES
def test_a_factor_that_changes_before_backward_is_an_error(dispatch: str):
    model = trainer(dispatch=dispatch)
    loss = model(input_ids=ids(), labels=ids()).loss
    with torch.no_grad():
        for layer in expert_layers(model).values():
            layer.lora_B["default"].weight.add_(1)
    message = {"eager": "an expert weight was changed in place", "grouped_mm": "modified by an inplace operation"}
    with pytest.raises(RuntimeError, match=message[dispatch]):
        loss.backward()


@DISPATCHES
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_gradient(dispatch: str, reentrant: bool):
    model = trainer(dispatch=dispatch)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(input_ids=ids(), labels=ids()).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    model.train()
    model.enable_input_require_grads()
    expected = gradients()
    assert expected.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients()
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert_same_bits(found[name], gradient, name)


# ------------------------------------------------------------------------------------------------- trained and exported


@pytest.mark.parametrize(("order", "dtype"), [("convert first", torch.float32), ("peft first", torch.bfloat16)])
def test_what_was_trained_is_exported_bit_for_bit(order: str, dtype: torch.dtype, tmp_path: Path):
    model = trainer(order, dtype=dtype)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == {name for name, _ in model.named_parameters() if "lora_" in name}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model, 3)
    assert losses[-1] < losses[0]
    assert {n for n, p in model.named_parameters() if not torch.equal(p, before[n])} == trainable
    expected = logits(model)
    used = {
        f"{n.replace('.base_layer', '').removeprefix('base_model.model.')}.{p}": m._quantized(p, m.source(p)).detach()
        for n, m in model.named_modules()
        if isinstance(m, W4A16Experts)
        for p in m.layout.parameters
    }
    with merged(model) as plain:
        assert not any("lora" in name or "base_layer" in name for name in plain.state_dict())
        streamed = dict(qq.export_weights(plain, "modelopt"))
        qq.export_checkpoint(plain, tmp_path / "merged", dialect="modelopt")
        assert qq.verify(plain, tmp_path / "merged")
    assert_same_bits(logits(model), expected)
    layers = expert_layers(model)
    unloaded = model.merge_and_unload()
    assert all(not layer.get_base_layer().__dict__["adapted"] for layer in layers.values())
    assert_same_bits(logits(unloaded), expected)
    qq.export_checkpoint(unloaded, tmp_path / "unloaded", dialect="modelopt")
    assert list(qq.diff(tmp_path / "merged", tmp_path / "unloaded")) == []
    again = dict(qq.export_weights(unloaded, "modelopt"))
    assert streamed.keys() == again.keys()
    assert all(torch.equal(streamed[n].view(torch.uint8), again[n].view(torch.uint8)) for n in again if again[n].ndim)
    loaded = qq.load_model(tmp_path / "unloaded", dtype=dtype)
    for name, weight in used.items():
        assert_same_bits(loaded.get_parameter(name).detach(), weight, name)


def test_step_tracks_the_codes_of_merged_weights_and_held_scales_are_theirs():
    model = qq.convert(base_model(), "w4a16", recipe=RECIPE, schedule=qq.Schedule(weight_scale="frozen"))
    model = randomized(get_peft_model(model, lora_config(**TARGETS, r=4)))
    qq.step(model, track_codes=True)
    assert qq.step(model, track_codes=True).changed == 0
    experts = next(iter(expert_layers(model).values())).get_base_layer()
    with merged(model):
        whole = experts.get_parameter("down_proj").detach().abs().amax((1, 2))
        held = experts.amax("down_proj")
    assert_same_bits(held, whole)
    randomized(model, 3)
    report = qq.step(model, track_codes=True)
    changed = {name for name, (share, _) in report.by_weight.items() if share}
    assert {name for name in report.by_weight if "experts" in name} <= changed
    assert_same_bits(experts.amax("down_proj"), whole)


@DISPATCHES
def test_disabled_adapters_are_the_base_policy_also_while_codes_are_kept(dispatch: str):
    expected = logits(qq.convert(base_model(dispatch), "w4a16", recipe=RECIPE))
    model = trainer(dispatch=dispatch)
    adapted = logits(model)
    assert not torch.equal(expected, adapted)
    with qq.accumulate(model):
        assert_same_bits(logits(model), adapted)
        with model.disable_adapter():
            assert_same_bits(logits(model), expected)
        assert_same_bits(logits(model), adapted)
    for exported in (False, True):
        model.merge_adapter()
        with model.disable_adapter():  # as in PEFT, this unmerges
            if exported:
                with merged(model) as plain:
                    dict(qq.export_weights(plain, "modelopt"))
                    assert_same_bits(logits(plain), expected)
            assert_same_bits(logits(model), expected)
        assert_same_bits(logits(model), adapted)
    assert_same_bits(logits(model.unload()), expected)


def test_observed_activations_are_those_of_the_merged_model():
    model = trainer()
    whole = with_merged_weights(qq.convert(base_model(), "w4a16", recipe=RECIPE), model)
    for context in (None, qq.full_precision):
        amaxes = []
        for m in (model, whole):
            with qq.observe_activations(m):
                if context is None:
                    logits(m)
                else:
                    with context(m):
                        logits(m)
            experts = [e for e in m.modules() if isinstance(e, W4A16Experts)]
            amaxes.append(torch.stack([o.amax for e in experts for o in e.observers.values()]))
        assert_same_bits(*amaxes)


# ----------------------------------------------------------------------------------------------- adapters, one and many


def test_several_adapters_are_merged_and_unmerged_bit_for_bit():
    model = trainer()
    one = logits(model)
    model.add_adapter("second", lora_config(**TARGETS, r=2, lora_alpha=3))
    assert len(expert_layers(model)) == 4  # no new layers
    assert_same_bits(logits(model), one)
    randomized(model, 1)
    model.base_model.set_adapter(["default", "second"])
    both = logits(model)
    assert not torch.equal(both, one)
    whole = with_merged_weights(qq.convert(base_model(), "w4a16", recipe=RECIPE), model)
    assert_same_bits(both, logits(plain_twin(whole, recipe=RECIPE)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.merge_adapter()
    assert_same_bits(logits(model), both)
    model.unmerge_adapter()
    for name in ("second", "default"):  # one after the other: the same sum
        model.base_model.merge_adapter([name])
    assert_same_bits(logits(model), both)
    model.unmerge_adapter()
    with merged(model):
        pass
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter.detach(), before[name], name)
    model.delete_adapter("second")
    assert not any("second" in name for name in model.state_dict())
    whole = with_merged_weights(qq.convert(base_model(), "w4a16", recipe=RECIPE), model)
    assert_same_bits(logits(model), logits(whole))


def test_a_broken_adapter_is_not_merged_safely():
    model = trainer()
    layer = next(iter(expert_layers(model).values()))
    before = layer.get_param().detach().clone()
    with torch.no_grad():
        layer.lora_B["default"].weight[0, 0] = float("inf")
    with pytest.raises(ValueError, match="NaN or inf"):
        layer.merge(safe_merge=True)
    assert not layer.merged
    assert_same_bits(layer.get_param().detach(), before)


def test_adapters_are_saved_and_loaded_by_peft_under_its_names(tmp_path: Path):
    model = trainer()
    plain = get_peft_model(base_model(), LoraConfig(**TARGETS, r=4))
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.save_pretrained(tmp_path)
    expected = logits(model)
    for given in (lora_config(**TARGETS, r=4), None):
        base = qq.convert(base_model(), "w4a16", recipe=RECIPE)
        loaded = PeftModel.from_pretrained(base, tmp_path, config=given)
        if given is None:  # the saved config makes PEFT's own layers
            with pytest.raises(RuntimeError, match=r"experts.* is no parameter of its module .*quantize_merged"):
                logits(loaded)
            with pytest.raises(ValueError, match="does not train a quantized merged weight"), merged(loaded):
                pass
            quantize_merged(loaded)
        assert_same_bits(logits(loaded), expected)


def test_copies_and_pickles_stand_on_their_own():
    model = trainer()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    expected = logits(model)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert_same_bits(logits(other), expected)
        randomized(other, 7)
        assert not torch.equal(logits(other), expected)
        assert_same_bits(logits(model), expected)


def test_one_graph_with_the_eager_bits_that_keeps_no_merged_stack():
    torch._dynamo.reset()
    counters.clear()
    experts, inputs = experts_and_inputs("qwen3_moe", "grouped_mm")
    block = qq.convert(nn.ModuleDict({"experts": experts}), "w4a16")
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    model = randomized(get_peft_model(block, lora_config(target_modules=[], target_parameters=targets, r=4)))
    layer = model.get_base_model()["experts"]
    graphs = []

    def compiler(module: fx.GraphModule, _: Any) -> Any:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler))
    leaves = [*inputs[:2], *(p for p in layer.parameters() if p.requires_grad)]
    assert len(leaves) == 6
    for _ in range(2):
        grads = []
        for run in (layer, compiled):
            out = run_experts(run, inputs)
            grads.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)])
        for got, wanted in zip(*grads, strict=True):
            assert_same_bits(got, wanted)
        with torch.no_grad():
            for parameter in leaves[2:]:
                parameter.sub_(parameter.sign(), alpha=0.01)
    assert counters["stats"]["unique_graphs"] == 1
    assert len(graphs) == 2
    assert sum("merge_adapters" in str(node.target) for node in graphs[1].nodes) == 2
    (output,) = (node for node in graphs[0].nodes if node.op == "output")
    stack = min(p.numel() for p in layer.get_base_layer().parameters())
    kept = [n for n in output.all_input_nodes if isinstance(t := n.meta.get("val"), Tensor) and t.numel() >= stack]
    assert len(kept) == 2
    assert all((n.args[0] if "detach" in str(n.target) else n).op == "placeholder" for n in kept)


# ------------------------------------------------------------------------------------------------------------- refusals


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
def test_what_cannot_be_merged_before_quantizing_is_refused(options: dict, message: str):
    config = {"target_modules": [], "target_parameters": PARAMETERS} | options
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
        get_peft_model(qq.convert(base_model(), "w4a4"), lora_config(target_modules=[], target_parameters=PARAMETERS))
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
        get_peft_model(qq.load_rollout(tmp_path / "packed", weights_only=True), lora_config(**TARGETS))
    alone = lora_config(target_modules=[], target_parameters=PARAMETERS)
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
