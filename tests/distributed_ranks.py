"""One rank of ``test_distributed.py``, started by torchrun: trainers on PyTorch's own engines against a whole model.

Over NCCL where every rank has a GPU, else over gloo.

The expected weights come from one process that knows all ranks' batches: each rank's gradients in the rank's own
order, added up rank by rank and divided, as a reduction over two ranks does bit for bit. Where an engine sums in
another order (a GEMM that is cut along K), the test says so and bounds the difference.
"""

from __future__ import annotations

import copy
import inspect
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import quads_qat as qq
from quads_qat import autograd
from quads_qat.experts import W4A16Experts
from quads_qat.token_log_probs import token_log_probs

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


def expected_run(model: nn.Module, world: int, compute: torch.dtype | None = None) -> Losses:
    """Train ``model`` in one process as ``world`` data-parallel ranks would; losses by step, all ranks' in order.

    ``compute``: forward and backward run in a copy of this dtype, gradients are reduced in fp32.
    """
    optimizer, history = optimizer_of(model), []
    for step in range(STEPS):
        losses, grads = [], []
        for rank in range(world):
            worker = copy.deepcopy(model)
            for p in worker.parameters():
                p.data = p.data.to(compute or p.dtype)
            total = [torch.zeros_like(p) for p in model.parameters()]
            for ids in batches(rank, step):
                worker.zero_grad()
                loss = loss_of(worker, ids)
                loss.backward()
                losses.append(loss.item())
                total = [t + p.grad.to(t.dtype) for t, p in zip(total, worker.parameters(), strict=True)]
            grads.append(total)
        for p, *each in zip(model.parameters(), *grads, strict=True):
            p.grad = sum(each) / world
        optimizer.step()
        history.append(losses)
    return history


def run(
    model: nn.Module, rank: int, sync: Callable[[bool], None], optimizer: torch.optim.Optimizer
) -> list[list[float]]:
    """Train this rank's share; ``sync(last)`` is called before each micro-batch."""
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for i, ids in enumerate(batches(rank, step)):
            sync(i == MICRO - 1)
            loss = loss_of(model, ids)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        history.append(losses)
    return history


def exported(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.reshape(-1).view(torch.uint8) for name, t in qq.export_weights(model, "modelopt")}


def assert_trained_alike(
    model: nn.Module, losses: list[list[float]], rank: int, expected: nn.Module, all_losses
) -> None:
    mine = [step[rank * MICRO : (rank + 1) * MICRO] for step in all_losses]
    assert losses == mine, (losses, mine)
    got, wanted = exported(model), exported(expected)
    assert got.keys() == wanted.keys()
    different = [name for name, t in wanted.items() if not torch.equal(got[name], t)]
    assert not different, different[:5]


def fsdp2(rank: int, world: int, *, experts: str = "grouped_mm", mixed: bool = False, reshard: bool = True) -> None:
    expected, model = qwen(experts=experts), qwen(experts=experts)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    losses = run(model, rank, model.set_requires_gradient_sync, optimizer_of(model))
    wanted = expected_run(expected, world, torch.bfloat16 if mixed else None)
    assert_trained_alike(model, losses, rank, expected, wanted)


def scales_held_and_codes_kept(rank: int, world: int) -> None:
    """Frozen scales, shares of codes, and codes kept between micro-batches, sharded as in one process."""
    schedule = qq.Schedule(weight_scale="ema")
    expected, model = (qq.convert(tiny_model("qwen3_moe").to(DEVICE), "w4a16", schedule=schedule) for _ in range(2))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer, whole = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, expected))
    for i in range(2):
        ids = batches(0, i)  # the same on all ranks: gradients are sums of equals, divided
        for m, opt in ((model, optimizer), (expected, whole)):
            opt.zero_grad()
            with qq.accumulate(m):
                for micro in ids:
                    loss_of(m, micro).backward()
            opt.step()
        got, wanted = qq.step(model, track_codes=True), qq.step(expected, track_codes=True)
        assert got == wanted, (got, wanted)
    assert 0 < got.changed < 1
    mine, single = exported(model), exported(expected)
    assert all(torch.equal(mine[name], t) for name, t in single.items())


