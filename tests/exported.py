"""Exports of one observed model, made once for a test module, and what can be wrong in them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import CHECKPOINTS
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import quads_qat as qq
from quads_qat import Dialect

SOURCE = CHECKPOINTS / "bf16" / "qwen3moe"
IDS = torch.randint(0, 120, (1, 12), generator=torch.Generator().manual_seed(0))
MODULE, EXPERT = "model.layers.1.self_attn.k_proj", "model.layers.0.mlp.experts.3.down_proj"
ENDINGS = {
    Dialect.MODELOPT: ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    Dialect.COMPRESSED_TENSORS: ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"),
}

Exported = Callable[..., Path]


@cache
def trainer(scope: str = "all") -> nn.Module:
    """Observed; only read."""
    model = qq.convert(AutoModelForCausalLM.from_pretrained(SOURCE), "w4a16", scope=scope)
    with torch.no_grad(), qq.observe_activations(model):
        model(IDS)
    return model


def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Makes a checkpoint at the first call with these arguments."""

    @cache
    def export(dialect: str, activations: str = "observed", scope: str = "all") -> Path:
        path = tmp_path_factory.mktemp("out") / "checkpoint"
        qq.export_checkpoint(trainer(scope), path, dialect=dialect, activations=activations)
        return path

    return export


def flip(tensor: Tensor, at: int = 5, bit: int = 0) -> Tensor:
    """One bit of the byte ``at``."""
    flat = tensor.clone().contiguous().reshape(-1)
    flat.view(torch.uint8)[at] ^= 1 << bit
    return flat.view(tensor.shape)


def with_json(path: Path, target: Path, file: str, change: Callable[[Any], None]) -> Path:
    shutil.copytree(path, target)
    content = json.loads((target / file).read_text("utf-8"))
    change(content)
    (target / file).write_text(json.dumps(content), "utf-8")
    return target


CONFIGS: dict[str, tuple[str, Callable[[Any], None], str, str]] = {
    "another model": (
        "config.json",
        lambda c: c["rope_parameters"].update(rope_theta=1.0),
        "config.json: rope_parameters.rope_theta",
        "1.0 against 10000.0",
    ),
    "experts per token": (
        "config.json",
        lambda c: c.update(num_experts_per_tok=1),
        "config.json: num_experts_per_tok",
        "1 against 2",
    ),
    "a router that engines would quantize": (
        "config.json",
        lambda c: c["quantization_config"]["ignore"].remove("model.layers.1.mlp.gate"),
        "config.json: ignore",
        "lacks ['model.layers.1.mlp.gate']",
    ),
    "a weight that engines would not decode": (
        "config.json",
        lambda c: c["quantization_config"]["ignore"].append("model.layers.1.self_attn.k_proj"),
        "config.json: ignore",
        "has ['model.layers.1.self_attn.k_proj'] too",
    ),
    "two files that disagree": (
        "hf_quant_config.json",
        lambda c: c["quantization"].update(quant_algo="W4A16_NVFP4"),
        "hf_quant_config.json: quantization: quant_algo",
        "'W4A16_NVFP4' against 'NVFP4'",
    ),
    "a KV cache that is not quantized": (
        "hf_quant_config.json",
        lambda c: c["quantization"].update(kv_cache_quant_algo="FP8"),
        "hf_quant_config.json: quantization: kv_cache_quant_algo",
        "'FP8' against None",
    ),
}
