"""NVFP4 checkpoints read by a decoder that shares no code with the package, with compressed-tensors or transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

CHECKPOINTS = Path(__file__).parent / "data" / "checkpoints"
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
#: Endings of what belongs to a quantized weight, besides its codes.
SCALES = ("_scale", "_scale_2", "_global_scale")


def tensors(path: Path) -> dict[str, Tensor]:
    """All shards of a directory."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text("utf-8"))


def decode(packed: Tensor, block_scale: Tensor, per_tensor_scale: Tensor, *, divides: bool) -> Tensor:
    """[N, K/2] uint8, [N, K/16] e4m3, one scale -> [N, K] float32."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)  # the low nibble is the even column
    s = block_scale.float()
    decode_scale = s / per_tensor_scale if divides else s * per_tensor_scale
    return E2M1[codes.long()] * decode_scale.repeat_interleave(16, dim=-1)


def quantized_weights(stored: dict[str, Tensor]) -> dict[str, str]:
    """BF16 name of every quantized weight -> name of its codes."""
    found = {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.uint8:
            found[name.removesuffix("_packed")] = name
    return found


def scale_names(name: str, codes: str) -> tuple[str, str]:
    """Names of block scales and per-tensor scale of the weight ``name``."""
    base = name.removesuffix(".weight")
    if codes.endswith("_packed"):
        return f"{base}.weight_scale", f"{base}.weight_global_scale"
    if name.endswith(".weight"):
        return f"{base}.weight_scale", f"{base}.weight_scale_2"
    return f"{name}_weight_scale", f"{name}_weight_scale_2"  # ModelOpt's stacks of experts


def transposed(block_scale: Tensor) -> Tensor:
    """``.mT`` made contiguous, for a dtype that torch cannot copy by strides."""
    return block_scale.view(torch.uint8).mT.contiguous().view(block_scale.dtype)


def decoded(path: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The whole checkpoint in high precision: BF16 name -> tensor; scales are gone."""
    stored = tensors(path)
    weights = quantized_weights(stored)
    out = {n: t for n, t in stored.items() if n not in weights.values() and not n.endswith(SCALES)}
    for name, codes in weights.items():
        block_scale, scale = (stored[n] for n in scale_names(name, codes))
        packed, divides = stored[codes], codes.endswith("_packed")
        if packed.ndim == 3:  # [E, K/2, N] and [E, K/16, N]
            value = decode(packed.mT, transposed(block_scale), scale, divides=divides).mT.contiguous()
        else:
            value = decode(packed, block_scale, scale, divides=divides)
        out[name] = value.to(dtype)
    return out


def write_decoded(path: Path, target: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """A plain checkpoint with the decoded values, for transformers to load."""
    target.mkdir()
    plain = {key: value for key, value in config(path).items() if key not in ("quantization_config", "quads_qat")}
    (target / "config.json").write_text(json.dumps(plain), "utf-8")
    values = {name: tensor.contiguous() for name, tensor in decoded(path, dtype).items()}
    save_file(values, target / "model.safetensors", {"format": "pt"})
    return target


def rewritten(path: Path, target: Path, change: Mapping[str, Tensor | None]) -> Path:
    """A copy of a single-file checkpoint with tensors replaced, added, or (None) left out; without its hashes."""
    shutil.copytree(path, target, ignore=shutil.ignore_patterns("quads_qat_files.json"))
    changed = tensors(path) | dict(change)
    kept = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    return target
