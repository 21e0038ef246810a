"""The way of every weight between memory and disk: which tensor of which name holds which rows of which parameter.

Export, import and verification all walk the same plan, made from a model (on the meta device will do) and the
selection of ``convert``; there is no second set of naming rules.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quads_qat import names
from quads_qat.checkpoint_io import Reader
from quads_qat.config import Dialect
from quads_qat.conversion import Conversion, Weight
from quads_qat.experts import ExpertsLayout, layout_of
from quads_qat.qtensor import NVFP4Tensor


@dataclass(frozen=True)
class DiskWeight:
    """One quantized weight on disk.

    Attributes:
        weight: the parameter in memory that it is a part of.
        name: what it is called, in BF16 terms: ``x.weight``, or a 3-D ``x.gate_up_proj``.
        source: the BF16 tensor that holds it on disk; other than ``name`` where a 3-D tensor is split into experts.
        expert, rows: the part of the parameter (blocks along its last dim); None is all.
        source_expert, source_rows: the part of ``source``.
        source_transposed: ``source`` has its last two dims as [K, N].
        whole_stack: it stays one 3-D tensor for all experts.
    """

    weight: Weight
    name: str
    source: str
    expert: int | None
    rows: slice | None
    source_expert: int | None = None
    source_rows: slice | None = None
    source_transposed: bool = False
    whole_stack: bool = False

    @property
    def stored_transposed(self) -> bool:
        """Codes and scales are [E, K, N] on disk too."""
        return self.whole_stack and self.source_transposed

    @property
    def scale_key(self) -> tuple[str, int | None]:
        """Disk weights with equal keys share one per-tensor scale."""
        return self.weight.group, self.expert if self.weight.format.per_expert else None

    def of_parameter(self, q: NVFP4Tensor) -> NVFP4Tensor:
        """This part of the quantized parameter [N, K] or [E, N, K]."""

        def scale(t: Tensor) -> Tensor:
            return t if t.ndim == 0 or self.expert is None else t[self.expert]

        qdata, block_scale = (cut(t, self.expert, self.rows) for t in (q.qdata, q.block_scale))
        return NVFP4Tensor(qdata, block_scale, scale(q.per_tensor_scale), q.recipe, scale(q.stored_scale))

    def read_source(self, reader: Reader) -> Tensor:
        """This part of the BF16 tensor on disk, blocks along the last dim, cast as the exporter casts masters."""
        tensor = reader.get(self.source, self.source_expert)  # not the whole stack for each of its experts
        tensor = tensor.mT if self.source_transposed else tensor
        return cut(tensor, None, self.source_rows).to(self.weight.format.export_dtype)


@dataclass(frozen=True)
class SplitBias:
    """One expert's bias, cut from the 2-D bias of a stack whose weights are split."""

    name: str
    source: str
    parameter: str
    expert: int
    rows: slice | None

    def of_source(self, tensor: Tensor) -> Tensor:
        """[N] of one expert and projection."""
        return tensor[self.expert] if self.rows is None else tensor[self.expert][self.rows]


@dataclass(frozen=True)
class Plan:
    """Every quantized weight on disk, and the biases that are split with them."""

    weights: list[DiskWeight]
    biases: list[SplitBias]


def cut(t: Tensor, expert: int | None, rows: slice | None) -> Tensor:
    """Rows of one expert of [(E,) N, *]: a view."""
    t = t if expert is None else t[expert]
    return t if rows is None else t[..., rows, :]


def layer_of(name: str) -> str:
    """``model.layers.3`` of any name below it; "" outside of layers."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match.group() if match else ""


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Sort key by which layer 10 comes after layer 9."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def export_plan(model: nn.Module, conversion: Conversion, dialect: Dialect) -> Plan:
    """:func:`disk_plan` for writing.

    Raises:
        ValueError: weights that the checkpoint format of the architecture merges or permutes: names their modules.
    """
    try:
        return disk_plan(model, conversion, dialect)
    except names.DiskLayoutError as error:
        modules = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name.rpartition(".")[0]): None for name in error.parameters}
        raise ValueError(
            f"export: {', '.join(modules)}: checkpoints of {type(model).__name__} merge these weights with others or "
            f"permute their rows, which no NVFP4 layout covers; convert with exclude={list(modules)}"
        ) from error


def disk_plan(model: nn.Module, conversion: Conversion, dialect: Dialect) -> Plan:
    """Plan the disk weights of a selection, in the order of the model's parameters.

    Raises:
        DiskLayoutError: (a ValueError) weights that are no slices of rows on disk.
    """
    weights = conversion.weights
    found = names.disk_tensors(model, {name: weight.format.transposed for name, weight in weights.items()})
    plan = Plan([], [])
    for disk in found:
        weight = weights[disk.parameter]
        module = model.get_submodule(weight.module)
        transposed = weight.format.transposed != disk.transposed
        stack = disk.expert is None and conversion_ndim(conversion, disk.parameter) == 3
        if not stack:
            name = disk.name if disk.name.endswith(".weight") else f"{disk.name}.weight"
            plan.weights.append(
                DiskWeight(weight, name, disk.name, disk.expert, disk.rows, source_transposed=transposed)
            )
        elif not weight.format.per_expert and dialect is Dialect.MODELOPT:
            plan.weights.append(
                DiskWeight(
                    weight, disk.name, disk.name, None, disk.rows, source_transposed=transposed, whole_stack=True
                )
            )
        else:
            _split_stack(plan, weight, disk, _layout(module), conversion_shape(conversion, disk.parameter), transposed)
    return plan


def _layout(module: nn.Module) -> ExpertsLayout:
    layout = module.__dict__.get("layout") or layout_of(module)
    assert layout is not None
    return layout


def _split_stack(
    plan: Plan, weight: Weight, disk: names.DiskTensor, layout: ExpertsLayout, shape: torch.Size, transposed: bool
) -> None:
    """A 3-D tensor on disk becomes ``<module>.<expert>.<projection>.weight``, gate and up apart."""
    experts, n = shape[0], shape[-1 if weight.format.transposed else -2]
    for expert in range(experts):
        for projection, rows in _projections(weight.parameter, layout, n):
            if disk.rows is not None and rows != disk.rows:
                continue  # on disk gate and up are two tensors; this is the other one
            base = f"{weight.module}.{expert}.{projection}"
            cut = None if disk.rows is not None else rows
            plan.weights.append(DiskWeight(weight, f"{base}.weight", disk.name, expert, rows, expert, cut, transposed))
            if layout.bias:
                plan.biases.append(SplitBias(f"{base}.bias", f"{disk.name}_bias", f"{weight.name}_bias", expert, rows))


def _projections(parameter: str, layout: ExpertsLayout, n: int) -> list[tuple[str, slice | None]]:
    if parameter != "gate_up_proj":
        return [(parameter, None)]
    if layout.interleaved:
        return [("gate_proj", slice(0, n, 2)), ("up_proj", slice(1, n, 2))]
    return [("gate_proj", slice(0, n // 2)), ("up_proj", slice(n // 2, n))]


def conversion_shape(conversion: Conversion, parameter: str) -> torch.Size:
    """Shape of a selected parameter in memory."""
    for module, leaf, full in conversion.groups[conversion.weights[parameter].group].members:
        if full == parameter:
            tensor = module._parameters[leaf]
            assert tensor is not None
            return tensor.shape
    raise KeyError(parameter)


def conversion_ndim(conversion: Conversion, parameter: str) -> int:
    """Rank of a selected parameter in memory."""
    return len(conversion_shape(conversion, parameter))
