"""Contract under test: ``verify`` sees every bit, and names the tensor that it is in."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from by_hand import CHECKPOINTS, config, rewritten, tensors
from exported import CONFIGS, ENDINGS, EXPERT, MODULE, SOURCE, Exported, exported, flip, trainer, with_json
from tiny_models import tiny_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

import quads_qat as qq
from quads_qat import Dialect, Recipe
from quads_qat.compare import inspect_checkpoint
from quads_qat.verify import VerificationError

dialects = pytest.mark.parametrize("dialect", list(Dialect), ids=str)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return exported(tmp_path_factory)


#: Every name that :func:`damages` may look up.
ALL_NAMES = [f"{m}.{ending}" for m in (MODULE, EXPERT) for endings in ENDINGS.values() for ending in endings]
ALL_NAMES += ["model.layers.1.mlp.gate.weight", "model.norm.weight"]


@dialects
@pytest.mark.parametrize("activations", ["none", "observed"])
@pytest.mark.parametrize("scope", ["all", "mlp", "experts"])
def test_what_was_exported_is_what_is_trained_with(
    scope: str, activations: str, dialect: Dialect, checkpoint: Exported
) -> None:
    path = checkpoint(dialect, activations, scope)
    quantized = {"all": 32, "mlp": 24, "experts": 24}[scope]  # 2 layers of q, k, v, o and 4 experts of 3
    for report in (qq.verify(trainer(scope), path), qq.verify_checkpoint(SOURCE, path)):
        assert report.ok
        assert (report.quantized, report.other) == (quantized, len(tensors(SOURCE)) - quantized)
        assert str(report).endswith("other tensors are equal, bit for bit")
        assert report.to_dict() == {
            "ok": True,
            "quantized": quantized,
            "other": len(tensors(SOURCE)) - quantized,
            "differences": {},
        }
        assert report.raise_if_different() is report


def damages(dialect: Dialect, stored: dict[str, Tensor]) -> dict[str, tuple[str, Tensor | None, str, str]]:
    """What is wrong -> (tensor, its new value, the name that is reported, what is said)."""
    codes, block_scale, scale, input_scale = ENDINGS[dialect]
    router, norm = "model.layers.1.mlp.gate.weight", "model.norm.weight"
    expert, module = f"{EXPERT}.weight", f"{MODULE}.weight"

    def one(name: str, changed: Callable[[Tensor], Tensor | None], reported: str, said: str) -> Any:
        return name, changed(stored[name]), reported, said

    gone: Callable[[Tensor], None] = lambda t: None  # noqa: E731
    return {
        "code": one(f"{MODULE}.{codes}", flip, module, "1 of 8192 elements, first at (0, 10)"),
        "high code": one(f"{EXPERT}.{codes}", lambda t: flip(t, bit=6), expert, "1 of 8192 elements, first at (0, 11)"),
        "block scale": one(f"{MODULE}.{block_scale}", flip, module, " of 8192 elements, first at (0, "),
        "scale": one(f"{EXPERT}.{scale}", lambda t: t * 2, expert, " of 8192 elements, first at (0, "),
        "bf16 value": one(router, lambda t: flip(t, at=8), router, "1 of 512 elements, first at (0, 4)"),
        "signs": one(norm, lambda t: -t, norm, "128 of 128 elements"),
        "dtype": one(
            norm, lambda t: t.float(), norm, "torch.float32 (128,) in the checkpoint against torch.bfloat16 (128,)"
        ),
        "bf16 missing": one(router, gone, router, "missing in the checkpoint"),
        "codes missing": one(f"{MODULE}.{codes}", gone, module, f"{MODULE}.{codes} is missing"),
        "block scales missing": one(f"{MODULE}.{block_scale}", gone, module, f"{MODULE}.{block_scale} is missing"),
        "scale missing": one(f"{EXPERT}.{scale}", gone, expert, f"{EXPERT}.{scale} is missing"),
        "input scale missing": one(f"{EXPERT}.{input_scale}", gone, expert, "its activation scale is missing"),
        "input scale": one(
            f"{EXPERT}.{input_scale}",
            lambda t: t * 2,
            f"{EXPERT}.{input_scale}",
            "1 of 1 elements, first at (",
        ),
        "input scale zero": one(f"{EXPERT}.{input_scale}", lambda t: 0 * t, expert, "must be one finite number > 0"),
    }


@dialects
@pytest.mark.parametrize("how", damages(Dialect.MODELOPT, dict.fromkeys(ALL_NAMES, torch.ones(128))))
def test_one_wrong_bit_is_named(how: str, dialect: Dialect, checkpoint: Exported, tmp_path: Path) -> None:
    path = checkpoint(dialect)
    tensor, value, reported, said = damages(dialect, tensors(path))[how]
    damaged = rewritten(path, tmp_path / "damaged", {tensor: value})
    with pytest.raises(VerificationError) as error:
        qq.verify(trainer(), damaged)
    assert str(error.value).startswith(f"1 tensor differs, first {reported}: ")
    assert said in str(error.value)
    report = qq.verify_checkpoint(SOURCE, damaged)
    assert not report.ok
    assert list(report.differences) == [reported]
    assert said in report.differences[reported]
    if " elements, first" in said and "input_" not in reported:
        value = r"-?[\d.e-]+"
        for text, side in ((str(error.value), "model"), (report.differences[reported], "source")):
            assert re.search(rf"\): {value} in the checkpoint against {value} from the {side}$", text)
    assert report.to_dict()["ok"] is False
    with pytest.raises(VerificationError, match="1 tensor differs"):
        report.raise_if_different()


@dialects
def test_what_only_one_side_quantizes(dialect: Dialect, checkpoint: Exported) -> None:
    with pytest.raises(VerificationError) as error:
        qq.verify(trainer("mlp"), checkpoint(dialect))
    assert "quantized in the checkpoint, not in the model" in str(error.value)
    with pytest.raises(VerificationError, match=r"self_attn\.\w_proj\.weight: .* is missing"):
        qq.verify(trainer(), checkpoint(dialect, "observed", "mlp"))


def test_a_trained_weight_differs(checkpoint: Exported) -> None:
    model = qq.convert(AutoModelForCausalLM.from_pretrained(SOURCE), "w4a16")
    path = checkpoint("modelopt")
    qq.verify(model, path)
    name = "model.layers.0.mlp.experts.down_proj"
    with torch.no_grad():
        model.get_parameter(name)[3, 1, 2] += 1e-9  # too little for bf16: the same master
        qq.verify(model, path)
        model.get_parameter(name)[3, 1, 2] += 3
    with pytest.raises(VerificationError, match=f"first {EXPERT}.weight: ".replace(".", r"\.")):
        qq.verify(model, path)


@pytest.mark.parametrize(
    ("dtype", "note"),
    [
        (
            torch.float32,
            "; those that are not quantized after the cast to bfloat16: the trainer multiplies by them in float32, ",
        ),
        (torch.bfloat16, ""),
        (torch.float16, ""),
    ],
    ids=str,
)
def test_a_cast_is_said(dtype: torch.dtype, note: str, tmp_path: Path) -> None:
    model = qq.convert(AutoModelForCausalLM.from_pretrained(SOURCE, dtype=dtype), "w4a16")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.001)
    qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt", source=SOURCE)
    shown = str(qq.verify(model, tmp_path / "out"))
    assert " other tensors are equal, bit for bit" + note in shown
    assert note or shown.endswith("bit for bit")
    if dtype != torch.float16:
        return
    told = json.dumps(config(tmp_path / "out") | {"dtype": "bfloat16"})  # as exports were that kept the source's
    (tmp_path / "out" / "config.json").write_text(told, "utf-8")
    assert str(qq.verify(model, tmp_path / "out")).endswith(
        "; config.json asks for bfloat16, to which readers cast the tensors of the trainer in float16: load the "
        "trainer with dtype=torch.bfloat16"
    )


@pytest.mark.parametrize("whole", [True, False], ids=["whole model", "layers only"])
def test_a_cast_that_fsdp_makes_too_is_not_said(whole: bool, tmp_path: Path) -> None:
    model = qq.convert(AutoModelForCausalLM.from_pretrained(SOURCE, dtype=torch.float32), "w4a16")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        options: Any = {"mesh": init_device_mesh("cpu", (1,)), "mp_policy": MixedPrecisionPolicy(torch.bfloat16)}
        for layer in model.model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **(options if whole else {"mesh": options["mesh"]}))  # embeddings, norm and head in fp32
        qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt", source=SOURCE)
        shown = str(qq.verify(model, tmp_path / "out"))
    finally:
        dist.destroy_process_group()
    assert ("; those that are not quantized after the cast to bfloat16" in shown) is not whole


def test_tensors_that_are_not_in_the_source(checkpoint: Exported, tmp_path: Path) -> None:
    path = checkpoint("modelopt")
    scale = {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.5)}  # of a KV cache: no weight
    assert qq.verify_checkpoint(SOURCE, rewritten(path, tmp_path / "cache", scale)).ok
    extra = rewritten(path, tmp_path / "extra", {"model.extra.weight": torch.ones(3)})
    assert qq.verify_checkpoint(SOURCE, extra).differences == {"model.extra.weight": "not in the source"}


def test_tensors_that_are_not_in_the_model(checkpoint: Exported, tmp_path: Path) -> None:
    """Neither a stranger, nor a scale that a W4A16 checkpoint does not have."""
    path = checkpoint("modelopt", "none")
    cache = {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.5)}  # of a KV cache: no weight
    assert qq.verify(trainer(), rewritten(path, tmp_path / "cache", cache)).ok
    for i, name in enumerate(["model.extra.weight", f"{MODULE}.input_scale", f"{MODULE}.weight_scale_inv"]):
        extra = rewritten(path, tmp_path / str(i), {name: torch.ones(())})
        with pytest.raises(VerificationError, match=f"^1 tensor differs, first {name}: not in the model$"):
            qq.verify(trainer(), extra)


def test_another_name_of_a_tied_weight(tmp_path: Path) -> None:
    """Some checkpoints store a tied head too; it must be the embedding."""
    model = qq.convert(tiny_model("ernie4_5_moe"), "w4a16")
    qq.export_checkpoint(model, tmp_path / "out", dialect="modelopt")
    embedding = tensors(tmp_path / "out")["model.embed_tokens.weight"]
    assert qq.verify(model, rewritten(tmp_path / "out", tmp_path / "tied", {"lm_head.weight": embedding.clone()})).ok
    untied = rewritten(tmp_path / "out", tmp_path / "untied", {"lm_head.weight": flip(embedding)})
    with pytest.raises(VerificationError, match=r"first lm_head\.weight: 1 of"):
        qq.verify(model, untied)


@dialects
def test_activation_scales_of_weights_that_share_their_input(
    dialect: Dialect, checkpoint: Exported, tmp_path: Path
) -> None:
    """Without observations in the model: an engine would use one of the two for both."""
    ending = ENDINGS[dialect][3]
    path, plain = checkpoint(dialect), qq.convert(AutoModelForCausalLM.from_pretrained(SOURCE), "w4a16")
    assert qq.verify(plain, path).ok
    for i, module in enumerate([MODULE, EXPERT]):
        name = f"{module}.{ending}"
        damaged = rewritten(path, tmp_path / str(i), {name: tensors(path)[name] / 2})
        with pytest.raises(VerificationError, match=f"first {name}: .* of the weights that take the same input"):
            qq.verify(plain, damaged)
    found = inspect_checkpoint(tmp_path / "0")["problems"]
    assert found == [
        "model.layers.1.self_attn.{q_proj,k_proj,v_proj}: engines fuse these weights, but their activation "
        "scales differ"
    ]


@pytest.mark.parametrize("how", CONFIGS)
def test_configs_are_verified(how: str, checkpoint: Exported, tmp_path: Path) -> None:
    file, change, name, said = CONFIGS[how]
    damaged = with_json(checkpoint("modelopt"), tmp_path / "damaged", file, change)
    with pytest.raises(VerificationError) as error:
        qq.verify(trainer(), damaged)
    assert str(error.value) == f"1 difference, first {name}: {said}"
    assert qq.verify_checkpoint(SOURCE, damaged).differences == {name: said}


def test_files_are_verified(checkpoint: Exported, tmp_path: Path) -> None:
    gone = shutil.copytree(checkpoint("modelopt"), tmp_path / "gone")
    (gone / "hf_quant_config.json").unlink()
    with pytest.raises(VerificationError, match=r"first hf_quant_config\.json: .*hf_quant_config\.json is missing"):
        qq.verify(trainer(), gone)
    other = with_json(
        checkpoint("modelopt"), tmp_path / "other", "config.json", lambda c: c.update(architectures=["Qwen3MoeModel"])
    )
    assert qq.verify_checkpoint(SOURCE, other).differences["config.json: architectures"].startswith("['Qwen3MoeModel']")


def test_what_training_changes_in_a_config_is_no_difference(checkpoint: Exported) -> None:
    model = qq.convert(AutoModelForCausalLM.from_pretrained(SOURCE), "w4a16")
    model.config.use_cache = False
    model.config.pad_token_id = 7
    model.config.eos_token_id = 3  # trainers of transformers and TRL take both from the tokenizer
    model.config.bos_token_id = None
    model.config.router_aux_loss_coef = 0.5
    assert qq.verify(model, checkpoint("modelopt")).ok


# Recipes.


def test_recipes_must_agree(checkpoint: Exported) -> None:
    """A trainer of one arithmetic and a checkpoint of another differ in 1 % of the codes: a mistake, not bad luck."""
    model = qq.convert(AutoModelForCausalLM.from_pretrained(SOURCE), "w4a16", recipe="modelopt-ieee")
    with pytest.raises(ValueError, match=r"was made with recipe 'aligned', not with 'modelopt-ieee'; convert"):
        qq.verify(model, checkpoint("modelopt"))
    with pytest.raises(ValueError, match=r"was made with recipe 'aligned', not with 'modelopt'; give recipe='aligned'"):
        qq.verify_checkpoint(SOURCE, checkpoint("modelopt"), recipe="modelopt")
    assert qq.verify_checkpoint(SOURCE, checkpoint("modelopt"), recipe="aligned").ok
    for refused in (AutoModelForCausalLM.from_pretrained(SOURCE), qq.convert(model, "w4a4_residual")):
        with pytest.raises(ValueError, match=r"has not been converted|verify the trainer model"):
            qq.verify(refused, checkpoint("modelopt"))


@pytest.mark.parametrize(
    ("fixture", "recipe"),
    [
        ("modelopt/qwen3moe-nvfp4", Recipe.MODELOPT_IEEE),
        ("modelopt/qwen3moe-nvfp4_experts_only", Recipe.MODELOPT_IEEE),
        ("modelopt/qwen3-nvfp4_fp8_kv_cfg", Recipe.MODELOPT_IEEE),
        ("compressed_tensors/qwen3moe-nvfp4a16", Recipe.LLM_COMPRESSOR),
        ("compressed_tensors/mixtral-nvfp4a16", Recipe.LLM_COMPRESSOR),
        ("compressed_tensors/gpt_oss-nvfp4a16", Recipe.LLM_COMPRESSOR),
    ],
)
def test_checkpoints_that_peers_wrote(fixture: str, recipe: Recipe) -> None:
    """They do not say which of the recipes that decode alike made them; the bits do."""
    source, path = CHECKPOINTS / "bf16" / fixture.split("/")[1].split("-")[0], CHECKPOINTS / fixture
    assert qq.verify_checkpoint(source, path, recipe=recipe).ok
    scope = "experts" if "experts" in fixture else "all"
    model = qq.convert(AutoModelForCausalLM.from_pretrained(source), "w4a16", recipe=recipe, scope=scope)
    assert qq.verify(model, path).ok
    qq.convert(qq.revert(model), "w4a16", scope=scope)
    with pytest.raises(ValueError, match=r"was made with recipe .*, not with 'aligned'"):
        qq.verify(model, path)
    if recipe is Recipe.MODELOPT_IEEE:
        report = qq.verify_checkpoint(source, path)  # as if it came from a GPU
        assert not report.ok
        assert report.differences


def test_of_a_source_in_fp32_others_cast_or_copy_what_is_not_quantized(tmp_path: Path):
    source, path = CHECKPOINTS / "bf16" / "qwen3", CHECKPOINTS / "modelopt" / "qwen3-nvfp4"
    wide = rewritten(source, tmp_path / "wide", {n: t.float() for n, t in tensors(source).items()})
    norm = "model.layers.1.input_layernorm.weight"
    copied = rewritten(path, tmp_path / "copied", {norm: tensors(source)[norm].float()})
    for other in (path, copied):
        assert qq.verify_checkpoint(wide, other, recipe="modelopt-ieee").ok
    wrong = rewritten(path, tmp_path / "wrong", {norm: tensors(source)[norm] * 2})
    assert list(qq.verify_checkpoint(wide, wrong, recipe="modelopt-ieee").differences) == [norm]
