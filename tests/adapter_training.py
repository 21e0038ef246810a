"""A training run of a few steps, for the tests of adapters."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def ids(seed: int = 0) -> Tensor:
    """Tokens [2, 9]."""
    return torch.randint(3, 120, (2, 9), generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, steps: int = 2) -> list[float]:
    """The losses of AdamW on whatever wants gradients."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(input_ids=ids(step % 2), labels=ids(step % 2)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
