"""Contract under test: what trainer, file and rollout agree on is in the file; a reader refuses what does not fit."""

import copy
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import CHECKPOINTS, config, rewritten, tensors
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

import quads_qat as qq
from quads_qat.compare import inspect_checkpoint
from quads_qat.config import ActivationFormat, ActivationScale, Mode, Recipe, ResidualConfig, Scope, WeightScale
from quads_qat.contract import VERSION, Contract, RolloutPolicy, contract_of
from quads_qat.demo import DATA
from quads_qat.residual import ResidualCompensatedLinear

SOURCE, MOE = CHECKPOINTS / "bf16" / "qwen3", CHECKPOINTS / "bf16" / "qwen3moe"
IDS = torch.arange(6).view(1, 6)
RULE = r"layers\.(\d+)\.(?:self_attn\.o_proj|mlp\.down_proj)$"

words = st.text("abz_.\\d()", max_size=8)
residuals = st.builds(
    ResidualConfig,
    fraction=st.floats(0, 1),
    scope=st.sampled_from(["batch", "token", "static"]),
    norm=st.sampled_from(["l1", "l2", "max"]),
    granularity=st.sampled_from([1, 16]),
)
policies = st.builds(
    RolloutPolicy,
    activation=st.builds(ActivationFormat, scale=st.sampled_from(ActivationScale), recipe=st.sampled_from(Recipe)),
    residual=residuals,
)
modules = st.lists(st.sampled_from(["a", "layers.0-1.q", "layers.3.q"]), unique=True).map(tuple)
contracts = st.builds(
    Contract,
    recipe=st.sampled_from(Recipe),
    scope=st.sampled_from(Scope),
    trainer=st.sampled_from(Mode),
    fused=st.lists(st.lists(words).map(tuple), max_size=3).map(tuple),
    rules=st.lists(words, max_size=3).map(tuple),
    activations=st.sampled_from(["none", "observed", "given"]),
    weight_scale=st.sampled_from(WeightScale),
    start_step=st.integers(0, 3),
    rollout=st.none() | policies,
    export_dtype=st.sampled_from([None, torch.bfloat16, torch.float16]),
    quantized=st.none() | modules,
    high_precision=st.none() | modules,
)


@cache
def trainer(recipe: str = "aligned", rules: tuple[str, ...] = ()) -> nn.Module:
    """Observed; only read."""
    model = qq.convert(AutoModelForCausalLM.from_pretrained(SOURCE), "w4a16", recipe=recipe, groups=rules)
    with torch.no_grad(), qq.observe_activations(model):
        model(IDS)
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("contract") / "out"
    residual = ResidualConfig(fraction=0.25, scope="block")  # pyright: ignore[reportArgumentType]
    qq.export_checkpoint(
        trainer(), path, dialect="modelopt", activations="observed", residual=residual, activation_scale="static"
    )
    return path


def with_entry(path: Path, target: Path, change: Callable[[Any], Any]) -> Path:
    """A copy whose ``quads_qat`` entry is ``change`` of what it was."""
    shutil.copytree(path, target)
    changed = config(path)
    changed["quads_qat"] = change(changed["quads_qat"])
    (target / "config.json").write_text(json.dumps(changed), "utf-8")
    return target


@given(contracts)
def test_json_and_back(contract: Contract) -> None:
    assert Contract.from_json(json.loads(json.dumps(contract.to_json()))) == contract


@given(contracts, contracts)
def test_only_weights_count(one: Contract, other: Contract) -> None:
    same = (one.recipe, one.fused, one.rules) == (other.recipe, other.fused, other.rules)
    assert (one.differences(other, export_dtype=False, modules=False) == []) == same
    dtypes, apart = {one.export_dtype, other.export_dtype} - {None}, False
    if None not in (one.quantized, one.high_precision, other.quantized, other.high_precision):
        pairs: Any = ((one.quantized, other.high_precision), (other.quantized, one.high_precision))
        alike = (one.quantized, one.high_precision) == (other.quantized, other.high_precision)
        apart = not alike and any(set(here) & set(there) for here, there in pairs)
    assert (one.differences(other, modules=False) == []) == (same and len(dtypes) < 2)
    assert (one.differences(other, export_dtype=False) == []) == (same and not apart)
    assert one.differences(other) == [] or not (same and len(dtypes) < 2 and not apart)


