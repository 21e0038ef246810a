"""Contract under test: the activation kernels give the reference's bits and masks for every input that they take.

On a GPU (``pytest -m gpu``), and on a CPU in Triton's interpreter, in a process of its own
(``test_kernels_interpreted.py``). Output buffers are poisoned before a kernel runs.
"""

from __future__ import annotations

import math

import pytest
import torch
from bits import assert_same_bits
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from strategies import cases
from torch import Tensor

from quads_qat import activations, formats, ops, reference
from quads_qat.config import ActivationFormat, ActivationScale, Recipe, ResidualConfig
from quads_qat.kernels import residual as kernels
from quads_qat.kernels import topk
from quads_qat.kernels.residual_batch import batch_mask
from quads_qat.reference_matmul import residual_mask

pytestmark = pytest.mark.gpu

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
EXAMPLES = 60 if CUDA else 12  # a kernel to compile, or the interpreter's tenth of a second, for each
PER_TOKEN = ActivationFormat()


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel leaves unwritten shows: NaN in floats, 0xff in bytes."""
    empty = torch.empty

    def poisoned(*args, **kwargs) -> Tensor:
        out = empty(*args, **kwargs)
        if out.is_meta or out.numel() == 0:
            return out
        if out.dtype == torch.bool:
            out.view(torch.uint8).fill_(255)
            return out
        return out.fill_(math.nan if out.is_floating_point() else 255 % 2 ** (out.itemsize * 8 - 1))

    monkeypatch.setattr(torch, "empty", poisoned)


def quantized(
    x: Tensor,
    residual: ResidualConfig | None,
    backend: str,
    activation: ActivationFormat = PER_TOKEN,
    input_amax: Tensor | None = None,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``ops.quantize_activation`` without its check for NaN, which only a CPU makes."""
    amax, mask = (None if t is None else t.to(DEVICE) for t in (input_amax, mask))
    return activations.quantize_activation(x.to(DEVICE), activation, residual, amax, mask, True, backend)


def assert_kernel_matches(x: Tensor, residual: ResidualConfig | None, **arguments) -> None:
    terms, mask = quantized(x, residual, "triton", **arguments)
    wanted_terms, wanted_mask = quantized(x, residual, "reference", **arguments)
    assert_same_bits(mask.view(torch.uint8), wanted_mask.view(torch.uint8), f"mask of {residual}")
    assert_same_bits(terms, wanted_terms, f"terms of {residual}, {arguments}")


