"""What the vLLM plugin computes for a checkpoint: config.json and the environment. Imports no vLLM."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quads_qat import dialects
from quads_qat.config import ActivationFormat, ActivationScale, Dialect, Recipe, ResidualConfig, ResidualScope
from quads_qat.contract import Contract, RolloutPolicy

RESIDUAL, SCALE, RECIPE = "QUADS_QAT_RESIDUAL", "QUADS_QAT_ACTIVATION_SCALE", "QUADS_QAT_ACTIVATION_RECIPE"


@dataclass(frozen=True)
class Serving:
    """What the linears and experts of a model compute.

    Attributes:
        recipe: how weights decode.
        activation: how activations are quantized.
        residual: what is compensated.
        source: where it was said, for the log.
    """

    recipe: Recipe
    activation: ActivationFormat
    residual: ResidualConfig
    source: str

    def __str__(self) -> str:
        r, a = self.residual, self.activation
        chosen = f"fraction={r.fraction}, scope={r.scope}, norm={r.norm}, granularity={r.granularity}"
        return f"activations {a.scale}, recipe {a.recipe}; residual {chosen} ({self.source}); weights {self.recipe}"


def overrides(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the environment says: ``residual``, ``scale``, ``recipe``, each only where it says something.

    Raises:
        ValueError: names the variable.

    >>> overrides({"QUADS_QAT_RESIDUAL": '{"fraction": 0.25}'})["residual"].fraction
    0.25
    """
    environ = os.environ if environ is None else environ
    readers: dict[str, tuple[str, Callable[[str], Any]]] = {
        RESIDUAL: ("residual", lambda text: ResidualConfig(**json.loads(text))),
        SCALE: ("scale", ActivationScale),
        RECIPE: ("recipe", Recipe),
    }
    found = {}
    for variable, (name, read) in readers.items():
        if text := environ.get(variable, "").strip():
            try:
                found[name] = read(text)
            except (TypeError, ValueError) as error:
                example = '; e.g. {"fraction": 0.5, "scope": "token"}' if variable == RESIDUAL else ""
                raise ValueError(f"{variable}={text!r} is not understood ({error}){example}") from None
    return found


def serving(entry: Any, where: str, dialect: Dialect, *, weights_only: bool) -> Serving | None:
    """What is to be computed for a checkpoint; None: what vLLM computes without the plugin.

    Args:
        entry: what config.json has under ``quads_qat``; None: nothing.
        where: the checkpoint, for messages.
        dialect: of the checkpoint.
        weights_only: W4A16.

    Raises:
        ValueError: an entry that cannot be read, or a policy that an engine cannot follow.
    """
    contract = None if entry is None else Contract.from_json(entry, where)
    recipe = dialects.FOREIGN_RECIPES[dialect][0] if contract is None else contract.recipe
    if not dialects.carries(dialect, recipe):
        raise ValueError(
            f"quads_qat: recipe '{recipe}' does not go with the {dialect} dialect; config.json was changed"
        )
    given, policy = overrides(), None if contract is None else contract.rollout
    source = "of the environment" if given else "of config.json" if policy is not None else "by default"
    if policy is None:
        if weights_only and "residual" not in given and "scale" not in given:
            return None
        policy = RolloutPolicy()
    activation = ActivationFormat(
        scale=given.get("scale", policy.activation.scale), recipe=given.get("recipe", policy.activation.recipe)
    )
    chosen = Serving(recipe, activation, given.get("residual", policy.residual), source)
    _require_servable(chosen, weights_only=weights_only)
    return chosen


def _require_servable(chosen: Serving, *, weights_only: bool) -> None:
    """Rows of a batch must not depend on each other: an engine pads batches, and other requests join them."""
    residual, scale = chosen.residual, chosen.activation.scale
    if residual.fraction > 0 and residual.scope is ResidualScope.BATCH:
        raise ValueError(
            f"quads_qat: residual scope 'batch' {chosen.source}: the rows of other requests, and of padding, would "
            f'choose the channels; set {RESIDUAL} to {{"scope": "token"}} or "block"'
        )
    if residual.fraction > 0 and residual.scope is ResidualScope.STATIC:
        raise ValueError(
            f"quads_qat: residual scope 'static' {chosen.source}: calibrated masks are not part of checkpoints; set "
            f'{RESIDUAL} to {{"scope": "token"}} or "block"'
        )
    if scale is ActivationScale.PER_TENSOR:
        raise ValueError(
            f"quads_qat: activation scale 'per_tensor' {chosen.source}: it would depend on the rows of other requests "
            f"and of padding; set {SCALE} to per_token or static"
        )
    if scale is ActivationScale.STATIC and weights_only:
        raise ValueError(
            f"quads_qat: activation scale 'static' {chosen.source}, but a W4A16 checkpoint has no input scales; set "
            f"{SCALE}=per_token"
        )
