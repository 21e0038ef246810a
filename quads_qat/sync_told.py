"""What a weight sync is told of its trainer beside the tensors: by a contract, and by the metadata of a state_dict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from quads_qat.contract import Contract
from quads_qat.conversion import Conversion
from quads_qat.linear import TRAINER
from quads_qat.name_ranges import expanded, listed, shortened
from quads_qat.schedule import not_started

_MASTERS = "update_weights: this state_dict is of a trainer that"


def notes_of(named_tensors: Any) -> dict[str, dict[str, Any]]:
    """Module -> what its trainer noted in a state_dict; {} of anything else, and of a plain model's."""
    metadata = getattr(named_tensors, "_metadata", None) or {}
    return {module: entry[TRAINER] for module, entry in metadata.items() if TRAINER in entry}


def listed_by(contract: Contract, named_tensors: Any, notes: Mapping[str, Mapping[str, Any]]) -> Contract:
    """A contract of the first version with the modules that a state_dict notes as quantized, and all others."""
    if not notes or None not in (contract.quantized, contract.high_precision):
        return contract
    others = [name for name in named_tensors._metadata if name and name not in notes]
    return replace(contract, quantized=shortened(notes), high_precision=shortened(others))


def cast_as_told(
    conversion: Conversion, contract: Contract | None, notes: Mapping[str, Mapping[str, Any]]
) -> Conversion:
    """A rollout's record with which masters are cast as their trainer casts them, where that is told.

    Its ``untold`` are the weights of which it is not, although the trainer is known to cast to several dtypes. A
    contract tells one for all, a state_dict that of each module. Weights that are packed were cast already.

    Raises:
        ValueError: contract and state_dict tell different dtypes.
    """
    noted = {module: getattr(torch, note["export_dtype"]) for module, note in notes.items()}
    told = set(noted.values())
    if contract is not None and contract.export_dtype is not None:
        if other := told - {contract.export_dtype}:
            raise ValueError(
                f"{_MASTERS} casts to {other.pop()} before it quantizes, and the contract says "
                f"{contract.export_dtype}; pass contract=quads_qat.contract_of(trainer)"
            )
        told = {contract.export_dtype}
    elif contract is not None and contract.quantized is not None and not told:  # a record that says: they differ
        dtypes = {weight.format.export_dtype for weight in conversion.weights.values()}
        several = len(dtypes) > 1  # then it has been told before, as far as it was
        return replace(conversion, untold=conversion.untold if several else frozenset(conversion.weights))
    if not told:
        return conversion
    only = next(iter(told)) if len(told) == 1 else None  # also of modules that have other names here
    weights = {}
    for name, weight in conversion.weights.items():
        dtype = only or noted.get(weight.module, weight.format.export_dtype)
        weights[name] = replace(weight, format=replace(weight.format, export_dtype=dtype))
    untold = frozenset(weight.name for weight in weights.values() if only is None and weight.module not in noted)
    return replace(conversion, weights=weights, untold=untold)


def not_compared(mine: Contract, theirs: Contract) -> str:
    """Why two contracts that do not differ say nothing of what is quantized; "" where they do."""
    if None in (mine.quantized, mine.high_precision, theirs.quantized, theirs.high_precision):
        return ""  # an older record
    here, there = expanded(mine.quantized or ()), expanded(theirs.quantized or ())
    if not theirs.modules().isdisjoint(here) or not mine.modules().isdisjoint(there):
        return ""
    return (
        f"update_weights: the contract quantizes {listed(theirs.quantized or ())}, this rollout "
        f"{listed(mine.quantized or ())}: no name in both, so it was not compared which weights the trainer quantizes; "
        "pass the contract of a model with the names of the rollout, or send packed tensors: "
        "quads_qat.export_weights(trainer)"
    )


def changed(requantized: list[str]) -> str:
    """That these weights came decoded, and are not what came."""
    first, more = requantized[0], len(requantized) - 1
    return (
        f"update_weights: {first}{f' and {more} more' if more else ''} came as decoded NVFP4 weights, as "
        "export_weights(trainer, 'dequantized') gives them, and have other values now that this rollout has quantized "
        "them again, with scales of its own; send packed tensors: quads_qat.export_weights(trainer, 'modelopt'). "
        "Masters that a trainer has started from are right as they are: trainer.state_dict() as it is made says so"
    )


def objections(
    named_tensors: Any, notes: Mapping[str, Mapping[str, Any]], conversion: Conversion, contract: Contract | None
) -> list[str]:
    """Why a rollout that takes these weights will not multiply by what their trainer multiplies by, as far as told."""
    starts = [note["start_step"] for note in notes.values()]  # of now; a contract may be older
    start = max(starts, default=0 if contract is None else contract.start_step)
    found = [f"update_weights: {not_started(start)}, and this rollout by quantized ones"] if start else []
    if not notes:
        return found
    if any(note["held"] for note in notes.values()):
        found.append(
            f"{_MASTERS} holds its scales (Schedule: frozen, ema), which masters do not tell: this rollout makes "
            "scales of its own and multiplies by other weights than the trainer; send "
            "quads_qat.export_weights(trainer, ...)"
        )
    if recipes := {note["recipe"] for note in notes.values()} - {conversion.recipe.value}:
        found.append(
            f"{_MASTERS} quantizes with recipe '{recipes.pop()}', this rollout with '{conversion.recipe}'; convert "
            "both with the same"
        )
    quantized: dict[str, list[str]] = {}
    for weight in conversion.weights.values():
        quantized.setdefault(weight.module, []).append(weight.group)
    shared = [name for name in quantized if name in notes and sorted(notes[name]["groups"]) != sorted(quantized[name])]
    if shared:
        found.append(
            f"{_MASTERS} shares the scale of {listed(shortened(shared))} among other weights than this rollout; "
            "convert both with the same groups="
        )
    high = [skipped.module for skipped in conversion.skipped]
    theirs, mine = (
        shortened(name for name in quantized if name in named_tensors._metadata and name not in notes),
        shortened(name for name in high if name in notes),
    )
    for names, does, other in ((theirs, "does not quantize", "does"), (mine, "quantizes", "does not")):
        if names:
            found.append(
                f"{_MASTERS} {does} {listed(names)}, which this rollout {other}; give both the same scope, include and "
                "exclude, or load the rollout from a new export of the trainer"
            )
    return found