def test_every_way_to_write_a_checkpoint_writes_it(exported: Path, tmp_path: Path) -> None:
    contract = contract_of(exported)
    assert (contract.recipe, contract.trainer, contract.activations) == (Recipe.ALIGNED, Mode.W4A16, "observed")
    assert contract.rollout is not None
    assert contract.rollout.residual == ResidualConfig(fraction=0.25, scope="block")  # pyright: ignore[reportArgumentType]
    assert contract.rollout.activation.scale is ActivationScale.STATIC
    qq.quantize_checkpoint(SOURCE, tmp_path / "ptq", recipe="modelopt-ieee", scope="mlp")
    ptq = contract_of(tmp_path / "ptq")
    assert (ptq.recipe, ptq.scope, ptq.activations, ptq.rollout) == (Recipe.MODELOPT_IEEE, Scope.MLP, "none", None)
    names = [n for n, _, _ in qq.export_metadata(trainer(), "modelopt", activations="observed") if "input_scale" in n]
    given_scales = dict.fromkeys(names, 0.5)
    qq.export_checkpoint(trainer(), tmp_path / "given", dialect="modelopt", activations=given_scales)
    assert contract_of(tmp_path / "given").activations == "given"
    with pytest.raises(ValueError, match="no quads_qat entry; quads_qat did not write it"):
        contract_of(SOURCE)
    with pytest.raises(ValueError, match="static' needs activation scales in the file, and activations='none'"):
        qq.export_checkpoint(trainer(), tmp_path / "x", dialect="modelopt", activation_scale="static")


def test_held_scales_are_recorded(tmp_path: Path) -> None:
    model = copy.deepcopy(trainer())
    assert "weight_scale" not in contract_of(model).to_json()  # which versions without it read
    revert = qq.revert(model)
    model = qq.convert(revert, "w4a16", schedule=qq.Schedule(weight_scale="ema"))
    qq.step(model)
    qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt")
    assert config(tmp_path / "out")["quads_qat"]["weight_scale"] == "ema"
    assert contract_of(tmp_path / "out").weight_scale is WeightScale.EMA
    assert qq.verify(model, tmp_path / "out").ok
    qq.load_rollout(tmp_path / "out", contract=contract_of(model))
    state = qq.quant_state_dict(model)
    other = copy.deepcopy(trainer())
    qq.load_quant_state_dict(other, state)
    assert contract_of(other).weight_scale is WeightScale.FROZEN  # held, and this schedule does not move it


@pytest.mark.parametrize("form", ["a dict", "pairs", "metadata"])
@pytest.mark.parametrize("weight_scale", ["frozen", "ema"])
def test_masters_of_a_trainer_that_holds_its_scales_are_not_synced(
    weight_scale: str, form: str, exported: Path
) -> None:
    model = qq.convert(qq.revert(copy.deepcopy(trainer())), "w4a16", schedule=qq.Schedule(weight_scale=weight_scale))
    qq.step(model)
    rollout, contract = qq.load_rollout(exported), contract_of(model)
    before = {name: tensor.clone() for name, tensor in rollout.state_dict().items()}
    state: Any = model.state_dict()
    options: Any = {"metadata": [(n, t.dtype, tuple(t.shape)) for n, t in state.items()]} if form == "metadata" else {}
    message = (
        f"scales.* held \\({weight_scale}\\), .*send packed tensors: quads_qat.export_weights.* or export_checkpoint"
    )
    with pytest.raises(ValueError, match=message) as error:
        qq.update_weights(rollout, state if form == "a dict" else state.items(), contract=contract, **options)
    assert "\n" not in str(error.value)
    if form != "pairs":  # known ahead
        assert all(torch.equal(tensor, before[name]) for name, tensor in rollout.state_dict().items())
    qq.update_weights(rollout, qq.export_weights(model, "modelopt"), contract=contract)
    assert qq.check_first_step(model, rollout).ok


