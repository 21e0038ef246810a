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
def decoded(v, encode, decode):
    """fp32 element -> bits of its decoded value; the sign is that of v, +0.0 for -0.0."""
    y = tl.minimum(num.snapped(tl.abs(v), encode) - 768.0, 6.0)
    return num.bits(num.e2m1_value(y) * decode) | (num.bits(v + 0.0) & SIGN)


@triton.jit
def decoded_pairs(low, high, s, finite, p, inverse_p):
    """Elements of T blocks -> int32 pairs of decoded values, exact in bf16; NaN where a block is not finite."""
    encode = ((1.0 / s) * inverse_p)[:, None]
    decode = tl.where(finite, s * p, float("nan"))[:, None]
    low = decoded(low, encode, decode)
    high = decoded(high, encode, decode)
    return ((low >> 16) & 0xFFFF) | (high & HIGH)


@triton.jit
def _code(v, encode):
    """fp32 element -> bits of MAGIC + its code: the least of 2y, y + 2, y/2 + 4 and 7, each rounded to even."""
    t = num.snapped(tl.abs(v), encode)
    code = tl.minimum(tl.fma(t, 2.0, MAGIC - 1536.0), t + (MAGIC + 2.0 - 768.0))
    code = tl.minimum(code, tl.fma(t, 0.5, MAGIC + 4.0 - 384.0))
    return num.bits(tl.minimum(code, MAGIC + 7.0))


# ------------------------------------------------------------------------------ four pairs, half a block, in a thread
#
# On a GPU these are inline assembly, because only that computes on both 16-bit numbers of a register at once: 11
# instructions an element, where fp32 lanes took 19 and bound the kernel. The interpreter takes the fp32 lanes.


