"""Which work a program of ``hopper_kernel`` has: tiles, or parts of tiles, and their steps of K.

A step is 64 elements of K, a group four steps, a piece of work a tile, or of a stream the part of a tile that falls to
one program.
"""

# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

GROUP = gl.constexpr(4)  # steps whose codes and block scales arrive together


@gluon.jit
def _sum(a, b):
    return a + b


@gluon.jit
def table_of(ends_ptr, groups, GROUPS: gl.constexpr, COLUMNS: gl.constexpr):
    """``groups.tiles_of_groups``, in every warp."""
    if GROUPS == 0:
        return (0, 0, 0, 0, 0)
    else:
        EACH: gl.constexpr = GROUPS // 32 if GROUPS > 32 else 1
        LAYOUT: gl.constexpr = gl.BlockedLayout([EACH], [32], [gl.num_warps()], [0])
        group = gl.arange(0, GROUPS, LAYOUT)
        valid = group < groups
        end = gl.load(ends_ptr + group, mask=valid, other=0)
        start = gl.load(ends_ptr + group - 1, mask=valid & (group > 0), other=0)
        tiles = gl.where(valid, (end - start + (COLUMNS - 1)) // COLUMNS, 0)
        return (group, start, end, tiles, gl.associative_scan(tiles, 0, _sum))


@gluon.jit
def place_of(tile, m, n, table, ROWS: gl.constexpr, COLUMNS: gl.constexpr, GROUPS: gl.constexpr):
    """(group, first row of x, end of its rows, first row of W) of a tile."""
    row_tiles = gl.cdiv(n, ROWS)
    if GROUPS > 0:
        this = tile // row_tiles
        group, start, end, tiles, upto = table
        chosen = gl.sum((upto <= this).to(gl.int32), 0)
        own = group == chosen
        first = gl.sum(gl.where(own, start + (this - upto + tiles) * COLUMNS, 0), 0)
        stop = gl.sum(gl.where(own, end, 0), 0)
        weight_tile = tile % row_tiles
    else:
        BAND: gl.constexpr = 8  # tiles of x side by side: they and the tiles of W that they meet stay in the L2
        band = tile // (BAND * row_tiles)
        height = gl.minimum(gl.cdiv(m, COLUMNS) - band * BAND, BAND)
        inside = tile % (BAND * row_tiles)
        first = (band * BAND + inside % height) * COLUMNS
        weight_tile = inside // height
        chosen = 0
        stop = m
    return chosen, first, stop, weight_tile * ROWS


@gluon.jit
def _range(tiles, steps):
    """This program's share of all groups of steps, tile after tile: (the first, the one after the last)."""
    every = tiles * (steps // GROUP)
    p = gl.program_id(0)
    return p * every // gl.num_programs(0), (p + 1) * every // gl.num_programs(0)


@gluon.jit
def _part(tile, share, steps):
    """(First step, number of steps) of a tile that a share of the groups of steps covers."""
    each = steps // GROUP
    begin = gl.maximum(share[0] - tile * each, 0)
    return begin * GROUP, (gl.minimum(share[1] - tile * each, each) - begin) * GROUP


@gluon.jit
def pieces_of(tiles, steps, STREAM: gl.constexpr):
    """(First tile, how many pieces of work, how many groups of steps they have) of this program.

    A stream begins with its last tile, of which it may have the beginning only: that part is left for another program
    early, and the end of its first tile, which needs the parts of others, comes last.
    """
    if STREAM:
        begin, end = _range(tiles, steps)
        last = (end - 1) // (steps // GROUP)
        return last, last - begin // (steps // GROUP) + 1, end - begin
    else:
        count = gl.cdiv(gl.maximum(tiles - gl.program_id(0), 0), gl.num_programs(0))
        return gl.program_id(0), count, count * (steps // GROUP)


@gluon.jit
def piece_of(i, first, tiles, steps, STREAM: gl.constexpr):
    """(Tile, first step, number of steps) of piece i of this program; after the last piece, any."""
    if STREAM:
        share = _range(tiles, steps)
        tile = gl.maximum(first - i, share[0] // (steps // GROUP))
        begin, count = _part(tile, share, steps)
        return tile, begin, count
    else:
        return gl.minimum(first + i * gl.num_programs(0), tiles - 1), 0, steps


@gluon.jit
def following(
    piece,
    group,
    row,
    run,
    left,
    first_tile,
    sizes,
    table,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUPS: gl.constexpr,
    STREAM: gl.constexpr,
):
    """The group of steps after one: its piece, group, rows of W, first step, and how many are left of the piece."""
    m, n, _groups, tiles, steps = sizes
    run += GROUP
    left -= GROUP
    if left == 0:
        piece += 1
        tile, run, left = piece_of(piece, first_tile, tiles, steps, STREAM)
        group, _first, _stop, row = place_of(tile, m, n, table, ROWS, COLUMNS, GROUPS)
    return piece, group, row, run, left
