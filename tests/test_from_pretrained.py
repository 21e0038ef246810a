"""Contract under test: after ``import quads_qat``, ``from_pretrained`` loads ModelOpt NVFP4 checkpoints exactly.

The yardsticks are ``load_rollout`` and ``load_model``, which ``test_load`` compares with numbers decoded by hand.
"""

import copy
import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bits import assert_same_bits
from by_hand import CHECKPOINTS, config, rewritten, tensors
from tiny_models import tiny_inputs, tiny_model
from torch import Tensor, nn

import quads_qat as qq
from quads_qat import Recipe, ResidualConfig
from quads_qat.config import ActivationScale
from quads_qat.integrations.modelopt import ModelOptConfig
from quads_qat.residual import ResidualCompensatedLinear

MODELOPT = CHECKPOINTS / "modelopt"
MOE = MODELOPT / "qwen3moe-nvfp4"
IDS = torch.randint(0, 120, (1, 6), generator=torch.Generator().manual_seed(0))
AutoModel: Any = transformers.AutoModelForCausalLM
NOTHING = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set(), "error_msgs": []}


def load(path: Path, **options: Any) -> Any:
    """Loaded by transformers, which must have found everything that it looked for, and nothing else."""
    loader = options.pop("loader", AutoModel)
    model, info = loader.from_pretrained(path, output_loading_info=True, **options)
    assert {key: type(NOTHING[key])(value) for key, value in info.items() if key in NOTHING} == NOTHING
    return model


