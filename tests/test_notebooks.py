"""The notebooks run as they stand, and hold the outputs of a run."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
TOUR = [path for path in NOTEBOOKS if path.stem[:2].isdigit()]
NEEDED = {"rl_with_trl": ("trl", "nbclient", "ipykernel")}
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def outputs(cell: dict[str, Any]) -> str:
    texts = [o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in cell.get("outputs", [])]
    return "".join("".join(text) for text in texts)


def figures(cell: dict[str, Any]) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell.get("outputs", []))


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@notebooks
def test_a_notebook_holds_the_outputs_of_a_whole_run(path: Path):
    code = code_cells(path)
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert not any(output["output_type"] == "error" for cell in code for output in cell["outputs"])
    text = "\n".join(map(outputs, code))
    assert not re.search(r"(^|[\s\"'=(])/(home|root|tmp|work|Users)/", text), "a path of the machine it ran on"
    assert "Warning" not in text
    assert re.search(r"torch \d.*\d CPU cores", text, re.DOTALL), "what it ran on"
    assert re.search(r"this notebook took \d+ s", text)
    assert path.stat().st_size < 300_000


def test_the_tour_is_whole_has_figures_and_is_short():
    assert [path.stem[:2] for path in TOUR] == ["01", "02", "03", "04"]
    assert all(sum(map(figures, code_cells(path))) >= 1 for path in TOUR)
    seconds = [re.search(r"(\d+) s of CPU time", "".join(map(outputs, code_cells(path)))) for path in TOUR]
    assert sum(int(found[1]) for found in seconds if found) < 240
    assert all(seconds)


@notebooks
def test_a_notebook_runs(path: Path, tmp_path: Path):
    missing = [name for name in NEEDED.get(path.stem, ("nbclient", "ipykernel")) if find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; `make notebooks` installs it and runs this")
    import nbformat  # pyright: ignore[reportMissingImports]
    from nbclient import NotebookClient  # pyright: ignore[reportMissingImports]

    notebook = nbformat.read(path, 4)
    stored = [(bool(outputs(cell)), figures(cell)) for cell in notebook.cells]
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
    assert [(bool(outputs(cell)), figures(cell)) for cell in notebook.cells] == stored
