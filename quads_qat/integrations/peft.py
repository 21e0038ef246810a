"""PEFT: LoRA that is quantized merged, ``Q(W + s B A)``, and LoRA on a frozen base of packed NVFP4 weights.

A trainer multiplies by the quantized *merged* weight, with the scale group's amax of merged weights: what an export of
the merged model holds, bit for bit. Plain PEFT around a converted linear would train ``Q(W) + s B A`` instead::

    model = qq.convert(AutoModelForCausalLM.from_pretrained(...), "w4a16")
    model = get_peft_model(model, lora_config(target_modules=["q_proj", "v_proj"], r=16))
    ...                                                        # train: base frozen, lora_A and lora_B in high precision
    with merged(model) as plain:                               # each weight sync
        qq.update_weights(rollout, qq.export_weights(plain, "modelopt"))
    qq.export_checkpoint(model.merge_and_unload(), "nvfp4", dialect="modelopt")

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

import torch
from torch import Tensor, nn

from quads_qat import adapters, autograd
from quads_qat.adapters import Factors
from quads_qat.config import Mode
from quads_qat.conversion import STATE, Conversion, conversion_of
from quads_qat.experts import W4A16Experts
from quads_qat.linear import W4A16Linear
from quads_qat.residual import ResidualCompensatedLinear

OLDEST = (0, 20)

try:
    import peft as installed  # pyright: ignore
    from peft import LoraConfig  # pyright: ignore
    from peft.tuners.lora.layer import Linear as LoraLinear  # pyright: ignore
    from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge  # pyright: ignore
except ImportError as error:
    raise ImportError(
        f"quads_qat.integrations.peft needs peft {OLDEST[0]}.{OLDEST[1]} or newer: pip install peft ({error})"
    ) from error
version: str = installed.__version__  # pyright: ignore
if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
    raise ImportError(
        f"quads_qat.integrations.peft needs peft {OLDEST[0]}.{OLDEST[1]} or newer, got {version}: pip install -U peft"
    )

M = TypeVar("M", bound=nn.Module)


def lora_config(**options: Any) -> Any:
    """``peft.LoraConfig(**options)`` that knows quantized linears: those of a trainer and of a weights-only rollout.

    Name ``target_modules`` for a rollout: ``"all-linear"`` finds subclasses of ``nn.Linear`` only.

    Raises:
        ValueError: ``target_parameters`` (LoRA on 3-D experts), which is not supported.
    """
    if options.get("target_parameters"):
        raise ValueError(
            "lora_config: target_parameters (LoRA on fused experts) is not supported; adapt linears with "
            "target_modules, or train the experts' weights themselves"
        )
    config: Any = LoraConfig(**options)  # pyright: ignore
    # PEFT's way for classes of one's own: docs/source/developer_guides/custom_models.md
    config._register_custom_module({W4A16Linear: QuantizedLoraLinear, ResidualCompensatedLinear: PackedLoraLinear})
    return config


def _refuse_variants(who: str, config: Any) -> None:
    """What is not ``W + s B A`` can be neither merged before quantizing nor ignored."""
    wrong = {
        "lora_dropout": config.lora_dropout > 0 and "dropout on x has no counterpart in a merged weight",
        "lora_bias": config.lora_bias and "biases are not quantized; train the base bias (bias='lora_only') instead",
        "use_dora": config.use_dora and "DoRA rescales the merged weight",
        "fan_in_fan_out": config.fan_in_fan_out and "weights are [N, K]",
    }
    for option, reason in wrong.items():
        if reason:
            raise ValueError(f"{who}: {option}={getattr(config, option)!r} is not supported: {reason}")


# -------------------------------------------------------------------------------------------------------------- trainer


class QuantizedLoraLinear(LoraLinear):
    """A LoRA layer around a :class:`~quads_qat.linear.W4A16Linear`: ``y = x @ Q(W + sum s B A).T + bias``.

    The sum over active adapters is made in fp32, in the order in which they were added, and rounded once to the
    weight's dtype; ``merge`` does the same, and ``unmerge`` gives the weight back bit for bit, from a copy that is kept
    meanwhile. With adapters disabled (a reference policy) the base weight alone is quantized. Merge on the device that
    trained: B A is a GEMM.
    """

    base_layer: W4A16Linear
    _unmerged: Tensor | None = None

    def __init__(self, base_layer: W4A16Linear, adapter_name: str, **kwargs: Any) -> None:
        super().__init__(base_layer, adapter_name, **kwargs)
        self._attach()

    def _attach(self) -> None:
        if self.base_layer.activation_format is not None:
            raise ValueError(
                "QuantizedLoraLinear: adapters need a trainer in mode 'w4a16', got 'w4a4'; convert the model to 'w4a16'"
            )
        self.base_layer.__dict__["adapted"] = self.merged_weight  # scale groups see merged weights

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """Add an adapter; refuses what cannot be merged before quantizing."""
        _refuse_variants(type(self).__name__, config)
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        if adapter_name in self.lora_variant:
            kind = type(self.lora_variant[adapter_name]).__name__
            raise ValueError(f"{type(self).__name__}: the LoRA variant {kind} is not supported; use plain LoRA")

    def factors(self, names: list[str] | None = None) -> list[Factors]:
        """Of these adapters, else of the active ones; none while merged or disabled."""
        if names is None:
            if self.disable_adapters or self.merged:
                return []
            names = self.active_adapters
        return [
            Factors(self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name])  # pyright: ignore
            for name in self.lora_A
            if name in names
        ]

    def merged_weight(self, weight: Tensor) -> Tensor:
        """What is quantized in the place of the base ``weight`` [N, K]. No gradient."""
        return adapters.merge(weight, self.factors())

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """X [..., K] -> [..., N]."""
        if kwargs.get("adapter_names") is not None:
            raise ValueError("QuantizedLoraLinear: adapter_names (one adapter for each row) is not supported")
        if self.disable_adapters and self.merged:
            self.unmerge()
        base, factors = self.base_layer, self.factors()
        if not factors:
            return base(x)
        if base.observer.enabled:
            base.observer.update(x)
        if base.full_precision.on():
            return adapters.merged_linear(x, base.weight, base.bias, factors, None, None)
        amax = autograd.amax_of(base.scale_group, base.weight_format)
        return adapters.merged_linear(x, base.weight, base.bias, factors, amax, base.weight_format)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put ``W + sum s B A`` in the base weight's place, in the bits that were trained.

        Raises:
            ValueError: ``safe_merge``, and the sum is not finite. Nothing is changed then.
        """
        names = check_adapters_to_merge(self, adapter_names)
        names = [name for name in names if name in self.lora_A]
        if not names:
            return
        original = self.base_layer.weight.data.clone() if self._unmerged is None else self._moved()
        weight = adapters.merge(original, self.factors([*self.merged_adapters, *names]))
        if safe_merge and not bool(torch.isfinite(weight).all()):
            raise ValueError(f"merge: the weight merged with {names} has NaN or inf; the adapter is broken")
        self._unmerged = original
        self.base_layer.weight.data.copy_(weight)  # in place: FSDP and optimizers hold this memory
        self.merged_adapters.extend(names)

    def _moved(self) -> Tensor:
        """The unmerged weight, where and what the base weight is by now."""
        assert self._unmerged is not None
        weight = self.base_layer.weight.data
        return self._unmerged.to(device=weight.device, dtype=weight.dtype)

    def unmerge(self) -> None:
        """Give the base weight back, bit for bit."""
        if not self.merged:
            warnings.warn("QuantizedLoraLinear: already unmerged, nothing to do", stacklevel=2)
            return
        self.base_layer.weight.data.copy_(self._moved())
        self._unmerged = None
        self.merged_adapters.clear()

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """What PEFT calls to take the layer away: the base layer, on its own again."""
        if merge:
            self.merge(safe_merge=safe_merge, adapter_names=adapter_names)
        self._unmerged = None
        self.base_layer.__dict__.pop("adapted", None)
        return self.base_layer


