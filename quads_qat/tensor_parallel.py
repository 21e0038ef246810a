"""What tensor parallelism would do to blocks of 16: a check before the run."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatch

from torch import nn

from quads_qat.conversion import STATE, Weight, conversion_of, require_model
from quads_qat.select_weights import select
from quads_qat.sharding import cut_by

_ROWWISE_LEAVES = ("o_proj", "down_proj", "out_proj", "w2", "wo", "dense_4h_to_h")
"""Linears that engines and Megatron cut along their input, where no plan says so."""


def check_tp(model: nn.Module, tp: int, *, plan: Mapping[str, str] | None = None) -> list[str]:
    """Weights whose blocks of 16 tensor parallelism over ``tp`` ranks would cut: one line each, empty if all is well.

    Only a cut along the input dim K (``rowwise``) can do that. Call it before training, for the trainer's tp and for
    the engine's: no engine can load such a checkpoint either.

    Args:
        model: converted or not; shapes and names are read, so the meta device will do.
        tp: ranks that share a layer.
        plan: name of a linear or of a 3-D parameter, with ``*`` for an index, -> style, as in transformers'
            ``base_model_tp_plan``; what it does not name is whole. None: the model's own plan, and where that names
            nothing, what engines do (the output projections of attention and MLP are ``rowwise``).

    Raises:
        ValueError: tp < 1, or nothing to quantize in the model.

    >>> check_tp(nn.ModuleDict({"down_proj": nn.Linear(96, 32)}), 4)
    ['down_proj.weight: K = 96 over 4 ranks is 24 a rank, not a multiple of 16']
    """
    if tp < 1:
        raise ValueError(f"check_tp: tp must be at least 1, got {tp}; pass the number of ranks that share a layer")
    require_model("check_tp", "model", model)
    converted = any(STATE in module.__dict__ for module in model.modules())
    root, conversion = conversion_of(model, "check_tp") if converted else (model, select(model))
    own = getattr(root, "_tp_plan", None) or getattr(root, "tp_plan", None) or {}
    problems = []
    for name, weight in conversion.weights.items():
        if not (_cuts_k(weight, own, default=True) if plan is None else _cuts_k(weight, plan, default=False)):
            continue
        parameter = root.get_parameter(name)
        problem = cut_by(parameter.shape[-2 if weight.format.transposed else -1], tp)
        if problem:
            problems.append(f"{name}: {problem}")
    return problems


def _cuts_k(weight: Weight, plan: Mapping[str, str], *, default: bool) -> bool:
    """Whether ``plan`` cuts a weight along K; ``default``: as engines do if it does not name the weight."""
    of_parameter = weight.module if weight.parameter == "weight" else weight.name
    styles = [style for pattern, style in plan.items() if fnmatch(of_parameter, pattern)]
    if styles:  # of stored dims: rowwise the last, colwise the one before
        return any(("colwise" if weight.format.transposed else "rowwise") in style for style in styles)
    return default and of_parameter.rpartition(".")[2] in _ROWWISE_LEAVES
