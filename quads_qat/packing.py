"""Layouts of codes and block scales: two codes a byte, row-major or 128x4-swizzled scales."""

from __future__ import annotations

import torch
from torch import Tensor

SWIZZLE_ROWS, SWIZZLE_COLS = 128, 4


def pack_codes(codes: Tensor) -> Tensor:
    """Pack ``codes`` [..., K] uint8 (0..15) into ``qdata`` [..., K/2] uint8, even index in the low nibble.

    >>> pack_codes(torch.tensor([1, 2], dtype=torch.uint8))
    tensor([33], dtype=torch.uint8)
    """
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_codes(qdata: Tensor) -> Tensor:
    """Undo :func:`pack_codes`: ``qdata`` [..., K/2] uint8 -> ``codes`` [..., K] uint8."""
    return torch.stack((qdata & 0xF, qdata >> 4), dim=-1).flatten(-2)


def _padded(block_scale: Tensor) -> tuple[int, int]:
    rows, cols = block_scale.shape[-2:]
    return -(-rows // SWIZZLE_ROWS) * SWIZZLE_ROWS, -(-cols // SWIZZLE_COLS) * SWIZZLE_COLS


def swizzle_block_scale(block_scale: Tensor) -> Tensor:
    """Row-major scales [..., N, K/16] -> the tensor-core order, one byte each, flat in the last dim.

    Each tile of 128 rows x 4 columns becomes 512 contiguous bytes; scale (n, k) lies at
    ``((n//128) * ceil(Kb/4) + k//4) * 512 + (n%32) * 16 + ((n%128)//32) * 4 + k%4`` with Kb = K/16. Rows and columns
    are padded with zeros to whole tiles. PyTorch calls this ``SWIZZLE_32_4_4``; cuBLAS, TensorRT-LLM, FlashInfer,
    vLLM and TransformerEngine share it.

    Args:
        block_scale: [..., N, K/16], any one-byte dtype.

    Returns:
        [..., padded N * padded K/16], same dtype.
    """
    rows, cols = block_scale.shape[-2:]
    padded_rows, padded_cols = _padded(block_scale)
    scales = torch.nn.functional.pad(block_scale.view(torch.uint8), (0, padded_cols - cols, 0, padded_rows - rows))
    tiles = scales.unflatten(-1, (-1, 4)).unflatten(-3, (-1, 4, 32))  # [..., N/128, 4, 32, Kb/4, 4]
    lead = tuple(range(tiles.ndim - 5))
    n_tile, n_high, n_low, k_tile, k_low = range(tiles.ndim - 5, tiles.ndim)
    swizzled = tiles.permute(*lead, n_tile, k_tile, n_low, n_high, k_low)
    return swizzled.flatten(len(lead)).contiguous().view(block_scale.dtype)


def unswizzle_block_scale(swizzled: Tensor, rows: int, cols: int) -> Tensor:
    """Undo :func:`swizzle_block_scale`: flat bytes -> row-major [..., rows, cols], padding dropped."""
    k_tiles = -(-cols // SWIZZLE_COLS)
    tiles = swizzled.view(torch.uint8).unflatten(-1, (-1, k_tiles, 32, 4, 4))  # [..., N/128, Kb/4, 32, 4, 4]
    lead = tuple(range(tiles.ndim - 5))
    n_tile, k_tile, n_low, n_high, k_low = range(tiles.ndim - 5, tiles.ndim)
    scales = tiles.permute(*lead, n_tile, n_high, n_low, k_tile, k_low).flatten(-2).flatten(len(lead), -2)
    return scales[..., :rows, :cols].contiguous().view(swizzled.dtype)
