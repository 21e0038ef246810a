"""``grouped_matmul``: rows sorted by expert, each multiplied with its expert's packed weights, in one launch.

Programs find their expert on the device: the ends of the groups are never read by the host, and experts without rows
cost nothing. A grid covers the most tiles that any split of the rows can need; what is too much ends at once.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from quads_qat.config import Recipe
from quads_qat.kernels import hopper
from quads_qat.kernels.decode import RUN
from quads_qat.kernels.dequantize import dequantize
from quads_qat.kernels.hopper import Hopper
from quads_qat.kernels.launch import cdiv
from quads_qat.kernels.matmul import Narrow, Wide, device_of, launch, launch_hopper, prepared

MOST_MEAN_ROWS = 256


@lru_cache(maxsize=4096)
def configuration(
    m: int, n: int, k: int, experts: int, terms: int, ordered: bool, on_hopper: bool = False
) -> Narrow | Wide | Hopper | None:
    """Tiles for m rows over ``experts`` experts with W [E, n, k]: by the mean number of rows of an expert.

    None: decode all of W once, then multiply in bf16.
    """
    mean = cdiv(m, max(1, min(experts, m)))
    if on_hopper and not ordered and (tiles := hopper.grouped_tiles(mean, k, terms)):
        return tiles
    if mean >= MOST_MEAN_ROWS and not ordered:
        return None
    columns = terms * mean
    if not ordered and (k % RUN or columns <= 4):
        return _narrow(m, k, experts, terms, columns)
    stacked = terms == 2
    if columns <= 8:
        return Wide(128, 16, 8, 4, 3, 1, stacked) if k < 1024 else Wide(64, 16, 16, 4, 3, 1, stacked)
    return Wide(128, 32, 8, 4, 3, 1, stacked) if columns <= 16 else Wide(128, 64, 8, 8, 3, 1, stacked)


def _narrow(m: int, k: int, experts: int, terms: int, columns: int) -> Narrow:
    if terms == 1 and m <= 16 and 2 * m <= experts:  # most experts have one row, if any: no program looks for others
        if k < 1024:
            return Narrow(32, 8, 8, 1, 4, 80, one_row=True)
        return Narrow(16 if m <= 8 else 32, 8, 8, 2, 4, 80, one_row=True)
    if terms == 2 and m <= 8:
        return Narrow(32, 8, 8, 2, 4)
    if columns <= 8:
        return Narrow(32, 8, 16, 1, 2, 128 if terms == 1 and k % 256 == 0 else None)
    return Narrow(32, 16, 16, 2, 3)


def takes_order(m: int, n: int, k: int, experts: int, terms: int) -> bool:
    """Whether :func:`grouped_matmul` of m rows wants them in tensor-core order, and would spend a pass on it."""
    return isinstance(configuration(m, n, k, experts, terms, False), Wide)


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
        config: instead of ``configuration``'s, for tuning.
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
        config = configuration(m, n, k, experts, terms, ordered, on_hopper)
        if config is None:
            return _decode_and_multiply(x, second, qdata, block_scale, per_tensor_scale, ends, bias)
    config = config or configuration(min(m, 64 * experts), n, k, experts, terms, ordered)
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