def ddp(rank: int, world: int) -> None:
    expected, model = qwen(), qwen()
    wrapped = DistributedDataParallel(model)

    def sync(last: bool) -> None:
        wrapped.require_backward_grad_sync = last

    losses = run(wrapped, rank, sync, optimizer_of(model))
    assert_trained_alike(model, losses, rank, expected, expected_run(expected, world))


def gradients_to_a_bound(rank: int, world: int, *, shard: bool) -> None:
    """More than two ranks are added up in an order of the engine's own; from equal gradients on, bytes are equal.

    ``world`` - 1 additions and an exact division: less than ``world`` roundings of 2**-24 of the mean magnitude.
    """
    expected, model = qwen(), qwen()
    for layer in model.model.layers if shard else ():
        fully_shard(layer)
    wrapped = fully_shard(model) if shard else DistributedDataParallel(model)
    optimizer, whole_optimizer = optimizer_of(model), optimizer_of(expected)
    for step in range(2):
        optimizer.zero_grad()
        loss = loss_of(wrapped, batches(rank, step)[0])
        loss.backward()
        each = []
        for r in range(world):
            expected.zero_grad()
            single = loss_of(expected, batches(r, step)[0])
            single.backward()
            assert r != rank or torch.equal(loss, single)
            each.append([p.grad.double() for p in expected.parameters()])
        for p, q, *grads in zip(model.parameters(), expected.parameters(), *each, strict=True):
            got = p.grad.full_tensor() if shard else p.grad
            size = sum(g.abs() for g in grads) / world
            assert size.any()
            assert ((got - sum(grads) / world).abs() <= world * 2.0**-24 * size).all()
            q.grad = got.clone()
        optimizer.step()
        whole_optimizer.step()
    got, wanted = exported(model), exported(expected)
    assert all(torch.equal(got[name], t) for name, t in wanted.items())


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
    _close(y, wanted)
    y.square().sum().backward()
    wanted.square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert isinstance(p.grad, DTensor), name
        _close(p.grad.full_tensor(), q.grad)
    got, whole_export = exported(model), exported(expected)
    assert all(torch.equal(got[name], t) for name, t in whole_export.items())


def _close(got: Tensor, wanted: Tensor) -> None:
    """Two layers, K <= 128: fewer than 2**9 roundings of 2**-24 stand between the two, of the largest value."""
    assert (got - wanted).abs().max() <= 2.0**-15 * wanted.abs().max(), (got - wanted).abs().max()


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


def expert_without_tokens(rank: int, world: int) -> None:
    """Rank 1's single token leaves two of four experts without rows; nothing hangs, gradients are those of the whole.

    Fused experts, that is: FSDP2 itself cannot reduce a linear per expert that one rank alone has used.
    """
    expected, model = qwen(), qwen()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    ids = [torch.arange(3, 15, device=DEVICE)[None], torch.tensor([[7]], device=DEVICE)]
    model(ids[rank]).logits.square().sum().backward()
    grads = []
    for rows in ids:
        expected.zero_grad()
        expected(rows).logits.square().sum().backward()
        grads.append([p.grad for p in expected.parameters()])
    for p, a, b in zip(model.parameters(), *grads, strict=True):
        assert torch.equal(p.grad.full_tensor(), (a + b) / 2)


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
            _close(masters, whole(x, index, weights))
        with qq.observe_activations(model):
            got = module(x, mine, weights)
        seen, all_seen = qq.quant_state_dict(model), qq.quant_state_dict(expected)
        assert seen.keys() == all_seen.keys()
        for key, amax in all_seen.items():  # of activations between the projections, which differ by sums over K
            _close(seen[key], amax)
        total = got.detach().clone()
        dist.all_reduce(total)
        _close(total, wanted)
        upstream = normal(7, k, seed=2)
        for out in (got, wanted):
            (out * upstream).sum().backward()
        part = slice(rank * local, (rank + 1) * local)
        for name, p in whole.named_parameters():
            gradient, of_whole = module._parameters[name].grad, p.grad[part]
            assert gradient.placements == (Shard(0),)
            assert of_whole.any()
            _close(gradient.to_local(), of_whole)
        for name in whole.layout.parameters:
            amax = whole.amax(name)[part if whole.weight_formats[name].per_expert else ...]
            assert torch.equal(module.amax(name), amax)
        got, wanted = exported(model), exported(expected)
        assert all(torch.equal(got[name], t) for name, t in wanted.items())


