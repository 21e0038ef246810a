"""Comparison, tensor by tensor and bit by bit: a model, or the source, against a checkpoint."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import checkpoint_io, dialects, ops, sharding
from quads_qat.autograd import fake_quantize_weight
from quads_qat.checkpoint_plan import DiskWeight, Plan, cut, disk_plan, with_stacks_of
from quads_qat.compare import cast_note, difference, dtype_name, tensors_of
from quads_qat.config import Mode, Recipe
from quads_qat.contract import Contract
from quads_qat.conversion import Conversion, conversion_of, require_same_modules, require_unwrapped
from quads_qat.dialects import FOREIGN_RECIPES
from quads_qat.export import casts_of, plan_checkpoint, scale_groups_on_disk
from quads_qat.nvfp4_checkpoint import Checkpoint
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.quantized_weights import amax_of_group
from quads_qat.record import changed_files
from quads_qat.scale_groups import activation_key, whole
from quads_qat.verify_config import announcement_differences, as_config, model_differences
from quads_qat.weight_stream import CACHE_SCALES, export_rest, input_scales, rest_in_memory, warn_before_start


class VerificationError(ValueError):
    """The first tensor that differs, and how."""


@dataclass
class Report:
    """What was compared.

    Attributes:
        quantized: quantized weights whose decoded values were compared.
        other: tensors in high precision that were compared.
        differences: name -> how it differs; empty if everything is the same bits.
        note: what "equal" leaves open: casts of what is not quantized, by the exporter or by readers; "" if none.
        reference: what the checkpoint was compared with, ``model`` or ``source``.
    """

    quantized: int = 0
    other: int = 0
    differences: dict[str, str] = field(default_factory=dict)
    note: str = ""
    reference: str = "model"

    @property
    def ok(self) -> bool:
        """Whether every bit is the same."""
        return not self.differences

    def difference(self, actual: Tensor, expected: Tensor) -> str | None:
        """How a tensor of the checkpoint differs from what it must be, or None."""
        return difference(actual, expected, ("in the checkpoint", f"from the {self.reference}"))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"ok": self.ok, "quantized": self.quantized, "other": self.other, "differences": self.differences}

    def __str__(self) -> str:
        if self.ok:
            return (
                f"{self.quantized} quantized weights and {self.other} other tensors are equal, bit for bit{self.note}"
            )
        name, how = next(iter(self.differences.items()))
        count = len(self.differences)
        if any(".json" in name for name in self.differences):  # what files say of the model, too
            return f"{count} difference{'s' if count > 1 else ''}, first {name}: {how}"
        return f"{count} tensor{'s differ' if count > 1 else ' differs'}, first {name}: {how}"

    def raise_if_different(self) -> Report:
        """Return the report, or raise :class:`VerificationError`."""
        if not self.ok:
            raise VerificationError(str(self))
        return self


def verify(model: nn.Module, path: str | Path) -> Report:
    """Check that the weight which the trainer multiplies by is the weight in the checkpoint, bit for bit, every tensor.

    Args:
        model: converted to w4a16 or w4a4.
        path: an NVFP4 checkpoint of either dialect.

    Returns:
        How much was compared. Of a sharded model all ranks must call this; each reads the files and compares.

    Raises:
        VerificationError: names the first tensor that differs.
        ValueError: the checkpoint was made with another recipe or from another dtype, or cannot be read.

    Warns:
        UserWarning: forwards do not quantize yet (``Schedule.start_step``): equal is what they will multiply by.
    """
    with sharding.together("verify", model, "nothing was compared"):  # each reads the files for itself
        root, conversion, checkpoint = _opened(model, path)
    warn_before_start(conversion, "verify", "compares")
    plan = disk_plan(root, conversion, checkpoint.dialect)
    expected = {disk.name for disk in plan.weights}
    extra = checkpoint.quantized_as(expected) - expected
    in_memory = rest_in_memory(root, conversion)
    readers = _reader_note(checkpoint, {dtype for _, dtype in in_memory.values()})
    report = Report(note=cast_note(root, in_memory) + readers)
    trained: dict[str, Tensor] = {}
    made: NVFP4Tensor | None = None
    for disk in plan.weights:
        weight, fmt = disk.weight, disk.weight.format
        if weight.name not in trained:
            master = whole(root.get_parameter(weight.name).detach())
            amax = amax_of_group(conversion, weight)
            value = fake_quantize_weight(master, amax, fmt, fmt.export_dtype)
            trained = {weight.name: value.mT if fmt.transposed else value}
            if not checkpoint.foreign:
                cast = master.to(fmt.export_dtype)
                made = ops.quantize(cast.mT if fmt.transposed else cast, tensor_amax=amax, recipe=fmt.recipe)
        values = cut(trained[weight.name], disk.expert, disk.rows).cpu()
        own = None if made is None else disk.of_parameter(made)
        _compare_quantized(report, checkpoint, disk, values, amax if amax.ndim == 0 else amax[disk.expert], own)
    report.differences |= dict.fromkeys(sorted(extra), "quantized in the checkpoint, not in the model")
    rest: dict[str, int] = {}
    for name, tensor in export_rest(root, conversion, plan):
        rest[name] = tensor.ndim
        if name not in extra:
            _compare(report, checkpoint.reader, name, tensor)
    _compare_input_scales(report, checkpoint, plan, _observed_scales(checkpoint, conversion, plan))
    _find_unknown(report, checkpoint, plan, {*rest, *extra}, root)
    if not extra:
        report.differences |= announcement_differences(checkpoint, rest, plan, root)
    config: Any = getattr(root, "config", None)
    if hasattr(config, "to_dict"):
        report.differences |= model_differences(config.to_dict(), checkpoint.reader.path, root)
    _compare_files(report, checkpoint)
    return report.raise_if_different()


def _opened(model: nn.Module, path: str | Path) -> tuple[nn.Module, Conversion, Checkpoint]:
    root, conversion = conversion_of(model, "verify")
    if conversion.mode is Mode.W4A4_RESIDUAL:
        raise ValueError("verify: a rollout model holds packed weights only; verify the trainer model")
    require_unwrapped(root, "verify")
    require_same_modules(root, conversion, "verify")
    checkpoint = Checkpoint.open(path)
    _require_recipe(checkpoint, conversion.recipe, "convert the model with recipe='{}', or export it again")
    if checkpoint.contract is not None:
        mine, where = Contract.of_conversion(conversion), f"verify: {checkpoint.reader.path}"
        sides = "the model's", "the checkpoint's"
        mine.require_same(checkpoint.contract, where, sides, modules=False)  # which ones differ, is said by their names
    checkpoint.recipe = conversion.recipe
    return root, conversion, checkpoint


def _reader_note(checkpoint: Checkpoint, dtypes: set[torch.dtype]) -> str:
    """Of a config.json of another 16-bit dtype than the tensors': a cast between the two is never exact."""
    config = checkpoint.reader.config
    asked = config.get("dtype") or config.get("torch_dtype")
    held = {dtype_name(dtype) for dtype in dtypes & {torch.float16, torch.bfloat16}}
    if asked not in ("float16", "bfloat16") or held <= {asked}:
        return ""
    return (
        f"; config.json asks for {asked}, to which readers cast the tensors of the trainer in {min(held - {asked})}: "
        f"load the trainer with dtype=torch.{asked}"
    )


