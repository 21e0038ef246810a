"""A row of the table, measured: export an architecture in every way, and let every engine load it."""

from __future__ import annotations

import re
import warnings
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from bits import assert_same_bits
from test_round_trips import excluded
from tiny_models import tiny_model
from torch import Tensor, nn
from twins import plain_twin

import quads_qat as qq
from quads_qat import EngineWarning, engine_limits
from quads_qat.checkpoint_plan import layer_of
from quads_qat.conversion import conversion_of
from quads_qat.experts_layout import layout_of
from quads_qat.names import disk_state

from . import ENGINES, table
from .common import Checkpoint, NotKnown, Refused, mismatches


@lru_cache(maxsize=1)
def trainer(arch: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A converted model with activation scales, and what it multiplies by: module on disk -> weight.

    Gate and query weights are eight times smaller than their siblings, so that scales which are not shared would
    differ; so would activation scales: every group has one of its own.
    """
    model = tiny_model(arch)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "gate_proj.weight", "q_a_proj.weight", "w1.weight")):
                parameter /= 8
            if name.endswith("experts.gate_up_proj") and parameter.shape[1] % 2 == 0:
                parameter[:, : parameter.shape[1] // 2] /= 8
    qq.convert(model, "w4a16", exclude=excluded(arch))
    for i, observer in enumerate(conversion_of(model, "test")[1].observers.values()):
        observer.amax = torch.tensor(2688.0 * 2.0 ** -(1 + i % 9))
    twin = plain_twin(model)
    weights = {name.removesuffix(".weight"): tensor for name, tensor in disk_state(twin, twin.state_dict()).items()}
    layers = {layer_of(name).rpartition(".")[2]: layer_of(name) for name in weights if re.search("expert|moe", name)}
    for name, module in twin.named_modules():  # stacks that may be taken apart on disk, below the layer's name there
        if (layout := layout_of(module)) is not None:
            layer = layer_of(name)
            on_disk = layers.get(layer.rpartition(".")[2], layer) + name.removeprefix(layer)
            weights |= _single_experts(on_disk, module, layout)
    return model, weights


def _single_experts(prefix: str, module: nn.Module, layout: Any) -> dict[str, Tensor]:
    single = {}
    for parameter in layout.parameters:
        stack = module.get_parameter(parameter).detach()
        for expert, matrix in enumerate(stack.mT if layout.transposed else stack):
            parts = {parameter: matrix}
            if parameter == "gate_up_proj":
                gate_up = (matrix[::2], matrix[1::2]) if layout.interleaved else matrix.chunk(2)
                parts = dict(zip(("gate_proj", "up_proj"), gate_up, strict=True))
            single |= {f"{prefix}.{expert}.{name}": part for name, part in parts.items()}
    return single


def measured(engine: str, checkpoint: Checkpoint, weights: dict[str, Tensor]) -> str:
    """A cell of the table; a pass means that all numbers are right, bit for bit."""
    try:
        loaded = ENGINES[engine].load(checkpoint)
    except Refused as refused:
        return refused.key
    except NotKnown as unknown:
        return f"? {unknown.key}"
    wrong = mismatches(checkpoint, partial(ENGINES[engine].quantizes, checkpoint))
    assert not wrong, f"{engine} is wrong about {wrong}"
    packed = {name for name, matrix in checkpoint.matrices().items() if matrix.dtype == torch.uint8}
    assert loaded.weights.keys() == packed
    for name, weight in loaded.weights.items():
        assert_same_bits(weight, weights[name].float(), f"{engine}: {name}")
    ending = "input_global_scale" if checkpoint.packed else "input_scale"
    assert loaded.input_scales.keys() == (packed if loaded.computes == "W4A4" else set())
    for name, scale in loaded.input_scales.items():
        stored = checkpoint.stored.get(f"{name}.{ending}", checkpoint.stored.get(f"{name}_{ending}"))
        assert stored is not None
        assert_same_bits(scale, stored.reshape(()), f"{engine}: {name}")
    return "pass"


def row(arch: str, folder: Path) -> table.Row:
    """Export in every dialect and scheme, let every engine load it, and compare warnings with what they did."""
    model, weights = trainer(arch)
    cells, unfused = {}, set()
    for dialect, scheme in table.COLUMNS:
        path = folder / f"{dialect}-{scheme}"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            qq.export_checkpoint(model, path, dialect=dialect, activations=table.ACTIVATIONS[scheme])
        checkpoint = Checkpoint.read(path)
        cells[dialect, scheme] = {engine: measured(engine, checkpoint, weights) for engine in ENGINES}
        unfused |= table.unfused(checkpoint)
        odd = [name for name in checkpoint.quantization["ignore"] if not re.fullmatch(r"[\w.\[\]]+", name)]
        assert not odd  # full names: no NUL, as Model-Optimizer wrote for Nemotron-H, no globs, no regexes
        warned = sorted(str(w.message) for w in caught if w.category is EngineWarning)
        refused = [limit for limit in engine_limits.LIMITS if limit.key in cells[dialect, scheme].values()]
        assert len(warned) == len(refused)
        for limit in refused:
            expected = f"{limit.engine} does not load this checkpoint: {limit.reason} ({limit.link})"
            assert any(message.startswith(expected) for message in warned), (expected, warned)
    return table.Row(arch, cells, excluded(arch), sorted(unfused))
