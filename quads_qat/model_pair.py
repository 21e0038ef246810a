"""A trainer and a rollout of one architecture, and in what they differ."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from quads_qat import sharding
from quads_qat.compare import dtype_name
from quads_qat.config import Mode
from quads_qat.gemm_noise import weight_error
from quads_qat.packed_module import PackedModule
from quads_qat.swaps import Sources, ingredients_of, master_of, parameters_of, root_of

LAYER = re.compile(r"((?:.*?\.)?\d+)(?:\.|$)")
"""The decoder layer that a module belongs to: its name up to the first number."""


@dataclass(frozen=True)
class ModelPair:
    """Two models of one architecture, and in what they differ.

    ``mine`` and ``theirs`` hold the ingredients of every weight that either side quantizes, ``half`` the rollout's
    weights with the trainer's activations; ``tensors`` what else of the rollout differs, in the trainer's dtypes, and
    ``casts`` the dtype whose cast explains it, where one does.
    """

    trainer: nn.Module
    rollout: nn.Module
    mine: Sources
    half: Sources
    theirs: Sources
    tensors: dict[str, Tensor]
    casts: dict[str, str]
    errors: dict[str, float]  #: parameter -> relative difference of the two weights
    masters: dict[str, Tensor]
    watched: list[str]
    layers: list[str]

    @classmethod
    def of(cls, trainer: nn.Module, rollout: nn.Module) -> ModelPair:
        """Compare the two; ValueError if they do not go together."""
        (a, a_conversion), (b, b_conversion) = root_of(trainer), root_of(rollout)
        for name, parameter in (*a.named_parameters(), *b.named_parameters()):
            if sharding.is_sharded(parameter):
                raise ValueError(
                    f"diagnose: {name} is sharded (DTensor), and both models must be whole: export the trainer "
                    "(quads_qat.export_checkpoint on all ranks) and diagnose its checkpoint in one process, or call "
                    "quads_qat.check_first_step, which takes a sharded trainer"
                )
        if a_conversion is not None and a_conversion.mode is Mode.W4A4_RESIDUAL:
            raise ValueError("diagnose: trainer is a rollout model; the order is diagnose(trainer, rollout, input_ids)")
        if b_conversion is not None and b_conversion.sync.broken:
            raise ValueError(f"diagnose: the rollout is unusable: {b_conversion.sync.broken}")
        names = [name for name, module in a.named_modules() if parameters_of(module)]
        if any(name.endswith(".base_layer") for name in names):
            raise ValueError(
                "diagnose: the trainer has adapters; pass the merged model: "
                "`with quads_qat.integrations.peft.merged(trainer) as plain: quads_qat.diagnose(plain, rollout, ids)`"
            )
        common = [name for name in names if (m := _submodule(b, name)) is not None and parameters_of(m)]
        if not common:
            raise ValueError(
                f"diagnose: {type(a).__name__} and {type(b).__name__} have no linear or expert module of the same "
                "name; pass two models of one architecture"
            )
        conversions = [c for c in (a_conversion, b_conversion) if c is not None]
        quantized = {weight.name: weight for c in conversions for weight in c.weights.values()}
        mine, half, theirs, errors = {}, {}, {}, {}
        for name, weight in quantized.items():
            if weight.module not in common:
                raise _unlike(a, b, f"{weight.module} is quantized and not in both")
            own = ingredients_of(a, a_conversion, weight.module, weight.parameter)
            other = ingredients_of(b, b_conversion, weight.module, weight.parameter)
            if own.weight.shape != other.weight.shape:
                raise _unlike(a, b, f"{name} has the shapes {list(own.weight.shape)} and {list(other.weight.shape)}")
            errors[name] = weight_error(own, other, a.get_parameter(name))
            swapped = own if errors[name] == 0 else replace(own, weight=other.weight)
            for held, side in ((mine, own), (half, swapped), (theirs, other)):
                held.setdefault(weight.module, {})[weight.parameter] = side
        tensors = _other_tensors(a, b, set(quantized))
        casts = _casts(a, b, tensors, {w.format.export_dtype for w in quantized.values()})
        masters = {name: master_of(a, w.module, w.parameter) for name, w in quantized.items()}
        layers = dict.fromkeys(found[1] for name in common if (found := LAYER.match(name)))
        return cls(a, b, mine, half, theirs, tensors, casts, errors, masters, common, list(layers))

    @property
    def same_weights(self) -> bool:
        """Whether all that trainer and rollout multiply by is equal."""
        return not self.tensors and not any(self.errors.values())

    @property
    def same_activations(self) -> bool:
        """Whether both sides do the same with activations everywhere."""
        return all(
            own.same_activation(self.theirs[module][parameter])
            for module, of_module in self.mine.items()
            for parameter, own in of_module.items()
        )


def _submodule(root: nn.Module, name: str) -> nn.Module | None:
    try:
        return root.get_submodule(name)
    except AttributeError:
        return None


def _unlike(a: nn.Module, b: nn.Module, why: str) -> ValueError:
    return ValueError(
        f"diagnose: trainer ({type(a).__name__}) and rollout ({type(b).__name__}) are not of one architecture and "
        f"vocabulary: {why}"
    )


def _other_tensors(a: nn.Module, b: nn.Module, quantized: set[str]) -> dict[str, Tensor]:
    """Parameters and buffers of ``b`` that neither side quantizes and that differ, in the dtypes of ``a``."""
    mine, theirs = a.state_dict(), b.state_dict()
    packed = tuple(f"{name}." if name else "" for name, module in b.named_modules() if isinstance(module, PackedModule))
    for name in theirs:
        if name not in mine and not name.startswith(packed):
            raise _unlike(a, b, f"only the rollout has {name}")
    differ = {}
    for name, value in mine.items():
        if name in quantized or not isinstance(value, Tensor):
            continue
        if name not in theirs:
            raise _unlike(a, b, f"only the trainer has {name}")
        if value.shape != theirs[name].shape:
            raise _unlike(a, b, f"{name} has the shapes {list(value.shape)} and {list(theirs[name].shape)}")
        other = theirs[name].to(value)
        if not torch.equal(other, value):
            differ[name] = other
    return differ


def _casts(a: nn.Module, b: nn.Module, tensors: dict[str, Tensor], export_dtypes: set[torch.dtype]) -> dict[str, str]:
    """Tensors of ``a`` that are those of ``b`` after a cast, that of an export or of the rollout's own dtype."""
    mine, theirs = a.state_dict(), b.state_dict()
    found = {}
    for name in tensors:
        there = theirs[name]
        for dtype in (there.dtype, *export_dtypes):
            if dtype != mine[name].dtype and torch.equal(mine[name].to(there.device).to(dtype).to(there.dtype), there):
                found[name] = dtype_name(dtype)
    return found
