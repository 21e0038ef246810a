"""What a weight sync was told of its trainer stays told, and what nobody told it is said."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import config
from tiny_models import tiny_model
from torch import nn
from weight_syncs import assert_same_state, state

import quads_qat as qq
from quads_qat import sync_layers
from quads_qat.contract import Contract, contract_of

TELLS: dict[str, Callable[[nn.Module], Any]] = {
    "a state_dict": lambda model: (model.state_dict(), {}),
    "a contract": lambda model: (iter(model.state_dict().items()), {"contract": contract_of(model)}),
    "a contract of packed weights": lambda model: (
        qq.export_weights(model, "modelopt"),
        {"contract": contract_of(model)},
    ),
}


def trainer(export: torch.dtype = torch.float16, seed: int = 1, first: torch.dtype = torch.float32) -> nn.Module:
    """Of fp32 masters between the numbers of 16 bits; ``first``: the dtype of the first layer's."""
    model: Any = tiny_model("qwen3_moe", seed=seed).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0009)
    model.model.layers[0].to(first)
    model.config.dtype = export
    return qq.convert(model, "w4a16")


def rollout(dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    model: Any = tiny_model("qwen3_moe", seed=0)
    return qq.convert(model.to(dtype), "w4a4_residual", **options)


def pairs(model: nn.Module) -> Any:
    """Masters without a word."""
    return iter(model.state_dict().items())


def quantized(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t for n, t in state(model).items() if n.endswith(("qdata", "block_scale", "per_tensor_scale"))}


# --------------------------------------------------------------------------------------------------------- export dtype


@pytest.mark.parametrize("how", TELLS)
def test_an_export_dtype_that_was_told_once_is_that_of_later_syncs(how: str) -> None:
    model, later, expected, mine = trainer(), trainer(seed=2), rollout(), rollout()
    weights, options = TELLS[how](model)
    qq.update_weights(mine, weights, **options)
    assert contract_of(mine).export_dtype == torch.float16
    for other in (later, model):
        qq.update_weights(mine, pairs(other))
        qq.update_weights(expected, qq.export_weights(other, "modelopt"))
        assert_same_state(quantized(mine), quantized(expected))
    qq.update_weights(mine, trainer(torch.bfloat16).state_dict())  # until another is told
    qq.update_weights(mine, pairs(later))
    assert contract_of(mine).export_dtype == torch.bfloat16
    qq.update_weights(expected, qq.export_weights(trainer(torch.bfloat16, seed=2), "modelopt"))
    assert_same_state(quantized(mine), quantized(expected))


def test_export_dtypes_of_modules_that_were_told_once_are_those_of_later_syncs() -> None:
    model, later = (trainer(seed=seed, first=torch.bfloat16) for seed in (1, 2))
    mine, expected = rollout(), rollout()
    qq.update_weights(mine, model.state_dict())
    for told in (None, contract_of(later)):
        qq.update_weights(mine, pairs(later), contract=told)
        qq.update_weights(expected, qq.export_weights(later, "modelopt"))
        assert_same_state(quantized(mine), quantized(expected))


def test_that_nobody_told_the_export_dtypes_is_remembered_too() -> None:
    mixed, mine = trainer(first=torch.bfloat16), rollout()
    qq.update_weights(mine, qq.export_weights(mixed, "modelopt"), contract=contract_of(mixed))
    before = state(mine)
    with pytest.raises(ValueError, match="its trainer's export dtypes differ, and nothing tells"):
        qq.update_weights(mine, dict(pairs(mixed)))
    assert_same_state(state(mine), before)
    qq.update_weights(mine, mixed.state_dict())
    qq.update_weights(mine, pairs(mixed))


@pytest.mark.parametrize("first", [torch.float32, torch.bfloat16])
def test_the_contract_that_a_rollout_was_loaded_with_tells_it(first: torch.dtype, tmp_path: Path) -> None:
    """Of a checkpoint that does not record from which dtype it was quantized."""
    model = trainer(first=first)
    qq.export_checkpoint(trainer(torch.bfloat16), tmp_path / "out", dialect="modelopt")
    changed = config(tmp_path / "out")
    for key in ("export_dtype", "quantized", "high_precision"):
        del changed["quads_qat"][key]
    changed["dtype"] = None
    (tmp_path / "out" / "config.json").write_text(json.dumps(changed | {"version": 1}), "utf-8")
    mine, expected = qq.load_rollout(tmp_path / "out", dtype=torch.float32, contract=contract_of(model)), rollout()
    if first == torch.float32:
        qq.update_weights(mine, pairs(model))
        qq.update_weights(expected, qq.export_weights(model, "modelopt"))
        assert_same_state(quantized(mine), quantized(expected))
    else:
        with pytest.raises(ValueError, match="its trainer's export dtypes differ, and nothing tells"):
            qq.update_weights(mine, dict(pairs(model)))


@pytest.mark.parametrize("begun", [True, False])
def test_a_sync_that_changes_nothing_is_told_nothing(begun: bool) -> None:
    """One that fails half-way is: the next one must make the rollout whole."""
    model, mine, expected = trainer(), rollout(), rollout()
    masters = dict(pairs(model))
    name = list(masters)[-1]
    masters[name] = torch.ones(3)
    with pytest.raises(ValueError, match="must have shape"):
        qq.update_weights(mine, iter(masters.items()) if begun else masters, contract=contract_of(model))
    assert contract_of(mine).export_dtype == (torch.float16 if begun else torch.bfloat16)
    if begun:
        qq.update_weights(mine, pairs(model))
        qq.update_weights(expected, qq.export_weights(model, "modelopt"))
        assert_same_state(quantized(mine), quantized(expected))


# ------------------------------------------------------------------------------------------------------ other 16 bits


HALVES = (torch.bfloat16, torch.float16)
OTHER = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}


