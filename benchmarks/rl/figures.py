"""The figures of README's results: the gap by arm over the steps of RL, the gap by k, the speed of the kernels."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.residual_report import key
from benchmarks.rl.table import WINDOW, Runs, compared, read_log, runs_of, values

LABELS = {
    "naive": "BF16 / naive W4A4",
    "w4a4-naive": "W4A4 QAT / naive W4A4",
    "w4a16-naive": "W4A16 QAT / naive W4A4",
    "quads-batch": "QUADS, per batch: W4A16 QAT / W4A4 + residual 50 %",
    "quads": "QUADS, per token: W4A16 QAT / W4A4 + residual 50 %",
    "bf16": "BF16 / BF16: the floor",
}
COLOURS = {
    "bf16": "0.4",
    "naive": "#c23b22",
    "w4a4-naive": "#e0a030",
    "w4a16-naive": "#8e5ea2",
    "quads": "#1f5fa8",
    "quads-batch": "#5fb3e0",
}


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "font.size": 9,
            "axes.titlesize": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "0.9",
            "axes.axisbelow": True,
            "svg.hashsalt": "quads",
        }
    )
    return plt


def _save(plt: Any, figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    # white also where the page is dark; without a date the same bytes every time
    figure.savefig(path, facecolor="white", metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    return path


def _log(axis: Any, which: str = "y") -> None:
    """A log axis with plain numbers at 1, 2 and 5 of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    (axis.set_yscale if which == "y" else axis.set_xscale)("log")
    ticks = axis.yaxis if which == "y" else axis.xaxis
    ticks.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ticks.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ticks.set_minor_formatter(NullFormatter())


def smooth(numbers: list[float]) -> list[float]:
    """Means over the last WINDOW steps."""
    return [fmean(numbers[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(numbers))]


def gap_by_arm(runs: Runs, path: Path) -> Path | None:
    """Mean gap, max gap and accuracy over the steps: the mean of the seeds, and from the least to the most of them."""
    shown = [arm for arm in LABELS if any(values(r, "reward") for r in runs.get(arm, {}).values())]
    if not shown:
        return None
    plt = _pyplot()
    panels = {
        "gap_mean": "mean gap of sampled tokens",
        "gap_max": "largest gap of a step",
        "rollout_accuracy": "held-out accuracy of the rollout, %",
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 4.1), layout="constrained")
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        for arm in shown:
            _line(axis, list(runs[arm].values()), name, LABELS[arm], COLOURS[arm])
        if name.startswith("gap"):
            _log(axis)
        axis.set_title(title)
        axis.set_xlabel("step")
        axis.margins(x=0.02)
    axes[0].set_ylabel(f"|log \u03c0 rollout \u2212 log \u03c0 trainer|, {WINDOW} steps")
    handles, labels = axes[0].get_legend_handles_labels()
    legend = {"loc": "outside lower center", "ncols": 3, "frameon": False, "title": "trainer / rollout"}
    figure.legend(handles, labels, **legend)
    return _save(plt, figure, path)


def _line(axis: Any, seeds: list[list[dict[str, Any]]], name: str, label: str, colour: str) -> None:
    """As far as all seeds got: where some were cut off, it ends."""
    lines = [values(records, name) for records in seeds]
    shown = min(map(len, lines))
    if not shown:
        return
    if name.startswith("gap"):
        lines = [smooth(line) for line in lines]
    else:
        lines = [[100 * x for x in line] for line in lines]
    steps = [r["step"] for r in seeds[0] if name in r][:shown]
    columns = list(zip(*(line[:shown] for line in lines), strict=True))
    axis.plot(steps, [fmean(c) for c in columns], label=label, color=colour, lw=1.6)
    axis.fill_between(steps, list(map(min, columns)), list(map(max, columns)), color=colour, alpha=0.18, lw=0)


def gap_by_k(main: Runs, ablated: Runs, quality: Path, path: Path) -> Path | None:
    """The gap by the share of channels: in RL, over the steps that all arms have, and on SmolLM2-135M."""
    plt = _pyplot()
    runs, seeds, steps = compared(main, ablated) if main and ablated else ({}, [], 0)
    trained, measured = _by_fraction(runs), quality.exists()
    panels = [bool(trained), measured]
    if not any(panels):
        return None
    figure, axes = plt.subplots(1, sum(panels), figsize=(4.8 * sum(panels), 3.6), layout="constrained", squeeze=False)
    remaining = list(axes[0])
    colours = {"token": COLOURS["quads"], "batch": COLOURS["quads-batch"]}
    if trained:
        axis = remaining.pop(0)
        for scope, points in trained.items():
            axis.plot(*zip(*points, strict=True), marker="o", ms=4, label=f"mask per {scope}", color=colours[scope])
        if "bf16" in runs:
            axis.axhline(_mean_gap(runs, "bf16"), color="0.4", lw=1.2, ls="--", label="BF16 / BF16: the floor")
        said = f"{len(seeds)} seed{'s' * (len(seeds) > 1)}"
        axis.set_title(f"GRPO, MoE of 7 M parameters: mean gap\nto the W4A16 trainer, first {steps} steps, {said}")
    if measured:
        axis = remaining.pop(0)
        records = [json.loads(line) for line in quality.read_text().splitlines()[1:]]
        shared = [r for r in records if r["fraction"] in (0.0, 1.0)]
        for scope, colour in colours.items():
            own = [r for r in records if key(r) in (f"{scope}, channels", f"{scope}, channels l2")]
            line = sorted([*own, *shared], key=lambda r: r["fraction"])
            percents, gaps = [100 * r["fraction"] for r in line], [r["kl_exact"] for r in line]
            axis.plot(percents, gaps, marker="o", ms=4, label=f"mask per {scope}", color=colour)
        axis.set_title("SmolLM2-135M, no training: KL to the same\nweights with activations not quantized")
    for axis in axes[0]:
        _log(axis)
        axis.set_xticks([0, 12.5, 25, 50, 75, 100], ["0\n(naive)", "12.5", "25", "50", "75", "100"])
        axis.set_xlabel("channels compensated, %")
        axis.legend(frameon=False)
    return _save(plt, figure, path)


