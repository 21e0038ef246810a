"""What ``residual-quality`` shows: rows, tables by fraction and whether they fall with it, a plot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.registry import Report

PACKAGES = ("torch", "transformers", "quads_qat")
#: what a rollout's log-probabilities are compared with
REFERENCES = {
    "bf16": "the BF16 model",
    "trainer": "the W4A16 trainer, in bf16",
    "exact": "the rollout's own weights and arithmetic (fp32), activations not quantized",
}
#: field of a record -> title of its table, and digits
METRICS = {
    "kl_exact": ("KL(rollout, exact), nats a token", 4),
    "kl_trainer": ("KL(rollout, trainer)", 4),
    "max_trainer": ("Largest gap of a token's log-probability to the trainer", 2),
    "kl_bf16": ("KL(rollout, bf16)", 4),
    "max_bf16": ("Largest gap of a token's log-probability to bf16", 2),
    "relative_error": ("Relative error of the linears' outputs, mean of all modules", 4),
    "perplexity": ("Perplexity", 2),
}
Record = dict[str, Any]


def key(record: Record) -> str:
    """What a record was measured on; equal for configurations that are the same."""
    if record["fraction"] is None:
        return "weights only"
    if record["fraction"] in (0.0, 1.0):
        return "naive W4A4" if record["fraction"] == 0 else "everything"
    unit = "blocks" if record["granularity"] == 16 else "channels"
    norm = "" if record["scope"] in ("token", "block") and record["granularity"] == 1 else f" {record['norm']}"
    return f"{record['scope']}, {unit}{norm}"


def series(records: list[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Each configuration with its records by ascending fraction, those that all share (0 and 1) included."""
    shared = [r for r in records if key(r) in ("naive W4A4", "everything")]
    for name in dict.fromkeys(map(key, records)):
        own = [r for r in records if key(r) == name]
        if own[0]["scope"] is not None and own[0] not in shared:
            yield name, sorted([*own, *shared], key=lambda r: r["fraction"])


def out_of_order(records: list[Record], metric: str) -> list[str]:
    """Where ``metric`` is larger at a larger fraction: "configuration: fraction -> fraction"."""
    found = []
    for name, line in series(records):
        steps = [(a, b) for a, b in pairwise(line) if b[metric] > a[metric]]
        found += [
            f"{name}: {a['fraction']:.1%} {a[metric]:.4f} -> {b['fraction']:.1%} {b[metric]:.4f}" for a, b in steps
        ]
    return found


@dataclass
class QualityReport(Report):
    """One row for each configuration."""

    records: list[Record] = field(default_factory=list)

    @property
    def header(self) -> tuple[str, ...]:
        columns = ("error", "KL exact", "KL trainer", "max trainer", "KL bf16", "max bf16", "perplexity")
        return ("rollout", "fraction", *columns)

    @property
    def legend(self) -> str:
        references = "; ".join(f"{name}: {what}" for name, what in REFERENCES.items())
        return (
            "error: relative error of the linears' outputs, mean of all modules; KL(rollout, reference) in nats a "
            f"token; max: largest gap of a token's log-probability; {references}"
        )

    def cells(self) -> list[tuple[str, ...]]:
        fields = ("relative_error", "kl_exact", "kl_trainer", "max_trainer", "kl_bf16", "max_bf16", "perplexity")
        table = []
        for r in self.records:
            values = [f"{r[name]:.{METRICS[name][1]}f}" for name in fields]
            table.append((key(r), "" if r["fraction"] is None else _percent(r["fraction"]), *values))
        return table

    def as_markdown(self) -> str:
        """A table for each metric, a row for each configuration, a column for each fraction."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [f"## {self.title}", "", f"{self.machine}, {versions}, {date.today()}", "", self.legend, ""]
        for metric in METRICS:
            lines += [*self._by_fraction(metric), ""]
        return "\n".join(lines)

    def _by_fraction(self, metric: str) -> list[str]:
        title, digits = METRICS[metric]
        by_name = {key(r): r for r in self.records}
        ends = [
            f"{name} {by_name[name][metric]:.{digits}f}"
            for name in ("weights only", "naive W4A4", "everything")
            if name in by_name
        ]
        inner = sorted({r["fraction"] for r in self.records} - {None, 0.0, 1.0})
        lines = [f"**{title}** ({', '.join(ends)})", ""]
        lines += [
            "| scope, unit, norm | " + " | ".join(map(_percent, inner)) + " |",
            "| --- |" + " ---: |" * len(inner),
        ]
        for name, line in series(self.records):
            values = {r["fraction"]: f"{r[metric]:.{digits}f}" for r in line}
            lines.append(f"| {name} | " + " | ".join(values.get(f, "") for f in inner) + " |")
        wrong = out_of_order(self.records, metric)
        return [*lines, "", "Falls with the fraction" + (f", but not {'; '.join(wrong)}." if wrong else " everywhere.")]


def _percent(fraction: float) -> str:
    return f"{100 * fraction:g} %"


def plot(records: list[Record], path: Path) -> None:
    """Gap by fraction, a line for each scope (single channels, L2)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {"kl_exact": "KL(rollout, same weights), nats a token", "max_trainer": "largest gap to the trainer"}
    figure, axes = plt.subplots(1, len(panels), figsize=(9, 3.6), layout="constrained")
    lines = [
        (name, line) for name, line in series(records) if "blocks" not in name and name.split()[-1] not in ("l1", "max")
    ]
    for axis, (metric, title) in zip(axes, panels.items(), strict=True):
        for name, line in lines:
            axis.plot(
                [100 * r["fraction"] for r in line],
                [r[metric] for r in line],
                marker="o",
                ms=4,
                label=name.split(",")[0],
            )
        axis.set_yscale("log")
        axis.set_xlabel("channels compensated, %")
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    floor = next((r for r in records if key(r) == "weights only"), None)
    if floor is not None:
        axes[1].axhline(floor["max_trainer"], color="gray", lw=1, ls="--", label="weights only (floor)")
    axes[1].legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
