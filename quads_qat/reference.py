"""NVFP4 quantization in plain torch: the specification of every bit that the other modules produce.

Each :class:`~quads_qat.config.Recipe` is a fixed order of roundings. ``R(.)`` is one fp32 rounding, ``A`` the tensor
amax, ``a`` the block amax, ``r6`` = fp32(1/6); E4M3 and E2M1 round to nearest, ties to even. "/" is a true division.

=================== ============================= ========================================= ========================
recipe              stored scale                  block_scale s, before its E4M3 cast       code = e2m1(.)
=================== ============================= ========================================= ========================
ALIGNED             p = 2**ceil(log2(A/2688))     a / (6p) exact, clamp [2**-9, 448];       x / (s p) exact
                                                  1.0 if a = 0
MODELOPT            p = R(A * r2688)              R(a / R(6p)), 0 -> 1, clamp [2**-9, 448]  R(x / R(s p))
MODELOPT_IEEE       p = R(A / 2688)               same                                      same
MODELOPT_STATIC     p = R(A * r2688)              R(R(R(a*r6) * 448) / R(A*r6)), same clamp;  R(x / R(s p))
                                                  a*r6 = 0 counts as 1
MODELOPT_STATIC_IEEE the same with R(a / 6), R(A / 6), R(A / 2688)
LLM_COMPRESSOR      G = 2688 / A as reciprocal    R(G * b), b = a/6 rounded in x's dtype,   R(x / R(s / G))
                    times 2688, in x's dtype      clamp 448; 0 after the cast -> 0.125
TRANSFORMER_ENGINE  A; G = R(2688 / A)            R(a * R(G * r6)), clamp 448; 0 stays 0    R(x * R(1 / R(s * R(1/G))))
=================== ============================= ========================================= ========================

Decoding is ``R(code * R(s * p))``, rounded once more to the output dtype; ``TRANSFORMER_ENGINE`` alone decodes with
``R(R(s * A) * r2688)`` in place of ``R(s * p)``. With ALIGNED every step is exact.

ALIGNED divides in fp32 all the same, by d = 6p or s p: rounding the quotient neither makes nor breaks a tie. For each
midpoint m of two codes or of two E4M3 numbers, m d is an fp32 number, since m has few bits and p is a power of two; and
R(x / d) = m takes |x - m d| <= d ulp(m) / 2, less than the distance from m d to the fp32 numbers beside it, so x = m d.

Non-finite elements are ignored by the amax; their block gets scale byte 0x7f and codes 0 and decodes to NaN.
Sources: numerics of nvidia-modelopt 0.47 ``nvfp4_tensor.py``, compressed-tensors 0.20 ``helpers.py``,
TransformerEngine ``reference_nvfp4.py``.

Arguments are checked in ``ops``, not here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quads_qat import formats
from quads_qat.config import Recipe
from quads_qat.formats import BLOCK_SIZE, E4M3_MAX, E4M3_MIN_SUBNORMAL, SCALE_RANGE
from quads_qat.packing import unpack_codes
from quads_qat.qtensor import NVFP4Tensor

_R6 = formats.round_to_float32(1 / 6)
_R2688 = formats.round_to_float32(1 / 2688)
_FLOAT32_MAX = torch.finfo(torch.float32).max

_STATIC = (Recipe.MODELOPT_STATIC, Recipe.MODELOPT_STATIC_IEEE)
_IEEE = (Recipe.MODELOPT_IEEE, Recipe.MODELOPT_STATIC_IEEE)

# Blocks handled at once: small enough for a CPU's cache; a GPU wants few launches.
_CHUNK_BLOCKS = {"cpu": 8192}
_CHUNK_BLOCKS_DEFAULT = 1 << 22


# --------------------------------------------------------------------------------------------------------- amax, scales


def amax(*tensors: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Largest finite magnitude over ``dim`` (None: everything), the maximum over all ``tensors``; 0 where none is.

    Args:
        tensors: any shapes, one dtype; with ``dim`` given, the shapes left after the reduction must be equal.
        dim: dims to reduce; -1 alone is kept as size 1 (one amax per token).

    Returns:
        the tensors' dtype: [] | the remaining dims | [..., 1]. An amax is exact in any dtype.
    """
    return torch.stack([_amax_of(x, dim) for x in tensors]).amax(0)


