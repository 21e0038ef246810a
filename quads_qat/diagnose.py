"""Where the gap between the log-probabilities of rollout and trainer comes from: one thing is swapped at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat.conversion import full_name
from quads_qat.diagnosis import ChannelError, Diagnosis, GemmError, OutputError, RouterFlips
from quads_qat.gap import GapLogger, GapStats, as_bool, gap_stats
from quads_qat.gemm_noise import GemmSums, weight_noise
from quads_qat.model_pair import LAYER, ModelPair
from quads_qat.swaps import (
    Ingredients,
    Sources,
    experts_layout,
    running_with,
    with_tensors,
)
from quads_qat.token_log_probs import chosen, evaluating

__all__ = ["Diagnosis", "GapLogger", "GapStats", "diagnose", "gap_stats"]

_GRID = 2.0**-32
"""Log-probabilities are rounded to multiples of this, so that their differences in float64 are exact and add up."""


@torch.no_grad()
def diagnose(
    trainer: nn.Module,
    rollout: nn.Module,
    input_ids: Tensor,
    *,
    mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    temperature: float = 1.0,
    channels: int = 20,
) -> Diagnosis:
    """Split ``delta = log pi_rollout - log pi_trainer`` into what weights, activations and arithmetic contribute.

    The trainer runs again and again on the same tokens, with one more ingredient of the rollout each time; its modules,
    dtype and order of operations stay. With ``P(weights, activations)`` for the log-probability that it then gives to
    a token, T the trainer's and R the rollout's ingredients::

        delta_weight = P(R, T) - P(T, T)      packed weights decoded into the trainer's dtype, and every other tensor
        delta_act    = P(R, R) - P(R, T)      activation quantization and residual, both terms in one product
        delta_num    = delta - the two        kernels, dtypes, order of summation and of the experts

    The three add up to delta exactly, token by token: log-probabilities are rounded to multiples of 2**-32 first. Where
    trainer and rollout have the same ingredient, its part is exactly 0. The order counts: quantization noise that
    activations add on quantized weights is ``delta_act``, and what the E2M1 grid makes of drift between two engines,
    ``Q(x + drift) != Q(x)``, is ``delta_num``: it too shrinks when the residual is compensated.

    Each row of ``input_ids`` is a forward of its own, without its padding and without a cache: scope ``batch`` and
    per-tensor activation scales see one sequence at a time. The outputs of all linears, experts and layers for one
    row are held, five times.

    Args:
        trainer: unconverted, or in mode w4a16 or w4a4; takes token ids [1, T] and returns logits, or an output that has
            them. Whole: not sharded over processes.
        rollout: usually in mode w4a4_residual, of the same architecture; any other model that ``trainer`` may be works
            too: a bf16 model against its fp32 copy shows the floor of the gap.
        input_ids: int64 [B, T].
        mask: [B, C], C < T, nonzero where one of the last C tokens counts; None counts all but the first.
        attention_mask: [B, T], 0 at padding, which is cut away.
        temperature: divides the logits on both sides.
        channels: how many of the worst channels to report.

    Returns:
        :class:`~quads_qat.diagnosis.Diagnosis`; ``print`` shows it, ``to_dict()`` is JSON, ``plot()`` a figure.

    Raises:
        ValueError: the two models do not go together, the trainer is a rollout, the rollout is unusable after a failed
            sync, a model gives NaN, or tokens, mask and attention mask do not fit. Both models are left as they were.

    Example::

        found = qq.diagnose(trainer, rollout, input_ids)
        rich.print(found)
        print(found.gap["delta_weight"].max)  # 0.0: both multiply by the same bits
    """
    pair = ModelPair.of(trainer, rollout)
    given = _tokens(pair.trainer, input_ids, mask, attention_mask)
    log_probs = [torch.full(given.ids.shape, torch.nan, dtype=torch.float64, device="cpu") for _ in range(5)]
    sums = _Sums(pair)
    with ExitStack() as stack:
        stack.enter_context(evaluating(trainer))
        stack.enter_context(evaluating(rollout))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for row, places in enumerate(given.places):
            if places.numel() > 1:
                forwards = _forwards(trainer, rollout, pair, given.ids[row, places], temperature, sums)
                sums.add(forwards)
                for held, forward in zip(log_probs, forwards, strict=True):
                    held[row, places[1:]] = forward.log_probs
    return _report(pair, sums, [held[:, -given.mask.shape[1] :] for held in log_probs], given.mask, channels)


# --------------------------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True)
class _Tokens:
    ids: Tensor  #: [B, T]
    places: list[Tensor]  #: of each row: where a token is no padding
    mask: Tensor  #: bool [B, C]


def _tokens(trainer: nn.Module, ids: Tensor, mask: Tensor | None, attention: Tensor | None) -> _Tokens:
    if ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32) or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise ValueError(
            f"diagnose: input_ids must be integers [B, T] with B >= 1 and T >= 2, got {ids.dtype} {list(ids.shape)}; "
            "the first token of a row is predicted by nothing"
        )
    if attention is not None and attention.shape != ids.shape:
        raise ValueError(
            f"diagnose: attention_mask must have the shape of input_ids, got {list(attention.shape)} and "
            f"{list(ids.shape)}"
        )
    if mask is not None and (mask.ndim != 2 or mask.shape[0] != ids.shape[0] or not 0 < mask.shape[1] < ids.shape[1]):
        raise ValueError(
            f"diagnose: mask must be [B, C] for the last C of input_ids [B, T], with 0 < C < T, got {list(mask.shape)} "
            f"and {list(ids.shape)}"
        )
    embedding = trainer.get_input_embeddings() if hasattr(trainer, "get_input_embeddings") else None  # pyright: ignore
    size = getattr(embedding, "num_embeddings", None)
    if isinstance(size, int) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        raise ValueError(
            f"diagnose: input_ids must lie in the trainer's vocabulary of {size}, got {int(ids.min())} to "
            f"{int(ids.max())}; was another tokenizer used?"
        )
    ids = ids.cpu()
    attended = torch.ones_like(ids) if attention is None else attention.cpu()
    wanted = torch.ones(ids.shape[0], ids.shape[1] - 1, device="cpu") if mask is None else mask.cpu()
    return _Tokens(ids.long(), [row.nonzero().flatten() for row in attended], as_bool("diagnose", wanted))


# ------------------------------------------------------------------------------------------------------------- forwards


@dataclass(frozen=True)
class _Forward:
    """Of one sequence of T tokens: log-probabilities [T - 1], outputs [T, N] of modules, chosen experts [T, k]."""

    log_probs: Tensor
    outputs: dict[str, Tensor]
    experts: dict[str, Tensor]


def _forwards(
    trainer: nn.Module, rollout: nn.Module, pair: ModelPair, ids: Tensor, temperature: float, sums: _Sums
) -> tuple[_Forward, ...]:
    """The trainer, P(T, T), P(R, T), P(R, R) and the rollout on one sequence; equal ingredients run once."""

    def swapped(sources: Sources, tensors: dict[str, Tensor], seen: Any = None) -> _Forward:
        with with_tensors(pair.trainer, tensors), running_with(pair.trainer, sources, seen):
            return _forward("trainer with swapped weights", trainer, pair.trainer, pair, ids, temperature)

    own = _forward("trainer", trainer, pair.trainer, pair, ids, temperature)
    other = _forward("rollout", rollout, pair.rollout, pair, ids, temperature)
    if pair.theirs or pair.tensors:
        both = swapped(pair.theirs, pair.tensors, sums.see)
        weights = both if pair.same_activations else swapped(pair.half, pair.tensors)
    else:
        both = weights = own
    base = weights if pair.same_weights else swapped(pair.mine, {}) if pair.mine else own
    return own, base, weights, both, other


def _forward(who: str, model: nn.Module, root: nn.Module, pair: ModelPair, ids: Tensor, temperature: float) -> _Forward:
    device = next(t.device for t in (*root.parameters(), *root.buffers()))
    with _watching(root, pair, ids.numel()) as (outputs, experts):
        found = model(ids[None].to(device))
    logits = getattr(found, "logits", found)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != (1, ids.numel()):
        raise ValueError(
            f"diagnose: the {who} must return logits [1, T, V] for token ids [1, T], got "
            f"{list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__} for T = {ids.numel()}"
        )
    if int(ids.max()) >= logits.shape[-1]:
        raise ValueError(
            f"diagnose: the {who} must return logits over its vocabulary, got {logits.shape[-1]} for token ids up to "
            f"{int(ids.max())}"
        )
    log_probs = chosen(logits[0, :-1], ids[1:].to(device), temperature).double().cpu()
    if not bool(torch.isfinite(log_probs).all()):
        raise ValueError(f"diagnose: the {who} gives a token a log-probability that is NaN or inf")
    return _Forward((log_probs / _GRID).round() * _GRID, outputs, experts)


@contextmanager
def _watching(root: nn.Module, pair: ModelPair, tokens: int) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """(outputs, experts) fill with what modules return and are told that sees each token once, in its order."""
    outputs: dict[str, Tensor] = {}
    experts: dict[str, Tensor] = {}
    again: set[str] = set()

    def returned(name: str, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if name in outputs:
            again.add(name)
        if isinstance(output, Tensor) and output.ndim > 1 and tokens in (output.shape[0], output.shape[:2].numel()):
            outputs[name] = output.detach().reshape(tokens, -1).clone()

    def told(name: str, arguments: tuple[Any, ...]) -> None:
        index = arguments[1] if len(arguments) > 1 else None
        if isinstance(index, Tensor) and not index.is_floating_point() and index.ndim == 2 and len(index) == tokens:
            experts[name] = index.detach().cpu()

    def scored(name: str, output: Any) -> None:
        scores: Tensor = output[0]  # [T, E], 0 for the experts that are not chosen
        experts[name] = scores.topk(int((scores != 0).sum(-1).max())).indices.cpu()

    handles = []
    try:
        for name in dict.fromkeys((*pair.layers, *pair.watched)):
            module = root.get_submodule(name)
            handles.append(module.register_forward_hook(lambda _m, _a, out, name=name: returned(name, out)))
            layout = experts_layout(module)
            if layout is not None and layout.token_sorted:  # llama4: rows arrive weighted, in the order of experts
                router = root.get_submodule(f"{name.rpartition('.')[0]}.router")
                handles.append(router.register_forward_hook(lambda _m, _a, out, name=name: scored(name, out)))
            elif layout is not None:
                before = lambda _m, args, kwargs, name=name: told(name, (*args, *kwargs.values()))  # noqa: E731
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        yield outputs, experts
    finally:
        for handle in handles:
            handle.remove()
        for name in again:
            outputs.pop(name, None)


# ----------------------------------------------------------------------------------------------------------- statistics


class _Sums:
    """What adds up over the rows."""

    def __init__(self, pair: ModelPair) -> None:
        self.pair = pair
        self.gemms = {
            full_name(module, parameter): GemmSums(own, pair.theirs[module][parameter])
            for module, of_module in pair.mine.items()
            for parameter, own in of_module.items()
        }
        self.outputs: dict[str, Tensor] = {}  #: total, weight, act, num, energy
        self.experts: dict[str, list[int]] = {}  #: tokens that flip, slots that flip, tokens, slots

    def see(self, module: str, parameter: str, expert: int | None, used: Ingredients, x: Tensor) -> None:
        """One GEMM of P(R, R)."""
        like = self.pair.trainer.get_submodule(module)._parameters[parameter]
        assert like is not None
        self.gemms[full_name(module, parameter)].add(expert, used, x, like)

    def add(self, forwards: tuple[_Forward, ...]) -> None:
        """The five forwards of one row."""
        own, base, weights, both, other = forwards
        for name, mine in own.outputs.items():
            if any(name not in f.outputs or f.outputs[name].shape != mine.shape for f in forwards):
                continue
            y = [f.outputs[name].to(mine.device) for f in (own, base, weights, both, other)]
            new = torch.stack([part.square().sum().double() for part in _differences(*y)]).cpu()
            self.outputs[name] = self.outputs.get(name, 0) + new
        for name, mine in own.experts.items():
            theirs = other.experts.get(name)
            if theirs is not None and theirs.shape == mine.shape:
                counts = self.experts.setdefault(name, [0, 0, 0, 0])
                for i, count in enumerate(_flips(mine, theirs)):
                    counts[i] += count


def _differences(own: Tensor, base: Tensor, weights: Tensor, both: Tensor, other: Tensor) -> Iterator[Tensor]:
    """Of the outputs of the five forwards: total, weight, act, num, and the trainer's own, one at a time in float32."""
    yield other.float() - own
    yield weights.float() - base
    yield both.float() - weights
    yield (other.float() - both) + (base.float() - own)
    yield own.float()


