"""Contract under test: how transformers reads NVFP4 checkpoints, with and without ``patch_transformers``.

The yardstick is ``by_hand``: a decoder written here, put into a plain model, sharing no code with transformers' loader,
with compressed-tensors or with this package. Everything is compared exactly.
"""

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("compressed_tensors")
pytest.importorskip("transformers", minversion="5.23")

from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig
from transformers.integrations import compressed_tensors as hf_compressed_tensors
from transformers.integrations.compressed_tensors import CompressedTensorsDequantize
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

from quads_qat.integrations.transformers import patch_transformers

CHECKPOINTS = Path(__file__).parent / "data" / "checkpoints"
MOE = ["qwen3moe-nvfp4a16", "qwen3moe-nvfp4", "deepseek_v3-nvfp4a16", "mixtral-nvfp4a16"]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])

both_modes = pytest.mark.parametrize("dequantize", [False, True], ids=["default", "dequantize"])


def decode(packed: Tensor, block_scale: Tensor, global_scale: Tensor | float) -> Tensor:
    """[N, K/2] uint8, [N, K/16] e4m3, [1] -> [N, K] bf16: q * (s / G) in float32, then one rounding to bf16."""
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)  # the low nibble is the even column
    decode_scale = (block_scale.float() / global_scale).repeat_interleave(16, dim=-1)
    return (E2M1[codes.long()] * decode_scale).bfloat16()


def fuse_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``experts.E.{gate,up,down}_proj.weight`` -> ``experts.gate_up_proj`` [E, 2I, H] and ``.down_proj`` [E, H, I]."""
    fused: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for key, weight in weights.items():
        key = key.replace(".block_sparse_moe.", ".mlp.")
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", key):
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = weight
        else:
            fused[key] = weight
    for prefix, by_index in experts.items():
        ordered = [by_index[i] for i in range(len(by_index))]
        fused[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([e["gate_proj"], e["up_proj"]]) for e in ordered])
        fused[f"{prefix}.down_proj"] = torch.stack([e["down_proj"] for e in ordered])
    return fused


@functools.cache
def by_hand(name: str, *, experts_lose_global_scale: bool = False) -> nn.Module:
    """The checkpoint as a plain bf16 model: every weight decoded and fused in this file, loaded strictly."""
    path = CHECKPOINTS / "compressed_tensors" / name
    stored, weights = load_file(path / "model.safetensors"), {}
    for key, tensor in stored.items():
        weight = key.removesuffix("_packed")
        if key.endswith("weight_packed"):
            lost = experts_lose_global_scale and ".experts." in key
            global_scale = 1.0 if lost else stored[f"{weight}_global_scale"]
            weights[weight] = decode(tensor, stored[f"{weight}_scale"], global_scale)
        elif not key.endswith(("weight_scale", "global_scale")):
            weights[key] = tensor
    config = AutoConfig.from_pretrained(path)
    del config.quantization_config
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.load_state_dict(fuse_experts(weights), strict=True)
    return model


def checkpoint(name: str, tmp_path: Path) -> Path:
    """The fixture; Mixtral's experts renamed from what llm-compressor writes to what transformers and engines read."""
    if not name.startswith("mixtral"):
        return CHECKPOINTS / "compressed_tensors" / name
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return rewritten(name, tmp_path, lambda key: re.sub("|".join(names), lambda match: names[match[0]], key))


def rewritten(name: str, tmp_path: Path, rename: Callable[[str], str | None]) -> Path:
    """A copy of the fixture with renamed tensors; None leaves the tensor out."""
    target = shutil.copytree(CHECKPOINTS / "compressed_tensors" / name, tmp_path / name)
    tensors = load_file(target / "model.safetensors")
    kept = {new: tensor for key, tensor in tensors.items() if (new := rename(key))}
    save_file(kept, target / "model.safetensors", {"format": "pt"})
    return target


def load(path: Path, *, dequantize: bool = False) -> tuple[nn.Module, dict]:
    """The model, and which keys were missing, mismatched or unexpected."""
    assert path.is_dir(), f"{path} is not there; from_pretrained would look for it on the network"
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
    return AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))).logits


def experts(model: nn.Module) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in model.state_dict().items() if ".experts." in key}


