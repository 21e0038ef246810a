"""``convert``: swap a model's linears and experts for quantized ones, in place, and undo it.

``select_weights.select`` decides first and touches nothing. Only then are classes swapped (trainer modes) or modules
replaced by packed ones (rollout mode).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quads_qat.bypasses import refuse_bypasses, refuse_wrappers
from quads_qat.config import (
    ActivationFormat,
    ActivationScale,
    Mode,
    Recipe,
    ResidualConfig,
    Schedule,
    Scope,
    require_kind,
)
from quads_qat.conversion import (
    STATE,
    Conversion,
    Weight,
    conversion_of,
    converted,
    full_name,
    refuse_save_pretrained,
    require_model,
    require_same_modules,
    require_unwrapped,
)
from quads_qat.experts import W4A4Experts, W4A16Experts
from quads_qat.experts_layout import layout_of
from quads_qat.linear import W4A4Linear, W4A16Linear
from quads_qat.packed_module import PackedModule
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.quantized_weights import quantize_weight
from quads_qat.residual import ResidualCompensatedExperts, ResidualCompensatedLinear
from quads_qat.rollout_state import refuse_unfit_states
from quads_qat.scale_groups import activation_key
from quads_qat.select_weights import check_patterns, select

_CONVERTED = (W4A16Linear, W4A16Experts, ResidualCompensatedLinear, ResidualCompensatedExperts)
_CLASSES = {Mode.W4A16: (W4A16Linear, W4A16Experts), Mode.W4A4: (W4A4Linear, W4A4Experts)}

M = TypeVar("M", bound=nn.Module)


# ------------------------------------------------------------------------------------------------------------ selection


def convert(
    model: M,
    mode: Mode | str,
    *,
    recipe: Recipe | str = Recipe.ALIGNED,
    scope: Scope | str = Scope.ALL,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    groups: Sequence[str] = (),
    residual: ResidualConfig | None = None,
    activation_scale: ActivationScale | str | None = None,
    activation_recipe: Recipe | str | None = None,
    weights_only: bool = False,
    schedule: Schedule | None = None,
) -> M:
    """Swap linears and experts for quantized ones, in place. Call it before FSDP or TP wrapping.

    Args:
        model: any module; transformers models of both expert layouts.
        mode: ``w4a16`` (trainer), ``w4a4`` (trainer, ablation) or ``w4a4_residual`` (rollout: packed weights, no
            gradient). Allowed on a converted model: ``w4a16`` <-> ``w4a4``, and either to ``w4a4_residual``.
        recipe: arithmetic of the weights.
        scope: ``all``, ``mlp`` or ``experts``.
        include: modules to quantize although the scope or a default excludes them: exact names, globs or ``re:...``.
        exclude: modules to leave in high precision; wins over everything.
        groups: regular expressions; linears that one of them finds, with equal capture groups, share a scale.
        residual: rollout only; None compensates half of the channels per token. ``fraction=0`` is naive W4A4.
        activation_scale: ``per_token`` (default), ``per_tensor`` or ``static``: what the trainer observed, or what
            ``calibrate`` sets.
        activation_recipe: arithmetic of the activations; default ALIGNED.
        weights_only: a rollout of packed weights that leaves activations alone (W4A16 inference).
        schedule: trainers only: when fake quantization starts, and what scales are made from; see ``step``.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: an unknown name, a pattern that matches nothing, a weight whose K is not a multiple of 16, an expert
            class of unknown layout, a partly excluded scale group, a mode that cannot follow the present one, for
            ``w4a4_residual`` a weight on meta or with NaN or inf. ``model`` is unchanged then.
        TypeError: no model; a weight of a dtype that cannot be quantized; a dict where a config belongs.

    >>> from quads_qat.coverage import coverage
    >>> model = convert(nn.Sequential(nn.Linear(32, 8)), "w4a16")
    >>> coverage(model).quantized_elements
    256
    """
    require_model("convert", "model", model)
    require_kind("convert", "residual", residual, ResidualConfig)
    require_kind("convert", "schedule", schedule, Schedule)
    mode, recipe, scope = Mode(mode), Recipe(recipe), Scope(scope)
    check_patterns(include=include, exclude=exclude, groups=groups)
    for_activations = activation_scale is not None or activation_recipe is not None
    _check_options(mode, residual, schedule, weights_only, for_activations)
    activation = None
    if mode is not Mode.W4A16 and not weights_only:
        activation = ActivationFormat(
            scale=ActivationScale(activation_scale or ActivationScale.PER_TOKEN),
            recipe=Recipe(activation_recipe or Recipe.ALIGNED),
        )
    if mode is Mode.W4A4:
        warnings.warn(
            "mode='w4a4' is for ablations: quantizing the trainer's activations widens the log-prob gap to the "
            "rollout (arXiv 2607.15810); train with mode='w4a16'",
            stacklevel=2,
        )
    if any(STATE in m.__dict__ for m in model.modules()):
        root, conversion = converted(model, "convert")
        require_unwrapped(root, "convert")
        _check_is_whole(model, root)
        _check_transition(conversion, mode, recipe, scope, include, exclude, groups)
        fresh = False
        if schedule is not None:
            raise ValueError("convert: the model is converted already and keeps its schedule; drop schedule=")
    else:
        if part := next((n or "it" for n, m in model.named_modules() if isinstance(m, _CONVERTED)), None):
            raise ValueError(f"convert: {part} is part of a converted model; call convert on the whole model")
        refuse_wrappers(model)
        root, fresh = model, True
        conversion = select(model, recipe=recipe, scope=scope, include=include, exclude=exclude, groups=groups)
        refuse_bypasses(model, conversion, trainer=mode is not Mode.W4A4_RESIDUAL)
    if mode is not Mode.W4A4_RESIDUAL:
        if fresh:
            conversion.schedule = schedule or Schedule()
            conversion.full_precision.start_step = conversion.schedule.start_step
            conversion.full_precision.delayed = conversion.schedule.start_step > 0
            install(root, conversion)
        _set_trainer_mode(root, conversion, mode, activation)
        return model
    packed, amaxes = _pack(root, conversion)  # may refuse: nothing is changed before it is done
    if fresh:
        install(root, conversion)
    residual = None if weights_only else residual or ResidualConfig()
    install_packed(root, conversion, packed, amaxes, activation, residual)
    return model


def _check_options(
    mode: Mode, residual: ResidualConfig | None, schedule: Schedule | None, weights_only: bool, for_activations: bool
) -> None:
    """Each option goes with the mode; ``for_activations``: whether one was given that says how they are quantized."""
    if residual is not None and mode is not Mode.W4A4_RESIDUAL:
        raise ValueError(f"convert: residual= is for mode='w4a4_residual', got mode='{mode}'; drop it")
    if schedule is not None and mode is Mode.W4A4_RESIDUAL:
        raise ValueError("convert: schedule= is for trainers; a rollout's weights change when they are synced; drop it")
    if weights_only and (mode is not Mode.W4A4_RESIDUAL or residual or for_activations):
        raise ValueError(
            "convert: weights_only=True is for mode='w4a4_residual' and leaves activations alone; drop it, or drop "
            "residual, activation_scale and activation_recipe"
        )
    if mode is Mode.W4A16 and for_activations:
        raise ValueError("convert: mode='w4a16' leaves activations alone; drop activation_scale and activation_recipe")


def _check_is_whole(model: nn.Module, root: nn.Module) -> None:
    """A wrapper around the converted model will do; a model of which only a part is converted will not."""
    inside = {id(p) for p in root.parameters()}
    outside = next((n for n, p in model.named_parameters() if p.ndim >= 2 and id(p) not in inside), None)
    if outside is not None:
        raise ValueError(
            f"convert: only a part of this model is converted, {outside} is not in it; quads_qat.revert the part, then "
            "convert the whole"
        )


def _check_transition(
    conversion: Conversion,
    mode: Mode,
    recipe: Recipe,
    scope: Scope,
    include: Sequence[str],
    exclude: Sequence[str],
    groups: Sequence[str],
) -> None:
    if conversion.mode is Mode.W4A4_RESIDUAL:
        raise ValueError(
            "convert: a rollout model (w4a4_residual) holds packed weights only; convert a copy of the trainer model"
        )
    if conversion.mode is mode:
        raise ValueError(f"convert: this model already is in mode '{mode}'; quads_qat.revert(model) undoes it")
    if include or exclude or groups or scope is not Scope.ALL or recipe is not Recipe.ALIGNED:
        if (recipe, scope) == (conversion.recipe, conversion.scope) and not (include or exclude or groups):
            return
        raise ValueError(
            "convert: the model is converted already and keeps its recipe, scope and groups; call "
            "quads_qat.revert(model) first to choose others"
        )


def _refuse_replaced_forward(model: nn.Module) -> None:
    """Of a deep copy, such a forward still runs the original's modules: a rollout that looks exact, and is not one."""
    for name, module in model.named_modules():
        if "forward" in module.__dict__:
            raise ValueError(
                f"convert: the forward of {name or 'the model'} was replaced on the object (as trainers, accelerate "
                "and torch.compile do), and a copy's may still be the original's; convert a copy that was made before, "
                "a model built from the config that then gets the state dict, or delete the attribute if it is right"
            )


