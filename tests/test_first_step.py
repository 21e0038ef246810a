"""Contract under test: ``check_first_step`` passes a sound first step, and names what is wrong with any other."""

import copy
import re
from functools import cache
from typing import Any, cast

import pytest
import torch
from small_modules import TINYMOE
from tiny_models import tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import quads_qat as qq
from quads_qat import names
from quads_qat.token_log_probs import token_log_probs

TEXT = (TINYMOE / "heldout.txt").read_bytes()
IDS = torch.tensor([list(TEXT[start : start + 48]) for start in (0, 5000)])
COUNT = 32  # of 48 tokens, the last ones were sampled


@cache
def _trainer(**options: Any) -> nn.Module:
    return qq.convert(AutoModelForCausalLM.from_pretrained(TINYMOE, dtype=torch.float32), "w4a16", **options)


@cache
def _rollout(fraction: float = 0.5, **options: Any) -> nn.Module:
    model = copy.deepcopy(_trainer(**options))
    rollout = qq.convert(model, "w4a4_residual", residual=qq.ResidualConfig(fraction=fraction))
    if not options:
        qq.update_weights(rollout, qq.export_weights(_trainer(), "modelopt"))
    return rollout


@cache
def _log_probs(side: str, temperature: float = 1.0) -> Tensor:
    model = _trainer() if side == "trainer" else _rollout()
    return token_log_probs(model, IDS, COUNT, temperature=temperature)


def check(**changes: Any) -> qq.FirstStepReport:
    sound = {"trainer": _trainer(), "rollout": _rollout(), "input_ids": IDS, "logp_rollout": _log_probs("rollout")}
    return qq.check_first_step(**(sound | changes))


def found(report: qq.FirstStepReport, name: str) -> str:
    return next(str(c) for c in report.checks if c.name == name)


# --------------------------------------------------------------------------------------------------------- a sound step


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_a_sound_step_passes(temperature: float):
    logp = {f"logp_{side}": _log_probs(side, temperature) for side in ("trainer", "rollout")}
    report = check(**logp, temperature=temperature)
    assert report.ok, str(report)
    assert [c.passed for c in report.checks] == [True] * 6
    assert report.raise_if_failed() is report
    assert report.gap == qq.gap_stats(logp["logp_rollout"], logp["logp_trainer"])
    equal = f"pass  weights: {len(_trainer().state_dict())} tensors are equal, bit for bit"
    assert found(report, "weights").startswith(
        f"{equal}; those that are not quantized after the cast to bfloat16: the trainer multiplies by them in float32, "
    )
    trainer = copy.deepcopy(_trainer()).bfloat16()
    assert found(qq.check_first_step(trainer, _rollout()), "weights") == equal


def test_modules_keep_their_mode():
    trainer = _trainer()
    trainer.train()
    part = next(trainer.children())
    part.eval()
    before = [m.training for m in trainer.modules()]
    check()
    assert [m.training for m in trainer.modules()] == before


def test_padding_on_the_left_and_a_mask_on_the_right():
    """As TRL pads: the padded batch has the log-probs of the unpadded rows."""
    pad, short = 7, 5
    ids = torch.cat([torch.zeros(2, pad, dtype=IDS.dtype), IDS], 1)
    attention_mask = torch.ones_like(ids)
    attention_mask[:, :pad] = 0
    attention_mask[1, -short:] = 0
    mask = torch.ones(2, COUNT)
    mask[1, -short:] = 0
    logp = _log_probs("rollout").masked_fill(mask == 0, float("nan"))
    report = check(input_ids=ids, attention_mask=attention_mask, mask=mask, logp_rollout=logp)
    assert report.ok, str(report)
    assert report.gap is not None
    assert report.gap.tokens == 2 * COUNT - short


def test_what_is_not_given_is_skipped_and_says_what_to_pass():
    report = qq.check_first_step(_trainer())
    assert {c.passed for c in report.checks} == {None}
    assert all("pass " in c.way_out for c in report.checks)
    assert not report.ok
    assert not report.failed
    assert report.to_dict()["gap"] is None
    with pytest.raises(ValueError, match=r"^check_first_step: nothing was checked: pass rollout=") as error:
        report.raise_if_failed()
    for argument in ("rollout=", "received=", "contract=", "input_ids=", "logp_rollout=", "logp_trainer="):
        assert argument in str(error.value)
    assert str(error.value).endswith(str(report))


