"""Modules built by hand: trees of linears with chosen names, and a mixture of experts as transformers 4 wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

TINYMOE = Path(__file__).parents[1] / "quads_qat" / "data" / "tinymoe"


def linears(*names: str, n: int = 16, k: int = 32, bias: bool = False) -> nn.Module:
    """A tree of linears [n, k] with these full names; it has no forward."""
    return tree({name: nn.Linear(k, n, bias=bias) for name in names})


def tree(leaves: Mapping[str, nn.Module]) -> nn.Module:
    """A tree of modules with these full names; it has no forward."""
    root = nn.Module()
    for name, leaf in leaves.items():
        *path, last = name.split(".")
        parent = root
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, leaf)
    return root


def names_with_weights(model: nn.Module) -> set[str]:
    """Every parameter of two or more dims."""
    return {name for name, p in model.named_parameters(remove_duplicate=False) if p.ndim >= 2}


class ListMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class ListMoE(nn.Module):
    """Top-2 routing over a ``ModuleList`` of experts, one linear each projection."""

    def __init__(self, hidden: int = 32, intermediate: int = 48, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.ModuleList(ListMLP(hidden, intermediate) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.gate(rows).float().softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(rows)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            if token.numel():
                y = expert(rows[token]) * weights[token, slot, None].to(rows.dtype)
                out = out.index_add(0, token, y)
        return out.view_as(x)


class ListModel(nn.Module):
    """Two residual layers of :class:`ListMoE`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"mlp": ListMoE()}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["mlp"](x)  # pyright: ignore[reportIndexIssue]
        return x


def fill(model: nn.Module, seed: int = 0, scale: float = 0.1) -> nn.Module:
    """``model`` with fixed random parameters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in unique(model.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def unique(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return list({id(p): p for p in parameters}.values())
