"""What ``gap`` shows: an arm a row, before and after training, and whether the arms come in the paper's order."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from typing import Any

from benchmarks.registry import Report

PACKAGES = ("torch", "transformers", "quads_qat")
TRAINERS = {"bf16": "BF16", "w4a16": "W4A16", "w4a4": "W4A4"}
Record = dict[str, Any]

COLUMNS = ("KL", "max", "mean", "k1", "k3", "> ln 2", "weight", "act", "num", "flips", "ppl")
LEGEND = (
    "KL: KL(rollout, trainer) over the vocabulary, nats a token. max, mean: of |delta|, delta = log pi_rollout - log "
    "pi_trainer of the text's tokens; k1: mean delta, k3: mean of exp(-delta) - 1 + delta (estimates of the KL for "
    "tokens that the rollout samples; these are the text's); > ln 2: share of tokens off by more than a factor of two. "
    "weight, act, num: mean magnitudes of the three parts of delta (qq.diagnose), which add up token by token but not "
    "in these means. flips: share of tokens that the routers send to another set of experts, mean over layers. ppl: "
    "perplexity of the rollout."
)

#: (what the paper says, or we, smaller arm, larger arm); arms as in ``label``
ORDER = (
    ("W4A16 QAT lowers the gap of naive W4A4 rollouts", "W4A16 | naive W4A4", "BF16 | naive W4A4"),
    ("symmetric W4A4 QAT has a larger gap than W4A16 QAT", "W4A16 | naive W4A4", "W4A4 | naive W4A4"),
    ("compensation lowers the gap of a BF16 trainer", "BF16 | residual 50 %, token", "BF16 | naive W4A4"),
    ("both sides beat either alone (W4A16)", "W4A16 | residual 50 %, token", "W4A16 | naive W4A4"),
    ("both sides beat either alone (compensation)", "W4A16 | residual 50 %, token", "BF16 | residual 50 %, token"),
    ("50 % below 25 %", "W4A16 | residual 50 %, token", "W4A16 | residual 25 %, token"),
    ("75 % below 50 %", "W4A16 | residual 75 %, token", "W4A16 | residual 50 %, token"),
    ("the BF16 floor is below QUADS at 75 %", "BF16 | BF16", "W4A16 | residual 75 %, token"),
    ("ours: weights that are exact in bf16 lower the floor", "W4A16 | weights only", "W4A16 modelopt | weights only"),
    (
        "ours: and the gap at 50 %",
        "W4A16 | residual 50 %, token",
        "W4A16 modelopt | residual 50 %, token",
    ),
)
#: what a claim is tested on: the paper reports ``max``, which is one token
METRICS = {"KL": ("kl",), "max": ("gap", "delta", "max"), "mean": ("gap", "delta", "mean")}


def label(record: Record) -> str:
    """Trainer and rollout, like ``W4A16 | residual 50 %, token``."""
    recipe = "" if record["recipe"] == "aligned" else f" {record['recipe']}"
    return f"{TRAINERS[record['trainer']]}{recipe} | {_rollout(record)}"


def _rollout(record: Record) -> str:
    if not record["packed"]:
        return "BF16"
    if record["fraction"] is None:
        return "weights only"
    return "naive W4A4" if record["fraction"] == 0 else f"residual {100 * record['fraction']:g} %, {record['scope']}"


def value(record: Record, path: tuple[str, ...]) -> float:
    """A number of a record."""
    found: Any = record
    for name in path:
        found = found[name]
    return found


def claims(records: list[Record]) -> list[tuple[str, str, bool, float, float]]:
    """(claim, metric, whether it holds, smaller, larger) of the arms of one stage that were measured."""
    by_label = {label(r): r for r in records}
    return [
        (claim, metric, value(by_label[low], path) < value(by_label[high], path), *pair)
        for claim, low, high in ORDER
        if low in by_label and high in by_label
        for metric, path in METRICS.items()
        for pair in [(value(by_label[low], path), value(by_label[high], path))]
    ]


@dataclass
class GapReport(Report):
    """One row for each arm and stage."""

    records: list[Record] = field(default_factory=list)

    @property
    def header(self) -> tuple[str, ...]:
        return ("trainer | rollout", *COLUMNS)

    @property
    def legend(self) -> str:
        return LEGEND

    def stages(self) -> dict[int, list[Record]]:
        """Steps of training -> records."""
        return {steps: [r for r in self.records if r["steps"] == steps] for steps in _unique(self.records)}

    def cells(self) -> list[tuple[str, ...]]:
        several = len(self.stages()) > 1
        table = _with_cells(self.records)
        return [(f"{r['steps']} steps: {c[0]}" if several else c[0], *c[1:]) for r, c in table]

    def as_markdown(self) -> str:
        """A table for each stage, each followed by the paper's order."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [f"## {self.title}", "", f"{self.machine}, {versions}, {date.today()}", "", self.legend, ""]
        for steps, records in self.stages().items():
            title = f"After {steps} steps of training" if steps else "Without training"
            lines += [f"**{title}**" + _trainers(records), ""]
            lines += ["| " + " | ".join(self.header) + " |", "| --- |" + " ---: |" * len(COLUMNS)]
            lines += [
                "| " + " | ".join(c.replace(" | ", ", ") for c in cells) + " |" for _, cells in _with_cells(records)
            ]
            lines += ["", *order_lines(records), ""]
        return "\n".join(lines)


def order_lines(records: list[Record]) -> list[str]:
    """Which comparisons come out as expected, by metric."""
    lines = []
    for claim, _, _ in ORDER:
        found = [(metric, holds, low, high) for c, metric, holds, low, high in claims(records) if c == claim]
        if found:
            shown = ", ".join(f"{'yes' if ok else 'NO'} by {m} ({_n(a)} against {_n(b)})" for m, ok, a, b in found)
            lines.append(f"* {claim}: {shown}")
    return lines


def _unique(records: list[Record]) -> list[int]:
    return list(dict.fromkeys(r["steps"] for r in records))


def _trainers(records: list[Record]) -> str:
    found = dict.fromkeys((label(r).split(" | ")[0], r["trainer_perplexity"]) for r in records)
    return "; perplexity of the trainers: " + ", ".join(f"{name} {ppl:.2f}" for name, ppl in found)


def _with_cells(records: list[Record]) -> list[tuple[Record, tuple[str, ...]]]:
    table = []
    for r in records:
        gap = r["gap"]
        whole = gap["delta"]
        parts = [_n(gap[f"delta_{part}"]["mean"]) for part in ("weight", "act", "num")]
        flips = "" if r["router_flips"] is None else f"{r['router_flips']:.1%}"
        numbers = (_n(r["kl"]), f"{whole['max']:.2f}", _n(whole["mean"]), _n(whole["k1"]), _n(whole["k3"]))
        cells = (label(r), *numbers, f"{whole['share_over_ln2']:.1%}", *parts, flips, f"{r['perplexity']:.2f}")
        table.append((r, cells))
    return table


def _n(number: float) -> str:
    return "0" if number == 0 else f"{number:.4f}"
