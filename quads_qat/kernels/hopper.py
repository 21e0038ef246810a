"""Launcher of the GEMM kernel for Hopper (``hopper_kernel``).

It takes K in multiples of 256 and activations in ordinary order, and writes bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor

from quads_qat.kernels import numerics as num
from quads_qat.kernels.launch import cdiv, next_power_of_2

K_STEP = 256
"""K is a multiple of it, so that rows of block scales begin where the copy engine can begin."""


@dataclass(frozen=True)
class Hopper:
    """Tiles of the kernel for Hopper.

    Attributes:
        rows: of W: 64 or 128.
        columns: rows of x; a second term has as many.
        stages: steps of 64 elements of K of x in its ring; that of W has one more.
        warps: that multiply: 4 or 8, 64 rows each four.
        decoders: warps that decode, in two teams: 4 or 8.
        ahead: times 256 elements of K, the codes in shared memory.
        stream: every program has as many steps, where tiles may be shared; of linears only.
    """

    rows: int
    columns: int
    stages: int
    warps: int = 8
    decoders: int = 4
    ahead: int = 2
    stream: bool = False

    def height(self, terms: int) -> int:
        """Rows of y."""
        return self.columns


@lru_cache(maxsize=64)
def runs_on(device: torch.device) -> bool:
    """Whether the kernel can run there: sm_90, and Triton 3.6 or newer, whose Gluon it is written in."""
    if num.INTERPRETED.value or device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)


BOX = 64
"""The most rows of x that one copy fetches."""


def programs_of(config: Hopper, m: int, n: int, k: int, groups: int, processors: int) -> int:
    """How many programs have work: tiles (for groups, the most that any split of the rows can need), or their steps."""
    used = min(groups, m)
    tall = used + (m - used) // config.columns if groups else cdiv(m, config.columns)
    pieces = tall * cdiv(n, config.rows) * (k // K_STEP if config.stream else 1)
    return min(pieces, processors)


@lru_cache(maxsize=1024)
def options_of(config: Hopper, terms: int, groups: int, scale_per_group: bool, bias: bool) -> dict[str, object]:
    """What the kernel is compiled with, but for what depends on the shape."""
    threads = 32 * (config.warps + config.decoders)
    each = 128 if threads == 256 else 65536 // threads // 8 * 8
    registers = {4: 152, 8: 128}[config.decoders] if threads > 256 else 104
    return {
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "STAGES": config.stages,
        "AHEAD": config.ahead,
        "DECODERS": config.decoders,
        "REGISTERS": registers,
        "TERMS": terms,
        "GROUPS": next_power_of_2(groups) if groups else 0,
        "STREAM": config.stream,
        "SCALE_PER_GROUP": scale_per_group,
        "BIAS": bias,
        "PDL": True,
        "num_warps": config.warps,
        "maxnreg": each,
        "launch_pdl": True,
    }


def descriptors(config: Hopper, x: Tensor, second: Tensor | None, qdata: Tensor, block_scale: Tensor) -> list[object]:
    """What the copy engine is told of x, the second term, codes and block scales; each needs rows of 16 n bytes."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    k = x.shape[1]
    words = qdata.contiguous().view(torch.int32).view(-1, k // 8)
    scales = block_scale.contiguous().view(torch.uint8).view(-1, k // 16)
    terms = [t if t.stride(0) >= k else t.contiguous() for t in (x, x if second is None else second)]
    box = [min(BOX, config.columns), 64]
    operands = [(t, box, NVMMASharedLayout(128, 16, 2)) for t in terms]
    operands.append((words, [config.rows, 32], NVMMASharedLayout(128, 32, 2)))
    operands.append((scales, [config.rows, 16], NVMMASharedLayout(0, 8, 2)))
    aligned = [(t if t.data_ptr() % 16 == 0 else t.clone(), block, layout) for t, block, layout in operands]
    return [TensorDescriptor.from_tensor(*operand) for operand in aligned]


def launch(
    config: Hopper,
    x: Tensor,
    second: Tensor | None,
    qdata: Tensor,
    block_scale: Tensor,
    per_tensor_scale: Tensor,
    bias: Tensor | None,
    ends: Tensor | None,
    y: Tensor,
    zeros: Tensor | None,
    programs: int,
) -> None:
    """Run the kernel. ``zeros``: for a stream, an int32 for each program, which stay zeros."""
    from quads_qat.kernels.hopper_kernel import hopper_kernel

    (m, k), n = x.shape, qdata.shape[-2]
    groups = 0 if ends is None else ends.numel()
    workspace = y
    if zeros is not None:
        workspace = torch.empty(programs * config.rows * config.columns, dtype=torch.float32, device=x.device)
    hopper_kernel[(programs,)](
        *descriptors(config, x, second, qdata, block_scale),
        per_tensor_scale.contiguous(),
        x if bias is None else bias.contiguous(),
        x if ends is None else ends,
        y,
        workspace,
        y if zeros is None else zeros,
        m,
        n,
        groups,
        k // 64,
        **options_of(config, 1 if second is None else 2, groups, per_tensor_scale.numel() > 1, bias is not None),
    )
