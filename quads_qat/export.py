"""Whole NVFP4 checkpoints: from a trainer model, or straight from a BF16 checkpoint, through the same plan.

What engines read beside the tensors is written here: config.json, hf_quant_config.json, the list of modules that are
not quantized. A checkpoint appears under its name when it is complete.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import checkpoint_io, dialects, ops
from quads_qat.checkpoint_plan import DiskWeight, Plan, export_plan, natural_order
from quads_qat.config import Dialect, Recipe, Scope
from quads_qat.conversion import Conversion, select
from quads_qat.skeleton import skeleton
from quads_qat.weight_stream import (
    ActivationScales,
    by_layer,
    cache_scales,
    emit,
    export_metadata,
    export_weights,
    input_scales,
    own_scales,
    prepare,
    rank,
)


def export_checkpoint(
    model: nn.Module,
    path: str | Path,
    *,
    dialect: Dialect | str,
    source: str | Path | None = None,
    activations: ActivationScales = "none",
    shard_bytes: int = checkpoint_io.DEFAULT_SHARD_BYTES,
) -> None:
    """Write a converted model as an NVFP4 checkpoint that engines load.

    With ``torch.distributed``, call it on all ranks; rank 0 writes.

    Args:
        model: converted to w4a16 or w4a4.
        path: directory to make; it must not exist. It appears when everything is written.
        dialect: ``modelopt`` (vLLM, SGLang, TensorRT-LLM) or ``compressed-tensors`` (transformers, vLLM, SGLang).
        source: the original checkpoint: its config.json is kept and only extended, tokenizer and code are copied.
        activations: as in :func:`~quads_qat.weight_stream.export_weights`.
        shard_bytes: size of a shard.

    Raises:
        ValueError: as :func:`~quads_qat.weight_stream.export_weights`; ``path`` exists; the disk is full. Nothing
            half-written stays.
    """
    root, conversion, dialect = prepare(model, dialect, "export_checkpoint")
    config = _config_of(root, source, next(iter(conversion.weights.values())).format.export_dtype)
    metadata = export_metadata(model, dialect, activations=activations)
    plan = export_plan(root, conversion, dialect)
    quantized = _tensor_names(plan, dialect)
    rest = {name: len(shape) for name, _, shape in metadata if name not in quantized}
    stream = export_weights(model, dialect, activations=activations, ranks=0)
    if rank() != 0:
        next(stream, None)
        return
    _require_space(Path(path), sum(_nbytes(dtype, shape) for _, dtype, shape in metadata))
    with checkpoint_io.whole_directory(path) as directory:
        checkpoint_io.write_shards(directory, stream, shard_bytes)
        ignored = _ignored(rest, plan, root, dialect)
        _write_configs(directory, config, dialect, ignored, conversion, weights_only=activations == "none")
        if source is not None:
            checkpoint_io.copy_companions(Path(source), directory)
        elif getattr(root, "generation_config", None) is not None:
            root.generation_config.save_pretrained(directory)  # pyright: ignore


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    dialect: Dialect | str = Dialect.MODELOPT,
    recipe: Recipe | str = Recipe.ALIGNED,
    scope: Scope | str = Scope.ALL,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    activations: ActivationScales = "none",
    shard_bytes: int = checkpoint_io.DEFAULT_SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Quantize a BF16 checkpoint directory into an NVFP4 one, one scale group in memory at a time.

    Quantized weights are the bytes that loading, converting and exporting the model gives; everything else is copied as
    it is. ``activations``: ``none`` or a mapping, as in :func:`~quads_qat.weight_stream.export_weights`.
    ``progress(done, total)`` counts bytes of the source.
    """
    dialect, recipe = Dialect(dialect), Recipe(recipe)
    dialects.check_recipe(recipe, dialect)
    if activations == "observed":
        raise ValueError(
            "quantize: a W4A4 checkpoint needs activation scales, which weights alone do not give; convert the model, "
            "observe activations and use export_checkpoint, pass a mapping, or make a W4A16 checkpoint (--weights-only)"
        )
    reader = checkpoint_io.Reader(source)
    if "quantization_config" in reader.config:
        raise ValueError(f"{source} is quantized already; quantize the original BF16 checkpoint")
    model, conversion, plan = plan_checkpoint(reader, dialect, recipe, Scope(scope), tuple(include), tuple(exclude))
    scales = input_scales(plan, conversion, dialect, activations)
    sources = {d.source for d in plan.weights} | {b.source for b in plan.biases}
    rest = {n: len(reader.shape(n)) for n in reader.names() if n not in sources}
    _require_space(Path(destination), int(0.3 * reader.nbytes()))
    with checkpoint_io.whole_directory(destination) as directory:
        stream = _stream_files(reader, conversion, plan, dialect, scales, list(rest), progress)
        checkpoint_io.write_shards(directory, stream, shard_bytes)
        ignored = _ignored(rest, plan, model, dialect)
        _write_configs(directory, dict(reader.config), dialect, ignored, conversion, weights_only=activations == "none")
        checkpoint_io.copy_companions(reader.path, directory)


