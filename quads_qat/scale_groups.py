"""Which weights share one per-tensor scale: rules on names, and the group that a module reads its siblings from.

Engines fuse some linears into one GEMM with a single per-tensor scale (q/k/v, gate/up, ...). They must share it in the
training forward too: a scale that is only merged at export would change bits that were trained with.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from quads_qat.formats import FLOATS

FUSED_LINEARS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)
"""Leaf names that share a scale when they have the same parent (Model-Optimizer 0.47's fusion of equal inputs)."""

_QKV, _MLA = "{q_proj,k_proj,v_proj}", "{q_a_proj,kv_a_proj_with_mqa}"
_JOINS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(pattern), groups)
    for pattern, groups in (
        (r"(.*attn)\.(?:gate_proj|g_proj|output_gate|linear_gate|kv_proj)", (_QKV, _MLA, "qkv_proj")),
        (r"(.*attn)\.(?:b_proj|g_a_proj|r_proj|forget_gate\.f_a_proj|forget_gate\.f_proj)", (_QKV,)),
        (r"(.*attn)\.kv_a_proj_with_mqa", (_QKV,)),
        (r"(.*attn)\.indexer\.(?:wk|weights_proj|index_qk_proj)", (_QKV, _MLA)),
        (r"(.*attn)\.compressor(?:\.indexer)?\.(?:kv_proj|gate_proj|scorer\.weights_proj)", (_QKV, _MLA)),
        (r"(.*attn)\.(?:compressor\.)?indexer\.(?:wq_b|q_b_proj)", ("q_b_proj",)),
        (r"(.*qkv_proj)\.v_proj_(?:current|delayed)", (_QKV,)),
        (r"(.*hyper_connection)\.block_inject_weight", ("input_mix_weight_down",)),
    )
)
"""Linears that read what a group of another name reads: Model-Optimizer 0.47 gives all of them one scale."""

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


def joined_group(name: str, groups: Collection[str]) -> str | None:
    """Which of ``groups`` the linear ``name`` belongs to besides its siblings: one that reads the same input, or None.

    >>> joined_group("self_attn.indexer.wk", ["self_attn.{q_a_proj,kv_a_proj_with_mqa}", "self_attn.q_b_proj"])
    'self_attn.{q_a_proj,kv_a_proj_with_mqa}'
    """
    for pattern, candidates in _JOINS:
        if match := pattern.fullmatch(name):
            found = (f"{match[1]}.{group}" for group in candidates)
            return next((group for group in found if group in groups), None)
    return None


def activation_key(group: str) -> str:
    """The activation group of a weight group: the same, but all experts of a layer's projection share one.

    >>> activation_key("mlp.experts.7.{gate_proj,up_proj}")
    'mlp.experts.*.{gate_proj,up_proj}'
    """
    return _EXPERT_INDEX.sub(r"\1.*", group)


ZERO3 = (
    "is sharded by DeepSpeed ZeRO-3, which gathers the parameters of one module at a time, so that no module sees all "
    "weights that share its scale; use ZeRO up to stage 2, or FSDP2"
)


HOOKED = (
    "was parallelized by transformers (tp_plan, ep_plan, DistributedConfig), whose hooks hand it its shard as if it "
    "were the whole weight, so that every rank would make a scale of its own; shard the converted model with PyTorch's "
    "parallelize_module or distribute_tensor (docs/trainers.md)"
)


def is_hooked(module: nn.Module) -> bool:
    """Whether transformers has put the hooks of its tensor or expert parallelism on ``module``; it leaves this mark."""
    return getattr(module, "_is_hooked", False)


def is_zero3(weight: Tensor) -> bool:
    """Whether DeepSpeed's stage 3 owns ``weight``; it gives parameters ids of its own."""
    return hasattr(weight, "ds_id")


@dataclass(eq=False)
class ScaleGroup:
    """The weights that share one per-tensor scale (for a stack of experts: one per expert).

    Attributes:
        name: as :func:`group_key` gives it.
        members: (module, parameter name, full name); read anew at every forward, so optimizer steps and
            resharding are seen.
        held: float32 [] or [E], the amax that ``step`` keeps (scales ``frozen`` or ``ema``); None: that of the weights
            as they are.
    """

    name: str
    members: list[tuple[nn.Module, str, str]] = field(default_factory=list)
    held: Tensor | None = None

    def weights(self) -> list[Tensor]:
        """The members' current weights, with their adapters merged in.

        Raises:
            TypeError: a member was cast to another dtype than weights are quantized from.
            RuntimeError: a member is sharded while another is whole: they sit in different FSDP units; or DeepSpeed
                shards parameters (ZeRO-3); or a weight is no parameter any more (a parametrization); or transformers
                has parallelized a member's module.
        """
        for module, parameter, name in self.members:
            if parameter not in module._parameters:
                raise RuntimeError(
                    f"{name} is no parameter of its module any more (as under torch.nn.utils.parametrize, PEFT's own "
                    "target_parameters, or FSDP1's flat parameters), so what replaced it would not be quantized; make "
                    "adapters with quads_qat.integrations.peft (lora_config, quantize_merged), shard with FSDP2, or "
                    "exclude the module from quantization"
                )
            if is_hooked(module):
                raise RuntimeError(f"{name} {HOOKED}")
        weights: list[Tensor] = [module._parameters[parameter] for module, parameter, _ in self.members]  # pyright: ignore[reportAssignmentType]
        for weight, (_, _, name) in zip(weights, self.members, strict=True):
            if weight.dtype not in FLOATS:
                raise TypeError(
                    f"{name}: master weights must be float32, bfloat16 or float16, got {weight.dtype}; cast it back"
                )
        if is_zero3(weights[0]):
            raise RuntimeError(f"{self.members[0][2]} {ZERO3}")
        # A DTensor, or a flat shard of FSDP1.
        sharded = [hasattr(w, "placements") or w.numel() == 0 or w.ndim < 2 for w in weights]
        if any(sharded) and not all(sharded):
            inside, outside = sharded.index(False), sharded.index(True)
            raise RuntimeError(
                f"{self.members[inside][2]} shares its per-tensor scale with {self.members[outside][2]}, which is "
                "still sharded; wrap the parent module that holds both as one FSDP unit"
            )
        if not self.adapted():
            return weights
        adapters = [module.__dict__.get("adapted", {}).get(parameter) for module, parameter, _ in self.members]
        return [w if adapt is None else adapt(w) for adapt, w in zip(adapters, weights, strict=True)]

    def adapted(self) -> bool:
        """Whether an adapter changes what is quantized: ``adapted`` of a member's module (``integrations.peft``)."""
        return any(parameter in module.__dict__.get("adapted", ()) for module, parameter, _ in self.members)


def whole(weight: Tensor) -> Tensor:
    """A sharded parameter (DTensor) gathered, which all its ranks must take part in; any other tensor as it is."""
    gather = getattr(weight, "full_tensor", None)
    return weight if gather is None else gather()
