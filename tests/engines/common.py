"""What the emulated engines share: a checkpoint as it lies on disk, and layers whose parameters nothing has filled yet.

An engine builds its layers from the names in the checkpoint, and decides from the *config* alone which of them are
quantized. Then it fills their parameters from the tensors. What a tensor does not fill stays as it was allocated, which
is NaN here and whatever the memory held there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from by_hand import SCALES, decode, tensors
from torch import Tensor

#: What engines fuse into one GEMM: leaf name of the fused module -> leaf names on disk.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("w1", "w3"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "fused_wqa_wkv": ("wq_a", "wkv"),  # DeepSeek-V4: vllm#47972
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
#: Leaf names of linears of which it is known with what they are fused, or that they are not.
FUSION_IS_KNOWN = frozenset(
    [leaf for fused in FUSED.items() for leaf in (fused[0], *fused[1])]
    + ["o_proj", "down_proj", "q_b_proj", "kv_b_proj", "w2"]
)
GATE, UP, DOWN = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)")


class Refused(Exception):  # noqa: N818
    """The engine is known not to load this; ``key`` is that of ``quads_qat.engine_limits``."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key}: {why}")
        self.key = key


class NotKnown(Exception):  # noqa: N818
    """What the engine does here was not read; ``key`` is one of ``UNREAD``."""

    def __init__(self, key: str) -> None:
        super().__init__(UNREAD[key])
        self.key = key


class LoadError(Exception):
    """The file breaks a rule of the engine."""


UNREAD = {
    "stacked experts": "experts that the ModelOpt dialect keeps as 3-D tensors (gpt-oss, Llama 4) go through loaders "
    "of these models, which were not read. Pointers: vllm#21499 and TensorRT-LLM#8956 added such loaders",
    "gpt-oss experts": "whether the loader of gpt-oss takes compressed-tensors' single, de-interleaved experts with "
    "biases was not read",
    "experts without down_proj": "transformers stores gate and up of LongCat's zero experts, which have no down; what "
    "becomes of them was not read",
    "llama 4 attention": "the loaders of Llama 4 permute the rows of q and k; whether they do so to "
    "`weight_packed` was not read",
}


@dataclass(frozen=True)
class Checkpoint:
    """The files of a checkpoint."""

    config: dict[str, Any]
    hf_quant_config: dict[str, Any] | None
    stored: dict[str, Tensor]

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        beside = path / "hf_quant_config.json"
        return cls(
            json.loads((path / "config.json").read_text("utf-8")),
            json.loads(beside.read_text("utf-8")) if beside.exists() else None,
            tensors(path),
        )

    @property
    def quantization(self) -> dict[str, Any]:
        return self.config.get("quantization_config") or {}

    @property
    def packed(self) -> bool:
        """Tensors have the names of compressed-tensors."""
        return any(name.endswith(".weight_packed") for name in self.stored)

    def is_type(self, *types: str) -> bool:
        nested = [value for value in self.config.values() if isinstance(value, dict)]
        return any(config.get("model_type") in types for config in (self.config, *nested))

    def matrices(self) -> dict[str, Tensor]:
        """Module (of experts that are 3-D: parameter) that holds a matrix -> the matrix, packed or not."""
        found = {}
        for name, tensor in self.stored.items():
            if name.endswith((*SCALES, "bias")) or tensor.ndim < 2:
                continue
            if name.endswith((".weight", ".weight_packed")):
                found[name.rpartition(".")[0]] = tensor
            elif name.rpartition(".")[0].endswith("experts"):
                found[name] = tensor
        return found


@dataclass
class Modules:
    """The modules of a checkpoint as engines build them."""

    dense: dict[str, list[str]] = field(default_factory=dict)  #: engine's name -> its shards on disk, in order
    experts: dict[str, dict[int, list[str]]] = field(default_factory=dict)  #: ``...experts`` -> expert -> its modules
    stacks: dict[str, list[str]] = field(default_factory=dict)  #: ``...experts`` -> its 3-D parameters


def build(checkpoint: Checkpoint) -> Modules:
    """Fuse what engines fuse, and gather experts."""
    modules, present = Modules(), checkpoint.matrices()
    for name in present:
        parent, _, leaf = name.rpartition(".")
        if match := _EXPERT.fullmatch(name):
            modules.experts.setdefault(match[1], {}).setdefault(int(match[2]), []).append(name)
        elif name in checkpoint.stored:
            modules.stacks.setdefault(parent, []).append(name)
        else:
            fused = next((f for f, shards in FUSED.items() if leaf in shards), None)
            shards = [f"{parent}.{shard}" for shard in FUSED[fused]] if fused else [name]
            shards = [shard for shard in shards if shard in present]
            modules.dense[f"{parent}.{fused}" if len(shards) > 1 else name] = shards
    return modules


