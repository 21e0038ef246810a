"""Contract under test: ``update_weights`` gives a rollout the bits of a fresh conversion in place.

"Fresh" is ``convert(copy of the trainer, "w4a4_residual")``.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from small_modules import fill
from tiny_models import tiny_inputs, tiny_model
from torch import Tensor, nn
from weight_syncs import (
    EXPERT,
    FORMS,
    Stream,
    addresses,
    assert_same_state,
    change,
    forms,
    fresh,
    fresh_logits,
    logits,
    packed,
    poke,
    rollout,
    state,
    trainer,
)

import quads_qat as qq
from quads_qat.config import Recipe

# ------------------------------------------------------------------------------------------------------------- the bits


@forms
@pytest.mark.parametrize("arch", ["list", "qwen2_moe", "mixtral", "gpt_oss", "llama4", "nemotron_h"])
def test_a_synced_rollout_is_a_fresh_one_at_the_same_addresses(arch: str, form: str):
    model = rollout(arch)
    before = addresses(model)
    assert not torch.equal(fresh_logits(arch, 0), fresh_logits(arch, 1))
    for seed in (1, 2):
        report = qq.update_weights(model, FORMS[form](trainer(arch, seed)))
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
        for stream_of in (iter, list):
            with pytest.raises(ValueError, match=r"activation scales of .*layers\.1.*gate_up_proj came in part"):
                qq.update_weights(model, stream_of(some))
        one = "model.layers.0.self_attn.q_proj"
        some = [(n, t) for n, t in stream if not n.startswith(f"{one}.input")]
        for stream_of in (iter, list):
            with pytest.raises(ValueError, match=rf"came for some weights, but not for {one}\.weight and 0 more"):
                qq.update_weights(model, stream_of(some))
        qq.update_weights(model, stream)
        with pytest.raises(ValueError, match=r"and 0 more; send all or none of them; nothing was changed$"):
            qq.update_weights(model, some)
        assert_same_bits(logits(model), expected)
        name = next(n for n, _ in stream if "input" in n and "scale" in n)
        with pytest.raises(ValueError, match=r"input_.*scale must be one finite number > 0, got .nan"):
            qq.update_weights(model, change(stream, name, poke(float("nan"))))
    plain = rollout()
    qq.update_weights(plain, qq.export_weights(source, "modelopt", activations="observed"))
    assert_same_state(state(plain), fresh(seed=1))
