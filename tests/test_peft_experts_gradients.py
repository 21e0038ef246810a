"""Contract under test: adapters of fused experts get the gradients of the merged weight, which no forward keeps."""

import copy

import pytest
import torch
from adapter_training import DISPATCHES, expert_layers, ids, randomized, trainer, with_merged_weights
from bits import assert_same_bits
from peft import get_peft_model
from torch import Tensor, nn
from twins import assert_equal_tensors, experts_and_inputs, run_experts

import quads_qat as qq
from quads_qat import adapters
from quads_qat.adapters import Factors
from quads_qat.config import WeightFormat
from quads_qat.integrations.peft import QuantizedLoraExperts, lora_config


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
