"""Cases of ``distributed_ranks.py``: FSDP2 and DDP.

The expected weights come from one process that knows all ranks' batches: each rank's gradients in the rank's own
order, added up rank by rank and divided, as a reduction over two ranks does bit for bit.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rank_models import DEVICE, MICRO, MLP, STEPS, Losses, batches, exported, loss_of, mlp, optimizer_of, qwen
from tiny_models import tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import quads_qat as qq
from quads_qat.token_log_probs import token_log_probs


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
