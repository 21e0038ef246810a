"""Contract under test: transformers and compressed-tensors, the real clients, read our exports as our numbers."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import CHECKPOINTS, config, quantized_weights, tensors
from torch import Tensor, nn

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.utils import is_module_quantized
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import quads_qat as qq
from quads_qat import Recipe, patch_transformers

IDS = torch.randint(0, 120, (2, 12), generator=torch.Generator().manual_seed(0))
RECIPES = [Recipe.ALIGNED, Recipe.LLM_COMPRESSOR]
CASES = [(Recipe.ALIGNED, name) for name in ("llama", "qwen3", "qwen3moe", "mixtral", "deepseek_v3")]
CASES += [(Recipe.LLM_COMPRESSOR, name) for name in ("qwen3", "qwen3moe")]
recipes = pytest.mark.parametrize("recipe", RECIPES, ids=str)
activations = pytest.mark.parametrize("activations", ["none", "observed"], ids=["w4a16", "w4a4"])
loading = pytest.mark.parametrize("dequantize", [False, True], ids=["compressed", "dequantize"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def exported(name: str, recipe: Recipe, activations: str, *exclude: str) -> Path:
        model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "bf16" / name)
        qq.convert(model, "w4a16", recipe=recipe, exclude=exclude)
        with torch.no_grad(), qq.observe_activations(model):
            model(IDS)
        path = tmp_path_factory.mktemp("out") / name
        qq.export_checkpoint(model, path, dialect="compressed-tensors", activations=activations)
        return path

    return exported


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(IDS).logits


def from_pretrained(path: Path, *, dequantize: bool = False) -> nn.Module:
    """As users load it; every parameter must come from the file, and everything in the file must be used."""
    options: Any = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    with patch_transformers():
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    unused = [key for key in info["unexpected_keys"] if not key.endswith("input_global_scale")]
    assert not unused
    return model


@loading
@pytest.mark.parametrize(("recipe", "name"), CASES)
def test_w4a16_in_transformers(name: str, recipe: Recipe, dequantize: bool, checkpoint: Any) -> None:
    path = checkpoint(name, recipe, "none")
    assert torch.equal(logits(from_pretrained(path, dequantize=dequantize)), logits(qq.load_model(path)))


@pytest.mark.parametrize(("recipe", "name"), CASES)
def test_w4a4_weights_in_transformers(name: str, recipe: Recipe, checkpoint: Any) -> None:
    path = checkpoint(name, recipe, "observed")
    assert torch.equal(logits(from_pretrained(path, dequantize=True)), logits(qq.load_model(path)))


def rounded(x: Tensor, global_scale: Tensor) -> Tensor:
    """W4A4 as compressed-tensors computes it: block scales in x's dtype, values in float32."""
    blocks = x.unflatten(-1, (-1, 16))
    scale = (global_scale * (blocks.abs().amax(-1, keepdim=True) / 6)).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    scale = torch.where(scale == 0, 0.125, scale) / global_scale
    y = blocks.float() / scale
    magnitude = y.abs().clamp(max=6)
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    return (torch.copysign((magnitude / step).round() * step, y) * scale).to(x.dtype).flatten(-2)


@recipes
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_w4a4_in_transformers(name: str, recipe: Recipe, checkpoint: Any) -> None:
    """Our weights, and activations rounded by our input scales."""
    path = checkpoint(name, recipe, "observed")
    stored, model = tensors(path), qq.load_model(path)
    expected_plain = logits(model)
    for module_name, module in model.named_modules():
        if (global_scale := stored.get(f"{module_name}.input_global_scale")) is not None:
            module.register_forward_pre_hook(lambda module, args, s=global_scale: (rounded(args[0], s),))
    actual = logits(from_pretrained(path))
    assert torch.equal(actual, logits(model))
    assert not torch.equal(actual, expected_plain)


@activations
@recipes
@pytest.mark.parametrize("name", ["qwen3", "qwen3moe", "gpt_oss"])
def test_compressed_tensors_decodes_our_weights(name: str, recipe: Recipe, activations: str, checkpoint: Any) -> None:
    path = checkpoint(name, recipe, activations)
    parsed = QuantizationConfig.model_validate(config(path)["quantization_config"])
    scheme: Any = parsed.config_groups["group_0"]
    assert (scheme.input_activations is None) == (activations == "none")
    compressor: Any = BaseCompressor.get_value_from_registry(scheme.format)
    stored = tensors(path)
    for weight in quantized_weights(stored):
        base = weight.removesuffix(".weight")
        parts = {key: stored[f"{base}.{key}"] for key in ("weight_packed", "weight_scale", "weight_global_scale")}
        actual = compressor.decompress(parts, scheme)["weight"]
        assert torch.equal(actual, qq.ops.dequantize(_read(path, weight), actual.dtype)), weight


def _read(path: Path, weight: str) -> qq.NVFP4Tensor:
    from quads_qat.nvfp4_checkpoint import Checkpoint

    return Checkpoint.open(path).read(weight)


@loading
@pytest.mark.parametrize("exclude", ["*.self_attn.*", "*.mlp.*"])
def test_what_is_ignored_stays_bf16_in_transformers(exclude: str, dequantize: bool, checkpoint: Any) -> None:
    path = checkpoint("qwen3", Recipe.ALIGNED, "none", exclude)
    model = from_pretrained(path, dequantize=dequantize)
    if not dequantize:
        quantized = {name for name, module in model.named_modules() if is_module_quantized(module)}
        assert quantized == {name.removesuffix(".weight") for name in quantized_weights(tensors(path))}
    assert torch.equal(logits(model), logits(qq.load_model(path)))


@loading
def test_a_moe_with_plain_attention(dequantize: bool, checkpoint: Any) -> None:
    path = checkpoint("qwen3moe", Recipe.ALIGNED, "none", "*.self_attn.*")
    assert torch.equal(logits(from_pretrained(path, dequantize=dequantize)), logits(qq.load_model(path)))


def test_a_moe_with_plain_experts_is_too_much_for_transformers(checkpoint: Any) -> None:
    """It takes the experts of every compressed checkpoint for compressed, and says so. ``load_model`` reads it."""
    path = checkpoint("qwen3moe", Recipe.ALIGNED, "none", "*.mlp.experts")
    assert logits(qq.load_model(path)).isfinite().all()
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        from_pretrained(path)


def test_generation_in_transformers(checkpoint: Any) -> None:
    path = checkpoint("qwen3moe", Recipe.ALIGNED, "none")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    models: list[Any] = [from_pretrained(path), qq.load_model(path)]
    assert torch.equal(*(model.generate(IDS, **options) for model in models))
