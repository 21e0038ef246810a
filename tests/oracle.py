"""``Recipe.ALIGNED`` in exact rational arithmetic: for each result, the number that it must be the nearest to.

Written from the contract alone, in plain Python with ``fractions``. It shares nothing with ``quads_qat``, not even a
constant, and knows no float but the ones it is given. A block takes about a millisecond.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

TWO = Fraction(2)


def minifloat(code: int, *, mantissa_bits: int, bias: int) -> Fraction:
    """The number that an unsigned ``code`` of such a format stands for."""
    exponent, mantissa = divmod(code, 1 << mantissa_bits)
    fraction = Fraction(mantissa, 1 << mantissa_bits)
    return fraction * TWO ** (1 - bias) if exponent == 0 else (1 + fraction) * TWO ** (exponent - bias)


E2M1 = [minifloat(code, mantissa_bits=1, bias=1) for code in range(8)]
E4M3 = [minifloat(byte, mantissa_bits=3, bias=7) for byte in range(0x7F)]

#: name -> (bits of precision, least normal exponent, greatest exponent)
FLOATS = {"float32": (24, -126, 127), "bfloat16": (8, -126, 127), "float16": (11, -14, 15)}


def nearest_even(value: Fraction, grid: Sequence[Fraction]) -> int:
    """Index in the ascending ``grid`` of the number nearest to ``value`` >= 0; ties go to the even index."""
    above = bisect_left(grid, value)
    if above == 0 or above == len(grid):
        return max(above - 1, 0)
    to_above, to_below = grid[above] - value, value - grid[above - 1]
    if to_above == to_below:
        return above - above % 2
    return above if to_above < to_below else above - 1


def round_to(value: Fraction, dtype: str) -> float:
    """``value`` >= 0 rounded to nearest, ties to even, as IEEE 754 does it: beyond the greatest finite number, inf."""
    precision, least, greatest = FLOATS[dtype]
    if value == 0:
        return 0.0
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    exponent -= TWO**exponent > value  # now 2**exponent <= value < 2**(exponent + 1)
    step = TWO ** (max(exponent, least) - (precision - 1))
    rounded = round(value / step) * step  # Python rounds a Fraction half to even
    return math.inf if rounded >= TWO ** (greatest + 1) else float(rounded)


def per_tensor_scale(tensor_amax: float) -> Fraction:
    """The least power of two p with ``tensor_amax <= 2688 p``, in [2**-116, 2**117]; 1 for a zero tensor."""
    if tensor_amax == 0:
        return Fraction(1)
    exponent = -116
    while exponent < 117 and Fraction(tensor_amax) > 2688 * TWO**exponent:
        exponent += 1
    return TWO**exponent


def block_scale_byte(block_amax: float, p: Fraction) -> int:
    if block_amax == 0:
        return 0x38
    return max(nearest_even(Fraction(block_amax) / (6 * p), E4M3), 0x01)


def encode(x: float, byte: int, p: Fraction) -> int:
    magnitude = nearest_even(abs(Fraction(x)) / (E4M3[byte] * p), E2M1)
    return magnitude | (8 if x < 0 else 0)


def decode(code: int, byte: int, p: Fraction, dtype: str) -> float:
    magnitude = round_to(E2M1[code & 7] * E4M3[byte] * p, dtype)
    return -magnitude if code & 8 else magnitude


@dataclass(frozen=True)
class Block:
    """What ``Recipe.ALIGNED`` makes of 16 numbers."""

    byte: int
    codes: list[int]
    values: list[float]


def quantize_block(x: Sequence[float], p: Fraction, dtype: str) -> Block:
    """``dtype`` is the one that values are decoded into."""
    byte = block_scale_byte(max(abs(v) for v in x), p)
    codes = [encode(v, byte, p) for v in x]
    return Block(byte, codes, [decode(code, byte, p, dtype) for code in codes])
