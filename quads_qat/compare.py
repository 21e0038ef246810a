"""Two checkpoints compared tensor by tensor, and what one checkpoint holds: from files alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import ops
from quads_qat.checkpoint_plan import DiskWeight, SplitBias, biases_by_source
from quads_qat.nvfp4_checkpoint import Checkpoint, by_parameter, read_bias, read_parameter, shared_input_amax
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.record import changed_files
from quads_qat.required_tensors import require_tensors
from quads_qat.scale_groups import group_key
from quads_qat.sharding import computed_in
from quads_qat.skeleton import skeleton
from quads_qat.verify_config import announcement_problems

COMPUTE_IN = "FSDP2: MixedPrecisionPolicy(param_dtype=torch.{}); or autocast"
"""How a trainer with fp32 masters multiplies by what an export casts them to."""


def difference(actual: Tensor, expected: Tensor, sides: tuple[str, str]) -> str | None:
    """How two tensors differ in their bits (the sign of zero counts), or None; ``sides`` like ``in the rollout``."""
    there, here = sides
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        shapes = tuple(actual.shape), tuple(expected.shape)
        return f"{actual.dtype} {shapes[0]} {there} against {expected.dtype} {shapes[1]} {here}"
    wrong = _bits(actual) != _bits(expected)
    if not bool(wrong.any()):
        return None
    first = tuple(wrong.nonzero()[0].tolist())
    count = int(wrong.sum())
    values = f"{actual[first].item()} {there} against {expected[first].item()} {here}"
    zeros = actual.is_floating_point() and torch.equal(actual.cpu().float(), expected.cpu().float())
    what = " in the sign of zero alone" if zeros else ""
    return f"{count} of {wrong.numel()} elements{what}, first at {first}: {values}"


def cast_note(root: nn.Module, rest: Mapping[str, tuple[Tensor, torch.dtype]]) -> str:
    """What "equal" leaves open: of name -> (tensor in high precision, dtype that an export casts it to).

    Quantized weights are cast in the trainer's forward too, the others only on their way to the file or the rollout,
    unless FSDP2 casts them. "" without such a cast.
    """
    computed = computed_in(root)
    casts = (
        (dtype_name(tensor.dtype), dtype_name(dtype))
        for name, (tensor, dtype) in rest.items()
        if computed.get(name, tensor.dtype) != dtype
    )
    here, there = next(casts, ("", ""))
    if not here:
        return ""
    return (
        f"; those that are not quantized after the cast to {there}: the trainer multiplies by them in {here}, unless "
        f"it computes in {there} ({COMPUTE_IN.format(there)})"
    )


def dtype_name(dtype: torch.dtype) -> str:
    """Like ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def _bits(t: Tensor) -> Tensor:
    t = t.detach().cpu().contiguous()
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


class Differences(list[dict[str, Any]]):
    """The rows of :func:`diff`; printed, they are in words."""

    @property
    def only_activation_scales(self) -> bool:
        """Whether something differs, and all of it is activation scales."""
        return bool(self) and all(only_activations(row) for row in self)

    def __str__(self) -> str:
        if not self:
            return "the same codes, scales and values, and the same other tensors"
        what, kind = "", "tensor"
        if self.only_activation_scales:
            what, kind = "weights are the same, bit for bit; ", "activation scale"
        verb = "s differ" if len(self) > 1 else " differs"
        head = f"{what}{len(self)} {kind}{verb}" + (", the first 20:" if len(self) > 20 else ":")
        return "\n".join([head, *(f"  {row['name']}: {describe(row)}" for row in self[:20])])

    __repr__ = __str__


def diff(a: str | Path, b: str | Path) -> Differences:
    """Compare two NVFP4 checkpoints of any dialects, weight by weight.

    Returns:
        A list that prints what differs in words: one row per weight or other tensor that differs. ``name``, and for
        weights ``codes``, ``block_scales``, ``values`` (elements that differ), ``max_abs`` (largest difference of
        decoded values) and, where they differ, ``per_tensor_scale`` (what multiplies) and ``input_amax`` (what the
        activation scale stands for; None: there is no such scale). A weight that cannot be read, and contracts that
        differ, are rows with a ``difference``.

    Raises:
        ValueError: one of the two is no NVFP4 checkpoint.

    Example::

        print(diff("step-100", "step-200"))
        changed = [row["name"] for row in diff("step-100", "step-200")]
    """
    return Differences(_rows(a, b))


