"""The kernels under their own suite and the reference's: in Triton's interpreter on a CPU, and on a GPU.

Each in a process of its own: Triton decides when it is imported whether it compiles, and ``under_test`` what is tested.
"""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
KERNELS = {"QUADS_QAT_UNDER_TEST": "kernels"}
# The interpreter takes milliseconds for a launch, and a minute to shrink an example
INTERPRETER = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "HYPOTHESIS_PROFILE": "few", "OMP_NUM_THREADS": "1"}


def assert_passes(suites: list[str], environment: dict[str, str], at_least: int, *options: str) -> None:
    files = [str(TESTS / f"{suite}.py") for suite in suites]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *options, *files]
    environment = {**os.environ, **environment}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout[-2000:]
    assert int(passed.group(1)) >= at_least


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton has no build for this platform")


@needs_triton
def test_the_kernels_suite_passes_in_the_interpreter():
    assert_passes(["test_kernels", "test_misuse"], INTERPRETER, 106, "-m", "gpu")


@needs_triton
def test_the_suite_of_the_activation_kernels_passes_in_the_interpreter():
    assert_passes(["test_residual_kernels"], INTERPRETER, 85, "-m", "gpu")


@needs_triton
def test_the_gemm_kernels_suite_passes_in_the_interpreter():
    assert_passes(["test_matmul_kernels"], INTERPRETER, 120, "-m", "gpu")


@needs_triton
def test_the_reference_s_properties_hold_for_the_kernels_in_the_interpreter():
    assert_passes(["test_reference_properties"], KERNELS | INTERPRETER, 21)


@needs_triton
def test_every_code_under_every_scale_byte_in_the_interpreter():
    """Of the sweeps, those over weights and amaxes take the interpreter many minutes: they are left to a GPU."""
    assert_passes(["test_reference_exhaustive"], KERNELS | INTERPRETER, 21, "-k", "every_code_under_every_scale_byte")


@pytest.mark.gpu
def test_the_reference_s_properties_and_sweeps_hold_for_the_kernels_on_a_gpu():
    assert_passes(["test_reference_properties", "test_reference_exhaustive"], KERNELS, 92)
