"""One rank of ``test_distributed.py``, started by torchrun: trainers on PyTorch's own engines against a whole model.

Over NCCL where every rank has a GPU, else over gloo. Where an engine sums in another order than one process (a GEMM
that is cut along K), the case says so and bounds the difference.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_data_parallel import (
    ddp,
    example_of_the_docs,
    expert_without_tokens,
    first_step,
    fsdp2,
    fsdp2_replicated,
    gradients_to_a_bound,
    observed_activations,
    scales_held_and_codes_kept,
    trainers_on_a_part_of_the_world,
)
from rank_expert_parallel import expert_parallel, fsdp2_with_expert_parallel
from rank_models import DEVICE
from rank_tensor_parallel import (
    cut_blocks,
    fsdp2_with_tensor_parallel,
    held_scales_with_tensor_parallel,
    hooks_of_transformers,
    siblings_cut_in_other_ways,
    tensor_parallel,
)

TWO_RANKS = {
    "fsdp2": fsdp2,
    "fsdp2, eager experts, kept unsharded": lambda r, w: fsdp2(r, w, experts="eager", reshard=False),
    "fsdp2, bf16 compute": lambda r, w: fsdp2(r, w, mixed=True),
    "scales held, codes kept": scales_held_and_codes_kept,
    "ddp": ddp,
    "tensor parallel": tensor_parallel,
    "siblings cut in other ways": siblings_cut_in_other_ways,
    "cut blocks": cut_blocks,
    "hooks of transformers": hooks_of_transformers,
    "an expert without tokens": expert_without_tokens,
    "expert parallel": expert_parallel,
    "observed activations": observed_activations,
    "example of the docs": example_of_the_docs,
    "first step": first_step,
}
FOUR_RANKS = {
    "fsdp2": lambda r, w: gradients_to_a_bound(r, w, shard=True),
    "ddp": lambda r, w: gradients_to_a_bound(r, w, shard=False),
    "tensor parallel": tensor_parallel,
    "expert parallel": expert_parallel,
    "fsdp2 x tensor parallel": fsdp2_with_tensor_parallel,
    "fsdp2 x tensor parallel, scales held": held_scales_with_tensor_parallel,
    "fsdp2 x expert parallel": fsdp2_with_expert_parallel,
    "fsdp2, replicated": fsdp2_replicated,
    "trainers on a part of the world": trainers_on_a_part_of_the_world,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(DEVICE == "cuda", warn_only=True)  # where bits are compared
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, case in (TWO_RANKS if world == 2 else FOUR_RANKS).items():
        case(rank, world)
        if rank == 0:
            with Path(sys.argv[1]).open("a") as file:
                file.write(f"{name}\n")
        dist.barrier()
    dist.destroy_process_group()
