"""The contract in the file: the ``quads_qat`` entry of config.json.

Tensors alone do not say how they were trained: which arithmetic made the codes, from which dtype, which weights shared
a scale, and what a rollout has to do with its activations. Settings that live only in a launch script drift apart; so
every export writes them beside the weights, and everything that reads a checkpoint reads them first.

    "quads_qat": {
      "version": 2,
      "recipe": "aligned",
      "export_dtype": "bfloat16",
      "scope": "all",
      "quantized": ["model.layers.0-27.self_attn.q_proj", ...],
      "high_precision": ["model.embed_tokens", "lm_head", ...],
      "trainer": "w4a16",
      "scale_groups": {"fused": [["q_proj", "k_proj", "v_proj"], ...], "rules": []},
      "activations": "observed",
      "rollout": {"activation_scale": "per_token", "activation_recipe": "aligned",
                  "residual": {"fraction": 0.5, "scope": "token", "norm": "l2", "granularity": 1}}
    }

``rollout`` is null unless the export was told what rollouts do. ``"weight_scale": "frozen"`` or ``"ema"`` is there if
the trainer holds its scales: weights in high precision do not tell them. ``"start_step": 100`` is there if the trainer
did not quantize yet: until then it multiplies by its master weights. The first version did not have ``export_dtype``,
``quantized`` and ``high_precision``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from quads_qat.checkpoint_io import read_json
from quads_qat.config import ActivationFormat, ActivationScale, Mode, Recipe, ResidualConfig, Scope, WeightScale
from quads_qat.conversion import Conversion, conversion_of
from quads_qat.name_ranges import expanded, listed, shortened
from quads_qat.scale_groups import FUSED_LINEARS

KEY = "quads_qat"
VERSION = 2
"""Of the entry. Whoever meets a higher one must not guess what it means."""

_ACTIVATIONS = ("none", "observed", "given")
_EXPORT_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RolloutPolicy:
    """What a rollout does with activations: how they are quantized, and what is compensated (``fraction=0``: naive)."""

    activation: ActivationFormat = field(default_factory=ActivationFormat)
    residual: ResidualConfig = field(default_factory=ResidualConfig)

    def __str__(self) -> str:
        residual = " ".join(f"{key} {value}" for key, value in asdict(self.residual).items())
        return f"activations {self.activation.scale} ({self.activation.recipe}), residual {residual}"


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What trainer, checkpoint and rollout must agree on.

    Attributes:
        recipe: arithmetic of the weights.
        scope, trainer: what was asked of ``convert``; for the record.
        fused: leaf names that share a per-tensor scale when they have the same parent.
        rules: the ``groups`` given to ``convert``: regular expressions.
        activations: where the activation scales in the file are from: ``none`` (there are none), ``observed`` or
            ``given``.
        weight_scale: what the trainer makes scales from. Those that it holds (frozen, ema) are in packed tensors only.
        start_step: the step at which a trainer that does not quantize yet will start to; 0: it does.
        rollout: what rollouts do with activations; None leaves it to them.
        export_dtype: what fp32 masters are cast to before they are quantized: bfloat16 or float16; None where that is
            not known (an older record), or weights differ.
        quantized: modules whose weights are quantized, as short as :func:`~quads_qat.name_ranges.shortened` makes their
            names; None where that is not known.
        high_precision: likewise, modules whose weights are not. A module in neither list is none of this model's.
    """

    recipe: Recipe
    scope: Scope = Scope.ALL
    trainer: Mode = Mode.W4A16
    fused: tuple[tuple[str, ...], ...] = FUSED_LINEARS
    rules: tuple[str, ...] = ()
    activations: str = "none"
    weight_scale: WeightScale = WeightScale.DYNAMIC
    start_step: int = 0
    rollout: RolloutPolicy | None = None
    export_dtype: torch.dtype | None = None
    quantized: tuple[str, ...] | None = None
    high_precision: tuple[str, ...] | None = None

    @classmethod
    def of_conversion(
        cls, conversion: Conversion, *, activations: str = "none", rollout: RolloutPolicy | None = None
    ) -> Contract:
        """What a converted model stands for. A rollout model brings its own policy."""
        if rollout is None and conversion.mode is Mode.W4A4_RESIDUAL and conversion.activation is not None:
            rollout = RolloutPolicy(
                activation=conversion.activation, residual=conversion.residual or ResidualConfig(fraction=0)
            )
        weight_scale = conversion.schedule.weight_scale
        if weight_scale is WeightScale.DYNAMIC and any(g.held is not None for g in conversion.groups.values()):
            weight_scale = WeightScale.FROZEN  # of a loaded state; nothing moves them
        to_come = conversion.full_precision.delayed and conversion.mode is not Mode.W4A4_RESIDUAL
        dtypes = {weight.format.export_dtype for weight in conversion.weights.values()}
        return cls(
            recipe=conversion.recipe,
            scope=conversion.scope,
            trainer=conversion.mode,
            rules=conversion.rules,
            activations=activations,
            weight_scale=weight_scale,
            start_step=conversion.full_precision.start_step if to_come else 0,
            rollout=rollout,
            export_dtype=next(iter(dtypes)) if len(dtypes) == 1 else None,
            quantized=shortened(weight.module for weight in conversion.weights.values()),
            high_precision=shortened(skipped.module for skipped in conversion.skipped),
        )

    def to_json(self) -> dict[str, Any]:
        """The entry of config.json: a dict that JSON holds, as messages do; :meth:`from_json` undoes it."""
        rollout = None
        if self.rollout is not None:
            residual = {k: getattr(v, "value", v) for k, v in asdict(self.rollout.residual).items()}
            rollout = {
                "activation_scale": self.rollout.activation.scale.value,
                "activation_recipe": self.rollout.activation.recipe.value,
                "residual": residual,
            }
        held = {} if self.weight_scale is WeightScale.DYNAMIC else {"weight_scale": self.weight_scale.value}
        dtype = None if self.export_dtype is None else str(self.export_dtype).removeprefix("torch.")
        modules = {"quantized": self.quantized, "high_precision": self.high_precision}
        return {
            "version": VERSION,
            "recipe": self.recipe.value,
            **({} if dtype is None else {"export_dtype": dtype}),
            "scope": self.scope.value,
            **{key: list(names) for key, names in modules.items() if names is not None},
            "trainer": self.trainer.value,
            "scale_groups": {"fused": [list(names) for names in self.fused], "rules": list(self.rules)},
            "activations": self.activations,
            **held,
            **({"start_step": self.start_step} if self.start_step else {}),
            "rollout": rollout,
        }

    @classmethod
    def from_json(cls, entry: Any, where: str = "Contract.from_json") -> Contract:
        """Undo :meth:`to_json`.

        Raises:
            ValueError: a later version, an unknown or missing key, a value that means nothing; ``where`` is named.
        """
        where = f"{where}: config.json: {KEY}"
        version = _mapping(entry, where).get("version", VERSION)
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ValueError(f"{where}.version must be a whole number from 1, got {version!r}")
        if version > VERSION:
            raise ValueError(
                f"{where} has version {version}, this quads_qat reads up to {VERSION}; install a newer quads_qat"
            )
        known = {"version", "recipe", "scope", "trainer", "scale_groups", "activations", "weight_scale", "rollout"}
        known |= {"export_dtype", "quantized", "high_precision", "start_step"}
        _refuse_unknown(entry, known, where)
        if "recipe" not in entry:
            raise ValueError(f"{where} names no recipe; config.json was changed")
        groups = _mapping(entry.get("scale_groups", {}), f"{where}.scale_groups")
        _refuse_unknown(groups, {"fused", "rules"}, f"{where}.scale_groups")
        fused = groups.get("fused", [list(names) for names in FUSED_LINEARS])
        if not isinstance(fused, list):
            raise ValueError(f"{where}.scale_groups.fused must be a list of lists of names, got {fused!r}")
        activations = entry.get("activations", "none")
        if activations not in _ACTIVATIONS:
            raise ValueError(f"{where}.activations must be one of {', '.join(_ACTIVATIONS)}, got {activations!r}")
        start_step = entry.get("start_step", 0)
        if not isinstance(start_step, int) or isinstance(start_step, bool) or start_step < 0:
            raise ValueError(f"{where}.start_step must be a whole number from 0, got {start_step!r}")
        dtype = entry.get("export_dtype")
        if dtype is not None and dtype not in list(_EXPORT_DTYPES):
            raise ValueError(f"{where}.export_dtype must be one of {', '.join(_EXPORT_DTYPES)}, got {dtype!r}")
        return cls(
            recipe=_choice(Recipe, entry["recipe"], f"{where}.recipe"),
            scope=_choice(Scope, entry.get("scope", Scope.ALL), f"{where}.scope"),
            trainer=_choice(Mode, entry.get("trainer", Mode.W4A16), f"{where}.trainer"),
            fused=tuple(_names(names, f"{where}.scale_groups.fused") for names in fused),
            rules=_names(groups.get("rules", []), f"{where}.scale_groups.rules"),
            activations=activations,
            weight_scale=_choice(WeightScale, entry.get("weight_scale", "dynamic"), f"{where}.weight_scale"),
            start_step=start_step,
            rollout=_rollout(entry.get("rollout"), f"{where}.rollout"),
            export_dtype=None if dtype is None else _EXPORT_DTYPES[dtype],
            quantized=_modules(entry.get("quantized"), f"{where}.quantized"),
            high_precision=_modules(entry.get("high_precision"), f"{where}.high_precision"),
        )

    def differences(self, other: Contract, *, export_dtype: bool = True, modules: bool = True) -> list[str]:
        """What of the weights differs: recipe, scale groups, export dtype and which modules are quantized.

        What one side does not know (an older record) counts as equal, and so does a module that one side does not have.
        Activations never count: a W4A16 trainer with a W4A4 rollout is the normal case.

        Args:
            other: what to compare with.
            export_dtype: whether it counts. Of packed weights it does not: they were cast already.
            modules: whether it counts which are quantized.
        """
        pairs = {
            "recipe": (self.recipe, other.recipe),
            "scale groups": (self.fused, other.fused),
            "rules of scale groups": (self.rules, other.rules),
        }
        if export_dtype and self.export_dtype is not None and other.export_dtype is not None:
            pairs["export dtype (that of the weights, or of fp32 masters model.config.dtype at convert)"] = (
                self.export_dtype,
                other.export_dtype,
            )
        found = [
            f"{what}: {_readable(mine)} against {_readable(theirs)}"
            for what, (mine, theirs) in pairs.items()
            if mine != theirs
        ]
        forms = "quantized against in high precision", "in high precision against quantized"
        for names, form in zip(self.quantized_apart(other) if modules else ((), ()), forms, strict=True):
            if names:
                found.append(f"scope, include or exclude: {listed(shortened(names))} {form}")
        return found

    def modules(self) -> set[str]:
        """All modules with weights, as far as they are known."""
        return {*expanded(self.quantized or ()), *expanded(self.high_precision or ())}

    def quantized_apart(self, other: Contract) -> tuple[list[str], list[str]]:
        """Modules that this side quantizes and ``other`` has in high precision, and the reverse; what both know."""
        mine, theirs = (self.quantized, self.high_precision), (other.quantized, other.high_precision)
        if None in (*mine, *theirs) or mine == theirs:
            return [], []
        (here, kept), (there, kept_there) = (
            [dict.fromkeys(expanded(names or ())) for names in side] for side in (mine, theirs)
        )
        return [name for name in here if name in kept_there], [name for name in there if name in kept]

    def require_same(
        self,
        other: Contract,
        who: str,
        sides: tuple[str, str] = ("this side's", "the other's"),
        *,
        export_dtype: bool = True,
        modules: bool = True,
    ) -> None:
        """Raise ValueError if weights made under ``other`` do not fit; says what differs. See :meth:`differences`.

        ``sides``: whose contracts they are, this one and ``other``.
        """
        if found := self.differences(other, export_dtype=export_dtype, modules=modules):
            raise ValueError(
                f"{who}: another contract: {'; '.join(found)}; export or convert again with the same settings (named "
                f"first is {sides[0]}, then {sides[1]})"
            )