def _refuse_meta(model: nn.Module, conversion: Conversion) -> None:
    for weight in conversion.weights.values():
        if model.get_parameter(weight.name).is_meta:
            raise ValueError(
                f"convert: mode='w4a4_residual' packs weights, but {weight.name} is on the meta device; "
                "load the weights first"
            )


# ------------------------------------------------------------------------------------------------------------- swapping


def install(model: nn.Module, conversion: Conversion) -> None:
    """Give every selected module its formats, groups and observers, and its trainer class."""
    by_module: dict[str, list[Weight]] = {}
    for weight in conversion.weights.values():
        by_module.setdefault(weight.module, []).append(weight)
    for name, weights in by_module.items():
        module = model.get_submodule(name)
        shared: dict[str, Any] = {"full_precision": conversion.full_precision, "code_cache": conversion.code_cache}
        observers = {w.parameter: conversion.observers[activation_key(w.group)] for w in weights}
        groups = {w.parameter: conversion.groups[w.group] for w in weights}
        formats = {w.parameter: w.format for w in weights}
        if isinstance(module, nn.Linear):
            shared |= {
                "weight_format": formats["weight"],
                "scale_group": groups["weight"],
                "observer": observers["weight"],
            }
            module.__class__ = W4A16Linear
        else:
            shared |= {"weight_formats": formats, "scale_groups": groups, "observers": observers}
            shared |= {"layout": layout_of(module), "original_class": type(module)}
            module.__class__ = W4A16Experts
        module.__dict__.update(shared)
    model.__dict__[STATE] = conversion


