"""Cases of ``distributed_ranks.py``: tensor parallelism, alone and under FSDP2."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from rank_models import DEVICE, MLP, PLAN, close, exported, mlp, normal, optimizer_of
from tiny_models import tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import quads_qat as qq
from quads_qat import autograd
from quads_qat.experts import W4A16Experts


def tensor_parallel(rank: int, world: int) -> None:
    """Forward GEMMs sum over K / tp, then over ranks: a float apart from the whole's; gradients likewise."""
    expected, model = mlp(), mlp()
    mesh = init_device_mesh(DEVICE, (world,))
    for block in model:
        parallelize_module(block, mesh, PLAN)
    x = normal(5, 64, seed=1)
    y, wanted = model(x), expected(x)
    for module, whole in ((model[0].down_proj, expected[0].down_proj), (model[0].gate_proj, expected[0].gate_proj)):
        amax = autograd.group_amax(module.scale_group.weights(), module.weight_format)
        assert torch.equal(amax, autograd.group_amax(whole.scale_group.weights(), whole.weight_format))
        shard = autograd.fake_quantize_weight(module.weight, amax, module.weight_format, torch.float32)
        full = autograd.fake_quantize_weight(whole.weight, amax, whole.weight_format, torch.float32)
        assert torch.equal(shard.full_tensor(), full)  # the weights multiplied by are the same, bit for bit
    close(y, wanted)
    y.square().sum().backward()
    wanted.square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert isinstance(p.grad, DTensor), name
        close(p.grad.full_tensor(), q.grad)
    got, whole_export = exported(model), exported(expected)
    assert all(torch.equal(got[name], t) for name, t in whole_export.items())


def siblings_cut_in_other_ways(rank: int, world: int) -> None:
    """One is whole on every rank, one cut along N, one along K: the scale is still that of the whole group."""
    whole = qq.convert(nn.ModuleDict({f"{leaf}_proj": nn.Linear(64, 32) for leaf in "qkv"}).to(DEVICE), "w4a16")
    with torch.no_grad():
        for i, p in enumerate(whole.parameters()):
            p.copy_(normal(*p.shape, seed=i))
        whole.v_proj.weight[3, 60], whole.k_proj.weight[31, 0] = 9.0, 7.0  # on the last rank alone
    model, mesh = copy.deepcopy(whole), init_device_mesh(DEVICE, (world,))
    for leaf, placement in (("q", Replicate()), ("k", Shard(0)), ("v", Shard(1))):
        linear = model[f"{leaf}_proj"]
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [placement]))
    group = whole.q_proj.scale_group
    amax = autograd.group_amax(group.weights(), whole.q_proj.weight_format)
    assert torch.equal(autograd.group_amax(model.q_proj.scale_group.weights(), whole.q_proj.weight_format), amax)
    got, wanted = exported(model), exported(whole)
    assert all(torch.equal(got[name], t) for name, t in wanted.items())


