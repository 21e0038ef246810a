"""Contract under test, on a GPU: rollouts, weight sync and files there are what they are on a CPU.

Bits of weights are equal everywhere. Outputs differ by the order of fp32 sums only, see ``bound``.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from tiny_models import tiny_model
from torch import Tensor, nn

import quads_qat as qq
from quads_qat.demo import DATA
from quads_qat.residual import ResidualCompensatedExperts

pytestmark = pytest.mark.gpu

CONFIGS = {
    "w4a16": {"weights_only": True},
    "w4a4": {"residual": qq.ResidualConfig(fraction=0.0)},
    "token": {"residual": qq.ResidualConfig(scope="token")},
    "block": {"residual": qq.ResidualConfig(scope="block")},
    "batch": {"residual": qq.ResidualConfig(scope="batch")},
    "before dispatch": {"residual": qq.ResidualConfig(scope="batch", expert_mask="before_dispatch")},
    "per tensor": {"residual": qq.ResidualConfig(scope="batch"), "activation_scale": "per_tensor"},
}

FP32_EXPERTS = ("w4a16", torch.float32)


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU: the interpreter has no graphs, streams or devices")


def bound(wanted: Tensor) -> float:
    """Two bf16 roundings (2**-8 each) of the largest output, for each of the two GEMMs between input and output."""
    return 4 * 2.0**-8 * float(wanted.abs().max())


def rollouts(arch: str, options: dict) -> tuple[nn.Module, nn.Module]:
    on_cpu = qq.convert(tiny_model(arch).bfloat16(), "w4a4_residual", **options)
    return on_cpu, copy.deepcopy(on_cpu).cuda()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_experts_on_a_gpu_give_what_they_give_on_a_cpu(arch: str, name: str):
    on_cpu, on_gpu = rollouts(arch, CONFIGS[name])
    mine, theirs = (
        next(m for m in model.modules() if isinstance(m, ResidualCompensatedExperts)) for model in (on_cpu, on_gpu)
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 64, generator=generator).bfloat16()
    index = torch.randint(0, 3, (9, 2), generator=generator)  # the last expert has no rows
    weights = torch.rand(9, 2, generator=generator).bfloat16()
    wanted = mine(x, index, weights)
    got = theirs(x.cuda(), index.cuda(), weights.cuda()).cpu()
    assert (got.float() - wanted.float()).abs().max() <= bound(wanted)


@pytest.mark.parametrize(
    ("name", "dtype"),  # weight-only experts of fp32 rows run one by one
    [(name, dtype) for name in CONFIGS for dtype in (torch.bfloat16, torch.float32) if (name, dtype) != FP32_EXPERTS],
)
def test_a_forward_reads_no_value_from_the_gpu(name: str, dtype: torch.dtype):
    _, model = rollouts("qwen3_moe", CONFIGS[name])
    experts = next(m for m in model.modules() if isinstance(m, ResidualCompensatedExperts))
    x = torch.randn(4, 64, device="cuda").to(dtype)
    index, weights = torch.tensor([[0, 1]] * 4, device="cuda"), torch.full((4, 2), 0.5, device="cuda").to(dtype)
    experts(x, index, weights)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts(x, index, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["w4a16", "token", "block"])
def test_a_captured_graph_computes_with_the_weights_that_an_update_brings(name: str):
    _, model = rollouts("llama", CONFIGS[name])
    layer = model.model.layers[0].mlp
    x = torch.randn(4, 64, device="cuda").bfloat16()
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        addresses = {key: t.data_ptr() for key, t in model.state_dict().items()}
        for seed in range(3):
            torch.manual_seed(seed)
            trainer = tiny_model("llama").bfloat16()
            for p in trainer.parameters():
                p.copy_(torch.randn_like(p) * 0.1)
            qq.update_weights(model, trainer.state_dict())
            out.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            fresh = qq.convert(trainer, "w4a4_residual", **CONFIGS[name]).cuda()
            assert_same_bits(out, fresh.model.layers[0].mlp(x))
    assert {key: t.data_ptr() for key, t in model.state_dict().items()} == addresses


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_trainer_on_a_gpu_exports_the_bytes_of_one_on_a_cpu(dialect: str, tmp_path: Path):
    trainer = qq.convert(tiny_model("qwen3_moe").bfloat16(), "w4a16")
    wanted = dict(qq.export_weights(trainer, dialect))
    trainer.cuda()
    got = dict(qq.export_weights(trainer, dialect))
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_bits(got[name].cpu(), tensor, name)
    qq.export_checkpoint(trainer, tmp_path / "out", dialect=dialect)
    assert qq.verify(trainer, tmp_path / "out").ok


def test_quantize_on_a_gpu_writes_the_files_of_a_cpu(tmp_path: Path):
    for device in ("cpu", "cuda"):
        qq.quantize_checkpoint(DATA, tmp_path / device, device=device)
    for file in sorted((tmp_path / "cpu").iterdir()):
        assert file.read_bytes() == (tmp_path / "cuda" / file.name).read_bytes(), file.name


@pytest.mark.parametrize("schedule", [None, qq.Schedule(weight_scale="ema")])
def test_steps_and_kept_codes_on_a_gpu(schedule: qq.Schedule | None):
    model = qq.convert(tiny_model("qwen3_moe").bfloat16(), "w4a16", schedule=schedule).cuda()
    model.set_experts_implementation("grouped_mm")
    ids = torch.arange(3, 15, device="cuda")[None]
    model(ids).logits.float().square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with qq.accumulate(model, debug=True):
        model(ids).logits.float().square().sum().backward()
    for p, grad in zip(model.parameters(), expected, strict=True):
        assert_same_bits(p.grad, grad)
    qq.step(model, track_codes=True)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.01)
    report = qq.step(model, track_codes=True)
    assert report.changed is not None
    assert 0 < report.changed <= 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_trainer_and_a_rollout_on_the_second_gpu_while_the_first_is_current():
    ids = torch.arange(3, 27).view(2, 12)
    on_cpu: Any = qq.convert(tiny_model("qwen3_moe").bfloat16(), "w4a16")
    trainer: Any = copy.deepcopy(on_cpu).to("cuda:1")
    rollout: Any = qq.convert(tiny_model("qwen3_moe", seed=1).bfloat16(), "w4a4_residual").to("cuda:1")
    assert torch.cuda.current_device() == 0
    qq.update_weights(rollout, qq.export_weights(trainer, "modelopt"))
    expected = qq.convert(on_cpu, "w4a4_residual").state_dict()
    for name, tensor in rollout.state_dict().items():
        assert_same_bits(tensor.cpu(), expected[name], name)
    with torch.cuda.device(1):
        wanted = [model(ids.to("cuda:1")).logits for model in (trainer, rollout)]
    for model, logits in zip((trainer, rollout), wanted, strict=True):
        assert_same_bits(model(ids.to("cuda:1")).logits, logits)