@triton.jit
def four_words(words):
    """int32 [T, 4] -> its four columns [T]."""
    even, odd = tl.split(tl.reshape(words, (words.shape[0], 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


_AMAX_OF_WORDS = tl.constexpr("""{
    .reg .b32 a, b, c, d;
    abs.bf16x2 a, $1;
    abs.bf16x2 b, $2;
    abs.bf16x2 c, $3;
    abs.bf16x2 d, $4;
    max.NaN.bf16x2 a, a, b;
    max.NaN.bf16x2 c, c, d;
    max.NaN.bf16x2 $0, a, c;
}""")


@triton.jit
def _larger_half(w):
    """Bits of the larger bf16 magnitude of a pair, NaN above infinity above numbers."""
    return tl.maximum((w >> 16) & 0x7FFF, w & 0x7FFF)


@triton.jit
def amax_of_words(first, second):
    """Two times four words [T] of T blocks -> (amax, 0 where a block is not finite; whether it is finite)."""
    if num.INTERPRETED:
        largest = tl.zeros(first[0].shape, tl.int32)
        for i in tl.static_range(4):
            largest = tl.maximum(largest, tl.maximum(_larger_half(first[i]), _larger_half(second[i])))
    else:
        a = tl.inline_asm_elementwise(_AMAX_OF_WORDS, "=r,r,r,r,r", first, tl.int32, True, 1)
        b = tl.inline_asm_elementwise(_AMAX_OF_WORDS, "=r,r,r,r,r", second, tl.int32, True, 1)
        largest = tl.maximum(_larger_half(a), _larger_half(b))
    finite = largest < 0x7F80
    return num.from_bits(tl.where(finite, largest, 0) << 16), finite


def _packed_word_assembly() -> str:
    """PTX: words $1 to $4 and the fp32 factor $5 -> $0, eight codes.

    Each pair becomes two fp16 quotients y: a bf16 x is a midpoint of two codes, or 2**-9 of it away, so that fp16, with
    2**-12, neither makes nor breaks a tie. Adding +0.0 turns -0.0 into +0.0 and leaves all else. The code is the least
    of 2y, y + 2, y/2 + 4 and 7, rounded to integers by adding 1536, where fp16 numbers are integers; then bits 0 to 2
    of a half are the code and bit 3 takes the sign. Bytes 0 and 2 of each pair's result are gathered.
    """
    lines = [".reg .b32 low, high, y, a, b, c, s, p0, p1, p2, p3;", ".reg .f32 fl, fh;", ".reg .b32 k<6>;"]
    for i, pair in enumerate((0x40004000, 0x66006600, 0x66026602, 0x38003800, 0x66046604, 0x66076607)):
        lines.append(f"mov.b32 k{i}, {pair:#x};")  # fp16 pairs 2, 1536, 1538, 0.5, 1540, 1543
    for i in range(4):
        lines += [
            f"shl.b32 low, ${1 + i}, 16;",
            f"and.b32 high, ${1 + i}, 0xFFFF0000;",
            "mov.b32 fl, low;",
            "mov.b32 fh, high;",
            "fma.rn.f32 fl, fl, $5, 0f00000000;",
            "fma.rn.f32 fh, fh, $5, 0f00000000;",
            "cvt.rn.f16x2.f32 y, fh, fl;",
            "abs.f16x2 c, y;",
            "fma.rn.f16x2 a, c, k0, k1;",
            "add.rn.f16x2 b, c, k2;",
            "fma.rn.f16x2 c, c, k3, k4;",
            "min.f16x2 a, a, b;",
            "min.f16x2 c, c, k5;",
            "min.f16x2 a, a, c;",
            "shr.u32 s, y, 12;",
            f"lop3.b32 p{i}, s, 0x00080008, a, 0xEA;",  # (s & mask) | a
        ]
    lines += [
        "prmt.b32 p0, p0, p1, 0x6240;",
        "prmt.b32 p2, p2, p3, 0x6240;",
        "prmt.b32 a, p0, p2, 0x5410;",  # the low codes, a byte each
        "prmt.b32 b, p0, p2, 0x7632;",  # the high codes
        "shl.b32 b, b, 4;",
        "or.b32 $0, a, b;",
    ]
    return "{ " + " ".join(lines) + " }"


_PACKED_WORD = tl.constexpr(_packed_word_assembly())


@triton.jit
def packed_word(words, encode):
    """Four words [T] and 1 / (s p) [T] -> int32 [T]: eight codes, the first in the lowest bits."""
    if num.INTERPRETED:
        word = tl.zeros(encode.shape, tl.int32)
        for i in tl.static_range(4):
            low, high = halves(words[i])
            code = (_code(low, encode) & 7) | ((_code(high, encode) & 7) << 4)
            sign = ((num.bits(low + 0.0) >> 28) & 0x8) | ((num.bits(high + 0.0) >> 24) & 0x80)
            word |= (code | sign) << (8 * i)
    else:
        w0, w1, w2, w3 = words
        word = tl.inline_asm_elementwise(_PACKED_WORD, "=r,r,r,r,r,r", [w0, w1, w2, w3, encode], tl.int32, True, 1)
    return word


def _decoded_words_assembly() -> str:
    """PTX: eight codes $4 and the bf16 pair (d, d) $5 -> $0 to $3, four bf16 pairs code * d.

    A code's sign in bit 15 and its magnitude in bits 6 to 8 are a bf16 of 2**-126 its value. A byte b of two codes
    becomes such a pair by b * 0x1001, which brings the second code to the upper half, and a multiplication by 0x1040,
    which shifts by 12 and by 6 at once. Both products are exact; -0.0 is added to keep a zero's sign, since sm_80
    multiplies pairs only with an addition.
    """
    lines = [".reg .b32 b, u, up, zero;", "mov.b32 up, 0x7E807E80;", "mov.b32 zero, 0x80008000;"]  # 2**126, -0.0
    for i in range(4):
        lines += [
            f"bfe.u32 b, $4, {8 * i}, 8;",
            "mul.lo.u32 u, b, 0x1001;",
            "and.b32 u, u, 0x000F000F;",
            "mul.lo.u32 u, u, 0x1040;",
            "and.b32 u, u, 0x81C081C0;",
            "fma.rn.bf16x2 u, u, up, zero;",
            f"fma.rn.bf16x2 ${i}, u, $5, zero;",
        ]
    return "{ " + " ".join(lines) + " }"


_DECODED_WORDS = tl.constexpr(_decoded_words_assembly())


@triton.jit
def _decoded_half(code, decode):
    """Codes 0..15 times s p, as the bits of fp32."""
    return num.bits(num.from_bits((code * 0x10400000) & -2118123520) * 8.507059173023462e37 * decode)


@triton.jit
def decoded_words(word, decode):
    """Eight codes [T] (int32) and s p [T] (fp32) -> int32 [T, 4], pairs of bf16 values, exact."""
    if num.INTERPRETED:
        shift = 8 * tl.arange(0, 4)[None, :]
        low = _decoded_half((word[:, None] >> shift) & 15, decode[:, None])
        high = _decoded_half((word[:, None] >> (shift + 4)) & 15, decode[:, None])
        pairs = ((low >> 16) & 0xFFFF) | (high & HIGH)
    else:
        scale = (num.bits(decode) & HIGH) | ((num.bits(decode) >> 16) & 0xFFFF)
        a, b, c, d = tl.inline_asm_elementwise(
            _DECODED_WORDS, "=&r,=&r,=&r,=&r,r,r", [word, scale], (tl.int32, tl.int32, tl.int32, tl.int32), True, 1
        )
        pairs = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (word.shape[0], 4))
    return pairs