def quantize_merged(model: M) -> M:
    """Let the adapters of a converted PEFT model train through the quantized merged weight, in place.

    For PEFT first, ``convert`` second; with :func:`lora_config` on a converted model there is nothing left to do.
    Afterwards names are those of the base model, and ``merge_and_unload()`` gives a converted model, whichever
    came first.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: not converted, or a rollout; adapters that cannot be merged (dropout, DoRA, w4a4). ``model`` is
            unchanged then.
    """
    root, conversion = conversion_of(model, "quantize_merged")
    if conversion.mode is not Mode.W4A16:
        raise ValueError(f"quantize_merged: needs a trainer in mode 'w4a16', got '{conversion.mode}'")
    plain = [
        (name, m)
        for name, m in model.named_modules()
        if type(m) is LoraLinear and isinstance(m.base_layer, W4A16Linear)
    ]
    for name, m in model.named_modules():
        if isinstance(m, BaseTunerLayer) and isinstance(m.get_base_layer(), W4A16Experts):  # pyright: ignore
            raise ValueError(
                f"quantize_merged: {name} adapts fused experts (target_parameters), which is not supported; adapt "
                "linears with target_modules, or exclude the experts from quantization"
            )
    for name, layer in plain:
        _require_mergeable(name, layer)
    for _, layer in plain:
        layer.__class__ = QuantizedLoraLinear
        layer._attach()  # pyright: ignore
    if hasattr(root, "get_base_model"):
        base: Any = root.get_base_model()  # pyright: ignore[reportCallIssue]
        prefix = next(f"{name}." for name, m in root.named_modules() if m is base)
        _rename(conversion, prefix)
        base.__dict__[STATE] = root.__dict__.pop(STATE)
    return model


