"""Trainer-side experts: a model's fused expert stack with fake-quantized weights, under its own dispatch.

transformers >= 5 keeps the experts of a layer as 3-D parameters and dispatches to ``eager``, ``batched_mm`` or
``grouped_mm`` functions. The converted module runs the same computation: ``grouped_mm`` through our own GEMM, which
recomputes quantized weights in backward; every other dispatch through the original code, given a stand-in ``self``
whose weights are quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quads_qat import adapters, autograd, checks, sharding
from quads_qat.adapters import Factors
from quads_qat.config import ActivationFormat, WeightFormat
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

_WHOLE_STACK = ("GptOssExperts", "Llama4TextExperts")
"""Expert classes whose 3-D parameters have one per-tensor scale for all experts, in every dialect."""

_SUM_IN = {
    "NemotronHExperts": "weights",
    "Inkling2Experts": "float32",
    "Inkling2LoopExperts": "float32",
    "OpenAIPrivacyFilterExperts": "float32",
}
"""Expert classes whose own loop adds the experts' outputs up in another dtype than that of the hidden states."""


@dataclass(frozen=True, kw_only=True)
class ExpertsLayout:
    """What the code must know of an experts class.

    Attributes:
        first: parameters of the first projection, one (``gate_up_proj``, ``up_proj``) or two (gate, up).
        down: parameter of the second projection.
        transposed: parameters are [E, K, N] instead of [E, N, K].
        interleaved: gate and up alternate along N instead of gate first.
        bias: there are ``<parameter>_bias`` parameters [E, N].
        gate: the first projection yields gate and up; ``_apply_gate`` or ``act_fn(gate) * up`` joins them.
        per_expert: one scale per expert; False for one scale for the whole stack.
        token_sorted: forward takes rows already sorted into equal groups (llama4), not routing indices.
        shared: every expert sees every row, scaled between its projections by a second argument (inkling).
        sum_in: what the class' own loop adds the experts up in: the dtype of ``hidden`` states, of the routing
            ``weights``, or ``float32``.
        routed_experts: experts that own weights; higher indices pass their input on (longcat's identity experts).
    """

    first: tuple[str, ...]
    down: str = "down_proj"
    transposed: bool = False
    interleaved: bool = False
    bias: bool = False
    gate: bool = True
    per_expert: bool = True
    token_sorted: bool = False
    shared: bool = False
    sum_in: str = "hidden"
    routed_experts: int = 0

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the quantized 3-D parameters."""
        return (*self.first, self.down)


def layout_of(module: nn.Module) -> ExpertsLayout | None:
    """The layout of an experts module of transformers, or None if it is not one that is known.

    Known: every class decorated with ``use_experts_implementation``, and llama4, longcat_flash, step3p7 and inkling's
    shared experts, which are not.
    """
    kind = type(module).__name__
    shapes = {name: p.ndim for name, p in module._parameters.items() if p is not None}
    if shapes.get("down_proj") != 3:
        return None
    first = tuple(name for name in ("gate_up_proj", "gate_proj", "up_proj") if shapes.get(name) == 3)
    decorated = hasattr(module, "is_transposed") and hasattr(module, "has_gate")
    if not first or not (
        decorated or kind in ("Llama4TextExperts", "LongcatFlashExperts", "Step3p7Experts", "InklingSharedExperts")
    ):
        return None
    return ExpertsLayout(
        first=first,
        transposed=getattr(module, "is_transposed", kind == "Llama4TextExperts"),
        interleaved=not getattr(module, "is_concatenated", True),
        bias=getattr(module, "has_bias", False),
        gate=getattr(module, "has_gate", True),
        per_expert=kind not in _WHOLE_STACK,
        token_sorted=kind == "Llama4TextExperts",
        shared=kind == "InklingSharedExperts",
        sum_in=_SUM_IN.get(kind, "hidden"),
        routed_experts=module._parameters["down_proj"].shape[0],  # pyright: ignore[reportOptionalMemberAccess]
    )


class StandsFor(nn.Module):
    """A module in the place of one of ``original_class``, whose methods and constants it lends to that class' code."""

    original_class: type[nn.Module]

    def __getattr__(self, name: str) -> Any:
        """What ``original_class`` defines and this class does not."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original_class")  # not there yet while an object is unpickled
            if original is None or not hasattr(original, name):
                raise
            found = getattr(original, name)
            return MethodType(found, self) if isinstance(found, FunctionType) else found


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

            experts_loop(self, self.layout, project, *args, **kwargs)

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

        return experts_loop(self, self.layout, project, *args, **kwargs)


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


# --------------------------------------------------------------------------------------------------------- computations


def expert_matrix(module: Any, weight: Any, expert: int) -> Tensor:
    """[N, K] of one expert, whichever way the stack is stored."""
    return weight[expert].t() if module.layout.transposed else weight[expert]


def expert_bias(module: Any, name: str, expert: int) -> Tensor | None:
    """[N] or None."""
    return sharding.local(getattr(module, f"{name}_bias"))[expert] if module.layout.bias else None


def join_gate(module: Any, first: Tensor) -> Tensor:
    """What lies between the two projections: [..., N of the first] -> [..., K of the second]."""
    layout = module.layout
    if not layout.gate:
        return module.act_fn(first)
    original = module.original_class
    if hasattr(original, "_apply_gate"):
        return original._apply_gate(module, first)
    gate, up = first.chunk(2, dim=-1)
    return module.act_fn(gate) * up


def experts_loop(
    module: Any,
    layout: ExpertsLayout,
    project: Callable[[str, int, Tensor], Tensor],
    hidden_states: Tensor,
    *routing: Tensor,
    **named: Tensor,
) -> Tensor:
    """Run the experts one by one; ``project(parameter, expert, x)`` computes a projection of rows x [m, K].

    Args:
        module: supplies activation, gate, biases and post-norm of the original class.
        layout: its layout.
        project: one projection of one expert; experts without rows are skipped.
        hidden_states: [M, H]; [..., H] for shared experts.
        routing: the original's further arguments: expert indices [M, k] and weights [M, k] (indices beyond the routed
            experts pass their rows on or are dropped); scales [..., E] for shared experts; nothing for sorted tokens.
        named: the same by name, in the original's order.

    Returns:
        the shape and dtype of ``hidden_states``.
    """
    given = (*routing, *named.values())
    if layout.token_sorted:
        groups = hidden_states.view(layout.routed_experts, -1, hidden_states.shape[-1])
        return torch.cat([_one_expert(module, layout, project, e, rows) for e, rows in enumerate(groups)])
    if layout.shared:
        rows, scales = hidden_states.reshape(-1, hidden_states.shape[-1]), given[0].reshape(-1, layout.routed_experts)
        outs = [_one_expert(module, layout, project, e, rows, scales[:, e, None]) for e in range(scales.shape[1])]
        return torch.stack(outs).float().sum(0).to(hidden_states.dtype).view(hidden_states.shape)
    top_k_index, top_k_weights = given
    sum_dtype = {"weights": top_k_weights.dtype, "float32": torch.float32}.get(layout.sum_in, hidden_states.dtype)
    out = torch.zeros_like(hidden_states, dtype=sum_dtype)
    own = min(layout.routed_experts, getattr(module, "num_experts", layout.routed_experts))  # fewer if sharded on E
    for expert, slot, token in _routed(top_k_index):
        rows = hidden_states[token]
        if expert < own:
            rows = _one_expert(module, layout, project, expert, rows)
        elif not hasattr(module, "identity_expert"):
            continue  # a masked slot of expert parallelism
        weighted = rows * top_k_weights[token, slot, None]
        out = out.index_add(0, token, weighted.to(out.dtype))
    return out.to(hidden_states.dtype)


def _routed(top_k_index: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each expert in use with its slots and tokens, in the order of transformers' own loops."""
    by_slot = top_k_index.t()
    for expert in top_k_index.unique().tolist():
        slot, token = torch.where(by_slot == expert)
        yield expert, slot, token