def _rows(a: str | Path, b: str | Path) -> Iterator[dict[str, Any]]:
    first, second = Checkpoint.open(a), Checkpoint.open(b)
    weights = [set(c.quantized()) for c in (first, second)]
    together, stacked_biases = _stacks(first, second) if weights[0] != weights[1] else ({}, {})
    inside = [{disk.name for parts in together.values() for disk in parts[i]} for i in (0, 1)]
    weights = [found - stacked for found, stacked in zip(weights, inside, strict=True)]
    for name in sorted(weights[0] ^ weights[1]):
        yield {"name": name, "only_in": str(a if name in weights[0] else b)}
    for name in sorted({*(weights[0] & weights[1]), *together}):
        try:
            if name in together:
                (qa, ia), (qb, ib) = (
                    _whole(c, parts) for c, parts in zip((first, second), together[name], strict=True)
                )
            else:
                (qa, ia), (qb, ib) = ((c.read(name), c.input_amax(name)) for c in (first, second))
        except ValueError as error:
            yield {"name": name, "difference": str(error)}
            continue
        if row := _row(name, (qa, qb), (ia, ib)):
            yield row
    if how := _contract_difference(first, second):
        yield {"name": "config.json", "difference": how}
    split = {bias.name for pair in stacked_biases.values() for _, biases in pair for bias in biases}
    others = [set(c.reader.names()) - quantized_tensors(c) - split - {*stacked_biases} for c in (first, second)]
    for name in sorted(others[0] ^ others[1]):
        yield {"name": name, "only_in": str(a if name in others[0] else b)}
    for name in sorted({*(others[0] & others[1]), *stacked_biases}):
        try:
            if name in stacked_biases:
                values = [
                    read_bias(c, model, biases) if biases else c.reader.get(name)
                    for c, (model, biases) in zip((first, second), stacked_biases[name], strict=True)
                ]
            else:
                values = [c.reader.get(name) for c in (first, second)]
        except ValueError as error:
            yield {"name": name, "difference": str(error)}
            continue
        if how := difference(values[0], values[1], ("in the first", "in the second")):
            yield {"name": name, "difference": how}


def _row(name: str, pair: tuple[NVFP4Tensor, NVFP4Tensor], inputs: tuple[Tensor | None, ...]) -> dict[str, Any]:
    """What differs; empty if nothing does."""
    a, b = pair
    if a.shape != b.shape:
        return {"name": name, "shapes": [list(a.shape), list(b.shape)]}
    va, vb = (ops.dequantize(q, torch.float32) for q in pair)
    row = {
        "name": name,
        "codes": int((a.qdata & 0x0F != b.qdata & 0x0F).sum() + (a.qdata >> 4 != b.qdata >> 4).sum()),
        "block_scales": int((_bits(a.block_scale) != _bits(b.block_scale)).sum()),
        "values": int((va != vb).sum()),
        "max_abs": float((va - vb).abs().max()) if va.numel() else 0.0,
    }
    scales = [q.per_tensor_scale.flatten().unique().tolist() for q in pair]
    if scales[0] != scales[1]:
        row["per_tensor_scale"] = [found[0] if len(found) == 1 else found for found in scales]
    amaxes = [None if amax is None else amax.item() for amax in inputs]
    if amaxes[0] != amaxes[1]:
        row["input_amax"] = amaxes
    return row if len(row) > 5 or row["codes"] or row["block_scales"] or row["values"] else {}


def only_activations(row: dict[str, Any]) -> bool:
    """Whether a row of :func:`diff` is of a weight that is the same, with another activation scale or none."""
    same = ("codes", "block_scales", "values", "max_abs")
    return "input_amax" in row and "per_tensor_scale" not in row and not any(row[key] for key in same)


def describe(row: dict[str, Any]) -> str:
    """A row of :func:`diff` in words: what differs, and only that."""
    if "difference" in row:
        return row["difference"]
    if "only_in" in row:
        return f"only in {row['only_in']}"
    if "shapes" in row:
        return "shapes {} and {}".format(*row["shapes"])
    found = [f"{row[key]} {key.replace('_', ' ')}" for key in ("codes", "block_scales", "values") if row[key]]
    if row["max_abs"]:
        found.append(f"max |a - b| {row['max_abs']:.3g}")
    names = {"per_tensor_scale": "per-tensor scale", "input_amax": "amax of the activation scale"}
    for key, name in names.items():
        if key in row:
            a, b = ("none" if value is None else value for value in row[key])
            found.append(f"{name} {a} against {b}")
    return ", ".join(found)


_Parts = tuple[list[DiskWeight], list[DiskWeight]]
_Biases = list[tuple[nn.Module, list[SplitBias]]]


def _stacks(first: Checkpoint, second: Checkpoint) -> tuple[dict[str, _Parts], dict[str, _Biases]]:
    """Parameters that one checkpoint holds as a 3-D stack and the other expert by expert, and their parts in each.

    Likewise their biases, with the skeleton of each; without parts where they are one tensor.
    """
    if not any(name.endswith("_proj") for c in (first, second) for name in c.quantized()):
        return {}, {}
    models = [skeleton(c.reader) for c in (first, second)]
    plans = [checkpoint.plan(model)[1] for checkpoint, model in zip((first, second), models, strict=True)]
    weights, biases = [by_parameter(plan) for plan in plans], [biases_by_source(plan) for plan in plans]
    both = [name for name in weights[0] if name in weights[1]]
    stacks = {n: (weights[0][n], weights[1][n]) for n in both if len(weights[0][n]) != len(weights[1][n])}
    split = biases[0].keys() ^ biases[1].keys()
    return stacks, {
        name: [(model, found.get(name, [])) for model, found in zip(models, biases, strict=True)] for name in split
    }


