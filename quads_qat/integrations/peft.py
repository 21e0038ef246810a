"""PEFT: LoRA that is quantized merged, ``Q(W + s B A)``, and LoRA on a frozen base of packed NVFP4 weights.

A trainer multiplies by the quantized *merged* weight, with the scale group's amax of merged weights: what an export of
the merged model holds, bit for bit. Plain PEFT around a converted linear would train ``Q(W) + s B A`` instead::

    model = qq.convert(AutoModelForCausalLM.from_pretrained(...), "w4a16")
    model = get_peft_model(model, lora_config(target_modules=["q_proj", "v_proj"], r=16))
    ...                                                        # train: base frozen, lora_A and lora_B in high precision
    with merged(model) as plain:                               # each weight sync
        qq.update_weights(rollout, qq.export_weights(plain, "modelopt"))
    qq.export_checkpoint(model.merge_and_unload(), "nvfp4", dialect="modelopt")

Fused experts are adapted as in PEFT, ``lora_config(target_parameters=["mlp.experts.gate_up_proj"])``.
A framework that calls PEFT first converts afterwards: ``quantize_merged(qq.convert(peft_model, "w4a16"))``.

A rollout with ``weights_only=True`` is a frozen base, 0.5625 bytes per weight, that lets gradients through::

    model = get_peft_model(qq.load_rollout("nvfp4", weights_only=True), lora_config(target_modules=[...]))

Adapters are never quantized. Tested with peft 0.20 and 0.21 (``tuners/lora/layer.py``, ``tuners/tuners_utils.py``).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from quads_qat.config import Mode
from quads_qat.conversion import STATE, Conversion, conversion_of
from quads_qat.experts import W4A16Experts
from quads_qat.integrations.peft_layers import (
    AuxiliaryTrainingWrapper,  # pyright: ignore
    BaseTunerLayer,  # pyright: ignore
    LoraConfig,  # pyright: ignore
    LoraLinear,  # pyright: ignore
    ModulesToSaveWrapper,  # pyright: ignore
    ParamWrapper,  # pyright: ignore
    QuantizedLora,
    QuantizedLoraExperts,
    QuantizedLoraLinear,
    require_stack,
)
from quads_qat.linear import W4A16Linear
from quads_qat.residual import ResidualCompensatedLinear

M = TypeVar("M", bound=nn.Module)

_PLACES = ("base_layer", "original_module", "token_adapter")
"""Where PEFT puts what it wraps."""

_OURS = {LoraLinear: QuantizedLoraLinear, ParamWrapper: QuantizedLoraExperts}


def lora_config(**options: Any) -> Any:
    """``peft.LoraConfig(**options)`` that knows a trainer's quantized linears and experts, and a rollout's linears.

    Name ``target_modules`` for a weights-only rollout: ``"all-linear"`` finds subclasses of ``nn.Linear`` only.

    >>> config = lora_config(
    ...     target_modules=["q_proj", "v_proj"],  # linears
    ...     target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],  # fused experts of a trainer
    ... )
    """
    config: Any = LoraConfig(**options)  # pyright: ignore
    # PEFT's way for classes of one's own: docs/source/developer_guides/custom_models.md
    ours = {W4A16Linear: QuantizedLoraLinear, W4A16Experts: QuantizedLoraExperts}
    config._register_custom_module({**ours, ResidualCompensatedLinear: PackedLoraLinear})
    return config


# -------------------------------------------------------------------------------------------------------------- trainer


def quantize_merged(model: M) -> M:
    """Let the adapters of a converted PEFT model train through the quantized merged weight, in place.

    For PEFT first, ``convert`` second; with :func:`lora_config` on a converted model there is nothing left to do.
    Afterwards names are those of the base model, and ``merge_and_unload()`` gives a converted model, whichever
    came first.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: not converted, or a rollout; adapters that cannot be merged (dropout, DoRA, w4a4); a module of
            ``modules_to_save`` that is quantized. ``model`` is unchanged then.
    """
    root, conversion = conversion_of(model, "quantize_merged")
    if conversion.mode is not Mode.W4A16:
        raise ValueError(f"quantize_merged: needs a trainer in mode 'w4a16', got '{conversion.mode}'")
    plain: list[tuple[str, Any]] = []
    for name, m in model.named_modules():
        base = m.get_base_layer() if type(m) in _OURS else None  # pyright: ignore
        if isinstance(base, W4A16Linear | W4A16Experts):
            _require_mergeable(name, m, base)
            plain.append((name, m))
        elif isinstance(m, ModulesToSaveWrapper):
            _refuse_quantized_copy("quantize_merged", name, m)
    for _, layer in plain:
        layer.__class__ = _OURS[type(layer)]
        layer._attach()
    if hasattr(root, "get_base_model"):
        base: Any = root.get_base_model()  # pyright: ignore[reportCallIssue]
        prefix = next(f"{name}." for name, m in root.named_modules() if m is base)
        _drop_what_peft_added(root, conversion)
        _rename(conversion, prefix)
        base.__dict__[STATE] = root.__dict__.pop(STATE)
    return model


def _require_mergeable(name: str, layer: Any, base: W4A16Linear | W4A16Experts) -> None:
    if isinstance(layer, ParamWrapper) and isinstance(base, W4A16Linear):
        raise ValueError(
            f"quantize_merged: {name} adapts a linear through target_parameters; name it in target_modules instead"
        )
    if isinstance(base, W4A16Experts):
        require_stack(f"quantize_merged: {name}", base, layer.parameter_name)
    dropout = any(not isinstance(d, nn.Identity) for d in layer.lora_dropout.values())
    found = {
        "lora_dropout": dropout,
        "lora_bias": any(layer.lora_bias.values()),
        "a LoRA variant (DoRA, ...)": bool(layer.lora_variant),
        "merged adapters": layer.merged,
    }
    for what, present in found.items():
        if present:
            raise ValueError(
                f"quantize_merged: {name} has {what}, which cannot be merged before quantizing; use plain LoRA without"
            )


def _refuse_quantized_copy(who: str, name: str, layer: Any) -> None:
    """A copy that is trained in full has left its scale group, and is not the module that an export knows."""
    if any(isinstance(m, W4A16Linear | W4A16Experts) for m in layer.modules()):
        leaf = name.rpartition(".")[2]
        raise ValueError(
            f"{who}: {name} is quantized, and trained in full as a copy (modules_to_save); name its linears in "
            f"target_modules, or convert with exclude=['*.{leaf}*']"
        )


def _drop_what_peft_added(root: nn.Module, conversion: Conversion) -> None:
    """Leave the base model's own modules in the record: adapters and copies are no part of it."""
    wrappers = {n for n, m in root.named_modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)}

    def is_own(name: str) -> bool:
        parts = name.split(".")
        inside = (part for i, part in enumerate(parts) if ".".join(parts[:i]) in wrappers)
        return all(part in _PLACES for part in inside)

    conversion.skipped = [skipped for skipped in conversion.skipped if is_own(skipped.module)]


