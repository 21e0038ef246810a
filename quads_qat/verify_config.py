"""What ``verify`` checks besides tensors: whether the JSON files announce what the tensors are, and of which model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from torch import nn

from quads_qat import checkpoint_io
from quads_qat.checkpoint_plan import Plan
from quads_qat.config import Dialect
from quads_qat.export import configs, ignored_modules
from quads_qat.nvfp4_checkpoint import Checkpoint

_NOT_OF_THE_MODEL = {
    "quantization_config",
    "quads_qat",
    "transformers_version",
    "_name_or_path",
    "dtype",
    "torch_dtype",
}
_OF_TRAINING = re.compile(
    r"(^|\.)(use_cache|return_dict|output_\w+|initializer_range|router_aux_loss_coef|\w*dropout\w*|problem_type|"
    r"(bos|eos|pad)_token_id|architectures|id2label|label2id|_\w+)(\.|$)"
)
"""Settings that change no weight and no number of an evaluation."""


def model_differences(expected: Mapping[str, Any], path: Path, model: nn.Module) -> dict[str, str]:
    """Where config.json describes another model than ``expected``, a config as a dict; by dotted key.

    Both go through the config class of ``model``, which fills in defaults and knows old names of settings.
    """
    config_class: Any = type(getattr(model, "config", None))
    if not hasattr(config_class, "from_pretrained"):
        return {}
    here = dict(_settings(json.loads(json.dumps(expected, default=str))))
    try:
        there = dict(_settings(json.loads(json.dumps(as_config(path, model), default=str))))
    except ValueError as error:
        return {"config.json": str(error)}
    differing = [key for key in sorted(here.keys() & there.keys()) if here[key] != there[key]]
    return {f"config.json: {key}": f"{there[key]!r} against {here[key]!r}" for key in differing}


def as_config(path: Path, model: nn.Module) -> dict[str, Any]:
    """A directory's config.json as :func:`model_differences` wants it.

    Raises:
        ValueError: transformers refuses it.
    """
    config_class: Any = type(getattr(model, "config", None))
    try:
        return config_class.from_pretrained(str(path)).to_dict()
    except Exception as error:  # whatever one of transformers' configs raises
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{path}: transformers cannot read config.json ({why})") from error


def _settings(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        name = f"{prefix}{key}"
        if key in _NOT_OF_THE_MODEL or _OF_TRAINING.search(name):
            continue
        if isinstance(value, Mapping) and value:
            yield from _settings(value, f"{name}.")
        else:
            yield name, value


def announcement_differences(
    checkpoint: Checkpoint, rest: dict[str, int], plan: Plan, model: nn.Module
) -> dict[str, str]:
    """Where the quantization entries are not what an export of these tensors writes; nothing for others' checkpoints.

    Args:
        checkpoint: ours.
        rest: name on disk -> rank, of everything in high precision.
        plan: the quantized weights.
        model: what they are of.
    """
    if checkpoint.contract is None:
        return {}
    ignored = ignored_modules(rest, plan, model, checkpoint.dialect)
    found: dict[str, str] = {}
    for file, expected in configs({}, checkpoint.dialect, ignored, checkpoint.contract).items():
        entry = expected.get("quantization_config", expected)
        try:
            loaded = checkpoint_io.read_json(checkpoint.reader.path / file)
        except ValueError as error:
            found[file] = str(error)
            continue
        written = loaded.get("quantization_config") if file == "config.json" else loaded
        found |= _compare(written if isinstance(written, Mapping) else {}, entry, file)
    return found


def _are_names(value: Any) -> TypeGuard[list[str]]:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _compare(written: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in expected.items():
        name, there = f"{where}: {key}", written.get(key)
        if key in ("producer", "version"):  # of the peer that is imitated; a later one is none the worse
            continue
        if isinstance(value, Mapping):
            found |= _compare(there if isinstance(there, Mapping) else {}, value, name)
        elif key in ("ignore", "exclude_modules") and _are_names(there):
            lacking, extra = sorted(set(value) - set(there)), sorted(set(there) - set(value))
            if lacking or extra:
                found[name] = f"lacks {lacking[:3]}" if lacking else f"has {extra[:3]} too"
        elif there != value:
            found[name] = f"{there!r} against {value!r}"
    return found


def announcement_problems(checkpoint: Checkpoint) -> list[str]:
    """What is wrong with a checkpoint's JSON files by themselves, whoever wrote them."""
    entry = checkpoint.reader.config.get("quantization_config") or {}
    ignored = set(entry.get("ignore") or ())
    problems = [
        f"config.json: ignore lists {name}, which is quantized"
        for name in (weight.removesuffix(".weight") for weight in checkpoint.quantized())
        if name in ignored
    ]
    legacy = checkpoint.reader.path / "hf_quant_config.json"
    if checkpoint.dialect is Dialect.MODELOPT and entry.get("quant_algo") and legacy.exists():
        other = checkpoint_io.read_json(legacy).get("quantization")
        other = other if isinstance(other, Mapping) else {}
        pairs = {"quant_algo": ("quant_algo", entry["quant_algo"]), "exclude_modules": ("ignore", sorted(ignored))}
        for key, (name, here) in pairs.items():
            there = other.get(key)
            if key == "exclude_modules":
                there = sorted(there) if _are_names(there) else there or []
            if there != here:
                problems.append(
                    f"hf_quant_config.json: {key} is not what config.json says in {name}; engines read one each"
                )
    return problems
