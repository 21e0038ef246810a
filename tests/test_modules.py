"""Contract under test: a converted module's output and gradients are, bit for bit, those of a plain module that holds
the fake-quantized weights (and, in W4A4, gets fake-quantized inputs with a straight-through gradient).

A sum of gradients that meets a zero may give it another sign, so zeros are compared without theirs.
"""

from collections.abc import Callable

import pytest
import torch
from bits import assert_same_bits
from small_modules import fill, linears
from tiny_models import tiny_inputs, tiny_model
from torch import Tensor, nn
from twins import (
    QuantizeLinearInputs,
    StraightThrough,
    assert_equal_tensors,
    experts_and_inputs,
    outputs_and_gradients,
    plain_twin,
    run_experts,
)

import quads_qat as qq
from quads_qat import autograd, reference

K, N = 48, 24
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
BIAS = pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
DISPATCHES = pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "[K]": lambda: torch.randn(K),
    "[M, K]": lambda: torch.randn(37, K),
    "[1, K]": lambda: torch.randn(1, K),
    "[0, K]": lambda: torch.randn(0, K),
    "[M, K] of columns": lambda: torch.randn(K, 37).t(),
    "[B, M, K]": lambda: torch.randn(3, 17, K),
    "[B, 0, K]": lambda: torch.randn(3, 0, K),
    "[B, M, K] transposed": lambda: torch.randn(17, 3, K).transpose(0, 1),
    "[B, M, K] expanded": lambda: torch.randn(1, 17, K).expand(3, 17, K),
    "[B, M, K] sliced": lambda: torch.randn(3, 17, 2 * K)[..., :K],
    "[B, M, K] of columns": lambda: torch.randn(3, K, 17).transpose(1, 2),
    "[A, B, M, K]": lambda: torch.randn(2, 3, 5, K),
    "[A, B, M, K] transposed": lambda: torch.randn(2, 5, 3, K).transpose(1, 2),
}


def linear_pair(dtype: torch.dtype, bias: bool, mode: str = "w4a16", n: int = N) -> tuple[nn.Module, nn.Module]:
    """A converted linear and its plain twin."""
    model = fill(nn.Sequential(nn.Linear(K, n, bias=bias)), scale=0.5).to(dtype)
    qq.convert(model, mode)
    return model, plain_twin(model)


# --------------------------------------------------------------------------------------------------------------- linear


