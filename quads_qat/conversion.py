"""What a conversion is: the record of which parameters of a model are quantized, and how, kept on the model.

Everything that deals with a converted model asks for it here, and is told what does not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from typing import Any

from torch import Tensor, nn

from quads_qat.config import ActivationFormat, Dialect, Mode, Recipe, ResidualConfig, Schedule, Scope, WeightFormat
from quads_qat.linear import ActivationObserver, CodeCache, FullPrecision, W4A16Linear
from quads_qat.packed_module import SyncState
from quads_qat.scale_groups import ScaleGroup

STATE = "_quads_qat"
"""Attribute of the converted model that holds its :class:`Conversion`, outside the state dict."""


def full_name(module: str, parameter: str) -> str:
    """The parameter's name in the model; the model itself may be the module."""
    return f"{module}.{parameter}" if module else parameter


@dataclass(frozen=True)
class Weight:
    """One quantized parameter: where it lives and how it is quantized.

    Attributes:
        module: full name of its module.
        parameter: its name there, ``weight`` or e.g. ``gate_up_proj``.
        format: recipe, cast and layout.
        group: name of its scale group.
    """

    module: str
    parameter: str
    format: WeightFormat
    group: str

    @cached_property
    def name(self) -> str:
        """Full parameter name."""
        return full_name(self.module, self.parameter)


@dataclass(frozen=True)
class Skipped:
    """A module that holds weights and is not quantized, and why."""

    module: str
    kind: str
    elements: int
    reason: str


@dataclass(eq=False)
class Conversion:
    """What was done to a model; kept on the model, outside its state dict."""

    mode: Mode
    recipe: Recipe
    scope: Scope
    weights: dict[str, Weight]
    skipped: list[Skipped]
    groups: dict[str, ScaleGroup]
    observers: dict[str, ActivationObserver]
    full_precision: FullPrecision = field(default_factory=FullPrecision)
    code_cache: CodeCache = field(default_factory=CodeCache)
    schedule: Schedule = field(default_factory=Schedule)
    steps: int = 0  #: calls of ``step``
    last_codes: dict[str, Tensor] = field(default_factory=dict)  #: of ``step(track_codes=True)``
    activation: ActivationFormat | None = None
    residual: ResidualConfig | None = None
    sync: SyncState = field(default_factory=SyncState)
    sync_plan: Any = None  #: what ``weight_sync`` derives from the model once
    export_plans: dict[Dialect, Any] = field(default_factory=dict)  #: made once, too
    rules: tuple[str, ...] = ()  #: regular expressions of scale groups, the ``groups`` of ``convert``
    untold: frozenset[str] = frozenset()  #: weights of a rollout of which nobody tells to what fp32 masters are cast


def require_model(who: str, argument: str, model: object) -> None:
    """Raise TypeError if ``model`` is something else: a path, say, or nothing."""
    if not isinstance(model, nn.Module):
        load = "; load it first: quads_qat.load_rollout, quads_qat.load_model, from_pretrained"
        way_out = load if isinstance(model, str | PathLike) else ""
        raise TypeError(f"{who}: {argument} must be a torch.nn.Module, got {type(model).__name__}{way_out}")


def conversion_of(model: nn.Module, who: str, mode: Mode = Mode.W4A16) -> tuple[nn.Module, Conversion]:
    """The module that ``convert`` was called on (``model`` or one inside it) and its record.

    Without what has wrapped modules of it since, whose names no export or sync knows. To look at and to fill, not to
    change: its containers may be copies. ``mode``: what the error tells to convert to.

    Raises:
        TypeError, ValueError: as :func:`converted`.
    """
    root, conversion = converted(model, who, mode)
    return _without_wrappers(root), conversion