def _whole(checkpoint: Checkpoint, parts: list[DiskWeight]) -> tuple[NVFP4Tensor, Tensor | None]:
    """A parameter put together from its parts."""
    model = skeleton(checkpoint.reader)
    q = read_parameter(checkpoint, model.get_parameter(parts[0].weight.name), parts)
    return q, shared_input_amax(checkpoint, parts, required=False)


def _contract_difference(first: Checkpoint, second: Checkpoint) -> str:
    a, b = first.contract, second.contract
    if a is None or b is None:
        return "" if a is b else f"only the {'second' if a is None else 'first'} has a quads_qat entry"
    found = a.differences(b, modules=False)  # of these there are rows
    if a.rollout != b.rollout:
        recorded = [str(contract.rollout or "not recorded") for contract in (a, b)]
        found.append("rollouts: {} against {}".format(*recorded))
    return "; ".join(found)


def inspect_checkpoint(path: str | Path) -> dict[str, Any]:
    """What an NVFP4 checkpoint holds, from its files alone.

    Returns:
        ``dialect``, ``recipe``, ``weights`` (W4A16 or W4A4), numbers of weights and bytes, what the ``contract`` says
        (scope, and what rollouts do with activations; [] without one), and ``problems``: scales that are missing, zero
        or NaN, activation scales missing in part, fused weights whose scales differ, files that have changed since
        they were written, tensors that the architecture needs (if transformers has it).
    """
    checkpoint = Checkpoint.open(path)
    problems = announcement_problems(checkpoint)
    problems += [f"{file}: {why}" for file, why in changed_files(checkpoint.reader.path).items()]
    inputs: dict[str, dict[str, float]] = {}
    scales: dict[str, dict[str, float]] = {}
    elements = with_input = 0
    weights = checkpoint.quantized()
    for name in weights:
        try:
            amax = checkpoint.input_amax(name)
            with_input += amax is not None
            if amax is not None:
                inputs.setdefault(group_key(name.removesuffix(".weight")), {})[name] = amax.item()
            q = checkpoint.read(name)
        except ValueError as error:
            problems.append(str(error))
            continue
        elements += q.shape.numel()
        scales.setdefault(group_key(name.removesuffix(".weight")), {})[name] = q.per_tensor_scale.item()
    for group, members in scales.items():
        if len(set(members.values())) > 1:
            problems.append(f"{group}: engines fuse these weights, but their per-tensor scales differ")
    for group, members in inputs.items():
        if len(set(members.values())) > 1:
            problems.append(f"{group}: engines fuse these weights, but their activation scales differ")
    if not checkpoint.weights_only and with_input < len(weights):
        problems.append(
            f"{len(weights) - with_input} of {len(weights)} weights of a W4A4 checkpoint have no activation scale"
        )
    problems += _of_the_architecture(checkpoint)
    return {
        "dialect": checkpoint.dialect.value,
        "recipe": f"{checkpoint.recipe}" + (" (assumed: the checkpoint does not say)" if checkpoint.foreign else ""),
        "weights": "W4A16" if checkpoint.weights_only else "W4A4",
        "quantized_weights": len(weights),
        "quantized_elements": elements,
        "other_tensors": len(set(checkpoint.reader.names()) - quantized_tensors(checkpoint)),
        "bytes": checkpoint.reader.nbytes(),
        "contract": _contract_lines(checkpoint),
        "problems": problems,
    }


def _of_the_architecture(checkpoint: Checkpoint) -> list[str]:
    """What the model of config.json lacks; nothing where transformers does not have it."""
    reader = checkpoint.reader
    try:
        model = skeleton(reader)
    except ValueError:  # the checkpoint brings its own code, or is of a later transformers
        return []
    try:
        require_tensors(reader, model, checkpoint.plan(model)[1].sources)
    except ValueError as error:
        return [str(error)]
    return []


def _contract_lines(checkpoint: Checkpoint) -> list[str]:
    contract = checkpoint.contract
    if contract is None:
        return []
    rollout, lines = contract.rollout, [f"scope: {contract.scope}"]
    if rollout is None:
        return [*lines, "rollouts: not recorded"]
    scale, residual = rollout.activation.scale, rollout.residual
    return [*lines, f"rollouts: activation scale {scale}, residual {residual.fraction:.0%} in scope {residual.scope}"]


def quantized_tensors(checkpoint: Checkpoint) -> set[str]:
    """Names of all tensors of quantized weights."""
    return {tensor for name in checkpoint.quantized() for tensor in tensors_of(checkpoint, name)}


def tensors_of(checkpoint: Checkpoint, weight: str, *, input_scale: bool = True) -> tuple[str, ...]:
    """Names of the tensors of one quantized weight."""
    names = checkpoint.tensor_names(weight)
    return (*names.weight, names.input_scale) if input_scale else names.weight
