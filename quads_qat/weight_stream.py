"""From a trainer model to the tensors of an NVFP4 checkpoint, one by one: what engines load, and files hold.

The codes come from ``quantized_weights.quantize_weight``, which is also what the model's forward multiplies by.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import dialects, names, ops, sharding
from quads_qat.checkpoint_plan import (
    DiskWeight,
    Plan,
    SplitBias,
    biases_by_source,
    export_plan,
    layer_of,
    natural_order,
    source_tensor,
)
from quads_qat.config import Dialect, Mode, Recipe
from quads_qat.conversion import Conversion, Weight, conversion_of, require_same_modules, require_unwrapped
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.quantized_weights import amax_of_group, quantize_weight
from quads_qat.scale_groups import activation_key, whole
from quads_qat.schedule import not_started

ActivationScales = str | Mapping[str, Any]

DEQUANTIZED = "dequantized"
"""In the place of a dialect: the weights that codes decode to, for engines that run BF16."""

CACHE_SCALES = (".q_scale", ".k_scale", ".v_scale", ".prob_scale")
"""Scales of a quantized KV cache, which engines take from the checkpoint as they are."""


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
        dialect: ``modelopt`` or ``compressed-tensors``; or ``dequantized``, for engines that run BF16: the weights that
            codes decode to, in BF16 (fp16 for a model in fp16), under the names of the original checkpoint.
        activations: ``none`` (a W4A16 checkpoint), ``observed`` (W4A4, from ``observe_activations``), or a mapping from
            tensor names on disk (``...q_proj.input_scale``, also ``...k_proj.k_scale``) to what the dialect stores.
        group_by: ``layer``: all tensors of a layer follow each other.
        ranks: ``all`` yields on every rank, a number on that rank only. Sharded weights (DTensor: FSDP2, tensor
            parallelism) are gathered one by one, so every rank must exhaust its iterator.

    Yields:
        Fresh tensors on the model's device; at most one parameter's codes more than the model are in memory (and the
        tensor that comes, where dequantized).

    Raises:
        ValueError: an unconverted or rollout model, meta weights, NaN or inf in a weight, a recipe that the dialect
            cannot carry, missing observations. Raised at the call, before the first tensor, wherever possible.
        RuntimeError: a weight was changed before its tensors were taken. Edits through ``parameter.data``, as of some
            optimizers, cannot be seen: step after the stream has ended.
    """
    if group_by != "layer":
        raise ValueError(f"export_weights: group_by must be 'layer', got {group_by!r}")
    root, conversion, chosen = prepare(model, dialect, "export_weights")
    warn_before_start(conversion, "export_weights")
    return weights_of(root, conversion, chosen, activations, ranks)


def weights_of(
    root: nn.Module, conversion: Conversion, dialect: Dialect | None, activations: ActivationScales, ranks: str | int
) -> Iterator[tuple[str, Tensor]]:
    """:func:`export_weights` of what :func:`prepare` found."""
    plan = export_plan(root, conversion, dialect or Dialect.MODELOPT)
    scales = input_scales(plan, conversion, dialect, activations)
    if ranks != "all" and not isinstance(ranks, int):
        raise ValueError(f"export_weights: ranks must be 'all' or the number of a rank, got {ranks!r}")
    versions = {name: root.get_parameter(name)._version for name in conversion.weights}
    amaxes: dict[str, Tensor] = {}  # of scale groups: computed (and gathered) once, not once for each member

    def quantize(weight: Weight) -> NVFP4Tensor:
        for _, _, name in conversion.groups[weight.group].members:
            if root.get_parameter(name)._version != versions[name]:
                raise RuntimeError(f"export: {name} was changed while its model was being exported; export again")
        if weight.group not in amaxes:
            amaxes[weight.group] = amax_of_group(conversion, weight)
        return quantize_weight(root, conversion, weight, amaxes[weight.group])

    source = _Source(quantize, rest_in_memory(root, conversion), scales)
    stream = _stream(root, plan, dialect, source)
    return stream if ranks in ("all", sharding.rank()) else _taking_part(stream)


