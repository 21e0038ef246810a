"""Contract under test: by the rules of vLLM, SGLang and TensorRT-LLM, our checkpoints load as the numbers trained with,
or are known not to load, and export says so.

``engines/`` holds the rules. Negative tests show that they notice what they are there for.
"""

import json
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from bits import assert_same_bits
from by_hand import CHECKPOINTS, config, decoded, rewritten, tensors
from engines import ENGINES, Checkpoint, LoadError, Refused, measure, sglang, table, tensorrt_llm, vllm
from test_architectures import CURRENT
from tiny_models import ARCHITECTURES, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from twins import plain_twin

import quads_qat as qq
from quads_qat import Dialect, EngineWarning, engine_limits
from quads_qat.names import disk_state

Checkpoints = Any
DIALECTS = {"modelopt": list(ENGINES), "compressed-tensors": ["vLLM", "SGLang"]}
CASES = [(dialect, engine) for dialect, found in DIALECTS.items() for engine in found]
cases = pytest.mark.parametrize(("dialect", "engine"), CASES)


# ------------------------------------------------------------------------------------------------------------ the table


@pytest.mark.skipif(not CURRENT, reason="the table is of transformers 5.24, and other releases have other models")
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_table(arch: str, tmp_path: Path) -> None:
    assert measure.row(arch, tmp_path) == table.read()[arch]


def test_the_table_has_every_architecture_and_its_page_is_current() -> None:
    assert list(table.read()) == list(ARCHITECTURES)
    assert table.PAGE.read_text("utf-8") == table.page(), "run `python -m engines` in tests/"


def test_every_known_refusal_is_in_the_table_or_tested_here() -> None:
    seen = {status for row in table.read().values() for cell in row.cells.values() for status in cell.values()}
    assert {limit.key for limit in engine_limits.LIMITS} - seen == {"vllm#45102"}
    assert {status.removeprefix("? ") for status in seen if status.startswith("?")} == set(engines.common.UNREAD)
    assert {limit.engine for limit in engine_limits.LIMITS} <= engine_limits.ENGINES.keys() == ENGINES.keys()


def test_a_quantized_head_is_refused_by_vllm_in_one_dialect_and_export_says_so(tmp_path: Path) -> None:
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    qq.convert(model, "w4a16", include=["lm_head"])
    with pytest.warns(EngineWarning, match=r"vLLM does not load .* output head .*vllm/issues/45102"):
        qq.export_checkpoint(model, tmp_path / "packed", dialect="compressed-tensors")
    with pytest.raises(Refused, match=r"vllm#45102: .*lm_head"):
        vllm.load(Checkpoint.read(tmp_path / "packed"))
    qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt")
    for engine in (vllm, sglang):
        assert "lm_head" in engine.load(Checkpoint.read(tmp_path / "out")).weights


def test_quantizing_a_checkpoint_warns_too(tmp_path: Path) -> None:
    with pytest.warns(EngineWarning, match=r"vLLM does not load .*vllm/issues/46641.*exclude=\['\*.experts'\]"):
        qq.quantize_checkpoint(CHECKPOINTS / "bf16" / "gpt_oss", tmp_path / "out")
    with pytest.warns(EngineWarning, match=r"TensorRT-LLM does not load .*TensorRT-LLM/issues/16511.*'modelopt'") as w:
        qq.quantize_checkpoint(CHECKPOINTS / "bf16" / "qwen3", tmp_path / "packed", dialect="compressed-tensors")
    assert w[0].filename == __file__


def test_converting_the_dialect_warns_too(tmp_path: Path) -> None:
    qq.quantize_checkpoint(CHECKPOINTS / "bf16" / "qwen3", tmp_path / "out")
    with pytest.warns(EngineWarning, match="TensorRT-LLM does not load") as warned:
        qq.convert_dialect(tmp_path / "out", tmp_path / "packed", dialect="compressed-tensors")
    assert [w.filename for w in warned] == [__file__]