def cut_blocks(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = qq.convert(nn.Sequential(nn.Linear(48, 32)).to(DEVICE), "w4a16")
    assert qq.check_tp(nn.ModuleDict({"down_proj": nn.Linear(48, 32)}), world)
    parallelize_module(model, init_device_mesh(DEVICE, (world,)), {"0": RowwiseParallel()})
    with pytest.raises(ValueError, match=r"^0.weight: .*24 a rank, not a multiple of 16.*check_tp"):
        model(torch.randn(2, 48, device=DEVICE))
    with pytest.raises(ValueError, match=r"^step: 0.weight: .*24 a rank, not a multiple of 16.*check_tp"):
        qq.step(model, track_codes=True)
    assert qq.step(model).step == 1  # what was refused does not count
    sharded = nn.Sequential(nn.Linear(48, 32)).to(DEVICE)
    parallelize_module(sharded, init_device_mesh(DEVICE, (world,)), {"0": RowwiseParallel()})
    with pytest.raises(ValueError, match=r"0\.weight is sharded.*24 a rank"):
        qq.convert(sharded, "w4a16")
    for arch, dim in (("mixtral", 2), ("gpt_oss", 1)):  # stacks [E, N, K] and [E, K, N]
        moe = tiny_model(arch).to(DEVICE)
        experts = next(m for m in qq.convert(moe, "w4a16").modules() if isinstance(m, W4A16Experts))
        weight = distribute_tensor(experts.down_proj.detach(), init_device_mesh(DEVICE, (world,)), [Shard(dim)])
        experts._parameters["down_proj"] = nn.Parameter(weight)
        for dispatch in ("grouped_mm", "eager"):
            moe.set_experts_implementation(dispatch)
            with pytest.raises(ValueError, match=r"^model\.layers\.0\.mlp\.experts\.down_proj: .*24 a rank.*check_tp"):
                moe(torch.tensor([[7]], device=DEVICE))
        with pytest.raises(
            ValueError, match=r"^step: model\.layers\.0\.mlp\.experts\.down_proj: .*24 a rank.*check_tp"
        ):
            qq.step(moe, track_codes=True)


def hooks_of_transformers(rank: int, world: int) -> None:
    """Applied after ``convert``, they hand a module its shard as if it were the whole weight: refused by name."""
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError:  # an older transformers, whose hooks go with shards that are no parameters
        return
    of_plan = "tp_plan" in inspect.signature(apply_tensor_parallelism).parameters  # else, up to 5.17, the model's own
    mesh = init_device_mesh(DEVICE, (world,), mesh_dim_names=("tp",))

    def parallelized(mode: str, styles: dict[str, str]) -> nn.Module:
        model = qq.convert(tiny_model("qwen3_moe").to(DEVICE), mode)
        styles = {f"model.layers.*.{name}": style for name, style in styles.items()}
        if of_plan:
            spread = {name.replace("*", str(i)): style for name, style in styles.items() for i in range(2)}
            apply_tensor_parallelism(model, mesh, spread)
        else:
            model.tp_plan = styles
            apply_tensor_parallelism(model, mesh)
        return model

    experts = {"mlp.experts.gate_up_proj": "packed_colwise", "mlp.experts": "moe_tp_experts"}
    attention = {"self_attn.o_proj": "rowwise", "self_attn.o_proj.weight": "rowwise"}
    ids = torch.arange(3, 15, device=DEVICE)[None]
    for styles, where in ((experts, r"mlp\.experts\.gate_up_proj"), (attention, r"self_attn\.o_proj\.weight")):
        model = parallelized("w4a16", styles)
        where = where if of_plan else r"\S+"  # every module is marked, and the first one refuses
        message = rf"^model\.layers\.0\.{where} was parallelized by transformers .*; .*parallelize_module"
        for grad in (True, False):
            with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=message):
                model(ids)
        with pytest.raises(RuntimeError, match=message):
            qq.step(model, track_codes=True)
    packed = parallelized("w4a4_residual", {"self_attn.o_proj": "rowwise"})
    with pytest.raises(RuntimeError, match=r"^a ResidualCompensatedLinear was parallelized by transformers"):
        packed(ids)


def fsdp2_with_tensor_parallel(rank: int, world: int) -> None:
    expected, model = mlp(), mlp()
    mesh = init_device_mesh(DEVICE, (world // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in model:
        parallelize_module(block, mesh["tp"], PLAN)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    data = [normal(5, 64, seed=i) for i in range(world // 2)]
    optimizer, whole_optimizer = optimizer_of(model), optimizer_of(expected)
    for _ in range(2):
        y = model(data[rank // 2])
        close(y, expected(data[rank // 2]))
        optimizer.zero_grad()
        y.square().sum().backward()
        whole_optimizer.zero_grad()
        for x in data:
            (expected(x).square().sum() / len(data)).backward()
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            close(p.grad.full_tensor(), q.grad)
            q.grad.copy_(p.grad.full_tensor())  # so that both go on from the same weights
        optimizer.step()
        whole_optimizer.step()
    got, wanted = exported(model), exported(expected)
    assert all(torch.equal(got[name], t) for name, t in wanted.items())


def held_scales_with_tensor_parallel(rank: int, world: int) -> None:
    """What is cut along one dim by both meshes has its amax from all ranks, and counts once in shares of codes."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        blocks = nn.Sequential(MLP(), MLP()).to(DEVICE)
        with torch.no_grad():  # an amax in each quarter of the rows, the largest on one rank alone
            for i in range(4):
                blocks[0].gate_proj.weight[32 * i + 5, 3] = 2.0 + i
                blocks[1].up_proj.weight[32 * i + 5, 3] = 5.0 - i
        return qq.convert(blocks, "w4a16", schedule=qq.Schedule(weight_scale="ema", decay=0.5))

    expected, sharded = model(), model()
    mesh = init_device_mesh(DEVICE, (world // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in sharded:
        parallelize_module(block, mesh["tp"], PLAN)
        fully_shard(block, mesh=mesh["dp"])
    for _ in range(3):
        found, wanted = qq.step(sharded, track_codes=True), qq.step(expected, track_codes=True)
        assert found == wanted, (found, wanted)
        with torch.no_grad():
            for m in (sharded, expected):
                for i, p in enumerate(m.parameters()):
                    p.mul_(1.5 - i % 3)
    assert wanted.changed
    found, wanted = qq.quant_state_dict(sharded), qq.quant_state_dict(expected)
    assert all(torch.equal(found[key], value) for key, value in wanted.items())
    got, whole_export = exported(sharded), exported(expected)
    assert all(torch.equal(got[name], t) for name, t in whole_export.items())