def _rename(conversion: Conversion, prefix: str) -> None:
    """Give everything in the record the names of the base model."""

    def plain(name: str) -> str:
        name = name.removeprefix(prefix)
        for place in _PLACES:
            name = name.replace(f".{place}", "")
        return name

    conversion.weights = {
        plain(full): replace(weight, module=plain(weight.module), group=plain(weight.group))
        for full, weight in conversion.weights.items()
    }
    conversion.skipped = [
        replace(s, module=plain(s.module), reason=s.reason.replace(prefix, "")) for s in conversion.skipped
    ]
    for group in conversion.groups.values():
        group.name = plain(group.name)
        group.members = [(module, parameter, plain(full)) for module, parameter, full in group.members]
    for observer in conversion.observers.values():
        observer.name = plain(observer.name)
    conversion.groups = {group.name: group for group in conversion.groups.values()}
    conversion.observers = {observer.name: observer for observer in conversion.observers.values()}
    conversion.last_codes.clear()
    conversion.export_plans.clear()


@contextmanager
def merged(model: nn.Module) -> Iterator[nn.Module]:
    """Inside this context the converted base model stands alone, adapters merged: to export, sync and verify.

    Afterwards adapters and base weights are what they were, bit for bit. Costs one copy of the adapted weights on
    their device (of fused experts, that is most of the model). The PEFT model itself must not run inside it. Adapters
    that are disabled (``model.disable_adapter()``) are left out, as in a forward. Modules that PEFT trains in full
    (``modules_to_save``) stand in the place of the original ones; a head that was tied to the embedding then is not.

    Yields:
        the base model, converted.

    Raises:
        ValueError: not converted; adapters other than :class:`QuantizedLora`, which did not train what would be
            exported; a quantized copy of ``modules_to_save``.
    """
    root, _ = conversion_of(model, "merged")
    places = [
        (parent, leaf, child)
        for parent in root.modules()
        for leaf, child in parent._modules.items()
        if isinstance(child, QuantizedLora | ModulesToSaveWrapper)
    ]
    other = next(
        (n for n, m in root.named_modules() if isinstance(m, BaseTunerLayer) and not isinstance(m, QuantizedLora)),
        None,
    )
    if other is not None:
        raise ValueError(
            f"merged: the adapter of {other} does not train a quantized merged weight; make adapters with "
            "quads_qat.integrations.peft.lora_config, or call quantize_merged(model) before training"
        )
    for name, m in root.named_modules():
        if isinstance(m, ModulesToSaveWrapper) and _in_use(m) is not m.original_module:  # pyright: ignore
            _refuse_quantized_copy("merged", name, m)
    ours: list[QuantizedLora] = []
    config: Any = getattr(root, "config", None)
    copied = any(isinstance(layer, ModulesToSaveWrapper) for _, _, layer in places)
    tied = copied and getattr(config, "tie_word_embeddings", False)
    try:
        for layer in [layer for _, _, layer in places if isinstance(layer, QuantizedLora)]:
            if layer.disable_adapters:
                if layer.merged:
                    layer.unmerge()
            elif not layer.merged:
                ours.append(layer)
                layer.merge()
        for parent, leaf, layer in places:  # layers of several parameters of one module are nested
            parent._modules[leaf] = _in_use(layer)
        if tied and _has_own_head(root):
            config.tie_word_embeddings = False  # as merge_and_unload does
        yield root
    finally:
        if tied:
            config.tie_word_embeddings = tied
        for parent, leaf, layer in places:
            parent._modules[leaf] = layer
        for layer in ours:
            if layer.merged:
                layer.unmerge()


