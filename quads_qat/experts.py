"""Trainer-side experts: a model's fused expert stack with fake-quantized weights, under its own dispatch.

transformers >= 5 keeps the experts of a layer as 3-D parameters and dispatches to ``eager``, ``batched_mm`` or
``grouped_mm`` functions. The converted module runs the same computation: ``grouped_mm`` through our own GEMM, which
recomputes quantized weights in backward; every other dispatch through the original code, given a stand-in ``self``
whose weights are quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quads_qat import adapters, autograd, checks, sharding
from quads_qat.adapters import Factors
from quads_qat.config import ActivationFormat, WeightFormat
from quads_qat.experts_dispatch import StandsFor, expert_bias, expert_matrix, experts_loop, grouped_forward
from quads_qat.experts_layout import ExpertsLayout
from quads_qat.linear import (
    ActivationObserver,
    CodeCache,
    FullPrecision,
    name_of,
    refuse_other_dtype,
    tell_trainer,
)
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.scale_groups import ScaleGroup

T = TypeVar("T")

Source = tuple[Tensor, NVFP4Tensor | None]
"""What a quantized weight is made from, besides the master weight: the amax of its scale group, and codes if kept."""


class W4A16Experts(StandsFor):
    """A fused expert stack that multiplies by fake-quantized weights; parameters stay the 3-D master weights.

    Under every dispatch the output equals, bit for bit, the original module's with the quantized weights put in.
    Made by ``quads_qat.convert`` from a module of any known layout; ``original_class`` is that module's class.
    Parameters with adapters (``integrations.peft``) are quantized merged.
    """

    layout: ExpertsLayout
    weight_formats: dict[str, WeightFormat]
    scale_groups: dict[str, ScaleGroup]
    observers: dict[str, ActivationObserver]
    full_precision: FullPrecision
    code_cache: CodeCache
    activation_format: ActivationFormat | None = None
    cast_dtype: torch.dtype | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> W4A16Experts:
        super()._apply(fn, recurse)
        if (weight := self._parameters.get(self.layout.down)) is not None:
            self.cast_dtype = weight.dtype
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        groups, formats = self.scale_groups.values(), self.weight_formats.values()
        tell_trainer(destination, prefix, groups, formats, self.full_precision)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The original module's arguments and result."""
        if self.full_precision.on():
            return self._in_full_precision(*args, **kwargs)
        if self._grouped():
            return grouped_forward(self, self._project_grouped, *args, **kwargs)
        sources = {name: self._naming(name, partial(self.source, name)) for name in self.layout.parameters}
        quantized = {name: self._naming(name, partial(self._quantized, name, s)) for name, s in sources.items()}
        if self._observing():
            self._observe(quantized, *args, **kwargs)
        stand_in = self._stand_in(quantized)
        with self._recompute(quantized, sources):
            return self.original_class.forward(stand_in, *args, **kwargs)

    def _in_full_precision(self, *args: Any, **kwargs: Any) -> Tensor:
        merged = {name: self._merged(name) for name in self.layout.parameters if self.factors(name)}
        if self._observing():
            self._observe({name: self._weight(name) for name in self.layout.parameters} | merged, *args, **kwargs)
        with self._recompute(merged, {}):
            return self.original_class.forward(self._stand_in(merged), *args, **kwargs)

    def amax(self, name: str) -> Tensor:
        """What the parameter's scales are made from: [E] or []."""
        return autograd.amax_of(self.scale_groups[name], self.weight_formats[name])

    def _weight(self, name: str) -> Tensor:
        """The master weight: of a stack that is sharded over ranks, the experts of this rank.

        Raises:
            ValueError: its shards cut blocks of 16.
        """
        weight: Tensor = self._parameters[name]  # pyright: ignore[reportAssignmentType]
        if sharding.is_sharded(weight) and (
            problem := sharding.cut_block(weight, -2 if self.layout.transposed else -1)
        ):
            raise ValueError(
                f"{name_of(self, name, self.scale_groups[name])}: "
                f"{problem}; list such layers with quads_qat.check_tp(model, tp), then shard them along E, or "
                "exclude them from quantization"
            )
        refuse_other_dtype(self, name, weight, self.weight_formats[name], self.scale_groups[name])
        return sharding.local(weight)

    def factors(self, name: str) -> list[Factors]:
        """The low-rank updates of a parameter that are active now.

        Raises:
            ValueError: there are some, and the stack is sharded.
        """
        adapted = self.__dict__.get("adapted", {}).get(name)
        factors = [] if adapted is None else adapted.factors()
        if factors and sharding.is_sharded(self._parameters[name]):  # pyright: ignore[reportArgumentType]
            raise ValueError(
                f"{name_of(self, name, self.scale_groups[name])}: "
                "expert or tensor parallelism with adapters is not supported; shard with FSDP2, the base "
                "weight and its adapters in one unit"
            )
        return factors

    def _merged(self, name: str) -> Tensor:
        return adapters.merged_stack(self._weight(name), self.factors(name))

    def source(self, name: str) -> Source:
        """What the quantized parameter is made from, besides itself: the amax, or its codes inside ``accumulate``."""
        return self.code_cache.source(self, name, self.scale_groups[name], self.weight_formats[name])

    def _grouped(self) -> bool:
        return getattr(getattr(self, "config", None), "_experts_implementation", None) == "grouped_mm" and hasattr(
            self, "has_gate"
        )

    def _naming(self, name: str, call: Callable[[], T]) -> T:
        return checks.naming(lambda: name_of(self, name, self.scale_groups[name]), call)

    def _project_grouped(self, name: str, x: Tensor, offs: Tensor, expert: Tensor) -> Tensor:
        return self._naming(name, lambda: self._project_all(name, x, offs, expert))

    def _project_all(self, name: str, x: Tensor, offs: Tensor, expert: Tensor) -> Tensor:
        if self.observers[name].enabled:
            self.observers[name].update(x)
        factors, (amax, codes) = self.factors(name), self.source(name)
        fmt, weight = self.weight_formats[name], self._weight(name)
        if factors and codes is None:
            out = adapters.merged_grouped_linear(x, weight, offs, factors, amax, fmt)
        else:
            out = autograd.grouped_linear(x, weight, offs, amax, fmt, codes)
        return out + sharding.local(getattr(self, f"{name}_bias"))[expert] if self.layout.bias else out

    def _observing(self) -> bool:
        return any(observer.enabled for observer in self.observers.values())

    def _quantized(self, name: str, source: Source) -> Tensor:
        amax, codes = source
        return autograd.fake_quantize_ste(self._merged(name), fmt=self.weight_formats[name], amax=amax, codes=codes)

    def _stand_in(self, replaced: dict[str, Tensor]) -> nn.Module:
        """An instance of the original class with this module's state, except for the ``replaced`` parameters.

        Of sharded parameters it has this rank's shards, which is what the original code expects of its experts.
        """
        stand_in = object.__new__(self.original_class)
        stand_in.__dict__.update(self.__dict__)
        stand_in.__dict__["_parameters"] = {
            name: p if p is None else sharding.local(p) for name, p in self._parameters.items() if name not in replaced
        }
        stand_in.__dict__.update(replaced)
        return stand_in

    def _recompute(self, weights: dict[str, Tensor], sources: dict[str, Source]) -> Any:
        """Save none of the ``weights``, quantized from ``sources``; without a source: merged alone."""
        if not weights or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return nullcontext()
        again = [
            (w, _again(self._weight(name), self.factors(name), sources.get(name), self.weight_formats[name]))
            for name, w in weights.items()
        ]
        return autograd.recompute_quantized(again)

    def _observe(self, weights: dict[str, Tensor], *args: Any, **kwargs: Any) -> None:
        """Run the experts once more, one by one, to see the inputs of both projections. Output bits are untouched."""
        with torch.no_grad():

            def project(name: str, expert: int, x: Tensor) -> Tensor:
                self.observers[name].update(x)
                return F.linear(
                    x.to(weights[name].dtype),
                    expert_matrix(self, weights[name], expert),
                    expert_bias(self, name, expert),
                )

            experts_loop(self, project, *args, **kwargs)

    def extra_repr(self) -> str:
        """Original class, shapes and recipe, for ``print(model)``."""
        shapes = ", ".join(f"{name}={tuple(self._parameters[name].shape)}" for name in self.layout.parameters)  # pyright: ignore[reportOptionalMemberAccess]
        recipe = next(iter(self.weight_formats.values())).recipe
        return f"{self.original_class.__name__}, {shapes}, recipe={recipe}"


