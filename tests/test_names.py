"""Contract under test: ``names`` says of a model what ``save_pretrained`` writes, tensor by tensor and bit by bit."""

import copy
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import tiny_models
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, UNBUILDABLE, tiny_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import Concatenate, Interleave, Transpose, WeightConverter

from quads_qat.names import (
    DiskLayoutError,
    DiskTensor,
    disk_elements,
    disk_state,
    disk_tensors,
    state_dict_names,
)

#: Weights that are merged with others on disk, or have their rows permuted there (# = any number). The list matters to
#: users: these stay unquantized.
MERGED: dict[str, set[str]] = {
    "inkling2": {"lm_head.weight", "model.layers.#.mlp.experts.gate_up_proj"},
    "inkling2_loop": {"lm_head.weight", "model.layers.#.mlp.experts.gate_up_proj"},
    "inkling2_loop_vl": {"lm_head.weight", "model.language_model.layers.#.mlp.experts.gate_up_proj"},
    "inkling2_vl": {"lm_head.weight", "model.language_model.layers.#.mlp.experts.gate_up_proj"},
    "inkling_vl": {
        "model.language_model.layers.#.mlp.experts.gate_up_proj",
        "model.language_model.layers.#.mlp.shared_experts.gate_proj",
        "model.language_model.layers.#.mlp.shared_experts.up_proj",
    },
    "lara_mini": {f"model.layers.#.linear_attn.in_proj_{part}.weight" for part in ("qkv", "z", "a", "b")},
    "mistral_large4": {f"model.vision_tower.transformer.layers.#.attention.{part}_proj.weight" for part in "qk"},
    "step3p7": {f"model.vision_model.layers.#.self_attn.{part}_proj.weight" for part in "qkv"},
    "unlimited_ocr": {
        f"model.vision_tower.vision_encoder.encoder.layers.#.self_attn.{part}_proj.weight" for part in "qkv"
    },
}


@cache
def shared_model(arch: str) -> PreTrainedModel:
    """For tests that only read it."""
    return tiny_model(arch)


def quantizable(model: nn.Module) -> dict[str, bool]:
    """Names of 2-D weights of nn.Linear and of 3-D weights of experts -> whether they are transposed in memory."""
    found = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            experts = parameter.ndim == 3 and "Expert" in type(module).__name__
            if experts or (isinstance(module, nn.Linear) and name == "weight"):
                transposed = getattr(module, "is_transposed", False) or type(module).__name__ == "Llama4TextExperts"
                found[f"{prefix}.{name}"] = experts and transposed
    return found


def numberless(names: Iterable[str]) -> set[str]:
    return {re.sub(r"(?<=\.)\d+", "#", name) for name in names}


def mapped(model: nn.Module, arch: str = "") -> tuple[list[DiskTensor], dict[str, bool]]:
    """The disk tensors of all quantizable weights but those in ``MERGED``, and those weights."""
    saved = set(state_dict_names(model))
    weights = {name: transposed for name, transposed in quantizable(model).items() if name in saved}
    if arch in MERGED:
        with pytest.raises(DiskLayoutError) as error:
            disk_tensors(model, weights)
        assert numberless(error.value.parameters) == MERGED[arch]
        weights = {name: transposed for name, transposed in weights.items() if name not in error.value.parameters}
    return disk_tensors(model, weights), weights


def on_disk(model: nn.Module, arch: str = "") -> dict[str, Tensor]:
    """What we say is on disk: quantizable weights through ``disk_tensors``, the rest through ``disk_state``."""
    tensors, weights = mapped(model, arch)
    state = model.state_dict()
    found = disk_state(model, {name: tensor for name, tensor in state.items() if name not in weights})
    for tensor in tensors:
        assert tensor.name not in found
        part = tensor.select(state[tensor.parameter], transposed_memory=weights[tensor.parameter])
        found[tensor.name] = part.mT if tensor.transposed else part
    return found


