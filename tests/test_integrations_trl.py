"""Contract under test: TRL's GRPO trains a W4A16 MoE on samples of a compensated rollout that has the trainer's bits.

The run is real, and small: three steps of products on the bundled model. Without trl those tests are skipped;
``make notebooks`` installs it and runs them.
"""

import copy
import importlib
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from small_modules import TINYMOE
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

import quads_qat as qq
from quads_qat.demo import byte_tokenizer

needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed: pip install -e '.[trl]'")
TEMPERATURE, STEPS = 0.9, 3


def trainer_model() -> nn.Module:
    return qq.convert(AutoModelForCausalLM.from_pretrained(TINYMOE, dtype=torch.float32), "w4a16")


def products(count: int) -> list[dict[str, str]]:
    """Prompts of 7 and 8 tokens."""
    generator = torch.Generator().manual_seed(0)
    pairs = [torch.randint(10, 100 + 900 * (i % 2), (2,), generator=generator).tolist() for i in range(count)]
    return [{"prompt": f"\n{a}*{b}="} for a, b in pairs]


def reward(completions: list[str], **_: Any) -> list[float]:
    """Share of odd digits: rarely the same for all completions of a prompt."""
    return [sum(letter in "13579" for letter in text) / max(len(text), 1) for text in completions]


