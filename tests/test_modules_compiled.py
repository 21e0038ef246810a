"""Contract under test: ``torch.compile(fullgraph=True)`` gives the eager bits, forward and backward, and compiles
nothing after the second step: with batches of any size, under autocast, checkpointing, schedules and ``accumulate``.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from bits import assert_same_bits
from small_modules import fill
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from twins import experts_and_inputs

import quads_qat as qq

KINDS = pytest.mark.parametrize("kind", ["dense", "moe"])
STEPS = (5, 8, 12, 16)  # rows of each step's batch
Run = Callable[[Tensor], Tensor]


class Dense(nn.Module):
    """A norm and a gated MLP whose gate and up share a scale."""

    def __init__(self, hidden: int = 64, intermediate: int = 96) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.gate_proj = nn.Linear(hidden, intermediate)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down_proj(self.gate_proj(h).relu() * self.up_proj(h))


class Moe(nn.Module):
    """A norm and fused experts under the ``grouped_mm`` dispatch, with a fixed routing."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.experts = experts_and_inputs("qwen3_moe", "grouped_mm", dtype)[0]

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        scores = h[:, :4].float()
        weights, index = scores.softmax(-1).topk(2, dim=-1)
        return x + self.experts(h, index, weights.to(h.dtype))


def block(kind: str, dtype: torch.dtype, **options: object) -> nn.Module:
    model = fill(Dense() if kind == "dense" else Moe(dtype)).to(dtype)
    return qq.convert(model, "w4a16", **options)


def batch(rows: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to(dtype)
    return x.requires_grad_()


def step_of(model: nn.Module, run: Run, rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of one batch."""
    x = batch(rows, dtype)
    out = run(x)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), [x, *model.parameters()])]


def assert_same_step(model: nn.Module, eager: Run, compiled: Run, rows: int, dtype: torch.dtype) -> None:
    expected, found = step_of(model, eager, rows, dtype), step_of(model, compiled, rows, dtype)
    for i, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        assert_same_bits(got, wanted, f"tensor {i} of a batch of {rows}")


def move(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.sign(), alpha=0.01)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


@KINDS
def test_checkpointed_batches_of_any_size_under_autocast_are_two_graphs(kind: str):
    model = block(kind, torch.float32)

    def run(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return checkpoint(model, x, use_reentrant=False)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for rows in STEPS:
        assert_same_step(model, run, compiled, rows, torch.float32)
        move(model)
    assert graphs() == 2  # of the first size, and of any


@KINDS
def test_a_schedule_costs_one_more_graph_at_its_start(kind: str):
    model = block(kind, torch.bfloat16, schedule=qq.Schedule(start_step=1, weight_scale="ema", decay=0.5))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in STEPS:
        assert_same_step(model, model, compiled, rows, torch.bfloat16)
        move(model)
        assert qq.step(model).scales_moved > 0
    assert graphs() == 2  # before the start, and since


@KINDS
def test_accumulate_has_a_graph_that_makes_codes_and_one_that_decodes_them(kind: str):
    model = block(kind, torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for _ in range(3):
        expected = [step_of(model, model, rows, torch.bfloat16) for rows in STEPS[:2]]
        with qq.accumulate(model):
            found = [step_of(model, compiled, rows, torch.bfloat16) for rows in STEPS[:2]]
        for got, wanted in zip(found, expected, strict=True):
            for pair in zip(got, wanted, strict=True):
                assert_same_bits(*pair)
        move(model)
    assert graphs() == 2


@KINDS
@pytest.mark.parametrize("without_grad", [torch.no_grad, torch.inference_mode])
def test_an_observation_sees_what_it_sees_in_eager_mode(kind: str, without_grad: Callable[[], AbstractContextManager]):
    """One graph more for the first batch that is observed, and one for the others; then training goes on as before."""
    model = block(kind, torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    assert_same_step(model, model, compiled, STEPS[0], torch.bfloat16)
    seen = []
    for run in (model, compiled):
        qq.load_quant_state_dict(model, {})
        with without_grad(), qq.observe_activations(model):
            outs = [run(batch(rows, torch.bfloat16)) for rows in STEPS]
        seen.append(qq.quant_state_dict(model) | {str(rows): out for rows, out in zip(STEPS, outs, strict=True)})
    assert seen[0].keys() == seen[1].keys()
    assert len(seen[0]) > len(STEPS)
    for name, wanted in seen[0].items():
        assert_same_bits(seen[1][name], wanted, name)
        assert name.isdigit() or not seen[1][name].is_inference()
    assert_same_step(model, model, compiled, STEPS[1], torch.bfloat16)
    assert graphs() == 3


def test_a_compiled_observation_under_inference_mode_serves_training():
    model = qq.convert(fill(nn.Sequential(nn.Linear(64, 32))), "w4a4", activation_scale="static")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.inference_mode(), qq.observe_activations(model):
        compiled(batch(4, torch.float32))
    model(batch(4, torch.float32)).sum().backward()
    assert model[0].weight.grad is not None
