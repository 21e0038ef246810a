"""bf16 in pairs, Recipe.ALIGNED: two elements in one int32, and few instructions, most of them on the FMA pipe.

A bf16 number is the high half of the fp32 number of the same value: a shift or a mask makes the fp32 lanes of a pair.
What bounds these kernels after memory is the half-rate pipe of integers and comparisons: hence sums that turn -0.0 into
+0.0 and show NaN, NaN scales in place of selects, and codes that are the least of three lines.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quads_qat.kernels import numerics as num

HIGH = tl.constexpr(-65536)  # 0xFFFF0000
SIGN = tl.constexpr(-2147483648)  # 0x80000000
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: fp32 numbers around it are integers


MAGIC_PAIR = tl.constexpr(0x4B400000 + ((0x4B400000 << 4) & 0xFFFFFFFF) - (1 << 32))  # bits of MAGIC, plus << 4


@triton.jit
def halves(x):
    """int32 pairs -> fp32 (low, high) elements."""
    return num.from_bits(x << 16), num.from_bits(x & HIGH)


@triton.jit
def amax_and_zero(low, high):
    """Elements [T, n] + [T, n] -> (amax [T], and 0, or NaN where one is not finite: x * 0 shows it, max drops it)."""
    return tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1), tl.sum(low * 0.0 + high * 0.0, 1)


@triton.jit
def block_scale_of_pairs(low, high, inverse_p):
    """Elements [T, 8] + [T, 8] of T blocks -> (block scales, whether each block is finite)."""
    a, zero = amax_and_zero(low, high)
    finite = zero == 0.0
    return num.aligned_block_scale(tl.where(finite, a, 0.0), inverse_p, False), finite


@triton.jit
def _decoded(v, encode, decode):
    """fp32 element -> bits of its decoded value; the sign is that of v, +0.0 for -0.0."""
    y = tl.minimum(num.snapped(tl.abs(v), encode) - 768.0, 6.0)
    return num.bits(num.e2m1_value(y) * decode) | (num.bits(v + 0.0) & SIGN)


@triton.jit
def decoded_pairs(low, high, s, finite, p, inverse_p):
    """Elements of T blocks -> int32 pairs of decoded values, exact in bf16; NaN where a block is not finite."""
    encode = ((1.0 / s) * inverse_p)[:, None]
    decode = tl.where(finite, s * p, float("nan"))[:, None]
    low = _decoded(low, encode, decode)
    high = _decoded(high, encode, decode)
    return ((low >> 16) & 0xFFFF) | (high & HIGH)


@triton.jit
def _code(v, encode):
    """fp32 element -> bits of MAGIC + its code: the least of 2y, y + 2, y/2 + 4 and 7, each rounded to even."""
    t = num.snapped(tl.abs(v), encode)
    code = tl.minimum(tl.fma(t, 2.0, MAGIC - 1536.0), t + (MAGIC + 2.0 - 768.0))
    code = tl.minimum(code, tl.fma(t, 0.5, MAGIC + 4.0 - 384.0))
    return num.bits(tl.minimum(code, MAGIC + 7.0))


@triton.jit
def packed_word(low, high, encode):
    """Four pairs of a block [T, 4] + [T, 4] -> int32 [T]: eight codes, the first in the lowest bits."""
    codes = _code(low, encode) + (_code(high, encode) << 4)  # and MAGIC's own bits
    signs = ((num.bits(low + 0.0) >> 28) & 0x8) | ((num.bits(high + 0.0) >> 24) & 0x80)
    lane = 8 * tl.arange(0, 4)[None, :]
    return tl.sum(((codes - MAGIC_PAIR) | signs) << lane, 1)
