"""What the vLLM plugin's layers call, on a CUDA GPU, beside Humming's W4A16: what vLLM 0.33 itself runs on Hopper.

``residual.projection`` is the call of the plugin's linears, and with offsets of its experts (``integrations.vllm``);
vLLM need not be installed. Humming (``humming-kernels``, compiled by NVRTC, or by nvcc with ``HUMMING_COMPILER=nvcc``)
takes the same codes and scales, and leaves activations alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from benchmarks.cuda_timing import Call, Times, copies_of, in_turn
from benchmarks.matmul import CHOSEN, EXPERT_SHAPES, EXPERTS, SAMPLED, _groups, _packed
from benchmarks.registry import GpuReport, Report, Row, benchmark
from quads_qat import ops, reference
from quads_qat.config import ActivationFormat, ResidualConfig
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.residual import projection

SHAPES = ((8192, 8192), (2048, 4096))
TOKENS = (1, 8, 16, 64, 256, 1024, 8192)
EXPERT_TOKENS = (1, 8, 64, 512, 8192)
#: What the plugin is told: the residual that is compensated; None: weight-only.
POLICIES: dict[str, ResidualConfig | None] = {
    "compensated": ResidualConfig(fraction=0.5),
    "naive W4A4": ResidualConfig(fraction=0.0),
    "W4A16": None,
}
HUMMING = "Humming W4A16"
COLUMNS = (*POLICIES, HUMMING, "bf16")


@dataclass(frozen=True)
class EngineRow(Row):
    """``seconds`` is the device's time of the compensated call.

    Attributes:
        times: column -> its times; a column that is missing was not timed.
    """

    times: Mapping[str, Times] = field(default_factory=dict)


@dataclass
class EngineReport(GpuReport):
    """One row for each layer and number of tokens, one column for each way to compute it."""

    @property
    def header(self) -> tuple[str, ...]:
        return ("layer", *(f"{name} us" for name in COLUMNS), "note")

    @property
    def legend(self) -> str:
        return (
            "Medians of all rounds of the device alone, calls replayed as one CUDA graph over weights that no cache "
            "holds. compensated: half of the channels per token, the plugin's default; bf16: cuBLAS, grouped_mm"
        )

    def cells(self) -> list[tuple[str, ...]]:
        return [(row.name, *(_us(row, name) for name in COLUMNS), row.note) for row in self.rows]


def _us(row: Row, column: str) -> str:
    times = row.times.get(column) if isinstance(row, EngineRow) else None
    return "-" if times is None else f"{(times.device or times.called) * 1e6:.1f}"


@benchmark("engine")
def engine(rounds: int = 5, seed: int = 0, humming: bool = True) -> Report:
    """The vLLM plugin's layers, with and without the residual, on a CUDA GPU, beside Humming's W4A16."""
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks: 'engine' needs a CUDA GPU")
    return measured("cuda", rounds, seed, humming)


@torch.no_grad()
def measured(device: str, rounds: int, seed: int, humming: bool) -> EngineReport:
    """The report of :func:`engine`."""
    report = EngineReport(
        "The layers of the vLLM plugin, bf16 activations, Recipe.ALIGNED",
        unit_count=1,
        unit="calls",
        packages=("torch", "triton", "humming-kernels"),
        settings={"rounds": rounds, "seed": seed},
    )
    torch.manual_seed(seed)
    progress = Console(stderr=True)
    problem = "not installed" if find_spec("humming") is None else "" if humming else "left out"
    for n, k in SHAPES:
        for row in _linears(device, n, k, rounds, with_humming=not problem):
            progress.print(row.name, *(_us(row, name) for name in COLUMNS), row.note)
            report.rows.append(row)
        torch.cuda.empty_cache()
    for n, k in EXPERT_SHAPES:
        for row in _experts(device, n, k, rounds, with_humming=not problem):
            progress.print(row.name, *(_us(row, name) for name in COLUMNS), row.note)
            report.rows.append(row)
        torch.cuda.empty_cache()
    if problem:
        report.rows.append(Row("Humming", None, note=problem))
    return report


def applied(x: Tensor, w: NVFP4Tensor, residual: ResidualConfig | None, offs: Tensor | None = None) -> Tensor:
    """What the plugin calls in each forward: its parameters as vLLM holds them are put together anew."""
    w = NVFP4Tensor(w.qdata, w.block_scale, w.per_tensor_scale, w.recipe, w.stored_scale)
    return projection(x, w, None, None if residual is None else ActivationFormat(), residual, None, None, offs)


def humming_layer(w: NVFP4Tensor, rows: Sequence[int]) -> Callable[..., Tensor]:
    """Humming's layer with the same codes and scales, padded as vLLM pads, its kernels compiled.

    Args:
        w: [N, K], or [E, N, K]: then ``expert_layout``, int64 [E + 1], says where the rows of each expert begin and
            end, as vLLM passes it under expert parallelism.
        rows: the numbers of rows that it will be called with, ascending. Left to itself, Humming compiles for each of
            the 60 to 90 ranges of rows that it tells apart; for these numbers it picks the same kernels, and compiles a
            few.
    """
    from humming.kernel.humming import HummingKernel  # pyright: ignore[reportMissingImports]
    from humming.layer import HummingLayer  # pyright: ignore[reportMissingImports]
    from humming.tune import get_heuristics_config  # pyright: ignore[reportMissingImports]

    *experts, n, k = w.shape
    layer: Any = HummingLayer(
        shape_n=n,
        shape_k=k,
        weight_config={"quant_method": "modelopt", "quant_algo": "nvfp4"},
        pad_n_to_multiple=256,
        pad_k_to_multiple=128,
        num_experts=experts[0] if experts else None,
        torch_dtype=torch.bfloat16,
    ).to(w.device)
    scales = {"weight_scale": w.block_scale, "weight_scale_2": w.per_tensor_scale.reshape(-1)}
    layer.load_from_tensors({"weight": w.qdata, **scales})
    layer.transform()
    kind = "grouped_contiguous" if experts else "dense"
    chosen = [
        (low, high, get_heuristics_config(layer.humming_config, shape_m=high, gemm_type=kind))
        for low, high in pairwise((0, *rows))
    ]
    configs = {"compute_config": json.dumps({"gemm_type": kind}), "tuning_config": json.dumps(chosen)}
    HummingKernel.prepare_kernels(layer.humming_config.to_str(), **configs)
    return partial(layer, **configs)


def _humming_layers(
    weights: Sequence[NVFP4Tensor], rows: Sequence[int], wanted: bool
) -> tuple[list[Callable[..., Tensor]], list[str]]:
    """:func:`humming_layer` of each weight, or none and why."""
    try:
        return [humming_layer(w, rows) for w in weights] if wanted else [], []
    except Exception as error:  # it compiles at run time: any of many things may be missing
        return [], [_failure(error)]


def _failure(error: Exception) -> str:
    return f"{HUMMING}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _humming_problem(is_outside: Callable[[], bool]) -> str:
    """Why a call of Humming gets no time, if it does not."""
    try:
        return f"{HUMMING} is outside of the bound: no time" if is_outside() else ""
    except Exception as error:
        return _failure(error)


def _linears(device: str, n: int, k: int, rounds: int, *, with_humming: bool) -> Iterator[Row]:
    weights = [_packed(device, n, k) for _ in range(copies_of(n * k * 9 // 16))]
    plain = [torch.randn(n, k, device=device, dtype=torch.bfloat16) for _ in range(copies_of(2 * n * k))]
    layers, failures = _humming_layers(weights, TOKENS, with_humming)
    for m in TOKENS:
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        notes = list(failures)
        calls: dict[str, Sequence[Call]] = {"bf16": [partial(F.linear, x, w) for w in plain]}
        for name, residual in POLICIES.items():
            y, terms = applied(x, weights[0], residual), terms_of(x, residual)
            if outside(y, terms, weights[0], partial_sums=False):
                notes.append(f"{name} is outside of the bound: no time")
            else:
                calls[name] = [partial(applied, x, w, residual) for w in weights]
        if layers:
            problem = _humming_problem(lambda x=x: outside(layers[0](x), [x], weights[0], partial_sums=True))
            if problem:
                notes.append(problem)
            else:
                calls[HUMMING] = [partial(layer, x) for layer in layers]
        yield _row(f"linear [{n}, {k}] M={m}", calls, rounds, notes)


def _experts(device: str, n: int, k: int, rounds: int, *, with_humming: bool) -> Iterator[Row]:
    weights = [_packed(device, EXPERTS, n, k) for _ in range(2)]
    plain = [torch.randn(EXPERTS, n, k, device=device, dtype=torch.bfloat16) for _ in range(2)]
    layers, failures = _humming_layers(weights, [tokens * CHOSEN for tokens in EXPERT_TOKENS], with_humming)
    for tokens in EXPERT_TOKENS:
        x = torch.randn(tokens * CHOSEN, k, device=device, dtype=torch.bfloat16)
        groups = [_groups(tokens).to(device) for _ in range(8)]
        notes = list(failures)
        calls: dict[str, Sequence[Call]] = {
            "bf16": [partial(F.grouped_mm, x, plain[i % 2].mT, offs=offs) for i, offs in enumerate(groups)]
        }
        for name, residual in POLICIES.items():
            y = applied(x, weights[0], residual, groups[0])
            if experts_outside(y, x, residual, weights[0], groups[0], partial_sums=False):
                notes.append(f"{name} is outside of the bound: no time")
            else:
                calls[name] = [partial(applied, x, weights[i % 2], residual, offs) for i, offs in enumerate(groups)]
        if layers:
            layouts = [F.pad(offs, (1, 0)).long() for offs in groups]
            problem = _humming_problem(
                lambda x=x, groups=groups, layouts=layouts: experts_outside(
                    layers[0](x, expert_layout=layouts[0]), x, None, weights[0], groups[0], partial_sums=True
                )
            )
            if problem:
                notes.append(problem)
            else:
                calls[HUMMING] = [partial(layers[i % 2], x, expert_layout=ends) for i, ends in enumerate(layouts)]
        yield _row(f"experts [{EXPERTS}, {n}, {k}] tokens={tokens}", calls, rounds, notes)


def _row(name: str, calls: Mapping[str, Sequence[Call]], rounds: int, notes: list[str]) -> EngineRow:
    try:
        times = in_turn(calls, rounds)
    except Exception as error:
        if HUMMING not in calls:
            raise
        notes.append(_failure(error))
        times = in_turn({column: sequence for column, sequence in calls.items() if column != HUMMING}, rounds)
    ours = times.get("compensated")
    return EngineRow(name, None if ours is None else ours.device or ours.called, note="; ".join(notes), times=times)


def terms_of(x: Tensor, residual: ResidualConfig | None) -> list[Tensor]:
    """What is multiplied by the weight: x itself, or Q(x) and the quantized residual, by the reference."""
    if residual is None:
        return [x]
    terms, _ = ops.quantize_activation(x[:SAMPLED], residual=residual, backend="reference")
    return list(terms)


def outside(y: Tensor, terms: list[Tensor], w: NVFP4Tensor, *, partial_sums: bool) -> bool:
    """Whether sampled outputs are further from exact sums than rounding can take them.

    K + 2 roundings of an fp32 sum (2**-22 each, tensor cores truncate) and one to bf16 (2**-8). ``partial_sums``: what
    thread blocks add up may be rounded to bf16 as well before it is joined: 2**-8 of the sum of magnitudes.
    """
    some = torch.randperm(w.shape[0], device=y.device)[:SAMPLED]
    sample = NVFP4Tensor(w.qdata[some], w.block_scale[some], w.per_tensor_scale, w.recipe, w.stored_scale)
    decoded = reference.dequantize(sample, torch.float32).double()
    rows = [term[:SAMPLED].double() for term in terms]
    exact = torch.stack([r @ decoded.t() for r in rows]).sum(0)
    size = torch.stack([r.abs() @ decoded.abs().t() for r in rows]).sum(0)
    error = (y[:SAMPLED, some].double() - exact).abs()
    summing = (len(terms) * w.shape[1] + 2) * 2.0**-22 + (2.0**-8 if partial_sums else 0.0)
    bound = exact.abs() * 2.0**-8 + size * summing
    return not bool((error <= bound * (1 + 2.0**-8)).all())


def experts_outside(
    y: Tensor, x: Tensor, residual: ResidualConfig | None, w: NVFP4Tensor, offs: Tensor, *, partial_sums: bool
) -> bool:
    """:func:`outside` for the first eight experts that have rows: those of ``offs``, the ends of their rows."""
    groups = [(expert, slice(*ends)) for expert, ends in enumerate(pairwise((0, *offs.tolist()))) if ends[0] < ends[1]]
    return any(
        outside(y[rows], terms_of(x[rows], residual), w.expert(expert), partial_sums=partial_sums)
        for expert, rows in groups[:8]
    )
