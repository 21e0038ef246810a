"""Contract under test: a model that FSDP2 shards exports the bytes of the whole model, from all ranks or from one."""

import os
import subprocess
import sys
from pathlib import Path

RANK = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from tiny_models import tiny_model
import quads_qat as qq

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{folder}/store", 2))
model = qq.convert(tiny_model("qwen3_moe"), "w4a16")
whole = dict(qq.export_weights(model, "modelopt"))
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
assert all(hasattr(p, "placements") for p in model.parameters())

def same(stream):
    return stream.keys() == whole.keys() and all(
        torch.equal(stream[name].reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8))
        for name, t in whole.items()
    )

assert same(dict(qq.export_weights(model, "modelopt")))
assert [len(list(qq.export_weights(model, "modelopt", ranks=r))) > 0 for r in (0, 1)] == [rank == 0, rank == 1]
assert qq.export_metadata(model, "modelopt") == [(n, t.dtype, tuple(t.shape)) for n, t in whole.items()]
qq.export_checkpoint(model, f"{folder}/out", dialect="modelopt")
dist.barrier()
assert qq.verify(model, f"{folder}/out").ok
print("fine")
dist.destroy_process_group()
"""


def test_two_ranks(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    outputs = [process.communicate(timeout=120) for process in ranks]
    assert [stdout for stdout, _ in outputs] == ["fine\n"] * 2, outputs[0][1] + outputs[1][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "store"]
