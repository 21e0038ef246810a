"""Cases of ``distributed_ranks.py``: stacks of experts cut along E, alone and under FSDP2."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist
from rank_models import DEVICE, close, exported, normal
from tiny_models import tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import quads_qat as qq
from quads_qat.experts import W4A16Experts


def expert_parallel(rank: int, world: int) -> None:
    """Stacks sharded on E: each rank runs its experts on all tokens, slots of others are masked, outputs are added."""
    cases = [("qwen3_moe", "grouped_mm", "w4a16"), ("qwen3_moe", "eager", "w4a16"), ("gpt_oss", "grouped_mm", "w4a16")]
    for arch, dispatch, mode in [*cases, ("qwen3_moe", "grouped_mm", "w4a4"), ("gpt_oss", "grouped_mm", "w4a4")]:
        if dispatch == "eager" and not _eager_experts_know_other_ranks():
            continue  # such a transformers fails on a masked slot without us, too
        expected, model = (tiny_model(arch).float().to(DEVICE) for _ in range(2))
        for m in (expected, model):
            m.set_experts_implementation(dispatch)
            qq.convert(m, mode)
        mesh = init_device_mesh(DEVICE, (world,))
        whole, module = (next(e for e in m.modules() if isinstance(e, W4A16Experts)) for m in (expected, model))
        with torch.no_grad():
            for m in (whole, module):  # an amax that the last rank alone sees
                m._parameters["down_proj"][-1, 3, 5] = 3.0
        for name, p in list(module._parameters.items()):
            if p is not None:
                module._parameters[name] = nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)]))
        experts, k = whole.layout.routed_experts, 64
        local = experts // world
        x = normal(7, k, seed=1)
        index = torch.stack([torch.arange(7) % experts, (torch.arange(7) + 1) % experts], 1).to(DEVICE)
        weights = torch.full((7, 2), 0.5, device=DEVICE)
        with qq.observe_activations(expected):
            wanted = whole(x, index, weights)
        mine = torch.where(index // local == rank, index - rank * local, local)
        module.num_experts, module._is_expert_parallel = local, True
        with torch.no_grad(), qq.full_precision(model), qq.full_precision(expected):
            masters = module(x, mine, weights)
            dist.all_reduce(masters)
            close(masters, whole(x, index, weights))
        with qq.observe_activations(model):
            got = module(x, mine, weights)
        seen, all_seen = qq.quant_state_dict(model), qq.quant_state_dict(expected)
        assert seen.keys() == all_seen.keys()
        for key, amax in all_seen.items():  # of activations between the projections, which differ by sums over K
            close(seen[key], amax)
        total = got.detach().clone()
        dist.all_reduce(total)
        close(total, wanted)
        upstream = normal(7, k, seed=2)
        for out in (got, wanted):
            (out * upstream).sum().backward()
        part = slice(rank * local, (rank + 1) * local)
        for name, p in whole.named_parameters():
            gradient, of_whole = module._parameters[name].grad, p.grad[part]
            assert gradient.placements == (Shard(0),)
            assert of_whole.any()
            close(gradient.to_local(), of_whole)
        for name in whole.layout.parameters:
            amax = whole.amax(name)[part if whole.weight_formats[name].per_expert else ...]
            assert torch.equal(module.amax(name), amax)
        got, wanted = exported(model), exported(expected)
        assert all(torch.equal(got[name], t) for name, t in wanted.items())


def _eager_experts_know_other_ranks() -> bool:
    """Whether the eager experts of this transformers know slots of other ranks: they are one class more."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    return "num_experts + 1" in inspect.getsource(Qwen3MoeExperts)


def fsdp2_with_expert_parallel(rank: int, world: int) -> None:
    """Stacks cut along E by both: the experts of a rank are gathered from its data-parallel peers. Held scales too."""
    for arch in ("qwen3_moe", "gpt_oss"):
        models = [tiny_model(arch, experts_implementation="grouped_mm").float().to(DEVICE) for _ in range(2)]
        for m in models:
            qq.convert(m, "w4a16", scope="experts", schedule=qq.Schedule(weight_scale="ema", decay=0.5))
        expected, model = models
        whole, module = (next(e for e in m.modules() if isinstance(e, W4A16Experts)) for m in models)
        mesh = init_device_mesh(DEVICE, (world // 2, 2), mesh_dim_names=("dp", "ep"))
        for name, p in list(module._parameters.items()):
            module._parameters[name] = nn.Parameter(distribute_tensor(p.detach(), mesh["ep"], [Shard(0)]))
        module.num_experts, module._is_expert_parallel = 2, True
        fully_shard(module, mesh=mesh["dp"])
        dp, ep = (mesh[dim].get_local_rank() for dim in ("dp", "ep"))
        data, upstream = [normal(7, 64, seed=i) for i in range(world // 2)], normal(7, 64, seed=9)
        index = torch.stack([torch.arange(7) % 4, (torch.arange(7) + 1) % 4], 1).to(DEVICE)
        weights, mine = torch.full((7, 2), 0.5, device=DEVICE), torch.where(index // 2 == ep, index - 2 * ep, 2)
        for _ in range(2):
            for m in models:
                m.zero_grad()
            out = module(data[dp], mine, weights)
            total = out.detach().clone()
            dist.all_reduce(total, group=mesh["ep"].get_group())
            close(total, whole(data[dp], index, weights))
            (out * upstream).sum().backward()
            for x in data:
                ((whole(x, index, weights) * upstream).sum() / len(data)).backward()
            with torch.no_grad():
                for p, q in zip(module.parameters(), whole.parameters(), strict=True):
                    close(p.grad.full_tensor(), q.grad)
                    q.sub_(0.1 * p.grad.full_tensor())  # so that both go on from the same weights
                    p.sub_(0.1 * p.grad)
            assert qq.step(model, track_codes=True) == qq.step(expected, track_codes=True)
        found, wanted = qq.quant_state_dict(model), qq.quant_state_dict(expected)
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
        got, whole_export = exported(model), exported(expected)
        assert all(torch.equal(got[name], t) for name, t in whole_export.items())
