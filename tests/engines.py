"""How vLLM, SGLang, TensorRT-LLM and compressed-tensors read an NVFP4 checkpoint, rule by rule, in plain Python.

The rules were read in their sources (vLLM and TensorRT-LLM of mid-2026, SGLang 0.5.23, compressed-tensors 0.20.1); no
engine runs here. Two questions: which modules does an engine take for unquantized (``*_ignores``), and which numbers
does it multiply by (``load``)? Parameters are prefilled with NaN: one that no tensor fills stays visible.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import torch
from by_hand import SCALES, config, decode, scale_names, tensors
from torch import Tensor

#: What engines fuse into one GEMM: name of the fused module -> leaf names on disk.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
W13, W2 = (("gate_proj", "w1"), ("up_proj", "w3")), ("down_proj", "w2")

# ------------------------------------------------------------------------------------------------ what is not quantized


def _shards(name: str) -> list[str]:
    parent, _, leaf = name.rpartition(".")
    return [f"{parent}.{shard}" for shard in FUSED.get(leaf, ())]


def vllm_ignores(name: str, patterns: Iterable[str]) -> bool:
    """ModelOpt dialect: exact or by its shards, then substring, then glob."""
    patterns = list(patterns)
    shards = [shard in patterns for shard in _shards(name)]
    if any(shards):
        assert all(shards), f"{name}: vLLM refuses a fused layer of which one shard is quantized and another is not"
        return True
    return any(pattern in name or fnmatch(name, pattern) for pattern in patterns)


def sglang_ignores(name: str, patterns: Iterable[str]) -> bool:
    """ModelOpt dialect: a regex against the whole name, or against any one component of it."""
    parts = [name, *name.split(".")]
    shards = _shards(name)
    return any(regex.fullmatch(part) for regex in _sglang_regexes(tuple(patterns)) for part in parts) or (
        bool(shards) and all(sglang_ignores(shard, patterns) for shard in shards)
    )


@cache
def _sglang_regexes(patterns: tuple[str, ...]) -> list[re.Pattern[str]]:
    return [re.compile(pattern.replace(".", r"\.").replace("*", r".*")) for pattern in patterns]


def tensorrt_ignores(name: str, patterns: Iterable[str]) -> bool:
    """ModelOpt dialect: a glob against the name and against everything above it."""
    above = [name[: dot.start()] for dot in re.finditer(r"\.", name)]
    candidates = [name, *above, *_shards(name)]
    return any(fnmatch(candidate, pattern) for pattern in patterns for candidate in candidates)


def compressed_tensors_ignores(name: str, patterns: Iterable[str]) -> bool:
    """Exact name or class name, or ``re:`` and a regex that matches from the start; vLLM looks at fused shards too."""

    def hit(candidate: str) -> bool:
        return any(re.match(p[3:], candidate) is not None if p.startswith("re:") else p == candidate for p in patterns)

    shards = [hit(shard) for shard in _shards(name)]
    assert len(set(shards)) < 2, f"{name}: a fused layer of which one shard is quantized and another is not"
    return hit(name) or any(shards)


IGNORES: dict[str, dict[str, Callable[[str, Iterable[str]], bool]]] = {
    "modelopt": {"vllm": vllm_ignores, "sglang": sglang_ignores, "tensorrt-llm": tensorrt_ignores},
    "compressed-tensors": {"compressed-tensors": compressed_tensors_ignores},
}


def modules(stored: dict[str, Tensor]) -> tuple[set[str], set[str]]:
    """(quantized modules, modules in high precision that have a matrix), as engines name them: fused ones, too."""
    quantized, plain = set(), set()
    for name, tensor in stored.items():
        if name.endswith((*SCALES, "bias")) or tensor.ndim < 2:
            continue
        module = name.rpartition(".")[0]
        if name.endswith((".weight", ".weight_packed")) or module.endswith("experts"):
            (quantized if tensor.dtype == torch.uint8 else plain).add(module)
    for found in (quantized, plain):
        for name in list(found):
            parent, _, leaf = name.rpartition(".")
            fused = [f for f, shards in FUSED.items() if leaf in shards]
            found |= {f"{parent}.{f}" for f in fused if all(f"{parent}.{shard}" in found for shard in FUSED[f])}
            if experts := re.match(r"(.*\.experts)\.\d+\.", name):
                found.add(experts[1])
    return quantized, plain


def assert_ignore_list_is_right(path: Path) -> None:
    """Every engine takes for quantized what is, and nothing else."""
    written = config(path)["quantization_config"]
    quantized, plain = modules(tensors(path))
    assert not quantized & plain
    for engine, ignores in IGNORES[written["quant_method"]].items():
        wrong = [name for name in sorted(quantized) if ignores(name, written["ignore"])]
        assert not wrong, f"{engine} would not quantize {wrong}"
        missed = [name for name in sorted(plain) if not ignores(name, written["ignore"])]
        assert not missed, f"{engine} would quantize {missed}"


# ------------------------------------------------------------------------------------------------ what is multiplied by


@dataclass
class Fused:
    """One GEMM of an engine: shards in order, each with the scales that its tensors fill, NaN until then."""

    shards: list[str]
    codes: list[Tensor | None] = field(default_factory=list)
    block_scales: list[Tensor | None] = field(default_factory=list)
    scales: Tensor = field(default_factory=lambda: torch.empty(0))
    input_scales: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        self.codes, self.block_scales = [None] * len(self.shards), [None] * len(self.shards)
        self.scales, self.input_scales = (torch.full((len(self.shards),), torch.nan) for _ in range(2))


def fused_modules(path: Path) -> tuple[dict[str, Fused], dict[str, dict[int, Fused]], dict[str, dict[int, Fused]]]:
    """Dense modules, and w13 and w2 of every expert, filled from the file; names are the engines'."""
    stored = tensors(path)
    dense: dict[str, Fused] = {}
    w13: dict[str, dict[int, Fused]] = {}
    w2: dict[str, dict[int, Fused]] = {}
    for codes in (name for name, tensor in stored.items() if tensor.dtype == torch.uint8):
        name = codes.removesuffix("_packed")
        module = name.removesuffix(".weight")
        parent, _, leaf = module.rpartition(".")
        if expert := re.fullmatch(r"(.*\.experts)\.(\d+)", parent):
            leaves = next(pair for pair in zip(*W13, strict=True) if leaf in pair) if leaf not in W2 else (leaf,)
            table = (w2 if leaf in W2 else w13).setdefault(expert[1], {})
            target = table.setdefault(int(expert[2]), Fused([f"{parent}.{shard}" for shard in leaves]))
        else:
            fused = next((f for f, shards in FUSED.items() if leaf in shards), None)
            shards = [f"{parent}.{shard}" for shard in FUSED[fused]] if fused else [module]
            shards = [shard for shard in shards if f"{shard}.{codes.rpartition('.')[2]}" in stored]  # MLA without q_a
            target = dense.setdefault(f"{parent}.{fused}" if fused else module, Fused(shards))
        i = target.shards.index(module)
        block_scale, scale = scale_names(name, codes)
        target.codes[i], target.block_scales[i] = stored[codes], stored[block_scale]
        target.scales[i] = stored[scale]
        activation = f"{module}.input_global_scale" if codes.endswith("_packed") else f"{module}.input_scale"
        if activation in stored:
            target.input_scales[i] = stored[activation]
    return dense, w13, w2


