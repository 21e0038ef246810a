"""Quantizing a weight on a CPU: every recipe against Model-Optimizer and compressed-tensors, bytes first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from benchmarks.registry import Report, Row, benchmark, best_times
from quads_qat import reference
from quads_qat.config import Recipe

#: packed codes, block scales, stored per-tensor scale
Bytes = tuple[Tensor, Tensor, Tensor]
Peer = Callable[[Tensor], Bytes]


def modelopt() -> Peer:
    """``NVFP4QTensor.quantize`` of nvidia-modelopt: everything from the weight, as its export does."""
    qtensor = import_module("modelopt.torch.quantization.qtensor").NVFP4QTensor

    def quantize(weight: Tensor) -> Bytes:
        packed, block_scale, per_tensor_scale = qtensor.quantize(weight, 16)
        return packed._quantized_data, block_scale, per_tensor_scale

    return quantize


def compressed_tensors() -> Peer:
    """``NVFP4PackedCompressor.compress``, with the scales that llm-compressor's min-max observers compute."""
    compressor = import_module("compressed_tensors.compressors.nvfp4").NVFP4PackedCompressor
    scheme = import_module("compressed_tensors.quantization").preset_name_to_scheme("NVFP4A16", ["Linear"])
    utils = import_module("compressed_tensors.quantization.utils")

    def quantize(weight: Tensor) -> Bytes:
        global_scale = utils.generate_gparam(*weight.aminmax())
        low, high = weight.unflatten(-1, (-1, 16)).aminmax(dim=-1)
        scale, _ = utils.calculate_qparams(low, high, scheme.weights, global_scale=global_scale)
        state = {"weight": weight, "weight_scale": scale, "weight_global_scale": global_scale}
        state = compressor.compress(state, scheme)
        return state["weight_packed"], state["weight_scale"], state["weight_global_scale"]

    return quantize


# distribution -> how to get its function, and the recipe that has its bytes
PEERS: dict[str, tuple[Callable[[], Peer], Recipe]] = {
    "nvidia-modelopt": (modelopt, Recipe.MODELOPT_IEEE),
    "compressed-tensors": (compressed_tensors, Recipe.LLM_COMPRESSOR),
}


def differing_bytes(peer: Peer, recipe: Recipe, weight: Tensor) -> int:
    """How many bytes of ``peer``'s result are not those of our ``recipe``."""
    q, theirs = reference.quantize(weight, recipe=recipe), peer(weight)
    pairs = zip((q.qdata, q.block_scale, q.stored_scale), theirs, strict=True)
    return sum(int((a.reshape(-1).view(torch.uint8) != b.reshape(-1).view(torch.uint8)).sum()) for a, b in pairs)


@benchmark("quantize-cpu")
@torch.no_grad()
def quantize_cpu(rows: int = 4096, columns: int = 4096, rounds: int = 10, seed: int = 0) -> Report:
    """Quantize a bf16 weight on a CPU, each recipe and each peer."""
    weight = (0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))).bfloat16()
    report = Report(
        title=f"Quantize a {rows} x {columns} bf16 weight on a CPU",
        unit_count=weight.numel(),
        unit="elements",
        packages=("torch", *PEERS),
        settings={"rows": rows, "columns": columns, "rounds": rounds, "seed": seed},
    )

    ours = {recipe: f"quads_qat {recipe}" for recipe in Recipe}
    calls: dict[str, Callable[[], object]] = {"copy of the weight": weight.clone}
    calls |= {ours[recipe]: partial(reference.quantize, weight, recipe=recipe) for recipe in Recipe}
    refused = []
    for name, (load, recipe) in PEERS.items():
        try:
            peer = load()
        except ImportError as error:
            refused.append(Row(name, None, note=f"skipped: {error}"))
            continue
        if wrong := differing_bytes(peer, recipe, weight):
            refused.append(Row(name, None, note=f"not timed: {wrong} bytes differ from {recipe}"))
        else:
            calls[name] = partial(peer, weight)

    for name, seconds in best_times(calls, rounds).items():
        if name in PEERS:
            recipe = PEERS[name][1]
            report.rows.append(Row(name, seconds, ours[recipe], f"bytes of {recipe}"))
        else:
            report.rows.append(Row(name, seconds))
    report.rows += refused
    return report
