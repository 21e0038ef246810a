"""``NVFP4Tensor``: codes and scales of one quantized tensor. A plain container, not a tensor subclass."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from quads_qat.config import Recipe


@dataclass(frozen=True, eq=False)
class NVFP4Tensor:
    """A quantized tensor of shape [..., K].

    Attributes:
        qdata: [..., K/2] uint8, two E2M1 codes a byte, even index in the low nibble.
        block_scale: [..., K/16] float8_e4m3fn, row-major; multiplies codes.
        per_tensor_scale: float32, multiplies: [] for a tensor, [E] for a stack of experts, [..., 1] per row.
        recipe: which arithmetic made it; decides how it decodes.
        stored_scale: the per-tensor scale as that recipe's peer stores it (``per_tensor_scale``; its divisor form
            G for LLM_COMPRESSOR; the amax for TRANSFORMER_ENGINE). Same shape as ``per_tensor_scale``. It is kept
            because 1/(1/x) != x for 17 % of fp32 numbers.

    ``value = code * (block_scale * per_tensor_scale)``; ``ops.dequantize`` computes it.
    """

    qdata: Tensor
    block_scale: Tensor
    per_tensor_scale: Tensor
    recipe: Recipe
    stored_scale: Tensor

    def __post_init__(self) -> None:
        if self.qdata.dtype != torch.uint8 or self.block_scale.dtype != torch.float8_e4m3fn:
            raise TypeError(
                "NVFP4Tensor: qdata must be uint8 and block_scale float8_e4m3fn, "
                f"got {self.qdata.dtype} and {self.block_scale.dtype}"
            )
        if (
            self.qdata.shape[:-1] != self.block_scale.shape[:-1]
            or self.qdata.shape[-1] != 8 * self.block_scale.shape[-1]
        ):
            raise ValueError(
                "NVFP4Tensor: qdata must be [..., K/2] and block_scale [..., K/16], "
                f"got {tuple(self.qdata.shape)} and {tuple(self.block_scale.shape)}"
            )

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that this decodes to: [..., K]."""
        return torch.Size((*self.qdata.shape[:-1], 2 * self.qdata.shape[-1]))

    @property
    def device(self) -> torch.device:
        """Device of the codes; scales live beside them."""
        return self.qdata.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales: 0.5625 per element plus the per-tensor scales."""
        return self.qdata.nbytes + self.block_scale.nbytes + self.per_tensor_scale.nbytes

    def expert(self, index: int) -> NVFP4Tensor:
        """The matrix of one expert of a stack [E, N, K] (views); a per-tensor scale [] is that of all."""
        p, stored = (s if s.ndim == 0 else s[index] for s in (self.per_tensor_scale, self.stored_scale))
        return NVFP4Tensor(self.qdata[index], self.block_scale[index], p, self.recipe, stored)

    def to(self, device: torch.device | str) -> NVFP4Tensor:
        """The same codes and scales on ``device``. There is no dtype to convert."""
        moved = {
            name: getattr(self, name).to(device)
            for name in ("qdata", "block_scale", "per_tensor_scale", "stored_scale")
        }
        return replace(self, **moved)
