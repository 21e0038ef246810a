"""Which modules are quantized: rules on names, shared by ``convert`` and everything that reads a checkpoint.

``scope="all"`` is the set that Model-Optimizer 0.47's NVFP4_DEFAULT quantizes
(modelopt_recipes/configs/ptq/units/default_disabled_quantizers.yaml), plus the exclusions that RL needs: adapters stay
in high precision.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from quads_qat.config import Scope

_EXCLUDED: tuple[tuple[str, str], ...] = (
    (r"lm_head|(^|\.)output\.|output_layer|proj_out\b", "output head"),
    (r"router|(^|\.)gate(\.|$)|shared_expert_gate", "router or gate"),
    (r"conv1d", "short convolution"),
    (r"(^|\.)in_proj_(a|b|ba)$", "decay and beta projections of linear attention"),
    # the mixer multiplies by dt_proj.weight itself, past the module's forward (jamba, mamba)
    (r"(^|\.)(mamba|mixer)\.dt_proj$", "time step of a state space"),
    (r"(^|\.)mtp(\.|$)", "multi-token prediction"),
    (r"vision_tower|visual|vision_model|multi_modal_projector|embed_vision", "vision tower"),
    (r"lora_(A|B|embedding)|lora_magnitude", "adapter"),
)

_EXPERTS = re.compile(r"(^|\.)experts(\.|$)|block_sparse_moe")
_MLP = re.compile(r"mlp|feed_forward|block_sparse_moe|(^|\.)(experts|shared_experts?|moe|ffn)(\.|$)")


def default_exclusion(name: str) -> str | None:
    """Why ``name`` is left alone by default, or None.

    >>> default_exclusion("model.layers.0.mlp.gate")
    'router or gate'
    >>> default_exclusion("model.layers.0.mlp.gate_proj") is None
    True
    """
    return next((reason for pattern, reason in _EXCLUDED if re.search(pattern, name)), None)


def in_scope(name: str, scope: Scope) -> bool:
    """Whether ``scope`` covers the module ``name``: routed experts, all of the MLPs, or everything."""
    if scope is Scope.ALL:
        return True
    return bool((_EXPERTS if scope is Scope.EXPERTS else _MLP).search(name))


def matches(name: str, pattern: str) -> bool:
    """Whether a user's ``pattern`` means the module ``name``: exact (with all below it), glob, or ``re:`` + regex.

    Globs match the whole name; regexes match from its start (``re.match``), as compressed-tensors' do.

    >>> matches("model.layers.0.mlp", "model.layers.0"), matches("a.q_proj", "*q_proj"), matches("a.b", "re:.*b$")
    (True, True, True)
    """
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def first_match(name: str, patterns: Sequence[str]) -> str | None:
    """The first of ``patterns`` that means ``name``, or None."""
    return next((p for p in patterns if matches(name, p)), None)


def patterns_of(names: Sequence[str], others: Collection[str]) -> list[str]:
    """Patterns that mean all of ``names`` and none of ``others``: globs over numbers, and names where these mean more.

    >>> patterns_of(["layers.0.q", "layers.1.q", "layers.1.k"], ["layers.0.k"])
    ['layers.*.q', 'layers.1.k']
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"(?<![^.])\d+(?![^.])", "*", name), []).append(name)
    found: list[str] = []
    for glob, named in alike.items():
        found += named if len(named) == 1 or any(matches(other, glob) for other in others) else [glob]
    return found