def given_contract(given: Any, who: str) -> Contract:
    """A ``contract=`` argument: a Contract, or the directory of a checkpoint that has one."""
    if isinstance(given, str | Path):
        return contract_of(given)
    if not isinstance(given, Contract):
        raise TypeError(
            f"{who}: contract must be a Contract or a checkpoint directory, got {type(given).__name__}; "
            "quads_qat.contract_of(trainer) gives one"
        )
    return given


def _readable(value: Recipe | torch.dtype | tuple[Any, ...]) -> str:
    if isinstance(value, Recipe):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str([name if isinstance(name, str) else "/".join(name) for name in value])


def _rollout(entry: Any, where: str) -> RolloutPolicy | None:
    if entry is None:
        return None
    _refuse_unknown(_mapping(entry, where), {"activation_scale", "activation_recipe", "residual"}, where)
    residual = _mapping(entry.get("residual", {}), f"{where}.residual")
    _refuse_unknown(residual, {f.name for f in fields(ResidualConfig)}, f"{where}.residual")
    try:
        compensated = ResidualConfig(**residual)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}.residual: {error}") from None
    scale = _choice(ActivationScale, entry.get("activation_scale", "per_token"), f"{where}.activation_scale")
    recipe = _choice(Recipe, entry.get("activation_recipe", "aligned"), f"{where}.activation_recipe")
    return RolloutPolicy(activation=ActivationFormat(scale=scale, recipe=recipe), residual=compensated)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a JSON object, got {value!r}")
    return value


def _refuse_unknown(entry: Mapping[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(entry) - known):
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(known))}")


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{where} must hold lists of strings, got {value!r}")
    return tuple(value)


def _modules(value: Any, where: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = _names(value, where)
    try:
        expanded(names)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return names


def _choice(kind: type[T], value: Any, where: str) -> T:
    try:
        return kind(value)  # pyright: ignore[reportCallIssue]
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def contract_of(source: nn.Module | str | Path) -> Contract:
    """The contract of a converted model (trainer or rollout), or of a checkpoint directory that quads_qat wrote.

    Raises:
        ValueError: the model is not converted; config.json holds no contract, or one that cannot be read.

    Example::

        contract = contract_of(trainer)  # in the trainer process; Contract.to_json() goes through any message
        rollout = load_rollout("out", contract=contract)  # refuses weights of another recipe or other scale groups
    """
    if isinstance(source, nn.Module):
        return Contract.of_conversion(conversion_of(source, "contract_of")[1])
    config = read_json(Path(source) / "config.json")
    if KEY not in config:
        raise ValueError(f"contract_of: {source}: config.json has no {KEY} entry; quads_qat did not write it")
    return Contract.from_json(config[KEY], str(source))
