"""Tiles of the kernel for Hopper that are tested, and whether they fit into its shared memory."""

from quads_qat.kernels.hopper import Hopper

HOPPER_TILES = [
    Hopper(128, 256, 3),
    Hopper(128, 128, 5),
    Hopper(128, 128, 3, 8, 8),
    Hopper(256, 64, 3, 8, 8),
    Hopper(64, 64, 4, 4, 4, 2),
    Hopper(128, 16, 3, 4, 4, 2),
    Hopper(128, 64, 5, ahead=3),
    Hopper(128, 256, 3, stream=True),
    Hopper(128, 128, 3, 8, 8, stream=True),
    Hopper(128, 64, 3, 8, 8, stream=True),
    Hopper(64, 64, 4, 4, 4, 2, stream=True),
]


def fits(tiles: Hopper, terms: int) -> bool:
    """Whether the ring, the codes ahead and the buffer of results fit into what a program has."""
    ring = tiles.stages * 128 * (tiles.rows + terms * tiles.columns)
    return ring + tiles.rows * (tiles.columns + 144 * tiles.ahead) <= 231_000