def test_one_check_is_enough_for_a_report():
    report = qq.check_first_step(_trainer(), contract=qq.contract_of(_trainer()))
    assert [c.name for c in report.checks if c.passed] == ["contract"]
    assert report.raise_if_failed().ok


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("side", ["rollout", "trainer"])
@pytest.mark.parametrize("models", [True, False])
def test_log_probs_that_are_not_finite_are_a_line(side: str, value: float, models: bool):
    logp: dict[str, Any] = {f"logp_{side}": _log_probs(side).clone() for side in ("trainer", "rollout")}
    logp[f"logp_{side}"][1, 3:5] = value
    options: dict[str, Any] = {"input_ids": IDS, "rollout": _rollout()} if models else {}
    report = qq.check_first_step(_trainer(), **options, **logp)
    failed = {True: [f"{side} log-probs", "gap"], False: ["rollout log-probs", "gap"]}[models]
    assert report.failed == failed
    assert report.gap is None
    for name in failed:
        assert f"2 of 64 counted numbers of logp_{side} are NaN or inf, first at [1, 3]" in found(report, name)
        assert "mask=" in found(report, name)
    mask = torch.ones(2, COUNT)
    mask[1, 3:5] = 0
    assert qq.check_first_step(_trainer(), **options, **logp, mask=mask).ok


def test_a_model_whose_log_probs_are_not_finite_is_named():
    rollout: Any = copy.deepcopy(_rollout())
    with torch.no_grad():
        rollout.model.norm.weight[3] = float("nan")
    report = check(rollout=rollout, logp_trainer=_log_probs("trainer"))
    assert report.failed == ["weights", "rollout log-probs"]
    assert "64 of 64 counted numbers of the rollout's own log-probs are NaN or inf" in found(
        report, "rollout log-probs"
    )


def test_two_arrays_alone_give_the_gap():
    logp = {f"logp_{side}": _log_probs(side) for side in ("trainer", "rollout")}
    report = qq.check_first_step(_trainer(), **logp)
    assert [c.name for c in report.checks if c.passed] == ["rollout log-probs", "gap"]
    shifted = qq.check_first_step(
        _trainer(), logp_rollout=logp["logp_rollout"].roll(-1, 1), logp_trainer=logp["logp_trainer"]
    )
    assert "they fit the next token" in found(shifted, "rollout log-probs")


# --------------------------------------------------------------------------------------------------------- broken steps


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.down_proj", "model.layers.1.input_layernorm.weight"])
def test_unsynced_weights_are_named(name: str):
    trainer = copy.deepcopy(_trainer())
    with torch.no_grad():
        trainer.get_parameter(name).view(-1)[5].add_(0.5)
    report = check(trainer=trainer)
    assert "weights" in report.failed
    assert f"1 of {len(trainer.state_dict())} tensors differ, first {name}" in found(report, "weights")
    assert "sync qq.export_weights(trainer)" in found(report, "weights")
    with pytest.raises(
        ValueError, match=r"^check_first_step: weights.* failed\. weights: 1 of .*\npass  contract"
    ) as error:
        report.raise_if_failed()
    first, *lines = str(error.value).splitlines()
    for failed in (c for c in report.checks if c.passed is False):  # logs and trackers often show one line
        assert f"{failed.name}: {failed.found} -> {failed.way_out}" in first
    assert "\n".join(lines) == str(report)


def test_one_flipped_code_is_named():
    rollout: Any = copy.deepcopy(_rollout())
    rollout.model.layers[0].self_attn.q_proj.weight_qdata[0, 0] ^= 1
    assert "q_proj.weight: qdata: 1 of" in found(check(rollout=rollout), "weights")