def assert_same_state(actual: nn.Module, expected: nn.Module) -> None:
    assert list(actual.state_dict()) == list(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        assert_same_bits(actual.state_dict()[name], tensor, name)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


def assert_loads(path: Path, loader: Any = AutoModel) -> None:
    rollout, expected = load(path, loader=loader), qq.load_rollout(path)
    assert_same_state(rollout, expected)
    assert qq.contract_of(rollout) == qq.contract_of(expected)
    plain = load(path, loader=loader, quantization_config=ModelOptConfig(dequantize=True))
    assert_same_state(plain, qq.load_model(path))
    assert not any(parameter.requires_grad for parameter in rollout.parameters())
    assert all(parameter.requires_grad for parameter in plain.parameters())
    if loader is AutoModel:
        assert torch.equal(logits(rollout).nan_to_num(9), logits(expected).nan_to_num(9))
        assert torch.equal(logits(plain), logits(qq.load_model(path)))


@pytest.mark.parametrize(
    "fixture",
    [
        "deepseek_v3-nvfp4",
        "gpt_oss-nvfp4",
        "llama-w4a16_nvfp4",
        "mixtral-nvfp4",
        "qwen3-nvfp4_fp8_kv_cfg",
        "qwen3moe-nvfp4",
        "qwen3moe-nvfp4_experts_only",
        "qwen3moe-w4a16_nvfp4",
    ],
)
def test_model_optimizers_checkpoints(fixture: str) -> None:
    assert_loads(MODELOPT / fixture)


OURS = [
    "llama4",
    "nemotron_h",
    "qwen3_5_moe",
    "qwen3_vl_moe",
    "ernie4_5_moe",
    "qwen3_omni_moe",
    "openai_privacy_filter",
]


@pytest.mark.parametrize("name", OURS)
def test_our_checkpoints(name: str, tmp_path: Path) -> None:
    """Names with prefixes, stacks on disk, experts without a gate, a tied head, a block that initializes its experts,
    biases of a stack that are apart on disk."""
    model = qq.convert(tiny_model(name), "w4a16")
    with torch.no_grad(), qq.observe_activations(model):
        model(**tiny_inputs(model))
    activations = "none" if name == "qwen3_omni_moe" else "observed"  # text alone does not reach its towers
    qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt", activations=activations, shard_bytes=100_000)
    assert_loads(tmp_path / "out", getattr(transformers, type(tiny_model(name)).__name__))


@cache
def reference_logits() -> Tensor:
    return logits(qq.load_rollout(MOE))


@pytest.mark.parametrize("device_map", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_placement(device_map: Any) -> None:
    assert torch.equal(logits(load(MOE, device_map=device_map)), reference_logits())


def test_offloading(tmp_path: Path) -> None:
    """What is packed stays in memory and works; decoded weights on disk would be empty: refused."""
    places = dict.fromkeys(["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", "model.layers.0"], "cpu")
    options: dict[str, Any] = {"device_map": places | {"model.layers.1": "disk"}, "offload_folder": tmp_path}
    assert torch.equal(logits(AutoModel.from_pretrained(MOE, **options)), reference_logits())
    with pytest.raises(ValueError, match=r"layers\.1\.\S+ was offloaded to CPU memory or disk, which NVFP4 weights"):
        AutoModel.from_pretrained(MOE, **options, quantization_config=ModelOptConfig(dequantize=True))


def settings(model: nn.Module) -> tuple[Any, Any]:
    module = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert isinstance(module, ResidualCompensatedLinear)
    return module.activation, module.residual


def test_what_rollouts_do(tmp_path: Path) -> None:
    naive = ResidualConfig(fraction=0)
    for residual in (naive, {"fraction": 0}):
        options = ModelOptConfig(residual=residual, activation_scale="static", activation_recipe="modelopt-ieee")
        model = load(MOE, quantization_config=options)
        activation, found = settings(model)
        assert found == naive
        assert (activation.scale, activation.recipe) == (ActivationScale.STATIC, Recipe.MODELOPT_IEEE)
    expected = qq.load_rollout(MOE, residual=naive, activation_scale="static", activation_recipe="modelopt-ieee")
    assert torch.equal(logits(model), logits(expected))
    assert_same_state(model, expected)
    weights_only = MODELOPT / "qwen3moe-w4a16_nvfp4"
    assert settings(load(weights_only)) == (None, None)
    assert settings(load(MOE, quantization_config=ModelOptConfig(weights_only=True))) == (None, None)
    trainer = qq.convert(load(weights_only, quantization_config=ModelOptConfig(dequantize=True)), "w4a16")
    qq.export_checkpoint(trainer, tmp_path / "out", dialect="modelopt", residual=ResidualConfig(fraction=0.25))
    assert settings(load(tmp_path / "out"))[1].fraction == 0.25  # what config.json records


def test_options_in_the_config() -> None:
    """For code that only passes ``config=``."""
    changed = transformers.AutoConfig.from_pretrained(MOE)
    changed.quantization_config["dequantize"] = True
    assert_same_state(load(MOE, config=changed), qq.load_model(MOE))


def test_another_dtype() -> None:
    expected = qq.load_model(MOE, dtype=torch.float32)
    loaded = load(MOE, dtype=torch.float32, quantization_config=ModelOptConfig(dequantize=True))
    assert_same_state(loaded, expected)
    assert logits(load(MOE, dtype=torch.float32)).dtype == torch.float32


def test_a_dequantized_model_is_a_plain_one(tmp_path: Path) -> None:
    """Saved, trained, converted and exported like any other."""
    path = MODELOPT / "mixtral-nvfp4"
    plain = load(path, quantization_config=ModelOptConfig(dequantize=True))
    plain.save_pretrained(tmp_path / "saved")
    qq.dequantize_checkpoint(path, tmp_path / "dequantized")
    saved, expected = tensors(tmp_path / "saved"), tensors(tmp_path / "dequantized")
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(saved[name], tensor, name)
    assert "quantization_config" not in config(tmp_path / "saved")
    logits_of_trainer = qq.convert(plain, "w4a16")(IDS, labels=IDS)
    logits_of_trainer.loss.backward()
    qq.export_checkpoint(plain, tmp_path / "out", dialect="compressed-tensors")
    assert qq.verify(plain, tmp_path / "out").ok


@pytest.mark.parametrize("how", ["from_pretrained", "load_rollout", "convert"])
def test_a_rollout_is_not_saved_as_something_that_it_is_not(how: str, tmp_path: Path) -> None:
    """Its packed buffers would load as random weights."""
    rollout: Any = {
        "from_pretrained": lambda: load(MOE),
        "load_rollout": lambda: qq.load_rollout(MOE),
        "convert": lambda: qq.convert(qq.load_model(MOE), "w4a4_residual"),
    }[how]()
    for model in (rollout, copy.deepcopy(rollout)):
        with pytest.raises(ValueError, match=r"copy the directory .* call quads_qat\.export_checkpoint of the trainer"):
            model.save_pretrained(tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_generation() -> None:
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    expected: Any = qq.load_rollout(MOE)
    assert torch.equal(load(MOE).generate(IDS, **options), expected.generate(IDS, **options))


def test_no_contract_outlives_its_weights(tmp_path: Path) -> None:
    qq.quantize_checkpoint(CHECKPOINTS / "bf16" / "qwen3", tmp_path / "nvfp4")
    loaded = load(tmp_path / "nvfp4", quantization_config=ModelOptConfig(dequantize=True))
    for i, model in enumerate([loaded, qq.load_model(tmp_path / "nvfp4")]):
        model.save_pretrained(tmp_path / str(i))  # pyright: ignore[reportCallIssue]
        assert not {"quads_qat", "quantization_config"} & config(tmp_path / str(i)).keys()


def test_a_snapshot_of_links(tmp_path: Path) -> None:
    """The Hub's cache: every file is a link to a blob."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for i, file in enumerate(sorted(MOE.iterdir())):
        shutil.copy(file, tmp_path / "blobs" / str(i))
        (tmp_path / "snapshot" / file.name).symlink_to(Path("..") / "blobs" / str(i))
    assert torch.equal(logits(load(tmp_path / "snapshot")), reference_logits())
    assert_same_state(qq.load_model(tmp_path / "snapshot"), qq.load_model(MOE))


# Refusals.


def test_damage_is_named(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.2.down_proj.weight_scale_2"
    for i, (value, match) in enumerate(
        [(None, f"{name} is missing"), (torch.tensor(0.0), f"{name} must be one finite")]
    ):
        with pytest.raises(ValueError, match=match):
            AutoModel.from_pretrained(rewritten(MOE, tmp_path / str(i), {name: value}))
    scale = "model.layers.0.self_attn.q_proj.input_scale"
    gone = rewritten(MOE, tmp_path / "gone", {scale: None})
    with pytest.raises(ValueError, match=f"{scale} is missing, and activation_scale='static' needs it"):
        AutoModel.from_pretrained(gone, quantization_config=ModelOptConfig(activation_scale="static"))
    short = shutil.copytree(MOE, tmp_path / "short")
    with open(short / "model.safetensors", "r+b") as file:
        file.truncate(200_000)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        AutoModel.from_pretrained(short)


INCOMPLETE: dict[str, tuple[dict[str, Any], str]] = {
    "norm": ({"model.norm.weight": None}, r"model\.norm\.weight missing, which Qwen3MoeForCausalLM needs"),
    "router": ({"model.layers.1.mlp.gate.weight": None}, r"mlp\.gate\.weight missing"),
    "head": ({"lm_head.weight": None}, r"lm_head\.weight missing"),
    "integers": (
        {"model.norm.weight": torch.ones(128, dtype=torch.int64)},
        r"model\.norm\.weight must be torch\.bfloat16",
    ),
    "shape": ({"model.norm.weight": torch.ones(64, dtype=torch.bfloat16)}, r"model\.norm\.weight has shape \[64\]"),
}


@pytest.mark.parametrize("how", INCOMPLETE)
def test_what_is_not_quantized_must_be_there(how: str, tmp_path: Path) -> None:
    """transformers made up random values, or numbers of integers, with at most a warning."""
    change, match = INCOMPLETE[how]
    path = rewritten(MOE, tmp_path / "out", change)
    for dequantize in (False, True):
        with pytest.raises(ValueError, match=match):
            AutoModel.from_pretrained(path, quantization_config=ModelOptConfig(dequantize=dequantize))
    with pytest.raises(ValueError, match=match):
        qq.dequantize_checkpoint(path, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


@pytest.mark.parametrize("dequantize", [False, True])
def test_a_missing_bias_of_a_quantized_module(dequantize: bool, tmp_path: Path) -> None:
    """It was uninitialised memory, without a warning: all below a packed module was taken for packed."""
    path = MODELOPT / "gpt_oss-nvfp4"
    for i, name in enumerate(["self_attn.q_proj.bias", "mlp.experts.down_proj_bias"]):
        gone = rewritten(path, tmp_path / str(i), {f"model.layers.0.{name}": None})
        with pytest.raises(ValueError, match=f"{name} missing, which GptOssForCausalLM needs"):
            AutoModel.from_pretrained(gone, quantization_config=ModelOptConfig(dequantize=dequantize))


def test_wrong_claims_and_options(tmp_path: Path) -> None:
    other = shutil.copytree(MOE, tmp_path / "fp8")
    (other / "config.json").write_text(
        json.dumps(config(MOE) | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}})
    )
    with pytest.raises(ValueError, match="quant_algo is 'FP8'"):
        AutoModel.from_pretrained(other)
    wrong: list[dict[str, Any]] = [{"dequantize": True}, {"weights_only": True}]
    for option in wrong:
        with pytest.raises(ValueError, match="or weights_only=True nothing quantizes activations; drop residual"):
            ModelOptConfig(**option, residual=ResidualConfig())
    with pytest.raises(ValueError, match="ActivationScale: unknown value 'per_channel'"):
        ModelOptConfig(activation_scale="per_channel")
    with pytest.raises(ValueError, match="does require the model to be pre-quantized"):
        AutoModel.from_pretrained(CHECKPOINTS / "bf16" / "qwen3", quantization_config=ModelOptConfig())


# Registration.

REGISTRATION = """
import sys, warnings
warnings.simplefilter("error")
import quads_qat
import quads_qat.cli
assert not {"transformers", "torch._dynamo", "triton"} & sys.modules.keys(), "import quads_qat must stay cheap"
waiting = list(sys.meta_path)
quads_qat.integrations.registration.register_with_transformers()
assert sys.meta_path == waiting
from transformers.quantizers import auto
assert auto.AUTO_QUANTIZER_MAPPING["modelopt"].__name__ == "ModelOptQuantizer"
assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["modelopt"].__name__ == "ModelOptConfig"
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("quads_qat")]
quads_qat.integrations.registration.register_with_transformers()
"""
TAKEN = """
from transformers.quantizers import auto
auto.AUTO_QUANTIZER_MAPPING["modelopt"] = auto.AwqQuantizer
import quads_qat
assert auto.AUTO_QUANTIZER_MAPPING["modelopt"] is auto.AwqQuantizer
assert "modelopt" not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
"""
UNKNOWN = """
import warnings
from transformers.quantizers import auto
auto.register_quantizer = None
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    import quads_qat
assert "this transformers takes no quantizer for 'modelopt' (TypeError" in "".join(str(w.message) for w in seen)
"""


@pytest.mark.parametrize("script", [REGISTRATION, TAKEN, UNKNOWN], ids=["lazily", "name taken", "unknown transformers"])
def test_registration(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
