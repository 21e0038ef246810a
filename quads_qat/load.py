"""Import: NVFP4 checkpoints of either dialect into rollout models or BF16 models."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from quads_qat import checkpoint_io, dialects, names, ops
from quads_qat.checkpoint_plan import Plan, cut, is_transposed_stack
from quads_qat.config import ActivationFormat, ActivationScale, Recipe, ResidualConfig, require_kind
from quads_qat.contract import Contract, RolloutPolicy, given_contract
from quads_qat.conversion import Conversion
from quads_qat.convert import install, install_packed
from quads_qat.nvfp4_checkpoint import Checkpoint, by_parameter, read_parameter, read_part, shared_input_amax
from quads_qat.scale_groups import activation_key
from quads_qat.skeleton import skeleton
from quads_qat.sync_told import cast_as_told

# --------------------------------------------------------------------------------------------------------------- models


def load_rollout(
    path: str | Path,
    *,
    residual: ResidualConfig | None = None,
    activation_scale: ActivationScale | str | None = None,
    activation_recipe: Recipe | str | None = None,
    weights_only: bool = False,
    dtype: torch.dtype | None = None,
    contract: Contract | str | Path | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A rollout model from an NVFP4 checkpoint: packed weights as they are on disk, never requantized.

    Args:
        path: directory of either dialect.
        residual: what is compensated. None: what config.json records; where it records nothing, nothing quantizes the
            activations of a W4A16 checkpoint (weight-only), and half of the channels per token are compensated for a
            W4A4 one. ``fraction=0`` is naive W4A4.
        activation_scale: ``per_token``, ``per_tensor`` or ``static`` (the checkpoint's input scales; those of a W4A16
            checkpoint wait for ``calibrate``). None: what config.json records, else ``per_token``.
        activation_recipe: arithmetic of the activations. ALIGNED rounds an imported scale up to a power of two. None:
            what config.json records, else ALIGNED.
        weights_only: leave activations alone (W4A16 inference), whatever the checkpoint says.
        dtype: of what is not quantized; None: the config's, or where it has none the files'.
        contract: what the checkpoint must have been made under, e.g. ``qq.contract_of(trainer)``: the same recipe,
            scale groups, export dtype and quantized modules, and, where it names a rollout policy, that one. An
            explicit argument above stands for its own part of the policy (``weights_only`` for all of it); the rest
            is then the contract's, and config.json may not record another. Masters of later weight syncs are cast to
            its export dtype.
        trust_remote_code: run the model code that the checkpoint brings, where transformers has none.

    Returns:
        The model of config.json's architecture, in eval mode, on the CPU.

    Raises:
        ValueError: a missing or damaged file, tensor or scale, an unknown architecture, another contract.
        TypeError: ``residual`` is no ResidualConfig.
    """
    require_kind("load_rollout", "residual", residual, ResidualConfig)
    checkpoint = Checkpoint.open(path)
    if weights_only and (residual or activation_scale or activation_recipe):
        raise ValueError(
            "load_rollout: weights_only=True leaves activations alone; drop it, or drop residual, activation_scale and "
            "activation_recipe"
        )
    activation, residual = rollout_policy(
        checkpoint, residual, activation_scale, activation_recipe, contract, weights_only=weights_only
    )
    model = skeleton(checkpoint.reader, dtype, trust_remote_code=trust_remote_code)
    conversion, plan = checkpoint.plan(model)
    require_same_modules(checkpoint, conversion, contract)
    if contract is not None:
        conversion = cast_as_told(conversion, given_contract(contract, str(path)), {})
    static = activation is not None and activation.scale is ActivationScale.STATIC
    packed, amaxes = {}, dict.fromkeys(conversion.weights)
    for parameter, disks in by_parameter(plan).items():
        packed[parameter] = read_parameter(checkpoint, model.get_parameter(parameter), disks)
        required = static and not checkpoint.weights_only
        amaxes[parameter] = shared_input_amax(checkpoint, disks, required=required)
        conversion.observers[activation_key(disks[0].weight.group)].amax = amaxes[parameter]
    _fill_rest(model, checkpoint.reader, plan)
    install(model, conversion)
    install_packed(model, conversion, packed, amaxes, activation, residual)
    return _finish(model, path)


