"""Checkpoints that an inference engine is known not to load: which engine, why, where it says so, the way out.

Export warns of them. The rules were read in the engines' sources; the tests emulate them, and ``docs/engines.md`` shows
what follows for every architecture.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from quads_qat.config import Dialect

ENGINES: dict[str, str] = {
    "vLLM": "0.33.0; its own classes are run as well: `make test-engines`",
    "SGLang": "0.5.23",
    "TensorRT-LLM": "mid-2026: _torch/model_config.py at 008e0af8, _torch/modules/linear.py at 00bbf71e",
}
"""Engine -> the version that its rules were read from."""

_REPOSITORIES = {"vllm": "vllm-project/vllm", "sglang": "sgl-project/sglang", "TensorRT-LLM": "NVIDIA/TensorRT-LLM"}


class EngineWarning(UserWarning):
    """An engine is known not to load the checkpoint that is being written."""


@dataclass(frozen=True)
class Written:
    """What decides who can load a checkpoint.

    Attributes:
        model_types: every ``model_type`` in its config.json.
        dialect: how it is written.
        weights_only: W4A16, not W4A4.
        names: the quantized weights on disk, in BF16 terms: ``x.weight``, or a 3-D ``x.experts.down_proj``.
    """

    model_types: frozenset[str]
    dialect: Dialect
    weights_only: bool
    names: tuple[str, ...]

    def is_type(self, *types: str) -> bool:
        """Whether one of its models is of such a type."""
        return not self.model_types.isdisjoint(types)

    def holds(self, *endings: str) -> bool:
        """Whether a quantized weight's name ends so."""
        return any(name.endswith(endings) for name in self.names)

    @property
    def stacks(self) -> bool:
        """Whether experts are 3-D on disk."""
        return any(not name.endswith(".weight") for name in self.names)


@dataclass(frozen=True)
class Limit:
    """One thing that an engine is known not to load.

    Attributes:
        key: repository and number of the thread that says so, like ``vllm#46641``; where there is none, the file of
            vLLM that does so, like ``vllm: models/jamba.py``.
        engine: a key of ``ENGINES``.
        reason: what the engine does instead.
        way_out: what to export for this engine.
        applies: whether a checkpoint is one of these.
    """

    key: str
    engine: str
    reason: str
    way_out: str
    applies: Callable[[Written], bool]

    @property
    def link(self) -> str:
        """Where it is documented."""
        if ": " in self.key:
            return f"https://github.com/vllm-project/vllm/blob/v0.33.0/vllm/model_executor/{self.key.split(': ')[1]}"
        repository, number = self.key.split("#")
        return f"https://github.com/{_REPOSITORIES[repository]}/issues/{number}"