@DTYPES
@BIAS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_equals_a_plain_linear_with_the_quantized_weight(layout: str, bias: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    x = LAYOUTS[layout]().to(dtype).detach()
    for n in (N, 1):
        model, twin = linear_pair(dtype, bias, n=n)
        for leaf in (x.requires_grad_(), x.detach()):  # as in the middle of a model, and on its inputs
            found, expected = (outputs_and_gradients(m, lambda m: m(leaf), [leaf]) for m in (model, twin))  # noqa: B023
            assert_equal_tensors(found, expected)
        with torch.no_grad():
            assert torch.equal(model(x), twin(x))


@BIAS
def test_linear_with_a_strided_output_gradient_equals_the_plain_one(bias: bool):
    x, upstream = torch.randn(3, 17, K), torch.randn(17, 3, N).transpose(0, 1)
    for leaf in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
        grads = []
        for module in linear_pair(torch.float32, bias):
            module(leaf.requires_grad_()).backward(upstream)
            grads.append({n: p.grad for n, p in module.named_parameters()} | {"x": leaf.grad})
            leaf.grad = None
        assert_equal_tensors(*grads)


@pytest.mark.parametrize("recipe", list(qq.Recipe))
def test_linear_equals_the_plain_one_under_every_recipe(recipe: qq.Recipe):
    model = qq.convert(fill(nn.Sequential(nn.Linear(K, N)), seed=3), "w4a16", recipe=recipe)
    x = torch.randn(7, K, requires_grad=True)
    found, expected = (outputs_and_gradients(m, lambda m: m(x), [x]) for m in (model, plain_twin(model, recipe)))
    assert_equal_tensors(found, expected)


@pytest.mark.parametrize("scale", ["per_token", "per_tensor", "static"])
@BIAS
@DTYPES
def test_w4a4_linear_equals_a_plain_linear_of_quantized_operands(dtype: torch.dtype, bias: bool, scale: str):
    model = fill(nn.Sequential(nn.Linear(K, N, bias=bias)), scale=0.5).to(dtype)
    x = torch.randn(3, 5, K).to(dtype)
    x[0, 1] = 0
    qq.convert(model, "w4a4", activation_scale=scale)
    observed = torch.tensor(1.5)
    if scale == "static":
        qq.load_quant_state_dict(model, {"0.amax": observed})
    twin = plain_twin(model)
    found = outputs_and_gradients(model, lambda m: m(x), [x.requires_grad_()])
    expected = outputs_and_gradients(twin, lambda m: m(StraightThrough.apply(x, scale, observed)), [x])
    assert_equal_tensors(found, expected)


@BIAS
@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_linear_under_autocast_equals_the_plain_one(low: torch.dtype, mode: str, bias: bool):
    model, twin = linear_pair(torch.float32, bias, mode)
    x = torch.randn(2, 9, K, requires_grad=True)

    def run(module: nn.Module) -> Tensor:
        with torch.autocast("cpu", low):
            if module is twin and mode == "w4a4":
                return module(StraightThrough.apply(x.to(low), "per_token", None))
            return module(x)

    found, expected = (outputs_and_gradients(m, run, [x]) for m in (model, twin))
    assert found["output"].dtype == low
    assert_equal_tensors(found, expected)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
def test_linear_without_grad_gives_the_training_bits(mode: str, context: Callable):
    model, _ = linear_pair(torch.bfloat16, True, mode)
    x = torch.randn(5, K).bfloat16()
    trained = model(x)
    with context():
        assert_same_bits(model(x), trained.detach())


@pytest.mark.parametrize(
    ("config_dtype", "export_dtype"),
    [("bfloat16", torch.bfloat16), (torch.float16, torch.float16), ("float32", torch.bfloat16), (None, torch.bfloat16)],
)
def test_fp32_masters_are_cast_to_the_dtype_of_the_export_first(config_dtype: object, export_dtype: torch.dtype):
    model = fill(linears("fc", k=K, n=N))
    with torch.no_grad():
        model.fc.weight += 1e-5  # in neither 16-bit format
    model.config = type("Config", (), {"dtype": config_dtype})()
    qq.convert(model, "w4a16")
    expected = reference.fake_quantize(model.fc.weight.detach().to(export_dtype)).float()
    assert torch.equal(model.fc(torch.eye(K)).t(), expected)
    assert model.fc.weight.dtype == torch.float32


@pytest.mark.parametrize(
    ("masters", "compute"), [("float32", "float16"), ("float16", "bfloat16"), ("bfloat16", "float16")]
)
@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_a_weight_cast_to_other_16_bits_than_it_is_exported_from_is_refused_by_name(arch, masters: str, compute: str):
    """FSDP2's mixed precision does that: the forward would quantize a weight that was rounded once more."""
    model = tiny_model(arch).to(getattr(torch, masters))
    inputs = tiny_inputs(model)
    qq.convert(model, "w4a16", scope="experts" if arch == "qwen3_moe" else "all")
    for module in model.modules():  # as FSDP2 does, past `Module.to`, after which masters are of that dtype
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().to(getattr(torch, compute))))
    with pytest.raises(ValueError, match=rf"layers\.0\..*: its forward sees torch.{compute}, but it is exported"):
        model(**inputs)
    with qq.full_precision(model):
        model(**inputs)


def test_masters_near_the_end_of_fp32_are_quantized_by_their_cast_amax():
    model = qq.convert(fill(linears("fc")), "w4a16")
    with torch.no_grad():
        model.fc.weight[3, 4] = 1.00390625  # halfway between two bfloat16 numbers: the cast decides the scale
    assert_equal_tensors(*[outputs_and_gradients(m, lambda m: m.fc(torch.eye(32))) for m in (model, plain_twin(model))])


# --------------------------------------------------------------------------------------------------------- scale groups


def test_in_training_a_group_shares_the_largest_amax_and_follows_its_siblings():
    model = fill(linears("attn.q_proj", "attn.k_proj", "attn.v_proj"))
    with torch.no_grad():
        model.attn.k_proj.weight.mul_(3e4)  # beside it, block scales of q are subnormal
    qq.convert(model, "w4a16")
    eye = torch.eye(32)

    def expected() -> Tensor:
        weights = [getattr(model.attn, f"{n}_proj").weight.detach().bfloat16() for n in "qkv"]
        return reference.fake_quantize(
            weights[0], tensor_amax=torch.stack([w.abs().max() for w in weights]).max()
        ).float()

    first = model.attn.q_proj(eye).t()
    assert torch.equal(first, expected())
    with torch.no_grad():
        model.attn.k_proj.weight.div_(3e4)
    assert torch.equal(model.attn.q_proj(eye).t(), expected())
    assert not torch.equal(model.attn.q_proj(eye).t(), first)


def test_a_sibling_that_is_still_sharded_is_an_error_that_names_both():
    model = qq.convert(fill(linears("attn.q_proj", "attn.k_proj")), "w4a16")
    model.attn.k_proj.weight.data = torch.empty(0)  # as FSDP1 leaves a shard of nothing
    message = (
        r"attn\.q_proj\.weight shares .* with attn\.k_proj\.weight, which is still sharded; wrap the parent module"
    )
    with pytest.raises(RuntimeError, match=message):
        model.attn.q_proj(torch.ones(1, 32))


