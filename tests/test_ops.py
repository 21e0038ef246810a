"""``ops``, the door: what it refuses and in which words, and that its ops behave under ``torch.compile``."""

import doctest
import importlib
import re
from types import SimpleNamespace

import pytest
import torch
import torch._dynamo.testing
from bits import assert_same, assert_same_bits
from hypothesis import given
from strategies import Case, cases, layouts

from quads_qat import library, ops, packing, reference
from quads_qat.config import Backend, Recipe
from quads_qat.qtensor import NVFP4Tensor

NAN = float("nan")


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -------------------------------------------------------------------------------------------------------- the same bits


@given(cases(), layouts)
def test_ops_return_what_the_reference_returns(case: Case, layout):
    x, scales = layout(case.x), case.scales
    q, expected = ops.quantize(x, **scales), reference.quantize(case.x, **scales)
    assert_same(q, expected)
    assert_same_bits(ops.fake_quantize(x, **scales), reference.fake_quantize(case.x, **scales))
    assert_same_bits(ops.dequantize(q, torch.float32), reference.dequantize(expected, torch.float32))
    assert_same_bits(ops.amax(x), reference.amax(case.x))
    assert_same_bits(ops.amax(x, dim=-1), reference.amax(case.x, dim=-1))
    assert_same_bits(ops.per_tensor_scale(x, dim=-1), reference.per_tensor_scale(case.x, dim=-1))


@pytest.mark.parametrize("backend", [Backend.AUTO, Backend.REFERENCE, "auto", "reference", "REFERENCE"])
def test_backends_have_the_same_bits(backend):
    x = randn(4, 32)
    q = ops.quantize(x, backend=backend)
    assert_same(q, reference.quantize(x))
    assert_same_bits(ops.dequantize(q, backend=backend), reference.dequantize(q))
    assert_same_bits(ops.fake_quantize(x, backend=backend), reference.fake_quantize(x))


@pytest.mark.parametrize("recipe", Recipe)
def test_recipes_are_named_by_member_or_by_text(recipe: Recipe):
    x = randn(4, 32)
    for name in (recipe, recipe.value, recipe.name, recipe.value.upper()):
        assert_same(ops.quantize(x, recipe=name), reference.quantize(x, recipe=recipe))
        assert_same_bits(ops.per_tensor_scale(x, recipe=name), reference.per_tensor_scale(x, recipe=recipe))


def test_non_finite_input_is_refused_unless_asked_for():
    x = randn(2, 32)
    x[1, 17] = NAN
    for call in (ops.quantize, ops.fake_quantize):
        with pytest.raises(ValueError, match=r"x holds 1 NaN or inf of 64 elements .*check_finite=False"):
            call(x)
    assert_same(ops.quantize(x, check_finite=False), reference.quantize(x))
    values = ops.fake_quantize(x, check_finite=False)
    assert values[1, 16:].isnan().all()
    assert values.isnan().sum() == 16


def test_a_parameter_gives_a_plain_container():
    """No tensor of it belongs to a graph: it can be stored, deep-copied and moved."""
    q = ops.quantize(torch.nn.Parameter(randn(4, 32)))
    assert not any(t.requires_grad for t in (q.per_tensor_scale, q.stored_scale, q.qdata, q.block_scale))


def test_fake_quantize_has_no_gradient_of_its_own():
    values = ops.fake_quantize(torch.nn.Parameter(randn(4, 32)))
    with pytest.raises(RuntimeError, match="fake_quantize_ste"):
        values.sum().backward()


def test_meta_tensors_keep_shapes_and_dtypes():
    x = randn(3, 4, 32, dtype=torch.float16)
    q, meta = ops.quantize(x), ops.quantize(x.to("meta"))
    for name in ("qdata", "block_scale", "per_tensor_scale", "stored_scale"):
        real, fake = getattr(q, name), getattr(meta, name)
        assert (fake.shape, fake.dtype, fake.device.type) == (real.shape, real.dtype, "meta")
    assert ops.fake_quantize(x.to("meta")).shape == x.shape
    assert ops.dequantize(meta, torch.float32).dtype == torch.float32
    assert ops.amax(x.to("meta"), dim=(1, 2)).shape == (3,)


# ------------------------------------------------------------------------------------------------------------- refusals

X = randn(4, 32)
EXPERTS = randn(3, 4, 32)
ONE = torch.tensor(1.0)