def plan_checkpoint(
    reader: checkpoint_io.Reader,
    dialect: Dialect,
    recipe: Recipe,
    scope: Scope = Scope.ALL,
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
) -> tuple[nn.Module, Conversion, Plan]:
    """The plan of a BF16 checkpoint directory, from its config.json and tensor names alone."""
    model = skeleton(reader.path, reader.names())
    conversion = select(model, recipe=recipe, scope=scope, include=include, exclude=exclude)
    plan = export_plan(model, conversion, dialect)
    missing = [d.source for d in plan.weights if d.source not in reader]
    if missing:
        raise ValueError(
            f"{reader.path}: {missing[0]} and {len(missing) - 1} more weights of {type(model).__name__} are missing"
        )
    return model, conversion, plan


def scale_groups_on_disk(plan: Plan) -> list[list[DiskWeight]]:
    """Disk weights that share a scale."""
    groups: dict[tuple[str, int | None], list[DiskWeight]] = {}
    for disk in plan.weights:
        groups.setdefault(disk.scale_key, []).append(disk)
    return list(groups.values())


def _stream_files(
    reader: checkpoint_io.Reader,
    conversion: Conversion,
    plan: Plan,
    dialect: Dialect,
    scales: dict[str, Tensor],
    rest: list[str],
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[str, Tensor]]:
    groups: dict[str, list[list[DiskWeight]]] = {}
    for group in scale_groups_on_disk(plan):
        groups.setdefault(group[0].source, []).append(group)
    biases: dict[str, list[Any]] = {}
    for bias in plan.biases:
        biases.setdefault(bias.source, []).append(bias)
    extra = cache_scales(plan, dialect, scales)
    total, done = reader.nbytes(), 0
    for layer in by_layer([*groups, *biases, *rest, *extra]).values():
        for group in (group for name in layer for group in groups.get(name, ())):
            done += yield from _quantize_group(group, reader, conversion.recipe, dialect, scales)
            if progress is not None:
                progress(done, total)
        for bias in (bias for name in layer for bias in biases.get(name, ())):
            yield bias.name, bias.of_source(reader.get(bias.source)).clone()
        for name in layer:
            if name in extra:
                yield name, extra[name].clone()
            elif name not in groups and name not in biases:
                tensor = reader.get(name)
                done += tensor.nbytes
                yield name, tensor
    if progress is not None:
        progress(total, total)