def _set_trainer_mode(
    model: nn.Module, conversion: Conversion, mode: Mode, activation: ActivationFormat | None
) -> None:
    linear, experts = _CLASSES[mode]
    for name in {w.module for w in conversion.weights.values()}:
        module = model.get_submodule(name)
        module.__class__ = linear if isinstance(module, nn.Linear) else experts
        module.__dict__["activation_format"] = activation
    conversion.mode, conversion.activation = mode, activation


def _pack(model: nn.Module, conversion: Conversion) -> tuple[dict[str, NVFP4Tensor], dict[str, Tensor | None]]:
    """Codes and scales, and the observed amax of the input, of every selected parameter. Changes nothing."""
    _refuse_meta(model, conversion)
    _refuse_replaced_forward(model)
    if any(not w.module for w in conversion.weights.values()):
        raise ValueError("convert: cannot replace the model itself; wrap it in a module, e.g. nn.Sequential(model)")
    amaxes = {n: conversion.observers[activation_key(w.group)].amax for n, w in conversion.weights.items()}
    return {name: quantize_weight(model, conversion, weight) for name, weight in conversion.weights.items()}, amaxes


def install_packed(
    model: nn.Module,
    conversion: Conversion,
    packed: dict[str, NVFP4Tensor],
    amaxes: dict[str, Tensor | None],
    activation: ActivationFormat | None,
    residual: ResidualConfig | None,
) -> None:
    """Replace the selected trainer modules by packed ones holding ``packed`` (by parameter name)."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}  # a module can have several
    for parent in model.modules():
        for leaf, child in parent._modules.items():
            places.setdefault(id(child), []).append((parent, leaf))
    for name in {w.module: None for w in conversion.weights.values()}:
        module = model.get_submodule(name)
        if isinstance(module, nn.Linear):
            new: PackedModule = ResidualCompensatedLinear(
                packed[full_name(name, "weight")],
                module.bias,
                activation=activation,
                residual=residual,
                input_amax=amaxes[full_name(name, "weight")],
                dtype=module.weight.dtype,
            )
        else:
            layout: Any = module.layout
            new = ResidualCompensatedExperts(
                module,
                module.original_class,  # pyright: ignore[reportArgumentType]
                layout,
                {p: packed[full_name(name, p)] for p in layout.parameters},
                activation=activation,
                residual=residual,
                input_amax={p: amaxes[full_name(name, p)] for p in layout.parameters},
            )
        new.train(module.training)
        new.sync, new.full_name = conversion.sync, name
        for parent, leaf in places[id(module)]:
            setattr(parent, leaf, new)
    conversion.groups.clear()  # they held the master weights
    conversion.mode, conversion.activation, conversion.residual = Mode.W4A4_RESIDUAL, activation, residual
    model.requires_grad_(False)
    refuse_save_pretrained(model)
    refuse_unfit_states(model)


def revert(model: M) -> M:
    """Undo ``convert`` in place: plain modules with the master weights; parameters stay the same objects.

    Raises:
        ValueError: the model is not converted, or is a rollout model, whose master weights are gone.
    """
    root, conversion = converted(model, "revert")
    if conversion.mode is Mode.W4A4_RESIDUAL:
        raise ValueError(
            "revert: a rollout model holds packed weights only; quads_qat.load_model gives BF16 weights of a checkpoint"
        )
    require_unwrapped(root, "revert")
    added = ("weight_format", "scale_group", "observer", "full_precision", "code_cache")
    added += ("activation_format", "cast_dtype")
    added_experts = ("weight_formats", "scale_groups", "observers", "layout", "original_class")
    for name in {w.module for w in conversion.weights.values()}:
        module = root.get_submodule(name)
        module.__class__ = nn.Linear if isinstance(module, nn.Linear) else module.original_class  # pyright: ignore[reportAttributeAccessIssue]
        for attribute in (*added, *added_experts):
            module.__dict__.pop(attribute, None)
    del root.__dict__[STATE]
    return model


@contextmanager
def full_precision(model: nn.Module) -> Iterator[None]:
    """Inside this context the trainer's forward uses the master weights: for reference policies and evaluation.

    The switch is the model's, so all threads that run it share it.

    Raises:
        RuntimeError: in a checkpointed forward under grad, whose recompute would be quantized.
        ValueError: a rollout model has no master weights.
    """
    root, conversion = conversion_of(model, "full_precision")
    if conversion.mode is Mode.W4A4_RESIDUAL:
        raise ValueError("full_precision: a rollout model holds packed weights only")
    require_same_modules(root, conversion, "full_precision")
    switch, with_grad = conversion.full_precision, torch.is_grad_enabled()
    switch.active, switch.entered_with_grad = switch.active + 1, switch.entered_with_grad + with_grad
    try:
        yield
    finally:
        switch.active, switch.entered_with_grad = switch.active - 1, switch.entered_with_grad - with_grad
