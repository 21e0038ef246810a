"""Contract under test: what ``export_weights`` streams and ``export_checkpoint`` writes, besides the peers' bytes."""

import json
import re
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from by_hand import CHECKPOINTS, config, decode, decoded, tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tiny_models import tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from twins import plain_twin

import quads_qat as qq
from quads_qat import Dialect, Recipe

dialects = pytest.mark.parametrize("dialect", list(Dialect), ids=str)
INPUT = ("input_scale", "input_global_scale")
IDS = torch.randint(0, 120, (2, 16), generator=torch.Generator().manual_seed(0))


def trainer(name: str = "qwen3moe", dtype: torch.dtype = torch.bfloat16, **options: Any) -> nn.Module:
    """A converted model of its own, to be changed at will."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "bf16" / name, dtype=dtype)
    return qq.convert(model, "w4a16", **options)


def observed(model: nn.Module) -> nn.Module:
    with torch.no_grad(), qq.observe_activations(model):
        model(IDS)
    return model


@cache
def shared(name: str = "qwen3moe") -> nn.Module:
    """For tests that only read it. Observed."""
    return observed(trainer(name))


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name in expected:
        assert_same_bits(actual[name], expected[name], name)


# The stream.


@dialects
@pytest.mark.parametrize("name", ["qwen3moe", "gpt_oss", "deepseek_v3"])
def test_layers_follow_each_other_in_order(name: str, dialect: Dialect) -> None:
    given = {"model.layers.0.self_attn.k_proj.k_scale": 0.5} if name == "qwen3moe" else {}
    scales = {n: t for n, t in qq.export_weights(shared(name), dialect, activations="observed") if n.endswith(INPUT)}
    names = [n for n, _ in qq.export_weights(shared(name), dialect, activations=scales | given)]
    assert set(given) <= set(names)
    layers = [int(found[1]) if (found := re.match(r"model\.layers\.(\d+)\.", n)) else -1 for n in names]
    assert layers == sorted(layers)
    assert set(layers) == {-1, 0, 1}


@dialects
def test_tensors_are_fresh(dialect: Dialect) -> None:
    """Filling what came out changes neither the model nor a second export."""
    model = shared()
    first = {n: t.clone() for n, t in qq.export_weights(model, dialect, activations="observed")}
    for _, tensor in qq.export_weights(model, dialect, activations="observed"):
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
        tensor.view(torch.uint8).fill_(7) if tensor.ndim else tensor.fill_(7)
    assert_same_tensors(dict(qq.export_weights(model, dialect, activations="observed")), first)


@dialects
def test_live_weights_are_read(dialect: Dialect) -> None:
    """vllm#32718: no stale copy; after a step the bytes are those of the new weights."""
    model = trainer()
    before = dict(qq.export_weights(model, dialect))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    after = dict(qq.export_weights(model, dialect))
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert {name for name in after if after[name].dtype == torch.uint8} <= changed

    layer = "model.layers.1.mlp.experts.2"
    gate_up = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")[2].detach()
    expected = qq.ops.fake_quantize(gate_up, recipe=Recipe.ALIGNED)
    names = ("weight_packed", "weight_scale", "weight_global_scale")
    if dialect is Dialect.MODELOPT:
        names = ("weight", "weight_scale", "weight_scale_2")
    parts = [
        decode(*(after[f"{layer}.{p}.{n}"] for n in names), divides=dialect is not Dialect.MODELOPT)
        for p in ("gate_proj", "up_proj")
    ]
    assert torch.equal(torch.cat(parts).bfloat16(), expected)


@dialects
@pytest.mark.parametrize("activations", ["none", "observed"])
@pytest.mark.parametrize(("arch", "dtype"), [("deepseek_v3", torch.float32), ("gpt_oss", torch.bfloat16)])
def test_metadata_is_that_of_the_stream(arch: str, dtype: torch.dtype, activations: str, dialect: Dialect) -> None:
    model = observed(qq.convert(tiny_model(arch, dtype=dtype), "w4a16"))
    metadata = qq.export_metadata(model, dialect, activations=activations)
    stream = qq.export_weights(model, dialect, activations=activations)
    assert metadata == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stream]


