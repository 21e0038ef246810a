"""Contract under test: on every MoE architecture of transformers, conversion covers the experts and leaves the routers,
and the model computes what its unconverted self computes with the quantized weights put in, under the same dispatch.
"""

import copy

import pytest
import torch
import transformers
from bits import assert_same_bits
from small_modules import ListModel, fill, names_with_weights
from tiny_models import ARCHITECTURES, NO_FORWARD, UNBUILDABLE, tiny_inputs, tiny_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from twins import assert_equal_tensors, outputs_and_gradients, plain_twin

import quads_qat as qq
from quads_qat.experts import W4A16Experts
from quads_qat.experts_layout import layout_of
from quads_qat.linear import W4A16Linear
from quads_qat.residual import ResidualCompensatedExperts, ResidualCompensatedLinear

#: Experts of a layout of their own; convert refuses them by name.
UNKNOWN_EXPERTS = {"dbrx": "DbrxExpertGLU", "jetmoe": "JetMoeParallelExperts"}
#: All text weights are shared by an encoder and a decoder, hence listed as tied and not quantized.
TIED = ("diffusion_gemma",)
DENSE = ("llama", "qwen3")
DISPATCHES = ("eager", "batched_mm", "grouped_mm")

BUILDABLE = sorted(ARCHITECTURES.keys() - UNBUILDABLE.keys() - UNKNOWN_EXPERTS.keys())
RUNNABLE = [arch for arch in BUILDABLE if arch not in NO_FORWARD]


#: The configs of ``tiny_models`` are those of this release; in an earlier one some models are missing or differ.
CURRENT = tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24)


def build(arch: str, implementation: str = "eager") -> PreTrainedModel:
    try:
        model = tiny_model(arch, experts_implementation=implementation)
    except (AttributeError, TypeError, ValueError) as error:
        if CURRENT and "does not support setting experts implementation" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__}: {type(error).__name__}: {str(error)[:80]}")
    kinds = {type(module).__name__ for module in model.modules()}
    if not CURRENT and "AriaGroupedExpertsGemm" in kinds:
        pytest.skip(f"transformers {transformers.__version__} has another layout of these experts")
    return model


def run(model: nn.Module) -> Tensor:
    torch.manual_seed(0)  # block diffusion starts from random tokens
    out = model(**tiny_inputs(model))  # pyright: ignore[reportArgumentType]
    return out.logits if "logits" in out else out[0]


@pytest.mark.parametrize("arch", BUILDABLE)
def test_every_weight_is_quantized_or_listed_and_revert_undoes_it(arch: str):
    model = build(arch)
    before = {name: type(module) for name, module in model.named_modules()}
    stacks = {name for name, module in model.named_modules() if layout_of(module) is not None}
    qq.convert(model, "w4a16")
    report = qq.coverage(model)
    skipped = {s.module: s.reason for s in report.skipped}

    biases = {n for n in names_with_weights(model) if n.endswith("_proj_bias")}  # [E, N], of experts
    known = set(report.quantized) | biases | {n for n in names_with_weights(model) if n.rpartition(".")[0] in skipped}
    assert names_with_weights(model) == known

    fused = {name for name, module in model.named_modules() if isinstance(module, W4A16Experts)}
    assert bool(stacks) == (arch not in DENSE)
    for name in stacks:
        assert name in fused or skipped[name].startswith(("vision tower", "tied")), name
    assert (stacks == fused) or arch in TIED or any("vision" in name for name in stacks - fused)
    for name in fused:
        module = model.get_submodule(name)
        three = {n for n, p in module.named_parameters(recurse=False) if p.ndim == 3}
        assert three == set(module.layout.parameters)
        assert {f"{name}.{n}" for n in three} <= report.quantized.keys()
    for name, module in model.named_modules():
        if any(part in type(module).__name__.lower() for part in ("router", "gating")) or name == "lm_head":
            assert not [n for n in report.quantized if n.startswith(f"{name}.")]
    for name in report.quantized:
        assert isinstance(model.get_submodule(name.rpartition(".")[0]), W4A16Experts | W4A16Linear)
    assert {name: type(module) for name, module in qq.revert(model).named_modules()} == before


