"""PEFT's LoRA layers on a trainer: what they adapt is quantized merged, ``Q(W + sum s B A)``.

:class:`QuantizedLoraLinear` around a linear, :class:`QuantizedLoraExperts` around a fused stack of experts (PEFT's
``target_parameters``). ``integrations.peft`` puts them in their places.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quads_qat import adapters, autograd
from quads_qat.adapters import Adapted, Factors
from quads_qat.linear import W4A16Linear
from quads_qat.scale_groups import whole

OLDEST = (0, 20)

try:
    import peft as installed  # pyright: ignore
    from peft import LoraConfig as LoraConfig  # pyright: ignore
    from peft.tuners.lora.layer import Linear as LoraLinear  # pyright: ignore
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper  # pyright: ignore
    from peft.tuners.tuners_utils import BaseTunerLayer as BaseTunerLayer  # pyright: ignore
    from peft.tuners.tuners_utils import check_adapters_to_merge  # pyright: ignore
    from peft.utils import ModulesToSaveWrapper as ModulesToSaveWrapper  # pyright: ignore
    from peft.utils.other import AuxiliaryTrainingWrapper as AuxiliaryTrainingWrapper  # pyright: ignore
except ImportError as error:
    raise ImportError(
        f"quads_qat.integrations.peft needs peft {OLDEST[0]}.{OLDEST[1]} or newer: pip install peft ({error})"
    ) from error
version: str = installed.__version__  # pyright: ignore
if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
    raise ImportError(
        f"quads_qat.integrations.peft needs peft {OLDEST[0]}.{OLDEST[1]} or newer, got {version}: pip install -U peft"
    )


def refuse_variants(who: str, config: Any) -> None:
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


_Mixin = LoraLayer if TYPE_CHECKING else object  # bare: quantize_merged assigns __class__, which needs equal layouts


class QuantizedLora(_Mixin):
    """What the LoRA layers of a trainer share: adapters of one parameter, merged before it is quantized.

    The sum over active adapters is made in fp32, in the order in which they were added, and rounded once to the
    parameter's dtype; ``merge`` does the same, and ``unmerge`` gives the parameter back bit for bit, from a copy that
    is kept meanwhile. Merge on the device that trained: B A is a GEMM.
    """

    parameter_name: str = "weight"
    _unmerged: Tensor | None = None

    def _attach(self) -> None:
        """Have the base layer and its scale groups see merged weights."""
        base: Any = self.get_base_layer()
        if base.activation_format is not None:
            raise ValueError(
                f"{type(self).__qualname__}: adapters need a trainer in mode 'w4a16', got 'w4a4'; convert the model to "
                "'w4a16'"
            )
        base.__dict__.setdefault("adapted", {})[self.parameter_name] = Adapted(self.factors)

    def _detach(self) -> None:
        self.get_base_layer().__dict__.get("adapted", {}).pop(self.parameter_name, None)
        self._unmerged = None

    def get_param(self) -> nn.Parameter:
        """The base weight, [N, K] or a stack of experts."""
        return self.get_base_layer()._parameters[self.parameter_name]  # pyright: ignore[reportReturnType]

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: Any, **kwargs: Any) -> None:
        """Add an adapter; refuses what cannot be merged before quantizing."""
        who = type(self).__qualname__
        refuse_variants(who, config)
        super().update_layer(adapter_name, r, lora_alpha=lora_alpha, config=config, **kwargs)
        if adapter_name in self.lora_variant:
            kind = type(self.lora_variant[adapter_name]).__name__
            raise ValueError(f"{who}: the LoRA variant {kind} is not supported; use plain LoRA")

    def _low_rank(self, name: str) -> tuple[Tensor, Tensor]:
        """``a`` and ``b`` of an adapter, for :class:`Factors`."""
        return self.lora_A[name].weight, self.lora_B[name].weight  # pyright: ignore

    def factors(self, names: list[str] | None = None) -> list[Factors]:
        """Of these adapters, else of the active ones; none while merged or disabled.

        Of a layer that is both, the base weight is put back first, as PEFT does: also where a forward of another layer
        asks, one that shares its scale with this.
        """
        if names is None:
            if self.disable_adapters and self.merged:
                self.unmerge()
            if self.disable_adapters or self.merged:
                return []
            names = self.active_adapters
        return [Factors(*self._low_rank(name), self.scaling[name]) for name in self.lora_A if name in names]

    def _refuse_names(self, kwargs: dict[str, Any]) -> None:
        if kwargs.pop("adapter_names", None) is not None:
            raise ValueError(f"{type(self).__qualname__}: adapter_names (one adapter for each row) is not supported")

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Put ``W + sum s B A`` in the base weight's place, in the bits that were trained.

        Raises:
            ValueError: ``safe_merge``, and the sum is not finite. Nothing is changed then.
        """
        names = check_adapters_to_merge(self, adapter_names)
        names = [name for name in names if name in self.lora_A]
        if not names:
            return
        original = self.get_param().data.clone() if self._unmerged is None else self._moved()
        weight = adapters.merge(original, self.factors([*self.merged_adapters, *names]))
        if safe_merge and not bool(torch.isfinite(weight).all()):
            raise ValueError(f"merge: the weight merged with {names} has NaN or inf; the adapter is broken")
        self._unmerged = original
        self.get_param().data.copy_(weight)  # in place: FSDP and optimizers hold this memory
        self.merged_adapters.extend(names)

    def _moved(self) -> Tensor:
        """The unmerged weight, where and what the base weight is by now."""
        assert self._unmerged is not None
        weight = self.get_param().data
        return self._unmerged.to(device=weight.device, dtype=weight.dtype)

    def unmerge(self) -> None:
        """Give the base weight back, bit for bit."""
        if not self.merged:
            warnings.warn(f"{type(self).__qualname__}: already unmerged, nothing to do", stacklevel=2)
            return
        self.get_param().data.copy_(self._moved())
        self._unmerged = None
        self.merged_adapters.clear()

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """What PEFT calls to take the layer away: the base layer, on its own again."""
        if merge:
            self.merge(safe_merge=safe_merge, adapter_names=adapter_names)
        self._detach()
        base: Any = self.base_layer
        if isinstance(base, QuantizedLora):  # that of another parameter of the same experts
            return base.unload_and_optionally_merge_module(merge, safe_merge, adapter_names)
        return base


