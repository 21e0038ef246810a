"""Packed weights as tensor-core operands: decoding in registers, and the order of K that it imposes.

A block of 16 codes is two int32 words. In a word, codes j and j + 4 lie 16 bits apart, so that one shift and one mask
bring both to the place where bf16 has them: bits 15 and 8 to 6 of each half are 2**-126 of an E2M1 number, subnormal
ones included. A pair (j, j + 4) is thus one register of an operand, and the weights are read as they are stored. What
changes is the order of K inside a tensor-core instruction, which is free as long as both operands share it:

* *narrow* (``mma.sync``): a thread holds whole blocks; activations are reordered in registers, for a few instructions.
* *wide* (``wgmma``): activations come from shared memory and must be stored in *tensor-core order*: element
  k = 16 t + 8 i + 4 h + q of a run of 64 (t, q < 4; i, h < 2) lies at 32 i + 8 q + 2 t + h. ``to_tensor_core_order``
  does that; whoever writes activations anyway may store them so.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from quads_qat.kernels import numerics as num

RUN = 64
"""Elements of K that tensor-core order permutes among each other."""

TILE_SCALE = tl.constexpr(128.0)
"""Decoded tiles hold 2**-7 of code * block_scale, which keeps the two factors of every product normal numbers."""


def _codes_assembly() -> str:
    """Two words (operands 8 and 10) and a scale pair (12) -> eight pairs: (0, 4), (1, 5), (2, 6), (3, 7) of each."""
    lines = ["{", ".reg .b32 pair, word, zero;", "mov.b32 zero, 0x80008000;"]
    for i in range(2):
        for q in range(4):
            if q == 2:
                lines.append(f"shr.u32 word, ${8 + 2 * i}, 8;")
            source = f"${8 + 2 * i}" if q < 2 else "word"
            mask, shifts = ("0x000F000F", (1 << 6) + (1 << 12)) if q % 2 == 0 else ("0x00F000F0", (1 << 2) + (1 << 8))
            lines.append(f"and.b32 pair, {source}, {mask}; mul.lo.u32 pair, pair, {shifts};")
            lines.append(f"and.b32 pair, pair, 0x81C081C0; fma.rn.bf16x2 ${4 * i + q}, pair, $12, zero;")
    return "\n".join([*lines, "}"])


_CODES = tl.constexpr(_codes_assembly())
_CODES_OPERANDS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 6))
# The byte << 4 is 2**-120 of an E4M3 number as bf16; two steps of powers of two (one would overflow) make it 2**119.
_SCALE = tl.constexpr(
    """{
    .reg .b32 pair, zero;
    .reg .pred nan;
    mov.b32 zero, 0x80008000;
    mul.lo.u32 pair, $1, 0x00100010;
    fma.rn.bf16x2 pair, pair, $2, zero;
    fma.rn.bf16x2 pair, pair, $3, zero;
    setp.eq.u32 nan, $1, 0x7F;
    selp.b32 $0, 0x7FFF7FFF, pair, nan;
    }"""
)


@triton.jit
def _scale_pairs(scale_bytes):
    """E4M3 bytes -> int32, 2**119 times the number as bf16 in both halves."""
    byte = scale_bytes.to(tl.int32)
    first = tl.full(byte.shape, 0x7F007F00, tl.int32)  # 2**127
    second = tl.full(byte.shape, 0x77807780, tl.int32)  # 2**112
    return tl.inline_asm_elementwise(_SCALE, "=r,r,r,r", [byte, first, second], tl.int32, True, 1)


@triton.jit
def _pair(word, q: tl.constexpr, scale, DTYPE: tl.constexpr):
    """Codes q and q + 4 of words [...] times ``scale`` (fp32) -> [..., 2]."""
    low = (word >> (4 * q)) & 15
    high = (word >> (4 * q + 16)) & 15
    code = tl.join(low, high)
    # bit 3 to bit 31, bits 0 to 2 to bits 22 to 24: 2**-126 of the signed number
    value = num.from_bits((code * 0x10400000) & -2118123520) * 8.507059173023462e37
    return (value * tl.join(scale, scale)).to(DTYPE)


@triton.jit
def decoded_pairs(words, scale_bytes, ASSEMBLY: tl.constexpr, DTYPE: tl.constexpr):
    """Words [..., B, 2] and scale bytes [..., B] of B blocks -> eight [..., B, 2]: pairs (q, q + 4) of words 0 and 1.

    Exact; NaN where the scale byte is 0x7F. Without ASSEMBLY plain operations do the same, for the interpreter.
    """
    first, second = tl.split(words)
    if ASSEMBLY:
        scale = _scale_pairs(scale_bytes)
        a0, a1, a2, a3, b0, b1, b2, b3 = tl.inline_asm_elementwise(
            _CODES,
            _CODES_OPERANDS,
            # both elements of a pair come from one word: of equal registers the assembly reads the first
            [tl.join(first, first), tl.join(second, second), tl.join(scale, scale)],
            (tl.bfloat16,) * 8,
            True,
            2,
        )
    else:
        s = num.e4m3_value(scale_bytes.to(tl.int32)) * 0.0078125
        a0 = _pair(first, 0, s, DTYPE)
        a1 = _pair(first, 1, s, DTYPE)
        a2 = _pair(first, 2, s, DTYPE)
        a3 = _pair(first, 3, s, DTYPE)
        b0 = _pair(second, 0, s, DTYPE)
        b1 = _pair(second, 1, s, DTYPE)
        b2 = _pair(second, 2, s, DTYPE)
        b3 = _pair(second, 3, s, DTYPE)
    first = tl.join(tl.join(a0, a2), tl.join(a1, a3))
    second = tl.join(tl.join(b0, b2), tl.join(b1, b3))
    return tl.join(first, second)  # [..., B, h, q's high bit, q's low bit, i]


@triton.jit
def narrow_weights(words, scale_bytes, ASSEMBLY: tl.constexpr, DTYPE: tl.constexpr):
    """[G, N, B, 2] and [G, N, B] -> [G, N, 16 B], K in the order (i, block, q, h)."""
    pairs = decoded_pairs(words, scale_bytes, ASSEMBLY, DTYPE)
    groups: tl.constexpr = pairs.shape[0]
    rows: tl.constexpr = pairs.shape[1]
    blocks: tl.constexpr = pairs.shape[2]
    return tl.reshape(tl.permute(pairs, (0, 1, 6, 2, 4, 5, 3)), (groups, rows, 16 * blocks))


@triton.jit
def narrow_activations(x, BLOCKS: tl.constexpr):
    """[G, M, 16 B] -> [G, 16 B, M], K in the order of ``narrow_weights``."""
    groups: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    x = tl.reshape(x, (groups, columns, BLOCKS, 2, 2, 4))  # block, i, h, q
    return tl.reshape(tl.permute(x, (0, 3, 2, 5, 4, 1)), (groups, 16 * BLOCKS, columns))


@triton.jit
def narrow_vector(x, BLOCKS: tl.constexpr):
    """[G, 16 B], one row -> [G, 16 B] in the order of ``narrow_weights``."""
    groups: tl.constexpr = x.shape[0]
    return tl.reshape(tl.permute(tl.reshape(x, (groups, BLOCKS, 2, 2, 4)), (0, 2, 1, 4, 3)), (groups, 16 * BLOCKS))


@triton.jit
def wide_weights(words, scale_bytes, ASSEMBLY: tl.constexpr, DTYPE: tl.constexpr):
    """[N, B, 2] and [N, B] -> [N, 16 B], K in tensor-core order."""
    pairs = decoded_pairs(words, scale_bytes, ASSEMBLY, DTYPE)
    rows: tl.constexpr = pairs.shape[0]
    blocks: tl.constexpr = pairs.shape[1]
    pairs = tl.reshape(pairs, (rows, blocks // 4, 4, 2, 2, 2, 2))  # run, t, h, q's bits, i
    return tl.reshape(tl.permute(pairs, (0, 1, 6, 4, 5, 2, 3)), (rows, 16 * blocks))


@triton.jit
def stride_between(first_ptr, second_ptr):
    """How many 16-bit elements ``second_ptr`` is after ``first_ptr``: two terms, aligned, are read as one tensor."""
    return tl.multiple_of((second_ptr.to(tl.int64) - first_ptr.to(tl.int64)) // 2, 8)


@triton.jit
def _order_kernel(x_ptr, second_ptr, out_ptr, k, row_stride, rows, PDL: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0)
    channel = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = channel < k
    start = (row // rows).to(tl.int64) * stride_between(x_ptr, second_ptr) + (row % rows).to(tl.int64) * row_stride
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + start + channel, mask=inside, other=0.0)
    x = tl.permute(tl.reshape(x, (TILE // 64, 4, 2, 2, 4)), (0, 2, 4, 1, 3))  # run, t, i, h, q -> run, i, q, t, h
    tl.store(out_ptr + row.to(tl.int64) * k + channel, tl.reshape(x, (TILE,)), mask=inside)


def to_tensor_core_order(x: Tensor, second: Tensor | None = None, pdl: bool = False) -> tuple[Tensor, Tensor | None]:
    """Rows [M, K] of 16 bits, and a second term of the same strides -> copies with K in tensor-core order; K % 64 == 0.

    >>> to_tensor_core_order(torch.arange(64, dtype=torch.int16, device="cuda").view(1, 64))[0][0, :10].tolist()
    [0, 4, 16, 20, 32, 36, 48, 52, 1, 5]
    """
    m, k = x.shape
    terms = 1 if second is None else 2
    out = torch.empty(terms, m, k, dtype=x.dtype, device=x.device)
    tile = 1024
    grid = terms * m, -(-k // tile)
    pdl_option = {"launch_pdl": True} if pdl else {}
    both = x, x if second is None else second
    _order_kernel[grid](*both, out, k, x.stride(0), m, PDL=pdl, TILE=tile, num_warps=4, **pdl_option)
    return out[0], None if second is None else out[1]


@triton.jit
def prefetch(pointers):
    """Ask for the cache lines at ``pointers``: weights may be on their way while the previous kernel still runs."""
    address = pointers.to(tl.int64)
    return tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], tl.int32, False, 1)
