"""Contract under test: byte for byte, our exports are what Model-Optimizer and llm-compressor write of the same model.

Every peer-written fixture is made again twice, from the BF16 files and from a converted model. The activation scales
are the peer's calibration and come from its file.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import CHECKPOINTS, config, tensors
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import quads_qat as qq
from quads_qat import Dialect, Recipe

FIXTURES = sorted(
    f"{peer}/{path.name}" for peer in ("modelopt", "compressed_tensors") for path in (CHECKPOINTS / peer).iterdir()
)
DIALECTS = {"modelopt": Dialect.MODELOPT, "compressed_tensors": Dialect.COMPRESSED_TENSORS}
RECIPES = {"modelopt": Recipe.MODELOPT_IEEE, "compressed_tensors": Recipe.LLM_COMPRESSOR}  # the peers ran on a CPU
CALIBRATED = ("input_scale", "input_global_scale", ".k_scale", ".v_scale")
#: llm-compressor's names of Mixtral's experts; engines and transformers read those of the original checkpoint.
MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

fixtures = pytest.mark.parametrize("fixture", FIXTURES)


def peer_of(fixture: str) -> str:
    return fixture.split("/")[0]


def source_of(fixture: str) -> Path:
    return CHECKPOINTS / "bf16" / fixture.split("/")[1].split("-")[0]


def arguments(fixture: str) -> dict[str, Any]:
    """Recipe and scope under which the fixture is to be reproduced."""
    scope = "mlp" if "_mlp_only" in fixture else "experts" if "_experts_only" in fixture else "all"
    return {"recipe": RECIPES[peer_of(fixture)], "scope": scope}


@cache
def expected(fixture: str) -> dict[str, Tensor]:
    """The peer's tensors, under the names that we give them."""
    stored = tensors(CHECKPOINTS / fixture)
    if fixture.startswith("compressed_tensors/mixtral"):
        pattern = re.compile(r"(?<=\.)(gate|up|down)_proj(?=\.weight)")
        return {pattern.sub(lambda found: MIXTRAL[found[0]], name): tensor for name, tensor in stored.items()}
    return stored


def activations(fixture: str) -> Any:
    return {n: t for n, t in expected(fixture).items() if n.endswith(CALIBRATED)} or "none"


@cache
def model_of(source: Path) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(source)


def converted(fixture: str) -> nn.Module:
    """The shared model, converted; callers revert it."""
    return qq.convert(model_of(source_of(fixture)), "w4a16", **arguments(fixture))


def assert_same_tensors(actual: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (actual[name].dtype, actual[name].shape) == (tensor.dtype, tensor.shape), name
        as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (actual[name], tensor)]
        assert torch.equal(*as_bytes), name


@fixtures
def test_files_to_files(fixture: str, tmp_path: Path) -> None:
    dialect = DIALECTS[peer_of(fixture)]
    options = arguments(fixture) | {"dialect": dialect, "activations": activations(fixture)}
    qq.quantize_checkpoint(source_of(fixture), tmp_path / "out", **options)
    assert_same_tensors(tensors(tmp_path / "out"), expected(fixture))
    check_json(tmp_path / "out", fixture)


@fixtures
def test_model_to_files_and_to_a_stream(fixture: str, tmp_path: Path) -> None:
    dialect, model = DIALECTS[peer_of(fixture)], converted(fixture)
    try:
        given = activations(fixture)
        stream = list(qq.export_weights(model, dialect, activations=given))
        assert len({name for name, _ in stream}) == len(stream)
        assert_same_tensors(dict(stream), expected(fixture))
        assert qq.export_metadata(model, dialect, activations=given) == [
            (n, t.dtype, tuple(t.shape)) for n, t in stream
        ]
        options = {"dialect": dialect, "source": source_of(fixture), "activations": given}
        qq.export_checkpoint(model, tmp_path / "out", **options)
        assert_same_tensors(tensors(tmp_path / "out"), expected(fixture))
        check_json(tmp_path / "out", fixture)
    finally:
        qq.revert(model)