def test_weights_that_were_decoded_and_quantized_again_have_the_same_values():
    """Zeros lose their sign then; nothing else is forgiven."""
    trainer, rollout = _trainer(), cast("Any", copy.deepcopy(_rollout()))
    name = "model.layers.0.self_attn.q_proj.weight"
    zeros = rollout.model.layers[0].self_attn.q_proj.weight_qdata.eq(0x80).nonzero()  # 0.0 and -0.0
    assert len(zeros) > 1
    qq.update_weights(rollout, qq.export_weights(trainer, "dequantized"))
    report = check(rollout=rollout)
    assert report.ok, str(report)
    count = len(trainer.state_dict())
    same = re.search(r"(\d+) tensors are equal, bit for bit, (\d+) in their values", found(report, "weights"))
    assert same is not None
    assert sum(map(int, same.groups())) == count
    first = tuple(zeros[0].tolist())
    codes = rollout.model.layers[0].self_attn.q_proj.weight_qdata
    for code in (0x80, 0x08, 0x01, 0x90):  # a zero's sign alone, too, is no second quantization
        codes[first] = code
        assert f"1 of {count} tensors differ, first {name}: qdata" in found(check(rollout=rollout), "weights")
    rollout = cast("Any", copy.deepcopy(_rollout()))
    rollout.model.layers[0].self_attn.q_proj.weight_qdata[first] = 0x00
    report = check(rollout=rollout)
    assert f"1 of {count} tensors differ, first {name}: qdata: 1 of" in found(report, "weights")


def test_masters_that_were_not_cast_are_named():
    trainer, rollout = copy.deepcopy(_trainer()), copy.deepcopy(_rollout())
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(1.001)
    qq.update_weights(rollout, trainer.state_dict())
    report = qq.check_first_step(trainer, rollout)
    assert report.failed == ["weights"]
    text = found(report, "weights")
    assert "are the trainer's fp32 masters, not cast to the 16 bits" in text
    assert "dtype=torch.bfloat16" in text
    assert "another step" not in text
    with torch.no_grad():
        trainer.get_parameter("model.layers.0.self_attn.q_proj.weight")[0].mul_(-1)
    text = found(check(trainer=trainer, rollout=rollout), "weights")
    assert "another step" in text
    assert "fp32 masters" not in text


@pytest.mark.parametrize("kind", ["ema", "frozen"])
def test_masters_of_a_trainer_with_held_scales_are_named(kind: str):
    schedule = qq.Schedule(weight_scale=qq.WeightScale(kind))
    trainer = qq.convert(tiny_model("qwen3_moe"), "w4a16", schedule=schedule)
    qq.step(trainer)
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(3.0)
    qq.step(trainer)
    rollout = qq.convert(tiny_model("qwen3_moe").bfloat16(), "w4a4_residual")
    with pytest.warns(UserWarning, match="holds its scales"):
        qq.update_weights(rollout, trainer.state_dict())
    text = found(qq.check_first_step(trainer, rollout), "weights")
    assert text.startswith("FAIL")
    assert "the trainer holds its scales (frozen, ema), which state_dict() does not tell" in text
    assert "sync qq.export_weights(trainer, ...)" in text
    assert "another step" not in text
    qq.update_weights(rollout, qq.export_weights(trainer, "modelopt"))
    assert found(qq.check_first_step(trainer, rollout), "weights").startswith("pass")
    with torch.no_grad():
        trainer.get_parameter("model.layers.0.self_attn.q_proj.weight")[0].mul_(-1)
    assert "another step" in found(qq.check_first_step(trainer, rollout), "weights")


def test_another_recipe_is_named():
    report = check(rollout=_rollout(recipe="modelopt"), logp_rollout=None)
    assert report.failed == ["contract", "weights"]
    assert "recipe: aligned against modelopt" in found(report, "contract")
    assert "the contract differs" in found(report, "weights")


def test_other_scale_groups_are_named():
    rollout = _rollout(groups=(r"layers\.(\d+)\.self_attn\.[qkvo]_proj",))
    assert "rules of scale groups" in found(check(rollout=rollout, logp_rollout=None), "contract")


@pytest.mark.parametrize("side", ["trainer", "rollout"])
def test_another_scope_is_named(side: str):
    other = {"trainer": {"trainer": _trainer(scope="experts")}, "rollout": {"rollout": _rollout(scope="experts")}}[side]
    report = check(**other, logp_rollout=None)
    where = {"trainer": "rollout", "rollout": "trainer"}[side]
    first = "model.layers.0.self_attn.q_proj.weight"
    assert report.failed == ["coverage"]  # what both quantize is equal
    assert f"16 are quantized in the {where} only, like {first}" in found(report, "coverage")
    assert "another scope, include or exclude" in found(report, "coverage")


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("what", ["pairs", "digests"])
@pytest.mark.parametrize("side", ["trainer", "rollout"])
def test_another_scope_of_an_engine_is_named(side: str, what: str, dialect: str):
    trainer, sent = _trainer(), _trainer(scope="experts")
    if side == "trainer":
        trainer, sent = sent, trainer
    stream = qq.export_weights(sent, dialect)
    report = qq.check_first_step(trainer, received=list(stream) if what == "pairs" else qq.weight_digests(stream))
    where = {"trainer": "rollout", "rollout": "trainer"}[side]
    assert report.failed == ["coverage"]
    assert f"16 are quantized in the {where} only, like model.layers.0.self_attn." in found(report, "coverage")
    assert "another scope, include or exclude" in found(report, "coverage")


