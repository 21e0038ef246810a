"""What Model-Optimizer 0.47 exports of every tiny model with NVFP4_DEFAULT on a CPU, as digests."""

import gzip
import hashlib
import json
from pathlib import Path

import torch
from by_hand import tensors
from torch import Tensor, nn

PATH = Path(__file__).parent / "data" / "modelopt_exports.json.gz"


def digest(*parts: Tensor) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(f"{part.dtype} {tuple(part.shape)}".encode())
        found.update(part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:10]


def digests(folder: Path) -> dict[str, str]:
    """Quantized weight, in BF16 terms -> digest of codes, block scales and per-tensor scale."""
    stored, found = tensors(folder), {}
    for name, tensor in stored.items():
        if not name.endswith("weight_scale_2"):
            continue
        base = name.removesuffix("weight_scale_2")
        codes = f"{base}weight" if base.endswith(".") else base.removesuffix("_")
        found[codes] = digest(stored[codes], stored[f"{base}weight_scale"], tensor)
    return found


def model_digest(model: nn.Module) -> str:
    return digest(*model.state_dict().values())


def load() -> dict:
    with gzip.open(PATH) as file:
        return json.load(file)
