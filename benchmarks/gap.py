"""Where the log-prob gap comes from on a real model: every trainer against every rollout, before and after a short QAT.

Teacher forced on a text that no trainer sees. Trainers compute in bf16, rollouts in fp32 as "the other engine", through
the product's own modules; ``qq.diagnose`` splits each gap.
"""

from __future__ import annotations

import copy
import hashlib
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quads_qat as qq
from benchmarks import smollm2
from benchmarks.gap_report import PACKAGES, GapReport, label
from benchmarks.registry import Row, benchmark
from benchmarks.residual_quality import CALIBRATION as TRAINING
from benchmarks.residual_quality import (
    TEXT,
    Log,
    Study,
    is_directory_of_transformers,
    open_model,
    sequences,
)
from quads_qat.config import ActivationFormat, Mode, Recipe, ResidualConfig


@dataclass(frozen=True)
class Trainer:
    """How a trainer quantizes: not at all (``mode`` None), or by ``mode`` with the ``recipe`` of its weights.

    The recipe is that of its rollouts too.
    """

    mode: Mode | None
    recipe: Recipe = Recipe.ALIGNED


@dataclass(frozen=True)
class Rollout:
    """What samples: the trainer's weights as they are (``packed`` False) or packed, and what activations become."""

    packed: bool
    activation: ActivationFormat | None = None
    residual: ResidualConfig | None = None


BF16, W4A16, W4A4 = Trainer(None), Trainer(Mode.W4A16), Trainer(Mode.W4A4)
MODELOPT = Trainer(Mode.W4A16, Recipe.MODELOPT)
PLAIN, WEIGHTS_ONLY = Rollout(packed=False), Rollout(packed=True)


def w4a4(fraction: float, scope: str = "token") -> Rollout:
    """Packed weights, quantized activations, and a part of their residual."""
    return Rollout(True, ActivationFormat(), ResidualConfig(fraction=fraction, scope=scope))  # pyright: ignore


ARMS: dict[Trainer, Sequence[Rollout]] = {
    BF16: (PLAIN, WEIGHTS_ONLY, w4a4(0.0), w4a4(0.5)),
    W4A4: (w4a4(0.0),),
    W4A16: (WEIGHTS_ONLY, w4a4(0.0), w4a4(0.25), w4a4(0.5), w4a4(0.75), w4a4(0.5, "batch")),
    MODELOPT: (WEIGHTS_ONLY, w4a4(0.0), w4a4(0.5)),
}
"""Trainer -> the rollouts that it is compared with."""


# ------------------------------------------------------------------------------------------------------------- training


@dataclass(frozen=True)
class Training:
    """A short fine-tuning on the next token: ``steps`` of AdamW on fp32 masters, one sequence of ``length`` a step."""

    steps: int
    length: int
    rate: float
    ids: Tensor

    def run(self, model: nn.Module) -> list[float]:
        """Train in place; the losses. Sequences are the same for every model."""
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=0.0)
        generator = torch.Generator().manual_seed(0)
        losses = []
        for _ in range(self.steps):
            start = int(torch.randint(0, self.ids.numel() - self.length, (1,), generator=generator))
            row = self.ids[None, start : start + self.length]
            loss = model(row, labels=row).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        model.eval()
        return losses


def make_trainer(base: nn.Module, kind: Trainer, training: Training | None) -> tuple[nn.Module, list[float]]:
    """A copy of ``base`` (bf16), converted, trained on fp32 masters, and cast back to bf16; and its losses."""
    model = copy.deepcopy(base)
    if training is not None:
        model.float()
    if kind.mode is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that W4A4 is for ablations is what is measured here
            qq.convert(model, kind.mode, recipe=kind.recipe)
    losses = [] if training is None else training.run(model)
    for parameter in model.parameters():  # not model.to(dtype), which would round the rotary frequencies too
        parameter.data = parameter.data.to(torch.bfloat16)
    return model, losses


def make_rollout(trainer: nn.Module, kind: Trainer, *, packed: bool) -> nn.Module:
    """The trainer's weights in fp32 arithmetic, as they are or packed; the trainer is left alone."""
    model = copy.deepcopy(trainer)
    if kind.mode is not None:
        qq.revert(model)
    return (qq.convert(model, "w4a4_residual", recipe=kind.recipe) if packed else model).float()


# ---------------------------------------------------------------------------------------------------------- measurement


