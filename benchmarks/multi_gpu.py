"""QAT and weight sync over several GPUs, a process each (NCCL), against one GPU: bits first, then time and memory.

Without GPUs the same code runs over gloo, which shows that it works and nothing else.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import quads_qat as qq
from benchmarks.registry import GpuReport, Report, Row, benchmark

STEPS = 3
BUCKET_BYTES = 256 << 20


class RanksReport(GpuReport):
    """Medians, not the best of all rounds: ranks wait for each other."""

    @property
    def legend(self) -> str:
        return super().legend.replace("best of all rounds", "median of all rounds")


@benchmark("multi-gpu")
def multi_gpu(
    gpus: int = 2,
    layers: int = 8,
    experts: int = 64,
    hidden: int = 2048,
    intermediate: int = 768,
    tokens: int = 4096,
    rounds: int = 5,
    syncs: int = 50,
    training: bool = True,
) -> Report:
    """FSDP2 against one GPU and against BF16, and a trainer that syncs a rollout on another GPU every step."""
    settings = dict(locals())
    report = RanksReport(
        f"{gpus} GPUs: Qwen3-MoE, {layers} layers, {experts} experts, hidden {hidden}",
        tokens * gpus,
        "tokens",
        ("torch", "triton", "transformers"),
        settings,
    )
    with TemporaryDirectory() as folder:
        ctx = mp.get_context("spawn")
        queues = ctx.Queue(), ctx.Queue()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(_rank, (settings, port, folder, queues), nprocs=gpus)
        report.rows += torch.load(Path(folder) / "rows.pt", weights_only=False)
    return report


def _rank(rank: int, settings: dict[str, int], port: int, folder: str, queues: Any) -> None:
    world = settings["gpus"]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    cuda = torch.cuda.device_count() >= world
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world)
    ctx = _Context(rank, world, device, settings)
    rows = [*(_fsdp2(ctx) if settings["training"] else []), *_sync(ctx, queues)]
    if rank == 0:
        torch.save(rows, Path(folder) / "rows.pt")
    dist.barrier()
    dist.destroy_process_group()


class _Context:
    """What a rank knows: its place, its device, the sizes."""

    def __init__(self, rank: int, world: int, device: torch.device, sizes: dict[str, int]) -> None:
        self.rank, self.world, self.device, self.sizes = rank, world, device, sizes

    def model(self, mode: str | None, dtype: torch.dtype, seed: int = 0) -> Any:
        """A Qwen3-MoE with random weights, the same on every rank."""
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

        s = self.sizes
        config = Qwen3MoeConfig(
            num_hidden_layers=s["layers"],
            num_experts=s["experts"],
            num_experts_per_tok=min(8, s["experts"]),
            hidden_size=s["hidden"],
            moe_intermediate_size=s["intermediate"],
            num_attention_heads=max(1, s["hidden"] // 128),
            num_key_value_heads=max(1, s["hidden"] // 512),
            head_dim=64,  # pyright: ignore[reportCallIssue]  the config does take it
            vocab_size=8192,
        )
        config._experts_implementation = "grouped_mm"
        torch.manual_seed(seed)
        with self.device:
            model = Qwen3MoeForCausalLM._from_config(config, dtype=dtype)
        model = model.to(dtype)
        return model if mode is None else qq.convert(model, mode)

    def batch(self, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * rank + step)
        ids = torch.randint(3, 8192, (max(1, self.sizes["tokens"] // 1024), 1024), generator=generator)
        return ids[:, : self.sizes["tokens"]].to(self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0


# ------------------------------------------------------------------------------------------------------------- training


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids).logits[:, :-1].float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _optimizer(model: nn.Module, ctx: _Context) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=ctx.device.type == "cuda")


def _digest(stream: Iterator[tuple[str, Tensor]]) -> str:
    """SHA-256 of names and bytes."""
    digest = hashlib.sha256()
    for name, tensor in stream:
        digest.update(name.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def _repeatable(model: Any) -> Any:
    """With attention whose backward pass adds in a fixed order: the fused one's does not, even on one GPU."""
    model.set_attn_implementation("eager")
    return model


