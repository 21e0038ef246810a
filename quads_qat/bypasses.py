"""What a model must not be when it is converted: wrapped already, or with code that goes around forwards of linears."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import nn

from quads_qat.conversion import Conversion
from quads_qat.experts_layout import layout_of

_WRAPPED = {
    "_orig_mod": "torch.compile",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_fsdp_wrapped_module": "FSDP1",
}
"""What PyTorch's wrappers call the module inside, and what they are."""


def refuse_wrappers(model: nn.Module) -> None:
    """Raise ValueError if the model, or a module in it, was wrapped before: names, and with them scale groups, change.

    Of FSDP2 only where it shards a linear or a stack of experts by itself, which gives it a class of another name.
    """
    for name, module in model.named_modules():
        inside = next((inside for inside in _WRAPPED if inside in module._modules), None)
        by = _WRAPPED.get(inside or "")
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            by, inside = type(module).__name__, "module"
        if by is not None:
            raise ValueError(
                f"convert: {name or 'the model'} is wrapped by {by}, whose names ({inside}.) scale groups and exports "
                "would take for the model's; convert first, then wrap"
            )
        alone = isinstance(module, nn.Linear) or layout_of(module) is not None
        if alone and any(base.__name__ == "FSDPModule" for base in type(module).__mro__):
            raise ValueError(
                f"convert: {name or 'the model'} was sharded by FSDP2 already, as a {type(module).__name__}; convert "
                "first, then call fully_shard"
            )


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
