"""Where each tensor of a weight sync belongs in a rollout model, by the names of checkpoints and by the model's own.

The same plan as for export and import (``checkpoint_plan``), made for a stand-in of the trainer: the rollout's modules
with their weights on the meta device in place of packed ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import dialects, names
from quads_qat.checkpoint_plan import DiskWeight, Plan, SplitBias, disk_plan, is_transposed_stack, layer_of
from quads_qat.config import Dialect
from quads_qat.conversion import Conversion, Weight
from quads_qat.packed_module import PackedModule
from quads_qat.residual import ResidualCompensatedExperts, ResidualCompensatedLinear
from quads_qat.scale_groups import ScaleGroup
from quads_qat.weight_stream import CACHE_SCALES

_KV_CACHE = tuple(f"{re.escape(suffix)}$" for suffix in CACHE_SCALES)

Layout = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class Target:
    """The part of a parameter or buffer that one tensor in high precision holds; without a part, all of it.

    Attributes:
        parameter: its name in memory.
        shape: of the tensor.
        rows: a slice of rows (``transposed_memory``: of a parameter [.., K, N]).
        bias: a slice of a stack's biases.
        positions: (flat positions in the tensor, in the parameter), for what is merged or permuted on disk.
    """

    parameter: str
    shape: tuple[int, ...]
    rows: names.DiskTensor | None = None
    transposed_memory: bool = False
    bias: SplitBias | None = None
    positions: tuple[Tensor, Tensor] | None = None

    @property
    def elements(self) -> int:
        """How many elements of the parameter the tensor holds."""
        return math.prod(self.shape) if self.positions is None else self.positions[1].numel()

    def write(self, tensor: Tensor, into: Tensor) -> None:
        """Copy ``tensor`` into its place in ``into``, a contiguous tensor like the parameter."""
        if self.positions is not None:
            there, here = (p.to(into.device) for p in self.positions)
            into.view(-1)[here] = tensor.to(into.device).reshape(-1)[there].to(into.dtype)
        elif self.rows is not None:
            place = self.rows.select(into, transposed_memory=self.transposed_memory)
            place.copy_(tensor.mT if self.rows.transposed else tensor)
        elif self.bias is not None:
            self.bias.of_source(into).copy_(tensor)
        else:
            into.view(self.shape).copy_(tensor)


@dataclass(frozen=True)
class PackedTarget:
    """One tensor of a quantized weight as a checkpoint holds it; ``layout`` is None for a scale: one number."""

    disk: DiskWeight
    layout: Layout | None
    input_scale: bool = False


@dataclass
class SyncPlan:
    """All names that a weight sync can bring, and what they fill.

    Attributes:
        required: parameters and buffers that a full sync brings, by their names in memory.
        units: parameter -> the layer that it is applied with. Layers that a scale group spans are one.
        plain: name of a tensor in high precision -> what it fills.
        packed: name of a packed tensor -> its place in each dialect that has it.
        parts: dialect -> quantized parameter -> its parts on disk.
        shapes: parameter -> its shape in memory.
        tied: parameters with several names, under each of which they may come.
        disk_names: parameter -> names of the tensors in high precision that hold it on disk.
        ignored: regular expressions of names that may come and are no weights of this model (MTP layers, say).
    """

    required: list[str]
    units: dict[str, str]
    shapes: dict[str, torch.Size]
    tied: frozenset[str]
    ignored: tuple[str, ...]
    plain: dict[str, list[Target]] = field(default_factory=dict)
    packed: dict[str, dict[Dialect, PackedTarget]] = field(default_factory=dict)
    parts: dict[Dialect, dict[str, list[DiskWeight]]] = field(default_factory=dict)
    disk_names: dict[str, list[str]] = field(default_factory=dict)
    members: dict[str, list[str]] = field(init=False)  #: unit -> its required parameters

    def __post_init__(self) -> None:
        self.members = {}
        for name in self.required:
            self.members.setdefault(self.units[name], []).append(name)


def sync_plan(root: nn.Module, conversion: Conversion) -> SyncPlan:
    """The plan of a rollout model; made once and kept with its record."""
    if conversion.sync_plan is None:
        conversion.sync_plan = _make(trainer_twin(root), conversion)
    return conversion.sync_plan


def trainer_twin(root: nn.Module) -> nn.Module:
    """The modules of a rollout with unpacked weights on the meta device; all other parameters are the rollout's own."""
    twins: dict[int, nn.Module] = {}

    def twin(module: nn.Module) -> nn.Module:
        if id(module) not in twins:
            new = _unpacked(module)
            twins[id(module)] = new
            new.__dict__["_modules"] = {n: m and twin(m) for n, m in module._modules.items()}
        return twins[id(module)]

    return twin(root)


def _unpacked(module: nn.Module) -> nn.Module:
    if isinstance(module, ResidualCompensatedLinear):
        new: Any = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        new.bias = module.bias
        return new
    kind = module.original_class if isinstance(module, ResidualCompensatedExperts) else type(module)
    new = object.__new__(kind)
    new.__dict__.update(module.__dict__)
    if isinstance(module, ResidualCompensatedExperts):
        shapes = {name: module.packed(name).shape for name in module.layout.parameters}
        shapes = {n: (*s[:-2], s[-1], s[-2]) if module.layout.transposed else s for n, s in shapes.items()}
        weights = {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}
        new.__dict__["_parameters"] = {**module._parameters, **weights}
        packed = tuple(f"{name}_" for name in shapes)
        new.__dict__["_buffers"] = {n: b for n, b in module._buffers.items() if not n.startswith(packed)}
    return new


# ----------------------------------------------------------------------------------------------------------------- plan


