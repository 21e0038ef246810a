"""What a training loop tells the trainer: ``step`` after an optimizer step, ``accumulate`` around micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quads_qat import autograd, sharding
from quads_qat.config import Mode, WeightFormat, WeightScale
from quads_qat.conversion import Conversion, conversion_of, require_same_modules
from quads_qat.formats import BLOCK_SIZE, SCALE_RANGE
from quads_qat.scale_groups import ScaleGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    Cuts = tuple[tuple[DeviceMesh, int], ...]


def not_started(start_step: int) -> str:
    """That forwards do not quantize yet: the start of what all say who compare or send quantized weights."""
    return (
        f"fake quantization starts at step {start_step} of the schedule; until then the trainer multiplies by its "
        "master weights"
    )


@dataclass(frozen=True)
class StepReport:
    """What ``step`` did and saw.

    Attributes:
        step: calls so far, this one included.
        quantizing: whether the next forward fake-quantizes (``Schedule.start_step`` has come).
        scales_moved: scale groups whose held amax changed; 0 with ``dynamic`` scales, which hold none.
        changed: share of weights whose code or block scale is another one than at the last ``track_codes``; None
            without it, at the first, or after one that raised.
        clipped: share of weights beyond the largest value of their scale (6 * 448 * p), which saturate; None without
            ``track_codes``. Always 0 with ``dynamic`` scales.
        by_weight: parameter name -> (changed, clipped), the same shares for each.
    """

    step: int
    quantizing: bool
    scales_moved: int
    changed: float | None = None
    clipped: float | None = None
    by_weight: dict[str, tuple[float | None, float]] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, float]:
        """The numbers that are known, by name, for a logger."""
        numbers = {"step": self.step, "scales_moved": self.scales_moved}
        return numbers | {k: v for k, v in (("changed", self.changed), ("clipped", self.clipped)) if v is not None}


@torch.no_grad()
def step(model: nn.Module, *, track_codes: bool = False) -> StepReport:
    """Move the schedule of a trainer on by one; call it right after ``optimizer.step()``.

    Needed for ``Schedule(start_step=..., weight_scale="frozen" | "ema")`` only; what it sets is what the next forwards,
    every export and ``verify`` use. All ranks that share sharded weights must call it; shares are those of the weights
    that this rank has a part in: of its own pipeline stage.

    Args:
        model: a trainer.
        track_codes: also compare every weight's codes with those of the last call that tracked. A signal worth logging:
            a share near 0 says that updates are too small to reach the rollout. Keeps 0.5625 bytes per weight.

    Raises:
        ValueError: a model that is not converted, or a rollout; with ``track_codes`` a weight that holds NaN or inf, or
            whose shards cut blocks of 16. The step does not count then.

    >>> from quads_qat.convert import convert
    >>> model = convert(nn.Sequential(nn.Linear(32, 8)), "w4a16")
    >>> step(model).step
    1
    """
    _, conversion = _trainer(model, "step")
    if conversion.code_cache.active:
        raise RuntimeError("step: inside accumulate, whose codes belong to one optimizer step; leave the block first")
    if track_codes:
        _refuse_cut_blocks(conversion)
    before = {name: group.held for name, group in conversion.groups.items()}
    try:
        report = _step(conversion, track_codes)
    except BaseException:
        for name, held in before.items():
            conversion.groups[name].held = held
        conversion.last_codes.clear()  # some may be of this call; keeping both would take twice the memory
        raise
    conversion.steps = report.step
    conversion.full_precision.delayed = not report.quantizing
    return report


def _step(conversion: Conversion, track_codes: bool) -> StepReport:
    schedule, steps = conversion.schedule, conversion.steps + 1
    quantizing, moved = steps >= schedule.start_step, 0
    if quantizing and schedule.weight_scale is not WeightScale.DYNAMIC:
        formats = {weight.group: weight.format for weight in conversion.weights.values()}
        moved = sum(_hold(group, formats[name], conversion) for name, group in conversion.groups.items())
    report = StepReport(steps, quantizing, moved)
    return _tracked(conversion, report) if track_codes else report


def _refuse_cut_blocks(conversion: Conversion) -> None:
    for group in conversion.groups.values():
        for module, parameter, name in group.members:
            weight, fmt = module._parameters.get(parameter), conversion.weights[name].format
            if weight is not None and (problem := sharding.cut_block(weight, -2 if fmt.transposed else -1)):
                raise ValueError(
                    f"step: {name}: {problem}; list such layers with quads_qat.check_tp(model, tp), then exclude them "
                    "from quantization or shard them along another dim"
                )


def _trainer(model: nn.Module, who: str) -> tuple[nn.Module, Conversion]:
    root, conversion = conversion_of(model, who)
    if conversion.mode is Mode.W4A4_RESIDUAL:
        raise ValueError(f"{who}: this is a rollout model, which does not train; call it with the trainer")
    require_same_modules(root, conversion, who)
    return root, conversion


def _hold(group: ScaleGroup, fmt: WeightFormat, conversion: Conversion) -> bool:
    """Set the amax that a group holds; whether it is another one than before."""
    schedule, before = conversion.schedule, group.held
    if before is not None and schedule.weight_scale is WeightScale.FROZEN:
        return False
    weights = group.weights()
    now = sharding.gather_first_dim(autograd.group_amax(weights, fmt), weights[0]).float()
    if before is None:
        group.held = now
    else:
        group.held = schedule.decay * before.to(now.device) + (1 - schedule.decay) * now
    return before is None or bool((group.held != before.to(now.device)).any())


def _tracked(conversion: Conversion, report: StepReport) -> StepReport:
    counts: dict[str, Tensor] = {}
    totals: dict[str, int] = {}
    cuts: dict[str, Cuts] = {}
    known = bool(conversion.last_codes)
    for name, weight in conversion.weights.items():
        group = conversion.groups[weight.group]
        place = next(i for i, (_, _, full) in enumerate(group.members) if full == name)
        parameter = group.weights()[place].detach()  # with what an adapter adds
        codes, clipped, bad = _codes_of(parameter, group, weight.format)
        last = conversion.last_codes.get(name)
        changed = torch.zeros((), dtype=torch.int64, device=codes.device) if last is None else _differing(codes, last)
        counts[name] = torch.stack([changed, clipped, bad])
        totals[name], cuts[name] = max(parameter.numel(), 1), _cuts_of(parameter)
        conversion.last_codes[name] = codes
    whole = _sum_over_shards(counts, cuts)
    for name, (_, _, bad) in whole.items():
        if bad:
            raise ValueError(
                f"step: {name} holds {bad} NaN or inf; go back to a checkpoint, and find the step that made them"
            )
    shares = {
        name: (changed / totals[name] if known else None, clipped / totals[name])
        for name, (changed, clipped, _) in whole.items()
    }
    changed, clipped, _ = (sum(each) / sum(totals.values()) for each in zip(*whole.values(), strict=True))
    return replace(report, changed=changed if known else None, clipped=clipped, by_weight=shares)


def _cuts_of(weight: Tensor) -> Cuts:
    """The mesh dims that cut a DTensor; over the others ranks hold the same."""
    if not sharding.is_sharded(weight):
        return ()
    mesh, placements = weight.device_mesh, weight.placements  # pyright: ignore[reportAttributeAccessIssue]
    return tuple((mesh, i) for i, placement in enumerate(placements) if sharding.cuts(placement))


def _sum_over_shards(counts: dict[str, Tensor], cuts: dict[str, Cuts]) -> dict[str, list[int]]:
    """Counts of this rank's shards -> those of whole weights, with one reduction for all that are cut alike."""
    alike: dict[Cuts, list[str]] = {}
    for name in counts:
        alike.setdefault(cuts[name], []).append(name)
    whole: dict[str, list[int]] = {}
    for along, names in alike.items():
        table = torch.stack([counts[name].to(counts[names[0]].device) for name in names])
        for mesh, i in along:
            torch.distributed.all_reduce(table, group=mesh.get_group(i))
        whole |= zip(names, table.tolist(), strict=True)
    return {name: whole[name] for name in counts}


