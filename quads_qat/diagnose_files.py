"""What ``quads-qat diagnose`` compares: two checkpoints and a text, as models and token ids."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quads_qat.activation_scales import BYTES, has_tokenizer
from quads_qat.checkpoint_io import read_json
from quads_qat.config import Mode, ResidualConfig
from quads_qat.convert import convert
from quads_qat.diagnose import diagnose
from quads_qat.diagnosis import Diagnosis
from quads_qat.load import load_model, load_rollout
from quads_qat.name_ranges import pattern
from quads_qat.nvfp4_checkpoint import Checkpoint
from quads_qat.skeleton import architecture_of


def diagnose_checkpoints(
    trainer: Path,
    rollout: Path,
    text: Path,
    *,
    mode: Mode | None = None,
    residual: ResidualConfig | None = None,
    rollout_dtype: torch.dtype | None = None,
    length: int = 512,
    rows: int = 4,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> Diagnosis:
    """:func:`~quads_qat.diagnose.diagnose` of two checkpoint directories on a text file.

    Args:
        trainer: a BF16 checkpoint, or an NVFP4 one, whose weights are decoded: what a W4A16 trainer multiplies by.
        rollout: an NVFP4 checkpoint of either dialect.
        text: UTF-8; of it come the first ``rows`` pieces of ``length`` tokens. A shorter text gives fewer.
        mode: ``w4a16`` or ``w4a4``: convert the trainer's masters first, under the rollout's recipe, scope and groups.
        residual: of the rollout; None: what the checkpoint records.
        rollout_dtype: of what the rollout does not quantize; None: the config's.
        length: tokens in a row, at least 2.
        rows: forwards of each model.
        device: cpu or cuda.
        trust_remote_code: run model or tokenizer code that the trainer's directory brings.

    Raises:
        ValueError: a directory or the text cannot be read, or the two models do not go together.
    """
    ids = _tokens(trainer, rollout, text, length, rows, trust_remote_code)
    here = _trainer(trainer, rollout, mode, trust_remote_code).to(device)
    there = load_rollout(rollout, residual=residual, dtype=rollout_dtype).to(device)
    return diagnose(here, there, ids)


def _trainer(path: Path, rollout: Path, mode: Mode | None, trust_remote_code: bool) -> nn.Module:
    config = read_json(path / "config.json")
    if config.get("quantization_config") is not None or (path / "hf_quant_config.json").exists():
        if mode is not None:
            raise ValueError(
                f"{path}: is quantized, and a trainer of mode '{mode}' starts from BF16 masters; drop --mode"
            )
        return load_model(path)
    architecture, _ = architecture_of(path, config, trust_remote_code=trust_remote_code)
    try:
        model = architecture.from_pretrained(path, dtype="auto", use_safetensors=True, local_files_only=True).eval()
    except Exception as error:  # whatever one of transformers' models raises
        raise ValueError(f"{path}: the model cannot be loaded ({_line(error)})") from error
    if mode is not None:
        checkpoint = Checkpoint.open(rollout)
        how: dict[str, Any] = {"recipe": checkpoint.recipe}
        if checkpoint.contract is not None:
            how |= {"scope": checkpoint.contract.scope, "groups": checkpoint.contract.rules}
            how["include"] = [pattern(names) for names in checkpoint.contract.quantized or ()]
            how["exclude"] = [pattern(names) for names in checkpoint.contract.high_precision or ()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that w4a4 is for ablations: this is one
            convert(model, mode, **how)
    return model


def _tokens(trainer: Path, rollout: Path, text: Path, length: int, rows: int, trust_remote_code: bool) -> Tensor:
    """[<= rows, length] from the start of the text; one shorter row if it has fewer tokens."""
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{text}: cannot be read as text ({error})") from error
    ids = torch.tensor(
        _encode(trainer, rollout, content, trust_remote_code)[: rows * length], dtype=torch.int64, device="cpu"
    )
    if len(ids) < 2:
        raise ValueError(f"{text}: has {len(ids)} tokens, and a log-probability needs two; give a longer text")
    whole = len(ids) // length
    return ids[: whole * length].view(whole, length) if whole else ids[None]


def _encode(trainer: Path, rollout: Path, text: str, trust_remote_code: bool) -> list[int]:
    from transformers import AutoTokenizer

    named = [path for path in (trainer, rollout) if has_tokenizer(path)]
    if not named:
        if read_json(trainer / "config.json").get("vocab_size") == BYTES:
            warnings.warn(
                f"{trainer}: holds no tokenizer, and neither does {rollout}; the bytes of the text are taken for token "
                f"ids, since the vocabulary has {BYTES}",
                stacklevel=2,
            )
            return list(text.encode())
        raise ValueError(f"{trainer}: has no tokenizer, and neither has {rollout}; put one into either directory")
    try:
        loaded = AutoTokenizer.from_pretrained(named[0], local_files_only=True, trust_remote_code=trust_remote_code)
        return list(loaded(text)["input_ids"])  # pyright: ignore[reportArgumentType]
    except Exception as error:  # whatever one of transformers' tokenizers raises
        raise ValueError(f"{named[0]}: its tokenizer cannot be used ({_line(error)})") from error


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
