"""The examples of README.md run as they stand, in an empty directory."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quads_qat as qq

README = Path(__file__).parents[1] / "README.md"
EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", README.read_text(), re.DOTALL))


@pytest.mark.parametrize("name", ["trainer", "rollout", "sync", "transformers"])
def test_example_runs(name: str, tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(README.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", EXAMPLES[name]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    expected = {
        "trainer": "are equal, bit for bit",
        "rollout": "GapStats(tokens=10",
        "sync": "parts have new weights",
        "transformers": "fraction 0.25",
    }
    assert expected[name] in done.stdout


def test_names_in_the_recipes_exist():
    recipes = (README.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\bqq((?:\.\w+)+)", recipes))
    assert len(names) > 10
    missing = [name for name in names if attribute(qq, name) is None]
    assert not missing


def attribute(module: Any, path: str) -> Any:
    for name in path.strip(".").split("."):
        module = getattr(module, name, None)
    return module


def test_examples_are_short():
    assert all(len(code.strip().splitlines()) <= 12 for code in EXAMPLES.values())
