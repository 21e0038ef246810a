"""A weight sync on a CPU: from a trainer's BF16 weights to a rollout's packed ones, seconds per GB, bits first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

import quads_qat as qq
from benchmarks.registry import Report, Row, benchmark, best_times

BUCKET_BYTES = 64 << 20


def qwen3_moe(layers: int, experts: int, hidden: int, seed: int) -> nn.Module:
    """A Qwen3-MoE with Qwen3-30B-A3B's proportions and random weights."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=min(8, experts),
        hidden_size=hidden,
        moe_intermediate_size=hidden * 3 // 8,
        num_attention_heads=max(1, hidden // 64),
        num_key_value_heads=max(1, hidden // 512),
        head_dim=128,  # pyright: ignore[reportCallIssue]  the config does take it
        vocab_size=8192,
    )
    torch.manual_seed(seed)
    return transformers.Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def differing_bytes(rollout: nn.Module, expected: dict[str, Tensor]) -> int:
    """How many bytes of a synced rollout are not those of a fresh one."""
    found = rollout.state_dict()
    pairs = ((found[name], tensor) for name, tensor in expected.items())
    return sum(int((a.reshape(-1).view(torch.uint8) != b.reshape(-1).view(torch.uint8)).sum()) for a, b in pairs)


@benchmark("weight-sync")
@torch.no_grad()
def weight_sync(layers: int = 2, experts: int = 16, hidden: int = 2048, rounds: int = 3, seed: int = 0) -> Report:
    """Export a trainer's weights and put them into a rollout: packed, in buckets, or as masters; s/GB of BF16."""
    trainer = qq.convert(qwen3_moe(layers, experts, hidden, seed), "w4a16")
    rollout = qq.convert(qwen3_moe(layers, experts, hidden, seed + 1), "w4a4_residual")
    weights = {name: parameter.detach() for name, parameter in trainer.named_parameters()}
    gigabytes = sum(weight.nbytes for weight in weights.values()) / 1e9
    report = Report(
        title=f"Sync {gigabytes:.2f} GB of BF16 weights on a CPU (Qwen3-MoE, {layers} layers, {experts} experts)",
        unit_count=sum(weight.nbytes for weight in weights.values()),
        unit="bytes of BF16 weights",
        packages=("torch", "transformers"),
        settings={"layers": layers, "experts": experts, "hidden": hidden, "rounds": rounds, "seed": seed},
    )

    def exhaust(dialect: str) -> None:
        for _ in qq.export_weights(trainer, dialect):
            pass

    def in_buckets() -> None:
        qq.update_weights(rollout, qq.unbucketed(qq.bucketed(qq.export_weights(trainer, "modelopt"), BUCKET_BYTES)))

    syncs: dict[str, Callable[[], object]] = {
        f"export + update_weights, {dialect}": partial(_sync, trainer, rollout, dialect)
        for dialect in ("modelopt", "compressed-tensors")
    }
    syncs["export + buckets + update_weights, modelopt"] = in_buckets
    syncs["update_weights from BF16 masters"] = lambda: qq.update_weights(rollout, trainer.state_dict())
    expected = qq.convert(copy.deepcopy(trainer), "w4a4_residual").state_dict()
    other = copy.deepcopy(rollout.state_dict())
    for name, call in list(syncs.items()):
        rollout.load_state_dict(other)
        call()
        if wrong := differing_bytes(rollout, expected):
            report.rows.append(Row(name, None, note=f"not timed: {wrong} bytes differ from a fresh conversion"))
            del syncs[name]
    del expected, other
    packed = [(name, tensor.clone()) for name, tensor in qq.export_weights(trainer, "modelopt")]
    calls: dict[str, Callable[[], object]] = {
        "copy of the BF16 weights": lambda: [weight.clone() for weight in weights.values()],
        "export_weights, modelopt": partial(exhaust, "modelopt"),
        "export_weights, compressed-tensors": partial(exhaust, "compressed-tensors"),
        "update_weights, modelopt": lambda: qq.update_weights(rollout, packed),
        **syncs,
    }
    times = best_times(calls, rounds)
    for name, seconds in times.items():
        report.rows.append(Row(name, seconds, note=f"{seconds / gigabytes:.2f} s/GB"))
    return report


def _sync(trainer: nn.Module, rollout: nn.Module, dialect: str) -> None:
    qq.update_weights(rollout, qq.export_weights(trainer, dialect))
