"""One rank of ``test_peft.py``, started by torchrun: adapters of an FSDP2 trainer against those of a whole model."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from peft import get_peft_model
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import quads_qat as qq
from quads_qat.integrations.peft import lora_config, merged


def trainer() -> nn.Module:
    torch.manual_seed(0)
    model = qq.convert(tiny_model("qwen3_moe", dtype=torch.bfloat16, experts_implementation="grouped_mm"), "w4a16")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    targets = {"target_modules": ["q_proj", "v_proj"], "target_parameters": experts}
    config = lora_config(**targets, r=4, init_lora_weights=False)
    return get_peft_model(model, config, autocast_adapter_dtype=False)  # FSDP2 wants one dtype in a unit


def step(model: nn.Module, ids: Tensor) -> Tensor:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, foreach=False)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    return loss.detach()


def main(report: Path) -> None:
    dist.init_process_group("gloo")
    ids = torch.randint(3, 120, (2, 9), generator=torch.Generator().manual_seed(0))  # equal on all ranks
    whole, sharded = trainer(), trainer()
    for layer in sharded.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    assert torch.equal(step(sharded, ids), step(whole, ids))
    before = {name: p.full_tensor().clone() for name, p in sharded.named_parameters()}
    with merged(whole) as plain:
        expected = dict(qq.export_weights(plain, "modelopt"))
    with merged(sharded) as plain:
        found = dict(qq.export_weights(plain, "modelopt"))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].float(), tensor.float()), name
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        assert torch.equal(parameter.full_tensor(), before[name]), name
    assert torch.equal(step(sharded, ids), step(whole, ids))
    if dist.get_rank() == 0:
        report.write_text("passed")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
