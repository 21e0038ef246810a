"""Contract under test: ``convert`` quantizes what the rules say, lists the rest with reasons, or refuses."""

import copy
import re

import pytest
import torch
from small_modules import TINYMOE, ListModel, fill, linears, names_with_weights, tree
from tiny_models import tiny_model
from torch import nn
from transformers import AutoModelForCausalLM

import quads_qat as qq
from quads_qat import reference
from quads_qat.experts import W4A16Experts
from quads_qat.linear import W4A16Linear

LAYER = (
    *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"feed_forward.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
    *(f"mlp.shared_expert.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
    *(f"mlp.experts.{e}.{part}" for e in (0, 1) for part in ("w1", "w2", "w3")),
)


def quantized(model: nn.Module) -> set[str]:
    return {name.removesuffix(".weight") for name in qq.coverage(model).quantized}


def reasons(model: nn.Module) -> dict[str, str]:
    return {skipped.module: skipped.reason for skipped in qq.coverage(model).skipped}


# ------------------------------------------------------------------------------------------------------------ selection


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lm_head", "output head"),
        ("output.dense", "output head"),
        ("model.layers.0.mlp.gate", "router or gate"),
        ("model.layers.0.mlp.gate.wg", "router or gate"),
        ("model.layers.0.mlp.router.proj", "router or gate"),
        ("model.layers.0.mlp.shared_expert_gate", "router or gate"),
        ("model.layers.0.linear_attn.conv1d", "short convolution"),
        ("model.layers.0.linear_attn.in_proj_a", "decay and beta projections of linear attention"),
        ("model.layers.0.linear_attn.in_proj_b", "decay and beta projections of linear attention"),
        ("model.layers.0.linear_attn.in_proj_ba", "decay and beta projections of linear attention"),
        ("model.layers.0.mamba.dt_proj", "time step of a state space"),
        ("mtp.fc", "multi-token prediction"),
        ("model.visual.blocks.0.mlp.up_proj", "vision tower"),
        ("model.vision_tower.layers.0.fc1", "vision tower"),
        ("model.layers.0.self_attn.o_proj.lora_A.default", "adapter"),
    ],
)
def test_by_default_a_linear_is_left_alone_for_its_name_and_listed(name: str, reason: str):
    model = qq.convert(linears(name, "model.layers.0.mlp.down_proj"), "w4a16")
    assert quantized(model) == {"model.layers.0.mlp.down_proj"}
    assert reasons(model) == {name: reason}
    assert type(model.get_submodule(name)) is nn.Linear


@pytest.mark.parametrize(
    "name",
    ["mlp.gate_up_proj", "a.gate_proj", "self_attn.in_proj_z", "self_attn.in_proj_abc", "gateway.fc", "mtp_like.fc"],
)
def test_names_that_only_resemble_an_exclusion_are_quantized(name: str):
    assert quantized(qq.convert(linears(name), "w4a16")) == {name}


@pytest.mark.parametrize(
    ("scope", "parts"),
    [
        ("all", LAYER),
        ("mlp", [name for name in LAYER if not name.startswith("self_attn")]),
        ("experts", [name for name in LAYER if ".experts." in name]),
    ],
)
def test_scope_is_everything_or_the_mlps_or_the_routed_experts(scope: str, parts: list[str]):
    names = [f"model.layers.0.{name}" for name in LAYER]
    model = qq.convert(linears(*names), "w4a16", scope=scope)
    assert quantized(model) == {f"model.layers.0.{name}" for name in parts}
    outside = set(names) - quantized(model)
    assert reasons(model) == dict.fromkeys(outside, f"outside scope='{scope}'")


@pytest.mark.parametrize("scope", ["all", "mlp", "experts"])
def test_scopes_hold_for_fused_experts_too(scope: str):
    model = qq.convert(tiny_model("qwen2_moe"), "w4a16", scope=scope)
    kinds = {re.sub(r"^model\.layers\.\d+\.", "", name).split(".")[0] for name in quantized(model)}
    assert kinds == ({"self_attn", "mlp"} if scope == "all" else {"mlp"})
    assert any("shared_expert" in name for name in quantized(model)) == (scope != "experts")
    assert any(name.endswith("experts.gate_up_proj") for name in quantized(model))


