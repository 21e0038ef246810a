"""What W4A16 QAT costs a trainer on one GPU: step time and peak memory of a dense MLP and of MoE layers, BF16 = 1."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import quads_qat as qq
from benchmarks.registry import GpuReport, Report, Row, benchmark

MICRO_BATCHES = 4
STEPS = 4
"""Steps of a round: only its end is waited for, as a training loop waits where it logs."""


@dataclass
class StepReport(GpuReport):
    """Rows with the time of a step, its ratio to BF16, and the peak of memory beyond what the model holds."""

    bf16: dict[str, tuple[float, int]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)

    @property
    def header(self) -> tuple[str, ...]:
        return ("step", "ms", "of BF16's time", "peak MB", "of BF16's peak", "note")

    @property
    def legend(self) -> str:
        return (
            f"A step is forward, backward and fused AdamW; median of rounds of {STEPS}, as called from Python. "
            "peak MB: the most memory that was allocated during a step, weights, gradients and optimizer state "
            "included. One CUDA graph: the whole step is replayed, which leaves Python out"
        )

    def cells(self) -> list[tuple[str, ...]]:
        table = []
        for row in self.rows:
            if row.seconds is None:
                table.append((row.name, "-", "-", "-", "-", row.note))
                continue
            seconds, peak = self.bf16[row.ours]
            mine = self.peaks.get(row.name, 0)
            memory = (f"{mine / 1e6:.0f}", f"{mine / peak:.3f}") if mine and peak else ("-", "-")
            table.append((row.name, f"{row.seconds * 1e3:.2f}", f"{row.seconds / seconds:.3f}", *memory, row.note))
        return table


class DenseMLP(nn.Module):
    """Llama's: gate and up [I, H], down [H, I]."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """``layers`` routed Qwen3-MoE blocks of transformers, one after the other, with its ``grouped_mm`` experts."""

    def __init__(self, layers: int, experts: int, top_k: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

        config = Qwen3MoeConfig(
            hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=experts, num_experts_per_tok=top_k
        )
        config._experts_implementation = "grouped_mm"
        self.config = config  # Model-Optimizer sets its experts to "eager" there, which it needs to see their weights
        self.blocks = nn.ModuleList(Qwen3MoeSparseMoeBlock(config) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            out = block(x[None])
            x = x + (out[0] if isinstance(out, tuple) else out)[0]
        return x


@benchmark("training")
def training(
    rounds: int = 7,
    experts: int = 128,
    top_k: int = 8,
    hidden: int = 2048,
    intermediate: int = 768,
    dense_hidden: int = 4096,
    dense_intermediate: int = 14336,
    tokens: int = 8192,
    layers: int = 4,
) -> Report:
    """Step time and peak memory of QAT against BF16: a dense MLP, one and four MoE layers, peers where they run."""
    report = StepReport(
        "Training steps, bf16 weights", 1, "steps", ("torch", "triton", "transformers", "nvidia-modelopt")
    )
    moe = lambda n: MoE(n, experts, top_k, hidden, intermediate)  # noqa: E731
    dense = lambda: DenseMLP(dense_hidden, dense_intermediate)  # noqa: E731
    _case(
        report,
        f"dense MLP {dense_hidden} -> {dense_intermediate}, {tokens} tokens",
        dense,
        dense_hidden,
        tokens,
        rounds,
        graphs=True,
    )
    for n in (tokens, 4 * tokens):
        _case(report, f"MoE layer, {n} tokens", lambda: moe(1), hidden, n, rounds, graphs=n == tokens)
    name = f"MoE layer, {MICRO_BATCHES} micro-batches of {tokens} tokens"
    _case(report, name, lambda: moe(1), hidden, tokens, rounds, micro_batches=MICRO_BATCHES)
    _case(report, f"{layers} MoE layers, {tokens} tokens", lambda: moe(layers), hidden, tokens, rounds)
    return report


def _case(
    report: StepReport,
    name: str,
    build: Callable[[], nn.Module],
    hidden: int,
    tokens: int,
    rounds: int,
    micro_batches: int = 1,
    graphs: bool = False,
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        base = build()
        x = torch.randn(tokens, hidden).bfloat16()
    with torch.no_grad():
        for p in base.parameters():
            p.normal_(std=0.02)
    base = base.bfloat16()
    arms: dict[str, Callable[[], tuple[nn.Module, bool]]] = {
        "BF16": lambda: (copy.deepcopy(base), False),
        "W4A16 QAT": lambda: (qq.convert(copy.deepcopy(base), "w4a16"), False),
    }
    if micro_batches > 1:
        arms["W4A16 QAT, codes kept"] = lambda: (qq.convert(copy.deepcopy(base), "w4a16"), True)
    else:
        arms["W4A16 QAT, scales frozen"] = lambda: (_frozen(base), False)
        arms["nvidia-modelopt QAT"] = lambda: (_modelopt(copy.deepcopy(base), x), False)
    wrong = _differs(base, x)
    bf16 = f"BF16: {name}"
    runs: dict[str, _Arm] = {}
    for arm, make in arms.items():
        label = f"{arm}: {name}"
        if wrong and arm.startswith("W4A16"):
            report.rows.append(
                Row(label, None, note="output differs from the BF16 model with quantized weights: no time")
            )
            continue
        try:
            model, kept = make()
            run = _Arm(model, x, micro_batches, kept)
            report.peaks[label] = run.peak()
        except Exception as error:  # a peer that is missing, refuses the model or runs out of memory is a row
            if arm != "nvidia-modelopt QAT":
                raise
            report.rows.append(Row(label, None, note=f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"))
            continue
        runs[label] = run
    if x.is_cuda and graphs:
        waits = "nothing" if name.startswith("dense") else "modelopt"  # its experts read values on the host
        for label in [label for label in runs if waits not in label]:
            model, kept = arms[label.split(":")[0]]()
            arm, of_what = label.split(": ")
            runs[f"{arm}, one CUDA graph: {of_what}"] = _GraphedArm(model, x, micro_batches, kept)
    for label, seconds in _median_times(runs, rounds).items():
        graphed = "one CUDA graph" in label
        base_label = bf16 if not graphed else bf16.replace(":", ", one CUDA graph:", 1)
        if label == base_label:
            report.bf16[label] = seconds, report.peaks.get(label, 0)
        report.rows.append(Row(label, seconds, ours=base_label))


def _differs(base: nn.Module, x: Tensor) -> bool:
    """Whether QAT's forward is not, bit for bit, that of the plain model with the exported weights put in."""
    trainer, plain = qq.convert(copy.deepcopy(base), "w4a16"), copy.deepcopy(base)
    groups = qq.coverage(trainer).groups
    with torch.no_grad():
        for names in groups.values():
            weights = [plain.get_parameter(name) for name in names]
            stacked = weights[0].ndim == 3
            amax = qq.ops.amax(*[w.detach() for w in weights], dim=(1, 2) if stacked else None)
            for w in weights:
                w.copy_(qq.ops.dequantize(qq.ops.quantize(w.detach(), tensor_amax=amax), w.dtype))
        rows = x[:512]
        return not torch.equal(trainer(rows), plain(rows))


def _frozen(base: nn.Module) -> nn.Module:
    """With the scales of the first step, as Model-Optimizer keeps those of its calibration."""
    model = qq.convert(copy.deepcopy(base), "w4a16", schedule=qq.Schedule(weight_scale="frozen"))
    qq.step(model)
    return model


def _modelopt(model: nn.Module, x: Tensor) -> nn.Module:
    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    config["quant_cfg"].append({"quantizer_name": "*input_quantizer", "enable": False})
    quantized = mtq.quantize(model, config, lambda m: m(x[:512]))
    kinds = {name for name, _ in quantized.named_modules() if "weight_quantizer" in name}
    if not any("experts" in name or "proj" in name for name in kinds):
        raise RuntimeError("no weight of this model was quantized")
    return quantized


class _Arm:
    """A model in training."""

    def __init__(self, model: nn.Module, x: Tensor, micro_batches: int, kept: bool) -> None:
        self.model, self.x, self.micro_batches, self.kept = model, x, micro_batches, kept
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=x.is_cuda)

    def step(self) -> None:
        self.optimizer.zero_grad()
        with qq.accumulate(self.model) if self.kept else nullcontext():
            for _ in range(self.micro_batches):
                self.model(self.x).float().square().mean().backward()
        self.optimizer.step()

    def round(self) -> float:
        """Seconds of a step; the GPU is waited for at both ends."""
        _synchronize(self.x)
        start = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        _synchronize(self.x)
        return (time.perf_counter() - start) / STEPS

    def peak(self) -> int:
        """Bytes that this arm alone has allocated at most during a step; it is warm afterwards."""
        if not self.x.is_cuda:
            self.step()
            return 0
        own = sum(p.nbytes for p in [*self.model.parameters(), *self.model.buffers()])
        others = torch.cuda.memory_allocated() - own
        for _ in range(2):  # the first makes the optimizer's state
            self.step()
        torch.cuda.reset_peak_memory_stats()
        self.step()
        peak = torch.cuda.max_memory_allocated() - others
        self.optimizer.zero_grad()
        return peak


class _GraphedArm(_Arm):
    """The same step, captured once and replayed."""

    def __init__(self, model: nn.Module, x: Tensor, micro_batches: int, kept: bool) -> None:
        super().__init__(model, x, micro_batches, kept)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                super().step()
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            super().step()

    def step(self) -> None:
        self.graph.replay()


def _median_times(arms: Mapping[str, _Arm], rounds: int) -> dict[str, float]:
    """Seconds of a step. Arms take turns: a GPU gets warmer, and slower, in the first seconds of work."""
    times: dict[str, list[float]] = {label: [] for label in arms}
    for _ in range(rounds):
        for label, arm in arms.items():
            times[label].append(arm.round())
            if not isinstance(arm, _GraphedArm):
                arm.optimizer.zero_grad()  # its gradients are no part of the next arm's memory
    return {label: statistics.median(seconds) for label, seconds in times.items()}


def _synchronize(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()
