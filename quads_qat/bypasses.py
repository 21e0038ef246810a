"""Code that multiplies by the weights of linears past their forwards, where quantization does not reach."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import nn

from quads_qat.conversion import Conversion


def refuse_bypasses(model: nn.Module, conversion: Conversion, *, trainer: bool) -> None:
    """Raise ValueError if a module around a selected linear may read its weight in the place of calling it."""
    for module in dict.fromkeys(weight.module for weight in conversion.weights.values()):
        parent, _, leaf = module.rpartition(".")
        reader = _reader(model.get_submodule(parent), leaf, trainer=trainer)
        if module and reader is not None:
            raise ValueError(f"convert: {module} belongs to {reader}pass exclude=['*.{leaf}']")


def _reader(parent: nn.Module, leaf: str, *, trainer: bool) -> str | None:
    """Who reads the weight of ``parent.leaf`` past the module, and what would keep it from that."""
    mamba = hasattr(parent, "conv1d") and "mamba" in type(parent).__name__.lower()
    if trainer and mamba and find_spec("mamba_ssm") is not None:  # its kernels take the weights as arguments
        return (
            "a Mamba mixer, whose fused training kernel (mamba_ssm is installed) reads the master weight past the "
            "module; "
        )
    if isinstance(parent, nn.TransformerEncoderLayer) and leaf in ("linear1", "linear2"):
        same = type(parent).forward is nn.TransformerEncoderLayer.forward
        if same and parent.self_attn.batch_first and torch.backends.mha.get_fastpath_enabled():
            return (
                f"a {type(parent).__name__}, whose fast path (in eval mode, without gradients) reads the weight past "
                "the module; call torch.backends.mha.set_fastpath_enabled(False) first, and leave it so, or "
            )
    in_pieces = getattr(parent, "slow_but_exact", False) and getattr(parent, "pretraining_tp", 1) > 1
    if in_pieces and leaf in ("dense", "dense_4h_to_h"):  # bloom
        return (
            f"a {type(parent).__name__}, which with slow_but_exact and pretraining_tp > 1 reads pieces of the weight "
            "past the module; build the model with slow_but_exact=False, or "
        )
    return None
