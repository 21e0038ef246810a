"""Contract under test: weights go from a trainer process to a rollout process, with a layer and a bucket of memory."""

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, finalize

import pytest
import torch
from bits import assert_same_bits
from small_modules import fill
from tiny_models import tiny_inputs, tiny_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import quads_qat as qq

BUCKET = 1 << 12


PROLOGUE = """
import sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from tiny_models import tiny_inputs, tiny_model
import quads_qat as qq

rank, world, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(f"{folder}/store", world))

def bits(tensor):
    return tensor.reshape(-1).view(torch.uint8)

def same(stream, expected):
    stream = dict(stream)
    return list(stream) == list(expected) and all(
        stream[name].dtype == t.dtype and torch.equal(bits(stream[name]), bits(t))
        for name, t in expected.items()
    )

def send(stream, group=None):
    for entries, bucket in qq.bucketed(stream, 4096):
        dist.broadcast_object_list([(entries, bucket.numel())], src=0, group=group)
        dist.broadcast(bucket, src=0, group=group)
    dist.broadcast_object_list([None], src=0, group=group)

def received(group=None):
    bucket = torch.empty(1 << 16, dtype=torch.uint8)  # one piece of memory for all
    while True:
        header = [None]
        dist.broadcast_object_list(header, src=0, group=group)
        if header[0] is None:
            return
        entries, size = header[0]
        dist.broadcast(bucket[:size], src=0, group=group)
        yield entries, bucket[:size]
"""

BROADCAST = """
for arch in ("qwen3_moe", "gpt_oss"):
    for dialect in ("modelopt", "compressed-tensors"):
        rollout = qq.convert(tiny_model(arch, seed=0), "w4a4_residual") if rank else None
        for seed in (1, 2):
            trainer = qq.convert(tiny_model(arch, seed=seed), "w4a16")
            metadata = [qq.export_metadata(trainer, dialect)] if rank == 0 else [None]
            dist.broadcast_object_list(metadata, src=0)
            if rank == 0:
                send(qq.export_weights(trainer, dialect, ranks=0))
            else:
                qq.update_weights(rollout, qq.unbucketed(received()), metadata=metadata[0])
                fresh = qq.convert(trainer, "w4a4_residual")
                assert same(rollout.state_dict().items(), fresh.state_dict()), (arch, dialect)
                logits = [m(**tiny_inputs(m)).logits for m in (rollout, fresh)]
                assert torch.equal(*logits)
"""

SHARDED = """
def sharded(kind):
    model = qq.convert(tiny_model("qwen3_moe", seed=1), "w4a16")
    if kind == "fsdp":
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)
    mesh = dist.init_device_mesh("cpu", (2,))
    for name, module in model.named_modules():  # as tensor parallelism cuts them: rows, columns, or whole experts
        for leaf, parameter in [(leaf, p) for leaf, p in module._parameters.items() if p is not None]:
            column = leaf == "weight" and name.rpartition(".")[2] in ("o_proj", "down_proj")
            cut = parameter.ndim > 1 and "norm" not in name and not name.endswith(".gate")
            placement = Shard(1) if column else Shard(0) if cut else Replicate()
            new = torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement]))
            module._parameters[leaf] = new
    return model

plain = qq.convert(tiny_model("qwen3_moe", seed=1), "w4a16")
fresh = qq.convert(tiny_model("qwen3_moe", seed=1), "w4a4_residual").state_dict()
for kind in ("fsdp", "tp"):
    model = sharded(kind)
    assert all(hasattr(p, "placements") for p in model.parameters()), kind
    for dialect in ("modelopt", "compressed-tensors", "dequantized"):
        whole = dict(qq.export_weights(plain, dialect))
        assert qq.export_metadata(model, dialect) == [(n, t.dtype, tuple(t.shape)) for n, t in whole.items()]
        assert same(qq.export_weights(model, dialect), whole), kind
    # all ranks gather; rank 0 has a rollout
    stream = qq.export_weights(model, "modelopt", ranks=0)
    if rank == 0:
        rollout = qq.convert(tiny_model("qwen3_moe"), "w4a4_residual")
        qq.update_weights(rollout, stream)
        assert same(rollout.state_dict().items(), fresh), kind
    else:
        assert list(stream) == []
    # a rollout on every rank takes the shards themselves
    rollout = qq.convert(tiny_model("qwen3_moe"), "w4a4_residual")
    qq.update_weights(rollout, model.state_dict())
    assert same(rollout.state_dict().items(), fresh), kind
    dist.barrier()
"""

