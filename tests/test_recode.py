"""Contract under test: dequantized and re-dialected checkpoints hold the same numbers under names that clients load."""

import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bits import assert_same_bits
from by_hand import CHECKPOINTS, config, rewritten, tensors
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import Case, cases
from tiny_models import tiny_inputs, tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import quads_qat as qq
from quads_qat import Dialect, Recipe, ops
from quads_qat.contract import contract_of
from quads_qat.nvfp4_checkpoint import Checkpoint
from quads_qat.qtensor import NVFP4Tensor
from quads_qat.recode import convert_dialect, dequantize_checkpoint
from quads_qat.record import RECORD

PEERS = sorted(f"{p}/{path.name}" for p in ("modelopt", "compressed_tensors") for path in (CHECKPOINTS / p).iterdir())
dialects = pytest.mark.parametrize("dialect", list(Dialect), ids=str)
OTHER = {Dialect.MODELOPT: Dialect.COMPRESSED_TENSORS, Dialect.COMPRESSED_TENSORS: Dialect.MODELOPT}


@cache
def trainer(name: str) -> nn.Module:
    """Observed; only read."""
    source = CHECKPOINTS / "bf16" / name
    model = AutoModelForCausalLM.from_pretrained(source) if source.exists() else tiny_model(name)
    qq.convert(model, "w4a16")
    with torch.no_grad(), qq.observe_activations(model):
        model(**tiny_inputs(model))  # pyright: ignore[reportArgumentType]
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def exported(name: str, dialect: str, activations: str = "none") -> Path:
        path = tmp_path_factory.mktemp("out") / name
        qq.export_checkpoint(trainer(name), path, dialect=dialect, activations=activations)
        return path

    return exported


# Dequantize.