def rollout_policy(
    checkpoint: Checkpoint,
    residual: ResidualConfig | None,
    activation_scale: ActivationScale | str | None,
    activation_recipe: Recipe | str | None,
    contract: Contract | str | Path | None = None,
    *,
    weights_only: bool = False,
) -> tuple[ActivationFormat | None, ResidualConfig | None]:
    """What a rollout of ``checkpoint`` does with activations; arguments as for :func:`load_rollout`.

    Raises:
        ValueError: the checkpoint was made under another contract than the one given.

    Warns:
        UserWarning: a W4A4 checkpoint records nothing about rollouts, and neither the caller nor the contract says what
            is compensated: says what this one does.
    """
    recipe = None if activation_recipe is None else Recipe(activation_recipe)
    scale = None if activation_scale is None else ActivationScale(activation_scale)
    explicit = residual is not None or scale is not None or recipe is not None

    def told(policy: RolloutPolicy) -> RolloutPolicy:
        activation = ActivationFormat(scale=scale or policy.activation.scale, recipe=recipe or policy.activation.recipe)
        return RolloutPolicy(activation=activation, residual=residual or policy.residual)

    recorded = chosen = None if checkpoint.contract is None else checkpoint.contract.rollout
    if chosen is None and (explicit or not checkpoint.weights_only):
        chosen = RolloutPolicy()
    expected = None
    if contract is not None:
        contract = given_contract(contract, str(checkpoint.reader.path))
        require_contract(checkpoint, contract)
        expected = contract.rollout
    if expected is not None and not weights_only:
        if explicit and recorded is None:
            chosen = expected
        elif chosen is None or told(chosen) != told(expected):
            raise ValueError(
                f"{checkpoint.reader.path}: another contract: rollouts of this checkpoint have "
                f"{chosen or 'activations untouched'}, expected are {expected}; pass residual=, activation_scale= or "
                "activation_recipe=, each for its own part, to say what this one does"
            )
    unsaid = recorded is None and expected is None and residual is None and not checkpoint.weights_only
    if chosen is not None:
        chosen = told(chosen)
    if unsaid and chosen is not None and not weights_only:
        warnings.warn(
            f"{checkpoint.reader.path} does not record what rollouts do with activations; this one takes "
            f"activation_scale='{chosen.activation.scale}' and compensates {chosen.residual.fraction:.0%} of the "
            f"channels (scope='{chosen.residual.scope}'). Pass residual= (diagnose: --residual-fraction), or record "
            "it: export_checkpoint(..., residual=...), quantize --residual-fraction",
            stacklevel=3,
        )
    return (None, None) if chosen is None or weights_only else (chosen.activation, chosen.residual)


_SIDES = "that of contract=", "the checkpoint's"


def require_contract(checkpoint: Checkpoint, given: Contract | str | Path) -> None:
    """Raise ValueError if the weights were made otherwise, as far as is recorded; activations never count."""
    contract = given_contract(given, str(checkpoint.reader.path))
    if checkpoint.contract is not None:
        recorded, config = checkpoint.contract, checkpoint.reader.config
        first_version = recorded.export_dtype is None and recorded.quantized is None
        if first_version and (config.get("dtype") or config.get("torch_dtype")):  # its writers put it there
            recorded = replace(recorded, export_dtype=checkpoint.export_dtype)
        contract.require_same(recorded, str(checkpoint.reader.path), _SIDES, modules=False)
    elif contract.recipe not in dialects.FOREIGN_RECIPES[checkpoint.dialect]:
        made = " or ".join(f"'{recipe}'" for recipe in dialects.FOREIGN_RECIPES[checkpoint.dialect])
        raise ValueError(
            f"{checkpoint.reader.path}: another contract: recipe: '{contract.recipe}' against {made} (others wrote it)"
        )


def require_same_modules(checkpoint: Checkpoint, conversion: Conversion, given: Contract | str | Path | None) -> None:
    """Raise ValueError if other modules are quantized than under the contract: of any checkpoint, recorded or not."""
    if given is not None:
        expected, here = given_contract(given, str(checkpoint.reader.path)), Contract.of_conversion(conversion)
        found = replace(expected, quantized=here.quantized, high_precision=here.high_precision)
        expected.require_same(found, str(checkpoint.reader.path), _SIDES)