STREAMED = """
from test_weight_sync_processes import Memory, big_layers

model = qq.convert(big_layers(1), "w4a16")
largest = max(p.nbytes for p in model.parameters())
assert sum(p.nbytes for p in model.parameters()) > 20 * largest
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
for ranks in ("all", 0):
    stream, names = qq.export_weights(model, "modelopt", ranks=ranks), 0
    with Memory() as memory:
        for _, tensor in stream:
            names += 1
            del tensor
    # a parameter as it comes from the other ranks, put together, and its codes or another copy
    assert memory.peak <= 3.125 * largest and memory.now == 0, (memory.peak, largest)
    assert (names > 0) == (ranks == "all" or rank == ranks)
with Memory() as memory:
    kept = dict(qq.export_weights(model, "modelopt"))
assert memory.peak > 6 * largest  # what is kept is seen
print("fine")
dist.destroy_process_group()
"""


def test_two_processes(tmp_path: Path):
    """A trainer broadcasts weights to a rollout; sharded trainers give the bytes of whole ones, in the same order.

    On every rank they gather one parameter at a time.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROLOGUE + BROADCAST + SHARDED + STREAMED, str(rank), "2", str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [stdout for stdout, _ in outputs] == ["fine\n"] * 2, "".join(stderr for _, stderr in outputs)


# -------------------------------------------------------------------------------------------------------------- buckets


def test_buckets_come_back_as_they_were():
    stream = list(qq.export_weights(qq.convert(tiny_model("gpt_oss"), "w4a16"), "modelopt"))
    back = list(qq.unbucketed(qq.bucketed(stream, BUCKET)))
    assert [name for name, _ in back] == [name for name, _ in stream]
    for (name, tensor), (_, expected) in zip(back, stream, strict=True):
        assert_same_bits(tensor, expected, name)


def test_entries_follow_from_metadata_alone():
    trainer = qq.convert(tiny_model("qwen3_moe"), "w4a16")
    entries = [entries for entries, _ in qq.bucketed(qq.export_weights(trainer, "modelopt"), BUCKET)]
    empty = ((n, torch.empty(s, dtype=d, device="meta")) for n, d, s in qq.export_metadata(trainer, "modelopt"))
    assert [entries for entries, _ in qq.bucketed(empty, BUCKET)] == entries
    assert len(entries) > 10


def test_a_bucket_may_lie_anywhere_in_memory():
    tensors = [("a", torch.randn(3)), ("b", torch.arange(5)), ("c", torch.randn(2, 2).bfloat16())]
    ((entries, bucket),) = qq.bucketed(tensors, 1 << 10)
    for shift in (1, 2, 5, 16):
        memory = torch.zeros(bucket.numel() + shift, dtype=torch.uint8)
        memory[shift:] = bucket
        for (name, tensor), (_, expected) in zip(qq.unbucketed([(entries, memory[shift:])]), tensors, strict=True):
            assert torch.equal(tensor, expected), name


def test_wrong_buckets_are_refused():
    ((entries, bucket),) = qq.bucketed([("a", torch.ones(8)), ("b", torch.ones(8))], 1 << 10)
    with pytest.raises(ValueError, match="unbucketed: b needs bytes up to 64, the bucket has 48; receive all of it"):
        list(qq.unbucketed([(entries, bucket[:-16])]))
    for wrong in (bucket.view(torch.float32), bucket.view(8, 8)):
        with pytest.raises(ValueError, match=r"unbucketed: a bucket must be uint8 \[bytes\], got"):
            list(qq.unbucketed([(entries, wrong)]))


# --------------------------------------------------------------------------------------------------------------- memory


class Memory(TorchDispatchMode):
    """Bytes of tensors made inside that are alive, and their peak. Scratch inside one operator is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.device.type == "cpu":
                storage = leaf.untyped_storage()
                if id(storage) not in before and storage not in self.known:
                    self.known[storage] = storage.nbytes()
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    finalize(storage, self._gone, storage.nbytes())
        return out

    def _gone(self, nbytes: int) -> None:
        self.now -= nbytes


def layer_bytes(stream: Iterator[tuple[str, Tensor]]) -> int:
    """Bytes of the largest layer of a stream; what belongs to no layer counts as one."""
    layers: dict[str, int] = {}
    for name, tensor in stream:
        layer = name.split(".")[2] if ".layers." in name else ""
        layers[layer] = layers.get(layer, 0) + tensor.nbytes
    return max(layers.values())


