"""Contract under test: the real vLLM multiplies by the trainer's bits, or refuses as the table says.

vLLM's own model classes are built on a CPU, their parameters filled with NaN, and loaded by their own loaders: once
with our export, once with a BF16 checkpoint of the trainer's fake-quantized weights under the same names. What vLLM
decodes from the first must be what it read from the second, in every module.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from bits import assert_same_bits
from by_hand import tensors
from engines import table
from engines.measure import trainer
from safetensors.torch import save_file
from tiny_models import ARCHITECTURES
from torch import Tensor
from twins import plain_twin
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant_dequant

import quads_qat as qq
from engines_real import vllm_cpu
from engines_real.architectures import BUILT, EXTRA, NOT_BUILT
from engines_real.vllm_cpu import KV_SCALES, Served, decoded, packed_modules, trained
from quads_qat import ops
from quads_qat.names import disk_state

#: What vLLM refuses, as the table says too: architecture -> dialects and schemes, and the message.
BOTH, CT = ("modelopt", "compressed-tensors"), ("compressed-tensors",)
REFUSED: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "afmoe": (("modelopt",), ("W4A16", "W4A4"), r"size of tensor a \(32\) must match"),
    "aria_vl": (BOTH, ("W4A16", "W4A4"), "chunk expects at least a 1-dimensional tensor|tuple index out of range"),
    "exaone_moe": (("modelopt",), ("W4A16", "W4A4"), r"size of tensor a \(32\) must match"),
    "glm4v_moe": (CT, ("W4A16", "W4A4"), "'QKVParallelLinear' object has no attribute 'data'"),
    "gpt_oss": (BOTH, ("W4A16", "W4A4"), r"layers.0.mlp.experts.(0\.)?w2_bias"),
    "granitemoehybrid": (CT, ("W4A4",), "block_sparse_moe.experts.w2_input_global_scale"),
    "jamba": (BOTH, ("W4A16", "W4A4"), "'MergedColumnParallelLinear' object has no attribute 'data'"),
    "llama4": (("modelopt",), ("W4A16", "W4A4"), "feed_forward.experts.routed_experts.w2_weight_"),
    "longcat_flash": (BOTH, ("W4A16", "W4A4"), r"layers.0.mlp.experts.4.gate_proj"),
    "openai_privacy_filter": (BOTH, ("W4A16", "W4A4"), "no module or parameter named 'score"),
    "phimoe": (BOTH, ("W4A16", "W4A4"), r"\[4, 64\]\)to a parameter of size|mlp.router.weight"),
}
#: Endings of the scales of packed weights and their inputs.
OURS = ("weight_scale", "weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale")


@pytest.fixture(scope="module", autouse=True)
def _group(tmp_path_factory: pytest.TempPathFactory) -> None:
    vllm_cpu.prepare(tmp_path_factory.mktemp("group") / "first")


def plain(path: Path, source: Path, weights: dict[str, Tensor]) -> Path:
    """A BF16 checkpoint of the same modules: the trainer's weights in the place of packed ones, the rest as it is."""
    path.mkdir()
    config = json.loads((source / "config.json").read_text("utf-8"))
    config = {key: value for key, value in config.items() if key not in ("quantization_config", "quads_qat")}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    stored, found = tensors(source), {}
    for name, tensor in stored.items():
        if tensor.dtype == torch.uint8:
            module = name.removesuffix(".weight_packed").removesuffix(".weight")
            found[f"{module}.weight" if module != name else name] = weights[module].contiguous().clone()
        elif not name.endswith(OURS):
            found[name] = tensor
    save_file(found, path / "model.safetensors")
    return path


def refused(arch: str, dialect: str, scheme: str) -> str | None:
    dialects, schemes, message = REFUSED.get(arch, ((), (), ""))
    return message if dialect in dialects and scheme in schemes else None


@pytest.mark.parametrize("arch", BUILT)
def test_vllm_multiplies_by_the_trainers_bits_or_refuses(arch: str, tmp_path: Path) -> None:
    model, weights = trained(arch)
    for dialect in BOTH:
        twin = None
        for scheme, activations in table.ACTIVATIONS.items():
            path = tmp_path / f"{dialect}-{scheme}"
            qq.export_checkpoint(model, path, dialect=dialect, activations=activations)
            if message := refused(arch, dialect, scheme):
                with pytest.raises(Exception, match=message):
                    Served(path, extra=EXTRA.get(arch)).load()
                continue
            if twin is None:
                twin = Served(plain(tmp_path / f"{dialect}-plain", path, weights), extra=EXTRA.get(arch)).load()
            served = Served(path, extra=EXTRA.get(arch)).load()
            assert_scales_are_shared(served)
            assert_same_model(served.finish(), twin)


def assert_scales_are_shared(served: Served) -> None:
    """Of all shards of a fused linear, and of the gate and up of each expert: vLLM takes one of them for all."""
    for name, parameter in served.model.named_parameters():
        if name.endswith(("weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale")):
            shards = parameter.data if "w13_" in name else parameter.data[None]  # [E, 2] or [1, shards]
            if "w2_" not in name and not shards.isnan().all():  # W4A16: vLLM makes input scales, and drops them
                assert torch.equal(shards, shards[:, :1].expand_as(shards)), name