def in_dtype(dtype: torch.dtype) -> nn.Module:
    model: Any = tiny_model("qwen3_moe", seed=1)
    return qq.convert(model.to(dtype), "w4a16")


@pytest.mark.parametrize("way_out", ["load_rollout", "to", "float32"])
@pytest.mark.parametrize("form", ["packed", "masters"])
@pytest.mark.parametrize("dtype", HALVES)
def test_a_rollout_in_other_16_bits_names_the_way_out(
    dtype: torch.dtype, form: str, way_out: str, tmp_path: Path
) -> None:
    """What is not quantized cannot be given to it without another rounding."""
    model, other = in_dtype(dtype), OTHER[dtype]
    qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt")
    mine = qq.load_rollout(tmp_path / "out", dtype=other)

    def weights() -> Any:
        return qq.export_weights(model, "modelopt") if form == "packed" else model.state_dict()

    said = (
        rf"must be {other} or float32, which is cast to that, got {dtype}; give the rollout its trainer's dtype: "
        rf"load_rollout\(\.\.\., dtype={dtype}\) or rollout.to\({dtype}\); or torch.float32, which takes all;"
    )
    with pytest.raises(ValueError, match=said):
        qq.update_weights(mine, weights())
    if way_out == "load_rollout":
        mine = qq.load_rollout(tmp_path / "out", dtype=dtype)
    else:
        mine = mine.to(dtype if way_out == "to" else torch.float32)
    qq.update_weights(mine, weights())
    assert qq.check_first_step(model, mine).failed == []


@pytest.mark.parametrize("dtype", HALVES)
def test_decoded_weights_in_other_16_bits_name_the_way_out(dtype: torch.dtype) -> None:
    model, mine = in_dtype(dtype), qq.convert(in_dtype(OTHER[dtype]), "w4a4_residual").float()
    said = (
        rf"must be {OTHER[dtype]} or float32, which is cast to that, got {dtype}; its trainer quantizes from "
        r"that: pass contract=quads_qat.contract_of\(trainer\), or send trainer.state_dict\(\) as it is made or packed"
    )
    with pytest.raises(ValueError, match=said):
        qq.update_weights(mine, qq.export_weights(model, "dequantized"))
    qq.update_weights(mine, qq.export_weights(model, "dequantized"), contract=contract_of(model))
    assert qq.check_first_step(model, mine).failed == []
    qq.update_weights(mine, pairs(model))  # it is remembered


