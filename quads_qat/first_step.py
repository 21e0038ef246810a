"""``check_first_step``: what to check once, at step 1, in any RL framework, before a run is left alone.

A run that samples with other weights, another recipe or another temperature than it trains with does not crash: it
learns badly, and is noticed days later. All of that can be seen in the first batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat.config import Mode, require_kind
from quads_qat.contract import Contract, contract_of
from quads_qat.conversion import Conversion, conversion_of
from quads_qat.diagnose import GapStats, gap_stats
from quads_qat.first_step_report import Check, FirstStepReport, GapLimits
from quads_qat.received import Comparison, compare_received, compare_rollout
from quads_qat.schedule import not_started
from quads_qat.token_log_probs import best_form, best_reading, best_shift, token_log_probs
from quads_qat.weight_stream import ActivationScales

_FEW = 256
"""Tokens, below which one of them can carry the gap over a limit."""


@torch.no_grad()
def check_first_step(
    trainer: nn.Module,
    rollout: nn.Module | None = None,
    *,
    input_ids: Tensor | None = None,
    logp_rollout: Tensor | None = None,
    logp_trainer: Tensor | None = None,
    mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    received: Iterable[tuple[str, Tensor]] | Mapping[str, Tensor | str] | None = None,
    activations: ActivationScales = "none",
    contract: Contract | Mapping[str, Any] | str | Path | None = None,
    limits: GapLimits | None = None,
) -> FirstStepReport:
    """Compare trainer and rollout in the first step of a run: contract, weights, log-probabilities.

    Call it after the first weight sync and the first rollouts, before the optimizer moves the weights. Give what the
    framework has; what is missing is reported as skipped. A few sequences are enough.

    Args:
        trainer: converted to w4a16 or w4a4. With sharded weights (DTensor), call it on all ranks.
        rollout: a rollout model of this package in the same process. For an engine elsewhere, give ``received`` and
            ``contract`` instead.
        input_ids: [B, T] prompts and completions as they were sampled, not tokenized anew; padded on either side.
        logp_rollout: [B, C] what the rollout reported for the last C of these tokens.
        logp_trainer: [B, C] what the framework's trainer computed for them. With ``input_ids`` it is compared with the
            trainer's own; without, it stands for it.
        mask: [B, C] nonzero where a token counts; None counts all.
        attention_mask: [B, T] as the models take it; None if nothing is padded.
        temperature: by which logits are divided before the softmax, on both sides.
        received: what the engine's ``load_weights`` was given: (name, tensor) pairs, or name -> tensor or digest
            (:func:`~quads_qat.received.weight_digests`, to be taken where the engine runs).
        activations: as the weights were exported, see :func:`~quads_qat.weight_stream.export_weights`.
        contract: of the rollout: of :func:`~quads_qat.contract.contract_of`, its JSON, or a checkpoint directory.
        limits: of the log-prob gap.

    Returns:
        One :class:`Check` a line, with the way out where one failed. ``report.raise_if_failed()`` stops a run.

    Raises:
        ValueError: the trainer is not converted, is itself a rollout; shapes that do not go together.

    Example::

        report = check_first_step(trainer, rollout, input_ids=ids, logp_rollout=logp, temperature=0.8)
        print(report)
    """
    require_kind("check_first_step", "limits", limits, GapLimits)
    _, conversion = conversion_of(trainer, "check_first_step")
    if conversion.mode is Mode.W4A4_RESIDUAL:
        raise ValueError(
            "check_first_step: trainer is a rollout model; the order is check_first_step(trainer, rollout)"
        )
    theirs = None if rollout is None else conversion_of(rollout, "check_first_step", Mode.W4A4_RESIDUAL)[1]
    if theirs is not None and theirs.mode is not Mode.W4A4_RESIDUAL:
        raise ValueError(
            "check_first_step: rollout is a trainer; pass a model in mode 'w4a4_residual', or load_rollout"
        )
    _check_shapes(input_ids, logp_rollout, logp_trainer, mask, attention_mask)
    checks = [_contract(conversion, rollout, contract)]
    checks += _weights(trainer, rollout, received, activations, same_contract=checks[0].passed is not False)
    if conversion.full_precision.delayed and checks[-1].passed is not False:
        checks[-1] = _before_start(checks[-1], conversion.schedule.start_step)
    tokens = _Tokens(input_ids, attention_mask, mask, temperature, limits or GapLimits())
    checks.append(_rollout_log_probs(tokens, trainer, rollout, logp_rollout, logp_trainer))
    checks.append(_trainer_log_probs(tokens, trainer, logp_trainer))
    gap, check = _gap(tokens, trainer, logp_rollout, logp_trainer)
    return FirstStepReport((*checks, check), gap)


def _check_shapes(
    ids: Tensor | None, rollout: Tensor | None, trainer: Tensor | None, mask: Tensor | None, attention: Tensor | None
) -> None:
    if ids is not None and ids.ndim != 2:
        raise ValueError(f"check_first_step: input_ids must be [B, T], got {tuple(ids.shape)}")
    if attention is not None and (ids is None or attention.shape != ids.shape):
        raise ValueError("check_first_step: attention_mask must have the shape of input_ids")
    given = {"logp_rollout": rollout, "logp_trainer": trainer, "mask": mask}
    shapes = {name: tuple(t.shape) for name, t in given.items() if t is not None}
    if len(set(shapes.values())) > 1 or any(len(shape) != 2 for shape in shapes.values()):
        raise ValueError(f"check_first_step: log-probabilities and mask must have one shape [B, C], got {shapes}")
    if mask is not None and not bool(mask.bool().any()):
        raise ValueError("check_first_step: mask counts no token; it must be nonzero where one was sampled")
    for name, shape in shapes.items():
        if ids is not None and (shape[0] != ids.shape[0] or shape[1] >= ids.shape[1]):
            raise ValueError(
                f"check_first_step: {name} must be [B, C] for the last C of input_ids [B, T], with C < T, got "
                f"{list(shape)} and {list(ids.shape)}"
            )


# ------------------------------------------------------------------------------------------------- contract and weights


def _contract(
    conversion: Conversion, rollout: nn.Module | None, given: Contract | Mapping[str, Any] | str | Path | None
) -> Check:
    mine = Contract.of_conversion(conversion)
    if isinstance(given, (str, Path)):
        given = contract_of(given)
    elif isinstance(given, Mapping):
        given = Contract.from_json(given, "check_first_step: contract")
    theirs = [c for c in (given, None if rollout is None else contract_of(rollout)) if c is not None]
    if not theirs:
        way_out = "pass rollout=, or contract=: qq.contract_of(...) of the checkpoint that the engine was started from"
        return Check("contract", None, "the rollout's is not known", way_out)
    # packed weights were cast already; modules of a rollout in this process are compared below
    if found := [line for c in theirs for line in mine.differences(c, export_dtype=False, modules=c is given)]:
        way_out = (
            "convert both sides with the same recipe=, groups=, scope=, include= and exclude=, or start the engine "
            "from a new export"
        )
        return Check("contract", False, f"trainer against rollout: {'; '.join(found)}", way_out)
    return Check("contract", True, f"both sides quantize weights with recipe '{mine.recipe}' and share scales alike")


def _weights(
    trainer: nn.Module,
    rollout: nn.Module | None,
    received: Any,
    activations: ActivationScales,
    *,
    same_contract: bool,
) -> list[Check]:
    """Checks of coverage and weights."""
    if rollout is None and received is None:
        way_out = "pass rollout=, or received=: the (name, tensor) pairs or digests that the engine took"
        return [Check(name, None, "what the rollout holds is not known", way_out) for name in ("coverage", "weights")]
    if rollout is not None:
        broken = conversion_of(rollout, "check_first_step")[1].sync.broken
        if broken:
            return [Check("weights", False, broken, "sync again, and look for the error of the sync that failed")]
        found = compare_rollout(trainer, rollout)
    else:
        found = compare_received(trainer, received, activations)
    coverage = Check("coverage", True, f"both sides have the same {found.names} names")
    lists = {
        "are quantized in the trainer only": found.quantized_here,
        "are quantized in the rollout only": found.quantized_there,
        "only in the trainer": found.missing,
        "only in the rollout": found.unexpected,
    }
    if seen := "; ".join(f"{len(names)} {what}, like {names[0]}" for what, names in lists.items() if names):
        way_out = "compare qq.coverage of both sides: scope, include and exclude must be the same, and a sync complete"
        if found.quantized_here or found.quantized_there:
            way_out = (
                "one side has another scope, include or exclude: convert both with the same, or start the rollout from "
                "a new export; qq.coverage lists what a side quantizes. Or the engine took the masters of "
                "trainer.state_dict(): send qq.export_weights(trainer, ...)"
            )
        coverage = Check("coverage", False, seen, way_out)
    weights = _compared(found, same_contract=same_contract)
    casts = [contract_of(model).export_dtype for model in (trainer, rollout) if model is not None]
    if weights.passed is False and len(casts) == 2 and None not in casts and casts[0] != casts[1]:
        way_out = (
            f"{weights.way_out}. Or masters were sent, which the trainer casts to {casts[0]} first, this rollout to "
            f"{casts[1]}: pass contract=quads_qat.contract_of(trainer) to update_weights, or packed weights"
        )
        weights = Check(weights.name, False, weights.found, way_out)
    return [coverage, weights]


def _before_start(weights: Check, start_step: int) -> Check:
    """What forwards multiply by is not what was found equal, or is not known."""
    return Check(
        weights.name,
        False,
        f"{weights.found}; but {not_started(start_step)}",
        "check again when it has started; until then the rollout multiplies by other weights than the trainer",
    )


def _compared(found: Comparison, *, same_contract: bool) -> Check:
    """The weights that both sides have."""
    if not found.different:
        zeros = (
            f", {found.same_values} in their values (0.0 for -0.0: dequantized weights were quantized on arrival)"
            if found.same_values
            else ""
        )
        return Check("weights", True, f"{found.equal} tensors are equal, bit for bit{zeros}{found.taken}{found.note}")
    name, how = next(iter(found.different.items()))
    total = found.equal + found.same_values + len(found.different)
    seen = f"{len(found.different)} of {total} tensors differ, first {name}: {how}{found.taken}"
    way_out = (
        "the rollout has the weights of another step: sync qq.export_weights(trainer) after every optimizer step, and "
        "before the check"
    )
    causes = []
    if found.own_scales:
        causes.append(
            f"{len(found.own_scales)} are the trainer's masters with scales of their own, but the trainer holds its "
            "scales (frozen, ema), which state_dict() does not tell"
        )
    if found.uncast:
        causes.append(
            f"{len(found.uncast)} are the trainer's fp32 masters, not cast to the 16 bits that an export and a bf16 "
            "rollout hold"
        )
    if causes and len(found.own_scales) + len(found.uncast) == len(found.different):  # all are explained
        seen, way_out = f"{seen}; {'; '.join(causes)}", "sync qq.export_weights(trainer, ...), not trainer.state_dict()"
        if found.uncast and not found.own_scales:
            way_out += ", or load the rollout in the dtype of the export (load_rollout(..., dtype=torch.bfloat16))"
    return Check("weights", False, seen, way_out if same_contract else "the contract differs, see above")


# ----------------------------------------------------------------------------------------------------- log-probs


_FORMS = {
    "probabilities": ("probabilities", "they lack the logarithm: report log_softmax(logits / temperature)"),
    "negative": ("minus the log-probs", "they are a loss (cross-entropy): change the sign"),
}
_READINGS = {
    "temperature": (
        "temperature {:g}",
        "both sides must divide logits by the same temperature; engines report log-probs before or after it (vLLM: "
        "logprobs_mode), so pass temperature= as the log-probs were taken",
    ),
    "logits": ("the tokens' logits", "they lack log_softmax(-1) over the vocabulary (vLLM: logprobs_mode)"),
    "unshifted": (
        "the distribution at the token's own position",
        "logits and tokens are not shifted against each other: logits at position t give the token at t + 1, "
        "logits[:, :-1] goes with ids[:, 1:]",
    ),
}
"""What log-probs may be instead: how that is called, and the way out."""


@dataclass(frozen=True)
class _Tokens:
    """The tokens of the step, and how their log-probabilities are to be taken."""

    ids: Tensor | None
    attention_mask: Tensor | None
    mask: Tensor | None
    temperature: float
    limits: GapLimits

    def log_probs(self, model: nn.Module, like: Tensor) -> Tensor:
        """[B, C] of a model, for the last C tokens."""
        assert self.ids is not None
        own = token_log_probs(model, self.ids, like.shape[-1], self.attention_mask, self.temperature)
        return own.to(like.device)

    def positive(self, given: Tensor) -> int:
        """How many counted numbers are no log-probabilities; rounding makes some that are 0 a little more."""
        counted = torch.ones_like(given, dtype=torch.bool) if self.mask is None else self.mask.to(given.device).bool()
        return int((given[counted] > 1e-3).sum())

    def not_finite(self, sides: Mapping[str, Tensor]) -> str:
        """Which of the log-probs have counted numbers that are NaN or inf; "" if none."""
        for name, logp in sides.items():
            bad = ~logp.isfinite()
            counted = bad.numel()
            if self.mask is not None:
                mask = self.mask.to(bad.device).bool()
                bad, counted = bad & mask, int(mask.sum())
            if bool(bad.any()):
                first = bad.nonzero()[0].tolist()
                return f"{int(bad.sum())} of {counted} counted numbers of {name} are NaN or inf, first at {first}"
        return ""

    def misfit(self, model: nn.Module | None, given: Tensor, own: Tensor) -> tuple[str, str] | None:
        """(what was seen, the way out) where log-probs do not fit, or None."""
        gap = gap_stats(given, own, self.mask)
        exceeded = self.limits.exceeded(gap)
        if not exceeded:
            return None
        seen = ", ".join(exceeded)
        if (shift := best_shift(given, own, self.mask)) is not None:
            offset, mean = shift
            side = "next" if offset > 0 else "previous"
            return (
                f"{seen}; they fit the {side} token (mean gap {mean:.4g})",
                "they are shifted by one: logits at position t give the token at t + 1, logits[:, :-1] goes with "
                "ids[:, 1:]",
            )
        if (form := best_form(given, own, self.mask)) is not None:
            what, way_out = _FORMS[form[0]]
            return f"{seen}; they fit {what} (mean gap {form[1]:.4g})", way_out
        if model is not None and self.ids is not None:
            best = best_reading(model, self.ids, given, self.mask, self.attention_mask, self.temperature)
            if best is not None:
                what, way_out = _READINGS[best.kind]
                what = what.format(best.temperature)
                expected = f", not {self.temperature:g}" if best.kind == "temperature" else ""
                return f"{seen}; they fit {what} (mean gap {best.mean:.4g}){expected}", way_out
        if positive := self.positive(given):
            return (
                f"{seen}; {positive} of them are > 0, which no log-probability is",
                "report log_softmax(logits / temperature) of the sampled token, not its logit, reward or probability",
            )
        return (
            seen,
            "look for text that was tokenized anew, a wrong mask or padding, top_k, top_p or penalties in the reported "
            "log-probs, other weights",
        )


_NOT_FINITE = (
    "pass mask=, zero where nothing was sampled (padding); -inf is of a token that top_k, top_p or a mask on logits "
    "leaves no probability: report log-probs before it; NaN of a model: look for NaN in its weights and activations"
)


def _rollout_log_probs(
    tokens: _Tokens, trainer: nn.Module, rollout: nn.Module | None, given: Tensor | None, logp_trainer: Tensor | None
) -> Check:
    """Whether the reported log-probs are those of the rollout's policy for these tokens."""
    name = "rollout log-probs"
    if given is None:
        return Check(name, None, "not given", "pass logp_rollout=, what the rollout reported for each sampled token")
    if tokens.ids is None and logp_trainer is None:
        return Check(name, None, "the tokens are not known", "pass input_ids= (or logp_trainer=)")
    if tokens.ids is None:
        assert logp_trainer is not None
        model, own, whose = None, logp_trainer, "the trainer's"
    else:
        model = rollout if rollout is not None else trainer
        own, whose = tokens.log_probs(model, given), "the rollout's own" if rollout is not None else "the trainer's"
    theirs = "logp_trainer" if own is logp_trainer else f"{whose} log-probs"
    if bad := tokens.not_finite({"logp_rollout": given, theirs: own}):
        return Check(name, False, bad, _NOT_FINITE)
    if (wrong := tokens.misfit(model, given, own)) is not None:
        return Check(name, False, f"against {whose} on these tokens: {wrong[0]}", wrong[1])
    mean = gap_stats(given, own, tokens.mask).mean
    return Check(name, True, f"they are {whose} for these tokens, mean gap {mean:.4g}")


