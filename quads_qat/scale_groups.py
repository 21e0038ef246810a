"""Which weights share one per-tensor scale: rules on names, and the group that a module reads its siblings from.

Engines fuse some linears into one GEMM with a single per-tensor scale (q/k/v, gate/up, ...). They must share it in the
training forward too: a scale that is only merged at export would change bits that were trained with.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

FUSED_LINEARS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)
"""Leaf names that share a scale when they have the same parent (Model-Optimizer 0.47's fusion of equal inputs)."""

_EXPERT_INDEX = re.compile(r"(\bexperts)\.\d+\b")


def group_key(name: str, rules: Sequence[str] = ()) -> str:
    r"""The scale group of the linear ``name``: itself, its fused siblings, or what a user's regex catches.

    Args:
        name: full module name.
        rules: regular expressions, searched in ``name``; linears caught by one rule with equal capture groups share.

    >>> group_key("model.layers.0.self_attn.k_proj")
    'model.layers.0.self_attn.{q_proj,k_proj,v_proj}'
    >>> group_key("layers.3.fused_b", [r"layers\.(\d+)\.fused_"])
    'rule 0 (3)'
    """
    for i, rule in enumerate(rules):
        if match := re.search(rule, name):
            return f"rule {i} ({', '.join(match.groups(''))})"
    plain = name.removesuffix(".base_layer")  # a linear wrapped by an adapter
    parent, _, leaf = plain.rpartition(".")
    for siblings in FUSED_LINEARS:
        if leaf in siblings:
            return f"{parent}.{{{','.join(siblings)}}}".lstrip(".")
    return plain


def activation_key(group: str) -> str:
    """The activation group of a weight group: the same, but all experts of a layer's projection share one.

    >>> activation_key("mlp.experts.7.{gate_proj,up_proj}")
    'mlp.experts.*.{gate_proj,up_proj}'
    """
    return _EXPERT_INDEX.sub(r"\1.*", group)


@dataclass(eq=False)
class ScaleGroup:
    """The weights that share one per-tensor scale (for a stack of experts: one per expert).

    Attributes:
        name: as :func:`group_key` gives it.
        members: (module, parameter name, full name); read anew at every forward, so optimizer steps and
            resharding are seen.
    """

    name: str
    members: list[tuple[nn.Module, str, str]] = field(default_factory=list)

    def weights(self) -> list[Tensor]:
        """The members' current weights.

        Raises:
            RuntimeError: a member is sharded while another is whole: they sit in different FSDP units.
        """
        weights: list[Tensor] = [module._parameters[parameter] for module, parameter, _ in self.members]  # pyright: ignore[reportAssignmentType]
        # A DTensor, a ZeRO-3 stub, or a flat shard of FSDP1.
        sharded = [hasattr(w, "placements") or w.numel() == 0 or w.ndim < 2 for w in weights]
        if any(sharded) and not all(sharded):
            inside, outside = sharded.index(False), sharded.index(True)
            raise RuntimeError(
                f"{self.members[inside][2]} shares its per-tensor scale with {self.members[outside][2]}, which is "
                "still sharded; wrap the parent module that holds both as one FSDP unit"
            )
        return weights


def whole(weight: Tensor) -> Tensor:
    """A sharded parameter (DTensor) gathered, which all its ranks must take part in; any other tensor as it is."""
    gather = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()