def test_what_is_no_float_has_no_such_way_out() -> None:
    mine = rollout(torch.bfloat16)
    for wrong in (torch.int64, torch.float64):
        masters = {"lm_head.weight": torch.zeros(128, 64, dtype=wrong)}
        with pytest.raises(ValueError, match=rf"cast to that, got {wrong}; nothing was changed$"):
            qq.update_weights(mine, masters, strict=False)


# ------------------------------------------------------------------------- contracts that do not list what is quantized


SETS: dict[str, dict[str, Any]] = {
    "all": {},
    "mlp": {"scope": "mlp"},
    "experts": {"scope": "experts"},
    "experts and more": {"scope": "experts", "include": ["*.q_proj", "*.k_proj", "*.v_proj"]},
}


@pytest.fixture(scope="module")
def of_others(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], nn.Module]:
    """Rollouts of checkpoints that do not say what was asked for when they were quantized."""
    directory = tmp_path_factory.mktemp("of_others")

    def load(what: str) -> nn.Module:
        path = directory / what
        if not path.exists():
            model = qq.convert(tiny_model("qwen3_moe", seed=0), "w4a16", recipe="modelopt", **SETS[what])
            qq.export_checkpoint(model, path, dialect="modelopt")
            others = {key: value for key, value in config(path).items() if key != "quads_qat"}
            (path / "config.json").write_text(json.dumps(others), "utf-8")
        return qq.load_rollout(path, weights_only=True)

    return load


def first_version(what: str) -> tuple[nn.Module, Contract]:
    """A trainer, and its contract as the first version had it."""
    model = qq.convert(tiny_model("qwen3_moe", seed=1), "w4a16", recipe="modelopt", **SETS[what])
    return model, replace(contract_of(model), quantized=None, high_precision=None)


@pytest.mark.parametrize("mine", SETS)
@pytest.mark.parametrize("theirs", SETS)
def test_where_a_state_dict_lists_what_is_quantized_that_decides(
    theirs: str, mine: str, of_others: Callable[[str], nn.Module]
) -> None:
    (model, told), target = first_version(theirs), of_others(mine)
    before, alike = state(target), {theirs, mine} <= {"mlp", "experts"} or theirs == mine
    if alike:  # the modules, whatever their scope is called
        qq.update_weights(target, model.state_dict(), contract=told)
        assert qq.check_first_step(model, target).failed == []
        return
    with pytest.raises(ValueError, match=r"another contract: scope, include or exclude: model.layers.0-1.self_attn"):
        qq.update_weights(target, model.state_dict(), contract=told)
    assert_same_state(state(target), before)


LACKS = {
    ("all", "mlp"): "covers model.layers.0.self_attn.q_proj, which this rollout does not quantize",
    ("all", "experts"): "covers model.layers.0.self_attn.q_proj, which this rollout does not quantize",
    ("mlp", "all"): "does not cover it",
    ("experts", "all"): "does not cover it",
    ("mlp", "experts and more"): "does not cover it",
    ("experts", "experts and more"): "does not cover it",
    ("experts and more", "all"): "does not cover it",
    ("experts and more", "experts and more"): "does not cover it",
}
NOT_TOLD = {("experts and more", "mlp"), ("experts and more", "experts"), ("all", "experts and more")}
"""Only by what was included or excluded do these differ from others that are alike."""


