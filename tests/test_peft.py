"""Contract under test: with PEFT's LoRA, what a trainer multiplies by is Q(W + s B A) and is exported bit for bit; a
packed base stays packed, lets gradients through, and no adapter is ever quantized.
"""

import copy
import gc
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from adapter_training import ids, train
from bits import assert_same_bits
from small_modules import fill
from tiny_models import tiny_model
from torch import Tensor, nn
from torch._dynamo.utils import counters

pytest.importorskip("peft", reason="needs peft (the extra dev brings it)")

from peft import LoraConfig, PeftModel, get_peft_model

import quads_qat as qq
from quads_qat import adapters, ops
from quads_qat.adapters import Factors
from quads_qat.integrations.peft import (
    PackedLoraLinear,
    QuantizedLoraLinear,
    lora_config,
    merged,
    quantize_merged,
)

TARGETS = ["q_proj", "v_proj", "o_proj"]  # k_proj shares its scale with q and v, and has no adapter
RECIPE = "modelopt"  # with powers of two (aligned) another amax seldom shows in the weights
ORDERS = pytest.mark.parametrize("order", ["convert first", "peft first"])
LoraLayers = QuantizedLoraLinear | PackedLoraLinear


def base_model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return tiny_model("qwen3_moe", dtype=dtype, experts_implementation="grouped_mm")


def trainer(order: str = "convert first", dtype: torch.dtype = torch.bfloat16) -> PeftModel:
    """A converted model with adapters that do something."""
    if order == "convert first":
        model = qq.convert(base_model(dtype), "w4a16", recipe=RECIPE)
        model = get_peft_model(model, lora_config(target_modules=TARGETS, r=4))
    else:
        model = get_peft_model(base_model(dtype), LoraConfig(target_modules=TARGETS, r=4))
        model = quantize_merged(qq.convert(model, "w4a16", recipe=RECIPE))
    return randomized(model)


def randomized(model: PeftModel, seed: int = 0) -> PeftModel:
    generator = torch.Generator().manual_seed(seed)
    for layer in lora_layers(model).values():
        for factor in (*layer.lora_A.values(), *layer.lora_B.values()):
            with torch.no_grad():
                factor.weight.copy_(torch.randn(factor.weight.shape, generator=generator) * 0.2)
    return model


def lora_layers(model: nn.Module) -> dict[str, LoraLayers]:
    found = {name: m for name, m in model.named_modules() if isinstance(m, LoraLayers)}
    assert found
    return found


def multiplied_by(layer: nn.Module) -> Tensor:
    """[N, K]: the weight that a linear without bias multiplies by; a product with one hides the sign of zero."""
    with torch.no_grad():
        return layer(torch.eye(layer.in_features, dtype=torch.bfloat16)).t().contiguous()


# ------------------------------------------------------------------------------------------------- quantized and merged


@ORDERS
def test_the_merged_weight_is_quantized_with_the_amax_of_the_merged_group(order: str):
    model = trainer(order)
    layers = lora_layers(model)
    assert len(layers) == 2 * len(TARGETS)
    root = model.get_base_model()
    for i in range(2):
        attention = root.get_submodule(f"model.layers.{i}.self_attn")
        whole = {}
        for leaf in ("q_proj", "k_proj", "v_proj"):
            linear = attention.get_submodule(leaf)
            if leaf == "k_proj":
                whole[leaf] = linear.weight
                continue
            base, a, b = linear.base_layer.weight, linear.lora_A["default"].weight, linear.lora_B["default"].weight
            whole[leaf] = (base.float() + (b.float() @ a.float()) * linear.scaling["default"]).to(base.dtype)
        amax = torch.stack([w.abs().max() for w in whole.values()]).max()
        assert amax != torch.stack([attention.get_submodule(leaf).weight.abs().max() for leaf in whole]).max()
        for leaf, weight in whole.items():
            expected = ops.fake_quantize(weight.detach(), tensor_amax=amax.detach(), recipe=RECIPE) + 0.0
            assert_same_bits(multiplied_by(attention.get_submodule(leaf)), expected, leaf)