def _compare_files(report: Report, checkpoint: Checkpoint) -> None:
    """Shards whose bytes are others than were written, where that is not explained by a tensor that differs.

    A scale of activations that nobody can compute anew, say.
    """
    if report.ok:
        report.differences |= changed_files(checkpoint.reader.path)


def _observed_scales(checkpoint: Checkpoint, conversion: Conversion, plan: Plan) -> dict[str, Tensor]:
    """The activation scales that the model's own observations give, if those are what the checkpoint holds."""
    observed = all(observer.amax is not None for observer in conversion.observers.values())
    if checkpoint.contract is None or checkpoint.contract.activations != "observed" or not observed:
        return {}
    return input_scales(plan, conversion, checkpoint.dialect, "observed")


def _compare_input_scales(
    report: Report, checkpoint: Checkpoint, plan: Plan, expected: dict[str, Tensor] | None = None
) -> None:
    """Activation scales against the model's, and against those of the weights that take the same input."""
    ours = checkpoint.contract is not None and checkpoint.contract.activations == "observed"
    groups: dict[Any, dict[str, Tensor]] = {}
    for disk in plan.weights:
        name = checkpoint.tensor_names(disk.name).input_scale
        if name in checkpoint.reader and disk.name not in report.differences:
            key = activation_key(disk.weight.group) if ours else disk.scale_key
            groups.setdefault(key, {})[name] = checkpoint.reader.get(name).float()
    for members in groups.values():
        values = [scale.flatten().tolist() for scale in members.values()]
        common = next(iter(members.values())) if len(values) < 3 else members[list(members)[_most_common(values)]]
        for name, scale in members.items():
            if expected and name in expected:
                how = report.difference(scale, expected[name])
            else:
                how = difference(scale, common, ("here", "of the weights that take the same input"))
            if how:
                report.differences[name] = how


