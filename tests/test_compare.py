"""Contract under test: ``diff`` sees every bit that differs in two checkpoints; ``inspect`` finds what is mangled."""

from pathlib import Path

import pytest
import torch
from by_hand import CHECKPOINTS, config, rewritten, tensors
from exported import CONFIGS, ENDINGS, EXPERT, MODULE, Exported, exported, flip, trainer, with_json
from torch import Tensor
from transformers import AutoModelForCausalLM

import quads_qat as qq
from quads_qat import Dialect
from quads_qat.compare import inspect_checkpoint
from quads_qat.scale_groups import FUSED_LINEARS

dialects = pytest.mark.parametrize("dialect", list(Dialect), ids=str)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return exported(tmp_path_factory)


def test_the_dialects_of_one_model_do_not_differ(checkpoint: Exported) -> None:
    for activations in ("none", "observed"):
        assert list(qq.diff(*(checkpoint(dialect, activations) for dialect in Dialect))) == []


POLICY = {"activation_scale": "per_token", "activation_recipe": "aligned", "residual": {"fraction": 0.25}}


def test_differences_print_in_words(checkpoint: Exported, tmp_path: Path) -> None:
    path = checkpoint("modelopt")
    same = qq.diff(path, path)
    assert repr(same) == str(same) == "the same codes, scales and values, and the same other tensors"
    assert not same.only_activation_scales
    norms = {n: t + 1 for n, t in tensors(path).items() if n.endswith("norm.weight")}
    rows = qq.diff(path, rewritten(path, tmp_path / "norms", norms))
    head, *lines = str(rows).splitlines()
    assert head == f"{len(norms)} tensors differ:"
    assert [line.split(":")[0].strip() for line in lines] == [row["name"] for row in rows] == sorted(norms)
    assert all(" elements, first at (0,): " in line for line in lines)
    recorded = with_json(path, tmp_path / "told", "config.json", lambda c: c["quads_qat"].update(rollout=POLICY))
    said = "  config.json: rollouts: not recorded against activations per_token (aligned), residual fraction 0.25"
    assert str(qq.diff(path, recorded)).splitlines()[1].startswith(f"{said} scope token norm l2")
    scales = qq.diff(path, checkpoint("modelopt", "none"))
    assert scales.only_activation_scales
    assert str(scales).startswith(f"weights are the same, bit for bit; {len(scales)} activation scales differ, the fi")
    assert len(str(scales).splitlines()) == 21
    with pytest.raises(ValueError, match="no such directory"):
        qq.diff(path, tmp_path / "nowhere")  # at once, not when it is looked at


def test_stacks_and_single_experts_are_compared(tmp_path: Path) -> None:
    """ModelOpt keeps gpt-oss' experts in one tensor, compressed-tensors has one for each."""
    model = qq.convert(AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "bf16" / "gpt_oss"), "w4a16")
    paths = [tmp_path / dialect for dialect in Dialect]
    for dialect, path in zip(Dialect, paths, strict=True):
        qq.export_checkpoint(model, path, dialect=dialect)
    assert list(qq.diff(*paths)) == list(qq.diff(*reversed(paths))) == []  # biases are split in one, too
    name = "model.layers.1.mlp.experts.2.up_proj.weight_packed"
    damaged = rewritten(paths[1], tmp_path / "damaged", {name: flip(tensors(paths[1])[name])})
    (row,) = qq.diff(paths[0], damaged)
    assert (row["name"], row["codes"], row["block_scales"]) == ("model.layers.1.mlp.experts.gate_up_proj", 1, 0)
    # up_proj is every second row of gate_up_proj
    name, stacked = "model.layers.1.mlp.experts.2.up_proj.bias", "model.layers.1.mlp.experts.gate_up_proj_bias"
    bias = tensors(paths[1])[name]
    changed = rewritten(paths[1], tmp_path / "changed", {name: torch.cat([bias[:3], bias[3:4] + 1, bias[4:]])})
    (row,) = qq.diff(changed, paths[0])
    assert row["name"] == stacked
    assert row["difference"].startswith(f"1 of {tensors(paths[0])[stacked].numel()} elements, first at (2, 7): ")
    short = rewritten(paths[1], tmp_path / "short", {name: bias[:-1].clone()})
    assert [(row["name"], "must have shape" in row["difference"]) for row in qq.diff(short, paths[0])] == [
        (stacked, True)
    ]
    lacking = rewritten(paths[1], tmp_path / "lacking", {name: None})
    (row,) = qq.diff(paths[0], lacking)
    assert (row["name"], row["difference"]) == (stacked, f"{lacking}: tensor {name} is missing")
    lacking = rewritten(paths[0], tmp_path / "without", {stacked: None})
    (row,) = qq.diff(paths[1], lacking)
    assert (row["name"], row["difference"]) == (stacked, f"{lacking}: tensor {stacked} is missing")


