"""NVFP4 checkpoints into other checkpoints without quantizing anything: dequantized, or in the other dialect.

Both stream: one tensor of the original checkpoint (with the experts that it holds) is in memory at a time, besides the
shard that is being filled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import checkpoint_io, dialects, engine_limits, ops
from quads_qat.checkpoint_plan import DiskWeight, Plan, SplitBias, cut, disk_plan
from quads_qat.config import Dialect, Recipe
from quads_qat.contract import KEY
from quads_qat.export import ignored_modules, require_space
from quads_qat.load import Checkpoint, by_parameter, read_parameter, read_part
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.required_tensors import require_tensors
from quads_qat.skeleton import skeleton
from quads_qat.weight_stream import CACHE_SCALES, by_layer

Progress = Callable[[int, int], None]
Maker = Callable[[], Iterator[tuple[str, Tensor]]]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def dequantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = checkpoint_io.DEFAULT_SHARD_BYTES,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write an NVFP4 checkpoint of either dialect as a plain one, in the names that transformers loads.

    The weights are those of :func:`~quads_qat.load.load_model`, bit for bit; what was not quantized is copied as it is,
    tokenizer and code too. Scales of activations and of a KV cache are dropped. Names that only the quantized one had
    (llm-compressor's experts of Mixtral and gpt-oss) become the architecture's own again.

    Args:
        source: directory of either dialect.
        destination: directory to make; it must not exist. It appears when everything is written.
        dtype: of the decoded weights, bfloat16, float16 or float32; None: config.json's. With Recipe.ALIGNED, bf16
            holds every weight exactly.
        shard_bytes: size of a shard.
        trust_remote_code: run the model code that the source brings, where transformers has none.
        progress: called with (done, total) bytes of the source.

    Raises:
        ValueError: as :func:`~quads_qat.load.load_model`; ``destination`` exists; the disk is full.

    Example::

        dequantize_checkpoint("nvfp4", "bf16")
        model = AutoModelForCausalLM.from_pretrained("bf16")
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ValueError(f"dequantize: dtype must be bfloat16, float16 or float32, got {dtype}")
    checkpoint = Checkpoint.open(source)
    model = skeleton(source, checkpoint.reader.names(), dtype, trust_remote_code=trust_remote_code)
    conversion, plan = checkpoint.plan(model)
    dtype = dtype or next(model.get_parameter(name).dtype for name in conversion.weights)
    recoded = _Recoded(checkpoint, model, plan)
    makers: dict[str, Maker] = {}
    for name, parts in recoded.by_source().items():
        makers[name] = _yields(name, lambda name=name, parts=parts: _decoded(checkpoint, model, parts, dtype))
    for name in recoded.unplaced:
        makers[name] = _yields(name, lambda name=name: _decoded_alone(checkpoint, name, dtype))
    for name, biases in recoded.biases().items():
        makers[name] = _yields(name, lambda biases=biases: _joined(checkpoint, model, biases))
    for name in recoded.rest:
        makers[name] = _yields(name, lambda name=name: checkpoint.reader.get(name))
    config = {k: v for k, v in checkpoint.reader.config.items() if k not in ("quantization_config", KEY)}
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    elements = sum(math.prod(checkpoint.reader.shape(checkpoint.tensor_names(d.name).qdata)) for d in plan.weights)
    require_space(Path(destination), checkpoint.reader.nbytes() + elements * (2 * dtype.itemsize - 1))
    with checkpoint_io.whole_directory(destination) as directory:
        checkpoint_io.write_shards(directory, _stream(makers, checkpoint.reader.nbytes(), progress), shard_bytes)
        checkpoint_io.copy_companions(checkpoint.reader.path, directory)
        (directory / "recipe.yaml").unlink(missing_ok=True)  # llm-compressor's: it describes what is undone here
        checkpoint_io.write_json(directory / "config.json", config)


def convert_dialect(
    source: str | Path,
    destination: str | Path,
    *,
    dialect: Dialect | str,
    shard_bytes: int = checkpoint_io.DEFAULT_SHARD_BYTES,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write an NVFP4 checkpoint in the other dialect: the same codes and block scales, and scales that decode alike.

    The dialects store the per-tensor scale in opposite directions, so it survives only if it is a power of two, as
    Recipe.ALIGNED makes it: x * p and x / (1/p) are the same bits then. An activation scale survives if 1/(1/x) == x.

    Args:
        source: directory of the other dialect.
        destination: directory to make; it must not exist. It appears when everything is written.
        dialect: which one to write.
        shard_bytes: size of a shard.
        trust_remote_code: run the model code that the source brings, where transformers has none.
        progress: called with (done, total) bytes of the source.

    Raises:
        ValueError: ``source`` is in that dialect already; a scale that would change bits (named); scales of a KV cache;
            experts whose scales differ where the dialect has one for all; as :func:`dequantize_checkpoint`.
    """
    dialect, checkpoint = Dialect(dialect), Checkpoint.open(source)
    if checkpoint.dialect is dialect:
        raise ValueError(f"{source} is in the {dialect} dialect already")
    _require_exact(checkpoint, dialect)
    checkpoint.recipe = Recipe.ALIGNED  # which every power of two decodes like
    model = skeleton(source, checkpoint.reader.names(), trust_remote_code=trust_remote_code)
    conversion, plan = checkpoint.plan(model)
    target = disk_plan(model, conversion, dialect)
    names, weights_only = [disk.name for disk in target.weights], checkpoint.weights_only
    engine_limits.warn(checkpoint.reader.config, dialect, names, weights_only=weights_only, stacklevel=2)
    recoded = _Recoded(checkpoint, model, plan)
    if recoded.unplaced:
        raise ValueError(f"{source}: {recoded.unplaced[0]} belongs to no module of {type(model).__name__}")
    makers: dict[str, Maker] = {}
    for name, disks in by_parameter(target).items():
        parts = [disk for disk in plan.weights if disk.weight.name == name]
        makers[disks[0].name] = lambda parts=parts, disks=disks: _in_dialect(checkpoint, model, parts, disks, dialect)
    joined, split = recoded.biases(), _by_bias_source(target)
    for name, biases in joined.items():
        makers[name] = lambda name=name, biases=biases: _rebuilt_biases(checkpoint, model, biases, split.get(name))
    for name in recoded.rest:
        makers[name] = lambda name=name: _split_bias(name, checkpoint.reader.get(name), split.get(name))
    require_space(Path(destination), checkpoint.reader.nbytes())
    with checkpoint_io.whole_directory(destination) as directory:
        checkpoint_io.write_shards(directory, _stream(makers, checkpoint.reader.nbytes(), progress), shard_bytes)
        checkpoint_io.copy_companions(checkpoint.reader.path, directory)
        _write_configs(directory, checkpoint, model, target, recoded.rest, dialect)


