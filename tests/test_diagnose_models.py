"""``diagnose``: identities between the parts of the gap, statistics against values by hand, and what it refuses."""

import copy
import dataclasses
import io
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from rich.console import Console
from small_modules import TINYMOE, ListModel, fill
from test_cli import assert_one_line_error, quads_qat
from tiny_models import tiny_inputs, tiny_model
from torch import Tensor, nn

import quads_qat as qq
from quads_qat.diagnose import _flips
from quads_qat.diagnosis import PARTS, Diagnosis
from quads_qat.formats import BLOCK_SIZE

MODELS = ["qwen3", "qwen3_moe", "gpt_oss", "llama4"]  # dense; fused experts; transposed with bias; sorted by token
NAIVE = qq.ResidualConfig(fraction=0.0)


def converted(model: nn.Module, mode: str, **how) -> nn.Module:
    return qq.convert(copy.deepcopy(model), mode, **how)


def rolled_out(model: nn.Module, **how) -> nn.Module:
    return converted(model, "w4a4_residual", **how)


def ids_for(model: nn.Module) -> Tensor:
    return tiny_inputs(model)["input_ids"]  # pyright: ignore[reportArgumentType]


def largest(found: Diagnosis) -> list[float]:
    return [found.gap[part].max for part in PARTS]


def printed(found: Diagnosis, width: int = 160) -> str:
    """As a terminal shows it, spaces of lines that wrap as one."""
    console = Console(file=io.StringIO(), width=width)
    console.print(found)
    return " ".join(console.file.getvalue().split())


def assert_parts_add_up(found: Diagnosis) -> None:
    counted = torch.isfinite(found.delta)
    total = found.delta_weight + found.delta_act + found.delta_num
    assert torch.equal(total[counted], found.delta[counted])


# ----------------------------------------------------------------------------------------------------------- identities


@pytest.mark.parametrize("arch", MODELS)
@pytest.mark.parametrize("mode", [None, "w4a16", "w4a4"])
def test_a_model_and_its_copy_have_no_gap_of_any_kind(arch: str, mode: str | None):
    model = tiny_model(arch)
    trainer = model if mode is None else converted(model, mode)
    found = qq.diagnose(trainer, copy.deepcopy(trainer), ids_for(model))
    assert largest(found) == [0.0] * 4
    assert all((e.total, e.weight, e.act, e.num) == (0.0,) * 4 for e in (*found.layers, *found.modules))
    assert len(found.layers) == 2
    assert all(gemm.local_error == gemm.weight_error == 0.0 for gemm in found.gemms)
    assert all(router.rate == 0.0 for router in found.routers)
    assert found.channels == []
    assert found.other_weights == []


@pytest.mark.parametrize(
    ("arch", "experts"), [*((arch, "eager") for arch in MODELS), ("qwen3_moe", "grouped_mm"), ("gpt_oss", "grouped_mm")]
)
def test_a_w4a16_trainer_and_its_rollout_multiply_by_the_same_weights(arch: str, experts: str):
    model = tiny_model(arch, experts_implementation=experts)
    trainer = converted(model, "w4a16")
    found = qq.diagnose(trainer, rolled_out(trainer, residual=NAIVE), ids_for(model))
    assert found.gap["delta_weight"].max == 0.0
    assert found.gap["delta_act"].max > 0.01
    assert all(gemm.weight_error == 0.0 and gemm.weight.grid_noise > 0.05 for gemm in found.gemms)
    assert_parts_add_up(found)


@pytest.mark.parametrize("arch", MODELS)
def test_weights_only_leaves_nothing_to_activations(arch: str):
    model = tiny_model(arch)
    found = qq.diagnose(model, rolled_out(model, weights_only=True), ids_for(model))
    assert found.gap["delta_act"].max == 0.0
    assert found.gap["delta_weight"].max > 0.01
    assert all(gemm.activation is None and gemm.compensated is None for gemm in found.gemms)
    assert {channel.cause for channel in found.channels} == {"weight"}
    assert_parts_add_up(found)


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_a_w4a4_trainer_and_its_naive_rollout_do_the_same_with_activations(arch: str):
    model = tiny_model(arch)
    trainer = converted(model, "w4a4")
    found = qq.diagnose(trainer, rolled_out(trainer, residual=NAIVE), ids_for(model))
    assert found.gap["delta_weight"].max == found.gap["delta_act"].max == 0.0
    found = qq.diagnose(converted(model, "w4a16"), rolled_out(trainer, residual=NAIVE), ids_for(model))
    assert found.gap["delta_weight"].max == 0.0
    assert found.gap["delta_act"].max > 0.01