def noise(rows: int, k: int, kind: str = "normal", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    if kind == "ties":
        x = torch.randint(-3, 4, (rows, k), generator=generator) * 0.25
    if kind == "blocks":  # of very different size, zeros among them
        blocks = x.view(-1, 16) * torch.exp2(torch.randint(-14, 4, (x.numel() // 16, 1), generator=generator).float())
        blocks[::5] = 0.0
        x = blocks.view(rows, k)
    if kind == "elements":
        x = x * torch.exp2(torch.randint(-100, 100, (rows, k), generator=generator).float())
    if kind == "tiny":
        x = x * 1e-38
    if kind == "huge":  # some decode to infinity
        x = (x * 3e38).clamp(-3.38e38, 3.38e38)
    if kind == "zeros":
        x = torch.zeros(rows, k)
        x[-1, ::3] = -0.0
    if kind == "not finite":
        x[0, 5], x[0, k - 1], x[-1, : k // 2] = math.nan, -math.inf, math.nan
    return x.bfloat16()


KINDS = ("normal", "ties", "blocks", "elements", "tiny", "huge", "zeros", "not finite")

few_selected = st.sampled_from([1 / 32, 0.25, 0.5, 15 / 16, 1.0])
configs = st.builds(
    ResidualConfig,
    fraction=few_selected,
    scope=st.sampled_from(["token", "batch"]),
    norm=st.sampled_from(["l2", "l1", "max"]),
    granularity=st.sampled_from([1, 1, 16]),
) | st.builds(ResidualConfig, fraction=few_selected, scope=st.just("block"))


@settings(max_examples=EXAMPLES, phases=[Phase.explicit, Phase.generate])
@given(
    case=cases([torch.bfloat16], leads=[(), (1,), (2,), (2, 1)], kinds=["own"]),
    residual=configs,
    scale=st.sampled_from([ActivationScale.PER_TOKEN, ActivationScale.PER_TENSOR]),
)
def test_terms_and_masks_equal_the_reference(case, residual: ResidualConfig, scale: ActivationScale):
    assert_kernel_matches(case.x, residual, activation=ActivationFormat(scale=scale))


SCOPES = ("token", "token in blocks", "block", "batch", "static", "none")
EVERY = [(kind, scope) for kind in KINDS for scope in SCOPES]
FEW = [(k, s) for k, s in EVERY if s == "token" or k in ("ties", "not finite") or (k == "huge" and "blocks" not in s)]


@pytest.mark.parametrize(("kind", "scope"), EVERY if CUDA else FEW)
def test_every_scope_on_every_kind_of_rows(kind: str, scope: str):
    x = noise(5, 4096, kind) if CUDA else noise(2, 48, kind)
    k = x.shape[-1]
    if scope == "none":
        assert_kernel_matches(x, None)
    elif scope == "static":
        mask = torch.rand(k, generator=torch.Generator().manual_seed(1)) < 0.4
        assert_kernel_matches(x, ResidualConfig(fraction=0.4, scope="static"), mask=mask)
    elif scope == "token in blocks":
        for norm in ("l2", "l1", "max"):
            assert_kernel_matches(x, ResidualConfig(fraction=0.4, norm=norm, granularity=16))
    else:
        assert_kernel_matches(x, ResidualConfig(fraction=0.4, scope=scope))


@pytest.mark.parametrize("n", range(1, 16) if CUDA else (1, 5, 8, 9, 15))
def test_block_scope_selects_any_number_of_channels(n: int):
    x = torch.cat([noise(1, 32, "ties", seed=n), noise(1, 32, "normal", seed=n)])
    assert_kernel_matches(x, ResidualConfig(fraction=n / 16, scope="block"))


@pytest.mark.parametrize("n", [1, 31, 32, 63])
def test_token_scope_selects_any_number_of_channels(n: int):
    x = torch.cat([noise(1, 64, kind, seed=n) for kind in ("ties", "elements")])
    assert_kernel_matches(x, ResidualConfig(fraction=n / 64))


BATCHES = [(rows, norm, g) for rows in (2, 127, 128, 129, 1030) for norm in ("l2", "l1", "max") for g in (1, 16)]
FEW_BATCHES = [(2, "l2", 1), (2, "l1", 16), (2, "max", 1), (2, "max", 16), (130, "l2", 1)]


@pytest.mark.parametrize(("rows", "norm", "granularity"), BATCHES if CUDA else FEW_BATCHES)
def test_batch_scope_adds_rows_in_the_contract_s_order(rows: int, norm: str, granularity: int):
    # rows repeat few values: sums of many channels agree up to the order of addition, which decides
    k = 2048 if CUDA else 32
    x = noise(4, k, seed=rows).repeat(rows, 1)[:rows]
    x[:, ::2] = x[:, 1::2].flip(0)
    config = ResidualConfig(fraction=0.4, scope="batch", norm=norm, granularity=granularity)  # pyright: ignore[reportArgumentType]
    q1 = reference.fake_quantize(x, tensor_amax=reference.amax(x, dim=-1))
    arguments = {"n": config.selected(k // granularity), "norm": ("l2", "l1", "max").index(norm)}
    mask = batch_mask(x.to(DEVICE), q1.to(DEVICE), **arguments, whole_blocks=granularity == 16)
    wanted = residual_mask(x.float() - q1.float(), config)
    assert wanted is not None
    assert mask.tolist() == wanted.tolist()


# rows of each expert: none, one, exactly a chunk, a chunk and a row
SOME_ENDS = ([0, 1, 1, 130, 130], [128, 257, 258, 258], [1], [7, 7], [0, 0, 3])
MANY_ENDS = (*SOME_ENDS, [i * i // 3 for i in range(61)], list(range(1, 130)))


def grouped(x: Tensor, ends: list[int], wanted) -> list[Tensor]:
    """``wanted(rows, expert)`` of each expert that has rows."""
    starts = [0, *ends[:-1]]
    return [wanted(x[a:b], e) for e, (a, b) in enumerate(zip(starts, ends, strict=True)) if b > a]


@pytest.mark.parametrize("ends", MANY_ENDS if CUDA else SOME_ENDS, ids=str)
@pytest.mark.parametrize(
    ("norm", "granularity"), [("l2", 1), ("l2", 16), ("l1", 1), ("max", 16)] if CUDA else [("l2", 1), ("max", 16)]
)
@pytest.mark.parametrize("is_residual", [False, True])
def test_batch_scope_ranks_the_rows_of_each_expert_apart(ends: list[int], norm: str, granularity: int, is_residual):
    k = 512 if CUDA else 32
    x = noise(4, k, seed=len(ends)).repeat(ends[-1], 1)[: ends[-1]]
    x[:, ::2] = x[:, 1::2].flip(0)
    x[0] *= 2.0**-70  # the square of a residual underflows: an expert with this row alone ranks by magnitude
    config = ResidualConfig(fraction=0.4, scope="batch", norm=norm, granularity=granularity)  # pyright: ignore[reportArgumentType]
    q1 = reference.fake_quantize(x, tensor_amax=reference.amax(x, dim=-1))
    r = x.float() - q1.float()
    arguments = {"n": config.selected(k // granularity), "norm": ("l2", "l1", "max").index(norm)}
    operands = (r.to(DEVICE), None) if is_residual else (x.to(DEVICE), q1.to(DEVICE))
    offs = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    masks = batch_mask(*operands, offs, **arguments, whole_blocks=granularity == 16)
    assert masks.shape == (len(ends), k)
    used = [e for e, end in enumerate(ends) if end > ([0, *ends][e])]
    wanted = grouped(r, ends, lambda rows, _: residual_mask(rows, config))
    assert masks[used].tolist() == torch.stack(wanted).tolist()


TOGETHER = [
    (dtype, kind, scope, scale)
    for dtype, kind in (("bfloat16", "normal"), ("bfloat16", "not finite"), ("float32", "blocks"), ("float16", "ties"))
    for scope in ("batch", "batch in blocks", "batch of all", "token", "static", "none")
    for scale in ("per_token", "per_tensor")
]
FEW_TOGETHER = [c for i, c in enumerate(TOGETHER) if i % 7 == 0 or (c[2] == "batch" and c[1] in ("normal", "blocks"))]


@pytest.mark.parametrize(("dtype_name", "kind", "scope", "scale"), TOGETHER if CUDA else FEW_TOGETHER)
def test_experts_are_quantized_together_as_each_by_itself(dtype_name: str, kind: str, scope: str, scale: str):
    ends, k = ([200, 200, 201, 1000], 2048) if CUDA else ([2, 2, 3, 6], 64)
    x = noise(ends[-1], k, kind).to(getattr(torch, dtype_name))
    x[: ends[0]] *= 4  # scales differ between experts
    mask = torch.rand(len(ends), k, generator=torch.Generator().manual_seed(1)) < 0.3 if scope == "static" else None
    residual = {
        "batch": ResidualConfig(fraction=0.3, scope="batch"),
        "batch in blocks": ResidualConfig(fraction=0.5, scope="batch", granularity=16),
        "batch of all": ResidualConfig(fraction=1.0, scope="batch"),
        "token": ResidualConfig(fraction=0.3),
        "static": ResidualConfig(fraction=0.3, scope="static"),
        "none": None,
    }[scope]
    activation = ActivationFormat(scale=ActivationScale(scale))

    def of_expert(rows: Tensor, expert: int) -> Tensor:
        own = None if mask is None else mask[expert]
        return activations.quantize_activation(rows, activation, residual, None, own, False, "reference")[0]

    wanted = torch.cat(grouped(x, ends, of_expert), 1)
    offs = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    own = None if mask is None else mask.to(DEVICE)
    for ordered in (False, True):
        options = activation, residual, None, own, False, "triton", ordered, offs
        terms, _ = activations.quantize_activation(x.to(DEVICE), *options)
        expected = activations._in_tensor_core_order(wanted) if ordered else wanted
        assert_same_bits(terms, expected.to(DEVICE), f"ordered: {ordered}")


@pytest.mark.parametrize("select", ["NONE", "FIXED", "TOKEN", "TOKEN_BLOCKS", "BLOCK"])
@pytest.mark.parametrize(("tile", "layout"), [(2, 0), (4, 1)] if CUDA else [(4, 1)])
def test_programs_that_share_a_row_give_the_bits_of_one(select: str, tile: int, layout: int):
    x = noise(1, 6 * 16, "ties").to(DEVICE)
    mask = torch.arange(96, device=DEVICE) % 3 == 0
    number = getattr(kernels, select).value
    arguments = {"select": number, "n": 3, "mask": mask, "return_mask": number > 0}
    whole, wanted = kernels.rows(x, **arguments, config=(8, 1, 0))
    shared, found = kernels.rows(x, **arguments, config=(tile, 1, layout))
    assert_same_bits(shared, whole)
    if wanted is not None and found is not None:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("tile", [4, 8])
def test_tensor_core_order(tile: int):
    """Number 16 t + 8 i + 4 h + q of a run of 64 lies at 32 i + 8 q + 2 t + h."""
    x = noise(1, 5 * 64).to(DEVICE)
    arguments = {"select": kernels.ALL.value, "return_mask": True}
    plain, _ = kernels.rows(x, **arguments)
    ordered, mask = kernels.rows(x, **arguments, ordered=True, config=(tile, 1, 0))
    runs = plain.view(2, 1, 5, 4, 2, 2, 4)  # t, i, h, q
    assert_same_bits(ordered, runs.permute(0, 1, 2, 4, 6, 3, 5).reshape(plain.shape))
    assert mask is not None
    assert mask.all()


@pytest.mark.parametrize("scope", ["token", "block", "batch"])
def test_terms_in_tensor_core_order_have_the_reference_s_bits(scope: str):
    x, residual = noise(2, 64, "ties").to(DEVICE), ResidualConfig(fraction=0.3, scope=scope)
    both = [
        activations.quantize_activation(x, PER_TOKEN, residual, None, None, False, backend, ordered=True)[0]
        for backend in ("triton", "reference")
    ]
    assert_same_bits(*both)


def test_counting_without_bf16_instructions_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "kind_of_pairs", lambda device: topk.PAIRS.value)
    for kind in KINDS if CUDA else ["ties", "not finite"]:
        assert_kernel_matches(noise(2, 256 if CUDA else 32, kind), ResidualConfig(fraction=0.3))


@pytest.mark.parametrize("start", [0, 1, 100, 0x7F80, 0x7FFF, -5])
@pytest.mark.parametrize("total", [8, 5000 if CUDA else 200])
def test_a_search_may_begin_anywhere(start: int, total: int, monkeypatch: pytest.MonkeyPatch):
    """The guess of the largest residual comes from the scale; a tensor's scale may be far from a row's."""
    x = noise(1, 16 * max(1, total // 16), "blocks")
    amax = torch.tensor(2688.0 * 2.0 ** (start % 120 - 60)).bfloat16()
    got = [
        kernels.rows(x.to(DEVICE), amax=amax.to(DEVICE), select=kernels.TOKEN.value, n=n, return_mask=True)
        for n in (1, 7)
    ]
    q1 = reference.fake_quantize(x, tensor_amax=amax)
    order = torch.sort((x.float() - q1.float()).abs(), descending=True, stable=True).indices
    for (_, mask), n in zip(got, (1, 7), strict=True):
        assert mask is not None
        assert mask[0].cpu().nonzero().flatten().tolist() == sorted(order[0, :n].tolist())


LAYOUTS = {
    "row stride": lambda: noise(3, 96)[:, 16:64],
    "odd offset": lambda: noise(3, 32).flatten()[1:-31].view(2, 32),
    "columns": lambda: noise(32, 2).t(),
    "expanded": lambda: noise(1, 32).expand(2, 32),
    "rank 3": lambda: noise(4, 32).view(2, 2, 32),
    "rank 1": lambda: noise(1, 32)[0],
    "no rows": lambda: noise(1, 32)[:0],
    "an odd number of blocks": lambda: noise(2, 48),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str):
    for scope in ("block", "batch"):
        assert_kernel_matches(LAYOUTS[layout](), ResidualConfig(scope=scope))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", list(ActivationScale))
@pytest.mark.parametrize("recipe", [Recipe.ALIGNED, Recipe.TRANSFORMER_ENGINE, Recipe.LLM_COMPRESSOR])
def test_other_dtypes_recipes_and_scales(recipe: Recipe, scale: ActivationScale, dtype: torch.dtype):
    x = noise(3, 64).to(dtype) * 1.37
    amax = torch.tensor(2.5, dtype=dtype)  # it saturates
    for residual in (None, ResidualConfig(fraction=0.3), ResidualConfig(fraction=0.5, scope="block")):
        activation = ActivationFormat(scale=scale, recipe=recipe)
        assert_kernel_matches(x, residual, activation=activation, input_amax=amax)


def test_a_row_does_not_depend_on_others_nor_on_their_number():
    x = noise(40 if CUDA else 3, 512 if CUDA else 32, "ties").to(DEVICE)
    for scope in ("token", "block"):
        residual = ResidualConfig(fraction=0.3, scope=scope)
        terms, _ = ops.quantize_activation(x, residual=residual, backend="triton")
        for row in (0, len(x) - 1):
            alone, _ = ops.quantize_activation(x[row : row + 1], residual=residual, backend="triton")
            assert_same_bits(alone[:, 0], terms[:, row])


def test_every_bf16_element_beside_every_block_scale():
    """All magnitudes from 2**-14 to 2688 beside an amax for each of the 126 block scales; p = 1: both terms."""
    if not CUDA:
        pytest.skip("3 million elements: too many for the interpreter; the GPU run covers it")
    for x in every_element():
        amax = torch.tensor(2688.0).bfloat16()
        terms, _ = kernels.rows(x.cuda(), amax=amax.cuda(), select=kernels.ALL.value)
        first = reference.fake_quantize(x, torch.ones(()))
        second = reference.fake_quantize(x.float() - first.float(), torch.tensor(0.25), dtype=torch.bfloat16)
        assert_same_bits(terms.cpu(), torch.stack([first, second]))


def every_element():
    magnitudes = torch.arange(0x7F80, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    magnitudes = magnitudes[(magnitudes >= 2.0**-14) & (magnitudes <= 2688)]
    elements = torch.cat([magnitudes, -magnitudes])
    elements = torch.cat([elements, elements.new_zeros(-len(elements) % 15)]).view(-1, 15)
    for s in formats.E4M3_MAGNITUDES[1:]:
        amax = torch.tensor(6 * s).bfloat16()
        yield torch.cat([amax.expand(len(elements), 1), torch.where(elements.abs() <= amax, elements, 0)], 1)


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("scope", ["token", "batch", None])
def test_the_operator_traces_with_the_shapes_that_it_returns(scope: str | None, backend: str):
    x = noise(2, 32).to(DEVICE)
    arguments = (x, None, None, "aligned", "per_token", scope, 0.5, "l2", 1, True, backend)
    torch.library.opcheck(
        torch.ops.quads_qat.quantize_activation.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