def load_model(
    path: str | Path,
    dtype: torch.dtype | None = None,
    *,
    contract: Contract | str | Path | None = None,
    trust_remote_code: bool = False,
) -> nn.Module:
    """A plain model with the dequantized weights of an NVFP4 checkpoint of either dialect, for any transformers code.

    ``dtype`` None: the config's. With Recipe.ALIGNED, bf16 holds every weight exactly. In eval mode; parameters take
    gradients, so the model can be converted and trained on. Weights that had rounded to -0.0 are +0.0 after another
    conversion, as the recipes have it: the same values, another sign of zero. ``contract`` and
    ``trust_remote_code`` as for :func:`load_rollout`.
    """
    checkpoint = Checkpoint.open(path)
    if contract is not None:
        require_contract(checkpoint, contract)
    model = skeleton(checkpoint.reader, dtype, trust_remote_code=trust_remote_code)
    conversion, plan = checkpoint.plan(model)
    require_same_modules(checkpoint, conversion, contract)
    for parameter, disks in by_parameter(plan).items():
        meta = model.get_parameter(parameter)
        value = torch.empty(meta.shape, dtype=meta.dtype, device="cpu")
        oriented = value.mT if disks[0].weight.format.transposed else value
        for disk in disks:
            q = read_part(checkpoint, meta, disk)
            cut(oriented, disk.expert, disk.rows).copy_(ops.dequantize(q, meta.dtype))
        _assign(model, parameter, value)
    _fill_rest(model, checkpoint.reader, plan)
    return _finish(model, path)


# ----------------------------------------------------------------------------------------- what stays in high precision


def _fill_rest(model: nn.Module, reader: checkpoint_io.Reader, plan: Plan) -> None:
    """Read everything that is not quantized into the skeleton."""
    for name, value in rest_from_disk(model, reader, plan):
        _assign(model, name, value)
    if hasattr(model, "tie_weights"):
        model.tie_weights()  # pyright: ignore[reportCallIssue]


def rest_from_disk(model: nn.Module, reader: checkpoint_io.Reader, plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """(name in memory, value) of every parameter and buffer that the plan does not quantize.

    Raises:
        ValueError: a tensor is missing.
    """
    state = model.state_dict()
    parameters = dict(model.named_parameters())
    split = joined_biases(model, reader, plan)
    yield from split.items()
    found_otherwise = {*split, *(disk.weight.name for disk in plan.weights)}
    rest = [n for n in names.state_dict_names(model) if n not in found_otherwise]
    matrices = {n: is_transposed_stack(model, n) for n in rest if n in parameters and state[n].ndim in (2, 3)}
    try:
        disks = names.disk_tensors(model, matrices)
    except names.DiskLayoutError as error:
        matrices = {n: transposed for n, transposed in matrices.items() if n not in error.parameters}
        disks = names.disk_tensors(model, matrices)
    for name, of_parameter in itertools.groupby(disks, key=lambda disk: disk.parameter):
        value = torch.empty_like(state[name], device="cpu")
        for disk in of_parameter:
            tensor = reader.get(disk.name)
            tensor = tensor.mT if disk.transposed else tensor
            _fill(disk.select(value, transposed_memory=matrices[name]), tensor, f"{reader.path}: {disk.name}")
        yield name, value
    by_element = [n for n in rest if n not in matrices]
    values = {n: torch.empty_like(state[n], device="cpu", memory_format=torch.contiguous_format) for n in by_element}
    for elements in names.disk_elements(model, by_element):
        elements.scatter(reader.get(elements.name), values)
    yield from values.items()


def joined_biases(model: nn.Module, reader: checkpoint_io.Reader, plan: Plan) -> dict[str, Tensor]:
    """Name in memory -> the bias [E, N] of a stack whose experts are apart on disk, and their biases with them."""
    joined: dict[str, Tensor] = {}
    for bias in plan.biases:
        value = joined.setdefault(bias.parameter, torch.empty_like(model.get_parameter(bias.parameter), device="cpu"))
        _fill(bias.of_source(value), reader.get(bias.name), f"{reader.path}: {bias.name}")
    return joined


def _fill(place: Tensor, tensor: Tensor, name: str) -> None:
    if place.shape != tensor.shape:  # copy_ would broadcast
        raise ValueError(f"{name} must have shape {list(place.shape)}, got {list(tensor.shape)}")
    names.require_float(name, tensor.dtype, place.dtype)
    place.copy_(tensor)


def _assign(model: nn.Module, name: str, value: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(value, requires_grad=value.is_floating_point())
    else:
        module._buffers[leaf] = value


def _finish(model: nn.Module, path: str | Path) -> nn.Module:
    left = [name for name, p in model.named_parameters() if p.is_meta]
    if left:
        raise ValueError(f"{path}: the checkpoint has no values for {left[0]} and {len(left) - 1} more parameters")
    if (Path(path) / "generation_config.json").exists() and hasattr(model, "generation_config"):
        from transformers import GenerationConfig

        try:
            model.generation_config = GenerationConfig.from_pretrained(str(path))  # pyright: ignore[reportArgumentType]
        except Exception as error:  # whatever transformers raises of it
            raise ValueError(
                f"{path}: generation_config.json cannot be read ({error}); correct it or remove it"
            ) from error
    return model.eval()
