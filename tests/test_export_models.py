"""Contract under test: any model that ``convert`` takes can be exported: recipes, dtypes, zeros, plain modules."""

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from by_hand import CHECKPOINTS, config, decode, decoded, rewritten, tensors
from tiny_models import tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import quads_qat as qq
from quads_qat import Dialect, Recipe
from quads_qat.dialects import carries

dialects = pytest.mark.parametrize("dialect", list(Dialect), ids=str)
PAIRS = [(recipe, dialect) for dialect in Dialect for recipe in Recipe if carries(dialect, recipe)]
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
IDS = torch.arange(3, 11)[None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("recipe", "dialect"), PAIRS)
def test_every_recipe_and_dtype_and_zeros(recipe: Recipe, dialect: Dialect, dtype: torch.dtype, tmp_path: Path) -> None:
    """ModelOpt#1382: zero weights, and blocks far below the tensor's amax, must not give scales of 0 or NaN."""
    model = tiny_model("qwen3_moe", dtype=dtype)
    attention, experts = (f"model.layers.0.{name}" for name in ("self_attn.o_proj.weight", "mlp.experts.down_proj"))
    with torch.no_grad():
        model.get_parameter(attention).zero_()
        model.get_parameter(experts)[1] = 0
        model.get_parameter("model.layers.1.self_attn.v_proj.weight")[:, 16:32] *= 1e-6
    qq.convert(model, "w4a16", recipe=recipe)
    with torch.no_grad(), qq.observe_activations(model):
        model(IDS)
    state = qq.quant_state_dict(model)
    qq.load_quant_state_dict(model, {k: torch.zeros(()) if "down_proj" in k else a for k, a in state.items()})
    qq.export_checkpoint(model, tmp_path / "out", dialect=dialect, activations="observed")
    qq.verify(model, tmp_path / "out")
    for name, tensor in tensors(tmp_path / "out").items():
        if name.endswith("scale") or name.endswith("scale_2"):
            assert tensor.float().isfinite().all(), name
            assert (tensor.float() > 0).all(), name
    loaded = qq.load_model(tmp_path / "out")
    assert not loaded.get_parameter(attention).any()
    assert not loaded.get_parameter(experts)[1].any()
    expected = decoded(tmp_path / "out", loaded.get_parameter(attention).dtype)
    name = "model.layers.1.self_attn.v_proj.weight"
    assert torch.equal(loaded.get_parameter(name), expected[name])
    rollout: Any = qq.load_rollout(tmp_path / "out", activation_scale="static")
    with torch.no_grad():
        assert rollout(IDS).logits.isfinite().all()


