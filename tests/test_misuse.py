"""Contract under test: a converted model that is copied, moved or used twice at once is right or refused."""

import copy
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bits import assert_same_bits
from small_modules import fill, linears
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import quads_qat as qq
from quads_qat import library, ops, reference
from quads_qat.experts_dispatch import StandsFor

X = torch.eye(32)


def trainer() -> nn.Module:
    return qq.convert(fill(linears("layers.0.q_proj", "layers.1.q_proj")), "w4a16")


def saved_and_loaded(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded])


def swapped(model: nn.Module) -> None:
    layers = model.layers._modules
    layers["0"], layers["1"] = layers["1"], layers["0"]


def copied_over(model: nn.Module) -> None:
    model.layers._modules["0"] = copy.deepcopy(model.layers._modules["1"])


def of_another_model(model: nn.Module) -> None:
    model.layers._modules["0"] = trainer().layers._modules["0"]


def plain(model: nn.Module) -> None:
    model.layers._modules["0"].q_proj = nn.Linear(32, 32)


def removed(model: nn.Module) -> None:
    del model.layers._modules["0"]


@pytest.mark.parametrize("change", [swapped, copied_over, of_another_model, plain, removed])
def test_modules_that_are_not_those_converted_are_refused(change: Callable[[nn.Module], None]):
    model = trainer()
    list(qq.export_weights(model, "modelopt"))
    change(model)
    message = r"layers\.0\.q_proj is not the module that was converted under this name"
    with pytest.raises(ValueError, match=f"^export_weights: {message}"):
        list(qq.export_weights(model, "modelopt"))
    with pytest.raises(ValueError, match=f"^step: {message}"):
        qq.step(model)
    with pytest.raises(ValueError, match=f"^full_precision: {message}"), qq.full_precision(model):
        pass


def test_overlapping_blocks_of_full_precision_and_observation_end_with_the_last():
    model = trainer()
    quantized, master = model.layers._modules["0"].q_proj, model.layers._modules["0"].q_proj.weight
    wanted = quantized(X)
    a, b = qq.full_precision(model), qq.full_precision(model)
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    assert_same_bits(quantized(X), nn.functional.linear(X, master))
    b.__exit__(None, None, None)
    assert_same_bits(quantized(X), wanted)
    a, b = qq.observe_activations(model), qq.observe_activations(model)
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    quantized(X)
    b.__exit__(None, None, None)
    quantized(100 * X)
    assert quantized.observer.amax == 1


@COPIES
def test_a_copy_made_inside_a_context_is_outside_of_it(copied: Callable[[nn.Module], nn.Module]):
    model = trainer()
    wanted = model.layers._modules["0"].q_proj(X)
    with qq.full_precision(model), qq.observe_activations(model):
        inside = copied(model).layers._modules["0"].q_proj
    assert_same_bits(inside(100 * X), 100 * wanted)
    assert inside.observer.amax is None
    with qq.accumulate(model):
        model.layers._modules["0"].q_proj(X)
        copy_of = copied(model)
    with torch.no_grad():
        copy_of.layers._modules["0"].q_proj.weight.mul_(2)
    assert_same_bits(copy_of.layers._modules["0"].q_proj(X), 2 * wanted)
    with qq.accumulate(copy_of):
        assert_same_bits(copy_of.layers._modules["0"].q_proj(X), 2 * wanted)


def test_a_weight_sync_inside_another_is_refused():
    rollout = qq.convert(tiny_model("qwen3_moe"), "w4a4_residual")
    weights = [
        list(qq.export_weights(qq.convert(tiny_model("qwen3_moe", seed=s), "w4a16"), "modelopt")) for s in (1, 2)
    ]

    copies = []

    def stream():
        for i, item in enumerate(weights[0]):
            if i == 9:
                copies.append(copy.deepcopy(rollout))
                qq.update_weights(rollout, weights[1])
            yield item

    with pytest.raises(RuntimeError, match="another sync of this rollout is under way"):
        qq.update_weights(rollout, stream())
    with pytest.raises(RuntimeError, match="send all weights again"):
        rollout(torch.arange(3, 9)[None])
    qq.update_weights(rollout, weights[1])
    fresh = qq.convert(tiny_model("qwen3_moe", seed=2), "w4a4_residual").state_dict()
    qq.update_weights(copies[0], weights[1])  # a copy made half-way can be made whole
    for model in (rollout, copies[0]):
        for name, tensor in model.state_dict().items():
            assert_same_bits(tensor, fresh[name], name)