@dialects
def test_differences_within_and_across_dialects(dialect: Dialect, checkpoint: Exported, tmp_path: Path) -> None:
    codes, block_scale, _, input_scale = (f"{MODULE}.{ending}" for ending in ENDINGS[dialect])
    stored = tensors(checkpoint(dialect))
    change = {
        codes: flip(stored[codes], bit=2),
        block_scale: flip(stored[block_scale], at=100),
        input_scale: stored[input_scale] / 2,
        f"{EXPERT}.{ENDINGS[dialect][3]}": None,
        "model.norm.weight": flip(stored["model.norm.weight"], at=2),
        "lm_head.weight": None,
        "model.new": torch.ones(2),
    }
    damaged = rewritten(checkpoint(dialect), tmp_path / "damaged", change)
    for other in Dialect:
        rows = {row.pop("name"): row for row in qq.diff(checkpoint(other), damaged)}
        assert rows.keys() == {
            f"{MODULE}.weight",
            f"{EXPERT}.weight",
            "model.norm.weight",
            "lm_head.weight",
            "model.new",
        }
        row = rows[f"{MODULE}.weight"]
        assert (row["codes"], row["block_scales"]) == (1, 1)
        assert 1 < row["values"] <= 17
        assert row["max_abs"] > 0
        assert row["input_amax"][0] in (2 * row["input_amax"][1], row["input_amax"][1] / 2)
        assert rows[f"{EXPERT}.weight"]["input_amax"][1] is None
        assert rows[f"{EXPERT}.weight"]["values"] == 0
        assert rows["model.norm.weight"] == {"difference": rows["model.norm.weight"]["difference"]}
        assert rows["lm_head.weight"] == {"only_in": str(checkpoint(other))}
        assert rows["model.new"] == {"only_in": str(damaged)}


def test_a_weight_that_one_checkpoint_keeps_in_bf16(checkpoint: Exported) -> None:
    rows = list(qq.diff(checkpoint("modelopt"), checkpoint("modelopt", "observed", "mlp")))
    assert {row["name"] for row in rows} == {
        f"model.layers.{i}.self_attn.{p}_proj.weight" for i in (0, 1) for p in "qkvo"
    }
    assert {row["only_in"] for row in rows} == {
        str(checkpoint("modelopt")),
        str(checkpoint("modelopt", "observed", "mlp")),
    }


def test_rows_for_scales_damage_and_contracts(checkpoint: Exported, tmp_path: Path) -> None:
    """A scale counts by itself (of a weight that is zero, say); what cannot be read does not end the comparison."""
    path = checkpoint("modelopt")
    stored = tensors(path)
    change = {
        f"{MODULE}.weight": torch.zeros_like(stored[f"{MODULE}.weight"]),
        f"{MODULE}.weight_scale_2": stored[f"{MODULE}.weight_scale_2"] * 2,
        f"{EXPERT}.weight_scale": None,
    }
    zeros = rewritten(path, tmp_path / "zeros", {f"{MODULE}.weight": change[f"{MODULE}.weight"]})
    damaged = rewritten(path, tmp_path / "damaged", change)
    scale = stored[f"{MODULE}.weight_scale_2"].item()
    rows = {row["name"]: row for row in qq.diff(zeros, damaged)}
    assert rows[f"{MODULE}.weight"]["per_tensor_scale"] == [scale, 2 * scale]
    assert rows[f"{MODULE}.weight"]["values"] == 0
    assert rows[f"{EXPERT}.weight"] == {
        "name": f"{EXPERT}.weight",
        "difference": f"{EXPERT}.weight_scale is missing; {EXPERT}.weight cannot be decoded without it",
    }
    qq.export_checkpoint(
        trainer(), tmp_path / "told", dialect="modelopt", activations="observed", residual=qq.ResidualConfig()
    )
    (row,) = qq.diff(path, tmp_path / "told")
    assert row["name"] == "config.json"
    assert row["difference"].startswith("rollouts: not recorded against activations per_token (aligned), residual ")
    foreign = with_json(path, tmp_path / "foreign", "config.json", lambda c: c.pop("quads_qat"))
    assert list(qq.diff(path, foreign)) == [
        {"name": "config.json", "difference": "only the first has a quads_qat entry"}
    ]