@dialects
@pytest.mark.parametrize("activation_scale", ["per_token", "static"])
def test_a_w4a4_trainer(activation_scale: str, dialect: Dialect, tmp_path: Path) -> None:
    """The ablation exports the same weights; the checkpoint says how it was trained."""
    model = qq.convert(tiny_model("qwen3_moe"), "w4a16")
    with torch.no_grad(), qq.observe_activations(model):
        model(IDS)
    before = dict(qq.export_weights(model, dialect, activations="observed"))
    qq.convert(model, "w4a4", activation_scale=activation_scale)
    for name, tensor in qq.export_weights(model, dialect, activations="observed"):
        assert_same_bits(tensor, before[name], name)
    qq.export_checkpoint(model, tmp_path / "out", dialect=dialect, activations="observed")
    assert config(tmp_path / "out")["quads_qat"]["trainer"] == "w4a4"
    qq.verify(model, tmp_path / "out")


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 48, bias=False), nn.Linear(32, 48, bias=False)
        self.down_proj = nn.Linear(48, 32, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(torch.relu(self.gate_proj(x)) * self.up_proj(x))


class Mixture(nn.Module):
    """The layout of transformers 4: a list of experts made of linears. Token i goes to expert i % 3; 3 is idle."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        self.gate(x)
        out = torch.empty_like(x)
        for i in range(3):
            out[i::3] = self.experts[i](x[i::3])
        return out


@dialects
def test_a_plain_module_with_a_list_of_experts(dialect: Dialect) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(layers=nn.Sequential(Mixture(), Mixture()), head=nn.Linear(32, 32))).bfloat16()
    original = set(model.state_dict())
    qq.convert(model, "w4a16", exclude=["head"])
    with torch.no_grad(), qq.observe_activations(model):
        model(torch.randn(12, 32, dtype=torch.bfloat16))
    stream = dict(qq.export_weights(model, dialect, activations="observed"))
    codes, _, scale, activation = (
        ("weight", "weight_scale", "weight_scale_2", "input_scale")
        if dialect is Dialect.MODELOPT
        else ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    )
    quantized = {n.removesuffix(f".{codes}") for n, t in stream.items() if t.dtype == torch.uint8}
    assert quantized == {
        f"layers.{i}.experts.{e}.{p}_proj" for i in (0, 1) for e in range(4) for p in ("gate", "up", "down")
    }
    ours = ("weight_scale", "weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale")
    names = {n.removesuffix("_packed") for n in stream if not n.endswith(ours)}
    assert names == original
    for layer in (0, 1):
        for projections in (("gate", "up"), ("down",)):  # one activation scale for all experts, the idle one too
            found = {
                stream[f"layers.{layer}.experts.{e}.{p}_proj.{activation}"].item()
                for e in range(4)
                for p in projections
            }
            assert len(found) == 1
        for e in range(4):
            gate, up = (stream[f"layers.{layer}.experts.{e}.{p}_proj.{scale}"] for p in ("gate", "up"))
            assert torch.equal(gate, up)
    base = "layers.1.experts.3.down_proj"
    value = decode(
        stream[f"{base}.{codes}"],
        stream[f"{base}.weight_scale"],
        stream[f"{base}.{scale}"],
        divides=dialect is Dialect.COMPRESSED_TENSORS,
    )
    assert torch.equal(value.bfloat16(), qq.ops.fake_quantize(model.get_parameter(f"{base}.weight").detach()))


def test_scale_groups_of_ones_own(tmp_path: Path) -> None:
    """``groups=`` holds in the file, which says so; a source quantized without it is another checkpoint."""
    source = CHECKPOINTS / "bf16" / "qwen3"
    model = AutoModelForCausalLM.from_pretrained(source)
    qq.convert(model, "w4a16", groups=[r"layers\.(\d+)\.(?:self_attn\.o|mlp\.down)_proj"], recipe="modelopt-ieee")
    qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt")
    stored = tensors(tmp_path / "out")
    for layer in ("model.layers.0", "model.layers.1"):
        assert torch.equal(*(stored[f"{layer}.{n}.weight_scale_2"] for n in ("self_attn.o_proj", "mlp.down_proj")))
    qq.verify(model, tmp_path / "out")
    assert qq.verify_checkpoint(source, tmp_path / "out").ok
    silent = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    silent["quads_qat"]["scale_groups"]["rules"] = []
    (tmp_path / "out" / "config.json").write_text(json.dumps(silent), "utf-8")
    assert not qq.verify_checkpoint(source, tmp_path / "out").ok


def test_a_source_in_fp32(tmp_path: Path) -> None:
    """Codes are those of the BF16 cast, as in training; what is not quantized is cast as an export casts it."""
    source = CHECKPOINTS / "bf16" / "qwen3moe"
    wide = rewritten(source, tmp_path / "source", {name: t.float() for name, t in tensors(source).items()})
    qq.quantize_checkpoint(wide, tmp_path / "wide")
    qq.quantize_checkpoint(source, tmp_path / "out")
    stored, expected = tensors(tmp_path / "wide"), tensors(tmp_path / "out")
    assert stored.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(stored[name], tensor, name)
    assert qq.verify_checkpoint(wide, tmp_path / "wide").ok


def test_ranks() -> None:
    model = qq.convert(tiny_model("llama"), "w4a16")
    assert len(list(qq.export_weights(model, "modelopt", ranks=0))) == len(list(qq.export_weights(model, "modelopt")))
    assert list(qq.export_weights(model, "modelopt", ranks=3)) == []
    with pytest.raises(ValueError, match="ranks must be 'all' or the number of a rank, got 'first'"):
        qq.export_weights(model, "modelopt", ranks="first")


def test_progress_ends_at_the_whole(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    source = CHECKPOINTS / "bf16" / "qwen3moe"
    qq.quantize_checkpoint(source, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    total = (source / "model.safetensors").stat().st_size
    assert {of for _, of in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)
    assert len(seen) > 10
