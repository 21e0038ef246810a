"""TRL: GRPO on a W4A16 trainer whose samples come from a residual-compensated rollout, synced before each batch.

    model = qq.convert(AutoModelForCausalLM.from_pretrained(...), "w4a16")
    rollout = ResidualRollout(model, residual=qq.ResidualConfig(fraction=0.5))
    trainer = QuadsGRPOTrainer(model, reward_funcs=..., args=GRPOConfig(...), train_dataset=..., rollout_func=rollout)
    trainer.train()

The contract of ``rollout_func`` was read in trl 1.16.0, ``trainer/grpo_trainer.py``: it is called with the prompts of
this process, one for each completion that is wanted, and the trainer; it returns ``prompt_ids``, ``completion_ids`` and
``logprobs``, lists of lists without padding. ``logprobs`` become ``sampling_per_token_logps``, which TRL's own loss
divides by with vLLM only; hence :class:`QuadsGRPOTrainer`.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat.config import Dialect, Mode, ResidualConfig
from quads_qat.contract import contract_of
from quads_qat.conversion import conversion_of
from quads_qat.convert import convert
from quads_qat.diagnose import GapStats, gap_stats
from quads_qat.dialects import carries
from quads_qat.first_step import FirstStepReport, GapLimits, check_first_step
from quads_qat.token_log_probs import chosen
from quads_qat.weight_stream import export_weights
from quads_qat.weight_sync import SyncReport, update_weights

OLDEST = (1, 16)

try:
    import trl as installed  # pyright: ignore
    from trl import GRPOTrainer  # pyright: ignore
except ImportError as error:
    raise ImportError(
        f"quads_qat.integrations.trl needs trl {OLDEST[0]}.{OLDEST[1]} or newer: pip install 'quads_qat[trl]' ({error})"
    ) from error
version: str = installed.__version__  # pyright: ignore
if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
    raise ImportError(
        f"quads_qat.integrations.trl needs trl {OLDEST[0]}.{OLDEST[1]} or newer, whose rollout_func it follows, got "
        f"{version}: pip install 'quads_qat[trl]'"
    )


class ResidualRollout:
    """``rollout_func`` of a ``GRPOTrainer``: samples from a rollout model that has the trainer's weights of this step.

    Every call syncs if the trainer's weights have changed, samples one completion for each prompt with the trainer's
    generation settings, and returns the log-probs that the rollout sampled with: after temperature and penalties,
    before top-k and top-p, as the trainer computes its own. The gap to the trainer is measured on the same tokens (one
    forward without gradient) and logged as ``rollout_gap/mean``, ``max``, ``k1``, ``k3`` and ``share_over_ln2``. The
    first batch goes through :func:`~quads_qat.first_step.check_first_step`; a failed check warns.

    Args:
        model: a converted trainer (w4a16 or w4a4), of which a copy becomes the rollout; or a rollout model as
            ``load_rollout`` gives it, which is used as it is.
        residual: what the copy compensates; None is the default of ``convert``.
        limits: of the first step's gap.

    Attributes:
        model: the rollout.
        gaps: one :class:`~quads_qat.diagnose.GapStats` for each batch of samples, of this process.
        first_step: the report of the first batch; None before it.
        syncs: how often weights were sent.

    Raises:
        ValueError: the model is not converted, or was given to a trainer already; ``residual`` for one that is a
            rollout already. When called: a trainer that uses vLLM, has a PEFT adapter, or whose contract differs from
            the rollout's.

    Where the model is sharded (FSDP2, tensor parallelism), pass a rollout from ``load_rollout``: shards are not copied.
    """

    def __init__(
        self, model: nn.Module, *, residual: ResidualConfig | None = None, limits: GapLimits | None = None
    ) -> None:
        _, conversion = conversion_of(model, "ResidualRollout")
        if conversion.mode is Mode.W4A4_RESIDUAL:
            if residual is not None:
                raise ValueError(
                    "ResidualRollout: this model is a rollout and has its residual already; drop residual="
                )
            self.model: Any = model
        else:
            _require_own_forward(model)
            self.model = convert(copy.deepcopy(model), Mode.W4A4_RESIDUAL, residual=residual)
        self.model.eval()
        self.limits = limits
        self.gaps: list[GapStats] = []
        self.first_step: FirstStepReport | None = None
        self.syncs = 0
        self._synced: tuple[int, int] | None = None

    def sync(self, model: nn.Module) -> SyncReport:
        """Send the trainer's weights, quantized as its forward quantizes them. With sharded weights, on all ranks."""
        recipe = conversion_of(model, "ResidualRollout.sync")[1].recipe
        dialect = next((d for d in Dialect if carries(d, recipe)), Dialect.MODELOPT)
        report = update_weights(self.model, export_weights(model, dialect), contract=contract_of(model))
        self.syncs += 1
        return report

    @torch.no_grad()
    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """The contract of ``rollout_func``."""
        self._require_usable(trainer)
        self.model.to(trainer.accelerator.device)
        # Steps alone would miss a second run, or weights that were loaded in between.
        state = trainer.state.global_step, sum(p._version for p in trainer.model.parameters())
        if self._synced != state:
            self.sync(trainer.model)
            self._synced = state
        prompt_ids = [list(ids) for ids in trainer._tokenize_prompts(prompts)[0]]
        completion_ids, logprobs = self._sample(prompt_ids, trainer)
        self._measure(prompt_ids, completion_ids, logprobs, trainer)
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}

    def _require_usable(self, trainer: Any) -> None:
        if trainer.use_vllm:
            raise ValueError("ResidualRollout: use_vllm=True samples from vLLM; set it to False")
        if hasattr(trainer.model, "peft_config"):
            raise ValueError(
                "ResidualRollout: a PEFT adapter is not part of the weights that are synced; train the full model, or "
                "merge the adapter and convert again"
            )
        if self._synced is None and not isinstance(trainer, QuadsGRPOTrainer):
            warnings.warn(
                "GRPOTrainer leaves the log-probs of a rollout_func out of the importance ratio; use "
                "quads_qat.integrations.trl.QuadsGRPOTrainer, or put its method in front of your own class",
                stacklevel=3,
            )

    def _sample(self, prompt_ids: list[list[int]], trainer: Any) -> tuple[list[list[int]], list[list[float]]]:
        padding = trainer.generation_config.pad_token_id
        ids, mask = padded(prompt_ids, padding, left=True, device=trainer.accelerator.device)
        recorder = _LogProbs(trainer.temperature)
        # Else what the checkpoint's own config sets (top_k, say) fills in what the trainer's leaves open.
        self.model.generation_config = copy.deepcopy(trainer.generation_config)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            generation_config=trainer.generation_config,
            logits_processor=[recorder.before],
            stopping_criteria=[recorder.after],
        )
        sampled, logp = out[:, ids.shape[1] :].tolist(), torch.stack(recorder.steps, 1).tolist()
        lengths = [_length(row, trainer.eos_token_ids) for row in sampled]
        return (
            [row[:n] for row, n in zip(sampled, lengths, strict=True)],
            [row[:n] for row, n in zip(logp, lengths, strict=True)],
        )

    def _measure(
        self, prompt_ids: list[list[int]], completion_ids: list[list[int]], logprobs: list[list[float]], trainer: Any
    ) -> None:
        """The gap on the tokens and in the padding that the loss will see."""
        device, pad = trainer.accelerator.device, trainer.generation_config.pad_token_id
        prompts, prompt_mask = padded(prompt_ids, pad, left=True, device=device)
        completions, mask = padded(completion_ids, pad, left=False, device=device)
        logp_rollout = padded(logprobs, 0.0, left=False, device=device)[0]
        ids, attention_mask = torch.cat([prompts, completions], 1), torch.cat([prompt_mask, mask], 1)
        logp_trainer = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, attention_mask, completions.shape[1], batch_size=trainer.args.per_device_eval_batch_size
        )[0]
        gap = gap_stats(logp_rollout, logp_trainer, mask)
        self.gaps.append(gap)
        _log(gap, trainer)
        if self.first_step is None:
            self.first_step = check_first_step(
                trainer.model,
                self.model,
                input_ids=ids,
                attention_mask=attention_mask,
                mask=mask,
                logp_rollout=logp_rollout,
                logp_trainer=logp_trainer,
                temperature=trainer.temperature,
                limits=self.limits,
            )
            if not self.first_step.ok:
                warnings.warn(f"the first step of this run is not sound:\n{self.first_step}", stacklevel=3)


