"""Contract under test: ``update_weights`` gives a rollout the bits of a fresh conversion in place, or says what is off.

"Fresh" is ``convert(copy of the trainer, "w4a4_residual")``. What is refused changes no layer by half.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from small_modules import ListModel, fill, linears
from tiny_models import tiny_inputs, tiny_model
from torch import Tensor, nn

import quads_qat as qq
from quads_qat import names
from quads_qat.config import Recipe
from quads_qat.conversion import conversion_of
from quads_qat.residual import PackedModule

Stream = list[tuple[str, Tensor]]


@cache
def _trainer(arch: str, seed: int, recipe: str) -> nn.Module:
    model = fill(ListModel(), seed).bfloat16() if arch == "list" else tiny_model(arch, seed=seed)
    return qq.convert(model, "w4a16", recipe=recipe)


@cache
def _rollout(arch: str, seed: int, recipe: str) -> nn.Module:
    return qq.convert(trainer(arch, seed, recipe), "w4a4_residual")


def trainer(arch: str = "qwen3_moe", seed: int = 1, recipe: str = "aligned") -> nn.Module:
    return copy.deepcopy(_trainer(arch, seed, recipe))


def rollout(arch: str = "qwen3_moe", seed: int = 0, recipe: str = "aligned") -> Any:
    return copy.deepcopy(_rollout(arch, seed, recipe))


def fresh(arch: str = "qwen3_moe", seed: int = 1, recipe: str = "aligned") -> dict[str, Tensor]:
    """The state of a rollout that was never synced. Read only."""
    return _rollout(arch, seed, recipe).state_dict()


@cache
def fresh_logits(arch: str = "qwen3_moe", seed: int = 1) -> Tensor:
    return logits(_rollout(arch, seed, "aligned"))


def on_disk(model: nn.Module) -> dict[str, Tensor]:
    """The master weights in the names of a BF16 checkpoint."""
    return names.disk_state(model, {n: t for n, t in model.state_dict().items() if n in names.state_dict_names(model)})


FORMS: dict[str, Callable[[nn.Module], Iterable[tuple[str, Tensor]]]] = {
    "modelopt": lambda model: qq.export_weights(model, "modelopt"),
    "compressed-tensors": lambda model: qq.export_weights(model, "compressed-tensors"),
    "the model's names": lambda model: model.state_dict().items(),
    "checkpoint names": lambda model: on_disk(model).items(),
}
forms = pytest.mark.parametrize("form", FORMS)


def packed(model: nn.Module | None = None, dialect: str = "modelopt") -> Stream:
    return _packed(dialect) if model is None else list(qq.export_weights(model, dialect))


@cache
def _packed(dialect: str) -> Stream:
    return list(qq.export_weights(trainer(), dialect))


def state(model: nn.Module) -> dict[str, Tensor]:
    """Also of a rollout whose sync failed, which gives none to users."""
    with conversion_of(model, "")[1].sync.readable():
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def addresses(model: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


def assert_same_state(actual: dict[str, Tensor], expected: dict[str, Tensor], only: str = "") -> None:
    __tracebackhide__ = True
    assert actual.keys() == expected.keys()
    assert any(only in name for name in expected)
    for name, tensor in expected.items():
        if only in name:
            assert_same_bits(actual[name], tensor, name)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return (
            model(torch.ones(2, 3, 32).bfloat16())
            if isinstance(model, ListModel)
            else model(**tiny_inputs(model)).logits
        )


# ------------------------------------------------------------------------------------------------------------- the bits


@forms
@pytest.mark.parametrize("arch", ["list", "qwen2_moe", "mixtral", "gpt_oss", "llama4", "nemotron_h"])
def test_a_synced_rollout_is_a_fresh_one_at_the_same_addresses(arch: str, form: str):
    model = rollout(arch)
    before = addresses(model)
    assert not torch.equal(fresh_logits(arch, 0), fresh_logits(arch, 1))
    for seed in (1, 2):
        report = qq.update_weights(model, FORMS[form](_trainer(arch, seed, "aligned")))
        assert (report.missing, report.unexpected) == ([], [])
        assert_same_state(state(model), fresh(arch, seed))
        assert addresses(model) == before
    assert_same_bits(logits(model), fresh_logits(arch, 2))


@pytest.mark.parametrize("recipe", [r for r in Recipe if r is not Recipe.TRANSFORMER_ENGINE])
@pytest.mark.parametrize("form", ["packed", "the model's names", "checkpoint names"])
def test_every_recipe_that_a_checkpoint_carries(recipe: Recipe, form: str):
    dialect = "compressed-tensors" if recipe is Recipe.LLM_COMPRESSOR else "modelopt"
    model, source = rollout("list", 0, recipe.value), trainer("list", 1, recipe.value)
    qq.update_weights(model, packed(source, dialect) if form == "packed" else FORMS[form](source))
    assert_same_state(state(model), fresh("list", 1, recipe.value))


@pytest.mark.parametrize("form", ["the model's names", "checkpoint names"])
def test_fp32_masters_are_cast_as_the_exporter_casts_them(form: str):
    def make(seed: int) -> nn.Module:
        return tiny_model("qwen3_moe", seed=seed, dtype=torch.float32)

    model = qq.convert(make(0), "w4a4_residual").to(torch.bfloat16)
    source = qq.convert(make(1), "w4a16")
    qq.update_weights(model, FORMS[form](source))
    expected = state(qq.convert(copy.deepcopy(source), "w4a4_residual").to(torch.bfloat16))
    assert_same_state(state(model), expected)
    qq.update_weights(model, FORMS[form](qq.convert(make(2), "w4a16")))
    qq.update_weights(model, packed(source))
    assert_same_state(state(model), expected)


@forms
def test_the_order_of_tensors_does_not_matter_and_their_memory_may_be_reused(form: str):
    def reused(stream: Stream) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream:
            tensor = tensor.detach().clone()
            yield name, tensor
            tensor.view(torch.uint8).fill_(0xFF) if tensor.ndim else tensor.fill_(float("nan"))

    stream = list(FORMS[form](trainer()))
    order = torch.randperm(len(stream), generator=torch.Generator().manual_seed(0)).tolist()
    model = rollout()
    assert qq.update_weights(model, reused([stream[i] for i in order])).layers == 3
    assert_same_state(state(model), fresh(seed=1))


def test_a_dict_will_do_and_the_trainer_is_read_anew_each_time():
    model, source = rollout("list"), trainer("list")
    for scale in (1.0, -0.5):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.mul_(scale)
        qq.update_weights(model, dict(source.named_parameters()))
        assert_same_state(state(model), state(qq.convert(copy.deepcopy(source), "w4a4_residual")))


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_rollout_from_a_checkpoint_is_synced_too(dialect: str, tmp_path: Path):
    for seed in (0, 1):
        qq.export_checkpoint(trainer(seed=seed), tmp_path / str(seed), dialect=dialect)
    model, other = (qq.load_rollout(tmp_path / seed, residual=qq.ResidualConfig()) for seed in "01")
    before = addresses(model)
    for form in FORMS.values():
        qq.update_weights(model, form(trainer()))
        assert_same_state(state(model), state(other))
        assert_same_bits(logits(model), logits(other))
        qq.update_weights(model, form(trainer(seed=0)))
    assert addresses(model) == before


@forms
def test_it_works_in_and_outside_of_inference_mode(form: str):
    with torch.inference_mode():
        inside = qq.convert(tiny_model("qwen3_moe"), "w4a4_residual", residual=qq.ResidualConfig(scope="static"))
        qq.calibrate(inside, [tiny_inputs(inside)])
    outside = rollout()
    stream = [(n, t.detach()) for n, t in FORMS[form](trainer())]
    stream = [(n, t.mT.contiguous().mT if t.ndim > 1 else t) for n, t in stream]  # any strides
    qq.update_weights(inside, stream)
    with torch.inference_mode():
        qq.update_weights(outside, stream)
    qq.update_weights(outside, trainer(seed=2).state_dict())
    qq.update_weights(outside, stream)
    assert_same_state(state(outside), fresh(seed=1))
    assert_same_state({n: t for n, t in state(inside).items() if "residual_mask" not in n}, fresh(seed=1))
    qq.load_quant_state_dict(inside, qq.quant_state_dict(inside))
    qq.calibrate(inside, [tiny_inputs(inside)])


def test_scales_of_a_kv_cache_are_the_engines_business():
    extra = ("model.layers.0.self_attn.k_proj.k_scale", torch.ones(()))
    model = rollout()
    qq.update_weights(model, [*packed(), extra])
    assert_same_state(state(model), fresh(seed=1))


# --------------------------------------------------------------------------------------------------------- tied weights


def tied(seed: int) -> Any:
    config = copy.deepcopy(tiny_model("qwen3").config)
    config.tie_word_embeddings = True
    model = type(tiny_model("qwen3"))(config).bfloat16()
    return fill(model, seed)


@forms
def test_tied_weights_come_once_or_under_both_names(form: str):
    model, source = qq.convert(tied(0), "w4a4_residual"), qq.convert(tied(1), "w4a16")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    stream = [(name, tensor) for name, tensor in FORMS[form](source) if name != "lm_head.weight"]
    qq.update_weights(model, stream)
    expected = state(qq.convert(copy.deepcopy(source), "w4a4_residual"))
    assert_same_state(state(model), expected)
    head = ("lm_head.weight", source.lm_head.weight)
    for both in ([*stream, head], [head, *stream]):
        qq.update_weights(model, both)
        assert_same_state(state(model), expected)
    renamed = [("lm_head.weight" if "embed" in name else name, tensor) for name, tensor in stream]
    qq.update_weights(model, renamed)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.raises(ValueError, match=r"lm_head\.weight is tied to model\.embed_tokens\.weight .* other values"):
        qq.update_weights(model, [*stream, ("lm_head.weight", source.lm_head.weight + 1)])


# ------------------------------------------------------------------------------------------------ what comes incomplete


def refused(model: Any, stream: Any, message: str, **options: Any) -> None:
    """The sync fails with ``message``, the rollout refuses to run, and a complete sync repairs it."""
    __tracebackhide__ = True
    with pytest.raises((ValueError, TypeError), match=message):
        qq.update_weights(model, stream, **options)
    with pytest.raises(RuntimeError, match=r"the last weight sync of this rollout failed .*; send all weights again"):
        logits(model)
    for part in (model, next(m for m in model.modules() if isinstance(m, PackedModule))):
        with pytest.raises(RuntimeError, match="the last weight sync of this rollout failed"):
            part.state_dict()  # which a whole rollout would load without a word
    failed = state(model)
    qq.update_weights(model, trainer(seed=2).state_dict())
    assert_same_state(state(model), fresh(seed=2))
    assert_same_bits(logits(model), fresh_logits(seed=2))
    model.load_state_dict(failed)


@forms
def test_a_half_sent_layer_stays_as_it_was(form: str):
    stream = list(FORMS[form](trainer()))
    last = max(i for i, (name, _) in enumerate(stream) if "layers.1." in name)
    model, old, new = rollout(), fresh(seed=0), fresh(seed=1)
    lost = stream[last][0]
    refused(model, stream[:last] + stream[last + 1 :], f"1 missing, namely {re.escape(lost)}")
    assert_same_state(state(model), old, "layers.1.")
    assert_same_state(state(model), new, "layers.0.")
    assert_same_state(state(model), new, "lm_head")


def test_nothing_at_all_is_missing_everything():
    model = rollout()
    refused(model, [], r"25 missing, like model\.embed_tokens\.weight|45 missing, like")
    assert_same_state(state(model), fresh(seed=0))


@pytest.mark.parametrize("error", [OSError("the trainer is gone"), KeyboardInterrupt()], ids=str)
def test_an_error_of_the_sender_passes_and_the_rollout_is_out_of_use(error: BaseException):
    def broken() -> Iterator[tuple[str, Tensor]]:
        yield from packed()[:-5]
        raise error

    model = rollout()
    with pytest.raises(type(error)):
        qq.update_weights(model, broken())
    for use in (model, copy.deepcopy(model), model.model.layers[0].mlp.experts):
        with pytest.raises(
            RuntimeError, match=rf"the last weight sync of this rollout failed \({type(error).__name__}"
        ):
            logits(use) if use is not model.model.layers[0].mlp.experts else use(torch.ones(1, 64), None, None)
    qq.update_weights(model, packed())
    assert_same_bits(logits(model), fresh_logits(seed=1))


def test_a_compiled_rollout_refuses_too():
    model = qq.convert(fill(nn.Sequential(nn.Linear(32, 16, bias=False))), "w4a4_residual", weights_only=True)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = torch.ones(2, 32)
    assert_same_bits(compiled(x), model(x))
    with pytest.raises(ValueError, match="1 missing"):
        qq.update_weights(model, [])
    with pytest.raises(Exception, match="the last weight sync of this rollout failed"):
        compiled(x)
    qq.update_weights(model, {"0.weight": torch.ones(16, 32)})
    assert_same_bits(compiled(x), model(x))


def test_not_strict_takes_whole_layers_and_tells_what_is_missing():
    stream = [(n, t) for n, t in packed() if "layers.1.self_attn.k_proj" not in n]
    model, old, new = rollout(), fresh(seed=0), fresh(seed=1)
    report = qq.update_weights(model, [*stream, ("draft.weight", torch.ones(3))], strict=False)
    assert (report.layers, report.unexpected) == (2, ["draft.weight"])
    assert report.missing == [
        f"model.layers.1.self_attn.k_proj.{n}" for n in ("weight", "weight_scale", "weight_scale_2")
    ]
    assert_same_state(state(model), old, "layers.1.")
    assert_same_state(state(model), new, "layers.0.")
    logits(model)
    with pytest.raises(ValueError, match="came twice"):
        qq.update_weights(model, stream[:1] * 2)
    qq.update_weights(model, stream, strict=False)  # not everything: the rollout stays out of use
    with pytest.raises(RuntimeError, match="the last weight sync of this rollout failed"):
        logits(model)


def test_layers_that_a_scale_group_spans_are_changed_together():
    rules = [r"layers\.\d+\.(mlp\.down_proj)"]

    def make(seed: int, mode: str) -> nn.Module:
        return qq.convert(tiny_model("qwen3", seed=seed), mode, groups=rules)

    source = make(1, "w4a16")
    for form in FORMS.values():
        model, old, new = make(0, "w4a4_residual"), state(make(0, "w4a4_residual")), state(make(1, "w4a4_residual"))
        stream = list(form(source))
        for name, tensor in ((n, t) for n, t in stream if "layers.1.mlp.up_proj" in n):
            with pytest.raises(ValueError, match="1 missing"):
                qq.update_weights(model, [(n, t) for n, t in stream if n != name])
            assert tensor is not None
            assert_same_state(state(model), old, "layers.")
        qq.update_weights(model, stream)
        assert_same_state(state(model), new)


# ----------------------------------------------------------------------------------------------------- what comes wrong

Q = "model.layers.1.self_attn.q_proj"
EXPERT = "model.layers.1.mlp.experts.2"


def change(stream: Iterable[tuple[str, Tensor]], name: str, by: Callable[[Tensor], Tensor]) -> Stream:
    stream = list(stream)
    assert name in dict(stream)
    return [(n, by(t.clone()) if n == name else t) for n, t in stream]


def poke(value: float) -> Callable[[Tensor], Tensor]:
    def poked(t: Tensor) -> Tensor:
        t = t.detach()
        t.view(-1)[-1] = value
        return t

    return poked


def byte(value: int) -> Callable[[Tensor], Tensor]:
    def poked(t: Tensor) -> Tensor:
        t.view(torch.uint8).view(-1)[-1] = value
        return t

    return poked


@pytest.mark.parametrize(
    ("name", "by", "message"),
    [
        (
            f"{Q}.weight",
            lambda t: t[:-1],
            r"q_proj\.weight must be torch\.uint8 \[64, 32\], got torch\.uint8 \[63, 32\]",
        ),
        *(
            (
                f"{Q}.weight",
                by,
                rf"q_proj\.weight must be torch\.uint8 \[64, 32\], got torch\.{dtype} \[64, 32\]",
            )
            for by, dtype in (
                (lambda t: t.view(torch.int8), "int8"),
                (lambda t: t.float(), "float32"),
                (lambda t: t.bfloat16(), "bfloat16"),
                (lambda t: t.long(), "int64"),
            )
        ),
        (
            f"{Q}.weight",
            lambda t: t.repeat(1, 2).view(torch.int8),
            r"q_proj\.weight must be torch\.bfloat16 or float32, which is cast to that, got torch.int8",
        ),
        (
            f"{Q}.weight_scale",
            lambda t: t[:, :-1],
            r"weight_scale must be torch\.float8_e4m3fn \[64, 4\], got .*\[64, 3\]",
        ),
        (f"{Q}.weight_scale", lambda t: t.view(torch.uint8), r"must be torch\.float8_e4m3fn .*, got torch\.uint8"),
        (
            f"{Q}.weight_scale_2",
            lambda t: t.expand(2),
            r"weight_scale_2 must be one float32 number, got torch\.float32 \[2\]",
        ),
        (f"{Q}.weight_scale_2", lambda t: t.bfloat16(), r"must be one float32 number, got torch\.bfloat16"),
        (f"{Q}.weight_scale_2", poke(float("nan")), r"weight_scale_2 must be one finite number > 0, got \[nan\]"),
        (f"{Q}.weight_scale_2", poke(float("inf")), "must be one finite number > 0"),
        (f"{Q}.weight_scale_2", poke(0.0), "must be one finite number > 0"),
        (f"{Q}.weight_scale_2", poke(-1.0), "must be one finite number > 0"),
        (f"{Q}.weight_scale_2", lambda t: t * 1.5, "scale of .*q_proj.weight must be a power of two .*another recipe"),
        (
            f"{Q}.weight_scale_2",
            lambda t: t * 2,
            "that of others in its scale group .*q_proj,k_proj,v_proj.* must share one",
        ),
        (f"{EXPERT}.up_proj.weight_scale_2", lambda t: t / 2, "they must share one, from one step of one trainer"),
        (f"{Q}.weight_scale", byte(0x7F), r"weight_scale holds NaN or negative scales"),
        (f"{EXPERT}.down_proj.weight_scale", byte(0x80), r"weight_scale holds NaN or negative scales"),
        ("model.norm.weight", poke(float("nan")), r"model\.norm\.weight holds 1 NaN or inf of 64 elements"),
        ("model.norm.weight", lambda t: t[1:], r"model\.norm\.weight must have shape \[64\], got \[63\]"),
        (
            "model.norm.weight",
            lambda t: t.half(),
            r"must be torch\.bfloat16 or float32, which is cast to that, got torch.float16",
        ),
        (
            "model.norm.weight",
            lambda t: t.long(),
            r"must be torch\.bfloat16 or float32, which is cast to that, got torch.int64",
        ),
        (
            "model.layers.1.mlp.gate.weight",
            lambda t: t.t(),
            r"mlp\.gate\.weight must have shape \[4, 64\], got \[64, 4\]",
        ),
    ],
)
def test_a_wrong_packed_stream_is_refused(name: str, by: Callable[[Tensor], Tensor], message: str):
    model = rollout()
    refused(model, change(packed(), name, by), message)
    layer = "layers.1." if "layers.1." in name else "norm.weight" if name == "model.norm.weight" else name
    for part in ("layers.1.",) if layer == "layers.1." else ("embed_tokens", "model.norm"):
        assert_same_state(state(model), fresh(seed=0), part)


@pytest.mark.parametrize("form", ["the model's names", "checkpoint names"])
@pytest.mark.parametrize(
    ("name", "by", "message"),
    [
        (f"{Q}.weight", poke(float("nan")), r"q_proj\.weight: quantize: x holds 1 NaN or inf"),
        (f"{Q}.weight", poke(-float("inf")), r"q_proj\.weight: quantize: x holds 1 NaN or inf"),
        (
            f"{Q}.weight",
            lambda t: t.half(),
            r"q_proj\.weight must be torch\.bfloat16 or float32, .*, got torch\.float16",
        ),
        (
            f"{Q}.weight",
            lambda t: t.to(torch.float8_e4m3fn),
            r"q_proj\.weight must be torch\.uint8 \[64, 32\], got torch.float8",
        ),
        (f"{Q}.weight", lambda t: t.t()[:32], r"q_proj\.weight must have shape \[64, 64\], got \[32, 64\]"),
        ("lm_head.weight", poke(float("inf")), r"lm_head\.weight holds 1 NaN or inf of 8192 elements"),
    ],
)
def test_wrong_weights_in_high_precision_are_refused(
    form: str, name: str, by: Callable[[Tensor], Tensor], message: str
):
    model = rollout()
    refused(model, change(FORMS[form](trainer()), name, by), message)
    assert_same_state(state(model), fresh(seed=0), "layers.1." if name.startswith(Q) else name)


def rename(stream: Iterable[tuple[str, Tensor]], old: str, new: str) -> Stream:
    swapped = {old: new, new: old}
    return [(swapped.get(name, name), tensor) for name, tensor in stream]


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "swapped names": (
        lambda: rename(packed(), f"{Q}.weight", f"{Q[:-6]}k_proj.weight"),
        r"k_proj\.weight must be torch\.uint8 \[32, 32\], got torch\.uint8 \[64, 32\]",
    ),
    "duplicates": (lambda: packed()[:3] * 2, r"update_weights: .*\.weight came twice; send each tensor once"),
    "an unknown name": (
        lambda: [*packed(), ("x", torch.ones(1))],
        "1 unexpected, namely x; drop what the rollout has no",
    ),
    "adapters": (
        lambda: [(f"base_model.model.{name}", tensor) for name, tensor in trainer().state_dict().items()],
        r"merge first: `with quads_qat\.integrations\.peft\.merged\(model\) as plain",
    ),
    "no bias": (lambda: [*packed(), (f"{Q}.bias", torch.ones(64))], r"1 unexpected, namely .*q_proj\.bias"),
    "a missing member": (
        lambda: [(n, t) for n, t in FORMS["the model's names"](trainer()) if "layers.0.self_attn.v_proj" not in n],
        r"1 missing, namely model\.layers\.0\.self_attn\.v_proj\.weight",
    ),
    "a missing expert": (
        lambda: [(n, t) for n, t in packed() if "layers.1.mlp.experts.3.up" not in n],
        r"3 missing, namely model\.layers\.1\.mlp\.experts\.3\.up_proj\.weight, .*weight_scale, .*weight_scale_2",
    ),
    "two dialects": (
        lambda: [*packed()[:20], *packed(dialect="compressed-tensors")[20:]],
        "is a tensor of the compressed-tensors dialect, but this sync began in the modelopt dialect",
    ),
    "a group of two forms": (
        lambda: [
            (f"{Q}.weight", trainer().state_dict()[f"{Q}.weight"]),
            *[p for p in packed() if p[0] != f"{Q}.weight"],
        ],
        r"_proj\.weight.* is packed, but other weights of its scale group .* came in high precision",
    ),
    "both names": (
        lambda: [*trainer().state_dict().items(), *((n, t) for n, t in on_disk(trainer()).items() if "expert" in n)],
        r"is a part of model\.layers\.0\.mlp\.experts\..*_proj that came under another name already",
    ),
    "packed values of another recipe": (
        lambda: packed(trainer(recipe="modelopt")),
        r"must be a power of two \(recipe 'aligned'\), got .*; the trainer has another recipe than the rollout",
    ),
    "no pair in the middle": (
        lambda: iter([*packed()[:9], packed()[9][1]]),
        r"must yield \(name, tensor\) pairs, got NoneType and Tensor",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_stream_is_refused(kind: str):
    make, message = WRONG[kind]
    refused(rollout(), make(), message)


def stops() -> Iterator[tuple[str, Tensor]]:
    raise ZeroDivisionError("the trainer has nothing")
    yield


NO_STREAM: dict[str, tuple[Callable[[], Any], str]] = {
    "a model": (
        trainer,
        r"got Qwen3MoeForCausalLM; pass quads_qat\.export_weights\(trainer, .*trainer\.state_dict\(\)",
    ),
    "a path": (lambda: "out", "got str; pass quads_qat"),
    "a path object": (lambda: Path("out"), "got PosixPath; pass quads_qat"),
    "None": (lambda: None, "got NoneType; pass quads_qat"),
    "a number": (lambda: 5, "got int; pass quads_qat"),
    "a tensor": (lambda: torch.ones(2), "got Tensor; pass quads_qat"),
    "a function": (lambda: packed, "got function; pass quads_qat"),
    "names": (lambda: iter(["model.norm.weight"]), r"must yield \(name, tensor\) pairs, got NoneType and str"),
    "tensors": (lambda: (t for _, t in packed()), r"must yield \(name, tensor\) pairs, got NoneType and Tensor"),
    "metadata": (lambda: qq.export_metadata(trainer(), "modelopt"), r"pairs, got NoneType and tuple; pass quads_qat"),
    "a list with a name": (lambda: [*packed()[:9], "x"], r"pairs, got NoneType and str"),
    "no tensors": (lambda: {"model.norm.weight": [1.0]}, r"must yield \(name, tensor\) pairs, got str and list"),
    "meta": (lambda: [("model.norm.weight", torch.ones(64, device="meta"))], "is on the meta device and has no values"),
    "a stream that stops": (stops, "the trainer has nothing"),
}


@pytest.mark.parametrize("kind", NO_STREAM)
def test_what_is_no_stream_leaves_the_rollout_in_use(kind: str):
    make, message = NO_STREAM[kind]
    model = rollout()
    expected = logits(model)
    with pytest.raises((TypeError, ValueError, ZeroDivisionError), match=message):
        qq.update_weights(model, make())
    assert_same_bits(logits(model), expected)
    assert_same_state(state(model), fresh(seed=0))
    with pytest.raises(ValueError, match="missing"):
        qq.update_weights(model, [])
    with pytest.raises((TypeError, ValueError, ZeroDivisionError), match=message):
        qq.update_weights(model, make())
    with pytest.raises(RuntimeError, match="send all weights again"):  # what is broken stays so
        logits(model)


def test_swapped_arguments_are_told():
    wrong: Any = packed()
    with pytest.raises(
        TypeError, match=r"rollout must be a torch\.nn\.Module, got list; the order is update_weights\(rollout, "
    ):
        qq.update_weights(wrong, rollout())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("recipe", "dialect"), [("modelopt", "compressed-tensors"), ("llm-compressor", "modelopt")])
def test_a_dialect_that_the_recipe_does_not_go_with_is_refused(recipe: str, dialect: str):
    model = rollout("list", recipe=recipe)
    with pytest.raises(ValueError, match=f"packed tensors of the {dialect} dialect cannot be of recipe '{recipe}'"):
        qq.update_weights(model, packed(trainer("list"), dialect))


def test_only_rollouts_are_synced():
    with pytest.raises(ValueError, match=r"this model is a trainer \(mode 'w4a16'\), whose weights load_state_dict"):
        qq.update_weights(trainer("list"), {})
    with pytest.raises(ValueError, match=r"not been converted; .*mode='w4a4_residual'\) first, or .*load_rollout"):
        qq.update_weights(linears("fc"), {})


# ------------------------------------------------------------------------------------------------------------- metadata


def shapes(stream: Iterable[tuple[str, Tensor]]) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stream]


@forms
def test_with_metadata_a_refusal_leaves_the_rollout_in_use(form: str):
    model, source = rollout(), trainer()
    right, expected = shapes(FORMS[form](source)), logits(model)
    name, dtype, shape = right[-1]
    for wrong, message in (
        (right[:-1], "metadata must name every weight once and nothing else: 1 missing"),
        ([*right, ("x", torch.float32, (2,))], "1 unexpected, namely x"),
        ([*right, right[-1]], "came twice"),
        ([*right[:-1], (name, dtype, (*shape, 1))], "must (have shape|be one)|got"),
        ([*right[:-1], (name, torch.int8, shape)], "must be"),
    ):
        with pytest.raises(ValueError, match=message):
            qq.update_weights(model, FORMS[form](source), metadata=wrong)
        assert_same_state(state(model), fresh(seed=0))
        assert_same_bits(logits(model), expected)
    qq.update_weights(model, FORMS[form](source), metadata=right)
    assert_same_state(state(model), fresh(seed=1))


def test_the_metadata_of_an_export_fits_and_what_comes_must_fit_it():
    source = trainer()
    metadata = qq.export_metadata(source, "modelopt")
    model = rollout()
    qq.update_weights(model, packed(source), metadata=metadata)
    assert_same_state(state(model), fresh(seed=1))
    refused(model, packed(source)[:-1], "1 missing", metadata=metadata)
    unannounced = [(n, t.float() if "norm" in n else t) for n, t in packed(source)]
    refused(model, unannounced, "norm.weight is not what the metadata announced", metadata=metadata)


# ---------------------------------------------------------------------------------------------------- activation scales


def test_static_activation_scales_come_with_the_weights():
    source = trainer()
    with qq.observe_activations(source):
        logits(source)
    naive: Any = {"activation_scale": "static", "residual": qq.ResidualConfig(fraction=0)}
    model: Any = qq.convert(trainer(seed=0), "w4a4_residual", **naive)
    for dialect in ("modelopt", "compressed-tensors"):
        stream = list(qq.export_weights(source, dialect, activations="observed"))
        qq.update_weights(model, stream)
        expected = logits(qq.convert(copy.deepcopy(source), "w4a4_residual", **naive))
        assert_same_bits(logits(model), expected)  # ALIGNED: the amax is rounded up to the same power of two
        kept = model.model.layers[1].mlp.experts.down_proj_input_amax
        address, value = kept.data_ptr(), kept.clone()
        qq.update_weights(model, qq.export_weights(source, dialect))  # without scales: they stay
        assert_same_bits(model.model.layers[1].mlp.experts.down_proj_input_amax, value)
        assert model.model.layers[1].mlp.experts.down_proj_input_amax.data_ptr() == address
        some = [(n, t) for n, t in stream if not n.startswith(f"{EXPERT}.up_proj.input")]
        with pytest.raises(ValueError, match=r"activation scales of .*layers\.1.*gate_up_proj came in part"):
            qq.update_weights(model, some)
        one = "model.layers.0.self_attn.q_proj"
        some = [(n, t) for n, t in stream if not n.startswith(f"{one}.input")]
        with pytest.raises(ValueError, match=rf"came for some weights, but not for {one}\.weight and 0 more"):
            qq.update_weights(model, some)
        name = next(n for n, _ in stream if "input" in n and "scale" in n)
        with pytest.raises(ValueError, match=r"input_.*scale must be one finite number > 0, got .nan"):
            qq.update_weights(model, change(stream, name, poke(float("nan"))))
    plain = rollout()
    qq.update_weights(plain, qq.export_weights(source, "modelopt", activations="observed"))
    assert_same_state(state(plain), fresh(seed=1))