@pytest.mark.parametrize("expert_mask", ["per_expert", "before_dispatch"])
@pytest.mark.parametrize("scope", ["token", "block", "batch", "static"])
def test_in_fp32_the_trainer_with_all_ingredients_is_the_rollout(scope: str, expert_mask: str):
    """What remains is the order of fp32 sums; another mask, scale or weight anywhere would cost 1000 times as much."""
    trainer = converted(tiny_model("qwen3_moe", dtype=torch.float32), "w4a16")
    residual = qq.ResidualConfig(fraction=0.25, scope=scope, expert_mask=expert_mask)
    rollout = rolled_out(trainer, residual=residual, activation_scale="static" if scope == "static" else "per_tensor")
    ids = ids_for(trainer)[:1]
    if scope == "static":
        qq.calibrate(rollout, [ids])
    found = qq.diagnose(trainer, rollout, ids)
    assert found.gap["delta_act"].max > 0.01
    assert found.gap["delta_num"].max < 1e-5
    assert all(0 < gemm.compensated < gemm.activation.grid_noise for gemm in found.gemms if gemm.rows)


def test_a_model_in_fp32_against_bf16_differs_in_numerics_alone():
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    found = qq.diagnose(model, copy.deepcopy(model).float(), ids_for(model))
    assert found.gap["delta_weight"].max == found.gap["delta_act"].max == 0.0
    assert found.gap["delta_num"].max == found.gap["delta"].max > 0
    assert_parts_add_up(found)


def test_a_tensor_that_no_side_quantizes_counts_as_weight_and_is_named():
    model = tiny_model("qwen3_moe")
    trainer = converted(model, "w4a16")
    rollout = rolled_out(trainer, weights_only=True)
    rollout.model.norm.weight.data.mul_(1.5)  # a weight sync that forgot one
    found = qq.diagnose(trainer, rollout, ids_for(model))
    assert found.other_weights == ["model.norm.weight"]
    assert found.gap["delta_weight"].max == found.gap["delta"].max > 0.01
    assert found.gap["delta_num"].max == 0.0
    assert_same_bits(trainer.model.norm.weight.detach(), model.model.norm.weight.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_cast_of_fp32_masters_is_no_stale_sync(dtype: torch.dtype):
    trainer = converted(tiny_model("qwen3_moe", dtype=torch.float32), "w4a16")
    rollout = rolled_out(trainer).to(dtype)
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(1.001)
    qq.update_weights(rollout, qq.export_weights(trainer, "modelopt"))
    rest = [name for name, _ in trainer.named_parameters() if name.endswith(("norm.weight", "gate.weight"))]
    found = qq.diagnose(trainer, rollout, ids_for(trainer))
    assert set(found.cast_weights) == set(found.other_weights) > set(rest)
    assert set(found.cast_weights.values()) == {"bfloat16"}
    shown = printed(found)
    assert "differ by the cast to bfloat16 alone" in shown
    assert "MixedPrecisionPolicy(param_dtype=torch.bfloat16)" in shown
    assert "stale" not in shown
    with torch.no_grad():
        rollout.model.norm.weight[3] += 1
    found = qq.diagnose(trainer, rollout, ids_for(trainer))
    assert set(found.other_weights) - set(found.cast_weights) == {"model.norm.weight"}
    assert "1 tensor (model.norm.weight) that is not quantized differs: a stale weight sync?" in printed(found)


def test_experts_that_are_linears_of_their_own():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.head = nn.Embedding(64, 32), ListModel(), nn.Linear(32, 64)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.body(self.embed(ids)))

    trainer = converted(fill(Model(), scale=0.2), "w4a16", exclude=["head"])
    ids = torch.arange(20).view(2, 10)
    found = qq.diagnose(trainer, rolled_out(trainer, residual=NAIVE), ids)
    assert found.gap["delta_weight"].max == 0.0
    assert found.gap["delta_num"].max == 0.0
    assert {gemm.layer for gemm in found.gemms} == {"body.layers.0", "body.layers.1"}
    assert sum(gemm.rows for gemm in found.gemms if gemm.name.endswith("0.mlp.experts.0.up_proj.weight")) < 20


