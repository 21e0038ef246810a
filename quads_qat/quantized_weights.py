"""Codes and scales of a converted model's parameters: what its forward multiplies by.

Rollouts, exports, weight syncs and ``verify`` all take them from here, so that they are the same bits.
"""

from __future__ import annotations

from torch import Tensor, nn

from quads_qat import checks, ops, sharding
from quads_qat.autograd import group_amax
from quads_qat.conversion import Conversion, Weight
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.scale_groups import whole


def amax_of_group(conversion: Conversion, weight: Weight, *, held: bool = True) -> Tensor:
    """What a parameter's scales are made from: [E] or []. Of sharded members all ranks must call this.

    ``held=False``: the amax of the weights as they are, whatever ``step`` holds.
    """
    group = conversion.groups[weight.group]
    if held and group.held is not None:
        return group.held.to(group.weights()[0].device).to(weight.format.export_dtype)
    weights = group.weights()
    return sharding.gather_first_dim(group_amax(weights, weight.format), weights[0])


def quantize_weight(
    model: nn.Module, conversion: Conversion, weight: Weight, amax: Tensor | None = None
) -> NVFP4Tensor:
    """Codes and scales of one converted parameter, blocks along the last dim ([E, N, K] also for transposed stacks).

    Exactly what the module's forward multiplies by; export and rollout both come from here. ``amax``: of its scale
    group, if it is known already.
    """
    amax = amax_of_group(conversion, weight) if amax is None else amax
    return quantize_master(weight, whole(model.get_parameter(weight.name).detach()), amax)


def quantize_master(weight: Weight, master: Tensor, amax: Tensor) -> NVFP4Tensor:
    """Codes and scales of the whole ``master`` of one parameter, whose scale group has this amax."""
    fmt = weight.format
    master = master.to(fmt.export_dtype)
    master = master.transpose(-1, -2) if fmt.transposed else master
    checks.require_finite(weight.name, master, "the weight", checks.OF_A_WEIGHT)
    try:
        return ops.quantize(master, tensor_amax=amax, recipe=fmt.recipe, check_finite=False)
    except ValueError as error:
        raise ValueError(f"{weight.name}: {error}") from error