def assert_same_tensors(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    wrong = [key for key in expected if not torch.equal(actual[key], expected[key])]
    assert not wrong, f"{len(wrong)} of {len(expected)} tensors differ: {wrong}"


def assert_loaded_completely(info: dict, *, unused: str = "nothing") -> None:
    """Every parameter came from the file; all that the file holds was used, but for names that match ``unused``."""
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert not [key for key in info["unexpected_keys"] if not re.search(unused, key)]


def rounds_activations(name: str, dequantize: bool) -> bool:
    """Whether transformers rounds the inputs of the dense layers, which ``by_hand`` does not do."""
    return not (dequantize or name.endswith("a16"))


def current_convert() -> object:
    return vars(CompressedTensorsDequantize)["convert"]


# Dense checkpoints: transformers is exact without help.


@both_modes
@pytest.mark.parametrize("name", ["llama-nvfp4a16", "qwen3-nvfp4a16"])
def test_dense_w4a16_is_exact(name: str, dequantize: bool):
    model, info = load(CHECKPOINTS / "compressed_tensors" / name, dequantize=dequantize)
    assert_loaded_completely(info)
    assert torch.equal(logits(model), logits(by_hand(name)))


@pytest.mark.parametrize("name", ["llama-nvfp4", "qwen3-nvfp4"])
def test_dense_w4a4_is_exact_when_dequantized(name: str):
    model, info = load(CHECKPOINTS / "compressed_tensors" / name, dequantize=True)
    assert_loaded_completely(info, unused=r"\.input_global_scale$")
    assert torch.equal(logits(model), logits(by_hand(name)))


@pytest.mark.parametrize("name", ["llama-nvfp4", "qwen3-nvfp4"])
def test_dense_w4a4_by_default_has_the_same_weights_and_rounds_activations(name: str):
    model, info = load(CHECKPOINTS / "compressed_tensors" / name)
    expected = by_hand(name)
    assert_loaded_completely(info)
    assert not torch.equal(logits(model), logits(expected))  # this first forward also decodes the weights, in place
    assert_same_tensors({key: model.state_dict()[key] for key in expected.state_dict()}, expected.state_dict())


def test_dense_checkpoints_load_the_same_under_the_patch():
    path = CHECKPOINTS / "compressed_tensors" / "qwen3-nvfp4"
    for dequantize in (False, True):
        plain, _ = load(path, dequantize=dequantize)
        with patch_transformers():
            patched, _ = load(path, dequantize=dequantize)
        assert torch.equal(logits(patched), logits(plain))


# Mixture of experts: exact with the patch only.


@both_modes
@pytest.mark.parametrize("name", MOE)
def test_patched_experts_are_exact(name: str, dequantize: bool, tmp_path: Path):
    with patch_transformers():
        model, info = load(checkpoint(name, tmp_path), dequantize=dequantize)
    assert_loaded_completely(info, unused=r"\.input_global_scale$")
    assert_same_tensors(experts(model), experts(by_hand(name)))
    if not rounds_activations(name, dequantize):
        assert torch.equal(logits(model), logits(by_hand(name)))


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="transformers #48371: experts lose weight_global_scale; once this passes, patch_transformers can retire",
)
@both_modes
@pytest.mark.parametrize("name", MOE)
def test_unpatched_experts_are_exact(name: str, dequantize: bool, tmp_path: Path):
    model, _ = load(checkpoint(name, tmp_path), dequantize=dequantize)
    assert_same_tensors(experts(model), experts(by_hand(name)))
    if not rounds_activations(name, dequantize):
        assert torch.equal(logits(model), logits(by_hand(name)))


@both_modes
@pytest.mark.parametrize("name", MOE)
def test_the_fault_is_the_lost_global_scale_and_nothing_tells(name: str, dequantize: bool, tmp_path: Path):
    model, info = load(checkpoint(name, tmp_path), dequantize=dequantize)
    assert_loaded_completely(info, unused=r"\.input_global_scale$")
    assert_same_tensors(experts(model), experts(by_hand(name, experts_lose_global_scale=True)))
    assert not torch.equal(logits(model), logits(by_hand(name)))


def test_fused_experts_of_a_w4a4_checkpoint_see_unrounded_activations():
    """Attention does round its inputs; ``experts.*.input_global_scale`` is unexpected and unused."""
    name, calls = "qwen3moe-nvfp4", {}
    with patch_transformers():
        model, info = load(CHECKPOINTS / "compressed_tensors" / name)
    assert {key for key in info["unexpected_keys"] if ".experts." not in key} == set()
    assert len(info["unexpected_keys"]) == 2 * 4 * 3  # layers, experts, projections
    layer, plain = model.model.layers[1], by_hand(name).model.layers[1]
    for module in (layer.self_attn.o_proj, layer.mlp.experts):
        module.register_forward_hook(lambda module, args, output: calls.update({module: (args, output)}))
    logits(model)

    args, output = calls[layer.mlp.experts]
    assert torch.equal(output, plain.mlp.experts(*args))
    (x,), y = calls[layer.self_attn.o_proj]
    assert not torch.equal(y, F.linear(x, plain.self_attn.o_proj.weight))


