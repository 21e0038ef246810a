"""Exact selection on a device: the n largest of a row, of a tensor, or of 16 channels; ties go to the lower index.

Scores are compared as integers: the bits of a non-negative float order like its value. A search brackets the n-th
largest key between two keys whose ranks it knows; each step counts two candidates in one pass and one reduction, and
the next two come from interpolating between the ranks.

Keys of 15 bits, those of bf16 magnitudes, travel in pairs in tiles [T, 4, 2] of int32 words. One subtraction compares a
pair with a candidate, since bit 15 of a half, set before, survives where the key is not less; from sm_90 on (FAST) one
bf16 instruction does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quads_qat.kernels import numerics as num

WIDE = tl.constexpr(0)  # one key a word, below FLOAT32_END
PAIRS = tl.constexpr(1)  # two keys a word
FAST = tl.constexpr(2)  # the same, by bf16 instructions

GUARD = tl.constexpr(-2147450880)  # 0x80008000: bit 15 of both halves
BOTH = tl.constexpr(0x00010001)
INFINITY = tl.constexpr(0x7F80)
FLOAT32_END = tl.constexpr(0x7FC00001)  # beyond every score_key
PATIENCE = tl.constexpr(10)  # steps after which the search no longer trusts interpolation


@triton.jit
def score_key(score):
    """fp32 scores >= 0 -> their bits, every NaN as 0x7FC00000."""
    return tl.minimum(num.bits(score) & 0x7FFFFFFF, 0x7FC00000)


@triton.jit
def magnitude_keys(words, top):
    """Pairs of bf16 residuals -> pairs of keys up to 0x7F80, which bf16 instructions can compare.

    NaN is the largest key, infinity the next: no finite residual comes near. ``top`` are the bits of a magnitude that
    bounds those of the numbers that the residuals are of; below 2**127 all are finite.
    """
    keys = words & 0x7FFF7FFF
    if top >= 0x7F00:  # rare
        low = keys & 0xFFFF
        high = keys >> 16
        low = tl.where(low == INFINITY, INFINITY - 1, tl.minimum(low, INFINITY))
        high = tl.where(high == INFINITY, INFINITY - 1, tl.minimum(high, INFINITY))
        keys = low | (high << 16)
    return keys


def _count_assembly() -> str:
    """PTX: eight words of keys $1 to $8, pairs of candidates $9 and $10 -> $0, two counts of the sixteen keys."""
    lines = [".reg .b32 a<8>, b<8>, k;", "mov.b32 k, 0x43004300;"]  # 128: adding it puts integers in the low bits
    for i in range(8):
        lines += [f"set.ge.bf16x2.bf16x2 a{i}, ${1 + i}, $9;", f"set.ge.bf16x2.bf16x2 b{i}, ${1 + i}, $10;"]
    for step in (4, 2, 1):
        lines += [f"add.rn.bf16x2 {c}{i}, {c}{i}, {c}{i + step};" for i in range(step) for c in "ab"]
    lines += [
        "prmt.b32 a1, a0, b0, 0x5410;",
        "prmt.b32 b1, a0, b0, 0x7632;",
        "add.rn.bf16x2 a1, a1, b1;",
        "add.rn.bf16x2 a1, a1, k;",
        "and.b32 $0, a1, 0x007F007F;",
    ]
    return "{ " + " ".join(lines) + " }"


_COUNT = tl.constexpr(_count_assembly())


@triton.jit
def _two_counts(keys, a, b, KIND: tl.constexpr):
    """How many of ``keys`` are >= a, and how many >= b."""
    if KIND == WIDE:
        one = tl.ravel((keys >= a).to(tl.int32) | ((keys >= b).to(tl.int32) << 16))
    else:
        a = a | (a << 16)
        b = b | (b << 16)
        if KIND == FAST:
            c0, c1, c2, c3, c4, c5, c6, c7 = columns(keys)
            operands = [c0, c1, c2, c3, c4, c5, c6, c7, a, b]
            one = tl.inline_asm_elementwise(_COUNT, "=r,r,r,r,r,r,r,r,r,r,r", operands, tl.int32, True, 1)
        else:
            guarded = keys | GUARD
            at_a = tl.sum(tl.sum(((guarded - a) >> 15) & BOTH, 2), 1)
            at_b = tl.sum(tl.sum(((guarded - b) >> 15) & BOTH, 2), 1)
            one = ((at_a + (at_a >> 16)) & 0xFFFF) | (((at_b & 0xFFFF) + (at_b >> 16)) << 16)
    count = tl.sum(one, 0)
    return count & 0xFFFF, (count >> 16) & 0xFFFF


@triton.jit
def nth_largest(keys, n, total, low, high, a, b, KIND: tl.constexpr):
    """The n-th largest of ``keys``, and how many of those equal to it are among the n largest.

    Args:
        keys: tile of int32, see WIDE, PAIRS and FAST. What is no key is less than ``low``, or 0.
        n: 1 <= n <= total.
        total: how many keys are >= low, at most 65535; less than n are >= high.
        low: bound of the n-th largest, >= 0.
        high: bound beyond it.
        a: first of two keys to begin with, any.
        b: second.
        KIND: which kind of keys.

    Returns:
        (key, wanted among its equals: ``total`` where all of them are).
    """
    UNIT: tl.constexpr = tl.constexpr(65536 if KIND == WIDE else 1)  # 2**-7 octaves
    at_low = total
    at_high = n * 0
    step = n * 0
    # at_low keys are >= low, at least n; at_high keys are >= high, less than n
    while (high - low > 1) & (at_low != n):
        a = tl.minimum(tl.maximum(a, low + 1), high - 1)
        b = tl.minimum(tl.maximum(b, a), high - 1)
        at_a, at_b = _two_counts(keys, a, b, KIND)
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
        a = tl.where(thirds, low + width // 3, center - margin)
        b = tl.where(thirds, high - width // 3, center + margin + 1)
        # beyond the two keys to begin with: first a few octaves on, as far as keys go that are no outliers
        above = (at_high == 0) & (width > 1024 * UNIT)
        a = tl.where(above, low + 192 * UNIT, a)
        b = tl.where(above, low + 385 * UNIT, b)
        below = (low == 0) & (width > 4096 * UNIT)
        a = tl.where(below, high - 1536 * UNIT, a)
        b = tl.where(below, high - 768 * UNIT, b)
    return low, tl.where(at_low == n, total, n - at_high)


@triton.jit
def nth_magnitude(keys, n, total, guess, KIND: tl.constexpr):
    """:func:`nth_largest` of ``magnitude_keys``; ``guess`` is a key a little above the largest. It may be wrong."""
    return nth_largest(keys, n, total, n * 0, n * 0 + 0x8000, guess - 768, guess - 384, KIND)


@triton.jit
def nth_score(keys, n, total, guess):
    """:func:`nth_largest` of ``score_key``s; ``guess`` is a key a little above the largest. It may be wrong."""
    below = guess - 768 * 65536
    return nth_largest(keys, n, total, n * 0, n * 0 + FLOAT32_END, below, below + 384 * 65536, WIDE)


@triton.jit
def equal_channels(keys, nth):
    """Pairs of keys [T, 4, 2] -> int32 [T]: bit i is set where channel i of the block has the key ``nth``."""
    equal = (GUARD - (keys ^ (nth | (nth << 16)))) >> 15  # bit 0 of a half: 0x8000 less 0
    bits = (equal & BOTH) << (2 * tl.arange(0, 4)[None, :, None] + 8 * tl.arange(0, 2)[None, None, :])
    bits = tl.sum(tl.sum(bits, 2), 1)
    return (bits & 0x5555) | ((bits >> 15) & 0xAAAA)


@triton.jit
def kept_channels(keys, block, nth, end, KIND: tl.constexpr):
    """Pairs of keys [T, 4, 2] of the blocks ``block`` -> words, 0xffff where a key is kept.

    Kept are keys above ``nth``, and equal ones of channels before ``end``: keys that are above it once 1 is added
    there.
    """
    before = tl.minimum(tl.maximum(end - 16 * block, 0), 16)[:, None, None]
    first = 2 * tl.arange(0, 4)[None, :, None] + 8 * tl.arange(0, 2)[None, None, :]
    places = first | ((first + 1) << 16)
    raised = keys + ((((before + 0x7FFF) * BOTH - places) >> 15) & BOTH)
    if KIND == FAST:
        pair = nth | (nth << 16)
        kept = tl.inline_asm_elementwise(
            "set.gtu.u32.bf16x2 $0, $1, $2;", "=r,r,r", [raised, pair], tl.int32, True, 1
        )  # infinity and 1 is NaN: hence "unordered" counts
    else:
        kept = ((raised | GUARD) - (nth + 1) * BOTH) & GUARD
        kept = kept | (kept - ((kept >> 15) & BOTH))
    return kept


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
def columns(x):
    """[T, 4, 2] -> eight times [T], in some order."""
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
    x = _descending(*columns(first))
    y = _descending(*columns(second))
    if N <= 8:
        nth = tl.maximum(x[N - 1], y[N - 1])
    else:
        nth = tl.minimum(x[7], y[N - 9])
        nth = tl.maximum(nth, tl.minimum(y[7], x[N - 9]))
    for i in tl.static_range(1, 8):
        if N - i >= 1 and N - i <= 8:
            nth = tl.maximum(nth, tl.minimum(x[i - 1], y[N - i - 1]))
    return nth
