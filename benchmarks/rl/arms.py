"""Who trains in what and samples from what, and how weights get from the one to the other."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quads_qat as qq
from quads_qat.config import Dialect, Mode, Recipe, ResidualConfig, ResidualScope, Schedule, WeightScale

NAIVE = ResidualConfig(fraction=0.0)
HALF = ResidualConfig(fraction=0.5)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A trainer and a rollout.

    Attributes:
        name: short, for files and tables.
        trainer: its mode; None for plain BF16.
        rollout: what a W4A4 rollout compensates (``fraction=0``: nothing); None for plain BF16.
        recipe: of the weights, on both sides.
        weight_scale: what the trainer's per-tensor scales are made from.
        rate: factor on the learning rate.
        engine: what the rollout computes in. float32 is the other engine, with rounding errors of its own. In bfloat16
            the kernels of this model's short sums round as the trainer's do: an engine that nobody has.
    """

    name: str
    trainer: Mode | None = Mode.W4A16
    rollout: ResidualConfig | None = HALF
    recipe: Recipe = Recipe.ALIGNED
    weight_scale: WeightScale = WeightScale.DYNAMIC
    rate: float = 1.0
    engine: torch.dtype = torch.float32

    @property
    def dialect(self) -> Dialect:
        """The one in which weights are synced."""
        return Dialect.COMPRESSED_TENSORS if self.recipe is Recipe.LLM_COMPRESSOR else Dialect.MODELOPT


MAIN = (
    Arm(name="bf16", trainer=None, rollout=None),
    Arm(name="naive", trainer=None, rollout=NAIVE),
    Arm(name="w4a16-naive", rollout=NAIVE),
    Arm(name="w4a4-naive", trainer=Mode.W4A4, rollout=NAIVE),
    Arm(name="quads", rollout=HALF),
    Arm(name="quads-modelopt", rollout=HALF, recipe=Recipe.MODELOPT),
    Arm(name="quads-batch", rollout=ResidualConfig(fraction=0.5, scope=ResidualScope.BATCH)),
)
"""The paper's arms, all at one learning rate."""


def _ablations() -> tuple[Arm, ...]:
    """One choice changed at a time, from the arms of MAIN (which are not repeated)."""

    def residual(name: str, **options: Any) -> Arm:
        return Arm(name=f"quads-{name}", rollout=ResidualConfig(**options))

    k = [residual(f"{100 * f:g}%", fraction=f) for f in (0.125, 0.25, 0.75, 1.0)]
    k_batch = [residual(f"batch-{100 * f:g}%", fraction=f, scope="batch") for f in (0.125, 0.25, 0.75)]
    scope = [residual("block", scope="block"), residual("static", scope="static")]
    norm = [residual(f"batch-{norm}", scope="batch", norm=norm) for norm in ("l1", "max")]
    units = [residual(f"{s}-blocks", scope=s, granularity=16) for s in ("token", "batch")]
    scales = [Arm(name=f"quads-{s}", weight_scale=s) for s in (WeightScale.FROZEN, WeightScale.EMA)]
    recipes = [
        Arm(name="quads-llm-compressor", recipe=Recipe.LLM_COMPRESSOR),
        Arm(name="w4a16-100%-modelopt", rollout=ResidualConfig(fraction=1.0), recipe=Recipe.MODELOPT),
    ]
    return (*k, *k_batch, *scope, *norm, *units, *scales, *recipes)


_KEY_ARMS = MAIN[:5]
STUDIES = {
    "main": MAIN,
    "engine": tuple(replace(arm, name=f"{arm.name}/bf16", engine=torch.bfloat16) for arm in MAIN),
    "ablations": _ablations(),
    "stress": tuple(replace(arm, name=f"{arm.name}@x{rate:g}", rate=rate) for rate in (2.0, 3.0) for arm in _KEY_ARMS),
}
"""main: the paper's arms. engine: sampled in bfloat16. ablations: one choice changed. stress: higher rates."""


@dataclass
class Pair:
    """A trainer, the rollout that samples for it, and the way of the weights.

    Attributes:
        trainer: BF16 parameters, in eval mode (the model has no dropout).
        rollout: another model.
        sync: gives the rollout the trainer's weights through ``update_weights``: packed by the trainer or, with
            ``masters``, quantized on arrival, which makes the same bits of a trainer that holds no scales.
    """

    arm: Arm
    trainer: nn.Module
    rollout: nn.Module
    sync: Callable[[], None]

    @classmethod
    def of(
        cls,
        arm: Arm,
        model: Path | str,
        device: torch.device,
        masters: bool = False,
        rollout_device: torch.device | None = None,
    ) -> Pair:
        """Both from the checkpoint ``model``; not synced yet. ``rollout_device``: another than the trainer's."""
        plain_fp32 = arm.rollout is None and arm.engine is torch.float32
        # torch has grouped_mm kernels for bfloat16
        trainer = _load(model, device)
        rollout = _load(model, rollout_device or device, "batched_mm" if plain_fp32 else "grouped_mm")
        if arm.trainer is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that W4A4 is for ablations is what is shown here
                schedule = Schedule(weight_scale=arm.weight_scale)
                qq.convert(trainer, arm.trainer, recipe=arm.recipe, schedule=schedule)
        if arm.rollout is not None:
            qq.convert(rollout, Mode.W4A4_RESIDUAL, recipe=arm.recipe, residual=arm.rollout)
        rollout.to(arm.engine)
        return cls(arm, trainer, rollout, _sync_of(arm, trainer, rollout, masters))

    def calibrate(self, ids: Tensor) -> None:
        """Choose static masks on these sequences [B, T]; nothing where nothing is static."""
        if self.arm.rollout is not None and self.arm.rollout.scope is ResidualScope.STATIC:
            qq.calibrate(self.rollout, [ids])

    def differing(self) -> int:
        """Bytes of the rollout that packed weights of the trainer would change: 0 if it has the trainer's weights."""
        if self.arm.trainer is None or self.arm.rollout is None:
            return 0
        before = {name: tensor.clone() for name, tensor in self.rollout.state_dict().items()}
        qq.update_weights(self.rollout, qq.export_weights(self.trainer, self.arm.dialect))
        after = self.rollout.state_dict()
        return sum(int((_bytes(before[name]) != _bytes(after[name])).sum()) for name in before)

    def stepped(self) -> None:
        """The optimizer has stepped: held scales move on."""
        if self.arm.weight_scale is not WeightScale.DYNAMIC:
            qq.step(self.trainer)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _load(model: Path | str, device: torch.device, experts: str = "grouped_mm") -> nn.Module:
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    loaded: nn.Module = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, experts_implementation=experts
    )
    return loaded.eval().to(device)  # pyright: ignore[reportArgumentType]


def _sync_of(arm: Arm, trainer: nn.Module, rollout: nn.Module, masters: bool) -> Callable[[], None]:
    if arm.rollout is None:
        source, target = dict(trainer.named_parameters()), dict(rollout.named_parameters())

        @torch.no_grad()
        def copy() -> None:
            for name, parameter in source.items():
                target[name].copy_(parameter)

        return copy
    if arm.trainer is None or (masters and arm.weight_scale is WeightScale.DYNAMIC):
        return lambda: _discard(qq.update_weights(rollout, trainer.state_dict()))
    return lambda: _discard(qq.update_weights(rollout, qq.export_weights(trainer, arm.dialect)))


def _discard(_: object) -> None:
    """A report that nobody reads."""
