"""An NVFP4 checkpoint of either dialect, opened: what it holds, under which names, and its weights one by one."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import checkpoint_io, dialects, names
from quads_qat.checkpoint_plan import Assembly, DiskWeight, Plan, SplitBias, cut, disk_plan
from quads_qat.config import Dialect, Recipe, Scope
from quads_qat.contract import KEY, Contract
from quads_qat.conversion import Conversion
from quads_qat.experts_layout import layout_of
from quads_qat.formats import BLOCK_SIZE
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.select_weights import cast_of, select
from quads_qat.selection import in_scope


@dataclass
class Checkpoint:
    """An opened NVFP4 checkpoint.

    Attributes:
        reader: its tensors.
        dialect: how they are named.
        weights_only: a W4A16 checkpoint.
        recipe: how codes decode; from the ``quads_qat`` entry of config.json, else the dialect's usual writer.
        contract: the ``quads_qat`` entry of config.json; None if others wrote it.
        renamed: weight of the model -> its name here, where the writer had names of its own.
    """

    reader: checkpoint_io.Reader
    dialect: Dialect
    weights_only: bool
    recipe: Recipe
    contract: Contract | None = None
    renamed: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open a directory.

        Raises:
            ValueError: no NVFP4 checkpoint, a contract that cannot be read or contradicts the rest of config.json, or
                shards are missing or damaged.
        """
        reader = checkpoint_io.Reader(path)
        dialect, weights_only = dialects.parse_config(_with_legacy_config(reader), str(path))
        _require_own_names(reader, dialect)
        if KEY not in reader.config:
            return cls(reader, dialect, weights_only, dialects.FOREIGN_RECIPES[dialect][0])
        contract = Contract.from_json(reader.config[KEY], str(path))
        if not dialects.carries(dialect, contract.recipe):
            raise ValueError(
                f"{path}: recipe '{contract.recipe}' does not go with the {dialect} dialect; config.json was changed"
            )
        return cls(reader, dialect, weights_only, contract.recipe, contract)

    @property
    def foreign(self) -> bool:
        """Others wrote it: its recipe is known up to what decodes alike."""
        return self.contract is None

    @property
    def export_dtype(self) -> torch.dtype:
        """What weights were cast to before they were quantized; if nothing records it, config.json's or the files'."""
        if self.contract is not None and self.contract.export_dtype is not None:
            return self.contract.export_dtype
        config = self.reader.config
        return cast_of(config.get("dtype") or config.get("torch_dtype") or self.reader.dtype())

    def quantized(self) -> list[str]:
        """BF16 names (``x.weight`` or a 3-D ``x.gate_up_proj``) of all quantized weights, by the tensor names alone."""
        found = (re.fullmatch(r"(.*)([._])weight_(scale|scale_2|global_scale|packed)", n) for n in self.reader.names())
        return list(dict.fromkeys(m[1] + (".weight" if m[2] == "." else "") for m in found if m))

    def quantized_as(self, expected: Collection[str]) -> set[str]:
        """:meth:`quantized` in the names that the model ``expected``; fills ``renamed``."""
        on_disk = set(self.quantized())
        self.renamed = {_of_mixtral(n): n for n in on_disk.difference(expected) if _of_mixtral(n) in expected}
        return on_disk - set(self.renamed.values()) | self.renamed.keys()

    def read(self, name: str, *, transposed: bool | None = None) -> NVFP4Tensor:
        """One quantized weight by its BF16 name, blocks along the last dim.

        Raises:
            ValueError: a missing tensor or a scale that is missing, NaN, zero or negative.
        """
        tensors = {n: self.reader.get(n) for n in self.tensor_names(name).weight if n in self.reader}
        stack = not name.endswith(".weight") if transposed is None else transposed
        here = self.renamed.get(name, name)
        q = dialects.read(here, tensors, self.dialect, self.recipe, transposed=stack)
        if self.recipe is Recipe.ALIGNED and math.frexp(q.per_tensor_scale.item())[0] != 0.5:
            raise ValueError(
                f"{self.tensor_names(name).scale} must be a power of two, as the recipe 'aligned' in config.json makes "
                f"it, got {tensors[self.tensor_names(name).scale].item()}; the tensor or config.json was changed"
            )
        return q

    def tensor_names(self, name: str) -> dialects.TensorNames:
        """What the tensors of a quantized weight are called here."""
        return dialects.tensor_names(self.renamed.get(name, name), self.dialect)

    def input_amax(self, name: str) -> Tensor | None:
        """The amax that the weight's activation scale stands for, [] float32; None if there is no such scale."""
        scale_name = self.tensor_names(name).input_scale
        if scale_name not in self.reader:
            return None
        return dialects.amax_of_input_scale(scale_name, self.reader.get(scale_name), self.dialect)

    def plan(self, model: nn.Module) -> tuple[Conversion, Plan]:
        """Which parameters of ``model`` (a skeleton) are quantized in this checkpoint, and where they are.

        Raises:
            ValueError: nothing is, some parts of a parameter are and others not, or a quantized tensor has no place.
        """
        candidates = [name for name, module in model.named_modules() if _can_be_packed(module)]
        try:
            every = disk_plan(model, select(model, recipe=self.recipe, only=candidates), self.dialect)
        except names.DiskLayoutError as error:  # merged on disk: those cannot be quantized there
            merged = {parameter.rpartition(".")[0] for parameter in error.parameters}
            candidates = [name for name in candidates if name not in merged]
            every = disk_plan(model, select(model, recipe=self.recipe, only=candidates), self.dialect)
        expected = {disk.name for disk in every.weights}
        on_disk = self.quantized_as(expected)
        self._require_placed(model, on_disk - expected)
        present: dict[str, list[bool]] = {}
        for disk in every.weights:
            present.setdefault(disk.weight.module, []).append(disk.name in on_disk)
        for module, found in present.items():
            if any(found) and not all(found):
                raise ValueError(
                    f"{self.reader.path}: {module} is quantized only in part ({sum(found)} of {len(found)} tensors)"
                )
        rules = () if self.contract is None else self.contract.rules
        quantized = [m for m, found in present.items() if all(found)]
        dtype = self.export_dtype
        conversion = select(model, recipe=self.recipe, only=quantized, groups=rules, export_dtype=dtype)
        if self.contract is not None:
            conversion.scope = self.contract.scope
        else:  # others do not say what was asked for; the narrowest that it can have been
            conversion.scope = next(s for s in reversed(Scope) if all(in_scope(name, s) for name in quantized))
        return conversion, disk_plan(model, conversion, self.dialect)

    def _require_placed(self, model: nn.Module, unplaced: set[str]) -> None:
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()  # MTP layers, say
        lost = [name for name in sorted(unplaced) if not any(re.search(pattern, name) for pattern in ignored)]
        if lost:
            raise ValueError(
                f"{self.reader.path}: {lost[0]} is quantized, but {type(model).__name__} has no such weight"
            )