def assert_same(found: dict[str, Tensor], written: dict[str, Tensor]) -> None:
    assert found.keys() == written.keys()
    for name, tensor in written.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_names_and_values_are_what_save_pretrained_writes(arch: str, tmp_path: Path) -> None:
    model = shared_model(arch)
    model.save_pretrained(tmp_path)
    assert_same(on_disk(model, arch), load_file(tmp_path / "model.safetensors"))

    reloaded = type(model).from_pretrained(tmp_path)
    reloaded.save_pretrained(tmp_path / "again")
    assert_same(on_disk(reloaded, arch), load_file(tmp_path / "again" / "model.safetensors"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_meta_model_has_the_same_names(arch: str) -> None:
    model = shared_model(arch)
    with torch.device("meta"):
        meta = type(model)._from_config(copy.deepcopy(model.config))
    assert state_dict_names(meta) == state_dict_names(model)
    assert mapped(meta, arch) == mapped(model, arch)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss", "llama", "mixtral", "qwen3", "qwen3moe"])
def test_names_and_values_of_a_checkpoint_are_its_own(name: str, data_dir: Path) -> None:
    directory = data_dir / "checkpoints" / "bf16" / name
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert_same(on_disk(model), load_file(directory / "model.safetensors"))


def test_a_prefix_in_the_loaded_checkpoint_is_kept(tmp_path: Path) -> None:
    """The text part of Qwen3.5-MoE is published inside a vision-language model, under another prefix."""
    model = shared_model("qwen3_5_moe")
    model.save_pretrained(tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    prefixed = {re.sub(r"^model\.", "model.language_model.", name): tensor for name, tensor in plain.items()}
    save_file(prefixed, tmp_path / "model.safetensors", {"format": "pt"})
    assert_same(on_disk(type(model).from_pretrained(tmp_path)), prefixed)


@pytest.mark.parametrize("arch", ["nemotron_h", "gemma4", "inkling2"])
def test_fsdp_does_not_change_names(arch: str) -> None:
    """FSDP2 gives modules new classes and leaves each rank a part of each parameter."""
    model = tiny_model(arch)
    names, weights = state_dict_names(model), mapped(model, arch)[1]
    tensors = disk_tensors(model, weights)
    rest = {name: torch.empty_like(t) for name, t in model.state_dict().items() if name not in weights}
    rest_on_disk = disk_state(model, rest).keys()
    dist.init_process_group(backend="fake", rank=0, world_size=2)
    try:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        assert state_dict_names(model) == names
        assert disk_tensors(model, weights) == tensors
        assert disk_state(model, rest).keys() == rest_on_disk
    finally:
        dist.destroy_process_group()


def test_swapped_classes_do_not_change_names() -> None:
    model, original = tiny_model("mixtral"), shared_model("mixtral")
    for module in model.modules():
        if isinstance(module, nn.Linear) or "Experts" in type(module).__name__:
            module.__class__ = type("Swapped", (type(module),), {})
    assert disk_tensors(model, quantizable(original)) == disk_tensors(original, quantizable(original))


def test_a_plain_module_keeps_its_names() -> None:
    model = nn.Sequential(nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model[2].weight = nn.Parameter(torch.zeros(3, 4, 16))  # [E, N, K]
    assert state_dict_names(model) == list(model.state_dict())
    assert disk_tensors(model, {"0.weight": False, "2.weight": True}) == [
        DiskTensor("0.weight", "0.weight", None, None, False),
        DiskTensor("2.weight", "2.weight", None, None, False),
    ]
    assert_same(disk_state(model, model.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("shape", [(8, 6), (8, 2), (2, 6), (2, 2)])
def test_interleaved_and_transposed_layouts(shape: tuple[int, int]) -> None:
    """[N, K]. No released text model has these layouts, but a conversion may."""
    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.weight = nn.Parameter(torch.randn(shape))
    mlp.up_proj.weight = nn.Parameter(torch.randn(1, shape[1]))
    mlp.down_proj.weight = nn.Parameter(torch.randn(shape))
    model._weight_conversions = [
        WeightConverter(
            ["mlp.even.weight", "mlp.odd.weight"],
            "mlp.gate_proj.weight",
            [Concatenate(0), Interleave(0, inverse=True)],
        ),
        WeightConverter("mlp.turned.weight", "mlp.up_proj.weight", [Transpose(0, 1)]),
        WeightConverter(
            ["mlp.left.weight", "mlp.right.weight"], "mlp.down_proj.weight", [Concatenate(0), Transpose(0, 1)]
        ),
    ]
    gate, up, down = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
    *interleaved, turned = disk_tensors(model, {gate: False, up: False})
    assert [t.name.split(".")[-2] for t in interleaved] == ["even", "odd"]
    assert not any(t.transposed for t in interleaved)
    for row, tensor in enumerate(interleaved):
        assert torch.equal(tensor.select(mlp.gate_proj.weight), mlp.gate_proj.weight[row::2])
        assert torch.equal(
            tensor.select(mlp.gate_proj.weight.mT, transposed_memory=True), mlp.gate_proj.weight[row::2].mT
        )
    assert turned == DiskTensor("model.layers.0.mlp.turned.weight", up, None, None, True)
    with pytest.raises(DiskLayoutError, match="down_proj"):  # cut along K
        disk_tensors(model, {down: False})


def test_select_takes_codes_and_block_scales() -> None:
    tensor = DiskTensor("experts.1.up_proj.weight", "experts.gate_up_proj", 1, slice(2, 4), False)
    weight = torch.arange(3 * 4 * 32).view(3, 4, 32)
    for values in (weight, weight[..., :16], weight[..., :2]):  # weights, codes, block scales
        part = tensor.select(values)
        assert torch.equal(part, values[1, 2:4])
        assert part.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        assert torch.equal(tensor.select(values.mT, transposed_memory=True), part.mT)


def test_a_merged_weight_is_refused_without_its_siblings_too() -> None:
    model = shared_model("step3p7")
    query, key = (f"model.vision_model.layers.0.self_attn.{name}_proj.weight" for name in "qk")
    with pytest.raises(DiskLayoutError, match=re.escape(query)):
        disk_tensors(model, {query: False})
    with pytest.raises(ValueError, match="must be given in one call"):
        disk_state(model, {query: model.get_parameter(query), key: model.get_parameter(key)})


def test_experts_of_text_and_images_are_found_one_by_one() -> None:
    """On disk the two groups of experts are one list, the text experts first."""
    model = shared_model("ernie4_5_vl_moe")
    tensors = disk_tensors(model, {"model.language_model.layers.1.mlp.vision_moe.experts.down_proj": False})
    assert [(t.name, t.expert) for t in tensors] == [
        (f"model.layers.1.mlp.experts.{4 + e}.down_proj.weight", e) for e in range(4)
    ]


def test_bad_arguments_are_named() -> None:
    model = shared_model("llama")
    with pytest.raises(ValueError, match=r"\[N, K\] or \[E, N, K\], got model\.norm\.weight with shape \[64\]"):
        disk_tensors(model, {"model.norm.weight": False})
    with pytest.raises(ValueError, match=r"must be in model\.state_dict\(\), got \['nobody'\]"):
        disk_state(model, {"nobody": torch.zeros(1)})


def test_tiny_models_cover_every_experts_class_of_transformers() -> None:
    root = Path(transformers.__file__).parent / "models"
    classes = re.compile(r"^class (\w+(?:Experts|ExpertGLU))\(nn\.Module\)", re.MULTILINE)
    known = {name for path in root.glob("*/modeling_*.py") for name in classes.findall(path.read_text("utf-8"))}
    built = {type(module).__name__ for arch in ARCHITECTURES for module in shared_model(arch).modules()}
    assert known - built == UNBUILDABLE.keys()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tiny_models_are_initialised_and_run(arch: str) -> None:
    model, again = shared_model(arch), tiny_model(arch)
    for (name, tensor), same in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(tensor, same), name
        assert not tensor.is_floating_point() or tensor.isfinite().all(), name
    if arch not in tiny_models.NO_FORWARD:
        with torch.no_grad():
            assert model(**tiny_models.tiny_inputs(model))[0].isfinite().all()


def test_elements_of_merged_and_padded_weights() -> None:
    """``lara_mini`` merges four weights of linear attention into two; ``inkling2`` pads the vocabulary of its head."""
    for arch, part in (("lara_mini", "layers.0.linear_attn.in_proj"), ("inkling2", "lm_head.weight")):
        model = shared_model(arch)
        state = {name: tensor for name, tensor in model.state_dict().items() if part in name}
        assert len(state) == (4 if arch == "lara_mini" else 1)
        values = {name: torch.full_like(tensor, torch.nan) for name, tensor in state.items()}
        for elements in disk_elements(model, state):
            on_disk = disk_state(model, state)[elements.name]
            assert elements.parts.keys() <= state.keys()
            elements.scatter(on_disk, values)
            with pytest.raises(ValueError, match=f"{elements.name} must have shape"):
                elements.scatter(on_disk[:-1], values)
        for name, tensor in state.items():
            assert torch.equal(values[name], tensor)


def test_elements_need_the_siblings_that_they_are_merged_with() -> None:
    model = shared_model("lara_mini")
    with pytest.raises(ValueError, match="must be given in one call"):
        list(disk_elements(model, ["model.layers.0.linear_attn.in_proj_a.weight"]))
