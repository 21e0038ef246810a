"""The activation kernels compile ahead of time for sm_80, 90, 100 and 120 and keep subnormal numbers.

From sm_90 on bf16 instructions compare pairs of keys; sm_80 has none.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from quads_qat.kernels import residual, residual_batch, topk

SIZES = dict.fromkeys(["n_blocks", "row_quads", "slices", "n", "rows", "words", "chunks", "k", "groups"], "i32")
ROWS = {"PER_TOKEN": True, "NORM": 0, "N_OF_16": 0, "STORES_FIRST": True, "STORES_MASK": False, "GROUPS": 0, "ROW": 256}

CHUNKS = {"NORM": 0, "WHOLE_BLOCKS": False, "TILE": 128}

# kernel -> types of its pointers, and its compile-time arguments
KERNELS = {
    name: (
        residual._rows_kernel,
        "*bf16 *bf16 *i8 *i32 *bf16 *i8",
        ROWS | {"SELECT": getattr(residual, name.split()[0]).value} | different,
    )
    for name, different in {
        "NONE": {"SHARED": False, "LAYOUT": 1, "TILE": 256},
        "FIXED": {"SHARED": False, "LAYOUT": 2, "TILE": 256, "STORES_FIRST": False},
        "TOKEN": {"SHARED": True, "LAYOUT": 0, "TILE": 64, "STORES_MASK": True},
        "TOKEN_BLOCKS": {"SHARED": False, "LAYOUT": 1, "TILE": 256, "NORM": 2},
        "FIXED of experts": {"SHARED": False, "LAYOUT": 1, "TILE": 256, "PER_TOKEN": False, "GROUPS": 128},
        "BLOCK": {"SHARED": True, "LAYOUT": 0, "TILE": 64, "N_OF_16": 9, "PER_TOKEN": False},
    }.items()
} | {
    "scores of chunks": (
        residual_batch._chunk_scores_kernel,
        "*bf16 *bf16 *i32 *fp32",
        CHUNKS | {"IS_RESIDUAL": False, "GROUPS": 0},
    ),
    "scores of chunks of experts": (
        residual_batch._chunk_scores_kernel,
        "*fp32 *fp32 *i32 *fp32",
        CHUNKS | {"IS_RESIDUAL": True, "GROUPS": 128},
    ),
    "total scores": (
        residual_batch._total_scores_kernel,
        "*fp32 *i32 *fp32",
        {"NORM": 1, "TILE": 128, "GROUPS": 128},
    ),
    "mask": (residual_batch._mask_kernel, "*fp32 *i8", {"NORM": 0, "WHOLE_BLOCKS": False, "T": 256}),
    "mask of blocks": (residual_batch._mask_kernel, "*fp32 *i8", {"NORM": 2, "WHOLE_BLOCKS": True, "T": 256}),
}


def compile_kernel(name: str, architecture: int, **sizes: int) -> CompiledKernel:
    """``sizes``: those that are known when it is compiled, as Triton takes a one to be unless it is told not to."""
    kernel, pointers, constants = KERNELS[name]
    if "KIND" in kernel.arg_names:
        constants = constants | {"KIND": (topk.FAST if architecture >= 90 else topk.PAIRS).value}
    constants = constants | sizes
    types = iter(pointers.split())
    signature = {a: "constexpr" if a in constants else SIZES.get(a) or next(types) for a in kernel.arg_names}
    assert next(types, None) is None
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(a),): v for a, v in constants.items()})
    options = {"num_warps": 8, "enable_fp_fusion": not name.startswith("scores of chunks")}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [(name, a) for name in KERNELS for a in ((80, 90, 100, 120) if name in ("TOKEN", "BLOCK") else (80, 120))],
)
def test_kernel_compiles(name: str, architecture: int):
    compiled = compile_kernel(name, architecture)
    ptx = compiled.asm["ptx"]
    assert f".target sm_{architecture}" in ptx
    assert ".ftz" not in ptx, "flushes subnormal numbers, which the reference keeps"
    if name.startswith("scores of chunks"):
        assert "fma.rn.f32" not in ptx, "squares are rounded before they are added"
    if name == "mask":
        assert compiled.metadata.shared <= 4096, "blocks move between threads in each step of the search"


@pytest.mark.parametrize("name", KERNELS)
def test_sizes_of_one(name: str):
    """One selected channel of one block of one row: Triton makes constants of ones, which are no tensors."""
    kernel = KERNELS[name][0]
    special = [p.name for p in kernel.params if p.name in SIZES and not p.do_not_specialize]
    compile_kernel(name, 90, **dict.fromkeys(special, 1))
    for size in special:
        compile_kernel(name, 90, **{size: 1})