@pytest.mark.parametrize("weight_scale", ["frozen", "ema"])
def test_a_state_dict_of_a_trainer_that_holds_its_scales_warns(
    weight_scale: str, exported: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = qq.convert(qq.revert(copy.deepcopy(trainer())), "w4a16", schedule=qq.Schedule(weight_scale=weight_scale))
    rollout, names = qq.load_rollout(exported), list(trainer().state_dict())
    recwarn.clear()
    qq.update_weights(rollout, model.state_dict())  # nothing is held yet
    qq.step(model)
    qq.update_weights(rollout, qq.export_weights(model, "modelopt"))
    assert not recwarn.list
    state: Any = model.state_dict()
    torch.save(state, tmp_path / "state.pt")
    for source in (state, torch.load(tmp_path / "state.pt")):
        assert list(source) == names
        with pytest.warns(
            UserWarning, match=r"update_weights: .* holds its scales .*export_weights\(trainer"
        ) as warned:
            qq.update_weights(rollout, source)
        assert [warning.filename for warning in warned] == [__file__]
    plain = qq.revert(model)
    plain.load_state_dict(state)
    recwarn.clear()
    qq.update_weights(rollout, plain.state_dict())
    assert not recwarn.list


@pytest.mark.parametrize("form", ["a dict", "pairs"])
@pytest.mark.parametrize(("theirs", "mine"), [("all", "mlp"), ("mlp", "all"), ("mlp", "experts"), ("experts", "all")])
def test_masters_of_a_trainer_with_another_scope_are_not_synced(theirs: str, mine: str, form: str) -> None:
    plain = [AutoModelForCausalLM.from_pretrained(MOE) for _ in range(2)]
    model, rollout = qq.convert(plain[0], "w4a16", scope=theirs), qq.convert(plain[1], "w4a4_residual", scope=mine)
    before = {name: tensor.clone() for name, tensor in rollout.state_dict().items()}
    state: Any = model.state_dict()
    refused = "update_weights: another contract: scope, include or exclude: model.layers.*_proj and 1 more "
    if "all" not in (theirs, mine):  # here the same modules under two names
        qq.update_weights(rollout, state, contract=contract_of(model))
        return
    forms = ["quantized against in high precision", "in high precision against quantized"]
    with pytest.raises(ValueError, match=f"{refused}{forms[theirs == 'all']};.*with the same") as error:
        qq.update_weights(rollout, state if form == "a dict" else state.items(), contract=contract_of(model))
    assert "\n" not in str(error.value)
    assert "mlp.experts" not in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in rollout.state_dict().items())
    told = replace(contract_of(model), quantized=None, high_precision=None)  # an older record
    message = rf"in high precision, .* its scope '{theirs}' .*; pass contract=quads_qat.contract_of\(trainer\), which"
    if form == "a dict":  # which lists the modules itself
        message = f"{refused}{forms[theirs == 'all']};.*with the same"
    with pytest.raises(ValueError, match=message) as error:
        qq.update_weights(rollout, state if form == "a dict" else state.items(), contract=told)
    assert "\n" not in str(error.value)
    if form == "a dict":
        assert all(torch.equal(tensor, before[name]) for name, tensor in rollout.state_dict().items())
    alike = qq.convert(qq.revert(model), "w4a16", scope=mine)
    qq.update_weights(rollout, alike.state_dict(), contract=contract_of(alike))


def test_masters_are_taken_where_only_the_name_of_the_scope_differs() -> None:
    """A checkpoint of others does not say what its scope was called; this one quantizes experts only."""
    rollout = qq.load_rollout(CHECKPOINTS / "modelopt" / "qwen3moe-nvfp4_experts_only", residual=ResidualConfig())
    assert contract_of(rollout).scope is Scope.EXPERTS
    recipe = contract_of(rollout).recipe
    model = qq.convert(AutoModelForCausalLM.from_pretrained(MOE), "w4a16", scope="experts", recipe=recipe)
    qq.update_weights(rollout, model.state_dict(), contract=contract_of(model))
    assert qq.check_first_step(model, rollout).ok


def settings(path: Path, **options: Any) -> tuple[Any, Any]:
    module = qq.load_rollout(path, **options).get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(module, ResidualCompensatedLinear)
    return module.activation, module.residual