def _one_gpu(ctx: _Context) -> tuple[list[list[float]], str]:
    """All ranks' batches one after the other in a bf16 copy, gradients summed rank by rank in fp32, then divided."""
    model = _repeatable(ctx.model("w4a16", torch.float32))
    optimizer, history = _optimizer(model, ctx), []
    worker = copy.deepcopy(model)
    for parameter in worker.parameters():  # not the buffers: FSDP2 leaves them as they are
        parameter.data = parameter.data.to(torch.bfloat16)
    for step in range(STEPS):
        losses = []
        for mine, master in zip(worker.parameters(), model.parameters(), strict=True):
            mine.data.copy_(master.data)
        for rank in range(ctx.world):
            worker.zero_grad()
            loss = _loss(worker, ctx.batch(rank, step))
            loss.backward()
            losses.append(loss.item())
            for mine, master in zip(worker.parameters(), model.parameters(), strict=True):
                assert mine.grad is not None
                grad = mine.grad.float()
                master.grad = grad if rank == 0 else master.grad.add_(grad)  # pyright: ignore[reportOptionalMemberAccess]
        for master in model.parameters():
            master.grad.div_(ctx.world)
        optimizer.step()
        history.append(losses)
    return history, _digest(qq.export_weights(model, "modelopt"))


def _sharded(ctx: _Context, mode: str | None) -> Any:
    model: Any = ctx.model(mode, torch.float32)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def _fsdp2(ctx: _Context) -> list[Row]:
    """QAT under FSDP2: the losses and exported bytes of one GPU; then the time of a step beside BF16's."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # sums of expert rows, so that bits can be compared
    wanted: Any = _one_gpu(ctx) if ctx.rank == 0 else None
    ctx.free()
    dist.barrier()
    model = _repeatable(_sharded(ctx, "w4a16"))
    optimizer, losses = _optimizer(model, ctx), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = _loss(model, ctx.batch(ctx.rank, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    every: list[Any] = [None] * ctx.world
    dist.all_gather_object(every, losses)
    digest = _digest(qq.export_weights(model, "modelopt"))
    found = [list(step) for step in zip(*every, strict=True)], digest
    del model, optimizer
    torch.use_deterministic_algorithms(False)  # it fills all new memory, which costs time
    ctx.free()
    name = f"FSDP2 over {ctx.world} against one GPU, {STEPS} steps"
    note = ""
    if ctx.rank == 0:
        same = ("losses", found[0] == wanted[0]), ("exported bytes", found[1] == wanted[1])
        note = ", ".join(f"{what} {'equal' if is_same else 'DIFFER'}" for what, is_same in same)
        if found[0] != wanted[0]:
            note += f": {found[0]} and {wanted[0]}"
    rows = [Row(name, None, note=note)]
    for arm, mode in (("BF16, FSDP2", None), ("W4A16 QAT, FSDP2", "w4a16")):
        seconds, peak = _time_steps(ctx, mode)
        rows.append(Row(arm, seconds, "BF16, FSDP2" if mode else "", f"peak {peak / 1e9:.2f} GB a GPU"))
        ctx.free()
    return rows


def _time_steps(ctx: _Context, mode: str | None) -> tuple[float, int]:
    model = _sharded(ctx, mode)
    optimizer, ids, times = _optimizer(model, ctx), ctx.batch(ctx.rank, 0), []
    for i in range(2 + ctx.sizes["rounds"]):
        ctx.synchronize()
        dist.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        _loss(model, ids).backward()
        optimizer.step()
        ctx.synchronize()
        if i >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times), ctx.peak()


# ---------------------------------------------------------------------------------------------------------- weight sync


def _sync(ctx: _Context, queues: Any) -> list[Row]:
    """A trainer on rank 0, a rollout on rank 1, whose bytes are compared with a fresh one's after every sync."""
    if ctx.rank > 1:
        for _ in range(2):
            dist.barrier()
        return []
    rows = []
    pair = dist.new_group([0, 1], use_local_synchronization=True) if ctx.world > 2 else None
    send_receive = {
        "broadcast": (lambda stream: _broadcast(stream, pair), lambda: _received(ctx.device, pair)),
        "shared memory (CUDA IPC)": (lambda stream: _put(stream, queues), lambda: _got(queues, ctx.device)),
    }
    for name, (send, receive) in send_receive.items():
        rows.append(_syncs(ctx, f"weight sync by {name}", send, receive, pair))
        dist.barrier()
    return rows