@ORDERS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_was_trained_is_exported_bit_for_bit(order: str, dtype: torch.dtype, tmp_path: Path):
    model = trainer(order, dtype)
    train(model)
    names = {n.removeprefix("base_model.model."): multiplied_by(m) for n, m in lora_layers(model).items()}
    with torch.no_grad():
        logits = model(input_ids=ids()).logits
    with merged(model) as plain:
        streamed = dict(qq.export_weights(plain, "modelopt"))
        qq.export_checkpoint(plain, tmp_path / "merged", dialect="modelopt")
        assert qq.verify(plain, tmp_path / "merged")
    unloaded = model.merge_and_unload()
    assert not any("lora" in name for name in unloaded.state_dict())
    with torch.no_grad():
        assert_same_bits(unloaded(input_ids=ids()).logits, logits)
    qq.export_checkpoint(unloaded, tmp_path / "unloaded", dialect="modelopt")
    assert list(qq.diff(tmp_path / "merged", tmp_path / "unloaded")) == []
    loaded = qq.load_model(tmp_path / "unloaded")
    for name, weight in names.items():
        assert_same_bits(loaded.get_parameter(f"{name}.weight").detach() + 0.0, weight, name)
    again = dict(qq.export_weights(unloaded, "modelopt"))
    assert streamed.keys() == again.keys()
    assert all(torch.equal(streamed[n].view(torch.uint8), again[n].view(torch.uint8)) for n in again if again[n].ndim)


def test_only_adapters_are_trained_and_none_is_quantized():
    model = trainer()
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trainable) == 2 * 2 * len(TARGETS)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model, 6)
    assert losses[-1] < losses[0]
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == trainable
    assert all(
        type(p) is nn.Linear for n, p in model.named_modules() if n.endswith(("lora_A.default", "lora_B.default"))
    )
    assert not any("lora" in name or "base_layer" in name for name in qq.coverage(model).quantized)


def test_peft_first_leaves_the_record_of_convert_first():
    found = [qq.coverage(trainer(order)) for order in ("convert first", "peft first")]
    assert found[0].quantized == found[1].quantized
    assert found[0].groups == found[1].groups
    assert {s.module for s in found[0].skipped} == {s.module for s in found[1].skipped}


@pytest.mark.parametrize("frozen", [True, False])
def test_gradients_are_straight_through_to_every_factor(frozen: bool):
    # integers, so that every sum is exact in fp32 whatever its order
    def integers(*shape: int) -> Tensor:
        return torch.randint(-3, 4, shape, generator=generator).float()

    generator = torch.Generator().manual_seed(0)
    x, weight, bias, grad = integers(2, 5, 32), integers(16, 32), integers(16), integers(2, 5, 16)
    pairs = [(integers(2, 32), integers(16, 2)), (integers(4, 32), integers(16, 4))]
    leaves = [x, weight, bias, *(t for pair in pairs for t in pair)]
    for leaf in leaves:
        leaf.requires_grad_(not (frozen and leaf is weight))
    factors = [Factors(a, b, 0.5) for a, b in pairs]
    amax = adapters.merge(weight, factors).abs().max().bfloat16()
    fmt = qq.config.WeightFormat(export_dtype=torch.bfloat16)

    def gradients(out: Tensor) -> list[Tensor | None]:
        for leaf in leaves:
            leaf.grad = None
        out.backward(grad)
        return [leaf.grad for leaf in leaves]

    found = adapters.merged_linear(x, weight, bias, factors, amax, fmt)
    whole = weight + sum((b @ a) * 0.5 for a, b in pairs)
    expected = nn.functional.linear(x, qq.fake_quantize_ste(whole, fmt=fmt, amax=amax), bias)
    assert_same_bits(found.detach(), expected.detach())
    for got, wanted in zip(gradients(found), gradients(expected), strict=True):
        assert (got is None) == (wanted is None)
        if wanted is not None:
            assert_same_bits(got + 0.0, wanted + 0.0)  # the sign of a zero depends on the order of a sum


def test_forward_keeps_factors_and_the_base_weight_only():
    model = trainer()
    layer = next(iter(lora_layers(model).values()))
    x = torch.randn(3, layer.in_features).bfloat16().requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        layer(x)
    known = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    others = [t for t in saved if t.untyped_storage().data_ptr() not in known]
    assert known & {t.untyped_storage().data_ptr() for t in saved}
    assert all(t.numel() <= x.numel() for t in others)