@torch.no_grad()
def log_probs(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Log-probabilities of all ids, [length - 1, ids] a sequence."""
    return [model(ids).logits[0, :-1].float().log_softmax(-1) for ids in batches]


def measure(trainer: nn.Module, own: list[Tensor], rollout: nn.Module, batches: list[Tensor]) -> dict[str, Any]:
    """One record: the gap and its parts, KL over the vocabulary, perplexities, router flips.

    Args:
        trainer: in bf16.
        own: its :func:`log_probs`.
        rollout: of its weights.
        batches: sequences [1, length], of one length.
    """
    start = time.perf_counter()
    with _logits_of(rollout) as logits:
        found = qq.diagnose(trainer, rollout, torch.cat(batches), channels=0)
    kl, nll = 0.0, 0.0
    for ids, theirs, mine in zip(batches, logits, own, strict=True):
        rolled = theirs[0, :-1].float().log_softmax(-1)
        kl += (rolled.exp() * (rolled - mine)).sum().item()
        nll -= rolled.gather(-1, ids[0, 1:, None]).sum().item()
    tokens = found.gap["delta"].tokens
    mine = torch.cat([m.gather(-1, ids[0, 1:, None]) for ids, m in zip(batches, own, strict=True)])
    flips = [router.rate for router in found.routers]
    return {
        "gap": {part: stats.to_dict() for part, stats in found.gap.items()},
        "kl": kl / tokens,
        "perplexity": float(torch.tensor(nll / tokens).exp()),
        "trainer_perplexity": float((-mine.mean()).exp()),
        "router_flips": sum(flips) / len(flips) if flips else None,
        "seconds": round(time.perf_counter() - start, 1),
    }


@contextmanager
def _logits_of(model: nn.Module) -> Iterator[list[Tensor]]:
    """Fills with the logits of every forward inside."""
    kept: list[Tensor] = []
    handle = model.register_forward_hook(lambda _module, _args, out: kept.append(out.logits.detach()))
    try:
        yield kept
    finally:
        handle.remove()


def arm_record(kind: Trainer, rollout: Rollout, steps: int) -> dict[str, Any]:
    """The part of a record that says what was measured."""
    residual = rollout.residual
    return {
        "steps": steps,
        "trainer": "bf16" if kind.mode is None else str(kind.mode),
        "recipe": str(kind.recipe),
        "packed": rollout.packed,
        "fraction": None if residual is None else residual.fraction,
        "scope": None if residual is None or residual.fraction == 0 else str(residual.scope),
    }


def measure_arms(
    kind: Trainer, rollouts: Sequence[Rollout], made: tuple[nn.Module, list[float]], batches: list[Tensor]
):
    """Yield (rollout, record) for each; weights are packed once."""
    trainer, losses = made
    own = log_probs(trainer, batches)
    packed = None
    for rollout in rollouts:
        if rollout.packed and packed is None:
            packed = Study(make_rollout(trainer, kind, packed=True), batches)
        if rollout.packed and packed is not None:
            packed.set(rollout.activation, rollout.residual)
        model = packed.rollout if rollout.packed and packed is not None else make_rollout(trainer, kind, packed=False)
        yield rollout, measure(trainer, own, model, batches) | {"losses": losses}


@benchmark("gap")
def gap(
    model: Path | None = None,
    text: Path = TEXT,
    tokens: int = 256,
    length: int = 256,
    experts: int = 0,
    steps: int = 30,
    training: Path = TRAINING,
    train_length: int = 128,
    rate: float = 3e-5,
    only: str = "",
    log: Path | None = None,
) -> GapReport:
    """Log-prob gap of every trainer and rollout, split by cause, before and after a short QAT; or ``only`` some."""
    settings = {
        "model": model.resolve().name if is_directory_of_transformers(model) else smollm2.find(model).stem,
        "experts": experts,
        "text": text.name,
        "text_sha256": hashlib.sha256(text.read_bytes()).hexdigest()[:16],
        "tokens": tokens,
        "length": length,
        "steps": steps,
        "training": {"text": training.name, "length": train_length, "rate": rate} if steps else None,
    }
    kept = Log(log, settings)
    base, encode = None, None
    for after in dict.fromkeys((0, steps)):
        for kind, rollouts in ARMS.items():
            records = {rollout: arm_record(kind, rollout, after) for rollout in rollouts}
            missing = [r for r, record in records.items() if only in label(record) and not kept.has(record)]
            if not missing:
                continue
            if base is None or encode is None:
                base, encode = open_model(model)
                base = smollm2.upcycle(base, experts) if experts else base
            batches = sequences(encode(text.read_text()), tokens, length)
            short = Training(after, train_length, rate, encode(training.read_text())) if after else None
            for rollout, record in measure_arms(kind, missing, make_trainer(base, kind, short), batches):
                kept.add(records[rollout] | record)
    upcycled = f" as {experts} experts" if experts else ""
    report = GapReport(
        title=f"Log-prob gap by trainer and rollout: {settings['model']}{upcycled}, {tokens} tokens of {text.name}",
        unit_count=tokens,
        unit="tokens",
        packages=PACKAGES,
        settings=settings,
        records=kept.records,
    )
    report.rows = [Row(label(r), r["seconds"]) for r in kept.records]
    return report