def mismatches(checkpoint: Checkpoint, quantizes: Callable[[str, list[str]], bool]) -> list[str]:
    """Modules that are packed on disk while the engine takes them for unquantized, or the other way round.

    ``quantizes(engine's name, shards on disk)`` is the engine's decision.
    """
    matrices = checkpoint.matrices()
    modules = build(checkpoint)
    layers = {**modules.dense, **modules.stacks}
    layers |= {name: [n for e in experts.values() for n in e] for name, experts in modules.experts.items()}
    wrong = []
    for name, shards in layers.items():
        expected = quantizes(name, shards)
        wrong += [shard for shard in shards if (matrices[shard].dtype == torch.uint8) != expected]
    return wrong


# --------------------------------------------------------------------------------------------------------- parameters


@dataclass
class Layer:
    """One GEMM: its shards in order, each with what its tensors have filled."""

    shards: list[str]
    codes: list[Tensor]
    block_scales: list[Tensor]
    scales: Tensor
    input_scales: Tensor

    def decode(self, scales: Tensor, *, divides: bool) -> dict[str, Tensor]:
        """Module on disk -> float32 weight, with these scales, one for each shard."""
        parts = zip(self.shards, self.codes, self.block_scales, scales, strict=True)
        return {shard: decode(codes, block, scale, divides=divides) for shard, codes, block, scale in parts}


def fill(checkpoint: Checkpoint, shards: list[str], *, input_scale: float = torch.nan) -> Layer:
    """Allocate the parameters of a quantized layer and load the tensors that belong to it.

    Raises:
        LoadError: a tensor of another dtype or shape, or a weight or scale that no tensor fills.
    """
    if checkpoint.packed:
        endings = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    else:
        endings = ("weight", "weight_scale", "weight_scale_2", "input_scale")
    layer = Layer(shards, [], [], torch.full((len(shards),), torch.nan), torch.full((len(shards),), input_scale))
    for i, shard in enumerate(shards):
        codes, block_scale, scale, activation = (checkpoint.stored.get(f"{shard}.{ending}") for ending in endings)
        if codes is None or block_scale is None or scale is None:
            raise LoadError(f"{shard}: a parameter was never loaded")
        if codes.dtype != torch.uint8 or block_scale.dtype != torch.float8_e4m3fn:
            raise LoadError(f"{shard}: tried to load {codes.dtype} and {block_scale.dtype} into packed parameters")
        if block_scale.shape != (codes.shape[0], codes.shape[1] / 8) or scale.numel() != 1:
            raise LoadError(f"{shard}: {codes.shape} codes, {block_scale.shape} block scales, {scale.shape} scale")
        layer.codes.append(codes)
        layer.block_scales.append(block_scale)
        layer.scales[i] = scale
        if activation is not None:
            layer.input_scales[i] = activation
    return layer


def decode_stack(checkpoint: Checkpoint, parameter: str) -> Tensor:
    """float32 [E, K, N] of experts that ModelOpt keeps as one tensor [E, K/2, N]."""
    codes, block, scale = (checkpoint.stored[f"{parameter}{end}"] for end in ("", "_weight_scale", "_weight_scale_2"))
    experts = zip(codes.mT.contiguous(), block.view(torch.uint8).mT.contiguous().view(block.dtype), strict=True)
    return torch.stack([decode(c, b, scale, divides=False).T for c, b in experts])


def by_projection(checkpoint: Checkpoint, experts: dict[int, list[str]]) -> list[list[list[str]]]:
    """Of each fused parameter (w13, w2), the shards of every expert; a layer without gates has up alone in w13.

    Experts of two sizes (ERNIE's, for text and for images) cannot be in one parameter.
    """
    matrices = checkpoint.matrices()
    parameters: dict[tuple[str, torch.Size], list[list[str]]] = {}
    for modules in experts.values():
        for kind, leaves in (("w13", (GATE, UP)), ("w2", (DOWN,))):
            shards = [name for leaf in leaves for name in modules if name.rpartition(".")[2] in leaf]
            if not shards:
                raise NotKnown("experts without down_proj")
            parameters.setdefault((kind, matrices[shards[0]].shape), []).append(shards)
    return list(parameters.values())


@dataclass
class Loaded:
    """What an engine computes with.

    Attributes:
        weights: module on disk -> float32 [N, K] that it multiplies by.
        input_scales: module on disk -> its activation scale, as the dialect stores it; empty for W4A16.
        computes: ``W4A4`` or ``W4A16``, on the GPU that was asked for.
    """

    computes: str
    weights: dict[str, Tensor] = field(default_factory=dict)
    input_scales: dict[str, Tensor] = field(default_factory=dict)

    def use_input_scale(self, shards: Iterable[str], value: Tensor) -> None:
        for shard in shards:
            self.input_scales[shard] = value.reshape(())
