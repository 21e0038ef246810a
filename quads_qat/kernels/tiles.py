"""Which kernel multiplies which shape, and in tiles of what size: by crossovers measured on an H200.

``configuration`` for a linear, ``grouped_configuration`` for experts. How it was measured: benchmarks/RESULTS.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from quads_qat.kernels.decode import RUN
from quads_qat.kernels.hopper import K_STEP, Hopper
from quads_qat.kernels.launch import cdiv, next_power_of_2


@dataclass(frozen=True)
class Narrow:
    """Tiles of the narrow kernel.

    Attributes:
        rows: of W.
        columns: terms times rows of x.
        blocks: a warp and step.
        slices: of K, one a warp.
        stages: of loads in flight.
        registers: the most a thread may use, so that more programs fit; None: as many as it likes.
        one_row: of one term, in all columns.
    """

    rows: int
    columns: int
    blocks: int
    slices: int
    stages: int
    registers: int | None = None
    one_row: bool = False

    def height(self, terms: int) -> int:
        """Rows of y."""
        return 1 if self.one_row else self.columns // terms


@dataclass(frozen=True)
class Wide:
    """Tiles of the wide kernel.

    Attributes:
        rows: of W.
        columns: rows of x, of both terms where they are stacked.
        blocks: a step.
        warps: 64 rows of W have 4 or 8.
        stages: of loads in flight.
        splits: programs that share a tile.
        stacked: two terms are the halves of one tile of x.
    """

    rows: int
    columns: int
    blocks: int
    warps: int
    stages: int
    splits: int
    stacked: bool = False

    def height(self, terms: int) -> int:
        """Rows of y."""
        return self.columns // 2 if self.stacked else self.columns


MOST_NARROW_COLUMNS = 16
MOST_STACKED_COLUMNS = 128
MOST_MEAN_ROWS = 256
_WORTH_A_PASS = 1 << 24  # weights, from which up to 16 rows gain by the wide kernel what ordering them costs


@lru_cache(maxsize=4096)
def configuration(
    m: int, n: int, k: int, terms: int, processors: int, ordered: bool, on_hopper: bool = False
) -> Narrow | Wide | Hopper | None:
    """Which kernel multiplies m rows in ``terms`` terms with W [n, k], and its tiles; None: decode once, then cuBLAS.

    ``ordered``: x is in tensor-core order already, which only the wide kernel takes. ``on_hopper``: its kernel can run.
    """
    if on_hopper and not ordered and k % K_STEP == 0 and (tiles := _hopper(m, n, k, terms, processors)):
        return tiles
    columns = m * terms
    # two terms come from a kernel that stores them in any order, one may have to be ordered for the wide kernel
    stays = columns <= 8 or k % RUN or (terms == 1 and n * k < _WORTH_A_PASS)
    if columns <= MOST_NARROW_COLUMNS and stays and not ordered:
        return _narrow(columns, n)
    most = 256 if n * k >= 1 << 25 else 128 if n * k >= 1 << 24 else 64
    if k % RUN or (m > most and not ordered):
        return None
    return _wide(m, n, k, terms, processors)


# Columns up to -> rows of W up to -> tiles. Small W need many programs, large ones few instructions a weight.
_NARROW = {
    1: {
        4096: Narrow(16, 8, 16, 4, 4, 80, one_row=True),
        12288: Narrow(16, 8, 16, 2, 4, one_row=True),
        math.inf: Narrow(16, 8, 32, 2, 3, one_row=True),
    },
    8: {
        2048: Narrow(16, 8, 16, 4, 4),
        4096: Narrow(32, 8, 16, 4, 3),
        16384: Narrow(32, 8, 16, 2, 4, 128),
        math.inf: Narrow(32, 8, 8, 4, 3),
    },
    16: {2048: Narrow(16, 16, 32, 4, 2), math.inf: Narrow(32, 16, 16, 2, 3)},
}


def _narrow(columns: int, n: int) -> Narrow:
    by_rows = next(table for most, table in _NARROW.items() if columns <= most)
    return next(tiles for most, tiles in by_rows.items() if n <= most)


def _wide(m: int, n: int, k: int, terms: int, processors: int) -> Wide:
    stacked = terms == 2 and 2 * m <= MOST_STACKED_COLUMNS
    columns = max(16, next_power_of_2(2 * m if stacked else m))
    columns = min(columns, 256 if terms == 1 else 128)
    accumulated = columns if stacked else columns * terms
    small, large = n < 4096 or (n < 8192 and k <= 4096), n > 16384
    rows, blocks, warps, programs = 128, 8, 8, 1  # programs a multiprocessor, by which K is split
    if columns == 16:
        rows, blocks, warps = 64, 16, 4
    elif small and accumulated <= 128:
        rows, blocks, warps = 64, 16 if accumulated <= 64 else 8, 4
    elif accumulated == 32:
        blocks, warps, programs = 16, 4 if stacked or large else 8, 2 if stacked else 1
    elif accumulated == 64 and (stacked or large):
        programs = 2
    elif accumulated <= 128:
        rows, warps, programs = 64, 4, 2
    tiles = cdiv(n, rows) * cdiv(2 * m if stacked else m, columns)
    splits = (4 if tiles <= processors else 2) if columns == 16 else programs * processors // tiles
    splits = min(splits, cdiv(k // 16, blocks))
    return Wide(rows, columns, blocks, warps, 3, 4 if splits >= 4 else 2 if splits >= 2 else 1, stacked)


_ONE_TERM, _TWO_TERMS = Hopper(128, 256, 3), Hopper(128, 128, 3, decoders=8)
_MOST_ON_HOPPER = {1: 1024, 2: 3072}

# Microseconds on an H200. Of a stream: K_STEP elements of K of a tile; besides; more for each program of a tile.
_STREAMS = {
    1: [(replace(_ONE_TERM, stream=True), 3.05, 11.5, 1.1), (Hopper(128, 128, 4, stream=True), 1.91, 7.5, 0.9)],
    2: [
        (replace(_TWO_TERMS, stream=True), 3.3, 6.0, 1.2),
        (Hopper(128, 64, 4, decoders=8, stream=True), 2.3, 5.0, 0.75),
    ],
}
_WHOLE = {1: (_ONE_TERM, 3.02), 2: (_TWO_TERMS, 3.12)}  # K_STEP elements of K of a tile
_WIDE = 0.0084  # an element of K of a tile of the wide kernel, of which two run at a time
# Decoding first, then cuBLAS: a weight; a weight and row, at least so much a weight; besides; an element of a second
# product.
_DECODING, _MULTIPLYING, _READING, _LAUNCHES, _ADDING = 2.5625 / 4.1e6, 2 / 7.9e8, 6e-7, {1: 6.0, 2: 14.0}, 1.1e-5


def _hopper(m: int, n: int, k: int, terms: int, processors: int) -> Hopper | None:
    """Tiles for Hopper's kernel, where by estimate nothing is faster."""
    if not 64 < m <= _MOST_ON_HOPPER[terms]:
        return None
    whole, step = _WHOLE[terms]
    times: dict[Hopper | None, float] = {whole: cdiv(_tiles(whole, m, n), processors) * k / K_STEP * step + 2}
    for stream, step, besides, sharing in _STREAMS[terms]:
        tiles = _tiles(stream, m, n)
        programs = min(tiles * k // K_STEP, processors)
        times[stream] = cdiv(tiles * k // K_STEP, programs) * step + besides + sharing * programs / tiles
    if terms == 1 and m <= 128:
        wide = _wide(m, n, k, terms, processors)
        times[None] = cdiv(cdiv(n, wide.rows) * wide.splits, 2 * processors) * k / wide.splits * _WIDE + 5
    else:
        times[None] = n * k * (_DECODING + terms * max(m * _MULTIPLYING, _READING)) + _LAUNCHES[terms]
        times[None] += m * n * _ADDING if terms == 2 else 0
    return min(times, key=lambda tiles: times[tiles])


def _tiles(config: Hopper, m: int, n: int) -> int:
    return cdiv(m, config.columns) * cdiv(n, config.rows)


@lru_cache(maxsize=4096)
def grouped_configuration(
    m: int, n: int, k: int, experts: int, terms: int, ordered: bool, on_hopper: bool = False
) -> Narrow | Wide | Hopper | None:
    """Tiles for m rows over ``experts`` experts with W [E, n, k]: by the mean number of rows of an expert.

    None: decode all of W once, then multiply in bf16.
    """
    mean = cdiv(m, max(1, min(experts, m)))
    if on_hopper and not ordered and k % K_STEP == 0 and mean >= 72:  # measured, as are the numbers below
        if terms == 2:
            return _TWO_TERMS
        if 80 <= mean <= 1280:
            return _ONE_TERM if mean >= 120 else _TWO_TERMS
    if mean >= MOST_MEAN_ROWS and not ordered:
        return None
    columns = terms * mean
    if not ordered and (k % RUN or columns <= 4):
        return _narrow_of_experts(m, k, experts, terms, columns)
    stacked = terms == 2
    if columns <= 8:
        return Wide(128, 16, 8, 4, 3, 1, stacked) if k < 1024 else Wide(64, 16, 16, 4, 3, 1, stacked)
    return Wide(128, 32, 8, 4, 3, 1, stacked) if columns <= 16 else Wide(128, 64, 8, 8, 3, 1, stacked)


def _narrow_of_experts(m: int, k: int, experts: int, terms: int, columns: int) -> Narrow:
    if terms == 1 and m <= 16 and 2 * m <= experts:  # most experts have one row, if any: no program looks for others
        if k < 1024:
            return Narrow(32, 8, 8, 1, 4, 80, one_row=True)
        return Narrow(16 if m <= 8 else 32, 8, 8, 2, 4, 80, one_row=True)
    if terms == 2 and m <= 8:
        return Narrow(32, 8, 8, 2, 4)
    if columns <= 8:
        return Narrow(32, 8, 16, 1, 2, 128 if terms == 1 and k % 256 == 0 else None)
    return Narrow(32, 16, 16, 2, 3)
