"""``python -m benchmarks list`` and ``python -m benchmarks run NAME [options]``."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import (  # noqa: F401  each module registers its benchmarks when it is imported
    activation,
    engine,
    export_cpu,
    export_gpu,
    gap,
    matmul,
    multi_gpu,
    quantize,
    quantize_cpu,
    residual_quality,
    training,
    weight_sync,
)
from benchmarks.registry import BENCHMARKS, Benchmark
from benchmarks.rl import figures, table
from benchmarks.rl import run as _rl  # noqa: F401

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measurements against other implementations.")
run = typer.Typer(no_args_is_help=True, help="Run a benchmark and print its table.")
report = typer.Typer(no_args_is_help=True, help="Tables and figures of runs that were logged.")
app.add_typer(run, name="run")
app.add_typer(report, name="report")

OUT = inspect.Parameter(
    "out",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[Path | None, typer.Option(help="Also write OUT.json and OUT.md.")],
)


def command(function: Benchmark):
    """``function`` as a command: its arguments become options, ``--out`` is added."""

    @functools.wraps(function)
    def call(*, out: Path | None = None, **options) -> None:
        function(**options).show(out)

    signature = inspect.signature(function, eval_str=True)
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in signature.parameters.values()]
    call.__signature__ = signature.replace(parameters=[*parameters, OUT], return_annotation=None)  # pyright: ignore
    call.__annotations__ = {p.name: p.annotation for p in [*parameters, OUT]}
    return call


for name, function in BENCHMARKS.items():
    run.command(name)(command(function))


@app.command("list")
def list_benchmarks() -> None:
    """Name all benchmarks."""
    for name, function in BENCHMARKS.items():
        Console().print(f"[bold]{name}[/bold]  {(inspect.getdoc(function) or '').splitlines()[0]}")


HERE = Path(__file__).parent


@report.command("rl")
def report_rl(results: Path = HERE / "results", out: Path = HERE.parent / "docs" / "figures") -> None:
    """Print the tables of the logs in RESULTS/rl, and draw the figures of README's results."""
    for log in sorted((results / "rl").glob("*.jsonl")):
        print(table.of_log(log).as_markdown())
    logs = [results / "rl" / f"{study}.jsonl" for study in ("main", "ablations")]
    if all(log.exists() for log in logs):
        print("## Ablations beside the main arms\n")
        print(table.ablations(*(table.runs_of(table.read_log(log)[1]) for log in logs)))
    for path in figures.draw_all(results, HERE / "RESULTS.md", out):
        print(path)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
