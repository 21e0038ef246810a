"""What the cases of ``distributed_ranks.py`` share: models, batches, and when two results are the same."""

from __future__ import annotations

import os

import torch
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import quads_qat as qq

Losses = list[list[float]]  # by step, then by micro-batch

STEPS = 3
MICRO = 2
DEVICE = "cuda" if torch.cuda.device_count() >= int(os.environ.get("WORLD_SIZE", "1")) else "cpu"


def normal(*shape: int, seed: int) -> Tensor:
    """The same numbers on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(DEVICE)


def batches(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return [torch.randint(3, 128, (2, 12), generator=generator, device="cpu").to(DEVICE) for _ in range(MICRO)]


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def qwen(dtype: torch.dtype = torch.float32, experts: str = "grouped_mm") -> nn.Module:
    model = tiny_model("qwen3_moe").to(DEVICE, dtype)
    model.set_experts_implementation(experts)
    return qq.convert(model, "w4a16")


def exported(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.reshape(-1).view(torch.uint8) for name, t in qq.export_weights(model, "modelopt")}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 128, bias=False), nn.Linear(64, 128)
        self.down_proj = nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


PLAN = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}


def mlp() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(MLP(), MLP()).to(DEVICE)
    with torch.no_grad():  # amaxes that one rank alone sees
        model[0].gate_proj.weight[90, 3], model[0].down_proj.weight[5, 2], model[1].up_proj.weight[0, 0] = (
            5.0,
            -7.0,
            4.0,
        )
    return qq.convert(model, "w4a16")


def close(got: Tensor, wanted: Tensor) -> None:
    """Two layers, K <= 128: fewer than 2**9 roundings of 2**-24 stand between the two, of the largest value."""
    assert (got - wanted).abs().max() <= 2.0**-15 * wanted.abs().max(), (got - wanted).abs().max()
