"""Export: from a trainer model, or straight from a BF16 checkpoint, to NVFP4 checkpoints and weight streams.

Both ways emit the same bytes through the same plan; a model's weights come from ``convert.quantize_weight``, which is
also what its forward multiplies by.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import checkpoint_io, dialects, names, ops
from quads_qat.checkpoint_plan import DiskWeight, Plan, disk_plan, layer_of, skeleton
from quads_qat.config import Dialect, Mode, Recipe, Scope
from quads_qat.convert import Conversion, conversion_of, quantize_weight, select
from quads_qat.scale_groups import activation_key

ActivationScales = str | Mapping[str, Any]


# --------------------------------------------------------------------------------------------------------- from a model


def export_weights(
    model: nn.Module,
    dialect: Dialect | str,
    *,
    activations: ActivationScales = "none",
    group_by: str = "layer",
    ranks: str | int = "all",
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the whole checkpoint, layer by layer, in the names that engines load.

    Args:
        model: converted to w4a16 or w4a4; read anew at every call.
        dialect: ``modelopt`` or ``compressed-tensors``.
        activations: ``none`` (a W4A16 checkpoint), ``observed`` (W4A4, from ``observe_activations``), or a mapping from
            tensor names on disk (``...q_proj.input_scale``) to values, written as they are.
        group_by: ``layer``: all tensors of a layer follow each other.
        ranks: ``all`` yields on every rank, a number on that rank only.

    Yields:
        Fresh tensors on the model's device; at most one weight group more than the model is in memory.

    Raises:
        ValueError: an unconverted or rollout model, meta weights, NaN or inf in a weight, a recipe that the dialect
            cannot carry, missing observations. Raised at the call, before the first tensor, wherever possible.
    """
    root, conversion, dialect = _prepare(model, dialect, "export_weights")
    if group_by != "layer":
        raise ValueError(f"export_weights: group_by must be 'layer', got {group_by!r}")
    plan = disk_plan(root, conversion, dialect)
    scales = _input_scales(plan, conversion, dialect, activations)
    if ranks != "all" and torch.distributed.is_initialized() and torch.distributed.get_rank() != ranks:
        return iter(())
    return _stream_model(root, conversion, plan, dialect, scales)


def _prepare(model: nn.Module, dialect: Dialect | str, who: str) -> tuple[nn.Module, Conversion, Dialect]:
    dialect = Dialect(dialect)
    root, conversion = conversion_of(model, who)
    if conversion.mode is Mode.W4A4_RESIDUAL:
        raise ValueError(
            f"{who}: a rollout model holds packed weights only; export the trainer model that it came from"
        )
    dialects.check_recipe(conversion.recipe, dialect)
    for name, parameter in root.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{who}: {name} is on the meta device and has no values; load the weights first")
    return root, conversion, dialect