# (arguments of quantize and fake_quantize, exception, what the message says: the rule, what it got, the way out)
WRONG = {
    "a list": (lambda: {"x": [1.0] * 16}, TypeError, r"x must be a torch\.Tensor, got list"),
    "integers": (lambda: {"x": X.int()}, TypeError, r"x must be float32.*got torch\.int32; convert it with x\.to"),
    "float64": (lambda: {"x": X.double()}, TypeError, r"x must be float32.*got torch\.float64; convert it with x\.to"),
    "no dims": (lambda: {"x": torch.tensor(1.0)}, ValueError, r"at least one dim.*got a 0-dim tensor"),
    "K % 16": (
        lambda: {"x": randn(4, 40)},
        ValueError,
        r"last dim must be a multiple of 16 .*got x\.shape=\(4, 40\); pad it with 8 zeros",
    ),
    "NaN": (
        lambda: {"x": torch.full((2, 16), NAN)},
        ValueError,
        r"holds 32 NaN or inf of 32 .*\(2, 16\).*check_finite",
    ),
    "two scales": (
        lambda: {"per_tensor_scale": ONE, "tensor_amax": ONE},
        ValueError,
        r"per_tensor_scale or tensor_amax, got both; drop one",
    ),
    "a number as scale": (lambda: {"per_tensor_scale": 1.0}, TypeError, r"must be a torch\.Tensor, got float; wrap it"),
    "a number as amax": (lambda: {"tensor_amax": 1.0}, TypeError, r"must be a torch\.Tensor, got float; wrap it"),
    "bf16 scale": (
        lambda: {"per_tensor_scale": ONE.bfloat16()},
        TypeError,
        r"per_tensor_scale must be float32, got torch\.bfloat16; convert it",
    ),
    "integer amax": (
        lambda: {"tensor_amax": torch.tensor(3)},
        TypeError,
        r"must be float32.*got torch\.int64; use",
    ),
    "another device": (
        lambda: {"per_tensor_scale": ONE.to("meta")},
        ValueError,
        r"per_tensor_scale is on meta, x on cpu; move it with per_tensor_scale\.to\(x\.device\)",
    ),
    "one scale per row of a matrix": (
        lambda: {"per_tensor_scale": torch.ones(4)},
        ValueError,
        r"\[\] .* \[E\].* or \[\.\.\., 1\].*got per_tensor_scale\.shape=\(4,\) for x\.shape=\(4, 32\); reshape",
    ),
    "scales of another stack": (
        lambda: {"x": EXPERTS, "per_tensor_scale": torch.ones(2)},
        ValueError,
        r"got per_tensor_scale\.shape=\(2,\) for x\.shape=\(3, 4, 32\)",
    ),
    "per-row scales without the last dim": (
        lambda: {"x": EXPERTS, "tensor_amax": torch.ones(3, 4)},
        ValueError,
        r"got tensor_amax\.shape=\(3, 4\) for x\.shape=\(3, 4, 32\)",
    ),
    "one scale per column": (
        lambda: {"tensor_amax": torch.ones(4, 32)},
        ValueError,
        r"got tensor_amax\.shape=\(4, 32\)",
    ),
    "no power of two": (
        lambda: {"per_tensor_scale": torch.tensor(0.75)},
        ValueError,
        r"ALIGNED needs per_tensor_scale = 2\*\*k with -116 <= k <= 117, got 0\.75; use ops\.per_tensor_scale.*round",
    ),
    "a power too small": (
        lambda: {"per_tensor_scale": torch.tensor(2.0**-117)},
        ValueError,
        r"-116 <= k <= 117, got 6\.0",
    ),
    "a power too large": (
        lambda: {"per_tensor_scale": torch.tensor(2.0**118)},
        ValueError,
        r"-116 <= k <= 117, got 3\.3",
    ),
    "one bad row": (
        lambda: {"per_tensor_scale": torch.tensor([[1.0], [-2.0], [0.5], [4.0]])},
        ValueError,
        r"ALIGNED needs .*got -2\.0",
    ),
    "a zero scale": (
        lambda: {"per_tensor_scale": torch.tensor(0.0), "recipe": "modelopt"},
        ValueError,
        r"per_tensor_scale must be finite and > 0, got 0\.0; let ops\.per_tensor_scale\(x\) compute it",
    ),
    "an infinite scale": (
        lambda: {"per_tensor_scale": torch.tensor(float("inf")), "recipe": "llm-compressor"},
        ValueError,
        r"per_tensor_scale must be finite and > 0, got inf",
    ),
    "a negative amax": (
        lambda: {"tensor_amax": torch.tensor(-1.0)},
        ValueError,
        r"tensor_amax must be finite and >= 0, got -1\.0; let ops\.amax\(x\) compute it",
    ),
    "a NaN amax": (
        lambda: {"tensor_amax": torch.tensor(NAN)},
        ValueError,
        r"tensor_amax must be finite and >= 0, got nan",
    ),
    "an unknown recipe": (
        lambda: {"recipe": "nvfp5"},
        ValueError,
        r"unknown value 'nvfp5'; choose one of aligned, mod",
    ),
    "an unknown backend": (
        lambda: {"backend": "cuda"},
        ValueError,
        r"unknown value 'cuda'; choose one of auto, ref",
    ),
}