LIMITS: tuple[Limit, ...] = (
    Limit(
        "vllm#46641",
        "vLLM",
        "for gpt-oss in the ModelOpt dialect it has no biases of experts and drops the scales of 3-D experts",
        "leave the experts in high precision, exclude=['*.experts']",
        lambda c: c.dialect is Dialect.MODELOPT and c.is_type("gpt_oss") and c.stacks,
    ),
    Limit(
        "vllm#41276",
        "vLLM",
        "for DeepSeek-V4 it raises NotImplementedError when compressor or indexer.weights_proj are quantized",
        "leave these in high precision, exclude=['*.compressor.*']",
        lambda c: (
            c.is_type("deepseek_v4")
            and c.holds("compressor.wkv.weight", "compressor.wgate.weight", "indexer.weights_proj.weight")
        ),
    ),
    Limit(
        "vllm#45102",
        "vLLM",
        "its output head has no parameters for scales of compressed-tensors",
        "leave the head in high precision, as the default does, or use dialect='modelopt'",
        lambda c: c.dialect is Dialect.COMPRESSED_TENSORS and c.holds("lm_head.weight"),
    ),
    Limit(
        "vllm: models/gpt_oss.py",
        "vLLM",
        "for gpt-oss in the compressed-tensors dialect it has no biases of single experts",
        "use dialect='modelopt' with exclude=['*.experts']",
        lambda c: c.dialect is Dialect.COMPRESSED_TENSORS and c.is_type("gpt_oss") and c.holds(".down_proj.weight"),
    ),
    Limit(
        "vllm: models/afmoe.py",
        "vLLM",
        "for AFMoE and EXAONE-MoE in the ModelOpt dialect its output head has no name that a list could leave out",
        "use dialect='compressed-tensors', or quantize the head too, include=['lm_head']",
        lambda c: c.dialect is Dialect.MODELOPT and c.is_type("afmoe", "exaone_moe") and not c.holds("lm_head.weight"),
    ),
    Limit(
        "vllm: models/llama4.py",
        "vLLM",
        "for text-only Llama 4 in the ModelOpt dialect its loader knows no scales of 3-D experts",
        "leave the experts in high precision, exclude=['*.experts'], or use dialect='compressed-tensors'",
        lambda c: c.dialect is Dialect.MODELOPT and c.is_type("llama4_text") and not c.is_type("llama4") and c.stacks,
    ),
    Limit(
        "vllm: models/aria.py",
        "vLLM",
        "for Aria's multimodal class its loader takes the gate of one expert for gate and up together; nor does it "
        "find experts in the list of what was left out",
        "use another engine",
        lambda c: c.is_type("aria"),
    ),
    Limit(
        "vllm: models/glm4_1v.py",
        "vLLM",
        "for GLM-4.5V in the compressed-tensors dialect it takes the vision tower's qkv for quantized",
        "use dialect='modelopt'",
        lambda c: c.dialect is Dialect.COMPRESSED_TENSORS and c.is_type("glm4v_moe"),
    ),
    Limit(
        "vllm: models/granitemoehybrid.py",
        "vLLM",
        "for Granite hybrids in the compressed-tensors dialect its loader does not find the experts' input scales",
        "use dialect='modelopt'",
        lambda c: c.dialect is Dialect.COMPRESSED_TENSORS and c.is_type("granitemoehybrid") and not c.weights_only,
    ),
    Limit(
        "vllm: layers/mamba/mamba_mixer.py",
        "vLLM",
        "for Jamba the projections of its Mamba layers are never quantized",
        "leave these in high precision, exclude=['*.mamba.*']",
        lambda c: c.is_type("jamba") and c.holds(".mamba.in_proj.weight", ".mamba.x_proj.weight"),
    ),
    Limit(
        "vllm: models/longcat_flash.py",
        "vLLM",
        "for LongCat its loader has no place for the gate and up weights that transformers stores for zero experts, "
        "quantized or not",
        "take the tensors of experts beyond the routed ones out of the file",
        lambda c: c.is_type("longcat_flash") and c.holds(".up_proj.weight"),
    ),
    Limit(
        "vllm: models/openai_privacy_filter.py",
        "vLLM",
        "for OpenAI's privacy filter it has no scales of the score head and no biases of quantized experts",
        "use dialect='modelopt' with exclude=['score', '*.experts']",
        lambda c: c.is_type("openai_privacy_filter") and (c.stacks or c.holds("score.weight", ".down_proj.weight")),
    ),
    Limit(
        "vllm: models/transformers/base.py",
        "vLLM",
        "PhiMoE runs as transformers' module there, whose router has another name than on disk and is taken for "
        "quantized",
        "use another engine",
        lambda c: c.is_type("phimoe"),
    ),
    Limit(
        "sglang#33245",
        "SGLang",
        "for DeepSeek-V4 it drops packed wq_a and wkv, which it fuses, with at most a log line",
        "quantize with scope='mlp'",
        lambda c: c.is_type("deepseek_v4") and c.holds(".wq_a.weight", ".wkv.weight"),
    ),
    Limit(
        "sglang#35032",
        "SGLang",
        "for Llama 4 in the ModelOpt dialect it expects the scales of each expert apart",
        "leave the experts in high precision, exclude=['*.experts']",
        lambda c: c.dialect is Dialect.MODELOPT and c.is_type("llama4", "llama4_text") and c.stacks,
    ),
    Limit(
        "TensorRT-LLM#16511",
        "TensorRT-LLM",
        "its reader of compressed-tensors configs takes input_activations for given, which W4A16 does not have",
        "use dialect='modelopt'",
        lambda c: c.dialect is Dialect.COMPRESSED_TENSORS and c.weights_only,
    ),
    Limit(
        "TensorRT-LLM#16447",
        "TensorRT-LLM",
        "it looks for ModelOpt's tensor names in compressed-tensors checkpoints too",
        "use dialect='modelopt'",
        lambda c: c.dialect is Dialect.COMPRESSED_TENSORS and not c.weights_only,
    ),
)


def limits(
    config: Mapping[str, Any], dialect: Dialect, names: Iterable[str], *, weights_only: bool
) -> tuple[Limit, ...]:
    """The limits that a checkpoint runs into.

    Args:
        config: its config.json.
        dialect: how it is written.
        names: its quantized weights on disk, in BF16 terms.
        weights_only: W4A16, not W4A4.

    >>> [limit.key for limit in limits({}, Dialect.COMPRESSED_TENSORS, ["o_proj.weight"], weights_only=True)]
    ['TensorRT-LLM#16511']
    """
    written = Written(frozenset(_model_types(config)), dialect, weights_only, tuple(names))
    return tuple(limit for limit in LIMITS if limit.applies(written))


def warn(
    config: Mapping[str, Any], dialect: Dialect, names: Iterable[str], *, weights_only: bool, stacklevel: int
) -> None:
    """One :class:`EngineWarning` for each limit, at the line ``stacklevel`` calls above the caller."""
    for limit in limits(config, dialect, names, weights_only=weights_only):
        warnings.warn(
            f"{limit.engine} does not load this checkpoint: {limit.reason} ({limit.link}); for {limit.engine}, "
            f"{limit.way_out}",
            EngineWarning,
            stacklevel=stacklevel + 1,
        )


def _model_types(config: Mapping[str, Any]) -> Iterable[str]:
    for key, value in config.items():
        if key == "model_type" and isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from _model_types(value)