# ------------------------------------------------------------------------------------------------------------- by hand


def test_deltas_are_the_differences_of_log_probabilities():
    model = tiny_model("qwen3")
    rollout = rolled_out(model, residual=NAIVE)
    ids = ids_for(model)

    def log_probs(of: nn.Module) -> Tensor:
        with torch.no_grad():
            logits = torch.cat([of(row[None]).logits for row in ids])
        return (logits[:, :-1].float() / 0.7).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1).double()

    found = qq.diagnose(model, rollout, ids, temperature=0.7)
    expected = log_probs(rollout) - log_probs(model)
    assert (found.delta - expected).abs().max() <= 2.0**-32
    decoded = copy.deepcopy(model)
    for name, module in rollout.named_modules():
        if isinstance(module, qq.residual.ResidualCompensatedLinear):
            decoded.get_submodule(name).weight.data = module.weight
    assert (found.delta_weight - (log_probs(decoded) - log_probs(model))).abs().max() <= 2.0**-32


def test_masks_and_padding():
    model = tiny_model("qwen3_moe")
    rollout = rolled_out(model, residual=NAIVE)
    ids = ids_for(model)
    whole = qq.diagnose(model, rollout, ids)
    mask = torch.zeros(2, 4)
    mask[1, 2:] = 1
    some = qq.diagnose(model, rollout, ids, mask=mask)
    assert some.gap["delta"].tokens == 2
    assert torch.equal(some.delta[1, 2:], whole.delta[1, -2:])
    assert torch.isnan(some.delta).sum() == 6
    assert [value is None for value in some.positions["delta"]] == [True, True, False, False]
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.int64), ids, torch.zeros(2, 2, dtype=torch.int64)], dim=1)
    attention = torch.zeros_like(padded)
    attention[:, 3:-2] = 1
    found = qq.diagnose(model, rollout, padded, attention_mask=attention)
    assert torch.equal(found.delta[:, 3:-2], whole.delta)
    assert found.gap == whole.gap


def test_flips_of_a_constructed_case():
    trainer = torch.tensor([[0, 1], [2, 3], [0, 3], [1, 2]])
    rollout = torch.tensor([[1, 0], [2, 0], [1, 2], [1, 2]])  # the same set, one other, both others, the same
    assert _flips(trainer, rollout) == (2, 3, 4, 8)


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "llama4"])
def test_a_router_that_is_turned_around_flips_for_every_token(arch: str):
    model = tiny_model(arch)
    other = copy.deepcopy(model)
    name = next(n for n, _ in model.named_parameters() if n.endswith(("mlp.gate.weight", "router.weight")))
    with torch.no_grad():
        other.get_parameter(name).neg_()
        if arch == "gpt_oss":  # a bias would keep the order
            for m in (model, other):
                m.get_parameter(name.replace("weight", "bias")).zero_()
    found = qq.diagnose(model, other, ids_for(model))
    first = found.routers[0]
    assert first.name.startswith(name.rpartition(".")[0].rpartition(".")[0])
    assert first.rate == 1.0
    assert first.slots > 0.5
    assert found.other_weights == [name]


