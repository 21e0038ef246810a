"""How far the rollout's log-probabilities are from the trainer's."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GapStats:
    """Statistics of ``delta = log pi_rollout - log pi_trainer`` over tokens that the rollout sampled.

    Attributes:
        tokens: how many were counted.
        max: largest abs(delta), the metric of arXiv 2607.15810.
        mean: mean of abs(delta).
        k1: mean delta, the unbiased estimate of KL(rollout, trainer); can be negative.
        k3: mean of exp(-delta) - 1 + delta, the low-variance, non-negative estimate of the same KL.
        share_over_ln2: share of tokens whose probability differs by more than a factor of two.
    """

    tokens: int
    max: float
    mean: float
    k1: float
    k3: float
    share_over_ln2: float

    def to_dict(self) -> dict[str, float]:
        """For JSON and loggers."""
        return asdict(self)


def gap_stats(logp_rollout: Tensor, logp_trainer: Tensor, mask: Tensor | None = None) -> GapStats:
    """Compare the log-probabilities of the same sampled tokens, as an RL loop holds them.

    Args:
        logp_rollout: any shape, what the rollout engine reported for each sampled token.
        logp_trainer: the same shape, what the trainer computes for it.
        mask: same shape, nonzero where a token counts; None counts all.

    Raises:
        ValueError: shapes differ, nothing is counted, or a counted value is NaN or inf.

    >>> gap_stats(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -3.0])).max
    1.0
    """
    if logp_rollout.shape != logp_trainer.shape or (mask is not None and mask.shape != logp_rollout.shape):
        shapes = [tuple(t.shape) for t in (logp_rollout, logp_trainer, mask) if t is not None]
        raise ValueError(f"gap_stats: log-probabilities and mask must have one shape, got {shapes}")
    delta = logp_rollout.detach().double() - logp_trainer.detach().double()
    delta = delta.flatten() if mask is None else delta[mask.to(delta.device).bool()]
    if delta.numel() == 0:
        raise ValueError("gap_stats: no tokens are counted; check the mask")
    if not bool(torch.isfinite(delta).all()):
        raise ValueError("gap_stats: a counted log-probability is NaN or inf; mask padding out")
    return GapStats(
        tokens=delta.numel(),
        max=delta.abs().max().item(),
        mean=delta.abs().mean().item(),
        k1=delta.mean().item(),
        k3=(torch.expm1(-delta) + delta).mean().item(),
        share_over_ln2=(delta.abs() > math.log(2)).double().mean().item(),
    )