def _mean_gap(runs: Runs, arm: str) -> float:
    return fmean(fmean(values(records, "gap_mean")) for records in runs[arm].values())


def _by_fraction(runs: Runs) -> dict[str, list[tuple[float, float]]]:
    """Scope -> (percent, mean gap): naive at 0, everything at 100; no scope with nothing in between."""
    found = {}
    for scope, half, prefix in (("token", "quads", "quads-"), ("batch", "quads-batch", "quads-batch-")):
        inner = [(50.0, half), *((k, f"{prefix}{k:g}%") for k in (12.5, 25.0, 75.0))]
        line = sorted([(0.0, "w4a16-naive"), *inner, (100.0, "quads-100%")])
        points = [(k, _mean_gap(runs, arm)) for k, arm in line if arm in runs]
        if len(points) > 2:
            found[scope] = points
    return found


PRODUCTS = {
    "W4A16 experts [128, 1536, 2048]": ("W4A16, 128 experts [1536, 2048]", COLOURS["w4a4-naive"]),
    "W4A16 [8192, 8192]": ("W4A16 [8192, 8192]", COLOURS["w4a16-naive"]),
    "W4A4 [8192, 8192]": ("W4A4 [8192, 8192]", COLOURS["quads-batch"]),
    "compensated, token [8192, 8192]": ("W4A4 + residual 10 % per token, the same", COLOURS["quads"]),
}
ELEMENTWISE = {
    "fake quantize": ("fake_quantize, amax given", "nvidia-modelopt fp4_fake_quant_block", "Model-Optimizer"),
    "quantize": ("quantize, amax given", "torchao nvfp4_quantize, compiled", "torchao, compiled"),
    "dequantize": ("dequantize", "nvidia-modelopt NVFP4QTensor.dequantize", "Model-Optimizer"),
}


def kernel_speed(results: Path, path: Path) -> Path:
    """Speed-up of packed GEMMs over cuBLAS by rows, and element-wise kernels against others, from RESULTS.md."""
    plt = _pyplot()
    text = results.read_text()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained", width_ratios=(3, 2))
    products = table_under(text, "## GEMMs of packed NVFP4 weights")
    for product, (label, colour) in PRODUCTS.items():
        points = [
            (int(m.group(1)), float(row["speed-up"]))
            for row in products
            if (m := re.fullmatch(re.escape(product) + r" (?:M|tokens)=(\d+)", row["product"]))
        ]
        if not points:
            raise ValueError(f"figures: no row of {product!r} in the table of GEMMs; run matmul, or change PRODUCTS")
        left.plot(*zip(*points, strict=True), marker="o", ms=4, label=label, color=colour)
    left.axhline(1.0, color="0.4", lw=1.2, ls="--")
    _log(left)
    left.set_xscale("log", base=2)
    left.set_xticks(rows := [1, 8, 64, 512, 8192], [f"{n:,}" for n in rows])
    left.set_yticks(ratios := [0.3, 0.5, 1, 2, 3], [f"{x:g}" for x in ratios])
    left.set_title("Speed-up over cuBLAS BF16, one H200 (no FP4 tensor cores)")
    left.set_xlabel("rows (of experts: tokens, 8 experts each)")
    left.legend(frameon=False, loc="lower left")
    _elementwise(right, table_under(text, "## NVFP4 kernels, bf16"))
    return _save(plt, figure, path)


def _elementwise(axis: Any, rows: list[dict[str, str]]) -> None:
    speeds = {row["kernel"]: row["of a copy"] for row in rows}
    for i, (ours, theirs, who) in enumerate(ELEMENTWISE.values()):
        for row, name, colour, said in ((-0.2, ours, COLOURS["quads"], "quads_qat"), (0.2, theirs, "0.75", who)):
            speed = float(speeds[f"{name} [16384, 8192]"])
            axis.barh(i + row, speed, height=0.36, color=colour)
            inside = speed > 0.5
            place = {"x": 0.02, "color": "white" if name == ours else "black"} if inside else {"x": speed + 0.02}
            axis.text(y=i + row, s=f"{said}  {speed:.2f}", va="center", **place)
    axis.set_yticks(range(len(ELEMENTWISE)), list(ELEMENTWISE))
    axis.axvline(1.0, color="0.4", lw=1.2, ls="--")
    axis.invert_yaxis()
    axis.grid(False)
    axis.set_title("Bandwidth on [16384, 8192], a copy = 1")


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
    """Every figure whose data is there."""
    logs = {path.stem: runs_of(read_log(path)[1]) for path in sorted((results / "rl").glob("*.jsonl"))}
    main, ablated = logs.get("main", {}), logs.get("ablations", {})
    drawn = [
        gap_by_arm(main, out / "rl-gap.svg"),
        gap_by_k(main, ablated, results / "residual-quality.jsonl", out / "gap-by-k.svg"),
        kernel_speed(markdown, out / "kernel-speed.svg"),
    ]
    return [path for path in drawn if path is not None]
