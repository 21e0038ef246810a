"""A BF16 checkpoint into an NVFP4 one, from files to files: for models that no memory holds.

The names and headers of the source say everything about the result but its values. So all output shards are laid out
first; then workers make one unit after another (a scale group, or a tensor that is copied) and write it to its place.
What is in memory is one unit for each worker, however large the model and its shards are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quads_qat import checkpoint_io, checks, dialects, engine_limits, ops
from quads_qat.activation_scales import calibration_data, observed_amaxes, recorded_scales, require_tokenizer
from quads_qat.checkpoint_plan import DiskWeight, Plan, SplitBias, natural_order
from quads_qat.config import ActivationScale, Dialect, Recipe, ResidualConfig, Scope, require_integer, require_kind
from quads_qat.export import (
    casts_of,
    configs,
    contract_of_export,
    ignored_modules,
    plan_checkpoint,
    scale_groups_on_disk,
)
from quads_qat.output_shards import Unit, copied, digest, is_finite, pack, write_checkpoint
from quads_qat.record import not_finite
from quads_qat.resume import Destination
from quads_qat.safetensors_file import nbytes
from quads_qat.weight_stream import ActivationScales, by_layer, cache_scales, emit, input_scales

HELD_BYTES = 1 << 30
"""A scale group that is larger (a stack of experts with one scale) is read twice rather than held."""


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    dialect: Dialect | str = Dialect.MODELOPT,
    recipe: Recipe | str = Recipe.ALIGNED,
    scope: Scope | str = Scope.ALL,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    activations: ActivationScales | Path = "none",
    calibrate: Path | Iterable[Tensor] | None = None,
    residual: ResidualConfig | None = None,
    activation_scale: ActivationScale | str | None = None,
    shard_bytes: int = checkpoint_io.DEFAULT_SHARD_BYTES,
    workers: int | None = None,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> bool:
    """Quantize a BF16 checkpoint directory into an NVFP4 one, without building the model.

    Quantized weights are the bytes that loading, converting and exporting the model gives. Everything else is copied as
    it is, with tokenizer, generation config, chat templates and custom code; of a source that is in fp32 throughout it
    is cast as an export casts it, to bf16, unless the architecture keeps it in fp32. The dtype in config.json is the
    one that the weights decode to, and are cast to. After a kill, the same call continues: shards that were
    finished are verified by their SHA-256 and kept. When all is there, it changes nothing.

    Args:
        source: a directory with config.json and safetensors; any floating dtype, cast as loading it would.
        destination: a directory that is not there, is empty, or holds the same job, finished or not.
        dialect: ``modelopt`` (vLLM, SGLang, TensorRT-LLM) or ``compressed-tensors`` (transformers, vLLM, SGLang).
        recipe: the arithmetic, see :class:`~quads_qat.config.Recipe`.
        scope: what is quantized, as for ``convert``.
        include: likewise.
        exclude: likewise.
        activations: ``none`` (W4A16), a mapping as for :func:`~quads_qat.weight_stream.export_weights`, or the Path of
            an NVFP4 checkpoint of the same model, whose activation scales are taken over (W4A4).
        calibrate: W4A4 with activation scales observed on a text file, or on token ids [batch, length]. This does build
            the model, on ``device``.
        residual: what rollouts of this checkpoint compensate, recorded in config.json; None leaves it to
            :func:`~quads_qat.load.load_rollout`.
        activation_scale: likewise, over what rollouts take the scale of an activation.
        shard_bytes: size of a shard.
        workers: threads; None: one for each CPU core, at most 8.
        device: where the arithmetic runs. The bytes do not depend on it, nor on ``workers``.
        trust_remote_code: run the model code that the source brings, where transformers has none.
        progress: called with (done, total) bytes of the source.

    Returns:
        Whether anything was written; False where ``destination`` holds what this call makes, its hashes verified.

    Raises:
        ValueError: the source is damaged, incomplete, quantized already or of an unknown architecture; the destination
            holds something else, is being written by another process, has too little space or cannot be written.

    Warns:
        UserWarning: a tensor that is copied holds NaN or inf; said again where all is there already. (In one that is
            quantized that is an error.)
    """
    dialect, recipe, device = Dialect(dialect), Recipe(recipe), torch.device(device)
    dialects.check_recipe(recipe, dialect)
    require_kind("quantize", "residual", residual, ResidualConfig)
    _check_arguments(activations, calibrate, workers, shard_bytes)
    selection: dict[str, Any] = {"scope": Scope(scope), "include": tuple(include), "exclude": tuple(exclude)}
    reader = checkpoint_io.Reader(source)
    checkpoint_io.require_unquantized(reader)
    model, conversion, plan = plan_checkpoint(reader, dialect, recipe, **selection, trust_remote_code=trust_remote_code)
    text = None if calibrate is None else calibration_data(calibrate)
    if isinstance(text, str):
        require_tokenizer(reader.path)
    given = recorded_scales(activations, plan, dialect) if isinstance(activations, Path) else activations
    scales = {} if text is not None else input_scales(plan, conversion, dialect, given)
    config = checkpoint_io.with_dtype(reader.config, next(iter(conversion.weights.values())).format.export_dtype)
    kind = "observed" if text is not None else "none" if given == "none" else "given"
    quantized = [disk.name for disk in plan.weights]
    contract = contract_of_export(conversion, kind, residual, activation_scale)
    engine_limits.warn(reader.config, dialect, quantized, weights_only=kind == "none", stacklevel=2)

    casts = casts_of(reader, model, conversion)
    work = _Work(reader, plan, recipe, dialect, scales, casts, device, weights_only=kind == "none")
    ignored = ignored_modules({name: len(reader.shape(name)) for name in work.rest}, plan, model, dialect)
    job = {"command": "quantize", "recipe": recipe.value, "dialect": dialect.value, **selection}
    job |= {"activations": digest([text, scales]), "rollout": contract.to_json()["rollout"]}

    def observe(directory: Destination) -> None:
        if text is None:
            return
        if "amaxes" not in directory.notes:  # computed once: all shards have the scales of one run
            options = {"recipe": recipe, **selection, "trust_remote_code": trust_remote_code}
            directory.note("amaxes", observed_amaxes(reader.path, text, device=device, **options))
        for group, amax in directory.notes["amaxes"].items():
            conversion.observers[group].amax = torch.tensor(amax, dtype=torch.float32, device="cpu")
        if unseen := [o.name for o in conversion.observers.values() if o.amax is None]:
            raise ValueError(
                f"quantize: the calibration did not reach {unseen[0]} and {len(unseen) - 1} other activation "
                "groups; leave them in high precision (exclude=, --exclude), or calibrate on data that does"
            )
        scales.update(input_scales(plan, conversion, dialect, "observed"))

    made = write_checkpoint(
        destination,
        job,
        pack(work.units(), shard_bytes),
        reader,
        configs(config, dialect, ignored, contract),
        workers=workers,
        progress=progress,
        prepare=observe,
    )
    if found := sorted(not_finite(Path(destination)), key=natural_order):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warnings.warn(
            f"{reader.path}: {found[0]}{more} hold{'' if more else 's'} NaN or inf; not quantized, copied as it is",
            stacklevel=2,
        )
    return made


def _check_arguments(
    activations: ActivationScales | Path, calibrate: Any, workers: int | None, shard_bytes: int
) -> None:
    if not isinstance(activations, Mapping | Path) and activations != "none":
        raise ValueError(
            "quantize: a W4A4 checkpoint needs activation scales, which weights alone do not give; pass calibrate=, or "
            "activations= as a mapping or the Path of a checkpoint that has them, or make a W4A16 checkpoint "
            f"(--weights-only); got activations={activations!r}"
        )
    if calibrate is not None and activations != "none":
        raise ValueError("quantize: activation scales come from calibrate or from activations, not from both")
    require_integer("quantize", "shard_bytes", shard_bytes, 1)
    if workers is not None:
        require_integer("quantize", "workers", workers, 1)


@dataclass(frozen=True, eq=False)
class _Work:
    """What there is to do, in units. ``scales`` may be filled in later: their names are known before."""

    reader: checkpoint_io.Reader
    plan: Plan
    recipe: Recipe
    dialect: Dialect
    scales: dict[str, Tensor]
    casts: dict[str, torch.dtype]
    device: torch.device
    weights_only: bool

    @property
    def rest(self) -> list[str]:
        """Tensors of the source that are copied."""
        taken = {disk.source for disk in self.plan.weights} | {bias.source for bias in self.plan.biases}
        return [name for name in self.reader.names() if name not in taken]

    def units(self) -> Iterator[Unit]:
        """Layer by layer."""
        groups: dict[str, list[list[DiskWeight]]] = {}
        for group in scale_groups_on_disk(self.plan):
            groups.setdefault(group[0].source, []).append(group)
        biases: dict[str, list[SplitBias]] = {}
        for bias in self.plan.biases:
            biases.setdefault(bias.source, []).append(bias)
        extra, rest = cache_scales(self.plan, self.dialect, self.scales), sorted(self.rest, key=natural_order)
        for layer in by_layer([*groups, *biases, *rest, *extra]).values():
            yield from (self._of_group(group) for name in layer for group in groups.get(name, ()))
            yield from (self._of_bias(bias) for name in layer for bias in biases.get(name, ()))
            for name in layer:
                if name in extra:
                    layout = extra[name].dtype, tuple(extra[name].shape)
                    yield Unit({name: layout}, 0, partial(_whole, name, partial(extra.__getitem__, name)))
                elif name not in groups and name not in biases:
                    yield copied(self.reader, name, look=True, cast=self.casts.get(name))

    def _of_bias(self, bias: SplitBias) -> Unit:
        entry = self.reader.entry(bias.source)
        dtype, shape = self.casts.get(bias.source, entry.dtype), entry.shape
        rows = range(shape[-1])[bias.rows or slice(None)]
        layout, found = (dtype, (len(rows),)), set[str]()

        def make() -> Iterator[tuple[str, int, Tensor]]:
            part = bias.of_source(self.reader.get(bias.source)).to(dtype)
            if not is_finite(part):
                found.add(bias.source)
            yield bias.name, 0, part

        return Unit({bias.name: layout}, nbytes(*layout), make, found)

    def _of_group(self, group: list[DiskWeight]) -> Unit:
        layouts, size = {}, 0
        for disk in group:
            shape = disk.source_shape(self.reader)
            layouts |= dialects.layouts(disk.name, shape, self.dialect, transposed=disk.stored_transposed)
            if not self.weights_only:
                name = dialects.tensor_names(disk.name, self.dialect).input_scale
                layouts[name] = torch.float32, dialects.scale_shape(self.dialect)
            size += nbytes(self.reader.entry(disk.source).dtype, shape)
        return Unit(layouts, size, partial(self._quantize, group, held=size <= HELD_BYTES))

    def _quantize(self, group: list[DiskWeight], *, held: bool) -> Iterator[tuple[str, int, Tensor]]:
        parts = [(disk, expert) for disk in group for expert in _experts(disk, self.reader)]

        def read(disk: DiskWeight, expert: int | None) -> Tensor:
            return disk.read_source(self.reader, expert).to(self.device)

        tensors = [read(*part) for part in parts] if held else None
        amax = ops.amax(*tensors) if tensors else torch.stack([ops.amax(read(*part)) for part in parts]).amax(0)
        for i, (disk, expert) in enumerate(parts):
            x = tensors[i] if tensors else read(disk, expert)
            checks.require_finite(disk.source, x, "the weight", "download it again, or exclude its module")
            try:
                q = ops.quantize(x, tensor_amax=amax, recipe=self.recipe, check_finite=False)
            except ValueError as error:
                raise ValueError(f"{disk.source}: {error}, or exclude its module") from error
            for name, tensor in emit(disk, q, self.dialect, self.scales):
                if tensor.ndim == 2:
                    yield name, (expert or 0) * tensor.nbytes, tensor
                elif not expert:  # the scales of a whole stack, once
                    yield name, 0, tensor


def _experts(disk: DiskWeight, reader: checkpoint_io.Reader) -> Iterable[int | None]:
    """A stack that stays whole on disk is quantized expert by expert all the same."""
    return range(reader.shape(disk.source)[0]) if disk.whole_stack else (None,)


def _whole(name: str, get: Callable[[], Tensor]) -> Iterator[tuple[str, int, Tensor]]:
    yield name, 0, get()