def test_an_observation_under_inference_mode_serves_training():
    model = qq.convert(fill(linears("q_proj")), "w4a4", activation_scale="static")
    with torch.inference_mode(), qq.observe_activations(model):
        model.q_proj(X)
    model.q_proj(X.clone().requires_grad_()).sum().backward()
    assert model.q_proj.weight.grad is not None


@pytest.mark.parametrize(("dtype", "other"), [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
def test_autocast_to_the_other_16_bit_dtype(dtype: torch.dtype, other: torch.dtype):
    x = torch.randn(4, 32).to(dtype)
    wanted = ops.fake_quantize(x), ops.amax(x, x * 2), ops.quantize_activation(x)[0]
    with torch.autocast("cpu", dtype=other):
        found = ops.fake_quantize(x), ops.amax(x, x * 2), ops.quantize_activation(x)[0]
    for a, b in zip(found, wanted, strict=True):
        assert_same_bits(a, b)
    model = qq.convert(fill(linears("q_proj")).to(dtype), "w4a16")
    with torch.autocast("cpu", dtype=other):
        model.q_proj(x).sum().backward()
    assert model.q_proj.weight.grad is not None


@pytest.mark.parametrize("function", [ops.quantize, ops.fake_quantize, ops.quantize_swizzled])
@pytest.mark.parametrize("scale", ["per_tensor_scale", "tensor_amax"])
def test_a_scale_that_wants_a_gradient_gets_none(function: Callable[..., object], scale: str):
    result = function(torch.ones(2, 32), **{scale: torch.tensor(1.0, requires_grad=True)})
    tensors = result if isinstance(result, tuple) else [result]
    tensors = [t for r in tensors for t in ([r] if isinstance(r, Tensor) else [r.qdata, r.per_tensor_scale])]
    assert not any(t.requires_grad for t in tensors)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dim"), [((32,), (-1,)), ((48,), (0,)), ((3, 32), (1,)), ((3, 32), (-1,)), ((2, 3, 32), (1, 2))]
)
def test_the_shape_of_an_amax_is_the_reference_s(shape: tuple[int, ...], dim: tuple[int, ...]):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    on = x.cuda() if torch.cuda.is_available() else x
    found = library.amax([on, on * 2], list(dim), "triton").cpu()
    assert_same_bits(found, reference.amax(x, x * 2, dim=dim))


@pytest.mark.gpu
def test_activations_of_one_row():
    x = torch.randn(32, generator=torch.Generator().manual_seed(0))
    wanted, _ = ops.quantize_activation(x, residual=qq.ResidualConfig(scope="token"))
    on = x.cuda() if torch.cuda.is_available() else x
    found, _ = ops.quantize_activation(on, residual=qq.ResidualConfig(scope="token"), backend="triton")
    assert_same_bits(found.cpu(), wanted)


def test_scales_that_do_not_divide_the_rows_are_refused():
    pytest.importorskip("triton", reason="Triton has no build for this platform")
    from quads_qat.kernels.launch import blocks_of

    with pytest.raises(ValueError, match=re.escape("32 per-tensor scales for 1 rows")):
        blocks_of(torch.ones(32), torch.ones(32))


@pytest.mark.parametrize(
    ("rule", "warned"), [(r"attn\.q_proj", True), (r"attn\.[qkv]_proj", False), (r"mlp\.down", False)]
)
def test_a_rule_that_parts_what_engines_fuse(rule: str, warned: bool, recwarn: pytest.WarningsRecorder):
    model = fill(linears("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.down_proj"))
    qq.convert(model, "w4a16", groups=[rule])
    found = [str(w.message) for w in recwarn if "attn.q_proj and attn.k_proj get a scale each" in str(w.message)]
    assert len(found) == warned


# ------------------------------------------------------------------------------------------------------------ gradients


class Skip(nn.Module):
    """A residual connection: a gradient arrives around a linear that passes none on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


@pytest.mark.parametrize("fraction", [0, 0.5])
@pytest.mark.parametrize("wants", ["x", "bias"])
def test_a_gradient_never_goes_around_what_quantizes_activations_in_silence(fraction: float, wants: str):
    model = qq.convert(fill(Skip()), "w4a4_residual", residual=qq.ResidualConfig(fraction=fraction))
    x = X.clone().requires_grad_(wants == "x")
    model.linear.bias.requires_grad_(wants == "bias")
    with torch.no_grad():
        without = model(x)
    out = model(x)  # no error: only a backward pass would be wrong
    assert_same_bits(out, without)
    with pytest.raises(RuntimeError, match=r"_linear lets no gradient through .*weights_only=True"):
        out.sum().backward()


def test_a_gradient_never_goes_around_packed_experts_in_silence():
    rollout = qq.convert(tiny_model("qwen3_moe"), "w4a4_residual")
    embeddings = torch.randn(1, 3, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match="lets no gradient through its quantized activations"):
        rollout.model.layers[0].mlp(embeddings).sum().backward()
    terms, _ = ops.quantize_activation(embeddings)
    with pytest.raises(RuntimeError, match="quantize_activation lets no gradient through"):
        terms.sum().backward()


@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "x",
    [X[0], X, X.view(2, 16, 32), X.view(16, 2, 32).transpose(0, 1), X.view(2, 2, 8, 32)],
    ids=["1d", "2d", "3d", "strided", "4d"],
)
def test_outputs_of_trainers_can_be_changed_in_place(mode: str, bias: bool, x: Tensor):
    """As those of a linear can: ``nn.ReLU(inplace=True)``, ``q.mul_(scale)``."""
    model = qq.convert(fill(linears("q_proj", bias=bias)), mode)
    for change in (torch.relu_, lambda y: y.mul_(0.5), lambda y: y.view(*y.shape[:-1], 2, 8).mul_(0.5)):
        grads = []
        for out in (model.q_proj(x), model.q_proj(x).clone()):
            model.zero_grad()
            change(out).sum().backward()
            grads.append(model.q_proj.weight.grad)
        assert_same_bits(*grads)


@pytest.mark.parametrize("x", [X[0], X.view(2, 16, 32), X.view(16, 2, 32).transpose(0, 1)], ids=["1d", "3d", "strided"])
def test_outputs_of_compiled_trainers_can_be_changed_in_place(x: Tensor):
    layers = nn.Sequential(nn.Linear(32, 48), nn.ReLU(inplace=True), nn.Linear(48, 16))
    model = qq.convert(fill(layers), "w4a16")
    grads = []
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        run(x).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for pair in zip(*grads, strict=True):
        assert_same_bits(*pair)


def test_outputs_of_a_packed_base_can_be_changed_in_place():
    model = qq.convert(fill(linears("q_proj", bias=True)), "w4a4_residual", weights_only=True)
    grads = []
    for i in range(2):
        x = X.view(2, 16, 32).clone().requires_grad_()
        out = model.q_proj(x)
        torch.relu_(out.clone() if i else out).sum().backward()
        grads.append(x.grad)
    assert_same_bits(*grads)


@pytest.mark.parametrize("compiled", [False, True])
def test_codes_that_inference_mode_made_serve_training(compiled: bool):
    """Old log-probs under inference_mode, then a training step, in one block of ``accumulate``."""
    model = qq.convert(fill(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))), "w4a16")
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    wanted = model(X)
    for forward in (run, model):
        with qq.accumulate(model):
            with torch.inference_mode():
                old = [run(X), run(X)]
            new = forward(X)
            new.sum().backward()
        for out in (*old, new):
            assert_same_bits(out, wanted)


def test_scales_that_were_loaded_in_inference_mode_serve_training():
    model = qq.convert(fill(linears("q_proj")), "w4a4", activation_scale="static")
    with torch.inference_mode():
        with qq.observe_activations(model):
            model.q_proj(X)
        qq.load_quant_state_dict(model, qq.quant_state_dict(model))
    model.q_proj(X.clone().requires_grad_()).sum().backward()
    assert model.q_proj.weight.grad is not None


# --------------------------------------------------------------------------------------------------------------- states


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    ("key", "cast"),
    [
        ("weight_qdata", lambda t: t.bfloat16()),
        ("weight_block_scale", lambda t: t.view(torch.uint8)),  # 56 is no longer the bits of 1.0, but a number
        ("weight_block_scale", lambda t: t.float()),
        ("weight_per_tensor_scale", lambda t: t.bfloat16()),
        ("weight_stored_scale", lambda t: t.double()),
        ("input_amax", lambda t: t.bfloat16()),
        ("residual_mask", lambda t: t.float()),
    ],
)
def test_a_state_that_was_cast_is_refused(key: str, cast: Callable[[Tensor], Tensor], assign: bool):
    def rollout(seed: int) -> nn.Module:
        static = qq.ResidualConfig(scope="static")
        model = qq.convert(fill(linears("q_proj"), seed=seed), "w4a4_residual", residual=static, recipe="modelopt")
        model.q_proj.set_calibrated("weight", "input_amax", torch.tensor(3.3))
        model.q_proj.set_calibrated("weight", "residual_mask", torch.arange(32) < 16)
        return model

    model, state = rollout(0), rollout(1).state_dict()
    before = copy.deepcopy(model.state_dict())
    name = f"q_proj.{key}"
    state[name] = cast(state[name])
    with pytest.raises(
        RuntimeError, match=rf"{name} must be torch\.\w+, got {state[name].dtype}; .*nothing was loaded"
    ):
        model.load_state_dict(state, assign=assign)
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, before[name], name)


# ------------------------------------------------------------------------------------------------------- default device


def test_what_is_made_on_the_way_is_where_the_model_is_whatever_the_default_device(tmp_path: Path):
    """On a GPU as default, half a model on the CPU would meet half a model there; ``meta`` shows every such tensor."""
    trainer = qq.convert(tiny_model("qwen3_moe"), "w4a16", schedule=qq.Schedule(weight_scale="ema"))
    ids = torch.arange(3, 15)[None]
    with torch.no_grad(), qq.observe_activations(trainer):
        trainer(ids)
    with torch.device("meta"):
        qq.step(trainer, track_codes=True)
        state = qq.quant_state_dict(trainer)
        qq.load_quant_state_dict(trainer, state)
        qq.export_checkpoint(trainer, tmp_path / "made", dialect="modelopt", activations="observed")
        qq.dequantize_checkpoint(tmp_path / "made", tmp_path / "plain")
        qq.quantize_checkpoint(tmp_path / "plain", tmp_path / "again", dialect="compressed-tensors")
        qq.convert_dialect(tmp_path / "made", tmp_path / "other", dialect="compressed-tensors")
        rollout = qq.load_rollout(tmp_path / "made", activation_scale="static")
        model = qq.load_model(tmp_path / "made")
        buckets = list(qq.bucketed(qq.export_weights(trainer, "compressed-tensors"), 1 << 20))
        qq.update_weights(rollout, qq.unbucketed(buckets))
        assert qq.verify(trainer, tmp_path / "made").ok
    wanted = qq.load_rollout(tmp_path / "made", activation_scale="static")
    for made, expected in ((rollout, wanted), (model, qq.load_model(tmp_path / "made"))):
        everything = dict(made.named_buffers()) | dict(made.named_parameters())
        assert {t.device.type for t in everything.values()} == {"cpu"}
        assert_same_bits(made(ids).logits, expected(ids).logits)
    assert qq.diagnose(model, wanted, ids).gap["delta_weight"].max == 0
    with torch.device("meta"):
        qq.gap_stats(*(torch.zeros(3, device="cpu"),) * 2)


# --------------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("mode", ["w4a16", "w4a4"])
def test_dtypes_that_cannot_be_quantized_are_refused_by_name(mode: str):
    model = qq.convert(fill(linears("layers.0.q_proj")), mode)
    linear = model.layers._modules["0"].q_proj
    with pytest.raises(TypeError, match=r"layers\.0\.q_proj\.weight: its input must be .*, got torch\.int64; cast it"):
        linear(X.long())
    model.double()
    with pytest.raises(TypeError, match=r"layers\.0\.q_proj\.weight: master weights must be .*, got torch\.float64"):
        linear(X.double())
    model.float()
    assert linear(X).isfinite().all()
    experts = qq.convert(tiny_model("qwen3_moe"), mode).double().model.layers[0].mlp.experts
    with pytest.raises(TypeError, match=r"mlp\.experts\.gate_up_proj: master weights must be .*, got torch\.float64"):
        experts(torch.zeros(1, 64).double(), torch.tensor([[0, 1]]), torch.ones(1, 2).double())


@pytest.mark.parametrize(("shape", "named"), [((32, 0), r"\[0, 32\]"), ((0, 8), r"\[8, 0\]")])
def test_a_weight_without_elements_is_refused(shape: tuple[int, int], named: str):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(*shape))
    with pytest.raises(ValueError, match=rf"convert: 1\.weight {named} holds nothing; remove it, or exclude"):
        qq.convert(model, "w4a16")
    qq.convert(model, "w4a16", exclude=["1"])


def test_a_weight_that_is_not_there_yet_is_refused():
    """It would become a plain linear, which ``coverage`` lists as something else."""
    model = nn.Sequential(nn.Linear(32, 32), nn.LazyLinear(16))
    with pytest.raises(ValueError, match=r"convert: 1 has no weight before its first forward .*run a batch first"):
        qq.convert(model, "w4a16")
    model(X)
    assert len(qq.coverage(qq.convert(model, "w4a16")).quantized) == 2


# ------------------------------------------------------------------------------------------------------------- wrappers


def one_compiled(model: nn.Module) -> nn.Module:
    attention = model.layers._modules["0"]
    attention.q_proj = torch.compile(attention.q_proj, backend="eager")
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    model.layers._modules["1"] = checkpoint_wrapper(model.layers._modules["1"])
    return model


@pytest.mark.parametrize("mode", ["w4a16", "w4a4_residual"])
@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (
            lambda m: torch.compile(m, backend="eager"),
            r"the model is wrapped by torch\.compile, whose names \(_orig_mod",
        ),
        (nn.DataParallel, r"the model is wrapped by DataParallel, whose names \(module\.\)"),
        (lambda m: nn.ModuleDict({"policy": nn.DataParallel(m)}), "policy is wrapped by DataParallel"),
        (one_compiled, r"layers\.0\.q_proj is wrapped by torch\.compile"),  # it would leave the scale group of q, k, v
        (checkpointed, r"layers\.1 is wrapped by activation checkpointing"),
    ],
)
def test_a_model_that_was_wrapped_before_is_refused(wrap: Callable[[nn.Module], nn.Module], message: str, mode: str):
    model = wrap(fill(linears(*(f"layers.{i}.{name}_proj" for i in range(2) for name in "qkv"))))
    with pytest.raises(ValueError, match=f"^convert: {message}.*; convert first, then wrap"):
        qq.convert(model, mode)


@pytest.mark.parametrize(
    "wrap",
    [checkpoint_wrapper, lambda m: torch.compile(m, backend="eager"), lambda m: torch.compile(checkpoint_wrapper(m))],
)
def test_layers_that_are_wrapped_afterwards_are_exported_and_synced_under_their_names(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
):
    """As torchtitan compiles and checkpoints: layer by layer, in the place of each."""

    def made(mode: str, seed: int, wrap: Callable[[nn.Module], nn.Module] | None) -> nn.Module:
        model = qq.convert(tiny_model("qwen3_moe", seed=seed), mode)
        for i, layer in enumerate(model.model.layers):
            model.model.layers[i] = layer if wrap is None else wrap(layer)
        return model

    wanted, model = made("w4a16", 0, None), made("w4a16", 0, wrap)
    stream = dict(qq.export_weights(model, "modelopt"))
    for name, tensor in qq.export_weights(wanted, "modelopt"):
        assert_same_bits(stream.pop(name), tensor, name)
    assert not stream
    for trainer, path in ((wanted, tmp_path / "wanted"), (model, tmp_path / "found")):
        qq.export_checkpoint(trainer, path, dialect="compressed-tensors")
    assert (tmp_path / "found" / "config.json").read_text() == (tmp_path / "wanted" / "config.json").read_text()
    assert qq.verify(model, tmp_path / "found").ok
    assert str(qq.contract_of(model)) == str(qq.contract_of(wanted))
    rollout = made("w4a4_residual", 1, wrap)
    qq.update_weights(rollout, qq.export_weights(model, "modelopt"))
    state = made("w4a4_residual", 0, None).state_dict()
    for name, tensor in rollout.state_dict().items():
        assert_same_bits(tensor, state[name.replace("_orig_mod.", "")], name)
    qq.revert(model)
    assert not any(isinstance(module, StandsFor) for module in model.modules())
