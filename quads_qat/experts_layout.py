"""How a class of transformers keeps its experts, and what the code must know of it: one dataclass, and how it is found.

transformers >= 5 keeps the experts of a layer as 3-D parameters of one module, whose layout differs between classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

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
