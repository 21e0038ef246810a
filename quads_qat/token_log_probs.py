"""Log-probabilities that a model gives to sampled tokens, and what is wrong with ones that do not fit them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_FITS = 0.25
"""An explanation counts when it leaves at most this part of the mean gap."""


def token_log_probs(
    model: nn.Module,
    input_ids: Tensor,
    count: int,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Log-probabilities [B, count], float32, of the last ``count`` tokens, from one forward a row, in eval mode.

    Args:
        model: takes ``input_ids`` [1, T] and returns logits [1, T, V], or an output that has ``logits``.
        input_ids: [B, T].
        count: below T.
        attention_mask: [B, T], passed on.
        temperature: divides the logits.
    """
    rows = _rows_of_logits(model, input_ids, count, attention_mask)
    return torch.stack([chosen(logits, ids, temperature) for logits, ids in rows])


def chosen(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability [..] of each of ``ids`` [..] under ``logits`` [.., V], in float32."""
    log_probs = (logits.float() / temperature).log_softmax(-1)
    return log_probs.gather(-1, ids.unsqueeze(-1).to(logits.device)).squeeze(-1)


@torch.no_grad()
def _rows_of_logits(
    model: nn.Module, input_ids: Tensor, count: int, attention_mask: Tensor | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits [count, V], the tokens [count] that they predict), row by row: a vocabulary is large."""
    device = next(p.device for p in (*model.parameters(), *model.buffers()))
    keeps = "logits_to_keep" in inspect.signature(getattr(model, "module", model).forward).parameters
    with _evaluating(model):
        for row, ids in enumerate(input_ids.to(device)):
            arguments: dict[str, Any] = (
                {} if attention_mask is None else {"attention_mask": attention_mask[row : row + 1].to(device)}
            )
            if keeps:
                arguments["logits_to_keep"] = count + 1
            out = model(ids[None], **arguments)
            logits = getattr(out, "logits", out)
            yield logits[0, -count - 1 : -1], ids[-count:]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
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
    rows = _rows_of_logits(model, input_ids, given.shape[-1], attention_mask)
    for (logits, ids), reported, counts in zip(rows, given, counted, strict=True):
        some = counts.nonzero().flatten()[:64]
        logits, ids, reported = logits[some.to(logits.device)], ids[some.to(ids.device)], reported[some]
        count += len(some)
        for i, t in enumerate(candidates):
            total[i] += (chosen(logits, ids, t) - reported.to(logits.device)).abs().sum().double().cpu()
    means = (total / count).tolist()
    best = min(range(len(candidates)), key=means.__getitem__)
    plain = means[0]
    return (candidates[best], means[best]) if means[best] <= _FITS * plain else None
