"""The way of every weight between memory and disk: which tensor of which name holds which rows of which parameter.

Export, import and verification all walk the same plan, made from a model (on the meta device will do) and the
selection of ``convert``; there is no second set of naming rules.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quads_qat import names
from quads_qat.checkpoint_io import Reader
from quads_qat.config import Dialect
from quads_qat.conversion import Conversion, Weight
from quads_qat.experts_layout import ExpertsLayout, layout_of
from quads_qat.formats import BLOCK_SIZE
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

    def read_source(self, reader: Reader, expert: int | None = None) -> Tensor:
        """This part of the BF16 tensor on disk, blocks along the last dim, cast as the exporter casts masters.

        ``expert``: of a whole stack, that one alone.
        """
        index = self.source_expert if expert is None else expert
        tensor = reader.get(self.source, index)  # not the whole stack for each of its experts
        tensor = tensor.mT if self.source_transposed else tensor
        return cut(tensor, None, self.source_rows).to(self.weight.format.export_dtype)

    def source_shape(self, reader: Reader) -> tuple[int, ...]:
        """[(E,) N, K] of this part on disk: what :meth:`read_source` gives, or a whole stack's."""
        *lead, n, k = reader.shape(self.source)
        if self.source_transposed:
            n, k = k, n
        if self.source_expert is not None:
            lead = lead[1:]
        return *lead, len(range(n)[self.source_rows or slice(None)]), k


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

    @property
    def sources(self) -> set[str]:
        """The BF16 tensors that hold them."""
        return {disk.source for disk in self.weights} | {bias.source for bias in self.biases}


def biases_by_source(plan: Plan) -> dict[str, list[SplitBias]]:
    """Split biases by the tensor that they are parts of."""
    found: dict[str, list[SplitBias]] = {}
    for bias in plan.biases:
        found.setdefault(bias.source, []).append(bias)
    return found