def test_noise_and_channels_of_one_linear_by_hand():
    generator = torch.Generator().manual_seed(0)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.up, self.head = nn.Embedding(64, 32), nn.Linear(32, 48), nn.Linear(48, 64)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.up(self.embed(ids)))

    model = fill(Model())
    with torch.no_grad():
        model.up.weight[:, 5] = 0.0
        model.embed.weight[:, 7] *= 30  # an outlier channel: the rest of its block sinks into the dead zone
    rollout = rolled_out(model, residual=NAIVE, exclude=["head"])
    ids = torch.randint(0, 64, (1, 9), generator=generator)
    found = qq.diagnose(model, rollout, ids)
    (gemm,) = found.gemms
    x, w = model.embed(ids[0]).detach(), model.up.weight.detach()
    wq = rollout.up.weight
    qx = qq.ops.quantize(x, tensor_amax=x.abs().amax(-1, keepdim=True))
    xq = qq.ops.dequantize(qx, torch.float32)
    assert gemm.rows == 9
    assert gemm.weight.dead_zone == ((wq == 0) & (w != 0)).sum().item() / (w != 0).sum().item()
    assert gemm.activation.dead_zone == ((xq == 0) & (x != 0)).sum().item() / (x != 0).sum().item() > 0.2
    assert gemm.weight.grid_noise == pytest.approx(((w - wq).norm() / w.norm()).item(), rel=1e-5)
    assert gemm.activation.grid_noise == pytest.approx(((x - xq).norm() / x.norm()).item(), rel=1e-5)
    assert gemm.compensated == gemm.activation.grid_noise
    assert gemm.weight_error == pytest.approx(gemm.weight.grid_noise, rel=1e-5)
    amax = x.view(9, 2, BLOCK_SIZE).abs().amax(-1)
    scale = 6 * qx.block_scale.float() * qx.per_tensor_scale
    assert gemm.activation.scale_error == pytest.approx((scale / amax - 1).abs().mean().item(), rel=1e-5)
    assert 0 < gemm.activation.scale_error < 0.07  # half a step of E4M3
    difference = F.linear(xq, wq) - F.linear(x, w)
    assert gemm.local_error == pytest.approx((difference.norm() / F.linear(x, w).norm()).item(), rel=1e-5)
    by_act = (x - xq).square().sum(0) * wq.square().sum(0)
    by_weight = x.square().sum(0) * (w - wq).square().sum(0)
    worst = found.channels[0]
    assert (worst.channel, worst.cause) == (7, "weight")
    assert worst.share == pytest.approx((by_weight[7] / (by_act + by_weight).sum()).item(), rel=1e-5)
    assert worst.error == pytest.approx((by_weight[7].sqrt() / F.linear(x, w).norm()).item(), rel=1e-5)
    assert [c.error for c in found.channels] == sorted((c.error for c in found.channels), reverse=True)
    assert all(c.channel != 5 or c.cause == "weight" for c in found.channels)  # its weights are 0


def test_what_a_module_returns_by_hand():
    model = tiny_model("qwen3")
    rollout = rolled_out(model, weights_only=True)
    ids = ids_for(model)[:1]
    with torch.no_grad():
        a, b = (m(ids, output_hidden_states=True).hidden_states[1].float() for m in (model, rollout))
    found = qq.diagnose(model, rollout, ids)
    first = found.layers[0]
    assert first.name == "model.layers.0"
    assert first.total == pytest.approx(((a - b).norm() / a.norm()).item(), rel=1e-5)
    assert first.weight == first.total
    assert first.act == first.num == 0.0
    assert found.modules[-1].name == "lm_head"


# ----------------------------------------------------------------------------------------------------- both models stay


def test_both_models_are_left_as_they_were():
    model = tiny_model("qwen3_moe").train()
    trainer = converted(model, "w4a16")
    rollout = rolled_out(model, residual=NAIVE)
    before = [{n: t.clone() for n, t in m.state_dict().items()} for m in (trainer, rollout)]
    parameters = list(trainer.parameters())
    qq.diagnose(trainer, rollout, ids_for(model))
    for m, state in zip((trainer, rollout), before, strict=True):
        assert m.training
        assert not any("forward" in module.__dict__ or module._forward_hooks for module in m.modules())
        for name, tensor in m.state_dict().items():
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), state[name].reshape(-1).view(torch.uint8))
    assert all(a is b for a, b in zip(parameters, trainer.parameters(), strict=True))