def _yields(name: str, make: Callable[[], Tensor]) -> Maker:
    return lambda: iter([(name, make())])


def _stream(makers: dict[str, Maker], total: int, progress: Progress | None) -> Iterator[tuple[str, Tensor]]:
    """Layer by layer. Progress is counted in tensors: what a maker reads is a fixed share of what it is part of."""
    done, step = 0, total / max(1, len(makers))
    for layer in by_layer(makers).values():
        for name in layer:
            yield from makers[name]()
            done += 1
            if progress is not None:
                progress(min(total, round(done * step)), total)


class _Recoded:
    """Which tensors of a checkpoint belong to what.

    Attributes:
        rest: names of tensors that are neither of a quantized weight, nor split with one, nor a scale.
        unplaced: quantized weights that the model leaves out (layers for multi-token prediction).
    """

    def __init__(self, checkpoint: Checkpoint, model: nn.Module, plan: Plan) -> None:
        self.plan = plan
        placed = {disk.name for disk in plan.weights}
        self.unplaced = [n for n in checkpoint.quantized() if n not in placed and n not in checkpoint.renamed.values()]
        names = [checkpoint.tensor_names(name) for name in (*placed, *self.unplaced)]
        taken = {tensor for n in names for tensor in (*n.weight, n.input_scale)} | {b.name for b in plan.biases}
        self.rest = [n for n in checkpoint.reader.names() if n not in taken and not n.endswith(CACHE_SCALES)]
        elsewhere = {disk.source for disk in plan.weights} | {bias.source for bias in plan.biases}
        require_tensors(checkpoint.reader, model, elsewhere)

    def by_source(self) -> dict[str, list[DiskWeight]]:
        """Weights by the BF16 tensor that they are parts of."""
        found: dict[str, list[DiskWeight]] = {}
        for disk in self.plan.weights:
            found.setdefault(disk.source, []).append(disk)
        return found

    def biases(self) -> dict[str, list[SplitBias]]:
        """Split biases by the tensor that they are parts of."""
        return _by_bias_source(self.plan)


