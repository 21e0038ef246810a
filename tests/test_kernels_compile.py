"""Every kernel compiles ahead of time for sm_80, 90, 100 and 120, without a GPU and without a float8 type."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quads_qat.kernels import amax, dequantize, fake_quantize, quantize

ARCHITECTURES = (80, 90, 100, 120)
_SIZES = """n_blocks tiles per_row columns padded_columns padded_size k n blocks_k tiles_n numel groups rows k_stride
scale_stride row_stride words0 words1 words2 parts0 parts1 parts2"""
SIZES = dict.fromkeys(_SIZES.split(), "i32") | {"group_stride": "i64"}

# kernel -> types of its pointers, and its compile-time arguments
KERNELS = {
    "amax": (amax._amax_kernel, "*bf16 *bf16 *bf16 *i32", {"INFINITY": 0x7F80, "TILE": 4096}),
    "amax of fp32": (amax._amax_kernel, "*fp32 *fp32 *fp32 *i32", {"INFINITY": 0x7F800000, "TILE": 4096}),
    "amax of odd sizes": (amax._odd_amax_kernel, "*fp16 *i32", {"TILE": 1024}),
    "amax of rows": (amax._row_amax_kernel, "*bf16 *bf16", {"TILE": 2048}),
    "fake_quantize of pairs": (
        fake_quantize._pairs_kernel,
        "*bf16 *bf16 *bf16",
        {"FROM_AMAX": True, "STRIDED": True, "FOLDED": True, "TILE": 128},
    ),
    "quantize of pairs": (
        quantize._pairs_kernel,
        "*bf16 *bf16 *fp32 *u8 *u8",
        {"FROM_AMAX": True, "STRIDED": True, "SWIZZLED": True, "FOLDED": True, "TILE": 512},
    ),
}
KERNELS["dequantize to pairs"] = (dequantize._pairs_kernel, "*u8 *u8 *fp32 *bf16", {"FOLDED": False, "TILE": 128})
for recipe in range(6):
    both = {"RECIPE": recipe, "KEEPS_NEGATIVE_ZERO": recipe in (0, 4, 5)}
    KERNELS[f"fake_quantize {recipe}"] = (
        fake_quantize._kernel,
        "*bf16 *fp32 *fp32 *fp32 *fp32",
        both | {"FROM_AMAX": False, "STRIDED": True, "FOLDED": True, "TILE": 64},
    )
    KERNELS[f"fake_quantize transposed {recipe}"] = (
        fake_quantize._transposed_kernel,
        "*fp16 *fp32 *fp32 *fp32 *fp16",
        both | {"FROM_AMAX": False, "PER_EXPERT": True, "TILE": 128},
    )
    KERNELS[f"quantize {recipe}"] = (
        quantize._kernel,
        "*fp32 *fp32 *fp32 *fp32 *fp32 *u8 *u8",
        {"RECIPE": recipe, "FROM_AMAX": False, "SWIZZLED": False, "FOLDED": True, "TILE": 64},
    )
    KERNELS[f"dequantize {recipe}"] = (
        dequantize._kernel,
        "*u8 *u8 *fp32 *fp32 *bf16",
        both | {"FOLDED": True, "TILE": 64},
    )


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_compiles_for_every_architecture(name: str):
    kernel, pointers, constants = KERNELS[name]
    types = iter(pointers.split())
    signature = {a: "constexpr" if a in constants else SIZES.get(a) or next(types) for a in kernel.arg_names}
    assert next(types, None) is None
    for architecture in ARCHITECTURES:
        source = ASTSource(kernel, signature, {(kernel.arg_names.index(a),): v for a, v in constants.items()})
        ptx = triton.compile(source, target=GPUTarget("cuda", architecture, 32)).asm["ptx"]
        assert f".target sm_{architecture}" in ptx
        assert "e4m3" not in ptx, "a float8 conversion: sm_80 has none"
        assert ".ftz" not in ptx, "flushes subnormal numbers, which the reference keeps"