def test_disabled_adapters_are_the_base_policy_also_while_codes_are_kept():
    base = qq.convert(base_model(), "w4a16", recipe=RECIPE)
    model = trainer()
    with torch.no_grad():
        expected, adapted = base(input_ids=ids()).logits, model(input_ids=ids()).logits
        assert not torch.equal(expected, adapted)
        with qq.accumulate(model):
            assert_same_bits(model(input_ids=ids()).logits, adapted)
            with model.disable_adapter():
                assert_same_bits(model(input_ids=ids()).logits, expected)
            assert_same_bits(model(input_ids=ids()).logits, adapted)
        with model.disable_adapter():
            assert_same_bits(model(input_ids=ids()).logits, expected)
        unloaded = model.unload()
        assert_same_bits(unloaded(input_ids=ids()).logits, expected)


def test_step_tracks_the_codes_of_merged_weights():
    model = trainer()
    qq.step(model, track_codes=True)
    assert qq.step(model, track_codes=True).changed == 0
    train(model)
    report = qq.step(model, track_codes=True)
    changed = {name for name, (share, _) in report.by_weight.items() if share}
    with_adapter = {f"{n.removeprefix('base_model.model.')}.weight" for n in lora_layers(model)}
    assert with_adapter <= changed <= with_adapter | {n.replace("q_proj", "k_proj") for n in with_adapter}


