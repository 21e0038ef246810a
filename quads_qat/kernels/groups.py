"""Rows sorted by group: ``ends`` [G] int32 is the row after each group's last. Groups may have no rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tiles_of_groups(ends_ptr, groups, GROUPS: tl.constexpr, HEIGHT: tl.constexpr):
    """(group, first row, end, tiles of HEIGHT rows, tiles up to and with it), each [GROUPS]; GROUPS >= groups."""
    group = tl.arange(0, GROUPS)
    valid = group < groups
    end = tl.load(ends_ptr + group, mask=valid, other=0)
    start = tl.load(ends_ptr + group - 1, mask=valid & (group > 0), other=0)
    tiles = tl.where(valid, (end - start + (HEIGHT - 1)) // HEIGHT, 0)
    return group, start, end, tiles, tl.cumsum(tiles, 0)


@triton.jit
def group_of_tile(tile, ends_ptr, groups, GROUPS: tl.constexpr, HEIGHT: tl.constexpr):
    """(group, first row, end of the group's rows) of a tile of up to HEIGHT rows; no rows after the last tile."""
    group, start, end, tiles, upto = tiles_of_groups(ends_ptr, groups, GROUPS, HEIGHT)
    chosen = tl.sum((upto <= tile).to(tl.int32), 0)  # all tiles of these groups come before
    this = group == chosen
    first = tl.sum(tl.where(this, start + (tile - upto + tiles) * HEIGHT, 0), 0)
    return chosen, first, tl.sum(tl.where(this, end, 0), 0)


@triton.jit
def group_of_row(row, ends_ptr, groups, GROUPS: tl.constexpr):
    """The group that ``row`` lies in."""
    group = tl.arange(0, GROUPS)
    end = tl.load(ends_ptr + group, mask=group < groups, other=2147483647)
    return tl.sum((end <= row).to(tl.int32), 0)