def _taking_part(stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yields nothing, but gathers sharded weights with the rank that yields."""
    for _ in stream:
        pass
    yield from ()


def export_metadata(
    model: nn.Module, dialect: Dialect | str, *, activations: ActivationScales = "none"
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """(name, dtype, shape) of everything that :func:`export_weights` yields, in its order, without quantizing.

    It refuses what export would refuse, values aside: call it after ``convert`` and before a long run.
    """
    root, conversion, chosen = prepare(model, dialect, "export_metadata")
    plan = export_plan(root, conversion, chosen or Dialect.MODELOPT)
    scales = input_scales(plan, conversion, chosen, activations)
    rest = rest_in_memory(root, conversion)
    source = _Source(
        lambda weight: empty_quantized(root.get_parameter(weight.name).shape, weight),
        {n: (torch.empty(t.shape, dtype=t.dtype, device="meta"), dtype) for n, (t, dtype) in rest.items()},
        {name: torch.empty_like(s, device="meta") for name, s in scales.items()},
    )
    return [(name, t.dtype, tuple(t.shape)) for name, t in _stream(root, plan, chosen, source)]


def export_rest(root: nn.Module, conversion: Conversion, plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """(name on disk, tensor) of everything that stays in high precision, layer by layer."""
    rest, biases = rest_in_memory(root, conversion), biases_by_source(plan)
    for layer in by_layer(rest).values():
        yield from _rest_of_layer(root, {name: rest[name] for name in layer}, biases)


def prepare(model: nn.Module, dialect: Dialect | str, who: str) -> tuple[nn.Module, Conversion, Dialect | None]:
    """The converted module, its record and the dialect (None: dequantized), if it can be exported."""
    chosen = _dialect_or_none(dialect)
    root, conversion = conversion_of(model, who)
    if conversion.mode is Mode.W4A4_RESIDUAL:
        raise ValueError(
            f"{who}: a rollout model holds packed weights only; export the trainer model that it came from"
        )
    if chosen is not None:
        dialects.check_recipe(conversion.recipe, chosen)
    require_unwrapped(root, who)
    require_same_modules(root, conversion, who)
    _refuse_two_names(root, conversion, who)
    for name, parameter in root.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{who}: {name} is on the meta device and has no values; load the weights first")
    return root, conversion, chosen


def _dialect_or_none(dialect: Dialect | str) -> Dialect | None:
    if isinstance(dialect, str) and dialect.lower() == DEQUANTIZED:  # any spelling, as of a Dialect
        return None
    try:
        return Dialect(dialect)
    except ValueError as error:
        raise ValueError(f"{error}, {DEQUANTIZED}") from None


def warn_before_start(conversion: Conversion, who: str, does: str = "gives") -> None:
    """Warn the caller of ``who`` if forwards do not quantize yet."""
    if conversion.full_precision.delayed:
        started = not_started(conversion.schedule.start_step)
        warnings.warn(f"{who}: {started}, and this {does} quantized ones", stacklevel=3)


def _refuse_two_names(root: nn.Module, conversion: Conversion, who: str) -> None:
    names_of: dict[int, str] = {}
    quantized = {weight.module for weight in conversion.weights.values()}
    for name, module in root.named_modules(remove_duplicate=False):
        first = names_of.setdefault(id(module), name)
        if first != name and first in quantized:
            raise ValueError(
                f"{who}: {first} and {name} are one module, quantized under one name only in a checkpoint; "
                f"convert with exclude=[{first!r}], or give {name} a module of its own"
            )


# --------------------------------------------------------------------------------------------------------------- stream


@dataclass(frozen=True)
class _Source:
    """Where a stream's tensors come from: real ones, or meta ones to learn names, dtypes and shapes."""

    quantize: Callable[[Weight], NVFP4Tensor]
    rest: dict[str, tuple[Tensor, torch.dtype]]
    scales: dict[str, Tensor]


def _stream(root: nn.Module, plan: Plan, dialect: Dialect | None, source: _Source) -> Iterator[tuple[str, Tensor]]:
    """``dialect`` None: the original checkpoint's tensors, decoded; any plan will do."""
    parts: dict[str, list[DiskWeight]] = {}
    for disk in plan.weights:
        parts.setdefault(disk.weight.name, []).append(disk)
    extra = {} if dialect is None else cache_scales(plan, dialect, source.scales)
    biases = {} if dialect is None else biases_by_source(plan)
    rounded: list[str] = []
    for layer in by_layer([*parts, *source.rest, *extra]).values():
        for parameter in (name for name in layer if name in parts):
            q = source.quantize(parts[parameter][0].weight)
            if not _require_decodable(parts[parameter][0], q, dialect):
                rounded.append(parameter)
            if dialect is None:
                yield from _decoded(parts[parameter], q)
            else:
                for disk in parts[parameter]:
                    yield from _tensors(disk, disk.of_parameter(q), dialect, source.scales)
            del q
        yield from _rest_of_layer(root, {n: source.rest[n] for n in layer if n in source.rest}, biases)
        yield from ((name, extra[name].clone()) for name in layer if name in extra)
    if rounded and dialect is not None:
        warnings.warn(
            f"export: fp16 cannot hold all that {rounded[0]} and {len(rounded) - 1} more weights decode to (steps "
            "below 2**-24): the trainer multiplies by rounded values, engines by those of the codes; train in "
            "bf16, or set weights that small to 0",
            stacklevel=2,
        )


def _decoded(parts: list[DiskWeight], q: NVFP4Tensor) -> Iterator[tuple[str, Tensor]]:
    """One parameter as it is in a BF16 checkpoint: what its codes decode to, one tensor at a time."""
    by_source: dict[str, list[DiskWeight]] = {}
    for disk in parts:
        by_source.setdefault(disk.source, []).append(disk)
    dtype = parts[0].weight.format.export_dtype
    for source, disks in by_source.items():
        value = source_tensor(disks, q.shape, lambda disk: ops.dequantize(disk.of_parameter(q), dtype))
        yield source, value.contiguous()
        del value


def emit(disk: DiskWeight, q: NVFP4Tensor, dialect: Dialect, scales: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one quantized weight, its activation scale included if there is one."""
    _require_decodable(disk, q, dialect)
    yield from _tensors(disk, q, dialect, scales)


def _tensors(
    disk: DiskWeight, q: NVFP4Tensor, dialect: Dialect, scales: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    yield from dialects.write(disk.name, q, dialect, transposed=disk.stored_transposed).items()
    input_scale = dialects.tensor_names(disk.name, dialect).input_scale
    if input_scale in scales:
        yield input_scale, scales[input_scale].clone()


def _require_decodable(disk: DiskWeight, q: NVFP4Tensor, dialect: Dialect | None) -> bool:
    """Refuse a weight, or a stack of them of which ``disk`` is one, that engines could not decode to finite numbers.

    Returns:
        False if fp16, from which it is exported, cannot hold values that are exact in bf16 (``Recipe.ALIGNED``).
    """
    if q.qdata.is_meta:
        return True
    stored = q.per_tensor_scale
    if dialect is not None:
        stored = dialects.stored(stored, q.stored_scale, q.recipe, dialect)
    scales = stored.flatten()
    if not bool((torch.isfinite(scales) & (scales > 0)).all()):
        worst = next(scale for scale in scales.tolist() if not 0 < scale < float("inf"))
        raise ValueError(
            f"{disk.name}: its per-tensor scale would be {worst}, which no engine can use; the weights are too "
            f"small for recipe '{q.recipe}', use 'aligned'"
        )
    if disk.weight.format.export_dtype != torch.float16:
        return True
    held = []
    for i in range(1 if q.qdata.ndim == 2 else q.shape[0]):  # one decoded expert at a time
        one = q if q.qdata.ndim == 2 else q.expert(i)
        value = ops.dequantize(one, torch.float16)
        exact = (value == ops.dequantize(one, torch.float32)).all()
        held.append(torch.stack([torch.isfinite(value).all(), exact]))
    finite, exact = torch.stack(held).all(0).tolist()
    if not finite:
        raise ValueError(
            f"{disk.name}: fp16 weights from 64544 up decode to inf in fp16; clip them, or train and export in bf16"
        )
    return exact or q.recipe is not Recipe.ALIGNED


def empty_quantized(shape: torch.Size, weight: Weight) -> NVFP4Tensor:
    """What ``quantize_weight`` returns, on meta."""
    fmt = weight.format
    *lead, n, k = (*shape[:-2], shape[-1], shape[-2]) if fmt.transposed else shape
    scale = torch.empty(lead if fmt.per_expert else (), dtype=torch.float32, device="meta")
    qdata = torch.empty(*lead, n, k // 2, dtype=torch.uint8, device="meta")
    block_scale = torch.empty(*lead, n, k // 16, dtype=torch.float8_e4m3fn, device="meta")
    return NVFP4Tensor(qdata, block_scale, scale, fmt.recipe, scale)


def by_layer(tensor_names: Iterable[str]) -> dict[str, list[str]]:
    """Names by layer, in the order of the layers; what belongs to none comes first."""
    layers: dict[str, list[str]] = {}
    for name in tensor_names:
        layers.setdefault(layer_of(name), []).append(name)
    return {layer: layers[layer] for layer in sorted(layers, key=lambda key: (key != "", natural_order(key)))}


# ----------------------------------------------------------------------------------------- what stays in high precision


def rest_in_memory(root: nn.Module, conversion: Conversion) -> dict[str, tuple[Tensor, torch.dtype]]:
    """Name in memory -> (tensor, dtype on disk): fp32 masters are cast as quantized ones are, unless kept in fp32."""
    state = root.state_dict()
    masters = all(p.dtype == torch.float32 for p in root.parameters() if p.is_floating_point())
    cast = next(iter(conversion.weights.values())).format.export_dtype
    kept = kept_in_fp32(root, cast)
    rest = {}
    for name in names.state_dict_names(root):
        if name not in conversion.weights:
            is_master = masters and state[name].dtype == torch.float32 and not any(k in name for k in kept)
            rest[name] = state[name], cast if is_master else state[name].dtype
    return rest


def kept_in_fp32(root: nn.Module, cast: torch.dtype) -> tuple[str, ...]:
    """Parts of the names of what the architecture keeps in fp32 where the rest is cast to ``cast``."""
    declared = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if cast == torch.float16 else [])]
    return tuple(name for attribute in declared for name in getattr(root, attribute, None) or ())


def _rest_of_layer(
    root: nn.Module, tensors: dict[str, tuple[Tensor, torch.dtype]], biases: dict[str, list[SplitBias]]
) -> Iterator[tuple[str, Tensor]]:
    """Tensors under their disk names: fresh."""
    cast = {name: whole(tensor.detach()).to(dtype) for name, (tensor, dtype) in tensors.items()}
    for name, tensor in names.disk_state(root, cast).items() if cast else ():
        if name in biases:
            yield from ((bias.name, bias.of_source(tensor).clone()) for bias in biases[name])
        else:
            yield name, tensor.clone(memory_format=torch.contiguous_format)


# ---------------------------------------------------------------------------------------------------- activation scales


def input_scales(
    plan: Plan, conversion: Conversion, dialect: Dialect | None, activations: ActivationScales
) -> dict[str, Tensor]:
    """Activation scales by tensor name on disk, as the dialect stores them.

    Raises:
        ValueError: an activation group that was not observed; a mapping that lacks a weight, names something else, or
            holds a value that is no finite number > 0.
    """
    if dialect is None:
        if activations == "none":
            return {}
        raise ValueError(
            f"export: dequantized weights come without activation scales, got activations={activations!r}; leave it "
            "out, or name a dialect"
        )
    if isinstance(activations, Mapping):
        return _given_scales(plan, dialect, activations)
    if activations == "none":
        return {}
    if activations != "observed":
        raise ValueError(f"export: activations must be 'none', 'observed' or a mapping, got {activations!r}")
    scales: dict[str, Tensor] = {}
    of_group: dict[str, Tensor] = {}
    for disk in plan.weights:
        group = activation_key(disk.weight.group)
        if group not in of_group:
            observer = conversion.observers[group]
            if observer.amax is None:
                raise ValueError(
                    f"export: no activations were observed for {observer.name}; run some batches inside `with "
                    "quads_qat.observe_activations(model):`, or pass activations='none' for a W4A16 checkpoint"
                )
            amax = observer.amax.to(disk.weight.format.export_dtype)
            p, own = ops.scale_from_amax(amax, recipe=conversion.recipe)
            of_group[group] = dialects.stored(p, own, conversion.recipe, dialect).reshape(dialects.scale_shape(dialect))
        scales[dialects.tensor_names(disk.name, dialect).input_scale] = of_group[group]
    return scales


def _given_scales(plan: Plan, dialect: Dialect, activations: Mapping[str, Any]) -> dict[str, Tensor]:
    needed = dict.fromkeys(own_scales(plan, dialect))
    for name in needed:
        if name not in activations:
            raise ValueError(
                f"export: activations has no {name}; a W4A4 checkpoint needs one for every quantized weight"
            )
    scales = {}
    for name, given in activations.items():
        if name not in needed and not name.endswith(CACHE_SCALES):
            raise ValueError(
                f"export: activations[{name!r}] belongs to no quantized weight; names are like {next(iter(needed))!r}"
            )
        value = torch.as_tensor(given, dtype=torch.float32)
        if value.numel() != 1 or not bool(torch.isfinite(value).all() & (value > 0).all()):
            raise ValueError(
                f"export: activations[{name!r}] must be one finite number > 0, got {value.flatten()[:4].tolist()}"
            )
        scales[name] = value.detach().reshape(() if dialect is Dialect.MODELOPT else (1,)).clone()
    return scales


def own_scales(plan: Plan, dialect: Dialect) -> list[str]:
    """Names of the activation scales that a W4A4 checkpoint has."""
    return [dialects.tensor_names(disk.name, dialect).input_scale for disk in plan.weights]


def cache_scales(plan: Plan, dialect: Dialect, scales: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of ``scales`` that belong to no quantized weight."""
    own = set(own_scales(plan, dialect))
    return {name: scale for name, scale in scales.items() if name not in own}
