"""What a benchmark is, and how its rows become a table, JSON and Markdown."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One timed call.

    Attributes:
        name: of the implementation.
        seconds: best of all rounds; None where it was not timed, and ``note`` says why.
        ours: name of our row that does the same work, for a peer.
        note: one line.
    """

    name: str
    seconds: float | None
    ours: str = ""
    note: str = ""


@dataclass
class Report:
    """Rows of one benchmark, measured side by side on one input.

    Attributes:
        title: what was measured, on which input.
        unit_count: how many units (elements, say) one call handles.
        unit: their name, in the plural.
        packages: distributions whose versions belong to the result.
        settings: whatever else is needed to repeat it.
        rows: in the order of the table.
    """

    title: str
    unit_count: int
    unit: str
    packages: tuple[str, ...] = ("torch",)
    settings: dict[str, object] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def versions(self) -> dict[str, str]:
        """Installed versions of ``packages``."""
        found = {}
        for name in self.packages:
            try:
                found[name] = metadata.version(name).split("+")[0]
            except metadata.PackageNotFoundError:
                found[name] = "not installed"
        return found

    @property
    def machine(self) -> str:
        """Threads and architecture: what a reader needs, and no name of any machine."""
        return f"{torch.get_num_threads()} CPU threads ({platform.machine().replace('x86_64', 'x86-64')})"

    @property
    def header(self) -> tuple[str, ...]:
        """Names of the columns: a name, numbers, a note."""
        return ("implementation", "ms", "M/s", "time / ours", "note")

    @property
    def legend(self) -> str:
        """What the columns hold."""
        return f"ms: best of all rounds; M/s: million {self.unit}/s; time / ours: against the row with the same bytes"

    def cells(self) -> list[tuple[str, ...]]:
        """The table as text, one tuple per row."""
        seconds = {row.name: row.seconds for row in self.rows}
        table = []
        for row in self.rows:
            if row.seconds is None:
                table.append((row.name, "-", "-", "-", row.note))
                continue
            ours = seconds.get(row.ours)
            ratio = f"{row.seconds / ours:.2f}" if ours else ""
            rate = self.unit_count / row.seconds / 1e6
            table.append((row.name, f"{row.seconds * 1e3:.1f}", f"{rate:.0f}", ratio, row.note))
        return table

    def as_table(self) -> Table:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        table = Table(title=self.title, caption=f"{self.machine}, {versions}\n{self.legend}")
        for i, name in enumerate(self.header):
            last = i == len(self.header) - 1
            table.add_column(name, justify="right" if i and not last else "left", no_wrap=not last, overflow="fold")
        for cells in self.cells():
            table.add_row(*cells)
        return table

    def as_markdown(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines = [f"## {self.title}", "", f"{self.machine}, {versions}, {date.today()}", ""]
        lines += markdown_table(self.header, self.cells())
        return "\n".join([*lines, "", self.legend]) + "\n"

    def as_json(self) -> str:
        measured = {"machine": self.machine, "versions": self.versions, "date": str(date.today())}
        return json.dumps(asdict(self) | measured, indent=2) + "\n"

    def show(self, out: Path | None = None) -> None:
        """Print the table; with ``out`` also write ``out.json`` and ``out.md``."""
        Console().print(self.as_table())
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.with_suffix(".json").write_text(self.as_json())
            out.with_suffix(".md").write_text(self.as_markdown())


def markdown_table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Lines of a table: a name, numbers, and a last column of text."""
    rule = ("---", *["---:"] * (len(header) - 2), "---")
    return ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]


@dataclass
class GpuReport(Report):
    """Of what runs on a GPU where there is one."""

    @property
    def machine(self) -> str:
        """The GPU, with how many of them where the setting ``gpus`` says so."""
        if not torch.cuda.is_available():
            return super().machine
        name = torch.cuda.get_device_name()
        return f"{self.settings['gpus']} x {name}" if "gpus" in self.settings else name


Benchmark = Callable[..., Report]
BENCHMARKS: dict[str, Benchmark] = {}


def benchmark(name: str) -> Callable[[Benchmark], Benchmark]:
    """Register a function under ``name``. Its keyword arguments become options of ``python -m benchmarks run name``."""

    def register(function: Benchmark) -> Benchmark:
        if name in BENCHMARKS:
            raise ValueError(f"benchmark {name!r} is registered twice")
        BENCHMARKS[name] = function
        return function

    return register


def best_times(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Best wall time of each call, in seconds. Calls take turns, so that a busy machine slows all of them."""
    for call in calls.values():
        call()  # warm up: caches, lazy imports, the allocator
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best
