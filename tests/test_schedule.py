"""Contract under test: ``step`` (delayed start, frozen and ema scales, shares of codes) and ``accumulate``."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from small_modules import ListMoE, linears
from tiny_models import tiny_model
from torch import Tensor, nn

import quads_qat as qq
from quads_qat import ops, schedule
from quads_qat.conversion import STATE


def mlp(**kwargs) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)).bfloat16()
    return qq.convert(model, "w4a16", **kwargs)


def rows(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(5, 32, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scale_of(model: nn.Module, name: str = "0.weight") -> Tensor:
    return dict(qq.export_weights(model, "modelopt"))[f"{name}_scale_2"]


# ----------------------------------------------------------------------------------------------------------------- step


def test_quantization_starts_at_the_step_that_the_schedule_names():
    model = mlp(schedule=qq.Schedule(start_step=2))
    plain = qq.revert(copy.deepcopy(model))
    quantized = mlp()
    for i in range(1, 4):
        assert_same_bits(model(rows()), plain(rows()) if i <= 2 else quantized(rows()))
        report = qq.step(model)
        assert (report.step, report.quantizing) == (i, i >= 2)
    with qq.full_precision(model):
        assert_same_bits(model(rows()), plain(rows()))


def test_a_delayed_start_survives_checkpointed_training():
    model = mlp(schedule=qq.Schedule(start_step=1))
    x = rows().requires_grad_()
    out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    out.sum().backward()
    expected = qq.revert(copy.deepcopy(model))
    expected.zero_grad()
    expected(rows()).sum().backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert_same_bits(p.grad, q.grad)


def test_a_frozen_scale_is_trained_with_and_exported_when_weights_outgrow_it(tmp_path: Path):
    model = mlp(schedule=qq.Schedule(weight_scale="frozen"))
    before = scale_of(model)
    assert qq.step(model).scales_moved == 2
    with torch.no_grad():
        model[0].weight[0, 0] = 100.0
    report = qq.step(model, track_codes=True)
    assert report.scales_moved == 0
    assert_same_bits(scale_of(model), before)
    top = 6 * 448 * float(before)
    assert report.by_weight["0.weight"][1] == 1 / model[0].weight.numel()
    assert report.clipped == 1 / sum(m.weight.numel() for m in (model[0], model[2]))
    amax = torch.tensor(top, dtype=torch.bfloat16)
    expected = ops.fake_quantize(model[0].weight.detach(), tensor_amax=amax)
    assert expected[0, 0] == top
    assert_same_bits(model[0](rows()), nn.functional.linear(rows(), expected, model[0].bias))
    qq.export_checkpoint(model, tmp_path / "out", dialect="compressed-tensors")
    assert qq.verify(model, tmp_path / "out").ok


def test_an_ema_scale_follows_slowly():
    model = mlp(schedule=qq.Schedule(weight_scale="ema", decay=0.75))
    qq.step(model)
    first = model[0].weight.detach().abs().amax().float()
    with torch.no_grad():
        model[0].weight[3, 3] = 8 * first
    for expected in (0.75 * first + 0.25 * 8 * first, 0.75 * (0.75 * first + 2 * first) + 2 * first):
        assert qq.step(model).scales_moved == 1
        held = qq.quant_state_dict(model)["0.weight_amax"]
        assert_same_bits(held, expected)
        assert_same_bits(scale_of(model), ops.scale_from_amax(held.bfloat16())[0])


def test_scales_of_expert_stacks_are_held_for_each_expert():
    model = qq.convert(tiny_model("qwen3_moe").bfloat16(), "w4a16", schedule=qq.Schedule(weight_scale="frozen"))
    ids = torch.arange(3, 15)[None]
    before = model(ids).logits
    qq.step(model)
    assert_same_bits(model(ids).logits, before)
    exported = dict(qq.export_weights(model, "modelopt"))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    again = dict(qq.export_weights(model, "modelopt"))
    scales = [name for name in exported if name.endswith("weight_scale_2")]
    assert scales
    for name in scales:
        assert_same_bits(again[name], exported[name])


def test_the_share_of_codes_that_changed():
    model = mlp()
    first = qq.step(model, track_codes=True)
    assert first.changed is None
    assert qq.step(model, track_codes=True).changed == 0.0
    q = ops.quantize(model[0].weight.detach())
    value = ops.dequantize(q)
    with torch.no_grad():  # a code of the middle of a block, its amax untouched
        row, column = divmod(int((value.abs() < value.abs().amax() / 4).flatten().nonzero()[0]), 32)
        block = model[0].weight[row, column // 16 * 16 : column // 16 * 16 + 16]
        position = int(block.abs().argmin())
        block[position] = -block.abs().max() / 2
    report = qq.step(model, track_codes=True)
    assert report.by_weight["0.weight"][0] == 1 / model[0].weight.numel()
    assert report.by_weight["2.weight"][0] == 0.0
    assert report.to_dict() == {"step": 3, "scales_moved": 0, "changed": report.changed, "clipped": 0.0}


def test_the_schedule_resumes_from_its_state():
    schedule = qq.Schedule(start_step=1, weight_scale="ema")
    model = mlp(schedule=schedule)
    for _ in range(3):
        qq.step(model)
        with torch.no_grad():
            model[0].weight.mul_(1.5)
    resumed = mlp(schedule=schedule)
    resumed.load_state_dict(model.state_dict())
    qq.load_quant_state_dict(resumed, qq.quant_state_dict(model))
    assert_same_bits(resumed(rows()), model(rows()))
    assert qq.step(resumed) == qq.step(model)
    assert_same_bits(resumed(rows()), model(rows()))
    qq.load_quant_state_dict(resumed, {})
    assert qq.step(resumed).step == 1


def frozen_moe() -> nn.Module:
    return qq.convert(tiny_model("qwen3_moe").bfloat16(), "w4a16", schedule=qq.Schedule(weight_scale="frozen"))


LINEAR, STACK = "model.layers.1.self_attn.o_proj.weight_amax", "model.layers.0.mlp.experts.down_proj.weight_amax"
OBSERVED = "model.layers.1.self_attn.o_proj.amax"


@pytest.mark.parametrize(
    ("key", "wrong", "message"),
    [
        (LINEAR, torch.ones(1), r"must be float32 \[\], got torch\.float32 \[1\]"),
        (LINEAR, torch.ones(64, 1), r"must be float32 \[\], got torch\.float32 \[64, 1\]"),
        (LINEAR, torch.tensor(2), r"must be float32 \[\], got torch\.int64 \[\]"),
        (LINEAR, torch.tensor(2.0).double(), r"must be float32 \[\], got torch\.float64 \[\]"),
        (LINEAR, torch.tensor(2.0).bfloat16(), r"must be float32 \[\], got torch\.bfloat16 \[\]"),
        (LINEAR, torch.tensor(torch.nan), r"must be finite and >= 0, got nan"),
        (LINEAR, torch.tensor(torch.inf), r"must be finite and >= 0, got inf"),
        (LINEAR, torch.tensor(-1.0), r"must be finite and >= 0, got -1"),
        (LINEAR, torch.tensor(3.4e38), r"must be finite and >= 0, got 3\.4e\+38, which is inf in torch\.bfloat16"),
        (LINEAR, 2.0, r"must be a tensor, got float"),
        (STACK, torch.tensor(1.0), r"must be float32 \[4\], got torch\.float32 \[\]"),
        (STACK, torch.ones(3), r"must be float32 \[4\], got torch\.float32 \[3\]"),
        (STACK, torch.ones(4, 1), r"must be float32 \[4\], got torch\.float32 \[4, 1\]"),
        (STACK, torch.tensor([1, 1, torch.nan, 1]), r"must be finite and >= 0, got nan"),
        (STACK, torch.tensor([1, 1, 1, -2.0]), r"must be finite and >= 0, got -2"),
        (OBSERVED, torch.ones(1), r"must be float32 \[\], got torch\.float32 \[1\]"),
        (OBSERVED, torch.tensor(torch.nan), r"must be finite and >= 0, got nan"),
        (OBSERVED, torch.tensor(-1.0), r"must be finite and >= 0, got -1"),
        ("steps", torch.tensor(-1), r"must be int64 \[\] and >= 0, got torch.int64 -1"),
        ("steps", torch.tensor(1.5), r"must be int64 \[\] and >= 0, got torch.float32 1\.5"),
        ("steps", torch.tensor([1]), r"must be int64 \[\] and >= 0, got torch.int64 \[1\]"),
    ],
)
def test_wrong_states_of_a_trainer_are_refused_and_change_nothing(key: str, wrong: Tensor, message: str):
    model = frozen_moe()
    with qq.observe_activations(model):
        model(torch.arange(3, 15)[None])
    qq.step(model)
    state = qq.quant_state_dict(model)
    assert {LINEAR, STACK, OBSERVED, "steps"} <= state.keys()
    halved = {k: v if k == "steps" else v / 2 for k, v in state.items()}
    with pytest.raises(TypeError if isinstance(wrong, float) else ValueError, match=f"{key} {message}"):
        qq.load_quant_state_dict(model, halved | {key: wrong})
    after = qq.quant_state_dict(model)
    assert after.keys() == state.keys()
    assert all(torch.equal(value, state[k]) for k, value in after.items())
    for fine in (halved, state | {LINEAR: torch.zeros(()), STACK: torch.zeros(4), OBSERVED: torch.zeros(())}):
        qq.load_quant_state_dict(model, fine)
        assert all(torch.equal(v, fine[k]) for k, v in qq.quant_state_dict(model).items())


@pytest.mark.parametrize("tracked", [0, 2])
def test_a_step_that_fails_moves_nothing(tracked: int, monkeypatch: pytest.MonkeyPatch):
    """But for the codes to compare with, of which some may be new."""
    model = mlp(schedule=qq.Schedule(start_step=2, weight_scale="ema", decay=0.5))
    twin = copy.deepcopy(model)

    def train(m: nn.Module) -> None:
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(-1.25)

    for m in (model, twin):
        for _ in range(tracked):
            qq.step(m, track_codes=True)
            train(m)
    before, codes_of = qq.quant_state_dict(model), schedule._codes_of
    calls = []

    def fail_at_the_second(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return codes_of(*args)

    monkeypatch.setattr(schedule, "_codes_of", fail_at_the_second)
    with pytest.raises(RuntimeError, match="out of memory"):
        qq.step(model, track_codes=True)
    assert qq.quant_state_dict(model) == before
    assert_same_bits(model(rows()), twin(rows()))
    found, wanted = (qq.step(m, track_codes=True) for m in (model, twin))
    assert found.changed is None
    assert (found.step, found.scales_moved, found.clipped) == (wanted.step, wanted.scales_moved, wanted.clipped)
    train(model)
    train(twin)
    assert qq.step(model, track_codes=True) == qq.step(twin, track_codes=True)


def test_step_refuses_what_does_not_train():
    with pytest.raises(ValueError, match="has not been converted"):
        qq.step(nn.Linear(16, 16))
    rollout = qq.convert(linears("a"), "w4a4_residual")
    with pytest.raises(ValueError, match="step: this is a rollout model"):
        qq.step(rollout)
    with pytest.raises(ValueError, match="schedule= is for trainers"):
        qq.convert(linears("a"), "w4a4_residual", schedule=qq.Schedule())
    with pytest.raises(ValueError, match="keeps its schedule"):
        qq.convert(mlp(), "w4a4", schedule=qq.Schedule())
    for wrong in ({"start_step": -1}, {"decay": 1.0}, {"weight_scale": "static"}):
        with pytest.raises(ValueError, match=r"^Schedule: |WeightScale: unknown value"):
            qq.Schedule(**wrong)


# ----------------------------------------------------------------------------------------------------------- accumulate


def gradients(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    model.zero_grad()
    for x in inputs:
        out = model(x)
        (out.logits if hasattr(out, "logits") else out).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_accumulated_gradients_have_the_same_bits(experts: str):
    model = tiny_model("qwen3_moe").bfloat16()
    model.set_experts_implementation(experts)
    qq.convert(model, "w4a16")
    ids = [torch.arange(3, 15)[None] + i for i in range(2)]
    expected = gradients(model, ids)
    calls = []
    original = ops.quantize
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "quantize", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
        with qq.accumulate(model, debug=True):
            got = gradients(model, ids)
    assert len(calls) == len(qq.coverage(model).quantized)  # once for all micro-batches
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_backward_after_the_block_has_the_same_bits(experts: str, reentrant: bool):
    """What a checkpoint recomputes then makes no codes, and saves the same tensors."""
    grads = []
    for accumulating in (False, True):
        model = qq.convert(tiny_model("qwen3_moe"), "w4a16").train()
        model.set_experts_implementation(experts)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        ids = torch.arange(3, 15)[None]
        with qq.accumulate(model) if accumulating else nullcontext():
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, wanted in grads[0].items():
        assert_same_bits(grads[1][name], wanted, name)


@pytest.mark.parametrize("kind", ["linear", "list of experts", "transposed experts"])
def test_every_kind_of_weight_accumulates(kind: str):
    torch.manual_seed(0)
    if kind == "linear":
        model, inputs = mlp(), [rows(i) for i in range(3)]
    elif kind == "list of experts":
        model, inputs = qq.convert(nn.Sequential(ListMoE()), "w4a16"), [rows(i, torch.float32) for i in range(3)]
    else:
        model, inputs = qq.convert(tiny_model("gpt_oss").bfloat16(), "w4a16"), [torch.arange(3, 15)[None]] * 2
    expected = gradients(model, inputs)
    with qq.accumulate(model):
        got = gradients(model, inputs)
    for a, b in zip(got, expected, strict=True):
        assert_same_bits(a, b)


def test_kept_codes_take_0_5625_bytes_per_weight():
    model = tiny_model("qwen3_moe").bfloat16()
    model.set_experts_implementation("grouped_mm")
    qq.convert(model, "w4a16")
    elements = {name: model.get_parameter(name).numel() for name in qq.coverage(model).quantized}
    qq.step(model, track_codes=True)
    with qq.accumulate(model):
        model(torch.arange(3, 15)[None])
        kept = [codes for _, codes, _ in model.model.layers[0].self_attn.q_proj.code_cache.entries.values()]
        assert len(kept) == len(elements)
        assert sum(q.qdata.nbytes + q.block_scale.nbytes for q in kept) == 0.5625 * sum(elements.values())
        assert all(q.per_tensor_scale.numel() <= 4 for q in kept)  # of a tensor, or of each of four experts
    tracked = model.__dict__[STATE].last_codes
    assert {name: codes.nbytes for name, codes in tracked.items()} == {n: 0.5625 * e for n, e in elements.items()}


def test_codes_do_not_outlive_the_block():
    model = mlp()
    with qq.accumulate(model):
        before = model(rows())
        assert model[0].code_cache.entries
    assert not model[0].code_cache.entries
    with torch.no_grad():
        model[0].weight.mul_(-1)
    assert not torch.equal(model(rows()), before)
    with pytest.raises(RuntimeError), qq.accumulate(model):
        model(rows()[:, :5])  # a wrong shape
    assert not model[0].code_cache.active


def test_a_weight_that_changes_inside_the_block_is_found_in_debug_mode():
    model = mlp()
    with qq.accumulate(model, debug=True):
        model(rows())
        model[2].weight.data[0, 0] += 1  # shows in neither _version nor data_ptr
        with pytest.raises(RuntimeError, match=r"accumulate: 2\.weight has changed.*leave the block"):
            model(rows())
    with (
        qq.accumulate(model),
        pytest.raises(RuntimeError, match="already inside accumulate"),
        qq.accumulate(model),
    ):
        pass
    with qq.accumulate(model), pytest.raises(RuntimeError, match="step: inside accumulate"):
        qq.step(model)


def test_members_of_a_group_take_their_amax_once_in_a_block(monkeypatch: pytest.MonkeyPatch):
    model = qq.convert(linears("mlp.gate_proj", "mlp.up_proj").bfloat16(), "w4a16")
    gate, up = model.mlp.gate_proj, model.mlp.up_proj
    expected = up(rows())
    taken, amax = [], ops.amax
    monkeypatch.setattr(ops, "amax", lambda *many, **options: taken.append(len(many)) or amax(*many, **options))
    with qq.accumulate(model):
        gate(rows())
        assert_same_bits(up(rows()), expected)
        assert taken == [2]
    assert not gate.code_cache.amaxes
    gate(rows()), up(rows())
    assert taken == [2, 2, 2], "outside nothing is kept that an edit could make wrong"
    with qq.accumulate(model, debug=True):
        gate(rows())
        gate.weight.data.mul_(8)
        with pytest.raises(RuntimeError, match=r"accumulate: a weight of mlp\..* has changed.*leave the block"):
            up(rows())


def test_a_checkpoint_before_the_start_warns_its_caller_once(tmp_path: Path):
    model = qq.convert(tiny_model("qwen3_moe"), "w4a16", schedule=qq.Schedule(start_step=3))
    with pytest.warns(UserWarning, match="export_checkpoint: fake quantization starts at step 3") as said:
        qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt")
    starts = [warning for warning in said if "starts at step 3" in str(warning.message)]
    assert [warning.filename for warning in starts] == [__file__]


def test_an_export_before_the_start_warns_and_a_report_prints_in_a_line():
    model = mlp(schedule=qq.Schedule(start_step=3))
    with pytest.warns(UserWarning, match="export_weights: fake quantization starts at step 3"):
        list(qq.export_weights(model, "modelopt"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qq.export_metadata(model, "modelopt")  # is for before a run
    assert "0.weight" not in repr(qq.step(model, track_codes=True))


@pytest.mark.parametrize("what", ["verify", "state_dict", "check_first_step"])
def test_whoever_compares_or_takes_weights_before_the_start_says_so(what: str, tmp_path: Path):
    model = qq.convert(tiny_model("qwen3_moe"), "w4a16", schedule=qq.Schedule(start_step=1))
    rollout = qq.convert(tiny_model("qwen3_moe"), "w4a4_residual")
    qq.export_checkpoint(qq.convert(tiny_model("qwen3_moe"), "w4a16"), tmp_path / "out", dialect="modelopt")
    started = "fake quantization starts at step 1 of the schedule; until then the trainer multiplies by its master"

    def act() -> Any:
        if what == "verify":
            return qq.verify(model, tmp_path / "out")
        if what == "state_dict":
            return qq.update_weights(rollout, model.state_dict(), contract=qq.contract_of(model))
        return qq.check_first_step(model, rollout)

    if what == "check_first_step":
        engine = qq.check_first_step(model, contract=qq.contract_of(rollout))  # of which nothing else is known
        assert engine.failed == ["weights"]
        assert engine.checks[2].found.endswith(f"is not known; but {started} weights")
        report = act()
        assert report.failed == ["weights"]
        assert report.checks[2].found.endswith(f"equal, bit for bit; but {started} weights")
    else:
        with pytest.warns(UserWarning, match=started) as said:
            act()
        assert [warning.filename for warning in said] == [__file__]
    qq.step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        done = act()
    assert what != "check_first_step" or done.failed == []
