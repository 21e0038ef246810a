"""How decoders of ``hopper_kernel`` make tiles of bf16 weights, K in its own order, from codes and block scales."""

# pyright: reportAssignmentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _assembly() -> str:
    """Four words (operands 16 to 19) and the bytes of two scales (20) -> 32 weights in bf16, as they lie in a row.

    As in ``decode``: bits 15 and 8 to 6 of bf16 are 2**-126 of an E2M1 number, and a scale byte << 4 is 2**-120 of an
    E4M3 number. ``prmt`` puts neighbours of a byte into the halves of a register; 0x8 copies a sign bit, which is zero.
    """
    lines = ["{", ".reg .b32 even, odd, pair, zero, scale0, scale1;", ".reg .pred nan;", "mov.b32 zero, 0x80008000;"]
    lines += ["mov.b32 odd, 0x7F007F00;", "mov.b32 even, 0x77807780;"]  # 2**127 and 2**112
    for i, cut in enumerate(("and.b32 pair, $20, 255;", "shr.u32 pair, $20, 8;")):
        lines += [cut, f"mul.lo.u32 scale{i}, pair, 0x00100010;"]
        lines += [f"fma.rn.bf16x2 scale{i}, scale{i}, odd, zero;", f"fma.rn.bf16x2 scale{i}, scale{i}, even, zero;"]
        lines += ["setp.eq.u32 nan, pair, 0x7F;", f"selp.b32 scale{i}, 0x7FFF7FFF, scale{i}, nan;"]
    for word in range(4):
        lines.append(f"and.b32 even, ${16 + word}, 0x0F0F0F0F;")
        lines.append(f"shr.u32 odd, ${16 + word}, 4; and.b32 odd, odd, 0x0F0F0F0F;")
        for q in range(4):
            lines.append(f"prmt.b32 pair, even, odd, 0x{12 + q:X}{4 + q:X}{8 + q:X}{q:X};")
            lines.append(f"mul.lo.u32 pair, pair, {(1 << 6) + (1 << 12)}; and.b32 pair, pair, 0x81C081C0;")
            lines.append(f"fma.rn.bf16x2 ${4 * word + q}, pair, scale{word // 2}, zero;")
    return "\n".join([*lines, "}"])


_DECODE = gl.constexpr(_assembly())
_OPERANDS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 5))


@gluon.constexpr_function
def two_lanes_a_row(rows, warps, width):
    """Layout [rows, 2 width]: a thread has half a row of a step, so that stores of a warp meet no bank twice."""
    of_warps = warps.bit_length() - 1
    bases = [[r, 0] for r in (16, 32, 64, 128) if r < rows]
    registers = [[0, i] for i in (1, 2) if i < width] + bases[of_warps:]
    lanes = [[0, width], [1, 0], [2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, bases[:of_warps], [], [rows, 2 * width])


@gluon.jit
def _four(a, b, c, d):
    """Four [R, ...] -> [R, ..., 2, 2], in this order."""
    return gl.join(gl.join(a, c), gl.join(b, d))


@gluon.jit
def decoded(words, scales):
    """Words [R, 8] and pairs of scale bytes [R, 2] int16 -> 64 bf16 of a row as int32 [R, 32]."""
    R: gl.constexpr = words.shape[0]
    low, high = gl.split(gl.reshape(words, (R, 2, 2, 2)))
    w0, w2 = gl.split(low)
    w1, w3 = gl.split(high)
    byte = gl.convert_layout(scales, w0.type.layout, assert_trivial=True).to(gl.int32) & 0xFFFF
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = gl.inline_asm_elementwise(
        _DECODE, _OPERANDS, [w0, w1, w2, w3, byte], (gl.int32,) * 16, True, 1
    )
    pairs = _four(_four(a0, a1, a2, a3), _four(b0, b1, b2, b3), _four(c0, c1, c2, c3), _four(d0, d1, d2, d3))
    return gl.reshape(gl.permute(pairs, (0, 1, 4, 5, 2, 3)), (R, 32))