@pytest.mark.parametrize(
    ("pattern", "gone"),
    [
        ("layers.0.self_attn.o_proj", {"layers.0.self_attn.o_proj"}),
        ("layers.1", {"layers.1.self_attn.o_proj", "layers.1.mlp.down_proj"}),
        ("*.o_proj", {"layers.0.self_attn.o_proj", "layers.1.self_attn.o_proj"}),
        ("re:layers.[1-9].*down", {"layers.1.mlp.down_proj"}),
    ],
)
def test_exclude_takes_names_parents_globs_and_regexes(pattern: str, gone: set[str]):
    names = {f"layers.{i}.{leaf}" for i in (0, 1) for leaf in ("self_attn.o_proj", "mlp.down_proj")}
    model = qq.convert(linears(*sorted(names)), "w4a16", exclude=[pattern])
    assert quantized(model) == names - gone
    assert reasons(model) == dict.fromkeys(gone, f"excluded by {pattern!r}")


@pytest.mark.parametrize("pattern", ["lm_head", "lm_*", "re:lm"])
def test_include_overrules_defaults_and_scope_and_exclude_overrules_include(pattern: str):
    names = ("lm_head", "self_attn.o_proj", "mlp.experts.0.w2")
    assert "lm_head" in quantized(qq.convert(linears(*names), "w4a16", scope="experts", include=[pattern]))
    both = qq.convert(linears(*names), "w4a16", include=[pattern], exclude=["lm_head"])
    assert reasons(both)["lm_head"] == "excluded by 'lm_head'"


@pytest.mark.parametrize("argument", ["include", "exclude", "groups"])
def test_a_pattern_that_matches_nothing_is_an_error(argument: str):
    model = linears("mlp.up_proj")
    with pytest.raises(ValueError, match="matches 'no_such_name'"):
        qq.convert(model, "w4a16", **{argument: ["no_such_name"]})
    assert type(model.get_submodule("mlp.up_proj")) is nn.Linear


@pytest.mark.parametrize("argument", ["include", "exclude", "groups"])
def test_patterns_are_lists_of_valid_regexes(argument: str):
    with pytest.raises(TypeError, match=re.escape(f"{argument} must be a list of patterns, got 'mlp'; pass ['mlp']")):
        qq.convert(linears("mlp.up_proj"), "w4a16", **{argument: "mlp"})
    broken = "(" if argument == "groups" else "re:("
    with pytest.raises(ValueError, match=f"{argument}: .* is no regular expression"):
        qq.convert(linears("mlp.up_proj"), "w4a16", **{argument: [broken]})


def test_including_by_name_what_cannot_be_quantized_is_an_error():
    model = tree({"embed": nn.Embedding(8, 16), "fc": nn.Linear(16, 16)})
    with pytest.raises(ValueError, match="include names 'embed', which cannot be quantized: Embedding is neither"):
        qq.convert(model, "w4a16", include=["embed"])
    assert quantized(qq.convert(model, "w4a16", include=["*"])) == {"fc"}


# --------------------------------------------------------------------------------------------- what cannot be quantized


def test_k_that_is_no_multiple_of_16_is_an_error_that_names_the_weight_and_the_way_out():
    model = linears("layers.0.up_proj", k=40)
    with pytest.raises(ValueError, match=re.escape("layers.0.up_proj.weight has an input dim K of 40")) as error:
        qq.convert(model, "w4a16")
    assert "exclude=['layers.0.up_proj']" in str(error.value)
    model.add_module("down_proj", nn.Linear(32, 16))
    assert quantized(qq.convert(model, "w4a16", exclude=["layers.0.up_proj"])) == {"down_proj"}


def test_all_such_weights_are_named_at_once():
    names = [f"layers.{i}.mlp.{leaf}" for i in (0, 1) for leaf in ("gate_proj", "up_proj", "down_proj")]
    model = tree({name: nn.Linear(32 if name == "layers.0.mlp.down_proj" else 40, 32) for name in names})
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate_proj\.weight has .*; nor is that of 4 more"):
        qq.convert(model, "w4a16")
    exclude = ["layers.*.mlp.gate_proj", "layers.*.mlp.up_proj", "layers.1.mlp.down_proj"]
    with pytest.raises(ValueError, match=re.escape(f"pass exclude={exclude} to leave them in high precision")):
        qq.convert(model, "w4a16")
    assert quantized(qq.convert(model, "w4a16", exclude=exclude)) == {"layers.0.mlp.down_proj"}


