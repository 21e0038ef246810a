"""NVFP4 checkpoints into other checkpoints without quantizing anything: dequantized, or in the other dialect.

Both stream: in memory is one tensor of the original checkpoint (with the experts that it holds) for each worker. A call
that was killed is continued by the same call, as ``quantize`` is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import checkpoint_io, dialects, engine_limits, names, ops
from quads_qat.checkpoint_plan import DiskWeight, Plan, SplitBias, biases_by_source, cut, disk_plan, source_tensor
from quads_qat.config import Dialect, Recipe
from quads_qat.contract import KEY
from quads_qat.export import ignored_modules
from quads_qat.formats import FLOATS
from quads_qat.nvfp4_checkpoint import Checkpoint, by_parameter, read_bias, read_parameter, read_part
from quads_qat.output_shards import Piece, Unit, copied, pack, write_checkpoint
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.required_tensors import require_tensors
from quads_qat.safetensors_file import Layout
from quads_qat.skeleton import skeleton
from quads_qat.weight_stream import CACHE_SCALES, by_layer

Progress = Callable[[int, int], None]


def dequantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = checkpoint_io.DEFAULT_SHARD_BYTES,
    workers: int | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> bool:
    """Write an NVFP4 checkpoint of either dialect as a plain one, in the names that transformers loads.

    The weights are those of :func:`~quads_qat.load.load_model`, bit for bit; what was not quantized is copied as it is,
    tokenizer and code too. Scales of activations and of a KV cache are dropped. Names that only the quantized one had
    (llm-compressor's experts of Mixtral and gpt-oss) become the architecture's own again.

    Args:
        source: directory of either dialect.
        destination: a directory that is not there, is empty, or holds the same job, finished or not.
        dtype: of the decoded weights, bfloat16, float16 or float32; None: config.json's, or where it has none the
            files'. With Recipe.ALIGNED, bf16 holds every weight exactly.
        shard_bytes: size of a shard.
        workers: threads; None: one for each CPU core, at most 8.
        trust_remote_code: run the model code that the source brings, where transformers has none.
        progress: called with (done, total) bytes of the source.

    Returns:
        Whether anything was written; False where ``destination`` holds what this call makes, its hashes verified.

    Raises:
        ValueError: as :func:`~quads_qat.load.load_model`; ``destination`` holds something else; the disk is full.

    Example::

        dequantize_checkpoint("nvfp4", "bf16")
        model = AutoModelForCausalLM.from_pretrained("bf16")
    """
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"dequantize: dtype must be bfloat16, float16 or float32, got {dtype}")
    checkpoint = Checkpoint.open(source)
    model = skeleton(checkpoint.reader, dtype, trust_remote_code=trust_remote_code)
    conversion, plan = checkpoint.plan(model)
    dtype = dtype or next(model.get_parameter(name).dtype for name in conversion.weights)
    recoded = _Recoded(checkpoint, model, plan)
    shapes = {name: tuple(tensor.shape) for name, tensor in names.disk_layouts(model).items()}
    units: dict[str, Unit] = {}
    for name, parts in recoded.by_source().items():
        layouts = {name: (dtype, shapes[name])}
        make = partial(_decoded, checkpoint, model, name, parts, dtype)
        units[name] = recoded.unit(layouts, make, [disk.name for disk in parts])
    for name in recoded.unplaced:
        *lead, n, k = checkpoint.reader.shape(checkpoint.tensor_names(name).qdata)
        shape = (*lead, n, 2 * k) if name.endswith(".weight") else (*lead, 2 * n, k)
        units[name] = recoded.unit({name: (dtype, shape)}, partial(_decoded_alone, checkpoint, name, dtype), [name])
    for name, biases in recoded.biases().items():
        kept = checkpoint.reader.entry(biases[0].name).dtype
        units[name] = recoded.unit({name: (kept, shapes[name])}, partial(_joined, checkpoint, model, name, biases))
    units |= {name: copied(checkpoint.reader, name) for name in recoded.rest}
    config = {k: v for k, v in checkpoint.reader.config.items() if k not in ("quantization_config", KEY)}
    return write_checkpoint(
        destination,
        {"command": "dequantize", "dtype": str(dtype)},
        pack(_layer_by_layer(units), shard_bytes),
        checkpoint.reader,
        {"config.json": checkpoint_io.with_dtype(config, dtype)},
        workers=workers,
        progress=progress,
        left_behind=["recipe.yaml"],  # llm-compressor's: it describes what is undone here
    )


def convert_dialect(
    source: str | Path,
    destination: str | Path,
    *,
    dialect: Dialect | str,
    shard_bytes: int = checkpoint_io.DEFAULT_SHARD_BYTES,
    workers: int | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> bool:
    """Write an NVFP4 checkpoint in the other dialect: the same codes and block scales, and scales that decode alike.

    The dialects store the per-tensor scale in opposite directions, so it survives only if it is a power of two, as
    Recipe.ALIGNED makes it: x * p and x / (1/p) are the same bits then. An activation scale survives if 1/(1/x) == x.

    Args:
        source: directory of the other dialect.
        destination: a directory that is not there, is empty, or holds the same job, finished or not.
        dialect: which one to write.
        shard_bytes: size of a shard.
        workers: threads; None: one for each CPU core, at most 8.
        trust_remote_code: run the model code that the source brings, where transformers has none.
        progress: called with (done, total) bytes of the source.

    Returns:
        Whether anything was written; False where ``destination`` holds what this call makes, its hashes verified.

    Raises:
        ValueError: ``source`` is in that dialect already; a scale that would change bits (named); scales of a KV cache;
            experts whose scales differ where the dialect has one for all; as :func:`dequantize_checkpoint`.
    """
    dialect, checkpoint = Dialect(dialect), Checkpoint.open(source)
    if checkpoint.dialect is dialect:
        raise ValueError(f"{source} is in the {dialect} dialect already")
    _require_exact(checkpoint, dialect)
    checkpoint.recipe = Recipe.ALIGNED  # which every power of two decodes like
    model = skeleton(checkpoint.reader, trust_remote_code=trust_remote_code)
    conversion, plan = checkpoint.plan(model)
    target = disk_plan(model, conversion, dialect)
    quantized, weights_only = [disk.name for disk in target.weights], checkpoint.weights_only
    engine_limits.warn(checkpoint.reader.config, dialect, quantized, weights_only=weights_only, stacklevel=2)
    recoded = _Recoded(checkpoint, model, plan)
    if recoded.unplaced:
        raise ValueError(f"{source}: {recoded.unplaced[0]} belongs to no module of {type(model).__name__}")
    units: dict[str, Unit] = {}
    for name, disks in by_parameter(target).items():
        parts = [disk for disk in plan.weights if disk.weight.name == name]
        layouts = _layouts_of(checkpoint, model, parts, disks, dialect)
        make = partial(_in_dialect, checkpoint, model, parts, disks, dialect)
        units[disks[0].name] = recoded.unit(layouts, make, [disk.name for disk in parts])
    joined, split = recoded.biases(), biases_by_source(target)
    for name, biases in joined.items():
        kept, whole = checkpoint.reader.entry(biases[0].name).dtype, model.get_parameter(biases[0].parameter)
        into = split.get(name, [])
        layouts = {bias.name: (kept, tuple(bias.of_source(whole).shape)) for bias in into}
        layouts = layouts or {name: (kept, tuple(whole.shape))}
        units[name] = recoded.unit(layouts, partial(_rebuilt_biases, checkpoint, model, name, biases, into))
    for name in recoded.rest:
        if name in split:
            layouts = {b.name: (checkpoint.reader.entry(name).dtype, _shape_of(b, model)) for b in split[name]}
            units[name] = recoded.unit(layouts, partial(_split_bias, checkpoint, name, split[name]))
        else:
            units[name] = copied(checkpoint.reader, name)
    ignored = ignored_modules({n: len(checkpoint.reader.shape(n)) for n in recoded.rest}, target, model, dialect)
    return write_checkpoint(
        destination,
        {"command": "convert-dialect", "dialect": dialect.value},
        pack(_layer_by_layer(units), shard_bytes),
        checkpoint.reader,
        _configs(checkpoint, recoded.rest, ignored, dialect),
        workers=workers,
        progress=progress,
    )


def _layer_by_layer(units: dict[str, Unit]) -> Iterable[Unit]:
    return (units[name] for layer in by_layer(units).values() for name in layer)


class _Recoded:
    """Which tensors of a checkpoint belong to what.

    Attributes:
        rest: names of tensors that are neither of a quantized weight, nor split with one, nor a scale.
        unplaced: quantized weights that the model leaves out (layers for multi-token prediction).
    """

    def __init__(self, checkpoint: Checkpoint, model: nn.Module, plan: Plan) -> None:
        self.checkpoint, self.plan = checkpoint, plan
        placed = {disk.name for disk in plan.weights}
        self.unplaced = [n for n in checkpoint.quantized() if n not in placed and n not in checkpoint.renamed.values()]
        tensors = [checkpoint.tensor_names(name) for name in (*placed, *self.unplaced)]
        taken = {tensor for n in tensors for tensor in (*n.weight, n.input_scale)} | {b.name for b in plan.biases}
        self.rest = [n for n in checkpoint.reader.names() if n not in taken and not n.endswith(CACHE_SCALES)]
        require_tensors(checkpoint.reader, model, plan.sources)

    def unit(
        self, layouts: dict[str, Layout], make: Callable[[], Iterator[Piece]], weights: Iterable[str] = ()
    ) -> Unit:
        """What makes these tensors, of these quantized weights (none: of something small)."""
        read = (t for name in weights for t in self.checkpoint.tensor_names(name).weight)
        return Unit(layouts, sum(self.checkpoint.reader.entry(t).nbytes for t in read), make)

    def by_source(self) -> dict[str, list[DiskWeight]]:
        """Weights by the BF16 tensor that they are parts of."""
        found: dict[str, list[DiskWeight]] = {}
        for disk in self.plan.weights:
            found.setdefault(disk.source, []).append(disk)
        return found

    def biases(self) -> dict[str, list[SplitBias]]:
        """Split biases by the tensor that they are parts of."""
        return biases_by_source(self.plan)


# ----------------------------------------------------------------------------------------------------------- dequantize


def _decoded(
    checkpoint: Checkpoint, model: nn.Module, name: str, parts: list[DiskWeight], dtype: torch.dtype
) -> Iterator[Piece]:
    """The BF16 tensor on disk that ``parts`` make up."""
    parameter = model.get_parameter(parts[0].weight.name)
    shape = (parameter.mT if parts[0].weight.format.transposed else parameter).shape

    def decode(disk: DiskWeight) -> Tensor:
        return ops.dequantize(read_part(checkpoint, parameter, disk), dtype)

    yield name, 0, source_tensor(parts, shape, decode)


def _decoded_alone(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Iterator[Piece]:
    value = ops.dequantize(checkpoint.read(name), dtype)
    yield name, 0, value if name.endswith(".weight") else value.mT


def _joined(checkpoint: Checkpoint, model: nn.Module, name: str, biases: list[SplitBias]) -> Iterator[Piece]:
    yield name, 0, read_bias(checkpoint, model, biases)


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
        tensors = checkpoint.tensor_names(name)
        if tensors.scale not in checkpoint.reader:
            continue
        scale = dialects.one_number(f"{path}: {tensors.scale}", checkpoint.reader.get(tensors.scale))
        if math.frexp(scale.item())[0] != 0.5:
            raise ValueError(
                f"{path}: {tensors.scale} is {scale.item()}, not a power of two; the {dialect} dialect stores its "
                "reciprocal, which would change bits. Quantize the original anew with --recipe aligned, or dequantize"
            )
        if tensors.input_scale in checkpoint.reader:
            stored = dialects.one_number(f"{path}: {tensors.input_scale}", checkpoint.reader.get(tensors.input_scale))
            if not bool((stored.reciprocal().reciprocal() == stored).all()):
                raise ValueError(
                    f"{path}: {tensors.input_scale} is {stored.flatten().tolist()}; the {dialect} dialect stores its "
                    "reciprocal, which would change bits"
                )


def _layouts_of(
    checkpoint: Checkpoint, model: nn.Module, parts: list[DiskWeight], target: list[DiskWeight], dialect: Dialect
) -> dict[str, Layout]:
    """Of what :func:`_in_dialect` makes."""
    parameter, layouts = model.get_parameter(parts[0].weight.name), {}
    scaled = any(checkpoint.tensor_names(disk.name).input_scale in checkpoint.reader for disk in parts)
    for disk in target:
        whole = parameter.mT if disk.weight.format.transposed else parameter
        shape = cut(whole, disk.expert, disk.rows).shape
        layouts |= dialects.layouts(disk.name, shape, dialect, transposed=disk.stored_transposed)
        if scaled:
            scale = dialects.tensor_names(disk.name, dialect).input_scale
            layouts[scale] = torch.float32, dialects.scale_shape(dialect)
    return layouts


def _shape_of(bias: SplitBias, model: nn.Module) -> tuple[int, ...]:
    return tuple(bias.of_source(model.get_parameter(bias.parameter)).shape)


def _in_dialect(
    checkpoint: Checkpoint, model: nn.Module, parts: list[DiskWeight], target: list[DiskWeight], dialect: Dialect
) -> Iterator[Piece]:
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


def _written(disk: DiskWeight, q: NVFP4Tensor, scale: Tensor | None, dialect: Dialect) -> Iterator[Piece]:
    for name, tensor in dialects.write(disk.name, q, dialect, transposed=disk.stored_transposed).items():
        yield name, 0, tensor
    if scale is not None:
        name, shape = dialects.tensor_names(disk.name, dialect).input_scale, dialects.scale_shape(dialect)
        yield name, 0, scale.float().reciprocal().reshape(shape)


def _input_scale(checkpoint: Checkpoint, parts: list[DiskWeight]) -> Tensor | None:
    """What the parts store, if they store the same."""
    scales_of = [checkpoint.tensor_names(disk.name).input_scale for disk in parts]
    present = [name for name in scales_of if name in checkpoint.reader]
    if not present:
        return None
    if len(present) < len(scales_of):
        missing = next(name for name in scales_of if name not in checkpoint.reader)
        raise ValueError(f"{checkpoint.reader.path}: {missing} is missing; other parts of the stack have theirs")
    scales = [checkpoint.reader.get(name) for name in present]
    for name, scale in zip(present, scales, strict=True):
        if not torch.equal(scale, scales[0]):
            raise ValueError(
                f"{checkpoint.reader.path}: {name} differs from {present[0]}, and one stack has one activation scale"
            )
    return scales[0]


def _rebuilt_biases(
    checkpoint: Checkpoint, model: nn.Module, name: str, biases: list[SplitBias], into: list[SplitBias]
) -> Iterator[Piece]:
    for _, _, value in _joined(checkpoint, model, name, biases):
        yield from ((bias.name, 0, bias.of_source(value)) for bias in into)
        if not into:
            yield name, 0, value


def _split_bias(checkpoint: Checkpoint, name: str, into: list[SplitBias]) -> Iterator[Piece]:
    tensor = checkpoint.reader.get(name)
    yield from ((bias.name, 0, bias.of_source(tensor)) for bias in into)


def _configs(
    checkpoint: Checkpoint, rest: Iterable[str], ignored: list[str], dialect: Dialect
) -> dict[str, dict[str, Any]]:
    config, weights_only = checkpoint.reader.config, checkpoint.weights_only
    held = {checkpoint.reader.entry(name).dtype for name in rest if not name.endswith(CACHE_SCALES)}
    if len(held) == 1 and held <= {*FLOATS}:  # of several, the source must know which one readers shall take
        config = checkpoint_io.with_dtype(config, held.pop())
    entry = dialects.quantization_config(dialect, ignored, weights_only=weights_only)
    files = {"config.json": config | {"quantization_config": entry}}
    if dialect is Dialect.MODELOPT:
        files = {"hf_quant_config.json": dialects.hf_quant_config(ignored, weights_only=weights_only), **files}
    return files