def _by_bias_source(plan: Plan) -> dict[str, list[SplitBias]]:
    found: dict[str, list[SplitBias]] = {}
    for bias in plan.biases:
        found.setdefault(bias.source, []).append(bias)
    return found


# ----------------------------------------------------------------------------------------------------------- dequantize


def _decoded(checkpoint: Checkpoint, model: nn.Module, parts: list[DiskWeight], dtype: torch.dtype) -> Tensor:
    """The BF16 tensor on disk that ``parts`` make up."""
    first, parameter = parts[0], model.get_parameter(parts[0].weight.name)
    if len(parts) == 1 and first.source_expert is None and first.source_rows is None:
        value = ops.dequantize(read_part(checkpoint, parameter, first), dtype)
        return (value.mT if first.source_transposed else value).contiguous()
    value = None
    for disk in parts:
        decoded = ops.dequantize(read_part(checkpoint, parameter, disk), dtype)
        if value is None:
            n, k = decoded.shape
            if disk.source_rows is not None:
                n = parameter.shape[-1 if disk.weight.format.transposed else -2]
            stacked = [] if disk.source_expert is None else [1 + max(d.source_expert or 0 for d in parts)]
            value = torch.empty(*stacked, n, k, dtype=dtype)
        cut(value, disk.source_expert, disk.source_rows).copy_(decoded)
    assert value is not None
    return (value.mT if first.source_transposed else value).contiguous()