def _codes_of(parameter: Tensor, group: ScaleGroup, fmt: WeightFormat) -> tuple[Tensor, Tensor, Tensor]:
    """Of this rank's shard: codes and block scales (uint8 [..., 9 K/16]), how many saturate, how many are NaN or inf.

    Nothing is refused here: the other ranks, whose shards are finite, would wait for the sums.
    """
    q = autograd.weight_codes(parameter, autograd.amax_of(group, fmt), fmt, check_finite=False)
    limit = SCALE_RANGE * q.per_tensor_scale
    master = sharding.local(parameter).to(fmt.export_dtype).abs().float()
    clipped = (master > limit.view(-1, *(1,) * (master.ndim - 1)) if limit.ndim else master > limit).sum()
    return torch.cat([q.qdata, q.block_scale.view(torch.uint8)], -1), clipped, (~torch.isfinite(master)).sum()


def _differing(codes: Tensor, last: Tensor) -> Tensor:
    """Elements whose code differs, or all of a block whose scale does."""
    k16 = codes.shape[-1] // 9
    nibbles = (codes[..., : 8 * k16] ^ last[..., : 8 * k16]).unflatten(-1, (k16, 8))
    in_block = ((nibbles & 15) != 0).sum(-1) + ((nibbles >> 4) != 0).sum(-1)
    rescaled = codes[..., 8 * k16 :] != last[..., 8 * k16 :]
    return torch.where(rescaled, BLOCK_SIZE, in_block).sum()


@contextmanager
def accumulate(model: nn.Module, *, debug: bool = False) -> Iterator[None]:
    """Inside this context weights are quantized once and decoded from their codes by every micro-batch.

    For gradient accumulation: forward and backward give the same bits, and skip the amax and most of the reading; codes
    take 0.5625 bytes per weight until the block ends. Weights must not change inside it: leave the block before
    ``optimizer.step()``. Under FSDP the codes are those of the unsharded weights, so sharding saves less.

    Args:
        model: a trainer in mode ``w4a16`` (experts of ``w4a4`` are quantized anew all the same).
        debug: compare a checksum of the weight at every use, which waits for the GPU; neither ``_version`` nor
            ``data_ptr`` shows every edit.

    Raises:
        ValueError: a model that is not converted, or a rollout.
        RuntimeError: nested; with ``debug``, a weight that changed inside the block.
    """
    _, conversion = _trainer(model, "accumulate")
    cache = conversion.code_cache
    if cache.active:
        raise RuntimeError("accumulate: already inside accumulate for this model; use one block per optimizer step")
    cache.active, cache.debug = True, debug
    try:
        yield
    finally:
        cache.clear()