def _in_use(layer: Any) -> nn.Module:
    """The module that a forward of this wrapper runs, once adapters are merged."""
    if isinstance(layer, QuantizedLora):
        return layer.get_base_layer()
    active = layer.active_adapters
    if layer.disable_adapters or not active or active[0] not in layer.modules_to_save:
        return layer.original_module
    return layer.modules_to_save[active[0]]


def _has_own_head(root: Any) -> bool:
    """Whether the output head has another weight than the embedding."""
    try:
        embedding, head = root.get_input_embeddings(), root.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # no language model
        return False
    weight = getattr(head, "weight", None)
    return weight is not None and weight is not getattr(embedding, "weight", None)


# ------------------------------------------------------------------------------------------------------- frozen, packed


class PackedLoraLinear(LoraLinear):
    """A LoRA layer on packed NVFP4 weights: ``y = x @ W.T + s (x A.T) B.T``; W is frozen, 0.5625 bytes per weight.

    Served as it was trained: base checkpoint and adapter side by side. It cannot be merged, because the merged weight
    would be quantized anew.
    """

    base_layer: ResidualCompensatedLinear

    def __init__(self, base_layer: ResidualCompensatedLinear, adapter_name: str, **kwargs: Any) -> None:
        if base_layer.activation is not None:
            raise ValueError(
                "PackedLoraLinear: a base that quantizes activations gives x no gradient; load it with "
                "qq.load_rollout(path, weights_only=True)"
            )
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Unsupported layer type")
            super().__init__(base_layer, adapter_name, **kwargs)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """Add an adapter; refuses what reads or changes the base weight."""
        if config.target_parameters:
            raise ValueError(
                f"PackedLoraLinear: target_parameters={list(config.target_parameters)!r} (LoRA on fused experts) needs "
                "a trainer, quads_qat.convert(model, 'w4a16'): a rollout's experts are packed, and are no parameters"
            )
        init = config.init_lora_weights
        if not (isinstance(init, bool) or init == "gaussian"):
            raise ValueError(
                f"PackedLoraLinear: init_lora_weights={init!r} would change the base weight, which is packed; use True "
                "or 'gaussian'"
            )
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        if adapter_name in self.lora_variant:
            kind = type(self.lora_variant[adapter_name]).__name__
            raise ValueError(f"PackedLoraLinear: the LoRA variant {kind} is not supported; use plain LoRA")

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Always an error."""
        raise ValueError(
            "merge: the base is packed in NVFP4, and merging would quantize it anew, which is not what was trained. "
            "Serve base and adapter side by side, or train with quads_qat.convert(model, 'w4a16') to merge"
        )

    def unmerge(self) -> None:
        """Nothing is ever merged."""
