"""Device arithmetic of a two-step quantization, on pairs of bf16 numbers in int32 words [T, 4, 2]: see ``residual``.

On a GPU inline assembly, because only that computes on both numbers of a register at once; in the interpreter the fp32
lanes of ``pairs``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quads_qat.kernels import numerics as num
from quads_qat.kernels.pairs import HIGH, decoded, halves

_LARGER = tl.constexpr("max.NaN.bf16x2 $0, $1, $2;")


@triton.jit
def _larger(a, b):
    return tl.inline_asm_elementwise(_LARGER, "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _larger_half(w):
    return tl.maximum(w & 0x7FFF, (w >> 16) & 0x7FFF)


@triton.jit
def largest_bits(words):
    """Words [T, 4, 2] -> bits of the largest bf16 magnitude of each block, int32 [T]; NaN above infinity."""
    if num.INTERPRETED:
        largest = tl.max(tl.max(_larger_half(words), 2), 1)
    else:
        magnitudes = words & 0x7FFF7FFF
        largest = _larger_half(tl.reduce(tl.reduce(magnitudes, 2, _larger), 1, _larger))
    return largest


@triton.jit
def row_scale(words, bits):
    """The scale of a row of words whose largest magnitude has these bits. What is not finite does not count."""
    if bits >= 0x7F80:  # rare: leave it out, element by element
        low = words & 0x7FFF
        high = (words >> 16) & 0x7FFF
        finite = tl.maximum(tl.where(low < 0x7F80, low, 0), tl.where(high < 0x7F80, high, 0))
        bits = tl.max(tl.ravel(finite), 0)
    return num.power_of_two_scale(num.from_bits(bits << 16))


def _step_assembly(residual: bool) -> str:
    """PTX of one step of the two-step quantization: words $x and factors 1 / (s p), s p -> decoded words, residual.

    Quotients y are fp16 pairs: a bf16 x is a midpoint of two codes, or 2**-9 of it away, so that fp16, with 2**-12,
    neither makes nor breaks a tie. Adding +0.0 turns -0.0 into +0.0 and leaves all else. y is rounded by adding and
    taking away 768 times the power of two c below it (at least 1): fp16 numbers there are c / 2 apart. An fp16 number
    shifted to the exponent's place of bf16 is 2**-112 of it.
    """
    x, encode, decode = ("$2", "$3", "$4") if residual else ("$1", "$2", "$3")
    lines = [
        ".reg .b32 low, high, y, c, t, k<4>;",
        ".reg .f32 fl, fh;",
        f"shl.b32 low, {x}, 16;",
        f"and.b32 high, {x}, 0xFFFF0000;",
        "mov.b32 fl, low;",
        "mov.b32 fh, high;",
        f"fma.rn.f32 fl, fl, {encode}, 0f00000000;",
        f"fma.rn.f32 fh, fh, {encode}, 0f00000000;",
        "cvt.rn.f16x2.f32 y, fh, fl;",
        "abs.f16x2 t, y;",
        "mov.b32 k0, 0x46004600;",  # 6
        "min.f16x2 t, t, k0;",
        "and.b32 c, t, 0x7C007C00;",
        "mov.b32 k0, 0x3C003C00;",  # 1
        "max.f16x2 c, c, k0;",
        "mov.b32 k0, 0x62006200;",  # 768
        "fma.rn.f16x2 t, c, k0, t;",
        "mov.b32 k0, 0xE200E200;",
        "fma.rn.f16x2 t, c, k0, t;",
        "shr.u32 t, t, 3;",
        "and.b32 t, t, 0x0FFF0FFF;",
        "mov.b32 k1, 0x80008000;",  # -0.0: adding it changes nothing
        "mov.b32 k0, 0x77807780;",  # 2**112
        "fma.rn.bf16x2 t, t, k0, k1;",
        f"fma.rn.bf16x2 t, t, {decode}, k1;",
        "lop3.b32 $0, y, 0x80008000, t, 0xEA;",  # (y & sign) | t
    ]
    if residual:
        lines += ["mov.b32 k0, 0xBF80BF80;", f"fma.rn.bf16x2 $1, $0, k0, {x};"]  # x - decoded
    return "{ " + " ".join(lines) + " }"


_FIRST = tl.constexpr(_step_assembly(True))
_SECOND = tl.constexpr(_step_assembly(False))


@triton.jit
def _factors(largest, p):
    """Bits of block amaxes [T] -> (1 / (s p) fp32, s p as a pair of bf16, NaN where not finite), [T, 1, 1]."""
    inverse_p = num.reciprocal_of_power_of_two(p)
    finite = largest < 0x7F80
    s = num.aligned_block_scale(num.from_bits(tl.where(finite, largest, 0) << 16), inverse_p, False)
    encode = (1.0 / s) * inverse_p
    decode = tl.where(finite, num.bits(s * p) >> 16, 0x7FC0)
    decode = decode | (decode << 16)
    return encode[:, None, None], decode[:, None, None]


@triton.jit
def _pair(low, high):
    """fp32 bits of bf16 numbers -> pairs."""
    return ((low >> 16) & 0xFFFF) | (high & HIGH)


@triton.jit
def _decoded_words(words, encode, decode):
    """The interpreter's way: fp32 lanes, as in ``pairs``."""
    low, high = halves(words)
    decode = num.from_bits(decode & HIGH)
    return _pair(decoded(low, encode, decode), decoded(high, encode, decode))


@triton.jit
def first_step(words, largest, p):
    """Words of x -> words of Q(x), and of x - Q(x)."""
    encode, decode = _factors(largest, p)
    if num.INTERPRETED:
        out = _decoded_words(words, encode, decode)
        low, high = halves(words)
        out_low, out_high = halves(out)
        low -= out_low
        high -= out_high
        low = tl.where(low == low, num.bits(low), 0x7FFF0000)  # a GPU makes this NaN of every NaN
        high = tl.where(high == high, num.bits(high), 0x7FFF0000)
        rest = _pair(low, high)
    else:
        out, rest = tl.inline_asm_elementwise(
            _FIRST, "=r,=r,r,r,r", [words, encode, decode], (tl.int32, tl.int32), True, 1
        )
    return out, rest


@triton.jit
def second_step(words, largest, p):
    """Words of a masked residual -> words of its quantization with p / 4, decoded."""
    encode, decode = _factors(largest, tl.maximum(p * 0.25, 1.2037062152420224e-35))  # 2**-116
    if num.INTERPRETED:
        out = _decoded_words(words, encode, decode)
    else:
        out = tl.inline_asm_elementwise(_SECOND, "=r,r,r,r", [words, encode, decode], tl.int32, True, 1)
    return out