def test_other_names_are_named():
    rollout: Any = copy.deepcopy(_rollout())
    del rollout.model.norm._parameters["weight"]
    rollout.model.norm.register_buffer("gain", torch.ones(2))
    report = check(rollout=rollout, logp_rollout=None)
    assert report.failed == ["coverage"]
    assert "only in the trainer, like model.norm.weight" in found(report, "coverage")
    assert "only in the rollout, like model.norm.gain" in found(report, "coverage")


def test_a_sync_that_failed_is_named():
    rollout = copy.deepcopy(_rollout())
    with pytest.raises(ValueError, match="missing"):
        qq.update_weights(rollout, iter([]))
    report = check(rollout=rollout, input_ids=None, logp_rollout=None)
    assert report.failed == ["weights"]
    assert "the last weight sync of this rollout failed" in found(report, "weights")


@pytest.mark.parametrize(("shift", "side"), [(1, "previous"), (-1, "next")])
def test_shifted_tokens_are_named(shift: int, side: str):
    report = check(logp_rollout=_log_probs("rollout").roll(shift, 1))
    assert report.failed == ["rollout log-probs", "gap"]
    assert f"they fit the {side} token" in found(report, "rollout log-probs")
    assert "logits[:, :-1] goes with ids[:, 1:]" in found(report, "rollout log-probs")


def test_another_temperature_of_the_rollout_is_named():
    report = check(logp_rollout=_log_probs("rollout", 0.6))
    assert report.failed == ["rollout log-probs", "gap"]
    assert "they fit temperature 0.6 (mean gap 0), not 1\n" in found(report, "rollout log-probs")


def test_another_temperature_of_the_trainer_is_named():
    logp = {"logp_rollout": _log_probs("rollout", 0.6), "logp_trainer": _log_probs("trainer", 1.0)}
    report = check(**logp, temperature=0.6)
    assert report.failed == ["trainer log-probs", "gap"]
    assert "they fit temperature 1 (mean gap 0), not 0.6\n" in found(report, "trainer log-probs")


@torch.no_grad()
def _logits(side: str) -> Tensor:
    """[B, T, V]."""
    model: Any = _trainer() if side == "trainer" else _rollout()
    return model(IDS).logits


