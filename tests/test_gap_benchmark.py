"""The gap study measures every arm as it says, and names what does not come in the paper's order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

import quads_qat as qq
from benchmarks import gap
from benchmarks.gap_report import ORDER, claims, label, order_lines
from quads_qat.config import Mode

SMALL: dict[str, Any] = {"tokens": 16, "length": 16, "train_length": 16, "rate": 1e-3}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Options of a run on a random MoE; the model directory only gives its name."""
    opened = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    monkeypatch.setattr(
        gap, "open_model", lambda path: (opened, lambda text: torch.tensor([ord(c) % 120 for c in text]))
    )
    (tmp_path / "config.json").touch()
    return {**SMALL, "model": tmp_path}


def test_every_arm_is_measured_before_and_after_training(small: dict[str, Any], tmp_path: Path):
    report = gap.gap(**small, steps=1, log=tmp_path / "log.jsonl")
    arms = sum(map(len, gap.ARMS.values()))
    assert len(report.records) == len(report.rows) == 2 * arms
    assert len({(label(r), r["steps"]) for r in report.records}) == 2 * arms
    for r in report.records:
        parts = {name: stats["max"] for name, stats in r["gap"].items()}
        bits_differ = r["trainer"] == "bf16" and r["packed"]
        act_differs = r["fraction"] is not None and r["trainer"] != "w4a4"
        assert (parts["delta_weight"] > 0) == bits_differ, label(r)
        assert (parts["delta_act"] > 0) == act_differs, label(r)
        assert parts["delta_num"] > 0, "bf16 against fp32"
        k1 = {name: stats["k1"] for name, stats in r["gap"].items()}
        assert k1["delta"] == pytest.approx(k1["delta_weight"] + k1["delta_act"] + k1["delta_num"], abs=1e-12)
        assert len(r["losses"]) == r["steps"]
    before, after = (report.stages()[steps] for steps in (0, 1))
    assert all(a["trainer_perplexity"] != b["trainer_perplexity"] for a, b in zip(before, after, strict=True))
    table = report.as_markdown()
    assert table.count("| W4A16, residual 50 %, batch |") == 2
    assert (
        json.loads(report.as_json())["records"]
        == report.records
        == [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()[1:]]
    )


def test_a_run_goes_on_where_it_stopped(small: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gap, "ARMS", {gap.W4A16: gap.ARMS[gap.W4A16][:2], gap.BF16: gap.ARMS[gap.BF16][:2]})
    log = tmp_path / "log.jsonl"
    first = gap.gap(**small, steps=0, log=log).records
    log.write_text("".join(line + "\n" for line in log.read_text().splitlines()[:-2]))
    again = gap.gap(**small, steps=0, log=log).records
    assert [r["gap"] for r in again] == [r["gap"] for r in first]
    some = gap.gap(**small, steps=0, only="weights only").records
    assert [(label(r), r["gap"]) for r in some] == [(label(r), r["gap"]) for r in first if "weights" in label(r)]
    assert [label(r) for r in some] == ["W4A16 | weights only", "BF16 | weights only"]
    monkeypatch.setattr(gap, "open_model", None)  # nothing is left to measure
    assert gap.gap(**small, steps=0, log=log).records == again


def test_a_record_holds_what_its_two_models_give():
    batches = [torch.arange(3, 19)[None], torch.arange(40, 56)[None]]
    trainer, losses = gap.make_trainer(tiny_model("qwen3_moe", dtype=torch.bfloat16), gap.W4A16, None)
    rollout = gap.make_rollout(trainer, gap.W4A16, packed=True)
    record = gap.measure(trainer, gap.log_probs(trainer, batches), rollout, batches)
    mine, theirs = (torch.cat(gap.log_probs(m, batches)) for m in (trainer, rollout))
    chosen = torch.cat(batches, dim=1)[0, torch.cat([torch.arange(1, 16), torch.arange(17, 32)])]
    logp = [side[torch.arange(30), chosen] for side in (theirs, mine)]
    found = qq.gap_stats(*logp)
    assert losses == []
    assert record["gap"]["delta"]["max"] == pytest.approx(found.max, abs=2**-31)
    assert record["gap"]["delta"]["k3"] == pytest.approx(found.k3, rel=1e-5)
    kl = nn.functional.kl_div(mine, theirs, log_target=True, reduction="batchmean").item()
    assert record["kl"] == pytest.approx(kl, rel=1e-4)
    assert record["perplexity"] == pytest.approx((-logp[0].mean()).exp().item(), rel=1e-5)
    assert record["trainer_perplexity"] == pytest.approx((-logp[1].mean()).exp().item(), rel=1e-5)


def test_trainers_start_from_one_model_and_see_the_same_sequences():
    base = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    before = {name: p.clone() for name, p in base.named_parameters()}
    training = gap.Training(2, 16, 1e-3, torch.arange(100))
    losses = [gap.make_trainer(base, gap.BF16, training)[1] for _ in range(2)]
    assert losses[0] == losses[1]
    quantized, of_quantized = gap.make_trainer(base, gap.W4A16, training)
    assert of_quantized != losses[0]
    assert qq.contract_of(quantized) is not None
    assert {p.dtype for p in quantized.parameters()} == {torch.bfloat16}
    assert all(torch.equal(p, before[name]) for name, p in base.named_parameters())
    assert gap.MODELOPT.mode is Mode.W4A16


def test_what_is_not_in_the_papers_order_is_named():
    def record(trainer: str, fraction: float | None, number: float) -> dict[str, Any]:
        delta = {"max": number, "mean": 1.0}
        arm = {"trainer": trainer, "recipe": "aligned", "packed": True, "fraction": fraction, "scope": "token"}
        return {**arm, "kl": number, "gap": {"delta": delta}}

    records = [record("bf16", 0.0, 2.0), record("w4a16", 0.0, 1.0), record("w4a16", 0.5, 1.5)]
    found = {(claim, metric): holds for claim, metric, holds, _, _ in claims(records)}
    both, qat = "both sides beat either alone (W4A16)", ORDER[0][0]
    assert {claim for claim, _ in found} == {qat, both}
    assert (found[qat, "max"], found[both, "max"], found[qat, "mean"]) == (True, False, False)
    assert order_lines(records)[1] == (
        f"* {both}: NO by KL (1.5000 against 1.0000), NO by max (1.5000 against 1.0000), "
        "NO by mean (1.0000 against 1.0000)"
    )
