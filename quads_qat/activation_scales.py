"""Activation scales for a checkpoint that is quantized from its files: observed on a text, or another checkpoint's."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from quads_qat import dialects
from quads_qat.checkpoint_io import read_json
from quads_qat.checkpoint_plan import Plan
from quads_qat.config import Dialect, Recipe, Scope
from quads_qat.convert import convert, full_precision
from quads_qat.nvfp4_checkpoint import Checkpoint
from quads_qat.scale_groups import activation_key
from quads_qat.skeleton import architecture_of
from quads_qat.state import observe_activations, quant_state_dict

LENGTH, ROWS = 512, 4
"""Tokens in a row of a calibration text, and rows in a batch."""

BYTES = 256
"""Vocabulary of a model without a tokenizer whose token ids are bytes, like the bundled one."""

_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


@torch.no_grad()
def observed_amaxes(
    path: Path,
    data: str | list[Tensor],
    *,
    recipe: Recipe,
    scope: Scope,
    include: Sequence[str],
    exclude: Sequence[str],
    device: torch.device,
    trust_remote_code: bool = False,
) -> dict[str, float]:
    """Largest magnitude that enters each activation group, over a text or batches of token ids.

    The weights are those of the checkpoint, in high precision, as Model-Optimizer and llm-compressor calibrate.

    Args:
        path: BF16 checkpoint; of a text :func:`require_tokenizer` holds.
        data: a text, or token ids [batch, length].
        recipe: as for ``convert``, which decides what is quantized.
        scope: likewise.
        include: likewise.
        exclude: likewise.
        device: the whole model goes there.
        trust_remote_code: run model or tokenizer code that the directory brings.

    Returns:
        Name of the activation group -> amax.

    Raises:
        ValueError: the model or the tokenizer cannot be loaded, or the text has no tokens.
    """
    batches = _tokens(path, data, trust_remote_code) if isinstance(data, str) else data
    model = _load(path, trust_remote_code).to(device)
    convert(model, "w4a16", recipe=recipe, scope=scope, include=include, exclude=exclude)
    with observe_activations(model), full_precision(model):
        for ids in batches:
            model(input_ids=ids.to(device))
    return {key.removesuffix(".amax"): amax.item() for key, amax in quant_state_dict(model).items()}


def _load(path: Path, trust_remote_code: bool) -> nn.Module:
    architecture, _ = architecture_of(path, read_json(path / "config.json"), trust_remote_code=trust_remote_code)
    try:
        return architecture.from_pretrained(path, dtype="auto", use_safetensors=True, local_files_only=True).eval()
    except Exception as error:  # whatever one of transformers' models raises
        raise ValueError(f"{path}: the model cannot be loaded to calibrate ({_line(error)})") from error


def _tokens(path: Path, text: str, trust_remote_code: bool) -> list[Tensor]:
    """Batches [<= ROWS, LENGTH]; the last is one row with what is left."""
    from transformers import AutoTokenizer

    try:
        if has_tokenizer(path):
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=trust_remote_code)
            ids = torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64, device="cpu")
        else:
            ids = torch.tensor(list(text.encode()), dtype=torch.int64, device="cpu")
    except Exception as error:  # whatever one of transformers' tokenizers raises
        raise ValueError(f"{path}: its tokenizer cannot be used to calibrate ({_line(error)})") from error
    if not len(ids):
        raise ValueError(f"{path}: its tokenizer finds no tokens in the calibration text; pass token ids")
    whole = len(ids) // LENGTH * LENGTH
    batches = [*ids[:whole].view(-1, LENGTH).split(ROWS), ids[None, whole:]]
    return [batch for batch in batches if batch.numel()]


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def calibration_data(calibrate: Path | str | Iterable[Tensor]) -> str | list[Tensor]:
    """The text of a file, or batches of token ids."""
    if not isinstance(calibrate, str | Path):
        return [ids.cpu() for ids in calibrate]
    try:
        return Path(calibrate).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{calibrate}: cannot be read as text to calibrate on ({error})") from error


def has_tokenizer(path: Path) -> bool:
    """Whether a directory brings a file of a tokenizer; transformers makes an empty one where there is none."""
    return any(file.is_file() for pattern in _TOKENIZER_FILES for file in path.glob(pattern))


def require_tokenizer(path: Path) -> None:
    """Raise ValueError if a checkpoint brings no tokenizer, which a text needs, unless its token ids are bytes."""
    if has_tokenizer(path):
        return
    if read_json(path / "config.json").get("vocab_size") == BYTES:
        warnings.warn(
            f"{path}: holds no tokenizer; the bytes of the text are taken for token ids, since the vocabulary has "
            f"{BYTES}",
            stacklevel=3,
        )
    else:
        raise ValueError(
            f"{path}: holds no tokenizer ({', '.join(_TOKENIZER_FILES)}), which calibrating on a text needs; copy the "
            "model's tokenizer files there, or pass token ids: quantize_checkpoint(..., calibrate=[ids])"
        )


def recorded_scales(path: Path, plan: Plan, dialect: Dialect) -> dict[str, Tensor]:
    """The activation scales of an NVFP4 checkpoint of either dialect, as ``dialect`` stores them.

    Weights of ``plan`` that engines fuse, and all experts of a projection, get the largest of theirs.

    Raises:
        ValueError: a weight has none there.
    """
    checkpoint = Checkpoint.open(path)
    checkpoint.quantized_as({disk.name for disk in plan.weights})
    groups: dict[str, list[Tensor]] = {}
    for disk in plan.weights:
        name = checkpoint.tensor_names(disk.name).input_scale
        if name not in checkpoint.reader:
            raise ValueError(
                f"{path}: {name} is missing; activation scales are taken over only where every quantized weight has one"
            )
        scale = dialects.one_number(f"{path}: {name}", checkpoint.reader.get(name))
        groups.setdefault(activation_key(disk.weight.group), []).append(scale)
    multiplies = checkpoint.dialect is Dialect.MODELOPT
    shared = {key: torch.stack(found).aminmax()[1 if multiplies else 0] for key, found in groups.items()}
    if dialect is not checkpoint.dialect:
        shared = {key: scale.reciprocal() for key, scale in shared.items()}
    return {
        dialects.tensor_names(disk.name, dialect).input_scale: shared[activation_key(disk.weight.group)]
        for disk in plan.weights
    }