class QuantizedLoraLinear(QuantizedLora, LoraLinear):
    """A LoRA layer around a :class:`~quads_qat.linear.W4A16Linear`: ``y = x @ Q(W + sum s B A).T + bias``.

    Merging: see :class:`QuantizedLora`. With adapters disabled (a reference policy) the base weight alone is quantized.
    """

    base_layer: W4A16Linear

    def __init__(
        self, base_layer: W4A16Linear, adapter_name: str, *, parameter_name: str | None = None, **kwargs: Any
    ) -> None:
        if parameter_name is not None:
            raise ValueError(
                f"QuantizedLoraLinear: target_parameters names {parameter_name!r} of {kwargs.get('target_name')!r}, a "
                "linear; name the linear in target_modules"
            )
        super().__init__(base_layer, adapter_name, **kwargs)
        self._attach()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """X [..., K] -> [..., N]."""
        self._refuse_names(kwargs)
        base, factors = self.base_layer, self.factors()
        if not factors:
            return base(x)
        if base.observer.enabled:
            base.observer.update(x)
        if base.full_precision.on():
            return adapters.merged_linear(x, base.weight, base.bias, factors, None, None)
        amax = autograd.amax_of(base.scale_group, base.weight_format)
        return adapters.merged_linear(x, base.weight, base.bias, factors, amax, base.weight_format)


class QuantizedLoraExperts(QuantizedLora, ParamWrapper):
    """LoRA on one 3-D parameter of :class:`~quads_qat.experts.W4A16Experts`, quantized merged: ``Q(W + sum s B A)``.

    Every expert e has factors of its own in PEFT's two matrices, as PEFT lays them out: rows ``e r`` to ``e r + r`` of
    lora_A [E r, K] and columns ``e, e + E, ...`` of lora_B [N, E r]; N and K change places for stacks stored
    [E, K, N] that say so (``is_transposed``). Layers of several parameters are nested. Merging: see
    :class:`QuantizedLora`. With adapters disabled (a reference policy) the base weights alone are quantized.

    Memory: nothing is kept between forward and backward but inputs, W, A and B. While a parameter is used, its stack is
    there merged and then quantized, two copies in its dtype (forward merges it once more before that, for the amax);
    backward adds the gradient of the stack, in its dtype. Each is let go after use, except under the dispatch
    ``batched_mm``, which gathers weights for every row.
    """

    base_layer: Any

    def __init__(
        self,
        base_layer: Any,
        adapter_name: str,
        *,
        config: Any,
        parameter_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        who, target = type(self).__qualname__, kwargs.get("target_name")
        if parameter_name is None:
            raise ValueError(
                f"{who}: target_modules names {target!r}, a stack of experts; name its parameters in target_parameters"
            )
        wrapped = isinstance(base_layer, ParamWrapper)
        require_stack(who, base_layer.get_base_layer() if wrapped else base_layer, parameter_name)
        refuse_variants(who, config)
        init = config.init_lora_weights
        if not (isinstance(init, bool) or init == "gaussian"):
            raise ValueError(
                f"{who}: init_lora_weights={init!r} is not supported for experts (target_parameters); use True, False "
                "or 'gaussian'"
            )
        super().__init__(base_layer, adapter_name, parameter_name=parameter_name, config=config, **kwargs)
        self._attach()

    def _low_rank(self, name: str) -> tuple[Tensor, Tensor]:
        a, b = map(whole, super()._low_rank(name))
        a = a.view(self.num_experts, -1, a.shape[-1])  # [E, r, in]
        b = b.view(b.shape[0], -1, self.num_experts).permute(2, 0, 1)  # [E, out, r]
        if self._did_swap_in_out_features:  # the parameter is [E, out, in]
            return a, b
        return b.transpose(-2, -1), a.transpose(-2, -1)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The original experts' arguments and result."""
        self._refuse_names(kwargs)
        return self.base_layer(*args, **kwargs)


QuantizedLoraExperts.__name__ = ParamWrapper.__name__  # PEFT (inject_parameters) tells its wrappers by this name


def require_stack(who: str, experts: Any, parameter: str) -> None:
    """Raise ValueError if ``parameter`` is none of the quantized stacks of the ``W4A16Experts``."""
    if parameter not in experts.layout.parameters:
        raise ValueError(
            f"{who}: {parameter} of {experts.original_class.__name__} is not quantized, so nothing can be merged "
            f"before quantizing; target_parameters takes {', '.join(experts.layout.parameters)}"
        )