def test_what_the_way_out_says_is_without_warnings(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", EngineWarning)
        qq.quantize_checkpoint(CHECKPOINTS / "bf16" / "gpt_oss", tmp_path / "out", exclude=["*.experts"])
        model = qq.convert(tiny_model("deepseek_v4"), "w4a16", scope="mlp")
        qq.export_checkpoint(model, tmp_path / "v4", dialect="modelopt")
    for path in (tmp_path / "out", tmp_path / "v4"):
        checkpoint = Checkpoint.read(path)
        for engine in ENGINES.values():
            assert engine.load(checkpoint).weights
        engines.assert_ignore_list_is_right(path)


def test_deepseek_v4_without_its_compressor_is_fused_rightly_by_vllm(tmp_path: Path) -> None:
    """``wq_a`` and ``wkv`` are one GEMM there, with the larger of their scales (vllm#47972)."""
    model = tiny_model("deepseek_v4")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_a_proj.weight"):
                parameter /= 8
    qq.convert(model, "w4a16", exclude=["*.compressor.*"])
    twin = plain_twin(model)
    with pytest.warns(EngineWarning) as warned:
        qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt")
    assert [str(w.message).split()[0] for w in warned] == ["SGLang"]
    loaded, expected = vllm.load(Checkpoint.read(tmp_path / "out")), disk_state(twin, twin.state_dict())
    for name, weight in loaded.weights.items():
        assert_same_bits(weight, expected[f"{name}.weight"].float(), name)
    assert {"model.layers.1.attn.wq_a", "model.layers.1.attn.wkv"} <= loaded.weights.keys()


# ------------------------------------------------------------------------------------------- what is not quantized

NAMES = ["llama", "qwen3", "qwen3moe", "mixtral", "deepseek_v3"]


DENSE = ("llama", "qwen3")
SCOPES = [(name, scope) for name in (*NAMES, "gpt_oss") for scope in ("all", "mlp", "experts")]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("name", "scope"), [case for case in SCOPES if case[0] not in DENSE or case[1] != "experts"])
def test_ignore_lists_are_complete_and_hit_nothing_quantized(
    name: str, scope: str, dialect: str, tmp_path: Path
) -> None:
    qq.quantize_checkpoint(CHECKPOINTS / "bf16" / name, tmp_path / "out", dialect=dialect, scope=scope)
    engines.assert_ignore_list_is_right(tmp_path / "out")


#: Experts on disk: one by one; as w1, w2, w3 below another name; as stacks; not below ``experts``; one name deeper.
EXPERTS = {
    "qwen3_moe": "model.layers.1.mlp.experts",
    "mixtral": "model.layers.1.block_sparse_moe.experts",
    "gpt_oss": "model.layers.1.mlp.experts",
    "llama4": "model.layers.1.feed_forward.experts",
    "granitemoe": "model.layers.1.block_sparse_moe.experts",
    "aria": "model.layers.1.mlp.experts",
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("arch", EXPERTS)
def test_excluded_experts_are_ignored_under_every_name_that_engines_ask_for(
    arch: str, dialect: str, tmp_path: Path
) -> None:
    """As one module, as single linears, and in vLLM under compressed-tensors' names for the first expert's linears."""
    model = qq.convert(tiny_model(arch), "w4a16", exclude=["*.experts"])
    qq.export_checkpoint(model, tmp_path / "out", dialect=dialect)
    engines.assert_ignore_list_is_right(tmp_path / "out")
    found, name = Checkpoint.read(tmp_path / "out"), EXPERTS[arch]
    for engine in (vllm, sglang, tensorrt_llm)[: len(DIALECTS[dialect])]:
        assert not engine.quantizes(found, name, [name])
        assert engine.quantizes(found, "model.layers.1.self_attn.o_proj", ["model.layers.1.self_attn.o_proj"])
    assert {"qwen3_moe": f"{name}.3.down_proj", "mixtral": f"{name}.3.w2"}.get(arch, name) in found.quantization[
        "ignore"
    ]


def test_the_substring_rule_is_why_full_names_are_written() -> None:
    name = "model.layers.10.mlp.down_proj"
    assert vllm.ignores(name, [name], ["model.layers.1"])
    assert not vllm.ignores(name, [name], ["model.layers.1.mlp.gate"])
    fused = "model.layers.1.mlp.gate_up_proj"
    assert vllm.ignores(fused, [f"model.layers.1.mlp.{shard}_proj" for shard in ("gate", "up")], [fused[:-8]])


# ---------------------------------------------------------------------------------------------- what engines get wrong


@cache
def observed(name: str) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "bf16" / name)
    qq.convert(model, "w4a16")
    with torch.no_grad(), qq.observe_activations(model):
        model(torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0)))
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    @cache
    def exported(name: str, dialect: str) -> Path:
        path = tmp_path_factory.mktemp("out") / name
        qq.export_checkpoint(observed(name), path, dialect=dialect, activations="observed")
        return path

    return exported


