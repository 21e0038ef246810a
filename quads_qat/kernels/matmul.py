"""``y = (x1 + x2) @ W.T``: the GEMM of packed weights, W4A16, W4A4 and compensated, for any number of rows.

Which road is taken depends on the shape alone, by what was measured on an H200 (benchmarks/RESULTS.md): few rows
*narrow*, up to 64 *wide*, some hundred by the kernel for Hopper (elsewhere *wide*), beyond that the weight is decoded
once and cuBLAS multiplies. The bits of a row of y are the same for every number of rows that gets the same tiles from
``tiles.configuration`` (of a stream of Hopper's: and needs as many of them).
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from quads_qat.config import Recipe
from quads_qat.kernels import hopper
from quads_qat.kernels import numerics as num
from quads_qat.kernels.decode import to_tensor_core_order
from quads_qat.kernels.dequantize import dequantize
from quads_qat.kernels.hopper import Hopper
from quads_qat.kernels.launch import cdiv, next_power_of_2, scale_pointer
from quads_qat.kernels.matmul_kernels import narrow_kernel, wide_kernel
from quads_qat.kernels.tiles import Narrow, Wide, configuration

_ROWS_OF_ONE_PRODUCT = 4096  # with fewer, to write W twice costs more than to add fp32 results


@lru_cache(maxsize=64)
def _device(index: int) -> tuple[int, bool]:
    """(multiprocessors, whether programmatic dependent launch exists)."""
    if num.INTERPRETED.value:
        return 4, False
    properties = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.major >= 9


def device_of(x: Tensor) -> tuple[int, bool]:
    """(multiprocessors, whether programmatic dependent launch exists) where ``x`` lies."""
    return _device(x.device.index or 0)


_COUNTERS: dict[tuple[int, int], Tensor] = {}
_RESERVE: dict[int, Tensor] = {}
_RESERVED = 1 << 20


def counters(device: torch.device, count: int) -> Tensor:
    """``count`` int32 zeros, which a launch leaves as zeros and shares with no launch that may run beside it.

    Calls of one stream take turns and share theirs. A captured launch replays on any stream, so each gets its own from
    a reserve; once that is used up, from a memset in the graph.
    """
    if device.type == "cpu":
        return torch.zeros(count, dtype=torch.int32)
    index = device.index or 0
    if torch.cuda.is_current_stream_capturing():
        reserve = _RESERVE.get(index)
        if reserve is None or reserve.numel() < count:
            return torch.zeros(count, dtype=torch.int32, device=device)
        _RESERVE[index] = reserve[count:]
        return reserve[:count]
    if index not in _RESERVE:
        _RESERVE[index] = torch.zeros(_RESERVED, dtype=torch.int32, device=device)
        torch.cuda.current_stream(device).synchronize()  # once: graphs that take from it may replay on other streams
    key = index, torch.cuda.current_stream(device).cuda_stream
    found = _COUNTERS.get(key)
    if found is None or found.numel() < count:
        found = _COUNTERS[key] = torch.zeros(max(count, 4096), dtype=torch.int32, device=device)
    return found


def takes_order(m: int, n: int, k: int, terms: int, device: torch.device) -> bool:
    """Whether :func:`matmul` of m rows wants them in tensor-core order, and would spend a pass on it."""
    processors, on_hopper = _device(device.index or 0)[0], hopper.runs_on(device)
    return m * n > 0 and isinstance(configuration(m, n, k, terms, processors, False, on_hopper), Wide)


def matmul(
    x: Tensor,
    qdata: Tensor,
    block_scale: Tensor,
    per_tensor_scale: Tensor,
    bias: Tensor | None = None,
    *,
    second: Tensor | None = None,
    row_scale: Tensor | None = None,
    ordered: bool = False,
    recipe: Recipe = Recipe.ALIGNED,
    dtype: torch.dtype | None = None,
    config: Narrow | Wide | Hopper | None = None,
    assembly: bool = True,
) -> Tensor:
    """``(row_scale[0] * x + row_scale[1] * second) @ W.T + bias`` with W = code * block_scale * per_tensor_scale.

    Products are exact; each term is summed in fp32, then both are added (by Hopper's tiles: in one sum); the result is
    rounded once.

    Args:
        x: [M, K] bf16.
        qdata: [N, K/2] uint8.
        block_scale: [N, K/16] float8_e4m3fn.
        per_tensor_scale: [] float32.
        bias: [N] or None.
        second: another term like x, or None.
        row_scale: [terms, M] float32 or None.
        ordered: K of the terms is in tensor-core order (``decode.to_tensor_core_order``).
        recipe: of W. ALIGNED's scale is a power of two.
        dtype: of y; None: x's.
        config: instead of ``tiles.configuration``'s, for tuning.
        assembly: decode with inline assembly; plain operations give the same bits.

    Returns:
        y [M, N].
    """
    terms = 1 if second is None else 2
    (m, k), n = x.shape, qdata.shape[0]
    dtype = dtype or x.dtype
    if m * n == 0:
        return x.new_empty(m, n, dtype=dtype)
    processors, pdl = device_of(x)
    on_hopper = row_scale is None and x.dtype == dtype == torch.bfloat16 and hopper.runs_on(x.device)
    config = config or configuration(m, n, k, terms, processors, ordered, on_hopper)
    if config is None:
        return _decode_and_multiply(x, second, qdata, block_scale, per_tensor_scale, bias, row_scale, recipe, dtype)
    x, second = prepared(x, second, config, ordered, pdl)
    y = torch.empty(m, n, dtype=dtype, device=x.device)
    if isinstance(config, Hopper):
        launch_hopper(config, x, second, qdata, block_scale, per_tensor_scale, bias, None, y)
        return y
    grid = (cdiv(n, config.rows),)
    launch(config, grid, x, second, qdata, block_scale, per_tensor_scale, bias, row_scale, None, y, assembly)
    return y


@lru_cache(maxsize=1024)
def _options(
    config: Narrow | Wide,
    terms: int,
    groups: int,
    scale_per_group: bool,
    row_scale: bool,
    bias: bool,
    assembly: bool,
    pdl: bool,
) -> dict[str, object]:
    """What a kernel is compiled with, but for what depends on the shape."""
    interpreted = num.INTERPRETED.value
    options: dict[str, object] = {
        "TERMS": terms,
        "GROUPS": next_power_of_2(groups) if groups else 0,
        "SCALE_PER_GROUP": scale_per_group,
        "ROW_SCALE": row_scale,
        "BIAS": bias,
        "ASSEMBLY": assembly and not interpreted,
        "PDL": pdl,
        "DTYPE": tl.float32 if interpreted else tl.bfloat16,
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "BLOCKS": config.blocks,
        "STAGES": config.stages,
        "num_stages": config.stages,
    }
    if pdl:
        options["launch_pdl"] = True
    if isinstance(config, Narrow):
        return options | {"SLICES": config.slices, "num_warps": config.slices, "maxnreg": config.registers}
    return options | {"SPLITS": config.splits, "STACKED": config.stacked, "num_warps": config.warps}


def launch(
    config: Narrow | Wide,
    grid: tuple[int, ...],
    x: Tensor,
    second: Tensor | None,
    qdata: Tensor,
    block_scale: Tensor,
    per_tensor_scale: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    ends: Tensor | None,
    y: Tensor,
    assembly: bool,
) -> None:
    """Run a kernel; ``grid`` of the narrow one as it is, of the wide one the tiles of W (``grid[0]``) and of x."""
    terms = 1 if second is None else 2
    (m, k), n = x.shape, qdata.shape[-2]
    blocks = k // 16
    words = qdata.contiguous().view(torch.int32)
    scales = block_scale.contiguous().view(torch.uint8)
    pointers = [
        x,
        x if second is None else second,
        words,
        scales,
        scale_pointer(per_tensor_scale),
        x if row_scale is None else row_scale,
    ]
    pointers += [x if bias is None else bias.contiguous(), x if ends is None else ends, y]
    groups = 0 if ends is None else ends.numel()
    given = groups, per_tensor_scale.numel() > 1, row_scale is not None, bias is not None, assembly
    options = _options(config, terms, *given, device_of(x)[1])
    if isinstance(config, Narrow):
        assert not config.one_row or terms == 1, f"{config} has no place for a second term"
        narrow_kernel[grid](
            *pointers,
            m,
            n,
            blocks,
            groups,
            x.stride(0),
            ONE_ROW=config.one_row,
            EVEN=n % config.rows == 0 and blocks % (config.blocks * config.slices) == 0,
            RUNS=blocks % 4 == 0,
            **options,
        )
        return
    tiles = grid[0] * (grid[1] if len(grid) > 1 else cdiv(m, config.height(terms)))
    steps = cdiv(blocks, config.blocks)
    if config.splits > 1:
        size = tiles * config.splits * config.rows * config.height(terms)
        workspace, counter = torch.empty(size, dtype=torch.float32, device=x.device), counters(x.device, tiles)
    else:
        workspace = counter = y
    wide_kernel[tiles, config.splits](
        *pointers,
        workspace,
        counter,
        m,
        n,
        blocks,
        groups,
        cdiv(steps, config.splits),
        x.stride(0),
        EVEN=n % config.rows == 0 and blocks % config.blocks == 0,
        **options,
    )


def launch_hopper(
    config: Hopper,
    x: Tensor,
    second: Tensor | None,
    qdata: Tensor,
    block_scale: Tensor,
    per_tensor_scale: Tensor,
    bias: Tensor | None,
    ends: Tensor | None,
    y: Tensor,
) -> None:
    """Run the kernel for Hopper."""
    groups = 0 if ends is None else ends.numel()
    assert not (config.stream and groups), f"{config} is for linears"
    programs = hopper.programs_of(config, x.shape[0], qdata.shape[-2], x.shape[1], groups, device_of(x)[0])
    zeros = counters(x.device, programs) if config.stream else None
    operands = x, second, qdata, block_scale, per_tensor_scale, bias, ends, y
    hopper.launch(config, *operands, zeros, programs)


def prepared(
    x: Tensor, second: Tensor | None, config: Narrow | Wide | Hopper, ordered: bool, pdl: bool
) -> tuple[Tensor, Tensor | None]:
    """The terms as a kernel wants them: rows of equal strides that start at multiples of 16 bytes, and their order."""
    terms = [x] if second is None else [x, second]
    if any(t.stride() != x.stride() or t.stride(1) != 1 or t.stride(0) % 8 or t.data_ptr() % 16 for t in terms):
        terms = [t.clone(memory_format=torch.contiguous_format) for t in terms]
    x, second = terms[0], terms[1] if len(terms) == 2 else None
    return to_tensor_core_order(x, second, pdl) if isinstance(config, Wide) and not ordered else (x, second)


def _decode_and_multiply(
    x: Tensor,
    second: Tensor | None,
    qdata: Tensor,
    block_scale: Tensor,
    per_tensor_scale: Tensor,
    bias: Tensor | None,
    row_scale: Tensor | None,
    recipe: Recipe,
    dtype: torch.dtype,
) -> Tensor:
    """W decoded once, then cuBLAS; in fp32 where something follows the product."""
    aligned = recipe is Recipe.ALIGNED  # then the decoded weights are exact in bf16, else code * block_scale is
    p = per_tensor_scale if aligned else torch.ones_like(per_tensor_scale)
    w = dequantize(qdata, block_scale, p, p, recipe=Recipe.ALIGNED, dtype=torch.bfloat16)
    plain = row_scale is None and aligned and dtype == x.dtype
    if plain and (second is None or x.shape[0] >= _ROWS_OF_ONE_PRODUCT):
        if second is not None:  # one product over twice the K: both sums in fp32, one rounding
            x, w = torch.cat([x, second], 1), torch.cat([w, w], 1)
        return F.linear(x, w, None if bias is None else bias.to(dtype))
    total = torch.zeros(x.shape[0], w.shape[0], dtype=torch.float32, device=x.device)
    for i, term in enumerate([x] if second is None else [x, second]):
        part = torch.mm(term, w.t(), out_dtype=torch.float32) if x.is_cuda else term.float() @ w.float().t()
        total += part if row_scale is None else part * row_scale[i][:, None]
    if not aligned:
        total *= per_tensor_scale
    if bias is not None:
        total += bias.float()
    return total.to(dtype)
