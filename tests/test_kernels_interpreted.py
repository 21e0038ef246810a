"""The kernels' whole suite in Triton's interpreter, on a CPU: what CI can know of them without a GPU."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton has no build for this platform")
def test_the_kernels_suite_passes_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:xdist", str(TESTS / "test_kernels.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-2000:]
    assert int(passed.group(1)) >= 100