@pytest.mark.parametrize("when", ["before convert", "after convert"])
def test_parameters_of_zero_3_are_refused(when: str):
    model = fill(linears("attn.q_proj", "attn.k_proj"))
    if when == "after convert":
        qq.convert(model, "w4a16")
    for i, parameter in enumerate(model.parameters()):
        parameter.ds_id = i  # gathered, as in a forward: still DeepSpeed's
    with pytest.raises(
        (ValueError, RuntimeError), match=r"attn\.q_proj\.weight is sharded by DeepSpeed ZeRO-3.* or FSDP2"
    ):
        qq.convert(model, "w4a16") if when == "before convert" else model.attn.q_proj(torch.ones(1, 32))


def test_fake_quantize_ste_has_the_group_amax_forward_and_an_identity_backward():
    weight, sibling = fill(nn.Linear(32, 8)).weight, nn.Parameter(torch.full((4, 32), 4e3))
    upstream = torch.randn(8, 32)
    for group in ((sibling,), (weight, sibling), (sibling, weight)):
        weight.grad = None
        out = qq.fake_quantize_ste(weight, group)
        cast = weight.detach().bfloat16()
        assert_same_bits(out.detach(), reference.fake_quantize(cast, tensor_amax=torch.tensor(4e3)).float())
        out.backward(upstream)
        assert_same_bits(weight.grad, upstream)
    stack = nn.Parameter(torch.randn(3, 8, 32).bfloat16() * torch.tensor([1e-3, 1, 1e3]).bfloat16()[:, None, None])
    fmt = autograd.WeightFormat(per_expert=True)
    each = torch.stack([qq.fake_quantize_ste(expert) for expert in stack])
    assert_same_bits(qq.fake_quantize_ste(stack, fmt=fmt).detach(), each.detach())


# -------------------------------------------------------------------------------------------------------------- experts

EXPERTS = pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "nemotron_h"])


@DISPATCHES
@EXPERTS
@DTYPES
def test_experts_equal_plain_ones_with_the_quantized_weights(dtype: torch.dtype, arch: str, implementation: str):
    experts, inputs = experts_and_inputs(arch, implementation, dtype)
    qq.convert(experts, "w4a16")
    twin = plain_twin(experts)
    found, expected = (_deterministic(m, inputs, implementation) for m in (experts, twin))
    assert_equal_tensors(found, expected)
    with torch.inference_mode():
        assert torch.equal(run_experts(experts, inputs), expected["output"])
    first = next(n for n in expected if n.endswith(("gate_up_proj", "up_proj")))
    assert expected[first].view(4, -1).any(1).tolist() == [False, True, True, True]  # expert 0 got no token


def _deterministic(module: nn.Module, inputs: list[Tensor], implementation: str) -> dict[str, Tensor | None]:
    torch.use_deterministic_algorithms(implementation == "batched_mm")
    try:
        return outputs_and_gradients(module, lambda m: run_experts(m, inputs), inputs[:2])
    finally:
        torch.use_deterministic_algorithms(False)


@DISPATCHES
@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
def test_experts_with_fp32_masters_under_autocast_equal_plain_ones(arch: str, implementation: str):
    experts, inputs = experts_and_inputs(arch, implementation, torch.float32)
    qq.convert(experts, "w4a16")
    twin = plain_twin(experts)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (_deterministic(m, inputs, implementation) for m in (experts, twin))
    assert_equal_tensors(found, expected)


@DISPATCHES
def test_a_batch_without_tokens_gives_an_empty_output_and_zero_gradients(implementation: str):
    experts, _ = experts_and_inputs("qwen3_moe", implementation)
    empty = torch.empty(0, 64, dtype=torch.bfloat16, requires_grad=True)
    nothing = [empty, torch.empty(0, 2, dtype=torch.bfloat16), torch.empty(0, 2, dtype=torch.int64)]
    for mode in ("w4a16", "w4a4"):
        qq.convert(experts, mode)
        out = run_experts(experts, nothing)
        assert out.shape == (0, 64)
        if out.requires_grad:  # the plain loop gives zeros without a graph
            out.sum().backward()
        assert not any(p.grad.any() for p in experts.parameters() if p.grad is not None)


def test_each_expert_has_its_own_scale_and_gpt_oss_one_for_all():
    for arch, own in (("qwen3_moe", True), ("gpt_oss", False)):
        experts, _ = experts_and_inputs(arch, "eager")
        with torch.no_grad():
            experts.gate_up_proj[2].mul_(1024)
        qq.convert(experts, "w4a16")
        expected = experts.gate_up_proj.abs().amax((1, 2)) if own else experts.gate_up_proj.abs().max()
        assert_same_bits(experts.amax("gate_up_proj"), expected.detach())


