"""vLLM 0.33.0 on load. ``engines_real`` runs vLLM's own code, on fewer architectures; it and the table agree."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatch
from typing import Any

import torch

from .common import Checkpoint, Loaded, LoadError, Refused, build, by_projection, decode_stack, fill

ALGORITHMS = {"NVFP4": "W4A4", "W4A16_NVFP4": "W4A16"}
_NESTED = ("group_size", "kv_cache_quant_algo", "exclude_modules")


def read_config(checkpoint: Checkpoint) -> tuple[str, list[str]]:
    """(scheme, ignored modules): from config.json, or from hf_quant_config.json where that has nothing."""
    config = checkpoint.quantization or checkpoint.hf_quant_config or {}
    if config.get("quant_method") == "compressed-tensors":
        return _read_groups(config), list(config.get("ignore", []))
    if not str(config.get("quant_method", "modelopt")).startswith("modelopt"):
        raise LoadError(f"unknown quantization method {config['quant_method']!r}")
    nested = config.get("quantization")
    found: dict[str, Any] = config if nested is None else nested
    if "quant_algo" not in found:
        raise LoadError("Missing 'quant_algo'")
    algorithm = str(found["quant_algo"]).upper()
    if algorithm not in ALGORITHMS:
        raise LoadError(f"ModelOpt currently only supports certain algorithms, got {algorithm}")
    if nested is not None and (missing := [key for key in _NESTED if key not in nested]):
        raise LoadError(f"NVFP4 quantization requires the following fields in hf_quant_config.json: {missing}")
    return ALGORITHMS[algorithm], list((config.get("ignore") if nested is None else nested["exclude_modules"]) or [])


def _read_groups(config: dict[str, Any]) -> str:
    for group in config["config_groups"].values():
        if not is_nvfp4(group["weights"]) or "Linear" not in group["targets"]:
            raise LoadError(f"no NVFP4 weights of all linears: {group}")
        if group["input_activations"] is None:
            return "W4A16"
        if not is_nvfp4(group["input_activations"]):
            raise LoadError("For NVFP4 weights, input quantization must also be NVFP4 format or None")
    return "W4A4"


def is_nvfp4(arguments: dict[str, Any]) -> bool:
    wanted = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    return all(arguments.get(key) == value for key, value in wanted.items())


def ignores(name: str, shards: list[str], patterns: Iterable[str]) -> bool:
    """ModelOpt dialect: exact or by its shards, then substring, then glob."""
    patterns = list(patterns)
    exact = [shard in patterns for shard in shards]
    if len(shards) > 1 and any(exact):
        if not all(exact):
            raise LoadError(f"{name}: some shards are quantized and others are not; all must have the same precision")
        return True
    return any(pattern in name or fnmatch(name, pattern) for pattern in patterns)


def ignores_linear(name: str, shards: list[str], patterns: Iterable[str]) -> bool:
    """compressed-tensors: exact names, or regexes that match from the start; of all shards or of none."""

    def hit(candidate: str) -> bool:
        return any(re.match(p[3:], candidate) is not None if p.startswith("re:") else p == candidate for p in patterns)

    if name in patterns:
        return True
    if len({hit(shard) for shard in shards}) > 1:
        raise LoadError(f"{name}: found different quantization schemes for {shards}; all must use the same")
    return all(hit(shard) for shard in shards)


def quantizes(checkpoint: Checkpoint, name: str, shards: list[str]) -> bool:
    """Whether the layer ``name`` is built with packed parameters."""
    _, patterns = read_config(checkpoint)
    if checkpoint.quantization.get("quant_method") != "compressed-tensors":
        return not ignores(name, shards if not name.endswith("experts") else [name], patterns)
    if name.endswith("experts"):  # asked under the names that a list of linears would have, whatever is on disk
        shards = [f"{name}.0.{leaf}_proj" for leaf in ("gate", "up", "down")]
        if len({ignores_linear(shard, [shard], patterns) for shard in shards}) > 1:
            raise LoadError("All MoE projections need to have same quantization scheme but found multiple")
    return not ignores_linear(name, shards, patterns)


def _check_known_limits(checkpoint: Checkpoint, quantized: list[str], scheme: str) -> None:
    """What the loaders of single models do."""

    def holds(*endings: str) -> bool:
        return any(name.endswith(endings) for name in quantized)

    is_type, packed = checkpoint.is_type, checkpoint.packed
    stacked = any(name in checkpoint.stored for name in quantized)  # a parameter, not a module
    if is_type("deepseek_v4") and holds("compressor.wkv", "compressor.wgate", "indexer.weights_proj"):
        raise Refused("vllm#41276", "NotImplementedError: compressor and indexer.weights_proj must not be quantized")
    if packed and holds("lm_head"):
        raise Refused("vllm#45102", "There is no module or parameter named 'lm_head.input_global_scale'")
    if stacked and is_type("gpt_oss"):
        raise Refused("vllm#46641", "KeyError: ...experts.w2_bias, and scales that stay unset")
    if packed and is_type("gpt_oss") and holds(".down_proj"):
        raise Refused("vllm: models/gpt_oss.py", "KeyError: ...experts.0.w2_bias")
    if not packed and is_type("afmoe", "exaone_moe") and not holds("lm_head"):
        raise Refused("vllm: models/afmoe.py", "a BF16 head for packed parameters: the layer has no name to ignore")
    if stacked and is_type("llama4_text") and not is_type("llama4"):
        raise Refused("vllm: models/llama4.py", "KeyError: ...routed_experts.w2_weight_weight_scale_2")
    if is_type("aria"):
        raise Refused("vllm: models/aria.py", "chunk expects at least a 1-dimensional tensor")
    if packed and is_type("glm4v_moe"):
        raise Refused("vllm: models/glm4_1v.py", "'QKVParallelLinear' object has no attribute 'data'")
    if packed and is_type("granitemoehybrid") and scheme == "W4A4":
        raise Refused("vllm: models/granitemoehybrid.py", "KeyError: ...experts.w2_input_global_scale")
    if is_type("jamba") and holds(".mamba.in_proj", ".mamba.x_proj"):
        raise Refused(
            "vllm: layers/mamba/mamba_mixer.py", "'MergedColumnParallelLinear' object has no attribute 'data'"
        )
    if is_type("longcat_flash") and holds(".up_proj"):
        raise Refused("vllm: models/longcat_flash.py", "KeyError: ...mlp.experts.4.gate_proj.weight_scale")
    if is_type("openai_privacy_filter") and (stacked or holds("score", ".down_proj")):
        raise Refused("vllm: models/openai_privacy_filter.py", "no module or parameter named 'score.weight_scale_2'")
    if is_type("phimoe"):
        raise Refused(
            "vllm: models/transformers/base.py", "a BF16 router for packed parameters, named otherwise on disk"
        )


def computes(scheme: str, capability: int) -> str:
    """What the GEMM of a layer is on a GPU of this compute capability (90 is Hopper)."""
    if capability < 75:
        raise LoadError("the quantization method is not supported for the current GPU; minimum capability: 75")
    return "W4A4" if scheme == "W4A4" and capability >= 100 else "W4A16"  # Marlin, with a warning


def load(checkpoint: Checkpoint, capability: int = 100) -> Loaded:
    """Load and post-process; dense layers take the largest scale of their shards, experts take the gate's."""
    scheme, _ = read_config(checkpoint)
    loaded = Loaded(computes(scheme, capability))
    matrices = checkpoint.matrices()
    _check_known_limits(checkpoint, [name for name, matrix in matrices.items() if matrix.dtype == torch.uint8], scheme)
    divides = checkpoint.packed
    modules = build(checkpoint)
    for name, shards in modules.dense.items():
        if not quantizes(checkpoint, name, shards):
            continue
        layer = fill(checkpoint, shards)
        loaded.weights |= layer.decode(layer.scales.max().expand(len(shards)), divides=divides)
        if scheme == "W4A4":
            _set_input_scale(loaded, name, layer.shards, layer.input_scales.max())  # max() of NaN is NaN
    for name, experts in modules.experts.items():
        if not quantizes(checkpoint, name, [module for modules in experts.values() for module in modules]):
            continue
        for projection in by_projection(checkpoint, experts):
            layers = [fill(checkpoint, shards) for shards in projection]
            for layer in layers:
                loaded.weights |= layer.decode(layer.scales[0].expand(len(layer.shards)), divides=divides)
            if scheme == "W4A4":
                every = torch.cat([layer.input_scales for layer in layers])
                value = every.min() if divides else every.max()  # the largest amax, in either direction
                _set_input_scale(loaded, name, [shard for layer in layers for shard in layer.shards], value)
    for parameter in (name for stack in modules.stacks.values() for name in stack):
        if checkpoint.stored[parameter].dtype == torch.uint8:  # Llama 4's: [E, K/2, N], one scale for all experts
            loaded.weights[parameter] = decode_stack(checkpoint, parameter)
            if scheme == "W4A4":
                _set_input_scale(loaded, parameter, [parameter], checkpoint.stored[f"{parameter}_input_scale"])
    return loaded


def _set_input_scale(loaded: Loaded, name: str, shards: Iterable[str], value: torch.Tensor) -> None:
    if not (value.isfinite() and value > 0):
        raise LoadError(f"{name}: no input scale was loaded; it is what the memory held (vllm#45212)")
    loaded.use_input_scale(shards, value)