def test_an_integer_weight_is_an_error_that_names_it():
    model = linears("fc")
    model.get_submodule("fc").weight = nn.Parameter(torch.zeros(16, 32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(TypeError, match=r"fc\.weight is torch\.int8; master weights must be"):
        qq.convert(model, "w4a16")


class StrangeExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.zeros(4, 32, 16))


@pytest.mark.parametrize("arguments", [{}, {"scope": "experts"}, {"include": ["*"]}])
def test_an_unknown_experts_class_is_an_error_unless_it_is_excluded(arguments: dict):
    model = tree(
        {"mlp.experts": StrangeExperts(), "mlp.experts_linear": nn.Linear(32, 16), "experts.0": nn.Linear(16, 16)}
    )
    with pytest.raises(ValueError, match=r"mlp\.experts is a StrangeExperts, an experts class of unknown layout"):
        qq.convert(model, "w4a16", **arguments)
    qq.convert(model, "w4a16", exclude=["mlp.experts"], **arguments)
    assert reasons(model)["mlp.experts"] == "excluded by 'mlp.experts'"


def test_a_tied_weight_is_listed():
    model = linears("a", "b", "c")
    model.get_submodule("b").weight = model.get_submodule("a").weight
    qq.convert(model, "w4a16")
    assert quantized(model) == {"c"}
    assert reasons(model) == {"a": "tied: shares its parameter with b", "b": "tied: shares its parameter with a"}


def test_a_head_tied_to_the_embedding_is_listed_even_if_its_name_is_included():
    model = tree({"embed": nn.Embedding(64, 32), "lm_head": nn.Linear(32, 64, bias=False), "fc": nn.Linear(32, 16)})
    model.get_submodule("lm_head").weight = model.get_submodule("embed").weight
    assert reasons(qq.convert(model, "w4a16", include=["lm_*"]))["lm_head"] == "tied: shares its parameter with embed"


class OwnLinear(nn.Linear):
    pass


def test_a_subclass_of_linear_is_listed():
    model = qq.convert(tree({"own": OwnLinear(32, 16), "fc": nn.Linear(32, 16)}), "w4a16")
    assert reasons(model) == {"own": "OwnLinear is a subclass of nn.Linear with a forward of its own"}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_linear_whose_weight_is_computed_is_listed():
    old = torch.nn.utils.weight_norm(nn.Linear(32, 16))  # weight_g and weight_v on the linear itself
    new = torch.nn.utils.parametrizations.weight_norm(nn.Linear(32, 16))
    model = qq.convert(tree({"old": old, "new": new, "fc": nn.Linear(32, 16)}), "w4a16")
    assert reasons(model)["old"] == "its weight is computed from other parameters"
    assert reasons(model)["new.parametrizations.weight"] == "ParametrizationList is neither a linear nor experts"
    assert quantized(model) == {"fc"}


def test_a_forward_replaced_on_the_instance_is_an_error():
    model = linears("fc", "other")
    model.get_submodule("fc").forward = lambda x: x
    with pytest.raises(ValueError, match="the forward of fc was replaced on the instance"):
        qq.convert(model, "w4a16")
    assert quantized(qq.convert(model, "w4a16", exclude=["fc"])) == {"other"}


@pytest.mark.parametrize("model", [nn.Sequential(), nn.Sequential(nn.LayerNorm(4)), nn.ReLU()])
def test_a_model_without_weights_is_an_error(model: nn.Module):
    with pytest.raises(ValueError, match=r"nothing to quantize in .*; it holds no weights"):
        qq.convert(model, "w4a16")


def test_a_model_without_linears_is_an_error_that_says_what_it_has():
    with pytest.raises(ValueError, match=r"nothing to quantize in Sequential .*; 0: Embedding is neither a linear"):
        qq.convert(nn.Sequential(nn.Embedding(4, 16)), "w4a16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "w8a8"}, "Mode: unknown value 'w8a8'; choose one of w4a16, w4a4, w4a4_residual"),
        ({"mode": "w4a16", "recipe": "best"}, "Recipe: unknown value 'best'; choose one of aligned"),
        ({"mode": "w4a16", "scope": "attention"}, "Scope: unknown value 'attention'; choose one of all, mlp, experts"),
        (
            {"mode": "w4a4", "activation_scale": "block"},
            "ActivationScale: unknown value 'block'; choose one of per_token",
        ),
        ({"mode": "w4a4", "activation_recipe": "best"}, "Recipe: unknown value 'best'"),
        ({"mode": "w4a16", "activation_scale": "static"}, "mode='w4a16' leaves activations alone"),
        ({"mode": "w4a16", "residual": qq.ResidualConfig()}, "residual= is for mode='w4a4_residual'"),
    ],
)
def test_unknown_or_unfitting_choices_are_refused_and_change_nothing(arguments: dict, message: str):
    model = linears("fc")
    with pytest.raises(ValueError, match=re.escape(message)):
        qq.convert(model, **arguments)
    assert type(model.get_submodule("fc")) is nn.Linear