@pytest.mark.parametrize("fixture", PEERS)
def test_peers_checkpoints_become_plain_ones(fixture: str, tmp_path: Path) -> None:
    """transformers finds every name, nothing more, and the values that load_model decodes."""
    path, plain = CHECKPOINTS / fixture, tmp_path / "plain"
    dequantize_checkpoint(path, plain)
    loader: Any = AutoModelForCausalLM
    loaded, info = loader.from_pretrained(plain, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    expected = qq.load_model(path).state_dict()
    for name, tensor in loaded.state_dict().items():
        assert_same_bits(tensor, expected[name], name)
    original = CHECKPOINTS / "bf16" / path.name.split("-")[0]
    assert tensors(plain).keys() == tensors(original).keys()
    assert {name: t.shape for name, t in tensors(plain).items()} == {n: t.shape for n, t in tensors(original).items()}
    assert not {"quantization_config", "quads_qat"} & config(plain).keys()
    assert sorted(os.listdir(plain)) == ["config.json", "generation_config.json", "model.safetensors", RECORD]


@pytest.mark.parametrize(
    ("name", "dialect"),
    [
        ("gpt_oss", Dialect.MODELOPT),
        ("gpt_oss", Dialect.COMPRESSED_TENSORS),
        ("llama4", Dialect.COMPRESSED_TENSORS),
        ("nemotron_h", Dialect.MODELOPT),
        ("qwen3_5_moe", Dialect.MODELOPT),
    ],
)
def test_our_checkpoints_become_plain_ones(name: str, dialect: Dialect, checkpoint: Any, tmp_path: Path) -> None:
    path = checkpoint(name, dialect, "observed")
    dequantize_checkpoint(path, tmp_path / "plain")
    loader: Any = getattr(transformers, type(trainer(name)).__name__)
    loaded, info = loader.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    expected = qq.load_model(path).state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for key, tensor in loaded.state_dict().items():
        assert_same_bits(tensor, expected[key], key)


def test_companions_shards_and_dtype(checkpoint: Any, tmp_path: Path) -> None:
    path = checkpoint("qwen3moe", "modelopt")
    extra = {
        n.replace("layers.1.", "layers.61."): t for n, t in tensors(path).items() if "layers.1.mlp.experts.0." in n
    }
    source = rewritten(path, tmp_path / "source", extra)
    (source / "tokenizer.json").write_text("{}")
    seen: list[tuple[int, int]] = []
    model_class = type(trainer("qwen3moe"))
    ignored = model_class._keys_to_ignore_on_load_unexpected  # pyright: ignore[reportAttributeAccessIssue]
    model_class._keys_to_ignore_on_load_unexpected = [r"layers\.61\."]  # pyright: ignore[reportAttributeAccessIssue]
    try:
        dequantize_checkpoint(
            source,
            tmp_path / "plain",
            dtype=torch.float32,
            shard_bytes=300_000,
            progress=lambda done, total: seen.append((done, total)),
        )
    finally:
        model_class._keys_to_ignore_on_load_unexpected = ignored  # pyright: ignore[reportAttributeAccessIssue]
    plain = tmp_path / "plain"
    assert (plain / "tokenizer.json").read_text() == "{}"
    assert config(plain)["dtype"] == "float32"
    index = json.loads((plain / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {p.name for p in plain.glob("*.safetensors")}
    assert len(list(plain.glob("*.safetensors"))) > 3
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1]
    stored = tensors(plain)
    assert set(index["weight_map"]) == set(stored)
    expected = qq.load_model(path, dtype=torch.float32).state_dict()
    weight = "mlp.experts.0.up_proj.weight"
    assert_same_bits(stored[f"model.layers.1.{weight}"], expected["model.layers.1.mlp.experts.gate_up_proj"][0, 64:])
    assert_same_bits(stored[f"model.layers.61.{weight}"], stored[f"model.layers.1.{weight}"])
    with pytest.raises(ValueError, match=r"dtype must be bfloat16, float16 or float32, got torch\.int8"):
        dequantize_checkpoint(path, tmp_path / "x", dtype=torch.int8)


@dialects
def test_nothing_half_written_stays(dialect: Dialect, checkpoint: Any, tmp_path: Path) -> None:
    path = checkpoint("qwen3moe", dialect)
    name = f"model.layers.1.self_attn.v_proj.{'weight_scale_2' if dialect is Dialect.MODELOPT else 'weight_scale'}"
    damaged = rewritten(path, tmp_path / "damaged", {name: None})
    with pytest.raises(ValueError, match=f"{name} is missing"):
        dequantize_checkpoint(damaged, tmp_path / "out", shard_bytes=10_000)
    with pytest.raises(ValueError, match=f"{name} is missing"):
        convert_dialect(damaged, tmp_path / "out", dialect=OTHER[dialect], shard_bytes=10_000)
    assert [p.name for p in tmp_path.iterdir()] == ["damaged"]
    for make in (dequantize_checkpoint, lambda a, b: convert_dialect(a, b, dialect=OTHER[dialect])):
        with pytest.raises(ValueError, match="exists already; remove it or choose another destination"):
            make(path, damaged)


def test_a_full_disk_is_known_before_it_is_full(checkpoint: Any, tmp_path: Path, monkeypatch: Any) -> None:
    path, usage = checkpoint("qwen3moe", "modelopt"), shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    for make in (dequantize_checkpoint, lambda a, b: convert_dialect(a, b, dialect="compressed-tensors")):
        with pytest.raises(ValueError, match=r"out: needs about \d+\.\d kB, 1\.0 kB are free there"):
            make(path, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# Requantizing what was dequantized.


def canonical(codes: Tensor) -> Tensor:
    """Codes of -0.0 as codes of 0.0."""
    low, high = codes & 15, codes >> 4
    return torch.where(low == 8, 0, low) | (torch.where(high == 8, 0, high) << 4)


def assert_same_or_halved(first: NVFP4Tensor, second: NVFP4Tensor) -> None:
    """The same bytes, codes of -0.0 aside; or p is halved and every block scale doubled: the same values."""
    if torch.equal(second.per_tensor_scale, first.per_tensor_scale):
        assert torch.equal(canonical(first.qdata), second.qdata)
        assert_same_bits(first.block_scale, second.block_scale)
    else:
        assert torch.equal(second.per_tensor_scale, first.per_tensor_scale / 2)
        assert torch.equal(ops.dequantize(first, torch.float32), ops.dequantize(second, torch.float32))


@given(cases(dtypes=(torch.bfloat16,), kinds=("own",), exponents=st.integers(-20, 10)))
def test_aligned_requantizes_to_the_same_bytes(case: Case) -> None:
    """Where no block scale is subnormal. p is halved only by an amax that rounds down to 1344 p, and only once."""
    first = ops.quantize(case.x, recipe=Recipe.ALIGNED)
    second = ops.quantize(ops.dequantize(first, torch.bfloat16), recipe=Recipe.ALIGNED)
    assume(bool((first.block_scale.float() >= 2**-6).all()))
    assert_same_or_halved(first, second)
    amax = case.x.abs().amax().float()
    halved = bool(second.per_tensor_scale < first.per_tensor_scale)
    assert halved == bool((amax > 0) & (amax <= 1392 * first.per_tensor_scale))
    third = ops.quantize(ops.dequantize(second, torch.bfloat16), recipe=Recipe.ALIGNED)
    assert torch.equal(third.per_tensor_scale, second.per_tensor_scale)


def test_where_requantizing_changes_bytes() -> None:
    """The three exceptions, smallest cases."""

    def twice(x: Tensor) -> tuple[Any, Any]:
        first = ops.quantize(x, recipe=Recipe.ALIGNED)
        return first, ops.quantize(ops.dequantize(first, torch.bfloat16), recipe=Recipe.ALIGNED)

    x = torch.zeros(16, dtype=torch.bfloat16)
    x[0], x[1] = 6, -0.1
    first, second = twice(x)
    assert (first.qdata[0] >> 4, second.qdata[0] >> 4) == (8, 0)  # -0.0
    x[0] = 1352
    first, second = twice(x)
    assert second.per_tensor_scale == first.per_tensor_scale / 2
    x = torch.zeros(32, dtype=torch.bfloat16)
    x[0], x[16] = 2688, 1.625 * 6 * 2**-9
    first, second = twice(x)
    assert [ops.dequantize(q)[16].item() for q in (first, second)] == [0.015625, 0.01171875]  # a subnormal block scale


@dialects
@pytest.mark.parametrize("name", ["qwen3moe", "gpt_oss"])
def test_a_loaded_model_exports_the_same_bytes(name: str, dialect: Dialect, checkpoint: Any, tmp_path: Path) -> None:
    path = checkpoint(name, dialect)
    again = qq.convert(qq.load_model(path), mode="w4a16")
    qq.export_checkpoint(again, tmp_path / "again", dialect=dialect)
    first, second = Checkpoint.open(path), Checkpoint.open(tmp_path / "again")
    assert first.reader.names() == second.reader.names()
    for weight in first.quantized():
        assert_same_or_halved(first.read(weight), second.read(weight))
    for rest in set(first.reader.names()) - {t for n in first.quantized() for t in first.tensor_names(n).weight}:
        assert_same_bits(first.reader.get(rest), second.reader.get(rest), rest)


@pytest.mark.parametrize("fixture", ["qwen3moe-w4a16_nvfp4", "mixtral-nvfp4", "gpt_oss-nvfp4", "llama-nvfp4"])
def test_model_optimizers_checkpoints_requantize_to_the_same_bytes(fixture: str, tmp_path: Path) -> None:
    """With the arithmetic of the machine that made them: an amax of 6 * 448 * p rounds back to itself in bf16."""
    first, second = requantized(CHECKPOINTS / "modelopt" / fixture, Recipe.MODELOPT_IEEE, tmp_path / "again")
    for weight in first.quantized():
        a, b = first.read(weight), second.read(weight)
        assert torch.equal(canonical(a.qdata), canonical(b.qdata)), weight
        assert_same_bits(a.block_scale, b.block_scale, weight)
        assert torch.equal(a.per_tensor_scale, b.per_tensor_scale), weight


def test_llm_compressors_checkpoints_do_not(tmp_path: Path) -> None:
    """Its scale is rounded in bf16 twice, so the amax of what it decodes to can give another one: other values."""
    path = CHECKPOINTS / "compressed_tensors" / "qwen3moe-nvfp4a16"
    first, second = requantized(path, Recipe.LLM_COMPRESSOR, tmp_path / "again")
    pairs = [(first.read(weight), second.read(weight)) for weight in first.quantized()]
    changed = sum(not torch.equal(a.stored_scale, b.stored_scale) for a, b in pairs)
    assert 0 < changed < len(pairs)
    assert all(torch.equal(canonical(a.qdata), canonical(b.qdata)) for a, b in pairs)


def requantized(path: Path, recipe: Recipe, target: Path) -> tuple[Checkpoint, Checkpoint]:
    """A checkpoint, and what its loaded model exports."""
    first = Checkpoint.open(path)
    model = qq.convert(qq.load_model(path), mode="w4a16", recipe=recipe)
    qq.export_checkpoint(model, target, dialect=first.dialect)
    return first, Checkpoint.open(target)


# Dialects.


@pytest.mark.parametrize(
    ("name", "activations"),
    [
        ("qwen3moe", "none"),
        ("qwen3moe", "observed"),
        ("mixtral", "observed"),
        ("gpt_oss", "observed"),
        ("deepseek_v3", "none"),
        ("llama4", "observed"),
    ],
)
def test_the_other_dialect_is_what_export_writes(name: str, activations: str, checkpoint: Any, tmp_path: Path) -> None:
    """Names, dtypes, shapes, bytes and configs; and back again."""
    path, expected = (checkpoint(name, dialect, activations) for dialect in Dialect)
    convert_dialect(path, tmp_path / "other", dialect="compressed-tensors")
    convert_dialect(tmp_path / "other", tmp_path / "back", dialect="modelopt", shard_bytes=100_000)
    for made, wanted in ((tmp_path / "other", expected), (tmp_path / "back", path)):
        assert tensors(made).keys() == tensors(wanted).keys()
        for key, tensor in tensors(wanted).items():
            assert_same_bits(tensors(made)[key], tensor, key)
        assert config(made) == config(wanted)
        written = [sorted(p.name for p in d.iterdir() if p.suffix == ".json") for d in (made, wanted)]
        assert set(written[0]) - {"model.safetensors.index.json"} == set(written[1])
    assert qq.verify(trainer(name), tmp_path / "other").ok
    assert list(qq.diff(path, tmp_path / "back")) == []


@dialects
def test_configs_announce_the_dtype_of_the_files(dialect: Dialect, checkpoint: Any, tmp_path: Path) -> None:
    """Of a checkpoint whose config.json kept the fp32 of the model that it was trained from."""
    path = rewritten(checkpoint("qwen3moe", dialect), tmp_path / "source", {})
    told = config(path) | {"dtype": "float32"}
    (path / "config.json").write_text(json.dumps(told), "utf-8")
    convert_dialect(path, tmp_path / "other", dialect=OTHER[dialect])
    assert config(tmp_path / "other")["dtype"] == "bfloat16"
    dequantize_checkpoint(path, tmp_path / "plain", dtype=torch.float16)
    assert config(tmp_path / "plain")["dtype"] == "float16"
    norm = {"model.norm.weight": tensors(path)["model.norm.weight"].float()}  # nothing to be sure of
    (mixed := rewritten(path, tmp_path / "mixed", norm) / "config.json").write_text(json.dumps(told), "utf-8")
    convert_dialect(mixed.parent, tmp_path / "kept", dialect=OTHER[dialect])
    assert config(tmp_path / "kept")["dtype"] == "float32"


@dialects
def test_powers_of_two_of_others(dialect: Dialect, checkpoint: Any, tmp_path: Path) -> None:
    """What counts is the scales, not who wrote them."""
    path = rewritten(checkpoint("gpt_oss", dialect, "observed"), tmp_path / "foreign", {})
    plain = {k: v for k, v in config(path).items() if k != "quads_qat"}
    (path / "config.json").write_text(json.dumps(plain), "utf-8")
    convert_dialect(path, tmp_path / "out", dialect=OTHER[dialect])
    expected = tensors(checkpoint("gpt_oss", OTHER[dialect], "observed"))
    assert tensors(tmp_path / "out").keys() == expected.keys()
    for key, tensor in expected.items():
        assert_same_bits(tensors(tmp_path / "out")[key], tensor, key)
    with pytest.raises(ValueError, match="quads_qat did not write it"):
        contract_of(tmp_path / "out")


def test_what_the_other_dialect_cannot_express(checkpoint: Any, tmp_path: Path) -> None:
    def refused(path: Path, dialect: str, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            convert_dialect(path, tmp_path / "out", dialect=dialect)
        assert not (tmp_path / "out").exists()

    modelopt, compressed = CHECKPOINTS / "modelopt", CHECKPOINTS / "compressed_tensors"
    refused(modelopt / "qwen3-w4a16_nvfp4", "modelopt", "is in the modelopt dialect already")
    refused(
        modelopt / "qwen3-w4a16_nvfp4",
        "compressed-tensors",
        r"weight_scale_2 is \d\S+, not a power of two; the compressed-tensors dialect stores its reciprocal, which",
    )
    refused(compressed / "qwen3-nvfp4a16", "modelopt", "weight_global_scale is .* not a power of two; the modelopt dia")
    refused(
        modelopt / "qwen3-nvfp4_fp8_kv_cfg", "compressed-tensors", r"k_proj\.k_scale belongs to a quantized KV cach"
    )
    names = [n for n in tensors(checkpoint("qwen3", "modelopt", "observed")) if n.endswith("input_scale")]
    value = next(v for v in torch.linspace(0.1, 0.2, 100) if v.reciprocal().reciprocal() != v)
    given_scales = dict.fromkeys(names, value)
    qq.export_checkpoint(trainer("qwen3"), tmp_path / "given", dialect="modelopt", activations=given_scales)
    refused(tmp_path / "given", "compressed-tensors", r"input_scale is \[0\.1\d+\]; the compressed-tensors dialect sto")
    path = checkpoint("gpt_oss", "compressed-tensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight_global_scale"
    apart = rewritten(path, tmp_path / "apart", {name: tensors(path)[name] * 2})
    refused(apart, "modelopt", r"experts\.gate_up_proj: its experts have scales of their own, and the modelopt dialect")
