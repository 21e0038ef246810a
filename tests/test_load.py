"""Contract under test: a checkpoint loads as the numbers that it holds, into BF16 models and into packed rollouts.

The yardstick is ``by_hand.decoded``, put into a plain model by transformers' own loader.
"""

import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_same_bits
from by_hand import CHECKPOINTS, config, decoded, rewritten, tensors, transposed, write_decoded
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import quads_qat as qq
from quads_qat import Dialect, Recipe, ResidualConfig
from quads_qat.config import ActivationScale
from quads_qat.residual import ResidualCompensatedExperts, ResidualCompensatedLinear

PEERS = sorted(f"{p}/{path.name}" for p in ("modelopt", "compressed_tensors") for path in (CHECKPOINTS / p).iterdir())
IDS = torch.randint(0, 120, (1, 6), generator=torch.Generator().manual_seed(0))
dialects = pytest.mark.parametrize("dialect", list(Dialect), ids=str)
Packed = ResidualCompensatedLinear | ResidualCompensatedExperts


@cache
def trainer(name: str = "qwen3moe") -> nn.Module:
    """Observed; only read."""
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "bf16" / name, experts_implementation="eager")
    qq.convert(model, "w4a16")
    with torch.no_grad(), qq.observe_activations(model):
        model(IDS)
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def exported(name: str = "qwen3moe", dialect: str = "modelopt", activations: str = "none") -> Path:
        path = tmp_path_factory.mktemp("out") / name
        qq.export_checkpoint(trainer(name), path, dialect=dialect, activations=activations)
        return path

    return exported


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