# --------------------------------------------------------------------------------------------------------- scale groups


@pytest.mark.parametrize(
    "names",
    [
        ("q_proj", "k_proj", "v_proj"),
        ("gate_proj", "up_proj"),
        ("w1", "w3"),
        ("q_a_proj", "kv_a_proj_with_mqa"),
        ("in_proj_qkv", "in_proj_z"),
    ],
)
def test_what_engines_fuse_is_one_scale_group_per_parent(names: tuple[str, ...]):
    parents = ("layers.0.mlp.experts.0", "layers.0.mlp.experts.1")
    model = qq.convert(linears(*(f"{p}.{n}" for p in parents for n in (*names, "other"))), "w4a16")
    members = [set(group) for group in qq.coverage(model).groups.values()]
    assert sorted(members, key=sorted) == sorted(
        [{f"{p}.{n}.weight" for n in names} for p in parents] + [{f"{p}.other.weight"} for p in parents], key=sorted
    )


def test_a_user_rule_groups_linears_with_equal_captures_and_they_share_a_scale():
    model = linears("layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b", "alone")
    fill(model)
    with torch.no_grad():
        model.get_submodule("layers.0.b").weight.mul_(1e4)  # beside it, block scales of a are subnormal
    qq.convert(model, "w4a16", groups=[r"layers\.(\d+)\.[ab]"])
    assert qq.coverage(model).groups == {
        "rule 0 (0)": ["layers.0.a.weight", "layers.0.b.weight"],
        "rule 0 (1)": ["layers.1.a.weight", "layers.1.b.weight"],
        "alone": ["alone.weight"],
    }
    a, b = (model.get_submodule(f"layers.0.{n}").weight.detach().bfloat16() for n in "ab")
    expected = reference.fake_quantize(a, tensor_amax=b.abs().max())
    assert not torch.equal(expected, reference.fake_quantize(a))
    assert torch.equal(model.get_submodule("layers.0.a")(torch.eye(32)).t().bfloat16(), expected)


def test_linears_under_an_adapter_are_grouped_like_those_without():
    names = [f"attn.{part}_proj" for part in "qkv"]
    wrapped = [f"{n}.{leaf}" for n in names for leaf in ("base_layer", "lora_A.default", "lora_B.default")]
    model = qq.convert(linears(*wrapped), "w4a16")
    assert qq.coverage(model).groups == {"attn.{q_proj,k_proj,v_proj}": [f"{name}.base_layer.weight" for name in names]}
    assert set(reasons(model).values()) == {"adapter"}