def _flips(a: Tensor, b: Tensor) -> tuple[int, int, int, int]:
    """Of chosen experts [T, k] on two sides: tokens with another set, slots whose expert is missing, tokens, slots."""
    missing = (a[:, :, None] != b[:, None, :]).all(-1)
    differs = a.sort(-1).values.ne(b.sort(-1).values).any(-1)
    return int(differs.sum()), int(missing.sum()), a.shape[0], a.numel()


def _report(pair: ModelPair, sums: _Sums, log_probs: list[Tensor], mask: Tensor, channels: int) -> Diagnosis:
    own, base, weights, both, other = log_probs
    counted = mask & torch.isfinite(own)
    if not bool(counted.any()):
        raise ValueError("diagnose: no tokens are counted; check mask and attention_mask")
    delta, weight, act = other - own, weights - base, both - weights
    deltas = {"delta": delta, "delta_weight": weight, "delta_act": act, "delta_num": delta - weight - act}
    deltas = {part: torch.where(counted, value, torch.nan) for part, value in deltas.items()}
    gap = {part: gap_stats(value, torch.zeros_like(value), counted) for part, value in deltas.items()}
    positions = {part: [_none(v) for v in value.abs().nanmean(0).tolist()] for part, value in deltas.items()}
    errors = {name: _output_error(name, s) for name, s in sums.outputs.items()}
    gemms = [_gemm_error(pair, name, gemm) for name, gemm in sums.gemms.items()]
    return Diagnosis(
        **deltas,
        gap=gap,
        positions=positions,
        layers=[errors[name] for name in pair.layers if name in errors],
        modules=[errors[name] for name in pair.watched if name in errors and name not in pair.layers],
        gemms=gemms,
        routers=[RouterFlips(n, c[0] / max(c[2], 1), c[1] / max(c[3], 1)) for n, c in sums.experts.items()],
        channels=_worst_channels(sums.gemms, channels),
        other_weights=list(pair.tensors),
        cast_weights=pair.casts,
    )


