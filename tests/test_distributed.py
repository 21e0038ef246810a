"""Contract under test: trainers under FSDP2, DDP, tensor parallelism and both train what one process would train.

Every case runs in ``distributed_ranks.py``, in processes that torchrun starts, over gloo or, with two GPUs, NCCL.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent


def passed_cases(ranks: int, folder: Path, gpus: str = "") -> tuple[list[str], str]:
    report = folder / "passed"
    report.touch()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "OMP_NUM_THREADS": "1"}
    environment["CUDA_VISIBLE_DEVICES"] = gpus
    done = subprocess.run(
        [*command, str(TESTS / "distributed_ranks.py"), str(report)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return report.read_text().splitlines(), done.stderr[-3000:]


@pytest.mark.parametrize("ranks", [2, 4])
def test_trainers_on_pytorch_s_engines(ranks: int, tmp_path: Path):
    from distributed_ranks import FOUR_RANKS, TWO_RANKS

    passed, log = passed_cases(ranks, tmp_path)
    assert passed == list(TWO_RANKS if ranks == 2 else FOUR_RANKS), log


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_trainers_on_pytorch_s_engines_over_nccl(ranks: int, tmp_path: Path):
    from distributed_ranks import FOUR_RANKS, TWO_RANKS

    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    passed, log = passed_cases(ranks, tmp_path, gpus=",".join(map(str, range(ranks))))
    assert passed == list(TWO_RANKS if ranks == 2 else FOUR_RANKS), log
