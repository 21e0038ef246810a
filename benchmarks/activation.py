"""Activations on their way into a W4A4 GEMM, on a CUDA GPU: one and two quantizations, every scope of the residual."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from rich.console import Console
from torch import Tensor

from benchmarks.cuda_timing import Call, Times, copies_of, in_turn
from benchmarks.quantize import KernelReport, KernelRow, _cells, _copies
from benchmarks.registry import Report, Row, benchmark
from quads_qat import ops
from quads_qat.config import ResidualConfig

ROWS = (1, 4, 64, 1024, 8192)
COLUMNS = (4096, 8192)
CONFIGS: dict[str, ResidualConfig | None] = {
    "Q(x)": None,
    "all": ResidualConfig(fraction=1.0),
    "static 50 %": ResidualConfig(fraction=0.5, scope="static"),  # pyright: ignore[reportArgumentType]
    "block 50 %": ResidualConfig(fraction=0.5, scope="block"),  # pyright: ignore[reportArgumentType]
    "token 50 %": ResidualConfig(fraction=0.5),
    "token 10 %": ResidualConfig(fraction=0.1),
    "token 50 %, whole blocks": ResidualConfig(fraction=0.5, granularity=16),
    "batch 50 %": ResidualConfig(fraction=0.5, scope="batch"),  # pyright: ignore[reportArgumentType]
}


@benchmark("activation")
def activation(rounds: int = 5, seed: int = 0) -> Report:
    """Quantize bf16 activations and their selected residual (Recipe.ALIGNED, a scale per token) on a CUDA GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks: 'activation' needs a CUDA GPU")
    return measured("cuda", ROWS, COLUMNS, rounds, seed)


@torch.no_grad()
def measured(device: str, rows: tuple[int, ...], columns: tuple[int, ...], rounds: int, seed: int = 0) -> KernelReport:
    """The report of :func:`activation`."""
    report = KernelReport(
        "Activations and their residual, bf16, Recipe.ALIGNED, a scale per token",
        unit_count=1,
        unit="calls",
        packages=("torch", "triton"),
        settings={"rounds": rounds, "seed": seed},
    )
    progress = Console(stderr=True)
    generator = torch.Generator(device).manual_seed(seed)
    for k in columns:
        for m in rows:
            x = torch.randn(m, k, device=device, generator=generator).bfloat16()
            mask = torch.rand(k, device=device, generator=generator) < 0.5
            for name, config in CONFIGS.items():
                for row in _rows(f"{name} [{m}, {k}]", x, config, mask, rounds):
                    progress.print(" | ".join(_cells(row, None)), highlight=False, soft_wrap=True)
                    report.rows.append(row)
    return report


def _rows(name: str, x: Tensor, config: ResidualConfig | None, mask: Tensor, rounds: int) -> Iterator[Row]:
    """Check the bits, then time the kernels and a copy of the same bytes against each other."""
    run = partial(ops.quantize_activation, residual=config, mask=mask)
    (terms, _), (wanted, _) = run(x), run(x, backend="reference")
    if not torch.equal(terms.view(torch.int16), wanted.view(torch.int16)):
        yield Row(name, None, note="bits differ from the reference: no time")
        return
    moved = x.nbytes + terms.nbytes
    del terms, wanted
    copies = [x, *(x.clone() for _ in range(1, copies_of(x.nbytes)))]
    calls: dict[str, list[Call]] = {name: [partial(run, copy) for copy in copies], "copy": _copies(moved, x.device)}
    times = in_turn(calls, rounds, graphs=x.is_cuda)
    copy = times.pop("copy", Times(None, 0.0)).device
    yield KernelRow(name, times[name].device, called=times[name].called, copy=copy, moved=moved)