def test_shapes_that_differ(checkpoint: Exported, tmp_path: Path) -> None:
    codes, block_scale = (f"{MODULE}.{ending}" for ending in ENDINGS[Dialect.MODELOPT][:2])
    stored = tensors(checkpoint("modelopt"))
    fewer = {
        name: stored[name].view(torch.uint8)[:-1].clone().view(stored[name].dtype) for name in (codes, block_scale)
    }
    (row,) = qq.diff(checkpoint("modelopt"), rewritten(checkpoint("modelopt"), tmp_path / "fewer", fewer))
    assert row == {"name": f"{MODULE}.weight", "shapes": [[64, 128], [63, 128]]}


def test_inspection_finds_what_engines_would_mangle(checkpoint: Exported, tmp_path: Path) -> None:
    path = checkpoint("modelopt")
    found = inspect_checkpoint(path)
    assert found["problems"] == []
    assert (found["dialect"], found["recipe"], found["weights"]) == ("modelopt", "aligned", "W4A4")
    assert found["quantized_weights"] == 32
    assert found["contract"] == ["scope: all", "rollouts: not recorded"]
    up = "model.layers.0.mlp.experts.1.up_proj"
    change: dict[str, Tensor | None] = {
        f"{up}.weight_scale_2": tensors(path)[f"{up}.weight_scale_2"] * 2,
        f"{EXPERT}.input_scale": None,
        f"{MODULE}.weight_scale_2": torch.tensor(0.0),
    }
    problems = "\n".join(inspect_checkpoint(rewritten(path, tmp_path / "damaged", change))["problems"])
    assert "model.layers.0.mlp.experts.1.{gate_proj,up_proj}: engines fuse these weights, but their" in problems
    assert "1 of 32 weights of a W4A4 checkpoint have no activation scale" in problems
    assert f"{MODULE}.weight_scale_2 must be one finite number > 0" in problems
    for how, said in (
        ("two files that disagree", "hf_quant_config.json: quant_algo is not what config.json says"),
        (
            "a weight that engines would not decode",
            "config.json: ignore lists model.layers.1.self_attn.k_proj, which is",
        ),
    ):
        file, changed, *_ = CONFIGS[how]
        (problem, *_) = inspect_checkpoint(with_json(path, tmp_path / how, file, changed))["problems"]
        assert problem.startswith(said)
    foreign = CHECKPOINTS / "modelopt" / "qwen3-w4a16_nvfp4"
    assert inspect_checkpoint(foreign)["recipe"] == "modelopt (assumed: the checkpoint does not say)"


def test_the_recipe_travels_in_the_config(checkpoint: Exported) -> None:
    assert config(checkpoint("compressed-tensors"))["quads_qat"] == {
        "version": 2,
        "recipe": "aligned",
        "export_dtype": "bfloat16",
        "scope": "all",
        "quantized": [f"model.layers.0-1.{name}" for name in (*(f"self_attn.{x}_proj" for x in "qkvo"), "mlp.experts")],
        "high_precision": ["model.embed_tokens", "model.layers.0-1.mlp.gate", "lm_head"],
        "trainer": "w4a16",
        "scale_groups": {"fused": [list(names) for names in FUSED_LINEARS], "rules": []},
        "activations": "observed",
        "rollout": None,
    }


def test_inspection_shows_what_rollouts_are_to_do(checkpoint: Exported, tmp_path: Path) -> None:
    model = qq.convert(qq.load_model(checkpoint("modelopt")), "w4a16")
    residual = qq.ResidualConfig(fraction=0.25, scope="block")
    qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt", residual=residual)
    shown = inspect_checkpoint(tmp_path / "out")["contract"]
    assert shown == ["scope: all", "rollouts: activation scale per_token, residual 25% in scope block"]