def test_rollouts_do_what_is_recorded_or_what_they_are_told(exported: Path) -> None:
    activation, residual = settings(exported)
    assert (activation.scale, activation.recipe) == (ActivationScale.STATIC, Recipe.ALIGNED)
    assert residual == ResidualConfig(fraction=0.25, scope="block")  # pyright: ignore[reportArgumentType]
    activation, residual = settings(exported, residual=ResidualConfig(fraction=1))
    assert (activation.scale, residual) == (ActivationScale.STATIC, ResidualConfig(fraction=1))
    activation, residual = settings(exported, activation_scale="per_tensor", activation_recipe="modelopt-ieee")
    assert (activation.scale, activation.recipe) == (ActivationScale.PER_TENSOR, Recipe.MODELOPT_IEEE)
    assert residual.fraction == 0.25
    again = contract_of(qq.load_rollout(exported))
    assert again.rollout == contract_of(exported).rollout


def test_another_contract_is_refused(exported: Path, tmp_path: Path) -> None:
    expected = contract_of(trainer())
    qq.load_rollout(exported, contract=expected)
    qq.load_model(exported, contract=contract_of(trainer()))
    for load in (qq.load_rollout, qq.load_model):
        with pytest.raises(ValueError, match=r"recipe: modelopt-ieee against aligned; .* \(named first is"):
            load(exported, contract=contract_of(trainer("modelopt-ieee")))
        with pytest.raises(ValueError, match=r"another contract: rules of scale groups: \['layers.* against \[\]"):
            load(exported, contract=contract_of(trainer("aligned", (RULE,))))
        with pytest.raises(ValueError, match="another contract: recipe: 'aligned' against 'llm-compressor'"):
            load(CHECKPOINTS / "compressed_tensors" / "qwen3-nvfp4a16", contract=expected)
    other = with_entry(exported, tmp_path / "other", lambda e: e | {"rollout": None})
    qq.load_rollout(other, contract=expected)  # a W4A16 trainer expects nothing of activations
    with pytest.raises(
        ValueError, match=r"another contract: rollouts of this checkpoint have .*0\.5.*, expected are .*0\.25"
    ) as refused:
        qq.load_rollout(other, contract=contract_of(exported))
    assert "RolloutPolicy(" not in str(refused.value)
    qq.load_rollout(other, contract=contract_of(exported), residual=ResidualConfig(fraction=1))
    assert settings(other, contract=contract_of(exported), weights_only=True) == (None, None)


def test_an_explicit_argument_stands_for_its_own_part_of_a_contract(exported: Path, tmp_path: Path) -> None:
    contract = contract_of(exported)
    unrecorded = with_entry(exported, tmp_path / "other", lambda e: e | {"rollout": None})
    for path in (exported, unrecorded):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the contract says what rollouts do
            activation, residual = settings(path, contract=contract, activation_scale="per_tensor")
        assert activation.scale is ActivationScale.PER_TENSOR
        assert residual == ResidualConfig(fraction=0.25, scope="block")  # pyright: ignore[reportArgumentType]
        activation, residual = settings(path, contract=contract, residual=ResidualConfig(fraction=1))
        assert (activation.scale, residual) == (ActivationScale.STATIC, ResidualConfig(fraction=1))
        activation, residual = settings(path, contract=contract, activation_recipe="modelopt-ieee")
        assert activation == ActivationFormat(scale=ActivationScale.STATIC, recipe=Recipe.MODELOPT_IEEE)
        assert residual.fraction == 0.25
    policy = RolloutPolicy(activation=ActivationFormat(scale=ActivationScale.STATIC), residual=ResidualConfig())
    with pytest.raises(ValueError, match=r"another contract: rollouts .*fraction 0\.25.*, expected .*fraction 0\.5"):
        qq.load_rollout(exported, contract=replace(contract, rollout=policy), activation_scale="per_tensor")
    qq.load_rollout(exported, contract=replace(contract, rollout=policy), residual=ResidualConfig(fraction=1))