def test_merging_and_unmerging_gives_every_bit_back():
    model = trainer()
    model.add_adapter("second", lora_config(target_modules=TARGETS, r=2))
    randomized(model, 1)
    model.base_model.set_adapter(["default", "second"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        logits = model(input_ids=ids()).logits
        model.merge_adapter()
        assert_same_bits(model(input_ids=ids()).logits, logits)
        model.unmerge_adapter()
        for name in ("second", "default"):  # one after the other: the same sum
            model.base_model.merge_adapter([name])
        assert_same_bits(model(input_ids=ids()).logits, logits)
        model.unmerge_adapter()
        with merged(model):
            pass
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter.detach(), before[name], name)


def test_merging_under_autocast_and_outside_of_it_is_the_same():
    model = trainer(dtype=torch.float32)
    layer = next(iter(lora_layers(model).values()))
    x = torch.eye(layer.in_features)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        inside = layer(x)
    assert inside.dtype == torch.bfloat16
    assert_same_bits(inside.t().float().contiguous(), multiplied_by(layer).float())


def test_copies_and_pickles_stand_on_their_own():
    model = trainer()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.no_grad():
        logits = model(input_ids=ids()).logits
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert_same_bits(other(input_ids=ids()).logits, logits)
            randomized(other, 7)
            assert not torch.equal(other(input_ids=ids()).logits, logits)
            assert_same_bits(model(input_ids=ids()).logits, logits)


def test_adapters_are_saved_and_loaded_by_peft(tmp_path: Path):
    model = trainer()
    model.save_pretrained(tmp_path)
    config = lora_config(target_modules=TARGETS, r=4)
    with torch.no_grad():
        expected = model(input_ids=ids()).logits
        for given in (config, None):
            base = qq.convert(base_model(), "w4a16", recipe=RECIPE)
            loaded = PeftModel.from_pretrained(base, tmp_path, config=given)
            if given is None:  # the saved config makes plain LoRA layers
                assert not torch.equal(loaded(input_ids=ids()).logits, expected)
                quantize_merged(loaded)
            assert_same_bits(loaded(input_ids=ids()).logits, expected)


def trained_with_copies(order: str, saved: list[str], base: nn.Module | None = None) -> PeftModel:
    """``saved`` modules are copied and trained in full (``modules_to_save``)."""
    base = base_model() if base is None else base
    if order == "convert first":
        model = qq.convert(base, "w4a16", recipe=RECIPE)
        model = get_peft_model(model, lora_config(target_modules=TARGETS, modules_to_save=saved, r=4))
    else:
        model = get_peft_model(base, LoraConfig(target_modules=TARGETS, modules_to_save=saved, r=4))
        model = quantize_merged(qq.convert(model, "w4a16", recipe=RECIPE))
    train(model)
    return model


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(found[name], tensor, name)


@ORDERS
@pytest.mark.parametrize("saved", [["lm_head"], ["norm", "gate", "embed_tokens"]], ids="+".join)
def test_modules_that_are_trained_in_full_are_exported_as_trained(order: str, saved: list[str]):
    model = trained_with_copies(order, saved)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = [(name, id(module)) for name, module in model.named_modules()]
    with merged(model) as plain:
        found = dict(qq.export_weights(plain, "modelopt"))
    with pytest.raises(KeyError, match="inside"), merged(model):
        raise KeyError("inside")
    with model.disable_adapter(), merged(model) as plain:
        untrained = dict(qq.export_weights(plain, "modelopt"))
    assert [(name, id(module)) for name, module in model.named_modules()] == modules
    assert_same_tensors(model.state_dict(), before)
    assert_same_tensors(found, dict(qq.export_weights(model.merge_and_unload(), "modelopt")))
    assert_same_tensors(
        untrained, dict(qq.export_weights(qq.convert(base_model(), "w4a16", recipe=RECIPE), "modelopt"))
    )
    for name in saved:
        tensors = [n for n in found if n.removesuffix(".weight").endswith(name)]
        assert tensors
        assert not any(torch.equal(found[n], untrained[n]) for n in tensors)


@ORDERS
def test_a_copy_of_a_quantized_module_is_not_exported(order: str):
    model = trained_with_copies(order, ["k_proj"])
    with pytest.raises(ValueError, match=r"k_proj.* is not the module that was converted"), merged(model) as plain:
        qq.export_weights(plain, "modelopt")


def test_a_copy_of_a_tied_head_is_exported_as_one_of_its_own(tmp_path: Path):
    def tied() -> nn.Module:
        base = base_model()
        base.config.tie_word_embeddings = True
        base.tie_weights()
        assert base.lm_head.weight is base.model.embed_tokens.weight
        return base

    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        model = trained_with_copies("convert first", ["lm_head"], tied())
    with merged(model) as plain:
        found = dict(qq.export_weights(plain, "modelopt"))
        qq.export_checkpoint(plain, tmp_path / "out", dialect="modelopt")
    assert model.get_base_model().config.tie_word_embeddings is True
    loaded = qq.load_model(tmp_path / "out")
    with pytest.warns(UserWarning, match="no longer tied"):
        plain = model.merge_and_unload()
    assert_same_tensors(found, dict(qq.export_weights(plain, "modelopt")))
    assert_same_bits(loaded.lm_head.weight, plain.lm_head.weight)
    assert_same_bits(loaded.model.embed_tokens.weight, plain.model.embed_tokens.weight)
    assert not torch.equal(plain.lm_head.weight, plain.model.embed_tokens.weight)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_gradient(reentrant: bool):
    model = trainer()

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        model(input_ids=ids(), labels=ids()).loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    model.train()
    model.enable_input_require_grads()
    expected = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found = gradients()
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        assert_same_bits(found[name], gradient, name)


def test_one_graph_with_the_eager_bits():
    torch._dynamo.reset()
    counters.clear()
    layers = nn.ModuleDict({f"{leaf}_proj": nn.Linear(64, 32, bias=leaf == "q") for leaf in "qkv"})
    block = qq.convert(fill(nn.ModuleDict({"attn": layers})).bfloat16(), "w4a16")
    model = randomized(get_peft_model(block, lora_config(target_modules=["q_proj", "v_proj"], r=4)))
    attention = model.get_base_model()["attn"]

    def run(x: Tensor) -> Tensor:
        return attention["q_proj"](x).float().sigmoid() * attention["k_proj"](x) + attention["v_proj"](x)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    trainable = [p for p in model.parameters() if p.requires_grad]
    for rows in (5, 9, 13):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).bfloat16().requires_grad_()
        leaves = [x, *trainable]
        expected, found = run(x), compiled(x)
        assert_same_bits(found.detach(), expected.detach())
        grads = [torch.autograd.grad(out.float().sum(), leaves) for out in (expected, found)]
        for got, wanted in zip(*grads, strict=True):
            assert_same_bits(got, wanted)
        with torch.no_grad():
            for parameter, gradient in zip(trainable, grads[0][1:], strict=True):
                parameter.sub_(gradient.sign(), alpha=0.01)
    assert counters["stats"]["unique_graphs"] == 1