@pytest.mark.parametrize("mine", SETS)
@pytest.mark.parametrize("theirs", SETS)
def test_where_nothing_lists_what_is_quantized_the_scope_is_compared_with_it(
    theirs: str, mine: str, of_others: Callable[[str], nn.Module]
) -> None:
    (model, told), target = first_version(theirs), of_others(mine)
    masters = dict(model.state_dict())
    before = state(target)
    if (theirs, mine) in LACKS:
        said = (
            rf"is in high precision, and the contract does not list its module; its scope '{told.scope}' "
            rf"{LACKS[theirs, mine]}, and what was included or excluded is not known; pass "
            r"contract=quads_qat.contract_of\(trainer\), which lists it, or send trainer.state_dict\(\) as it is made"
        )
        with pytest.raises(ValueError, match=said):
            qq.update_weights(target, masters, contract=told)
        assert_same_state(state(target), before)
        if theirs == mine:  # the ways out
            qq.update_weights(target, masters, contract=contract_of(model))
            qq.update_weights(target, model.state_dict(), contract=told)
            qq.update_weights(target, qq.export_weights(model, "modelopt"), contract=told)
        return
    qq.update_weights(target, masters, contract=told)
    failed = qq.check_first_step(model, target).failed
    assert failed == (["coverage"] if (theirs, mine) in NOT_TOLD else [])


# ------------------------------------------------------------------------------------------------------ decoded weights


def held(weight_scale: Any) -> qq.Schedule:
    return qq.Schedule(weight_scale=weight_scale)


def dequantized(model: nn.Module, dialect: str = "dequantized") -> Any:
    return qq.export_weights(model, dialect)