def test_a_rollout_of_a_w4a16_checkpoint_takes_the_rest_of_the_policy_from_the_contract() -> None:
    path = CHECKPOINTS / "compressed_tensors" / "qwen3-nvfp4a16"
    contract = contract_of(qq.load_rollout(path, residual=ResidualConfig(fraction=0.25)))
    assert contract_of(qq.load_rollout(path, weights_only=True, contract=contract)).rollout is None
    activation, residual = settings(path, contract=contract, activation_scale="per_tensor")
    assert (activation.scale, residual) == (ActivationScale.PER_TENSOR, ResidualConfig(fraction=0.25))
    with pytest.raises(
        ValueError, match=r"have activations untouched, expected are .*0\.25.*residual=.*activation_recipe="
    ):
        qq.load_rollout(path, contract=contract)


def test_the_export_dtype_of_the_first_version_is_that_of_its_config(exported: Path, tmp_path: Path) -> None:
    newer = ("export_dtype", "quantized", "high_precision")
    first = with_entry(
        exported, tmp_path / "first", lambda e: {k: v for k, v in e.items() if k not in newer} | {"version": 1}
    )
    contract = contract_of(trainer())
    half = replace(contract, export_dtype=torch.float16)
    for load in (qq.load_rollout, qq.load_model):
        load(first, contract=contract)
        load(first, contract=replace(contract, export_dtype=None))
        with pytest.raises(ValueError, match=r"another contract: export dtype .*: float16 against bfloat16; export or"):
            load(first, contract=half)
    (first / "config.json").write_text(json.dumps(config(first) | {"dtype": None, "torch_dtype": None}), "utf-8")
    qq.load_model(first, torch.bfloat16, contract=half)  # nothing says what it was


def test_scale_groups_of_a_rule(tmp_path: Path) -> None:
    """A rule travels with the file; a trainer without it is another trainer."""
    model = trainer("aligned", (RULE,))
    qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt", activations="observed")
    assert contract_of(tmp_path / "out").rules == (RULE,)
    assert qq.verify(model, tmp_path / "out").ok
    with pytest.raises(ValueError, match=r"another contract: rules of scale groups: \[\] against \['layers"):
        qq.verify(trainer(), tmp_path / "out")
    rollout = qq.load_rollout(tmp_path / "out")
    assert contract_of(rollout).rules == (RULE,)
    assert "rule 0 (1)" in qq.coverage(rollout).groups


def test_weights_of_another_contract_are_not_synced(exported: Path) -> None:
    rollout = qq.load_rollout(exported)
    before = {name: tensor.clone() for name, tensor in rollout.state_dict().items()}
    other = trainer("modelopt-ieee")
    with pytest.raises(ValueError, match="update_weights: another contract: recipe: aligned against modelopt-ieee"):
        qq.update_weights(rollout, qq.export_weights(other, "modelopt"), contract=contract_of(other))
    assert all(torch.equal(tensor, before[name]) for name, tensor in rollout.state_dict().items())
    message = json.loads(json.dumps(contract_of(trainer()).to_json()))
    qq.update_weights(
        rollout, qq.export_weights(trainer(), "modelopt"), contract=Contract.from_json(message, "the message")
    )