def test_results_as_json_table_and_figure(tmp_path: Path):
    model = tiny_model("qwen3_moe")
    found = qq.diagnose(model, rolled_out(model), ids_for(model), mask=torch.tensor([[1, 0], [1, 0]]))
    for value in (found.to_dict(), found.to_dict(tokens=True)):
        assert json.loads(json.dumps(value, allow_nan=False)) == value
    assert "tokens" not in found.to_dict()
    tokens = found.to_dict(tokens=True)["tokens"]
    assert tokens["delta"][0] == [found.delta[0, 0].item(), None]
    console = Console(file=io.StringIO(), width=160)
    console.print(found)
    shown = console.file.getvalue()
    for plain in (str(found), repr(found)):
        assert "\x1b" not in plain
        assert plain.split() == printed(found, width=100).split()
        assert max(map(len, plain.splitlines())) <= 100
    for word in ("delta_weight", "model.layers.1", "router flips", "gate_up_proj", "channel"):
        assert word in shown
    wide = dataclasses.replace(found.top_modules()[0], local_error=1.234e-5, weight_error=1.234e-6)
    wide = dataclasses.replace(
        found, gemms=[dataclasses.replace(wide, name="model.layers.11.mlp.experts.gate_up_proj")]
    )
    narrow = printed(wide, width=80)  # as in a pipe
    noise = [n for n in (wide.gemms[0].weight, wide.gemms[0].activation) if n is not None]
    numbers = ["1.23e-05", "1.23e-06", *(f"{n.dead_zone:.1%} {n.grid_noise:.4f}" for n in noise)]
    assert " ".join(numbers) in narrow
    assert "dead: share of nonzero values that became 0" in narrow
    found.plot().savefig(tmp_path / "gap.png")
    assert (tmp_path / "gap.png").stat().st_size > 10_000


# ------------------------------------------------------------------------------------------------------------- refusals


def test_refusals():
    model = tiny_model("qwen3_moe")
    trainer, rollout, ids = converted(model, "w4a16"), rolled_out(model), ids_for(model)
    refused = [
        ((rollout, trainer, ids), "trainer is a rollout model; the order is"),
        ((trainer, rollout, ids[:, :0]), r"integers \[B, T\] with B >= 1 and T >= 2, got torch.int64 \[2, 0\]"),
        ((trainer, rollout, ids[0]), r"got torch.int64 \[12\]"),
        ((trainer, rollout, ids.float()), "got torch.float32"),
        ((trainer, rollout, ids + 128), "must lie in the trainer's vocabulary of 128, got .* another tokenizer"),
        ((tiny_model("llama"), rollout, ids), "not of one architecture and vocabulary: .*experts is quantized and not"),
        ((nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 8)), rollout, ids), "have no linear or expert module of"),
        ((trainer, tiny_model("llama"), ids), "not of one architecture"),
    ]
    for arguments, message in refused:
        with pytest.raises(ValueError, match=message):
            qq.diagnose(*arguments)
    adapted = nn.Sequential(nn.Embedding(8, 16), nn.ModuleDict({"base_layer": nn.Linear(16, 8)}))
    with pytest.raises(ValueError, match="the trainer has adapters; pass the merged model"):
        qq.diagnose(adapted, rollout, ids)
    classifier = nn.Sequential(nn.Embedding(128, 16), nn.Linear(16, 8))
    with pytest.raises(ValueError, match="must return logits over its vocabulary, got 8 for token ids up to 1"):
        qq.diagnose(classifier, copy.deepcopy(classifier), ids)
    larger = tiny_model("qwen3_moe")
    larger.resize_token_embeddings(144)
    with pytest.raises(ValueError, match=r"embed_tokens.weight has the shapes \[128, 64\] and \[144, 64\]"):
        qq.diagnose(trainer, larger, ids)
    with pytest.raises(ValueError, match=r"mask must be \[B, C\] for the last C of input_ids \[B, T\], with 0 < C < T"):
        qq.diagnose(trainer, rollout, ids, mask=torch.ones(2, 12))
    with pytest.raises(ValueError, match="no tokens are counted"):
        qq.diagnose(trainer, rollout, ids, mask=torch.zeros(2, 3))
    with pytest.raises(ValueError, match="attention_mask must have the shape of input_ids"):
        qq.diagnose(trainer, rollout, ids, attention_mask=torch.ones(2, 3))


