"""The GEMM kernel for many rows on Hopper, in Gluon: some warps decode while others multiply.

A ``wgmma`` whose weights come from registers never overlaps with the decoding of the same warps. So here *decoders*
read codes and block scales and write tiles of W into a ring in shared memory; the other warps wait for a slot of it,
issue ``wgmma`` on it and give it back, and ask for tiles of x in a ring of their own. K keeps its order. Weights are
the left operand, y.T = W x.T: a tile of W is decoded once and meets as many rows of x as a tile holds, of both terms.

Programs stay, one a multiprocessor, and take piece after piece of the work: while one is stored, the next is
being decoded. A piece is a tile; where the number of tiles would leave multiprocessors idle, STREAM gives every program
as many steps instead, so that some pieces are parts of tiles. Where they are cut depends on the shape and the chip.
Gluon has no interpreter: without a GPU this kernel is only compiled (``tests/test_matmul_compile.py``).
"""

# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quads_qat.kernels.hopper_decode import decoded, two_lanes_a_row
from quads_qat.kernels.hopper_work import GROUP, following, piece_of, pieces_of, place_of, table_of

_barrier = getattr(gl, "barrier", None) or getattr(gl, "thread_barrier")  # noqa: B009, its name before Triton 3.7
_TILE_SCALE = gl.constexpr(128.0)  # decode.TILE_SCALE


@gluon.jit
def _wait_for_the_kernel_before():
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def _ask(words_desc, scales_desc, words, scales, ready, slot, row, run, wanted):
    """Start to copy the codes and block scales of a group of steps into ``slot``."""
    bar = ready.index(slot)
    mbarrier.expect(bar, words.shape[1] * (GROUP * 36), pred=wanted)
    tma.async_copy_global_to_shared(words_desc, [row, run * 8], bar, words.index(slot), pred=wanted)
    tma.async_copy_global_to_shared(scales_desc, [row, run * 4], bar, scales.index(slot), pred=wanted)