@pytest.mark.parametrize("factor", [0.9, 1.7, 1e-3])
@pytest.mark.parametrize("weight_scale", ["dynamic", "frozen", "ema"])
@pytest.mark.parametrize("recipe", ["aligned", "modelopt", "llm-compressor"])
def test_decoded_weights_that_change_when_they_are_quantized_again_are_warned_of(
    recipe: str, weight_scale: str, factor: float, recwarn: pytest.WarningsRecorder
) -> None:
    model: Any = tiny_model("qwen3_moe", seed=1)
    model = qq.convert(model, "w4a16", recipe=recipe, schedule=held(weight_scale))
    qq.step(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    qq.step(model)
    mine = rollout(torch.bfloat16, recipe=recipe)
    recwarn.clear()
    qq.update_weights(mine, dequantized(model))
    differ = "weights" in qq.check_first_step(model, mine).failed
    assert [warning.filename for warning in recwarn.list] == [__file__] * differ
    if differ:
        said = str(recwarn.list[0].message)
        assert "came as decoded NVFP4 weights" in said
        assert "send packed tensors: quads_qat.export_weights(trainer, 'modelopt')" in said
        assert "\n" not in said
    if recipe == "modelopt" and factor == 0.9:
        assert differ == (weight_scale != "dynamic")  # there is something to warn of
    if recipe == "aligned":
        assert not differ
    recwarn.clear()
    qq.update_weights(mine, dequantized(model, "compressed-tensors" if recipe == "llm-compressor" else "modelopt"))
    qq.update_weights(mine, pairs(model))  # masters that nobody decoded
    assert not recwarn.list


def test_a_state_dict_says_that_it_holds_masters(recwarn: pytest.WarningsRecorder) -> None:
    """A trainer that starts from decoded weights quantizes them again itself."""
    source = qq.convert(tiny_model("qwen3_moe", seed=1), "w4a16", recipe="modelopt")
    decoded = dict(dequantized(source))
    plain: Any = qq.revert(source)
    plain.load_state_dict(decoded, strict=False)
    model, mine = qq.convert(plain, "w4a16"), rollout(torch.bfloat16)
    recwarn.clear()
    qq.update_weights(mine, model.state_dict())
    assert qq.check_first_step(model, mine).failed == []
    assert not recwarn.list


def test_weights_of_few_values_are_no_decoded_ones(recwarn: pytest.WarningsRecorder) -> None:
    model, mine = in_dtype(torch.bfloat16), rollout(torch.bfloat16)
    fills = (lambda t: torch.full_like(t, 0.3), lambda t: t.sign(), lambda t: torch.eye(*t.shape[-2:]).expand(t.shape))
    for fill in (*fills, lambda t: (t * 100).round().clamp(-2, 2) / 7):
        masters = {n: fill(t).to(t.dtype) if t.ndim > 1 else t for n, t in model.state_dict().items()}
        qq.update_weights(mine, masters)
    assert not recwarn.list


def test_masters_are_looked_at_once_for_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look reads a value, which on a GPU waits for all that was asked before."""
    looks: list[int] = []
    look = sync_layers.most_magnitudes
    monkeypatch.setattr(sync_layers, "most_magnitudes", lambda weight: looks.append(look(weight)) or looks[-1])
    model, mine = in_dtype(torch.bfloat16), rollout(torch.bfloat16)
    qq.update_weights(mine, pairs(model))
    assert len(looks) == 1
    qq.update_weights(mine, model.state_dict())  # says that it holds masters
    assert len(looks) == 1


def test_decoded_stacks_are_looked_at_along_their_blocks() -> None:
    """Those of gpt-oss are transposed in memory; the first expert is unused."""
    model: Any = tiny_model("gpt_oss", seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name and parameter.ndim == 3:
                parameter[0] = 0
    model = qq.convert(model, "w4a16", recipe="modelopt", scope="experts", schedule=held("frozen"))
    qq.step(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    mine = qq.convert(tiny_model("gpt_oss", seed=0), "w4a4_residual", recipe="modelopt", scope="experts")
    with pytest.warns(UserWarning, match=r"experts.* and 3 more came as decoded NVFP4 weights"):
        qq.update_weights(mine, dequantized(model))


# ---------------------------------------------------------------------------------------------- a start that is to come


STREAMS: dict[str, Callable[[nn.Module], Any]] = {
    "a state_dict": lambda model: model.state_dict(),
    "pairs": pairs,
    "packed": lambda model: list(qq.export_weights(model, "modelopt")),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_a_contract_tells_that_fake_quantization_has_not_started(stream: str) -> None:
    model: Any = tiny_model("qwen3_moe", seed=1)
    model, mine = qq.convert(model, "w4a16", schedule=qq.Schedule(start_step=2)), rollout(torch.bfloat16)
    for step in range(4):
        told = Contract.from_json(json.loads(json.dumps(contract_of(model).to_json())), "the message")
        assert told == contract_of(model)
        assert told.start_step == (2 if step < 2 else 0)
        weights = STREAMS[stream](model)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            qq.update_weights(mine, weights, contract=told)
        assert [(str(warning.message), warning.filename) for warning in warned] == [
            (
                "update_weights: fake quantization starts at step 2 of the schedule; until then the trainer multiplies "
                "by its master weights, and this rollout by quantized ones",
                __file__,
            )
        ] * (step < 2)
        qq.step(model)


def test_a_state_dict_knows_better_than_an_old_contract(recwarn: pytest.WarningsRecorder) -> None:
    model: Any = tiny_model("qwen3_moe", seed=1)
    model, mine = qq.convert(model, "w4a16", schedule=qq.Schedule(start_step=1)), rollout(torch.bfloat16)
    told = contract_of(model)
    qq.step(model)
    qq.update_weights(mine, model.state_dict(), contract=told)
    assert not recwarn.list


def test_a_rollout_has_no_start(tmp_path: Path) -> None:
    model: Any = tiny_model("qwen3_moe", seed=1)
    model = qq.convert(model, "w4a16", schedule=qq.Schedule(start_step=1))
    with pytest.warns(UserWarning, match="fake quantization starts at step 1"):
        qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt")
    assert contract_of(tmp_path / "out").start_step == 1
    assert contract_of(qq.load_rollout(tmp_path / "out", contract=contract_of(model))).start_step == 0
    assert contract_of(qq.convert(model, "w4a4_residual")).start_step == 0