def _most_common(values: list[Any]) -> int:
    return max(range(len(values)), key=lambda i: values.count(values[i]))


def _find_unknown(report: Report, checkpoint: Checkpoint, plan: Plan, known: set[str], root: nn.Module) -> None:
    """Tensors of the checkpoint that are nothing of the model's."""
    scales = checkpoint.contract is None or not checkpoint.weights_only  # others' W4A16 files may hold some
    known = known | {t for disk in plan.weights for t in tensors_of(checkpoint, disk.name, input_scale=scales)}
    known |= {t for name in report.differences if name.endswith(".weight") for t in tensors_of(checkpoint, name)}
    ignored = getattr(root, "_keys_to_ignore_on_load_unexpected", None) or ()  # MTP layers, say
    state = root.state_dict()
    for name in checkpoint.reader.names():
        if name in known or name.endswith(CACHE_SCALES) or any(re.search(pattern, name) for pattern in ignored):
            continue
        if name in state:  # another name of a tied weight
            how = report.difference(
                checkpoint.reader.get(name), whole(state[name]).to(checkpoint.reader.get(name).dtype)
            )
        else:
            how = "not in the model"
        if how:
            report.differences[name] = how


def verify_checkpoint(
    source: str | Path, path: str | Path, *, recipe: Recipe | str | None = None, trust_remote_code: bool = False
) -> Report:
    """Compare an NVFP4 checkpoint with its BF16 source: every weight is fake-quantized anew and compared in its bits.

    Args:
        source: the BF16 checkpoint.
        path: the NVFP4 checkpoint.
        recipe: for a checkpoint that others wrote; None: Model-Optimizer's arithmetic on a GPU, or llm-compressor's.
            Our own say it themselves.
        trust_remote_code: run the model code that the source brings, where transformers has none.

    Returns:
        All differences; :meth:`Report.raise_if_different` makes an error of them.
    """
    checkpoint = Checkpoint.open(path)
    if "quantization_config" in checkpoint_io.Reader(source).config:
        raise ValueError(f"{source} is quantized already; give the BF16 checkpoint first, or compare the two with diff")
    if recipe is not None:
        _require_recipe(checkpoint, Recipe(recipe), "give recipe='{}' (--recipe) or none, or quantize it again")
        checkpoint.recipe = Recipe(recipe)
    reader = checkpoint_io.Reader(source)
    model, conversion, _ = plan_checkpoint(
        reader, checkpoint.dialect, checkpoint.recipe, trust_remote_code=trust_remote_code
    )
    casts = casts_of(reader, model, conversion)
    plan = with_stacks_of(reader, checkpoint.plan(model)[1])
    report = Report(reference="source")
    for group in scale_groups_on_disk(plan):
        tensors = [disk.read_source(reader) for disk in group]
        amax = ops.amax(*tensors)
        for disk, tensor in zip(group, tensors, strict=True):
            expected = ops.fake_quantize(tensor, tensor_amax=amax, recipe=checkpoint.recipe)
            foreign = checkpoint.foreign  # others may write what decodes alike
            made = None if foreign else ops.quantize(tensor, tensor_amax=amax, recipe=checkpoint.recipe)
            _compare_quantized(report, checkpoint, disk, expected, amax, made)
    expected_names = {name for disk in plan.weights for name in tensors_of(checkpoint, disk.name)}
    in_high_precision = {bias.source for bias in plan.biases} | {disk.source for disk in plan.weights}
    for bias in plan.biases:
        whole_bias = _as_copied(reader.get(bias.source), checkpoint, bias.name, casts.get(bias.source))
        _compare(report, checkpoint.reader, bias.name, bias.of_source(whole_bias))
        expected_names.add(bias.name)
    for name in (n for n in reader.names() if n not in in_high_precision):
        _compare(report, checkpoint.reader, name, _as_copied(reader.get(name), checkpoint, name, casts.get(name)))
        expected_names.add(name)
    for name in checkpoint.reader.names():
        if name not in expected_names and not name.endswith(CACHE_SCALES):
            report.differences[name] = "not in the source"
    _compare_input_scales(report, checkpoint, plan)
    rest = {n: len(reader.shape(n)) for n in reader.names() if n not in in_high_precision}
    report.differences |= announcement_differences(checkpoint, rest, plan, model)
    report.differences |= model_differences(as_config(reader.path, model), checkpoint.reader.path, model)
    listed = [config.get("architectures") for config in (checkpoint.reader.config, reader.config)]
    if listed[0] != listed[1]:
        report.differences["config.json: architectures"] = f"{listed[0]!r} against {listed[1]!r}"
    _compare_files(report, checkpoint)
    return report


