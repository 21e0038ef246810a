"""Contract under test: a GEMM kernel multiplies the decoded operands exactly and sums in fp32, for every shape.

On a GPU (``pytest -m gpu``), and on a CPU in Triton's interpreter, in a process of its own
(``test_kernels_interpreted.py``). Output buffers are poisoned before a kernel runs.

The bound: a product of a decoded weight (6 significant bits) and a bf16 number is exact in fp32. An fp32 sum of S
products in any order is off by at most S * u * sum|products|, u = 2**-22 for tensor cores, which keep two bits
more than fp32 and cut off; two more steps are per-tensor scale and bias. The result is rounded once, to bf16: 2**-9.
"""

from __future__ import annotations

import math

import pytest
import torch
from bits import assert_same_bits
from hopper_tiles import HOPPER_TILES, fits
from torch import Tensor

from quads_qat import gemms, ops, reference, reference_matmul
from quads_qat.config import ActivationFormat, ActivationScale, Recipe, ResidualConfig
from quads_qat.kernels import matmul as module
from quads_qat.kernels.decode import to_tensor_core_order
from quads_qat.kernels.grouped_matmul import grouped_matmul
from quads_qat.kernels.hopper import Hopper, runs_on
from quads_qat.kernels.matmul import matmul
from quads_qat.kernels.native_matmul import native_matmul
from quads_qat.kernels.tiles import Narrow, Wide, configuration
from quads_qat.qtensor import NVFP4Tensor

pytestmark = pytest.mark.gpu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = DEVICE == "cuda"


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten shows: NaN in floats, 0xff in bytes."""
    empty = torch.empty

    def poisoned(*args, **kwargs) -> Tensor:
        out = empty(*args, **kwargs)
        return out.fill_(math.nan if out.is_floating_point() else 255 % 2 ** (out.itemsize * 8 - 1))

    monkeypatch.setattr(torch, "empty", poisoned)


def weight(
    *shape: int, seed: int = 0, recipe: Recipe = Recipe.ALIGNED, dim: tuple[int, ...] | None = None
) -> NVFP4Tensor:
    """Random codes; block scales of every size, subnormal and zero ones included."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape, generator=generator)
    q = reference.quantize(rows, tensor_amax=reference.amax(rows, dim=dim), recipe=recipe)
    scales = torch.randint(0, 0x7F, q.block_scale.shape, generator=generator, dtype=torch.uint8)
    parts = q.qdata, scales.view(torch.float8_e4m3fn), q.per_tensor_scale, recipe, q.stored_scale
    return NVFP4Tensor(*parts).to(DEVICE)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def small_integers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def exact_weight(*shape: int, seed: int = 0) -> NVFP4Tensor:
    """Codes times block scales 1, 2 or 4: their sums with small integers are exact in fp32, in any order."""
    q = weight(*shape, seed=seed)
    powers = torch.tensor([0x38, 0x40, 0x48], dtype=torch.uint8)
    chosen = torch.randint(0, 3, q.block_scale.shape, generator=torch.Generator().manual_seed(seed))
    one = torch.ones((), device=DEVICE)
    return NVFP4Tensor(q.qdata, powers[chosen].view(torch.float8_e4m3fn).to(DEVICE), one, q.recipe, one)


def run(x: Tensor, q: NVFP4Tensor, bias: Tensor | None = None, **options) -> Tensor:
    """Terms x [T, M, K] times q."""
    options["second"] = x[1] if len(x) == 2 else None
    return matmul(x[0], q.qdata, q.block_scale, q.per_tensor_scale, bias, recipe=q.recipe, **options)


def exact(x: Tensor, q: NVFP4Tensor, bias: Tensor | None = None, row_scale: Tensor | None = None) -> Tensor:
    """The same product in float64."""
    w = reference.dequantize(q, torch.float32).double()
    rows = x.double() if row_scale is None else x.double() * row_scale.double()[..., None]
    y = rows.sum(0) @ w.mT
    return y if bias is None else y + bias.double()