@gluon.jit
def _decode(
    descriptors,
    ends_ptr,
    packed_ring,
    ring,
    sizes,
    STEP: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUPS: gl.constexpr,
    STREAM: gl.constexpr,
):
    """One of two teams of decoders: has every second step, over all pieces of this program; team 0 asks for codes.

    Each takes long to fill a slot, most of it in fences and barriers, but they fill two at a time.
    """
    words_desc, scales_desc = descriptors
    words, scales, ready, taken = packed_ring
    ws, full, empty = ring
    m, n, groups, tiles, steps = sizes
    STAGES: gl.constexpr = ws.shape[0]
    ROWS: gl.constexpr = ws.shape[1]
    AHEAD: gl.constexpr = words.shape[0]
    WORDS: gl.constexpr = two_lanes_a_row(64, gl.num_warps(), 4)
    SCALES: gl.constexpr = two_lanes_a_row(64, gl.num_warps(), 1)
    first_tile, _count, total = pieces_of(tiles, steps, STREAM)
    if STEP == 0:  # what is asked for is AHEAD - 1 groups of steps after what is decoded
        table = table_of(ends_ptr, groups, GROUPS, COLUMNS)
        piece = 0
        tile, run, left = piece_of(piece, first_tile, tiles, steps, STREAM)  # run: 64 elements of K
        group, _first, _stop, row = place_of(tile, m, n, table, ROWS, COLUMNS, GROUPS)
        for i in gl.static_range(AHEAD - 1):
            _ask(words_desc, scales_desc, words, scales, ready, i, group * n + row, run, i < total)
            piece, group, row, run, left = following(
                piece, group, row, run, left, first_tile, sizes, table, ROWS, COLUMNS, GROUPS, STREAM
            )
    for g in range(total):
        if STEP == 0:
            last = g + AHEAD - 1
            mbarrier.wait(taken.index(last % AHEAD), ((g - 1) // AHEAD) & 1, pred=g > 0)
            at_row = group * n + row
            _ask(words_desc, scales_desc, words, scales, ready, last % AHEAD, at_row, run, last < total)
            piece, group, row, run, left = following(
                piece, group, row, run, left, first_tile, sizes, table, ROWS, COLUMNS, GROUPS, STREAM
            )
        here = g % AHEAD
        mbarrier.wait(ready.index(here), (g // AHEAD) & 1)
        for j in gl.static_range(STEP, GROUP, 2):
            count = g * GROUP + j
            slot = count % STAGES
            mbarrier.wait(empty.index(slot), ((count // STAGES) & 1) ^ 1)
            codes = words.index(here).slice(8 * j, 8, dim=1)
            pairs = scales.index(here)._reinterpret(gl.int16, [ROWS, 2 * GROUP], gl.NVMMASharedLayout(0, 16, 2))
            for i in gl.static_range(ROWS // 64):
                packed = codes.slice(64 * i, 64, dim=0).load(WORDS)
                bytes_ = pairs.slice(64 * i, 64, dim=0).slice(2 * j, 2, dim=1).load(SCALES)
                ws.index(slot).slice(64 * i, 64, dim=0).store(decoded(packed, bytes_))
            fence_async_shared()
            mbarrier.arrive(full.index(slot), count=1)
        mbarrier.arrive(taken.index(here), count=1)


@gluon.jit
def _ask_for_rows(descriptors, x_ring, slot, first, run, m, wanted, TERMS: gl.constexpr):
    """Start to copy 64 elements of K of a tile of x, of both terms, into ``slot``."""
    x_desc, second_desc = descriptors
    xs, seconds, arrived = x_ring
    STAGES: gl.constexpr = xs.shape[0]
    BOX: gl.constexpr = x_desc.block_type.shape[0]
    BOXES: gl.constexpr = xs.shape[1] // BOX
    BYTES: gl.constexpr = xs.shape[1] * 128 * TERMS
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    bar = arrived.index(slot)
    mbarrier.expect(bar, BYTES, pred=wanted)
    for b in gl.static_range(BOXES):
        # past the last row other rows do as well: their sums are not stored, and copying nothing is slow
        at = [gl.where(first + b * BOX < m, first + b * BOX, first), run * 64]
        box = xs._reinterpret(gl.bfloat16, [STAGES * BOXES, BOX, 64], TILE).index(slot * BOXES + b)
        tma.async_copy_global_to_shared(x_desc, at, bar, box, pred=wanted)
        if TERMS == 2:
            box = seconds._reinterpret(gl.bfloat16, [STAGES * BOXES, BOX, 64], TILE).index(slot * BOXES + b)
            tma.async_copy_global_to_shared(second_desc, at, bar, box, pred=wanted)


@gluon.jit
def _places(pointer, acc):
    """Where a tile is left: 8 x 8 elements side by side, which is 256 bytes for an instruction of a warp."""
    MMA: gl.constexpr = acc.type.layout
    row = gl.arange(0, acc.shape[0], gl.SliceLayout(1, MMA))[:, None]
    column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, MMA))[None, :]
    return pointer + ((row // 8) * (8 * acc.shape[1]) + (column // 8) * 64 + (row % 8) * 8 + column % 8)


@gluon.jit
def _leave(acc, workspace_ptr, ready_ptr):
    """Leave the part of a tile that this program has for the one with the end of its K."""
    p = gl.program_id(0)
    gl.store(_places(workspace_ptr + p.to(gl.int64) * (acc.shape[0] * acc.shape[1]), acc), acc)
    _barrier()
    gl.atomic_add(ready_ptr + p, 1, sem="release")


@gluon.jit
def _with_parts_before(acc, workspace_ptr, ready_ptr, tile, tiles, steps):
    """The sum of a tile, of which this program has the end of K: the parts before it are added from late to early.

    Programs that left them were started before this one and waited for none, so they come.
    """
    each = steps // GROUP
    p = gl.program_id(0)
    earliest = gl.cdiv((tile * each + 1) * gl.num_programs(0), tiles * each) - 1
    for i in range(p - earliest):
        other = p - 1 - i
        while gl.atomic_add(ready_ptr + other, 0, sem="acquire") == 0:
            pass
        acc += gl.load(
            _places(workspace_ptr + other.to(gl.int64) * (acc.shape[0] * acc.shape[1]), acc), cache_modifier=".cg"
        )
        gl.store(ready_ptr + other, 0)  # for the next launch
    return acc


@gluon.jit
def _store(y_ptr, buffer, tile, first, stop, row, n, p, bias_ptr, BIAS: gl.constexpr):
    """Scale a tile [ROWS, C], add the bias in fp32, round once, store it into y [M, N]."""
    C: gl.constexpr = buffer.shape[0]
    ROWS: gl.constexpr = buffer.shape[1]
    LANES: gl.constexpr = ROWS // 8
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    tile *= p
    if BIAS:
        in_tile = row + gl.arange(0, ROWS, gl.SliceLayout(1, tile.type.layout))
        tile += gl.load(bias_ptr + in_tile, mask=in_tile < n, other=0.0).to(gl.float32)[:, None]
    _barrier()
    buffer.permute((1, 0)).store(tile.to(gl.bfloat16))
    _barrier()
    y = buffer.load(OUT)
    y_row = first + gl.arange(0, C, gl.SliceLayout(1, OUT))
    y_column = row + gl.arange(0, ROWS, gl.SliceLayout(0, OUT))
    inside = (y_row < stop)[:, None] & (y_column < n)[None, :]
    gl.store(y_ptr + y_row.to(gl.int64)[:, None] * n + y_column[None, :], y, mask=inside)


@gluon.jit
def _store_all(y_ptr, buffer, acc, first, stop, row, n, p, bias_ptr, BIAS: gl.constexpr):
    """``_store`` of a tile, as many rows of y at a time as the buffer holds."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    C: gl.constexpr = buffer.shape[0]
    if C == COLUMNS:
        STORED: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, C, 16])
        _store(
            y_ptr, buffer, gl.convert_layout(acc, STORED, assert_trivial=True), first, stop, row, n, p, bias_ptr, BIAS
        )
    else:
        HALF: gl.constexpr = COLUMNS // 2
        left, right = gl.split(gl.permute(gl.reshape(acc, (ROWS, 2, HALF)), (0, 2, 1)))
        _store_all(y_ptr, buffer, left, first, stop, row, n, p, bias_ptr, BIAS)
        _store_all(y_ptr, buffer, right, first + HALF, stop, row, n, p, bias_ptr, BIAS)


@gluon.jit
def _multiply(
    descriptors,
    pointers,
    buffer,
    ring,
    x_ring,
    sizes,
    TERMS: gl.constexpr,
    GROUPS: gl.constexpr,
    STREAM: gl.constexpr,
    SCALE_PER_GROUP: gl.constexpr,
    BIAS: gl.constexpr,
):
    """The other warps: multiply slot after slot of both rings, and store a tile after its last."""
    per_tensor_scale_ptr, bias_ptr, ends_ptr, y_ptr, workspace_ptr, ready_ptr = pointers
    ws, full, empty = ring
    xs, seconds, arrived = x_ring
    m, n, groups, tiles, steps = sizes
    STAGES: gl.constexpr = ws.shape[0]
    X_STAGES: gl.constexpr = xs.shape[0]
    ROWS: gl.constexpr = ws.shape[1]
    COLUMNS: gl.constexpr = xs.shape[1]
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, COLUMNS, 16])
    table = table_of(ends_ptr, groups, GROUPS, COLUMNS)
    first_tile, pieces, _total = pieces_of(tiles, steps, STREAM)
    tile, run, count = piece_of(0, first_tile, tiles, steps, STREAM)
    group, first, stop, row = place_of(tile, m, n, table, ROWS, COLUMNS, GROUPS)
    for i in gl.static_range(X_STAGES):
        _ask_for_rows(descriptors, x_ring, i, first, run + i, m, pieces > 0, TERMS)
    slot = 0
    phase = 0
    x_slot = 0
    x_phase = 0
    for piece in range(pieces):
        more = piece + 1 < pieces
        next_tile, next_run, next_count = piece_of(piece + 1, first_tile, tiles, steps, STREAM)
        next_group, next_first, next_stop, next_row = place_of(next_tile, m, n, table, ROWS, COLUMNS, GROUPS)
        acc = gl.full([ROWS, COLUMNS], 0.0, gl.float32, MMA)
        gl.assume(count > 0)  # a loop that may be empty makes ptxas wait for every wgmma
        for t in range(count):
            mbarrier.wait(full.index(slot), phase)
            mbarrier.wait(arrived.index(x_slot), x_phase)
            w = ws.index(slot)._reinterpret(gl.bfloat16, [ROWS, 64], gl.NVMMASharedLayout(128, 16, 2))
            acc = warpgroup_mma(w, xs.index(x_slot).permute((1, 0)), acc, is_async=True)
            if TERMS == 2:
                acc = warpgroup_mma(w, seconds.index(x_slot).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(TERMS, deps=[acc])  # what was before is done: its slots are free
            mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1, pred=t > 0)
            after = t - 1 + X_STAGES
            own = after < count
            x_row = gl.where(own, first, next_first)
            x_run = gl.where(own, run + after, next_run + after - count)
            x_before = gl.where(x_slot == 0, X_STAGES - 1, x_slot - 1)
            _ask_for_rows(descriptors, x_ring, x_before, x_row, x_run, m, (t > 0) & (own | more), TERMS)
            slot += 1
            if slot == STAGES:
                slot = 0
                phase ^= 1
            x_slot += 1
            if x_slot == X_STAGES:
                x_slot = 0
                x_phase ^= 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(gl.where(slot == 0, STAGES - 1, slot - 1)), count=1)
        x_before = gl.where(x_slot == 0, X_STAGES - 1, x_slot - 1)
        _ask_for_rows(descriptors, x_ring, x_before, next_first, next_run + X_STAGES - 1, m, more, TERMS)
        ends = True
        if STREAM:
            ends = run + count == steps
            if not ends:
                _leave(acc, workspace_ptr, ready_ptr)
            elif run > 0:
                acc = _with_parts_before(acc, workspace_ptr, ready_ptr, tile, tiles, steps)
        if ends:
            p = gl.load(per_tensor_scale_ptr + (group if SCALE_PER_GROUP else 0)) * _TILE_SCALE
            bias = bias_ptr + (group * n if GROUPS > 0 and BIAS else 0)
            _store_all(y_ptr, buffer, acc, first, stop, row, n, p, bias, BIAS)
        tile, run, count = next_tile, next_run, next_count
        group, first, stop, row = next_group, next_first, next_stop, next_row


@gluon.jit(do_not_specialize=["m", "groups", "steps"])
def hopper_kernel(
    x_desc,
    second_desc,
    words_desc,
    scales_desc,
    per_tensor_scale_ptr,
    bias_ptr,
    ends_ptr,
    y_ptr,
    workspace_ptr,
    ready_ptr,
    m,
    n,
    groups,
    steps,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    DECODERS: gl.constexpr,
    REGISTERS: gl.constexpr,
    TERMS: gl.constexpr,
    GROUPS: gl.constexpr,
    STREAM: gl.constexpr,
    SCALE_PER_GROUP: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Tiles of ROWS of W with COLUMNS rows of x, in ``steps`` of 64 elements of K each, a multiple of four.

    A second term meets each tile of W right after the first, and both are summed in one accumulator. STAGES tiles of x
    and one more of W are held. DECODERS warps in two teams, with REGISTERS each, decode. STREAM: every program has as
    many steps; a workspace of a tile and a zero for each program, which stays zero.
    """
    gl.static_assert(STAGES <= GROUP)  # a piece has as many steps, of which the first are asked for together
    W_STAGES: gl.constexpr = STAGES + 1
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    ws = gl.allocate_shared_memory(gl.int32, [W_STAGES, ROWS, 32], gl.NVMMASharedLayout(128, 32, 2))
    xs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS, 64], TILE)
    seconds = xs
    if TERMS == 2:
        seconds = gl.allocate_shared_memory(gl.bfloat16, [STAGES, COLUMNS, 64], TILE)
    buffer = gl.allocate_shared_memory(gl.bfloat16, [64 if COLUMNS > 64 else COLUMNS // 2, ROWS], TILE)
    words = gl.allocate_shared_memory(gl.int32, [AHEAD, ROWS, 8 * GROUP], gl.NVMMASharedLayout(128, 32, 2))
    scales = gl.allocate_shared_memory(gl.uint8, [AHEAD, ROWS, 4 * GROUP], gl.NVMMASharedLayout(0, 8, 2))
    ready = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], BARRIER)
    taken = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], BARRIER)
    full = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], BARRIER)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(AHEAD):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(taken.index(i), count=2)
    for i in gl.static_range(W_STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
    fence_async_shared()
    _barrier()
    if PDL:
        _wait_for_the_kernel_before()
    if GROUPS > 0:
        _group, _start, _end, tiles_of_groups, _upto = table_of(ends_ptr, groups, GROUPS, COLUMNS)
        tall = gl.sum(tiles_of_groups, 0)
    else:
        tall = gl.cdiv(m, COLUMNS)
    tiles = tall * gl.cdiv(n, ROWS)
    ring = (ws, full, empty)
    x_ring = (xs, seconds, arrived)
    sizes = (m, n, groups, tiles, steps)
    pointers = (per_tensor_scale_ptr, bias_ptr, ends_ptr, y_ptr, workspace_ptr, ready_ptr)
    of_x = (x_desc, second_desc)
    of_w = (words_desc, scales_desc)
    packed = (words, scales, ready, taken)
    gl.warp_specialize(
        [
            (_multiply, (of_x, pointers, buffer, ring, x_ring, sizes, TERMS, GROUPS, STREAM, SCALE_PER_GROUP, BIAS)),
            (_decode, (of_w, ends_ptr, packed, ring, sizes, 0, COLUMNS, GROUPS, STREAM)),
            (_decode, (of_w, ends_ptr, packed, ring, sizes, 1, COLUMNS, GROUPS, STREAM)),
        ],
        [DECODERS // 2, DECODERS // 2],
        [REGISTERS, REGISTERS],
    )
