"""Whole NVFP4 checkpoints from a trainer model, and what all of them have besides tensors.

What engines read beside the tensors is written here: config.json, hf_quant_config.json, the list of modules that are
not quantized. A checkpoint appears under its name when it is complete.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import checkpoint_io, dialects, engine_limits, sharding
from quads_qat import contract as contracts
from quads_qat.checkpoint_plan import DiskWeight, Plan, cut, export_plan, layer_of, natural_order, with_stacks_of
from quads_qat.config import (
    ActivationFormat,
    ActivationScale,
    Dialect,
    Recipe,
    ResidualConfig,
    Scope,
    require_integer,
    require_kind,
)
from quads_qat.contract import Contract, RolloutPolicy
from quads_qat.conversion import Conversion
from quads_qat.experts_layout import layout_of
from quads_qat.formats import FLOATS
from quads_qat.output_shards import require_space, write_stream
from quads_qat.record import RECORD, record_text
from quads_qat.required_tensors import require_tensors
from quads_qat.safetensors_file import nbytes
from quads_qat.select_weights import select
from quads_qat.skeleton import skeleton
from quads_qat.weight_stream import (
    ActivationScales,
    export_metadata,
    kept_in_fp32,
    own_scales,
    prepare,
    warn_before_start,
    weights_of,
)

_NOTHING = "no checkpoint was written"


def export_checkpoint(
    model: nn.Module,
    path: str | Path,
    *,
    dialect: Dialect | str,
    source: str | Path | None = None,
    activations: ActivationScales = "none",
    residual: ResidualConfig | None = None,
    activation_scale: ActivationScale | str | None = None,
    shard_bytes: int = checkpoint_io.DEFAULT_SHARD_BYTES,
) -> None:
    """Write a converted model as an NVFP4 checkpoint that engines load.

    With ``torch.distributed``, call it on all ranks; rank 0 writes. Where weights are sharded, all ranks leave
    together: when the directory is there, or with an error if one of them has one. An
    :class:`~quads_qat.engine_limits.EngineWarning` names each engine that is known not to load what is written.

    Args:
        model: converted to w4a16 or w4a4.
        path: directory to make; it must not exist. It appears when everything is written.
        dialect: ``modelopt`` (vLLM, SGLang, TensorRT-LLM) or ``compressed-tensors`` (transformers, vLLM, SGLang).
        source: the original checkpoint: its config.json is kept, with the dtype of what is written, and extended;
            tokenizer and code are copied.
        activations: as in :func:`~quads_qat.weight_stream.export_weights`.
        residual: what rollouts of this checkpoint compensate, recorded in config.json; None leaves it to
            :func:`~quads_qat.load.load_rollout`.
        activation_scale: likewise, over what rollouts take the scale of an activation.
        shard_bytes: size of a shard.

    Raises:
        ValueError: as :func:`~quads_qat.weight_stream.export_weights`; ``path`` exists; the disk is full. Nothing
            half-written stays.
    """
    path, writes = Path(path), sharding.rank() == 0
    with sharding.together("export_checkpoint", model, _NOTHING):
        dialect = Dialect(dialect)
        require_kind("export_checkpoint", "residual", residual, ResidualConfig)
        require_integer("export_checkpoint", "shard_bytes", shard_bytes, 1)
        root, conversion, _ = prepare(model, dialect, "export_checkpoint")
        warn_before_start(conversion, "export_checkpoint")
        contract = contract_of_export(conversion, activations, residual, activation_scale)
        layouts = {n: (dtype, shape) for n, dtype, shape in export_metadata(model, dialect, activations=activations)}
        plan = export_plan(root, conversion, dialect)
        stream = weights_of(root, conversion, dialect, activations, ranks=0)
        config: dict[str, Any] = {}
        if writes or not sharding.shards(model):  # the files of others need not be here
            config = _config_of(root, source, next(iter(conversion.weights.values())).format.export_dtype)
            if source is not None:
                checkpoint_io.require_apart(Path(source), path)
            if writes:
                checkpoint_io.remove_abandoned(path)  # for the sake of the space that is looked for below
            checkpoint_io.require_free(path)
        if writes:
            names, weights_only = [disk.name for disk in plan.weights], activations == "none"
            engine_limits.warn(config, dialect, names, weights_only=weights_only, stacklevel=2)
            require_space(path, sum(nbytes(*layout) for layout in layouts.values()))

    def write(stream: Iterator[tuple[str, Tensor]]) -> None:
        with checkpoint_io.whole_directory(path) as directory:
            written = write_stream(directory, layouts, stream, shard_bytes)
            quantized = _tensor_names(plan, dialect)
            rest = {name: len(shape) for name, (_, shape) in layouts.items() if name not in quantized}
            ignored = ignored_modules(rest, plan, root, dialect)
            for file, content in configs(config, dialect, ignored, contract).items():
                checkpoint_io.write_json(directory / file, content)
            job = {"command": "export", "dialect": dialect.value, "recipe": conversion.recipe.value}
            (directory / RECORD).write_text(record_text(job, written), "utf-8")
            _copy_companions(root, source, directory)

    _gather_for(write if writes else None, model, stream)


def _gather_for(
    write: Callable[[Iterator[tuple[str, Tensor]]], None] | None,
    model: nn.Module,
    stream: Iterator[tuple[str, Tensor]],
) -> None:
    """``write`` on the rank that has one, while the others gather; all leave with its error, if it has one.

    An error of ``stream`` itself is not passed on: it is that of a weight, whole on all ranks, which all raise.
    """
    error, lost = None, []

    def gathered() -> Iterator[tuple[str, Tensor]]:
        try:
            yield from stream
        except Exception as raised:
            lost.append(raised)
            raise

    try:
        if write is None:
            next(stream, None)
        else:
            write(gathered())
    except Exception as raised:
        if write is None or lost:
            raise
        error = raised
        if sharding.shards(model):
            deque(stream, 0)  # the others gather to the end
    sharding.raise_together("export_checkpoint", model, error, _NOTHING)


def _copy_companions(root: nn.Module, source: str | Path | None, directory: Path) -> None:
    """Tokenizer, code and generation config, of the source or as the model has it."""
    if source is not None:
        for file in checkpoint_io.companions(Path(source)):
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(source) / file, directory / file)
    elif (generation_config := getattr(root, "generation_config", None)) is not None:
        generation_config.save_pretrained(directory)


def plan_checkpoint(
    reader: checkpoint_io.Reader,
    dialect: Dialect,
    recipe: Recipe,
    scope: Scope = Scope.ALL,
    include: tuple[str, ...] = (),
    exclude: tuple[str, ...] = (),
    *,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, Conversion, Plan]:
    """The plan of a BF16 checkpoint directory, from its config.json and the headers of its shards alone.

    Raises:
        ValueError: a tensor is missing, or is not what config.json says of it.
    """
    model = skeleton(reader, trust_remote_code=trust_remote_code)
    conversion = select(model, recipe=recipe, scope=scope, include=include, exclude=exclude)
    usual = export_plan(model, conversion, dialect)
    plan = with_stacks_of(reader, usual)
    missing = [d.source for d in plan.weights if d.source not in reader]
    if missing:
        raise ValueError(
            f"{reader.path}: {missing[0]} and {len(missing) - 1} more weights of {type(model).__name__} are missing"
        )
    for disk in plan.weights:
        _require_expected(reader, model, disk)
    require_tensors(reader, model, {disk.source for disk in (*usual.weights, *plan.weights)})
    return model, conversion, plan


def casts_of(reader: checkpoint_io.Reader, model: nn.Module, conversion: Conversion) -> dict[str, torch.dtype]:
    """Tensors of a checkpoint -> what an export of the loaded model casts them to: all of one in fp32 throughout."""
    dtypes = {name: reader.entry(name).dtype for name in reader.names()}
    if {dtype for dtype in dtypes.values() if dtype.is_floating_point} != {torch.float32}:
        return {}
    cast = next(iter(conversion.weights.values())).format.export_dtype
    kept = kept_in_fp32(model, cast)
    return {n: cast for n, dtype in dtypes.items() if dtype == torch.float32 and not any(part in n for part in kept)}


def _require_expected(reader: checkpoint_io.Reader, model: nn.Module, disk: DiskWeight) -> None:
    parameter, found = model.get_parameter(disk.weight.name), reader.entry(disk.source)
    if found.dtype not in FLOATS:
        raise ValueError(
            f"{reader.path}: {disk.source} is {found.dtype}; only bfloat16, float16 and float32 weights can be "
            "quantized. Quantize the original checkpoint, or exclude the module"
        )
    expected = tuple(cut(parameter.mT if disk.weight.format.transposed else parameter, disk.expert, disk.rows).shape)
    ndim = 2 if disk.source_expert is None else 3
    if len(found.shape) < ndim or disk.source_shape(reader) != expected:
        raise ValueError(
            f"{reader.path}: {disk.source} has shape {list(found.shape)}, which does not go with config.json; one of "
            "the two is of another model"
        )


def scale_groups_on_disk(plan: Plan) -> list[list[DiskWeight]]:
    """Disk weights that share a scale."""
    groups: dict[tuple[str, int | None], list[DiskWeight]] = {}
    for disk in plan.weights:
        groups.setdefault(disk.scale_key, []).append(disk)
    return list(groups.values())


# ----------------------------------------------------------------------------------------------------------------- JSON


def _config_of(root: nn.Module, source: str | Path | None, export_dtype: torch.dtype) -> dict[str, Any]:
    if source is not None:
        return checkpoint_io.with_dtype(checkpoint_io.read_json(Path(source) / "config.json"), export_dtype)
    config: Any = getattr(root, "config", None)
    if config is None:
        return {}
    written = json.loads(config.to_json_string())
    written.setdefault("architectures", [type(root).__name__])
    if "num_local_experts" in written and hasattr(config, "num_experts"):  # readers know one or the other
        written.setdefault("num_experts", written["num_local_experts"])
    return checkpoint_io.with_dtype(written, export_dtype)


def configs(
    config: dict[str, Any], dialect: Dialect, ignored: list[str], contract: Contract
) -> dict[str, dict[str, Any]]:
    """File name -> JSON that announces a quantized checkpoint; config.json, without which it is none, comes last."""
    weights_only = contract.activations == "none"
    files = {}
    if dialect is Dialect.MODELOPT:
        files["hf_quant_config.json"] = dialects.hf_quant_config(ignored, weights_only=weights_only)
    entry = dialects.quantization_config(dialect, ignored, weights_only=weights_only)
    return files | {"config.json": {**config, "quantization_config": entry, contracts.KEY: contract.to_json()}}


def contract_of_export(
    conversion: Conversion,
    activations: ActivationScales,
    residual: ResidualConfig | None = None,
    activation_scale: ActivationScale | str | None = None,
) -> Contract:
    """What is recorded in config.json."""
    source = activations if isinstance(activations, str) else "given"
    rollout = None
    if residual is not None or activation_scale is not None:
        scale = ActivationScale(activation_scale or ActivationScale.PER_TOKEN)
        if scale is ActivationScale.STATIC and source == "none":
            raise ValueError(
                "export: activation_scale='static' needs activation scales in the file, and activations='none' writes "
                "none. Run some batches inside `with quads_qat.observe_activations(model):` and pass "
                "activations='observed' (quantize: calibrate=, --calibrate); or leave activation_scale out, load with "
                "load_rollout(path, activation_scale='static') and calibrate the rollout"
            )
        rollout = RolloutPolicy(activation=ActivationFormat(scale=scale), residual=residual or ResidualConfig())
    return Contract.of_conversion(conversion, activations=source, rollout=rollout)


def _tensor_names(plan: Plan, dialect: Dialect) -> set[str]:
    """Names of all tensors of quantized weights, activation scales included."""
    names = set(own_scales(plan, dialect))
    for disk in plan.weights:
        names.update(dialects.tensor_names(disk.name, dialect).weight)
    return names


def _experts_elsewhere(ignored: set[str], plan: Plan, model: nn.Module) -> set[str]:
    """Experts in high precision whose tensors are not below ``...experts`` on disk (GraniteMoE), as engines ask."""
    quantized = {disk.weight.module for disk in plan.weights}
    found = {layer_of(name) for name in ignored if name.endswith(".experts")}
    layers = {layer_of(name) for name in ignored}
    experts = [n for n, module in model.named_modules() if n not in quantized and layout_of(module) is not None]
    return {name for name in experts if name.endswith(".experts") and layer_of(name) in layers - found}


def ignored_modules(rest: dict[str, int], plan: Plan, model: nn.Module, dialect: Dialect) -> list[str]:
    """Modules that keep a weight of two or more dims, by full name on disk; the head also when it is tied.

    Engines know experts as one module, so what is below ``...experts`` brings it along; vLLM looks for that one in the
    compressed-tensors dialect under the names of the first expert's linears, whatever is on disk. A module that holds a
    quantized one (a Mamba mixer with its 2-D ``A_log``) is left out: engines take an entry to mean all below it.
    vLLM takes a plain entry of the ModelOpt dialect for a substring; where that would hit a quantized module, the last
    letter is put in brackets, which only patterns match.
    """
    matrices = [name for name, ndim in rest.items() if ndim >= 2]
    ignored = {n.removesuffix(".weight") if n.endswith(".weight") else n.rpartition(".")[0] for n in matrices}
    ignored |= {match[1] for name in ignored if (match := re.match(r"(.*\.experts)\.", name))}
    ignored |= _experts_elsewhere(ignored, plan, model)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    ignored.update(name for name, module in model.named_modules() if module is head and name)
    holds_quantized = {disk.name[: dot.start()] for disk in plan.weights for dot in re.finditer(r"\.", disk.name)}
    ignored -= holds_quantized
    if dialect is not Dialect.MODELOPT:
        experts = [name for name in ignored if name.endswith(".experts")]
        ignored.update(f"{name}.0.{leaf}_proj" for name in experts for leaf in ("gate", "up", "down"))
        return sorted(ignored, key=natural_order)
    found = sorted(ignored, key=natural_order)
    quantized = "\n".join({disk.name.removesuffix(".weight"): None for disk in plan.weights})
    return [f"{name[:-1]}[{name[-1]}]" if name in quantized else name for name in found]
