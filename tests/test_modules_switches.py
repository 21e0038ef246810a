"""Contract under test: ``full_precision`` is the unconverted model, and ``observe_activations`` sees what enters each
projection without touching a bit of the output.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from small_modules import ListModel, fill, linears
from tiny_models import tiny_inputs, tiny_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from twins import experts_and_inputs, plain_twin, run_experts

import quads_qat as qq

DISPATCHES = pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
MODES = pytest.mark.parametrize("mode", ["w4a16", "w4a4"])


def logits(model: nn.Module) -> Tensor:
    return model(**tiny_inputs(model)).logits.detach()


# ------------------------------------------------------------------------------------------------------- full precision


@MODES
@DISPATCHES
@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_full_precision_is_the_unconverted_model_and_ends_with_its_context(arch: str, implementation: str, mode: str):
    model = tiny_model(arch, experts_implementation=implementation)
    plain = logits(model)
    quantized = logits(qq.convert(model, mode))
    assert not torch.equal(quantized, plain)
    with qq.full_precision(model):
        assert_same_bits(logits(model), plain)
        with qq.full_precision(model):
            assert_same_bits(logits(model), plain)
        assert_same_bits(logits(model), plain)
    assert_same_bits(logits(model), quantized)
    with pytest.raises(KeyError), qq.full_precision(model):
        raise KeyError
    assert_same_bits(logits(model), quantized)


def test_full_precision_trains_the_master_weights():
    model = fill(nn.Sequential(nn.Linear(32, 16)))
    x = torch.randn(4, 32)
    model(x).square().sum().backward()
    expected = model[0].weight.grad.clone()
    qq.convert(model, "w4a16")
    model.zero_grad()
    with qq.full_precision(model):
        model(x).square().sum().backward()
    assert_same_bits(model[0].weight.grad, expected)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", ["linear", "eager", "grouped_mm"])
def test_full_precision_inside_checkpointing_is_refused_under_grad(kind: str, reentrant: bool):
    module, x, run = checkpointed(kind)

    def forward() -> Tensor:
        return checkpoint(run, x, use_reentrant=reentrant)

    message = "full_precision: a checkpointed forward would be recomputed with fake quantization on"
    with qq.full_precision(module), pytest.raises(RuntimeError, match=message):
        forward()
    out = forward().sum()
    with qq.full_precision(module), pytest.raises(RuntimeError, match=message):
        out.backward()  # recomputes what was quantized
    with torch.no_grad(), qq.full_precision(module):
        assert_same_bits(forward(), run(x))
    with qq.full_precision(module):
        run(x).sum().backward()


def checkpointed(kind: str) -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    if kind == "linear":
        module = qq.convert(fill(nn.Sequential(nn.Linear(32, 16))), "w4a16")
        return module, torch.randn(4, 32, requires_grad=True), module
    experts, (hidden, weights, index) = experts_and_inputs("qwen3_moe", kind)
    qq.convert(experts, "w4a16")
    return experts, hidden, lambda x: experts(x, index, weights.detach())


@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
def test_full_precision_of_a_checkpointing_model_evaluates_under_no_grad():
    model = tiny_model("qwen3_moe")
    plain = logits(model)
    qq.convert(model, "w4a16").gradient_checkpointing_enable()
    with torch.no_grad(), qq.full_precision(model.eval()):
        assert_same_bits(logits(model), plain)
    with torch.no_grad(), qq.full_precision(model.train()):
        assert_same_bits(logits(model), plain)


# ------------------------------------------------------------------------------------------------ observed activations


@contextmanager
def inputs_seen(model: nn.Module) -> Iterator[dict[str, float]]:
    """Amax of what enters each linear, by hooks."""
    seen: dict[str, float] = {}

    def hook(name: str) -> Callable:
        def note(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen[name] = max(seen.get(name, 0.0), args[0].abs().max().item())

        return note

    handles = [m.register_forward_pre_hook(hook(n)) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    yield seen
    for handle in handles:
        handle.remove()


@MODES
def test_linears_record_the_amax_that_hooks_see(mode: str):
    model = qq.convert(fill(ListModel()), mode)
    with inputs_seen(model) as seen, qq.observe_activations(model):
        for seed in range(3):
            model(torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(seed)))
    expected: dict[str, float] = {}
    for name, value in seen.items():
        if ".experts." in name:  # one value for a projection over all experts of a layer; gate and up are fused
            layer, leaf = name.split(".mlp.")[0], name.rpartition(".")[2]
            group = "down_proj" if leaf == "down_proj" else "{gate_proj,up_proj}"
            key = f"{layer}.mlp.experts.*.{group}.amax"
            expected[key] = max(expected.get(key, 0.0), value)
    state = qq.quant_state_dict(model)
    assert {key: value.item() for key, value in state.items()} == expected
    assert all(value.dtype == torch.float32 and value.shape == () for value in state.values())


class ExpertInputs(TorchFunctionMode):
    """Amax of the first operand of every ``F.linear``, by the weight's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[torch.Size, float] = {}

    def __torch_function__(self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        if func is F.linear and args[0].numel():
            shape = args[1].shape
            self.seen[shape] = max(self.seen.get(shape, 0.0), args[0].abs().max().item())
        return func(*args, **(kwargs or {}))


@DISPATCHES
@MODES
def test_experts_record_what_enters_both_projections_under_every_dispatch(implementation: str, mode: str):
    experts, inputs = experts_and_inputs("qwen3_moe", implementation)
    qq.convert(experts, mode)
    before = run_experts(experts, inputs)
    with qq.observe_activations(experts):
        during = run_experts(experts, inputs)
    assert_same_bits(during, before)
    assert_same_bits(run_experts(experts, inputs), before)

    if mode == "w4a4":
        return  # the same code and its bits are another test's
    twin = plain_twin(experts)
    twin.config._experts_implementation = "eager"
    with ExpertInputs() as by_hand:
        run_experts(twin, inputs)
    first, second = (by_hand.seen[getattr(twin, name).shape[1:]] for name in ("gate_up_proj", "down_proj"))
    state = qq.quant_state_dict(experts)
    assert state["gate_up_proj.amax"].item() == first
    # grouped_mm computes the intermediate with another GEMM: one bfloat16 ulp
    found = state["down_proj.amax"].item()
    assert found == second if implementation != "grouped_mm" else abs(found - second) <= 2**-7 * second


@pytest.mark.parametrize("arch", ["gpt_oss", "nemotron_h", "llama4", "longcat_flash", "inkling", "step3p7"])
def test_every_layout_of_experts_can_be_observed(arch: str):
    model = qq.convert(tiny_model(arch), "w4a16")
    before = logits(model)
    with qq.observe_activations(model):
        assert_same_bits(logits(model), before)
    state = qq.quant_state_dict(model)
    groups = {group for name, (_, group) in qq.coverage(model).quantized.items() if not name.endswith(".weight")}
    assert groups
    assert {f"{group}.amax" for group in groups} <= state.keys()
    assert all(0 < value < float("inf") for value in state.values())
    qq.convert(model, "w4a4", activation_scale="static")
    assert logits(model).isfinite().all()


def test_observations_are_recomputed_without_effect_and_only_grow():
    model = qq.convert(fill(linears("fc")), "w4a16")
    x = torch.randn(3, 32, requires_grad=True)
    with qq.observe_activations(model):
        checkpoint(model.fc, x, use_reentrant=False).sum().backward()
    assert_same_bits(qq.quant_state_dict(model)["fc.amax"], x.detach().abs().max())
    model.fc(2 * x)  # outside: not seen
    with qq.observe_activations(model):
        model.fc(x / 2)
    assert_same_bits(qq.quant_state_dict(model)["fc.amax"], x.detach().abs().max())
    with qq.observe_activations(model):
        model.fc(2 * x)
    assert_same_bits(qq.quant_state_dict(model)["fc.amax"], 2 * x.detach().abs().max())
    with pytest.raises(KeyError), qq.observe_activations(model):
        raise KeyError
    model.fc(4 * x)
    assert_same_bits(qq.quant_state_dict(model)["fc.amax"], 2 * x.detach().abs().max())


def test_activations_that_are_not_finite_do_not_spoil_an_observation():
    model = qq.convert(fill(linears("fc")), "w4a16")
    x = torch.ones(2, 32)
    x[0, 0], x[1, 1], x[1, 2] = float("inf"), float("nan"), -3.0
    with qq.observe_activations(model):
        model.fc(x)
    assert qq.quant_state_dict(model)["fc.amax"].item() == 3.0


def test_quant_state_dict_round_trips_and_is_no_alias():
    model = qq.convert(tiny_model("qwen3_moe"), "w4a16")
    assert qq.quant_state_dict(model) == {}
    with qq.observe_activations(model):
        logits(model)
    state = qq.quant_state_dict(model)
    other = qq.convert(tiny_model("qwen3_moe"), "w4a4", activation_scale="static")
    with pytest.raises(
        ValueError, match="activation_scale='static' needs observed activations: run some batches inside"
    ):
        logits(other)
    qq.load_quant_state_dict(other, state)
    expected = logits(other)
    assert {k: v.item() for k, v in qq.quant_state_dict(other).items()} == {k: v.item() for k, v in state.items()}
    for value in state.values():
        value.zero_()
    assert_same_bits(logits(other), expected)
    assert not any("amax" in name for name in model.state_dict())
    with pytest.raises(KeyError, match=r"'lm_head\.amax' is no activation group of this model"):
        qq.load_quant_state_dict(model, {"lm_head.amax": torch.ones(())})
    assert qq.quant_state_dict(model).keys() == state.keys()
    qq.load_quant_state_dict(model, {})
    assert qq.quant_state_dict(model) == {}


@pytest.mark.gpu
def test_observations_made_on_a_cpu_serve_on_cuda():
    model = qq.convert(fill(linears("fc")), "w4a4", activation_scale="static")
    qq.load_quant_state_dict(model, {"fc.amax": torch.tensor(2.0)})
    x = torch.randn(4, 32)
    on_cpu = model.fc(x)
    on_cuda = model.cuda().fc(x.cuda())
    torch.testing.assert_close(
        on_cuda.cpu(), on_cpu, rtol=1e-5, atol=1e-5
    )  # the same operands, another summation order
