"""Device arithmetic of NVFP4: E4M3 and E2M1 rounding, scales from amaxes, quotients. fp32, exact or one rounding each.

The derivations differ from ``reference`` on purpose: two ways, one answer.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

# Recipes as compile-time numbers; ``launch.RECIPES`` maps the enum.
ALIGNED = tl.constexpr(0)
MODELOPT = tl.constexpr(1)  # and MODELOPT_IEEE: they differ in the per-tensor scale only
MODELOPT_STATIC = tl.constexpr(2)
MODELOPT_STATIC_IEEE = tl.constexpr(3)
LLM_COMPRESSOR = tl.constexpr(4)
TRANSFORMER_ENGINE = tl.constexpr(5)

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
"""The interpreter's fma rounds twice; there a division takes the place of Markstein's, which has the same value."""

R6 = tl.constexpr(0.16666667163372039794921875)  # fl32(1/6)
R2688 = tl.constexpr(3.720238164532929658889770507812e-04)  # fl32(1/2688)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def bits(x):
    """The bits of fp32 ``x``, as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(b):
    """The fp32 number with the int32 bits ``b``."""
    return b.to(tl.float32, bitcast=True)


@triton.jit
def widen(x):
    """Any float -> fp32. bf16 by its bits: the interpreter flushes its subnormal numbers."""
    if x.dtype == tl.bfloat16:
        x = from_bits(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    return x.to(tl.float32)


@triton.jit
def reciprocal_of_power_of_two(p):
    """1/p for p = 2**k, -126 <= k <= 126: exact."""
    return from_bits(0x7F000000 - bits(p))


@triton.jit
def power_of_two_scale(a):
    """2**ceil(log2(a / 2688)) in [2**-116, 2**117], from the bits of ``a`` >= 0; 1 for a = 0. 2688 = 1.3125 * 2**11."""
    b = bits(a)
    exponent = (b >> 23) - 138 + tl.where((b & 0x7FFFFF) > 0x280000, 1, 0)
    exponent = tl.minimum(tl.maximum(exponent, -116), 117)
    return tl.where(a == 0.0, 1.0, from_bits((exponent + 127) << 23))


@triton.jit
def round_e4m3(x):
    """fp32 in [0, 448] -> nearest E4M3 value, ties to even: the addition of 1.5 * 2**23 steps rounds."""
    power = from_bits(bits(x) & 0x7F800000)
    magic = tl.maximum(power, 0.015625) * 1572864.0  # steps of power / 8, of 2**-9 below 2**-6
    return (x + magic) - magic


@triton.jit
def e4m3_byte(s):
    """The byte of an E4M3 value ``s`` in [0, 448] held as fp32: 2**-120 of it has the byte in bits 20 to 26."""
    return bits(s * 7.52316384526264e-37) >> 20


@triton.jit
def e4m3_value(byte):
    """The fp32 value of E4M3 bytes 0x00..0xff (int32); 0x7f and 0xff become NaN."""
    magnitude = byte & 0x7F
    value = from_bits(magnitude << 20 | (byte & 0x80) << 24) * 1.329227995784916e36  # 2**120
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit
def e2m1_magnitude(code):
    """The fp32 magnitude of codes 0..7 (int32): the code in bits 22 to 24 is 2**-126 of it, subnormals included."""
    return from_bits(code << 22) * 8.507059173023462e37


@triton.jit
def aligned_block_scale(a, inverse_p, EXACT: tl.constexpr):
    """E4M3 nearest-even of the exact a / (6p), clamped to [2**-9, 448]; 1.0 for a = 0. ``inverse_p`` is a power of two.

    A product with fl(1/6) will do for amaxes of 16-bit floats: it is a midpoint of E4M3 exactly where a / (6p) is one
    (checked for all midpoints by a test), and elsewhere a / (6p) is at least 2**-11 away. fp32 amaxes are divided.
    """
    if EXACT:
        t = tl.div_rn(a * inverse_p, a * 0.0 + 6.0)
    else:
        t = a * (inverse_p * R6)
    s = round_e4m3(tl.minimum(tl.maximum(t, 0.001953125), 448.0))
    return tl.where(a == 0.0, 1.0, s)


@triton.jit
def encode_scale_te(tensor_amax):
    """TransformerEngine's G = min(2688 / A, FLT_MAX), 1 for A = 0."""
    one = tl.where(tensor_amax == 0.0, 1.0, tensor_amax)
    g = tl.minimum(tl.div_rn(one * 0.0 + 2688.0, one), FLOAT32_MAX)
    return tl.where((tensor_amax == 0.0) | (g == 0.0), 1.0, g)


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """fp32 -> nearest value of DTYPE. The interpreter cuts bf16 off and flushes it; there the bits are rounded."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        b = bits(x)
        nearest = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
        out = tl.where(x == x, nearest, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        out = x.to(DTYPE)
    return out


@triton.jit
def block_scale_of(a, p, source, RECIPE: tl.constexpr, DTYPE: tl.constexpr):
    """(E4M3 block scale as fp32) of block amax ``a``; ``p``, ``source`` (G, A or p) broadcast against ``a``."""
    if RECIPE == ALIGNED:
        s = aligned_block_scale(a, reciprocal_of_power_of_two(p), tl.float32 == DTYPE)
    elif RECIPE == MODELOPT:
        raw = tl.div_rn(a, 6.0 * p + a * 0.0)
        s = round_e4m3(tl.minimum(tl.maximum(tl.where(raw == 0.0, 1.0, raw), 0.001953125), 448.0))
    elif RECIPE == LLM_COMPRESSOR:
        sixth = widen(round_to(tl.div_rn(a, a * 0.0 + 6.0), DTYPE))
        s = round_e4m3(tl.minimum(source * sixth, 448.0))
        s = tl.where(s == 0.0, 0.125, s)
    elif RECIPE == TRANSFORMER_ENGINE:
        s = round_e4m3(tl.minimum(a * (encode_scale_te(source) * R6), 448.0))
    else:
        if RECIPE == MODELOPT_STATIC_IEEE:
            sixth = tl.div_rn(a, a * 0.0 + 6.0)
            whole = tl.div_rn(source + a * 0.0, a * 0.0 + 6.0)
        else:
            sixth = a * R6
            whole = source * R6 + a * 0.0
        raw = tl.div_rn(tl.where(sixth == 0.0, 1.0, sixth) * 448.0, whole)
        s = round_e4m3(tl.minimum(tl.maximum(raw, 0.001953125), 448.0))
    return s


@triton.jit
def decode_scale_of(s, p, stored, RECIPE: tl.constexpr):
    """What a code is multiplied by."""
    if RECIPE == TRANSFORMER_ENGINE:
        d = (s * stored) * R2688
    else:
        d = s * p
    return d


@triton.jit
def snapped(magnitude, encode):
    """768 + magnitude * encode, rounded to 2**-14: 768 + an E2M1 midpoint where the exact quotient is one, only there.

    For ``magnitude`` a bf16 or fp16 number and ``encode`` = 1 / (s p) within a few ulps: the quotient by s p is a
    midpoint or at least 2**-14 away from it (2**-12 of 0.25, the smallest), and the product within 2**-21 of the
    quotient.
    """
    return tl.fma(magnitude, encode, 768.0)


@triton.jit
def rounding_step(y):
    """1, 2 or 4: the power of two below ``y`` in [0, 8), at least 1; E2M1 values there are half of it apart."""
    return tl.maximum(from_bits(bits(y) & 0x7F800000), 1.0)


@triton.jit
def e2m1_value(y):
    """fp32 in [0, 6] -> nearest E2M1 magnitude, ties to the even code: 1.5 * 2**22 steps are added and taken away."""
    c = rounding_step(y)
    return tl.fma(c, -6291456.0, tl.fma(c, 6291456.0, y))


@triton.jit
def e2m1_code(y):
    """fp32 in [0, 6] -> code 0..7 of the nearest E2M1 magnitude.

    The low bits of the sum count steps of c / 2, and two more of them; the exponent of c adds what the steps before c
    amount to.
    """
    c = rounding_step(y)
    t = tl.fma(c, 6291457.0, y)
    return (bits(t) + (bits(c) >> 22)) & 7


@triton.jit
def quotient_of(x, s, p, stored, RECIPE: tl.constexpr):
    """(|quotient| capped at 6, whether a code is negative): ``x`` is a tile of elements, the rest broadcast to it.

    An fp32 quotient of ALIGNED is safe for any input: it is a midpoint only where the exact one is (see ``reference``).
    """
    if RECIPE == ALIGNED:
        y = tl.minimum(tl.div_rn(tl.abs(x) * reciprocal_of_power_of_two(p), s + x * 0.0), 6.0)
        y = tl.where(y == y, y, 0.0)
        negative = x < 0.0
    else:
        q = peers_quotient(x, s, p, stored, RECIPE)
        negative = q < 0.0
        y = tl.abs(q)
        y = tl.where(y == y, tl.minimum(y, 6.0), 0.0)
    return y, negative


@triton.jit
def peers_quotient(x, s, p, stored, RECIPE: tl.constexpr):
    """The signed fp32 quotient of the recipes that copy a peer."""
    if RECIPE == LLM_COMPRESSOR:
        q = tl.div_rn(x, tl.div_rn(s, stored + s * 0.0) + x * 0.0)
    elif RECIPE == TRANSFORMER_ENGINE:
        g = encode_scale_te(stored)
        inverse_g = tl.div_rn(g * 0.0 + 1.0, g)
        d = s * inverse_g
        encode = tl.where(d == 0.0, FLOAT32_MAX, tl.div_rn(d * 0.0 + 1.0, tl.where(d == 0.0, 1.0, d)))
        q = x * tl.minimum(encode, FLOAT32_MAX)
    else:
        q = tl.div_rn(x, s * p + x * 0.0)
    return q
