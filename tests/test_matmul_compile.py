"""The GEMM kernels compile ahead of time for every architecture, and what makes them fast is in what is compiled.

No GPU is needed to see it: a load that is not asynchronous, or a change of layout in the hot loop, costs more than any
tuning gains, and comes in silently with an innocent change of the source.
"""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler", allow_module_level=True)

import sass
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quads_qat.kernels.hopper import BOX, Hopper, options_of
from quads_qat.kernels.matmul import _options
from quads_qat.kernels.matmul_kernels import narrow_kernel, wide_kernel
from quads_qat.kernels.native_matmul import native_kernel
from quads_qat.kernels.tiles import Narrow, Wide, configuration, grouped_configuration

OPERANDS = "*bf16 *bf16 *i32 *u8 *fp32 *fp32 *bf16 *i32 *bf16"
LAUNCH = ("num_stages", "num_warps", "launch_pdl", "maxnreg")


def compiled(
    kernel: Any, types: str, options: dict[str, Any], architecture: int, unaligned: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The stages of a kernel whose pointers and sizes are multiples of 16, but for those named."""
    constants = {name: value for name, value in options.items() if name not in LAUNCH}
    left = iter(types.split())
    signature = {name: "constexpr" if name in constants else next(left) for name in kernel.arg_names}
    assert next(left, None) is None
    place = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    given = [name for name in signature if name not in (*constants, *unaligned, "m")]
    aligned = {place[name]: [["tt.divisibility", 16]] for name in given}
    source = ASTSource(kernel, signature, {place[name]: value for name, value in constants.items()}, aligned)
    launch = {name: options[name] for name in LAUNCH if options.get(name) is not None}
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=launch).asm


def narrow(
    tiles: Narrow,
    architecture: int = 90,
    terms: int = 1,
    groups: int = 0,
    unaligned: tuple[str, ...] = (),
    **extra: Any,
) -> dict[str, Any]:
    options = _options(tiles, terms, groups, False, False, False, True, architecture >= 90)
    options = options | {"ONE_ROW": False, "EVEN": True, "RUNS": True} | extra
    return compiled(narrow_kernel, f"{OPERANDS} i32 i32 i32 i32 i32", options, architecture, unaligned)


def wide(
    tiles: Wide,
    architecture: int = 90,
    terms: int = 1,
    groups: int = 0,
    unaligned: tuple[str, ...] = (),
    **extra: Any,
) -> dict[str, Any]:
    options = _options(tiles, terms, groups, False, False, False, True, architecture >= 90) | {"EVEN": True} | extra
    return compiled(wide_kernel, f"{OPERANDS} *fp32 *i32 i32 i32 i32 i32 i32 i32", options, architecture, unaligned)


def hopper(tiles: Hopper, terms: int = 1, groups: int = 0) -> dict[str, Any]:
    """The kernel for Hopper, as ``compiled``; descriptors of tensors stand for the pointers of the operands."""
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    from quads_qat.kernels.hopper_kernel import hopper_kernel

    options = options_of(tiles, terms, groups, groups > 0, True)
    constants = {name: value for name, value in options.items() if name not in LAUNCH}
    x = f"tensordesc<bf16[{min(BOX, tiles.columns)}, 64],{NVMMASharedLayout(128, 16, 2)!r}>"
    words = f"tensordesc<i32[{tiles.rows}, 32],{NVMMASharedLayout(128, 32, 2)!r}>"
    scales = f"tensordesc<u8[{tiles.rows}, 16],{NVMMASharedLayout(0, 8, 2)!r}>"
    types = iter(
        [x, x, words, scales, *["*fp32", "*bf16", "*i32", "*bf16", "*fp32", "*i32", "i32", "i32", "i32", "i32"]]
    )
    names = hopper_kernel.arg_names
    signature = {name: "constexpr" if name in constants else next(types) for name in names}
    place = {name: (i,) for i, name in enumerate(names)}
    aligned = {place[name]: [["tt.divisibility", 16]] for name in names if name.endswith("_ptr") or name == "n"}
    source = GluonASTSource(hopper_kernel, signature, {place[name]: v for name, v in constants.items()}, aligned)
    launch = {name: options[name] for name in LAUNCH if options.get(name) is not None}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch).asm


@pytest.mark.skipif(find_spec("triton.experimental.gluon") is None, reason="needs Gluon")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("terms", [1, 2])
def test_on_hopper_some_warps_decode_while_others_multiply(terms: int, stream: bool):
    asm = hopper(Hopper(128, 128, 3, stream=stream), terms, groups=0 if stream else 8)
    multiply, decode = asm["ttgir"].split("partition0", 1)
    loop = re.search(r"scf\.for %t (.*?)scf\.yield %\S+#0", multiply, re.DOTALL)
    assert loop, "no loop over K"
    assert loop.group(1).count("isAsync = true") == terms
    assert f"pendings = {terms}" in loop.group(1), "one step stays in flight while the next is waited for"
    assert "tt.load" not in loop.group(1)
    assert loop.group(1).count("async_tma_copy_global_to_local") == 2 * terms, "x is asked for while a step multiplies"
    assert decode.count("async_tma_copy_global_to_local") == 4, "codes and block scales, the first and the next"
    assert "ld.shared.v4" in asm["ptx"]
    assert "st.shared.v4" in asm["ptx"], "a word of codes is one store of 16 bytes"
    assert "stmatrix" in asm["ptx"], "tiles of y.T are transposed on the way out"
    kinds = ("WARPGROUP.DEPBAR", "BAR.SYNC", "SYNCS.ARRIVE")
    order = [opcode for opcode, _ in sass.instructions(asm["cubin"]) if opcode.startswith(kinds)]
    waits = [i for i, opcode in enumerate(order) if opcode.startswith("WARPGROUP.DEPBAR")]
    assert len(waits) == 2
    if stream:
        opcodes = [opcode for opcode, _ in sass.instructions(asm["cubin"])]
        assert not any(opcode.startswith(("STL", "LDL")) for opcode in opcodes), "a sum of parts does not fit registers"
        left = next(i for i, opcode in enumerate(opcodes) if opcode.startswith("REDG"))
        assert any(opcode.startswith("MEMBAR") for opcode in opcodes[left - 20 : left]), "told before it is there"
    for i in waits:  # each warpgroup waits for its own (github.com/triton-lang/triton/issues/11047)
        assert order[i + 1].startswith("BAR.SYNC"), "a slot is given back before all have multiplied from it"
        assert order[i + 2].startswith("SYNCS.ARRIVE")


@pytest.mark.parametrize("architecture", [80, 90, 100, 120])
def test_kernels_compile_for_every_architecture(architecture: int):
    few = narrow(Narrow(16, 16, 8, 2, 3), architecture, terms=2, groups=8, EVEN=False, BIAS=True, ROW_SCALE=True)
    many = wide(Wide(64, 32, 8, 4, 2, 2), architecture, terms=2, EVEN=False, BIAS=True, ROW_SCALE=True)
    for asm in (few, many):
        assert f".target sm_{architecture}" in asm["ptx"]
        assert ".ftz" not in asm["ptx"], "flushes subnormal numbers, which codes and small block scales are"


def hot_loop(asm: dict[str, Any]) -> str:
    """The first loop of TTGIR: the one over K."""
    body = re.search(r"scf\.for (.*?) scf\.yield", asm["ttgir"], re.DOTALL)
    assert body, "no loop"
    return body.group(1)


@pytest.mark.parametrize("one_row", [True, False])
@pytest.mark.parametrize("terms", [1, 2])
def test_few_rows_stream_through_an_undisturbed_loop(one_row: bool, terms: int):
    if one_row and terms == 2:
        pytest.skip("a vector is one term")
    asm = narrow(Narrow(16, 8, 16, 2, 3), terms=terms, ONE_ROW=one_row)
    loop = hot_loop(asm)
    assert loop.count("async_copy_global_to_local") == 3, "words, scales and activations, all asynchronous"
    assert "tt.load" not in loop
    assert "convert_layout" not in loop
    assert "mma.sync" in asm["ptx"]
    wide_copies = re.findall(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], 0x([0-9a-f]+)", asm["ptx"])
    assert wide_copies.count("10") > wide_copies.count("8") + wide_copies.count("4"), "16 bytes a copy but for scales"


def test_more_rows_use_wgmma_on_weights_in_registers():
    asm = wide(Wide(128, 64, 8, 8, 3, 1))
    loop = hot_loop(asm)
    assert loop.count("async_copy_global_to_local") == 3
    assert "tt.load" not in loop
    assert asm["ptx"].count("wgmma.mma_async") >= 8
    assert re.search(r"warp_group_dot %\w+, .*dot_op<\{opIdx = 0", loop), "the weights are in registers"
    assert "shfl.sync" not in asm["ptx"], "a decoded tile changes its layout"


IN_USE = [
    *((configuration(m, 8192, 8192, 1, 132, False), 1, 0) for m in (16, 64, 128, 256)),
    *((configuration(m, 8192, 8192, 2, 132, True), 2, 0) for m in (8, 32)),
    *((grouped_configuration(m, 1536, 2048, 128, 1, False), 1, 128) for m in (2048,)),
    (Wide(256, 128, 4, 8, 4, 2), 1, 0),  # was wrong in one launch of fifty
]


@pytest.mark.parametrize(("tiles", "terms", "groups"), IN_USE, ids=str)
def test_no_register_is_written_that_a_multiplication_in_flight_reads(tiles: Wide, terms: int, groups: int):
    """Nothing else waits for it: where a tensor core is late, it multiplies by weights of the next step."""
    assert isinstance(tiles, Wide)
    bodies = sass.loops(sass.instructions(wide(tiles, terms=terms, groups=groups)["cubin"]))
    assert len(bodies) == 1
    assert sass.overwritten(bodies[0]) == []
    order = [opcode for opcode, _ in bodies[0] if opcode.startswith(("WARPGROUP.DEPBAR", "BAR.SYNC", "LDGSTS"))]
    copies = order[order.index(next(opcode for opcode in order if opcode.startswith("LDGSTS"))) :]
    assert all(opcode.startswith("LDGSTS") for opcode in copies), "all copies come last"
    assert order[-len(copies) - 1].startswith("BAR.SYNC"), (
        "behind a barrier: another warp may still multiply from there"
    )
    assert order[-len(copies) - 2].startswith("WARPGROUP.DEPBAR")


def test_a_register_that_is_written_too_early_is_found():
    group = [("HGMMA.64x16x16.F32.BF16", "R24, R40, gdesc[UR4], R24, gsb0")]
    for left, wrong in (("0x0", 0), ("0x1", 3)):
        body = [*group, ("WARPGROUP.DEPBAR.LE", f"gsb0, {left}"), ("LDS.64", "R42, [R9]")]
        assert len(sass.overwritten(body)) == wrong
    assert sass.overwritten([*group, ("LDS.64", "R44, [R9]"), ("STS", "R40, R41")]) == []


@pytest.mark.parametrize("kernel", ["narrow", "wide"])
def test_rows_of_block_scales_that_end_anywhere_are_copied_asynchronously(kernel: str):
    """K = 2880: 180 block scales a row are no multiple of 16."""
    if kernel == "narrow":
        asm = narrow(Narrow(32, 8, 16, 1, 2), EVEN=False, unaligned=("blocks",))
    else:
        asm = wide(Wide(64, 16, 16, 4, 3, 1), EVEN=False, unaligned=("blocks",))
    loop = hot_loop(asm)
    assert loop.count("async_copy_global_to_local") == 3
    assert "tt.load" not in loop


@pytest.mark.parametrize("architecture", [100, 120])
def test_block_scaled_tensor_cores_multiply_packed_operands(architecture: int):
    options = {"TERMS": 2, "ROWS": 128, "COLUMNS": 128, "STEP": 256, "STAGES": 3, "BIAS": True, "num_warps": 4}
    types = "*u8 *u8 *fp32 *u8 *u8 *fp32 *bf16 *bf16 i32 i32 i32"
    ptx = compiled(native_kernel, types, options, architecture)["ptx"]
    instruction = {100: r"tcgen05\.mma.*kind::mxf4nvf4\.block_scale\.scale_vec::4X", 120: r"mma\.sync.*mxf4nvf4.*ue4m3"}
    assert re.search(instruction[architecture], ptx)


def test_operand_types_of_the_options():
    options = _options(Narrow(16, 8, 16, 2, 3), 1, 0, False, False, False, True, True)
    assert options["DTYPE"] is tl.bfloat16
    assert options["ASSEMBLY"] is True
