"""What a rollout holds against what its trainer multiplies by: names, and every tensor bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import names, ops
from quads_qat.checkpoint_plan import export_plan
from quads_qat.compare import cast_note, difference
from quads_qat.config import Dialect
from quads_qat.conversion import Conversion, conversion_of, require_unwrapped
from quads_qat.dialects import carries, tensor_names
from quads_qat.formats import BLOCK_SIZE
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.quantized_weights import amax_of_group, quantize_master
from quads_qat.scale_groups import whole
from quads_qat.sync_plan import module_of
from quads_qat.weight_stream import (
    DEQUANTIZED,
    ActivationScales,
    by_layer,
    export_metadata,
    export_weights,
    own_scales,
    rest_in_memory,
)

_SIDES = "in the rollout", "from the trainer"
_PARTS = ("qdata", "block_scale", "per_tensor_scale")
_SCALES = ("weight_scale", "weight_scale_2", "weight_global_scale")


@dataclass
class Comparison:
    """What was found.

    Attributes:
        names: how many both sides have.
        missing: names that only the trainer has.
        unexpected: names that only the rollout has.
        quantized_here: weights that only the trainer quantizes: it has another scope, include or exclude.
        quantized_there: weights that only the rollout quantizes.
        equal: how many tensors have the same bits.
        same_values: how many weights have other codes for the same values: 0.0 for -0.0, as of decoded weights that
            were quantized again.
        different: name -> how it differs.
        uncast: those of them that are equal without the cast that an export makes: fp32 masters.
        own_scales: those of them that are the trainer's masters quantized with the scales of the moment, where the
            trainer holds others (``Schedule``: frozen, ema).
        note: what "equal" leaves open: the cast of fp32 masters that are not quantized; "" without one.
        taken: what an engine took, if it is of no dialect; else "".
    """

    names: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    quantized_here: list[str] = field(default_factory=list)
    quantized_there: list[str] = field(default_factory=list)
    equal: int = 0
    same_values: int = 0
    different: dict[str, str] = field(default_factory=dict)
    uncast: list[str] = field(default_factory=list)
    own_scales: list[str] = field(default_factory=list)
    note: str = ""
    taken: str = ""

    def add(self, name: str, how: str | None) -> None:
        """One tensor that both sides have; ``how`` it differs."""
        if how is None:
            self.equal += 1
        else:
            self.different[name] = how


def compare_rollout(trainer: nn.Module, rollout: nn.Module) -> Comparison:
    """Every weight of a trainer against the rollout module's own, in the names of the model."""
    root, conversion = conversion_of(trainer, "check_first_step")
    require_unwrapped(root, "check_first_step")
    other, theirs = conversion_of(rollout, "check_first_step")
    live, rest = other.state_dict(keep_vars=True), rest_in_memory(root, conversion)
    packed = {f"{name}_{part}" for name in theirs.weights for part in (*_PARTS, "stored_scale")}
    beside = ("input_amax", "residual_mask")  # of activations, not of weights
    here = {*conversion.weights, *rest}
    there = {*theirs.weights, *(n for n in live if n not in packed and not n.endswith(beside))}
    there -= root.state_dict().keys() - here  # further names of tied weights
    found = Comparison(len(here & there), sorted(here - there), sorted(there - here), note=cast_note(root, rest))
    amaxes: dict[str, tuple[Tensor, Tensor | None]] = {}
    for name, weight in conversion.weights.items():
        if weight.group not in amaxes:  # on all ranks, whatever the rollout has: sharded weights are gathered
            holds = conversion.groups[weight.group].held is not None
            own = amax_of_group(conversion, weight, held=False) if holds else None
            amaxes[weight.group] = amax_of_group(conversion, weight), own
        amax, own = amaxes[weight.group]
        master = whole(root.get_parameter(name).detach())
        if name in theirs.weights:
            q = quantize_master(weight, master, amax)
            how = _packed_difference(other, theirs, name, q)
            if how is not None and _was_decoded(other, theirs, name, q):
                found.same_values += 1
                continue
            found.add(name, how)
            if how is None or own is None:
                continue
            if _packed_difference(other, theirs, name, quantize_master(weight, master, own)) is None:
                found.own_scales.append(name)
        elif name in there:
            found.quantized_here.append(name)
    for name, (tensor, dtype) in rest.items():
        value = whole(tensor.detach()).to(dtype)
        if name in theirs.weights:
            found.quantized_there.append(name)
        elif name in there:
            held = live[name].detach()
            how = difference(held, value.to(held.dtype), _SIDES)
            found.add(name, how)
            if how is not None and difference(held, whole(tensor.detach()), _SIDES) is None:
                found.uncast.append(name)
    return found


