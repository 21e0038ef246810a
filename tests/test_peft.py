"""Contract under test: with PEFT's LoRA on linears, what a trainer multiplies by is Q(W + s B A) and is exported
bit for bit, and no adapter is ever quantized. What linears and experts share is in ``test_peft_experts.py``.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from adapter_training import LINEARS, ORDERS, RECIPE, base_model, ids, train, with_adapters
from bits import assert_same_bits
from peft import PeftModel, get_peft_model
from small_modules import fill
from torch import Tensor, nn
from torch._dynamo.utils import counters

import quads_qat as qq
from quads_qat import adapters, ops
from quads_qat.adapters import Factors
from quads_qat.integrations.peft import (
    QuantizedLoraLinear,
    lora_config,
    merged,
    quantize_merged,
)


def trainer(order: str = "convert first", dtype: torch.dtype = torch.bfloat16) -> PeftModel:
    """A converted model with adapters that do something."""
    return randomized(with_adapters(order, base_model(dtype), **LINEARS, r=4))


def randomized(model: PeftModel, seed: int = 0) -> PeftModel:
    generator = torch.Generator().manual_seed(seed)
    for layer in lora_layers(model).values():
        for factor in (*layer.lora_A.values(), *layer.lora_B.values()):
            with torch.no_grad():
                factor.weight.copy_(torch.randn(factor.weight.shape, generator=generator) * 0.2)
    return model


def lora_layers(model: nn.Module) -> dict[str, QuantizedLoraLinear]:
    found = {name: m for name, m in model.named_modules() if isinstance(m, QuantizedLoraLinear)}
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
    assert len(layers) == 2 * len(LINEARS["target_modules"])
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
    assert len(trainable) == 2 * 2 * len(LINEARS["target_modules"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model, 6)
    assert losses[-1] < losses[0]
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == trainable
    assert all(
        type(p) is nn.Linear for n, p in model.named_modules() if n.endswith(("lora_A.default", "lora_B.default"))
    )
    assert not any("lora" in name or "base_layer" in name for name in qq.coverage(model).quantized)


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
    model.add_adapter("second", lora_config(**LINEARS, r=2))
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


def test_adapters_are_saved_and_loaded_by_peft(tmp_path: Path):
    model = trainer()
    model.save_pretrained(tmp_path)
    config = lora_config(**LINEARS, r=4)
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
    model = with_adapters(order, base, **LINEARS, modules_to_save=saved, r=4)
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


def test_a_copy_of_a_quantized_module_is_not_exported():
    model = trained_with_copies("convert first", ["k_proj"])
    with (
        pytest.raises(ValueError, match=r"merged: .*k_proj is quantized, and trained in full as a copy"),
        merged(model),
    ):
        pass
    with pytest.raises(ValueError, match=r"k_proj.* is not the module that was converted"):
        qq.export_weights(model.merge_and_unload(), "modelopt")


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