def _make(twin: nn.Module, conversion: Conversion) -> SyncPlan:
    state = twin.state_dict(keep_vars=True)
    saved = names.state_dict_names(twin)
    first: dict[int, str] = {}
    for name in (*saved, *state):
        first.setdefault(id(state[name]), name)
    required = [name for name in saved if first[id(state[name])] == name]
    plan = SyncPlan(
        required,
        units=_units([*first.values()], conversion),
        shapes={name: state[name].shape for name in first.values()},
        tied=frozenset(first[id(tensor)] for name, tensor in state.items() if first[id(tensor)] != name),
        ignored=(*_KV_CACHE, *(getattr(twin, "_keys_to_ignore_on_load_unexpected", None) or ())),
    )
    groups: dict[str, ScaleGroup] = {}
    for weight in conversion.weights.values():
        member = twin.get_submodule(weight.module), weight.parameter, weight.name
        groups.setdefault(weight.group, ScaleGroup(weight.group)).members.append(member)
    _add_packed(plan, twin, replace(conversion, groups=groups))
    _add_plain(plan, twin, state, conversion.weights)
    for name, targets in plan.plain.items():
        for target in targets:
            if target.bias is None:
                plan.disk_names.setdefault(target.parameter, []).append(name)
    for name, tensor in state.items():  # the model's own names, where they are not those of a part
        plan.plain.setdefault(name, [Target(first[id(tensor)], tuple(tensor.shape))])
    return plan


def _units(parameters: list[str], conversion: Conversion) -> dict[str, str]:
    unit = {layer: layer for layer in map(layer_of, parameters)}
    groups: dict[str, set[str]] = {}
    for weight in conversion.weights.values():
        groups.setdefault(weight.group, set()).add(unit[layer_of(weight.name)])
    for layers in groups.values():
        joined = {unit[layer] for layer in layers}
        if len(joined) > 1:
            unit = {layer: min(joined) if u in joined else u for layer, u in unit.items()}
    return {name: unit[layer_of(name)] for name in parameters}


def _add_packed(plan: SyncPlan, twin: nn.Module, conversion: Conversion) -> None:
    for dialect in Dialect:
        disks = _packable(twin, conversion, dialect)
        parts = plan.parts.setdefault(dialect, {})
        for disk in disks.weights:
            parts.setdefault(disk.weight.name, []).append(disk)
            layouts = _layouts(disk, twin.get_parameter(disk.weight.name), dialect)
            tensor_names = dialects.tensor_names(disk.name, dialect)
            for name in tensor_names.weight:
                target = PackedTarget(disk, None if name == tensor_names.scale else layouts[name])
                plan.packed.setdefault(name, {})[dialect] = target
            plan.packed.setdefault(tensor_names.input_scale, {})[dialect] = PackedTarget(disk, None, input_scale=True)
        for bias in disks.biases:
            stack = twin.get_parameter(bias.parameter)
            target = Target(bias.parameter, tuple(bias.of_source(stack).shape), bias=bias)
            plan.plain[bias.name] = [target]


def _packable(twin: nn.Module, conversion: Conversion, dialect: Dialect) -> Plan:
    """The plan of all weights that a checkpoint can hold packed; the others come in high precision only."""
    try:
        return disk_plan(twin, conversion, dialect)
    except names.DiskLayoutError as error:
        weights = {n: w for n, w in conversion.weights.items() if n not in error.parameters}
        return disk_plan(twin, replace(conversion, weights=weights), dialect)


def _layouts(disk: DiskWeight, parameter: Tensor, dialect: Dialect) -> dict[str, Layout]:
    oriented = parameter.mT if disk.weight.format.transposed else parameter
    part = oriented if disk.expert is None else oriented[disk.expert]
    shape = part.shape if disk.rows is None else part[..., disk.rows, :].shape
    return dialects.layouts(disk.name, shape, dialect, transposed=disk.stored_transposed)


def _add_plain(plan: SyncPlan, twin: nn.Module, state: dict[str, Any], weights: Mapping[str, Weight]) -> None:
    """Tensors in high precision by their names on disk."""
    matrices = {
        n: weights[n].format.transposed if n in weights else is_transposed_stack(twin, n)
        for n in plan.required
        if isinstance(state[n], nn.Parameter) and state[n].ndim in (2, 3)
    }
    try:
        disks = names.disk_tensors(twin, matrices)
    except names.DiskLayoutError as error:
        matrices = {n: transposed for n, transposed in matrices.items() if n not in error.parameters}
        disks = names.disk_tensors(twin, matrices)
    for disk in disks:
        part = disk.select(state[disk.parameter], transposed_memory=matrices[disk.parameter])
        shape = tuple((part.mT if disk.transposed else part).shape)
        plan.plain[disk.name] = [Target(disk.parameter, shape, disk, matrices[disk.parameter])]
    by_element = [n for n in plan.required if n not in matrices and n not in weights]
    try:
        merged = list(names.disk_elements(twin, by_element))
    except ValueError:  # some are merged on disk with quantized ones; all of these have their own names in memory
        merged = names.disk_elements(twin, [n for n in by_element if state[n].ndim < 2])
    for elements in merged:
        plan.plain[elements.name] = [
            _of_elements(elements, name, state[name].numel(), positions) for name, positions in elements.parts.items()
        ]


def _of_elements(elements: names.DiskElements, name: str, numel: int, positions: tuple[Tensor, Tensor]) -> Target:
    there, here = positions
    shape = tuple(elements.shape)
    if there.numel() == here.numel() == numel == math.prod(shape) and torch.equal(there, here):
        return Target(name, shape)  # by far the most: no need to keep positions
    return Target(name, shape, positions=positions)


def module_of(root: nn.Module, weight: Weight) -> PackedModule:
    """The packed module that holds a quantized weight."""
    module = root.get_submodule(weight.module)
    assert isinstance(module, PackedModule)
    return module
