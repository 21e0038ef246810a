"""Comparison, tensor by tensor and bit by bit: model against checkpoint, source against checkpoint, two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import checkpoint_io, ops
from quads_qat.autograd import fake_quantize_weight, group_amax
from quads_qat.checkpoint_plan import cut, disk_plan
from quads_qat.config import Mode, Recipe
from quads_qat.convert import conversion_of
from quads_qat.dialects import tensor_names
from quads_qat.export import export_rest, plan_checkpoint, scale_groups_on_disk
from quads_qat.load import Checkpoint
from quads_qat.scale_groups import group_key


class VerificationError(ValueError):
    """The first tensor that differs, and how."""


@dataclass
class Report:
    """What was compared.

    Attributes:
        quantized: quantized weights whose decoded values were compared.
        other: tensors in high precision that were compared.
        differences: name -> how it differs; empty if everything is the same bits.
    """

    quantized: int = 0
    other: int = 0
    differences: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every bit is the same."""
        return not self.differences

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, "quantized": self.quantized, "other": self.other, "differences": self.differences}

    def __str__(self) -> str:
        if self.ok:
            return f"{self.quantized} quantized weights and {self.other} other tensors are equal, bit for bit"
        name, how = next(iter(self.differences.items()))
        return f"{len(self.differences)} tensors differ, first {name}: {how}"

    def raise_if_different(self) -> Report:
        """Return the report, or raise :class:`VerificationError`."""
        if not self.ok:
            raise VerificationError(str(self))
        return self