def test_a_partly_excluded_scale_group_is_an_error_and_a_wholly_excluded_one_is_not():
    names = [f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj")]
    with pytest.raises(
        ValueError, match=r"self_attn\.k_proj \(excluded by .*\) and self_attn\.q_proj\.weight share one scale"
    ):
        qq.convert(linears(*names), "w4a16", exclude=["*.k_proj"])
    assert quantized(qq.convert(linears(*names), "w4a16", exclude=["re:.*[qkv]_proj"])) == {"self_attn.o_proj"}


def test_a_scale_group_with_a_subclass_of_linear_is_an_error():
    model = tree({"mlp.gate_proj": OwnLinear(32, 16), "mlp.up_proj": nn.Linear(32, 16)})
    with pytest.raises(
        ValueError, match=r"mlp\.gate_proj \(OwnLinear is .*\) and mlp\.up_proj\.weight share one scale"
    ):
        qq.convert(model, "w4a16")


def test_a_scale_group_of_two_dtypes_or_layouts_is_an_error():
    model = linears("mlp.gate_proj", "mlp.up_proj")
    model.get_submodule("mlp.up_proj").bfloat16()
    with pytest.raises(ValueError, match=r"share one scale .* but not dtype and layout"):
        qq.convert(model, "w4a16")
    with pytest.raises(ValueError, match=r"o_proj.weight and .*gate_up_proj share one scale \(rule 0 \(\)\)"):
        qq.convert(tiny_model("qwen3_moe"), "w4a16", groups=["gate_up_proj|o_proj"])


# ------------------------------------------------------------------------------------------------------------- coverage


@pytest.mark.parametrize("mode", ["w4a16", "w4a4", "w4a4_residual"])
def test_coverage_of_the_shipped_model_knows_every_weight(mode: str):
    model = AutoModelForCausalLM.from_pretrained(TINYMOE)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    everything = names_with_weights(model)
    report = qq.coverage(qq.convert(model, mode))
    skipped = {s.module for s in report.skipped}
    assert everything == set(report.quantized) | {n for n in everything if n.rpartition(".")[0] in skipped}
    assert not any(n.rpartition(".")[0] in skipped for n in report.quantized)
    assert {n: elements for n, (elements, _) in report.quantized.items()} == {n: sizes[n] for n in report.quantized}
    assert sum(s.elements for s in report.skipped) == sum(sizes[n] for n in everything - set(report.quantized))
    assert sorted(n for group in report.groups.values() for n in group) == sorted(report.quantized)
    assert all(".experts." in n or "self_attn" in n for n in report.quantized)
    assert {s.reason for s in report.skipped} >= {"router or gate"}
    assert report.fraction > 0.8


def test_coverage_reads_as_a_report():
    model = qq.convert(ListModel(), "w4a16", exclude=["layers.1"])
    text = str(qq.coverage(model))
    assert "quantized: 12 weights, 18,432 elements, 49.7% of all" in text
    lines = text.splitlines()
    assert "  layers.0.mlp.experts.0-3.{gate_proj,up_proj}" in lines
    assert "  layers.0.mlp.experts.0-3.down_proj" in lines
    assert "  (names in one pair of braces share a scale)" in lines
    assert "  layers.0.mlp.gate (Linear, 128): router or gate" in lines
    assert "  layers.1.mlp.experts.0-3.up_proj (Linear, 1,536 each): excluded by 'layers.1'" in lines


def test_coverage_names_the_weights_of_a_rule_in_braces():
    model = tree({"a.fc": nn.Linear(16, 16), "b.fc": nn.Linear(16, 16), "head.out": nn.Linear(16, 16)})
    lines = str(qq.coverage(qq.convert(model, "w4a16", groups=[r"(a|b)\.fc"]))).splitlines()
    assert lines[1:] == ["  a.fc", "  b.fc", "  head.out", "not quantized: 0 modules"]
    model = qq.convert(qq.revert(model), "w4a16", groups=[r"\w\.(fc)"])
    assert str(qq.coverage(model)).splitlines()[1:3] == ["  {a.fc, b.fc}", "  head.out"]


def test_print_shows_what_was_converted():
    text = repr(qq.convert(tiny_model("qwen3_moe"), "w4a16"))
    assert f"{W4A16Experts.__name__}(" in text
    assert "Qwen3MoeExperts, gate_up_proj=(4, 64, 64), down_proj=(4, 64, 32), recipe=aligned" in text
    assert f"{W4A16Linear.__name__}(in_features=64, out_features=64, bias=False, recipe=aligned, scale_group=" in text


def test_w4a4_says_that_it_is_for_ablations():
    with pytest.warns(UserWarning, match="mode='w4a4' is for ablations"):
        qq.convert(nn.Sequential(nn.Linear(16, 8)), "w4a4")


def test_a_rollout_of_a_model_whose_forward_was_replaced_is_refused():
    """A deep copy's forward would be bound to the original: no gap at all, since it is the trainer that runs."""
    model = nn.Sequential(nn.Linear(32, 16))
    original = model.forward
    model.forward = lambda x: original(x)
    rollout = copy.deepcopy(model)
    with pytest.raises(ValueError, match="the forward of the model was replaced on the object"):
        qq.convert(rollout, "w4a4_residual")
    del rollout.forward
    qq.convert(rollout, "w4a4_residual")
    qq.convert(model, "w4a16")  # a trainer's parameters stay where they are