def _one_expert(
    module: Any,
    layout: ExpertsLayout,
    project: Callable[[str, int, Tensor], Tensor],
    expert: int,
    rows: Tensor,
    scale: Tensor | None = None,
) -> Tensor:
    if len(layout.first) == 2:  # separate gate and up
        gate, up = (project(name, expert, rows) for name in layout.first)
        joined = module.act_fn(gate) * up
    else:
        joined = join_gate(module, project(layout.first[0], expert, rows))
    out = project(layout.down, expert, joined if scale is None else joined * scale)
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


def grouped_forward(
    module: Any,
    project: Callable[[str, Tensor, Tensor, Tensor], Tensor],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """The ``grouped_mm`` dispatch: rows sorted by expert, one GEMM call per projection. Traceable as one graph.

    ``project(parameter, rows [M, K], offs [E], expert of each row [M])`` is a projection of all experts -> [M, N].

    The steps and their order are those of transformers' ``grouped_mm_experts_forward``
    (integrations/moe.py), so that the bits are the same; slots of experts on other ranks (expert parallelism) sort to
    the tail, get no GEMM and are zeroed.
    """
    layout: ExpertsLayout = module.layout
    tokens, k = hidden_states.shape[0], top_k_index.shape[-1]
    expert_of_slot, order = torch.sort(top_k_index.reshape(-1))
    rows = hidden_states[order // k]
    weights = top_k_weights.reshape(-1)[order]
    on_cpu = hidden_states.device.type in ("cpu", "mps")
    counted = expert_of_slot.float() if on_cpu else expert_of_slot.int()  # histc: floats on a CPU, ints on CUDA
    counts = torch.histc(counted, bins=module.num_experts, min=0, max=module.num_experts - 1)
    offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
    elsewhere = None
    if getattr(module, "_is_expert_parallel", True):  # where there is no such flag, transformers masks always
        elsewhere = (expert_of_slot >= module.num_experts).unsqueeze(-1)
        expert_of_slot = expert_of_slot.clamp(max=module.num_experts - 1)
        rows = rows.masked_fill(elsewhere, 0.0)

    def projected(name: str, x: Tensor) -> Tensor:
        out = project(name, x, offs, expert_of_slot)
        return out if elsewhere is None else out.masked_fill(elsewhere, 0.0)

    out = projected(layout.down, join_gate(module, projected(layout.first[0], rows)))
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    out = out * weights.unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return out[inverse].view(tokens, k, hidden_states.shape[-1]).sum(dim=1).to(hidden_states.dtype)
