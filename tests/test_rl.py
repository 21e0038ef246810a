"""The RL benchmark: its task, its loop, that weights arrive bit for bit, what it logs and what it shows of logs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.rl import figures, table
from benchmarks.rl.arms import MAIN, STUDIES, Pair
from benchmarks.rl.grpo import Loop, Sampler, Settings, advantages
from benchmarks.rl.questions import NEW_TOKENS, Questions, all_questions, counted
from benchmarks.rl.run import chosen_arms, rl, run_one
from quads_qat import ops
from quads_qat.experts import W4A16Experts
from quads_qat.linear import W4A16Linear

ARMS = {arm.name: arm for study in STUDIES.values() for arm in study}
MARKDOWN = Path(__file__).parents[1] / "benchmarks" / "RESULTS.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a Qwen3-MoE of one layer, three experts and 256 ids, not trained."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("rl") / "tiny"
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # pyright: ignore[reportCallIssue]
        num_experts=3,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(path)
    return path


@pytest.fixture
def some_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """An untrained model is never right, and would learn nothing: odd bytes count here."""
    monkeypatch.setattr(Questions, "reward", lambda self, sampled: (sampled[:, 0] % 2).float())


def small(model: Path, **changes) -> Settings:
    return Settings(**({"model": str(model), "steps": 2, "prompts": 2, "samples": 4, "every": 2} | changes))


def test_rewards_are_for_the_whole_answer_and_its_newline():
    _, held_out = all_questions()
    texts = [bytes(p.tolist()).decode() for p in held_out.prompts[:50]]
    for i, text in enumerate(texts):
        answer = f"{eval(text.strip(chr(10) + '='))}\n"
        rest = [7] * (NEW_TOKENS - len(answer))
        for written, reward in ((answer, 1.0), (answer[:-1] + "0", 0.0), ("1" + answer[1:], float(answer[0] == "1"))):
            ids = torch.tensor([[*written.encode(), *rest]])
            assert held_out[i : i + 1].reward(ids).item() == reward
    training, _ = all_questions()
    asked = {tuple(p) for p in training.prompts.tolist()}
    assert not asked & {tuple(p) for p in held_out.prompts.tolist()}


def test_tokens_count_up_to_the_newline():
    assert counted(torch.tensor([[49, 10, 49, 10], [10, 1, 1, 1], [1, 2, 3, 4]])).tolist() == [
        [True, True, False, False],
        [True, False, False, False],
        [True, True, True, True],
    ]


def test_advantages_are_normalized_in_each_group():
    found = advantages(torch.tensor([1.0, 0, 0, 1, 1, 1, 0, 0]), 4)
    assert found[:4].sum().abs() < 1e-6
    assert found[0] == found[3] == -found[1]
    assert advantages(torch.ones(4), 4).tolist() == [0.0] * 4


def test_samples_follow_the_model_and_greedy_ones_are_its_argmax(model: Path):
    pair = Pair.of(ARMS["bf16/bf16"], model, torch.device("cpu"))
    prompts = all_questions()[0].prompts[:64]
    ids, logp = Sampler(pair.trainer)(prompts, greedy=True)
    with torch.no_grad():
        logits = pair.trainer(torch.cat([prompts, ids], 1)).logits[:, -NEW_TOKENS - 1 : -1].float()
    torch.testing.assert_close(logp, logits.log_softmax(-1).amax(-1), atol=0.05, rtol=0)  # bf16, another order of sums
    torch.manual_seed(0)
    ids, logp = Sampler(pair.trainer)(prompts[:1].expand(4096, -1))
    counts = torch.bincount(ids[:, 0], minlength=256) / 4096
    with torch.no_grad():
        expected = pair.trainer(prompts[:1]).logits[0, -1].float().softmax(-1)
    assert (counts - expected).abs().max() < 0.04  # five standard deviations of a share of 4096


@pytest.mark.parametrize(
    ("name", "masters"),
    [
        ("w4a4-naive", False),
        ("quads", False),
        ("quads", True),
        ("quads-modelopt", True),
        ("quads-llm-compressor", False),
    ],
)
@pytest.mark.usefixtures("some_are_right")
def test_the_rollout_multiplies_by_the_weights_of_the_trainer_bit_for_bit(model: Path, name: str, masters: bool):
    loop = Loop(ARMS[name], small(model, masters=masters), seed=0)
    before = {n: t.clone() for n, t in loop.pair.trainer.state_dict().items()}
    for record in loop:
        assert all(math.isfinite(value) for value in record.values())
    assert record["differing"] == 0
    trainer, rollout = loop.pair.trainer, loop.pair.rollout.bfloat16()
    moved = {n for n, t in trainer.state_dict().items() if not torch.equal(before[n], t)}
    assert {"model.layers.0.mlp.experts.down_proj", "model.layers.0.self_attn.q_proj.weight"} <= moved
    seen = 0
    for path, module in trainer.named_modules():
        packed: Any = rollout.get_submodule(path)
        if type(module) is W4A16Linear:
            used = module(torch.eye(module.in_features, dtype=torch.bfloat16)).T  # sums of one number and zeros: exact
            assert torch.equal(packed.weight, used)
            seen += 1
        elif isinstance(module, W4A16Experts):
            for parameter in module.layout.parameters:
                used = module._quantized(parameter, module.source(parameter))
                assert torch.equal(ops.dequantize(packed.packed(parameter), torch.bfloat16), used)
                seen += 1
    assert seen == (2 if name == "w4a4-naive" else 6)  # W4A4 linears would quantize the unit vectors as well


@pytest.mark.usefixtures("some_are_right")
def test_bf16_against_itself_is_numerical_noise_and_every_arm_gives_finite_records(model: Path, tmp_path: Path):
    settings, gaps = small(model), {}
    for name in (*(arm.name for arm in MAIN), "bf16/bf16", "quads-static", "quads-ema"):
        records = run_one(ARMS[name], 0, settings, tmp_path / "log.jsonl")
        assert [record["step"] for record in records] == [0, 1, 2], records[-1]
        assert all(math.isfinite(v) for r in records for v in r.values() if not isinstance(v, str))
        gaps[name] = max(record["gap_max"] for record in records[:2])
    assert gaps["bf16/bf16"] < 0.05  # one engine
    assert gaps["bf16"] < 0.2  # bf16 against fp32
    assert gaps["bf16"] < gaps["quads"] < gaps["naive"]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {line["arm"] for line in lines} >= {arm.name for arm in MAIN}


@pytest.mark.usefixtures("some_are_right")
def test_seeds_repeat(model: Path):
    one, two, other = (run_one(ARMS["quads"], seed, small(model), None) for seed in (3, 3, 4))
    names = ("reward", "gap_max", "gap_k1", "grad_norm", "entropy")
    assert [[r.get(n) for n in names] for r in one] == [[r.get(n) for n in names] for r in two]
    assert [r.get("gap_k1") for r in one] != [r.get("gap_k1") for r in other]


def test_a_run_that_breaks_says_so(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Loop, "sample", lambda self: (_ for _ in ()).throw(ValueError("weights hold NaN")))
    (record,) = run_one(ARMS["bf16"], 0, small(model), None)
    assert record["error"] == "ValueError: weights hold NaN"
    assert table.summary({0: [record]})["collapsed"] == [0]


def test_the_command_logs_and_shows(model: Path, tmp_path: Path):
    log = tmp_path / "results" / "rl" / "main.jsonl"
    options = ["--smoke", "--device", "cpu", "--model", str(model), "--arms", "bf16,quads", "--log", str(log)]
    result = CliRunner().invoke(app, ["run", "rl", *options, "--out", str(tmp_path / "table")])
    assert result.exit_code == 0, result.output
    settings, records = table.read_log(log)
    assert settings["model"] == "tiny"
    assert len(records) == 8
    assert set(json.loads((tmp_path / "table.json").read_text())["arms"]) == {"bf16", "quads"}
    with pytest.raises(ValueError, match="exists; remove it"):
        rl(smoke=True, device="cpu", log=log)
    out = tmp_path / "figures"
    result = CliRunner().invoke(app, ["report", "rl", "--results", str(tmp_path / "results"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "| quads |" in result.output
    assert {path.name for path in out.iterdir()} == {"rl-gap.svg", "kernel-speed.svg"}


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="--study 'x' is unknown; choose from main"):
        chosen_arms("x")
    with pytest.raises(ValueError, match="--arms 'quads-block' is not in --study main"):
        chosen_arms("main", "bf16,quads-block")
    assert len({arm.name for study in STUDIES.values() for arm in study}) == sum(map(len, STUDIES.values()))


def test_collapse_is_half_of_the_best_mean_reward():
    def run(rewards: list[float]) -> list[dict]:
        return [{"step": i, "reward": r} for i, r in enumerate(rewards)]

    assert table.collapse(run([0.4] * 20 + [0.6] * 20)) is None
    assert table.collapse(run([0.8] * 20 + [0.0] * 20)) == 25  # six of ten are 0
    assert table.collapse([*run([0.5] * 12), {"step": 12, "error": "ValueError"}]) == 12


def logged(
    arm: str, steps: int, seed: int = 0, ended: bool = True, reward: float = 0.5, gap: float = 0.1
) -> list[dict]:
    """Records of a run whose reward grows by 0.1 a step, evaluated every second step and at its end."""
    numbers = {"gap_mean": gap, "gap_max": 1.0, "gap_k3": 0.01, "grad_norm": 1.0, "entropy": 0.2}
    seconds = {"sample_s": 0.1, "train_s": 0.1, "sync_s": 0.1}
    run = [{"step": i, "reward": reward + 0.1 * i} | numbers | seconds for i in range(steps)]
    for record in run[::2]:
        record |= {"rollout_accuracy": record["reward"], "trainer_accuracy": record["reward"]}
    last = {"step": steps, "differing": 0, "rollout_accuracy": 1.0, "trainer_accuracy": 1.0}
    return [{"arm": arm, "seed": seed} | record for record in [*run, *([last] if ended else [])]]


def rows_of(markdown: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in row.split("|")[1:3]] for row in markdown.splitlines() if row.startswith("| quads")
    ]


def test_runs_that_were_cut_off_are_compared_over_the_steps_that_all_reached(tmp_path: Path):
    cut_off = [*logged("quads-batch", 3, seed=0, ended=False), *logged("quads-batch", 4, seed=1, ended=False)]
    broken = [{"arm": "naive", "seed": 0, "step": 0, "error": "ValueError"}]
    records = [*broken, *cut_off, *logged("quads", 6, seed=1), *logged("quads", 6, seed=0)]
    runs = table.runs_of(records)
    assert [(arm, list(seeds)) for arm, seeds in runs.items()] == [
        ("naive", [0]),
        ("quads", [0, 1]),
        ("quads-batch", [0, 1]),
    ]
    assert list(table.whole(runs)) == ["naive", "quads"]
    assert table.common_steps(runs) == 3  # a run that broke is over, it holds no other back
    settings = {"study": "main", "model": "tiny", "steps": 6, "prompts": 2, "samples": 2, "seeds": 2}
    log = tmp_path / "main.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in (settings, *records)))
    report = table.of_log(log)
    markdown = report.as_markdown()
    assert "Cut off, and not in the table above (steps of each seed): quads-batch (3, 4)." in markdown
    assert "All arms over the 3 steps that every run reached:" in markdown
    mean_of_6, mean_of_3 = "0.75 / 0.75 / 0.75", "0.60 / 0.60 / 0.60"
    assert rows_of(markdown) == [["quads", mean_of_6], ["quads", mean_of_3], ["quads-batch", mean_of_3]]
    found = json.loads(report.as_json())
    assert found["common_steps"] == 3
    assert found["arms"]["quads"]["rollout_accuracy"] == 1.0  # after the last step
    assert found["first_steps"]["quads"]["rollout_accuracy"] == pytest.approx(0.7)  # in step 2
    report.records = [r for r in records if r["arm"] != "quads-batch"]
    assert "Cut off" not in report.as_markdown()


def test_ablations_are_compared_over_the_seeds_and_steps_that_all_have():
    main = table.runs_of([*logged("quads", 6, seed=0, gap=0.3), *logged("quads", 6, seed=1)])
    ablated = table.runs_of(logged("quads-block", 4, ended=False, gap=0.5))
    markdown = table.ablations(main, ablated)
    assert markdown.startswith("The first 4 steps with seed 0, means:")
    assert markdown.splitlines()[-2:] == [
        "| quads | 0.3000 | 1.00 | 0.0100 | 0.650 | 70.0 |",
        "| quads-block | 0.5000 | 1.00 | 0.0100 | 0.650 | 70.0 |",
    ]


def test_the_gap_by_k_takes_the_same_steps_of_every_arm():
    names = {0.0: "w4a16-naive", 12.5: "quads-12.5%", 50.0: "quads"}
    main = table.runs_of([*logged("w4a16-naive", 6, gap=0.3), *logged("quads", 6, gap=0.1)])
    for record in main["quads"][0][4:]:
        record["gap_mean"] = 100.0
    runs, _, steps = table.compared(main, table.runs_of(logged("quads-12.5%", 4, ended=False, gap=0.2)))
    assert steps == 4
    points = figures._by_fraction(runs)
    assert list(points) == ["token"]
    assert points["token"] == [(k, pytest.approx(gap)) for k, gap in zip(names, (0.3, 0.2, 0.1), strict=True)]


def test_logs_that_end_in_the_middle_of_a_line_are_read(tmp_path: Path):
    (tmp_path / "log").write_text('{"study": "main"}\n{"arm": "a"}\n{"ar')
    assert table.read_log(tmp_path / "log") == ({"study": "main"}, [{"arm": "a"}])


def test_tables_are_found_in_markdown():
    rows = figures.table_under(MARKDOWN.read_text(), "## GEMMs of packed NVFP4 weights")
    assert rows[0]["product"].startswith("W4A16 [28672, 8192] M=1")
    assert float(rows[0]["speed-up"]) > 0
    with pytest.raises(ValueError, match="no table under '## Nothing'"):
        figures.table_under("# x\n## Nothing\ntext", "## Nothing")
