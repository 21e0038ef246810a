"""The figures of README's results: the gap by arm over the steps of RL, the gap by k, the speed of the kernels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.residual_report import key
from benchmarks.rl.table import WINDOW, Runs, read_log, runs_of, values

LABELS = {
    "bf16": "BF16 / BF16",
    "naive": "BF16 / naive W4A4",
    "w4a4-naive": "W4A4 QAT / naive W4A4",
    "w4a16-naive": "W4A16 QAT / naive W4A4",
    "quads": "QUADS: W4A16 QAT / residual 50 %",
}
COLOURS = {"bf16": "0.45", "naive": "C3", "w4a4-naive": "C1", "w4a16-naive": "C4", "quads": "C0"}


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "quads"})
    return plt


def _save(plt: Any, figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)  # the same bytes every time
    plt.close(figure)
    return path


def smooth(numbers: list[float]) -> list[float]:
    """Means over the last WINDOW steps."""
    return [fmean(numbers[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(numbers))]


def gap_by_arm(runs: Runs, path: Path) -> Path | None:
    """Mean gap, max gap and accuracy over the steps: the mean of the seeds, and from the least to the most of them."""
    if not any(arm in runs for arm in LABELS):
        return None
    plt = _pyplot()
    panels = {
        "gap_mean": "mean gap of sampled tokens",
        "gap_max": "max gap of a step",
        "rollout_accuracy": "held-out accuracy of the rollout, greedy",
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 3.6), layout="constrained")
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for arm, label in LABELS.items():
            if arm in runs:
                _line(axis, runs[arm], name, label, COLOURS[arm])
        if name != "rollout_accuracy":
            axis.set_yscale("log")
        axis.set_title(title)
        axis.set_xlabel("step")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    return _save(plt, figure, path)


def _line(axis: Any, seeds: dict[int, list[dict[str, Any]]], name: str, label: str, colour: str) -> None:
    lines = [values(records, name) for records in seeds.values()]
    shown = min(map(len, lines))
    if not shown:
        return
    lines = [smooth(line)[:shown] if name.startswith("gap") else line[:shown] for line in lines]
    steps = [r["step"] for r in next(iter(seeds.values())) if name in r][:shown]
    columns = list(zip(*lines, strict=True))
    axis.plot(steps, [fmean(c) for c in columns], label=label, color=colour, lw=1.4)
    axis.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.15, lw=0)


def gap_by_k(runs: Runs, quality: Path, path: Path) -> Path | None:
    """The gap by the share of channels: over whole runs of RL, and on SmolLM2-135M; what was measured of them."""
    plt = _pyplot()
    trained, measured = _by_fraction(runs), quality.exists()
    panels = [bool(trained), measured]
    if not any(panels):
        return None
    figure, axes = plt.subplots(1, sum(panels), figsize=(4.8 * sum(panels), 3.4), layout="constrained", squeeze=False)
    remaining = list(axes[0])
    if trained:
        axis = remaining.pop(0)
        for scope, names in trained.items():
            points = [(k, _whole_mean(runs, arm)) for k, arm in names if arm in runs]
            axis.plot(*zip(*points, strict=True), marker="o", ms=4, label=scope)
        if "bf16" in runs:
            axis.axhline(_whole_mean(runs, "bf16"), color="0.45", lw=1, ls="--", label="BF16 / BF16")
        axis.set_title("RL on a 7 M parameter MoE: mean gap of all steps")
    if measured:
        axis = remaining.pop(0)
        records = [json.loads(line) for line in quality.read_text().splitlines()[1:]]
        shared = [r for r in records if r["fraction"] in (0.0, 1.0)]
        for scope in ("token", "batch"):
            own = [r for r in records if key(r) in (f"{scope}, channels", f"{scope}, channels l2")]
            line = sorted([*own, *shared], key=lambda r: r["fraction"])
            percents, gaps = [100 * r["fraction"] for r in line], [r["kl_exact"] for r in line]
            axis.plot(percents, gaps, marker="o", ms=4, label=scope)
        axis.set_title("SmolLM2-135M: KL(rollout, same weights)")
    for axis in axes[0]:
        axis.set_yscale("log")
        axis.set_xlabel("channels compensated, %")
        axis.legend(frameon=False, fontsize=8)
    return _save(plt, figure, path)


def _whole_mean(runs: Runs, arm: str) -> float:
    return fmean(fmean(values(records, "gap_mean")) for records in runs[arm].values())


def _by_fraction(runs: Runs) -> dict[str, list[tuple[float, str]]]:
    """Scope -> (percent, arm): naive at 0, everything at 100."""
    found = {}
    for scope, half, prefix in (("token", "quads", "quads-"), ("batch", "quads-batch", "quads-batch-")):
        inner = [(50.0, half), *((k, f"{prefix}{k:g}%") for k in (12.5, 25.0, 75.0))]
        line = sorted([(0.0, "w4a16-naive"), *inner, (100.0, "quads-100%")])
        if sum(arm in runs for _, arm in line) > 2:
            found[scope] = line
    return found


def kernel_speed(results: Path, path: Path) -> Path:
    """Speed-up of packed GEMMs over cuBLAS by rows, and element-wise kernels against others, from RESULTS.md."""
    plt = _pyplot()
    text = results.read_text()
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", width_ratios=(3, 2))
    products = table_under(text, "## GEMMs of packed NVFP4 weights")
    for product, label in (
        ("W4A16 [8192, 8192]", "W4A16 [8192, 8192]"),
        ("W4A4 [8192, 8192]", "W4A4"),
        ("compensated, token [8192, 8192]", "W4A4 + residual 50 % per token"),
        ("W4A16 experts [128, 1536, 2048]", "W4A16, 128 experts [1536, 2048]"),
    ):
        points = [
            (int(m.group(1)), float(row["speed-up"]))
            for row in products
            if (m := re.fullmatch(re.escape(product) + r" (?:M|tokens)=(\d+)", row["product"]))
        ]
        left.plot(*zip(*points, strict=True), marker="o", ms=4, label=label)
    left.axhline(1.0, color="0.45", lw=1, ls="--")
    left.set_xscale("log", base=2)
    left.set_title("speed-up over cuBLAS BF16 by rows (one H200)")
    left.set_xlabel("rows (of experts: tokens, 8 experts each)")
    left.legend(frameon=False, fontsize=8)
    shape = " [16384, 8192]"
    rows = {row["kernel"].removesuffix(shape): row for row in table_under(text, "## NVFP4 kernels, bf16")}
    shown = {
        "fake_quantize, amax given": "fake quantize, ours",
        "nvidia-modelopt fp4_fake_quant_block": "Model-Optimizer",
        "quantize, amax given": "quantize, ours",
        "torchao nvfp4_quantize, compiled": "torchao, compiled",
        "dequantize": "dequantize, ours",
        "nvidia-modelopt NVFP4QTensor.dequantize": "Model-Optimizer ",
    }
    bars = {label: float(rows[name]["of a copy"]) for name, label in shown.items()}
    right.barh(list(bars), list(bars.values()), color=["C0" if "ours" in label else "0.7" for label in bars])
    right.axvline(1.0, color="0.45", lw=1, ls="--")
    right.invert_yaxis()
    right.set_title("bandwidth of a copy = 1, [16384, 8192]")
    return _save(plt, figure, path)


def table_under(markdown: str, heading: str) -> list[dict[str, str]]:
    """The rows of the first table below a heading that begins with ``heading``.

    Raises:
        ValueError: there is no such heading or table.
    """
    _, found, rest = markdown.partition(f"\n{heading}")
    lines = [line for line in rest.split("\n## ")[0].splitlines() if line.startswith("|")]
    if not found or len(lines) < 3:
        raise ValueError(f"figures: no table under {heading!r}; run the benchmark and paste its table there")
    names, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    first = []
    for row in rows:
        if len(row) != len(names):
            break
        first.append(dict(zip(names, row, strict=True)))
    return first


def draw_all(results: Path, markdown: Path, out: Path) -> list[Path]:
    """Every figure whose data is there: one of the gap for the log of each engine, and those of all."""
    logs = {path.stem: runs_of(read_log(path)[1]) for path in sorted((results / "rl").glob("*.jsonl"))}
    drawn = []
    for name in ("main", "engine"):
        runs = {arm.removesuffix("/bf16"): seeds for arm, seeds in logs.get(name, {}).items()}
        drawn.append(gap_by_arm(runs, out / f"rl-gap-{name}.svg"))
    together = logs.get("main", {}) | logs.get("ablations", {})
    drawn.append(gap_by_k(together, results / "residual-quality.jsonl", out / "gap-by-k.svg"))
    drawn.append(kernel_speed(markdown, out / "kernel-speed.svg"))
    return [path for path in drawn if path is not None]
