"""What experts compute between the tokens that come in and the sum that goes out, whatever multiplies their weights.

Trainer, rollout, diagnosis and engines give a function for one projection; the loop over experts and the ``grouped_mm``
dispatch run it in the order of transformers' own code, so that sums have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat import sharding
from quads_qat.experts_layout import ExpertsLayout


class StandsFor(nn.Module):
    """A module in the place of one of ``original_class``, whose methods and constants it lends to that class' code."""

    original_class: type[nn.Module]

    def __getattr__(self, name: str) -> Any:
        """What ``original_class`` defines and this class does not."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__.get("original_class")  # not there yet while an object is unpickled
            if original is None or not hasattr(original, name):
                raise
            found = getattr(original, name)
            return MethodType(found, self) if isinstance(found, FunctionType) else found


def expert_matrix(module: Any, weight: Any, expert: int) -> Tensor:
    """[N, K] of one expert, whichever way the stack is stored."""
    return weight[expert].t() if module.layout.transposed else weight[expert]


def expert_bias(module: Any, name: str, expert: int) -> Tensor | None:
    """[N] or None."""
    return sharding.local(getattr(module, f"{name}_bias"))[expert] if module.layout.bias else None


def _join_gate(module: Any, first: Tensor) -> Tensor:
    """What lies between the two projections: [..., N of the first] -> [..., K of the second]."""
    layout = module.layout
    if not layout.gate:
        return module.act_fn(first)
    original = module.original_class
    if hasattr(original, "_apply_gate"):
        return original._apply_gate(module, first)
    gate, up = first.chunk(2, dim=-1)
    return module.act_fn(gate) * up


def experts_loop(
    module: Any,
    project: Callable[[str, int, Tensor], Tensor],
    hidden_states: Tensor,
    *routing: Tensor,
    **named: Tensor,
) -> Tensor:
    """Run the experts one by one; ``project(parameter, expert, x)`` computes a projection of rows x [m, K].

    Args:
        module: supplies layout, and activation, gate, biases and post-norm of the original class.
        project: one projection of one expert; experts without rows are skipped.
        hidden_states: [M, H]; [..., H] for shared experts.
        routing: the original's further arguments: expert indices [M, k] and weights [M, k] (indices beyond the routed
            experts pass their rows on or are dropped); scales [..., E] for shared experts; nothing for sorted tokens.
        named: the same by name, in the original's order.

    Returns:
        the shape and dtype of ``hidden_states``.
    """
    layout: ExpertsLayout = module.layout
    given = (*routing, *named.values())
    if layout.token_sorted:
        groups = hidden_states.view(layout.routed_experts, -1, hidden_states.shape[-1])
        return torch.cat([_one_expert(module, project, e, rows) for e, rows in enumerate(groups)])
    if layout.shared:
        rows, scales = hidden_states.reshape(-1, hidden_states.shape[-1]), given[0].reshape(-1, layout.routed_experts)
        outs = [_one_expert(module, project, e, rows, scales[:, e, None]) for e in range(scales.shape[1])]
        return torch.stack(outs).float().sum(0).to(hidden_states.dtype).view(hidden_states.shape)
    top_k_index, top_k_weights = given
    sum_dtype = {"weights": top_k_weights.dtype, "float32": torch.float32}.get(layout.sum_in, hidden_states.dtype)
    out = torch.zeros_like(hidden_states, dtype=sum_dtype)
    own = min(layout.routed_experts, getattr(module, "num_experts", layout.routed_experts))  # fewer if sharded on E
    for expert, slot, token in _routed(top_k_index):
        rows = hidden_states[token]
        if expert < own:
            rows = _one_expert(module, project, expert, rows)
        elif not hasattr(module, "identity_expert"):
            continue  # a masked slot of expert parallelism
        weighted = rows * top_k_weights[token, slot, None]
        out = out.index_add(0, token, weighted.to(out.dtype))
    return out.to(hidden_states.dtype)


def _routed(top_k_index: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each expert in use with its slots and tokens, in the order of transformers' own loops."""
    by_slot = top_k_index.t()
    for expert in top_k_index.unique().tolist():
        slot, token = torch.where(by_slot == expert)
        yield expert, slot, token


def _one_expert(
    module: Any,
    project: Callable[[str, int, Tensor], Tensor],
    expert: int,
    rows: Tensor,
    scale: Tensor | None = None,
) -> Tensor:
    layout: ExpertsLayout = module.layout
    if len(layout.first) == 2:  # separate gate and up
        gate, up = (project(name, expert, rows) for name in layout.first)
        joined = module.act_fn(gate) * up
    else:
        joined = _join_gate(module, project(layout.first[0], expert, rows))
    out = project(layout.down, expert, joined if scale is None else joined * scale)
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


def grouped_forward(
    module: Any,
    project: Callable[[str, Tensor, Tensor, Tensor], Tensor],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """The ``grouped_mm`` dispatch: rows sorted by expert, one GEMM call per projection. Traceable as one graph.

    ``project(parameter, rows [M, K], offs [E], expert of each row [M])`` is a projection of all experts -> [M, N].

    The steps and their order are those of transformers' ``grouped_mm_experts_forward``
    (integrations/moe.py), so that the bits are the same; slots of experts on other ranks (expert parallelism) sort to
    the tail, get no GEMM and are zeroed.
    """
    layout: ExpertsLayout = module.layout
    tokens, k = hidden_states.shape[0], top_k_index.shape[-1]
    expert_of_slot, order = torch.sort(top_k_index.reshape(-1))
    rows = hidden_states[order // k]
    weights = top_k_weights.reshape(-1)[order]
    on_cpu = hidden_states.device.type in ("cpu", "mps")
    counted = expert_of_slot.float() if on_cpu else expert_of_slot.int()  # histc: floats on a CPU, ints on CUDA
    counts = torch.histc(counted, bins=module.num_experts, min=0, max=module.num_experts - 1)
    offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
    elsewhere = None
    if getattr(module, "_is_expert_parallel", True):  # where there is no such flag, transformers masks always
        elsewhere = (expert_of_slot >= module.num_experts).unsqueeze(-1)
        expert_of_slot = expert_of_slot.clamp(max=module.num_experts - 1)
        rows = rows.masked_fill(elsewhere, 0.0)

    def projected(name: str, x: Tensor) -> Tensor:
        out = project(name, x, offs, expert_of_slot)
        return out if elsewhere is None else out.masked_fill(elsewhere, 0.0)

    out = projected(layout.down, _join_gate(module, projected(layout.first[0], rows)))
    if getattr(module, "has_post_expert_norm", False):
        out = module.post_expert_norm(out)
    out = out * weights.unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], device=order.device)
    return out[inverse].view(tokens, k, hidden_states.shape[-1]).sum(dim=1).to(hidden_states.dtype)
