"""What quantization keeps outside of ``state_dict``: amaxes of activations, static scales and residual masks.

It changes only here: in ``observe_activations`` (trainers), in ``calibrate`` (rollouts) and when a state is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import checks
from quads_qat.config import ActivationScale, ExpertMask, Mode, ResidualConfig, ResidualScope
from quads_qat.conversion import Conversion, Weight, conversion_of, require_unwrapped
from quads_qat.linear import ActivationObserver
from quads_qat.packed_module import PackedModule, Record
from quads_qat.reference_matmul import ChannelScores, mask_of_score
from quads_qat.residual import ResidualCompensatedExperts, residual_rows
from quads_qat.scale_groups import activation_key

# ------------------------------------------------------------------------------------------------------------- trainers


@contextmanager
def observe_activations(model: nn.Module) -> Iterator[None]:
    """Inside this context forwards record the amax of each activation group; output bits do not change.

    Amaxes run on over several contexts; ``load_quant_state_dict(model, {})`` forgets them.

    With ``torch.distributed`` initialized, amaxes are MAX-reduced over all ranks of the world when the context ends:
    all of them must enter it, with the same model, sharded or not.
    """
    _, conversion = conversion_of(model, "observe_activations")
    if conversion.mode is Mode.W4A4_RESIDUAL:
        raise ValueError("observe_activations: a rollout model does not observe; observe in the trainer, or calibrate")
    for observer in conversion.observers.values():
        observer.enabled += 1
    try:
        yield
    finally:
        for observer in conversion.observers.values():
            observer.enabled -= 1
            observer.leave_inference_mode()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        for observer in conversion.observers.values():  # the same order on every rank; unseen counts as 0
            device = next(model.parameters()).device
            amax = torch.zeros((), device=device) if observer.amax is None else observer.amax
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX)
            observer.amax = amax if bool(amax > 0) or observer.amax is not None else None


# ------------------------------------------------------------------------------------------------------------- rollouts


@torch.no_grad()
def calibrate(rollout: nn.Module, batches: Iterable[Any]) -> None:
    """Set what is static in a rollout: activation scales (``activation_scale="static"``), masks (``scope="static"``).

    The batches run with packed weights and untouched activations, as in the W4A16 trainer: nothing depends on what had
    been static before, and the amaxes are those that ``observe_activations`` sees there.

    A mask takes the channels with the largest residual ``x - Q(x)`` over all rows that its GEMM saw: exactly those that
    scope ``batch`` takes for these rows in one call. Rows count in the order of batches, experts ascending; scores add
    up in fp32 row by row in chunks of 128, chunks ascending, however the rows are cut into batches. A fused expert
    stack gets one mask for each expert, [E, K] (one that saw no rows takes the mask of all rows of its projection), or
    one for all, [K], with ``ResidualConfig(expert_mask="before_dispatch")``.

    Args:
        rollout: a rollout model with something static.
        batches: each a mapping of keyword arguments, a tuple of arguments, or one argument for the model. Kept in
            memory, since static scales must be known before residuals are.

    Raises:
        TypeError: one batch in place of several, or text.
        ValueError: not a rollout, nothing static, no batches, or weights whose inputs no batch reached. The rollout is
            unchanged then.

    Ranks do not communicate: run the same batches on each, or load the ``quant_state_dict`` of one on the others.
    Masks and scales stay as they are when weights are synced; calibrate again when activations have moved.
    """
    root, conversion = conversion_of(rollout, "calibrate", Mode.W4A4_RESIDUAL)
    if conversion.mode is not Mode.W4A4_RESIDUAL:
        raise ValueError("calibrate: this model is a trainer; pass a rollout model, or use observe_activations")
    activation, residual = conversion.activation, conversion.residual
    scales = activation is not None and activation.scale is ActivationScale.STATIC
    masks = residual is not None and residual.scope is ResidualScope.STATIC and residual.fraction > 0
    if isinstance(batches, Tensor | Mapping | str):
        raise TypeError(f"calibrate: batches must be a list of batches, got one {type(batches).__name__}; pass [batch]")
    batches = list(batches)
    if texts := [batch for batch in batches if isinstance(batch, str)]:
        raise TypeError(
            f"calibrate: a batch must be what the model takes, got the text {texts[0]!r}; tokenize it first"
        )
    if not scales and not masks:
        raise ValueError(
            "calibrate: nothing in this rollout is static; choose residual=ResidualConfig(scope='static') or "
            "activation_scale='static' for it to have a use"
        )
    if not batches:
        raise ValueError("calibrate: batches must hold at least one batch, got none")
    modules = {name: root.get_submodule(name) for name in {w.module: None for w in conversion.weights.values()}}
    amaxes = dict.fromkeys(conversion.weights) | {
        name: _packed(root, weight).calibrated(weight.parameter, "input_amax")
        for name, weight in conversion.weights.items()
    }
    found: dict[str, Tensor] = {}
    if scales:
        observed = _Amaxes(conversion, modules)
        _run(rollout, modules, batches, observed)
        amaxes = observed.found()
    if masks:
        assert residual is not None
        scores = _Scores(conversion, modules, residual, amaxes)
        _run(rollout, modules, batches, scores)
        found = scores.masks()
    for name, weight in conversion.weights.items():
        module = _packed(root, weight)
        if scales:
            module.set_calibrated(weight.parameter, "input_amax", amaxes[name])
        if masks:
            module.set_calibrated(weight.parameter, "residual_mask", found[name])


def _packed(root: nn.Module, weight: Weight) -> PackedModule:
    module = root.get_submodule(weight.module)
    assert isinstance(module, PackedModule)
    return module


def _run(rollout: nn.Module, modules: dict[str, Any], batches: list[Any], record: Record) -> None:
    """Forwards of all batches with untouched activations; ``record`` sees the inputs of every GEMM."""
    before = {name: module.activation for name, module in modules.items()}
    try:
        for module in modules.values():
            module.activation, module.record = None, record
        with torch.compiler.set_stance("force_eager"):
            for batch in batches:
                if isinstance(batch, Mapping):
                    rollout(**batch)
                else:
                    rollout(*batch) if isinstance(batch, tuple) else rollout(batch)
    finally:
        for name, module in modules.items():
            module.activation = before[name]
            del module.record


def _unreached(weight: Weight) -> ValueError:
    return ValueError(f"calibrate: no row reached {weight.name} in these batches; use more or longer ones")


class _Amaxes:
    """Largest magnitudes by activation group."""

    def __init__(self, conversion: Conversion, modules: dict[str, nn.Module]) -> None:
        self.weights, self.names = conversion.weights, {id(module): name for name, module in modules.items()}
        self.observers = {key: ActivationObserver(key) for key in conversion.observers}

    def __call__(self, module: nn.Module, parameter: str, expert: int | None, x: Tensor) -> None:
        if expert is None or expert >= 0:
            weight = self.weights[f"{self.names[id(module)]}.{parameter}"]
            if checks.can_look(x):  # an amax is that of the finite rest
                checks.require_finite(f"calibrate: {weight.name}", x, "x", checks.OF_AN_INPUT)
            self.observers[activation_key(weight.group)].update(x)

    def found(self) -> dict[str, Tensor]:
        """Weight -> amax of its input."""
        amaxes = {}
        for name, weight in self.weights.items():
            amax = self.observers[activation_key(weight.group)].amax
            if amax is None:
                raise _unreached(weight)
            amaxes[name] = amax
        return amaxes


class _Scores:
    """Channel scores of the inputs of each weight, of each expert of a stack, and of all experts of a projection."""

    def __init__(
        self,
        conversion: Conversion,
        modules: dict[str, Any],
        residual: ResidualConfig,
        amaxes: Mapping[str, Tensor | None],
    ) -> None:
        self.conversion, self.residual, self.amaxes = conversion, residual, amaxes
        self.modules, self.names = modules, {id(module): name for name, module in modules.items()}
        self.before_dispatch = residual.expert_mask is ExpertMask.BEFORE_DISPATCH
        self.scores: dict[tuple[str, int | None], ChannelScores] = {}
        first = {weight.group: weight.name for weight in reversed(conversion.weights.values())}
        self.leaders = set(first.values())  # one of each scale group, whose members have the same inputs

    def __call__(self, module: nn.Module, parameter: str, expert: int | None, x: Tensor) -> None:
        weight = self.conversion.weights[f"{self.names[id(module)]}.{parameter}"]
        if x.numel() == 0 or (expert is not None and (expert == -1) != self._takes_hidden_states(module, parameter)):
            return
        assert self.conversion.activation is not None
        activation, amax = self.conversion.activation, self.amaxes[weight.name]
        r = checks.naming(lambda: f"calibrate: {weight.name}", lambda: residual_rows(x, activation, amax))
        streams: list[tuple[str, int | None]] = [(weight.name, None)]
        if expert is not None and not self.before_dispatch:
            streams.append((weight.name, expert))
        key = activation_key(weight.group)
        if key != weight.group and weight.name in self.leaders:  # an expert that is a linear of its own
            streams.append((key, None))
        for stream in streams:
            if stream not in self.scores:
                self.scores[stream] = ChannelScores(r.shape[-1], self.residual.norm, r.device)
            self.scores[stream].add(r)

    def _takes_hidden_states(self, module: Any, parameter: str) -> bool:
        return self.before_dispatch and parameter != module.layout.down

    def masks(self) -> dict[str, Tensor]:
        """Weight -> bool [K], or [E, K] with a mask for each expert."""
        masks = {}
        for name, weight in self.conversion.weights.items():
            module = self.modules[weight.module]
            stack = isinstance(module, ResidualCompensatedExperts)
            seen = name
            if stack and self._takes_hidden_states(module, weight.parameter):
                seen = f"{weight.module}.{module.layout.first[0]}"  # of two first projections, one records
            every = self._mask(seen)
            if every is None and not stack:
                every = self._mask(activation_key(weight.group))
            if every is None:
                raise _unreached(weight)
            if stack and not self.before_dispatch:
                own = (self._mask(name, expert) for expert in range(module.layout.routed_experts))
                every = torch.stack([every if mask is None else mask for mask in own])
            masks[name] = every
        return masks

    def _mask(self, name: str, expert: int | None = None) -> Tensor | None:
        scores = self.scores.get((name, expert))
        return None if scores is None else mask_of_score(scores.score(), self.residual)


# ---------------------------------------------------------------------------------------------------------------- state


def quant_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """What quantization keeps outside ``state_dict``.

    Returns:
        ``<activation group>.amax``, float32 []: what a trainer observed, or a rollout's static scales are made from.
        ``<weight>.mask`` of a rollout with static masks, bool [K] or [E, K]. Of a trainer that calls ``step``:
        ``steps``, int64 [], and ``<scale group>.weight_amax``, float32 [] or [E], which frozen and ema scales are made
        from. Copies.
    """
    root, conversion = conversion_of(model, "quant_state_dict")
    if conversion.mode is not Mode.W4A4_RESIDUAL:
        amaxes = {f"{key}.amax": o.amax.clone() for key, o in conversion.observers.items() if o.amax is not None}
        held = {f"{k}.weight_amax": g.held.clone() for k, g in conversion.groups.items() if g.held is not None}
        return amaxes | held | ({"steps": torch.tensor(conversion.steps, device="cpu")} if conversion.steps else {})
    require_unwrapped(root, "quant_state_dict")
    state: dict[str, Tensor] = {}
    for name, weight in conversion.weights.items():
        module, key = _packed(root, weight), f"{activation_key(weight.group)}.amax"
        amax, mask = (module.calibrated(weight.parameter, what) for what in ("input_amax", "residual_mask"))
        if amax is not None:
            state[key] = torch.maximum(state[key], amax) if key in state else amax.clone()
        if mask is not None:
            state[f"{name}.mask"] = mask.clone()
    return state


@torch.inference_mode(False)  # training could not use a tensor that was made in it
def load_quant_state_dict(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Restore :func:`quant_state_dict`, a rollout's in place; what is missing becomes "not observed".

    A rollout takes a trainer's amaxes too; to keep its masks, pass ``{**quant_state_dict(rollout), **amaxes}``.

    Raises:
        KeyError: a key that means nothing in this model.
        TypeError: a value that is no tensor.
        ValueError: a mask, an amax or a count of a wrong dtype or shape, or an amax that is NaN, inf or negative. The
            model is unchanged then.
    """
    root, conversion = conversion_of(model, "load_quant_state_dict")
    rollout = conversion.mode is Mode.W4A4_RESIDUAL
    if rollout:
        require_unwrapped(root, "load_quant_state_dict")
    _require_fits(root, conversion, state)
    for key, observer in conversion.observers.items():
        amax = state.get(f"{key}.amax")
        observer.amax = None if amax is None else amax.clone()
    for key, group in conversion.groups.items():
        amax = state.get(f"{key}.weight_amax")
        group.held = None if amax is None else amax.clone()
    if not rollout:
        conversion.steps = int(state.get("steps", 0))
        conversion.full_precision.delayed = conversion.steps < conversion.schedule.start_step
    for name, weight in conversion.weights.items() if rollout else ():
        module, amax = _packed(root, weight), conversion.observers[activation_key(weight.group)].amax
        module.set_calibrated(weight.parameter, "input_amax", amax)
        module.set_calibrated(weight.parameter, "residual_mask", state.get(f"{name}.mask"))