def _gathered(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.gather(-1, ids[..., None])[..., 0][:, -COUNT:]


def _instead(what: str, temperature: float) -> Tensor:
    """What a framework reports by mistake."""
    logits = _logits("rollout") / temperature
    return {
        "the tokens' logits": lambda: _gathered(logits[:, :-1], IDS[:, 1:]),
        "the distribution at the token's own position": lambda: _gathered(logits.log_softmax(-1), IDS),
        "probabilities": lambda: _log_probs("rollout", temperature).exp(),
        "minus the log-probs": lambda: -_log_probs("rollout", temperature),
    }[what]()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("side", ["rollout", "trainer", "engine"])
@pytest.mark.parametrize(
    ("what", "way_out"),
    [
        ("the tokens' logits", "they lack log_softmax(-1)"),
        ("the distribution at the token's own position", "logits[:, :-1] goes with ids[:, 1:]"),
        ("probabilities", "they lack the logarithm"),
        ("minus the log-probs", "change the sign"),
    ],
)
def test_what_is_reported_instead_of_log_probs_is_named(what: str, way_out: str, side: str, temperature: float):
    wrong = _instead(what, temperature)
    if side == "trainer":
        sound = _log_probs("rollout", temperature)
        report = check(logp_trainer=wrong, logp_rollout=sound, temperature=temperature)
    else:
        rollout = {"rollout": None} if side == "engine" else {}
        report = check(logp_rollout=wrong, temperature=temperature, **rollout)
    name = "trainer log-probs" if side == "trainer" else "rollout log-probs"
    assert report.failed == [name, "gap"]
    assert f"they fit {what} (mean gap " in found(report, name)
    assert way_out in found(report, name)


def test_two_arrays_tell_a_form():
    sound = _log_probs("trainer")
    for wrong, what in (
        (_log_probs("rollout").exp(), "probabilities"),
        (-_log_probs("rollout"), "minus the log-probs"),
    ):
        report = qq.check_first_step(_trainer(), logp_rollout=wrong, logp_trainer=sound)
        assert f"they fit {what} (mean gap " in found(report, "rollout log-probs")
    report = qq.check_first_step(_trainer(), logp_rollout=_instead("the tokens' logits", 1.0), logp_trainer=sound)
    assert "of them are > 0, which no log-probability is" in found(report, "rollout log-probs")
    report = qq.check_first_step(_trainer(), logp_rollout=torch.zeros_like(sound), logp_trainer=sound)
    assert "they fit" not in found(report, "rollout log-probs")
    assert "tokenized anew" in found(report, "rollout log-probs")


def test_other_tokens_are_not_taken_for_a_shift_or_a_temperature():
    generator = torch.Generator().manual_seed(0)
    ids = IDS.clone()
    ids[:, -COUNT:] = torch.randint(32, 127, (2, COUNT), generator=generator)
    report = check(input_ids=ids)
    assert report.failed == ["rollout log-probs", "gap"]
    assert "tokenized anew" in found(report, "rollout log-probs")


def test_a_naive_rollout_is_over_the_limits():
    naive = _rollout(fraction=0.0)
    report = check(rollout=naive, logp_rollout=token_log_probs(naive, IDS, COUNT))
    assert report.failed == ["gap"]
    assert "> 0.05" in found(report, "gap")
    assert "raise ResidualConfig(fraction=...)" in found(report, "gap")
    wide = qq.GapLimits(mean=1, k3=1, share_over_ln2=1)
    assert check(rollout=naive, logp_rollout=token_log_probs(naive, IDS, COUNT), limits=wide).ok


# -------------------------------------------------------------------------------------------------- an engine elsewhere


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("what", ["pairs", "digests"])
def test_what_an_engine_received(dialect: str, what: str):
    stream = qq.export_weights(_trainer(), dialect)
    received = list(stream) if what == "pairs" else qq.weight_digests(stream)
    contract = qq.contract_of(_trainer()).to_json()
    report = qq.check_first_step(_trainer(), received=received, contract=contract)
    assert [c.passed for c in report.checks[:3]] == [True] * 3
    assert f"{len(received)} tensors are equal, bit for bit; those" in found(report, "weights")


@pytest.mark.parametrize("what", ["pairs", "digests"])
def test_a_flipped_sign_of_zero_is_found(what: str):
    received = dict(qq.export_weights(_trainer(), "modelopt"))
    name = "model.layers.1.mlp.gate.weight"
    trainer = copy.deepcopy(_trainer())
    with torch.no_grad():
        trainer.get_parameter(name)[0, 0] = 0.0
    received[name][0, 0] = -0.0
    given: Any = received if what == "pairs" else qq.weight_digests(received)
    report = qq.check_first_step(trainer, received=given)
    assert report.failed == ["weights"]
    assert f"1 of {len(received)} tensors differ, first {name}" in found(report, "weights")


def test_names_that_an_engine_did_not_get():
    received = dict(qq.export_weights(_trainer(), "modelopt"))
    lost = "model.layers.0.mlp.experts.1.up_proj.weight_scale"
    del received[lost]
    received["model.layers.0.extra"] = torch.zeros(1)
    report = qq.check_first_step(_trainer(), received=received)
    assert report.failed == ["coverage"]
    assert f"1 only in the trainer, like {lost}" in found(report, "coverage")
    assert "1 only in the rollout, like model.layers.0.extra" in found(report, "coverage")


def test_foreign_names_are_refused():
    with pytest.raises(ValueError, match="none of the 1 received names"):
        qq.check_first_step(_trainer(), received={"w13_weight": torch.zeros(1)})


# ------------------------------------------------------------------------------------------------------------ bad input


def test_sides_must_not_be_swapped():
    with pytest.raises(ValueError, match=r"trainer is a rollout model; the order is"):
        qq.check_first_step(_rollout(), _trainer())
    with pytest.raises(ValueError, match="rollout is a trainer"):
        qq.check_first_step(_trainer(), _trainer())
    with pytest.raises(ValueError, match="has not been converted"):
        qq.check_first_step(nn.Linear(32, 16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": IDS[0]}, r"input_ids must be \[B, T\]"),
        ({"attention_mask": IDS[:, 1:]}, "attention_mask must have the shape"),
        ({"mask": torch.ones(2, COUNT + 1)}, r"must have one shape \[B, C\]"),
        ({"logp_rollout": torch.zeros(2, 48)}, r"with C < T, got \[2, 48\] and \[2, 48\]"),
        ({"logp_rollout": torch.zeros(1, 8)}, r"got \[1, 8\] and \[2, 48\]"),
        ({"mask": torch.zeros(2, COUNT)}, "^check_first_step: mask counts no token"),
    ],
)
def test_shapes(changes: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        check(**changes)


def test_an_engine_that_took_dequantized_weights():
    """A stale one of them is named; masters, which are not what the trainer multiplies by, are no such stream."""
    model = qq.convert(tiny_model("qwen3_moe"), "w4a16")
    stream = dict(qq.export_weights(model, "dequantized"))
    report = qq.check_first_step(model, received=qq.weight_digests(stream))
    assert report.ok, report
    assert "the engine took dequantized weights" in found(report, "weights")
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    stream[name] = stream[name] * 2
    with pytest.raises(ValueError, match=rf"weights.*{re.escape(name)}"):
        qq.check_first_step(model, received=stream).raise_if_failed()
    masters = qq.revert(copy.deepcopy(model)).bfloat16()
    plain = {n: t for n, t in names.disk_state(masters, masters.state_dict()).items() if n in stream}
    with pytest.raises(ValueError, match=r"coverage.*quantized in the trainer only"):
        qq.check_first_step(model, received=qq.weight_digests(plain)).raise_if_failed()


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("what", ["pairs", "digests"])
def test_dequantized_weights_of_another_step_are_told_from_another_scope(what: str, arch: str):
    """Digests of neither the codes' values nor the masters: what came is of another step, whatever it was."""
    model = qq.convert(tiny_model(arch), "w4a16")
    stream = dict(qq.export_weights(model, "dequantized"))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.01)
    received: Any = stream if what == "pairs" else qq.weight_digests(stream)
    report = qq.check_first_step(model, received=received, contract=qq.contract_of(model))
    assert report.failed == ["weights"], report
    assert f"{len(stream)} of {len(stream)} tensors differ" in found(report, "weights")
    assert ("dequantized weights" if what == "pairs" else "do not tell") in found(report, "weights")
    assert "weights of another step: sync qq.export_weights(trainer)" in found(report, "weights")


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
def test_weights_that_nobody_quantized_are_told_whatever_their_step(arch: str):
    model = qq.convert(tiny_model(arch), "w4a16")
    stream = dict(qq.export_weights(model, "dequantized"))
    masters = qq.revert(copy.deepcopy(model))
    plain = {n: t for n, t in names.disk_state(masters, masters.state_dict()).items() if n in stream}
    for stale in (False, True):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.01 if stale else 1)
        report = qq.check_first_step(model, received=plain)
        assert report.failed == ["coverage", *(["weights"] if stale else [])], report
        assert "are quantized in the trainer only" in found(report, "coverage")
        assert "trainer.state_dict()" in found(report, "coverage")
        assert "dequantized weights" not in found(report, "weights")


def test_dequantized_weights_of_another_scope_are_named():
    wide, narrow = (
        qq.convert(tiny_model("qwen3_moe"), "w4a16"),
        qq.convert(tiny_model("qwen3_moe"), "w4a16", scope="mlp"),
    )
    received = dict(qq.export_weights(narrow, "dequantized"))
    with torch.no_grad():
        for p in wide.parameters():
            p.mul_(1.01)
    report = qq.check_first_step(wide, received=received)
    assert report.failed == ["coverage", "weights"]
    assert "8 are quantized in the trainer only, like model.layers.0.self_attn.k_proj.weight" in found(
        report, "coverage"
    )
    assert f"{len(received) - 8} of {len(received) - 8} tensors differ" in found(report, "weights")
