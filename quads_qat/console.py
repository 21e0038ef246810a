"""What the command line shows: results on stdout, as text or as one JSON object; progress bars on stderr."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

out = Console()
err = Console(stderr=True)


def quiet_transformers() -> None:
    """Leave out transformers' own progress bars and warnings."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def print_json(value: Any) -> None:
    """One machine-readable object."""
    print(json.dumps(value, indent=2, default=str))


@contextmanager
def bar_of_steps(total: int) -> Iterator[Callable[[str], None]]:
    """A bar fed with what each step did."""
    columns = (TextColumn("{task.description:<32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("starting", total=total)

        def advance(description: str) -> None:
            bar.update(task, advance=1, description=description)

        yield advance


@contextmanager
def bar_of_bytes(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar fed with (done, total) bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task(name, total=None)
        began = False

        def report(done: int, total: int) -> None:
            nonlocal began
            if not began:  # what was done before counts for the bar, not for the rate
                bar.reset(task, completed=done, total=total)
                began = True
            bar.update(task, completed=done)

        yield report


def print_written(
    destination: Path, size: int, made: bool, as_json: bool, *, what: str = "", **facts: str | int
) -> None:
    """A checkpoint of ``size`` bytes that was made, or was complete; ``facts`` are for JSON, ``what`` for text."""
    if as_json:
        print_json({"destination": str(destination), **facts, "bytes": size, "already_complete": not made})
    else:
        already = "" if made else "already complete, "
        out.print(f"{destination}: {already}{what}{size / 1e6:,.1f} MB", soft_wrap=True)


def print_inspection(summary: dict[str, Any]) -> None:
    """What ``inspect`` found, a row each."""
    table = Table(show_header=False)
    for key, value in summary.items():
        table.add_row(key.replace("_", " "), "\n".join(value) or "none" if isinstance(value, list) else str(value))
    out.print(table)


def print_demo(result: dict[str, Any], directory: Path) -> None:
    """The gaps of all trainers and rollouts, and what was checked on the way."""
    table = Table(title="Log-prob gap on held-out text: NVFP4 rollouts (fp32 compute) against their trainers (bf16)")
    table.add_column("trainer")
    table.add_column("rollout")
    for heading in ("KL", "mean gap", "max gap", "perplexity"):
        table.add_column(heading, justify="right")
    previous = None
    for gap in result["gaps"]:
        if previous not in (None, gap["trainer"]):
            table.add_section()
        trainer = "" if gap["trainer"] == previous else gap["trainer"]
        previous = gap["trainer"]
        row = (f"{gap['kl']:.5f}", f"{gap['mean']:.4f}", f"{gap['max']:.3f}", f"{gap['perplexity']:.4f}")
        table.add_row(trainer, gap["rollout"], *row)
    out.print(table)
    out.print(f"quantized in every arm: {result['coverage']:.1%} of the weights")
    for name, report in result["checkpoints"].items():
        out.print(f"verified {name}: {report}")
    out.print(_of_transformers(result["transformers"]))
    out.print(
        "W4A16 QAT with compensated W4A4 rollouts is QUADS. What is left with weights only is bf16 against fp32 "
        "arithmetic: the weights are the same bits."
    )
    out.print(f"plot: {directory / 'gap.png'}   numbers: {directory / 'result.json'}", soft_wrap=True)


def _of_transformers(client: dict[str, Any] | None) -> str:
    if client is None:
        return (
            "transformers was not tried: reading compressed-tensors checkpoints needs `pip install compressed-tensors`"
        )
    patched = "the patch of quads_qat.patch_transformers() (transformers #48371)"
    patch = patched if client["patch_needed"] else "no patch"
    equal = "equal to ours" if client["equal_with_patch"] else "DIFFERENT from ours"
    return f"transformers loads the compressed-tensors checkpoint: logits {equal}; it needed {patch}"
