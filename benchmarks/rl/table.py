"""Logs of ``run rl`` as one table: what became of each arm, beside what the paper says of it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.registry import Report, markdown_table
from benchmarks.rl.arms import STUDIES

PACKAGES = ("torch", "triton", "transformers", "quads_qat")
WINDOW = 10
"""Steps that one figure of the table is a mean of."""
PAPER = {
    "bf16": "0.74; 73.2",
    "naive": "about 1.3, collapses; 51.4",
    "w4a16-naive": "71.1",
    "w4a4-naive": "wider than W4A16",
    "quads": "0.86; 72.9",
}
"""arXiv 2607.15810 with a 25B MoE: max gap; average pass@1 in %."""
Record = dict[str, Any]
Runs = dict[str, dict[int, list[Record]]]
"""Arm -> seed -> its records by step."""


def read_log(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """(settings, records) of a log; a last line that was cut off is left out."""
    header, *lines = path.read_text().splitlines()
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return json.loads(header), records


def runs_of(records: Iterable[Record]) -> Runs:
    """Records by arm and seed, in the order of ``STUDIES``; runs that were cut off too."""
    runs: Runs = {}
    for record in records:
        runs.setdefault(record["arm"], {}).setdefault(record["seed"], []).append(record)
    known = [arm.name for study in STUDIES.values() for arm in study]
    ordered = [*(arm for arm in known if arm in runs), *(arm for arm in runs if arm not in known)]
    return {arm: dict(sorted(runs[arm].items())) for arm in ordered}


def whole(runs: Runs, ended: bool = True) -> Runs:
    """Runs whose last record is the evaluation after the last step, or tells what broke them; else those cut off."""
    found = {arm: {s: r for s, r in seeds.items() if _ended(r) is ended} for arm, seeds in runs.items()}
    return {arm: seeds for arm, seeds in found.items() if seeds}


def _ended(records: list[Record]) -> bool:
    return "error" in records[-1] or "reward" not in records[-1]


def common_steps(runs: Runs) -> int:
    """Steps that each run has logged; a run that broke ends by itself and does not count."""
    return min(len(values(r, "reward")) for seeds in runs.values() for r in seeds.values() if "error" not in r[-1])


def until(runs: Runs, steps: int) -> Runs:
    """The records of the first ``steps`` steps."""
    return {arm: {s: [x for x in r if x["step"] < steps] for s, r in seeds.items()} for arm, seeds in runs.items()}


def compared(main: Runs, ablated: Runs) -> tuple[Runs, list[int], int]:
    """(runs of both, seeds, steps): only the seeds and the first steps that all arms have."""
    runs = main | ablated
    seeds = sorted(set.intersection(*map(set, runs.values())))
    runs = {arm: {seed: of_arm[seed] for seed in seeds} for arm, of_arm in runs.items()}
    steps = common_steps(runs)
    return until(runs, steps), seeds, steps


def values(records: list[Record], name: str) -> list[float]:
    """One number of the steps that have it."""
    return [record[name] for record in records if name in record]


def ends(numbers: list[float]) -> tuple[float, float, float]:
    """Means over the first, the middle and the last WINDOW steps."""
    middle = max(0, (len(numbers) - WINDOW) // 2)
    return fmean(numbers[:WINDOW]), fmean(numbers[middle : middle + WINDOW]), fmean(numbers[-WINDOW:])


def collapse(records: list[Record]) -> int | None:
    """The first step whose reward, a mean over WINDOW steps, is below half of the best before; or that broke."""
    reward, best = values(records, "reward"), 0.0
    for end in range(WINDOW, len(reward) + 1):
        mean = fmean(reward[end - WINDOW : end])
        if mean < best / 2:
            return end - 1
        best = max(best, mean)
    return next((record["step"] for record in records if "error" in record), None)


def summary(seeds: dict[int, list[Record]]) -> dict[str, Any]:
    """What became of one arm: means over its seeds, and the spread of the final accuracy."""
    stepped = [r for r in seeds.values() if values(r, "reward")]
    collapsed = [collapse(r) for r in seeds.values()]
    differing = sum(sum(values(r, "differing")) for r in seeds.values())
    found: dict[str, Any] = {
        "seeds": len(seeds),
        "differing": differing,
        "collapsed": [step for step in collapsed if step is not None],
    }
    if not stepped:
        return found
    for name in ("reward", "gap_mean", "gap_max", "gap_k3", "grad_norm", "entropy"):
        found[name] = [fmean(column) for column in zip(*(ends(values(r, name)) for r in stepped), strict=True)]
    for name in ("rollout_accuracy", "trainer_accuracy"):
        last = [values(r, name)[-1] for r in stepped if values(r, name)]
        found[name] = fmean(last)
        found[f"{name}_spread"] = max(last) - min(last)
    for name in ("sample_s", "train_s", "sync_s"):
        found[name] = fmean(fmean(values(r, name)[2:] or values(r, name)) for r in stepped)  # without warming up
    return found


@dataclass
class RLReport(Report):
    """One row for each arm."""

    records: list[Record] = field(default_factory=list)

    @property
    def versions(self) -> dict[str, str]:
        logged: Any = self.settings.get("versions")
        found = logged or super().versions
        return {name: version for name, version in found.items() if version != "not installed"}  # run from its files

    @property
    def machine(self) -> str:
        if "machine" in self.settings:
            return str(self.settings["machine"])
        on_gpu = self.settings.get("device") == "cuda" and torch.cuda.is_available()
        if not on_gpu:
            return super().machine
        count = torch.cuda.device_count()
        return f"{count} x {torch.cuda.get_device_name()}" if count > 1 else torch.cuda.get_device_name()

    @property
    def header(self) -> tuple[str, ...]:
        columns = ("reward", "accuracy", "of the trainer", "gap mean", "gap max", "k3", "collapse", "ms a step")
        return ("arm", *columns, "paper")

    @property
    def legend(self) -> str:
        return (
            f"reward, gaps and k3: means over {WINDOW} steps and all seeds at the start, in the middle and at the end; "
            "accuracy: of rollout and trainer on held-out questions, greedy, at the last evaluation, in % (largest "
            "minus smallest of the seeds); gap: abs(log pi_rollout - log pi_trainer) of sampled tokens; collapse: step "
            "at which the reward has halved, of each seed that did; ms: sampling + training + sync; paper: max gap; "
            "average pass@1"
        )

    def cells(self) -> list[tuple[str, ...]]:
        return _rows(whole(runs_of(self.records)))

    def as_markdown(self) -> str:
        text = super().as_markdown().replace(f", {date.today()}\n", f", {self.settings.get('date', date.today())}\n", 1)
        runs = runs_of(self.records)
        cut_off = whole(runs, ended=False)
        if not cut_off:
            return text
        steps = common_steps(runs)
        reached = [
            f"{arm} ({', '.join(str(len(values(r, 'reward'))) for r in seeds.values())})"
            for arm, seeds in cut_off.items()
        ]
        said = f"Cut off, and not in the table above (steps of each seed): {', '.join(reached)}."
        lines = [said, "", f"All arms over the {steps} steps that every run reached:", ""]
        return "\n".join([text, *lines, *markdown_table(self.header, _rows(until(runs, steps)))]) + "\n"

    def as_json(self) -> str:
        runs = runs_of(self.records)
        found: Record = {"arms": {arm: summary(seeds) for arm, seeds in whole(runs).items()}}
        if whole(runs, ended=False):
            steps = common_steps(runs)
            found |= {"common_steps": steps, "first_steps": {a: summary(s) for a, s in until(runs, steps).items()}}
        measured = {"title": self.title, "settings": self.settings, "machine": self.machine, "versions": self.versions}
        return json.dumps(measured | found, indent=2) + "\n"


def _rows(runs: Runs) -> list[tuple[str, ...]]:
    return [_row(arm, summary(seeds)) for arm, seeds in runs.items()]


def _row(arm: str, s: dict[str, Any]) -> tuple[str, ...]:
    collapsed = ", ".join(map(str, s["collapsed"])) or "none"
    paper = PAPER.get(arm, "")
    if "reward" not in s:
        return (arm, *["-"] * 6, collapsed, "-", paper)
    accuracies = [
        f"{100 * s[f'{side}_accuracy']:.1f} ({100 * s[f'{side}_accuracy_spread']:.1f})"
        for side in ("rollout", "trainer")
    ]
    seconds = " + ".join(f"{1e3 * s[name]:.0f}" for name in ("sample_s", "train_s", "sync_s"))
    return (
        arm,
        _three(s["reward"], 2),
        *accuracies,
        _three(s["gap_mean"], 4),
        _three(s["gap_max"], 2),
        _three(s["gap_k3"], 4),
        collapsed,
        seconds,
        paper,
    )


def _three(numbers: list[float], digits: int) -> str:
    return " / ".join(f"{x:.{digits}f}" for x in numbers)


def ablations(main: Runs, ablated: Runs) -> str:
    """The arms of both logs over the seeds and steps that all of them have: means of these steps, in Markdown."""
    runs, seeds, steps = compared(main, ablated)
    rows = []
    for arm, records in runs.items():
        numbers = {name: fmean(x for r in records.values() for x in values(r, name)) for name in _ABLATED}
        last = fmean(values(r, "rollout_accuracy")[-1] for r in records.values())
        rows.append((arm, *(f"{numbers[name]:.{digits}f}" for name, digits in _ABLATED.items()), f"{100 * last:.1f}"))
    of = f"The first {steps} steps with seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}, means:"
    header = ("arm", "gap mean", "gap max", "k3", "reward", "accuracy")
    return "\n".join([of, "", *markdown_table(header, rows)]) + "\n"


_ABLATED = {"gap_mean": 4, "gap_max": 2, "gap_k3": 4, "reward": 3}


def of_log(path: Path) -> RLReport:
    """The table of a log, with the machine and the versions that it was made with."""
    settings, records = read_log(path)
    report = RLReport(title_of(settings), settings["prompts"] * settings["samples"], "samples", PACKAGES, settings)
    report.records = records
    return report


def title_of(settings: dict[str, Any]) -> str:
    """Of a run with these settings."""
    batch = f"{settings['steps']} steps of {settings['prompts']} x {settings['samples']} samples"
    return f"GRPO on arithmetic ({settings['study']}): {settings['model']}, {batch}, {settings['seeds']} seeds"
