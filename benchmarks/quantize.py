"""The element-wise kernels on a CUDA GPU, as a fraction of a device copy of the same bytes in the same run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.registry import Report, Row, benchmark
from quads_qat import ops, reference

SHAPES = ((16384, 8192), (128, 1536, 2048), (128, 2048, 768), (2048, 4096))


@dataclass
class KernelReport(Report):
    """Rows with bytes moved and the time of a copy of as many bytes."""

    copies: dict[str, tuple[int, float]] = field(default_factory=dict)

    @property
    def machine(self) -> str:
        return torch.cuda.get_device_name()

    @property
    def header(self) -> tuple[str, ...]:
        return ("kernel", "us", "MB moved", "of a copy", "note")

    @property
    def legend(self) -> str:
        return "us: median of all rounds, launches included; of a copy: time of a device copy of the same bytes / time"

    def cells(self) -> list[tuple[str, ...]]:
        table = []
        for row in self.rows:
            if row.seconds is None:
                table.append((row.name, "-", "-", "-", row.note))
                continue
            nbytes, copy = self.copies[row.name]
            numbers = (f"{row.seconds * 1e6:.1f}", f"{nbytes / 1e6:.1f}", f"{copy / row.seconds:.3f}")
            table.append((row.name, *numbers, row.note))
        return table


@benchmark("quantize")
def quantize(rounds: int = 7, calls: int = 20) -> Report:
    """amax, fake_quantize, quantize and dequantize in bf16 with Recipe.ALIGNED, on a CUDA GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks: 'quantize' needs a CUDA GPU; 'quantize-cpu' does not")
    report = KernelReport("NVFP4 kernels, bf16, Recipe.ALIGNED", 1, "calls", ("torch", "triton"))
    for shape in SHAPES:
        x = (torch.randn(shape, device="cuda") * 0.02).bfloat16()
        dim = (1, 2) if x.ndim == 3 else None
        label = f"[{', '.join(map(str, shape))}]"
        for name, (call, expected, per_element) in _cases(x, dim).items():
            _measure(report, f"{name} {label}", call, expected, int(per_element * x.numel()), rounds, calls)
    return report


def _cases(
    x: Tensor, dim: tuple[int, ...] | None
) -> dict[str, tuple[Callable[[], object], Callable[[], object], float]]:
    """Kernel -> (our call, the reference's, bytes per element)."""
    amax = reference.amax(x, dim=dim)
    q = reference.quantize(x, tensor_amax=amax)
    return {
        "amax": (lambda: ops.amax(x, dim=dim), lambda: amax, 2),
        "fake_quantize, amax given": (
            lambda: ops.fake_quantize(x, tensor_amax=amax),
            lambda: reference.fake_quantize(x, tensor_amax=amax),
            4,
        ),
        "amax + fake_quantize": (
            lambda: ops.fake_quantize(x, tensor_amax=ops.amax(x, dim=dim)),
            lambda: reference.fake_quantize(x, tensor_amax=amax),
            6,
        ),
        "quantize, amax given": (lambda: ops.quantize(x, tensor_amax=amax), lambda: q, 2.5625),
        "dequantize": (lambda: ops.dequantize(q), lambda: reference.dequantize(q), 2.5625),
    }


def _measure(
    report: KernelReport,
    name: str,
    call: Callable[[], object],
    expected: Callable[[], object],
    nbytes: int,
    rounds: int,
    calls: int,
) -> None:
    if not _same(call(), expected()):
        report.rows.append(Row(name, None, note="bits differ from the reference: no time"))
        return
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times: dict[str, list[float]] = {"ours": [], "copy": []}
    for _ in range(rounds):  # turn by turn, so that a change of clocks meets both
        times["ours"].append(_seconds(call, calls))
        times["copy"].append(_seconds(lambda: target.copy_(source), calls))
    report.rows.append(Row(name, statistics.median(times["ours"])))
    report.copies[name] = nbytes, statistics.median(times["copy"])


def _seconds(call: Callable[[], object], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls / 1e3


def _same(actual: object, expected: object) -> bool:
    if isinstance(actual, ops.NVFP4Tensor) and isinstance(expected, ops.NVFP4Tensor):
        codes = torch.equal(actual.qdata, expected.qdata)
        return codes and torch.equal(actual.block_scale.view(torch.uint8), expected.block_scale.view(torch.uint8))
    assert isinstance(actual, Tensor)
    assert isinstance(expected, Tensor)
    return torch.equal(actual.view(torch.int16), expected.view(torch.int16))
