"""The NVFP4 number format as data: E2M1 codes, E4M3 block scales, and the constants that bind them.

``value = code * block_scale * per_tensor_scale``: one E4M3 ``block_scale`` for 16 contiguous elements of the reduced
dim, one fp32 ``per_tensor_scale`` for a tensor, an expert or a token. Everything here is a constant; nothing rounds.
"""

from __future__ import annotations

import struct

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What is quantized, and what codes are decoded into."""

BLOCK_SIZE = 16
"""Elements that share one ``block_scale``, contiguous along the reduced dim K."""

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of the codes 0..7; bit 3 of a code is the sign, so code 8 is -0.0."""

E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway points between neighbouring magnitudes; a tie goes to the even code: up at 0.75, 1.75 and 3.5."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN_SUBNORMAL = 2.0**-9
E4M3_NAN_BYTE = 0x7F
SCALE_RANGE = E2M1_MAX * E4M3_MAX
"""2688: the largest magnitude that codes and block scales reach together, in units of ``per_tensor_scale``."""

ALIGNED_MIN_EXPONENT = -116
ALIGNED_MAX_EXPONENT = 117
"""``Recipe.ALIGNED`` scales are 2**k with k in this range: their reciprocals and products stay exact in fp32."""


def round_to_float32(value: float) -> float:
    """The fp32 number nearest to ``value``, as a Python float.

    >>> round_to_float32(1 / 2688).hex()
    '0x1.8618620000000p-12'
    """
    return struct.unpack("f", struct.pack("f", value))[0]


def _e4m3_magnitude(byte: int) -> float:
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3_MAGNITUDES = tuple(_e4m3_magnitude(byte) for byte in range(127))
"""Magnitude of the bytes 0x00..0x7e, ascending; 0x7f is NaN."""