def _require_own_names(reader: checkpoint_io.Reader, dialect: Dialect) -> None:
    """The tensors are named as config.json claims."""
    of_others = {Dialect.MODELOPT: r"\.weight_packed$", Dialect.COMPRESSED_TENSORS: r"[._]weight_scale_2$"}[dialect]
    found = next((name for name in reader.names() if re.search(of_others, name)), None)
    if found is not None:
        other = next(d for d in Dialect if d is not dialect)
        raise ValueError(
            f"{reader.path}: config.json says {dialect}, but {found} is a name of the {other} dialect; one of the two "
            "is of another checkpoint"
        )


def _with_legacy_config(reader: checkpoint_io.Reader) -> dict[str, Any]:
    """config.json; where it says nothing of quantization, early Model-Optimizer exports do in hf_quant_config.json."""
    legacy = reader.path / "hf_quant_config.json"
    if reader.config.get("quantization_config") is not None or not legacy.exists():
        return reader.config
    return reader.config | {"quantization_config": {"quant_method": "modelopt", **checkpoint_io.read_json(legacy)}}


def _of_mixtral(name: str) -> str:
    """llm-compressor calls the experts' w1, w3, w2 by other names."""
    names_ = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return re.sub(r"(?<=\.)(gate|up|down)_proj(?=\.weight$)", lambda found: names_[found[0]], name)


