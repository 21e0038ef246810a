import os
from pathlib import Path

# Before any test imports huggingface_hub, which reads it once: a test that needs a download is a wrong test.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "ci", deadline=None, derandomize=True, max_examples=100, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", settings.get_profile("ci"), derandomize=False, max_examples=2000)
settings.register_profile("few", settings.get_profile("ci"), max_examples=7, phases=[Phase.explicit, Phase.generate])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # one core per worker; more threads only fight each other


def pytest_runtest_setup(item: pytest.Item) -> None:
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"  # the kernels' suite runs on a CPU then
    if item.get_closest_marker("gpu") and not torch.cuda.is_available() and not interpreting:
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds for subprocesses of each test too, whatever an earlier test did to the environment."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """``golden/`` (vectors) and ``checkpoints/`` (as the peers write them). Read only: copy before writing."""
    return Path(__file__).parent / "data"
