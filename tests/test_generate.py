"""``generate`` of transformers on rollout models: cache, padding and sampling give what a plain forward gives.

A CPU's GEMM and softmax sum in an order that depends on the number of rows and keys, so that a cached step, one row
long, differs from the same row of a longer forward by a rounding, in an unconverted model too. Here they sum in
float64 and round once, and everything is compared bit for bit: what is left could only come from quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import quads_qat as qq
from quads_qat.residual import ResidualCompensatedExperts, ResidualCompensatedLinear

NEW = 5
PROMPT = torch.randint(3, 120, (1, 12), generator=torch.Generator().manual_seed(3))
BATCH_INVARIANT = pytest.mark.parametrize(
    ("arch", "scope", "dtype"),
    [
        ("qwen3_moe", "token", torch.float32),
        ("qwen3_moe", "token", torch.bfloat16),
        ("qwen3_moe", "block", torch.float32),
        ("gpt_oss", "token", torch.float32),
        ("gpt_oss", "block", torch.bfloat16),
        ("llama", "token", torch.float32),
        ("llama", "block", torch.bfloat16),
        ("qwen3_moe", "weights only", torch.float32),
        ("qwen3_moe", "static", torch.float32),
    ],
)


class SumInFloat64(TorchFunctionMode):
    """Matrix products and softmax in float64, rounded once to the dtype they would have had."""

    OPS = (F.linear, F.softmax, torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.softmax)

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.OPS:
            return func(*args, **kwargs)
        dtype = kwargs.pop("dtype", None) or args[0].dtype
        wide = [a.double() if isinstance(a, Tensor) else a for a in args]
        return func(*wide, **{k: v.double() if isinstance(v, Tensor) else v for k, v in kwargs.items()}).to(dtype)


@pytest.fixture(autouse=True)
def _sum_in_float64():
    with SumInFloat64(), torch.no_grad():
        yield


def rollout(arch: str, scope: str = "token", dtype: torch.dtype = torch.float32) -> Any:
    model = tiny_model(arch, dtype=dtype)
    model.generation_config.eos_token_id = None  # a random model ends at random
    if scope == "weights only":
        return qq.convert(model, "w4a4_residual", weights_only=True)
    qq.convert(model, "w4a4_residual", residual=qq.ResidualConfig(fraction=0.5, scope=scope))
    if scope == "static":
        qq.calibrate(model, [PROMPT.flip(1)])
    return model


def generate(model: Any, ids: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """``(sequences [B, L + NEW], logits [B, NEW, V])``."""
    defaults = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    flags = {"return_dict_in_generate": True, "output_logits": True}
    out = model.generate(ids, **{**defaults, **options}, **flags)
    assert out.sequences.shape[1] == ids.shape[1] + NEW
    return out.sequences, torch.stack(out.logits, 1)


def step_by_step(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy: the whole sequence anew for every token."""
    logits = []
    for _ in range(NEW):
        logits.append(model(ids, use_cache=False).logits[:, -1])
        ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], 1)
    return ids, torch.stack(logits, 1).float()


# --------------------------------------------------------------------------------------------------------------- greedy


@BATCH_INVARIANT
def test_a_kv_cache_changes_no_bit(arch: str, scope: str, dtype: torch.dtype):
    model = rollout(arch, scope, dtype)
    expected, logits = step_by_step(model, PROMPT)
    found, found_logits = generate(model, PROMPT)
    assert torch.equal(found, expected)
    assert_same_bits(found_logits.float(), logits)


def test_a_static_cache_changes_no_bit():
    model = rollout("qwen3_moe")
    assert_same_bits(*(generate(model, PROMPT, cache_implementation=kind)[1] for kind in ("static", "dynamic")))


def test_batch_scope_ranks_the_rows_of_a_call_so_the_cache_matters():
    model = rollout("qwen3_moe", "batch")
    cached, logits = generate(model, PROMPT)[1], step_by_step(model, PROMPT)[1]
    assert_same_bits(cached[:, 0], logits[:, 0])  # the prompt: the same rows
    assert not torch.equal(cached[:, 1], logits[:, 1])  # one row against thirteen


# ---------------------------------------------------------------------------------------------------------------- batch


@BATCH_INVARIANT
def test_a_row_of_a_left_padded_batch_is_the_row_alone(arch: str, scope: str, dtype: torch.dtype):
    model = rollout(arch, scope, dtype)
    lengths = (12, 5, 9)
    ids, mask = torch.zeros(3, 12, dtype=torch.long), torch.zeros(3, 12, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, -length:] = PROMPT[0, :length]
        mask[row, -length:] = 1
    found, logits = generate(model, ids, attention_mask=mask)
    for row, length in enumerate(lengths):
        alone, logits_alone = generate(model, PROMPT[:, :length])
        assert torch.equal(found[row, -NEW - length :], alone[0])
        assert_same_bits(logits[row], logits_alone[0])


def test_a_row_that_has_ended_is_padded_and_leaves_the_others_alone():
    model = rollout("llama")
    ids = torch.cat([PROMPT, PROMPT.flip(1)])
    free, _ = generate(model, ids)
    end = int(free[0, ids.shape[1] + 2])
    stop = [row.tolist().index(end) + 1 if end in row.tolist() else NEW for row in free[:, ids.shape[1] :]]
    assert stop[0] < stop[1]
    found, _ = generate(model, ids, eos_token_id=end)
    for row, length in enumerate(stop):
        written = found[row, ids.shape[1] :]
        assert torch.equal(written[:length], free[row, ids.shape[1] :][:length])
        assert not written[length:].any()


# ------------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("arch", ["llama", "qwen3_moe"])
def test_samples_are_those_of_the_seed(arch: str):
    model = rollout(arch)

    def sample(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return generate(model, PROMPT, do_sample=True, top_k=0, num_return_sequences=4)[0]

    first = sample(0)
    assert torch.equal(sample(0), first)
    assert not torch.equal(sample(1), first)
    assert len({tuple(row.tolist()) for row in first}) == 4


@BATCH_INVARIANT
def test_log_probs_of_samples_are_those_of_one_forward_over_them(arch: str, scope: str, dtype: torch.dtype):
    """What reinforcement learning recomputes."""
    model = rollout(arch, scope, dtype)
    torch.manual_seed(0)
    sequences, logits = generate(model, PROMPT, do_sample=True, top_k=0, num_return_sequences=3)
    again = model(sequences[:, :-1]).logits[:, -NEW:]
    assert_same_bits(logits.to(dtype), again)


# ------------------------------------------------------------------------------------------- what stays as it was


def test_tied_embeddings_and_head_stay_tied_and_are_not_quantized():
    model = tiny_model("llama")
    model.config.tie_word_embeddings = True
    model.tie_weights()
    before = model.get_input_embeddings().weight.clone()
    qq.convert(model, "w4a4_residual")
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    assert type(head) is nn.Linear
    assert head.weight is embeddings.weight
    assert_same_bits(head.weight, before)
    reasons = {s.module: s.reason for s in qq.coverage(model).skipped}
    assert {"lm_head", "model.embed_tokens"} <= reasons.keys()
    kinds = (ResidualCompensatedLinear, ResidualCompensatedExperts)
    assert sum(isinstance(m, kinds) for m in model.modules()) == 2 * 7
    assert generate(model, PROMPT, eos_token_id=-1)[0].shape == (1, 12 + NEW)
