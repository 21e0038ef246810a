"""Log-probabilities that a model gives to sampled tokens, and what is wrong with ones that do not fit them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

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
    return torch.cat([chosen(logits, ids, temperature) for logits, ids in batches])


def chosen(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability [..] of each of ``ids`` [..] under ``logits`` [.., V], in float32."""
    log_probs = (logits.float() / temperature).log_softmax(-1)
    return log_probs.gather(-1, ids.unsqueeze(-1).to(logits.device)).squeeze(-1)


@torch.no_grad()
def _batches_of_logits(
    model: nn.Module, input_ids: Tensor, count: int, attention_mask: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits [b, count, V], the tokens [b, count] that they predict), few rows at a time: a vocabulary is large."""
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
            yield logits[:, -count - 1 : -1], ids[:, -count:]


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


def best_temperature(
    model: nn.Module,
    input_ids: Tensor,
    given: Tensor,
    mask: Tensor | None,
    attention_mask: Tensor | None,
    temperature: float,
) -> tuple[float, float] | None:
    """(temperature, mean gap) that explains ``given`` [B, C] rather than ``temperature``, or None.

    Tried on the first 64 counted tokens of each row, for the multiples of 0.05 up to 2.5.
    """
    candidates = [temperature, *(k / 20 for k in range(1, 51))]
    total, count = torch.zeros(len(candidates), dtype=torch.float64), 0
    counted = torch.ones_like(given, dtype=torch.bool) if mask is None else mask.to(given.device).bool()
    counted &= counted.cumsum(-1) <= 64
    start = 0
    for logits, ids in _batches_of_logits(model, input_ids, given.shape[-1], attention_mask):
        some = counted[start : start + len(ids)]
        reported = given[start : start + len(ids)][some].to(logits.device)
        logits, ids = logits[some.to(logits.device)], ids[some.to(ids.device)]
        for i, t in enumerate(candidates):
            total[i] += (chosen(logits, ids, t) - reported).abs().sum().double().cpu()
        start, count = start + len(some), count + len(reported)
    means = (total / count).tolist()
    best = min(range(len(candidates)), key=means.__getitem__)
    return (candidates[best], means[best]) if means[best] <= _FITS * means[0] else None