def _trainer_log_probs(tokens: _Tokens, trainer: nn.Module, given: Tensor | None) -> Check:
    """Whether the framework's trainer log-probs are those of the converted trainer."""
    name = "trainer log-probs"
    if given is None or tokens.ids is None:
        return Check(name, None, "not given", "pass logp_trainer= and input_ids=")
    own = tokens.log_probs(trainer, given)
    if bad := tokens.not_finite({"logp_trainer": given, "the trainer's own log-probs": own}):
        return Check(name, False, bad, _NOT_FINITE)
    if (wrong := tokens.misfit(trainer, given, own)) is not None:
        return Check(name, False, f"against the trainer's own on these tokens: {wrong[0]}", wrong[1])
    return Check(name, True, f"they are its own, mean gap {gap_stats(given, own, tokens.mask).mean:.4g}")


def _gap(
    tokens: _Tokens, trainer: nn.Module, logp_rollout: Tensor | None, logp_trainer: Tensor | None
) -> tuple[GapStats | None, Check]:
    """The gap that training sees."""
    if logp_rollout is None or (logp_trainer is None and tokens.ids is None):
        return None, Check("gap", None, "not known", "pass logp_rollout= and input_ids= (or logp_trainer=)")
    whose = "logp_trainer"
    if logp_trainer is None:
        whose, logp_trainer = "the trainer's own log-probs", tokens.log_probs(trainer, logp_rollout)
    if bad := tokens.not_finite({"logp_rollout": logp_rollout, whose: logp_trainer}):
        return None, Check("gap", False, bad, _NOT_FINITE)
    gap = gap_stats(logp_rollout, logp_trainer.to(logp_rollout.device), tokens.mask)
    seen = f"mean {gap.mean:.4g}, max {gap.max:.4g}, k3 {gap.k3:.4g}, {gap.share_over_ln2:.2%} over ln 2"
    if exceeded := tokens.limits.exceeded(gap):
        way_out = (
            "repair what failed above first; if nothing did, raise ResidualConfig(fraction=...), use scope='token', "
            "leave sensitive layers out of the conversion, or set limits= for this model"
        )
        if gap.tokens < _FEW:
            way_out += f"; {gap.tokens} tokens are few, some hundreds tell more"
        return gap, Check("gap", False, f"{seen} ({', '.join(exceeded)})", way_out)
    return gap, Check("gap", True, f"{seen}, {gap.tokens} tokens")