def _stream_model(
    root: nn.Module, conversion: Conversion, plan: Plan, dialect: Dialect, scales: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    rest = _rest_names(root, conversion)
    parts: dict[str, list[DiskWeight]] = {}
    for disk in plan.weights:
        parts.setdefault(disk.weight.name, []).append(disk)
    for layer in _layers([*parts, *rest]):
        for parameter in (p for p in parts if layer_of(p) == layer):
            q = quantize_weight(root, conversion, conversion.weights[parameter])
            for disk in parts[parameter]:
                yield from _emit(disk, disk.of_parameter(q), dialect, scales)
            del q
        yield from _rest_of_layer(root, conversion, plan, [n for n in rest if layer_of(n) == layer])
    yield from ((n, s) for n, s in scales.items() if n not in _own_scales(plan, dialect))


def _emit(disk: DiskWeight, q: Any, dialect: Dialect, scales: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    _require_finite_decode(disk, q)
    transposed = disk.whole_stack and disk.source_transposed
    yield from dialects.write(disk.name, q, dialect, transposed=transposed).items()
    input_scale = dialects.tensor_names(disk.name, dialect).input_scale
    if input_scale in scales:
        yield input_scale, scales[input_scale].clone()


def _require_finite_decode(disk: DiskWeight, q: Any) -> None:
    if disk.weight.format.export_dtype != torch.float16:
        return
    if not bool(torch.isfinite(ops.dequantize(q, torch.float16)).all()):
        raise ValueError(
            f"{disk.name}: fp16 weights from 64544 up decode to inf in fp16; clip them, or train and export in bf16"
        )


def _rest_names(root: nn.Module, conversion: Conversion) -> list[str]:
    return [name for name in names.state_dict_names(root) if name not in conversion.weights]


def _layers(parameters: Iterable[str]) -> list[str]:
    """Layers in the order of the model; what belongs to none comes first."""
    return sorted({layer_of(p): None for p in parameters}, key=lambda layer: (layer != "", _natural(layer)))


def _natural(name: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def _rest_of_layer(
    root: nn.Module, conversion: Conversion, plan: Plan, rest: list[str]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors that stay in high precision, under their disk names, cast as the exporter casts masters."""
    state = root.state_dict()
    cast = _masters_are_fp32(root, conversion)
    kept = _kept_in_fp32(root)
    tensors = {}
    for name in rest:
        tensor = state[name].detach()
        if cast is not None and tensor.dtype == torch.float32 and not any(k in name for k in kept):
            tensor = tensor.to(cast)
        tensors[name] = tensor
    split = {bias.source for bias in plan.biases}
    for name, tensor in names.disk_state(root, tensors).items() if tensors else ():
        if name in split:
            yield from ((b.name, b.of_source(tensor).clone()) for b in plan.biases if b.source == name)
        else:
            yield name, tensor.detach().clone(memory_format=torch.contiguous_format)


def export_rest(root: nn.Module, conversion: Conversion, plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """(name on disk, tensor) of everything that stays in high precision, layer by layer."""
    rest = _rest_names(root, conversion)
    for layer in _layers(rest):
        yield from _rest_of_layer(root, conversion, plan, [n for n in rest if layer_of(n) == layer])


def _masters_are_fp32(root: nn.Module, conversion: Conversion) -> torch.dtype | None:
    """The dtype that everything is cast to, if all parameters are fp32 masters; None if they are not."""
    if any(p.dtype != torch.float32 for p in root.parameters() if p.is_floating_point()):
        return None
    return next(iter(conversion.weights.values())).format.export_dtype


def _kept_in_fp32(root: nn.Module) -> tuple[str, ...]:
    declared = (getattr(root, "_keep_in_fp32_modules", None), getattr(root, "_keep_in_fp32_modules_strict", None))
    return tuple(name for names_ in declared for name in names_ or ())


def _input_scales(
    plan: Plan, conversion: Conversion, dialect: Dialect, activations: ActivationScales
) -> dict[str, Tensor]:
    """Activation scales by tensor name on disk, as the dialect stores them."""
    if isinstance(activations, Mapping):
        given = {n: torch.as_tensor(v, dtype=torch.float32).clone() for n, v in activations.items()}
        for name in _own_scales(plan, dialect):
            if name not in given:
                raise ValueError(
                    f"export: activations has no {name}; a W4A4 checkpoint needs one for every quantized weight"
                )
        for name, value in given.items():
            if not bool(torch.isfinite(value).all() & (value > 0).all()):
                raise ValueError(
                    f"export: activations[{name!r}] must be finite and > 0, got {value.flatten()[:4].tolist()}"
                )
        return given
    if activations == "none":
        return {}
    if activations != "observed":
        raise ValueError(f"export: activations must be 'none', 'observed' or a mapping, got {activations!r}")
    scales = {}
    for disk in plan.weights:
        observer = conversion.observers[activation_key(disk.weight.group)]
        if observer.amax is None:
            raise ValueError(
                f"export: no activations were observed for {observer.name}; run some batches inside `with "
                "quads_qat.observe_activations(model):`, or pass activations='none' for a W4A16 checkpoint"
            )
        p, own = ops.scale_from_amax(observer.amax.to(disk.weight.format.export_dtype), recipe=conversion.recipe)
        scales[dialects.tensor_names(disk.name, dialect).input_scale] = dialects.stored(
            p, own, conversion.recipe, dialect
        )
    return scales


def _own_scales(plan: Plan, dialect: Dialect) -> list[str]:
    return [dialects.tensor_names(disk.name, dialect).input_scale for disk in plan.weights]


def export_metadata(
    model: nn.Module, dialect: Dialect | str, *, activations: ActivationScales = "none"
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """(name, dtype, shape) of everything that :func:`export_weights` yields, in its order, without quantizing."""
    root, conversion, dialect = _prepare(model, dialect, "export_metadata")
    plan = disk_plan(root, conversion, dialect)
    scales = _input_scales(plan, conversion, dialect, activations)
    with torch.device("meta"):
        scales = {name: torch.empty_like(s, device="meta") for name, s in scales.items()}
        stream = _stream_metadata(root, conversion, plan, dialect, scales)
        return [(name, t.dtype, tuple(t.shape)) for name, t in stream]


def _stream_metadata(
    root: nn.Module, conversion: Conversion, plan: Plan, dialect: Dialect, scales: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    shapes = {n: root.get_parameter(n).shape for n in conversion.weights}
    rest = _rest_names(root, conversion)
    for layer in _layers([*dict.fromkeys(d.weight.name for d in plan.weights), *rest]):
        for parameter in dict.fromkeys(d.weight.name for d in plan.weights if layer_of(d.weight.name) == layer):
            fmt, shape = conversion.weights[parameter].format, shapes[parameter]
            *lead, n, k = (*shape[:-2], shape[-1], shape[-2]) if fmt.transposed else shape
            empty = torch.empty(lead if fmt.per_expert else (), dtype=torch.float32, device="meta")
            q = dialects.NVFP4Tensor(
                torch.empty(*lead, n, k // 2, dtype=torch.uint8, device="meta"),
                torch.empty(*lead, n, k // 16, dtype=torch.float8_e4m3fn, device="meta"),
                empty,
                conversion.recipe,
                empty,
            )
            for disk in (d for d in plan.weights if d.weight.name == parameter):
                transposed = disk.whole_stack and disk.source_transposed
                yield from dialects.write(disk.name, disk.of_parameter(q), dialect, transposed=transposed).items()
                input_scale = dialects.tensor_names(disk.name, dialect).input_scale
                if input_scale in scales:
                    yield input_scale, scales[input_scale]
        for name, tensor in _rest_of_layer(root, conversion, plan, [n for n in rest if layer_of(n) == layer]):
            yield name, tensor.to("meta")
    yield from ((n, s) for n, s in scales.items() if n not in _own_scales(plan, dialect))


def bucketed(
    stream: Iterable[tuple[str, Tensor]], bucket_bytes: int
) -> Iterator[tuple[list[tuple[str, torch.dtype, tuple[int, ...], int]], Tensor]]:
    """Pack a weight stream into flat uint8 buckets for one broadcast each.

    Args:
        stream: (name, tensor) pairs.
        bucket_bytes: a bucket is yielded before it would exceed this; one larger tensor gets a bucket of its own.

    Yields:
        (entries, bucket): entries are (name, dtype, shape, byte offset), bucket is uint8 [bytes]; offsets are
        multiples of 16.
    """
    entries: list[tuple[str, torch.dtype, tuple[int, ...], int]] = []
    parts: list[Tensor] = []
    size = 0
    for name, tensor in stream:
        flat = (
            tensor.detach().contiguous().view(-1).view(torch.uint8)
            if tensor.ndim
            else tensor.reshape(1).view(torch.uint8)
        )
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % 16))
        if parts and size + padded.numel() > bucket_bytes:
            yield entries, torch.cat(parts)
            entries, parts, size = [], [], 0
        entries.append((name, tensor.dtype, tuple(tensor.shape), size))
        parts.append(padded)
        size += padded.numel()
    if parts:
        yield entries, torch.cat(parts)


# ---------------------------------------------------------------------------------------------------- whole checkpoints


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

    Args:
        model: converted to w4a16 or w4a4.
        path: directory to make; it must not exist. It appears when everything is written.
        dialect: ``modelopt`` (vLLM, SGLang, TensorRT-LLM) or ``compressed-tensors`` (transformers, vLLM, SGLang).
        source: the original checkpoint: its config.json is kept and only extended, tokenizer and code are copied.
        activations: as in :func:`export_weights`.
        shard_bytes: size of a shard.

    Raises:
        ValueError: as :func:`export_weights`; ``path`` exists; the disk is full. Nothing half-written stays.
    """
    root, conversion, dialect = _prepare(model, dialect, "export_checkpoint")
    metadata = export_metadata(model, dialect, activations=activations)
    plan = disk_plan(root, conversion, dialect)
    config = _config_of(root, source, next(iter(conversion.weights.values())).format.export_dtype)
    _require_space(Path(path), sum(_nbytes(dtype, shape) for _, dtype, shape in metadata))
    rest = {n: len(shape) for n, _, shape in metadata if n not in _quantized_names(plan, dialect)}
    with checkpoint_io.whole_directory(path) as directory:
        checkpoint_io.write_shards(directory, export_weights(model, dialect, activations=activations), shard_bytes)
        _write_configs(directory, config, dialect, _ignored(rest, root), conversion, weights_only=activations == "none")
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

    The bytes equal those of loading, converting and exporting the model. ``activations``: ``none`` or a mapping, as in
    :func:`export_weights`. ``progress(done, total)`` counts bytes of the source.
    """
    dialect, recipe = Dialect(dialect), Recipe(recipe)
    dialects.check_recipe(recipe, dialect)
    if activations == "observed":
        raise ValueError(
            "quantize: a W4A4 checkpoint needs activation scales, which weights alone do not give; convert the model, observe "
            "activations and use export_checkpoint, pass a mapping, or make a W4A16 checkpoint (--weights-only)"
        )
    reader = checkpoint_io.Reader(source)
    if "quantization_config" in reader.config:
        raise ValueError(f"{source} is quantized already; quantize the original BF16 checkpoint")
    model, conversion, plan = plan_checkpoint(reader, dialect, recipe, Scope(scope), tuple(include), tuple(exclude))
    scales = _input_scales(plan, conversion, dialect, activations)
    sources = {d.source for d in plan.weights} | {b.source for b in plan.biases}
    rest = {n: len(reader.shape(n)) for n in reader.names() if n not in sources}
    _require_space(Path(destination), int(0.3 * reader.nbytes()))
    with checkpoint_io.whole_directory(destination) as directory:
        stream = _stream_files(reader, conversion, plan, dialect, scales, list(rest), progress)
        checkpoint_io.write_shards(directory, stream, shard_bytes)
        ignored = _ignored(rest, model)
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
    model = skeleton(reader.path)
    conversion = select(model, recipe=recipe, scope=scope, include=include, exclude=exclude)
    plan = disk_plan(model, conversion, dialect)
    missing = [d.source for d in plan.weights if d.source not in reader]
    if missing:
        raise ValueError(
            f"{reader.path}: {missing[0]} and {len(missing) - 1} more weights of {type(model).__name__} are not in the checkpoint"
        )
    return model, conversion, plan


def scale_groups_on_disk(plan: Plan) -> list[list[DiskWeight]]:
    """Disk weights that share a scale, layer by layer."""
    groups: dict[tuple[str, int | None], list[DiskWeight]] = {}
    for disk in plan.weights:
        groups.setdefault(disk.scale_key, []).append(disk)
    return sorted(groups.values(), key=lambda g: _natural(layer_of(g[0].source)))


def _stream_files(
    reader: checkpoint_io.Reader,
    conversion: Conversion,
    plan: Plan,
    dialect: Dialect,
    scales: dict[str, Tensor],
    rest: list[str],
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[str, Tensor]]:
    groups = scale_groups_on_disk(plan)
    total, done = reader.nbytes(), 0
    for layer in _layers([*(g[0].source for g in groups), *rest]):
        for group in (g for g in groups if layer_of(g[0].source) == layer):
            tensors = [disk.of_source(reader.get(disk.source)) for disk in group]
            amax = ops.amax(*tensors)
            for disk, tensor in zip(group, tensors, strict=True):
                try:
                    q = ops.quantize(tensor, tensor_amax=amax, recipe=conversion.recipe, check_finite=True)
                except ValueError as error:
                    raise ValueError(f"{disk.source}: {error}") from error
                yield from _emit(disk, q, dialect, scales)
                done += tensor.nbytes
            if progress is not None:
                progress(done, total)
        for bias in (b for b in plan.biases if layer_of(b.source) == layer):
            yield bias.name, bias.of_source(reader.get(bias.source)).clone()
        for name in (n for n in rest if layer_of(n) == layer):
            tensor = reader.get(name)
            yield name, tensor
            done += tensor.nbytes
    yield from ((n, s) for n, s in scales.items() if n not in _own_scales(plan, dialect))
    if progress is not None:
        progress(total, total)


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


def _quantized_names(plan: Plan, dialect: Dialect) -> set[str]:
    quantized = set(_own_scales(plan, dialect))
    for disk in plan.weights:
        quantized.update(dialects.tensor_names(disk.name, dialect).weight)
    return quantized


def _ignored(rest: dict[str, int], model: nn.Module) -> list[str]:
    """Every module that keeps a weight of two or more dims, by its full name on disk; the head also when it is tied."""
    ignored = {
        n.removesuffix(".weight") if n.endswith(".weight") else n.rpartition(".")[0]
        for n, ndim in rest.items()
        if ndim >= 2
    }
    head = getattr(model, "get_output_embeddings", lambda: None)()
    ignored.update(name for name, module in model.named_modules() if module is head and name)
    return sorted(ignored, key=_natural)


def _nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return torch.empty((), dtype=dtype).element_size() * int(torch.Size(shape).numel())


def _require_space(destination: Path, needed: int) -> None:
    parent = destination.absolute().parent
    if parent.is_dir() and shutil.disk_usage(parent).free < needed:
        raise ValueError(
            f"{destination}: needs about {needed / 1e9:.1f} GB, {shutil.disk_usage(parent).free / 1e9:.1f} GB are free there"
        )