def one_line(message: str, pattern: str) -> None:
    assert "\n" not in message
    assert re.search(pattern, message), f"{message!r} does not say {pattern!r}"


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("name", ["quantize", "fake_quantize"])
def test_wrong_arguments(name: str, what: str):
    arguments, exception, pattern = WRONG[what]
    with pytest.raises(exception) as error:
        getattr(ops, name)(**{"x": X, **arguments()})
    one_line(str(error.value), pattern)
    if "unknown" not in what:
        assert str(error.value).startswith(f"{name}: "), "it says who speaks"


@pytest.mark.parametrize(
    ("call", "exception", "pattern"),
    [
        (lambda: ops.amax(), ValueError, r"amax: give at least one tensor, got none; pass the members"),
        (lambda: ops.amax([X, X]), TypeError, r"amax: members must be torch\.Tensor, got list; unpack"),
        (lambda: ops.amax(X.int()), TypeError, r"amax: tensors must be float32.*got torch\.int32; convert"),
        (
            lambda: ops.amax(X, X.float()),
            ValueError,
            r"share dtype and device, got torch\.bfloat16 .*float32.*convert",
        ),
        (lambda: ops.amax(X, X.to("meta")), ValueError, r"share dtype and device, got .*cpu and .*meta; convert"),
        (
            lambda: ops.amax(X, dim=2),
            ValueError,
            r"amax: dim must name dims.*got dim=\[2\] for shape \(4, 32\)",
        ),
        (
            lambda: ops.amax(X, X[:2], dim=-1),
            ValueError,
            r"after reducing dim=\[-1\] must be equal, got \[\[4\], \[2\]\]",
        ),
        (lambda: ops.per_tensor_scale(X.int()), TypeError, r"got torch\.int32; convert"),
        (lambda: ops.per_tensor_scale(X, recipe="x"), ValueError, r"unknown value 'x'; choose one of aligned"),
        (
            lambda: ops.scale_from_amax(3.0),
            TypeError,
            r"scale_from_amax: tensor_amax must be .*got float; use ops",
        ),
        (
            lambda: ops.scale_from_amax(-ONE),
            ValueError,
            r"scale_from_amax: tensor_amax must be .* >= 0, got -1\.0",
        ),
        (lambda: ops.dequantize(X), TypeError, r"dequantize: q must be an NVFP4Tensor, got Tensor; quantize it first"),
        (
            lambda: ops.dequantize(ops.quantize(X), torch.int8),
            TypeError,
            r"dequantize: dtype must be .*got torch\.int8",
        ),
        (
            lambda: ops.fake_quantize(X, dtype=torch.float64),
            TypeError,
            r"fake_quantize: dtype must .*got torch\.float64",
        ),
    ],
)
def test_wrong_arguments_of_the_others(call, exception, pattern: str):
    with pytest.raises(exception) as error:
        call()
    one_line(str(error.value), pattern)


def test_a_container_refuses_parts_that_do_not_fit():
    q = ops.quantize(X)
    scales = (q.per_tensor_scale, q.recipe, q.stored_scale)
    with pytest.raises(TypeError, match=r"qdata must be uint8 and block_scale float8_e4m3fn, got torch\.int32"):
        NVFP4Tensor(q.qdata.int(), q.block_scale, *scales)
    with pytest.raises(ValueError, match=r"\[\.\.\., K/2\] and .*\[\.\.\., K/16\], got \(4, 16\) and \(4, 1\)"):
        NVFP4Tensor(q.qdata, q.block_scale[:, :1], *scales)


# ------------------------------------------------------------------------------------------------- library and compiler

QUADS = torch.ops.quads_qat
PER_EXPERT, PER_ROW = torch.tensor([1.0, 2.0, 4.0]), torch.full((4, 1), 0.5)

OPCHECKS = {
    "amax": (QUADS.amax.default, ([X, randn(2, 16)], None)),
    "amax of rows": (QUADS.amax.default, ([EXPERTS], [-1])),
    "amax of experts": (QUADS.amax.default, ([EXPERTS, EXPERTS], [1, 2])),
    "amax of experts without rows": (QUADS.amax.default, ([torch.empty(3, 0, 16)], [1, 2])),
    "scale_from_amax": (QUADS.scale_from_amax.default, (PER_EXPERT, "aligned")),
    "scale_from_amax in bf16": (QUADS.scale_from_amax.default, (PER_EXPERT.bfloat16(), "llm-compressor")),
    "quantize": (QUADS.quantize.default, (X, None, None, "aligned")),
    "quantize a view": (QUADS.quantize.default, (randn(32, 4).t(), None, ONE, "modelopt")),
    "quantize experts": (QUADS.quantize.default, (EXPERTS, PER_EXPERT, None, "aligned")),
    "quantize rows": (QUADS.quantize.default, (X, None, PER_ROW, "transformer-engine")),
    "quantize nothing": (QUADS.quantize.default, (torch.empty(0, 16), None, None, "aligned")),
    "fake_quantize": (QUADS.fake_quantize.default, (X, None, ONE, "aligned", torch.bfloat16)),
    "fake_quantize a view": (QUADS.fake_quantize.default, (randn(32, 4).t(), None, None, "modelopt", torch.float32)),
    "fake_quantize_backward": (QUADS.fake_quantize_backward.default, (X, None, ONE, "aligned", torch.bfloat16)),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name: str):
    op, args = OPCHECKS[name]
    torch.library.opcheck(op, args)


