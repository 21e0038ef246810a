"""Log-probabilities that a model gives to sampled tokens, and what is wrong with ones that do not fit them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_FITS = 0.25
"""An explanation counts when it leaves at most this part of the mean gap."""

_TOKENS = 2048
"""Whose logits are held at once."""


def token_log_probs(
    model: nn.Module,
    input_ids: Tensor,
    count: int,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probabilities [B, count], float32, of the last ``count`` tokens, in eval mode, without gradient.

    Args:
        model: takes ``input_ids`` [b, T] and returns logits [b, T, V], or an output that has ``logits``.
        input_ids: [B, T].
        count: below T.
        attention_mask: [B, T], passed on.
        temperature: divides the logits.
    """
    batches = _batches_of_logits(model, input_ids, count, attention_mask)
    return torch.cat([chosen(logits[:, :-1], ids, temperature) for logits, ids in batches])


def chosen(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability [..] of each of ``ids`` [..] under ``logits`` [.., V], in float32."""
    log_probs = (logits.float() / temperature).log_softmax(-1)
    return log_probs.gather(-1, ids.unsqueeze(-1).to(logits.device)).squeeze(-1)


@torch.no_grad()
def _batches_of_logits(
    model: nn.Module, input_ids: Tensor, count: int, attention_mask: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits [b, count + 1, V], the tokens [b, count] that all but the last predict), few rows at a time."""
    device = next(p.device for p in (*model.parameters(), *model.buffers()))
    keeps = "logits_to_keep" in inspect.signature(getattr(model, "module", model).forward).parameters
    rows = max(1, _TOKENS // count)
    with evaluating(model):
        for start in range(0, len(input_ids), rows):
            ids, arguments = input_ids[start : start + rows].to(device), {}
            if attention_mask is not None:
                arguments["attention_mask"] = attention_mask[start : start + rows].to(device)
            if keeps:
                arguments["logits_to_keep"] = count + 1
            out = model(ids, **arguments)
            logits = getattr(out, "logits", out)
            yield logits[:, -count - 1 :], ids[:, -count:]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards the modules that were training are again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def best_shift(given: Tensor, own: Tensor, mask: Tensor | None) -> tuple[int, float] | None:
    """(offset, mean gap) if ``given[:, t]`` is ``own[:, t + offset]``, offset 1 or -1, rather than ``own[:, t]``."""
    counted = torch.ones_like(given, dtype=torch.bool) if mask is None else mask.to(given.device).bool()
    delta, own = (given - own).abs(), own.to(given.device)
    found = []
    for offset in (1, -1):
        a, b = (slice(None, -1), slice(1, None)) if offset > 0 else (slice(1, None), slice(None, -1))
        both = counted[:, a] & counted[:, b]
        if int(both.sum()) < 4:
            continue
        shifted, plain = (given[:, a] - own[:, b]).abs()[both].mean().item(), delta[:, a][both].mean().item()
        if shifted <= _FITS * plain:
            found.append((shifted, offset))
    return (min(found)[1], min(found)[0]) if found else None


def best_form(given: Tensor, own: Tensor, mask: Tensor | None) -> tuple[str, float] | None:
    """("probabilities" or "negative", mean gap) if ``given`` is exp(own) or -own rather than own."""
    counted = torch.ones_like(given, dtype=torch.bool) if mask is None else mask.to(given.device).bool()
    given, own = given[counted].float(), own.to(given.device)[counted].float()
    if not given.numel():
        return None
    forms = {"probabilities": own.exp(), "negative": -own}
    gaps = {name: (given - form).abs().mean().item() for name, form in forms.items()}
    best = min(gaps, key=gaps.__getitem__)
    spread = (given - given.mean()).abs().mean().item()  # a constant is near to probabilities
    return (best, gaps[best]) if gaps[best] <= _FITS * min(spread, (given - own).abs().mean().item()) else None


@dataclass(frozen=True)
class Reading:
    """What a model's logits must be made into to give the reported numbers.

    Attributes:
        kind: ``temperature`` (log-probs at another one), ``logits`` (no log_softmax), or ``unshifted`` (the
            distribution at the token's own position, which is over the token after it).
        temperature: by which the logits are divided.
        mean: gap that is left.
    """

    kind: str
    temperature: float
    mean: float


def best_reading(
    model: nn.Module,
    input_ids: Tensor,
    given: Tensor,
    mask: Tensor | None,
    attention_mask: Tensor | None,
    temperature: float,
) -> Reading | None:
    """What explains ``given`` [B, C] rather than the log-probs of these tokens at ``temperature``, or None.

    Tried on the first 64 counted tokens of each row; temperatures are the multiples of 0.05 up to 2.5.
    """
    temperatures = [temperature, *(k / 20 for k in range(1, 51))]
    kinds = [("temperature", t) for t in temperatures]
    kinds += [(kind, t) for kind in ("logits", "unshifted") for t in dict.fromkeys((temperature, 1.0))]
    total, count = torch.zeros(len(kinds), dtype=torch.float64, device="cpu"), 0
    counted = torch.ones_like(given, dtype=torch.bool) if mask is None else mask.to(given.device).bool()
    counted &= counted.cumsum(-1) <= 64
    start = 0
    for logits, ids in _batches_of_logits(model, input_ids, given.shape[-1], attention_mask):
        some = counted[start : start + len(ids)]
        reported, on = given[start : start + len(ids)][some].to(logits.device), some.to(logits.device)
        before, at, ids = logits[:, :-1][on], logits[:, 1:][on], ids[some.to(ids.device)]
        for i, (kind, t) in enumerate(kinds):
            if kind == "logits":
                reading = (before.float() / t).gather(-1, ids[:, None].to(before.device))[:, 0]
            else:
                reading = chosen(at if kind == "unshifted" else before, ids, t)
            total[i] += (reading - reported).abs().sum().double().cpu()
        start, count = start + len(some), count + len(reported)
    means = (total / count).tolist()
    best = min(range(len(kinds)), key=means.__getitem__)
    return Reading(*kinds[best], means[best]) if means[best] <= _FITS * means[0] else None
