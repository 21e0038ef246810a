"""Tiles of the kernel for Hopper that are tested, and whether they fit into its shared memory."""

from quads_qat.kernels.hopper import Hopper

HOPPER_TILES = [
    Hopper(128, 256, 3),
    Hopper(128, 128, 4),
    Hopper(128, 128, 3, decoders=8),
    Hopper(64, 64, 4, warps=4),
    Hopper(128, 16, 3, warps=4),
    Hopper(128, 64, 4, ahead=3),
    Hopper(128, 256, 3, stream=True),
    Hopper(128, 128, 3, decoders=8, stream=True),
    Hopper(128, 128, 4, stream=True),
    Hopper(128, 64, 4, decoders=8, stream=True),
    Hopper(64, 64, 4, warps=4, stream=True),
]


def fits(tiles: Hopper, terms: int) -> bool:
    """Whether both rings, the codes ahead and the buffer of results fit into what a program has."""
    rings = 128 * ((tiles.stages + 1) * tiles.rows + tiles.stages * terms * tiles.columns)
    return rings + tiles.rows * (2 * min(64, tiles.columns // 2) + 144 * tiles.ahead) <= 231_000