@pytest.mark.parametrize("name", ["mixtral-nvfp4a16", "gpt_oss-nvfp4a16"])
def test_expert_names_of_llm_compressor_that_transformers_cannot_read(name: str):
    """Mixtral's ``{gate,up,down}_proj``, gpt-oss's single experts: the parameters stay random, and a log says so."""
    with patch_transformers():
        model, info = load(CHECKPOINTS / "compressed_tensors" / name)
    assert info["missing_keys"] == experts(model).keys()
    assert all(".experts." in key for key in info["unexpected_keys"])


def test_an_expert_without_its_global_scale_is_an_error(tmp_path: Path):
    lost = "model.layers.1.mlp.experts.2.up_proj.weight_global_scale"
    path = rewritten("qwen3moe-nvfp4a16", tmp_path, lambda key: None if key == lost else key)
    with patch_transformers(), pytest.raises(RuntimeError, match="conversion of the weights"):
        load(path)


# The patch itself.


def test_undo_restores_the_very_function():
    original = current_convert()
    undo = patch_transformers()
    assert undo.needed
    assert current_convert() is not original
    undo.undo()
    assert current_convert() is original
    undo.undo()
    assert current_convert() is original


def test_leaving_the_context_undoes_even_after_an_error():
    original = current_convert()
    with pytest.raises(KeyError), patch_transformers():
        raise KeyError
    assert current_convert() is original


@pytest.mark.parametrize("first_out", [0, 1])
def test_nested_patches_last_until_the_last_undo_in_any_order(first_out: int):
    original = current_convert()
    undos = [patch_transformers(), patch_transformers()]
    patched = current_convert()
    assert [undo.needed for undo in undos] == [True, True]
    undos.pop(first_out).undo()
    assert current_convert() is patched
    undos.pop().undo()
    assert current_convert() is original


def test_a_repaired_transformers_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    with patch_transformers():
        repaired = current_convert()
    monkeypatch.setattr(CompressedTensorsDequantize, "convert", repaired)
    with patch_transformers() as undo:
        assert not undo.needed
        assert current_convert() is repaired
    assert current_convert() is repaired


@pytest.mark.parametrize(
    ("owner", "attribute", "value"),
    [
        (hf_compressed_tensors, "CompressedTensorsDequantize", None),
        (hf_compressed_tensors, "get_experts_scheme", None),
        (CompressedTensorsDequantize, "convert", lambda self, tensors: tensors),
        (CompressedTensorsDequantize, "convert", lambda *args, **kwargs: {"x": torch.full((1, 1, 16), 3.0)}),
        (CompressedTensorsHfQuantizer, "serialized_names", {"weight": ["weight_packed", "weight_scale"]}),
    ],
    ids=["class is gone", "scheme is gone", "other signature", "other result", "scale not collected"],
)
def test_an_unknown_transformers_is_left_alone_and_named(monkeypatch, owner, attribute: str, value: object):
    if value is None:
        monkeypatch.delattr(owner, attribute)
    else:
        monkeypatch.setattr(owner, attribute, value)
    with pytest.raises(RuntimeError, match=r"patch_transformers: transformers 5\..* nothing was changed.*load_model"):
        patch_transformers()
    assert getattr(owner, attribute, None) is value


def test_missing_compressed_tensors_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    with pytest.raises(ImportError, match="patch_transformers: needs compressed-tensors"):
        patch_transformers()


# ModelOpt checkpoints.

PLAIN_TRANSFORMERS = """
import sys
from transformers import AutoModelForCausalLM
for path in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(path)
    except RuntimeError as error:
        assert "ignore_mismatched_sizes" in str(error), error
    else:
        sys.exit(f"{path} loaded")
"""


def test_plain_transformers_refuses_modelopt_checkpoints():
    """Its message is a list of size mismatches. In a process of its own: this package may register the format."""
    names = ["llama-w4a16_nvfp4", "qwen3-nvfp4", "qwen3moe-nvfp4", "mixtral-nvfp4"]
    paths = [str(CHECKPOINTS / "modelopt" / name) for name in names]
    result = subprocess.run([sys.executable, "-c", PLAIN_TRANSFORMERS, *paths], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "Unknown quantization type, got modelopt" in result.stderr
