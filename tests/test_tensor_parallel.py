"""Contract under test: ``check_tp`` lists the weights whose blocks of 16 a plan would cut, or an engine without one.

And stacks of experts that share scales must be cut alike.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_modules import linears
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

import quads_qat as qq
from quads_qat import sharding

NAMES = ("layers.0.self_attn.o_proj", "layers.0.self_attn.q_proj", "layers.0.mlp.down_proj")


def listed(model: nn.Module, tp: int, **kwargs: Any) -> set[str]:
    return {line.partition(":")[0] for line in qq.check_tp(model, tp, **kwargs)}


def test_the_line_says_how_many_channels_a_rank_would_have():
    with torch.device("meta"):
        model = nn.ModuleDict({"down_proj": nn.Linear(1856, 2688), "up_proj": nn.Linear(2688, 1856)})
    assert qq.check_tp(model, 8) == ["down_proj.weight: K = 1856 over 8 ranks is 232 a rank, not a multiple of 16"]
    assert qq.check_tp(model, 4) == qq.check_tp(model, 1) == []  # 464 = 29 blocks


def test_without_a_plan_it_is_what_engines_cut():
    model = linears(*NAMES)  # K = 32
    assert listed(model, 4) == {f"{NAMES[0]}.weight", f"{NAMES[2]}.weight"}
    assert listed(model, 2) == set()


def test_a_plan_that_is_given_is_all_there_is():
    model = linears(*NAMES)
    assert listed(model, 4, plan={"layers.*.self_attn.q_proj": "rowwise"}) == {f"{NAMES[1]}.weight"}
    assert listed(model, 4, plan={"layers.*.mlp.down_proj": "colwise"}) == set()
    assert listed(model, 4, plan={}) == set()


def test_a_model_s_own_plan_goes_first_and_what_it_leaves_out_is_as_in_engines():
    model: Any = linears(*NAMES)
    model._tp_plan = {"layers.*.self_attn.o_proj": "colwise", "layers.*.self_attn.q_proj": "rowwise_split_input"}
    assert listed(model, 4) == {f"{NAMES[1]}.weight", f"{NAMES[2]}.weight"}


@pytest.mark.parametrize(
    ("arch", "expected"),
    [
        ("qwen3_moe", {"mlp.experts.down_proj"}),  # the plan names it
        ("gpt_oss", {"mlp.experts.down_proj"}),  # the plan names no quantized weight; stored [E, K, N]
        (
            "llama4",
            {"feed_forward.experts.down_proj", "feed_forward.shared_expert.down_proj.weight"},
        ),  # colwise, of [K, N]
    ],
)
@pytest.mark.parametrize("converted", [False, True])
def test_stacks_of_experts_are_cut_along_their_k(arch: str, expected: set[str], converted: bool):
    model = tiny_model(arch)
    if converted:
        qq.convert(model, "w4a16")
    found = {name.partition("layers.0.")[2] for name in listed(model, 4)} - {""}
    assert found == expected
    assert listed(model, 1) == set()


def test_what_is_not_quantized_may_be_cut():
    model = qq.convert(linears(*NAMES), "w4a16", exclude=["*.o_proj"])
    assert listed(model, 4) == {f"{NAMES[2]}.weight"}


def test_a_wrapper_around_a_converted_model_is_looked_through():
    model = nn.ModuleDict({"module": qq.convert(linears(*NAMES), "w4a16")})  # as DistributedDataParallel has it
    assert listed(model, 4) == {f"{NAMES[0]}.weight", f"{NAMES[2]}.weight"}


def test_a_number_of_ranks_is_at_least_one():
    with pytest.raises(ValueError, match=r"^check_tp: tp must be at least 1, got 0; pass the number of ranks"):
        qq.check_tp(linears(*NAMES), 0)


def test_stacks_of_one_scale_group_that_are_cut_along_e_in_different_ways_are_refused():
    """Each rank would compare the amaxes of other experts."""

    def stack(*placements: Placement) -> Tensor:
        weight = torch.zeros(4, 8, 32)
        weight.placements = placements  # pyright: ignore[reportAttributeAccessIssue]
        return weight

    alike = [stack(Shard(0), Replicate()), stack(Shard(0), Shard(1))]
    sharding.require_same_experts(alike)
    sharding.require_same_experts([torch.zeros(4, 8, 32), stack(Replicate(), Shard(1))])
    for other in (stack(Replicate(), Shard(0)), stack(Replicate(), Shard(1)), torch.zeros(4, 8, 32)):
        with pytest.raises(ValueError, match="cut over ranks in different ways"):
            sharding.require_same_experts([alike[0], other])
