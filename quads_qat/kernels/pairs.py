"""bf16 in pairs, Recipe.ALIGNED: two elements in one int32, and few instructions, most of them on the FMA pipe.

A bf16 number is the high half of the fp32 number of the same value, so a shift or a mask makes the fp32 lanes of a pair.
What bounds these kernels after memory is the half-rate integer and compare pipe: hence sums that turn -0.0 into +0.0 and
show NaN, NaN scales in place of selects, and codes that are the least of three lines.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quads_qat.kernels import numerics as num

HIGH = tl.constexpr(-65536)  # 0xFFFF0000
SIGN = tl.constexpr(-2147483648)  # 0x80000000
MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2**23: fp32 numbers around it are integers


@triton.jit
def halves(x):
    """int32 pairs -> fp32 (low, high) elements."""
    return num.from_bits(x << 16), num.from_bits(x & HIGH)


@triton.jit
def block_scale_of_pairs(low, high, inverse_p):
    """Elements [T, 8] + [T, 8] of T blocks -> (block scales, whether each block is finite).

    x * 0 is NaN where x is not finite, and the maximum drops NaN: a block that is not finite gets some scale, no NaN.
    """
    a = tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 1)
    finite = tl.sum(low * 0.0 + high * 0.0, 1) == 0.0
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
    """fp32 element -> fp32 bits whose low three are its code: the least of 2y, y + 2, y/2 + 4 and 7, rounded to even."""
    t = num.snapped(tl.abs(v), encode)
    code = tl.minimum(tl.fma(t, 2.0, MAGIC - 1536.0), t + (MAGIC + 2.0 - 768.0))
    code = tl.minimum(code, tl.fma(t, 0.5, MAGIC + 4.0 - 384.0))
    return num.bits(tl.minimum(code, MAGIC + 7.0))


@triton.jit
def packed_pairs(low, high, s, finite, inverse_p):
    """Elements of T blocks -> int32 [T, 8], each a byte of two codes; 0 where a block is not finite."""
    encode = ((1.0 / s) * inverse_p)[:, None]
    codes = (_code(low, encode) & 0x7) | ((_code(high, encode) << 4) & 0x70)
    signs = ((num.bits(low + 0.0) >> 28) & 0x8) | ((num.bits(high + 0.0) >> 24) & 0x80)
    return tl.where(finite[:, None], codes | signs, 0)