@pytest.mark.parametrize("scale", ["per_token", "per_tensor"])
@pytest.mark.parametrize("arch", ["qwen3_moe", "nemotron_h"])
@DISPATCHES
def test_w4a4_experts_equal_the_plain_eager_loop_of_quantized_operands(arch: str, scale: str, implementation: str):
    experts, inputs = experts_and_inputs(arch, implementation)
    if arch == "nemotron_h":  # sums in the dtype of the routing weights
        inputs[1] = inputs[1].detach().float().requires_grad_()
    qq.convert(experts, "w4a4", activation_scale=scale)
    twin = plain_twin(experts)
    twin.config._experts_implementation = "eager"  # its loop is plain F.linear calls
    found = outputs_and_gradients(experts, lambda m: run_experts(m, inputs), inputs[:2])

    def quantized(module: nn.Module) -> Tensor:
        with QuantizeLinearInputs(scale):
            return run_experts(module, inputs)

    expected = outputs_and_gradients(twin, quantized, inputs[:2])
    assert_equal_tensors(found, expected)


def test_w4a4_experts_are_the_plain_experts_of_quantized_operands_where_the_plain_code_is_no_f_linear():
    # x @ W + b rounds twice where F.linear rounds once: one ulp of the terms' size each, in fp32, over K = 64
    experts, inputs = experts_and_inputs("gpt_oss", "eager", torch.float32)
    qq.convert(experts, "w4a4")
    twin = plain_twin(experts)
    hidden, weights, index = inputs
    expected = torch.zeros_like(hidden)
    for token in range(hidden.shape[0]):
        for slot, e in enumerate(index[token].tolist()):
            x = StraightThrough.apply(hidden[token], "per_token", None)
            joined = twin._apply_gate(x @ twin.gate_up_proj[e] + twin.gate_up_proj_bias[e])
            x = StraightThrough.apply(joined, "per_token", None)
            out = x @ twin.down_proj[e] + twin.down_proj_bias[e]
            expected = expected.index_add(0, torch.tensor([token]), (out * weights[token, slot])[None])
    torch.testing.assert_close(run_experts(experts, inputs), expected, rtol=1e-5, atol=1e-5)


def test_inklings_shared_experts_see_every_token():
    model = tiny_model("inkling")
    inputs = tiny_inputs(model)
    shared = next(m for n, m in model.named_modules() if n.endswith("shared_experts"))
    qq.convert(model, "w4a16")
    hidden, gammas = torch.randn(2, 5, 64).bfloat16(), torch.rand(2, 5, shared.n_shared_experts).bfloat16()
    twin = plain_twin(shared_only(shared))
    assert torch.equal(shared(hidden, gammas), twin(hidden, gammas))
    qq.convert(model, "w4a4")
    gap = (shared(hidden, gammas) - twin(hidden, gammas)).abs().mean() / twin(hidden, gammas).abs().mean()
    assert 0.01 < gap < 0.25  # rounding each operand to 4 bits costs about 10 %
    assert model(**inputs).logits.isfinite().all()


def shared_only(module: nn.Module) -> nn.Module:
    """A conversion of ``module`` alone."""
    import copy

    alone = copy.deepcopy(module)
    alone.__class__ = alone.original_class
    for attribute in ("weight_formats", "scale_groups", "observers", "layout", "original_class", "full_precision"):
        alone.__dict__.pop(attribute, None)
    return qq.convert(alone, "w4a16")


@pytest.mark.gpu
@DTYPES
@BIAS
def test_on_cuda_linear_equals_the_plain_one_on_cuda(bias: bool, dtype: torch.dtype):
    for shape in ((64, K), (2, 33, K)):
        model, twin = (m.cuda() for m in linear_pair(dtype, bias))
        x = torch.randn(shape, device="cuda").to(dtype).requires_grad_()
        found, expected = (outputs_and_gradients(m, lambda m: m(x), [x]) for m in (model, twin))  # noqa: B023
        assert_equal_tensors(found, expected)


@pytest.mark.gpu
@DISPATCHES
@EXPERTS
def test_on_cuda_experts_equal_plain_ones_on_cuda(arch: str, implementation: str):
    experts, inputs = experts_and_inputs(arch, implementation)
    qq.convert(experts, "w4a16")
    twin, experts = plain_twin(experts).cuda(), experts.cuda()
    inputs = [t.detach().cuda() for t in inputs]
    for t in inputs[:2]:
        t.requires_grad_()
    found, expected = (_deterministic(m, inputs, "batched_mm") for m in (experts, twin))
    assert_equal_tensors(found, expected)