def _decoded_alone(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Tensor:
    value = ops.dequantize(checkpoint.read(name), dtype)
    return value if name.endswith(".weight") else value.mT.contiguous()


def _joined(checkpoint: Checkpoint, model: nn.Module, biases: list[SplitBias]) -> Tensor:
    """The 2-D bias [E, N] of a stack from its experts' biases."""
    value = torch.empty_like(model.get_parameter(biases[0].parameter), device="cpu").detach()
    for i, bias in enumerate(biases):
        part = checkpoint.reader.get(bias.name)
        value = value.to(part.dtype) if i == 0 else value
        place = bias.of_source(value)
        if place.shape != part.shape:
            raise ValueError(
                f"{checkpoint.reader.path}: {bias.name} must have shape {list(place.shape)}, got {list(part.shape)}"
            )
        place.copy_(part)
    return value


# -------------------------------------------------------------------------------------------------------------- dialect


def _require_exact(checkpoint: Checkpoint, dialect: Dialect) -> None:
    """Refuse what the other dialect would store as other numbers. Reads scales only."""
    path = checkpoint.reader.path
    if cache := next((n for n in checkpoint.reader.names() if n.endswith(CACHE_SCALES)), None):
        raise ValueError(
            f"{path}: {cache} belongs to a quantized KV cache, which the dialects describe differently; dequantize the "
            "checkpoint, or quantize the original without it"
        )
    for name in checkpoint.quantized():
        names = checkpoint.tensor_names(name)
        if names.scale not in checkpoint.reader:
            continue
        scale = dialects.one_number(f"{path}: {names.scale}", checkpoint.reader.get(names.scale))
        if math.frexp(scale.item())[0] != 0.5:
            raise ValueError(
                f"{path}: {names.scale} is {scale.item()}, not a power of two; the {dialect} dialect stores its "
                "reciprocal, which would change bits. Quantize the original anew with --recipe aligned, or dequantize"
            )
        if names.input_scale in checkpoint.reader:
            stored = dialects.one_number(f"{path}: {names.input_scale}", checkpoint.reader.get(names.input_scale))
            if not bool((stored.reciprocal().reciprocal() == stored).all()):
                raise ValueError(
                    f"{path}: {names.input_scale} is {stored.flatten().tolist()}; the {dialect} dialect stores its "
                    "reciprocal, which would change bits"
                )


def _in_dialect(
    checkpoint: Checkpoint, model: nn.Module, parts: list[DiskWeight], target: list[DiskWeight], dialect: Dialect
) -> Iterator[tuple[str, Tensor]]:
    """One parameter's tensors in the other dialect."""
    same, parameter = {_place(disk): disk for disk in parts}, model.get_parameter(parts[0].weight.name)
    if all(_place(disk) in same for disk in target):
        for disk in target:
            part = same[_place(disk)]
            yield from _written(disk, read_part(checkpoint, parameter, part), _input_scale(checkpoint, [part]), dialect)
        return
    weight, scale = parts[0].weight, _input_scale(checkpoint, parts)
    q = read_parameter(checkpoint, parameter, parts)
    if q.per_tensor_scale.ndim:
        raise ValueError(
            f"{checkpoint.reader.path}: {weight.name}: its experts have scales of their own, and the {dialect} dialect "
            "has one for all of them; quantize the original anew"
        )
    for disk in target:
        yield from _written(disk, disk.of_parameter(q), scale, dialect)


def _place(disk: DiskWeight) -> tuple[Any, ...]:
    rows = disk.rows and (disk.rows.start, disk.rows.stop, disk.rows.step)
    return disk.expert, rows


def _written(disk: DiskWeight, q: NVFP4Tensor, scale: Tensor | None, dialect: Dialect) -> Iterator[tuple[str, Tensor]]:
    yield from dialects.write(disk.name, q, dialect, transposed=disk.stored_transposed).items()
    if scale is not None:
        shape = () if dialect is Dialect.MODELOPT else (1,)
        yield dialects.tensor_names(disk.name, dialect).input_scale, scale.float().reciprocal().reshape(shape)


def _input_scale(checkpoint: Checkpoint, parts: list[DiskWeight]) -> Tensor | None:
    """What the parts store, if they store the same."""
    names = [checkpoint.tensor_names(disk.name).input_scale for disk in parts]
    present = [name for name in names if name in checkpoint.reader]
    if not present:
        return None
    if len(present) < len(names):
        missing = next(name for name in names if name not in checkpoint.reader)
        raise ValueError(f"{checkpoint.reader.path}: {missing} is missing; other parts of the stack have theirs")
    scales = [checkpoint.reader.get(name) for name in present]
    for name, scale in zip(present, scales, strict=True):
        if not torch.equal(scale, scales[0]):
            raise ValueError(
                f"{checkpoint.reader.path}: {name} differs from {present[0]}, and one stack has one activation scale"
            )
    return scales[0]


def _rebuilt_biases(
    checkpoint: Checkpoint, model: nn.Module, biases: list[SplitBias], split: list[SplitBias] | None
) -> Iterator[tuple[str, Tensor]]:
    yield from _split_bias(biases[0].source, _joined(checkpoint, model, biases), split)


def _split_bias(name: str, tensor: Tensor, split: list[SplitBias] | None) -> Iterator[tuple[str, Tensor]]:
    if split is None:
        yield name, tensor
    else:
        yield from ((bias.name, bias.of_source(tensor).clone()) for bias in split)


def _write_configs(
    directory: Path, checkpoint: Checkpoint, model: nn.Module, target: Plan, rest: list[str], dialect: Dialect
) -> None:
    ignored = ignored_modules({n: len(checkpoint.reader.shape(n)) for n in rest}, target, model, dialect)
    config = dict(checkpoint.reader.config)
    config["quantization_config"] = dialects.quantization_config(dialect, ignored, weights_only=checkpoint.weights_only)
    if dialect is Dialect.MODELOPT:
        legacy = dialects.hf_quant_config(ignored, weights_only=checkpoint.weights_only)
        checkpoint_io.write_json(directory / "hf_quant_config.json", legacy)
    checkpoint_io.write_json(directory / "config.json", config)
