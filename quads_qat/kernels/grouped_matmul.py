"""``grouped_matmul``: rows sorted by expert, each multiplied with its expert's packed weights, in one launch.

Programs find their expert on the device: the ends of the groups are never read by the host, and experts without rows
cost nothing. A grid covers the most tiles that any split of the rows can need; what is too much ends at once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quads_qat.config import Recipe
from quads_qat.kernels import hopper
from quads_qat.kernels.dequantize import dequantize
from quads_qat.kernels.hopper import Hopper
from quads_qat.kernels.launch import cdiv
from quads_qat.kernels.matmul import device_of, launch, launch_hopper, prepared
from quads_qat.kernels.tiles import Narrow, Wide, grouped_configuration


def takes_order(m: int, n: int, k: int, experts: int, terms: int) -> bool:
    """Whether :func:`grouped_matmul` of m rows wants them in tensor-core order, and would spend a pass on it."""
    return isinstance(grouped_configuration(m, n, k, experts, terms, False), Wide)


def grouped_matmul(
    x: Tensor,
    qdata: Tensor,
    block_scale: Tensor,
    per_tensor_scale: Tensor,
    ends: Tensor,
    bias: Tensor | None = None,
    *,
    second: Tensor | None = None,
    row_scale: Tensor | None = None,
    ordered: bool = False,
    dtype: torch.dtype | None = None,
    config: Narrow | Wide | Hopper | None = None,
    assembly: bool = True,
) -> Tensor:
    """``matmul`` of each expert's rows with its own weight.

    Args:
        x: [M, K] bf16, rows sorted by expert.
        qdata: [E, N, K/2] uint8.
        block_scale: [E, N, K/16] float8_e4m3fn.
        per_tensor_scale: [] or [E] float32.
        ends: [E] int32, the row after each expert's last; ``ends[-1]`` is M.
        bias: [E, N] or None.
        second: another term like x, or None.
        row_scale: [terms, M] float32 or None.
        ordered: K of the terms is in tensor-core order.
        dtype: of y; None: x's.
        config: instead of ``tiles.grouped_configuration``'s, for tuning.
        assembly: decode with inline assembly; plain operations give the same bits.

    Returns:
        y [M, N].
    """
    terms = 1 if second is None else 2
    (m, k), (experts, n) = x.shape, qdata.shape[:2]
    y = torch.empty(m, n, dtype=dtype or x.dtype, device=x.device)
    if y.numel() == 0 or experts == 0:
        return y
    if config is None and x.is_cuda and row_scale is None and y.dtype == x.dtype:
        on_hopper = x.dtype == torch.bfloat16 and hopper.runs_on(x.device)
        config = grouped_configuration(m, n, k, experts, terms, ordered, on_hopper)
        if config is None:
            return _decode_and_multiply(x, second, qdata, block_scale, per_tensor_scale, ends, bias)
    config = config or grouped_configuration(min(m, 64 * experts), n, k, experts, terms, ordered)
    assert config is not None
    x, second = prepared(x, second, config, ordered, device_of(x)[1])
    if isinstance(config, Hopper):
        launch_hopper(config, x, second, qdata, block_scale, per_tensor_scale, bias, ends, y)
        return y
    used = min(experts, m)
    tiles = used + (m - used) // config.height(terms)  # every expert with rows has a tile, and one more when it is full
    grid = cdiv(n, config.rows), tiles
    launch(config, grid, x, second, qdata, block_scale, per_tensor_scale, bias, row_scale, ends, y, assembly)
    return y


def _decode_and_multiply(
    x: Tensor,
    second: Tensor | None,
    qdata: Tensor,
    block_scale: Tensor,
    per_tensor_scale: Tensor,
    ends: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """All experts' W decoded, then one grouped bf16 product; the bias is added to its rounded result."""
    p = per_tensor_scale
    w = dequantize(qdata, block_scale, p, p, recipe=Recipe.ALIGNED, dtype=torch.bfloat16)
    if second is not None:  # one product over twice the K: both sums in fp32, one rounding
        x, w = torch.cat([x, second], 1), torch.cat([w, w], 2)
    y = F.grouped_mm(x, w.mT, offs=ends)
    if bias is None:
        return y
    rows = torch.arange(x.shape[0], device=x.device, dtype=ends.dtype)
    return y + bias[torch.searchsorted(ends, rows, right=True).clamp(max=len(bias) - 1)].to(y.dtype)