def _none(value: float) -> float | None:
    return None if value != value else value


def _ratio(a: float, b: float) -> float:
    return (a / b) ** 0.5 if b else float(a > 0)


def _output_error(name: str, sums: Tensor) -> OutputError:
    total, weight, act, num, energy = sums.tolist()
    return OutputError(name, *(_ratio(part, energy) for part in (total, weight, act, num)))


def _gemm_error(pair: ModelPair, name: str, gemm: GemmSums) -> GemmError:
    error, energy, left, entered = (0.0,) * 4 if gemm.output is None else gemm.output.tolist()
    layer = LAYER.match(name)
    return GemmError(
        name=name,
        layer=layer[1] if layer else "",
        rows=gemm.rows,
        local_error=_ratio(error, energy),
        weight_error=pair.errors[name],
        weight=weight_noise(pair.masters[name], gemm.theirs.weight),
        activation=gemm.activation.noise(),
        compensated=None if gemm.theirs.activation is None or not gemm.rows else _ratio(left, entered),
    )


def _worst_channels(gemms: dict[str, GemmSums], count: int) -> list[ChannelError]:
    found = []
    for name, gemm in gemms.items():
        if gemm.channels is None or gemm.output is None:
            continue
        whole, energy = gemm.channels.sum().item(), gemm.output[1].item()
        for cause, caused in zip(("act", "weight"), gemm.channels, strict=True):
            values, places = caused.topk(min(count, len(caused)))
            found += [
                ChannelError(name, channel, cause, value / whole, _ratio(value, energy))
                for value, channel in zip(values.tolist(), places.tolist(), strict=True)
                if value > 0
            ]
    return sorted(found, key=lambda entry: -entry.error)[:count]