@cases
@pytest.mark.parametrize("shard", ["model.layers.1.self_attn.k_proj", "model.layers.1.mlp.experts.2.up_proj"])
def test_engines_go_wrong_when_fused_weights_do_not_share_a_scale(
    dialect: str, engine: str, shard: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """vllm#54974: real checkpoints have gate and up scales that differ by up to ten times."""
    path = checkpoint("qwen3moe", dialect)
    name = f"{shard}.weight_scale_2" if dialect == "modelopt" else f"{shard}.weight_global_scale"
    broken = Checkpoint.read(rewritten(path, tmp_path / "broken", {name: tensors(path)[name] / 2}))
    if engine == "TensorRT-LLM":
        with pytest.raises(LoadError, match="weight_scale_2 should be same"):
            tensorrt_llm.load(broken)
        return
    expected = decoded(tmp_path / "broken", torch.float32)
    for capability in (90, 100):
        weights = ENGINES[engine].load(broken, capability).weights
        wrong = [module for module, weight in weights.items() if not torch.equal(weight, expected[f"{module}.weight"])]
        apart = engine == "SGLang" and capability == 100 and dialect == "modelopt" and "experts" in shard
        assert {module.rpartition(".")[0] for module in wrong} == (set() if apart else {shard.rpartition(".")[0]})


@cases
@pytest.mark.parametrize("module", ["model.layers.0.mlp.experts.1.down_proj", "model.layers.0.self_attn.k_proj"])
def test_a_missing_input_scale_is_noticed_by_no_engine_but_always_wrong(
    dialect: str, engine: str, module: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """vllm#45212: never routed, never calibrated. vLLM computes with what the memory held, SGLang with 1.0."""
    path = checkpoint("qwen3moe", dialect)
    ending = "input_scale" if dialect == "modelopt" else "input_global_scale"
    broken = Checkpoint.read(rewritten(path, tmp_path / "broken", {f"{module}.{ending}": None}))
    if engine == "SGLang":
        used = sglang.load(broken).input_scales[module]
        assert used.isnan() if dialect == "compressed-tensors" else used == 1
        return
    message = "no input scale" if engine == "vLLM" else "input_scale should be same"
    with pytest.raises(LoadError, match=message):
        ENGINES[engine].load(broken)


@cases
def test_a_missing_or_unpacked_tensor_is_noticed(
    dialect: str, engine: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path, module = checkpoint("qwen3moe", dialect), "model.layers.0.self_attn.k_proj"
    codes = f"{module}.weight" if dialect == "modelopt" else f"{module}.weight_packed"
    changes: list[tuple[dict[str, Tensor | None], str]] = [
        ({f"{module}.weight_scale": None}, "never loaded"),
        ({codes: tensors(path)[codes].float()}, "torch.float32"),
        ({codes: tensors(path)[codes][:, :8].contiguous()}, "block scales"),
    ]
    for i, (change, message) in enumerate(changes):
        broken = Checkpoint.read(rewritten(path, tmp_path / str(i), change))
        with pytest.raises(LoadError, match=message):
            ENGINES[engine].load(broken)


# --------------------------------------------------------------------------------------------------------------- config


def edited(path: Path, change: Callable[[dict[str, Any], dict[str, Any] | None], None]) -> Checkpoint:
    """A checkpoint with other JSON: ``change(config.json, hf_quant_config.json)``."""
    found = Checkpoint.read(path)
    change(found.config, found.hf_quant_config)
    return found


def test_which_file_wins(checkpoint: Checkpoints) -> None:
    """vLLM and SGLang read config.json, TensorRT-LLM hf_quant_config.json; ours say the same."""
    path = checkpoint("qwen3", "modelopt")
    assert not tensorrt_llm.divergence(Checkpoint.read(path))

    def weights_only_beside(_: dict[str, Any], beside: Any) -> None:
        beside["quantization"]["quant_algo"] = "W4A16_NVFP4"
        beside["quantization"]["exclude_modules"] = ["lm_head"]

    diverging = edited(path, weights_only_beside)
    assert [engine.read_config(diverging)[0] for engine in ENGINES.values()] == ["W4A4", "W4A4", "W4A16"]
    assert tensorrt_llm.divergence(diverging) == ["quant_algo", "exclude_modules"]
    nested = edited(path, lambda config, _: config.pop("quantization_config"))
    assert [engine.read_config(nested)[0] for engine in ENGINES.values()] == ["W4A4"] * 3
    only_flat = Checkpoint(Checkpoint.read(path).config, None, {})
    assert [engine.read_config(only_flat)[0] for engine in ENGINES.values()] == ["W4A4"] * 3
    ignored = [engine.read_config(c)[1] for engine in ENGINES.values() for c in (nested, only_flat)]
    assert all(found == ignored[0] for found in ignored)


@pytest.mark.parametrize("algorithm", ["nvfp4", "NVFP4_AWQ", "NVFP4"])
def test_algorithms(algorithm: str, checkpoint: Checkpoints) -> None:
    def rename(config: dict[str, Any], beside: Any) -> None:
        config["quantization_config"]["quant_algo"] = beside["quantization"]["quant_algo"] = algorithm

    renamed = edited(checkpoint("qwen3", "modelopt"), rename)
    reads = {"nvfp4": ["vLLM"], "NVFP4": list(ENGINES), "NVFP4_AWQ": []}[algorithm]  # AWQ's tensors are not emulated
    for name, engine in ENGINES.items():
        if name in reads:
            assert engine.read_config(renamed)[0] == "W4A4"
        else:
            with pytest.raises(LoadError, match=algorithm):
                engine.read_config(renamed)


def test_required_keys(checkpoint: Checkpoints) -> None:
    path = checkpoint("qwen3", "modelopt")

    def without(key: str) -> Checkpoint:
        def change(config: dict[str, Any], beside: Any) -> None:
            config.pop("quantization_config")
            del beside["quantization"][key]

        return edited(path, change)

    for key in ("group_size", "kv_cache_quant_algo", "exclude_modules"):
        with pytest.raises(LoadError, match=f"requires the following fields.*{key}"):
            vllm.read_config(without(key))
        assert tensorrt_llm.read_config(without(key))[0] == "W4A4"
    for key in ("group_size", "exclude_modules"):
        with pytest.raises(LoadError, match="required"):
            sglang.read_config(without(key))

    def two_sizes(config: dict[str, Any], _: Any) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 32

    with pytest.raises(LoadError, match="Inconsistent group_size"):
        sglang.read_config(edited(path, two_sizes))


@pytest.mark.parametrize(("key", "value"), [("strategy", "group"), ("group_size", 32), ("symmetric", False)])
def test_other_schemes_of_compressed_tensors_are_not_taken_for_nvfp4(
    key: str, value: Any, checkpoint: Checkpoints
) -> None:
    path = checkpoint("qwen3", "compressed-tensors")

    def change(config: dict[str, Any], _: Any) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"][key] = value

    for engine in (vllm, sglang):
        assert engine.read_config(Checkpoint.read(path))[0] == "W4A4"
        with pytest.raises(LoadError, match="no NVFP4 weights"):
            engine.read_config(edited(path, change))


def test_a_fused_layer_that_is_quantized_in_part_is_refused(checkpoint: Checkpoints) -> None:
    for dialect in DIALECTS:
        found = Checkpoint.read(checkpoint("qwen3", dialect))
        found.quantization["ignore"].append("model.layers.0.self_attn.k_proj")
        with pytest.raises(LoadError, match="same"):
            vllm.load(found)
    found.quantization["ignore"].append("model.layers.0.mlp.experts.0.gate_proj")
    with pytest.raises(LoadError, match="All MoE projections"):
        vllm.quantizes(found, "model.layers.0.mlp.experts", [])


# ------------------------------------------------------------------------------------------------------------------ GPU


def test_hopper_computes_w4a16_from_a_w4a4_checkpoint(checkpoint: Checkpoints) -> None:
    """Silently in vLLM and SGLang: measure W4A4 on Blackwell, or with vLLM's emulation backend."""
    found = Checkpoint.read(checkpoint("qwen3", "modelopt"))
    assert [engine.load(found, 100).computes for engine in ENGINES.values()] == ["W4A4"] * 3
    assert [engine.load(found, 90).computes for engine in (vllm, sglang)] == ["W4A16"] * 2
    with pytest.raises(LoadError, match="Arch unsupported"):
        tensorrt_llm.load(found, 90)
    for engine in ENGINES.values():
        with pytest.raises(LoadError):
            engine.computes("W4A4", 70)
        assert engine.computes("W4A16", 90) == "W4A16"
    assert [engine.computes("W4A16", 100) for engine in (vllm, sglang)] == ["W4A16"] * 2


def test_the_files_say_what_the_checkpoint_is(checkpoint: Checkpoints) -> None:
    """What the emulators read is what export wrote."""
    for dialect in Dialect:
        path = checkpoint("qwen3", dialect.value)
        assert Checkpoint.read(path).packed == (dialect is Dialect.COMPRESSED_TENSORS)
        assert config(path) == json.loads((path / "config.json").read_text("utf-8"))