def _syncs(ctx: _Context, name: str, send: Callable[[Any], None], receive: Callable[[], Any], pair: Any) -> Row:
    trainer: Any = ctx.model("w4a16", torch.bfloat16) if ctx.rank == 0 else None
    rollout = ctx.model("w4a4_residual", torch.bfloat16, seed=1)
    size = torch.tensor(0 if trainer is None else sum(p.nbytes for p in trainer.parameters()), device=ctx.device)
    dist.broadcast(size, src=0, group=pair)
    times, wrong, memory = [], 0, []
    for step in range(ctx.sizes["syncs"]):
        if trainer is not None:
            with torch.no_grad():
                for parameter in trainer.parameters():
                    parameter.mul_(-1.01)
        ctx.synchronize()
        dist.barrier(group=pair)
        start = time.perf_counter()
        if trainer is not None:
            send(qq.export_weights(trainer, "modelopt", ranks=0))
        else:
            qq.update_weights(rollout, receive())
        ctx.synchronize()
        dist.barrier(group=pair)
        if step > 1:
            times.append(time.perf_counter() - start)
        if trainer is not None:  # the same weights, here, by another road: masters, not packed
            qq.update_weights(rollout, trainer.state_dict())
        sums = _sums(rollout)
        both = [torch.empty_like(sums) for _ in range(2)]
        dist.all_gather(both, sums, group=pair)
        wrong += not torch.equal(both[0], both[1])
        if ctx.device.type == "cuda":
            memory.append(torch.cuda.memory_allocated())
    seconds = statistics.median(times)
    grown = torch.tensor(memory[-1] - memory[min(5, len(memory) - 1)] if memory else 0, device=ctx.device)
    dist.all_reduce(grown, dist.ReduceOp.MAX, group=pair)
    if wrong:
        return Row(name, None, note=f"{wrong} of {ctx.sizes['syncs']} syncs differ from the trainer's weights: no time")
    gigabytes = int(size) / 1e9
    note = f"{seconds / gigabytes:.3f} s/GB of {gigabytes:.1f} GB of BF16, {ctx.sizes['syncs']} syncs bit-exact, "
    return Row(name, seconds, note=note + f"memory grew by {int(grown) / 1e6:.1f} MB")


def _sums(rollout: nn.Module) -> Tensor:
    """[tensors] int64: for each tensor of the rollout, its bytes weighted by their places (mod 2**64)."""
    sums = []
    for tensor in rollout.state_dict().values():
        data = tensor.reshape(-1).view(torch.uint8)
        rest = -data.numel() % 8
        words = nn.functional.pad(data, (0, rest)).view(torch.int64)
        places = torch.arange(words.numel(), device=words.device) * 2654435761 + 1
        sums.append((words * places).sum())
    return torch.stack(sums)


def _broadcast(stream: Iterator[tuple[str, Tensor]], group: Any) -> None:
    for entries, bucket in qq.bucketed(stream, BUCKET_BYTES):
        dist.broadcast_object_list([(entries, bucket.numel())], src=0, group=group)
        dist.broadcast(bucket, src=0, group=group)
    dist.broadcast_object_list([None], src=0, group=group)


def _received(device: torch.device, group: Any) -> Iterator[tuple[str, Tensor]]:
    def buckets() -> Iterator[Any]:
        while True:
            header: list[Any] = [None]
            dist.broadcast_object_list(header, src=0, group=group)
            if header[0] is None:
                return
            entries, size = header[0]
            bucket = torch.empty(size, dtype=torch.uint8, device=device)
            dist.broadcast(bucket, src=0, group=group)
            yield entries, bucket

    return qq.unbucketed(buckets())


def _put(stream: Iterator[tuple[str, Tensor]], queues: Any) -> None:
    """Handles of buckets through a queue; a bucket lives until the other side has said that it is done with it."""
    there, back = queues
    for entries, bucket in qq.bucketed(stream, BUCKET_BYTES):
        if bucket.is_cuda:
            torch.cuda.synchronize()  # the reader knows nothing of this process's stream
        there.put((entries, bucket))
        back.get()
    there.put(None)


def _got(queues: Any, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    def buckets() -> Iterator[Any]:
        there, back = queues
        while (item := there.get()) is not None:
            entries, bucket = item
            yield entries, bucket.to(device)  # over NVLink, where the sender's is on another GPU
            if device.type == "cuda":
                torch.cuda.synchronize()
            del item, bucket
            back.put(True)

    return qq.unbucketed(buckets())
