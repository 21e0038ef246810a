"""Contract under test: LoRA on fused experts (PEFT's target_parameters) multiplies by Q(W + s B A) under every dispatch
and layout, trains the factors alone, and is exported bit for bit.
"""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_training import (
    BOTH,
    DISPATCHES,
    LINEARS,
    ORDERS,
    RECIPE,
    base_model,
    expert_layers,
    logits,
    randomized,
    train,
    trainer,
    with_adapters,
    with_merged_weights,
)
from bits import assert_same_bits
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import tiny_inputs, tiny_model
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from twins import experts_and_inputs, plain_twin, run_experts

import quads_qat as qq
from quads_qat import adapters
from quads_qat.adapters import Factors
from quads_qat.experts import W4A16Experts
from quads_qat.integrations.peft import QuantizedLoraLinear, lora_config, merged, quantize_merged

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
    whole = with_merged_weights(qq.convert(base_model(dispatch=dispatch), "w4a16", recipe=RECIPE), model)
    assert_same_bits(logits(model), logits(plain_twin(whole, recipe=RECIPE)))
    with qq.full_precision(model), qq.full_precision(whole):
        assert_same_bits(logits(model), logits(whole))
        assert_same_bits(logits(model), logits(qq.revert(copy.deepcopy(whole))))


RECORDED: dict[str, dict[str, Any]] = {
    "linears and experts": BOTH,
    "copies": LINEARS | {"modules_to_save": ["lm_head", "norm", "embed_tokens"]},
    "tokens": LINEARS | {"trainable_token_indices": [1, 2]},
    "an embedding": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
}


@pytest.mark.parametrize("what", RECORDED)
def test_peft_first_leaves_the_record_of_convert_first(what: str):
    models = [with_adapters(order, base_model(), **RECORDED[what], r=4) for order in ("convert first", "peft first")]
    found = [qq.coverage(trained) for trained in models]
    assert found[0] == found[1]
    assert len(found[0].skipped) == 4  # embedding, head and two routers
    assert qq.contract_of(models[0]) == qq.contract_of(models[1])


def test_a_stack_is_merged_in_pieces_with_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 32, 48, generator=generator)
    factors = [Factors(*(torch.randint(-3, 4, s, generator=generator) / 8 for s in ((5, 2, 48), (5, 32, 2))), 0.5)]
    whole = adapters.merge(weight, factors)
    assert_same_bits(whole, weight + (factors[0].b @ factors[0].a) * 0.5)
    for piece in (1, 2 * 32 * 48, 3 * 32 * 48 + 1):
        monkeypatch.setattr(adapters, "_PIECE", piece)
        assert_same_bits(adapters.merge(weight, factors), whole)


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
    model = randomized(get_peft_model(model, lora_config(**BOTH, r=4)))
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
    expected = logits(qq.convert(base_model(dispatch=dispatch), "w4a16", recipe=RECIPE))
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
    model.add_adapter("second", lora_config(**BOTH, r=2, lora_alpha=3))
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
    plain = get_peft_model(base_model(), LoraConfig(**BOTH, r=4))
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.save_pretrained(tmp_path)
    expected = logits(model)
    for given in (lora_config(**BOTH, r=4), None):
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