def test_fsdp2_trains_and_exports_the_adapters_of_a_whole_model(tmp_path: Path):
    tests = Path(__file__).parent
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), *sys.path]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(tests / "peft_ranks.py"), str(tmp_path / "report")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (tmp_path / "report").exists(), done.stderr[-3000:]


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
        get_peft_model(qq.convert(base_model(), "w4a16"), lora_config(target_modules=TARGETS, **options))
    model = qq.convert(get_peft_model(base_model(), LoraConfig(target_modules=TARGETS, **options)), "w4a16")
    with pytest.raises(ValueError, match=r"quantize_merged: .*q_proj has .*cannot be merged before quantizing"):
        quantize_merged(model)


def test_an_unmerged_model_is_neither_exported_nor_reverted(tmp_path: Path):
    model = trainer()
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
        with pytest.raises(ValueError, match=r"^check_first_step: .*q_proj is wrapped .* plain:` check_first_step"):
            qq.check_first_step(model, **side)
    plain = get_peft_model(qq.convert(base_model(), "w4a16"), LoraConfig(target_modules=TARGETS))
    with pytest.raises(ValueError, match="does not train a quantized merged weight"), merged(plain):
        pass
    assert not (tmp_path / "x").exists()


def test_w4a4_trainers_take_no_adapters():
    with pytest.raises(ValueError, match="adapters need a trainer in mode 'w4a16'"):
        get_peft_model(qq.convert(base_model(), "w4a4"), lora_config(target_modules=TARGETS))


# ------------------------------------------------------------------------------------------------------- frozen, packed


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nvfp4") / "checkpoint"
    model = qq.convert(base_model(), "w4a16")
    qq.export_checkpoint(model, path, dialect="modelopt")
    return path


def packed_model(checkpoint: Path) -> PeftModel:
    rollout = qq.load_rollout(checkpoint, weights_only=True)
    return randomized(get_peft_model(rollout, lora_config(target_modules=TARGETS, r=4)))


def test_lora_on_a_packed_base_equals_lora_on_its_decoded_weights(checkpoint: Path):
    model = packed_model(checkpoint)
    assert sum(isinstance(m, PackedLoraLinear) for m in model.modules()) == 2 * len(TARGETS)
    plain = get_peft_model(qq.load_model(checkpoint), LoraConfig(target_modules=TARGETS, r=4))
    plain.load_state_dict({n: t for n, t in model.state_dict().items() if "lora" in n}, strict=False)
    plain.set_experts_implementation("eager")
    losses = []
    for m in (model, plain):
        m(input_ids=ids(), labels=ids()).loss.backward()
        losses.append(m(input_ids=ids(), labels=ids()).loss.detach())
    assert_same_bits(losses[0], losses[1])
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 2 * len(TARGETS)
    for name, parameter in trained.items():
        assert_same_bits(parameter.grad, plain.get_parameter(name).grad, name)
    before = {n: b.clone() for n, b in model.named_buffers()}
    assert train(model, 6)[-1] < losses[0]
    for name, buffer in model.named_buffers():
        same = buffer.float() == before[name].float()
        assert bool(same.all()), name


def test_a_packed_base_takes_0_5625_bytes_per_weight_and_keeps_no_decoded_one(checkpoint: Path):
    model = packed_model(checkpoint)
    layer = next(iter(lora_layers(model).values()))
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
        get_peft_model(qq.load_rollout(checkpoint, residual=qq.ResidualConfig()), lora_config(target_modules=TARGETS))
    rollout = qq.load_rollout(checkpoint, weights_only=True)
    with pytest.raises(ValueError, match="init_lora_weights='pissa' would change the base weight"):
        get_peft_model(rollout, lora_config(target_modules=TARGETS, init_lora_weights="pissa"))