def by_transformers(path: Path, target: Path) -> nn.Module:
    """The decoded checkpoint, loaded by transformers; llm-compressor's own names are brought back first."""
    plain = write_decoded(path, target)
    stored = load_file(plain / "model.safetensors")
    if path.name.startswith("mixtral-nvfp4a16"):
        for old, new in {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items():
            stored = {name.replace(f".{old}.", f".{new}."): tensor for name, tensor in stored.items()}
    if path.name.startswith("gpt_oss-nvfp4a16"):
        stored = _stack_gpt_oss(stored)
    save_file(stored, plain / "model.safetensors", {"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(plain)


def _stack_gpt_oss(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Single experts -> [E, K, N], gate and up interleaved; biases [E, N]."""
    found: dict[str, dict[int, dict[str, Tensor]]] = {}
    out = {}
    for name, tensor in stored.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+\.\w+)", name)
        if match is None:
            out[name] = tensor
        else:
            found.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
    for prefix, experts in found.items():
        parts = {key: torch.stack([experts[e][key] for e in sorted(experts)]) for key in experts[0]}
        out[f"{prefix}.down_proj"] = parts["down_proj.weight"].mT.contiguous()
        out[f"{prefix}.down_proj_bias"] = parts["down_proj.bias"]
        interleaved = torch.stack([parts["gate_proj.weight"], parts["up_proj.weight"]], dim=2).flatten(1, 2)
        out[f"{prefix}.gate_up_proj"] = interleaved.mT.contiguous()
        out[f"{prefix}.gate_up_proj_bias"] = torch.stack([parts["gate_proj.bias"], parts["up_proj.bias"]], 2).flatten(1)
    return out


def packed_modules(model: nn.Module) -> dict[str, Packed]:
    return {name: m for name, m in model.named_modules() if isinstance(m, Packed)}


def assert_packs(rollout: nn.Module, plain: nn.Module) -> None:
    """What the rollout model multiplies by is the weight of ``plain``."""
    found = packed_modules(rollout)
    assert found
    for name, module in found.items():
        for parameter in module.recipes:
            weight = plain.get_parameter(f"{name}.{parameter}")
            value = qq.ops.dequantize(module.packed(parameter), weight.dtype)
            oriented = weight.mT if value.shape != weight.shape or _is_transposed(module) else weight
            assert torch.equal(value, oriented), f"{name}.{parameter}"


def _is_transposed(module: Packed) -> bool:
    return isinstance(module, ResidualCompensatedExperts) and module.layout.transposed


# Values.


@pytest.mark.parametrize("fixture", PEERS)
def test_peers_checkpoints(fixture: str, tmp_path: Path) -> None:
    path = CHECKPOINTS / fixture
    expected = by_transformers(path, tmp_path / "plain")
    loaded = qq.load_model(path)
    assert type(loaded) is type(expected)
    assert loaded.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name  # -0.0 is 0.0: Model-Optimizer's decoder drops it
        assert loaded.state_dict()[name].dtype == tensor.dtype
    assert torch.equal(logits(loaded), logits(expected))

    rollout = qq.load_rollout(path)
    assert_packs(rollout, loaded)
    quantized = {name.removesuffix(".weight") for name, t in tensors(path).items() if t.dtype == torch.uint8}
    assert len(packed_modules(rollout)) <= len(quantized)
    if "-nvfp4_" not in fixture:
        assert logits(rollout).isfinite().all()


@dialects
@pytest.mark.parametrize("activations", ["none", "observed"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3moe", "gpt_oss"])
def test_our_checkpoints(name: str, activations: str, dialect: Dialect, checkpoint: Any, tmp_path: Path) -> None:
    path = checkpoint(name, dialect, activations)
    loaded = qq.load_model(path)
    if not (name == "gpt_oss" and dialect is Dialect.COMPRESSED_TENSORS):  # transformers stacks no single experts
        expected = by_transformers(path, tmp_path / "plain").state_dict()
        for key, tensor in loaded.state_dict().items():
            assert_same_bits(tensor, expected[key], key)
    loaded.set_experts_implementation("eager")  # pyright: ignore[reportCallIssue]
    assert torch.equal(logits(loaded), logits(trainer(name)))
    assert_packs(qq.load_rollout(path), loaded)


@dialects
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_weight_only_rollout_is_the_dense_trainer(name: str, dialect: Dialect, checkpoint: Any) -> None:
    rollout = qq.load_rollout(checkpoint(name, dialect))
    assert torch.equal(logits(rollout), logits(trainer(name)))
    assert not rollout.training
    assert not any(parameter.requires_grad for parameter in rollout.parameters())


def test_codes_are_never_requantized(checkpoint: Any) -> None:
    path = checkpoint("qwen3moe", "modelopt")
    stored, rollout = tensors(path), qq.load_rollout(path)
    attention = rollout.get_submodule("model.layers.0.self_attn.v_proj")
    assert isinstance(attention, ResidualCompensatedLinear)
    q = attention.packed()
    assert torch.equal(q.qdata, stored["model.layers.0.self_attn.v_proj.weight"])
    assert_same_bits(q.block_scale, stored["model.layers.0.self_attn.v_proj.weight_scale"])
    experts = rollout.get_submodule("model.layers.1.mlp.experts")
    assert isinstance(experts, ResidualCompensatedExperts)
    up = experts.packed("gate_up_proj")
    assert up.per_tensor_scale.shape == (4,)
    assert torch.equal(up.qdata[3, 64:], stored["model.layers.1.mlp.experts.3.up_proj.weight"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_another_dtype(dtype: torch.dtype, checkpoint: Any) -> None:
    path = checkpoint("qwen3")
    loaded = qq.load_model(path, dtype=dtype)
    name = "model.layers.1.mlp.up_proj.weight"
    assert_same_bits(loaded.get_parameter(name).data, decoded(path, torch.float32)[name].to(dtype))
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert logits(qq.load_rollout(path, dtype=dtype)).dtype == dtype


# Scales that engines would mangle, and we do not.


@dialects
def test_gate_and_up_with_scales_of_their_own(dialect: Dialect, checkpoint: Any, tmp_path: Path) -> None:
    """vllm#54974. A scale that is twice as large in one shard halves or doubles its values: one scale per row."""
    ending = "weight_scale_2" if dialect is Dialect.MODELOPT else "weight_global_scale"
    scale = f"model.layers.1.mlp.experts.2.up_proj.{ending}"
    before = checkpoint("qwen3moe", dialect)
    path = rewritten(before, tmp_path / "unfused", {scale: tensors(before)[scale] * 2})
    loaded, rollout = qq.load_model(path), qq.load_rollout(path)
    expected = by_transformers(path, tmp_path / "plain").state_dict()
    for name, tensor in loaded.state_dict().items():
        assert_same_bits(tensor, expected[name], name)
    assert_packs(rollout, loaded)
    experts = rollout.get_submodule("model.layers.1.mlp.experts")
    assert isinstance(experts, ResidualCompensatedExperts)
    p = experts.packed("gate_up_proj").per_tensor_scale
    assert p.shape == (4, 128, 1)
    assert p[2].unique().numel() == 2
    loaded.set_experts_implementation("eager")  # pyright: ignore[reportCallIssue]
    assert torch.equal(logits(rollout), logits(loaded))


@dialects
def test_static_activation_scales(dialect: Dialect, checkpoint: Any) -> None:
    path = checkpoint("qwen3moe", dialect, "observed")
    stored = tensors(path)
    rollout = qq.load_rollout(path, activation_scale="static")
    for name, module in packed_modules(rollout).items():
        if isinstance(module, ResidualCompensatedLinear):
            amaxes, disk = [module.input_amax], [name]
        else:
            amaxes = [module.gate_up_proj_input_amax, module.down_proj_input_amax]
            disk = [f"{name}.0.up_proj", f"{name}.3.down_proj"]
        for amax, module_name in zip(amaxes, disk, strict=True):
            assert isinstance(amax, Tensor)
            if dialect is Dialect.MODELOPT:
                assert amax == stored[f"{module_name}.input_scale"] * 2688
            else:
                assert amax == 2688 / stored[f"{module_name}.input_global_scale"][0]
    # ALIGNED's scales are powers of two: per token or static, Q(x) is the same as long as no block scale underflows.
    assert torch.equal(logits(rollout), logits(qq.load_rollout(path)))
    options: Any = {"activation_recipe": "modelopt-ieee"}
    static, per_token = (qq.load_rollout(path, activation_scale=s, **options) for s in ("static", "per_token"))
    assert not torch.equal(logits(static), logits(per_token))
    uncalibrated = qq.load_rollout(checkpoint("qwen3moe", dialect), activation_scale="static")
    with pytest.raises(ValueError, match=r"activation_scale='static' and was not calibrated; run quads_qat\.calibrate"):
        logits(uncalibrated)


@dialects
def test_a_w4a4_checkpoint_without_a_static_scale_is_refused(dialect: Dialect, checkpoint: Any, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(checkpoint("qwen3moe", dialect, "observed"), path)
    kept = tensors(path)
    del kept[next(name for name in kept if "input" in name)]
    save_file(kept, path / "model.safetensors")
    with pytest.raises(ValueError, match=r"input_.*scale is missing, and activation_scale='static' needs it; use"):
        qq.load_rollout(path, activation_scale="static")


def test_weights_only_leaves_activations_alone_whatever_the_checkpoint_says(checkpoint: Any) -> None:
    path = checkpoint("qwen3", "modelopt", "observed")
    rollout = qq.load_rollout(path, weights_only=True)
    module = rollout.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(module, ResidualCompensatedLinear)
    assert (module.activation, module.residual) == (None, None)
    assert torch.equal(logits(rollout), logits(qq.load_model(path)))
    with pytest.raises(ValueError, match="load_rollout: weights_only=True leaves activations alone; drop it, or drop"):
        qq.load_rollout(path, weights_only=True, activation_scale="static")


def test_what_a_rollout_does_with_activations(checkpoint: Any) -> None:
    weight_only, both = checkpoint("qwen3", "modelopt"), checkpoint("qwen3", "modelopt", "observed")

    def settings(path: Path, **options: Any) -> tuple[Any, Any]:
        module = qq.load_rollout(path, **options).get_submodule("model.layers.0.mlp.up_proj")
        assert isinstance(module, ResidualCompensatedLinear)
        return module.activation, module.residual

    assert settings(weight_only) == (None, None)
    activation, residual = settings(both)
    assert activation.scale is ActivationScale.PER_TOKEN
    assert activation.recipe is Recipe.ALIGNED
    assert residual == ResidualConfig(fraction=0.5)
    naive = ResidualConfig(fraction=0)
    assert settings(weight_only, residual=naive)[1] == naive
    activation, _ = settings(both, residual=naive, activation_scale="per_tensor", activation_recipe="modelopt-ieee")
    assert (activation.scale, activation.recipe) == (ActivationScale.PER_TENSOR, Recipe.MODELOPT_IEEE)


# Models.


@dialects
def test_tied_embeddings(dialect: Dialect, tmp_path: Path) -> None:
    model = tiny_model("ernie4_5_moe")
    assert model.config.tie_word_embeddings
    qq.export_checkpoint(qq.convert(model, "w4a16"), tmp_path / "out", dialect=dialect)
    assert "lm_head.weight" not in tensors(tmp_path / "out")
    assert "lm_head" in config(tmp_path / "out")["quantization_config"]["ignore"]
    for loaded in (qq.load_model(tmp_path / "out"), qq.load_rollout(tmp_path / "out")):
        loaded.set_experts_implementation("eager")  # pyright: ignore[reportCallIssue]
        loaded.set_attn_implementation("eager")  # pyright: ignore[reportCallIssue]
        assert loaded.get_parameter("lm_head.weight") is loaded.get_parameter("model.embed_tokens.weight")
        assert torch.equal(logits(loaded), logits(model))


def test_generation(checkpoint: Any, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint("qwen3"), tmp_path / "out")
    (path / "generation_config.json").write_text(json.dumps({"max_length": 77, "eos_token_id": 255}), "utf-8")
    rollout = qq.load_rollout(path)
    assert rollout.generation_config.max_length == 77  # pyright: ignore
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    written = rollout.generate(IDS, **options)  # pyright: ignore[reportCallIssue]
    assert torch.equal(written, trainer("qwen3").generate(IDS, **options))  # pyright: ignore[reportCallIssue]
    moe = qq.load_rollout(checkpoint("qwen3moe", "compressed-tensors", "observed"))
    assert moe.generate(IDS, **options).shape[1] > IDS.shape[1]  # pyright: ignore[reportCallIssue]


def test_a_loaded_model_can_be_trained_and_exported_again(checkpoint: Any, tmp_path: Path) -> None:
    """ALIGNED: the decoded weights quantize to themselves; 4-bit codes of -0.0 become those of 0.0."""
    path = checkpoint("qwen3moe")
    again = qq.convert(qq.load_model(path), "w4a16")
    qq.export_checkpoint(again, tmp_path / "again", dialect="modelopt")
    first, second = decoded(path), decoded(tmp_path / "again")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_stacks_keep_their_layout(checkpoint: Any) -> None:
    """gpt-oss in the ModelOpt dialect: [E, K/2, N] on disk, [E, N, K/2] in a rollout."""
    path = checkpoint("gpt_oss")
    stored = tensors(path)
    experts = qq.load_rollout(path).get_submodule("model.layers.0.mlp.experts")
    assert isinstance(experts, ResidualCompensatedExperts)
    q = experts.packed("gate_up_proj")
    assert torch.equal(q.qdata, stored["model.layers.0.mlp.experts.gate_up_proj"].mT)
    scales = transposed(stored["model.layers.0.mlp.experts.gate_up_proj_weight_scale"])
    assert_same_bits(q.block_scale, scales)
    assert q.per_tensor_scale.shape == ()
