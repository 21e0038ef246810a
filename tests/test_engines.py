"""Contract under test: by the rules of vLLM, SGLang and TensorRT-LLM, our checkpoints load as the numbers trained with.

``engines.py`` holds the rules. Negative tests show that they notice what they are there for.
"""

from functools import cache
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from by_hand import CHECKPOINTS, config, decoded, rewritten, tensors
from torch import nn
from transformers import AutoModelForCausalLM

import quads_qat as qq

NAMES = ["llama", "qwen3", "qwen3moe", "mixtral", "deepseek_v3"]
CLIENTS = {"modelopt": ["vllm", "sglang", "tensorrt-llm"], "compressed-tensors": ["vllm", "sglang"]}
CASES = [(dialect, engine) for dialect, found in CLIENTS.items() for engine in found]
Checkpoints = Any


@cache
def trainer(name: str) -> nn.Module:
    """Observed, with gate weights ten times smaller than up's: their amaxes differ."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "bf16" / name)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("q_proj.weight", "gate_proj.weight")):
                parameter /= 10
            if parameter_name.endswith("experts.gate_up_proj"):
                parameter[:, : parameter.shape[1] // 2] /= 10
        qq.convert(model, "w4a16")
        with qq.observe_activations(model):
            model(torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0)))
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    @cache
    def exported(name: str, dialect: str, activations: str = "observed") -> Path:
        path = tmp_path_factory.mktemp("out") / name
        qq.export_checkpoint(trainer(name), path, dialect=dialect, activations=activations)
        return path

    return exported


@pytest.mark.parametrize("activations", ["observed", "none"])
@pytest.mark.parametrize(("dialect", "engine"), CASES)
@pytest.mark.parametrize("name", NAMES)
def test_engines_multiply_by_our_numbers(
    name: str, dialect: str, engine: str, activations: str, checkpoint: Checkpoints
) -> None:
    path = checkpoint(name, dialect, activations)
    weights, inputs = engines.load(path, engine)
    expected = decoded(path, torch.float32)
    quantized, _ = engines.modules(tensors(path))
    assert weights.keys() == {name for name in quantized if f"{name}.weight" in expected}
    for module, weight in weights.items():
        assert torch.equal(weight, expected[f"{module}.weight"]), module
    assert all(value.isnan() for value in inputs.values()) == (activations == "none")


@pytest.mark.parametrize("dialect", CLIENTS)
@pytest.mark.parametrize("scope", ["all", "mlp", "experts"])
@pytest.mark.parametrize("name", [*NAMES, "gpt_oss"])
def test_ignore_lists_are_complete_and_hit_nothing_quantized(
    name: str, scope: str, dialect: str, tmp_path: Path
) -> None:
    if scope == "experts" and name in ("llama", "qwen3"):
        pytest.skip("dense")
    qq.quantize_checkpoint(CHECKPOINTS / "bf16" / name, tmp_path / "out", dialect=dialect, scope=scope)
    engines.assert_ignore_list_is_right(tmp_path / "out")


@pytest.mark.parametrize("dialect", CLIENTS)
def test_excluded_experts_are_ignored_as_a_module_and_one_by_one(dialect: str, tmp_path: Path) -> None:
    """vLLM asks about ``...mlp.experts`` as a whole."""
    source, options = CHECKPOINTS / "bf16" / "qwen3moe", {"dialect": dialect, "exclude": ["*.experts"]}
    qq.quantize_checkpoint(source, tmp_path / "out", **options)
    engines.assert_ignore_list_is_right(tmp_path / "out")
    ignored = config(tmp_path / "out")["quantization_config"]["ignore"]
    assert {"model.layers.1.mlp.experts", "model.layers.1.mlp.experts.3.down_proj"} <= set(ignored)


@pytest.mark.parametrize(("dialect", "engine"), CASES)
@pytest.mark.parametrize("shard", ["model.layers.1.self_attn.k_proj", "model.layers.1.mlp.experts.2.up_proj"])
def test_engines_go_wrong_when_fused_weights_do_not_share_a_scale(
    dialect: str, engine: str, shard: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """vllm#54974: real checkpoints have gate and up scales that differ by up to ten times."""
    path = checkpoint("qwen3moe", dialect)
    name = f"{shard}.weight_scale_2" if dialect == "modelopt" else f"{shard}.weight_global_scale"
    broken = rewritten(path, tmp_path / "broken", {name: tensors(path)[name] / 2})
    if engine == "tensorrt-llm":
        with pytest.raises(AssertionError, match="weight_scale_2 should be same"):
            engines.load(broken, engine)
        return
    weights, _ = engines.load(broken, engine)
    expected = decoded(broken, torch.float32)
    wrong = [module for module, weight in weights.items() if not torch.equal(weight, expected[f"{module}.weight"])]
    assert wrong
    assert {module.rpartition(".")[0] for module in wrong} == {shard.rpartition(".")[0]}


@pytest.mark.parametrize(("dialect", "engine"), CASES)
def test_engines_read_nan_where_an_expert_has_no_input_scale(
    dialect: str, engine: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """vllm#45212: never routed, never calibrated."""
    path = checkpoint("qwen3moe", dialect)
    ending = "input_scale" if dialect == "modelopt" else "input_global_scale"
    lost = {f"model.layers.0.mlp.experts.1.down_proj.{ending}": None}
    with pytest.raises(AssertionError, match="no input scale"):
        engines.load(rewritten(path, tmp_path / "broken", lost), engine)


def test_the_substring_rule_is_why_full_names_are_written() -> None:
    assert engines.vllm_ignores("model.layers.10.mlp.down_proj", ["model.layers.1"])
    assert not engines.vllm_ignores("model.layers.10.mlp.down_proj", ["model.layers.1.mlp.gate"])
    assert engines.vllm_ignores("model.layers.1.mlp.gate_up_proj", ["model.layers.1.mlp.gate"])
