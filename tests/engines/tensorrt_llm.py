"""TensorRT-LLM of mid-2026 (PyTorch backend) on load; the files are in ``quads_qat.engine_limits.ENGINES``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatch, fnmatchcase
from typing import Any

import torch
from torch import Tensor

from .common import Checkpoint, Loaded, LoadError, NotKnown, Refused, build, by_projection, fill

ALGORITHMS = {"NVFP4": "W4A4", "W4A16_NVFP4": "W4A16"}  # others of its QuantAlgo have other tensors


def read_config(checkpoint: Checkpoint) -> tuple[str, list[str]]:
    """(scheme, excluded modules): hf_quant_config.json wins over what config.json says."""
    config = checkpoint.hf_quant_config or checkpoint.quantization
    if config.get("quant_method") == "compressed-tensors":
        return _read_groups(config), list(config.get("ignore", []))
    nested = config.get("quantization")
    found: dict[str, Any] = config if nested is None else nested
    excluded = found.get("ignore" if nested is None else "exclude_modules") or []
    if found.get("quant_algo") not in ALGORITHMS:
        raise LoadError(f"ValueError: {found.get('quant_algo')!r} is not a valid QuantAlgo")
    return ALGORITHMS[found["quant_algo"]], list(excluded)


def _read_groups(config: dict[str, Any]) -> str:
    for group in config["config_groups"].values():
        if group["input_activations"] is None:
            raise Refused("TensorRT-LLM#16511", "TypeError: 'NoneType' object is not subscriptable")
        for arguments in (group["weights"], group["input_activations"]):
            if arguments["strategy"] != "tensor_group" or arguments["num_bits"] != 4 or arguments["group_size"] != 16:
                raise LoadError(f"Unsupported quantization: {arguments}")
    return "W4A4"


def divergence(checkpoint: Checkpoint) -> list[str]:
    """What it warns of: fields in which the two JSON files differ."""
    flat, nested = checkpoint.quantization, (checkpoint.hf_quant_config or {}).get("quantization")
    if nested is None:
        return []
    pairs = {
        "quant_algo": (flat.get("quant_algo"), nested.get("quant_algo")),
        "exclude_modules": (set(flat.get("ignore") or []), set(nested.get("exclude_modules") or [])),
    }
    return [key for key, (one, other) in pairs.items() if one != other]


def ignores(name: str, shards: list[str], patterns: Iterable[str]) -> bool:
    """A glob against the name, its shards' and everything above it."""
    candidates = [name, *(name[: dot.start()] for dot in re.finditer(r"\.", name)), *shards]
    return any(fnmatch(candidate, pattern) for pattern in patterns for candidate in candidates)


def used_to_ignore(name: str, shards: list[str], patterns: Iterable[str]) -> bool:
    """Earlier versions: a glob against full names alone."""
    return any(fnmatchcase(candidate, pattern) for pattern in patterns for candidate in (name, *shards))


def quantizes(checkpoint: Checkpoint, name: str, shards: list[str]) -> bool:
    """Whether the layer ``name`` is built with packed parameters; versions must agree."""
    _, patterns = read_config(checkpoint)
    shards = [name] if name.endswith("experts") else shards
    now, before = ignores(name, shards, patterns), used_to_ignore(name, shards, patterns)
    if now != before:
        raise LoadError(f"{name}: excluded by {'later' if now else 'earlier'} versions only")
    return not now


def computes(scheme: str, capability: int) -> str:
    """What the GEMM of a layer is on a GPU of this compute capability (90 is Hopper)."""
    if scheme == "W4A4" and capability >= 100:
        return "W4A4"
    if scheme == "W4A16":  # TensorRT-LLM#15969 and #16511; elsewhere not known
        return "W4A16" if capability in (90, 120, 121) else "?"
    raise LoadError("[GEMM Dispatch] Arch unsupported for CUTLASS FP4 GEMM")


def load(checkpoint: Checkpoint, capability: int | None = None) -> Loaded:
    """Load; scales of what is fused must be equal. ``capability`` None: one that runs the scheme."""
    scheme, _ = read_config(checkpoint)
    loaded = Loaded(computes(scheme, capability or {"W4A4": 100, "W4A16": 90}[scheme]))
    if checkpoint.packed:
        raise Refused("TensorRT-LLM#16447", "w1_weight is not None: no tensor has ModelOpt's names")
    modules = build(checkpoint)
    if any(quantizes(checkpoint, name, shards) for name, shards in modules.stacks.items()):
        raise NotKnown("stacked experts")
    for name, shards in modules.dense.items():
        if not quantizes(checkpoint, name, shards):
            continue
        layer = fill(checkpoint, shards)
        _require_equal(layer.scales, "weight_scale_2")
        loaded.weights |= layer.decode(layer.scales, divides=False)
        if scheme == "W4A4" and not layer.input_scales.isnan().all():  # without any it computes them while it runs
            _require_equal(layer.input_scales, "input_scale")
            loaded.use_input_scale(shards, layer.input_scales[0])
    for name, experts in modules.experts.items():
        if not quantizes(checkpoint, name, [module for modules in experts.values() for module in modules]):
            continue
        for projection in by_projection(checkpoint, experts):
            for layer in (fill(checkpoint, shards) for shards in projection):
                _require_equal(layer.scales, "weight_scale_2")  # what happens to unequal ones was not read
                loaded.weights |= layer.decode(layer.scales, divides=False)
                if scheme == "W4A4":
                    _require_equal(layer.input_scales, "input_scale")
                    loaded.use_input_scale(layer.shards, layer.input_scales[0])
    return loaded


def _require_equal(scales: Tensor, what: str) -> None:
    if not torch.equal(scales, scales[:1].expand_as(scales)):  # NaN differs from itself
        raise LoadError(f"The {what} should be same for all the weights")