class Assembly:
    """Codes and scales [(E,) N, K] of one parameter, put together from its parts on disk, which come in any order."""

    def __init__(self, weight: Weight, shape: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.weight, self.shape, self.device = weight, tuple(shape), device
        self.q: NVFP4Tensor | None = None

    def add(self, disk: DiskWeight, q: NVFP4Tensor) -> None:
        """One part; a part that is the whole parameter is kept as it is."""
        if disk.expert is None and disk.rows is None:
            self.q = q
            return
        if self.q is None:
            *lead, n, k = self.shape
            qdata = torch.empty(*lead, n, k // 2, dtype=torch.uint8, device=self.device)
            block_scale = torch.empty(*lead, n, k // BLOCK_SIZE, dtype=torch.uint8, device=self.device)
            per_row, stored = (torch.empty(*lead, n, 1, dtype=torch.float32, device=self.device) for _ in range(2))
            self.q = NVFP4Tensor(qdata, block_scale.view(torch.float8_e4m3fn), per_row, q.recipe, stored)
        cut(self.q.qdata, disk.expert, disk.rows).copy_(q.qdata)
        cut(self.q.block_scale.view(torch.uint8), disk.expert, disk.rows).copy_(q.block_scale.view(torch.uint8))
        cut(self.q.per_tensor_scale, disk.expert, disk.rows).copy_(q.per_tensor_scale.expand(q.shape[-2], 1))
        cut(self.q.stored_scale, disk.expert, disk.rows).copy_(q.stored_scale.expand(q.shape[-2], 1))

    def finish(self) -> NVFP4Tensor:
        """The parameter.

        Its per-tensor scale is [] or [E], or one per row, [..., N, 1], where parts of one expert have scales of their
        own (checkpoints whose gate and up were not fused).
        """
        assert self.q is not None
        scale = self.q.per_tensor_scale
        if scale.ndim < len(self.shape):
            return self.q
        index = (0,) * scale.ndim if scale.ndim == 2 else (slice(None), 0, 0)
        if scale.ndim == 3 and not self.weight.format.per_expert and bool((scale == scale[0, 0]).all()):
            index = (0, 0, 0)
        if not bool((scale == (scale[..., :1, :])).all()):
            return self.q
        return replace(self.q, per_tensor_scale=scale[index].clone(), stored_scale=self.q.stored_scale[index].clone())


def is_transposed_stack(model: nn.Module, name: str) -> bool:
    """Whether a parameter is a stack of experts that the model keeps as [E, K, N]."""
    layout = layout_of(model.get_submodule(name.rpartition(".")[0]))
    return layout is not None and layout.transposed and name.rpartition(".")[2] in layout.parameters


def with_stacks_of(reader: Reader, plan: Plan) -> Plan:
    """``plan`` for a BF16 checkpoint that has experts in 3-D tensors where others have a tensor for each."""

    def moved(disk: DiskWeight) -> DiskWeight:
        stack = re.sub(r"(\.experts)\.\d+\..*", rf"\1.{disk.weight.parameter}", disk.source)
        if disk.expert is None or disk.source in reader or stack not in reader:
            return disk
        transposed = disk.weight.format.transposed
        return replace(
            disk, source=stack, source_expert=disk.expert, source_rows=disk.rows, source_transposed=transposed
        )

    return Plan([moved(disk) for disk in plan.weights], plan.biases)


def cut(t: Tensor, expert: int | None, rows: slice | None) -> Tensor:
    """Rows of one expert of [(E,) N, *]: a view."""
    t = t if expert is None else t[expert]
    return t if rows is None else t[..., rows, :]


def source_tensor(parts: list[DiskWeight], shape: Sequence[int], decode: Callable[[DiskWeight], Tensor]) -> Tensor:
    """The BF16 tensor on disk that ``parts`` of one parameter make up.

    Args:
        parts: all of one ``source``.
        shape: [(E,) N, K] of the parameter, blocks along the last dim.
        decode: gives [(E,) N, K] of a part.
    """
    first, value = parts[0], None
    if len(parts) == 1 and first.source_expert is None and first.source_rows is None:
        value = decode(first)
        return value.mT if first.source_transposed else value
    for disk in parts:
        decoded = decode(disk)
        if value is None:
            n, k = decoded.shape
            n = n if disk.source_rows is None else shape[-2]
            stacked = [] if disk.source_expert is None else [1 + max(d.source_expert or 0 for d in parts)]
            value = decoded.new_empty(*stacked, n, k)
        cut(value, disk.source_expert, disk.source_rows).copy_(decoded)
    assert value is not None
    return value.mT if first.source_transposed else value


def layer_of(name: str) -> str:
    """``model.layers.3`` of any name below it; "" outside of layers."""
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match.group() if match else ""


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Sort key by which layer 10 comes after layer 9."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def export_plan(model: nn.Module, conversion: Conversion, dialect: Dialect) -> Plan:
    """:func:`disk_plan` for writing, made once for a model and dialect: it takes a while for many experts.

    Raises:
        ValueError: weights that the checkpoint format of the architecture merges or permutes: names their modules.
    """
    if dialect in conversion.export_plans:
        return conversion.export_plans[dialect]
    try:
        conversion.export_plans[dialect] = plan = disk_plan(model, conversion, dialect)
        return plan
    except names.DiskLayoutError as error:
        modules = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name.rpartition(".")[0]): None for name in error.parameters}
        raise ValueError(
            f"export: {', '.join(modules)}: checkpoints of {type(model).__name__} merge these weights with others or "
            f"permute their rows, which no NVFP4 layout covers; convert with exclude={list(modules)} (--exclude)"
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
            base = f"{_on_disk(weight.module, disk.name)}.{expert}.{projection}"
            cut = None if disk.rows is not None else rows
            plan.weights.append(DiskWeight(weight, f"{base}.weight", disk.name, expert, rows, expert, cut, transposed))
            if layout.bias:
                plan.biases.append(SplitBias(f"{base}.bias", f"{disk.name}_bias", f"{weight.name}_bias", expert, rows))


def _on_disk(module: str, tensor: str) -> str:
    """``module`` with what ``tensor``, on disk, has before its layer: all of a model lies under one prefix there."""
    layer, own = layer_of(tensor), layer_of(module)
    return f"{layer}{module.removeprefix(own)}" if layer and own else module


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
