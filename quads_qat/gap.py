"""How far the rollout's log-probabilities are from the trainer's: statistics, and a logger for training loops."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from quads_qat.config import require_integer


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


def as_bool(who: str, mask: Tensor) -> Tensor:
    """A mask in bool.

    Raises:
        ValueError: it is float and holds something else than 0 and 1: a weight of 0.5 would count as 1.
    """
    wrong = mask[(mask != 0) & (mask != 1)] if mask.is_floating_point() else mask[:0]
    if wrong.numel():
        raise ValueError(
            f"{who}: a mask says which tokens count, 0 or 1, got {wrong[0].item()}; tokens cannot be weighted"
        )
    return mask.bool()


def gap_stats(logp_rollout: Tensor, logp_trainer: Tensor, mask: Tensor | None = None) -> GapStats:
    """Compare the log-probabilities of the same sampled tokens, as an RL loop holds them.

    Args:
        logp_rollout: any shape, what the rollout engine reported for each sampled token.
        logp_trainer: the same shape, what the trainer computes for it.
        mask: same shape, nonzero where a token counts (a float one: 1, not a weight); None counts all.

    Raises:
        TypeError: log-probabilities or a mask that are no tensors.
        ValueError: shapes differ, a float mask is not of 0 and 1, nothing is counted, or a counted value is NaN or inf.

    >>> gap_stats(torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -3.0])).max
    1.0
    """
    for name, given in {"logp_rollout": logp_rollout, "logp_trainer": logp_trainer, "mask": mask}.items():
        if not isinstance(given, Tensor) and (given is not None or name != "mask"):
            raise TypeError(f"gap_stats: {name} must be a torch.Tensor, got {type(given).__name__}")
    if logp_rollout.shape != logp_trainer.shape or (mask is not None and mask.shape != logp_rollout.shape):
        shapes = [tuple(t.shape) for t in (logp_rollout, logp_trainer, mask) if t is not None]
        raise ValueError(f"gap_stats: log-probabilities and mask must have one shape, got {shapes}")
    delta = logp_rollout.detach().double() - logp_trainer.detach().double()
    delta = delta.flatten() if mask is None else delta[as_bool("gap_stats", mask).to(delta.device)]
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


class GapLogger:
    """Writes :func:`gap_stats` to TensorBoard, or to anything else with ``add_scalar(tag, value, step)``.

    Args:
        writer: ``torch.utils.tensorboard.SummaryWriter``, or an object with its ``add_scalar``.
        every: writes in steps that this divides; the others cost nothing.
        prefix: of the tags ``<prefix>/max``, ``<prefix>/mean``, ``<prefix>/k1``, ...

    Raises:
        TypeError, ValueError: ``writer`` has no ``add_scalar``, or ``every`` is no integer >= 1.

    Example::

        log_gap = qq.GapLogger(SummaryWriter("runs/quads"), every=10)
        for step in range(steps):
            ...
            log_gap(step, logp_rollout, logp_trainer, mask)
    """

    def __init__(self, writer: Any, *, every: int = 1, prefix: str = "logprob_gap") -> None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(f"GapLogger: writer must have add_scalar(tag, value, step), got {type(writer).__name__}")
        require_integer("GapLogger", "every", every, 1)
        self.writer, self.every, self.prefix = writer, every, prefix

    def __call__(
        self, step: int, logp_rollout: Tensor, logp_trainer: Tensor, mask: Tensor | None = None
    ) -> GapStats | None:
        """Write the statistics of this step and return them; None in steps that are left out."""
        if step % self.every:
            return None
        stats = gap_stats(logp_rollout, logp_trainer, mask)
        for name, value in stats.to_dict().items():
            self.writer.add_scalar(f"{self.prefix}/{name}", value, step)
        return stats
