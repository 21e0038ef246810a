"""Hypothesis strategies that draw tensors *relative to their scale*.

Random floats never meet a tie, a subnormal block scale or a saturated block. Here the per-tensor scale p comes first,
then each block's amax as a point of the E4M3 grid (or halfway between two) times 6 p, then its elements as points of
the E2M1 grid (or halfway) times a neighbouring block scale; each may move by one unit in the last place of the dtype.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INTEGER = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}

_E4M3 = [m * 2.0**-9 for m in range(8)] + [m * 2.0**e for e in range(-9, 6) for m in range(8, 16)][:-1]
_E4M3_MIDPOINTS = [(a + b) / 2 for a, b in itertools.pairwise(_E4M3)]
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_E2M1_MIDPOINTS = [(a + b) / 2 for a, b in itertools.pairwise(_E2M1)]

# In units of 6 p. Twice the chance for the subnormal end, where most rules stop to hold.
_BLOCK_AMAX = (
    st.just(0.0)
    | st.sampled_from(sorted(_E4M3[1:] + _E4M3_MIDPOINTS))
    | st.sampled_from(sorted(_E4M3[1:10] + _E4M3_MIDPOINTS[:9] + [2.0**-12, 2.0**-30]))
    | st.sampled_from([447.9, 463.9, 464.0, 465.0, 500.0, 2000.0, 1e30])
)
# In units of p, and a step: the tensor amax that fixes p, at both ends of the range that a power of two serves.
_TENSOR_AMAX = [(2688.0, 0), (2688.0, -1), (2688.0, 1), (1344.0, 1), (1352.0, 0), (1792.0, 0), (2000.0, 0)]

_TARGETS = [0.0, *_E2M1_MIDPOINTS, *_E2M1[1:]]
_STEPS = (0, 1, -1)
# An element is one integer: sign, which of the two neighbouring scales, step in units in the last place, target.
# Numbers beyond that are plain fractions of the block amax, and the last is the least subnormal number.
_STRUCTURED = len(_TARGETS) * len(_STEPS) * 2
_FRACTIONS = 100
_ELEMENT = st.integers(0, 2 * (_STRUCTURED + _FRACTIONS) - 1)

_LEADS = [(), (1,), (3,), (2, 2), (3, 1), (1, 2), (2, 1, 2), (1, 2, 2)]


@dataclass(frozen=True)
class Case:
    """A tensor and the scale that it is quantized with: its own, a given one, or that of a given amax."""

    x: Tensor
    per_tensor_scale: Tensor | None = None
    tensor_amax: Tensor | None = None

    @property
    def scales(self) -> dict[str, Tensor | None]:
        """The scale arguments of ``quantize`` and ``fake_quantize``."""
        return {"per_tensor_scale": self.per_tensor_scale, "tensor_amax": self.tensor_amax}


def step_bits(magnitudes: Tensor, steps: Tensor) -> Tensor:
    """Move finite ``magnitudes`` >= 0 by ``steps`` units in the last place; stops at 0 and at the greatest number."""
    integer = _INTEGER[magnitudes.dtype]
    greatest = torch.tensor(torch.finfo(magnitudes.dtype).max, dtype=magnitudes.dtype)
    moved = (magnitudes.view(integer).int() + steps.int()).clamp(0, int(greatest.view(integer)))
    return moved.to(integer).view(magnitudes.dtype)


def rounded(values: Sequence[float] | Tensor, dtype: torch.dtype, steps: Sequence[int] | Tensor) -> Tensor:
    """``values`` >= 0 in ``dtype``, saturated, then moved by ``steps`` units in the last place."""
    exact = torch.as_tensor(values, dtype=torch.float64).clamp(max=torch.finfo(dtype).max)
    return step_bits(exact.to(dtype), torch.as_tensor(steps))


def _exponents(dtype: torch.dtype) -> st.SearchStrategy[int]:
    """k of p = 2**k: where ``dtype`` has all its precision, and the ends of what ALIGNED allows."""
    if dtype is torch.float16:
        return st.integers(-20, 4)
    return st.integers(-20, 10) | st.sampled_from([-116, -115, 100, 115, 116, 117])


def _block(amax: float, step: int, place: int, elements: Sequence[int], p: float, dtype: torch.dtype) -> Tensor:
    """One block of 16; ``amax`` in units of 6 p."""
    index = bisect_right(_E4M3, amax)
    neighbours = [_E4M3[min(max(i, 1), 126)] for i in (index - 1, index)]
    largest = rounded([amax * 6 * p], dtype, [step if amax else 0])
    values, steps, signs = [], [], []
    for element in elements:
        rest, negative = divmod(element, 2)
        if rest < _STRUCTURED:
            rest, which = divmod(rest, 2)
            target, moved = divmod(rest, len(_STEPS))
            values.append(_TARGETS[target] * neighbours[which] * p)
            steps.append(_STEPS[moved])
        else:
            share = (rest - _STRUCTURED) / (_FRACTIONS - 1)
            values.append(0.0 if share == 1 else share * amax * 6 * p)
            steps.append(1 if share == 1 else 0)
        signs.append(-1.0 if negative else 1.0)
    block = torch.minimum(rounded(values, dtype, steps), largest)
    block[place] = largest[0]
    return block * torch.tensor(signs, dtype=dtype)


@st.composite
def cases(
    draw: st.DrawFn,
    dtypes: Sequence[torch.dtype] = DTYPES,
    *,
    leads: Sequence[tuple[int, ...]] = tuple(_LEADS),
    kinds: Sequence[str] = ("own", "scale", "amax"),
    aligned: bool = True,
    exponents: st.SearchStrategy[int] | None = None,
) -> Case:
    """A tensor of rank 1 to 4 with the scale that it is meant for.

    Args:
        draw: given by Hypothesis.
        dtypes: to choose from.
        leads: shapes without the last dim, to choose from.
        kinds: "own" leaves the scale to the tensor; "scale" and "amax" give it: one, one per expert or one per row.
        aligned: scales are powers of two.
        exponents: k of the scales 2**k.
    """
    dtype, lead, kind = draw(st.sampled_from(dtypes)), draw(st.sampled_from(leads)), draw(st.sampled_from(kinds))
    n_blocks = draw(st.integers(1, 3))
    layouts = [()]
    if kind != "own" and lead:
        layouts += [(*lead, 1)]
    if kind != "own" and len(lead) >= 2:
        layouts += [lead[:1]]
    layout = draw(st.sampled_from(layouts))

    count = torch.Size(layout).numel()
    k = _exponents(dtype) if exponents is None else exponents
    p = [2.0 ** draw(k) for _ in range(count)]
    if not aligned:
        p = [v * draw(st.floats(0.5, 1.0, width=32)) for v in p]
    units, steps = zip(*(draw(st.sampled_from(_TENSOR_AMAX)) for _ in range(count)), strict=True)
    amaxes = rounded([u * v for u, v in zip(units, p, strict=True)], dtype, steps)

    total = torch.Size(lead).numel() * n_blocks
    blocks = []
    for i in range(total):
        scale = p[i * count // total]
        amax, step = draw(_BLOCK_AMAX), draw(st.sampled_from(_STEPS))
        elements = draw(st.lists(_ELEMENT, min_size=16, max_size=16))
        blocks.append(_block(amax, step, draw(st.integers(0, 15)), elements, scale, dtype))
    x = torch.stack(blocks)
    if kind == "own":
        # One element, the largest, makes the tensor's own scale the one that the blocks were drawn for.
        x = x.clamp(-amaxes[0], amaxes[0])
        x[draw(st.integers(0, total - 1)), draw(st.integers(0, 15))] = amaxes[0]
    x = x.view(*lead, 16 * n_blocks)
    return Case(
        x,
        per_tensor_scale=torch.tensor(p, dtype=torch.float32).view(layout) if kind == "scale" else None,
        tensor_amax=amaxes.view(layout) if kind == "amax" else None,
    )


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def _every_other(x: Tensor) -> Tensor:
    return torch.stack((x, torch.full_like(x, 7.0)), dim=-1).flatten(-2)[..., ::2]


def _inside(x: Tensor) -> Tensor:
    outer = x.new_full((*x.shape[:-1], x.shape[-1] + 5), 7.0)
    outer[..., 3:-2] = x
    return outer[..., 3:-2]


#: name -> the same values with other strides or another offset
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "transposed": _transposed,
    "every other element": _every_other,
    "inside a wider tensor": _inside,
}
layouts = st.sampled_from(sorted(LAYOUTS)).map(LAYOUTS.__getitem__)