def _eager_experts_know_other_ranks() -> bool:
    """Whether the eager experts of this transformers know slots of other ranks: they are one class more."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    return "num_experts + 1" in inspect.getsource(Qwen3MoeExperts)


def observed_activations(rank: int, world: int) -> None:
    """Ranks see other batches (rank 0's reaches two of four experts); afterwards each has the amaxes of all of them."""
    model = qwen()
    whole = copy.deepcopy(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    ids = [torch.tensor([[7]], device=DEVICE), torch.arange(3, 15, device=DEVICE)[None]]
    with torch.no_grad(), qq.observe_activations(model), qq.observe_activations(whole):
        model(ids[rank])
        for rows in ids:
            whole(rows)
        alone = qq.quant_state_dict(model)
    got, wanted = qq.quant_state_dict(model), qq.quant_state_dict(whole)
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[key], amax) for key, amax in wanted.items())
    differs = torch.tensor(sum(not torch.equal(alone[key], amax) for key, amax in got.items()), device=DEVICE)
    dist.all_reduce(differs)
    assert differs  # there was something to exchange


def example_of_the_docs(rank: int, world: int) -> None:
    """The code of docs/trainers.md as it stands, on different batches: one model comes out of it."""
    docs = (Path(__file__).parents[1] / "docs" / "trainers.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"<!-- example: fsdp2 -->\n```python\n(.*?)```", docs, re.DOTALL)
    model, sent = tiny_model("qwen3_moe").to(DEVICE, torch.float32), []
    before = qq.weight_digests(qq.export_weights(qq.convert(copy.deepcopy(model), "w4a16"), "modelopt"))
    exec(code, {"model": model, "ids": batches(rank, 0)[0], "sent": sent})
    assert sent == (list(before) if rank == 0 else [])
    assert qq.check_first_step(model, received=before).failed == ["weights"]  # it has trained
    every = [None] * world
    dist.all_gather_object(every, qq.weight_digests(qq.export_weights(model, "modelopt")))
    assert every == [every[0]] * world


def first_step(rank: int, world: int) -> None:
    """``check_first_step`` on all ranks: a sharded trainer against a whole rollout, and against an engine's digests."""
    model = qwen()
    rollout = qq.convert(copy.deepcopy(model), "w4a4_residual")
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    qq.update_weights(rollout, qq.export_weights(model, "modelopt"))
    received = qq.weight_digests(qq.export_weights(model, "modelopt"))
    ids = batches(0, 0)[0]
    tokens = {"input_ids": ids, "logp_rollout": token_log_probs(rollout, ids, 6)}
    limits = qq.GapLimits(mean=1, k3=1)  # a tiny random model
    report = qq.check_first_step(model, rollout, **tokens, limits=limits)
    assert report.ok, str(report)
    assert [check.passed for check in report.checks].count(True) == 5
    assert qq.check_first_step(model, received=received).ok
    optimizer = optimizer_of(model)
    loss_of(model, ids).backward()
    optimizer.step()
    assert qq.check_first_step(model, rollout).failed == ["weights"]
    assert qq.check_first_step(model, received=received).failed == ["weights"]


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
        _close(y, expected(data[rank // 2]))
        optimizer.zero_grad()
        y.square().sum().backward()
        whole_optimizer.zero_grad()
        for x in data:
            (expected(x).square().sum() / len(data)).backward()
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            _close(p.grad.full_tensor(), q.grad)
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


def trainers_on_a_part_of_the_world(rank: int, world: int) -> None:
    """Two pipeline stages, each under FSDP2 on its half of the ranks, and a trainer that half of the ranks have."""
    mesh = init_device_mesh(DEVICE, (2, world // 2), mesh_dim_names=("pp", "dp"))
    stage = mesh["pp"].get_local_rank()

    def model(stage: int) -> nn.Module:
        torch.manual_seed(stage)
        blocks = nn.Sequential(*(MLP() for _ in range(1 + stage))).to(DEVICE)  # stages differ in their numbers
        return qq.convert(blocks, "w4a16", schedule=qq.Schedule(weight_scale="ema", decay=0.5))

    expected, sharded = model(stage), fully_shard(model(stage), mesh=mesh["dp"])
    for i in range(3):
        found, wanted = qq.step(sharded, track_codes=True), qq.step(expected, track_codes=True)
        assert found == wanted, (found, wanted)
        assert i == 0 or (wanted.changed == 0) == (stage == 1)
        with torch.no_grad():
            for m in (sharded, expected):
                for p in m.parameters():
                    p.mul_(1 if stage else -1.5)
    if stage == 0:
        alone, whole = fully_shard(model(0), mesh=mesh["dp"]), model(0)
        for _ in range(2):
            assert qq.step(alone, track_codes=True) == qq.step(whole, track_codes=True)


def fsdp2_replicated(rank: int, world: int) -> None:
    """Sharded within halves of the ranks, replicated between them: every weight counts once."""
    expected, model = mlp(), mlp()
    mesh = init_device_mesh(DEVICE, (world // 2, 2), mesh_dim_names=("replicas", "shards"))
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        found, wanted = qq.step(model, track_codes=True), qq.step(expected, track_codes=True)
        assert found == wanted, (found, wanted)
        with torch.no_grad():
            for m in (model, expected):
                next(m.parameters()).mul_(-1)
    assert 0 < wanted.changed < 1


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
            _close(total, whole(data[dp], index, weights))
            (out * upstream).sum().backward()
            for x in data:
                ((whole(x, index, weights) * upstream).sum() / len(data)).backward()
            with torch.no_grad():
                for p, q in zip(module.parameters(), whole.parameters(), strict=True):
                    _close(p.grad.full_tensor(), q.grad)
                    q.sub_(0.1 * p.grad.full_tensor())  # so that both go on from the same weights
                    p.sub_(0.1 * p.grad)
            assert qq.step(model, track_codes=True) == qq.step(expected, track_codes=True)
        found, wanted = qq.quant_state_dict(model), qq.quant_state_dict(expected)
        assert all(torch.equal(found[key], value) for key, value in wanted.items())
        got, whole_export = exported(model), exported(expected)
        assert all(torch.equal(got[name], t) for name, t in whole_export.items())


TWO_RANKS = {
    "fsdp2": fsdp2,
    "fsdp2, eager experts, kept unsharded": lambda r, w: fsdp2(r, w, experts="eager", reshard=False),
    "fsdp2, bf16 compute": lambda r, w: fsdp2(r, w, mixed=True),
    "scales held, codes kept": scales_held_and_codes_kept,
    "ddp": ddp,
    "tensor parallel": tensor_parallel,
    "siblings cut in other ways": siblings_cut_in_other_ways,
    "cut blocks": cut_blocks,
    "an expert without tokens": expert_without_tokens,
    "expert parallel": expert_parallel,
    "observed activations": observed_activations,
    "example of the docs": example_of_the_docs,
    "first step": first_step,
}
FOUR_RANKS = {
    "fsdp2": lambda r, w: gradients_to_a_bound(r, w, shard=True),
    "ddp": lambda r, w: gradients_to_a_bound(r, w, shard=False),
    "tensor parallel": tensor_parallel,
    "expert parallel": expert_parallel,
    "fsdp2 x tensor parallel": fsdp2_with_tensor_parallel,
    "fsdp2 x tensor parallel, scales held": held_scales_with_tensor_parallel,
    "fsdp2 x expert parallel": fsdp2_with_expert_parallel,
    "fsdp2, replicated": fsdp2_replicated,
    "trainers on a part of the world": trainers_on_a_part_of_the_world,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(DEVICE == "cuda", warn_only=True)  # where bits are compared
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, case in (TWO_RANKS if world == 2 else FOUR_RANKS).items():
        case(rank, world)
        if rank == 0:
            with Path(sys.argv[1]).open("a") as file:
                file.write(f"{name}\n")
        dist.barrier()
    dist.destroy_process_group()