def test_metadata_quantizes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def quantize(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("quantized")

    monkeypatch.setattr(qq.ops, "quantize", quantize)
    assert qq.export_metadata(shared(), "modelopt")


@pytest.mark.parametrize("bucket_bytes", [1, 1000, 65536, 10**9])
def test_buckets_hold_the_stream(bucket_bytes: int) -> None:
    stream = list(qq.export_weights(shared(), "modelopt", activations="observed"))
    unpacked = []
    for entries, bucket in qq.bucketed(iter(stream), bucket_bytes):
        assert bucket.dtype == torch.uint8
        assert len(entries) == 1 or bucket.numel() <= bucket_bytes
        for name, dtype, shape, offset in entries:
            assert offset % 16 == 0
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            unpacked.append((name, bucket[offset : offset + nbytes].view(dtype).view(shape)))
    assert [name for name, _ in unpacked] == [name for name, _ in stream]
    assert_same_tensors(dict(unpacked), dict(stream))


SHAPES = st.lists(st.integers(0, 5), max_size=3)
DTYPES = st.sampled_from([torch.uint8, torch.float32])


@settings(max_examples=50)
@given(st.lists(st.tuples(SHAPES, DTYPES), max_size=8), st.integers(1, 200))
def test_any_tensors_fit_in_buckets(shapes: list[tuple[list[int], torch.dtype]], bucket_bytes: int) -> None:
    stream = [(str(i), torch.full(shape, i + 1, dtype=dtype)) for i, (shape, dtype) in enumerate(shapes)]
    seen = []
    for entries, bucket in qq.bucketed(stream, bucket_bytes):
        for name, dtype, shape, offset in entries:
            part = bucket[offset : offset + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
            assert torch.equal(part, dict(stream)[name])
            seen.append(name)
    assert seen == [name for name, _ in stream]


# Dtypes.


@dialects
def test_fp32_masters_are_cast_first(dialect: Dialect) -> None:
    """Everything comes out as from a BF16 copy of the model; what the model keeps in fp32 stays fp32."""
    model, cast = tiny_model("deepseek_v3", dtype=torch.float32), tiny_model("deepseek_v3", seed=1)
    cast.load_state_dict(model.state_dict())
    kept = "model.layers.1.mlp.gate.weight"
    streams = [dict(qq.export_weights(qq.convert(m, "w4a16"), dialect)) for m in (model, cast)]
    assert_same_tensors(*streams)
    assert streams[0][kept].dtype == torch.float32
    assert {t.dtype for n, t in streams[0].items() if "norm" in n or "embed" in n} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral", "gpt_oss", "llama4", "nemotron_h", "qwen3_5_moe"])
def test_dequantized_weights_have_the_original_names(arch: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """What save_pretrained writes of a plain model with the weights that this one multiplies by."""
    model = qq.convert(tiny_model(arch, dtype=dtype), "w4a16")
    twin = plain_twin(model)
    (twin if dtype == torch.bfloat16 else twin.bfloat16()).save_pretrained(tmp_path)  # pyright: ignore
    stream = list(qq.export_weights(model, "dequantized"))
    expected = tensors(tmp_path)
    if dtype == torch.float32:  # which some models keep of some weights
        kept = {name: tensor for name, tensor in stream if tensor.dtype == dtype}
        assert all(torch.equal(tensor.bfloat16(), expected.pop(name)) for name, tensor in kept.items())
        stream = [(name, tensor) for name, tensor in stream if name not in kept]
    assert_same_tensors(dict(stream), expected)
    assert len(stream) == len(dict(stream))


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_dequantized_weights_come_like_packed_ones(arch: str) -> None:
    """Announced, layer by layer, fresh, of the weights as they are now."""
    model = qq.convert(tiny_model(arch), "w4a16", recipe=Recipe.TRANSFORMER_ENGINE)  # which no dialect carries
    first = [(name, tensor.clone()) for name, tensor in qq.export_weights(model, "dequantized")]
    assert qq.export_metadata(model, "dequantized") == [(n, t.dtype, tuple(t.shape)) for n, t in first]
    layers = [int(found[1]) if (found := re.match(r"model\.layers\.(\d+)\.", n)) else -1 for n, _ in first]
    assert layers == sorted(layers)
    for _, tensor in qq.export_weights(model, "dequantized"):
        assert tensor.is_contiguous()
        tensor.fill_(7)
    assert_same_tensors(dict(qq.export_weights(model, "dequantized")), dict(first))
    back = qq.unbucketed(qq.bucketed(qq.export_weights(model, "dequantized"), 4096))
    assert_same_tensors(dict(back), dict(first))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-2)
    assert all(torch.equal(t, -2 * dict(first)[n]) for n, t in qq.export_weights(model, "dequantized"))


def test_dequantized_weights_have_no_activation_scales() -> None:
    for export in (qq.export_weights, qq.export_metadata):
        with pytest.raises(ValueError, match=r"dequantized weights come without activation scales, got .*'observed'"):
            export(shared(), "dequantized", activations="observed")


@pytest.mark.parametrize("dialect", ["modelopt", "dequantized"])
def test_fp16_that_decodes_to_inf_is_refused(dialect: str) -> None:
    model = trainer("qwen3", torch.float16)
    weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
    with torch.no_grad():
        weight[3, 5] = 60000
    assert dict(qq.export_weights(model, dialect))
    with torch.no_grad():
        weight[3, 5] = 65504
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.down_proj\.weight: fp16 .* decode to inf .*; clip them"):
        list(qq.export_weights(model, dialect))


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("name", ["self_attn.o_proj.weight", "mlp.experts.down_proj"])
def test_fp16_that_rounds_what_codes_decode_to_is_named(name: str, dialect: str, tmp_path: Path) -> None:
    """Channels that are nearly dead: in bf16 they are exact, in fp16 the trainer multiplies by other values."""
    for dtype in (torch.bfloat16, torch.float16):
        for small in (False, True):
            model, path = trainer("qwen3moe", dtype), tmp_path / f"{dtype} {small}"
            if small:
                weight = model.get_parameter(f"model.layers.1.{name}").data
                weight.mul_(0.01 / weight.abs().max())[..., :16].mul_(2e-4)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                qq.export_checkpoint(model, path, dialect=dialect)
            said = [str(w.message) for w in warned if w.category is UserWarning]
            if small and dtype == torch.float16:
                assert len(said) == 1
                assert f"fp16 cannot hold all that model.layers.1.{name} and 0 more weights decode to" in said[0]
                with pytest.raises(qq.VerificationError, match=r"layers\.1\..*: fp16, in which the trainer multiplies"):
                    qq.verify(model, path)
            else:
                assert not said
                assert qq.verify(model, path).ok


# Activation scales.


def seen_by_hand(model: nn.Module) -> dict[str, float]:
    """The amax of each linear's input, by hooks; routed experts apart."""
    amaxes: dict[str, float] = {}

    def hook(name: str) -> Any:
        def record(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            amaxes[name] = max(amaxes.get(name, 0.0), args[0].abs().max().item())

        return record

    handles = [m.register_forward_pre_hook(hook(n)) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    experts = [m.register_forward_pre_hook(hook(n)) for n, m in model.named_modules() if n.endswith("mlp.experts")]
    with torch.no_grad():
        model(IDS)
    for handle in (*handles, *experts):
        handle.remove()
    return amaxes


CASES = [
    (Recipe.ALIGNED, Dialect.MODELOPT),
    (Recipe.ALIGNED, Dialect.COMPRESSED_TENSORS),
    (Recipe.MODELOPT_IEEE, Dialect.MODELOPT),
    (Recipe.LLM_COMPRESSOR, Dialect.COMPRESSED_TENSORS),
]


def stored_scale(amax: float, recipe: Recipe, dialect: Dialect) -> float:
    """What the dialect stores for an activation amax."""
    if recipe is Recipe.ALIGNED:
        p = 2.0 ** torch.tensor(amax / 2688, dtype=torch.float64).log2().ceil().item()
        return p if dialect is Dialect.MODELOPT else 1 / p
    if recipe is Recipe.MODELOPT_IEEE:
        return (torch.tensor(amax) / torch.tensor(2688.0)).item()
    return (torch.tensor(amax, dtype=torch.bfloat16).reciprocal() * 2688).item()  # what torch makes of 2688 / amax


@pytest.mark.parametrize(("recipe", "dialect"), CASES)
def test_observed_activation_scales(recipe: Recipe, dialect: Dialect) -> None:
    model = observed(trainer(recipe=recipe))
    amaxes = seen_by_hand(model)
    ending, shape = ("input_scale", ()) if dialect is Dialect.MODELOPT else ("input_global_scale", (1,))
    stream = {n: t for n, t in qq.export_weights(model, dialect, activations="observed") if n.endswith(ending)}
    assert all(t.dtype == torch.float32 and t.shape == shape for t in stream.values())
    values = {name.removesuffix(f".{ending}"): tensor.item() for name, tensor in stream.items()}
    quantized = {n.rpartition(".")[0] for n, t in qq.export_weights(model, dialect) if t.dtype == torch.uint8}
    assert values.keys() == quantized

    for layer in ("model.layers.0", "model.layers.1"):
        attention, experts = f"{layer}.self_attn", f"{layer}.mlp.experts"
        shared_by_qkv = stored_scale(amaxes[f"{attention}.q_proj"], recipe, dialect)
        assert {values[f"{attention}.{p}_proj"] for p in "qkv"} == {shared_by_qkv}
        assert values[f"{attention}.o_proj"] == stored_scale(amaxes[f"{attention}.o_proj"], recipe, dialect)
        of_projection = {p: {values[f"{experts}.{e}.{p}_proj"] for e in range(4)} for p in ("gate", "up", "down")}
        assert of_projection["gate"] == of_projection["up"]
        assert {len(found) for found in of_projection.values()} == {1}  # one for all experts, routed to or not
        top = stored_scale(amaxes[experts], recipe, dialect)
        assert of_projection["gate"] == {top}  # with 2 of 4 experts for 32 tokens, every token is some expert's input


def test_unobserved_activations_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no activations were observed for .*; run some batches inside"):
        qq.export_weights(trainer("qwen3"), "modelopt", activations="observed")
    state = qq.quant_state_dict(shared())
    model = trainer()
    lost = "model.layers.1.mlp.experts.down_proj.amax"
    qq.load_quant_state_dict(model, {key: value for key, value in state.items() if key != lost})
    with pytest.raises(ValueError, match=re.escape(f"observed for {lost.removesuffix('.amax')};")):
        qq.export_weights(model, "modelopt", activations="observed")


def test_given_activation_scales_are_checked() -> None:
    model = shared("qwen3")
    stream = qq.export_weights(model, "modelopt", activations="observed")
    scales = {name: tensor for name, tensor in stream if name.endswith(INPUT)}
    first = next(iter(scales))

    def refused(match: str, **change: Any) -> None:
        with pytest.raises(ValueError, match=match):
            qq.export_weights(model, "modelopt", activations=scales | change)

    missing = {name: scale for name, scale in scales.items() if name != first}
    with pytest.raises(ValueError, match=f"activations has no {re.escape(first)}; a W4A4 checkpoint needs one"):
        qq.export_weights(model, "modelopt", activations=missing)
    refused("belongs to no quantized weight; names are like", **{"model.layers.0.self_attn.q_proj.imput_scale": 1.0})
    for bad in (0.0, -1.0, float("nan"), float("inf"), torch.ones(2)):
        refused("must be one finite number > 0", **{first: bad})
    with pytest.raises(ValueError, match="must be 'none', 'observed' or a mapping, got 'dynamic'"):
        qq.export_weights(model, "modelopt", activations="dynamic")
    plain = {name: scale.item() for name, scale in scales.items()}  # numbers get the dialect's shape
    assert_same_tensors(*(dict(qq.export_weights(model, "modelopt", activations=a)) for a in (plain, scales)))


# Whole directories.


@dialects
@pytest.mark.parametrize("shard_bytes", [1, 20_000, 10**9])
def test_shards_and_index(shard_bytes: int, dialect: Dialect, tmp_path: Path) -> None:
    model = shared()
    qq.export_checkpoint(model, tmp_path / "out", dialect=dialect, shard_bytes=shard_bytes)
    stream = dict(qq.export_weights(model, dialect))
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert_same_tensors(tensors(tmp_path / "out"), stream)
    index = tmp_path / "out" / "model.safetensors.index.json"
    if shard_bytes == 10**9:
        assert [file.name for file in files] == ["model.safetensors"]
        assert not index.exists()
        return
    written = json.loads(index.read_text("utf-8"))
    assert written["metadata"]["total_size"] == sum(t.nbytes for t in stream.values())
    assert list(written["weight_map"]) == list(stream)  # the order of the layers, too
    assert {file.name for file in files} == set(written["weight_map"].values())
    assert files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    for file in files:
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert {written["weight_map"][name] for name in opened.keys()} == {file.name}  # noqa: SIM118
            sizes = [stream[name].nbytes for name in opened.keys()]  # noqa: SIM118
        assert len(sizes) == 1 or sum(sizes) <= shard_bytes
    assert_same_tensors(dict(qq.load_model(tmp_path / "out").state_dict()), dict(_whole(model, dialect, tmp_path)))


def _whole(model: nn.Module, dialect: Dialect, tmp_path: Path) -> dict[str, Tensor]:
    qq.export_checkpoint(model, tmp_path / "whole", dialect=dialect)
    return qq.load_model(tmp_path / "whole").state_dict()


def test_companions_are_copied_and_the_config_is_extended(tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = trainer("qwen3")
    model.save_pretrained(source)  # pyright: ignore[reportCallIssue]
    original = config(source) | {"my_key": [1, {"a": None}], "num_experts": 7}
    (source / "config.json").write_text(json.dumps(original), "utf-8")
    for name in ("tokenizer.json", "chat_template.jinja", "modeling_mine.py", "merges.txt"):
        (source / name).write_text(name, "utf-8")
    for name in ("old.bin", "model.safetensors.index.json", "hf_quant_config.json", ".hidden"):
        (source / name).write_text("{}", "utf-8")
    qq.export_checkpoint(model, tmp_path / "out", dialect="compressed-tensors", source=source)
    found = {path.name for path in (tmp_path / "out").iterdir()}
    assert found == {
        *("config.json", "generation_config.json", "model.safetensors", "quads_qat_files.json"),
        *("tokenizer.json", "chat_template.jinja", "modeling_mine.py", "merges.txt"),
    }
    written = config(tmp_path / "out")
    assert written.pop("quantization_config")["quant_method"] == "compressed-tensors"
    assert written.pop("quads_qat") == qq.contract_of(model).to_json()
    assert written == original


def test_without_a_source_the_config_comes_from_the_model(tmp_path: Path) -> None:
    """transformers writes ``num_local_experts`` for this model, others read ``num_experts``."""
    qq.export_checkpoint(shared(), tmp_path / "out", dialect="modelopt", activations="observed")
    written = config(tmp_path / "out")
    assert written["architectures"] == ["Qwen3MoeForCausalLM"]
    assert written["num_experts"] == written["num_local_experts"] == 4
    assert written["dtype"] == "bfloat16"
    assert written["quantization_config"]["quant_algo"] == "NVFP4"
    assert (tmp_path / "out" / "generation_config.json").exists()


@pytest.mark.parametrize("activations", ["none", "observed"])
@dialects
def test_a_source_in_fp32_announces_what_the_files_hold(dialect: Dialect, activations: str, tmp_path: Path) -> None:
    """Else readers would ask for fp32, and multiply by it what decodes to bf16."""
    AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "bf16" / "qwen3", dtype=torch.float32).save_pretrained(
        tmp_path / "source"
    )
    original = config(tmp_path / "source")
    assert original["dtype"] == "float32"
    model = observed(qq.convert(AutoModelForCausalLM.from_pretrained(tmp_path / "source"), "w4a16"))
    options: dict[str, Any] = {"dialect": dialect, "activations": activations, "source": tmp_path / "source"}
    qq.export_checkpoint(model, tmp_path / "out", **options)
    written = config(tmp_path / "out")
    assert {k: written[k] for k in original} == original | {"dtype": "bfloat16"}
    assert qq.verify(model, tmp_path / "out").ok
    assert {p.dtype for p in qq.load_model(tmp_path / "out").parameters()} == {torch.bfloat16}
    assert qq.load_rollout(tmp_path / "out").dtype == torch.bfloat16
    with qq.patch_transformers():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert loaded(IDS).logits.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("said", ["float32", "bfloat16", "float16", None])
def test_the_dtype_of_the_config_is_that_of_the_files(
    said: str | None, key: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Old and new name; the text model's config and those that say what the whole does; others are of other towers."""
    source = tmp_path / "source"
    source.mkdir()
    original = config(CHECKPOINTS / "bf16" / "qwen3")
    original.pop("dtype")
    other = "float64"
    nested = {"text_config": {key: "float32", "n": 1}, "vision_config": {key: other}, "audio_config": {key: said}}
    given = original | nested | ({} if said is None else {key: said})
    (source / "config.json").write_text(json.dumps(given), "utf-8")
    qq.export_checkpoint(trainer("qwen3", dtype), tmp_path / "out", dialect="modelopt", source=source)
    written, name = config(tmp_path / "out"), "float16" if dtype == torch.float16 else "bfloat16"
    stored = tensors(tmp_path / "out")
    assert stored["model.norm.weight"].dtype == getattr(torch, name)
    assert written["dtype" if said is None else key] == name
    assert not {"dtype", "torch_dtype"} - {"dtype" if said is None else key} & written.keys()
    assert written["text_config"] == {key: name, "n": 1}
    assert written["vision_config"] == {key: other}
    assert written["audio_config"] == {key: None if said is None else name}


def test_an_empty_destination_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    qq.export_checkpoint(shared("qwen3"), tmp_path / "out", dialect="modelopt")
    assert decoded(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert oct((tmp_path / "out").stat().st_mode & 0o777) == "0o755"