def test_a_rollout_after_a_failed_sync_is_refused():
    trainer = converted(tiny_model("qwen3"), "w4a16")
    rollout = rolled_out(trainer)
    half = list(qq.export_weights(trainer, "modelopt"))[:-3]
    with pytest.raises(ValueError, match="missing"):
        qq.update_weights(rollout, iter(half))
    with pytest.raises(ValueError, match="diagnose: the rollout is unusable: "):
        qq.diagnose(trainer, rollout, ids_for(trainer))


def test_a_nan_names_the_model():
    trainer = converted(tiny_model("qwen3"), "w4a16")
    rollout = rolled_out(trainer)
    rollout.model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="the rollout gives a token a log-probability that is NaN or inf"):
        qq.diagnose(trainer, rollout, ids_for(trainer))


# --------------------------------------------------------------------------------------------------------- command line


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diagnose") / "nvfp4"
    done = quads_qat("quantize", TINYMOE, path, "--weights-only")
    assert done.returncode == 0, done.stderr
    return path


def test_the_command_on_the_bundled_model(nvfp4: Path, tmp_path: Path):
    what = ("--text", TINYMOE / "heldout.txt", "--rows", 2, "--length", 8)
    figure = tmp_path / "gap.png"
    with pytest.warns(UserWarning, match="holds no tokenizer, .* the bytes of the text are taken for token ids"):
        done = quads_qat("diagnose", TINYMOE, nvfp4, *what, "--fraction", 0, "--json", "--plot", figure)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["gap.png"]
    found = json.loads(done.stdout)
    assert found["gap"]["delta"]["tokens"] == 14
    assert found["gap"]["delta_weight"]["max"] > 0.01
    assert found["gap"]["delta_act"]["max"] > 0.01
    assert [layer["name"] for layer in found["layers"]] == [f"model.layers.{i}" for i in range(4)]
    assert len(found["routers"]) == 4
    for trainer, mode in ((TINYMOE, ("--mode", "w4a16")), (nvfp4, ())):  # the same weights: masters quantized, decoded
        done = quads_qat("diagnose", trainer, nvfp4, *what, *mode, "--fraction", 0, "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["gap"]["delta_weight"]["max"] == 0.0
    naive = json.loads(done.stdout)["gap"]["delta_act"]
    gaps = []
    for scope in ("token", "batch"):
        residual = ("--residual-fraction", 0.5, "--residual-scope", scope)
        done = quads_qat("diagnose", nvfp4, nvfp4, *what, *residual, "--json")
        gaps.append(json.loads(done.stdout)["gap"]["delta_act"])
    assert naive != gaps[0] != gaps[1] != naive


def test_the_command_says_what_is_wrong_in_one_line(nvfp4: Path, tmp_path: Path):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert_one_line_error(quads_qat("diagnose", TINYMOE, nvfp4, "--text", empty), "has 0 tokens")
    assert_one_line_error(quads_qat("diagnose", TINYMOE, nvfp4, "--text", tmp_path / "no"), "cannot be read as text")
    text = ("--text", TINYMOE / "heldout.txt", "--rows", 1, "--length", 8)
    assert_one_line_error(quads_qat("diagnose", nvfp4, nvfp4, *text, "--mode", "w4a16"), "starts from BF16 masters")
    assert_one_line_error(quads_qat("diagnose", TINYMOE, TINYMOE, *text), "NVFP4")
    rollouts = quads_qat("diagnose", TINYMOE, nvfp4, *text, "--mode", "w4a4_residual")
    assert_one_line_error(rollouts, "'w4a4_residual' is not one of 'w4a16', 'w4a4'")
    assert_one_line_error(quads_qat("diagnose", TINYMOE, nvfp4, *text, "--plot", "gap.gif"), "--plot must end in")
