"""SGLang 0.5.23 on load: modelopt_quant.py and compressed_tensors/."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from . import vllm
from .common import Checkpoint, Loaded, LoadError, NotKnown, Refused, build, by_projection, fill

ALGORITHMS = {"NVFP4": "W4A4", "W4A16_NVFP4": "W4A16"}  # NVFP4_AWQ and FP8 are read too, with other tensors


def read_config(checkpoint: Checkpoint) -> tuple[str, list[str]]:
    """(scheme, ignored modules): from config.json, or from hf_quant_config.json where that has nothing."""
    config = checkpoint.quantization or checkpoint.hf_quant_config or {}
    if config.get("quant_method") == "compressed-tensors":
        return vllm.read_config(checkpoint)  # its reader was adapted from vLLM's
    nested = config.get("quantization")
    found: dict[str, Any] = config if nested is None else nested
    algorithm = found.get("quant_algo")
    if algorithm not in ALGORITHMS:  # case matters
        raise LoadError(f"quant_algo must be one of FP8, NVFP4, NVFP4_AWQ, W4A16_NVFP4, got {algorithm!r}")
    if nested is None:
        groups = [g for group in config.get("config_groups", {}).values() for g in group.values()]
        sizes = {g["group_size"] for g in groups if isinstance(g, dict) and "group_size" in g}
    else:
        sizes = {nested[key] for key in ("group_size",) if nested.get(key) is not None}
    if len(sizes) > 1:
        raise LoadError(f"Inconsistent group_size values: {sorted(sizes)}")
    ignored = found.get("ignore", found.get("exclude_modules"))
    if not sizes or ignored is None:
        raise LoadError("group_size and the list of ignored modules are required")
    return ALGORITHMS[algorithm], list(ignored)


def ignores(name: str, shards: list[str], patterns: Iterable[str]) -> bool:
    """ModelOpt dialect: a regex against the whole name, or against any one component of it."""

    def hit(candidate: str) -> bool:
        parts = [candidate, *candidate.split(".")]
        return any(regex.fullmatch(part) for regex in _regexes(tuple(patterns)) for part in parts)

    return hit(name) or all(hit(shard) for shard in shards)


@cache
def _regexes(patterns: tuple[str, ...]) -> list[re.Pattern[str]]:
    return [re.compile(pattern.replace(".", r"\.").replace("*", r".*")) for pattern in patterns]


def ignores_linear(name: str, shards: list[str], patterns: Iterable[str]) -> bool:
    """compressed-tensors: as vLLM, and a pattern may be the end of a name."""
    patterns = list(patterns)

    def hit(candidate: str) -> bool:
        return vllm.ignores_linear(candidate, [candidate], patterns) or any(
            candidate.endswith(f".{pattern}") for pattern in patterns if not pattern.startswith("re:")
        )

    if hit(name):
        return True
    if len({hit(shard) for shard in shards}) > 1:
        raise LoadError(f"{name}: found different quantization schemes for {shards}; all must use the same")
    return all(hit(shard) for shard in shards)


def quantizes(checkpoint: Checkpoint, name: str, shards: list[str]) -> bool:
    """Whether the layer ``name`` is built with packed parameters."""
    _, patterns = read_config(checkpoint)
    rule = ignores_linear if checkpoint.quantization.get("quant_method") == "compressed-tensors" else ignores
    return not rule(name, [name] if name.endswith("experts") else shards, patterns)


def _check_known_limits(checkpoint: Checkpoint, quantized: list[str]) -> None:
    if checkpoint.is_type("deepseek_v4") and any(name.endswith((".wq_a", ".wkv")) for name in quantized):
        raise Refused("sglang#33245", "wq_a and wkv are fused by suffixes that packed tensors do not have: dropped")
    stacked = any(name in checkpoint.stored for name in quantized)  # a parameter, not a module
    if stacked and checkpoint.is_type("llama4", "llama4_text"):
        raise Refused("sglang#35032", "RuntimeError: expand, the scales of all experts for one expert's")
    if stacked:
        raise NotKnown("stacked experts")
    if checkpoint.packed and checkpoint.is_type("gpt_oss"):
        raise NotKnown("gpt-oss experts")
    if checkpoint.packed and checkpoint.is_type("llama4", "llama4_text"):
        raise NotKnown("llama 4 attention")


def computes(scheme: str, capability: int) -> str:
    """What the GEMM of a layer is on a GPU of this compute capability (90 is Hopper)."""
    if capability < 80:
        raise LoadError("native dense GEMM backends require SM100+")
    return "W4A4" if scheme == "W4A4" and capability >= 100 else "W4A16"  # Marlin


def load(checkpoint: Checkpoint, capability: int = 100) -> Loaded:
    """Load and post-process; a missing input scale is 1.0 in the ModelOpt dialect, and was not read in the other."""
    scheme, _ = read_config(checkpoint)
    loaded = Loaded(computes(scheme, capability))
    matrices = checkpoint.matrices()
    _check_known_limits(checkpoint, [name for name, matrix in matrices.items() if matrix.dtype == torch.uint8])
    divides = checkpoint.packed
    unset = torch.nan if checkpoint.packed else 1.0
    modules = build(checkpoint)
    for name, shards in modules.dense.items():
        if not quantizes(checkpoint, name, shards):
            continue
        layer = fill(checkpoint, shards, input_scale=unset)
        loaded.weights |= layer.decode(layer.scales.max().expand(len(shards)), divides=divides)
        if scheme == "W4A4":
            loaded.use_input_scale(shards, layer.input_scales.max())
    for name, experts in modules.experts.items():
        if not quantizes(checkpoint, name, [module for modules in experts.values() for module in modules]):
            continue
        for projection in by_projection(checkpoint, experts):
            layers = [fill(checkpoint, shards, input_scale=unset) for shards in projection]
            for layer in layers:
                # Marlin and compressed-tensors take the gate's scale twice; other backends keep one for gate and one
                # for up.
                twice = divides or loaded.computes == "W4A16"
                scales = layer.scales[0].expand(len(layer.shards)) if twice else layer.scales
                loaded.weights |= layer.decode(scales, divides=divides)
            if scheme == "W4A4":
                every = torch.cat([layer.input_scales for layer in layers])
                value = every.min() if divides else every.max()
                loaded.use_input_scale([shard for layer in layers for shard in layer.shards], value)
    return loaded