MALFORMED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no object": (lambda e: "aligned", "quads_qat must be a JSON object, got 'aligned'"),
    "null": (lambda e: None, "quads_qat must be a JSON object, got None"),
    "newer": (
        lambda e: e | {"version": VERSION + 1},
        rf"has version {VERSION + 1}, .* up to {VERSION}; install a newer",
    ),
    "version of words": (lambda e: e | {"version": "1"}, "version must be a whole number from 1, got '1'"),
    "unknown key": (
        lambda e: e | {"residuals": {}},
        "quads_qat: unknown key 'residuals'; known are activations, export_",
    ),
    "no recipe": (lambda e: {k: v for k, v in e.items() if k != "recipe"}, "names no recipe"),
    "recipe of a number": (lambda e: e | {"recipe": 4}, "quads_qat.recipe: Recipe: unknown value 4"),
    "scope": (lambda e: e | {"scope": "half"}, "quads_qat.scope: Scope: unknown value 'half'"),
    "groups": (lambda e: e | {"scale_groups": []}, "scale_groups must be a JSON object"),
    "fused": (lambda e: e | {"scale_groups": {"fused": [1]}}, "scale_groups.fused must hold lists of strings"),
    "fused of a number": (lambda e: e | {"scale_groups": {"fused": 1}}, "must be a list of lists of names, got 1"),
    "rules": (lambda e: e | {"scale_groups": {"rules": "x"}}, "scale_groups.rules must hold lists of strings, got 'x'"),
    "weight scale": (lambda e: e | {"weight_scale": "x"}, "quads_qat.weight_scale: WeightScale: unknown value 'x'"),
    "start step": (lambda e: e | {"start_step": -1}, "start_step must be a whole number from 0, got -1"),
    "start step of words": (lambda e: e | {"start_step": "1"}, "start_step must be a whole number from 0, got '1'"),
    "export dtype": (
        lambda e: e | {"export_dtype": "float8"},
        "export_dtype must be one of bfloat16, float16, got 'fl",
    ),
    "export dtype of a list": (lambda e: e | {"export_dtype": []}, r"export_dtype must be one of .*, got \[\]"),
    "quantized": (lambda e: e | {"quantized": "all"}, "quantized must hold lists of strings, got 'all'"),
    "far too many": (lambda e: e | {"quantized": ["a.0-99999999999"]}, "quantized: more than 10,000,000 names"),
    "activations": (lambda e: e | {"activations": "many"}, "activations must be one of none, observed, given"),
    "rollout": (lambda e: e | {"rollout": 3}, "rollout must be a JSON object, got 3"),
    "fraction": (
        lambda e: e | {"rollout": {"residual": {"fraction": 2}}},
        "residual: ResidualConfig: fraction must be",
    ),
    "residual": (lambda e: e | {"rollout": {"residual": {"part": 1}}}, "rollout.residual: unknown key 'part'"),
    "activation scale": (lambda e: e | {"rollout": {"activation_scale": "x"}}, "ActivationScale: unknown value 'x'"),
}


@pytest.mark.parametrize("how", MALFORMED)
def test_malformed_entries(how: str, exported: Path, tmp_path: Path) -> None:
    change, match = MALFORMED[how]
    damaged = with_entry(exported, tmp_path / "damaged", change)
    for read in (qq.load_rollout, qq.load_model, inspect_checkpoint, contract_of, lambda p: qq.verify(trainer(), p)):
        with pytest.raises(ValueError, match=match) as error:
            read(damaged)
        assert "\n" not in str(error.value)


def test_an_entry_without_a_version_is_the_first(exported: Path, tmp_path: Path) -> None:
    path = with_entry(exported, tmp_path / "first", lambda e: {"recipe": "aligned"})
    assert contract_of(path) == Contract(recipe=Recipe.ALIGNED)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_scales_that_the_recipe_cannot_have_made(dialect: str, tmp_path: Path) -> None:
    """The claim is checked against the tensors: ALIGNED has powers of two, and what decodes exactly depends on it."""
    qq.export_checkpoint(trainer(), tmp_path / "out", dialect=dialect)
    ending = "weight_scale_2" if dialect == "modelopt" else "weight_global_scale"
    name = f"model.layers.1.mlp.down_proj.{ending}"
    scale = tensors(tmp_path / "out")[name]
    path = rewritten(tmp_path / "out", tmp_path / "swapped", {name: scale * 1.5})
    for load in (qq.load_rollout, qq.load_model):
        with pytest.raises(ValueError, match=f"{name} must be a power of two, as the recipe 'aligned'"):
            load(path)
    assert name in inspect_checkpoint(path)["problems"][0]
    foreign = CHECKPOINTS / "modelopt" / "qwen3-w4a16_nvfp4"
    shutil.copytree(foreign, tmp_path / "claims")
    claims = config(foreign) | {"quads_qat": {"recipe": "aligned"}}
    (tmp_path / "claims" / "config.json").write_text(json.dumps(claims), "utf-8")
    with pytest.raises(ValueError, match="must be a power of two"):
        qq.load_model(tmp_path / "claims")


def test_a_contract_may_be_given_as_a_directory(tmp_path: Path):
    qq.quantize_checkpoint(DATA, tmp_path / "a")
    rollout = qq.load_rollout(tmp_path / "a", contract=tmp_path / "a")
    qq.update_weights(rollout, qq.load_model(tmp_path / "a").state_dict(), contract=str(tmp_path / "a"))
    with pytest.raises(TypeError, match="contract must be a Contract or a checkpoint directory, got int"):
        qq.load_model(tmp_path / "a", contract=3)
