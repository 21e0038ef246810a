"""Contract under test: a weight sync that stops, or lacks something, changes no layer by half and says where it is."""

import copy
import re
from collections.abc import Iterator

import pytest
import torch
from bits import assert_same_bits
from small_modules import fill
from tiny_models import tiny_model
from torch import Tensor, nn
from weight_syncs import (
    FORMS,
    assert_same_state,
    forms,
    fresh,
    fresh_logits,
    logits,
    packed,
    refused,
    rollout,
    shapes,
    state,
    trainer,
)

import quads_qat as qq

# ------------------------------------------------------------------------------------------------ what comes incomplete


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


NONE_OLD = "new weights: model.layers.0-1, what is in no layer; old weights: none"


@forms
@pytest.mark.parametrize(
    ("lost", "ages"),
    [
        ("layers.1.", "new weights: model.layers.0, what is in no layer; old weights: model.layers.1"),
        ("norm.weight", "new weights: none; old weights: model.layers.0-1, what is in no layer"),
        ("model.norm.weight", "new weights: model.layers.0-1; old weights: what is in no layer"),
    ],
)
def test_the_error_says_which_layers_are_new(form: str, lost: str, ages: str):
    stream = [(name, tensor) for name, tensor in FORMS[form](trainer()) if lost not in name]
    model = rollout()
    with pytest.raises(ValueError, match=f"missing.*; {ages}; the rollout refuses to run until a complete sync$"):
        qq.update_weights(model, iter(stream))
    message = rf"failed \(ValueError: .* missing, .*\): {ages}; send all weights again with quads_qat.update_weights$"
    with pytest.raises(RuntimeError, match=message) as refusal:
        logits(model)
    assert str(refusal.value).count("new weights") == 1


def test_layers_are_told_in_runs_and_scale_groups_join_them():
    def make(seed: int, mode: str) -> nn.Module:
        config = copy.deepcopy(tiny_model("qwen3").config)
        config.num_hidden_layers, config.layer_types = 12, ["full_attention"] * 12
        model = fill(type(tiny_model("qwen3"))(config).bfloat16(), seed)
        return qq.convert(model, mode, groups=[r"layers\.[23]\.(mlp\.down_proj)"])

    stream = [(n, t) for n, t in make(1, "w4a16").state_dict().items() if not re.search(r"\.(2|8|10)\.mlp\.up_proj", n)]
    with pytest.raises(
        ValueError,
        match=r"new weights: model\.layers\.0-1, model\.layers\.4-7, model\.layers\.9, model\.layers\.11, what is in "
        r"no layer; old weights: model\.layers\.2-3, model\.layers\.8, model\.layers\.10; the rollout refuses",
    ):
        qq.update_weights(make(0, "w4a4_residual"), iter(stream))


@pytest.mark.parametrize("contract", [False, True], ids=["", "contract"])
def test_a_name_too_many_leaves_every_layer_new_and_the_next_sync_recovers(contract: bool):
    options = {"contract": qq.contract_of(trainer())} if contract else {}
    model = rollout()
    for again in (lambda: packed(), lambda: iter(packed())):
        with pytest.raises(
            ValueError,
            match=f"1 unexpected, namely draft.weight; drop what the rollout has no place for, .*strict=False.*; "
            f"{NONE_OLD}; the rollout refuses to run until a complete sync$",
        ):
            qq.update_weights(model, iter([*packed(), ("draft.weight", torch.ones(3))]), **options)
        assert_same_state(state(model), fresh(seed=1))
        with pytest.raises(RuntimeError, match=f"{NONE_OLD}; send all weights again"):
            logits(model)
        qq.update_weights(model, again(), **options)
        assert_same_bits(logits(model), fresh_logits(seed=1))


def test_a_layer_that_was_interrupted_while_it_changed_is_told():
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    model = rollout()
    model.model.layers[1].mlp.experts.refresh = interrupted
    with pytest.raises(KeyboardInterrupt):
        qq.update_weights(model, iter(packed()))
    with pytest.raises(
        RuntimeError,
        match=r"failed \(KeyboardInterrupt: \): new weights: .*; half new: model.layers.1; old weights: none",
    ):
        logits(model)


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
        qq.update_weights(model, iter([]))
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
        qq.update_weights(model, iter(stream[:1] * 2))
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
                qq.update_weights(model, iter([(n, t) for n, t in stream if n != name]))
            assert tensor is not None
            assert_same_state(state(model), old, "layers.")
        qq.update_weights(model, stream)
        assert_same_state(state(model), new)


# ------------------------------------------------------------------------------------------------------------- metadata


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
