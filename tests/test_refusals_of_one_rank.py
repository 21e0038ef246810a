"""Contract under test: what one rank alone refuses, all ranks that share its weights raise; none waits."""

import os
import subprocess
import sys
from pathlib import Path

RANK = """
import os, shutil, sys, warnings, torch
from pathlib import Path
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from tiny_models import tiny_model
import quads_qat as qq
from quads_qat.safetensors_file import FileWriter

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{folder}/store", 2))
model = qq.convert(tiny_model("qwen3_moe"), "w4a16")
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)


def both(call):
    try:
        call()
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("went on")
    dist.barrier()  # they are at the same place


def export(name="out", dialect="modelopt", **options):
    qq.export_checkpoint(model, f"{folder}/{name}", dialect=dialect, **options)


usage, write = shutil.disk_usage, FileWriter.write
shutil.disk_usage = lambda path: usage(path)._replace(free=1000)
both(export)
shutil.disk_usage = usage

with warnings.catch_warnings():
    warnings.simplefilter("error")
    both(lambda: export(dialect="compressed-tensors"))

left = [5]
def disk_full(self, *arguments):
    left[0] -= 1
    if left[0] == 0:
        raise OSError(28, "No space left on device")
    return write(self, *arguments)

FileWriter.write = disk_full
both(export)
FileWriter.write = write

both(lambda: export(source=f"{folder}/nowhere"))
activations = {"wrong": 1.0} if rank == 1 else "none"
both(lambda: export(activations=activations))
both(lambda: export(shard_bytes=1000 - 2000 * rank))
assert not list(Path(folder).glob("*out*"))

both(export)
away = [f"{folder}/out", f"{folder}/away"]
if rank == 1:
    away[0] = f"{folder}/other disk"
both(lambda: qq.verify(model, away[0]))
both(lambda: qq.verify(model, f"{folder}/out"))

rollout = qq.convert(tiny_model("qwen3_moe"), "w4a4_residual")
both(lambda: qq.diagnose(model, rollout, torch.arange(3, 15)[None]))

part = model.model.layers[1].self_attn.k_proj.weight.to_local()
whole = part.clone()
if rank == 1:
    part.data[0, 3] = float("nan")
both(lambda: qq.step(model, track_codes=True))
both(lambda: list(qq.export_weights(model, "modelopt", ranks=0)))
both(lambda: export("second"))
part.data.copy_(whole)
both(lambda: qq.step(model, track_codes=True))
dist.destroy_process_group()
"""

EXPECTED = [  # of each call: the start of what rank 0 says, and what rank 1 says
    ("ValueError: {}/out: needs about", "RuntimeError: export_checkpoint: rank 0 failed (ValueError: "),
    ("EngineWarning: TensorRT-LLM", "RuntimeError: export_checkpoint: rank 0 failed (EngineWarning: TensorRT-LLM"),
    ("ValueError: {}/out: could not be written", "RuntimeError: export_checkpoint: rank 0 failed (ValueError: "),
    ("ValueError: {}/nowhere", "RuntimeError: export_checkpoint: rank 0 failed (ValueError: {}/nowhere"),
    ("RuntimeError: export_checkpoint: rank 1 failed (ValueError: export: activations has", "ValueError: export: act"),
    (
        "RuntimeError: export_checkpoint: rank 1 failed (ValueError: export_checkpoint: shard_bytes must be",
        "ValueError: export_checkpoint: shard_bytes must be an integer >= 1, got -1000",
    ),
    ("went on", "went on"),
    ("RuntimeError: verify: rank 1 failed (ValueError: {}/other disk", "ValueError: {}/other disk"),
    ("went on", "went on"),
    *[("ValueError: diagnose: model.embed_tokens.weight is sharded",) * 2],
    *[("ValueError: step: model.layers.1.self_attn.k_proj.weight holds 1 NaN or inf",) * 2],
    *[("NotFiniteError: model.layers.1.self_attn.k_proj.weight: ",) * 2] * 2,
    ("went on", "went on"),
]


def test_two_ranks(tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in ranks]
    except subprocess.TimeoutExpired:
        for process in ranks:
            process.kill()
        raise AssertionError([process.communicate() for process in ranks]) from None
    said = list(zip(*(stdout.splitlines() for stdout, _ in outputs), strict=True))
    assert len(said) == len(EXPECTED), outputs
    for pair, expected in zip(said, EXPECTED, strict=True):
        for found, start in zip(pair, expected, strict=True):
            assert found.startswith(start.format(tmp_path)), (pair, expected)