class W4A4Experts(W4A16Experts):
    """Fake-quantized weights and activations in an expert stack: the symmetric variant, for ablations.

    Runs expert by expert with its own loop under every dispatch: each projection's input rows are quantized.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The original module's arguments and result."""
        if self.full_precision.on():
            return self._in_full_precision(*args, **kwargs)
        amaxes = {name: self.amax(name) for name in self.layout.parameters}
        # one view for all experts: its backward is one stack, where a select each would add up whole zero stacks
        matrices = {name: self._weight(name).unbind(0) for name in self.layout.parameters}

        def project(name: str, expert: int, x: Tensor) -> Tensor:
            observer, fmt = self.observers[name], self.weight_formats[name]
            if observer.enabled:
                observer.update(x)
            weight = expert_matrix(self, matrices[name], expert)
            amax = amaxes[name][expert] if fmt.per_expert else amaxes[name]
            bias, how = expert_bias(self, name, expert), (_of_one_expert(fmt), self.activation_format, observer.amax)
            return self._naming(name, lambda: autograd.linear(x, weight, bias, amax, *how))

        return experts_loop(self, project, *args, **kwargs)


def _of_one_expert(fmt: WeightFormat) -> WeightFormat:
    return WeightFormat(recipe=fmt.recipe, export_dtype=fmt.export_dtype)


def _again(weight: Tensor, factors: list[Factors], source: Source | None, fmt: WeightFormat) -> Callable[[], Tensor]:
    given = (weight, *(t for f in factors for t in (f.a, f.b)))
    versions = [t._version for t in given]

    def rebuild() -> Tensor:
        if [t._version for t in given] != versions:
            raise RuntimeError(
                "an expert weight was changed in place between forward and backward; step the optimizer after backward"
            )
        merged = adapters.merge(weight, factors)
        if source is None:
            return merged
        amax, codes = source
        return autograd.fake_quantize_weight(merged, amax, fmt, weight.dtype, codes)

    return rebuild