def _packed_difference(rollout: nn.Module, conversion: Conversion, name: str, q: NVFP4Tensor) -> str | None:
    weight = conversion.weights[name]
    module = module_of(rollout, weight)
    held = module.packed(weight.parameter)
    try:
        fitted = module.fit_packed(weight.parameter, q)
    except ValueError as error:
        return str(error)
    for part in _PARTS:
        if how := difference(getattr(held, part).to(q.device), getattr(fitted, part), _SIDES):
            return f"{part}: {how}"
    return None


def _was_decoded(rollout: nn.Module, conversion: Conversion, name: str, q: NVFP4Tensor) -> bool:
    """Whether the rollout has the values of ``q``, and no -0.0: zeros that are quantized again lose their sign."""
    weight = conversion.weights[name]
    held = module_of(rollout, weight).packed(weight.parameter)
    negative_zero = ((held.qdata & 0x0F) == 0x08) | ((held.qdata >> 4) == 0x08)
    if held.shape != q.shape or bool(negative_zero.any()):
        return False
    return torch.equal(ops.dequantize(held, torch.float32).to(q.device), ops.dequantize(q, torch.float32))


# ------------------------------------------------------------------------------------------------- an engine elsewhere


def weight_digests(named_tensors: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> SHA-256 of dtype, shape and bytes: small enough to send from the engine's process to the trainer's.

    >>> digests = weight_digests({"w": torch.zeros(2)})
    >>> digests == weight_digests({"w": torch.zeros(2)}), digests == weight_digests({"w": -torch.zeros(2)})
    (True, False)
    """
    items: Any = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    return {name: _digest(tensor) for name, tensor in items}


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{data.dtype} {list(data.shape)}".encode())
    digest.update(data.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def compare_received(
    trainer: nn.Module,
    received: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor | str],
    activations: ActivationScales = "none",
) -> Comparison:
    """A fresh export of the trainer against the tensors, or digests, that an engine took.

    Raises:
        ValueError: not one name belongs to either dialect.
    """
    taken = dict(received)
    root, conversion = conversion_of(trainer, "check_first_step")
    require_unwrapped(root, "check_first_step")
    if not any(name.endswith(_SCALES) for name in taken):
        quantized = {disk.source for disk in export_plan(root, conversion, Dialect.MODELOPT).weights}
        if quantized & taken.keys():
            return _compare_decoded(trainer, quantized, taken)
    dialect, own = _dialect_of(trainer, conversion, taken, activations)
    scales = {*own_scales(export_plan(root, conversion, dialect), dialect)} - own  # an engine's own, if it has any
    found = Comparison(len(own & taken.keys()), sorted(own - taken.keys()), sorted(taken.keys() - own - scales))
    found.note = cast_note(root, rest_in_memory(root, conversion))
    for name, tensor in export_weights(trainer, dialect, activations=activations):
        if name in taken:
            found.add(name, _received_difference(taken[name], tensor))
    _sort_out_scopes(found, dialect)
    return found


def _received_difference(there: Tensor | str, here: Tensor) -> str | None:
    if isinstance(there, str):
        return None if there == _digest(here) else "its digest differs"
    return difference(there, here, _SIDES)


def _compare_decoded(trainer: nn.Module, quantized: set[str], taken: Mapping[str, Tensor | str]) -> Comparison:
    """Against the stream of dequantized weights; what nobody quantized is sorted out, whatever its step."""
    own = {name for name, _, _ in export_metadata(trainer, DEQUANTIZED)}
    found = Comparison(len(own & taken.keys()), sorted(own - taken.keys()), sorted(taken.keys() - own))
    for name, tensor in export_weights(trainer, DEQUANTIZED):
        if name in taken:
            found.add(name, _received_difference(taken[name], tensor))
    root, conversion = conversion_of(trainer, "check_first_step")
    came = sorted(quantized & taken.keys())
    differ = [name for name in came if name in found.different]
    masters: dict[str, str] = {}
    if any(isinstance(taken[name], str) for name in differ):
        masters = weight_digests(_masters(root, conversion))
    for name in differ:
        there = taken[name]
        if there == masters.get(name) if isinstance(there, str) else not _may_be_decoded(there):
            found.quantized_here.append(name)
            del found.different[name]
    if all(name in found.different and isinstance(taken[name], str) for name in came):
        found.taken = (
            "; the engine took weights in high precision, whose digests do not tell whether they were quantized"
        )
    elif len(found.quantized_here) < len(came):
        found.taken = "; the engine took dequantized weights"
    found.note = cast_note(root, rest_in_memory(root, conversion))
    return found


def _masters(root: nn.Module, conversion: Conversion) -> Iterator[tuple[str, Tensor]]:
    """(name on disk, master weight) of everything that is quantized, cast as before it is, layer by layer."""
    for layer in by_layer(conversion.weights).values():
        dtypes = {name: conversion.weights[name].format.export_dtype for name in layer}
        masters = {name: whole(root.get_parameter(name).detach()).to(dtype) for name, dtype in dtypes.items()}
        yield from names.disk_state(root, masters).items()


def _may_be_decoded(tensor: Tensor) -> bool:
    """Whether each block of 16, along one of the last two dims, has no more magnitudes than FP4: 8, zero included."""
    for blocks_along in (tensor, tensor.mT) if tensor.ndim > 1 else ():
        if blocks_along.shape[-1] % BLOCK_SIZE == 0:
            magnitudes = blocks_along.abs().unflatten(-1, (-1, BLOCK_SIZE)).sort(-1).values
            if not bool(((magnitudes.diff(dim=-1) != 0).sum(-1) > 7).any()):
                return True
    return False


def _sort_out_scopes(found: Comparison, dialect: Dialect) -> None:
    """Weights that are packed on one side only: their scales are missing on the other, as is or differs the weight."""
    endings = {".weight_scale": ".weight"} | (
        {"_weight_scale": ""} if dialect is Dialect.MODELOPT else {}
    )  # 3-D stacks
    for packed, plain, into in (
        (found.missing, found.unexpected, found.quantized_here),
        (found.unexpected, found.missing, found.quantized_there),
    ):
        for name in [n.removesuffix(end) + own for n in packed for end, own in endings.items() if n.endswith(end)]:
            parts = {*tensor_names(name, dialect).weight} - {name}
            if parts <= {*packed} and (name in found.different or name in plain):
                into.append(name)
                found.different.pop(name, None)
                packed[:] = [n for n in packed if n not in parts]
                plain[:] = [n for n in plain if n != name]


def _dialect_of(
    trainer: nn.Module, conversion: Conversion, taken: Mapping[str, object], activations: ActivationScales
) -> tuple[Dialect, set[str]]:
    """The dialect that shares most names with what was taken, and all names of an export in it."""
    candidates = {
        dialect: {name for name, _, _ in export_metadata(trainer, dialect, activations=activations)}
        for dialect in Dialect
        if carries(dialect, conversion.recipe)
    }
    common = {dialect: len(own & taken.keys()) for dialect, own in candidates.items()}
    best = max(common, key=lambda dialect: common[dialect], default=None)
    if best is None or not common[best]:
        raise ValueError(
            f"check_first_step: none of the {len(taken)} received names is one that export_weights gives, the first is "
            f"{next(iter(taken), 'none')!r}; record the names where the engine's load_weights takes them, before it "
            "maps them to its own"
        )
    return best, candidates[best]
