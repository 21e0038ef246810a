"""Contract under test: a damaged or unfitting NVFP4 checkpoint is refused with one line that names what is wrong."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import CHECKPOINTS, config, rewritten, tensors
from torch import Tensor

import quads_qat as qq

#: The same weights in both dialects, W4A4, as their peers wrote them.
MODELOPT, COMPRESSED = (
    CHECKPOINTS / "modelopt" / "qwen3moe-nvfp4",
    CHECKPOINTS / "compressed_tensors" / "qwen3moe-nvfp4",
)
LOADERS: dict[str, Callable[[Path], Any]] = {"load_model": qq.load_model, "load_rollout": qq.load_rollout}
loaders = pytest.mark.parametrize("loader", LOADERS)
DENSE, EXPERT = "model.layers.1.self_attn.v_proj", "model.layers.0.mlp.experts.2.down_proj"


def refused(loader: str, path: Path, match: str) -> None:
    with pytest.raises(ValueError, match=match) as error:
        LOADERS[loader](path)
    assert "\n" not in str(error.value)


@cache
def stored(path: Path) -> dict[str, Tensor]:
    return tensors(path)


def like(value: float) -> Callable[[Tensor], Tensor]:
    return lambda t: torch.full_like(t, value, dtype=torch.float32).to(t.dtype)


def with_byte(byte: int) -> Callable[[Tensor], Tensor]:
    def changed(t: Tensor) -> Tensor:
        as_bytes = t.view(torch.uint8).clone()
        as_bytes[1, 2] = byte
        return as_bytes.view(t.dtype)

    return changed


def left_out(t: Tensor) -> None:
    return None


TENSORS: dict[str, tuple[Path, str, Callable[[Tensor], Tensor | None], str]] = {
    "no codes": (MODELOPT, f"{DENSE}.weight", left_out, f"{DENSE}.weight is missing"),
    "no block scales": (MODELOPT, f"{DENSE}.weight_scale", left_out, f"{DENSE}.weight_scale is missing"),
    "no scale": (MODELOPT, f"{DENSE}.weight_scale_2", left_out, f"{DENSE}.weight_scale_2 is missing; .* cannot be dec"),
    "no packed codes": (COMPRESSED, f"{DENSE}.weight_packed", left_out, f"{DENSE}.weight_packed is missing"),
    "no scales of packed": (COMPRESSED, f"{DENSE}.weight_scale", left_out, f"{DENSE}.weight_scale is missing"),
    "no global scale": (COMPRESSED, f"{EXPERT}.weight_global_scale", left_out, f"{EXPERT}.weight_global_scale is mis"),
    "scale zero": (MODELOPT, f"{EXPERT}.weight_scale_2", like(0.0), "must be one finite number > 0, got .0.0"),
    "scale negative": (MODELOPT, f"{EXPERT}.weight_scale_2", like(-1.0), "must be one finite number > 0"),
    "scale NaN": (MODELOPT, f"{EXPERT}.weight_scale_2", like(torch.nan), "must be one finite number > 0, got .nan"),
    "global scale inf": (COMPRESSED, f"{DENSE}.weight_global_scale", like(torch.inf), "must be one finite number > 0"),
    "two scales": (
        COMPRESSED,
        f"{DENSE}.weight_global_scale",
        lambda t: torch.ones(2),
        "must be one float32 number",
    ),
    "block scale NaN": (MODELOPT, f"{DENSE}.weight_scale", with_byte(0x7F), "holds NaN or negative scales"),
    "block scale negative": (COMPRESSED, f"{DENSE}.weight_scale", with_byte(0xB8), "holds NaN or negative scales"),
    "codes of 16 bits": (
        MODELOPT,
        f"{DENSE}.weight",
        lambda t: t.to(torch.int16),
        "must be uint8 and .* got torch.int16",
    ),
    "block scales bf16": (
        COMPRESSED,
        f"{DENSE}.weight_scale",
        lambda t: t.bfloat16(),
        "float8_e4m3fn, got .*bfloat16",
    ),
    "codes cut short": (
        MODELOPT,
        f"{DENSE}.weight",
        lambda t: t[:, :-1].contiguous(),
        rf"damaged: {DENSE}\.weight and {DENSE}\.weight_scale do not go together: .*qdata must be .* and block_scale",
    ),
    "norm missing": (MODELOPT, "model.norm.weight", left_out, "tensor model.norm.weight is missing"),
    "norm of another size": (
        MODELOPT,
        "model.norm.weight",
        lambda t: t[:-1].clone(),
        "must have shape .128., got .127.",
    ),
    "router of one row": (
        MODELOPT,
        "model.layers.0.mlp.gate.weight",
        lambda t: t[:1].clone(),
        "must have shape .4, 128.",
    ),
    "embedding missing": (COMPRESSED, "model.embed_tokens.weight", left_out, "tensor model.embed_tokens.weight is mis"),
}


@loaders
@pytest.mark.parametrize("how", TENSORS)
def test_damaged_tensors(how: str, loader: str, tmp_path: Path) -> None:
    path, name, change, match = TENSORS[how]
    refused(loader, rewritten(path, tmp_path / "damaged", {name: change(stored(path)[name])}), match)


@loaders
def test_codes_and_scales_of_another_size(loader: str, tmp_path: Path) -> None:
    names = [f"{DENSE}.weight", f"{DENSE}.weight_scale"]
    change = {name: stored(MODELOPT)[name].view(torch.uint8)[:-1].clone() for name in names}
    change[names[1]] = change[names[1]].view(torch.float8_e4m3fn)
    path = rewritten(MODELOPT, tmp_path / "damaged", change)
    refused(loader, path, f"{DENSE}.weight must decode to shape .*, got")


def renamed(path: Path, target: Path, old: str, new: str | None) -> Path:
    """All tensors of the weight ``old`` under another name, or left out."""
    found = {name: tensor for name, tensor in stored(path).items() if name.startswith(f"{old}.")}
    change: dict[str, Tensor | None] = dict.fromkeys(found)
    if new is not None:
        change |= {name.replace(old, new): tensor for name, tensor in found.items()}
    return rewritten(path, target, change)


@loaders
@pytest.mark.parametrize("path", [MODELOPT, COMPRESSED], ids=["modelopt", "compressed-tensors"])
def test_quantized_tensors_that_the_model_has_no_place_for(path: Path, loader: str, tmp_path: Path) -> None:
    extra = renamed(path, tmp_path / "layer", DENSE, "model.layers.7.self_attn.v_proj")
    refused(loader, extra, r"layers\.7\.self_attn\.v_proj\.weight is quantized, but Qwen3MoeForCausalLM has no such")
    part = renamed(path, tmp_path / "part", EXPERT, None)
    refused(loader, part, r"layers\.0\.mlp\.experts is quantized only in part \(11 of 12 tensors\)")
    gone = renamed(path, tmp_path / "gone", DENSE, None)
    refused(loader, gone, f"tensor {DENSE}.weight is missing")


def test_layers_for_multi_token_prediction_are_left_alone(tmp_path: Path) -> None:
    """DeepSeek-V3 publishes layer 61, which transformers does not build: it declares the names that may be ignored."""
    path = CHECKPOINTS / "modelopt" / "deepseek_v3-nvfp4"
    extra = {
        n.replace("layers.1.", "layers.61."): t for n, t in tensors(path).items() if n.startswith("model.layers.1.")
    }
    loaded = qq.load_model(rewritten(path, tmp_path / "mtp", extra))
    assert all(torch.equal(t, loaded.state_dict()[n]) for n, t in qq.load_model(path).state_dict().items())


# Files and configs.


def copied(path: Path, target: Path, change: dict[str, Any]) -> Path:
    shutil.copytree(path, target)
    (target / "config.json").write_text(json.dumps(config(path) | change), "utf-8")
    return target


def compressed(**change: Any) -> dict[str, Any]:
    return {"quantization_config": config(COMPRESSED)["quantization_config"] | change}


CONFIGS: dict[str, tuple[Path, dict[str, Any], str]] = {
    "not quantized": (CHECKPOINTS / "bf16" / "qwen3", {}, r"; this is no NVFP4 checkpoint \(quantize_checkpoint, or"),
    "fp8": (
        MODELOPT,
        {"quantization_config": {"quant_method": "fp8"}},
        r"quant_method is 'fp8' \(FP8\); only modelopt and comp",
    ),
    "modelopt fp8": (
        MODELOPT,
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
        "quant_algo is 'FP8'; only NVFP4 and W4A16_NVFP4",
    ),
    "int4": (
        COMPRESSED,
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {},
            }
        },
        "format is 'pack-quantized'; only nvfp4-pack-quantized",
    ),
    "gptq": (
        MODELOPT,
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        r"quant_method is 'gptq' \(GPTQ\); only",
    ),
    "awq": (
        MODELOPT,
        {"quantization_config": {"quant_method": "awq"}},
        r"quant_method is 'awq' \(AWQ\); .* start from the",
    ),
    "mxfp4": (MODELOPT, {"quantization_config": {"quant_method": "mxfp4"}}, r"quant_method is 'mxfp4' \(MXFP4\); only"),
    "transformers' nvfp4": (
        MODELOPT,
        {"quantization_config": {"quant_method": "nvfp4"}},
        "own NVFP4, which is made while",
    ),
    "no method": (MODELOPT, {"quantization_config": {}}, "quant_method is ''; only modelopt and compressed-tensors"),
    "mixed precision": (
        MODELOPT,
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}},
        "quant_algo is 'MIXED_PRECISION'; only NVFP4",
    ),
    "a list": (
        MODELOPT,
        {"quantization_config": ["modelopt"]},
        r"quantization_config must be a JSON object, got \['model",
    ),
    "nested list": (
        MODELOPT,
        {"quantization_config": {"quant_method": "modelopt", "quantization": ["NVFP4"]}},
        r"quantization_config\.quantization must be a JSON object",
    ),
    "groups of a word": (COMPRESSED, compressed(config_groups="all"), "config_groups must be a JSON object, got 'all'"),
    "a group of a word": (COMPRESSED, compressed(config_groups={"a": "b"}), r"config_groups\.a must be a JSON object"),
    "format of a list": (COMPRESSED, compressed(format=["x"], config_groups={}), r"format is \['x'\]; only nvfp4-pack"),
    "blocks of 32": (
        COMPRESSED,
        compressed(config_groups={"g": {"weights": {"group_size": 32}}}),
        "group_size of the weights is 32, but of NVFP4 it is 16",
    ),
    "eight bits": (
        COMPRESSED,
        compressed(config_groups={"g": {"weights": {"num_bits": 8}}}),
        "num_bits of the weights is 8, but of NVFP4 it is 4",
    ),
    "a mixture": (
        COMPRESSED,
        compressed(config_groups={"g": {"format": "float-quantized"}}),
        "a group has format 'float-quantized'; only nvfp4-pack-quantized can be read, not mixtures",
    ),
    "nested blocks of 128": (
        MODELOPT,
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quantization": {"quant_algo": "NVFP4", "group_size": 128},
            }
        },
        "group_size is 128, but NVFP4 has blocks of 16",
    ),
    "claims the other dialect": (
        MODELOPT,
        {"quantization_config": config(COMPRESSED)["quantization_config"]},
        r"config\.json says compressed-tensors, but \S+weight_scale_2 is a name of the modelopt dialect; one of the",
    ),
    "claims modelopt": (
        COMPRESSED,
        {"quantization_config": config(MODELOPT)["quantization_config"]},
        r"config\.json says modelopt, but \S+weight_packed is a name of the compressed-tensors dialect",
    ),
    "architectures of a word": (MODELOPT, {"architectures": "Qwen3MoeForCausalLM"}, "must name an architecture of"),
    "architectures of numbers": (MODELOPT, {"architectures": [7]}, r"must name an architecture of .*\[7\]"),
    "layers of a word": (MODELOPT, {"num_hidden_layers": "two"}, "cannot build Qwen3MoeForCausalLM from config.json"),
    "unknown recipe": (
        MODELOPT,
        {"quads_qat": {"recipe": "mine"}},
        "Recipe: unknown value 'mine'; choose one of aligned",
    ),
    "recipe of another dialect": (
        MODELOPT,
        {"quads_qat": {"recipe": "llm-compressor"}},
        "recipe 'llm-compressor' does not go with the modelopt dialect",
    ),
    "unknown architecture": (MODELOPT, {"architectures": ["Nobody"]}, r"must name an architecture .*\['Nobody'\]"),
    "more layers": (MODELOPT, {"num_hidden_layers": 3}, r"tensor model\.layers\.2\.\S+ is missing"),
    "fewer layers": (MODELOPT, {"num_hidden_layers": 1}, r"model\.layers\.1\.\S+ is quantized, but"),
}


@loaders
@pytest.mark.parametrize("how", CONFIGS)
def test_configs(how: str, loader: str, tmp_path: Path) -> None:
    path, change, match = CONFIGS[how]
    refused(loader, copied(path, tmp_path / "copy", change), match)


@loaders
def test_damaged_files(loader: str, tmp_path: Path) -> None:
    refused(loader, tmp_path / "nobody", "nobody: no such directory")
    refused(loader, tmp_path, "config.json is missing")
    path = shutil.copytree(MODELOPT, tmp_path / "copy")
    with open(path / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    refused(loader, path, "model.safetensors is damaged")
    (path / "model.safetensors").unlink()
    refused(loader, path, "holds neither model.safetensors nor model.safetensors.index.json; only safetensors")


def test_a_legacy_export_says_nvfp4_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Early Model-Optimizer exports have no quantization_config in config.json."""
    path = shutil.copytree(MODELOPT, tmp_path / "copy")
    plain = {key: value for key, value in config(MODELOPT).items() if key != "quantization_config"}
    (path / "config.json").write_text(json.dumps(plain), "utf-8")
    loaded = qq.load_model(path)
    assert all(torch.equal(t, loaded.state_dict()[n]) for n, t in qq.load_model(MODELOPT).state_dict().items())
    for file in ("hf_quant_config.json", "config.json"):
        for content, match in (("[1]", "must hold a JSON object"), ("{", "cannot be read as JSON")):
            (path / file).write_text(content, "utf-8")
            refused("load_model", path, f"{file}: {match}")


def test_a_nested_modelopt_config_is_read(tmp_path: Path) -> None:
    """The legacy form, as in hf_quant_config.json."""
    nested = {"quant_method": "modelopt", **json.loads((MODELOPT / "hf_quant_config.json").read_text("utf-8"))}
    loaded = qq.load_model(copied(MODELOPT, tmp_path / "copy", {"quantization_config": nested}))
    assert all(torch.equal(t, loaded.state_dict()[n]) for n, t in qq.load_model(MODELOPT).state_dict().items())


def test_wrong_arguments() -> None:
    for options, match in (
        ({"activation_scale": "per_channel"}, "ActivationScale: unknown value 'per_channel'"),
        ({"activation_recipe": "mine"}, "Recipe: unknown value 'mine'"),
    ):
        with pytest.raises(ValueError, match=match):
            qq.load_rollout(MODELOPT, **options)  # pyright: ignore[reportArgumentType]