def test_opcheck_of_dequantize():
    q = ops.quantize(EXPERTS, PER_EXPERT)
    args = (q.qdata, q.block_scale, q.per_tensor_scale, q.stored_scale, "aligned", torch.float16)
    # No test_schema: torch's checker multiplies every argument, and float8 has no multiplication.
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(QUADS.dequantize.default, args, test_utils=checks)


def everything(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
    q = ops.quantize(x, tensor_amax=ops.amax(x, dim=-1))
    given_scale = ops.quantize(x, scale, recipe=Recipe.MODELOPT)
    return (
        *(q.qdata, q.block_scale, q.per_tensor_scale, q.stored_scale),
        *(given_scale.qdata, given_scale.block_scale),
        ops.dequantize(q, torch.float32),
        ops.fake_quantize(x),
        ops.fake_quantize(x, tensor_amax=ops.amax(x, x[:1]), recipe="transformer-engine"),
        ops.per_tensor_scale(x),
    )


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compiled_equals_eager(dtype: torch.dtype):
    x, scale = randn(5, 48, dtype=dtype), torch.tensor(2.0**-8)
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    for actual, expected in zip(compiled(x, scale), everything(x, scale), strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.usefixtures("fresh_compiler")
def test_a_dynamic_batch_compiles_once():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(everything, fullgraph=True, backend=counter, dynamic=True)
    scale = torch.tensor(2.0**-8)
    for rows in (3, 4, 7, 64, 5):
        x = randn(rows, 32, seed=rows)
        for actual, expected in zip(compiled(x, scale), everything(x, scale), strict=True):
            assert_same_bits(actual, expected)
    assert counter.frame_count == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_does_not_look_at_values():
    """Checks that read a tensor are eager only: compiled, NaN passes through and spoils its block."""
    x = randn(2, 32)
    x[0, 3] = NAN
    compiled = torch.compile(ops.fake_quantize, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), ops.fake_quantize(x, check_finite=False))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_keeps_its_refusals():
    with pytest.raises(Exception, match="must be a multiple of 16"):
        torch.compile(ops.fake_quantize, fullgraph=True, backend="aot_eager")(randn(4, 40))


# ------------------------------------------------------------------------------------------------------------- doctests


@pytest.mark.parametrize("module", ["config", "formats", "ops", "packing", "qtensor", "reference"])
def test_docstrings_tell_the_truth(module: str):
    failed, tried = doctest.testmod(importlib.import_module(f"quads_qat.{module}"))
    assert not failed
    assert tried or module == "qtensor"


def test_swizzled_scales_are_the_row_major_ones_rearranged():
    x = randn(2, 130, 48)
    q, (qdata, swizzled, p) = ops.quantize(x), ops.quantize_swizzled(x)
    assert_same_bits(qdata, q.qdata)
    assert_same_bits(p, q.per_tensor_scale)
    assert_same_bits(packing.unswizzle_block_scale(swizzled, 130, 3).view(torch.uint8), q.block_scale.view(torch.uint8))
    meta = ops.quantize_swizzled(x.to("meta"))
    assert [t.shape for t in meta] == [qdata.shape, swizzled.shape, p.shape]
    with pytest.raises(ValueError, match=r"must be \[..., N, K\].*use x\[None\]"):
        ops.quantize_swizzled(randn(32))


@pytest.mark.parametrize("current", [0, 1])
def test_operators_run_on_the_gpu_of_their_tensors(monkeypatch: pytest.MonkeyPatch, current: int):
    """Triton launches on the current device, whatever the tensors' is."""
    entered = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)

        def __exit__(self, *_: object) -> None:
            entered.append("left")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    call = library._undisturbed(lambda first, *args, **kwargs: (first, args, kwargs, list(entered)))
    inside = [] if current == 1 else [x.device]
    assert call(x, 2, three=3) == (x, (2,), {"three": 3}, inside)
    assert call([x]) == ([x], (), {}, inside + (["left", x.device] if inside else []))
