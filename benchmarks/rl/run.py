"""``python -m benchmarks run rl``: many loops side by side, one process each, one log."""

from __future__ import annotations

import json
import time
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.registry import Report, benchmark
from benchmarks.rl.arms import STUDIES, Arm
from benchmarks.rl.grpo import Loop, Settings
from benchmarks.rl.table import PACKAGES, RLReport, title_of
from quads_qat.demo import DATA

Record = dict[str, Any]

SMOKE = {"steps": 3, "prompts": 4, "samples": 4, "every": 3}


@benchmark("rl")
def rl(
    study: str = "main",
    arms: str = "",
    seeds: int = 3,
    steps: int = 150,
    prompts: int = 64,
    samples: int = 8,
    lr: float = 1e-4,
    jobs: int = 0,
    model: Path = DATA,
    device: str = "",
    split: bool = False,
    graphs: bool = True,
    masters: bool = False,
    log: Path | None = None,
    smoke: bool = False,
) -> Report:
    """GRPO on arithmetic with a small MoE: reward and log-prob gap by what trains and what samples.

    ``study``: main, engine, ablations, stress, or several with commas. ``arms``: only these. ``jobs``: processes side
    by side; 0 takes one for each arm on a GPU, and none beside this one on a CPU. ``log``: a new file of JSON lines,
    the settings first, then a record for each step of each run. ``masters``: sync BF16 weights, which the rollout
    quantizes; else packed ones. ``split``: the rollout on the GPU after the trainer's. ``smoke``: three small steps.
    """
    chosen = chosen_arms(study, arms)
    if split and torch.cuda.device_count() < 2:
        raise ValueError(f"rl: --split needs two GPUs, found {torch.cuda.device_count()}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings(
        model=str(model),
        steps=steps,
        prompts=prompts,
        samples=samples,
        lr=lr,
        device=device,
        split=split,
        graphs=graphs,
        masters=masters,
    )
    if smoke:
        settings, seeds = replace(settings, **SMOKE), 1
    jobs = jobs or (len(chosen) if device == "cuda" else 1)
    header: Record = (
        {"study": study, "seeds": seeds, "jobs": jobs} | asdict(settings) | {"model": Path(settings.model).name}
    )
    report = RLReport(title_of(header), settings.prompts * settings.samples, "samples", PACKAGES, header)
    if log is not None:
        _start_log(log, header | {"machine": report.machine, "versions": report.versions, "date": _today()})
    runs = [(arm, seed) for seed in range(seeds) for arm in chosen]
    report.records = [record for records in _all(runs, settings, log, jobs) for record in records]
    return report


def chosen_arms(study: str, arms: str = "") -> list[Arm]:
    """The arms of some studies, each once, or those of them that are named.

    Raises:
        ValueError: an unknown study or arm.
    """
    unknown = [name for name in study.split(",") if name not in STUDIES]
    if unknown:
        raise ValueError(f"rl: --study {unknown[0]!r} is unknown; choose from {', '.join(STUDIES)}")
    found = {arm.name: arm for name in study.split(",") for arm in STUDIES[name]}
    names = arms.split(",") if arms else list(found)
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"rl: --arms {missing[0]!r} is not in --study {study}; choose from {', '.join(found)}")
    return [found[name] for name in names]


def _today() -> str:
    return time.strftime("%Y-%m-%d")


def _start_log(log: Path, header: Record) -> None:
    if log.exists():
        raise ValueError(f"rl: {log} exists; remove it, or choose another --log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(json.dumps(header) + "\n")


def _all(runs: list[tuple[Arm, int]], settings: Settings, log: Path | None, jobs: int) -> Iterator[list[Record]]:
    console = Console(stderr=True)
    if jobs == 1:
        for arm, seed in runs:
            yield run_one(arm, seed, settings, log)
        return
    with ProcessPoolExecutor(min(jobs, len(runs)), mp_context=get_context("spawn")) as pool:
        gpus = max(1, torch.cuda.device_count())
        waiting = {
            pool.submit(run_one, arm, seed, settings, log, i % gpus): (arm, seed) for i, (arm, seed) in enumerate(runs)
        }
        for done in as_completed(waiting):
            arm, seed = waiting[done]
            records = done.result()
            last = records[-1]
            console.print(f"{arm.name}, seed {seed}: step {last.get('step')}, {last.get('error', 'done')}")
            yield records


def run_one(
    arm: Arm, seed: int, settings: Settings, log: Path | None, beside_others: int | None = None
) -> list[Record]:
    """All records of one arm with one seed, appended to ``log`` as they come. A run that breaks ends with its error.

    ``beside_others``: the GPU to take in a process that shares the machine.
    """
    if beside_others is not None:
        torch.set_num_threads(1)
        if settings.device == "cuda":
            torch.cuda.set_device(beside_others)
    warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)  # older versions know no other
    records: list[Record] = []

    def keep(record: Record) -> None:
        numbers = {name: float(f"{v:.4g}") if isinstance(v, float) else v for name, v in record.items()}
        records.append({"arm": arm.name, "seed": seed} | numbers)
        if log is not None:
            with log.open("a") as file:  # one write of a line: processes do not mix theirs
                file.write(json.dumps(records[-1]) + "\n")

    try:
        for record in Loop(arm, settings, seed):
            keep(record)
    except (ValueError, RuntimeError) as error:  # weights that are NaN cannot be exported, nor gaps be counted
        traceback.print_exc()
        keep({"step": len(records), "error": f"{type(error).__name__}: {error}"[:300]})
    return records