def converted(model: nn.Module, who: str, mode: Mode = Mode.W4A16) -> tuple[nn.Module, Conversion]:
    """:func:`conversion_of`, the module as it is.

    Raises:
        TypeError: ``model`` is none.
        ValueError: nothing in ``model`` was converted, or several parts of it were, one by one.
    """
    require_model(who, "rollout" if mode is Mode.W4A4_RESIDUAL else "model", model)
    found = [(name, module) for name, module in model.named_modules() if STATE in module.__dict__]
    if not found:
        loaded = ", or load it with quads_qat.load_rollout" if mode is Mode.W4A4_RESIDUAL else ""
        raise ValueError(
            f"{who}: this model has not been converted; call quads_qat.convert(model, mode='{mode}') first{loaded}"
        )
    if len(found) > 1:
        names = ", ".join(name or "(root)" for name, _ in found)
        raise ValueError(f"{who}: {names} were converted one by one; call {who} for each of them")
    return found[0][1], found[0][1].__dict__[STATE]


def _without_wrappers(module: nn.Module) -> nn.Module:
    """``module`` without wrappers of torch.compile and activation checkpointing; without any in it, itself."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        if (inside := module._modules.get(name)) is not None:
            return _without_wrappers(inside)
    children = {name: child if child is None else _without_wrappers(child) for name, child in module._modules.items()}
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    bare = object.__new__(type(module))
    bare.__dict__.update(module.__dict__, _modules=children)
    return bare


def refuse_save_pretrained(root: nn.Module) -> None:
    """Of a rollout: transformers would write its packed buffers in names and with a config that nothing loads."""
    if hasattr(root, "save_pretrained"):
        root.save_pretrained = _refused_save_pretrained  # pyright: ignore[reportArgumentType]


def _refused_save_pretrained(*args: Any, **kwargs: Any) -> None:
    raise ValueError(
        "save_pretrained: a rollout's packed weights would be written in a form that loads as random ones; copy the "
        "directory of the NVFP4 checkpoint that it was loaded from, or, for newer weights, call "
        "quads_qat.export_checkpoint of the trainer"
    )


_WRAPPERS = ("base_layer", "original_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")


def require_same_modules(root: nn.Module, conversion: Conversion, who: str) -> None:
    """Raise ValueError if modules of a trainer were moved, copied or replaced since ``convert``.

    Scales are those of the modules that were converted under these names: others would be exported with foreign ones.
    """
    if conversion.mode is Mode.W4A4_RESIDUAL:
        return  # packed modules hold their scales
    for weight in conversion.weights.values():
        converted = next(module for module, _, full in conversion.groups[weight.group].members if full == weight.name)
        try:
            found = root.get_submodule(weight.module)
            while wrapper := next((name for name in _WRAPPERS if name in found._modules), None):
                found = found._modules[wrapper]
                assert found is not None
        except AttributeError:
            found = None
        if found is not converted:
            raise ValueError(
                f"{who}: {weight.module or 'the model'} is not the module that was converted under this name; layers "
                "were moved, copied, replaced or removed since. Change a model first, then convert it; revert "
                "before the change gives the plain model back"
            )


def require_unwrapped(root: nn.Module, who: str) -> None:
    """Raise ValueError if adapters wrap modules of a converted model, whose names and weights then are other ones."""
    way_out = (
        f"is not merged; call model.merge_and_unload() first, or {who} of plain inside `with "
        "quads_qat.integrations.peft.merged(model) as plain:`"
    )
    if root.__dict__[STATE].mode is Mode.W4A4_RESIDUAL:
        way_out = "hides its packed weights; call model.unload() first"
    for name, module in root.named_modules():
        base = module._modules.get("base_layer")
        if isinstance(base, W4A16Linear) and not base.__dict__.get("adapted"):
            raise ValueError(
                f"{who}: {name} is wrapped by an adapter that was added to the quantized weight, which no engine does; "
                "merged, other weights would be quantized than were trained with. Make adapters with "
                "quads_qat.integrations.peft.lora_config, or call quantize_merged(model) before training"
            )
        if base is not None or "original_module" in module._modules:
            raise ValueError(f"{who}: {name} is wrapped by an adapter that {way_out}")