def arguments(folder: Path) -> Any:
    from trl import GRPOConfig  # pyright: ignore[reportMissingImports]

    return GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=6,
        temperature=TEMPERATURE,
        max_steps=STEPS,
        learning_rate=1e-4,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What was seen at every step: ``calls`` of the rollout, ``batches`` of the loss."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]

    from quads_qat.integrations.trl import QuadsGRPOTrainer, ResidualRollout

    seen = SimpleNamespace(calls=[], batches=[])

    class Rollout(ResidualRollout):
        def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
            random = torch.get_rng_state()
            out = super().__call__(prompts, trainer)
            after = torch.get_rng_state()
            torch.set_rng_state(random)
            again = sample(self.model, prompts, trainer.eos_token_ids)
            torch.set_rng_state(after)
            model = copy.deepcopy(trainer.model)
            model.__dict__.pop("forward", None)  # accelerate's, which runs the original
            fresh = qq.convert(model, "w4a4_residual").state_dict()
            held = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            seen.calls.append(SimpleNamespace(prompts=prompts, out=out, again=again, fresh=fresh, held=held))
            return out

    class Trainer(QuadsGRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
            seen.batches.append(super()._generate_and_score_completions(inputs))
            return dict(seen.batches[-1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        torch.manual_seed(0)
        model = trainer_model()
        seen.before = {name: p.detach().clone() for name, p in model.named_parameters()}
        seen.rollout = Rollout(
            model, residual=qq.ResidualConfig(fraction=0.5), limits=qq.GapLimits(mean=1, k3=1, share_over_ln2=1)
        )
        seen.trainer = Trainer(
            model,
            reward_funcs=reward,
            args=arguments(tmp_path_factory.mktemp("trl")),
            train_dataset=Dataset.from_list(products(16)),
            processing_class=byte_tokenizer(),
            rollout_func=seen.rollout,
        )
        seen.addresses = {name: t.data_ptr() for name, t in seen.rollout.model.state_dict().items()}
        seen.trainer.train()
    seen.model, seen.syncs, seen.gaps = model, seen.rollout.syncs, list(seen.rollout.gaps)
    return seen


def sample(rollout: Any, prompts: list[str], ends: list[int]) -> list[tuple[list[int], Tensor]]:
    """(tokens, log-probs) by transformers' own bookkeeping: all logits are kept."""
    ids = [list(prompt.encode()) for prompt in prompts]
    width = max(map(len, ids))
    config = GenerationConfig(
        do_sample=True,
        temperature=TEMPERATURE,
        max_new_tokens=6,
        eos_token_id=ends,
        pad_token_id=0,
        top_k=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    out = rollout.generate(
        torch.tensor([[0] * (width - len(row)) + row for row in ids]),
        attention_mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids]),
        generation_config=config,
    )
    tokens = out.sequences[:, width:]
    logp = (torch.stack(out.logits, 1).float() / TEMPERATURE).log_softmax(-1)
    logp = logp.gather(-1, tokens[..., None]).squeeze(-1)
    lengths = [row.index(ends[0]) + 1 if ends[0] in row else len(row) for row in tokens.tolist()]
    return [(tokens[i, :n].tolist(), logp[i, :n]) for i, n in enumerate(lengths)]


@needs_trl
def test_after_every_sync_the_rollout_holds_a_fresh_export(run: Any):
    assert run.syncs == len(run.calls) == STEPS
    for call in run.calls:
        assert call.held.keys() == call.fresh.keys()
        for name, fresh in call.fresh.items():
            quantized = "_proj_" in name or "_proj.weight_" in name
            expected = fresh if quantized else fresh.to(torch.bfloat16).float()  # fp32 masters are cast as at export
            assert_same_bits(call.held[name], expected)
    first, last = run.calls[0].held, run.calls[-1].held
    codes = [name for name in first if name.endswith("qdata")]
    assert not any(torch.equal(first[name], last[name]) for name in codes), "no code has changed"
    assert {name: t.data_ptr() for name, t in run.rollout.model.state_dict().items()} == run.addresses


@needs_trl
def test_the_log_probs_are_the_rollouts_own(run: Any):
    for call in run.calls:
        assert call.out["prompt_ids"] == [list(prompt.encode()) for prompt in call.prompts]
        for ids, logp, again in zip(call.out["completion_ids"], call.out["logprobs"], call.again, strict=True):
            assert ids == again[0]
            assert_same_bits(torch.tensor(logp), again[1])
    lengths = [{len(ids) for ids in call.out["prompt_ids"]} for call in run.calls]
    assert any(len(different) > 1 for different in lengths), "no padding was tested"


@needs_trl
def test_the_ratio_is_against_the_rollout(run: Any):
    for call, batch in zip(run.calls, run.batches, strict=True):
        old, mask = batch["old_per_token_logps"], batch["completion_mask"].bool()
        assert old[mask].tolist() == [x for logp in call.out["logprobs"] for x in logp]


@needs_trl
def test_the_trainer_learns_and_logs(run: Any):
    moved = [name for name, p in run.model.named_parameters() if not torch.equal(p, run.before[name])]
    assert len(moved) == len(run.before)
    logs = [entry for entry in run.trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [1, 2, 3]
    assert all(math.isfinite(entry["loss"]) and entry["grad_norm"] > 0 for entry in logs)
    for entry, gap in zip(logs, run.gaps, strict=True):
        for name in ("mean", "max", "k1", "k3", "share_over_ln2"):
            assert entry[f"rollout_gap/{name}"] == pytest.approx(getattr(gap, name), rel=1e-6, abs=1e-9)
        assert gap.tokens == sum(map(len, run.calls[logs.index(entry)].out["completion_ids"]))


@needs_trl
def test_a_sync_follows_every_change_and_nothing_else(run: Any):
    from quads_qat.integrations.trl import ResidualRollout

    def call() -> int:
        before = run.rollout.syncs
        ResidualRollout.__call__(run.rollout, ["\n7*8="], run.trainer)
        return run.rollout.syncs - before

    assert [call(), call()] == [1, 0]  # the last step of the run had changed the weights
    with torch.no_grad():
        run.model.model.norm.weight.mul_(1.5)
    assert [call(), call()] == [1, 0]
    assert torch.equal(run.rollout.model.model.norm.weight, run.model.model.norm.weight.bfloat16().float())


@needs_trl
def test_the_first_step_was_checked(run: Any):
    assert [check.passed for check in run.rollout.first_step.checks] == [True] * 6


# ----------------------------------------------------------------------------------------------------------- refusals


def fake_trainer(**changes: Any) -> Any:
    return SimpleNamespace(**({"use_vllm": False, "model": nn.Linear(2, 2)} | changes))


@needs_trl
def test_what_does_not_go_together_is_refused():
    from quads_qat.integrations.trl import ResidualRollout

    with pytest.raises(ValueError, match="has not been converted"):
        ResidualRollout(nn.Linear(32, 16))
    model = qq.convert(nn.Sequential(nn.Linear(32, 16)), "w4a16")
    given = qq.convert(copy.deepcopy(model), "w4a4_residual")
    assert ResidualRollout(given).model is given
    with pytest.raises(ValueError, match="drop residual="):
        ResidualRollout(given, residual=qq.ResidualConfig())
    rollout = ResidualRollout(model)
    assert rollout.model is not model
    with pytest.raises(ValueError, match="use_vllm=True samples from vLLM"):
        rollout([], fake_trainer(use_vllm=True))
    adapted = nn.Linear(2, 2)
    adapted.peft_config = {}  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="PEFT adapter"):
        rollout([], fake_trainer(model=adapted))
    with pytest.warns(UserWarning, match="QuadsGRPOTrainer"), pytest.raises(AttributeError):
        rollout([], fake_trainer())
    other = qq.convert(nn.Sequential(nn.Linear(32, 16)), "w4a16", recipe="modelopt")
    with pytest.raises(ValueError, match="another contract: recipe"):
        rollout.sync(other)


@needs_trl
def test_a_model_that_a_trainer_has_wrapped_is_refused(run: Any):
    """Its forward is an attribute, and bound to the original: every copy would compute with the trainer's weights."""
    from quads_qat.integrations.trl import ResidualRollout

    assert "forward" in run.model.__dict__
    with pytest.raises(ValueError, match="the forward of the model was replaced"):
        ResidualRollout(run.model)


def test_the_byte_tokenizer_knows_every_byte():
    text = "".join(map(chr, range(0x400))) + "\u65e5\n"
    tokenizer = byte_tokenizer()
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode()), skip_special_tokens=False) == text
    assert tokenizer.batch_decode([[0x34, 0x32, 0x0A]], skip_special_tokens=True) == ["42"]
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (0x0A, 0, 256)


def test_without_trl_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "quads_qat.integrations.trl", raising=False)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ImportError, match=r"needs trl 1\.16 or newer: pip install 'quads_qat\[trl\]'"):
        importlib.import_module("quads_qat.integrations.trl")


def test_an_old_trl_is_named(monkeypatch: pytest.MonkeyPatch):
    old: Any = ModuleType("trl")
    old.__version__, old.GRPOTrainer = "1.15.2", object
    monkeypatch.delitem(sys.modules, "quads_qat.integrations.trl", raising=False)
    monkeypatch.setitem(sys.modules, "trl", old)
    with pytest.raises(ImportError, match=r"got 1\.15\.2"):
        importlib.import_module("quads_qat.integrations.trl")