def _as_copied(tensor: Tensor, checkpoint: Checkpoint, name: str, cast: torch.dtype | None) -> Tensor:
    """A tensor of the source as the checkpoint must hold it: in fp32 throughout, others leave what is not quantized."""
    if cast is None or (
        checkpoint.foreign and name in checkpoint.reader and checkpoint.reader.entry(name).dtype != cast
    ):
        return tensor
    return tensor.to(cast)


def _require_recipe(checkpoint: Checkpoint, recipe: Recipe, way_out: str) -> None:
    alike = FOREIGN_RECIPES[checkpoint.dialect] if checkpoint.foreign else (checkpoint.recipe,)
    if recipe not in alike:
        made = " or ".join(f"'{r}'" for r in alike)
        raise ValueError(
            f"verify: {checkpoint.reader.path} was made with recipe {made}, not with '{recipe}'; "
            f"{way_out.format(alike[0].value)}"
        )


def _compare_quantized(
    report: Report,
    checkpoint: Checkpoint,
    disk: DiskWeight,
    expected: Tensor,
    amax: Tensor,
    made: NVFP4Tensor | None,
) -> None:
    """Decoded values against ``expected``, and the per-tensor scale, which engines use in fp32, against ``amax``'s.

    ``made``: codes and scales that must be the very bytes; a block of zeros decodes alike from many.
    """
    report.quantized += 1
    try:
        q = checkpoint.read(disk.name, transposed=disk.stored_transposed)
        if not checkpoint.weights_only and checkpoint.input_amax(disk.name) is None:
            raise ValueError("its activation scale is missing, which a W4A4 checkpoint needs")
    except ValueError as error:
        report.differences[disk.name] = str(error)
        return
    names = checkpoint.tensor_names(disk.name)
    p, own = ops.scale_from_amax(amax.cpu(), recipe=checkpoint.recipe)
    scale = dialects.stored(p, own, checkpoint.recipe, checkpoint.dialect).reshape(
        dialects.scale_shape(checkpoint.dialect)
    )
    if how := report.difference(ops.dequantize(q, expected.dtype), expected):
        report.differences[disk.name] = how
        return
    if report.reference == "model" and expected.dtype == torch.float16 and checkpoint.recipe is Recipe.ALIGNED:
        exact = ops.dequantize(q, torch.float32)  # what engines multiply by
        if how := report.difference(exact, expected.float()):
            report.differences[disk.name] = f"fp16, in which the trainer multiplies, rounds {how}; train in bf16"
    stored = checkpoint.reader.get(names.scale)
    if how := report.difference(stored.float().reshape(scale.shape) if checkpoint.foreign else stored, scale):
        report.differences[names.scale] = how
    if made is not None:
        pairs = {names.qdata: (q.qdata, made.qdata), names.block_scale: (q.block_scale, made.block_scale)}
        for name, (there, here) in pairs.items():
            if how := report.difference(there, here.cpu()):
                report.differences[name] = how


def _compare(report: Report, reader: checkpoint_io.Reader, name: str, expected: Tensor) -> None:
    if name not in reader:
        report.differences[name] = "missing in the checkpoint"
    elif how := report.difference(reader.get(name), expected):
        report.differences[name] = how
    report.other += 1