def _amax_of(x: Tensor, dim: int | tuple[int, ...] | None) -> Tensor:
    keepdim = dim in (-1, (-1,))
    dims = tuple(range(x.ndim)) if dim is None else (dim,) if isinstance(dim, int) else dim
    if x.numel() == 0:
        return x.new_zeros(torch.empty(x.shape, device="meta").sum(dims, keepdim).shape)
    if x.ndim == 0:
        return torch.where(torch.isfinite(x), x.abs(), 0)
    if x.device.type == "cpu":
        # One pass without a temporary; NaN and inf show through and send the tensor the long way. abs is for -0.0.
        largest = torch.maximum(x.amax(dims, keepdim), -x.amin(dims, keepdim)).abs()
        if bool(torch.isfinite(largest).all()):
            return largest
    return torch.where(torch.isfinite(x), x, 0).abs().amax(dims, keepdim)


def scale_from_amax(tensor_amax: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """``(per_tensor_scale, stored_scale)``, both float32, of a tensor whose amax is ``tensor_amax`` (in its dtype)."""
    a = tensor_amax.float()
    if recipe is Recipe.ALIGNED:
        p = _power_of_two_scale(a)
        return p, p
    if recipe is Recipe.LLM_COMPRESSOR:
        tiny = torch.finfo(tensor_amax.dtype).tiny
        g = (tensor_amax.clamp(min=tiny).reciprocal() * SCALE_RANGE).float()
        g = torch.nan_to_num(g, nan=1.0, posinf=1.0, neginf=1.0)
        return g.reciprocal(), g
    p = a / torch.full_like(a, SCALE_RANGE) if recipe in _IEEE else a * _R2688
    p = torch.where(p == 0, 1.0, p)  # also where it underflows
    return p, (a if recipe is Recipe.TRANSFORMER_ENGINE else p)


def _power_of_two_scale(a: Tensor) -> Tensor:
    """2**ceil(log2(a / 2688)), clamped to [2**-116, 2**117], from the bits of ``a`` >= 0: 2688 = 1.3125 * 2**11."""
    bits = a.view(torch.int32)
    exponent = (bits >> 23) - (127 + 11) + ((bits & 0x7FFFFF) > 0x280000).int()
    exponent = exponent.clamp(formats.ALIGNED_MIN_EXPONENT, formats.ALIGNED_MAX_EXPONENT)
    return torch.where(a == 0, 1.0, ((exponent + 127) << 23).view(torch.float32))


def stored_from_scale(p: Tensor, recipe: Recipe) -> Tensor:
    """``stored_scale`` for a caller's ``per_tensor_scale``: its divisor form, its amax, or itself."""
    if recipe is Recipe.LLM_COMPRESSOR:
        return p.reciprocal()
    return _amax_from_scale(p) if recipe is Recipe.TRANSFORMER_ENGINE else p


def _amax_from_scale(p: Tensor) -> Tensor:
    return (p * SCALE_RANGE).clamp(max=_FLOAT32_MAX)


def per_tensor_scale(x: Tensor, *, recipe: Recipe = Recipe.ALIGNED, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """The scale that :func:`quantize` gives ``x``; ``dim`` as in :func:`amax`. Float32, multiplies."""
    return scale_from_amax(amax(x, dim=dim), recipe)[0]


# ---------------------------------------------------------------------------------------------------------- block_scale


def _block_scale_bytes(a: Tensor, p: Tensor, source: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """E4M3 bytes (uint8) of blocks with amax ``a`` (float32); ``source``: G, A or p, see :func:`scales`."""
    if recipe is Recipe.LLM_COMPRESSOR:
        low = a.to(dtype)
        scale = source * (low / torch.full_like(low, 6.0)).float()
        byte = scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        return torch.where(byte == 0, 0x20, byte)
    if recipe is Recipe.TRANSFORMER_ENGINE:
        scale = a * (_encode_scale_te(source) * _R6)
        return scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    if recipe in _STATIC:
        divide = recipe in _IEEE
        sixth = a / torch.full_like(a, 6.0) if divide else a * _R6
        whole = source / torch.full_like(source, 6.0) if divide else source * _R6
        scale = torch.where(sixth == 0, 1.0, sixth) * E4M3_MAX / whole
    else:
        scale = a / (6.0 * p)
        scale = torch.where((a if recipe is Recipe.ALIGNED else scale) == 0, 1.0, scale)
    return scale.clamp(E4M3_MIN_SUBNORMAL, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _encode_scale_te(tensor_amax: Tensor) -> Tensor:
    g = (torch.full_like(tensor_amax, SCALE_RANGE) / tensor_amax).clamp(max=_FLOAT32_MAX)
    return torch.where((tensor_amax == 0) | (g == 0), 1.0, g)


def decode_scale(block_scale: Tensor, p: Tensor, stored: Tensor, recipe: Recipe) -> Tensor:
    """What a code is multiplied by: float32, the shape of ``block_scale`` (float32) broadcast with ``p``."""
    if recipe is Recipe.TRANSFORMER_ENGINE:
        return (block_scale * stored) * _R2688
    return block_scale * p


# ---------------------------------------------------------------------------------------------------------------- codes


def _codes(x: Tensor, s: Tensor, p: Tensor, stored: Tensor, recipe: Recipe) -> Tensor:
    """E2M1 codes (int32) of ``x`` [16, B] float32 whose blocks (columns) have block scales ``s`` [B] float32.

    The magnitudes that neighbouring codes stand for lie on a line that bends at 2 and at 4: the code of y is the least
    of 2y, y + 2, y/2 + 4 and 7, rounded half to even. Rounded before they are added, all three are exact.
    """
    quotient = _quotient(x, s, p, stored, recipe)
    y = quotient.abs()
    codes = torch.minimum((2 * y).round_(), y.round().add_(2))
    codes = torch.minimum(codes, (0.5 * y).round_().add_(4)).clamp_(max=7).int()
    negative = (x if recipe is Recipe.ALIGNED else quotient) < 0  # not the same: a tiny quotient may become -0.0
    return codes | (negative.int() << 3)


def _quotient(x: Tensor, s: Tensor, p: Tensor, stored: Tensor, recipe: Recipe) -> Tensor:
    if recipe is Recipe.LLM_COMPRESSOR:
        return x / (s / stored)
    if recipe is Recipe.TRANSFORMER_ENGINE:
        return x * (s * _encode_scale_te(stored).reciprocal()).reciprocal().clamp(max=_FLOAT32_MAX)
    return x / (s * p)


def _grid(recipe: Recipe, device: torch.device) -> Tensor:
    """Float32 values of the codes 0..15: the bent line of :func:`_codes` read backwards.

    It is made on the device, since copying a table there would wait for the GPU.
    """
    codes = torch.arange(16, device=device)
    n = (codes & 7).float()
    magnitudes = torch.maximum(torch.maximum(0.5 * n, n - 2), 2 * n - 8)
    values = torch.where(codes < 8, magnitudes, -magnitudes)
    return values + 0.0 if recipe.value.startswith("modelopt") else values  # Model-Optimizer decodes code 8 (-0) to +0


def _look_up(grid: Tensor, codes: Tensor) -> Tensor:
    return grid.index_select(0, codes.flatten().int()).view(codes.shape)


# ------------------------------------------------------------------------------------------------- blocks of any tensor


def _per_block(scale: Tensor, x: Tensor) -> Tensor:
    """A scale [] | [E] | [..., 1] -> [] or one per block of ``x`` [..., K], flat."""
    if scale.ndim == 0:
        return scale
    if scale.ndim < x.ndim:
        scale = scale.view(*scale.shape, *(1,) * (x.ndim - scale.ndim))
    return scale.expand(*x.shape[:-1], x.shape[-1] // BLOCK_SIZE).reshape(-1)


def _chunks(n_blocks: int, device: torch.device) -> Iterator[slice]:
    size = _CHUNK_BLOCKS.get(device.type, _CHUNK_BLOCKS_DEFAULT)
    for start in range(0, n_blocks, size):
        yield slice(start, min(start + size, n_blocks))


def _pick(scale: Tensor, chunk: slice) -> Tensor:
    return scale if scale.ndim == 0 else scale[chunk]


def scales(x: Tensor, p: Tensor | None, tensor_amax: Tensor | None, recipe: Recipe) -> tuple[Tensor, Tensor, Tensor]:
    """``(per_tensor_scale, stored_scale, source)``: ``source`` is what block scales are made from.

    That is the tensor amax for the static recipes and TRANSFORMER_ENGINE, G for LLM_COMPRESSOR, else p.
    """
    if p is not None:
        p = p.float()
        stored = stored_from_scale(p, recipe)
        return p, stored, (_amax_from_scale(p) if recipe in _STATIC else stored)
    tensor_amax = amax(x) if tensor_amax is None else tensor_amax
    if recipe is Recipe.LLM_COMPRESSOR:
        tensor_amax = tensor_amax.to(x.dtype)
    p, stored = scale_from_amax(tensor_amax, recipe)
    return p, stored, (tensor_amax.float() if recipe in _STATIC else stored)


def _encode(
    x: Tensor, p: Tensor, stored: Tensor, source: Tensor, recipe: Recipe
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Yield ``(chunk, codes [16, B] int32, block scale bytes [B] uint8, decode scale [B] float32)``.

    Elements of a block run along dim 0, so that every operation with a per-block operand is contiguous.
    """
    blocks = x.reshape(-1, BLOCK_SIZE)
    p, stored, source = (_per_block(t, x) for t in (p, stored, source))
    for chunk in _chunks(blocks.shape[0], x.device):
        values = blocks[chunk].t().to(torch.float32, memory_format=torch.contiguous_format)
        pc, sc = _pick(p, chunk), _pick(stored, chunk)
        a = values.abs().amax(0)
        finite = torch.isfinite(a)
        byte = _block_scale_bytes(a, pc, _pick(source, chunk), recipe, x.dtype)
        byte = torch.where(finite, byte, formats.E4M3_NAN_BYTE)
        scale = byte.view(torch.float8_e4m3fn).float()
        mask = torch.where(finite, 15, 0).int()
        yield chunk, _codes(values, scale, pc, sc, recipe) & mask, byte, decode_scale(scale, pc, sc, recipe)


# --------------------------------------------------------------------------------------------------------------- public


def quantize(
    x: Tensor,
    per_tensor_scale: Tensor | None = None,
    *,
    tensor_amax: Tensor | None = None,
    recipe: Recipe = Recipe.ALIGNED,
) -> NVFP4Tensor:
    """Quantize ``x`` to codes and scales; the module docstring gives the arithmetic.

    Args:
        x: [..., K] bf16, fp16 or fp32, any strides, K % 16 == 0.
        per_tensor_scale: float32 [] | [E] for [E, N, K] | [..., 1]: used as given; None: from ``tensor_amax``.
        tensor_amax: amax of the scale group, the same shapes; None: the amax of ``x``.
        recipe: rounding order and zero rules.

    Returns:
        codes and scales on ``x``'s device.

    >>> quantize(torch.full((1, 16), 6.0)).block_scale
    tensor([[256.]], dtype=torch.float8_e4m3fn)
    """
    p, stored, source = scales(x, per_tensor_scale, tensor_amax, recipe)
    n_blocks = x.numel() // BLOCK_SIZE
    qdata = torch.empty(n_blocks, BLOCK_SIZE // 2, dtype=torch.uint8, device=x.device)
    scale_bytes = torch.empty(n_blocks, dtype=torch.uint8, device=x.device)
    for chunk, codes, byte, _ in _encode(x, p, stored, source, recipe):
        qdata[chunk] = (codes[::2] | (codes[1::2] << 4)).t()
        scale_bytes[chunk] = byte
    lead = x.shape[:-1]
    return NVFP4Tensor(
        qdata=qdata.view(*lead, x.shape[-1] // 2),
        block_scale=scale_bytes.view(torch.float8_e4m3fn).view(*lead, x.shape[-1] // BLOCK_SIZE),
        per_tensor_scale=p,
        recipe=recipe,
        stored_scale=stored,
    )


def dequantize(q: NVFP4Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Decode ``q`` into a tensor of its shape [..., K] in ``dtype``; one rounding to ``dtype`` at the end."""
    n_blocks = q.block_scale.numel()
    out = torch.empty(n_blocks, BLOCK_SIZE, dtype=dtype, device=q.device)
    qdata, scales = q.qdata.reshape(n_blocks, BLOCK_SIZE // 2), q.block_scale.reshape(-1)
    shaped = torch.empty(q.shape, device="meta")
    p, stored = _per_block(q.per_tensor_scale, shaped), _per_block(q.stored_scale, shaped)
    grid = _grid(q.recipe, q.device)
    for chunk in _chunks(n_blocks, q.device):
        scale = decode_scale(scales[chunk].float(), _pick(p, chunk), _pick(stored, chunk), q.recipe)
        out[chunk] = _look_up(grid, unpack_codes(qdata[chunk])) * scale[:, None]
    return out.view(q.shape)


def fake_quantize(
    x: Tensor,
    per_tensor_scale: Tensor | None = None,
    *,
    tensor_amax: Tensor | None = None,
    recipe: Recipe = Recipe.ALIGNED,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``dequantize(quantize(x, ...), dtype or x.dtype)`` without the packed tensor in between: the same bits.

    >>> fake_quantize(torch.tensor([5.1, 0.3] + [0.0] * 14))[:2]
    tensor([5.2500, 0.4375])
    """
    p, stored, source = scales(x, per_tensor_scale, tensor_amax, recipe)
    out = torch.empty(x.numel() // BLOCK_SIZE, BLOCK_SIZE, dtype=dtype or x.dtype, device=x.device)
    grid = _grid(recipe, x.device)
    for chunk, codes, _, scale in _encode(x, p, stored, source, recipe):
        out[chunk] = (_look_up(grid, codes) * scale).to(out.dtype).t()
    return out.view(x.shape)
