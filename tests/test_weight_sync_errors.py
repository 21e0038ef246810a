"""Contract under test: ``update_weights`` refuses what is wrong, says what is off, and changes no layer by half."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from small_modules import linears
from torch import Tensor
from weight_syncs import (
    EXPERT,
    FORMS,
    Q,
    Stream,
    assert_same_state,
    byte,
    change,
    fresh,
    logits,
    on_disk,
    packed,
    poke,
    refused,
    rollout,
    state,
    trainer,
)

import quads_qat as qq

# ----------------------------------------------------------------------------------------------------- what comes wrong


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
        (f"{Q}.weight", poke(float("nan")), r"q_proj\.weight: the weight holds 1 NaN or inf"),
        (f"{Q}.weight", poke(-float("inf")), r"q_proj\.weight: the weight holds 1 NaN or inf"),
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
            *[p for p in packed() if "layers.1.self_attn.k_proj" in p[0]],
        ],
        r"_proj\.weight.* is packed, but other weights of its scale group .* came in high precision",
    ),
    "a master among packed weights": (
        lambda: [
            *((n, t) for n, t in trainer().state_dict().items() if "layers.1.self_attn.o_proj" in n),
            *[p for p in packed() if "layers.1.self_attn.o_proj" not in p[0]],
        ],
        r"o_proj\.weight is in high precision where other weights are packed, like .*; give both the same scope",
    ),
    "both names": (
        lambda: [*trainer().state_dict().items(), *((n, t) for n, t in on_disk(trainer()).items() if "expert" in n)],
        r"is a part of model\.layers\.0\.mlp\.experts\..*_proj that came under another name already",
    ),
    "packed values of another recipe": (
        lambda: packed(trainer(recipe="modelopt")),
        r"must be a power of two \(recipe 'aligned'\), got .*; the trainer has another recipe than the rollout",
    ),
    "a sparse tensor": (
        lambda: change(FORMS["the model's names"](trainer()), f"{Q}.weight", lambda t: t.to_sparse()),
        r"q_proj\.weight is of the layout torch\.sparse_coo; send it dense: tensor\.to_dense\(\)",
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


# ----------------------------------------------------------------------------------------------------- no stream at all


@pytest.mark.parametrize("contract", [False, True], ids=["", "contract"])
@pytest.mark.parametrize(
    "kind", [k for k in WRONG if k not in ("packed values of another recipe", "no pair in the middle")]
)
def test_what_is_at_hand_is_checked_before_a_byte_changes(kind: str, contract: bool):
    make, message = WRONG[kind]
    model, items = rollout(), make()
    expected = logits(model)
    options: Any = {"contract": qq.contract_of(trainer())} if contract else {}
    for collection in (items, tuple(items), dict(items), dict(items).items()):
        if isinstance(collection, (list, tuple)) or kind != "duplicates":
            with pytest.raises(ValueError, match=f"{message}.*; nothing was changed$"):
                qq.update_weights(model, collection, **options)
            assert_same_state(state(model), fresh(seed=0))
            assert_same_bits(logits(model), expected)
    announced = qq.export_metadata(trainer(), "modelopt")
    with pytest.raises(ValueError, match=r"nothing was changed$"):
        qq.update_weights(model, items, metadata=announced, **options)
    assert_same_bits(logits(model), expected)


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
        qq.update_weights(model, iter([]))
    with pytest.raises((TypeError, ValueError, ZeroDivisionError), match=message):
        qq.update_weights(model, make())
    with pytest.raises(RuntimeError, match="send all weights again"):  # what is broken stays so
        logits(model)


# ---------------------------------------------------------------------------------------- no rollout, no dialect of its


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


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (lambda: torch.compile(trainer()).state_dict(), r"names of a wrapper \(torch.compile, DDP\)"),
        (lambda: {f"module.{n}": t for n, t in trainer().state_dict().items()}, "names of a wrapper"),
        (lambda: rollout(seed=2).state_dict(), r"a rollout, which rollout\.load_state_dict takes; nothing was changed"),
    ],
)
def test_the_state_of_another_kind_of_model_is_told(states: Callable[[], dict[str, Tensor]], message: str):
    with pytest.raises(ValueError, match=message):
        qq.update_weights(rollout(), states())


def test_only_rollouts_are_synced():
    with pytest.raises(ValueError, match=r"this model is a trainer \(mode 'w4a16'\), whose weights load_state_dict"):
        qq.update_weights(trainer("list"), {})
    with pytest.raises(ValueError, match=r"not been converted; .*mode='w4a4_residual'\) first, or .*load_rollout"):
        qq.update_weights(linears("fc"), {})