@pytest.mark.parametrize("implementation", DISPATCHES)
@pytest.mark.parametrize("arch", RUNNABLE)
def test_output_and_gradients_are_those_of_the_model_with_the_quantized_weights_put_in(arch: str, implementation: str):
    model = build(arch, implementation)
    qq.convert(model, "w4a16")
    twin = plain_twin(model)
    torch.use_deterministic_algorithms(implementation == "batched_mm")
    try:
        found, expected = (outputs_and_gradients(m, run) for m in (model, twin))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equal_tensors(found, expected)
    assert found["output"].isfinite().all()


@pytest.mark.parametrize("arch", RUNNABLE)
def test_every_mode_runs_and_revert_brings_the_plain_output_back(arch: str):
    model = build(arch)
    with torch.no_grad():
        plain = run(model)
        w4a16 = run(qq.convert(model, "w4a16"))
        w4a4 = run(qq.convert(model, "w4a4"))
        naive, whole = (
            run(qq.convert(copy.deepcopy(model), "w4a4_residual", residual=qq.ResidualConfig(fraction=fraction)))
            for fraction in (0.0, 1.0)
        )
        assert_same_bits(run(qq.revert(model)), plain)
    for out in (w4a16, w4a4, naive, whole):
        assert out.isfinite().all()
        assert torch.equal(out, plain) == (arch in TIED)

    def gap(out: Tensor) -> float:
        return (out.float() - w4a16.float()).abs().mean().item()

    assert arch in TIED or gap(whole) < gap(naive) / 2
    if arch not in DENSE + TIED:
        rollout = qq.convert(model, "w4a4_residual", scope="experts")
        assert any(isinstance(m, ResidualCompensatedExperts) for m in rollout.modules())


@pytest.mark.parametrize("arch", UNKNOWN_EXPERTS)
def test_experts_of_an_unknown_layout_are_refused_by_name_and_can_be_excluded(arch: str):
    model = build(arch)
    kind = UNKNOWN_EXPERTS[arch]
    with pytest.raises(ValueError, match=rf"\.0\..* is a {kind}, an experts class of unknown layout; pass exclude="):
        qq.convert(model, "w4a16")
    names = [n for n, m in model.named_modules() if type(m).__name__ == kind]
    qq.convert(model, "w4a16", exclude=names)
    assert {s.module for s in qq.coverage(model).skipped if s.kind == kind} == set(names)
    twin = plain_twin(model)
    assert_equal_tensors(outputs_and_gradients(model, run), outputs_and_gradients(twin, run))


# -------------------------------------------------------------------------------------- a list of experts, one by one


def test_a_list_of_experts_equals_its_plain_twin_and_groups_gate_with_up():
    model = fill(ListModel(), scale=0.3).bfloat16()
    x = torch.randn(2, 9, 32).bfloat16().requires_grad_()
    qq.convert(model, "w4a16")
    report = qq.coverage(model)
    assert len(report.quantized) == 2 * 4 * 3
    assert {s.module: s.reason for s in report.skipped} == {f"layers.{i}.mlp.gate": "router or gate" for i in (0, 1)}
    assert report.groups["layers.1.mlp.experts.2.{gate_proj,up_proj}"] == [
        f"layers.1.mlp.experts.2.{part}_proj.weight" for part in ("gate", "up")
    ]
    found, expected = (outputs_and_gradients(m, lambda m: m(x), [x]) for m in (model, plain_twin(model)))
    assert_equal_tensors(found, expected)


def test_a_list_of_experts_runs_in_every_mode():
    model = fill(ListModel(), scale=0.3)
    x = torch.randn(2, 9, 32)
    plain, w4a16, w4a4 = (
        run_list.detach() for run_list in (model(x), qq.convert(model, "w4a16")(x), qq.convert(model, "w4a4")(x))
    )
    rollout = qq.convert(copy.deepcopy(model), "w4a4_residual")
    assert sum(isinstance(m, ResidualCompensatedLinear) for m in rollout.modules()) == 24
    assert (rollout(x) - w4a16).abs().mean() < (w4a4 - w4a16).abs().mean()
    assert_same_bits(qq.revert(model)(x).detach(), plain)