def assert_within_bound(y: Tensor, x: Tensor, q: NVFP4Tensor, bias: Tensor | None = None) -> None:
    wanted = exact(x, q, bias)
    absolute = x.double().abs().sum(0) @ reference.dequantize(q, torch.float32).double().abs().mT
    if bias is not None:
        absolute += bias.double().abs()
    rounding = 2.0**-9 if y.dtype == torch.bfloat16 else 2.0**-24
    sums = (x.shape[0] * x.shape[2] + 2) * 2.0**-22
    error = (y.double() - wanted).abs()
    assert (error <= wanted.abs() * rounding + absolute * sums * (1 + rounding)).all(), float(error.max())


SHAPES = [(16, 16), (48, 80), (70 * 16, 64), (64, 192), (32, 272)] if GPU else [(16, 16), (48, 80), (64, 192)]
ROWS = (1, 2, 3, 8, 9, 16, 17, 33, 64, 100, 129, 300, 700) if GPU else (1, 8, 17)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("terms", [1, 2])
def test_sums_that_are_exact_have_the_right_bits(shape: tuple[int, int], m: int, terms: int):
    q, x = exact_weight(*shape), small_integers(terms, m, shape[1])
    bias = small_integers(shape[0], seed=2)
    for dtype in (torch.bfloat16, torch.float32) if GPU else (torch.bfloat16,):
        assert_same_bits(run(x, q, bias, dtype=dtype), exact(x, q, bias).to(dtype))


TILES = [
    *(Narrow(16, 8, 4, 2, 2), Narrow(32, 16, 8, 4, 3), Narrow(16, 8, 16, 1, 4), Narrow(64, 16, 8, 2, 3)),
    Narrow(16, 8, 4, 2, 2, one_row=True),
    *(Wide(64, 16, 8, 4, 3, 1), Wide(64, 16, 16, 4, 3, 4), Wide(128, 32, 8, 8, 3, 2), Wide(64, 64, 16, 4, 3, 2)),
    *(Wide(128, 128, 8, 8, 3, 1), Wide(128, 128, 8, 8, 3, 2), Wide(64, 16, 8, 4, 2, 2, stacked=True)),
]


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("terms", [1, 2])
def test_every_kind_of_tile(tiles: Narrow | Wide, terms: int):
    n, k = (272, 1088) if GPU else (80, 320)
    if terms == 1 and isinstance(tiles, Wide) and tiles.stacked:
        pytest.skip("one term is not stacked")
    if terms == 2 and isinstance(tiles, Narrow) and tiles.one_row:
        pytest.skip("one row is one term")
    m = max(1, tiles.height(terms) - 1) if isinstance(tiles, Narrow) else tiles.height(terms) + 5 if GPU else 11
    q, x, bias = exact_weight(n, k), small_integers(terms, m, k), small_integers(n, seed=2)
    assert_same_bits(run(x, q, bias, config=tiles), exact(x, q, bias).bfloat16())


@pytest.mark.skipif(not GPU, reason="minutes in the interpreter")
@pytest.mark.parametrize("shape", [(2048, 4096), (1024, 2880), (4096, 1536), (8192, 8192)])
@pytest.mark.parametrize("m", [1, 7, 16, 31, 64, 200, 512, 1024])
def test_shapes_of_models(shape: tuple[int, int], m: int):
    q = exact_weight(*shape)
    for terms in (1, 2):
        x = small_integers(terms, m, shape[1])
        assert_same_bits(run(x, q), exact(x, q).bfloat16())
        x = noise(terms, m, shape[1])
        assert_within_bound(run(x, q), x, q)


@pytest.mark.parametrize("recipe", [Recipe.ALIGNED, Recipe.MODELOPT, Recipe.LLM_COMPRESSOR, Recipe.TRANSFORMER_ENGINE])
@pytest.mark.parametrize("m", [1, 6, 20, 600])
def test_noise_is_within_the_bound(recipe: Recipe, m: int):
    if m == 600 and not GPU:
        m = 150
    q, x, bias = weight(48, 128, recipe=recipe), noise(1, m, 128), noise(48, seed=3)
    assert_within_bound(run(x, q, bias, dtype=torch.float32), x, q, bias)


