"""Exact selection on a device: the n largest of a row, of a tensor, or of 16 channels; ties go to the lower index.

Scores are compared as integers: the bits of a non-negative float order like its value, NaN above infinity. A search
brackets the n-th largest key between two keys whose ranks it knows; each step counts two candidates in one pass and one
reduction, and the next two come from interpolating between the ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quads_qat.kernels import numerics as num

BF16_END = tl.constexpr(0x8000)  # beyond the bits of every bf16 magnitude
FLOAT32_END = tl.constexpr(0x7FC00001)  # beyond every score_key
PATIENCE = tl.constexpr(10)  # steps after which the search no longer trusts interpolation


@triton.jit
def score_key(score):
    """fp32 scores >= 0 -> their bits, every NaN as 0x7FC00000."""
    return tl.minimum(num.bits(score) & 0x7FFFFFFF, 0x7FC00000)


@triton.jit
def _two_counts(keys, a, b, BF16: tl.constexpr):
    """How many of ``keys`` are >= a, and how many >= b: low and high 16 bits of one int32."""
    if BF16:  # one subtraction compares with both; bit 15 of a half survives where the key is not less
        left = (keys | -2147450880) - (a | (b << 16))
        one = (left >> 15) & 0x00010001
    else:
        one = (keys >= a).to(tl.int32) | ((keys >= b).to(tl.int32) << 16)
    count = tl.sum(tl.ravel(one), 0)
    return count & 0xFFFF, (count >> 16) & 0xFFFF


@triton.jit
def nth_largest(keys, n, total, guess, BF16: tl.constexpr):
    """The n-th largest of ``keys``, 1 <= n <= total <= 65535, and how many of those equal to it are among the n.

    Args:
        keys: tile of int32: 15-bit keys, each in both halves of its word, or keys below FLOAT32_END. Padding is 0.
        n: how many are wanted.
        total: how many keys there are, without padding.
        guess: a key a little above the largest one, where the search begins. It may be wrong.
        BF16: which kind of keys.

    Returns:
        (key, wanted among its equals: ``total`` where all of them are).
    """
    UNIT: tl.constexpr = 1 if BF16 else 65536  # 2**-7 octaves
    END: tl.constexpr = BF16_END if BF16 else FLOAT32_END
    low = n * 0
    high = low + END
    at_low = total
    at_high = low
    a = guess - 768 * UNIT
    b = guess - 384 * UNIT
    step = low
    # at_low keys are >= low, at least n; at_high keys are >= high, less than n
    while (high - low > 1) & (at_low != n):
        a = tl.minimum(tl.maximum(a, low + 1), high - 1)
        b = tl.minimum(tl.maximum(b, a), high - 1)
        at_a, at_b = _two_counts(keys, a, b, BF16)
        above_b = at_b >= n
        below_a = at_a < n
        low = tl.where(above_b, b, tl.where(below_a, low, a))
        at_low = tl.where(above_b, at_b, tl.where(below_a, at_low, at_a))
        high = tl.where(above_b, high, tl.where(below_a, a, b))
        at_high = tl.where(above_b, at_high, tl.where(below_a, at_a, at_b))
        width = high - low
        step += 1
        share = (at_low - n).to(tl.float32) / tl.maximum(at_low - at_high, 1).to(tl.float32)
        center = low + (width.to(tl.float32) * share).to(tl.int32)
        margin = width // 16 + 1
        thirds = (width > 1024 * UNIT) | (step > PATIENCE)
        far = (low == 0) & (width > 4096 * UNIT)
        a = tl.where(far, high - 1536 * UNIT, tl.where(thirds, low + width // 3, center - margin))
        b = tl.where(far, high - 768 * UNIT, tl.where(thirds, high - width // 3, center + margin + 1))
    return low, tl.where(at_low == n, total, n - at_high)


@triton.jit
def end_of_equals(equal, wanted):
    """The index after the ``wanted``-th of the elements that are ``equal`` [T]."""
    equal = equal.to(tl.int32)
    before = tl.cumsum(equal, 0) - equal
    return tl.max(tl.where((equal > 0) & (before < wanted), tl.arange(0, equal.shape[0]) + 1, 0), 0)


@triton.jit
def end_of_ties(ties, wanted):
    """The index after the ``wanted``-th of equal channels; bit i of ``ties`` [T] int32 stands for channel 16 t + i."""
    pairs = ties - ((ties >> 1) & 0x5555)
    fours = (pairs & 0x3333) + ((pairs >> 2) & 0x3333)
    eights = (fours + (fours >> 4)) & 0x0F0F
    all_ = (eights + (eights >> 8)) & 0xFF
    rest = wanted - (tl.cumsum(all_, 0) - all_)
    here = (rest >= 1) & (rest <= all_)  # in one block
    # where its rest-th bit is: halve the block four times
    at = rest * 0
    counts = (ties, pairs, fours, eights)
    for i in tl.static_range(3, -1, -1):
        lower = (counts[i] >> at) & ((2 << i) - 1)
        beyond = rest > lower
        rest = tl.where(beyond, rest - lower, rest)
        at = tl.where(beyond, at + (1 << i), at)
    return tl.max(tl.where(here, 16 * tl.arange(0, ties.shape[0]) + at + 1, 0), 0)


# ------------------------------------------------------------------------------------------------------- of 16 channels


@triton.jit
def _ordered(a, b):
    return tl.maximum(a, b), tl.minimum(a, b)


@triton.jit
def _descending(a, b, c, d, e, f, g, h):
    """Eight tensors, sorted element by element: Batcher's network of 19 comparisons."""
    a, b = _ordered(a, b)
    c, d = _ordered(c, d)
    e, f = _ordered(e, f)
    g, h = _ordered(g, h)
    a, c = _ordered(a, c)
    b, d = _ordered(b, d)
    e, g = _ordered(e, g)
    f, h = _ordered(f, h)
    b, c = _ordered(b, c)
    f, g = _ordered(f, g)
    a, e = _ordered(a, e)
    b, f = _ordered(b, f)
    c, g = _ordered(c, g)
    d, h = _ordered(d, h)
    c, e = _ordered(c, e)
    d, f = _ordered(d, f)
    b, c = _ordered(b, c)
    d, e = _ordered(d, e)
    f, g = _ordered(f, g)
    return a, b, c, d, e, f, g, h


@triton.jit
def _columns(x):
    """[T, 4, 2] -> eight times [T], in any order."""
    T: tl.constexpr = x.shape[0]
    first, second = tl.split(x)
    x0, x1 = tl.split(tl.reshape(first, (T, 2, 2)))
    x2, x3 = tl.split(tl.reshape(second, (T, 2, 2)))
    a, b = tl.split(x0)
    c, d = tl.split(x1)
    e, f = tl.split(x2)
    g, h = tl.split(x3)
    return a, b, c, d, e, f, g, h


@triton.jit
def nth_of_16(first, second, N: tl.constexpr):
    """The N-th largest (1 <= N <= 15) of the 16 numbers in each row of two [T, 4, 2] int32 tensors: [T].

    The N-th of two sorted lists is the greatest of min(i-th of one, (N-i)-th of the other).
    """
    x = _descending(*_columns(first))
    y = _descending(*_columns(second))
    if N <= 8:
        nth = tl.maximum(x[N - 1], y[N - 1])
    else:
        nth = tl.minimum(x[7], y[N - 9])
        nth = tl.maximum(nth, tl.minimum(y[7], x[N - 9]))
    for i in tl.static_range(1, 8):
        if N - i >= 1 and N - i <= 8:
            nth = tl.maximum(nth, tl.minimum(x[i - 1], y[N - i - 1]))
    return nth
