"""A whole checkpoint on a CPU, from disk to disk: ``quantize_checkpoint`` against Model-Optimizer, bytes first."""

from __future__ import annotations

import copy
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

import quads_qat as qq
from benchmarks.registry import Report, Row, benchmark

PEER, EXPORT = "nvidia-modelopt: load, quantize, export", "nvidia-modelopt: export alone"
WHOLE = "quads_qat quantize"
#: (function that makes the checkpoint at a path, seconds of its parts by name)
Maker = Callable[[Path], dict[str, float]]


@benchmark("export-cpu")
def export_cpu(
    layers: int = 2, experts: int = 32, hidden: int = 1024, intermediate: int = 768, rounds: int = 3, workers: int = 0
) -> Report:
    """Quantize a Qwen3-MoE checkpoint of random bf16 weights to W4A16 on a CPU, each peer and the cp of its files."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source = Path(folder) / "source"
        elements = make_source(source, layers, experts, hidden, intermediate)
        report = Report(
            title=f"Quantize a checkpoint of {elements / 1e6:.0f} M bf16 weights, from disk to disk",
            unit_count=elements,
            unit="weights",
            packages=("torch", "transformers", "nvidia-modelopt"),
            settings={"layers": layers, "experts": experts, "hidden": hidden, "intermediate": intermediate}
            | {"rounds": rounds, "workers": workers},
        )
        makers: dict[str, Maker] = {"copy of the files": _copy(source), WHOLE: _ours(source, workers)}
        try:
            makers[PEER] = _modelopt(source)
        except ImportError as error:
            report.rows.append(Row(PEER, None, note=f"skipped: {error}"))
        made = {name: Path(folder) / f"made-{i}" for i, name in enumerate(makers)}
        best: dict[str, float] = {}
        for i in range(rounds + 1):
            for name, make in list(makers.items()):
                shutil.rmtree(made[name], ignore_errors=True)
                for part, seconds in make(made[name]).items():
                    if i:  # the first round warms up, and its bytes are compared
                        best[part] = min(best.get(part, seconds), seconds)
            if i == 0 and PEER in makers and (wrong := difference(made[WHOLE], made[PEER])):
                report.rows.append(Row(PEER, None, note=f"not timed: {wrong}"))
                del makers[PEER]
    note = {PEER: "the same bytes", EXPORT: "the model is in memory and quantized already"}
    report.rows += [
        Row(name, seconds, WHOLE if name in note else "", note.get(name, "")) for name, seconds in best.items()
    ]
    return report


def make_source(path: Path, layers: int, experts: int, hidden: int, intermediate: int) -> int:
    """A Qwen3-MoE checkpoint of random bf16 weights; how many it has."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        num_hidden_layers=layers,
        num_experts=experts,
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        intermediate_size=intermediate,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        head_dim=64,
        vocab_size=8192,
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).bfloat16()
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def _timed(name: str, call: Callable[[], object]) -> dict[str, float]:
    start = time.perf_counter()
    call()
    return {name: time.perf_counter() - start}


def _copy(source: Path) -> Maker:
    return lambda out: _timed("copy of the files", lambda: shutil.copytree(source, out))


def _ours(source: Path, workers: int) -> Maker:
    options = {"recipe": "modelopt-ieee", "workers": workers or None}
    return lambda out: _timed(WHOLE, lambda: qq.quantize_checkpoint(source, out, **options))  # pyright: ignore


def _modelopt(source: Path) -> Maker:
    quantization = import_module("modelopt.torch.quantization")
    export = import_module("modelopt.torch.export").export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    def make(out: Path) -> dict[str, float]:
        start = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(source)
        quantization.quantize(model, copy.deepcopy(quantization.W4A16_NVFP4_CFG), None)
        middle = time.perf_counter()
        export(model, export_dir=out)
        end = time.perf_counter()
        return {PEER: end - start, EXPORT: end - middle}

    return make


def difference(ours: Path, theirs: Path) -> str:
    """What differs in names or bytes, or nothing."""
    a, b = (_tensors(path) for path in (ours, theirs))
    if a.keys() != b.keys():
        return f"{len(a.keys() ^ b.keys())} names differ"
    wrong = [name for name in a if not torch.equal(_bytes(a[name]), _bytes(b[name]))]
    return f"{len(wrong)} tensors differ, {wrong[0]} first" if wrong else ""


def _tensors(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