def test_every_code_with_every_block_scale():
    """Row n has block scale n, element j of each block the code j; one-hot rows of x read them back. 0x7f is NaN."""
    k = 64
    codes = torch.arange(16, dtype=torch.uint8).repeat(128, k // 16)
    scales = torch.arange(128, dtype=torch.uint8)[:, None].expand(128, k // 16).contiguous()
    one = torch.ones(())
    parts = codes[:, ::2] | codes[:, 1::2] << 4, scales.view(torch.float8_e4m3fn), one, Recipe.ALIGNED, one
    q = NVFP4Tensor(*parts).to(DEVICE)
    wanted = reference.dequantize(q, torch.float32)
    for rows, tiles in ((16, Narrow(64, 16, 4, 1, 2)), (64, Wide(64, 64, 8, 4, 2, 1))):
        for start in range(0, k, rows):
            x = torch.eye(k, device=DEVICE)[start : start + rows].bfloat16()
            y = run(x[None], q, config=tiles, dtype=torch.float32)
            assert torch.isnan(y[:, 127]).all()
            assert torch.equal(y[:, :127], wanted.t()[start : start + rows, :127] + 0.0)


def test_nan_of_one_row_stays_there():
    q, x = weight(48, 128), noise(1, 5, 128)
    q.block_scale.view(torch.uint8)[7, 3] = 0x7F
    y = run(x, q)
    assert torch.isnan(y[:, 7]).all()
    assert torch.isfinite(y[:, torch.arange(48) != 7]).all()


def test_a_row_s_bits_do_not_depend_on_other_rows():
    n, k = (4096, 1024) if GPU else (48, 128)
    q = weight(n, k)
    for counts in ((2, 5, 8), (9, 16), (17, 30, 32)):
        x = noise(1, counts[-1], k)
        whole = run(x, q)
        assert_same_bits(run(x.clone(), q), whole, "twice")
        for count in counts:
            assert_same_bits(run(x[:, :count], q), whole[:count], f"{count} of {counts[-1]} rows")
        other = x.clone()
        other[:, 1:] = math.nan
        assert_same_bits(run(other, q)[:1], whole[:1], "beside NaN")


@pytest.mark.parametrize("m", [1, 4, 20])
def test_strides_and_offsets(m: int):
    q, x = weight(48, 128), noise(1, m, 128)
    wanted = run(x, q)
    views = {
        "row stride": torch.cat([x, x], -1)[..., :128],
        "odd row stride": torch.cat([x, x], -1)[..., :129].contiguous()[..., :128],
        "odd offset": torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
        "columns": x.mT.contiguous().mT,
    }
    for name, view in views.items():
        assert_same_bits(run(view, q), wanted, name)
    both = run(torch.stack([x[0], x[0]]), q)
    parts = q.qdata, q.block_scale, q.per_tensor_scale
    assert_same_bits(matmul(x[0], *parts, second=views["row stride"][0]), both, "terms of two layouts")


def test_no_rows_and_no_outputs():
    q = weight(48, 128)
    assert run(noise(1, 0, 128), q).shape == (0, 48)
    nothing = NVFP4Tensor(q.qdata[:0], q.block_scale[:0], q.per_tensor_scale, q.recipe, q.stored_scale)
    assert run(noise(1, 4, 128), nothing).shape == (4, 0)


def test_the_default_dtype_changes_nothing():
    q, x = weight(48, 128), noise(2, 20, 128)
    tiles = Wide(64, 16, 4, 4, 2, 2, stacked=True)
    wanted = run(x, q, config=tiles)
    torch.set_default_dtype(torch.bfloat16)  # as transformers does while it loads
    try:
        assert_same_bits(run(x, q, config=tiles), wanted)
    finally:
        torch.set_default_dtype(torch.float32)


def test_row_scales_multiply_each_term():
    q = weight(48, 128)
    for m in (3, 20):
        x, scale = noise(2, m, 128), torch.rand(2, m, device=DEVICE) + 0.1
        y = run(x, q, row_scale=scale, dtype=torch.float32)
        assert torch.allclose(y.double(), exact(x, q, row_scale=scale), rtol=1e-5, atol=1e-4)


def test_tensor_core_order_is_what_the_documentation_says():
    k = 192
    wanted = torch.zeros(k, dtype=torch.int16)
    for index in range(k):
        start, t, i, h, q = index // 64 * 64, index // 16 % 4, index // 8 % 2, index // 4 % 2, index % 4
        wanted[start + 32 * i + 8 * q + 2 * t + h] = index
    x = torch.arange(k, dtype=torch.int16, device=DEVICE).expand(3, k).contiguous()
    first, second = to_tensor_core_order(x, x + 1000)
    assert second is not None
    assert torch.equal(first, wanted.to(DEVICE).expand(3, k))
    assert torch.equal(second, wanted.to(DEVICE).expand(3, k) + 1000)


def test_activations_may_be_stored_in_tensor_core_order():
    q = exact_weight(48, 192)
    for m in (3, 20):
        x = small_integers(2, m, 192)
        first, second = to_tensor_core_order(x[0], x[1])
        parts = q.qdata, q.block_scale, q.per_tensor_scale
        assert_same_bits(matmul(first, *parts, ordered=True), exact(x[:1], q).bfloat16())
        assert_same_bits(matmul(first, *parts, second=second, ordered=True), exact(x, q).bfloat16())


@pytest.mark.skipif(not GPU, reason="the interpreter runs no assembly")
def test_assembly_and_plain_operations_give_the_same_bits():
    q = weight(256, 1024)
    for m in (1, 8, 64):
        x = noise(1, m, 1024)
        assert_same_bits(run(x, q, assembly=False), run(x, q))


@pytest.mark.skipif(not GPU, reason="a race needs a GPU")
@pytest.mark.parametrize("shape", [(2048, 4096), (8192, 8192)], ids=str)
def test_thousands_of_launches_give_the_same_bits(shape: tuple[int, int]):
    """What a multiplication reads may be late by chance: one launch in fifty was wrong, with tiles that none chose."""
    q = weight(*shape)
    rows = [(256, Wide(256, 128, 4, 8, 4, 2)), *((m, None) for m in (256, 128, 64, 16))]
    if runs_on(torch.device(DEVICE)):
        rows += [(200, Hopper(128, 256, 3, stream=True)), (100, Hopper(128, 128, 4, stream=True))]
    for m, tiles in rows:
        x = noise(1, m, shape[1])
        wanted, wrong = run(x, q, config=tiles), torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(2000):
            wrong += (run(x, q, config=tiles) != wanted).any()
        assert int(wrong) == 0, f"{m} rows, {tiles}"


@pytest.mark.skipif(not GPU, reason="needs CUDA graphs")
@pytest.mark.parametrize("rows", [48, 200])
def test_graphs_and_streams_share_no_counters(rows: int):
    q, xs = weight(8192, 4096), [noise(1, rows, 4096, seed=i) for i in range(4)]
    tiles = configuration(rows, 8192, 4096, 1, module.device_of(xs[0])[0], False, runs_on(torch.device(DEVICE)))
    assert isinstance(tiles, Wide) or (isinstance(tiles, Hopper) and tiles.stream and rows == 200)
    wanted = [run(x, q) for x in xs]
    graphs, results = [torch.cuda.CUDAGraph() for _ in xs], []
    for graph, x in zip(graphs, xs, strict=True):
        with torch.cuda.graph(graph):
            results.append([run(x, q) for _ in range(20)])
    for graph in graphs:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.replay()
    torch.cuda.synchronize()
    for many, one in zip(results, wanted, strict=True):
        for y in many:
            assert_same_bits(y, one)


# ------------------------------------------------------------------------------------------------------------ on Hopper


on_hopper = pytest.mark.skipif(
    not runs_on(torch.device(DEVICE)), reason="needs sm_90 and Gluon, which interprets nothing"
)


@on_hopper
@pytest.mark.parametrize("tiles", HOPPER_TILES, ids=str)
@pytest.mark.parametrize("terms", [1, 2])
def test_tiles_of_hopper(tiles: Hopper, terms: int):
    """More steps than the ring has slots, rows and columns that end inside a tile, several tiles for each program."""
    if not fits(tiles, terms):
        pytest.skip("more shared memory than there is")
    for m, n, k in ((1, 272, 1024), (tiles.columns + 5, 272, 1024), (3 * tiles.columns - 1, 137, 1024)):
        q, x, bias = exact_weight(n, k), small_integers(terms, m, k), small_integers(n, seed=2)
        y = run(x, q, bias, config=tiles)
        assert_same_bits(y, exact(x, q, bias).bfloat16())
    m, k = 150 * tiles.columns + 3, 1024 if tiles.stream else 256  # more tiles than programs
    q, x = exact_weight(272, k), small_integers(terms, m, k)
    assert_same_bits(run(x, q, config=tiles), exact(x, q).bfloat16())
    x = noise(terms, m, k)
    assert_same_bits(run(x, q, config=tiles), run(x, q, config=tiles), "twice")


@on_hopper
def test_every_code_with_every_block_scale_on_hopper():
    k = 256
    codes = torch.arange(16, dtype=torch.uint8).repeat(128, k // 16)
    scales = torch.arange(128, dtype=torch.uint8)[:, None].expand(128, k // 16).contiguous()
    one = torch.ones(())
    parts = codes[:, ::2] | codes[:, 1::2] << 4, scales.view(torch.float8_e4m3fn), one, Recipe.ALIGNED, one
    q = NVFP4Tensor(*parts).to(DEVICE)
    y = run(torch.eye(k, device=DEVICE)[None].bfloat16(), q, config=Hopper(128, 128, 3, decoders=8))
    assert torch.isnan(y[:, 127]).all()
    assert torch.equal(y[:, :127].float(), reference.dequantize(q, torch.float32).t()[:, :127] + 0.0)


# ----------------------------------------------------------------------------------------------------------- by experts


COUNTS = {
    "empty first and last": [0, 3, 0, 9, 1, 0],
    "one expert": [0, 0, 19, 0],
    "single rows": [1] * 5,
}
if GPU:
    COUNTS["many rows"] = [140, 1, 0, 23, 64, 65]
GROUPED_TILES = [
    None,
    Narrow(16, 8, 4, 2, 2),
    Narrow(16, 8, 4, 2, 2, one_row=True),
    Wide(64, 16, 8, 4, 2, 1),
    Wide(64, 32, 8, 4, 2, 2),
]
if runs_on(torch.device(DEVICE)):
    GROUPED_TILES += [tiles for tiles in HOPPER_TILES if not tiles.stream]


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("tiles", GROUPED_TILES, ids=str)
@pytest.mark.parametrize("terms", [1, 2])
def test_each_expert_multiplies_its_rows(counts: list[int], tiles: Narrow | Wide | Hopper | None, terms: int):
    n, k = (80, 192) if GPU else (24, 64)
    if terms == 2 and isinstance(tiles, Narrow) and tiles.one_row:
        pytest.skip("one row is one term")
    if isinstance(tiles, Hopper):
        n, k = 144, 512
        if not fits(tiles, terms):
            pytest.skip("more shared memory than there is")
    q = exact_weight(len(counts), n, k)
    x, bias = small_integers(terms, sum(counts), k), small_integers(len(counts), n, seed=2)
    scale = torch.exp2(torch.arange(len(counts), device=DEVICE).float() - 2)
    offs = torch.tensor(counts).cumsum(0).int().to(DEVICE)
    second = x[1] if terms == 2 else None
    y = grouped_matmul(x[0], q.qdata, q.block_scale, scale, offs, bias, second=second, config=tiles)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        own = NVFP4Tensor(q.qdata[expert], q.block_scale[expert], scale[expert], q.recipe, scale[expert])
        wanted = exact(x[:, start:end], own, bias[expert]).bfloat16()
        assert_same_bits(y[start:end], wanted, f"expert {expert}")
        start = end


@pytest.mark.skipif(not GPU, reason="minutes in the interpreter")
@pytest.mark.parametrize("shape", [(128, 1536, 2048), (128, 2048, 768), (32, 720, 2880), (8, 1024, 4096)], ids=str)
@pytest.mark.parametrize("rows", [1, 8, 16, 64, 256, 512, 1024, 2048, 4096, 32768])
@pytest.mark.parametrize("terms", [1, 2])
def test_experts_of_a_model(shape: tuple[int, int, int], rows: int, terms: int):
    """The tiles that are chosen, for every mean number of rows, and with the order that they want."""
    experts, _, k = shape
    q = exact_weight(*shape)
    chosen = torch.randint(0, experts, (rows,), generator=torch.Generator().manual_seed(rows)).sort().values
    offs = torch.bincount(chosen, minlength=experts).cumsum(0).int().to(DEVICE)
    x = small_integers(terms, rows, k)
    second = x[1] if terms == 2 else None
    y = grouped_matmul(x[0], q.qdata, q.block_scale, q.per_tensor_scale, offs, second=second)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        own = NVFP4Tensor(q.qdata[expert], q.block_scale[expert], q.per_tensor_scale, q.recipe, q.stored_scale)
        assert_same_bits(y[start:end], exact(x[:, start:end], own).bfloat16(), f"expert {expert}")
        start = end


@pytest.mark.skipif(not GPU, reason="minutes in the interpreter")
@pytest.mark.parametrize(
    "shape", [(2048, 4096), (4096, 4096), (6144, 2048), (8192, 8192), (16384, 1024), (28672, 1024)]
)
@pytest.mark.parametrize("terms", [1, 2])
def test_linears_of_models(shape: tuple[int, int], terms: int):
    q = exact_weight(*shape)
    for m in (1, 4, 8, 12, 16, 24, 32, 48, 64, 128, 200, 512, 1500):
        x = small_integers(terms, m, shape[1])
        assert_same_bits(run(x, q), exact(x, q).bfloat16(), f"{m} rows")


# ------------------------------------------------------------------------------------------------------------- the door


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("recipe", [Recipe.ALIGNED, Recipe.LLM_COMPRESSOR])
def test_ops_equal_the_reference_where_sums_are_exact(dtype: torch.dtype, recipe: Recipe):
    q = exact_weight(48, 128)
    q = NVFP4Tensor(q.qdata, q.block_scale, q.per_tensor_scale, recipe, q.stored_scale)
    x = small_integers(3, 2, 128).to(dtype)
    assert_same_bits(ops.linear_w4a16(x, q, backend="triton"), reference_matmul.linear_w4a16(x, q))


@pytest.mark.parametrize("recipe", [Recipe.ALIGNED, Recipe.MODELOPT, Recipe.TRANSFORMER_ENGINE])
@pytest.mark.parametrize("scale", ["per_token", "per_tensor", "static"])
@pytest.mark.parametrize("fraction", [None, 0.0, 0.5, 1.0])
def test_ops_of_quantized_activations_follow_the_reference(recipe: Recipe, scale: str, fraction: float | None):
    activation = ActivationFormat(scale=ActivationScale(scale), recipe=recipe)
    options = {"activation": activation, "input_amax": torch.tensor(3.0, device=DEVICE) if scale == "static" else None}
    q = weight(48, 128)
    for m in (3, 20) if GPU or recipe is Recipe.ALIGNED else (3,):
        x = noise(m, 128).float()
        if fraction is None:
            y = ops.linear_w4a4(x, q, **options, backend="triton")
            wanted = reference_matmul.linear_w4a4(x.double().float(), q, **options)
        else:
            residual = ResidualConfig(fraction=fraction)
            y = ops.residual_linear(x, q, residual, **options, backend="triton")
            wanted = reference_matmul.residual_linear(x, q, residual, **options)
        size = x.abs() @ reference.dequantize(q, torch.float32).abs().t()
        assert ((y - wanted).abs() <= 2 * 258 * 2.0**-22 * size).all()


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("grouped", [False, True])
def test_activations_are_quantized_in_the_order_that_the_gemm_reads(
    grouped: bool, terms: int, monkeypatch: pytest.MonkeyPatch
):
    """The same bits as in ordinary order, without the pass that reorders."""
    q, x = weight(*([2] if grouped else []), 48, 256, dim=(1, 2) if grouped else None), noise(20, 256)
    options: dict = {"offs": torch.tensor([9, 20], dtype=torch.int32, device=DEVICE)} if grouped else {}
    if terms == 2:
        options["residual"] = ResidualConfig(fraction=1.0)
    prefix, name = "grouped_" if grouped else "", "linear_w4a4" if terms == 1 else "residual_linear"
    function = getattr(ops, prefix + name)
    orders, write = [], gemms.activations.quantize_activation

    def spy(*arguments):
        orders.append(arguments[7])
        return write(*arguments)

    monkeypatch.setattr(gemms.activations, "quantize_activation", spy)
    got = function(x, q, **options, backend="triton")
    monkeypatch.setattr(gemms, "_wants_order", lambda *_: False)
    assert_same_bits(got, function(x, q, **options, backend="triton"))
    assert orders == [True, False]
    static = ActivationFormat(scale=ActivationScale.STATIC)  # put together from parts, in ordinary order
    monkeypatch.undo()
    assert not gemms._wants_order(x, q, static, terms, options.get("offs"))
    assert not gemms._wants_order(x[:2], q, ActivationFormat(), terms, options.get("offs"))


def test_a_weight_with_a_scale_for_each_row_is_decoded_first():
    rows = torch.randn(16, 64)
    q = reference.quantize(rows, tensor_amax=reference.amax(rows, dim=-1)).to(DEVICE)
    x = noise(3, 64)
    assert_same_bits(ops.linear_w4a16(x, q, backend="triton"), reference_matmul.linear_w4a16(x, q))
    assert_same_bits(ops.linear_w4a4(x, q, backend="triton"), ops.linear_w4a4(x, q, backend="reference"))
    residual = ResidualConfig(fraction=0.5)
    y = ops.residual_linear(x, q, residual, backend="triton")
    assert_same_bits(y, ops.residual_linear(x, q, residual, backend="reference"))


def test_grouped_ops_follow_the_reference():
    q = weight(3, 16, 64, dim=(1, 2))
    offs = torch.tensor([2, 2, 7], dtype=torch.int32, device=DEVICE)
    x, bias = noise(7, 64), noise(3, 16, seed=4)
    batch, static = (ResidualConfig(fraction=0.25, scope=scope) for scope in ("batch", "static"))
    per_tensor = ActivationFormat(scale=ActivationScale.PER_TENSOR)
    pairs = [
        (ops.grouped_linear_w4a16, {}),
        (ops.grouped_linear_w4a4, {}),
        (ops.grouped_residual_linear, {"residual": ResidualConfig(fraction=0.25)}),
        (ops.grouped_residual_linear, {"residual": batch}),
        (ops.grouped_linear_w4a4, {"activation": per_tensor}),
        (ops.grouped_residual_linear, {"residual": batch, "activation": per_tensor}),
        (ops.grouped_residual_linear, {"residual": batch, "activation": ActivationFormat(recipe=Recipe.MODELOPT)}),
        (ops.grouped_residual_linear, {"residual": static, "mask": torch.arange(64, device=DEVICE) % 4 == 0}),
        (ops.grouped_residual_linear, {"residual": static, "mask": noise(3, 64, seed=8) > 0.5}),
    ]
    for function, options in pairs:
        y = function(x, q, offs, bias=bias, backend="triton", **options)
        wanted = function(x, q, offs, bias=bias, backend="reference", **options)
        error, largest = (y.float() - wanted.float()).abs(), float(wanted.abs().max())
        assert (error <= 2.0**-7 * (wanted.float().abs() + largest)).all(), (function, options)
    strided = torch.stack([offs, torch.zeros_like(offs)], 1)[:, 0]  # every other number of memory
    for function, options in pairs:
        y = function(x, q, strided, bias=bias, backend="triton", **options)
        assert_same_bits(y, function(x, q, offs, bias=bias, backend="triton", **options))
    for mask in (None, static_mask := torch.ones(2, 64, dtype=torch.bool, device=DEVICE), static_mask.float()[0]):
        with pytest.raises(
            ValueError, match=r"grouped_residual_linear: (scope='static' needs a mask|mask must be bool)"
        ):
            ops.grouped_residual_linear(x, q, offs, static, mask=mask, backend="triton")


# ------------------------------------------------------------------------------------------------------ packed operands


@pytest.mark.skipif(GPU and torch.cuda.get_device_capability()[0] < 10, reason="needs tensor cores for NVFP4")
@pytest.mark.parametrize("shape", [(16, 16), (48, 80), (130, 272)])
@pytest.mark.parametrize("m", [1, 9, 130])
def test_packed_operands(shape: tuple[int, int], m: int):
    (n, k), q = shape, exact_weight(*shape)
    terms = [exact_weight(m, k, seed=seed) for seed in (5, 6)]
    x = torch.stack([t.qdata for t in terms])
    scales = torch.stack([t.block_scale.view(torch.uint8) for t in terms]).view(torch.float8_e4m3fn)
    row_scale = torch.exp2(torch.arange(2 * m, device=DEVICE).view(2, m) % 5 - 2.0)
    bias = small_integers(n, seed=2)
    y = native_matmul(x, scales, row_scale, q.qdata, q.block_scale, q.per_tensor_scale, bias)
    values = torch.stack([reference.dequantize(t, torch.float32) for t in terms])
    assert_same_bits(y, exact(values, q, bias, row_scale).bfloat16())