def _require_mergeable(name: str, layer: Any) -> None:
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


def _rename(conversion: Conversion, prefix: str) -> None:
    """Give everything in the record the names of the base model, adapters left out."""

    def plain(name: str) -> str:
        return name.removeprefix(prefix).replace(".base_layer", "")

    conversion.weights = {
        plain(full): replace(weight, module=plain(weight.module), group=plain(weight.group))
        for full, weight in conversion.weights.items()
    }
    conversion.skipped = [replace(s, module=plain(s.module)) for s in conversion.skipped if s.reason != "adapter"]
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

    Afterwards adapters and base weights are what they were, bit for bit. Costs one copy of the adapted weights. The
    PEFT model itself must not run inside it.

    Yields:
        the base model, converted.

    Raises:
        ValueError: not converted; adapters other than :class:`QuantizedLoraLinear`, which did not train what would be
            exported.
    """
    root, _ = conversion_of(model, "merged")
    places = [
        (parent, leaf, child)
        for parent in root.modules()
        for leaf, child in parent._modules.items()
        if isinstance(child, QuantizedLoraLinear)
    ]
    other = next(
        (
            n
            for n, m in root.named_modules()
            if isinstance(m, BaseTunerLayer) and not isinstance(m, QuantizedLoraLinear)
        ),
        None,
    )
    if other is not None:
        raise ValueError(
            f"merged: the adapter of {other} does not train a quantized merged weight; make adapters with "
            "quads_qat.integrations.peft.lora_config, or call quantize_merged(model) before training"
        )
    ours: list[QuantizedLoraLinear] = []
    try:
        for parent, leaf, layer in places:
            if not layer.merged:
                ours.append(layer)
                layer.merge()
            parent._modules[leaf] = layer.base_layer
        yield root
    finally:
        for parent, leaf, layer in places:
            parent._modules[leaf] = layer
        for layer in ours:
            if layer.merged:
                layer.unmerge()


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