def difference(actual: Tensor, expected: Tensor) -> str | None:
    """How two tensors differ in their bits (the sign of zero counts), or None."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"{actual.dtype} {tuple(actual.shape)} against {expected.dtype} {tuple(expected.shape)}"
    wrong = _bits(actual) != _bits(expected)
    if not bool(wrong.any()):
        return None
    first = tuple(wrong.nonzero()[0].tolist())
    count = int(wrong.sum())
    return f"{count} of {wrong.numel()} elements, first at {first}: {actual[first].item()} against {expected[first].item()}"


def _bits(t: Tensor) -> Tensor:
    t = t.detach().cpu().contiguous()
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def verify(model: nn.Module, path: str | Path) -> Report:
    """Check that the weight which the trainer multiplies by is the weight in the checkpoint, bit for bit, every tensor.

    Args:
        model: converted to w4a16 or w4a4.
        path: an NVFP4 checkpoint of either dialect.

    Returns:
        How much was compared.

    Raises:
        VerificationError: names the first tensor that differs.
        ValueError: the checkpoint was made with another recipe, or cannot be read.
    """
    root, conversion = conversion_of(model, "verify")
    if conversion.mode is Mode.W4A4_RESIDUAL:
        raise ValueError("verify: a rollout model holds packed weights only; verify the trainer model")
    checkpoint = Checkpoint.open(path)
    if checkpoint.recipe is not conversion.recipe:
        raise ValueError(
            f"verify: the model trains with recipe '{conversion.recipe}', {path} was made with '{checkpoint.recipe}'"
        )
    plan = disk_plan(root, conversion, checkpoint.dialect)
    report = Report()
    trained: dict[str, Tensor] = {}
    for disk in plan.weights:
        weight, fmt = disk.weight, disk.weight.format
        if weight.name not in trained:
            master = root.get_parameter(weight.name)
            amax = group_amax(conversion.groups[weight.group].weights(), fmt)
            value = fake_quantize_weight(master, amax, fmt, fmt.export_dtype)
            trained = {weight.name: value.mT if fmt.transposed else value}
        q = checkpoint.read(disk.name, transposed=disk.whole_stack and disk.source_transposed)
        if how := difference(
            ops.dequantize(q, fmt.export_dtype), cut(trained[weight.name].cpu(), disk.expert, disk.rows)
        ):
            report.differences[disk.name] = how
        report.quantized += 1
    extra = set(checkpoint.quantized()) - {disk.name for disk in plan.weights}
    report.differences |= dict.fromkeys(sorted(extra), "quantized in the checkpoint, not in the model")
    for name, tensor in export_rest(root, conversion, plan):
        if name not in checkpoint.reader:
            report.differences[name] = "missing in the checkpoint"
        elif how := difference(checkpoint.reader.get(name), tensor):
            report.differences[name] = how
        report.other += 1
    return report.raise_if_different()


def verify_checkpoint(source: str | Path, path: str | Path, *, recipe: Recipe | str | None = None) -> Report:
    """Compare an NVFP4 checkpoint with its BF16 source: every weight is fake-quantized anew and compared in its bits.

    ``recipe`` None: the one that the checkpoint records, else its dialect's usual writer.
    """
    checkpoint = Checkpoint.open(path)
    if recipe is not None:
        checkpoint.recipe = Recipe(recipe)
    reader = checkpoint_io.Reader(source)
    quantized = set(checkpoint.quantized())
    model, _, _ = plan_checkpoint(reader, checkpoint.dialect, checkpoint.recipe)
    conversion, plan = checkpoint.plan(model)
    report = Report()
    for group in scale_groups_on_disk(plan):
        tensors = [disk.of_source(reader.get(disk.source)) for disk in group]
        amax = ops.amax(*tensors)
        for disk, tensor in zip(group, tensors, strict=True):
            expected = ops.fake_quantize(tensor, tensor_amax=amax, recipe=checkpoint.recipe)
            q = checkpoint.read(disk.name, transposed=disk.whole_stack and disk.source_transposed)
            if how := difference(ops.dequantize(q, expected.dtype), expected):
                report.differences[disk.name] = how
            report.quantized += 1
    sources = {d.source for d in plan.weights}
    split = {b.source: b for b in plan.biases}
    for bias in plan.biases:
        _compare(report, checkpoint.reader, bias.name, bias.of_source(reader.get(bias.source)))
    for name in (n for n in reader.names() if n not in sources and n not in split):
        _compare(report, checkpoint.reader, name, reader.get(name))
    report.differences |= dict.fromkeys(
        sorted(quantized - {d.name for d in plan.weights}), "not a weight of the source"
    )
    return report


def _compare(report: Report, reader: checkpoint_io.Reader, name: str, expected: Tensor) -> None:
    if name not in reader:
        report.differences[name] = "missing in the checkpoint"
    elif how := difference(reader.get(name), expected):
        report.differences[name] = how
    report.other += 1


def diff(a: str | Path, b: str | Path) -> Iterator[dict[str, Any]]:
    """Compare two NVFP4 checkpoints of any dialects, weight by weight.

    Yields:
        One row per weight or other tensor that differs: ``name``, and for weights ``codes``, ``block_scales``,
        ``values`` (elements that differ), ``max_abs`` (largest difference of decoded values).
    """
    first, second = Checkpoint.open(a), Checkpoint.open(b)
    weights = [set(c.quantized()) for c in (first, second)]
    for name in sorted(weights[0] ^ weights[1]):
        yield {"name": name, "only_in": str(a if name in weights[0] else b)}
    for name in sorted(weights[0] & weights[1]):
        qa, qb = first.read(name), second.read(name)
        if qa.shape != qb.shape:
            yield {"name": name, "shapes": [list(qa.shape), list(qb.shape)]}
            continue
        va, vb = ops.dequantize(qa, torch.float32), ops.dequantize(qb, torch.float32)
        row = {
            "name": name,
            "codes": int((qa.qdata & 0x0F != qb.qdata & 0x0F).sum() + (qa.qdata >> 4 != qb.qdata >> 4).sum()),
            "block_scales": int((_bits(qa.block_scale) != _bits(qb.block_scale)).sum()),
            "values": int((va != vb).sum()),
            "max_abs": float((va - vb).abs().max()) if va.numel() else 0.0,
        }
        if any(row[key] for key in ("codes", "block_scales", "values")):
            yield row
    others = [set(c.reader.names()) - _quantized_tensors(c) for c in (first, second)]
    for name in sorted(others[0] ^ others[1]):
        yield {"name": name, "only_in": str(a if name in others[0] else b)}
    for name in sorted(others[0] & others[1]):
        if how := difference(first.reader.get(name), second.reader.get(name)):
            yield {"name": name, "difference": how}


def _quantized_tensors(checkpoint: Checkpoint) -> set[str]:
    named = [tensor_names(name, checkpoint.dialect) for name in checkpoint.quantized()]
    return {n for t in named for n in (*t.weight, t.input_scale)}


def inspect_checkpoint(path: str | Path) -> dict[str, Any]:
    """What an NVFP4 checkpoint holds, from its files alone.

    Returns:
        ``dialect``, ``recipe``, ``activations``, numbers of weights and bytes, and ``problems``: scales that are missing,
        zero or NaN, activation scales that are missing in part, fused weights whose scales differ.
    """
    checkpoint = Checkpoint.open(path)
    problems: list[str] = []
    scales: dict[str, dict[str, float]] = {}
    elements = with_input = 0
    weights = checkpoint.quantized()
    for name in weights:
        try:
            q = checkpoint.read(name)
            with_input += checkpoint.input_amax(name) is not None
        except ValueError as error:
            problems.append(str(error))
            continue
        elements += q.shape.numel()
        scales.setdefault(group_key(name.removesuffix(".weight")), {})[name] = q.per_tensor_scale.item()
    for group, members in scales.items():
        if len(set(members.values())) > 1:
            problems.append(f"{group}: engines fuse these weights, but their per-tensor scales differ")
    if not checkpoint.weights_only and with_input < len(weights):
        problems.append(
            f"{len(weights) - with_input} of {len(weights)} weights of a W4A4 checkpoint have no activation scale"
        )
    recorded = checkpoint.reader.config.get("quads_qat", {})
    return {
        "dialect": checkpoint.dialect.value,
        "recipe": f"{checkpoint.recipe}" + ("" if recorded else " (assumed: the checkpoint does not say)"),
        "weights": "W4A16" if checkpoint.weights_only else "W4A4",
        "quantized_weights": len(weights),
        "quantized_elements": elements,
        "other_tensors": len(set(checkpoint.reader.names()) - _quantized_tensors(checkpoint)),
        "bytes": checkpoint.reader.nbytes(),
        "problems": problems,
    }