def load(path: Path, engine: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(module on disk -> the weight that the engine multiplies by, fused module -> the input scale that it uses)."""
    divides = config(path)["quantization_config"]["quant_method"] == "compressed-tensors"
    weights_only = _weights_only(path)
    dense, w13, w2 = fused_modules(path)
    weights: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}
    for name, module in dense.items():
        scale, input_scale = _dense_scales(module, engine)
        _decode(module, scale.expand(len(module.shards)), weights, divides=divides)
        inputs[name] = input_scale
    for table, kind in ((w13, "w13"), (w2, "w2")):
        for name, experts in table.items():
            for module in experts.values():
                if engine == "tensorrt-llm":
                    _require_equal(module.scales, "weight_scale_2")
                _decode(module, module.scales[0].expand(len(module.shards)), weights, divides=divides)  # gate's, twice
            every = torch.cat([module.input_scales for module in experts.values()])
            inputs[f"{name}.{kind}"] = every.min() if divides else every.max()  # over all experts: the largest amax
    for name, value in inputs.items():
        assert weights_only or (bool(value.isfinite()) and value > 0), f"{name}: {engine} reads no input scale"
    return weights, inputs


def _weights_only(path: Path) -> bool:
    group = config(path)["quantization_config"]["config_groups"]["group_0"]
    return group.get("input_activations") is None


def _dense_scales(module: Fused, engine: str) -> tuple[Tensor, Tensor]:
    if engine == "tensorrt-llm":
        _require_equal(module.scales, "weight_scale_2")
        if not module.input_scales.isnan().all():
            _require_equal(module.input_scales, "input_scale")
    return module.scales.max(), module.input_scales.max()  # both dialects, also where the scale divides


def _require_equal(scales: Tensor, what: str) -> None:
    assert bool((scales == scales[0]).all()), f"The {what} should be same for all the weights"


def _decode(module: Fused, scales: Tensor, into: dict[str, Tensor], *, divides: bool) -> None:
    for shard, codes, block_scale, scale in zip(module.shards, module.codes, module.block_scales, scales, strict=True):
        assert codes is not None, f"{shard} was not loaded"
        assert block_scale is not None, f"{shard} was not loaded"
        into[shard] = decode(codes, block_scale, scale, divides=divides)