def _quantize_group(
    group: list[DiskWeight], reader: checkpoint_io.Reader, recipe: Recipe, dialect: Dialect, scales: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one scale group; returns the bytes that were read for it."""
    tensors = [disk.read_source(reader) for disk in group]
    amax = ops.amax(*tensors)
    for disk, tensor in zip(group, tensors, strict=True):
        try:
            q = ops.quantize(tensor, tensor_amax=amax, recipe=recipe, check_finite=True)
        except ValueError as error:
            raise ValueError(f"{disk.source}: {error}") from error
        yield from emit(disk, q, dialect, scales)
    return sum(tensor.nbytes for tensor in tensors)


# ----------------------------------------------------------------------------------------------------------------- JSON


def _config_of(root: nn.Module, source: str | Path | None, export_dtype: torch.dtype) -> dict[str, Any]:
    if source is not None:
        return checkpoint_io.read_json(Path(source) / "config.json")
    config: Any = getattr(root, "config", None)
    if config is None:
        return {}
    written = json.loads(config.to_json_string())
    written.setdefault("architectures", [type(root).__name__])
    if "num_local_experts" in written and hasattr(config, "num_experts"):  # readers know one or the other
        written.setdefault("num_experts", written["num_local_experts"])
    written["dtype"] = str(export_dtype).removeprefix("torch.")
    return written


def _write_configs(
    directory: Path,
    config: dict[str, Any],
    dialect: Dialect,
    ignored: list[str],
    conversion: Conversion,
    *,
    weights_only: bool,
) -> None:
    config["quantization_config"] = dialects.quantization_config(dialect, ignored, weights_only=weights_only)
    config["quads_qat"] = {
        "recipe": conversion.recipe.value,
        "scope": conversion.scope.value,
        "trainer": conversion.mode.value,
    }
    checkpoint_io.write_json(directory / "config.json", config)
    if dialect is Dialect.MODELOPT:
        quantization = dialects.hf_quant_config(ignored, weights_only=weights_only)
        checkpoint_io.write_json(directory / "hf_quant_config.json", quantization)


def _tensor_names(plan: Plan, dialect: Dialect) -> set[str]:
    """Names of all tensors of quantized weights, activation scales included."""
    names = set(own_scales(plan, dialect))
    for disk in plan.weights:
        names.update(dialects.tensor_names(disk.name, dialect).weight)
    return names


def _ignored(rest: dict[str, int], plan: Plan, model: nn.Module, dialect: Dialect) -> list[str]:
    """Modules that keep a weight of two or more dims, by full name on disk; the head also when it is tied.

    Engines know experts as one module, so single experts bring ``...experts`` with them. A module that holds a
    quantized one (a Mamba mixer with its 2-D ``A_log``) is left out: engines take an entry to mean all below it.
    vLLM takes a plain entry of the ModelOpt dialect for a substring; where that would hit a quantized module, the last
    letter is put in brackets, which only patterns match.
    """
    matrices = [name for name, ndim in rest.items() if ndim >= 2]
    ignored = {n.removesuffix(".weight") if n.endswith(".weight") else n.rpartition(".")[0] for n in matrices}
    ignored |= {match[1] for name in ignored if (match := re.match(r"(.*\.experts)\.\d+\.", name))}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    ignored.update(name for name, module in model.named_modules() if module is head and name)
    holds_quantized = {disk.name[: dot.start()] for disk in plan.weights for dot in re.finditer(r"\.", disk.name)}
    found = sorted(ignored - holds_quantized, key=natural_order)
    if dialect is not Dialect.MODELOPT:
        return found
    quantized = "\n".join({disk.name.removesuffix(".weight"): None for disk in plan.weights})
    return [f"{name[:-1]}[{name[-1]}]" if name in quantized else name for name in found]


# ---------------------------------------------------------------------------------------------------------------- space


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.empty((), dtype=dtype).element_size() * int(torch.Size(shape).numel())


def _require_space(destination: Path, needed: int) -> None:
    parent = destination.absolute().parent
    if parent.is_dir() and shutil.disk_usage(parent).free < needed:
        free = shutil.disk_usage(parent).free
        raise ValueError(f"{destination}: needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free there")