def _can_be_packed(module: nn.Module) -> bool:
    if type(module) is nn.Linear:
        return module.in_features % BLOCK_SIZE == 0
    layout = layout_of(module)
    if layout is None:
        return False
    k = -2 if layout.transposed else -1
    return all(module._parameters[p].shape[k] % BLOCK_SIZE == 0 for p in layout.parameters)  # pyright: ignore[reportOptionalMemberAccess]


# ------------------------------------------------------------------------------------------------------- its weights


def read_part(checkpoint: Checkpoint, parameter: Tensor, disk: DiskWeight) -> NVFP4Tensor:
    """One quantized weight, if it has the shape of its place in ``parameter`` (on meta will do)."""
    try:
        q = checkpoint.read(disk.name, transposed=disk.stored_transposed)
    except ValueError as error:
        path = str(checkpoint.reader.path)
        raise error if path in str(error) else ValueError(f"{path}: {error}") from None
    expected = cut(parameter.mT if disk.weight.format.transposed else parameter, disk.expert, disk.rows).shape
    if q.shape != expected:
        raise ValueError(
            f"{checkpoint.reader.path}: {disk.name} must decode to shape {list(expected)}, got {list(q.shape)}"
        )
    return q


def read_parameter(checkpoint: Checkpoint, parameter: Tensor, disks: list[DiskWeight]) -> NVFP4Tensor:
    """All of a parameter's codes and scales, [(E,) N, K], from its parts on disk."""
    weight = disks[0].weight
    assembly = Assembly(weight, (parameter.mT if weight.format.transposed else parameter).shape)
    for disk in disks:
        assembly.add(disk, read_part(checkpoint, parameter, disk))
    return assembly.finish()


def read_bias(checkpoint: Checkpoint, model: nn.Module, biases: list[SplitBias]) -> Tensor:
    """The 2-D bias [E, N] of a stack, from its experts' biases."""
    shape, dtype = model.get_parameter(biases[0].parameter).shape, checkpoint.reader.entry(biases[0].name).dtype
    value = torch.empty(shape, dtype=dtype, device="cpu")
    for bias in biases:
        part, place = checkpoint.reader.get(bias.name), bias.of_source(value)
        if place.shape != part.shape:
            raise ValueError(
                f"{checkpoint.reader.path}: {bias.name} must have shape {list(place.shape)}, got {list(part.shape)}"
            )
        if part.dtype != dtype:
            raise ValueError(
                f"{checkpoint.reader.path}: {bias.name} must be {dtype} as {biases[0].name} is, got {part.dtype}"
            )
        place.copy_(part)
    return value


def by_parameter(plan: Plan) -> dict[str, list[DiskWeight]]:
    """Parts by the parameter in memory that they belong to."""
    parameters: dict[str, list[DiskWeight]] = {}
    for disk in plan.weights:
        parameters.setdefault(disk.weight.name, []).append(disk)
    return parameters


def shared_input_amax(checkpoint: Checkpoint, disks: list[DiskWeight], *, required: bool) -> Tensor | None:
    """The largest of the parts' activation amaxes: what engines use for fused weights."""
    amaxes = [checkpoint.input_amax(disk.name) for disk in disks]
    present = [a for a in amaxes if a is not None]
    if required and len(present) < len(amaxes):
        name = checkpoint.tensor_names(disks[amaxes.index(None)].name).input_scale
        raise ValueError(
            f"{checkpoint.reader.path}: {name} is missing, and activation_scale='static' needs it; use "
            "activation_scale='per_token', or export with activations='observed'"
        )
    return torch.stack(present).amax() if present else None