class QuadsGRPOTrainer(GRPOTrainer):  # pyright: ignore
    """``GRPOTrainer`` whose importance ratio is trainer / rollout: the policy that sampled, not a second trainer pass.

    Without vLLM, TRL stores the log-probs of a ``rollout_func`` but divides by the trainer's own; the ratio is then 1
    in the first update, whatever the rollout sampled with. Here they are ``old_per_token_logps``, so every loss type
    clips the true ratio. With vLLM, or without a ``rollout_func``, nothing changes.
    """

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.rollout_func is not None and not self.use_vllm:
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
        return output


class _LogProbs:
    """Log-probs of what ``generate`` samples, step by step: it keeps one [B] for each, no logits [B, T, V]."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.steps: list[Tensor] = []
        self.logits: Tensor | None = None

    def before(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """A logits processor: sees the logits [B, V] of the next token."""
        self.logits = scores
        return scores

    def after(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """A stopping criterion that never stops: sees which token was drawn."""
        assert self.logits is not None
        self.steps.append(chosen(self.logits, input_ids[:, -1], self.temperature))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _require_own_forward(model: nn.Module) -> None:
    """Trainers replace ``forward`` on the object; a copy's is still bound to the original and its weights."""
    replaced = next((name for name, module in model.named_modules() if "forward" in module.__dict__), None)
    if replaced is not None:
        raise ValueError(
            f"ResidualRollout: the forward of {replaced or 'the model'} was replaced, as trainers and accelerate do, "
            "and a copy would run the original's; make the ResidualRollout before the trainer, or pass a rollout from "
            "quads_qat.load_rollout"
        )


def padded(
    rows: list[list[Any]], value: float, *, left: bool, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor]:
    """([B, T] of rows of different lengths, mask [B, T] with 1 where there is something)."""
    width = max(map(len, rows))
    gaps = [width - len(row) for row in rows]
    full = [[value] * n + row if left else row + [value] * n for row, n in zip(rows, gaps, strict=True)]
    mask = [[0] * n + [1] * len(r) if left else [1] * len(r) + [0] * n for r, n in zip(rows, gaps, strict=True)]
    return torch.tensor(full, device=device), torch.tensor(mask, device=device)


def _length(ids: list[int], ends: list[int]) -> int:
    """How many tokens a completion has, its end included."""
    return next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))


def _log(gap: GapStats, trainer: Any) -> None:
    """Beside TRL's own metrics; over all processes."""
    names = ("mean", "max", "k1", "k3", "share_over_ln2")
    here = torch.tensor([[getattr(gap, name) for name in names]], device=trainer.accelerator.device)
    everywhere = trainer.accelerator.gather(here)
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for i, name in enumerate(names):
        column = everywhere[:, i]
        metrics[f"rollout_gap/{name}"].append((column.max() if name == "max" else column.mean()).item())
