"""What quantization does to the operands of a GEMM, and to what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from quads_qat.formats import BLOCK_SIZE
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.reference import dequantize
from quads_qat.swaps import Ingredients, experts_in, product


@dataclass(frozen=True)
class Noise:
    """How far a quantized tensor is from what it was made from.

    Attributes:
        dead_zone: share of the nonzero values that became 0.
        scale_error: mean of ``abs(6 * decode_scale / block_amax - 1)`` over the blocks that are not all zero: what E4M3
            rounding, underflow and saturation do to the scale. A block that became 0 counts 1.
        grid_noise: ``norm(x - Q(x)) / norm(x)``, over all values.
    """

    dead_zone: float
    scale_error: float
    grid_noise: float


@dataclass
class NoiseSums:
    """Running sums from which :class:`Noise` is made; they stay on the device until it is asked for."""

    sums: Tensor | None = None

    def add(self, x: Tensor, q: NVFP4Tensor) -> None:
        """``q`` was made from x [..., K]; both of one matrix."""
        x, decoded = x.detach().float(), dequantize(q, torch.float32)
        amax = x.unflatten(-1, (-1, BLOCK_SIZE)).abs().amax(-1)
        ideal = amax / 6
        scale = q.block_scale.float() * q.per_tensor_scale
        nonzero, live = x != 0, amax > 0
        error = torch.where(live, (scale / torch.where(live, ideal, 1) - 1).abs(), 0)
        values = [(nonzero & (decoded == 0)).sum(), nonzero.sum(), error.sum(), live.sum()]
        values += [(x - decoded).square().sum(), x.square().sum()]
        new = torch.stack([value.double() for value in values])
        self.sums = new if self.sums is None else self.sums + new

    def noise(self) -> Noise | None:
        """None where nothing was quantized."""
        if self.sums is None:
            return None
        dead, nonzero, scale, blocks, error, energy = self.sums.tolist()
        return Noise(_over(dead, nonzero), _over(scale, blocks), _over(error, energy) ** 0.5)


def _over(a: float, b: float) -> float:
    return a / b if b else 0.0


def weight_noise(master: Tensor, weight: NVFP4Tensor | Tensor) -> Noise | None:
    """Of codes made from a master weight [(E,) N, K]; None if the weight is not quantized."""
    if not isinstance(weight, NVFP4Tensor):
        return None
    sums = NoiseSums()
    for expert in experts_in(weight):
        sums.add(*(master, weight) if expert is None else (master[expert], weight.expert(expert)))
    return sums.noise()


def weight_error(a: Ingredients, b: Ingredients, like: Tensor) -> float:
    """``norm(a - b) / norm(a)`` of two weights, decoded as the trainer multiplies them; exactly 0 if they are equal."""
    error, energy = 0.0, 0.0
    for expert in experts_in(a.weight):
        mine, theirs = a.matrix(expert, like).float(), b.matrix(expert, like).float()
        error += (mine - theirs).square().sum().item()
        energy += mine.square().sum().item()
        if not error and not torch.equal(mine, theirs):  # the difference underflows
            error = 5e-324
    return (error / energy) ** 0.5 if energy else float(error > 0)


@dataclass
class GemmSums:
    """What is seen of one parameter's GEMMs while the rollout's ingredients run in the trainer.

    ``mine``: what the trainer itself multiplies there, ``theirs``: the rollout.
    """

    mine: Ingredients
    theirs: Ingredients
    activation: NoiseSums = field(default_factory=NoiseSums)
    rows: int = 0
    output: Tensor | None = None  #: [error, energy, left of x after compensation, energy of x]
    channels: Tensor | None = None  #: [2, K]: output energy that an input channel's activation, weight error causes

    def add(self, expert: int | None, used: Ingredients, x: Tensor, like: Tensor) -> None:
        """One GEMM with x [..., K] as it came in; ``used`` is ``theirs`` with the mask of this call."""
        x = x.reshape(-1, x.shape[-1])
        if x.shape[0] == 0:
            return
        (packed, operands), (_, own) = (_operands(x, side, expert) for side in (used, self.mine))
        weight, own_weight = used.matrix(expert, like), self.mine.matrix(expert, like)
        if packed:
            self.activation.add(x, packed[0])
        expected = product(own, own_weight).float()
        kept, own_kept = (torch.stack([o.float() for o in side]).sum(0) for side in (operands, own))
        differences = [product(operands, weight).float() - expected, expected, x.float() - kept, x.float()]
        output = torch.stack([difference.square().sum().double() for difference in differences])
        self.output = output if self.output is None else self.output + output
        wide, changed = weight.float(), weight.float() - own_weight.float()
        by_act = (kept - own_kept).square().sum(0) * wide.square().sum(0)
        by_weight = own_kept.square().sum(0) * changed.square().sum(0)
        caused = torch.stack([by_act, by_weight]).double()
        self.channels = caused if self.channels is None else self.channels + caused
        self.rows += x.shape[0]


def _operands(x: Tensor, side: Ingredients, expert: int | None) -> tuple[list[NVFP4Tensor], list[Tensor]]:
    """What x is multiplied as: packed (nothing, if it is left alone), and decoded into its dtype."""
    packed = [] if side.activation is None else side.quantize(x, expert)
    return packed, [dequantize(q, x.dtype) for q in packed] or [x]
