"""The benchmarks check bits before they measure, and their command line shows what they found."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import quantize_cpu
from benchmarks.__main__ import app
from benchmarks.registry import BENCHMARKS, benchmark
from quads_qat.config import Recipe


def test_a_peer_with_other_bytes_gets_no_time(monkeypatch: pytest.MonkeyPatch):
    def wrong(weight: torch.Tensor):
        rows, columns = weight.shape
        return torch.zeros(rows, columns // 2).byte(), torch.zeros(rows, columns // 16).byte(), torch.ones(())

    def missing():
        raise ImportError("No module named 'peer'")

    peers = {"wrong": (lambda: wrong, Recipe.MODELOPT_IEEE), "missing": (missing, Recipe.ALIGNED)}
    monkeypatch.setattr(quantize_cpu, "PEERS", peers)
    rows = {row.name: row for row in quantize_cpu.quantize_cpu(rows=16, columns=32, rounds=1).rows}
    assert rows["wrong"].seconds is None
    assert "bytes differ from modelopt-ieee" in rows["wrong"].note
    assert rows["missing"].seconds is None
    assert rows["missing"].note == "skipped: No module named 'peer'"
    assert all(rows[f"quads_qat {recipe}"].seconds for recipe in Recipe)


def test_the_command_line_writes_what_it_shows(tmp_path: Path):
    arguments = [
        "run",
        "quantize-cpu",
        "--rows",
        "16",
        "--columns",
        "64",
        "--rounds",
        "1",
        "--out",
        str(tmp_path / "a/b"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Quantize a 16 x 64 bf16 weight" in result.output
    written = json.loads((tmp_path / "a/b.json").read_text())
    assert written["settings"] == {"rows": 16, "columns": 64, "rounds": 1, "seed": 0}
    table = (tmp_path / "a/b.md").read_text()
    assert all(f"| {row['name']} | " in table for row in written["rows"])


def test_names_are_unique():
    assert "quantize-cpu" in CliRunner().invoke(app, ["list"]).output
    with pytest.raises(ValueError, match="'quantize-cpu' is registered twice"):
        benchmark("quantize-cpu")(BENCHMARKS["quantize-cpu"])
