"""Contract under test: from which dtype weights are quantized, and which ones, is told and compared, never guessed."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import CHECKPOINTS, config
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_model
from torch import nn
from transformers import AutoModelForCausalLM
from weight_syncs import assert_same_state, state

import quads_qat as qq
from quads_qat.config import Mode
from quads_qat.contract import Contract, contract_of
from quads_qat.conversion import conversion_of
from quads_qat.diagnose_files import diagnose_checkpoints
from quads_qat.name_ranges import expanded, pattern, shortened
from quads_qat.selection import first_match

O_PROJ = "model.layers.0-1.self_attn.o_proj"
RULE: dict[str, Any] = {"groups": [r"layers\.(\d+)\.(?:self_attn\.[qkvo]_proj)$"]}
EXCLUDE: dict[str, Any] = {"exclude": ["*.o_proj"]}


def trainer(masters: torch.dtype = torch.float32, export: torch.dtype = torch.bfloat16, **options: Any) -> nn.Module:
    """Of seed 1; fp32 masters of a config in ``export`` are what ``from_pretrained(dtype=torch.float32)`` never is."""
    model: Any = tiny_model("qwen3_moe", seed=1).to(masters)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0009)  # in fp32 between the numbers of bf16
    model.config.dtype = export
    return qq.convert(model, "w4a16", **options)


def both_dtypes() -> nn.Module:
    """A trainer whose first layer has masters in bf16, and the rest fp32 masters that are cast to fp16."""
    model: Any = tiny_model("qwen3_moe", seed=1).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0009)
    model.model.layers[0].to(torch.bfloat16)
    model.config.dtype = torch.float16
    return qq.convert(model, "w4a16")


def quantized_weights(model: nn.Module) -> set[str]:
    return set(conversion_of(model, "the test")[1].weights)


def rollout(dtype: torch.dtype = torch.bfloat16, **options: Any) -> nn.Module:
    """Of seed 0."""
    return qq.convert(tiny_model("qwen3_moe", seed=0).to(dtype), "w4a4_residual", **options)


def quantized(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t for n, t in state(model).items() if n.endswith(("qdata", "block_scale", "per_tensor_scale"))}


@cache
def checkpoint(directory: Path, export: torch.dtype, recipe: str) -> Path:
    path = directory / f"{export}-{recipe}"
    qq.export_checkpoint(trainer(export=export, recipe=recipe), path, dialect="modelopt")
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exports")


def without(path: Path, target: Path, *keys: str) -> Path:
    """A copy that older versions wrote, or (the whole entry) others."""
    shutil.copytree(path, target)
    changed = config(path)
    for key in keys:
        if key == "quads_qat":
            del changed[key]
        else:
            changed["quads_qat"] = {k: v for k, v in changed["quads_qat"].items() if k != key} | {"version": 1}
    (target / "config.json").write_text(json.dumps(changed), "utf-8")
    return target


# --------------------------------------------------------------------------------------------------------- export dtype


LOADS: dict[str, Callable[[Path, torch.dtype], Any]] = {
    "load_rollout": lambda path, dtype: qq.load_rollout(path, dtype=dtype, weights_only=True),
    "from_pretrained": lambda path, dtype: AutoModelForCausalLM.from_pretrained(path, dtype=dtype),
}
RECORDS = {"recorded": (), "an older record": ("export_dtype", "quantized", "high_precision"), "others": ("quads_qat",)}


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("export", [torch.bfloat16, torch.float16])
def test_masters_are_cast_as_the_checkpoint_was_whatever_dtype_the_rollout_has(
    export: torch.dtype, dtype: torch.dtype, load: str, record: str, directory: Path, tmp_path: Path
) -> None:
    recipe = "modelopt" if record == "others" else "aligned"
    path = without(checkpoint(directory, export, recipe), tmp_path / "out", *RECORDS[record])
    model, mine, expected = trainer(export=export, recipe=recipe), LOADS[load](path, dtype), qq.load_rollout(path)
    assert contract_of(mine).export_dtype == export
    before = quantized(mine)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.7)
    qq.update_weights(expected, qq.export_weights(model, "modelopt"))
    qq.update_weights(mine, model.state_dict())
    assert_same_state(quantized(mine), quantized(expected))
    assert any(
        not torch.equal(before[name].view(torch.uint8), t.view(torch.uint8)) for name, t in quantized(mine).items()
    )


OTHER = {torch.bfloat16: torch.float16, torch.float16: torch.bfloat16}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASTS = [
    (masters, export, dtype)
    for export in DTYPES[:2]
    for masters in (torch.float32, export)
    for dtype in DTYPES
    if masters == torch.float32 or dtype in (masters, torch.float32)  # 16 bits never become 16 other bits
]


@pytest.mark.parametrize(("masters", "export", "dtype"), CASTS)
def test_a_contract_tells_the_export_dtype(masters: torch.dtype, export: torch.dtype, dtype: torch.dtype) -> None:
    model = trainer(masters, export)
    told = Contract.from_json(json.loads(json.dumps(contract_of(model).to_json())), "the message")
    assert told.export_dtype == export
    expected, pairs, mapping = (rollout(d) for d in (torch.float32, dtype, dtype))
    qq.update_weights(expected, qq.export_weights(model, "modelopt"), contract=told)
    qq.update_weights(pairs, iter(model.state_dict().items()), contract=told)
    qq.update_weights(mapping, model.state_dict(), contract=told)
    assert_same_state(quantized(pairs), quantized(expected))
    assert_same_state(quantized(mapping), quantized(expected))
    if dtype == export:
        assert qq.check_first_step(model, pairs).failed == []


def test_the_first_step_names_another_export_dtype() -> None:
    model, target = trainer(), rollout(torch.float16)
    qq.update_weights(target, iter(model.state_dict().items()))  # nobody tells
    check = qq.check_first_step(model, target).checks[2]
    assert not check.passed
    assert "the trainer casts to torch.bfloat16 first, this rollout to torch.float16: pass contract=" in check.way_out


def test_another_export_dtype_is_refused_where_weights_are_those_of_a_file(directory: Path, tmp_path: Path) -> None:
    path = checkpoint(directory, torch.float16, "aligned")
    model = trainer()
    for check in (
        lambda: qq.load_rollout(path, contract=contract_of(model)),
        lambda: qq.load_model(path, contract=contract_of(model)),
        lambda: qq.verify(model, path),
    ):
        with pytest.raises(ValueError, match=r"another contract: export dtype .*: bfloat16 against float16; export or"):
            check()
    older = without(path, tmp_path / "older", "export_dtype")
    assert contract_of(older).export_dtype is None
    qq.load_rollout(older, contract=contract_of(model))  # nobody knows
    assert contract_of(qq.load_rollout(path)).differences(contract_of(model)) == [
        "export dtype (that of the weights, or of fp32 masters model.config.dtype at convert): float16 against bfloat16"
    ]


def test_a_source_in_fp16_and_a_trainer_with_masters_in_fp32_differ(tmp_path: Path) -> None:
    tiny_model("qwen3_moe", seed=1).half().save_pretrained(tmp_path / "source")
    qq.quantize_checkpoint(tmp_path / "source", tmp_path / "ptq")
    load = AutoModelForCausalLM.from_pretrained
    model = qq.convert(load(tmp_path / "source", dtype=torch.float32), "w4a16")
    with pytest.raises(ValueError, match=r"export dtype .*: bfloat16 against float16"):
        contract_of(model).require_same(contract_of(tmp_path / "ptq"), "here")
    again = load(tmp_path / "source", dtype=torch.float32)
    again.config.dtype = torch.float16  # what the message says
    assert qq.verify(qq.convert(again, "w4a16"), tmp_path / "ptq").ok


@pytest.mark.filterwarnings("ignore:export. fp16 cannot hold")
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_files_in_fp16_need_no_dtype_in_config_json(dialect: str, tmp_path: Path) -> None:
    """They are loaded and quantized as what they are, as transformers does."""

    def forget(path: Path, *keys: str) -> Path:
        left = {key: value for key, value in config(path).items() if key not in ("dtype", "torch_dtype", *keys)}
        (path / "config.json").write_text(json.dumps(left), "utf-8")
        return path

    tiny_model("qwen3_moe", seed=1).half().save_pretrained(tmp_path / "source")
    source, recipe = forget(tmp_path / "source"), {"modelopt": "modelopt"}.get(dialect, "llm-compressor")
    qq.quantize_checkpoint(source, tmp_path / "out", dialect=dialect, recipe=recipe)
    model = qq.convert(AutoModelForCausalLM.from_pretrained(source), "w4a16", recipe=recipe)
    assert contract_of(tmp_path / "out").export_dtype == contract_of(model).export_dtype == torch.float16
    assert qq.verify(model, tmp_path / "out").ok
    for path in (forget(tmp_path / "out"), forget(tmp_path / "out", "quads_qat")):  # ours, others'
        assert qq.verify(model, path).ok
        mine = qq.load_rollout(path, weights_only=True)
        assert {t.dtype for t in (*mine.parameters(), *qq.load_model(path).parameters())} == {torch.float16}
        qq.update_weights(mine, dict(model.state_dict()))
        assert qq.check_first_step(model, mine).failed == []
    qq.dequantize_checkpoint(tmp_path / "out", tmp_path / "plain")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    assert_same_state(plain, qq.load_model(tmp_path / "out").state_dict())


@pytest.mark.parametrize("with_contract", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_state_dict_tells_the_export_dtype_of_each_module(dtype: torch.dtype, with_contract: bool) -> None:
    model, expected, mine = both_dtypes(), rollout(torch.float32), rollout(dtype)
    told = contract_of(model) if with_contract else None
    assert contract_of(model).export_dtype is None
    qq.update_weights(expected, qq.export_weights(model, "modelopt"), contract=told)
    masters: Any = model.state_dict()
    for name in [n for n in masters if n not in quantized_weights(model)]:
        masters[name] = masters[name].to(dtype)  # what is not quantized is the rollout's own
    qq.update_weights(mine, masters, contract=told)
    assert_same_state(quantized(mine), quantized(expected))


@pytest.mark.parametrize("ahead", [True, False])
def test_masters_are_refused_if_only_a_contract_tells_that_export_dtypes_differ(ahead: bool) -> None:
    model, target = both_dtypes(), rollout()
    before, masters = state(target), {n: t for n, t in model.state_dict().items() if t.dtype == torch.float32}
    sent = dict(masters) if ahead else iter(masters.items())
    said = r"layers.1.*weight is in high precision, its trainer's export dtypes differ, and nothing tells .*; send"
    with pytest.raises(ValueError, match=said):
        qq.update_weights(target, sent, contract=contract_of(model), strict=False)
    if ahead:
        assert_same_state(state(target), before)


# --------------------------------------------------------------------------------------------------- quantized modules


STREAMS: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda model: (model.state_dict(), {}),
    "pairs": lambda model: (iter(model.state_dict().items()), {}),
    "packed": lambda model: (qq.export_weights(model, "modelopt"), {}),
    "packed, with metadata": lambda model: (
        qq.export_weights(model, "compressed-tensors"),
        {"metadata": qq.export_metadata(model, "compressed-tensors")},
    ),
}


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize(
    ("theirs", "mine", "said"),
    [
        (EXCLUDE, {}, f"{O_PROJ} quantized against in high precision;"),
        ({}, EXCLUDE, f"{O_PROJ} in high precision against quantized;"),
        ({"include": ["lm_head"]}, {}, "lm_head in high precision against quantized;"),
        ({"scope": "mlp"}, {}, "model.layers.0-1.self_attn.q_proj, .*k_proj, .*v_proj and 1 more quantized against in"),
    ],
)
def test_other_quantized_modules_are_refused_with_a_contract(
    theirs: Any, mine: Any, said: str, stream: str, strict: bool
) -> None:
    model, target = trainer(**theirs), rollout(**mine)
    before, (weights, options) = state(target), STREAMS[stream](model)
    with pytest.raises(ValueError, match=f"update_weights: another contract: scope, include or exclude: {said}") as e:
        qq.update_weights(target, weights, contract=contract_of(model), strict=strict, **options)
    assert "\n" not in str(e.value)
    assert_same_state(state(target), before)  # which would raise after a sync that failed half-way
    alike = rollout(**theirs)
    weights, options = STREAMS[stream](model)
    qq.update_weights(alike, weights, contract=contract_of(model), strict=strict, **options)
    assert qq.check_first_step(model, alike).failed == []


@pytest.mark.parametrize("record", RECORDS)
def test_loading_refuses_other_quantized_modules(record: str, directory: Path, tmp_path: Path) -> None:
    recipe = "modelopt" if record == "others" else "aligned"
    path = without(checkpoint(directory, torch.bfloat16, recipe), tmp_path / "out", *RECORDS[record])
    for load in (qq.load_rollout, qq.load_model):
        load(path, contract=contract_of(trainer(recipe=recipe)))
        with pytest.raises(
            ValueError,
            match=f"out: another contract: scope, include or exclude: {O_PROJ} in high precision against quantized",
        ):
            load(path, contract=contract_of(trainer(recipe=recipe, **EXCLUDE)))


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("order", ["layer by layer", "packed last"])
def test_a_stream_of_packed_weights_has_no_master_for_a_quantized_place(order: str, dialect: str) -> None:
    """Without any contract: what is not packed beside packed weights is not quantized by its trainer."""
    model, target = trainer(**EXCLUDE), rollout()
    stream, metadata = list(qq.export_weights(model, dialect)), qq.export_metadata(model, dialect)
    if order == "packed last":
        stream.sort(key=lambda item: item[1].dtype != torch.bfloat16)
    before, said = (
        state(target),
        r"o_proj.weight is in high precision where other weights are packed, like .*; give both",
    )
    ways: Any = (({"metadata": metadata}, iter(stream)), ({}, stream), ({"strict": False}, dict(stream)))
    for options, weights in ways:
        with pytest.raises(ValueError, match=f"{said} .*; nothing was changed"):
            qq.update_weights(target, weights, **options)
        assert_same_state(state(target), before)
    with pytest.raises(ValueError, match=f"{said} .*; the rollout refuses to run"):
        qq.update_weights(target, iter(stream))


def test_what_a_contract_does_not_tell_is_not_refused() -> None:
    """Older records, a stage of a pipeline, modules under other names; streams that bring a part."""
    model, target = trainer(), rollout()
    told, weights = contract_of(model), model.state_dict()
    part = {name: tensor for name, tensor in weights.items() if ".layers.1." in name}
    qq.update_weights(target, part, contract=told, strict=False)
    stage = replace(told, quantized=shortened(n for n in expanded(told.quantized or ()) if ".layers.1." in n))
    renamed = replace(told, quantized=tuple(f"language_model.{name}" for name in told.quantized or ()))
    for known in (stage, renamed, replace(told, quantized=None), replace(told, high_precision=None)):
        qq.update_weights(target, weights, contract=known)
    assert qq.check_first_step(model, target).failed == []


@pytest.mark.parametrize("ahead", [True, False])
def test_a_contract_of_other_names_warns_that_masters_were_not_compared(
    ahead: bool, recwarn: pytest.WarningsRecorder
) -> None:
    model, wrapped, target = trainer(**EXCLUDE), nn.Module(), rollout()
    wrapped.module = qq.revert(model)
    wrapped = qq.convert(wrapped, "w4a16", **EXCLUDE)
    told, masters = contract_of(wrapped), {n.removeprefix("module."): t for n, t in wrapped.state_dict().items()}
    recwarn.clear()
    said = (
        r"update_weights: the contract quantizes module.model.layers.0-1.self_attn.q_proj, .* and \d+ more, this "
        r"rollout model.layers.0-1.self_attn.q_proj, .* and \d+ more: no name in both, so .* compared"
    )
    with pytest.warns(UserWarning, match=said) as warned:
        qq.update_weights(target, masters if ahead else iter(masters.items()), contract=told)
    assert [warning.filename for warning in warned] == [__file__]
    recwarn.clear()
    same, packed = rollout(**EXCLUDE), list(qq.export_weights(wrapped, "modelopt"))
    qq.update_weights(same, [(n.removeprefix("module."), t) for n, t in packed], contract=told)  # packed tell it
    qq.update_weights(same, iter(masters.items()), contract=contract_of(same))
    assert not recwarn.list


def test_include_beyond_the_scope_is_no_other_scope() -> None:
    """Masters of all stages of a pipeline, and the contract of one, which does not list the modules of the others."""
    selection: Any = {"scope": "experts", "include": ["*.q_proj", "*.k_proj", "*.v_proj"]}
    stage: Any = tiny_model("qwen3_moe", seed=1)
    stage.model.layers[0] = nn.Identity()
    told, model, target = (
        contract_of(qq.convert(stage, "w4a16", **selection)),
        trainer(**selection),
        rollout(**selection),
    )
    first = {name: tensor for name, tensor in model.state_dict().items() if ".layers.0." in name}
    qq.update_weights(target, first, strict=False, contract=told)
    qq.update_weights(target, iter(model.state_dict().items()), contract=told)
    assert qq.check_first_step(model, target).failed == []


def test_the_first_step_compares_an_engine_by_its_contract() -> None:
    model, other = trainer(), contract_of(rollout(**EXCLUDE))
    report = qq.check_first_step(model, contract=other)
    assert report.failed == ["contract"]
    assert f"{O_PROJ} quantized against in high precision" in report.checks[0].found
    packed = replace(contract_of(rollout(torch.float16)), export_dtype=torch.float16)
    assert qq.check_first_step(model, contract=packed).failed == []  # what is sent packed was cast already


@pytest.mark.parametrize(
    ("theirs", "mine", "said"),
    [
        (EXCLUDE, {}, f"does not quantize {O_PROJ}, which this rollout does; give both"),
        ({}, EXCLUDE, f"quantizes {O_PROJ}, which this rollout does not; give both"),
        ({"include": ["lm_head"]}, {}, "quantizes lm_head, which this rollout does not; give both"),
        ({"recipe": "modelopt"}, {}, "quantizes with recipe 'modelopt', this rollout with 'aligned'; convert both"),
        (
            RULE,
            {},
            "shares the scale of .*q_proj, .*k_proj, .*v_proj and 1 more among other weights than this rollout;",
        ),
    ],
)
def test_a_state_dict_warns_of_another_conversion(
    theirs: Any, mine: Any, said: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model, target = trainer(**theirs), rollout(**mine)
    told: Any = model.state_dict()
    torch.save(told, tmp_path / "state.pt")
    for weights in (told, torch.load(tmp_path / "state.pt")):
        with pytest.warns(UserWarning, match=f"update_weights: this state_dict is of a trainer that {said}") as warned:
            qq.update_weights(target, weights)
        assert [warning.filename for warning in warned] == [__file__]
    recwarn.clear()
    qq.update_weights(rollout(**theirs), told)
    qq.update_weights(target, dict(told))  # tells nothing
    qq.update_weights(target, qq.revert(model).state_dict())  # of a plain model
    assert not recwarn.list


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("export", [torch.bfloat16, torch.float16])
def test_a_state_dict_tells_the_export_dtype(export: torch.dtype, dtype: torch.dtype) -> None:
    model, mine, expected = trainer(export=export), rollout(dtype), rollout(torch.float32)
    qq.update_weights(mine, model.state_dict())
    qq.update_weights(expected, qq.export_weights(model, "modelopt"))
    assert_same_state(quantized(mine), quantized(expected))
    before = state(mine)
    with pytest.raises(
        ValueError, match=f"a trainer that casts to {export} before .*, and the contract says torch.*16;"
    ):
        qq.update_weights(mine, model.state_dict(), contract=contract_of(trainer(export=OTHER[export])))
    assert_same_state(state(mine), before)


# --------------------------------------------------------------------------------------------------------- short lists


parts = st.sampled_from(["a", "b_1", "x-y", "", "007", "0", "1", "2", "3", "10", "1-2", "1,2", r"\1-2", r"\\3", r"\a"])


@given(st.lists(st.lists(parts, min_size=1, max_size=4).map(".".join), max_size=40))
def test_short_lists_hold_the_names(names: list[str]) -> None:
    short = shortened(names)
    assert sorted(expanded(short)) == sorted(set(names))
    assert sorted(shortened(reversed(names))) == sorted(short)


@given(st.lists(st.lists(parts.filter(bool), min_size=1, max_size=3).map(".".join), min_size=1), st.data())
def test_patterns_of_short_lists_mean_the_names(names: list[str], data: st.DataObject) -> None:
    wanted = data.draw(st.lists(st.sampled_from(names), unique=True))
    patterns = [pattern(short) for short in shortened(wanted)]
    assert {name for name in names if first_match(name, patterns)} == set(wanted)


@pytest.mark.filterwarnings("ignore:.*holds no tokenizer")
def test_diagnosis_from_files_quantizes_what_the_checkpoint_records(tmp_path: Path) -> None:
    """A trainer of a BF16 directory, converted as the rollout's checkpoint was: weights add nothing to the gap."""
    source = CHECKPOINTS / "bf16" / "qwen3moe"
    qq.quantize_checkpoint(source, tmp_path / "out", scope="mlp", include=["lm_head"], exclude=["model.layers.1.mlp"])
    (tmp_path / "text").write_text("37+45=82\n" * 4, "utf-8")
    found = diagnose_checkpoints(source, tmp_path / "out", tmp_path / "text", mode=Mode.W4A16, length=16, rows=2)
    assert found.gap["delta_weight"].max == 0.0


def test_words_that_look_like_ranges_are_words() -> None:
    names = ["d.1-2", "d.1", "d.2", "d.3-9999999999", "d.3"]
    assert shortened(names) == (r"d.\1-2", "d.1-3", r"d.\3-9999999999")
    assert expanded(["a.1-2", "x-y"]) == ["a.1", "a.2", "x-y"]  # as in older files
    model = nn.Module()
    model.d = nn.ModuleDict({name.removeprefix("d."): nn.Linear(32, 16) for name in names})
    told = contract_of(qq.convert(model, "w4a16", exclude=["d.1", "d.2"]))
    again = Contract.from_json(json.loads(json.dumps(told.to_json())), "the message")
    assert again.quantized_apart(told) == ([], [])
    assert again.modules() == set(names)


def test_lists_are_short() -> None:
    names = [f"layers.{i}.experts.{j}.{p}" for i in range(61) for j in range(256) for p in ("up", "down")]
    assert shortened(names) == ("layers.0-60.experts.0-255.up", "layers.0-60.experts.0-255.down")
    assert expanded(shortened(names[:9])) == [*names[:9:2], *names[1:9:2]]
    assert shortened(["a.3", "a.5", "a.4", "a.10"]) == ("a.3-5,10",)