def test_memory_is_seen():
    with Memory() as memory:
        kept = torch.ones(1000)
        torch.ones(500)
        view = kept[:10]
        assert view.numel() == 10
    assert (memory.now, memory.peak) == (4000, 6000)
    del kept, view
    assert memory.now == 0


def big_layers(seed: int) -> Any:
    """12 equal layers, larger than the embeddings, so that a second layer in memory would show."""
    config = tiny_model("qwen3_moe").config
    config.num_hidden_layers, config.num_experts, config.moe_intermediate_size = 12, 8, 64
    config.layer_types = None
    return fill(type(tiny_model("qwen3_moe"))(config).bfloat16(), seed)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_sync_takes_one_layer_and_one_bucket(dialect: str):
    trainer = qq.convert(big_layers(1), "w4a16")
    rollout = qq.convert(big_layers(0), "w4a4_residual")
    layer = layer_bytes(qq.export_weights(trainer, dialect))
    qq.update_weights(rollout, qq.export_weights(trainer, dialect))  # plans are made once

    def buckets(stream: Any) -> Iterator[Any]:
        for item in qq.bucketed(stream, BUCKET):
            yield item
            del item

    stream = qq.export_weights(trainer, dialect)  # plans, with a fixed amount of memory, and yields nothing yet
    with Memory() as sender:
        for entries, bucket in buckets(stream):
            del entries, bucket
    parameter = max(p.numel() for p in trainer.parameters() if p.ndim == 3) * 9 // 16
    assert sender.peak <= parameter + 2 * BUCKET + parameter // 8, (sender.peak, parameter, layer)
    stream = qq.export_weights(trainer, dialect)
    with Memory() as receiver:
        qq.update_weights(rollout, qq.unbucketed(buckets(stream)))
    assert receiver.peak <= layer + sender.peak + layer // 8, (receiver.peak, layer, sender.peak)
    assert (sender.now, receiver.now) == (0, 0)


def test_dequantized_weights_take_one_layer_too():
    trainer = qq.convert(big_layers(1), "w4a16")
    layer = layer_bytes(qq.export_weights(trainer, "dequantized"))
    stream = qq.export_weights(trainer, "dequantized")
    with Memory() as memory:
        for item in qq.bucketed(stream, BUCKET):
            del item
    assert memory.peak <= layer + BUCKET, (memory.peak, layer)
    assert memory.now == 0


def test_masters_take_one_layer_too():
    trainer, rollout = big_layers(1), qq.convert(big_layers(0), "w4a4_residual")
    state = trainer.state_dict()
    qq.update_weights(rollout, state)
    with Memory() as memory:
        qq.update_weights(rollout, state)
    assert memory.peak <= 1.2 * layer_bytes(iter(state.items()))
    assert memory.now == 0


def tensors_alive() -> int:
    return sum(type(thing) in (Tensor, nn.Parameter) for thing in gc.get_objects())


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_hundred_syncs_leak_nothing_and_keep_every_bit():
    trainer: Any = qq.convert(tiny_model("qwen3_moe"), "w4a16")
    rollout: Any = qq.convert(tiny_model("qwen3_moe"), "w4a4_residual")
    addresses = {name: tensor.data_ptr() for name, tensor in rollout.state_dict().items()}
    alive, memory = 0, 0
    for step in range(100):
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.copy_(parameter.flatten().roll(1).view_as(parameter) * -1.01)
        dialect = ("modelopt", "compressed-tensors")[step % 2]
        metadata = qq.export_metadata(trainer, dialect) if step % 10 == 0 else None
        qq.update_weights(
            rollout, qq.unbucketed(qq.bucketed(qq.export_weights(trainer, dialect), BUCKET)), metadata=metadata
        )
        fresh = qq.convert(copy.deepcopy(trainer), "w4a4_residual").state_dict()
        for name, tensor in rollout.state_dict().items():
            assert_same_bits(tensor, fresh[name], f"step {step}: {name}")
        del fresh
        if step == 10:
            gc.collect()
            alive, memory = tensors_alive(), resident()
    gc.collect()
    assert tensors_alive() <= alive
    assert resident() - memory < 16 << 20
    assert {name: tensor.data_ptr() for name, tensor in rollout.state_dict().items()} == addresses
    assert bool(torch.isfinite(rollout(**tiny_inputs(rollout)).logits).all())