def _require_fits(root: nn.Module, conversion: Conversion, state: Mapping[str, Any]) -> None:
    rollout = conversion.mode is Mode.W4A4_RESIDUAL
    known = {f"{key}.amax" for key in conversion.observers}
    held = {} if rollout else {f"{key}.weight_amax": group for key, group in conversion.groups.items()}
    masks = {f"{name}.mask": weight for name, weight in conversion.weights.items()} if rollout else {}
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"load_quant_state_dict: {key} must be a tensor, got {type(value).__name__}")
        if key in masks:
            module = _packed(root, masks[key])
            *lead, _, k = module.packed(masks[key].parameter).shape
            allowed = ([k], [*lead, k])  # the same for a linear
            if value.dtype != torch.bool or list(value.shape) not in allowed:
                raise ValueError(
                    f"load_quant_state_dict: {key} must be bool {allowed[0]}{f' or {allowed[1]}' * bool(lead)}, "
                    f"got {value.dtype} {list(value.shape)}"
                )
            if problem := module.mask_problem(value):
                raise ValueError(f"load_quant_state_dict: {key}: {problem}")
        elif key in held:
            member, parameter, full = held[key].members[0]
            fmt = conversion.weights[full].format
            shape = list(member.get_parameter(parameter).shape[:1]) if fmt.per_expert else []
            _require_amax(key, value, shape, fmt.export_dtype)
        elif key == "steps" and not rollout:
            if value.dtype != torch.int64 or value.ndim or int(value) < 0:
                raise ValueError(
                    f"load_quant_state_dict: steps must be int64 [] and >= 0, got {value.dtype} {value.tolist()}"
                )
        elif key not in known:
            raise KeyError(f"load_quant_state_dict: {key.removesuffix('.mask')!r} is no activation group of this model")
        else:
            _require_amax(key, value, [], torch.float32)


def _require_amax(key: str, value: Tensor, shape: list[int], dtype: torch.dtype) -> None:
    """``dtype``: in which scales are made from it."""
    if value.dtype != torch.float32 or list(value.shape) != shape:
        raise ValueError(f"load_quant_state_dict: {key} must be float32 {shape}, got {value.dtype} {list(value.shape)}")
    fine = torch.isfinite(value.to(dtype)) & (value >= 0)
    if not bool(fine.all()):
        wrong = float(value[~fine][0])
        why = f", which is inf in {dtype}" if 0 <= wrong < float("inf") else ""
        raise ValueError(f"load_quant_state_dict: {key} must be finite and >= 0, got {wrong:g}{why}")