def assert_same_model(served: Served, twin: Served) -> None:
    """Bit for bit; nothing on disk was left out, and what is not packed has its dtype."""
    packed, expected, elements = packed_modules(served.model), dict(twin.model.named_parameters()), 0
    for name, weights in packed.items():
        for weight in weights:
            mine = decoded(served.model.get_submodule(name), weight)
            assert not mine.isnan().any(), f"{name}.{weight}: a parameter was not loaded"
            assert_same_bits(mine, expected[f"{name}.{weight}"].data, f"{name}.{weight}")
            elements += mine.numel()
    assert elements == sum(2 * t.numel() for t in tensors(served.path).values() if t.dtype == torch.uint8)
    rest = {name for name, _ in served.model.named_parameters() if name.rpartition(".")[0] not in packed}
    for name in (name for name in rest if not name.endswith(KV_SCALES)):
        assert_same_bits(served.model.get_parameter(name).data, expected[name].data, name)
    routers = [name for name in rest if re.search(r"(mlp|moe|feed_forward)\.(gate|router)\.weight$", name)]
    assert all(served.model.get_parameter(name).is_floating_point() for name in routers)


@pytest.mark.parametrize("dialect", BOTH)
@pytest.mark.parametrize("arch", ["llama", "qwen2_moe", "qwen3_moe", "mixtral"])
def test_a_second_load_brings_the_new_weights(arch: str, dialect: str, tmp_path: Path) -> None:
    """Through vLLM's layerwise reload, there and back; nothing of the plugin is here."""
    model, weights = trained(arch)
    first, second = tmp_path / "first", tmp_path / "second"
    try:
        qq.export_checkpoint(model, first, dialect=dialect, activations="observed")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.5)
        qq.export_checkpoint(model, second, dialect=dialect, activations="observed")
        twin = plain_twin(model)
    finally:
        trainer.cache_clear()
    new = {name.removesuffix(".weight"): tensor for name, tensor in disk_state(twin, twin.state_dict()).items()}
    before = Served(plain(tmp_path / "before", first, weights)).load()
    after = Served(plain(tmp_path / "after", second, new)).load()
    served = Served(first).load().finish()
    assert_same_model(served, before)
    for path, expected in ((second, after), (first, before), (second, after)):
        served.reload(tensors(path).items())
        assert_same_model(served, expected)
    with pytest.raises(AssertionError, match="weight"):
        assert_same_model(served, before)


def test_every_architecture_is_built_or_has_a_reason() -> None:
    assert not NOT_BUILT.keys() & REFUSED.keys()
    assert {*NOT_BUILT, *REFUSED, *EXTRA} <= ARCHITECTURES.keys()


@pytest.mark.parametrize("arch", BUILT)
def test_the_table_agrees(arch: str) -> None:
    row = table.read()[arch]
    for dialect, scheme in table.COLUMNS:
        cell = row.cells[dialect, scheme]["vLLM"]
        assert (cell != "pass") == (refused(arch, dialect, scheme) is not None), f"{dialect} {scheme}: {cell}"
        assert not cell.startswith("?")


# -------------------------------------------------------------------------------------------- activations, as it does


@pytest.mark.parametrize("amax", [2688.0, 336.0, 2688.0 * 32, 50.62565994262695, 1.0, 36.5654296875, 0.0127])
def test_the_emulation_quantizes_activations_as_transformer_engine_does(amax: float) -> None:
    """As far as these scales show: see the next test."""
    tensor_amax = torch.tensor(amax)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 512, generator=generator) * torch.exp(2 * torch.randn(256, 512, generator=generator))
    x = (x * amax / 400).bfloat16()
    theirs = ref_nvfp4_quant_dequant(x, 1.0 / (tensor_amax / 2688.0), 16)
    ours = ops.fake_quantize(x, tensor_amax=tensor_amax, recipe="transformer-engine")
    assert (x.abs() > amax).any()  # some saturate
    assert_same_bits(theirs + 0.0, ours + 0.0, "activations")  # their zeros may have another sign


@pytest.mark.parametrize(("amax", "block"), [(5.641448020935059, 0.478515625), (48.0, 1.125)])
def test_but_for_one_block_in_two_million(amax: float, block: float) -> None:
    """R(G * R(a / 6)) in place of R(a * R(G / 6)): seldom on the other side of a midpoint, one E4M3 step away."""
    x, tensor_amax = torch.full((1, 16), block).bfloat16(), torch.tensor(amax)
    theirs = ref_nvfp4_quant_dequant(x, 1.0 / (tensor_amax / 2688.0), 16).float()
    ours = ops.fake_quantize(x, tensor_amax=tensor_amax, recipe="transformer-engine").float()
    assert 0 < (theirs / ours - 1).abs().max() <= 1 / 8
