"""What vLLM, SGLang and TensorRT-LLM do with a checkpoint on load, in plain Python; no engine runs here.

Each module has ``read_config`` (which of the JSON files, which scheme, what is ignored), ``quantizes`` (is a layer
built with packed parameters), ``load`` (which numbers it multiplies by) and ``computes`` (which GEMM a GPU gets). The
rules were read in the engines' sources, in the versions of ``quads_qat.engine_limits.ENGINES``; where none was read,
the emulators say so (``NotKnown``) and guess nothing. ``table`` has what follows for every architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType

from . import sglang, tensorrt_llm, vllm
from .common import Checkpoint, Loaded, LoadError, NotKnown, Refused, mismatches

ENGINES: Mapping[str, ModuleType] = {"vLLM": vllm, "SGLang": sglang, "TensorRT-LLM": tensorrt_llm}

__all__ = ["ENGINES", "Checkpoint", "LoadError", "Loaded", "NotKnown", "Refused", "assert_ignore_list_is_right"]


def assert_ignore_list_is_right(path: Path) -> None:
    """Every engine that reads the config takes for quantized what is packed, and nothing else."""
    checkpoint = Checkpoint.read(path)
    for name, engine in ENGINES.items():
        try:
            engine.read_config(checkpoint)
        except Refused:
            continue
        wrong = mismatches(checkpoint, partial(engine.quantizes, checkpoint))
        assert not wrong, f"{name} is wrong about {wrong}"