def check_json(ours: Path, fixture: str) -> None:
    """The peer's JSON, but for what is listed here."""
    peers = CHECKPOINTS / fixture
    written, wanted = config(ours), config(peers)
    assert {**config(source_of(fixture)), **written} == written  # the original keys, verbatim
    entry = written.pop("quads_qat")
    assert (entry["recipe"], entry["scope"]) == (RECIPES[peer_of(fixture)].value, arguments(fixture)["scope"])
    ignored = written["quantization_config"].pop("ignore")
    assert covers(ignored, wanted["quantization_config"].pop("ignore"), tensors(ours))
    # We write the scales of a KV cache but announce no scheme: whether it is FP8 or NVFP4 is not in the scales.
    cache_scheme = wanted["quantization_config"].pop("kv_cache_scheme", None)
    assert written["quantization_config"].pop("kv_cache_scheme", None) is None
    assert (cache_scheme is not None) == ("_kv_cfg" in fixture)
    assert written == wanted

    assert (ours / "hf_quant_config.json").exists() == (peer_of(fixture) == "modelopt")
    if peer_of(fixture) == "modelopt":
        written, wanted = (json.loads((p / "hf_quant_config.json").read_text("utf-8")) for p in (ours, peers))
        assert written["quantization"].pop("exclude_modules") == ignored
        wanted["quantization"].pop("exclude_modules")
        wanted["quantization"]["kv_cache_quant_algo"] = None
        assert written == wanted
    companion = "generation_config.json"
    assert (ours / companion).read_bytes() == (source_of(fixture) / companion).read_bytes()


def covers(ours: list[str], theirs: list[str], stored: dict[str, Tensor]) -> bool:
    """Ours are full names: ModelOpt's wildcards are spelled out, and embeddings are named for llm-compressor too."""
    modules = {name.rpartition(".")[0] for name in stored} | {"lm_head"}
    expanded = {m for m in modules for t in theirs if m == t or (t.endswith("*") and m.startswith(t[:-1]))}
    norms = {m for m in expanded if m.endswith("norm")}  # hit by self_attn*, but not a matrix
    return not any(set("*\0") & set(name) for name in ours) and set(ours) - {"model.embed_tokens"} == (
        expanded - norms - {"model.embed_tokens"}
    )


@pytest.mark.parametrize("name", sorted(path.name for path in (CHECKPOINTS / "bf16").iterdir()))
@pytest.mark.parametrize("recipe", [Recipe.MODELOPT_IEEE, Recipe.ALIGNED])
def test_both_dialects_hold_the_same_numbers(name: str, recipe: Recipe) -> None:
    """``weight_global_scale`` is the reciprocal of ``weight_scale_2``, which survives for powers of two only."""
    model = qq.convert(model_of(CHECKPOINTS / "bf16" / name), "w4a16", recipe=recipe)
    try:
        if recipe is not Recipe.ALIGNED:
            with pytest.raises(ValueError, match="recipe 'modelopt-ieee' cannot be written in the compressed-tensors"):
                qq.export_weights(model, "compressed-tensors")
            return
        modelopt, compressed = (dict(qq.export_weights(model, dialect)) for dialect in Dialect)
    finally:
        qq.revert(model)
    packed = [n.removesuffix("_packed") for n in compressed if n.endswith("weight_packed") and n[:-7] in modelopt]
    assert packed or name == "gpt_oss"
    for weight in packed:
        assert torch.equal(compressed[f"{weight}_packed"], modelopt[weight])
        assert torch.equal(*(d[f"{weight}_scale"].view(torch.uint8) for d in (compressed, modelopt)))
        scale, inverse = modelopt[f"{weight}_scale_2"], compressed[f"{weight}_global_scale"]
        assert scale.shape == ()
        assert inverse.shape == (1,)
        assert torch.equal(1 / inverse[0], scale)
        assert torch.equal(1 / scale, inverse[0])


def test_a_prefix_in_the_source_is_kept(tmp_path: Path) -> None:
    """The text part of Qwen3.5-MoE is published inside a vision-language model, under another prefix."""
    from safetensors.torch import save_file
    from tiny_models import tiny_model

    tiny_model("qwen3_5_moe").save_pretrained(tmp_path / "source")
    prefixed = {re.sub(r"^model\.", "model.language_model.", n): t for n, t in tensors(tmp_path / "source").items()}
    save_file(prefixed, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    qq.quantize_checkpoint(tmp_path / "source", tmp_path / "files")
    model = qq.convert(AutoModelForCausalLM.from_pretrained(tmp_path / "source"), "w4a16")
    qq.export_checkpoint(model, tmp_path / "model", dialect="modelopt")
    assert_same_tensors(tensors(tmp_path / "model"), tensors(tmp_path / "files"))
    assert set(prefixed) <= set(tensors(tmp_path / "files"))
    qq.verify(model, tmp_path / "files")
    state = qq.load_model(tmp_path / "model").state_dict()
    assert torch.equal(state["model.norm.weight"], model.model.norm.weight)  # pyright: ignore
