"""GEMMs of packed weights on a CUDA GPU, against cuBLAS in bf16 in the same run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from benchmarks.cuda_timing import Call, copies_of, in_turn
from benchmarks.registry import GpuReport, Report, Row, benchmark
from quads_qat import ops, reference
from quads_qat.config import Recipe, ResidualConfig
from quads_qat.qtensor import NVFP4Tensor

SHAPES = ((28672, 8192), (8192, 8192), (2048, 4096))
TOKENS = (1, 8, 16, 64, 256, 1024, 8192)
QUANTIZED = (8192, 8192)
QUANTIZED_TOKENS = (1, 4, 8, 16, 64, 1024, 8192)
#: gate_up_proj and down_proj of Qwen3-30B-A3B
EXPERTS, CHOSEN, EXPERT_SHAPES = 128, 8, ((1536, 2048), (2048, 768))
EXPERT_TOKENS = (1, 8, 64, 512, 8192)
#: Outputs compared with exact sums
SAMPLED = 64


@dataclass(frozen=True)
class GemmRow(Row):
    """``seconds`` is the device's time alone.

    Attributes:
        bf16: seconds of the bf16 product of the same shape.
        called: seconds of our call from Python.
    """

    bf16: float = 0.0
    called: float = 0.0


@dataclass
class GemmReport(GpuReport):
    """Our GEMMs and the bf16 ones that they replace."""

    @property
    def header(self) -> tuple[str, ...]:
        return ("product", "us", "bf16 us", "speed-up", "called us", "note")

    @property
    def legend(self) -> str:
        return (
            "Medians of all rounds. us: the device alone, calls replayed as one CUDA graph over weights that no cache "
            "holds; bf16 us: cuBLAS, for experts the faster of grouped_mm and bmm, likewise; speed-up: bf16 us / us; "
            "called us: as called from Python, the host's time where that is longer. Inputs are in ordinary order and "
            "a reordering that a kernel wants is part of its time"
        )

    def cells(self) -> list[tuple[str, ...]]:
        return [_cells(row) for row in self.rows]


def _cells(row: Row) -> tuple[str, ...]:
    if not isinstance(row, GemmRow) or row.seconds is None:
        return (row.name, "-", "-", "-", "-", row.note)
    numbers = row.seconds * 1e6, row.bf16 * 1e6, row.bf16 / row.seconds, row.called * 1e6
    return (row.name, *(f"{x:.{d}f}" for x, d in zip(numbers, (1, 1, 2, 1), strict=True)), row.note)


@benchmark("matmul")
def matmul(rounds: int = 5, seed: int = 0) -> Report:
    """W4A16, W4A4 and compensated GEMMs, dense and of experts, on a CUDA GPU, against cuBLAS in bf16."""
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks: 'matmul' needs a CUDA GPU")
    return measured("cuda", rounds, seed)


@torch.no_grad()
def measured(device: str, rounds: int, seed: int) -> GemmReport:
    """The report of :func:`matmul`."""
    report = GemmReport(
        "GEMMs of packed NVFP4 weights, bf16 inputs, Recipe.ALIGNED",
        unit_count=1,
        unit="calls",
        packages=("torch", "triton", "humming-kernels"),
        settings={"rounds": rounds, "seed": seed},
    )
    torch.manual_seed(seed)
    progress = Console(stderr=True)
    for n, k in SHAPES:
        progress.print(f"[{n}, {k}]")
        report.rows += _dense(device, n, k, rounds)
        torch.cuda.empty_cache()
    for n, k in EXPERT_SHAPES:
        progress.print(f"[{EXPERTS}, {n}, {k}]")
        report.rows += _experts(device, n, k, rounds)
        torch.cuda.empty_cache()
    if find_spec("humming") is None:
        report.rows.append(Row("Humming", None, note="not installed"))
    return report


def _packed(device: str, *shape: int) -> NVFP4Tensor:
    """Random codes and block scales, bit patterns straight from the generator."""
    *lead, k = shape
    qdata = torch.randint(0, 256, (*lead, k // 2), dtype=torch.uint8, device=device)
    scales = torch.randint(0x28, 0x48, (*lead, k // 16), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    p = torch.full(shape[:1] if len(shape) == 3 else (), 2.0**-6, device=device)
    return NVFP4Tensor(qdata, scales, p, Recipe.ALIGNED, p)


def _dense(device: str, n: int, k: int, rounds: int) -> Iterator[Row]:
    weights = [_packed(device, n, k) for _ in range(copies_of(n * k * 9 // 16))]
    plain = [torch.randn(n, k, device=device, dtype=torch.bfloat16) for _ in range(copies_of(2 * n * k))]
    for m in sorted({*TOKENS, *QUANTIZED_TOKENS}):
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        for name, call in _kinds(x, (n, k)):
            problem = _wrong(x, weights[0], call) if name == "W4A16" else ""
            if problem:
                yield Row(f"{name} [{n}, {k}] M={m}", None, note=problem)
                continue
            calls: dict[str, Sequence[Call]] = {
                "ours": [partial(call, w) for w in weights],
                "bf16": [partial(F.linear, x, w) for w in plain],
            }
            yield _row(f"{name} [{n}, {k}] M={m}", calls, rounds)


def _kinds(x: Tensor, shape: tuple[int, int]) -> Iterator[tuple[str, Callable[[NVFP4Tensor], Tensor]]]:
    """Names and calls of what is measured for these rows and this weight."""
    if len(x) in TOKENS:
        yield "W4A16", lambda w: ops.linear_w4a16(x, w)
    if shape == QUANTIZED and len(x) in QUANTIZED_TOKENS:
        yield "W4A4", lambda w: ops.linear_w4a4(x, w)
        static = torch.arange(x.shape[-1], device=x.device) % 10 == 0
        for scope, mask in (("static", static), ("block", None), ("token", None)):
            residual = ResidualConfig(fraction=0.1 if scope != "block" else 0.125, scope=scope)  # pyright: ignore[reportArgumentType]
            yield f"compensated, {scope}", partial(_compensated, x, residual, mask)


def _compensated(x: Tensor, residual: ResidualConfig, mask: Tensor | None, w: NVFP4Tensor) -> Tensor:
    return ops.residual_linear(x, w, residual, mask=mask)


def _wrong(x: Tensor, w: NVFP4Tensor, call: Callable[[NVFP4Tensor], Tensor]) -> str:
    """What is wrong with a product: bits that change, or an output beyond the bound of a correctly rounded sum."""
    y = call(w)
    if not torch.equal(y.view(torch.int16), call(w).view(torch.int16)):
        return "bits differ from call to call: no time"
    some = torch.randperm(w.shape[0], device=x.device)[:SAMPLED]
    sample = NVFP4Tensor(w.qdata[some], w.block_scale[some], w.per_tensor_scale, w.recipe, w.stored_scale)
    decoded = reference.dequantize(sample, torch.float32).double()
    rows = x.double()[:SAMPLED]
    exact, size = rows @ decoded.t(), rows.abs() @ decoded.abs().t()
    error = (y[:SAMPLED, some].double() - exact).abs()
    bound = exact.abs() * 2.0**-8 + size * (x.shape[-1] + 2) * 2.0**-22
    return "" if bool((error <= bound * (1 + 2.0**-8)).all()) else "outside of the bound: no time"


def _experts(device: str, n: int, k: int, rounds: int) -> Iterator[Row]:
    weights = [_packed(device, EXPERTS, n, k) for _ in range(2)]
    plain = [torch.randn(EXPERTS, n, k, device=device, dtype=torch.bfloat16) for _ in range(2)]
    for tokens in EXPERT_TOKENS:
        x = torch.randn(tokens * CHOSEN, k, device=device, dtype=torch.bfloat16)
        groups = [_groups(tokens).to(device) for _ in range(8)]
        calls: dict[str, Sequence[Call]] = {
            "ours": [partial(ops.grouped_linear_w4a16, x, weights[i % 2], offs) for i, offs in enumerate(groups)],
            "grouped_mm": [partial(F.grouped_mm, x, plain[i % 2].mT, offs=offs) for i, offs in enumerate(groups)],
        }
        if tokens == 1:  # one row for each of eight experts, which bmm reads where they are
            few = [w[i : i + CHOSEN].mT for w in plain for i in range(0, EXPERTS, 2 * CHOSEN)]
            calls["bmm"] = [partial(torch.bmm, x[:, None], w) for w in few]
        if tokens == 8:  # as if the experts that have rows, about 52, lay side by side with two rows each
            used, most = sum(int(offs.unique().count_nonzero()) for offs in groups) // len(groups), 2
            rows = torch.randn(used, most, k, device=device, dtype=torch.bfloat16)
            calls["bmm"] = [partial(torch.bmm, rows, w[i : i + used].mT) for w in plain for i in (0, EXPERTS - used)]
        yield _row(f"W4A16 experts [{EXPERTS}, {n}, {k}] tokens={tokens}", calls, rounds)


def _groups(tokens: int) -> Tensor:
    """Ends of the experts' rows, each token choosing CHOSEN of EXPERTS."""
    chosen = torch.stack([torch.randperm(EXPERTS)[:CHOSEN] for _ in range(tokens)])
    return torch.bincount(chosen.flatten(), minlength=EXPERTS).cumsum(0).int()


def _row(name: str, calls: dict[str, Sequence[Call]], rounds: int) -> GemmRow:
    times = in_turn(calls, rounds)
    bf16 = min(t.device for peer, t in times.items() if peer != "ours" and t.device is not None)
    ours = times["ours"]
    note = "" if ours.device is not None else "waits for the GPU: called from Python"
    return GemmRow(name, ours.device or ours.called, note=note, bf16=bf16, called=ours.called)
